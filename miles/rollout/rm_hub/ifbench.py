"""A reply and its instructions in, 1.0 out where it follows every one of them, else 0.0.

``metadata["instruction_id_list"]`` names the instructions, ``metadata["kwargs"]`` holds the arguments of each, as in
IFBench's own files. Of its 58 instructions, those are checked here that need no data of other packages; `MISSING` says
what the others need. What follows ``</think>`` is the reply. Source: IFBench (Pyatkin et al. 2025, Generalizing
Verifiable Instruction Following); sentences are split by `ifbench_text`'s rule, which knows fewer abbreviations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from miles.errors import RewardFailed
from miles.rollout.rm_hub import ifbench_layout, ifbench_text
from miles.rollout.rm_hub.answers import after_thinking

Check = Callable[..., bool]
"""f(reply, **arguments)"""

CHECKS: dict[str, Check] = {**ifbench_text.CHECKS, **ifbench_layout.CHECKS}
MISSING = {
    "ratio:stop_words": "a list of stop words",
    **dict.fromkeys(
        (
            "ratio:overlap", "count:pronouns", "words:keywords_specific_position", "words:words_position",
            "format:title_case",
        ),
        "a trained tokenizer of words",
    ),
    "words:start_verb": "a part-of-speech tagger",
    "words:odd_even_syllables": "a dictionary of syllables",
    "format:emoji": "a table of emoji",
}  # fmt: skip


def ifbench(response: str, label: str, metadata: Mapping[str, Any]) -> float:
    """Raises RewardFailed where an instruction is not there, or its arguments don't fit."""
    names = metadata.get("instruction_id_list")
    if not names or isinstance(names, str):
        raise RewardFailed('metadata["instruction_id_list"] has to be a list of instructions')
    arguments = metadata.get("kwargs") or [{}] * len(names)
    if len(arguments) != len(names):
        raise RewardFailed(f'{len(arguments)} entries in metadata["kwargs"] for {len(names)} instructions')
    reply = after_thinking(response)
    checks = [(find(name), given) for name, given in zip(names, arguments, strict=True)]
    return float(bool(reply.strip()) and all(_follows(check, reply, given or {}) for check, given in checks))


def find(name: str) -> Check:
    """The check of an instruction. Raises RewardFailed where there is none here."""
    if name in CHECKS:
        return CHECKS[name]
    why = f"needs {MISSING[name]}, which miles doesn't ship" if name in MISSING else "is none of IFBench's"
    raise RewardFailed(f"instruction {name} {why}; those that work: {', '.join(CHECKS)}")


def _follows(check: Check, reply: str, arguments: Mapping[str, Any]) -> bool:
    """Arguments come from tables, where an integer may be a float and what isn't given a null."""
    given = {name: value for name, value in arguments.items() if value is not None}
    return check(reply, **{n: int(v) if isinstance(v, float) and v.is_integer() else v for n, v in given.items()})
