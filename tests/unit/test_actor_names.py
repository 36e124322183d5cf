"""What Ray is told of the actors of a run: their names, and their memory (run/actors.py)."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from ray_apr.run import actors
from ray_apr.run.actors import Actors
from tests.run_specs import run_spec


@pytest.fixture
def options(monkeypatch):
    """Of each actor that is made."""
    options: list[dict] = []

    class Remote:
        def options(self, **kwargs):
            options.append(kwargs)
            return SimpleNamespace(remote=lambda: None)

    monkeypatch.setattr(actors.ray, "remote", lambda cls: Remote())
    return options


def test_an_actors_name_says_which_part_of_which_run_it_is(options):
    for run_id in ("1f", "2e"):  # of one name, after each other
        parts = Actors(run_spec(name="a-run"))
        parts._run_id = run_id
        for part in ("buffer", "rollout"):
            parts.make(object, part=part)
    names = [found["name"] for found in options]
    assert names == ["a-run-buffer-1f", "a-run-rollout-1f", "a-run-buffer-2e", "a-run-rollout-2e"]
    assert all(re.fullmatch(r"[\w-]+", name) for name in names)


@pytest.mark.parametrize(("outside", "arenas"), [(None, "1"), ("4", "4")])
def test_the_threads_of_an_actor_share_an_arena_unless_it_is_said_outside(
    options, monkeypatch, outside, arenas
):
    monkeypatch.delenv("MALLOC_ARENA_MAX", raising=False)
    if outside is not None:
        monkeypatch.setenv("MALLOC_ARENA_MAX", outside)
    Actors(run_spec(name="a-run")).make(object, part="buffer")
    assert options[0]["runtime_env"] == {"env_vars": {"MALLOC_ARENA_MAX": arenas}}
