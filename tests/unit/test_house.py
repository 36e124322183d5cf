"""The shape of the package: few rooms, short files."""

from __future__ import annotations

from pathlib import Path

import ray_apr

PACKAGE = Path(ray_apr.__file__).parent
MOST_LINES = 400
LONGER: dict[str, str] = {}
"""Files that may be longer, at most three, each with its reason."""


def test_the_top_level_has_few_rooms_and_holds_the_facade_alone() -> None:
    rooms = [p for p in PACKAGE.iterdir() if p.name != "__pycache__"]
    files = sorted(p.name for p in rooms if p.suffix == ".py")
    assert files == ["__init__.py", "__main__.py", "session.py", "trainer.py"]
    assert len(rooms) <= 20


def test_no_file_is_long() -> None:
    lines = {
        str(path.relative_to(PACKAGE)): len(path.read_text().splitlines())
        for path in PACKAGE.rglob("*.py")
    }
    assert {name for name, count in lines.items() if count > MOST_LINES} == set(LONGER)
    assert len(LONGER) <= 3
