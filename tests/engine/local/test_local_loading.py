"""Model folders and weight sources: what can't be computed is refused by name, what is adopted is not copied."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from miles.engine.local.model import Model
from miles.engine.local.model_config import ModelConfig, choose_dtype
from miles.engine.local.weights import expected_shapes, load_folder, map_shared
from miles.engine.segment import Manifest, Segment, create_segment
from miles.errors import EngineRefused, SettingsError
from tests.engine.local.tiny import CONFIGS, EOS, save_model


def with_config(folder, tmp_path, **changes):
    target = tmp_path / "model"
    shutil.copytree(folder, target)
    values = json.loads((target / "config.json").read_text()) | changes
    (target / "config.json").write_text(json.dumps(values))
    return target


def write_segment(folder, tensors):
    """A segment as the publisher makes it, in the order of ``tensors``; returns its path."""
    manifest = Manifest.plan((name, t.dtype, tuple(t.shape)) for name, t in tensors.items())
    path = folder / "0.bin"
    create_segment(path, manifest)
    manifest.save(folder)
    segment = Segment(path, manifest)
    for name, view in segment.tensors.items():
        view.copy_(tensors[name])
    segment.seal()
    return path


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "architecture ['MixtralForCausalLM'] is not supported; Llama"),
        ({"use_sliding_window": True, "sliding_window": 64}, "use_sliding_window with a window of 64"),
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            "sliding_attention is not supported; full attention",
        ),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; 'silu' is"),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 4}},
            "rope type 'yarn' is not supported; default and llama3",
        ),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 4}}, "'llama3' lacks low_freq_factor, high_freq_factor"),
        ({"dtype": "float8_e4m3fn"}, "dtype 'float8_e4m3fn' is not supported; float32"),
        ({"num_experts": 8}, "mixture-of-experts"),
        ({"hidden_size": None}, "hidden_size is None; a whole number is needed"),
    ],
)
def test_configs_that_would_be_computed_wrongly_are_refused_by_name(folder, tmp_path, changes, said):
    with pytest.raises(SettingsError) as refused:
        ModelConfig.read(with_config(folder, tmp_path, **changes))
    assert said in str(refused.value)


def test_every_problem_of_a_config_is_told_at_once(folder, tmp_path):
    with pytest.raises(SettingsError) as refused:
        ModelConfig.read(with_config(folder, tmp_path, hidden_act="gelu", num_experts=8))
    assert len(refused.value.problems) == 2


def test_a_folder_without_config_is_refused(tmp_path):
    with pytest.raises(SettingsError, match="--model-path needs a folder"):
        ModelConfig.read(tmp_path)


def test_older_rope_names_mean_the_same(folders, tmp_path):
    new = ModelConfig.read(folders["llama"])
    rope = dict(CONFIGS["llama"].rope_parameters)
    theta = rope.pop("rope_theta")
    target = with_config(folders["llama"], tmp_path, rope_parameters=None, rope_theta=theta, rope_scaling=rope)
    assert ModelConfig.read(target) == new


def test_eos_is_the_union_of_both_configs_within_the_vocabulary(folder, tmp_path):
    target = with_config(folder, tmp_path)
    (target / "generation_config.json").write_text('{"eos_token_id": [3, 4, 99999]}')
    assert ModelConfig.read(target).eos_ids == {EOS, 3, 4}


def test_dtype_auto_is_the_checkpoints_where_the_cpu_has_units_for_it(monkeypatch):
    assert choose_dtype("auto", torch.float32) == torch.float32
    assert choose_dtype("bfloat16", torch.float32) == torch.bfloat16
    for unit, expected in (("avx512_bf16", torch.bfloat16), ("amx_bf16", torch.bfloat16), ("avx2", torch.float32)):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda unit=unit: {unit: True})
        assert choose_dtype("auto", torch.bfloat16) == expected


def test_expected_names_and_shapes_are_those_of_transformers(folders, family):
    stored = {name: tuple(t.shape) for name, t in load_file(folders[family] / "model.safetensors").items()}
    assert expected_shapes(ModelConfig.read(folders[family])) == stored


def test_sharded_folders_are_read(folder, tmp_path):
    target = with_config(folder, tmp_path)
    tensors = load_file(target / "model.safetensors")
    (target / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, held in shards.items():
        save_file({n: tensors[n] for n in held}, target / file)
    index = {"weight_map": {n: file for file, held in shards.items() for n in held}}
    (target / "model.safetensors.index.json").write_text(json.dumps(index))
    config = ModelConfig.read(folder)
    got, expected = (load_folder(f, config, torch.float32) for f in (target, folder))
    assert all(torch.equal(got[n], expected[n]) for n in expected)
    (target / "b.safetensors").unlink()
    with pytest.raises(EngineRefused, match=r"b\.safetensors not found"):
        load_folder(target, config, torch.float32)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.pop("model.norm.weight"), "model.norm.weight is missing"),
        (lambda t: t.update(extra=torch.ones(2)), "extra is unknown"),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(7)}),
            "model.norm.weight has shape [7], Qwen3ForCausalLM needs [48]",
        ),
        (lambda t: t.update({"model.norm.weight": torch.ones(48, dtype=torch.int32)}), "a float dtype is needed"),
    ],
)
@pytest.mark.parametrize("source", ["disk", "segment"])
def test_weights_that_do_not_fit_are_refused_by_tensor(folder, tmp_path, change, said, source):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    config = ModelConfig.read(folder)
    with pytest.raises(EngineRefused) as refused:
        if source == "disk":
            save_file(tensors, tmp_path / "model.safetensors")
            load_folder(tmp_path, config, torch.float32)
        else:
            map_shared(write_segment(tmp_path, tensors), config, torch.float32)
    assert said in str(refused.value)


def test_a_broken_file_is_refused(folder, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"not a safetensors file at all")
    with pytest.raises(EngineRefused, match=r"model\.safetensors: "):
        load_folder(tmp_path, ModelConfig.read(folder), torch.float32)


def test_a_segment_that_is_too_short_or_has_no_manifest_is_refused(folder, tmp_path):
    config = ModelConfig.read(folder)
    path = write_segment(tmp_path, load_file(folder / "model.safetensors"))
    path.write_bytes(b"short")
    with pytest.raises(EngineRefused, match="has 5 bytes, its manifest needs"):
        map_shared(path, config, torch.float32)
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(EngineRefused, match="not a weight segment"):
        map_shared(path, config, torch.float32)


def test_a_segment_that_was_not_written_to_its_end_is_refused_by_tensor(folder, tmp_path):
    config = ModelConfig.read(folder)
    path = write_segment(tmp_path, load_folder(folder, config, torch.float32))
    Segment(path, Manifest.load(tmp_path)).tensors["model.layers.1.mlp.down_proj.weight"][3, 5] += 1
    with pytest.raises(
        EngineRefused, match=r"model\.layers\.1\.mlp\.down_proj\.weight \[48, 80\] float32 differs from its"
    ):
        map_shared(path, config, torch.float32)


def test_a_segment_of_our_dtype_is_adopted_without_a_copy(folder, tmp_path):
    """In state-dict order q, k, v (and gate, up) lie side by side, so even the joined matrices are the segment itself."""
    config = ModelConfig.read(folder)
    stored = load_folder(folder, config, torch.float32)
    weights = map_shared(write_segment(tmp_path, stored), config, torch.float32)
    start = min(w.data_ptr() for w in weights.values())
    end = max(w.data_ptr() + w.nbytes for w in weights.values())
    model = Model(config, weights)
    for layer in model._layers:
        for matrix in (layer.qkv, layer.gate_up, layer.down, layer.out, layer.input_norm):
            assert start <= matrix.data_ptr() < end
    assert torch.equal(model._layers[2].qkv[-1], stored["model.layers.2.self_attn.v_proj.weight"][-1])


def test_a_segment_in_another_order_computes_the_same(folder, tmp_path):
    config = ModelConfig.read(folder)
    stored = load_folder(folder, config, torch.float32)
    shuffled = dict(sorted(stored.items(), key=lambda item: item[0][::-1]))
    models = [Model(config, w) for w in (stored, map_shared(write_segment(tmp_path, shuffled), config, torch.float32))]
    for a, b in zip(models[0]._layers, models[1]._layers, strict=True):
        assert torch.equal(a.qkv, b.qkv) and torch.equal(a.gate_up, b.gate_up)


def test_a_segment_of_another_dtype_is_converted_into_a_copy(folder, tmp_path):
    config = ModelConfig.read(folder)
    stored = {n: t.bfloat16() for n, t in load_folder(folder, config, torch.float32).items()}
    path = write_segment(tmp_path, stored)
    weights = map_shared(path, config, torch.float32)
    path.write_bytes(bytes(path.stat().st_size))
    assert all(w.dtype == torch.float32 and torch.equal(w, stored[n].float()) for n, w in weights.items())


def test_a_tied_checkpoint_may_carry_its_head(folder, tmp_path):
    config = ModelConfig.read(folder)
    tensors = load_folder(folder, config, torch.float32)
    save_file(
        tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, tmp_path / "model.safetensors"
    )
    assert load_folder(tmp_path, config, torch.float32).keys() == tensors.keys()


def test_a_model_of_another_dtype_on_disk_is_converted(tmp_path):
    folder = save_model(tmp_path, "llama", dtype=torch.bfloat16)
    config = ModelConfig.read(folder)
    assert config.dtype == torch.bfloat16
    assert {w.dtype for w in load_folder(folder, config, torch.float32).values()} == {torch.float32}
