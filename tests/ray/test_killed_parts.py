"""Runs that lose parts to kill -9."""

from __future__ import annotations

import itertools
import json
import os
import signal
import time

import pytest

from ray_apr.run.folder import read_rows
from ray_apr.tools.verify import verify
from tests.engine_kills import kill_a_core, sync_of
from tests.killed_parts import SMALL, KilledRun
from tests.processes import processes_of
from tests.whole_runs import (
    ONE_OF_EACH,
    fail_by_killing,
    living_parts,
    running_cluster,
    start_run,
)

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(420)]


@pytest.mark.long
def test_servers_that_die_inside_of_a_sync_and_later_are_replaced_and_the_run_goes_on(
    tmp_path, marked
):
    """known fault: an engine core killed during a sync ended the run though another one lived."""
    mark, env = marked
    overrides = (
        "train.steps=1000", "train.weight_sync_timeout_s=30",
        "scaling={num_workers: 1, use_gpu: false}",
    )  # fmt: skip
    process = start_run(tmp_path, env, *overrides)
    kill = kill_a_core(mark, tmp_path / "run", after_step=3, delay_s=0.0)
    timeline = tmp_path / "run" / "timeline.jsonl"
    left = 3
    seen: list[str] = []
    assert process.stdout is not None
    for line in process.stdout:
        seen.append(line)
        if not line.startswith("step"):
            continue
        spans = [json.loads(span) for span in timeline.read_text().splitlines()]
        if ("engine-2", "generate") not in {(span["actor"], span["what"]) for span in spans}:
            continue
        if left == 3:
            victim = next(p for p, name in processes_of(mark).items() if "ServeReplica" in name)
            os.kill(victim, signal.SIGKILL)
        left -= 1
        if left == 0:
            break
    process.send_signal(signal.SIGTERM)  # as Ctrl-C, of which there is a test above
    rest, _ = process.communicate(timeout=90)
    assert process.returncode == 143, "".join(seen)[-6000:] + rest
    assert (tmp_path / "run" / "report.html").is_file()
    spans = [json.loads(span) for span in timeline.read_text().splitlines()]
    started = {(span["actor"], span["what"]) for span in spans}
    assert {("trainer", "load"), *((f"engine-{i}", "start") for i in range(3))} <= started
    hit = sync_of(kill, tmp_path / "run")
    assert hit is not None
    assert hit["end_s"] - hit["start_s"] < 25.0, "the others did not wait for a limit"
    final = json.loads((tmp_path / "run" / "final.json").read_text())
    assert (final["status"], final["error"]) == ("stopped", "stopped by SIGTERM")
    assert final["ledger_error"] == 0


@pytest.mark.long
@pytest.mark.parametrize("victim", ["RolloutWorker", "RayTrainWorker"])
def test_a_run_without_one_of_its_parts_fails_with_the_reason_and_leaves_nothing(
    tmp_path, marked, victim
):
    _, env = marked
    with running_cluster(env) as (address, _):
        final = fail_by_killing(
            victim, tmp_path, address, env, "rollout.num_replicas=1", "train.steps=1000",
            "scaling={num_workers: 1, use_gpu: false}", "train.weight_sync_timeout_s=30",
            "rollout.journal={enabled: false}",
        )  # fmt: skip
    if victim == "RolloutWorker":
        assert final["error"].startswith("RolloutError: the rollout worker died")


@pytest.mark.long
def test_a_killed_driver_leaves_nothing_on_a_cluster_that_lives_on(tmp_path, marked):
    """known fault: it left the Serve application and its GPUs behind."""
    mark, env = marked
    ours = ("EngineCore", "ServeReplica", "ServeController", "ProxyActor", "RunLease")
    with running_cluster(env) as (address, _):
        on_cluster = env | {"RAY_AUTH_MODE": "disabled", "RAY_ADDRESS": address}
        run = start_run(tmp_path, on_cluster, *ONE_OF_EACH, "train.steps=1000")
        assert run.stdout is not None
        seen = list(itertools.takewhile(lambda line: not line.startswith("step"), run.stdout))
        running = processes_of(mark)
        assert "EngineCore" in str(running), "".join(seen)
        (lease,) = [pid for pid, name in running.items() if "RunLease" in name]
        os.kill(lease, signal.SIGKILL)  # Ray starts it again
        run.kill()
        run.wait()
        deadline = time.monotonic() + 150  # Ray Train's PlacementGroupCleaner takes its time
        while (left := living_parts(address, env)) != "[]" and time.monotonic() < deadline:
            time.sleep(1)
        assert left == "[]"
        names = processes_of(mark).values()
        assert not [name for name in names if any(part in name for part in ours)]


@pytest.mark.parametrize(
    ("victims", "beside_the_trainer"),
    [
        (["rollout worker", "buffer", "recorder"], 2),
        pytest.param(
            ["engine core", "train worker", "reward worker", "rollout worker", "driver",
             "train controller", "read task", "Serve controller", "replica"],
            1,
            marks=pytest.mark.long,
        ),
    ],
)  # fmt: skip
@pytest.mark.timeout(1200)
def test_a_run_that_loses_its_parts_goes_on_and_loses_no_token(
    tmp_path, marked, victims, beside_the_trainer
):
    mark, env = marked
    steps = 4 + 5 * len(victims)
    run = KilledRun(tmp_path, mark, env, (*SMALL, f"train.steps={steps}"))
    run.start()
    for victim in victims:
        run.wait_for_step(len(run.times) + 3)
        assert run.kill(victim), f"no {victim}: {run.tail}"
    assert run.end(400) == 0, run.tail
    folder = tmp_path / "run"
    checks = verify(folder)
    assert all(check.ok for check in checks), checks
    restarts, resumes = read_rows(folder / "restarts.jsonl"), read_rows(folder / "resumes.jsonl")
    assert len(restarts) == beside_the_trainer
    assert bool(resumes) == ("train worker" in victims)
    assert sum(row["tokens_lost"] for row in (*restarts, *resumes)) == 0
    assert len({row["sample_id"] for row in read_rows(folder / "samples.jsonl")}) == 32 * steps
