"""The text of an ``--eval-config`` in, the evaluation sets that it names out, each with what it says of itself.

`eval: {defaults: {...}, datasets: [{name: ..., path: ..., ...}]}`, in YAML or JSON. A set's own value wins over the defaults;
what neither says comes from the flags of evaluation, then of training.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from miles.config import flags
from miles.config.flags import flag
from miles.config.problems import Problems
from miles.config.yaml_file import read_text

FLAG = "--eval-config"


@dataclass(frozen=True)
class EvalDataset:
    """One evaluation set. None, or nothing: as the flags say."""

    name: str = flag("", "", name="name")
    path: str = flag("", "", name="path")
    rm_type: str | None = flag(None, "", name="rm_type")
    input_key: str | None = flag(None, "", name="input_key")
    label_key: str | None = flag(None, "", name="label_key")
    tool_key: str | None = flag(None, "", name="tool_key")
    metadata_key: str | None = flag(None, "", name="metadata_key")
    n_samples_per_eval_prompt: int | None = flag(None, "", name="n_samples_per_eval_prompt", positive=True)
    temperature: float | None = flag(None, "", name="temperature")
    top_p: float | None = flag(None, "", name="top_p")
    top_k: int | None = flag(None, "", name="top_k")
    max_response_len: int | None = flag(None, "", name="max_response_len", positive=True)
    min_new_tokens: int | None = flag(None, "", name="min_new_tokens")
    stop: tuple[str, ...] = flag((), "", name="stop")
    stop_token_ids: tuple[int, ...] = flag((), "", name="stop_token_ids")
    custom_generate_function_path: str | None = flag(None, "", name="custom_generate_function_path")
    metadata_overrides: dict[str, Any] = flag({}, "", name="metadata_overrides")

    def sampling_params(self) -> dict[str, Any]:
        """Its own SGLang sampling parameters."""
        own = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "max_new_tokens": self.max_response_len,
            "min_new_tokens": self.min_new_tokens,
            "stop": list(self.stop) or None,
            "stop_token_ids": list(self.stop_token_ids) or None,
        }
        return {name: value for name, value in own.items() if value is not None}

    def metadata(self) -> dict[str, Any]:
        """What every sample's metadata gets, in the place of what its row says."""
        return ({"rm_type": self.rm_type} if self.rm_type else {}) | self.metadata_overrides


def read_datasets(path: str, problems: Problems) -> tuple[EvalDataset, ...]:
    """The sets of a file, or of a text after ``base64:``; what can't be used of it becomes a problem."""
    import yaml

    works = "eval: {datasets: [{name: NAME, path: PATH}]} works"
    read = read_text(FLAG, path, works, problems)
    if read is None:
        return ()
    name, text = read
    try:
        root = yaml.safe_load(text)
    except yaml.YAMLError as error:
        problems.add(FLAG, name, " ".join(str(error).split()), works)
        return ()
    held = root.get("eval", root) if isinstance(root, dict) else None
    if not isinstance(held, dict) or not isinstance(held.get("datasets"), list) or not held["datasets"]:
        problems.add(FLAG, name, "has no list of datasets", works)
        return ()
    for key in held.keys() - {"defaults", "datasets"}:
        near = flags.nearest(str(key), ["defaults", "datasets"], "defaults and datasets work")
        problems.add(FLAG, f"{name} {key}", "no such part", near)
    defaults = _given(f"{name} defaults", held.get("defaults") or {}, problems) or {}
    sets = [_given(f"{name} datasets[{i}]", own, problems) for i, own in enumerate(held["datasets"])]
    return tuple(
        _dataset(f"{name} {own.get('name', f'datasets[{i}]')}", defaults | own, problems)
        for i, own in enumerate(sets)
        if own is not None
    )


def _given(place: str, own: Any, problems: Problems) -> dict[str, Any] | None:
    """The keys that have a value and are keys of a set; None where there are no keys at all."""
    keys = [f.name for f in fields(EvalDataset)]
    if not isinstance(own, dict):
        problems.add(FLAG, place, f"is {own!r:.50}, no object", "{name: NAME, path: PATH} works")
        return None
    for key in own.keys() - set(keys):
        problems.add(FLAG, f"{place} {key}", "no such key", flags.nearest(str(key), keys, f"{', '.join(keys)} work"))
    return {key: own[key] for key in keys if own.get(key) is not None}


def _dataset(place: str, given: Mapping[str, Any], problems: Problems) -> EvalDataset:
    for key in ("name", "path"):
        if key not in given:
            problems.add(FLAG, place, f"has no {key}", f"{key}: {key.upper()} works")
    texts = {key: _text(value) for key, value in given.items()}
    sources = dict.fromkeys(texts, f"{FLAG} {place}")
    return EvalDataset(**flags.convert(flags.hinted(EvalDataset), texts, problems, sources=sources, later={}))


def _text(value: Any) -> Any:
    """A value as its flag would be given it."""
    if isinstance(value, list):
        return [str(item) for item in value]
    return value if isinstance(value, dict) else str(value)
