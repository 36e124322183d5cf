"""Engines that come and go while a run trains (run/scaling.py, run/scale_requests.py)."""

from __future__ import annotations

import threading
import time
import types
from pathlib import Path

import pytest
from ray.exceptions import RayTaskError

from ray_apr.cli import main as cli
from ray_apr.config import RolloutConfig
from ray_apr.core.exceptions import (
    APRError,
    ConfigError,
    EngineUnavailableError,
    ResourceError,
    StarvedError,
)
from ray_apr.data.fence import Fence
from ray_apr.run import scale_requests
from ray_apr.run.resume import hold_folder
from ray_apr.run.scale_requests import (
    ScaleAnswer,
    ScaleRequest,
    answer,
    ask,
    forget,
    scale,
    take,
    withdraw,
)
from ray_apr.run.scaling import EngineScaling, as_scaled
from ray_apr.serve import handle
from ray_apr.serve.handle import num_of_engines
from tests.run_specs import run_spec


class Cluster:
    """What a run deploys and tells, in order; what fails says so in `fail`."""

    def __init__(self, rollout: RolloutConfig | None = None, *, num_clients: int = 2) -> None:
        self.done: list[tuple] = []
        self.fail: dict[tuple, Exception] = {}
        self.room = 8
        self.closing = threading.Event()
        spec = run_spec(rollout=rollout or RolloutConfig(num_replicas=2))
        self.scaling = EngineScaling(
            spec,
            deploy=lambda number, behind: self._do("deploy", number, behind),
            tell=[lambda n, i=i: self._do(f"client {i}", n) for i in range(num_clients)],
            check_room=self._check_room,
            started_at=time.time() - 5.0,
            closing=self.closing,
        )

    def _do(self, *step) -> None:
        self.done.append(step)
        if step in self.fail:
            raise self.fail[step]

    def _check_room(self, number: int) -> None:
        if number > self.room:
            raise ConfigError("rollout.num_replicas", number, "the cluster has 8 CPUs")

    def serve(self, replicas) -> ScaleAnswer:
        return self.scaling.serve(ScaleRequest(request_id="r", replicas=replicas))


def test_engines_run_before_clients_know_them_and_are_let_go_before_they_end():
    cluster = Cluster()
    given = cluster.serve(8)
    assert (given.outcome, given.before, given.after, given.reason) == ("done", 2, 8, "")
    assert 5.0 <= given.time_s < 60.0
    assert cluster.done == [("deploy", 8, 2), ("client 0", 8), ("client 1", 8)]
    cluster.done.clear()
    assert cluster.serve(2).outcome == "done"
    assert cluster.done == [("client 0", 2), ("client 1", 2), ("deploy", 2, 2)]


def test_the_ingress_is_told_while_all_engines_run():
    cluster = Cluster(RolloutConfig(num_replicas=2, http={"port": 1}), num_clients=1)
    cluster.serve(3)
    cluster.serve(2)
    assert cluster.done == [
        ("deploy", 3, 2), ("client 0", 3), ("deploy", 3, 3),
        ("client 0", 2), ("deploy", 3, 2), ("deploy", 2, 2),
    ]  # fmt: skip


@pytest.mark.parametrize("replicas", [0, -1, float("nan"), 2.0, True, None, "8", "{"])
def test_what_is_no_number_of_engines_is_refused(replicas):
    cluster = Cluster()
    given = cluster.serve(replicas)
    assert (given.outcome, given.after, cluster.done) == ("refused", 2, [])
    assert "give a whole number, at least 1" in given.reason


def test_the_number_that_there_is_is_done_at_once():
    cluster = Cluster()
    assert (cluster.serve(2).outcome, cluster.done) == ("done", [])


def test_what_the_cluster_has_no_room_for_is_refused_and_nothing_is_touched():
    cluster = Cluster()
    given = cluster.serve(9)
    assert (given.outcome, given.after, cluster.done) == ("refused", 2, [])
    assert "the cluster has 8 CPUs" in given.reason
    cluster.room = 1
    assert cluster.serve(1).outcome == "done", "fewer always fit"


def test_engines_that_share_gpus_with_train_workers_stay():
    engine = {"device": "cuda", "placement": "colocated"}
    cluster = Cluster(RolloutConfig(num_replicas=2, engine=engine))
    given = cluster.serve(1)
    assert (given.outcome, cluster.done) == ("refused", [])
    assert "neither come nor go" in given.reason
    assert cluster.serve(2).outcome == "done"


def test_numbers_beyond_those_of_autoscaling_are_refused():
    engine = {"autoscaling": {"min_replicas": 2, "max_replicas": 4}}
    cluster = Cluster(RolloutConfig(num_replicas=2, engine=engine))
    for number in (1, 5):
        given = cluster.serve(number)
        assert (given.outcome, cluster.done) == ("refused", [])
        assert "between min_replicas and max_replicas" in given.reason


LATE = ResourceError("not ready after 600 s")
UP = [("deploy", 4, 2), ("client 0", 4), ("client 1", 4)]
DOWN = [("client 0", 1), ("client 1", 1), ("deploy", 1, 1)]
BACK = {
    ("deploy", 4, 2): ("deploy", 2, 2), ("deploy", 1, 1): ("deploy", 2, 1),
    ("client 0", 4): ("client 0", 2), ("client 0", 1): ("client 0", 2),
    ("client 1", 4): ("client 1", 2), ("client 1", 1): ("client 1", 2),
}  # fmt: skip
"""What undoes a step."""


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize(("replicas", "steps"), [(4, UP), (1, DOWN)])
def test_what_fails_half_done_is_undone_the_last_step_first(replicas, steps, number):
    cluster = Cluster()
    cluster.fail[steps[number]] = LATE
    given = cluster.serve(replicas)
    assert (given.outcome, given.before, given.after) == ("undone", 2, 2)
    assert given.reason == "not ready after 600 s"
    done = steps[: number + 1]
    assert cluster.done == [*done, *(BACK[step] for step in reversed(done))]
    cluster.fail.clear()
    assert cluster.serve(replicas).outcome == "done"


def test_an_undoing_that_fails_does_not_end_the_others_and_is_told():
    cluster = Cluster()
    dead = RayTaskError("scale", "traceback", EngineUnavailableError("engine-1 is dead"))
    cluster.fail = {UP[2]: dead.as_instanceof_cause(), ("client 0", 2): RuntimeError("gone")}
    given = cluster.serve(4)
    assert given.reason == "engine-1 is dead; not undone: RuntimeError: gone"
    assert cluster.done[-1] == ("deploy", 2, 2)


def test_nothing_is_undone_of_what_is_taken_away():
    cluster = Cluster()
    cluster.fail[UP[1]] = ResourceError("the run ends")
    cluster.closing.set()
    given = cluster.serve(4)
    assert (given.outcome, given.reason) == ("refused", "the run ends")
    assert cluster.done == UP[:2]


def test_a_driver_that_has_lost_the_run_answers_nobody(folder, monkeypatch):
    cluster = Cluster()
    monkeypatch.setattr(type(cluster.scaling._spec), "folder", folder)
    monkeypatch.setattr("ray_apr.run.scaling._LOOK_S", 0.01)
    asked = [ScaleRequest(request_id="7-a", replicas=2), ScaleRequest(request_id="7-b", replicas=2)]

    def take_next(folder):
        if len(asked) == 1:
            cluster.closing.set()
        return asked.pop()

    monkeypatch.setattr("ray_apr.run.scaling.take", take_next)
    Fence("another", str(folder)).take()
    cluster.scaling.follow()
    assert not asked and not (folder / "engines.jsonl").exists()


@pytest.mark.parametrize(("by", "num_left"), [("command", 1), ("autoscaling", 0)])
def test_what_the_end_of_an_attempt_cuts_off_waits_for_the_next_one(
    folder, monkeypatch, by, num_left
):
    cluster = Cluster()
    monkeypatch.setattr(type(cluster.scaling._spec), "folder", folder)
    monkeypatch.setattr("ray_apr.run.scaling._LOOK_S", 0.01)
    asked = ScaleRequest(request_id="7-a", replicas=4, by=by)
    monkeypatch.setattr("ray_apr.run.scaling.take", lambda folder: asked)

    def ends(number, behind):
        cluster.closing.set()
        raise ResourceError("the run ends")

    monkeypatch.setattr(cluster.scaling, "_deploy", ends)
    cluster.scaling.follow()
    assert not (folder / "engines.jsonl").exists()
    left = [take(folder) for _ in range(num_left)]
    assert left == [ScaleRequest(request_id="7-a", replicas=4)] * num_left
    assert take(folder) is None


# -- requests --------------------------------------------------------------------------------------


def given(request_id: str, **told) -> ScaleAnswer:
    values = {"outcome": "done", "at": 10.0, "time_s": 1.0, "before": 2, "after": 4, "seconds": 1.0}
    return ScaleAnswer(request_id=request_id, **values | told)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.setattr(scale_requests, "_LOOK_S", 0.01)
    return tmp_path


def test_requests_are_taken_in_their_order_and_each_one_once(folder):
    assert take(folder) is None
    ids = [ask(folder, replicas) for replicas in (4, 2, 8)]
    assert withdraw(folder, ids[1])
    assert not withdraw(folder, ids[1])
    assert [take(folder), take(folder), take(folder)] == [
        ScaleRequest(request_id=ids[0], replicas=4),
        ScaleRequest(request_id=ids[2], replicas=8),
        None,
    ]
    ask(folder, 3)
    forget(folder)
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "replicas"), [("{", "{"), ("[3]", [3]), ("{}", None), ('{"replicas": "3"}', "3")]
)
def test_a_file_that_somebody_wrote_by_hand_is_a_request_to_refuse(folder, text, replicas):
    (folder / "scale-me.json").write_text(text)
    assert take(folder) == ScaleRequest(request_id="me", replicas=replicas)


def test_the_run_is_asked_and_its_answer_comes(folder, monkeypatch, capsys):
    cluster = Cluster()
    monkeypatch.setattr(type(cluster.scaling._spec), "folder", folder)
    monkeypatch.setattr("ray_apr.run.scaling._LOOK_S", 0.01)
    thread = threading.Thread(target=cluster.scaling.follow)
    with hold_folder(folder):
        thread.start()
        try:
            assert cli.main(["scale", str(folder), "--replicas", "4"]) == 0
            assert cli.main(["scale", str(folder), "--replicas", "40"]) == 1
            assert cli.main(["scale", str(folder), "--replicas", "0"]) == 2
        finally:
            cluster.closing.set()
            thread.join(timeout=10)
    out, err = capsys.readouterr()
    assert out.startswith("engines: 2 → 4 in 0.0 s")
    assert "refused: rollout.num_replicas = 40: the cluster has 8 CPUs; engines: 4" in err
    assert {path.name for path in folder.iterdir()} == {".lock", "engines.jsonl"}


def test_a_folder_that_no_process_trains_is_refused_at_once(folder, capsys):
    for _ in range(2):
        assert cli.main(["scale", str(folder), "--replicas", "4", "--timeout", "60"]) == 2
        assert "no process trains a run there now" in capsys.readouterr().err
        with hold_folder(folder):  # a run that has ended
            pass
    assert [path.name for path in folder.iterdir()] == [".lock"]


@pytest.mark.parametrize("argv", [["--replicas", "nan"], ["--replicas", "2", "--timeout", "nan"]])
def test_arguments_that_are_no_numbers_are_wrong(folder, argv):
    with pytest.raises(SystemExit) as caught:
        cli.main(["scale", str(folder), *argv])
    assert caught.value.code == 2


def test_a_run_that_ends_is_not_waited_for(folder):
    held = hold_folder(folder)
    held.__enter__()
    threading.Timer(0.2, held.__exit__, (None, None, None)).start()
    with pytest.raises(APRError, match="has ended"):
        scale(folder, 4, timeout_s=60.0)
    assert take(folder) is None, "it is withdrawn"


def test_the_last_answer_of_a_run_that_ends_is_heard(folder, monkeypatch):
    monkeypatch.setattr(scale_requests, "is_held", lambda folder: not answers)
    answers: list[str] = []

    def answer_it(folder, replicas):
        request_id = ask(folder, replicas)
        answer(folder, given(request_id))
        answers.append(request_id)
        return request_id

    monkeypatch.setattr(scale_requests, "ask", answer_it)
    assert scale(folder, 4, timeout_s=60.0).after == 4


def test_a_wait_has_a_limit_and_says_what_becomes_of_the_request(folder):
    with hold_folder(folder):
        with pytest.raises(StarvedError, match=r"within 0\.05 s: it is withdrawn"):
            scale(folder, 4, timeout_s=0.05)
        taken: list[ScaleRequest | None] = []
        threading.Timer(0.05, lambda: taken.append(take(folder))).start()
        with pytest.raises(StarvedError, match=r"the run is at it; see engines\.jsonl"):
            scale(folder, 4, timeout_s=0.3)
        assert taken[0] is not None


def test_a_restart_begins_with_the_engines_that_there_were(folder, monkeypatch):
    spec = run_spec(rollout=RolloutConfig(num_replicas=2))
    monkeypatch.setattr(type(spec), "folder", folder)
    assert as_scaled(spec, since=0.0) is spec
    answer(folder, given("a", at=5.0, after=8))
    answer(folder, given("b", at=20.0, after=4))
    answer(folder, given("c", at=21.0, after=4, outcome="undone"))
    with (folder / "engines.jsonl").open("a") as file:
        file.write('{"half a li')
    assert as_scaled(spec, since=10.0).rollout.num_replicas == 4
    assert as_scaled(spec, since=30.0) is spec, "a command that goes on has settings of its own"


def test_serve_knows_how_many_engines_there_are(monkeypatch):
    deployed = {"engine-0": None, "engine-1": None, "RolloutIngress": None}
    apps = {"run": types.SimpleNamespace(deployments=deployed)}
    status = types.SimpleNamespace(applications=apps)
    monkeypatch.setattr(handle.serve, "status", lambda: status)
    assert (num_of_engines("run"), num_of_engines("other")) == (2, 0)


def test_a_restart_rests_where_the_number_was_ordered(folder, monkeypatch):
    engine = {"autoscaling": {"max_replicas": 4}}
    spec = run_spec(rollout=RolloutConfig(engine=engine))
    monkeypatch.setattr(type(spec), "folder", folder)
    answer(folder, given("a", after=3, by="autoscaling", why="the trainer starves"))
    rollout = as_scaled(spec, since=0.0).rollout
    assert (rollout.num_replicas, rollout.engine.autoscaling) == (
        3,
        spec.rollout.engine.autoscaling,
    )
    answer(folder, given("b", after=2))
    rollout = as_scaled(spec, since=0.0).rollout
    assert (rollout.num_replicas, rollout.engine.autoscaling) == (2, None)
