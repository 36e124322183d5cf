"""What a person reads of a run that failed (causes.py, final.py, cli.py, train/loop.py)."""

from __future__ import annotations

import json
import signal
import threading
import time
import types

import pyarrow as pa
import pytest
from ray.exceptions import ActorDiedError, OutOfDiskError, RayTaskError
from ray.train.v2.api.exceptions import ControllerError, WorkerGroupError

from ray_apr.cli import main as cli
from ray_apr.core.exceptions import (
    APRError,
    ResourceError,
    StarvedError,
    Stopped,
    TrainError,
    WeightSyncError,
)
from ray_apr.core.ledger import LedgerSnapshot
from ray_apr.data.encoding import EncodedPrompts
from ray_apr.data.fence import Fence
from ray_apr.data.resumption import Begin, Counters, RolloutSummary
from ray_apr.data.store import put
from ray_apr.run import controller, progress
from ray_apr.run.actors import Actors
from ray_apr.run.causes import cause_of, death_of, write_error_log
from ray_apr.run.controller import _Parts
from ray_apr.run.failed_groups import FailedGroups
from ray_apr.run.final import final_figures, write_end_of_start
from ray_apr.run.folder import add_row
from ray_apr.run.side import RolloutSide
from ray_apr.scheduling.stock import BufferStats
from ray_apr.train import loop as loop_module
from ray_apr.train.checkpoint import Progress
from ray_apr.train.residency import AlwaysThere
from tests.fakes import evaluation_row
from tests.run_specs import run_spec

STATS = BufferStats(
    ledger=LedgerSnapshot(buffered=5, trained=40, discarded={"masked": 3}), buffered_samples=0,
    trained_samples=12, evicted_samples=0, read_ahead_max=4, held_groups=(),
)  # fmt: skip
SUMMARY = RolloutSummary(
    ledger=LedgerSnapshot(interrupted=2), samples_interrupted=1, samples_resumed=1,
    prompts_position=9, num_prompts=4, pending_prompts=(), engines=(), sampled={},
)  # fmt: skip


class OfAWorker(Exception):
    """What Ray Train makes of an error in a train worker."""

    def __init__(self, error: BaseException) -> None:
        super().__init__("Traceback (most recent call last):\n  of the worker")
        self._base_exc = error


def of_a_task(error: Exception) -> Exception:
    return RayTaskError("take", "Traceback (most recent call last):\n  far away", error)


def group_error(**failures: Exception) -> WorkerGroupError:
    ranks = {int(name.removeprefix("rank")): error for name, error in failures.items()}
    return WorkerGroupError("[Rank 0 Error Snippet]: Traceback ...", ranks)


@pytest.mark.parametrize(
    "error",
    [
        group_error(rank0=OfAWorker(WeightSyncError("the sender died"))),
        group_error(rank0=OfAWorker(of_a_task(of_a_task(WeightSyncError("the sender died"))))),
        group_error(
            rank1=OfAWorker(WeightSyncError("the sender died")),
            rank0=OfAWorker(RuntimeError("Connection closed by peer")),
        ),
        ControllerError(of_a_task(WeightSyncError("the sender died"))),
    ],
)
def test_the_cause_is_ours_and_comes_without_what_ray_puts_around_it(error):
    """The error was a truncated traceback of Ray Train with ours in its middle."""
    cause = cause_of(error)
    assert type(cause) is WeightSyncError and str(cause) == "the sender died"


def test_a_cause_that_is_not_ours_is_told_in_one_line():
    error = group_error(rank0=OfAWorker(RuntimeError("CUDA out of memory.\nTried to allocate")))
    cause = cause_of(error)
    assert isinstance(cause, TrainError)
    assert str(cause) == "training failed: RuntimeError: CUDA out of memory."


def test_the_log_begins_with_the_cause_and_has_the_traceback_of_each_worker(tmp_path):
    error = group_error(rank3=OfAWorker(WeightSyncError("the sender died")))
    write_error_log(tmp_path / "error.log", error, cause_of(error))
    text = (tmp_path / "error.log").read_text()
    assert text.startswith("WeightSyncError: the sender died\n")
    assert "train worker 3:\nTraceback (most recent call last):\n  of the worker" in text


def test_the_death_of_an_actor_is_told_by_its_reason():
    died = ActorDiedError()
    died.error_msg = "The actor died.\n\tclass_name: X\nThe actor is dead because of a signal."
    assert death_of(died) == "The actor is dead because of a signal."
    unwell = RuntimeError("A worker health check failed.")
    unwell.health_check_failure = died  # as Ray Train has it
    of_a_worker = group_error(rank0=unwell)
    # known fault: where another rank than the first died, its peer's lost connection was told
    peer = OfAWorker(RuntimeError("Connection closed by peer"))
    for error in (died, of_a_worker, group_error(rank0=peer, rank1=unwell)):
        said = "training failed: a process of it died: The actor is dead because of a signal."
        assert str(cause_of(error)) == said


def test_an_actor_that_could_not_be_made_is_told_by_what_was_raised():
    """known fault: of a reward whose module the workers have not, the run said six times that an
    error was raised, and never which."""
    died = ActorDiedError()
    died.error_msg = (
        "The actor died because of an error raised in its creation task, ray::x.__init__()\n"
        "  At least one of the input arguments for this task could not be computed:\n"
        "ModuleNotFoundError: No module named 'helpers'\n"
    )
    assert death_of(died) == (
        "The actor died because of an error raised in its creation task: "
        "ModuleNotFoundError: No module named 'helpers'"
    )


def test_a_full_object_store_is_told_with_what_helps(monkeypatch):
    """The rollout worker raised Ray's error as its own, in which nobody is told what to do."""
    full = OutOfDiskError("Local disk is full")

    def no_room(value):
        raise full

    monkeypatch.setattr("ray.put", no_room)
    with pytest.raises(ResourceError, match=r"object store is full.*make room.*--resume") as raised:
        put(b"a group")
    of_a_read_task = group_error(rank0=OfAWorker(of_a_task(full)))
    for error in (raised.value, of_a_read_task):
        assert str(cause_of(error)) == str(raised.value)
    assert "\n" not in str(raised.value)


class Handle:
    def __init__(self, **answers) -> None:
        for verb, answer in answers.items():
            setattr(self, verb, types.SimpleNamespace(remote=lambda *_, answer=answer: answer))


def get(answer, timeout=None):
    if isinstance(answer, ActorDiedError):
        raise answer
    return answer


def parts_of(monkeypatch, tmp_path, **actors) -> _Parts:
    monkeypatch.setattr("ray_apr.run.controller.ray.get", get)
    monkeypatch.setattr("ray_apr.run.actors.ray.kill", lambda actor: None)
    monkeypatch.setattr("ray_apr.run.actors.stop_rollout_servers", lambda name: None)
    monkeypatch.setattr("ray_apr.run.actors.end_serve", lambda name=None: True)
    parts = object.__new__(_Parts)
    parts.spec = run_spec()
    monkeypatch.setattr(type(parts.spec), "folder", tmp_path)
    parts._begin = Begin()
    parts._start_error = parts._evaluator = parts._setup_s = parts._scaling = None
    parts._started_at, parts._actors = 0.0, Actors(parts.spec)
    parts.recorder = actors["recorder"]
    parts._side = types.SimpleNamespace(
        buffer=actors["buffer"], worker=actors["worker"], begin=Begin(),
        stop_watching=lambda: None, join=lambda: None, spec_now=parts.spec.with_replicas(3),
        failure=None,
    )  # fmt: skip
    parts._side.first_error = lambda: RolloutSide.first_error(parts._side)
    return parts


BUFFER = Handle(failure=None, stats=STATS, close=None, fail=None, finish_samples=None)
RECORDER = Handle(num_steps=3, close=None, record=None)


def test_a_failed_run_says_why_in_one_line_that_names_the_log(monkeypatch, tmp_path, capsys):
    starved = StarvedError("trainer starved: step 7 waited")
    buffer = Handle(failure=starved, stats=STATS, close=None)
    worker = Handle(stop=SUMMARY)
    parts = parts_of(monkeypatch, tmp_path, buffer=buffer, worker=worker, recorder=RECORDER)
    reason = parts._reason(group_error(rank0=OfAWorker(RuntimeError("the stream broke"))))
    assert reason is starved
    monkeypatch.setattr(cli, "_doctor", lambda args: (_ for _ in ()).throw(reason))
    assert cli.main(["doctor"]) == 1
    log = tmp_path / "error.log"
    said = f"error: StarvedError: trainer starved: step 7 waited (traceback: {log})\n"
    assert capsys.readouterr().err == said
    assert "train worker 0:\nTraceback" in log.read_text()


def test_what_a_run_was_ended_with_is_its_reason_though_the_buffer_died(monkeypatch, tmp_path):
    buffer = Handle(failure=ActorDiedError())
    parts = parts_of(monkeypatch, tmp_path, buffer=buffer, worker=None, recorder=RECORDER)
    died = group_error(rank0=OfAWorker(RuntimeError("the stream broke")))
    assert str(parts._reason(died)).startswith("the sample buffer died")
    parts._side.failure = StarvedError("the rollout worker died 6 times")
    assert parts._reason(died) is parts._side.failure


def test_a_run_without_its_worker_still_writes_what_is_known(monkeypatch, tmp_path):
    """final.json was missing."""
    worker = Handle(stop=ActorDiedError())
    parts = parts_of(monkeypatch, tmp_path, buffer=BUFFER, worker=worker, recorder=RECORDER)
    parts._actors.prompts = EncodedPrompts(
        tables=[], schema=pa.schema({}), num_prompts=9, num_dropped=2
    )
    parts.close(APRError("the rollout worker died:\nkilled"))
    text = (tmp_path / "final.json").read_text()
    assert '"status": "failed"' in text and '"ledger_error": null' in text
    assert '"error": "APRError: the rollout worker died: killed"' in text
    assert '"samples_trained": 12' in text
    assert '"num_prompts_dropped": 2' in text
    assert '"num_replicas": 3' in text, "as many engines as there were at the end"


@pytest.mark.parametrize("error", [None, Stopped(), APRError("the buffer died")])
def test_the_end_of_a_run_whose_folder_was_taken_meanwhile_is_not_in_it(
    monkeypatch, tmp_path, error
):
    """known fault: one that was suspended while it ended, or that ended of something else, said in
    the folder of the run that had gone on how that had ended."""
    worker = Handle(stop=SUMMARY)
    parts = parts_of(monkeypatch, tmp_path, buffer=BUFFER, worker=worker, recorder=RECORDER)
    parts._show = lambda line: None
    Fence("of the next start", str(tmp_path)).take()
    parts.close(error)
    write_end_of_start(parts.spec, Begin(), error or APRError("no room"), 1.0)
    assert [file.name for file in tmp_path.iterdir()] == ["owner.json"]


def test_actors_are_killed_although_the_servers_cannot_be_stopped(monkeypatch, tmp_path):
    killed: list[str] = []
    parts = parts_of(monkeypatch, tmp_path, buffer=BUFFER, worker=None, recorder=RECORDER)

    def stop(name):
        raise KeyError(name)

    monkeypatch.setattr("ray_apr.run.actors.stop_rollout_servers", stop)
    monkeypatch.setattr("ray_apr.run.actors.ray.kill", killed.append)
    parts._side.worker = Handle(stop=SUMMARY)
    parts._actors.handles = ["the recorder", "the lease"]
    with pytest.raises(KeyError):
        parts.close(None)
    assert killed == ["the lease", "the recorder"]


def test_no_thread_waits_for_an_actor_of_a_run_that_has_ended(monkeypatch, tmp_path):
    """known fault: one that asked again after Ray's shutdown ended the process with exit code 1."""
    is_killed, shown = threading.Event(), []

    def end_after(seconds):
        assert is_killed.wait(30)
        time.sleep(seconds)

    def answer(*_, **__):
        end_after(1.0)
        raise ActorDiedError()

    parts = parts_of(monkeypatch, tmp_path, buffer=BUFFER, worker=None, recorder=RECORDER)
    monkeypatch.setattr("ray_apr.run.actors.ray.kill", lambda actor: is_killed.set())
    monkeypatch.setattr("ray_apr.run.progress.ray.get", answer)
    watch = threading.Thread(target=end_after, args=(0.3,))
    watch.start()
    parts._side.join = watch.join
    parts._actors.handles = ["the recorder"]
    add_row(tmp_path / "evaluations.jsonl", evaluation_row(2))
    with progress.follow_progress(Handle(follow=None), tmp_path, 8, shown.append) as stop_showing:
        stop_showing()
        add_row(tmp_path / "evaluations.jsonl", evaluation_row(4))
        parts._take_away()
        assert not watch.is_alive()
    assert not [thread for thread in threading.enumerate() if thread.name == "progress"]
    assert shown == ["held-out prompts, version 4 │ 0.750, pass@1 0.500 │ 1 failed"]


def failed_row(number, reason="failed"):
    error = f"reward of sample e0-{number}-1 raised: ValueError: cannot score"
    return {"group_id": f"e0-{number}", "reason": reason, "num_generated": 5, "error": error}


def test_groups_that_fail_are_told_at_the_first_one_and_then_by_their_number(tmp_path):
    """Nothing in the terminal said that the reward raised."""
    file = tmp_path / "dropped.jsonl"
    add_row(file, failed_row(0))
    failed = FailedGroups(tmp_path)
    assert failed.warnings() == [], "one that an earlier part of the run has told"
    add_row(file, failed_row(1, "stale"))
    assert failed.warnings() == []
    for number in range(2, 4):
        add_row(file, failed_row(number))
    assert failed.warnings() == [
        "warning: 2 groups were dropped as something failed; the last: reward of sample e0-3-1 "
        "raised: ValueError: cannot score (each is in dropped.jsonl)"
    ]
    shown = []
    for number in range(4, 30):
        add_row(file, failed_row(number))
        shown += failed.warnings()
    (line,) = shown
    assert line.startswith("warning: 10 groups were dropped")


def test_the_last_failure_is_told_of_a_group_that_failed_before(tmp_path):
    """known fault: `watch` told the one before, and the report this one."""
    watched = FailedGroups(tmp_path, tells_old=True)
    for number in (1, 2, 1):
        add_row(tmp_path / "dropped.jsonl", failed_row(number))
        (line,) = watched.lines()
    assert line.startswith("2 groups were") and "the last: reward of sample e0-1-1" in line


def test_prompts_that_are_set_aside_are_told_each_time(tmp_path):
    """known fault: a log of Ray alone had them, while engines died one after the other."""
    file = tmp_path / "poison.jsonl"
    add_row(file, {"row": 7, "error": "engine a is dead"})
    failed, watched = FailedGroups(tmp_path), FailedGroups(tmp_path, tells_old=True)
    assert failed.warnings() == []
    for row in (8, 9):
        add_row(file, {"row": row, "error": "engine b is dead"})
        (line,) = failed.warnings()
    told = "set aside, as engines died of them; the last: row 9 of the dataset, engine b is dead"
    assert line == f"warning: 2 prompts were {told} (each is in poison.jsonl)"
    assert failed.warnings() == []
    assert watched.lines() == [f"3 prompts were {told}"]


def test_a_run_shows_the_groups_that_fail(monkeypatch, tmp_path):
    shown, is_over = [], threading.Event()

    def answer(*_, **__):
        add_row(tmp_path / "dropped.jsonl", failed_row(0))
        is_over.set()
        raise ActorDiedError() from None

    monkeypatch.setattr("ray_apr.run.progress.ray.get", answer)
    with progress.follow_progress(Handle(follow=None), tmp_path, 8, shown.append):
        assert is_over.wait(30)
    assert [line.partition(" dropped")[0] for line in shown] == ["warning: 1 group was"]


@pytest.mark.parametrize("begin", [0, 40])
def test_a_run_without_a_new_step_says_for_how_long_it_waits(monkeypatch, tmp_path, begin):
    """known fault: one that began with step 40 of another run had fewer rows than steps, so that
    it said to the end what no step waited for."""
    row = {
        "step": begin,
        "time_s": 25.0,
        "reward_mean": 0.5,
        "staleness_mean": 0.0,
        "staleness_max": 0,
    }
    row |= {"response_tokens_mean": 3.0, "response_tokens_max": 4, "trainer_wait_s": 1.0}
    row |= {"trainer_step_s": 1.0, "weight_sync_s": 1.0}
    answers = iter([
        ([], {"doing": {"rollout servers": "start", "train workers": "compile"}}),
        ([row], {}),
        ([], {"waiting_for": "a reward"}),
        ([row | {"step": begin + 1}], {}),
        ([], {"waiting_for": "a trainer", "doing": {"train workers": "write the last checkpoint"}}),
    ])  # fmt: skip
    clock = iter([100.0, 110.2, 125.0, 135.4, 140.0, 150.4])
    shown, is_over = [], threading.Event()

    def answer(*_, **__):
        try:
            return next(answers)
        except StopIteration:
            is_over.set()
            raise ActorDiedError() from None

    monkeypatch.setattr("ray_apr.run.progress.ray.get", answer)
    monkeypatch.setattr(progress, "time", types.SimpleNamespace(monotonic=lambda: next(clock)))
    with progress.follow_progress(Handle(follow=None), tmp_path, begin + 2, shown.append):
        assert is_over.wait(30)
    assert [shown[0], shown[2], shown[4]] == [
        "… waiting for 10 s: rollout servers start, train workers compile",
        "… waiting for 10 s: a reward",
        "… waiting for 10 s: train workers write the last checkpoint",
    ]
    assert shown[1].startswith(f"step {begin + 1:>4}/{begin + 2}")


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (Stopped(signal.SIGINT), "stopped"),
        (Stopped(signal.SIGTERM), "stopped"),
        (KeyboardInterrupt(), "stopped"),
        (ValueError("no row\nat all"), "failed"),
    ],
)
def test_a_run_that_ends_while_its_parts_are_made_says_how(monkeypatch, tmp_path, error, status):
    spec = run_spec(model=str(tmp_path))
    monkeypatch.setattr(type(spec), "folder", tmp_path)
    monkeypatch.setattr(type(spec), "checkpoints_folder", str(tmp_path))
    monkeypatch.setattr(controller, "make_run_folder", lambda spec: None)
    monkeypatch.setattr(controller, "check_engine", lambda *_: None)
    monkeypatch.setattr(controller.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(controller.ray, "cluster_resources", lambda: {"CPU": 2.0})

    def parts(*_):
        raise error

    monkeypatch.setattr(controller, "_Parts", parts)
    with pytest.raises(Stopped if status == "stopped" else ValueError) as raised:
        controller.run(spec, None)
    final = json.loads((tmp_path / "final.json").read_text())
    assert (final["status"], final["steps"], final["ledger_error"]) == (status, 0, None)
    assert final["error"] == (str(raised.value) if status == "stopped" else "ValueError: no row")
    assert (tmp_path / "error.log").exists() == (status == "failed")


def test_an_error_of_the_servers_is_reported_as_one_of_theirs(monkeypatch, tmp_path):
    """It was told as one of the training."""
    told = []
    parts = parts_of(monkeypatch, tmp_path, buffer=None, worker=None, recorder=RECORDER)
    parts._side.fail = told.append
    parts._closing, parts._made = threading.Event(), threading.Event()
    parts._made.set()

    def start(*_, **__):
        raise KeyError("no such deployment")

    monkeypatch.setattr("ray_apr.run.controller.start_rollout_servers", start)
    parts._start_servers()
    reason = parts._reason(group_error(rank0=OfAWorker(RuntimeError("the stream broke"))))
    assert told == [reason] and str(reason) == "servers: KeyError('no such deployment')"
    assert "in start" in (tmp_path / "error.log").read_text()


@pytest.mark.parametrize(("summary", "stats"), [(SUMMARY, STATS), (None, STATS), (SUMMARY, None)])
def test_final_figures_count_the_steps_that_were_recorded(summary, stats):
    final = final_figures(run_spec(), summary, stats, 11, Counters())
    assert final["steps"] == 11
    assert (final["ledger_error"] is None) == (summary is None or stats is None)
    assert "steps" not in final_figures(run_spec(), summary, stats, None, Counters())


def test_a_step_whose_sync_fails_is_recorded(monkeypatch):
    """final.json said one step more than the rows."""
    recorded = []
    control = types.SimpleNamespace(
        end_step=lambda step, version: {"reward/form_mean": 0.5},
        record_step=recorded.append,
        record_span=lambda *_: None,
    )

    def fail(*_, **__):
        raise WeightSyncError("no engine")

    loop = object.__new__(loop_module._TrainLoop)
    loop._control, loop._residency, loop._started_at = control, AlwaysThere(), 0.0
    loop._progress = Progress(step=4, policy_version=4)
    loop._train = run_spec().train
    loop._rank, loop._is_told = 0, False
    loop._spec = types.SimpleNamespace(algorithm=None, max_response_tokens=8, train=loop._train)
    loop._learner = types.SimpleNamespace(train=lambda batch: {"loss": 1.0})
    loop._publisher = types.SimpleNamespace(after_step=fail)
    monkeypatch.setattr(loop, "_next_batch", lambda: (None, 0.0))
    with pytest.raises(WeightSyncError):
        loop._step()
    (row,) = recorded
    assert (row["step"], row["policy_version"], row["weight_sync_s"]) == (4, 5, 0.0)
    assert (row["loss"], row["reward/form_mean"]) == (1.0, 0.5)
