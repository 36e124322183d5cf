"""An `apr` run that was killed uses the prompts of one that was not, in their order."""

from __future__ import annotations

import json
import signal
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from ray_apr.run.folder import read_rows
from ray_apr.scheduling.order import prompt_position
from tests.resumed_runs import BATCH, GROUP, check_run, journaled_samples, run_once

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.long, pytest.mark.timeout(600)]

STEPS = 12
SETTINGS = (
    "mode=apr", f"train.steps={STEPS}", "train.checkpoint_every=2",
    "train.num_checkpoints_to_keep=6",  # and with them the whole journal
)  # fmt: skip


@dataclass
class Used:
    """The prompts of a run, by their places in its order."""

    handed_out: int
    trained: Counter[int]
    """Samples of each that were trained."""
    dropped: set[int]
    """In the end, and not tried again."""
    pending: set[int]
    digests: dict[int, str]
    """Of the token ids of each prompt that has samples."""

    @classmethod
    def of(cls, folder: Path) -> Used:
        final = json.loads((folder / "final.json").read_text())
        table, _ = journaled_samples(folder)
        num_prompts, pending = final["num_prompts"], set(final["prompts_pending"])

        def places(group_ids: list[str]) -> list[int]:
            return [prompt_position(group_id, num_prompts) for group_id in group_ids]

        trained = Counter(places([r["group_id"] for r in read_rows(folder / "samples.jsonl")]))
        dropped = set(places([r["group_id"] for r in read_rows(folder / "dropped.jsonl")]))
        began = zip(
            places(table["group_id"].to_pylist()), table["prompt_digest"].to_pylist(), strict=True
        )
        assert max(Counter(table["sample_id"].to_pylist()).values()) == 1
        assert max(Counter(table["group_id"].to_pylist()).values()) == GROUP
        return cls(
            final["prompts_position"], trained, dropped - set(trained) - pending, pending,
            dict(began),
        )  # fmt: skip


def test_an_apr_run_that_lost_all_its_processes_uses_the_same_prompts(tmp_path, marked):
    _, env = marked
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        folder.mkdir()
    run_once(whole, env, *SETTINGS)
    run_once(killed, env, *SETTINGS, stop_at=5, kill=signal.SIGKILL, kills_all=True)
    run_once(killed, env, *SETTINGS)
    check_run(whole / "run", steps=STEPS, resumes=0)
    check_run(killed / "run", steps=STEPS, resumes=1)
    one, other = (Used.of(folder / "run") for folder in (whole, killed))
    for used in (one, other):
        assert set(used.trained.values()) == {GROUP}, "whole groups, each once"
        assert len(used.trained) == STEPS * BATCH // GROUP
        in_order = [*used.trained, *used.dropped, *used.pending]
        assert sorted(in_order) == list(range(used.handed_out)), "none lost, none twice"
    both = one.digests.keys() & other.digests.keys()
    assert len(both) >= len(one.trained) and all(one.digests[i] == other.digests[i] for i in both)
    # what only one of them has trained the other one has under way, dropped, or has yet to begin
    for used, than in ((one, other), (other, one)):
        rest = used.trained.keys() - than.trained.keys()
        assert all(i in than.pending | than.dropped or i >= than.handed_out for i in rest)
