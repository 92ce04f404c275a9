"""Files of prompts in, prompts out: read row by row, mixed and shuffled by (seed, epoch), with a cursor to be saved."""

from miles.data.prompts import Prompt, PromptSource
from miles.data.render import PromptEncoder

__all__ = ["Prompt", "PromptEncoder", "PromptSource"]
