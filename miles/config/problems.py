"""Problems go in one by one, one error with all of them comes out."""

from __future__ import annotations

from typing import Any

from miles.errors import SettingsError


class Problems:
    """Collects what is wrong with the settings; ``raise_all`` raises once, with everything."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.warnings: list[str] = []
        self.notes: list[str] = []

    def add(self, flag: str, value: Any, why: str, works: str) -> None:
        """One problem: the flag, its value, the arithmetic or reason, and a value that works."""
        shown = "is not set" if value is None else str(value)
        self.lines.append(f"{flag} {shown}".strip() + f": {why}; {works}")

    def warn(self, line: str) -> None:
        """Something that works but may not be what the user meant."""
        self.warnings.append(line)

    def note(self, line: str) -> None:
        """A choice that was made for the user."""
        self.notes.append(line)

    def raise_all(self) -> None:
        if self.lines:
            raise SettingsError(self.lines)
