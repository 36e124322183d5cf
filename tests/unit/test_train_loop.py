from __future__ import annotations

import contextlib
import dataclasses
import types

import pytest

from ray_apr.config import EvaluationConfig, TrainConfig
from ray_apr.core.exceptions import StarvedError, TrainError
from ray_apr.data import datasource
from ray_apr.scheduling.orders import Order, OrderKind
from ray_apr.train import loop as loop_module
from ray_apr.train.checkpoint import Progress
from ray_apr.train.residency import AlwaysThere
from ray_apr.train.step import check_batch
from tests.train_batches import make_batches, make_samples

PROGRESS = Progress(step=4, policy_version=3)


@pytest.fixture
def row():
    """Samples of the versions 0 to 2, for step 4 at version 3."""
    (made,) = make_batches(make_samples(), step=4, policy_version=3)
    assert min(made.token_versions) == 0
    return made


def test_a_batch_within_the_bound_is_taken(row):
    check_batch(row, PROGRESS, max_staleness=3)


def test_a_sample_beyond_the_bound_is_refused(row):
    with pytest.raises(TrainError, match="version 0, beyond max_staleness = 2"):
        check_batch(row, PROGRESS, max_staleness=2)


def test_masked_tokens_may_be_of_any_age():
    (row,) = make_batches(make_samples(), step=4, policy_version=3, oldest_version=1)
    assert min(row.token_versions) == 0
    check_batch(row, PROGRESS, max_staleness=2)
    with pytest.raises(TrainError, match="version 1, beyond max_staleness = 1"):
        check_batch(row, PROGRESS, max_staleness=1)


@pytest.mark.parametrize("change", [{"step": 5}, {"policy_version": 4}])
def test_the_row_of_another_step_is_refused(row, change):
    with pytest.raises(TrainError, match="expected the batch of step 4 at version 3"):
        check_batch(dataclasses.replace(row, **change), PROGRESS, max_staleness=9)


class Writer:
    """Notes what is reported: (metrics, whether with a checkpoint, its name)."""

    def __init__(self) -> None:
        self.reports = []
        self.is_closed = False
        self.step = 0

    def report(self, row):
        self.reports.append((row, False, None))

    def save(self, row, progress, *, name=None, is_last=False):
        self.reports.append((row, True, name))
        self.step = progress.step

    def close(self):
        self.is_closed = True


def recorder(told):
    """A stand-in for the handle of one, which notes what starts."""
    record = types.SimpleNamespace(remote=lambda _kind, row: told.append(row["doing"]))
    return types.SimpleNamespace(record=record)


@pytest.fixture
def loop(monkeypatch):
    """A train loop whose steps only count, and what it reported."""
    loop = object.__new__(loop_module._TrainLoop)
    loop._control = types.SimpleNamespace(
        grant=lambda *_: None,
        end_step=lambda *_: {},
        record_step=lambda row: None,
        record_span=lambda *_: None,
        wait_until_recorded=lambda: None,
    )
    loop._rank = 0
    loop._spec = types.SimpleNamespace(
        train=TrainConfig(),
        algorithm=None,
        model="none",
        max_response_tokens=8,
        evaluation=None,
        recorder=recorder([]),
    )
    loop._publisher = types.SimpleNamespace(after_step=lambda *_, **__: {}, close=lambda: None)
    loop._learner = types.SimpleNamespace(train=lambda batch: {"loss": 1.0})
    loop._residency = AlwaysThere()
    loop._gate, loop._row, loop._started_at = None, {}, 0.0
    loop._is_told = False
    loop._progress = Progress(step=0, policy_version=0)
    loop._writer = Writer()
    loop._reports = loop._writer.reports
    monkeypatch.setattr(loop, "_next_batch", lambda: (None, 0.0))
    monkeypatch.setattr(loop_module, "freeze_heap", lambda: None)  # this process goes on
    return loop


@pytest.mark.parametrize(
    ("train", "steps"),
    [
        ({"steps": 5}, [4]),
        ({"steps": 5, "report_every": 1}, [0, 1, 2, 3, 4]),
        ({"steps": 5, "report_every": 2, "checkpoint_every": 3}, [1, 2, 3, 4]),
    ],
)
def test_every_so_many_steps_are_reported_and_the_last_one(loop, train, steps):
    loop._train = TrainConfig(**train)
    loop.run()
    assert [metrics["step"] for metrics, _, _ in loop._reports] == steps
    assert loop._writer.is_closed


def test_what_a_train_worker_begins_with_is_spared_from_garbage_collections(loop, monkeypatch):
    did = []
    loop._train = TrainConfig(steps=2)
    monkeypatch.setattr(loop, "_next_batch", lambda: did.append("wait") or (None, 0.0))
    monkeypatch.setattr(loop_module, "freeze_heap", lambda: did.append("freeze"))
    loop.run()
    assert did == ["freeze", "wait", "wait"]


def test_a_run_without_a_step_left_sends_and_evaluates_its_last_version(loop):
    done = []
    loop._train = TrainConfig(steps=3)
    loop._progress = Progress(step=3, policy_version=3)
    loop._spec.start_timeout_s = 60.0
    loop._publisher.publish = lambda version, timeout_s: done.append(("send", version, timeout_s))
    loop._control.evaluate_last = lambda version: done.append(("evaluate", version))
    loop.run()
    assert not done, "it evaluates nothing"
    loop._spec.evaluation = EvaluationConfig()
    loop.run()
    assert done == [("send", 3, 60.0), ("evaluate", 3)] and not loop._reports


def test_each_step_may_be_profiled(loop, monkeypatch):
    steps = []
    monkeypatch.setattr(
        loop_module, "profiled", lambda step, *_: steps.append(step) or contextlib.nullcontext()
    )
    loop._train = TrainConfig(steps=2)
    loop.run()
    assert steps == [0, 1]


def row_of(order):
    return {name: value for name, (value,) in datasource._row_of(order).items()}


def test_a_row_without_a_batch_has_the_weights_sent_again_before_the_step(loop, row, monkeypatch):
    monkeypatch.undo()
    loop._rank, loop._progress, sent = 0, PROGRESS, []
    loop._spec.partial_rollout = types.SimpleNamespace(max_staleness=3)
    loop._publisher.send_again = lambda lost, version: sent.append((lost, version))
    again = row_of(Order(OrderKind.SEND_WEIGHTS, 4, 3))
    loop._rows = iter([again, again, row.to_row()])
    batch, _ = loop._next_batch()
    assert (batch.step, sent) == (4, [(3, 3), (3, 3)])
    with pytest.raises(StarvedError, match=r"ended before step 4.*that read it has died"):
        loop._next_batch()


def test_a_checkpoint_is_ordered_between_two_steps_and_written_once(loop, row, monkeypatch):
    monkeypatch.undo()
    loop._rank, loop._progress, loop._row = 0, PROGRESS, {"step": 3}
    loop._spec.partial_rollout = types.SimpleNamespace(max_staleness=3)
    order = row_of(Order(OrderKind.CHECKPOINT, 4))
    loop._rows = iter([order, order, row.to_row()])
    batch, _ = loop._next_batch()
    assert (batch.step, loop._reports) == (4, [({"step": 3}, True, None)])


def test_a_loop_behind_a_gate_does_what_is_ordered(loop):
    loop._train = TrainConfig(steps=3)
    orders, stood_at = ["begin", None, None, "saved", None], []

    def next_order():
        stood_at.append(loop._progress.step)
        return orders.pop(0)

    loop._gate = types.SimpleNamespace(next=next_order)
    loop.run()
    assert stood_at == [0, 0, 1, 2, 2] and orders == []
    begin, saved, last = loop._reports
    assert begin == ({}, True, "begin")
    assert saved[0]["step"] == 1 and saved[1:] == (True, "saved")
    assert last[0]["step"] == 2 and last[1:] == (True, None)


def test_engines_sleep_for_a_checkpoint_on_devices_that_they_share(loop):
    loop._train, turns = TrainConfig(steps=3), []
    loop._progress = Progress(step=2, policy_version=2)
    loop._residency = types.SimpleNamespace(
        takes_turns=True, enter=lambda: turns.append("trainer's")
    )
    loop._publisher.publish = lambda version, timeout_s: turns.append(("engines'", version))
    orders = ["saved", None]
    loop._gate = types.SimpleNamespace(next=lambda: orders.pop(0))
    loop._follow_orders()
    assert turns == ["trainer's", ("engines'", 2)]
    assert loop._reports == [({}, True, "saved")]


@pytest.mark.parametrize(
    "shares_device, takes_turns", [(True, False), (True, True), (False, False)]
)
def test_the_model_is_loaded_after_the_engines_start_on_a_device_that_they_share(
    monkeypatch, shares_device, takes_turns
):
    """An engine measures what is free when it starts; the processes of both start together. Where
    it leaves room for a trainer, what that will need is compiled meanwhile. The stream of batches
    begins before all of it."""
    done, told = [], []

    class Loaded(Exception):
        """As far as a test needs it."""

    def load(*_, is_compiled):
        done.append("load")
        assert is_compiled == ("compile" in done)
        raise Loaded

    context = types.SimpleNamespace(get_world_rank=lambda: 0)
    control = types.SimpleNamespace(wait_for_engines=lambda: done.append("engines"))
    monkeypatch.setattr(loop_module.ray.train, "get_context", lambda: context)
    monkeypatch.setattr(loop_module, "_make_control", lambda _: control)
    monkeypatch.setattr(loop_module, "_wait_limit_s", lambda _: 5.0)
    monkeypatch.setattr(loop_module.dist, "new_group", lambda **_: "ranks")
    monkeypatch.setattr(loop_module.dist, "barrier", done.append)
    monkeypatch.setattr(loop_module.ray.train.torch, "get_device", lambda: None)
    monkeypatch.setattr(loop_module.ray.train, "get_dataset_shard", lambda name: name)
    monkeypatch.setattr(loop_module, "rows_of", done.append)
    monkeypatch.setattr(loop_module, "Learner", load)

    def compile_ahead(_spec, _device, span):
        with span("compile"):
            done.append("compile")

    monkeypatch.setattr(loop_module, "compile_ahead", compile_ahead)
    control.record_span = lambda *_: None
    spec = types.SimpleNamespace(
        train=None, started_at=0.0, gate=None, shares_device=shares_device,
        takes_turns=takes_turns, recorder=recorder(told),
    )  # fmt: skip
    with pytest.raises(Loaded):
        loop_module._TrainLoop(spec)
    ahead = ["compile"] if shares_device and not takes_turns else []
    waited = ["engines", "ranks"] if shares_device else []
    assert done == ["rank0", *ahead, *waited, "load"]
    assert told == ahead + (["wait for the rollout servers"] if shares_device else [])


def test_the_last_checkpoint_is_told_of(monkeypatch):
    """Its writing takes seconds, in which a run showed what the rollout side waited for."""
    told, loop = [], object.__new__(loop_module._TrainLoop)
    loop._control, loop._train = object(), TrainConfig(checkpoint_every=1)
    loop._spec = types.SimpleNamespace(recorder=recorder(told))
    loop._progress = Progress(step=1, policy_version=1)
    monkeypatch.setattr(loop, "_checkpoint", lambda *_, **__: told.append("written"), raising=False)
    loop._report({}, is_last=False)
    assert told == ["written"]
    loop._report({}, is_last=True)
    assert told == ["written", "write the last checkpoint", "written"]


def test_what_comes_after_the_last_checkpoint_is_told_of(loop):
    """known fault: lines of a run said until its end, which may be minutes away, that the last
    checkpoint is written."""
    told: list[str] = []
    loop._train, loop._spec.recorder = TrainConfig(steps=1), recorder(told)
    loop._publisher.publish = lambda version, timeout_s: told.append("weights")
    loop._control.evaluate_last = lambda version: told.append("evaluated")
    loop._writer.close = lambda: told.append("durable")
    loop.run()
    ends = ["write the last checkpoint", "durable", "end"]
    assert told == ["", *ends]
    told.clear()
    loop._progress, loop._spec.evaluation = Progress(step=0, policy_version=0), EvaluationConfig()
    loop.run()
    evaluates = ["weights", "wait for the last evaluation", "evaluated"]
    assert told == ["", ends[0], *evaluates, *ends], "what may be waited for after an evaluation"


def test_the_first_step_and_long_ones_say_what_they_do(loop, monkeypatch):
    """Lines of a run that shows no step have nothing else to name, where a batch is there."""
    told: list[str] = []
    loop._train, loop._spec.recorder = TrainConfig(steps=5), recorder(told)
    loop._is_told = True
    long = iter([False, True, True, False, False])
    monkeypatch.setattr(loop_module, "_LONG_S", 0.0)

    def train(batch):
        loop_module._LONG_S = 0.0 if next(long) else 1e9
        return {"loss": 1.0}

    loop._learner = types.SimpleNamespace(train=train)
    loop._train_steps()
    step = [["wait for a batch", f"train step {number}"] for number in range(1, 6)]
    assert told == [*step[0], "", *step[2], *step[3], "", "write the last checkpoint"]
