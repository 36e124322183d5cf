"""The last counters of a run (final.py)."""

from __future__ import annotations

import dataclasses

from ray_apr.core.ledger import LedgerSnapshot
from ray_apr.data.resumption import Counters, RolloutSummary
from ray_apr.run.final import final_figures
from ray_apr.scheduling.stock import BufferStats
from tests.fakes import ScriptedEngine
from tests.run_specs import run_spec


async def test_tokens_for_others_than_the_run_are_outside_of_its_ledger():
    (status,) = await ScriptedEngine().status()
    engine = dataclasses.replace(status, tokens_generated=30, tokens_outside=7, tokens_evaluated=5)
    summary = RolloutSummary(
        ledger=LedgerSnapshot(generated=60, pending=4, interrupted=6, discarded={"failed": 10}),
        samples_interrupted=0, samples_resumed=0, prompts_position=0, num_prompts=1,
        pending_prompts=(), engines=(engine, engine), sampled={},
    )  # fmt: skip
    stats = BufferStats(
        ledger=LedgerSnapshot(buffered=10, trained=30), buffered_samples=0, trained_samples=0,
        evicted_samples=0, read_ahead_max=0, held_groups=(),
    )  # fmt: skip
    final = final_figures(run_spec(), summary, stats, 0, Counters())
    assert (final["tokens_generated"], final["tokens_outside"]) == (60, 14)
    assert final["ledger_error"] == 0
