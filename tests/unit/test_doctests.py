"""Examples in docstrings are true."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

import ray_apr

PACKAGE = Path(ray_apr.__file__).parent
MODULES = [
    ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
    for file in sorted(PACKAGE.rglob("*.py"))
    if ">>> " in file.read_text("utf-8")
]


@pytest.mark.parametrize("module", MODULES)
def test_examples_are_true(module: str) -> None:
    ran = doctest.testmod(importlib.import_module(module), optionflags=doctest.ELLIPSIS)
    assert ran.failed == 0
