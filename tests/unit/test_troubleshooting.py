"""docs/troubleshooting.md quotes messages that the code has."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import ray_apr

PACKAGE = Path(ray_apr.__file__).parent
PAGE = PACKAGE.parent / "docs/troubleshooting.md"
QUOTED = re.findall(r"^### `(.+)`$", PAGE.read_text("utf-8"), re.MULTILINE)


def texts(source: str) -> set[str]:
    """Texts of some code, with … for what is filled in."""
    return {
        str(node.value) if isinstance(node, ast.Constant) else _with_gaps(node)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.JoinedStr)
        or (isinstance(node, ast.Constant) and isinstance(node.value, str))
    }


def _with_gaps(node: ast.JoinedStr) -> str:
    parts = (str(p.value) if isinstance(p, ast.Constant) else "…" for p in node.values)
    return "".join(parts)


def is_in(quoted: str, said: set[str]) -> bool:
    """Whether a text has all parts of a quotation between its gaps, in order."""
    pattern = re.compile(".*".join(map(re.escape, quoted.split("…"))), re.DOTALL)
    return any(pattern.search(text) for text in said)


@pytest.fixture(scope="module")
def said() -> set[str]:
    found: set[str] = set()
    for file in PACKAGE.rglob("*.py"):
        found |= texts(file.read_text("utf-8"))
    return found


def test_there_are_enough() -> None:
    assert len(QUOTED) >= 15 and len(set(QUOTED)) == len(QUOTED)


@pytest.mark.parametrize("quoted", QUOTED)
def test_a_message_is_in_the_code(quoted: str, said: set[str]) -> None:
    assert is_in(quoted, said)


def test_a_message_that_was_changed_is_missed() -> None:
    said = texts('print(f"no file {name}; make it")')
    assert is_in("no file …; make it", said)
    assert not is_in("no folder …; make it", said)
    assert not is_in("make it …; no file", said)
