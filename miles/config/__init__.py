"""Flags in, typed settings out; every problem with them is collected and reported at once."""

from miles.config.problems import Problems
from miles.config.settings import Settings

__all__ = ["Problems", "Settings"]
