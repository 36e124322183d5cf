"""The driver's watch of nodes that are drained (run/draining.py)."""

from __future__ import annotations

import dataclasses
import threading
from types import SimpleNamespace

import pytest
import ray.train
from ray.exceptions import RpcError

from ray_apr.config import RolloutConfig, TrainConfig
from ray_apr.config.engine import EngineConfig
from ray_apr.core.exceptions import FolderTakenError, RanksChange, TrainError
from ray_apr.data.fence import Fence
from ray_apr.run import draining as module
from ray_apr.run import watch
from ray_apr.run.draining import NodeWatch, PartsOfNode, parts_on
from ray_apr.run.folder import read_rows
from tests.run_specs import run_spec

DRIVER, TRAINER, OTHER = ("n0", 1), ("n0", 2), ("n0", 3)


def actor(name, cls, node, *, owner=DRIVER, port=9):
    def place(node, port):
        return {"NodeID": node, "IPAddress": "::1", "Port": port}

    return {
        "Name": name, "ActorClassName": cls, "Address": place(node, port),
        "OwnerAddress": place(*owner),
    }  # fmt: skip


ACTORS = [
    actor("run-recorder-1", "RunRecorder", "n0"),
    actor("", "TrainController", "n0", port=TRAINER[1]),
    actor("", "TrainController", "n0", owner=("n9", 7), port=OTHER[1]),
    actor("", "RayTrainWorker", "n0", owner=TRAINER),
    actor("", "RayTrainWorker", "n1", owner=TRAINER),
    actor("", "RayTrainWorker", "n1", owner=OTHER),
    actor("", "PlacementGroupCleaner", "n1", owner=TRAINER),
    actor("SERVE_REPLICA::run#engine-1#ab", "ServeReplica", "n1", owner=("n0", 5)),
    actor("SERVE_REPLICA::run-2#engine-0#ab", "ServeReplica", "n1", owner=("n0", 5)),
    actor("SERVE_REPLICA::run#RolloutIngress#ab", "ServeReplica", "n1", owner=("n0", 5)),
    actor("run-rollout-1", "RolloutWorker", "n2"),
]


def test_a_node_has_parts_of_this_run_and_of_no_other():
    def on(node):
        return parts_on(node, ACTORS, app="run", recorder="run-recorder-1")

    assert on("n1") == PartsOfNode(("engine-1",), 1)
    assert on("n2") == PartsOfNode(others=("RolloutWorker",))
    assert on("n0") == PartsOfNode((), 1, ("RunRecorder", "TrainController"))
    assert on("n3") == PartsOfNode()
    assert parts_on("n1", ACTORS, app="run", recorder="another") is None


def test_a_node_is_looked_at_again_where_ray_starts_the_recorder_again(monkeypatch, tmp_path):
    cluster = Cluster(monkeypatch, tmp_path)
    cluster.drained, cluster.actors = {"n1": 0.0}, ACTORS[1:]
    cluster.watch.look()
    assert cluster.said == []
    cluster.actors = ACTORS
    cluster.watch.look()
    assert len(cluster.said) == 1


class Side:
    """Notes what the watch has the run do; the buffer answers with `step`."""

    def __init__(self, step=None) -> None:
        self.step, self.num_ordered = step, 0
        self.reason = None
        self.failed = threading.Event()
        self.buffer = SimpleNamespace(order_checkpoint=SimpleNamespace(remote=self.order))

    def order(self):
        self.num_ordered += 1
        return self.step

    def fail(self, reason) -> None:
        self.reason = reason
        self.failed.set()


class Cluster:
    """Nodes, a run on them and its watch, whose thread does not run."""

    def __init__(self, monkeypatch, tmp_path, *, num_workers=(1, 2), now=2, **parts) -> None:
        self.drained: dict[str, float] = {}
        self.actors = ACTORS
        self.saved, self.room, self.said = 0, 0, []
        self.side = Side()
        scaling = ray.train.ScalingConfig(num_workers=num_workers)
        train = TrainConfig(batch_size=24, checkpoint_every=4)
        spec = run_spec(scaling=scaling, train=train, **parts)
        scaling = dataclasses.replace(spec.scaling, num_workers=now)
        self.spec = dataclasses.replace(spec, scaling=scaling, name="run")
        monkeypatch.setattr(type(self.spec), "folder", tmp_path)
        monkeypatch.setattr(module, "drained_nodes", lambda: self.drained)
        monkeypatch.setattr(module, "living_actors", lambda: self.actors)
        monkeypatch.setattr(module, "last_step", lambda spec, trainer_lives: self.saved)
        monkeypatch.setattr(module, "free_by_node", lambda: [{"CPU": float(self.room)}])
        monkeypatch.setattr(module, "unix_s", lambda: 1_000.0)
        monkeypatch.setattr(module.ray, "get", lambda answer, timeout: answer)
        self.watch = self.new_watch()

    def new_watch(self) -> NodeWatch:
        return NodeWatch(
            self.spec, self.side, recorder="run-recorder-1", started_at=990.0,
            show=self.said.append,
        )  # fmt: skip


def test_each_node_is_told_once_and_only_where_the_run_has_parts(monkeypatch, tmp_path):
    cluster = Cluster(monkeypatch, tmp_path)
    cluster.drained = {"n1": 1_100.0, "n2": 0.0, "n3": 1_100.0}
    for _ in range(3):
        cluster.watch.look()
    cluster.new_watch().look()  # the run has begun again
    rows = read_rows(tmp_path / "notices.jsonl")
    assert rows == [
        {"time_s": 10.0, "node": "n1", "left_s": 100.0, "engines": ["engine-1"],
         "num_train_workers": 1, "others": []},
        {"time_s": 10.0, "node": "n2", "left_s": None, "engines": [], "num_train_workers": 0,
         "others": ["RolloutWorker"]},
    ]  # fmt: skip
    assert cluster.said == [
        "node n1 is drained, gone in 100 s; it has engine-1, train workers: 1",
        "node n2 is drained; it has RolloutWorker",
    ]


def test_a_run_that_is_another_driver_s_is_told_of_no_node(monkeypatch, tmp_path):
    cluster = Cluster(monkeypatch, tmp_path)
    cluster.drained = {"n1": 0.0}
    Fence("another", str(tmp_path)).take()
    with pytest.raises(FolderTakenError):
        cluster.watch.look()
    assert not (tmp_path / "notices.jsonl").exists() and not cluster.said


def test_train_workers_leave_with_a_checkpoint_that_is_durable(monkeypatch, tmp_path):
    cluster = Cluster(monkeypatch, tmp_path)
    cluster.drained = {"n1": 0.0}
    assert not cluster.watch.look(), "the trainer has not begun"
    cluster.side.step = 7
    assert not cluster.watch.look()
    cluster.saved = 6
    assert not cluster.watch.look() and cluster.side.num_ordered == 2
    cluster.saved = 7
    assert cluster.watch.look()
    assert isinstance(cluster.side.reason, RanksChange)
    assert str(cluster.side.reason) == (
        "1 of 2 train workers are on nodes that are drained; others have room for 1"
    )


def test_a_run_that_has_its_last_checkpoint_does_not_begin_again(monkeypatch, tmp_path):
    cluster = Cluster(monkeypatch, tmp_path)
    last = cluster.spec.train.num_steps
    cluster.drained, cluster.side.step, cluster.saved = {"n1": 0.0}, last, last
    assert not cluster.watch.look() and cluster.side.reason is None


def test_train_workers_without_another_place_train_on(monkeypatch, tmp_path):
    cluster = Cluster(monkeypatch, tmp_path, num_workers=(2, 4))
    cluster.drained, cluster.side.step, cluster.saved = {"n1": 0.0}, 3, 3
    assert not cluster.watch.look() and cluster.side.num_ordered == 1
    cluster.room = 1
    assert cluster.watch.look()
    assert "others have room for 2" in str(cluster.side.reason)


@pytest.mark.parametrize("is_colocated", [False, True])
def test_a_fixed_number_of_train_workers_gets_a_checkpoint_alone(
    monkeypatch, tmp_path, is_colocated
):
    placement = "colocated" if is_colocated else "disaggregated"
    rollout = RolloutConfig(engine=EngineConfig(placement=placement))
    cluster = Cluster(monkeypatch, tmp_path, num_workers=2, rollout=rollout)
    cluster.drained, cluster.side.step, cluster.saved = {"n1": 0.0}, 3, 3
    assert not cluster.watch.look() and not cluster.watch.look()
    assert cluster.side.num_ordered == (not is_colocated)
    assert cluster.side.reason is None


def test_the_watch_outlives_what_ray_does_not_answer_and_else_ends_the_run(monkeypatch, tmp_path):
    monkeypatch.setattr(watch, "LOOK_S", 0.001)
    cluster = Cluster(monkeypatch, tmp_path)
    answers = [RpcError("GCS is away"), TimeoutError(), KeyError("a name that Ray has changed")]

    def drained_nodes():
        raise answers.pop(0)

    monkeypatch.setattr(module, "drained_nodes", drained_nodes)
    with cluster.watch:
        assert cluster.side.failed.wait(10)
    assert isinstance(cluster.side.reason, TrainError) and "a name" in str(cluster.side.reason)
