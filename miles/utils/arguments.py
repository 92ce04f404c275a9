"""Door: the command line as the flat namespace that hooks and first-era scripts read."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence

from miles.config import Problems, Settings, effects


def parse_args(argv: Sequence[str] | None = None) -> Namespace:
    """Parses flags. Raises `SettingsError` with every one that can't be read or had here."""
    problems = Problems()
    settings = Settings.parse(sys.argv[1:] if argv is None else argv, problems)
    effects.check(settings, problems)
    problems.raise_all()
    return settings.namespace()
