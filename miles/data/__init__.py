"""Files of prompts in, prompts out: read by offset, shuffled by (seed, epoch), with a cursor that can be saved."""

from miles.data.prompts import Prompt, PromptSource
from miles.data.render import PromptEncoder

__all__ = ["Prompt", "PromptEncoder", "PromptSource"]
