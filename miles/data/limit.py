"""A row in, the reason why its prompt is too long out: measured with the renderer that its tokens are sent with."""

from __future__ import annotations

from dataclasses import dataclass

from miles.data.render import PromptEncoder
from miles.data.rows import Row


@dataclass(frozen=True)
class PromptLimit:
    """Prompts of at most ``tokens`` tokens, tools and special tokens included; ``flag`` is who set it."""

    encoder: PromptEncoder
    tokens: int
    flag: str

    def refusal(self, row: Row) -> str | None:
        """None where the prompt fits, or is none that can be measured."""
        if not self.encoder.can_encode(row.prompt):
            return None
        tools = row.metadata.get("tools")
        count = len(self.encoder.encode(row.prompt, tools))
        if count <= self.tokens:
            return None
        what = f"{count} tokens with {len(tools)} tools" if tools else f"{count} tokens"
        return f"{row.place} has {what}, {self.flag} is {self.tokens}"
