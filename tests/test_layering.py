"""Rooms import only from lower floors; what must stay light imports no torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import miles

PACKAGE = Path(miles.__file__).parent
FLOORS = [
    ["types", "errors", "loops", "hooks"],
    ["config"],
    ["data", "engine"],
    ["rollout", "train", "weights", "observe"],
    ["cluster"],
    ["driver"],
    ["sim", "cli", "launch"],
    ["utils"],
]
FLOOR = {room: height for height, rooms in enumerate(FLOORS) for room in rooms}


def room_of(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_rooms(path):
    """(line, room) for every import of ours, function-local ones included."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" if node.module == "miles" else node.module for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "miles" and len(parts) > 1 and parts[1] in FLOOR:
                yield node.lineno, parts[1]


def test_every_room_has_a_floor():
    rooms = {room_of(p) for p in PACKAGE.rglob("*.py")} - {"__init__"}
    assert rooms == set(FLOOR)


def test_imports_point_down():
    """Rooms on one floor are houses of their own and talk through lower nouns; the first floor's may use each other."""
    wrong = []
    for path in PACKAGE.rglob("*.py"):
        room = room_of(path)
        for line, other in imported_rooms(path):
            height = FLOOR.get(room, len(FLOORS))
            if other != room and height > 0 and FLOOR[other] >= height:
                wrong.append(f"{path.relative_to(PACKAGE.parent)}:{line} imports {other}")
    assert not wrong, "\n".join(wrong)


def test_nobody_imports_the_doors():
    users = [
        p for p in PACKAGE.rglob("*.py") for _, other in imported_rooms(p) if other == "utils" and room_of(p) != "utils"
    ]
    assert users == []


@pytest.mark.parametrize(
    "module", ["miles", "miles.cli", "miles.rollout.assembly", "miles.sim.control_plane", "miles.driver.check"]
)
def test_control_plane_and_help_import_no_torch(module):
    code = f"import sys, {module}; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0, f"{module} imports torch"
