"""What Ray's tables call the actors of a run (run/actors.py)."""

from __future__ import annotations

import re
from types import SimpleNamespace

from ray_apr.run import actors
from ray_apr.run.actors import Actors
from tests.run_specs import run_spec


def test_an_actors_name_says_which_part_of_which_run_it_is(monkeypatch):
    options: list[dict] = []

    class Remote:
        def options(self, **kwargs):
            options.append(kwargs)
            return SimpleNamespace(remote=lambda: None)

    monkeypatch.setattr(actors.ray, "remote", lambda cls: Remote())
    for run_id in ("1f", "2e"):  # of one name, after each other
        parts = Actors(run_spec(name="a-run"))
        parts._run_id = run_id
        for part in ("buffer", "rollout"):
            parts.make(object, part=part)
    names = [found["name"] for found in options]
    assert names == ["a-run-buffer-1f", "a-run-rollout-1f", "a-run-buffer-2e", "a-run-rollout-2e"]
    assert all(re.fullmatch(r"[\w-]+", name) for name in names)
