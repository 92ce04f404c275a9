"""What is saved comes back: checkpoints exactly, exports in transformers."""

import json

import pytest
import torch

from miles.errors import TrainerError
from tests.train.tiny import make_batch, make_settings, save_model, weights_of


@pytest.mark.parametrize("done", [0, 2])
def test_checkpoint_goes_on_exactly_where_it_stopped(launch, model, tmp_path, done):
    settings = make_settings(model, lr=1e-3, adam_eps=1e-8, clip_grad=1.0, lr_decay_style="cosine")
    batches = [make_batch(seed=seed) for seed in range(3)]
    (tmp_path / "saved").mkdir()
    trainer = launch(settings)
    for step in range(done):
        trainer.train(batches[step], step)
    trainer.save(str(tmp_path / "saved"), optimizer=True)
    unbroken = trainer.train(batches[done], done)
    expected = weights_of(trainer, tmp_path / "weights")

    trainer = launch(settings)
    assert trainer.load(str(tmp_path / "saved")) == done
    resumed = trainer.train(batches[done], done)
    assert {k: v for k, v in resumed.items() if "time" not in k} == {
        k: v for k, v in unbroken.items() if "time" not in k
    }
    found = weights_of(trainer, tmp_path / "weights")
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_checkpoint_without_optimizer_says_so_and_restores_the_weights(launch, model, tmp_path, caplog):
    settings = make_settings(model, lr=1e-3, adam_eps=1e-8)
    (tmp_path / "saved").mkdir()
    trainer = launch(settings)
    trainer.train(make_batch(), 0)
    trainer.save(str(tmp_path / "saved"), optimizer=False)
    expected = weights_of(trainer, tmp_path / "weights")
    trainer = launch(settings)
    assert trainer.load(str(tmp_path / "saved")) == 1
    assert "holds no optimizer state" in caplog.text
    assert all(torch.equal(t, expected[n]) for n, t in weights_of(trainer, tmp_path / "weights").items())


def test_resumed_run_may_change_its_weight_decay(launch, model, tmp_path):
    """A batch without any advantage has no gradient: all that a first step then does is the decay."""
    still = make_batch() | {"raw_reward": [1.0] * 12}
    (tmp_path / "saved").mkdir()
    trainer = launch(make_settings(model, lr=0.1))
    trainer.train(still, 0)
    trainer.save(str(tmp_path / "saved"), optimizer=True)
    before = weights_of(trainer, tmp_path / "weights")
    trainer = launch(make_settings(model, lr=0.1, weight_decay=0.5))
    trainer.load(str(tmp_path / "saved"))
    trainer.train(still, 1)
    after = weights_of(trainer, tmp_path / "weights")
    torch.testing.assert_close(after["model.embed_tokens.weight"], 0.95 * before["model.embed_tokens.weight"])


def test_folder_that_is_no_checkpoint_or_of_another_model_is_refused(launch, model, tmp_path):
    trainer = launch(make_settings(model))
    with pytest.raises(TrainerError, match=r"is no finished miles checkpoint"):
        trainer.load(str(tmp_path))
    (tmp_path / "saved").mkdir()
    trainer.save(str(tmp_path / "saved"), optimizer=True)
    other = launch(make_settings(save_model(tmp_path / "untied", tied=False)))
    with pytest.raises(TrainerError, match=r"saved doesn't fit the model of --hf-checkpoint"):
        other.load(str(tmp_path / "saved"))


@pytest.mark.parametrize(("tied", "dtype"), [(True, "float32"), (False, "float32"), (True, "bfloat16")])
def test_export_is_a_model_that_transformers_loads(launch, tmp_path, tied, dtype):
    from transformers import AutoModelForCausalLM

    model = save_model(tmp_path / "model", tied=tied)
    (model / "generation_config.json").write_text('{"do_sample": false, "temperature": 0.6}')
    trainer = launch(make_settings(model, dtype=dtype))
    trainer.train(make_batch(), 0)
    trainer.export_hf(str(tmp_path / "export"))
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path / "export", output_loading_info=True, dtype="auto")
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert loaded.dtype == getattr(torch, dtype)
    for name, weights in weights_of(trainer, tmp_path / "weights").items():
        assert torch.equal(loaded.state_dict()[name], weights)
    config = json.loads((tmp_path / "export" / "config.json").read_text())
    assert (config["architectures"], config["dtype"]) == (["Qwen3ForCausalLM"], dtype)
    for name in ("tokenizer.json", "generation_config.json"):
        assert (tmp_path / "export" / name).read_bytes() == (model / name).read_bytes()
