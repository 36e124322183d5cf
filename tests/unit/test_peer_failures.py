"""How other libraries failed, each with a test of ours that names the report.

Some of the tests are here; the others are where their subject is, and say in their docstring which
report they are about. The last test of this module checks that none is missing.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from ray_apr.config import PartialRolloutConfig
from ray_apr.core.group import GroupMeta, SampleMeta
from ray_apr.core.sample import FinishReason
from ray_apr.scheduling.shelf import Shelf
from ray_apr.tools.simulator.cluster import ClusterConfig
from ray_apr.tools.simulator.run import Simulation
from ray_apr.tools.simulator.trace import Trace
from tests.schedules import Driven

REPORTS = (
    # versions
    "AReaL#1569", "AReaL#1388", "verl#7569", "prime-rl#3009", "prime-rl#3313", "trl#5650",
    "verl#6780",
    # abort, pause, resume
    "vllm#33926", "verl#7511", "verl#7990", "vime#294", "verl#7611", "miles#2589", "AReaL#1160",
    "OpenRLHF#1262", "trl#5892", "prime-rl#2841", "verl#4067", "slime#2176", "verl#6882",
    "slime#2092",
)  # fmt: skip


def group(*versions: int, sequence: int = 0) -> GroupMeta:
    sample = SampleMeta(
        sample_id="g-0",
        group_id="g",
        num_prompt_tokens=1,
        num_tokens=len(versions),
        oldest_version=versions[0],
        newest_version=versions[-1],
        reward=1.0,
        finish_reason=FinishReason.STOP,
        num_interruptions=0,
        version_tokens=tuple((version, 1) for version in versions),
    )
    return GroupMeta(group_id="g", sequence=sequence, samples=(sample,))


def test_a_sample_is_as_old_as_its_oldest_token():
    """verl#7569: only the last version of a sample was judged."""
    shelf = Shelf(batch_size=1, max_staleness=2, on_stale="evict")
    shelf.add(group(1, 5))
    assert shelf.select(5).evicted == (group(1, 5),)


@pytest.mark.parametrize("on_stale", ["evict", "mask"])
def test_the_time_in_the_queue_counts(on_stale):
    """prime-rl#3009, prime-rl#3313: a sample that was fresh when it came could wait for ever."""
    shelf = Shelf(batch_size=2, max_staleness=1, on_stale=on_stale)
    shelf.add(group(3))
    assert shelf.select(3).chosen == ()
    shelf.add(group(5, sequence=1))
    selection = shelf.select(5)
    assert selection.chosen == ()
    assert [g.oldest_version for g in selection.evicted] == [3]


def test_a_full_batch_does_not_wait_for_a_slow_reward():
    """slime#2176: the batch was full, and still waited for a reward that took its time."""
    rows = [
        {
            "prompt_id": prompt,
            "sample_index": index,
            "prompt_tokens": 4,
            "response_tokens": 10,
            "reward_s": 10_000.0 if prompt == 3 else 0.1,
        }
        for prompt in range(64)
        for index in range(2)
    ]
    cluster = ClusterConfig.from_dict(
        {"gpus": 2, "rollout_gpus": 1, "batch": {"prompts": 4, "group_size": 2}, "steps": 10}
    )
    outcome = Simulation(Trace(rows), cluster, PartialRolloutConfig.preset("apr")).run()
    assert outcome.wall_s < 100
    assert outcome.ledger.error == 0


@pytest.mark.parametrize("mode", ["sync", "async", "in_flight"])
def test_a_mode_without_interruption_never_interrupts(mode):
    """verl#6882, slime#2092: partial rollout went on after it had been turned off."""
    config = PartialRolloutConfig.preset(mode)
    at_a_sync = {"sync": "abort", "async": "wait", "in_flight": "keep"}
    assert config.pause_mode == at_a_sync[mode], "with sync, evaluations alone are there"
    scheduler = Driven(config, batch_size=2, group_size=1, max_inflight=8)
    scheduler.admit_some()
    assert scheduler.start_all()
    scheduler.on_buffer_counts(num_buffered=8)
    assert scheduler.full_aborts() == []


def test_every_report_has_its_test():
    tests = Path(__file__).parents[1]
    sources = [path for path in tests.rglob("test_*.py") if path != Path(__file__)]
    text = "".join(path.read_text() for path in sources)
    here = Path(__file__).read_text().partition(")  # fmt: skip")[2]
    assert [report for report in REPORTS if report not in text + here] == []
