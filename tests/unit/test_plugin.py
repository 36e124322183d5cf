"""The entry point by which vLLM finds ray_apr (serve/vllm/plugin.py)."""

from __future__ import annotations

import asyncio
import multiprocessing
from importlib.metadata import EntryPoint

import pytest

from ray_apr.cli import doctor
from ray_apr.core.exceptions import EngineUnavailableError
from ray_apr.serve.spec import EngineSpec
from ray_apr.serve.vllm import plugin
from ray_apr.serve.vllm.engine import VLLMEngine

OURS = EntryPoint("ray_apr", "ray_apr.serve.vllm.plugin:register", "vllm.general_plugins")
OTHER = EntryPoint("other", "other.plugin:register", "vllm.general_plugins")


@pytest.fixture
def installed(monkeypatch):
    """Set the entry points of this process."""
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)

    def set_points(*points):
        monkeypatch.setattr(plugin.importlib.metadata, "entry_points", lambda group: points)

    return set_points


def test_an_engine_of_a_checkout_that_is_not_installed_says_so(installed):
    installed(OTHER)
    engine = VLLMEngine(EngineSpec(model="model", device="cpu"), "engine-0")
    with pytest.raises(EngineUnavailableError, match=r"no entry point .*pip install .* -e \."):
        asyncio.run(engine.start())
    check = doctor.check_plugin()
    assert not check.ok and "pip install" in check.remedy


def test_an_installed_one_is_found_unless_vllm_is_told_to_leave_it_out(installed, monkeypatch):
    installed(OTHER, OURS)
    assert plugin.why_not_loaded() is None
    assert doctor.check_plugin().ok
    monkeypatch.setenv("VLLM_PLUGINS", "other,ray_apr")
    assert plugin.why_not_loaded() is None
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    assert "leaves out ray_apr" in (plugin.why_not_loaded() or "")


class Freed:
    """Writes a file when a module that holds it is freed."""

    def __init__(self, path) -> None:
        self.path = path

    def __del__(self) -> None:
        self.path.touch()


kept: list[Freed] = []


def _hold(path, *, ends_at_once: bool) -> None:
    if ends_at_once:
        plugin._end_at_once()
    kept.append(Freed(path))


@pytest.mark.parametrize("ends_at_once", [True, False])
def test_a_child_process_ends_without_freeing_its_modules(tmp_path, ends_at_once):
    child = multiprocessing.get_context("spawn").Process(
        target=_hold, args=(tmp_path / "freed",), kwargs={"ends_at_once": ends_at_once}
    )
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert (tmp_path / "freed").exists() != ends_at_once


def test_the_process_itself_is_left_alone(monkeypatch):
    ended: list[object] = []
    monkeypatch.setattr(plugin.atexit, "register", ended.append)
    plugin._end_at_once()
    assert ended == []
