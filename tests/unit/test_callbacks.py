"""Callbacks follow the run folder (run/callbacks.py)."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from ray_apr.config.trackers import TrackersConfig
from ray_apr.core.exceptions import ConfigError
from ray_apr.core.user import RunCallback
from ray_apr.data.fence import Fence
from ray_apr.run import callbacks as callbacks_module
from ray_apr.run.callbacks import followed_by
from ray_apr.run.folder import add_row
from ray_apr.run.options import RunOptions
from ray_apr.run.ray_loggers import as_run_callback
from ray_apr.trackers import trackers_of
from tests.run_specs import run_spec
from tests.tracked import Together


class Told(RunCallback):
    """Keeps what it is told; raises where it is asked to."""

    def __init__(self, name: str = "told", raises: str = "") -> None:
        self.name = name
        self.calls: list[tuple] = []
        self._raises = raises

    def _take(self, verb: str, *args) -> None:
        if verb == self._raises:
            raise RuntimeError("no network")
        self.calls.append((verb, *args))

    notes: Any = "abc"

    def on_start(self, run):
        self._take("start", run.is_resumed, dict(run.notes))
        run.notes["id"] = self.notes

    def on_step(self, row):
        self._take("step", row["step"])

    def on_evaluation(self, row):
        self._take("evaluation", row["policy_version"])

    def on_checkpoint(self, step, path):
        self._take("checkpoint", step, path)

    def on_end(self, final):
        self._take("end", final.get("status"))


def steps(folder: Path, *numbers: int) -> None:
    for number in numbers:
        add_row(folder / "metrics.jsonl", {"step": number})


def follow(folder: Path, *callbacks: RunCallback, checkpoints=()) -> Together:
    followed = Together(folder, callbacks, lambda: checkpoints)
    followed.start("run", {})
    return followed


def test_each_row_and_checkpoint_is_told_once_and_in_order(tmp_path):
    told, checkpoints = Told(), []
    followed = follow(tmp_path, told, checkpoints=checkpoints)
    steps(tmp_path, 0, 1)
    add_row(tmp_path / "evaluations.jsonl", {"policy_version": 0})
    followed.look()
    followed.look()
    checkpoints += [(2, "a"), (1, "b")]
    steps(tmp_path, 2)
    followed.look()
    (tmp_path / "final.json").write_text('{"status": "ok"}')
    steps(tmp_path, 3)
    followed.look(is_end=True)
    followed.end()
    assert told.calls == [
        ("start", False, {}), ("step", 0), ("step", 1), ("evaluation", 0), ("step", 2),
        ("checkpoint", 1, "b"), ("checkpoint", 2, "a"), ("step", 3), ("end", "ok"),
    ]  # fmt: skip


def test_a_row_that_is_not_whole_is_told_later(tmp_path):
    told = Told()
    followed = follow(tmp_path, told)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 0}\n{"st')
        file.flush()
        followed.look()
        file.write('ep": 1}\n')
    followed.look()
    assert told.calls[1:] == [("step", 0), ("step", 1)]


def test_a_damaged_row_of_evaluations_costs_no_steps(tmp_path):
    """known fault: the steps that came in one look with it were told nobody."""
    told = Told()
    followed = follow(tmp_path, told)
    steps(tmp_path, 0, 1)
    (tmp_path / "evaluations.jsonl").write_text('!!\n{"policy_version": 1}\n')
    with pytest.raises(ConfigError, match=r"evaluations\.jsonl, line 1"):
        followed.look()
    followed.look()
    assert told.calls[1:] == [("step", 0), ("step", 1), ("evaluation", 1)]


def test_steps_that_are_trained_once_more_are_not_told_again(tmp_path):
    """A run that begins again writes a new file, with fewer rows, over the old one."""
    told = Told()
    followed = follow(tmp_path, told)
    steps(tmp_path, *range(6))
    followed.look()
    new = tmp_path / "new"
    new.write_text("".join(json.dumps({"step": k, "more": "x" * 50}) + "\n" for k in range(9)))
    new.replace(tmp_path / "metrics.jsonl")
    followed.look()
    assert [call[1] for call in told.calls[1:]] == list(range(9))


def test_another_process_goes_on_where_the_first_one_was(tmp_path):
    steps(tmp_path, 0, 1)
    first = follow(tmp_path, Told())
    first.look()
    steps(tmp_path, 2)
    told, newcomer = Told(), Told("new")
    follow(tmp_path, told, newcomer).look()
    assert told.calls == [("start", True, {"id": "abc"}), ("step", 2)]
    assert newcomer.calls[0] == ("start", False, {})


def test_what_raises_stops_neither_the_run_nor_the_others(tmp_path, caplog):
    bad, good = Told("bad", raises="step"), Told("good")
    followed = follow(tmp_path, bad, good)
    steps(tmp_path, 0, 1, 2)
    with caplog.at_level(logging.ERROR):
        followed.look()
        followed.end()
    assert caplog.text.count("on_step of the callback bad raised RuntimeError: no network") == 1
    assert [call[0] for call in good.calls] == ["start", "step", "step", "step", "end"]
    assert [call[0] for call in bad.calls] == ["start", "end"]


def test_a_callback_that_changes_its_row_does_so_for_itself(tmp_path):
    """known fault: `row.pop("step")` ended the thread, and nobody was told of anything more."""

    class Pops(Told):
        def on_step(self, row):
            super().on_step({"step": row.pop("step")})

        def on_evaluation(self, row):
            row.clear()

        def on_end(self, final):
            final.clear()

    pops, other = Pops("pops"), Told("other")
    followed = follow(tmp_path, pops, other)
    steps(tmp_path, 0, 1)
    add_row(tmp_path / "evaluations.jsonl", {"policy_version": 0})
    followed.look()
    (tmp_path / "final.json").write_text('{"status": "ok"}')
    followed.end()
    assert pops.calls[1:] == [("step", 0), ("step", 1)]
    assert other.calls[1:] == [("step", 0), ("step", 1), ("evaluation", 0), ("end", "ok")]


def test_each_row_is_noted_as_told_before_the_next_one(tmp_path):
    class Dies(Told):
        def on_step(self, row):
            super().on_step(row)
            if row["step"] == 2:
                raise KeyboardInterrupt  # as if the process were killed there

    steps(tmp_path, *range(5))
    with pytest.raises(KeyboardInterrupt):
        follow(tmp_path, Dies()).look()
    told = Told()
    follow(tmp_path, told).look()
    assert [call[1] for call in told.calls[1:]] == [2, 3, 4]


def test_a_full_disk_and_notes_that_are_no_json_cost_the_notes_alone(tmp_path, caplog, monkeypatch):
    told, other = Told(), Told("other")
    told.notes = {("a", "b"): 1}
    with caplog.at_level(logging.ERROR):
        followed = follow(tmp_path, told, other)
        steps(tmp_path, 0, 1)
        followed.look()
        followed.end()
    assert caplog.text.count("callbacks.json is not written") == 1
    assert [call[0] for call in other.calls] == ["start", "step", "step", "end"]
    again = Told("other")
    follow(tmp_path, again).look()
    assert again.calls == [("start", True, {"id": "abc"})], "the other's are there"


def test_notes_that_are_no_json_any_more_cost_the_others_nothing(tmp_path):
    follow(tmp_path, Told())
    bad, other = Told(), Told("other")
    bad.notes = {("a", "b"): 1}
    steps(tmp_path, 0, 1)
    follow(tmp_path, bad, other).look()
    kept = json.loads((tmp_path / "callbacks.json").read_text())
    assert (kept["other"]["step"], kept["told"]["notes"]) == (1, {"id": "abc"})


def test_a_run_of_an_older_version_is_gone_on_with_where_its_callbacks_were(tmp_path, caplog):
    """known fault: its trackers began runs anew, and were told all steps again."""
    steps(tmp_path, 0, 1, 2)
    kept = {"step": 1, "policy_version": 0, "notes": {"told": {"id": "abc"}}}
    (tmp_path / "callbacks.json").write_text(json.dumps(kept))
    told = Told()
    follow(tmp_path, told).look()
    assert told.calls == [("start", True, {"id": "abc"}), ("step", 2)]
    assert not caplog.text


@pytest.mark.parametrize("text", ["", "[]", '{"step": null}', '{"step": 1, "notes": {"told": 1}}'])
def test_notes_that_were_damaged_by_hand_cost_the_notes_alone(tmp_path, caplog, text):
    """known fault: the thread of the callbacks died, and none of them heard of anything."""
    steps(tmp_path, 0, 1)
    file = tmp_path / "callbacks.json"
    file.write_text(text, encoding="utf-8")
    told = Told()
    follow(tmp_path, told).look()
    assert told.calls == [("start", False, {}), ("step", 0), ("step", 1)]
    assert f"{file} cannot be read, so that callbacks are told all again" in caplog.text
    assert json.loads(file.read_text(encoding="utf-8"))["told"]["step"] == 1


def test_a_callback_that_cannot_begin_tries_again_and_misses_nothing(tmp_path, caplog, monkeypatch):
    """known fault: a tracker whose server was away as the run began was told of steps, which it
    could write nowhere, and had none of them when the server was there again."""

    class Away(Told):
        is_away = True

        def on_start(self, run):
            run.notes.setdefault("tried", True)
            if self.is_away:
                raise ConnectionError("no server")
            super().on_start(run)

    monkeypatch.setattr(callbacks_module, "_AGAIN_S", 0.0)
    away, other = Away("away"), Told("other")
    followed = follow(tmp_path, away, other)
    steps(tmp_path, 0, 1)
    followed.look()
    assert caplog.text.count("ConnectionError: no server; the run goes on") == 1
    assert [away.calls, len(other.calls)] == [[], 3]

    second = follow(tmp_path, away)  # another process goes on with the run
    steps(tmp_path, 2)
    second.end()
    assert "the callback away was told nothing" in caplog.text
    away.is_away = False
    second.look()
    second.end()
    begun = ("start", False, {"tried": True})
    assert away.calls == [begun, ("step", 0), ("step", 1), ("step", 2), ("end", None)]
    assert "the callback away has begun" in caplog.text


def test_a_callback_that_cannot_begin_is_asked_ever_less(tmp_path, monkeypatch):
    class Away(RunCallback):
        num_tries = 0

        def on_start(self, run):
            self.num_tries += 1
            raise ConnectionError

    now = [0.0]
    monkeypatch.setattr(callbacks_module.time, "monotonic", lambda: now[0])
    away = Away()
    followed = follow(tmp_path, away)
    tries = []
    for second in range(1000):
        now[0], before = float(second), away.num_tries
        followed.look()
        tries += [second] * (away.num_tries - before)
    assert tries[:7] == [1, 3, 7, 15, 31, 63, 123]
    followed.look(is_end=True)
    assert away.num_tries == len(tries) + 2, "at the begin, and once more at the end"


@pytest.mark.parametrize("error", [SystemExit(3), asyncio.CancelledError()])
def test_a_callback_that_exits_ends_itself_alone(tmp_path, caplog, error):
    class Exits(RunCallback):
        def on_start(self, run):
            raise error

    good = Told()
    with caplog.at_level(logging.ERROR):
        follow(tmp_path, Exits(), good).end()
    assert f"raised {type(error).__name__}" in caplog.text
    assert [call[0] for call in good.calls] == ["start", "end"]


def test_checkpoints_are_looked_for_where_somebody_wants_them(tmp_path):
    def never():
        raise AssertionError

    followed = Together(tmp_path, [RunCallback()], never)
    followed.start("run", {})
    steps(tmp_path, 0)
    followed.look(is_end=True)


def test_a_run_is_followed_from_its_begin_to_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr(callbacks_module, "_LOOK_S", 0.01)
    spec = run_spec()
    monkeypatch.setattr(type(spec), "folder", tmp_path)
    monkeypatch.setattr(callbacks_module, "kept_checkpoints", lambda spec: [])
    told = Told()
    with pytest.raises(KeyError), followed_by([told], spec):
        steps(tmp_path, 0)
        deadline = time.monotonic() + 20
        while ("step", 0) not in told.calls:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        (tmp_path / "final.json").write_text('{"status": "failed"}')
        raise KeyError
    assert told.calls[-1] == ("end", "failed")
    assert not any(thread.name.startswith("callback") for thread in threading.enumerate())


def test_a_driver_that_has_lost_its_folder_tells_its_callbacks_no_more(
    tmp_path, monkeypatch, caplog
):
    """known fault: trackers had the rows of the driver that went on with the run twice, and its
    notes were those of the first one."""
    monkeypatch.setattr(callbacks_module, "_LOOK_S", 0.01)
    monkeypatch.setattr("ray_apr.data.fence.LOOK_S", 0.01)
    spec = run_spec()
    monkeypatch.setattr(type(spec), "folder", tmp_path)
    told = Told()
    with followed_by([told], spec):
        steps(tmp_path, 0)
        deadline = time.monotonic() + 20
        while ("step", 0) not in told.calls and time.monotonic() < deadline:
            time.sleep(0.01)
        Fence("another", str(tmp_path)).take()
        time.sleep(0.5)
        (tmp_path / "callbacks.json").write_text("theirs")
        steps(tmp_path, 1)
        (tmp_path / "final.json").write_text('{"status": "ok"}')
    assert told.calls[1:] == [("step", 0)]
    assert (tmp_path / "callbacks.json").read_text() == "theirs"
    assert "the callback told is told no more: " in caplog.text


def test_without_callbacks_there_is_neither_thread_nor_file(tmp_path, monkeypatch):
    spec = run_spec()
    monkeypatch.setattr(type(spec), "folder", tmp_path)
    with followed_by([], spec):
        assert not any(thread.name.startswith("callback") for thread in threading.enumerate())
    assert not list(tmp_path.iterdir())


def test_a_callback_that_hangs_is_left_alone(tmp_path, monkeypatch, caplog):
    class Hangs(RunCallback):
        over = threading.Event()

        def on_end(self, final):
            self.over.wait(30)

    monkeypatch.setattr(callbacks_module, "_END_S", 0.2)
    spec = run_spec()
    monkeypatch.setattr(type(spec), "folder", tmp_path)
    monkeypatch.setattr(callbacks_module, "kept_checkpoints", lambda spec: [])
    with caplog.at_level(logging.ERROR), followed_by([Hangs()], spec):
        pass
    assert "did not end within 0.2 s" in caplog.text
    Hangs.over.set()


def test_a_callback_that_takes_long_costs_the_others_nothing(tmp_path, monkeypatch, caplog):
    """known fault: a tracker whose server was away kept the last steps and the end from all."""

    class Hangs(RunCallback):
        over = threading.Event()

        def on_step(self, row):
            self.over.wait(30)

    monkeypatch.setattr(callbacks_module, "_LOOK_S", 0.01)
    monkeypatch.setattr(callbacks_module, "_END_S", 0.5)
    spec = run_spec()
    monkeypatch.setattr(type(spec), "folder", tmp_path)
    monkeypatch.setattr(callbacks_module, "kept_checkpoints", lambda spec: [])
    told = Told()
    with caplog.at_level(logging.ERROR), followed_by([Hangs(), told], spec):
        steps(tmp_path, 0, 1, 2)
        (tmp_path / "final.json").write_text('{"status": "ok"}')
    assert told.calls[1:] == [("step", 0), ("step", 1), ("step", 2), ("end", "ok")]
    assert "are left alone: " in caplog.text
    assert "told" not in caplog.text
    Hangs.over.set()
    resumed = Told()
    follow(tmp_path, resumed).look()
    assert resumed.calls == [("start", True, {"id": "abc"})]


def test_what_is_no_callback_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"callbacks .*must be objects of a RunCallback"):
        RunOptions(model="a/b", prompts=None, callbacks=[print])
    with pytest.raises(ConfigError, match=r"callbacks .*must have a `name` of their own"):
        RunOptions(model="a/b", prompts=None, callbacks=[Told(), Told()])


@pytest.mark.parametrize(
    "name", ["on_start", "on_step", "on_evaluation", "on_checkpoint", "on_end"]
)
def test_a_callback_that_nobody_would_wait_for_is_refused(name):
    """known fault: the method was called, and never ran."""

    async def method(self, *_):
        raise AssertionError("it never runs")

    mine = type("Mine", (RunCallback,), {name: method})()
    with pytest.raises(ConfigError, match=r"^callbacks = .*method': must not be async"):
        RunOptions(model="a/b", prompts=None, callbacks=[mine])


def test_a_callback_with_a_method_that_nobody_calls_is_refused():
    """known fault: `on_step_end`, as other libraries call it, never ran, without a word."""

    class Mine(Told):
        def on_step_end(self, row):
            raise AssertionError("it never runs")

    with pytest.raises(
        ConfigError, match=r"Mine': has on_step_end, .* called are on_start, on_step, "
    ):
        RunOptions(model="a/b", prompts=None, callbacks=[Mine()])


def test_what_a_callback_has_for_others_than_a_run_is_no_fault():
    """known fault: an attribute, a function that the callback was given, and methods of another
    library's base class, which that library calls, were refused as those that nobody calls."""

    class OfAnotherLibrary:
        def on_epoch_end(self):
            raise AssertionError("no run calls it")

    class Mine(Told, OfAnotherLibrary):
        on_gpu = True

        def __init__(self):
            super().__init__()
            self.on_best = print

    mine = Mine()
    assert as_run_callback(mine) is mine


@pytest.mark.parametrize("name", ["wandb", "mlflow", "tensorboard"])
def test_a_callback_with_the_name_of_a_tracker_is_refused(name):
    """known fault: of two with one name the first was told nothing, without a word."""
    trackers = TrackersConfig(**{name: {"experiment": "e"} if name == "mlflow" else {}})
    (tracker,) = trackers_of(trackers)
    assert tracker.name == name
    given = {"model": "a/b", "prompts": None, "callbacks": [Told(name)]}
    with pytest.raises(ConfigError, match=rf"\['{name}', '{name}'\]: must have a `name` of their"):
        RunOptions(**given, trackers_config=trackers)
    RunOptions(**given)
