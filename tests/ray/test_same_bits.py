"""Runs whose scheduling must make no difference end with the same weights, bit for bit."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from tests.processes import kill_all, marked_environment
from tests.resumed_runs import check_run, figures, journaled_samples, run_once
from tests.whole_runs import CONFIG, command

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.long, pytest.mark.timeout(420)]

ONE_BY_ONE = (
    "train.steps=3", "train.batch_size=16", "rollout.sampling.seed=7",
    "rollout.engine.kwargs={max_num_seqs: 1, enable_prefix_caching: false}",
)  # fmt: skip
"""Each request alone in its engine: then its log-probs do not depend on who else is there."""
BOUND_0 = ("partial_rollout.max_staleness=0", "partial_rollout.oversampling_factor=1")
AWAKE = "rollout.engine.sleep=false"


def trained_weights(folder: Path, env: dict[str, str], *overrides: str) -> bytes:
    """What a whole run ends with, one request at a time."""
    run = subprocess.run(
        command(folder, *ONE_BY_ONE, *overrides),
        env=env, capture_output=True, text=True, timeout=300, check=False, cwd=folder,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    return last_weights(folder)


def last_weights(folder: Path) -> bytes:
    (model,) = (folder / "run").glob("checkpoint_*/hf/model.safetensors")
    return model.read_bytes()


@pytest.fixture(scope="module")
def trained_in_sync(tmp_path_factory) -> bytes:
    mark, env = marked_environment()
    try:
        one = ("mode=sync", "rollout.num_replicas=1")  # the others have two
        weights = trained_weights(tmp_path_factory.mktemp("sync"), env, *one)
    finally:
        kill_all(mark)
    assert weights != (CONFIG.parent / "base_model" / "model.safetensors").read_bytes()
    return weights


def test_apr_without_staleness_trains_the_same_bits_as_sync(tmp_path, marked, trained_in_sync):
    """verl#6780: with a bound of 0, the asynchronous trainer did not equal the synchronous one."""
    _, env = marked
    assert trained_weights(tmp_path, env, "mode=apr", *BOUND_0) == trained_in_sync


@pytest.mark.parametrize(
    "mode", [("mode=sync",), ("mode=sync", AWAKE), ("mode=apr", AWAKE, *BOUND_0)], ids=str
)
def test_colocated_engines_train_the_same_bits_as_others(tmp_path, marked, trained_in_sync, mode):
    """In turns; and awake, where the trainer goes on while weights travel."""
    _, env = marked
    settings = (*mode, "rollout.engine.placement=colocated", "train.checkpoint_every=2")
    assert trained_weights(tmp_path, env, *settings) == trained_in_sync


@pytest.mark.timeout(600)
def test_a_sync_run_that_was_killed_trains_the_same_bits_as_one_that_was_not(tmp_path, marked):
    _, env = marked
    keep = "train.num_checkpoints_to_keep=8"  # and with them the journal
    settings = (*ONE_BY_ONE, "mode=sync", "train.steps=8", "train.checkpoint_every=1", keep)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        folder.mkdir()
    run_once(whole, env, *settings)
    run_once(killed, env, *settings, stop_at=2, kill=signal.SIGKILL)
    run_once(killed, env, *settings)
    check_run(killed / "run", steps=8, resumes=1)
    assert last_weights(killed) == last_weights(whole)
    assert figures(killed / "run") == figures(whole / "run")
    assert trained(killed / "run") == trained(whole / "run")


def trained(folder: Path) -> dict[int, list[tuple[object, ...]]]:
    """The samples of each step of a run: ids, tokens, log-probs, versions, rewards."""
    table, plan = journaled_samples(folder)
    columns = ("token_ids", "logprobs", "segment_versions", "segment_lengths", "reward")
    by_group: dict[str, list[tuple[object, ...]]] = {}
    for row in table.sort_by("sample_id").to_pylist():
        values = (row["sample_id"], *(row[name] for name in columns))
        by_group.setdefault(row["group_id"], []).append(values)
    assert len(plan) == 8 and all(by_group[group] for groups in plan.values() for group in groups)
    return {step: [s for group in groups for s in by_group[group]] for step, groups in plan.items()}
