"""Checks of a run at its start, without a cluster (preflight.py)."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import ray.train
from ray.exceptions import ActorDiedError

from ray_apr.config import TrainConfig
from ray_apr.core.exceptions import ConfigError, ResourceError
from ray_apr.run import preflight
from ray_apr.run.checks import check_restarts
from ray_apr.run.preflight import (
    check_shared_folder,
    make_run_folder,
    not_placed,
    other_nodes,
    settings_of_ray_train,
    wait_for_cpu,
)
from ray_apr.run.spec import RESTARTS
from tests.run_specs import run_spec

# -- storage ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("blind", [(), ("b",), ("a", "b")])
def test_a_folder_that_not_all_nodes_share_is_refused_at_the_start(tmp_path, blind):
    """known fault: it failed at the first checkpoint, by default after the last step."""
    looked_at: list[str] = []

    def who_misses(path, node_ids):
        assert os.path.exists(path) and sorted(node_ids) == ["a", "b"]
        looked_at.append(path)
        return blind

    nodes = {"a": "10.0.0.1", "b": "10.0.0.2"}
    folder = tmp_path / "run"
    folder.mkdir()
    if blind:
        with pytest.raises(ConfigError, match=r"storage_path.*10\.0\.0\.2.*run\.storage_path"):
            check_shared_folder(folder, nodes, who_misses)
    else:
        check_shared_folder(folder, nodes, who_misses)
    assert len(looked_at) == 1 and not list(folder.iterdir()), "nothing stays in the folder"


def test_a_cluster_of_one_node_is_not_asked(tmp_path):
    check_shared_folder(tmp_path, {}, lambda *_: pytest.fail("nobody else writes there"))


@pytest.mark.parametrize(
    ("scaling", "asked"),
    [
        ({"num_workers": 1}, ["10.0.0.2", "10.0.0.3"]),
        ({"num_workers": 1, "use_gpu": True}, ["10.0.0.3"]),
        ({"num_workers": 1, "resources_per_worker": {"CPU": 8}}, ["10.0.0.3"]),
    ],
)
def test_nodes_that_no_train_worker_fits_on_need_not_see_it(monkeypatch, scaling, asked):
    def node(number, alive=True, **resources):
        address = f"10.0.0.{number}"
        return {
            "NodeID": str(number), "NodeManagerAddress": address, "Alive": alive,
            "Resources": resources,
        }  # fmt: skip

    nodes = [
        node(1, CPU=8, GPU=8), node(2, CPU=4), node(3, CPU=8, GPU=1), node(4, CPU=0),
        node(5, alive=False, CPU=8, GPU=8),
    ]  # fmt: skip
    context = SimpleNamespace(get_node_id=lambda: "1")
    monkeypatch.setattr(preflight.ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(preflight.ray, "nodes", lambda: nodes)
    assert sorted(other_nodes(ray.train.ScalingConfig(**scaling)).values()) == asked


def test_remote_storage_is_not_looked_for_on_the_nodes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(preflight, "other_nodes", lambda _: pytest.fail("all nodes reach it"))
    storage = f"file://{tmp_path}/bucket"
    spec = run_spec(run=ray.train.RunConfig(name="mine", storage_path=storage))
    make_run_folder(spec)
    assert spec.folder == tmp_path / "runs" / "mine" and spec.folder.is_dir()


# -- restarts --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RESTARTS[1:])
@pytest.mark.parametrize("value", [3, -1])
def test_restarts_of_train_workers_are_refused_however_they_are_asked_for(name, value):
    """known fault: after one, "group of version 4 is newer than the trainer at 0"; it was refused
    for colocated runs only."""
    failures = ray.train.FailureConfig(**{name: value})
    run = ray.train.RunConfig(failure_config=failures)
    if value == getattr(ray.train.FailureConfig(), name):  # Ray's default, which nobody asked for
        check_restarts(run, 1)
        return
    with pytest.raises(ConfigError, match=rf"failure_config\.{name} = {value}: must be 0"):
        check_restarts(run, 1)


def test_a_run_that_asks_for_no_restart_is_taken():
    check_restarts(ray.train.RunConfig(), 0)


def test_a_run_that_goes_on_after_failures_needs_checkpoints():
    run = ray.train.RunConfig(failure_config=ray.train.FailureConfig(max_failures=3))
    check_restarts(run, 1)
    with pytest.raises(ConfigError, match=r"max_failures = 3: needs checkpoints.*checkpoint_every"):
        check_restarts(run, 0)
    assert run_spec(run=run).max_failures == 3 and run_spec().max_failures == 0


def test_ray_train_starts_nothing_again_for_any_reason():
    """known fault: Ray 2.60's default goes on for ever after a preemption, and after workers that
    found no place."""
    from ray.train.v2._internal.exceptions import WorkerGroupStartupTimeoutError
    from ray.train.v2._internal.execution.failure_handling import DefaultFailurePolicy
    from ray.train.v2._internal.execution.failure_handling.failure_policy import FailureDecision
    from ray.train.v2.api.exceptions import ControllerError, WorkerGroupError

    class PreemptedError(ActorDiedError):
        preempted = True

    policy = DefaultFailurePolicy(run_spec().run_config.failure_config)
    for error in (
        ControllerError(WorkerGroupStartupTimeoutError(num_workers=2)),
        WorkerGroupError("a worker has died", {0: ActorDiedError()}),
        WorkerGroupError("a worker was preempted", {0: PreemptedError()}),
    ):
        assert policy.make_decision(error) is FailureDecision.RAISE


def test_what_ray_train_gets_besides_is_the_users():
    checkpoints = ray.train.CheckpointConfig(num_to_keep=7)
    run = ray.train.RunConfig(name="mine", storage_path="/x", checkpoint_config=checkpoints)
    config = run_spec(run=run).run_config
    assert (config.name, config.storage_path) == ("mine", "/x")
    assert config.checkpoint_config.num_to_keep == 7
    keep = run_spec(train=TrainConfig(num_checkpoints_to_keep=3)).run_config.checkpoint_config
    assert keep.num_to_keep == 3
    best = ray.train.CheckpointConfig(checkpoint_score_attribute="reward_mean")
    keep = run_spec(run=ray.train.RunConfig(checkpoint_config=best, name="x")).run_config
    assert keep.checkpoint_config.checkpoint_score_attribute == "reward_mean"
    assert keep.checkpoint_config.num_to_keep == 2


# -- placement -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("free", "reason"),
    [
        ({"CPU": 8.0}, "the cluster lacks GPU"),
        ({"CPU": 1.0, "GPU": 1.0}, "the cluster lacks GPU and CPU"),
        ({"CPU": 8.0, "GPU": 2.0}, "no node has as much of them as one worker wants"),
    ],
)
def test_train_workers_without_a_place_say_what_the_cluster_lacks(monkeypatch, free, reason):
    """known fault: Ray tried for ever, and the status line blamed max_live_batches."""
    monkeypatch.setattr(preflight.ray, "available_resources", lambda: free)
    monkeypatch.setattr(preflight.ray, "cluster_resources", lambda: {"CPU": 8.0, "GPU": 2.0})
    scaling = ray.train.ScalingConfig(
        num_workers=2, use_gpu=True, resources_per_worker={"CPU": 3.0}
    )
    text = str(not_placed(scaling, 600.0))
    assert reason in text and "within 600 s (rollout.engine.start_timeout_s)" in text
    assert f"6 CPU (free: {free['CPU']:g} of 8)" in text
    assert f"2 GPU (free: {free.get('GPU', 0):g} of 2)" in text
    monkeypatch.setenv("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "7")
    text = str(not_placed(scaling, 600.0))
    assert "within 7 s (RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S)" in text


@pytest.mark.parametrize("is_placed", [True, False])
def test_prompts_that_find_no_cpu_say_so(monkeypatch, is_placed):
    """It waited without end, as Ray Data does."""
    cancelled = []
    remote = SimpleNamespace(remote=lambda path: path)
    monkeypatch.setattr(preflight.ray, "remote", lambda **_: lambda function: remote)
    monkeypatch.setattr(preflight.ray, "wait", lambda refs, timeout: (refs * is_placed, []))
    monkeypatch.setattr(preflight.ray, "cancel", cancelled.append)
    monkeypatch.setattr(preflight.ray, "available_resources", dict)
    monkeypatch.setattr(preflight.ray, "cluster_resources", lambda: {"CPU": 4.0})
    if is_placed:
        wait_for_cpu(5.0)
        return
    with pytest.raises(ResourceError, match=r"within 5 s .*start_timeout_s.*free: 0 of 4"):
        wait_for_cpu(5.0)
    assert cancelled == [os.sep]


@pytest.mark.parametrize("before", [None, "7"])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "90.0"),
        ("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.5"),
    ],
)
def test_a_runs_settings_reach_ray_train_and_do_not_stay(monkeypatch, name, value, before):
    monkeypatch.delenv(name, raising=False)
    if before is not None:
        monkeypatch.setenv(name, before)
    with settings_of_ray_train(90.0):
        assert os.environ[name] == (before or value), "a user's variable wins"
    assert os.environ.get(name) == before
