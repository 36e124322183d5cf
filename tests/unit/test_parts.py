"""What the figures of a run that was gone on with are of: the time in which it trained."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from ray_apr.core.exceptions import ConfigError
from ray_apr.tools.diagnosis import findings
from ray_apr.tools.report.html import write_report
from ray_apr.tools.report.load import RunData, load_run
from ray_apr.tools.report.parts import parts_of, setup_s, steady_steps, training_windows
from ray_apr.tools.report.summary import engine_counts, summarize
from ray_apr.tools.shares import shares_of
from ray_apr.tools.simulator.of_run import estimate
from tests.unit.test_diagnosis import NUM_STEPS, SLOW, run_of, said, simulated

GAP_S = 400.0
HALF = NUM_STEPS // 2


def paused(run: RunData, step: int = HALF, *, begins_at: float | None = None) -> RunData:
    """The same run, gone on with at the end of a step: what follows is so much later."""
    at = run.steps[step - 1]["time_s"] if begins_at is None else begins_at

    def later(row: Any, *names: str) -> Any:
        return row | {name: row[name] + GAP_S for name in names if row[names[0]] >= at}

    return dataclasses.replace(
        run,
        steps=[later(row, "time_s") if row["step"] >= step else row for row in run.steps],
        timeline=[later(row, "start_s", "end_s") for row in run.timeline],
        resumes=[*run.resumes, {"time_s": at, "step": step}],
    )


def with_trainer(run: RunData) -> RunData:
    """The trainer's spans, too: it waits 2 s of each step of 10 s."""
    spans = [
        {"actor": "trainer", "what": "wait", "start_s": 10.0 * k, "end_s": 10.0 * k + 2.0}
        for k in range(len(run.steps))
    ]
    return dataclasses.replace(run, timeline=[*run.timeline, *spans])


def test_the_time_between_two_parts_is_nobodys():
    """known fault: the engines of a run that was stopped and gone on with were told to have been
    idle 85 % of the time, and more train workers to help."""
    run = run_of(waits=0.25, generates=0.75, paused=0.125)
    once, twice = shares_of(run), shares_of(paused(run))
    for name in ("trains", "syncs", "starves", "handed", "generates", "paused", "idle"):
        assert getattr(twice, name) == pytest.approx(getattr(once, name)), name
    assert twice.seconds == pytest.approx(10.0 * (NUM_STEPS - 4)), "two steps fill in each part"
    assert said(paused(run_of())) == ""


def test_a_wait_is_that_for_the_step_before_in_its_part():
    waits = shares_of(paused(run_of(waits=0.25))).waits
    assert [wait.before["step"] for wait in waits] == [*range(1, 11), *range(13, 23)]


def test_figures_of_the_summary_leave_the_time_between_out():
    """known fault: 690 tokens generated a second instead of 4,395."""
    run = with_trainer(run_of(generates=0.75, tokens_generated=2400))
    for resumed in (run, paused(run), paused(paused(run), 16)):
        summary = summarize(resumed)
        assert summary["rollout_tokens_per_s"] == pytest.approx(10.0)
        assert summary["generation_idle_ratio"] == pytest.approx(0.25)
        assert summary["trainer_idle_ratio"] == pytest.approx(0.2)
        assert summary["parts"] == len(resumed.resumes) + 1


@pytest.mark.parametrize("has_ranks", [False, True])
def test_a_part_begins_with_the_engines_of_its_settings(has_ranks):
    """known fault: a run of one engine that was given a second one, and then gone on with, was
    told to have two from then on, or an idle ratio below 0."""
    run = run_of()
    given_s, half_s = 50.0, 10.0 * HALF
    run = dataclasses.replace(
        run,
        timeline=[
            row for row in run.timeline
            if row["actor"] == "engine-0" or given_s <= row["start_s"] < half_s
        ],
        config=run.config | {"rollout": run.config["rollout"] | {"num_replicas": 1}},
        scalings=[{"time_s": given_s, "before": 1, "after": 2}],
    )  # fmt: skip
    run = paused(run)
    if has_ranks:  # the settings are those of another time
        begins = (0.0, half_s + GAP_S)
        run = dataclasses.replace(
            run,
            config=run.config | {"rollout": run.config["rollout"] | {"num_replicas": 7}},
            ranks=[{"time_s": at, "step": 0, "num_engines": 1} for at in begins],
        )
    assert engine_counts(run)[-1][1] == 1
    assert summarize(run)["generation_idle_ratio"] == pytest.approx(0.0)
    assert shares_of(run).generates == pytest.approx(1.0)
    later = {"time_s": run.steps[-1]["time_s"] - 10.0, "before": 1, "after": 2}
    again = dataclasses.replace(run, scalings=[*run.scalings, later])
    assert summarize(again)["generation_idle_ratio"] == pytest.approx(10.0 / 320.0)


def test_the_seconds_of_a_start_are_those_of_all_parts():
    run = with_trainer(run_of(setup_s=0.0))
    run = paused(run)
    run = dataclasses.replace(run, final=run.final | {"setup_s": GAP_S, "wall_s": 1000.0})
    assert training_windows(run) == ((0.0, 120.0), (120.0 + GAP_S, 240.0 + GAP_S))
    assert setup_s(run) == GAP_S
    found = findings(run, shares_of(run))
    assert "the starts of its 2 parts took 400 of 1000 s" in found[-1].what
    again = paused(run, 16)
    assert setup_s(again) == pytest.approx(2 * GAP_S)


def test_steps_are_of_the_part_that_trained_them_last():
    """Times of a killed run's last row are rounded in the row of the resume, and steps after its
    checkpoint are trained again: the step tells the part."""
    run = paused(run_of(), begins_at=119.9999)
    parts = parts_of(run)
    assert [len(part.steps) for part in parts] == [HALF, HALF]
    further = {"time_s": 10_000.0, "step": 8}
    parts = parts_of(dataclasses.replace(run, resumes=[*run.resumes, further]))
    assert [len(part.steps) for part in parts] == [8, 0, NUM_STEPS - 8]


def test_a_part_whose_steps_were_trained_again_has_its_time():
    """Its tokens are among those that were generated."""
    run = with_trainer(run_of())
    run = dataclasses.replace(run, resumes=[{"time_s": 60.0, "step": 0}])
    kept = [row for row in run.steps if row["time_s"] > 60.0]
    run = dataclasses.replace(run, steps=[row | {"step": k} for k, row in enumerate(kept)])
    assert training_windows(run) == ((0.0, 60.0), (60.0, 240.0))
    silent = [row for row in run.timeline if row["start_s"] >= 60.0]
    assert training_windows(dataclasses.replace(run, timeline=silent)) == ((60.0, 240.0),)


def test_estimates_are_of_the_steps_of_each_part():
    run, _ = simulated(SLOW)
    once, twice = estimate(run), estimate(paused(run))
    assert abs(twice.off) < 0.05 and twice.changes[0].what == once.changes[0].what


def test_short_parts_tell_nothing():
    run = run_of()
    for step in range(3, NUM_STEPS, 3):
        run = paused(run, step)
    assert len(steady_steps(run)) == NUM_STEPS // 3, "two steps of three are left out"
    few = dataclasses.replace(run, steps=run.steps[:9], resumes=run.resumes[:2])
    with pytest.raises(
        ConfigError, match="it takes 4 without the first 2 of each of its 3 parts, in which"
    ):
        shares_of(few)
    with pytest.raises(ConfigError, match=r"too short to simulate \(9 steps\); it takes 20"):
        estimate(few)


def test_a_folder_tells_its_parts(tmp_path):
    run = paused(with_trainer(run_of(samples_interrupted=5, samples_resumed=6)))
    run = dataclasses.replace(run, ranks=[{"time_s": 0.0, "step": 0, "num_engines": 2}])
    tables = {
        "metrics": run.steps, "timeline": run.timeline, "resumes": run.resumes, "samples": [],
        "ranks": run.ranks,
    }  # fmt: skip
    for name, rows in tables.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "final.json").write_text(json.dumps(run.final))
    found = load_run(tmp_path)
    assert (found.resumes, found.ranks) == (run.resumes, run.ranks)
    headline = dict(write_report(tmp_path).headline)
    assert (
        "(resumed 6; samples that were in flight where it was gone on"
        in headline["Responses interrupted"]
    )


@pytest.mark.parametrize(
    ("noted", "until"),
    [
        ({"ended": "ok", "steps_repeated": 0}, 120.0),
        ({"ended": "ok", "steps_repeated": 2}, 170.0),
        ({"ended": "killed", "steps_repeated": 0}, 170.0),
        ({}, 170.0),
    ],
)
def test_the_end_of_a_part_that_had_trained_all_of_its_steps_is_no_training(noted, until):
    """known fault: a run whose `train.steps` were raised after it had come to its end had engines
    that were idle while its last checkpoint was written and its parts ended."""
    run = paused(with_trainer(run_of()))  # steps until 120 and 640 s
    run = dataclasses.replace(run, resumes=[{"time_s": 170.0, "step": HALF, **noted}])
    assert [window[1] for window in training_windows(run)] == [until, 640.0]
