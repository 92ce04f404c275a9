"""Settings in, problems out: what is wrong with the prompt files and the epochs, found before anything starts."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from miles.config import Problems, Settings
from miles.data.jsonl import JsonlFile, RowKeys
from miles.errors import DataError


def check(settings: Settings, problems: Problems) -> None:
    """Reads every prompt file: all rows of small ones, the first 50,000 and the last of large ones."""
    data = settings.data
    rows = _check_file("--prompt-data", data.prompt_data, RowKeys(data.input_key, data.label_key, data.metadata_key),
                       settings, problems)  # fmt: skip
    _check_length(settings, rows, problems)
    _check_eval(settings, problems)


def _check_length(settings: Settings, rows: int | None, problems: Problems) -> None:
    """A run needs an end, and an epoch has to hold at least one batch."""
    batch, epochs = settings.rollout.rollout_batch_size, settings.data.num_epoch
    if settings.rollout.num_rollout is not None:
        return
    if epochs is None:
        problems.add("--num-rollout", None, "nor is --num-epoch, so the run has no end", "--num-rollout 100 works")
    elif rows is not None and batch is not None and epochs * rows < batch:
        problems.add(
            "--num-epoch", epochs,
            f"{epochs} epochs x {rows} rows = {epochs * rows} prompts, fewer than the {batch} of one step"
            " (--rollout-batch-size)",
            f"--num-epoch {-(-batch // rows)} or --rollout-batch-size {epochs * rows} works",
        )  # fmt: skip


def _check_eval(settings: Settings, problems: Problems) -> None:
    words, flag = settings.eval.eval_prompt_data, "--eval-prompt-data"
    if settings.eval.eval_interval is not None and not words:
        problems.add(flag, None, f"--eval-interval is {settings.eval.eval_interval}", f"{flag} NAME PATH works")
    if len(words) > 1 and len(words) % 2:
        problems.add(
            flag, " ".join(words), f"{len(words)} words are no NAME PATH pairs", f"{flag} aime eval.jsonl works"
        )
        return
    for name, count in Counter(name for name, _ in settings.eval_sets).items():
        if count > 1:
            problems.add(flag, name, f"the name is given to {count} files", "a name of its own for each works")
    keys = RowKeys(
        settings.eval.eval_input_key or settings.data.input_key,
        settings.eval.eval_label_key or settings.data.label_key,
        settings.data.metadata_key,
    )
    for name, path in settings.eval_sets:
        _check_file(f"{flag} {name}", path, keys, settings, problems)


def _check_file(flag: str, path: str | None, keys: RowKeys, settings: Settings, problems: Problems) -> int | None:
    """The number of rows, or None where the file can't be used."""
    works = "a JSONL file works"
    if not path:
        problems.add(flag, None, "there is nothing to sample from", f"{flag} prompts.jsonl works")
    elif path.endswith("]") and "@[" in path:
        problems.add(flag, path, "slices of a file (path@[start:end]) can't be read", works)
    elif Path(path).suffix not in (".jsonl", ".json"):
        problems.add(flag, path, f"files of type {Path(path).suffix or 'unknown'} can't be read", works)
    elif not Path(path).is_file():
        problems.add(flag, path, "there is no such file", works)
    else:
        try:
            return _check_rows(flag, JsonlFile(path, keys), settings, problems)
        except DataError as error:
            problems.add(flag, path, str(error), "correct the row, or name its keys")
    return None


def _check_rows(flag: str, file: JsonlFile, settings: Settings, problems: Problems) -> int:
    file.check()
    if not settings.data.apply_chat_template and not isinstance(file[0].prompt, str):
        problems.add(
            flag, file.path, f"its prompts are lists of messages ({file.path}:1)", "with --apply-chat-template it works"
        )
    return len(file)
