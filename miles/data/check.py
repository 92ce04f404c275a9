"""Settings in, problems out: what is wrong with the prompts and the epochs, found before anything starts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from miles.config import Problems, Settings
from miles.data.mix import split
from miles.data.render import PromptEncoder, load_tokenizer
from miles.data.rows import Row, RowKeys, check_rows
from miles.data.words import Word, WordError
from miles.errors import DataError, HookError
from miles.hooks import load_function

FirstRowCheck = Callable[[str, str, Row], None]
"""Judges the first row of a file, given the flag and the word that name it."""


def check(settings: Settings, problems: Problems) -> None:
    """Reads every prompt file: all rows of small ones, the first 50,000 and the last of large ones."""
    check_first = _first_row_check(settings, problems)
    rows = _check_training(settings, check_first, problems)
    _check_length(settings, rows, problems)
    _check_eval(settings, check_first, problems)
    _check_prompt_lengths(settings, problems)
    _check_hooks(settings, problems)


def _check_training(settings: Settings, check_first: FirstRowCheck, problems: Problems) -> int | None:
    """The number of rows, or None where there are none to be counted."""
    data, flag = settings.data, "--prompt-data"
    own_source = data.data_source_path != type(data).data_source_path
    if not data.rollout_global_dataset:
        if not (own_source or _hooks_make_prompts(settings)):
            problems.add(
                "--disable-rollout-global-dataset", "", "every prompt is empty, and no hook fills it in",
                "with --custom-generate-function-path or --rollout-function-path it works",
            )  # fmt: skip
        return None
    if not data.prompt_data:
        if not own_source:
            problems.add(flag, None, "there is nothing to sample from", f"{flag} prompts.jsonl works")
        return None
    keys = RowKeys.of_training(settings)
    words = [_check_word(flag, text, keys, check_first, problems) for text in data.prompt_data]
    sound = [(word, rows) for word, rows in filter(None, words)]
    return _check_weights(flag, sound, problems) if len(sound) == len(words) else None


def _check_weights(flag: str, words: Sequence[tuple[Word, int]], problems: Problems) -> int:
    total = sum(rows for _, rows in words)
    weights = [word.weight for word, _ in words if word.weight is not None]
    without = next((word.where for word, _ in words if word.weight is None), None)
    if weights and without is not None:
        problems.add(flag, without, f"has no weight, and {len(weights)} others have", f"{without}*1 works")
    elif weights:
        try:
            split(total, weights)
        except WordError as error:
            problems.add(flag, " ".join(word.where for word, _ in words), error.why, error.works)
    return total


def _check_length(settings: Settings, rows: int | None, problems: Problems) -> None:
    """A run needs an end, and an epoch has to hold at least one batch."""
    batch, epochs = settings.rollout.rollout_batch_size, settings.data.num_epoch
    if settings.rollout.num_rollout is not None:
        return
    if epochs is None:
        problems.add("--num-rollout", None, "nor is --num-epoch, so the run has no end", "--num-rollout 100 works")
    elif not settings.data.rollout_global_dataset or not settings.data.prompt_data:
        problems.add("--num-epoch", epochs, "without --prompt-data an epoch has no length", "--num-rollout 100 works")
    elif rows is not None and batch is not None and epochs * rows < batch:
        problems.add(
            "--num-epoch", epochs,
            f"{epochs} epochs x {rows} rows = {epochs * rows} prompts, fewer than the {batch} of one step"
            " (--rollout-batch-size)",
            f"--num-epoch {-(-batch // rows)} or --rollout-batch-size {epochs * rows} works",
        )  # fmt: skip


def _check_eval(settings: Settings, check_first: FirstRowCheck, problems: Problems) -> None:
    words, flag, config = settings.eval.eval_prompt_data, settings.eval_flag, settings.eval.eval_config
    if settings.eval.eval_function_path is not None:
        if words or config:
            problems.warn(f"{flag} has no effect beside --eval-function-path, whose function has its own prompts")
        return
    if settings.eval.eval_interval is not None and not words and config is None:
        problems.add(flag, None, f"--eval-interval is {settings.eval.eval_interval}", f"{flag} NAME PATH works")
    if config is None and len(words) > 1 and len(words) % 2:
        problems.add(
            flag, " ".join(words), f"{len(words)} words are no NAME PATH pairs", f"{flag} aime eval.jsonl works"
        )
        return
    for name, count in Counter(d.name for d in settings.eval_datasets).items():
        if count > 1:
            problems.add(flag, name, f"the name is given to {count} files", "a name of its own for each works")
    for dataset in settings.eval_datasets:
        if not dataset.path:
            continue
        place, keys = f"{flag} {dataset.name}", RowKeys.of_evaluation(settings, dataset)
        found = _check_word(place, dataset.path, keys, check_first, problems)
        if found is not None and found[0].weight is not None:
            problems.add(place, dataset.path, "weights mix training prompts", f"{found[0].where} works")


def _check_word(
    flag: str, text: str, keys: RowKeys, check_first: FirstRowCheck, problems: Problems
) -> tuple[Word, int] | None:
    """The word and its number of rows, or None where they can't be used."""
    try:
        word = Word.parse(text)
        rows = word.open(keys)
        if not word.is_generated:
            check_rows(rows)
    except WordError as error:
        problems.add(flag, text, error.why, error.works)
    except DataError as error:  # its text starts with the file and the row
        place, _, why = str(error).partition(": ")
        problems.add(flag, place, why, "correct the row, or name its keys")
    else:
        check_first(flag, text, rows[0])
        return word, len(rows)
    return None


def _first_row_check(settings: Settings, problems: Problems) -> FirstRowCheck:
    """What the first row of every file is asked: that the chat template renders it, or that it needs none."""
    usable = _check_template_file(settings, problems)
    if not settings.data.apply_chat_template:
        return partial(_check_is_text, settings, problems)
    encoder = _encoder(settings, problems) if usable else None
    if encoder is None or _hooks_make_prompts(settings):
        return lambda flag, text, first: None
    return partial(_check_renders, encoder, problems)


def _check_is_text(settings: Settings, problems: Problems, flag: str, text: str, first: Row) -> None:
    if not (isinstance(first.prompt, str) or _hooks_make_prompts(settings)):
        problems.add(
            flag, text, f"its prompts are lists of messages ({first.place})", "with --apply-chat-template it works"
        )


def _encoder(settings: Settings, problems: Problems) -> PromptEncoder | None:
    """The renderer of the run; None where there is no model folder, which is the trainer's problem, or no template."""
    folder = settings.model.hf_checkpoint
    if folder is None or not (Path(folder) / "config.json").is_file():
        return None
    try:
        tokenizer = load_tokenizer(settings)
    except Exception as error:  # the tokenizers library raises plain ones: whatever it is, the files can't be used
        why = f"its tokenizer can't be loaded ({type(error).__name__}: {str(error).partition(chr(10))[0]})"
        problems.add("--hf-checkpoint", folder, why, "a folder with one works")
        return None
    if not tokenizer.chat_template:
        problems.add(
            "--apply-chat-template", "", f"the tokenizer in {folder} has no chat template",
            "--chat-template-path with a Jinja file works, and so does leaving it out",
        )  # fmt: skip
        return None
    return PromptEncoder.from_settings(settings, tokenizer)


def _check_renders(encoder: PromptEncoder, problems: Problems, flag: str, text: str, first: Row) -> None:
    try:
        encoder.encode(first.prompt, first.metadata.get("tools"))
    except Exception as error:  # a template is the user's code: whatever it raises says that it can't render this row
        why = f"the chat template can't render {first.place} ({type(error).__name__}: {error})"
        problems.add(flag, text, why, "--chat-template-path with another template works, or other prompts")


def _check_prompt_lengths(settings: Settings, problems: Problems) -> None:
    context = settings.sampling.rollout_max_context_len
    lengths = {
        "--rollout-max-prompt-len": settings.sampling.rollout_max_prompt_len,
        "--eval-max-prompt-len": settings.eval.eval_max_prompt_len,
    }
    for flag, tokens in lengths.items():
        if tokens is not None and context is not None and tokens > context - 1:
            problems.add(
                flag, tokens, f"of --rollout-max-context-len {context} tokens that leaves none for a response",
                f"{context - 1} or less works",
            )  # fmt: skip


def _check_template_file(settings: Settings, problems: Problems) -> bool:
    """Whether ``--chat-template-path``, if it is set, can be read."""
    flag, path = "--chat-template-path", settings.chat_template_file
    if settings.data.chat_template_path == "autofix":
        problems.warn(f"{flag} autofix is the old name of leaving the flag out; the tokenizer's own template is used")
    if path is None or Path(path).is_file():
        return True
    problems.add(flag, path, "there is no such file", "a file with a Jinja template works")
    return False


def _check_hooks(settings: Settings, problems: Problems) -> None:
    for flag, path in (
        ("--data-source-path", settings.data.data_source_path),
        ("--buffer-filter-path", settings.data.buffer_filter_path),
    ):
        if path == type(settings.data).data_source_path:
            continue
        try:
            load_function(path)
        except HookError as error:
            problems.add(flag, path, str(error), "give a path that can be imported here")


def _hooks_make_prompts(settings: Settings) -> bool:
    """Prompts are rendered by a function of the user's, which may do so in its own way."""
    return settings.rollout.custom_generate_function_path is not None or settings.mode == "function"
