"""The entry point by which vLLM finds ray_apr (serve/plugin.py)."""

from __future__ import annotations

import asyncio
from importlib.metadata import EntryPoint

import pytest

from ray_apr import doctor
from ray_apr.exceptions import EngineUnavailableError
from ray_apr.serve import plugin
from ray_apr.serve.engine import Engine

OURS = EntryPoint("ray_apr", "ray_apr.serve.plugin:register", "vllm.general_plugins")
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
    engine = Engine("model", replica_id="engine-0", engine_kwargs={})
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
