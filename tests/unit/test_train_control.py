"""Rank 0's line to the other actors (train/control.py)."""

from __future__ import annotations

import contextlib
import pickle
import types

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, OwnerDiedError, RayError

from ray_apr.config import EvaluationConfig
from ray_apr.core.exceptions import NoEngineError, SyncBrokenError
from ray_apr.data import parts as parts_module
from ray_apr.data.parts import Living
from ray_apr.train import control as control_module
from ray_apr.train.control import RunControl
from tests.fakes import FixedPart


class Sender:
    """A transport of which nothing is seen but these methods."""

    holds_device = False

    def __init__(self, **methods) -> None:
        for name in ("prepare", "deliver", "release"):
            setattr(self, name, lambda: None)
        vars(self).update(methods)


class Actor(FixedPart):
    """Answers each call with its own name, which `ray.get` below notes down."""

    def __init__(self, name: str) -> None:
        super().__init__(self)
        self._name = name

    def __getattr__(self, verb: str):
        said = f"{self._name}.{verb}"
        call = type("Call", (), {"remote": lambda _, *args, **__: (said, *args)})
        return call()


EVALUATE = type("Call", (), {"remote": lambda _, *args, **kwargs: "evaluation"})()
PROGRESS = type("Call", (), {"remote": lambda _: "progress"})()


def control_with(evaluation: EvaluationConfig | None) -> RunControl:
    """What rank 0 has, beside parts that only say what they were asked."""
    return RunControl(
        buffer=None,
        worker=Actor("worker"),
        recorder=None,
        sync_timeout_s=5.0,
        evaluator=Actor("evaluator"),
        evaluation=evaluation,
    )


@pytest.mark.parametrize("evaluates", [True, False])
def test_engines_sleep_once_nothing_is_evaluated(monkeypatch, evaluates):
    waited_for: list[tuple] = []

    def get(ref, timeout):
        waited_for.append(ref)
        return {"stopped_s": 0.0}

    def wait(refs, num_returns, timeout):
        waited_for.extend(refs)
        return refs, []

    monkeypatch.setattr(control_module.ray, "get", get)
    monkeypatch.setattr(control_module.ray, "wait", wait)
    control = control_with(EvaluationConfig(every=2) if evaluates else None)
    sender = Sender()
    control.sleep_engines()
    for version in (0, 1, 2):
        control.broadcast(sender, version)
        waited_for.clear()
        control.sleep_engines()
    evaluation = [("evaluator.wait_until_idle",), ("evaluator.evaluate", 2)] if evaluates else []
    assert waited_for == [*evaluation, ("worker.sleep",)]


def test_a_run_that_has_failed_waits_for_no_evaluation(monkeypatch):
    failures = [None, NoEngineError("no rollout server runs")]
    monkeypatch.setattr(control_module, "failure_of", lambda buffer: failures.pop(0))
    monkeypatch.setattr(control_module.ray, "wait", lambda refs, num_returns, timeout: ([], refs))
    control = control_with(EvaluationConfig(timeout_s=600.0))
    with pytest.raises(NoEngineError):
        control.sleep_engines()
    assert not failures, "the evaluation was under way when it first looked"


@pytest.mark.parametrize("goes_on", [True, False])
def test_the_last_evaluation_is_waited_for_while_it_makes_progress(monkeypatch, caplog, goes_on):
    waits: list[float] = []

    def wait(refs, timeout):
        waits.append(timeout)
        return (refs, []) if len(waits) == 20 else ([], refs)

    def get(ref, timeout=None):
        return len(waits) if goes_on else 7

    monkeypatch.setattr(control_module.ray, "get", get)
    monkeypatch.setattr(control_module.ray, "wait", wait)
    control = RunControl(
        buffer=None,
        worker=Actor("worker"),
        recorder=None,
        sync_timeout_s=5.0,
        evaluator=type("Evaluator", (), {"evaluate": EVALUATE, "progress": PROGRESS})(),
        evaluation=EvaluationConfig(timeout_s=30.0),
    )
    control.evaluate_last(3)
    assert waits == [30.0] * (20 if goes_on else 2)
    assert ("evaluation.timeout_s" in caplog.text) != goes_on


def test_a_sync_is_begun_again_while_responses_have_to_end_first(monkeypatch):
    answers, seen = [False, False, True], []

    def get(ref, timeout):
        seen.append((ref[0], control.is_draining))
        return answers.pop(0) if ref[0] == "worker.begin_sync" else {"stopped_s": 0.0}

    monkeypatch.setattr(control_module.ray, "get", get)
    control = RunControl(buffer=None, worker=Actor("worker"), recorder=None, sync_timeout_s=5.0)
    sender = Sender(deliver=lambda: seen.append(("deliver", None)))
    control.broadcast(sender, 1)
    assert seen == [
        ("worker.begin_sync", False), ("worker.begin_sync", True), ("worker.begin_sync", True),
        ("deliver", None), ("worker.wait_until_received", False), ("worker.finish_sync", False),
    ]  # fmt: skip


@pytest.mark.parametrize(("every", "wanted"), [(10, [12, 21, 30]), (2, list(range(3, 34, 3)))])
def test_versions_that_are_never_synced_are_evaluated_at_the_next_one(monkeypatch, every, wanted):
    """With a sync each third step. Known fault: the first sync took version 2 for evaluated."""
    monkeypatch.setattr(control_module.ray, "get", lambda ref, timeout: {})
    control = RunControl(
        buffer=None, worker=Actor("worker"), recorder=None, sync_timeout_s=5.0,
        evaluator=Actor("evaluator"), evaluation=EvaluationConfig(every=every),
    )  # fmt: skip
    evaluated = []
    for version in range(3, 34, 3):
        control._evaluating = None
        control.broadcast(Sender(), version)
        evaluated += [version] if control._evaluating else []
    assert evaluated == wanted


@pytest.mark.parametrize("holds_device", [True, False])
def test_weights_are_released_once_the_engines_have_them(monkeypatch, holds_device):
    """Those that want the memory back go on afterwards, and are told so."""
    order: list[object] = []

    def begin(version, notice, *, holds_device):
        order.append(("begin", version, pickle.loads(notice), holds_device))
        return ("worker.begin_sync",)

    worker = Actor("worker")
    worker.begin_sync = types.SimpleNamespace(remote=begin)
    monkeypatch.setattr(control_module.ray, "get", lambda ref, timeout: order.append(ref[0]) or {})
    control = RunControl(buffer=None, worker=worker, recorder=None, sync_timeout_s=5.0)
    sender = Sender(
        prepare=lambda: order.append("prepare") or {"gpu": []},
        deliver=lambda: order.append("deliver"),
        release=lambda: order.append("release"),
    )
    sender.holds_device = holds_device
    control.broadcast(sender, 3)
    assert order == [
        "prepare", ("begin", 3, {"gpu": []}, holds_device), "worker.begin_sync", "deliver",
        "worker.wait_until_received", "release", "worker.finish_sync",
    ]  # fmt: skip


def test_weights_that_did_not_arrive_are_not_released(monkeypatch):
    def get(ref, timeout):
        if ref[0] == "worker.wait_until_received":
            raise SyncBrokenError("engine-0: no such file")
        return {}

    released: list[bool] = []
    monkeypatch.setattr(control_module.ray, "get", get)
    control = RunControl(buffer=None, worker=Actor("worker"), recorder=None, sync_timeout_s=5.0)
    with pytest.raises(SyncBrokenError, match="no such file"):
        control.broadcast(Sender(release=lambda: released.append(True)), 3)
    assert not released, "another try needs them"


@pytest.mark.parametrize("all_have_them", [True, False])
def test_a_broadcast_that_breaks_off_is_a_success_if_the_servers_that_live_have_all(
    monkeypatch, all_have_them
):
    def get(ref, timeout):
        if ref[0] == "worker.wait_until_received" and not all_have_them:
            raise SyncBrokenError("engine-0: connection reset")
        return {"stopped_s": 0.25}

    def deliver() -> None:
        raise SyncBrokenError("the weight broadcast broke off")

    monkeypatch.setattr(control_module.ray, "get", get)
    control = RunControl(buffer=None, worker=Actor("worker"), recorder=None, sync_timeout_s=5.0)
    sender = Sender(deliver=deliver)
    expected = contextlib.nullcontext() if all_have_them else pytest.raises(SyncBrokenError)
    with expected as raised:
        assert control.broadcast(sender, 3) == {"stopped_s": 0.25}
    assert all_have_them or "engine-0" in str(raised.value)


@pytest.mark.parametrize("answer", ["none", "joined", "died"])
def test_the_trainer_gives_a_group_up_whose_servers_could_not_join(monkeypatch, answer):
    def connect(endpoint, is_hopeless):
        assert endpoint == ("endpoint", 1, "127.0.0.1", 5.0)
        hopeless.append(is_hopeless())
        if hopeless[0]:
            raise SyncBrokenError("the engine workers did not join")

    def open_(num_engine_workers, *, host, timeout_s):
        return ("endpoint", num_engine_workers, host, timeout_s)

    def get(ref, timeout=None):
        if ref[0] == "worker.weight_group_state":
            return type("State", (), {"num_workers": 1, "first_ranks": {"a": 1}})
        if answer == "died":
            raise RayError("no rollout server runs")

    hopeless: list[bool] = []
    monkeypatch.setattr(control_module.ray, "get", get)
    monkeypatch.setattr(
        control_module.ray, "wait", lambda refs, timeout: ([] if answer == "none" else refs, [])
    )
    monkeypatch.setattr(control_module.ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    control = RunControl(buffer=None, worker=Actor("worker"), recorder=None, sync_timeout_s=5.0)
    expected = pytest.raises(RayError, match="no rollout server runs")
    with expected if answer == "died" else contextlib.nullcontext():
        control.connect(Sender(open=open_, connect=connect), timeout_s=5.0)
    assert hopeless == [answer == "died"]


def test_the_next_step_ends_after_the_look_of_a_checkpoint(monkeypatch):
    """Else the checkpoint would count the next step's samples as trained."""
    waited_for: list[tuple] = []
    taken = types.SimpleNamespace(
        summary=None, stats=None, state=None, samples=("table",), before=None, epoch=1
    )

    def get(ref, timeout):
        waited_for.append(ref)
        return taken if ref == ("worker.capture",) else ref

    monkeypatch.setattr(control_module.ray, "get", get)
    monkeypatch.setattr(control_module.RolloutProgress, "of", lambda *_, **__: "progress")
    control = RunControl(
        buffer=Actor("buffer"), worker=Actor("worker"), recorder=None, sync_timeout_s=5.0
    )
    captured = control.capture()
    assert waited_for == []
    for step in (3, 4):
        control.end_step(step, step + 1)
    assert captured() == ("progress", "table"), "which is not asked for again"
    assert waited_for == [("worker.capture",), "table", ("buffer.ack", 3, 4), ("buffer.ack", 4, 5)]


@pytest.mark.parametrize("fails", [False, True])
def test_the_end_of_a_step_outlives_the_longest_start_of_a_rollout_worker(monkeypatch, fails):
    """known fault: after a minute the run failed, with a worker that had 180 s and more."""
    now, limits = [0.0], set()

    def get(ref, timeout):
        assert ref == ("buffer.ack", 3, 4)
        limits.add(timeout)
        if now[0] >= 200.0 and fails:
            raise NoEngineError("engine-0 does not answer")
        return {"num_turns": 4} if now[0] >= 200.0 else None

    def sleep(seconds):
        now[0] += seconds

    monkeypatch.setattr(control_module.ray, "get", get)
    monkeypatch.setattr(control_module.time, "sleep", sleep)
    control = RunControl(buffer=Actor("buffer"), worker=None, recorder=None, sync_timeout_s=5.0)
    expected = pytest.raises(NoEngineError) if fails else contextlib.nullcontext()
    with expected:
        assert control.end_step(3, 4) == {"num_turns": 4}
    assert now == [200.0] and limits == {60.0}


@pytest.mark.parametrize(
    ("lost", "error"),
    [
        (("worker.capture",), ActorDiedError()),
        ("table", OwnerDiedError("0" * 56, None, "")),
    ],
)
def test_a_worker_that_dies_before_its_samples_are_fetched_is_followed(monkeypatch, lost, error):
    taken = types.SimpleNamespace(
        summary=None, stats=None, state=None, samples=("table",), before=None, epoch=1
    )
    followed: list[BaseException] = []

    def get(ref, timeout):
        if ref == lost and not followed:
            raise error
        return taken if ref == ("worker.capture",) else ref

    monkeypatch.setattr(control_module.ray, "get", get)
    monkeypatch.setattr(control_module.RolloutProgress, "of", lambda *_, **__: "progress")
    worker = Actor("worker")
    worker.follow = lambda error, asked: followed.append(error)
    control = RunControl(buffer=None, worker=worker, recorder=None, sync_timeout_s=5.0)
    assert control.capture()() == ("progress", "table")
    assert followed == [error]


def test_a_look_at_the_rollout_side_outlives_a_second_death(monkeypatch):
    """known fault: a worker that died as its successor had, in the same look, ended the run."""
    taken = types.SimpleNamespace(
        summary=None, stats=None, state=None, samples=("table",), before=None, epoch=1
    )
    followed: list[BaseException] = []
    errors = [ActorDiedError(), ActorDiedError(), ActorUnavailableError("connection reset", None)]

    def get(ref, timeout):
        if ref == ("worker.capture",) and errors:
            raise errors.pop(0)
        return taken if ref == ("worker.capture",) else ref

    monkeypatch.setattr(control_module.ray, "get", get)
    monkeypatch.setattr(control_module.RolloutProgress, "of", lambda *_, **__: "progress")
    worker = Actor("worker")
    worker.follow = lambda error, asked: followed.append(error)
    control = RunControl(buffer=None, worker=worker, recorder=None, sync_timeout_s=5.0)
    assert control.capture()() == ("progress", "table")
    assert len(followed) == 3


def test_a_sync_outlives_a_broken_connection_to_its_worker(monkeypatch):
    """The worker and the sync live: a second one could not begin beside it."""
    verbs = [f"worker.{verb}" for verb in ("begin_sync", "wait_until_received", "finish_sync")]
    seen: list[str] = []

    def get(ref, timeout):
        seen.append(ref[0])
        if seen.count(ref[0]) == 1:
            raise ActorUnavailableError("connection reset", None)
        return {"stopped_s": 0.25}

    monkeypatch.setattr(control_module.ray, "get", get)
    monkeypatch.setattr(parts_module.time, "sleep", lambda seconds: None)
    control = RunControl(buffer=None, worker=Actor("worker"), recorder=None, sync_timeout_s=5.0)
    assert control.broadcast(Sender(), 3) == {"stopped_s": 0.25}
    assert seen == [verb for verb in verbs for _ in range(2)]


def test_a_sync_breaks_off_where_another_thread_has_followed_to_the_next_worker(monkeypatch):
    """known fault: that worker knew nothing of the sync, and the run ended."""
    first = types.SimpleNamespace()
    second = types.SimpleNamespace()
    control = RunControl(buffer=None, worker=FixedPart(first), recorder=None, sync_timeout_s=5.0)

    def verb(name, worker, *, dies=False):
        call = types.SimpleNamespace(remote=lambda *_, **__: (name, worker, dies))
        setattr(worker, name, call)

    def get(ref, timeout):
        name, worker, dies = ref
        asked.append((name, worker is first))
        if dies:
            raise ActorDiedError()
        return {}

    def deliver():  # meanwhile
        control._worker._living = Living(1, second)

    asked: list[tuple[str, bool]] = []
    verb("begin_sync", first)
    verb("wait_until_received", first, dies=True)
    verb("wait_until_received", second)
    monkeypatch.setattr(control_module.ray, "get", get)
    with pytest.raises(SyncBrokenError, match="died in a sync"):
        control.broadcast(Sender(deliver=deliver), 3)
    assert asked == [("begin_sync", True), ("wait_until_received", True)]


def test_a_durable_checkpoint_has_its_span_and_lets_the_journal_before_the_kept_ones_go():
    rows: list[tuple] = []
    asked: list[tuple] = []
    worker = types.SimpleNamespace(call=lambda *call: asked.append(call))
    record = type("Call", (), {"remote": lambda _, kind, row: rows.append((kind, row))})()
    recorder = types.SimpleNamespace(record=record)
    control = RunControl(buffer=None, worker=worker, recorder=recorder, sync_timeout_s=5.0)
    control.checkpoint_written(4, 1000.0, None)
    assert asked == []
    control.checkpoint_written(6, 2000.0, 3)
    assert asked == [("drop_journal_before", 3)]
    (kind, span), _ = rows
    assert kind == "timeline" and span.pop("end_s") > 1000.0
    assert span == {"actor": "checkpoint", "what": "write", "start_s": 1000.0}
