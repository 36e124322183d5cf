"""What goes from actor to actor in the place of a value (data/store.py)."""

from __future__ import annotations

import ray

from ray_apr.data.store import MOST_CARRIED, carry, opened
from tests.fakes import ScriptedEngine
from tests.rollout_run import running, without_ray


def without_store(monkeypatch) -> list[bytes]:
    """Stand in for Ray's object store; returns what is put there. A reference is its place."""
    stored: list[bytes] = []

    def put(value):
        stored.append(value)
        return len(stored) - 1

    monkeypatch.setattr(ray, "put", put)
    monkeypatch.setattr(ray, "get", lambda refs, timeout: [stored[ref] for ref in refs])
    return stored


def test_small_values_go_along_and_large_ones_into_the_store(monkeypatch):
    stored = without_store(monkeypatch)
    values = [(1, "a"), "x" * MOST_CARRIED, (2, "b"), "y" * (2 * MOST_CARRIED)]
    carried = [carry(value) for value in values]
    assert [isinstance(value, bytes) for value in carried] == [True, False, True, False]
    assert len(stored) == 2
    assert opened(carried, timeout_s=1.0) == values
    assert opened([carry("z")]) == ["z"]
    assert opened([]) == []


async def test_groups_of_a_whole_run_are_not_in_the_store(monkeypatch):
    """An object for each group left 380 bytes with Ray in the rollout worker."""
    without_ray(monkeypatch)
    stored = without_store(monkeypatch)
    async with running(ScriptedEngine(auto=1)) as run:
        for step in range(3):
            assert len(await run.step(step)) == 4
            await run.sync(step + 1)
    assert not stored
    await run.check_ledger(run.summary)
