"""A prompt in, the token ids that an engine gets out: the one renderer for sending prompts and for measuring them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from miles.config import Settings
from miles.data.messages import with_plain_text
from miles.errors import SettingsError
from miles.types import Message


def load_tokenizer(settings: Settings) -> Any:
    """The checkpoint's tokenizer, with the chat template that the run was told."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(settings.model.hf_checkpoint)
    if settings.chat_template_file is not None:
        tokenizer.chat_template = Path(settings.chat_template_file).read_text(encoding="utf-8")
    return tokenizer


TURN = "assistant-turn-7f3a"
"""Stands for an assistant's words where only what the template writes after them is wanted."""


class PromptEncoder:
    """Encodes prompts with a ``transformers`` tokenizer.

    With ``apply_chat_template`` a list of messages is rendered by the tokenizer's template, and so is a text, as one
    user message; special tokens are the template's business. Without it a text is encoded as it is, with exactly one
    BOS where the tokenizer adds one, whether the text starts with it or not, and never an EOS after it.
    """

    def __init__(
        self,
        tokenizer: Any,
        apply_chat_template: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        if apply_chat_template and not tokenizer.chat_template:
            raise SettingsError(["--apply-chat-template is set: the tokenizer has no chat template; leave it out"])
        self._tokenizer = tokenizer
        self._apply_chat_template = apply_chat_template
        self._template_kwargs = {"add_generation_prompt": True} | dict(template_kwargs or {})
        bos = tokenizer.bos_token_id
        self._bos = [bos] if bos is not None and bos in tokenizer.encode("a")[:1] else []

    @classmethod
    def from_settings(cls, settings: Settings, tokenizer: Any) -> PromptEncoder:
        return cls(tokenizer, settings.data.apply_chat_template, settings.data.apply_chat_template_kwargs)

    def can_encode(self, prompt: str | Sequence[Message]) -> bool:
        """Messages without a template are for hooks, which render them in their own way."""
        return self._apply_chat_template or isinstance(prompt, str)

    def encode(self, prompt: str | Sequence[Message], tools: Sequence[Any] | None = None) -> list[int]:
        """Token ids of a prompt; ``tools`` are rendered by the template. Raises SettingsError without one."""
        if self._apply_chat_template:
            return self._encode_text(self.render(prompt, tools))
        if not isinstance(prompt, str):
            raise SettingsError(["--apply-chat-template is not set: a prompt is a list of messages; set the flag"])
        ids = self._encode_text(prompt)
        return ids if ids[:1] == self._bos else [*self._bos, *ids]

    def render(self, prompt: str | Sequence[Message], tools: Sequence[Any] | None = None) -> str:
        """The text that the chat template makes of a prompt."""
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        text = self._tokenizer.apply_chat_template(
            [with_plain_text(m) for m in messages],
            tools=list(tools) if tools else None,
            **self._template_kwargs | {"tokenize": False},
        )
        return str(text)

    def encode_after_turn(
        self, messages: Sequence[Message], last_ids: Sequence[int], tools: Sequence[Any] | None = None
    ) -> list[int]:
        """What the template writes between an assistant's turn, whose ids end in ``last_ids``, and its next one.

        That is the end of the turn, left out where it was sampled, then ``messages`` and the head of the next turn, all
        rendered at once. What stands before the turn isn't looked at. Raises SettingsError for a template without turns.
        """
        turn = [{"role": "user", "content": "user"}, {"role": "assistant", "content": TURN}]
        _, found, after = self.render([*turn, *messages], tools).rpartition(TURN)
        if not found:
            raise SettingsError(
                ["the chat template leaves the words of an assistant's turn out: it can't go on from one"]
            )
        ids = self._encode_text(after)
        return ids[1:] if ids[:1] == list(last_ids[-1:]) else ids

    def _encode_text(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))
