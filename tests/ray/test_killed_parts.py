"""Runs that lose a part to kill -9: a server, an engine core, a train worker, the driver."""

from __future__ import annotations

import itertools
import json
import os
import signal
import time

import pytest

from tests.engine_kills import kill_a_core, sync_of
from tests.processes import processes_of
from tests.resumed_runs import SMALL, check_run
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


@pytest.mark.parametrize(
    "victim",
    [
        "RolloutWorker",
        *(
            pytest.param(part, marks=pytest.mark.long)
            for part in ("RayTrainWorker", "ServeReplica", "EngineCore")
        ),
    ],
)
def test_a_run_without_one_of_its_parts_fails_with_the_reason_and_leaves_nothing(
    tmp_path, marked, victim
):
    _, env = marked
    with running_cluster(env) as (address, _):
        final = fail_by_killing(
            victim, tmp_path, address, env, "rollout.num_replicas=1", "train.steps=1000",
            "scaling={num_workers: 1, use_gpu: false}", "train.weight_sync_timeout_s=30",
        )  # fmt: skip
    if victim == "RolloutWorker":
        assert final["error"].startswith("RolloutError: the rollout worker died")


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
        deadline = time.monotonic() + 60
        while (left := living_parts(address, env)) != "[]" and time.monotonic() < deadline:
            time.sleep(1)
        assert left == "[]"
        names = processes_of(mark).values()
        assert not [name for name in names if any(part in name for part in ours)]


@pytest.mark.parametrize(
    "victims",
    [
        ["SampleBuffer"],
        pytest.param(
            ["RolloutWorker", "RayTrainWorker", "EngineCore", "RunRecorder", "TrainController"],
            marks=pytest.mark.long,
        ),
    ],
)
@pytest.mark.timeout(900)
def test_a_run_that_loses_its_parts_goes_on_by_itself(tmp_path, marked, victims):
    mark, env = marked
    settings = (
        f"train.steps={4 + 6 * len(victims)}", "train.checkpoint_every=2",
        f"run.max_failures={len(victims)}",
    )  # fmt: skip
    run = start_run(tmp_path, env, *SMALL, *settings)
    assert run.stdout is not None
    left, said, num_steps = list(victims), [], 0
    for line in run.stdout:
        said.append(line)
        num_steps += line.startswith("step")
        if left and num_steps >= 3:
            victim = left.pop()
            found = [p for p, name in processes_of(mark).items() if victim in name]
            assert found, f"no {victim}: " + "".join(said)
            os.kill(found[0], signal.SIGKILL)
            num_steps = 0
    assert run.wait(60) == 0, "".join(said)[-6000:]
    steps = 4 + 6 * len(victims)
    check_run(tmp_path / "run", steps=steps, resumes=len(victims))
    restarts = [line for line in said if line.startswith("failed: ")]
    assert len(restarts) == len(victims), restarts
