"""The table of vLLM's arguments against the vLLM that is installed (config/engine_options.py)."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest

from ray_apr.config.engine_options import REFUSED, TUNES


@pytest.fixture(scope="module")
def arguments() -> set[str]:
    """Fields of ``AsyncEngineArgs``, read without the seconds that importing vLLM takes."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("vLLM is not installed")
    file = Path(spec.submodule_search_locations[0], "engine", "arg_utils.py")
    classes = {n.name: n for n in ast.parse(file.read_text()).body if isinstance(n, ast.ClassDef)}
    return {
        field.target.id
        for name in ("EngineArgs", "AsyncEngineArgs")
        for field in classes[name].body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    }


def test_every_argument_that_may_be_given_exists(arguments):
    assert TUNES.keys() <= arguments


def test_every_argument_of_this_vllm_is_decided_upon(arguments):
    """One that is not is refused, as unknown: read what it does, and put it into a table."""
    assert arguments <= TUNES.keys() | REFUSED.keys()
