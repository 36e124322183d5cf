"""A run in another terminal (tools/watch.py)."""

from __future__ import annotations

import io
import json
import re
import threading
from pathlib import Path

import pytest
from rich.console import Console

from ray_apr.cli.main import main
from ray_apr.core.exceptions import ConfigError
from ray_apr.run.folder import add_row
from ray_apr.run.new_rows import NewRows
from ray_apr.run.resume import hold_folder
from ray_apr.tools import watch as watch_module
from ray_apr.tools.watch import Watched, clock, sparkline, view, watch
from tests.fakes import evaluation_row


def step(number: int, **more) -> dict:
    return {
        "step": number, "time_s": 100.0 + 2 * number, "reward_mean": number / 10,
        "staleness_mean": 1.5, "staleness_max": 3, "response_tokens_mean": 20.0,
        "response_tokens_max": 40, "trainer_wait_s": 0.1, "trainer_step_s": 1.0,
        "weight_sync_s": 0.2, "inflight": 7, "held": 2, "buffered": 5,
        "tokens_generated": 1000 * number, "waiting_for": "rewards", **more,
    }  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch) -> Path:
    """A run of 40 steps of which five are done."""
    monkeypatch.setattr(watch_module, "_LOOK_S", 0.02)
    run = tmp_path / "my-run"
    run.mkdir()
    (run / "config.json").write_text(json.dumps({"train": {"steps": 40}}))
    for number in range(5):
        add_row(run / "metrics.jsonl", step(number))
    row = {"actor": "rewards", "what": "score", "start_s": 80, "end_s": 100}
    add_row(run / "timeline.jsonl", row)
    for what, begin, end in (("idle", 0, 80), ("generate", 80, 95), ("paused", 95, 100)):
        row = {"actor": "engine-0", "what": what, "start_s": begin, "end_s": end}
        add_row(run / "timeline.jsonl", row)
    add_row(
        run / "timeline.jsonl", {"actor": "weights", "what": "sync", "start_s": 90, "end_s": 91}
    )
    return run


def shown(folder: Path) -> str:
    watched = Watched(folder)
    watched.new_steps()
    watched.new_evaluations()
    console = Console(file=io.StringIO(), width=120)
    console.print(view(watched))
    return console.file.getvalue()


def test_a_view_says_how_far_a_run_is_and_who_waits_for_whom(folder):
    text = shown(folder)
    assert "step 5/40" in text and "1:48 passed, about 1:10 left" in text
    assert "▁▃▅▆█  0.000 → 0.400, of the last 5 steps" in text
    assert "generate 50%  idle 33%  paused 17%" in text, "of the last half minute"
    assert "5 samples wait for the trainer, 7 in flight, 2 interrupted" in text
    assert "500 tokens generated a second" in text and "waits for  rewards" in text
    assert "weights" not in text and "score" not in text


@pytest.mark.parametrize(
    ("ended", "told"),
    [(100, "train 100%"), (76, "under way 80%  train 20%"), (65, "under way 100%")],
)
def test_a_view_says_what_share_of_the_time_a_trainer_is_at_something(folder, ended, told):
    """known fault: as a span is recorded when it ends, a trainer that had waited for 24 of 30 s was
    said to train all of the time, and one that had waited for longer was not there."""
    row = {"actor": "trainer", "what": "train", "start_s": ended - 40, "end_s": ended}
    add_row(folder / "timeline.jsonl", row)
    assert re.search(f"trainer +{told} *\n", shown(folder))


def test_a_trainer_whose_last_span_is_far_back_in_the_file_is_at_something(folder, monkeypatch):
    """known fault: of a run of many engines the end of the file, which is looked at, has a minute
    or less; a trainer that was at one thing for longer was not there at all."""
    row = {"actor": "engine-0", "what": "generate", "start_s": 100, "end_s": 104}
    add_row(folder / "timeline.jsonl", {**row, "actor": "trainer"})
    for second in range(104, 140, 4):
        add_row(folder / "timeline.jsonl", {**row, "start_s": second, "end_s": second + 4})
    monkeypatch.setattr(watch_module, "_END_OF_FILE", 8 * len(json.dumps(row)))
    assert re.search("trainer +under way 100% *\n", shown(folder))


def test_a_view_has_the_last_evaluation_with_its_suites(folder):
    assert "held-out" not in shown(folder)
    for version, failed in ((0, 1), (4, 0)):
        suites = {"easy": evaluation_row(version, reward_mean=None, pass_at_k={})}
        row = evaluation_row(version, num_failed=failed, suites=suites)
        add_row(folder / "evaluations.jsonl", row)
    line = "held-out prompts, version 4 │ 0.750, pass@1 0.500 │ easy no reward\n"
    assert line in re.sub(" +\n", "\n", shown(folder))


def test_a_run_without_a_step_says_so(folder):
    (folder / "metrics.jsonl").unlink()
    assert "my-run: no step yet" in shown(folder)


def go_on(folder: Path, at: int) -> None:
    """The run goes on after 500 s."""
    add_row(folder / "resumes.jsonl", {"time_s": 108.0, "step": at})
    for number in range(5, 8):
        later = {"time_s": 600.0 + 4 * number, "tokens_generated": 4000 + 1000 * number}
        add_row(folder / "metrics.jsonl", step(number, **later))


@pytest.mark.parametrize("at", [5, 3])  # with every step, or after two that were trained again
def test_speed_leaves_out_the_time_until_a_run_was_gone_on_with(folder, at):
    """known fault: a line of a run that was gone on with counted the time between, too."""
    watched = Watched(folder)
    watched.new_steps()
    go_on(folder, at)
    rows = watched.new_steps()
    assert [watched.first_of(row)["step"] for row in rows] == [5, 5, 5]
    console = Console(file=io.StringIO(), width=120)
    console.print(view(watched))
    assert "250 tokens generated a second" in console.file.getvalue()


def test_lines_of_a_run_that_was_gone_on_with_have_the_speed_of_their_part(folder):
    go_on(folder, 5)
    lines: list[str] = []
    watch(folder, lines.append, Console(file=io.StringIO()))
    speeds = [re.search(r"[\d,]+ tok/s", line) for line in lines]
    told = [None if speed is None else speed[0] for speed in speeds]
    assert told == [None, *["500 tok/s"] * 4, None, "250 tok/s", "250 tok/s"]


def fail(folder: Path, number: int, reason: str = "failed") -> None:
    add_row(
        folder / "dropped.jsonl",
        {"group_id": f"g{number}", "reason": reason, "num_generated": 400, "error": "no answer"},
    )


def test_a_view_says_how_many_groups_failed_and_why(folder):
    fail(folder, 0, "filtered")
    assert "failures" not in shown(folder)
    fail(folder, 1)
    said = "1 group was dropped as something failed (10% of the generated tokens); the last: no "
    assert f"failures   {said}" in shown(folder)
    add_row(folder / "metrics.jsonl", step(5, tokens_generated=400_000))
    assert "(less than 1% of the generated tokens)" in shown(folder)
    (folder / "metrics.jsonl").unlink()
    text = " ".join(shown(folder).split())
    assert "no step yet" in text and "something failed; the last: no answer" in text


@pytest.mark.parametrize("damage", [b"!!\n", b"[1]\n", b"\xff\xfe\n"])
@pytest.mark.parametrize("name", ["metrics.jsonl", "dropped.jsonl", "timeline.jsonl"])
def test_a_damaged_line_is_named(folder, name, damage):
    """known fault: an error that told neither the file nor the line."""
    file = folder / name
    fail(folder, 1)
    file.write_bytes(damage + file.read_bytes())
    place = name if name == "timeline.jsonl" else f"{name}, line 1"
    with pytest.raises(ConfigError, match=rf"{re.escape(place)}': is cut off or no JSON"):
        shown(folder)


def test_rows_around_a_damaged_line_are_told(tmp_path):
    """known fault: those before it that came in one look with it were not."""
    file = tmp_path / "rows"
    file.write_bytes(b'{"step": 0}\n{"step": 1}\n!!\n{"step": 2}\n')
    rows = NewRows(file, "step")
    assert rows.new() == [{"step": 0}, {"step": 1}]
    with pytest.raises(ConfigError, match="line 3"):
        rows.new()
    assert rows.new() == [{"step": 2}] and rows.new() == []


def test_bars_and_clocks():
    assert sparkline([0.0, 1.0, 0.5]) == "▁█▅"
    assert sparkline([2.0, 2.0]) == "▁▁"
    assert (clock(65.4), clock(3 * 3600 + 62)) == ("1:05", "3:01:02")


def end_soon(folder: Path, held: hold_folder) -> threading.Timer:
    def end() -> None:
        add_row(folder / "metrics.jsonl", step(5))
        (folder / "final.json").write_text('{"status": "failed", "steps": 6, "error": "no room"}')
        held.__exit__(None, None, None)

    timer = threading.Timer(0.2, end)
    timer.start()
    return timer


def test_where_there_is_no_terminal_each_step_and_evaluation_is_a_line(folder):
    add_row(folder / "evaluations.jsonl", evaluation_row(2))
    fail(folder, 1)
    held = hold_folder(folder)
    held.__enter__()
    end_soon(folder, held)
    lines: list[str] = []
    said, _ = watch(folder, lines.append, Console(file=io.StringIO()))
    warned = lines.pop(6)  # what was there at the first look
    assert warned.startswith("warning: 1 group was dropped as something failed; the last: no answ")
    evaluated = [lines.pop(5)]
    assert [line[:9] for line in lines] == [f"step    {k}" for k in range(1, 7)]
    assert said == "failed: 6 steps; no room"
    assert evaluated == ["held-out prompts, version 2 │ 0.750, pass@1 0.500 │ 1 failed"]
    assert "tok/s" not in lines[0], "the start of the run has no part in the speed"
    assert all("│ 500 tok/s │" in line for line in lines[1:])


def test_where_there_is_no_terminal_a_run_that_starts_says_so_once(folder):
    (folder / "metrics.jsonl").unlink()
    lines: list[str] = []
    watch(folder, lines.append, Console(file=io.StringIO()))
    assert lines == [], "nobody trains it"
    held = hold_folder(folder)
    held.__enter__()
    end_soon(folder, held)
    watch(folder, lines.append, Console(file=io.StringIO()))
    assert lines[0] == f"{folder.name}: no step yet; engines and train workers start"
    assert [line[:9] for line in lines[1:]] == ["step    6"]


def test_in_a_terminal_the_view_goes_on_until_the_run_ends(folder):
    held = hold_folder(folder)
    held.__enter__()
    end_soon(folder, held)
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    lines: list[str] = []
    assert watch(folder, lines.append, console) == ("failed: 6 steps; no room", False)
    assert not lines
    assert "step 6/40" in console.file.getvalue()


def test_a_step_before_the_end_that_no_look_met_is_shown(folder, monkeypatch):
    """known fault: in a terminal the last look was before the end."""

    def ends_meanwhile(_: Path) -> bool:
        add_row(folder / "metrics.jsonl", step(5))
        return False

    monkeypatch.setattr(watch_module, "is_held", ends_meanwhile)
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    watch(folder, lambda _: None, console)
    assert "step 6/40" in console.file.getvalue()


def test_a_run_that_nobody_trains_and_that_said_nothing(folder, capsys):
    assert main(["watch", str(folder)]) == 1
    out = capsys.readouterr().out
    assert out.count("│ reward") == 5
    assert out.endswith("no process trains it, and it has not said how it ended\n")


@pytest.mark.parametrize(("status", "code"), [("ok", 0), ("failed", 1), ("stopped", 1)])
def test_the_exit_code_says_whether_the_run_came_to_its_end(folder, capsys, status, code):
    """known fault: it was 0 whatever had happened, so that no script could wait for a run."""
    (folder / "final.json").write_text(json.dumps({"status": status, "steps": 5}))
    assert main(["watch", str(folder)]) == code
    assert capsys.readouterr().out.endswith(f"\n{status}: 5 steps\n")


def test_what_is_no_run_is_refused(tmp_path, capsys):
    assert main(["watch", str(tmp_path)]) == 2
    assert "is no run folder: it has no config.json" in capsys.readouterr().err


def test_a_damaged_file_is_named(folder, capsys):
    (folder / "final.json").write_text('{"status": "o')
    assert main(["watch", str(folder)]) == 2
    assert f"'{folder / 'final.json'}': is cut off or no JSON (Unterm" in capsys.readouterr().err
    (folder / "config.json").write_bytes(b'{"train": \xff')
    assert main(["watch", str(folder)]) == 2
    assert f"'{folder / 'config.json'}': is cut off or no JSON ('utf-8" in capsys.readouterr().err
