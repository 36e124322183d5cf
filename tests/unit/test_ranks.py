"""Train workers that come and go (run/ranks.py, config/ranks.py)."""

from __future__ import annotations

import dataclasses
import json
import threading
import types

import pytest
import ray.train

from ray_apr.compat.ray import RAY, free_by_node, size_by_node
from ray_apr.config import EvaluationConfig, PartialRolloutConfig, RolloutConfig, TrainConfig
from ray_apr.config.engine import EngineConfig
from ray_apr.config.ranks import RankRange
from ray_apr.core.exceptions import ConfigError, RanksChange, ResourceError, TrainError
from ray_apr.run import ranks as module
from ray_apr.run import watch
from ray_apr.run.changes import changed_after, changed_settings
from ray_apr.run.checks import check_resources
from ray_apr.run.final import write_json
from ray_apr.run.host import HostedRun
from ray_apr.run.ranks import RankWatch, lost_nodes_excused
from ray_apr.run.room import num_that_fit, without
from ray_apr.tools.report.compare import other_settings
from tests.run_specs import run_spec

ROLLOUT = RolloutConfig(num_replicas=2)
TRAIN = TrainConfig(batch_size=24, checkpoint_every=4)


def elastic(least=1, most=4, **parts):
    scaling = ray.train.ScalingConfig(
        num_workers=(least, most), elastic_resize_monitor_interval_s=0.01
    )
    return run_spec(scaling=scaling, **{"train": TRAIN, **parts})


def with_number(number):
    """A run that has so many train workers now, of 1 to 4."""
    spec = elastic()
    scaling = dataclasses.replace(spec.scaling, num_workers=number)
    return dataclasses.replace(spec, scaling=scaling)


@pytest.mark.parametrize(
    ("cluster", "has"),
    [
        ({"CPU": 4.0, "node:a": 1.0}, {"num_cpus": 2, "num_gpus": 0.0}),
        ({"CPU": 1.0, "GPU": 1.0, "node:a": 1.0}, {"num_cpus": 1.0, "num_gpus": 1.0}),
        ({"CPU": 16.0, "node:a": 1.0, "node:b": 1.0}, {"num_cpus": 16.0, "num_gpus": 0.0}),
        ({"CPU": 8.0, "GPU": 8.0, "node:a": 2.0}, {"num_cpus": 8.0, "num_gpus": 8.0}),
    ],
)
def test_the_run_folder_says_what_a_part_has(tmp_path, monkeypatch, cluster, has):
    """known fault: of settings that give Ray more CPUs than there are nothing told the machine."""
    cluster = {**cluster, "node:__internal_head__": 1.0}
    monkeypatch.setattr(module.ray, "cluster_resources", lambda: cluster)
    monkeypatch.setattr(module, "cpus_of_this_machine", lambda: 2)
    folder = ray.train.RunConfig(name=tmp_path.name, storage_path=str(tmp_path.parent))
    spec = dataclasses.replace(
        with_number(3),
        name=tmp_path.name,
        run=folder,
        rollout=ROLLOUT,
        partial_rollout=PartialRolloutConfig(max_staleness=2, batches_per_step=2),
    )
    assert module.note_ranks(spec, 5, 0.0) == {}
    row = json.loads((tmp_path / "ranks.jsonl").read_text())
    parts = {"num_train_workers": 3, "num_engines": 2, "batch_size": 48, "max_staleness": 2}
    assert row == {"time_s": row["time_s"], "step": 5} | parts | has
    write_json(tmp_path / "config.json", spec.describe())
    train = dataclasses.replace(spec.train, steps=9, learning_rate=0.25)
    spec = dataclasses.replace(spec.with_replicas(1), train=train)
    was = json.loads((tmp_path / "config.json").read_text())["train"]
    changed = {
        f"train.{name}": [was[name], getattr(train, name)] for name in ("steps", "learning_rate")
    }
    assert module.note_ranks(spec, 7, 0.0) == {name: tuple(b) for name, b in changed.items()}
    text = (tmp_path / "ranks.jsonl").read_text().splitlines()[-1]
    assert json.loads(text)["changed"] == changed


def test_a_folder_without_the_digest_of_a_file_does_not_tell_that_the_file_changed(
    tmp_path, monkeypatch
):
    """known fault: a run of an older version went on with 'digests {} → null, the file of reward',
    and a comparison with one listed both."""
    spec = run_spec(reward=elastic)
    monkeypatch.setattr(type(spec), "folder", tmp_path)
    now = json.loads(json.dumps(spec.describe()))
    for before in ({}, {"algorithm.loss": "6f1c"}, {"reward": "6f1c"}):
        was = now | {"digests": before}
        write_json(tmp_path / "config.json", was)
        told = ["digests.reward"] if "reward" in before else []
        assert [*changed_settings(spec)] == [one.name for one in other_settings(was, now)] == told


def test_where_the_checkpoints_are_is_written_down_and_is_no_setting(tmp_path, monkeypatch):
    uri = "s3://bucket/runs"
    spec = run_spec(run=ray.train.RunConfig(name="run", storage_path=uri))
    monkeypatch.setattr(type(spec), "folder", tmp_path)
    now = spec.describe()
    assert now["checkpoints"] == f"{uri}/{spec.name}" and "checkpoints" not in run_spec().describe()
    was = {
        name: value for name, value in json.loads(json.dumps(now)).items() if name != "checkpoints"
    }
    for before in (was, was | {"checkpoints": "s3://other/run"}):
        write_json(tmp_path / "config.json", before)
        assert changed_settings(spec) == {} and other_settings(before, now) == []


def test_a_setting_that_a_run_of_an_older_version_had_not_has_its_default_there(
    tmp_path, monkeypatch
):
    """known fault: after an upgrade a run told each new setting as 'null → default'."""
    spec = run_spec(evaluation=EvaluationConfig(every=5), rollout=RolloutConfig(group_size=4))
    monkeypatch.setattr(type(spec), "folder", tmp_path)
    was = json.loads(json.dumps(spec.describe()))
    for section, name in (
        ("train", "mini_batches"), ("buffer", "wait_timeout_s"), ("evaluation", "samples"),
        ("rollout", "group_size"), ("train", "lora"),
    ):  # fmt: skip
        was[section].pop(name, None)
    write_json(tmp_path / "config.json", was)
    assert changed_settings(spec) == {"rollout.group_size": (RolloutConfig().group_size, 4)}
    del was["evaluation"]
    write_json(tmp_path / "config.json", was)
    assert changed_settings(spec)["evaluation.every"] == (None, 5), "it had none"


def test_what_a_run_changed_after_a_step_is_from_its_value_to_the_last():
    rows = [
        {"step": 0},
        {"step": 4, "changed": {"a": [1, 2], "b": [None, "x"]}},
        {"step": 8, "changed": {"a": [2, 3]}},
    ]
    assert changed_after(rows, 3) == {"a": (1, 3), "b": (None, "x")}
    assert changed_after(rows, 4) == {"a": (2, 3)} and changed_after(rows, 8) == {}


@pytest.mark.parametrize("given", [0, "2", True, (2, 1), (0, 2), (1, 2, 3), (1.0, 2)])
def test_a_number_that_is_none_is_refused(given):
    with pytest.raises(ConfigError, match=r"scaling\.num_workers"):
        RankRange.of(given)


def test_numbers_that_do_not_divide_the_batch_are_passed_over():
    assert RankRange.of([1, 6]).counts(TRAIN) == [1, 2, 3, 4, 6]
    shards = dataclasses.replace(TRAIN, shard_ranks=2)
    assert RankRange.of((2, 6)).counts(shards) == [2, 4, 6]
    assert not RankRange.of(3).is_elastic and not RankRange.of((3, 3)).is_elastic


@pytest.mark.parametrize(
    ("parts", "field"),
    [
        ({"train": TrainConfig(batch_size=24)}, r"train\.checkpoint_every"),
        ({"most": 5}, r"train\.batch_size"),
        (
            {"rollout": RolloutConfig(engine=EngineConfig(placement="colocated"))},
            r"scaling\.num_workers",
        ),
    ],
)
def test_what_does_not_fit_a_number_that_changes_is_refused(parts, field):
    spec = elastic(**parts)
    with pytest.raises(ConfigError, match=field):
        spec.check(spec.scaling)


def test_a_run_whose_steps_are_ordered_has_one_number(monkeypatch):
    monkeypatch.setattr("ray_apr.run.host.ray.get_runtime_context", lambda: Here)
    with pytest.raises(ConfigError, match="one number where the caller"):
        HostedRun(elastic(), None, is_gated=True)


class Here:
    @staticmethod
    def get_node_id():
        return "ab" * 28


def test_the_cluster_has_to_hold_the_least_number():
    spec = elastic(2, 4)
    rollout = RolloutConfig(num_replicas=1, engine=EngineConfig(num_cpus_per_replica=1))
    spec = dataclasses.replace(spec, rollout=rollout)
    check_resources(spec, {"CPU": 4.0})
    with pytest.raises(ConfigError, match="2 train workers want 3 CPUs"):
        check_resources(spec, {"CPU": 2.5})


def test_room_is_counted_node_by_node_beside_the_engines():
    """Ray's own policy counts what the engines have as room for train workers."""
    free = [{"CPU": 4.0}, {"CPU": 1.5}, {"GPU": 8.0}]
    assert num_that_fit(free, {"CPU": 1.0}, 9) == 5
    assert num_that_fit(free, {"CPU": 2.0}, 9) == 2
    assert num_that_fit(free, {"CPU": 1.0, "GPU": 1.0}, 9) == 0
    assert num_that_fit(free, {"CPU": 0.0}, 3) == 3
    assert num_that_fit([{"CPU": 0.3}], {"CPU": 0.1}, 9) == 3
    left = without(free, {"CPU": 1.5, "GPU": 0.0}, 2)
    assert [node.get("CPU", 0.0) for node in left] == [1.0, 1.5, 0.0]
    assert num_that_fit(left, {"CPU": 1.0}, 9) == 2


def test_a_run_has_as_many_engines_as_the_nodes_that_stay_have_room_for(monkeypatch):
    """Ray would wait for those of a node that is gone until the run's limit."""
    nodes = [{"CPU": 3.0}]
    monkeypatch.setattr(module, "size_by_node", lambda: nodes)
    monkeypatch.setattr(module, "free_by_node", lambda: nodes)
    monkeypatch.setattr(module, "_SETTLE_S", 0.0)
    engine = EngineConfig(num_cpus_per_replica=1)
    spec = elastic(1, 2, rollout=RolloutConfig(num_replicas=4, engine=engine))
    assert module.choose_ranks(spec).rollout.num_replicas == 2
    nodes[0]["CPU"] = 1.0
    assert module.choose_ranks(spec).rollout.num_replicas == 4, "none has room: they are waited for"
    nodes[0]["CPU"] = 9.0
    assert module.choose_ranks(spec).rollout.num_replicas == 4


@pytest.mark.parametrize(("cpus", "number"), [(3.0, 1), (4.0, 2), (2.0, 1), (9.0, 2)])
def test_one_cpu_is_left_for_the_task_that_encodes_the_prompts(monkeypatch, cpus, number):
    """known fault: train workers took the last CPU, which the check at the start refuses."""
    for name in ("size_by_node", "free_by_node"):
        monkeypatch.setattr(module, name, lambda: [{"CPU": cpus}])
    monkeypatch.setattr(module, "_SETTLE_S", 0.05)
    monkeypatch.setattr(module, "_LOOK_S", 0.0)
    engine = EngineConfig(num_cpus_per_replica=1)
    spec = elastic(1, 2, rollout=RolloutConfig(num_replicas=1, engine=engine))
    assert module.choose_ranks(spec).scaling.num_workers == number
    watch = module.RankWatch(spec, last_step=lambda: 0, fail=pytest.fail)
    assert watch._room_now(9) == cpus - 1, "so that it asks for no more than would be chosen"


def test_dead_and_drained_nodes_have_no_room(monkeypatch):
    cpus = {"small": 1.0, "drained": 8.0, "dead": 8.0, "big": 4.0}
    state = types.SimpleNamespace(
        get_draining_nodes=lambda: {"drained": 0},
        node_table=lambda: [
            {"NodeID": name, "Alive": name != "dead", "Resources": {"CPU": 2 * cpus[name]}}
            for name in cpus
        ],
        available_resources_per_node=lambda: {name: {"CPU": n} for name, n in cpus.items()},
    )
    monkeypatch.setattr(type(RAY), "get", lambda self, name: state)
    assert free_by_node() == [{"CPU": 4.0}, {"CPU": 1.0}]
    assert size_by_node() == [{"CPU": 8.0}, {"CPU": 2.0}]


class Told:
    """Takes the reason."""

    def __init__(self) -> None:
        self.reason = None
        self.told = threading.Event()

    def __call__(self, reason):
        self.reason = reason
        self.told.set()


def test_more_ranks_come_after_a_checkpoint(monkeypatch):
    monkeypatch.setattr(watch, "LOOK_S", 0.01)
    steps, fail = iter([4, 4, 8]), Told()
    with RankWatch(with_number(1), last_step=lambda: next(steps), fail=fail, room=lambda most: 1):
        assert fail.told.wait(10)
    assert isinstance(fail.reason, RanksChange)
    assert str(fail.reason) == "there is room for 2 train workers instead of 1"
    assert list(steps) == [], "it waited for the checkpoint of step 8"


@pytest.mark.parametrize(("number", "room", "wanted"), [(1, 0, 1), (2, 2, 4), (3, 0, 3), (1, 3, 4)])
def test_a_run_never_gives_up_ranks_that_live(number, room, wanted):
    ranks = RankWatch(
        with_number(number), last_step=int, fail=Told(), room=lambda most: min(room, most)
    )
    assert ranks.wanted() == wanted


class NotReadable:
    """Gives steps of checkpoints, or raises the error that is in the place of one."""

    def __init__(self, *steps) -> None:
        self.steps = list(steps)

    def __call__(self) -> int:
        step = self.steps.pop(0)
        if isinstance(step, Exception):
            raise step
        return step


def test_a_list_of_checkpoints_that_is_being_written_is_read_again():
    steps = NotReadable(4, ResourceError("cut off"), 8)
    fail = Told()
    ranks = RankWatch(with_number(1), last_step=steps, fail=fail, room=lambda most: 1)
    assert [ranks.look() for _ in range(3)] == [False, False, True]
    assert isinstance(fail.reason, RanksChange)


def test_the_users_pause_is_until_there_is_room():
    spec = with_number(1)
    scaling = dataclasses.replace(spec.scaling, elastic_resize_monitor_interval_s=30.0)
    spec = dataclasses.replace(spec, scaling=scaling)
    room = [0, 1, 0]
    ranks = RankWatch(spec, last_step=lambda: 4, fail=Told(), room=lambda most: room.pop(0))
    assert ranks.pause_s == 30
    pauses = []
    while room:
        assert not ranks.look()
        pauses.append(ranks.pause_s)
    assert pauses == [30, watch.LOOK_S, 30]


def test_an_error_that_comes_with_a_lost_node_is_a_change_of_ranks(monkeypatch):
    monkeypatch.setattr(module, "_LOOK_S", 0.01)
    monkeypatch.setattr(module, "_SETTLE_S", 0.05)
    alive = {"one": True, "two": True}
    monkeypatch.setattr(
        module.ray, "nodes", lambda: [{"NodeID": n, "Alive": a} for n, a in alive.items()]
    )
    drained: dict[str, float] = {}
    monkeypatch.setattr(module, "drained_nodes", lambda: drained)

    def fail(spec):
        with lost_nodes_excused(spec):
            alive["two"] = is_alive
            raise TrainError("a rank died")

    is_alive = True
    with pytest.raises(TrainError):
        fail(elastic())
    is_alive = False
    with pytest.raises(RanksChange, match="node two is gone: a rank died"):
        fail(elastic())
    alive["two"] = is_alive = True
    with pytest.raises(TrainError):
        fail(run_spec())

    def drain(spec):
        with lost_nodes_excused(spec):
            drained["two"] = 0.0
            raise TrainError("Ray Train has ended its workers")

    with pytest.raises(RanksChange, match="node two is gone"):
        drain(elastic())
    with pytest.raises(TrainError):
        drain(elastic())  # it was drained before
