"""The reference page is what the code says."""

from pathlib import Path

from miles.config import known
from miles.config.reference import page

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "cli.md"


def test_the_page_is_current():
    assert PAGE.read_text() == page(), "python -m miles.config.reference > docs/reference/cli.md"


def test_the_page_has_each_known_flag_once():
    lines = page().splitlines()
    assert all(sum(line.startswith(f"| `{row.flag}` |") for line in lines) == 1 for row in known.rows())
