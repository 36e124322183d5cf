"""Runs whose rollout side and trainer die in any order, at moments that a seed draws."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest

from ray_apr.data.journal import JournalFolder
from tests.rollout_run import without_ray
from tests.unit.test_capture import samples_of
from tests.unit.test_journal import PARTIAL, Killed

NUM_DEATHS = 5
SEEDS = [*range(3), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(3, 60))]
_STEP_S = 30.0
"""Of a few steps on a busy machine; a run that stands still has none."""


@pytest.fixture(autouse=True)
def no_ray(monkeypatch):
    without_ray(monkeypatch)


def are_in_order(samples) -> bool:
    """Whether the versions of each one's tokens rise."""
    return all(list(s.token_versions) == sorted(s.token_versions) for s in samples)


@pytest.mark.parametrize("seed", SEEDS)
async def test_no_order_of_deaths_breaks_what_a_run_promises(tmp_path, seed):
    draw = random.Random(seed)
    killed = Killed(
        JournalFolder.of(str(tmp_path / "journal")),
        trainer_lives=True,
        partial=PARTIAL[seed % len(PARTIAL)],
    )
    is_written = draw.random() < 0.5
    """Whether all that was noted is in the file at each death."""
    for _ in range(NUM_DEATHS):
        follows_trainer = not killed.trainer_lives
        killed.trainer_lives = draw.random() < 0.6
        async with killed as run:
            if killed.step and follows_trainer:
                await run.run.sync(killed.step)
            for _ in range(draw.randrange(3)):
                await do_something(run, draw)
            if is_written:
                await run.write()
            step = killed.step
        check_begin(killed, step, is_written=is_written)
        planned = killed.begin.replayed.plan if killed.begin.replayed else {}
        known = range(killed.step)
        killed.batches = {n: g for n, g in killed.batches.items() if n in known or n in planned}
    follows_trainer = not killed.trainer_lives
    async with killed as run:
        if killed.step and follows_trainer:
            await run.run.sync(killed.step)
        await asyncio.wait_for(run.train(4), _STEP_S)
        summary, stats = await run.run.worker.stop(), await run.run.buffer.stats()
        assert (run.run.worker._before.ledger + summary.ledger + stats.ledger).error == 0
    assert are_in_order(killed.trained)
    trained = Counter(group for groups in killed.batches.values() for group in groups)
    assert set(trained.values()) == {1}


async def do_something(killed: Killed, draw: random.Random) -> None:
    """Train some steps, then save, or let the rest of the run go on for a while."""
    await asyncio.wait_for(killed.train(draw.randrange(3)), _STEP_S)
    what = draw.random()
    if what < 0.3:
        await killed.save()
    elif what < 0.5:
        await asyncio.wait_for(killed.train(1), _STEP_S)
    else:
        for _ in range(draw.randrange(12)):
            await asyncio.sleep(0)


def check_begin(killed: Killed, step: int, *, is_written: bool) -> None:
    """Check what a run goes on with.

    Args:
        killed: It.
        step: Steps that were trained when it died.
        is_written: Whether the journal has all.
    """
    begin = killed.begin
    assert killed.num_lost >= 0
    if begin.samples is not None:
        assert are_in_order(samples_of(begin))
    if not killed.trainer_lives:
        return
    num_trained = begin.before.samples_trained
    assert begin.of_engines <= step and num_trained <= step * 4
    if is_written:
        assert (begin.of_engines, num_trained, killed.num_lost) == (step, step * 4, 0)
        assert begin.replayed.trained is None or begin.replayed.trained[0] == step - 1
