"""The report: each figure on a hand-made run folder, and folders that a crash left behind."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Callable
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from plotly.offline import get_plotlyjs

from ray_apr.core.exceptions import ConfigError
from ray_apr.core.metrics import SPECS
from ray_apr.run.progress import step_line
from ray_apr.run.resume import hold_folder
from ray_apr.tools.report import html, page, timeline
from ray_apr.tools.report.compare import comparison_text, other_settings, write_comparison
from ray_apr.tools.report.figures import SERIES, figure, line, moving_average
from ray_apr.tools.report.html import duration, write_report
from ray_apr.tools.report.load import RunFolderError, load_run
from ray_apr.tools.report.parts import training_windows
from ray_apr.tools.report.plots import reward_chart
from ray_apr.tools.report.summary import check_run, covered_s, summarize
from tests.fakes import step_row

DETAIL = "Each span from 5 to 30 s: drag to zoom, double click for all"
EVIL = "<script>alert(1)</script>"

FINAL: dict[str, Any] = {
    "mode": "apr",
    "seed": 0,
    "steps": 6,
    "wall_s": 25.0,
    "setup_s": 9.0,
    "max_staleness": 2,
    "batch_size": 8,
    "num_replicas": 2,
    "num_train_workers": 1,
    "policy_version": 6,
    "samples_trained": 3,
    "samples_interrupted": 5,
    "samples_resumed": 4,
    "tokens_generated": 120,
    "tokens_trained": 60,
    "tokens_buffered": 25,
    "tokens_interrupted": 15,
    "tokens_discarded": {"stale": 12, "shutdown": 8},
    "ledger_error": 0,
    "read_ahead_max": 1,
    "engines": [],
    "status": "ok",
    "error": None,
}

# Steps end at 12, 14 ... 22 s; the trainer's first span starts at 10 s: a window of 12 s.
STEPS = [
    {
        "step": k,
        "policy_version": k + 1,
        "time_s": 12.0 + 2 * k,
        "reward_mean": (k + 1) / 10,
        "trainer_wait_s": 0.5,
        "trainer_step_s": 1.0,
        "weight_sync_s": (k + 1) / 10,
        "tokens_generated": 20 * k,
        "loss": -0.01 * k,
    }
    for k in range(6)
]
SAMPLES = [
    {
        "step": i,
        "sample_id": f"{EVIL}-{i}",
        "group_id": "g",
        "reward": 1.0,
        "staleness": i,
        "num_tokens": 10 * (i + 1),
        "num_interruptions": int(i == 1),
        "finish_reason": "stop",
    }
    for i in range(3)
]
TIMELINE = [
    {"actor": actor, "what": what, "start_s": start, "end_s": end}
    for actor, what, start, end in [
        ("trainer", "wait", 10.0, 11.0),
        ("trainer", "train", 11.0, 12.0),
        ("trainer", "wait", 12.0, 12.5),
        ("trainer", "sync", 12.5, 13.0),
        ("engine-0", "generate", 5.0, 13.0),
        ("engine-0", "generate", 12.0, 16.0),
        ("engine-0", "idle", 16.0, 22.0),
        ("engine-1", "idle", 5.0, 16.0),
        ("engine-1", "generate", 16.0, 30.0),
    ]
]

EXPECTED = {
    "mode": "apr",
    "steps": 6,
    "parts": 1,
    "wall_s": 25.0,
    "setup_s": 9.0,
    "reward_first": pytest.approx(0.2),  # 0.1 ... 0.3
    "reward_last": pytest.approx(0.5),  # 0.4 ... 0.6
    "reward_parts": {},
    "held_out": None,
    "samples_trained": 3,
    "samples_interrupted": 5,
    "samples_resumed": 4,
    "tokens_generated": 120,
    "tokens_trained": 60,
    "tokens_buffered": 25,
    "tokens_interrupted": 15,
    "tokens_discarded": {"stale": 12, "shutdown": 8},
    "ledger_error": 0,
    "staleness_max": 2,
    "staleness_mean": pytest.approx(1.0),
    "max_staleness": 2,
    "policy_version": 6,
    "num_replicas": 2,
    "num_train_workers": 1,
    "generation_idle_ratio": pytest.approx(0.5),  # 1 - (6 s of 10..16 + 6 s of 16..22) / (2 x 12 s)
    "trainer_idle_ratio": pytest.approx(0.125),  # 1.5 s of 12 s
    "weight_sync_s": {"p50": pytest.approx(0.35), "max": pytest.approx(0.6)},
    "rollout_tokens_per_s": pytest.approx(10.0),  # 120 tokens in 12 s
    "read_ahead_max": 1,
}


@pytest.fixture(autouse=True)
def short_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages without Plotly's own 4.8 MB."""
    monkeypatch.setattr(page, "get_plotlyjs", lambda: "/* Plotly */")


def charts(path: Path) -> dict[str, list[dict[str, Any]]]:
    """Title -> what Plotly draws, of a page."""
    pattern = r'<figcaption class="title">(.*?)</figcaption>.*?"application/json">(.*?)</script>'
    found = re.findall(pattern, path.read_text())
    return {unescape(title): json.loads(text)["data"] for title, text in found}


def lines(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    def make(name: str = "run", **final: Any) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "metrics.jsonl").write_text(lines(STEPS))
        (folder / "samples.jsonl").write_text(lines(SAMPLES))
        (folder / "timeline.jsonl").write_text(lines(TIMELINE))
        (folder / "final.json").write_text(json.dumps({**FINAL, **final}))
        config = {"model": EVIL, "partial_rollout": {"mode": "apr", "max_staleness": 2}}
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return make


def warnings_of(folder: Path) -> str:
    run = load_run(folder)
    return "\n".join(check_run(run, summarize(run)))


def test_summary_has_exactly_these_keys_and_values(make_run: Callable[..., Path]) -> None:
    report = write_report(make_run())
    summary = json.loads(report.summary_path.read_text())
    assert list(summary) == list(EXPECTED)
    assert summary == EXPECTED
    assert ("Responses interrupted", "5  (resumed 4)") in report.headline
    assert report.warnings == []


def test_engines_that_were_not_there_yet_did_not_idle(make_run: Callable[..., Path]) -> None:
    """They counted as idle from the run's begin, and after they had gone."""
    folder = make_run()
    rows = [
        {"time_s": 4.0, "before": 2, "after": 1},
        {"time_s": 16.0, "before": 1, "after": 2},
        {"time_s": 50.0, "before": 2, "after": 1},
    ]
    (folder / "engines.jsonl").write_text(lines(rows))
    ratio = summarize(load_run(folder))["generation_idle_ratio"]
    assert ratio == pytest.approx(1 - 12 / (6 + 2 * 6)), "one engine until 16 s, then two"


def test_the_page_counts_engines_and_train_workers(make_run: Callable[..., Path]) -> None:
    text = write_report(make_run(num_replicas=1, num_train_workers=2)).html_path.read_text()
    assert "1 engine, 2 train workers" in text


@pytest.mark.parametrize("key", EXPECTED)
def test_each_figure(make_run: Callable[..., Path], key: str) -> None:
    assert summarize(load_run(make_run()))[key] == EXPECTED[key]


def test_the_first_step_starts_when_the_servers_are_ready(make_run: Callable[..., Path]) -> None:
    assert training_windows(load_run(make_run(setup_s=11.0))) == ((11.0, 22.0),)


@pytest.mark.parametrize(
    ("num_steps", "first", "last", "remark"),
    [
        (1, 0.1, 0.1, "of the only step"),
        (3, 0.1, 0.3, "first and last step"),
        (4, 0.15, 0.35, "mean of the first and last 2 steps"),
        (6, 0.2, 0.5, "mean of the first and last 3 steps"),
    ],
)
def test_the_rewards_at_both_ends_of_a_short_run_share_no_step(
    make_run: Callable[..., Path], num_steps: int, first: float, last: float, remark: str
) -> None:
    run = load_run(make_run())
    run = dataclasses.replace(run, steps=run.steps[:num_steps])
    summary = summarize(run)
    assert summary["reward_first"] == pytest.approx(first)
    assert summary["reward_last"] == pytest.approx(last)
    assert html._reward(summary)[1] == remark


def test_engines_that_are_paused_are_not_called_idle(
    make_run: Callable[..., Path], tmp_path: Path
) -> None:
    """known fault: the share in which engines are paused was in it, beside doctor's idle share."""
    headline = dict(write_report(make_run()).headline)
    assert headline["Generation"] == "10 tok/s  (engines idle or paused 50.0% of the time)"
    compared = write_comparison([make_run("a"), make_run("b")], tmp_path / "compare.html")
    assert "engines idle or paused" in [row.name for row in compared.figures]


def test_a_step_is_none_of_the_optimizer(make_run: Callable[..., Path], tmp_path: Path) -> None:
    """known fault: with `train.mini_batches` or `epochs` a step has several of these."""
    report = write_report(make_run())
    assert dict(report.headline)["Steps"] == "6  (policy version 6)"
    compared = write_comparison([make_run("a"), make_run("b")], tmp_path / "compare.html")
    pages = [report.html_path.read_text(), (tmp_path / "compare.html").read_text()]
    texts = [*pages, comparison_text(compared), *(spec.description for spec in SPECS)]
    assert not any("optimizer step" in text.lower() for text in texts)


def test_the_bound_is_the_largest_that_a_step_had(make_run: Callable[..., Path]) -> None:
    """known fault: a run that went on with a smaller one was said to have trained old tokens."""
    folder = make_run(max_staleness=1)
    starts = [(0, 2), (3, 1), (6, 9)]  # the last one trained nothing
    rows = [{"time_s": float(step), "step": step, "max_staleness": age} for step, age in starts]
    (folder / "ranks.jsonl").write_text(lines(rows))
    assert summarize(load_run(folder))["max_staleness"] == 2
    assert not warnings_of(folder)


@pytest.mark.parametrize("status", ["stopped", "failed"])
def test_what_was_generated_after_the_last_step_makes_no_run_faster(
    make_run: Callable[..., Path], status: str
) -> None:
    """known fault: of a run that ended while its trainer starved these tokens were in the rate, and
    their time was not."""
    summary = summarize(load_run(make_run(status=status, tokens_generated=90_000)))
    assert summary["tokens_generated"] == 90_000
    assert summary["rollout_tokens_per_s"] == pytest.approx(100 / 12)


def test_a_part_that_came_to_no_step_takes_no_tokens_from_those_before_it(
    make_run: Callable[..., Path],
) -> None:
    """known fault: of a run that was killed, and failed as it was gone on with, the rate had all of
    the time and the tokens until the last step alone."""
    folder = make_run(status="failed", tokens_generated=900)
    row = {"time_s": 40.0, "step": 6, "ended": "killed", "tokens_generated": 800}
    (folder / "resumes.jsonl").write_text(lines([row]))
    run = load_run(folder)
    ((begin, end),) = training_windows(run)
    seconds = end - begin
    assert end == 40.0 and summarize(run)["rollout_tokens_per_s"] == pytest.approx(800 / seconds)


def test_a_run_that_was_given_engines_has_them_before_its_end(
    make_run: Callable[..., Path],
) -> None:
    """known fault: its report had those of its settings until final.json was there."""
    folder = make_run()
    (folder / "final.json").unlink()
    (folder / "config.json").write_text('{"rollout": {"num_replicas": 2}}')
    assert summarize(load_run(folder))["num_replicas"] == 2
    (folder / "engines.jsonl").write_text(lines([{"time_s": 12.0, "before": 2, "after": 3}]))
    assert summarize(load_run(folder))["num_replicas"] == 3


@pytest.mark.parametrize(("starts", "has"), [([1, 3, 2], 2), ([], 4)])
def test_a_run_whose_train_workers_come_and_go_has_a_report_before_its_end(
    make_run: Callable[..., Path], starts: list[int], has: int
) -> None:
    """known fault: a TypeError, as the settings say `[least, most]`."""
    folder = make_run()
    (folder / "final.json").unlink()
    (folder / "config.json").write_text('{"scaling": {"num_workers": [1, 4]}}')
    rows = [{"time_s": 0.0, "step": k, "num_train_workers": n} for k, n in enumerate(starts)]
    (folder / "ranks.jsonl").write_text(lines(rows))
    assert dict(write_report(folder).headline)["Mode"].endswith(f"{has} train workers)")


@pytest.mark.parametrize(
    ("final", "warning"),
    [
        ({"samples_trained": 4}, "samples_trained = 4, the recorded rows say 3"),
        ({"tokens_trained": 61}, "tokens_trained = 61, the recorded rows say 60"),
        ({"steps": 7}, "steps = 7, the recorded rows say 6"),
        ({"tokens_buffered": 26}, "ledger_error = 0, its counters give -1"),
        ({"ledger_error": 3}, "off by 3 tokens"),
        ({"max_staleness": 1}, "staleness 2 was trained, above the bound of 1"),
        ({"samples_interrupted": 0}, "but 1 trained samples were interrupted"),
        ({"status": "failed", "error": "StarvedError: x"}, "the run failed: StarvedError: x"),
        ({"status": "stopped", "error": "stopped by SIGTERM"}, "the run was stopped by SIGTERM"),
    ],
)
def test_sources_that_disagree_warn(
    make_run: Callable[..., Path], final: dict[str, Any], warning: str
) -> None:
    assert warning in warnings_of(make_run(**final))


def test_groups_that_failed_are_told_with_the_last_error(make_run: Callable[..., Path]) -> None:
    folder = make_run()
    error = "reward of sample e0-4-5 raised: ValueError: cannot score"
    rows = [
        {"group_id": "e0-3", "reason": "failed", "num_generated": 20},  # of an older version
        {"group_id": "e0-4", "reason": "failed", "num_generated": 10, "error": error},
        {"group_id": "e0-5", "reason": "stale", "num_generated": 10},
    ]
    (folder / "dropped.jsonl").write_text(lines(rows))
    report = write_report(folder)
    line = "2 groups were dropped as something failed (25% of the generated tokens); the last: "
    line += error
    assert report.warnings == [line]
    assert line in report.html_path.read_text()
    again = {"group_id": "e0-3", "reason": "failed", "num_generated": 5, "error": error}
    (folder / "dropped.jsonl").write_text(lines([*rows, again]))
    fewer = line.replace("25%", "12%")
    assert warnings_of(folder) == fewer, "known fault: one that failed again was another one"
    (folder / "poison.jsonl").write_text(lines([{"row": 7, "error": "engine b is dead"}]))
    told = (
        "1 prompt was set aside, as engines died of them; the last: row 7 of the dataset, engine b"
    )
    assert told in warnings_of(folder)
    (folder / "poison.jsonl").unlink()
    (folder / "dropped.jsonl").write_text(lines(rows[2:]))
    assert warnings_of(folder) == ""


@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl", "timeline.jsonl"])
@pytest.mark.parametrize("tail", ['{"step": 6, "rew', "\0\0\0", '{"a": "\xe9'])
def test_a_cut_off_last_line_is_skipped(
    make_run: Callable[..., Path], name: str, tail: str
) -> None:
    folder = make_run()
    with (folder / name).open("a", encoding="latin-1") as file:
        file.write(tail)
    run = load_run(folder)
    assert summarize(run)["steps"] == 6
    assert (len(run.samples), len(run.timeline)) == (3, 9)
    if tail.strip("\0"):
        assert f"{name}: the last line" in warnings_of(folder)
    write_report(folder)


@pytest.mark.parametrize(
    ("name", "line", "message"),
    [
        ("metrics.jsonl", "{half", r"metrics\.jsonl, line 1: no JSON"),
        ("metrics.jsonl", "[1]", "line 1: a list instead of an object"),
        ("metrics.jsonl", '{"step": 0}', "line 1: time_s = None is no number"),
        ("samples.jsonl", '{"step": "x"}', r"samples\.jsonl, line 1: step = 'x' is no number"),
        (
            "timeline.jsonl",
            '{"start_s": 0, "end_s": 1, "what": "wait"}',
            r"timeline\.jsonl, line 1: actor = None is no text",
        ),
    ],
)
def test_other_garbage_names_file_and_line(
    make_run: Callable[..., Path], name: str, line: str, message: str
) -> None:
    folder = make_run()
    (folder / name).write_text(line + "\n" + (folder / name).read_text())
    with pytest.raises(RunFolderError, match=message):
        load_run(folder)


def test_a_killed_run_is_reported_from_its_rows(make_run: Callable[..., Path]) -> None:
    folder = make_run()
    (folder / "final.json").unlink()
    summary = json.loads(write_report(folder).summary_path.read_text())
    assert list(summary) == list(EXPECTED)
    assert summary["mode"] == "apr"
    assert summary["max_staleness"] == 2
    assert summary["wall_s"] == 30.0  # the last time that was recorded
    assert summary["policy_version"] == 6
    assert summary["tokens_generated"] == 100  # the last step's cumulative counter
    assert summary["tokens_trained"] == 60
    assert summary["ledger_error"] is None
    assert "final.json is missing: the run ended before" in warnings_of(folder)


def test_a_run_that_goes_on_is_not_said_to_have_ended(make_run: Callable[..., Path]) -> None:
    """known fault: its report said that it ended before final.json was written."""
    folder = make_run()
    (folder / "final.json").unlink()
    with hold_folder(folder):
        assert warnings_of(folder) == "final.json is missing: the run goes on"


def test_what_rewards_told_beside_their_number_has_charts(make_run: Callable[..., Path]) -> None:
    folder = make_run()
    parts = {f"reward/{EVIL}_{what}": i for i, what in enumerate(("min", "mean", "max"))}
    rows = [{**row, **parts, "reward/form_mean": row["step"]} for row in STEPS[1:]]
    (folder / "metrics.jsonl").write_text(lines([STEPS[0], *rows]))
    report = write_report(folder)
    summary = json.loads(report.summary_path.read_text())
    assert summary["reward_parts"] == {
        EVIL: {"first": 1.0, "last": 1.0},
        "form": {"first": 1.5, "last": 4.5},
    }
    page = report.html_path.read_text()
    assert "Parts of the reward" in page and "form" in page and EVIL not in page


def test_a_run_whose_worker_died_is_reported(make_run: Callable[..., Path]) -> None:
    folder = make_run()
    final = {"status": "failed", "error": "RolloutError: it died", "steps": 6, "ledger_error": None}
    (folder / "final.json").write_text(json.dumps(final))
    assert write_report(folder).warnings == ["the run failed: RolloutError: it died"]


def test_masked_tokens_are_not_trained_and_have_no_age(make_run: Callable[..., Path]) -> None:
    folder = make_run(
        tokens_trained=48, tokens_discarded={"stale": 12, "shutdown": 8, "masked": 12}
    )
    masked = ({"num_masked_tokens": 10, "staleness": None}, {"num_masked_tokens": 2}, {})
    rows = [{**row, **change} for row, change in zip(SAMPLES, masked, strict=True)]
    (folder / "samples.jsonl").write_text(lines(rows))
    summary = summarize(load_run(folder))
    assert (summary["staleness_max"], summary["staleness_mean"]) == (2, pytest.approx(1.5))
    assert (summary["samples_trained"], summary["tokens_trained"]) == (3, 48)
    assert write_report(folder).warnings == []
    assert "discarded: masked" in write_report(folder).html_path.read_text()
    (folder / "final.json").unlink()
    assert summarize(load_run(folder))["tokens_trained"] == 48


def test_an_age_must_be_there_even_if_it_is_null(make_run: Callable[..., Path]) -> None:
    folder = make_run()
    rows = [{key: value for key, value in SAMPLES[0].items() if key != "staleness"}]
    (folder / "samples.jsonl").write_text(lines(rows))
    with pytest.raises(RunFolderError, match="line 1: staleness = None is no number"):
        load_run(folder)


def test_steps_without_a_weight_sync_do_not_lower_its_median(make_run: Callable[..., Path]) -> None:
    folder = make_run()
    rows = [{**row, "weight_sync_s": 0.0 if row["step"] % 2 else 0.4} for row in STEPS]
    (folder / "metrics.jsonl").write_text(lines(rows))
    assert summarize(load_run(folder))["weight_sync_s"] == {"p50": 0.4, "max": 0.4}


@pytest.mark.parametrize("kept", ["config.json", "final.json", "timeline.jsonl", "metrics.jsonl"])
def test_a_run_that_hardly_began_still_gets_a_page(
    make_run: Callable[..., Path], kept: str
) -> None:
    folder = make_run()
    for file in folder.iterdir():
        if file.name != kept:
            file.unlink()
    report = write_report(folder)
    assert "no sample was trained" in report.warnings
    assert report.html_path.read_text().endswith("</html>\n")


def test_a_folder_without_a_run_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no run folder"):
        load_run(tmp_path)


def test_nan_does_not_reach_the_json_and_is_told(make_run: Callable[..., Path]) -> None:
    folder = make_run()
    rows = [dict(row) for row in STEPS]
    rows[2]["reward_mean"] = math.nan
    rows[3]["loss"] = math.inf
    (folder / "metrics.jsonl").write_text(lines(rows))
    report = write_report(folder)
    assert "NaN" not in report.summary_path.read_text()
    assert any("no finite number in 1 steps" in w for w in report.warnings)
    drawn = charts(report.html_path)
    assert drawn["Reward"][0]["y"][2] is None
    assert drawn["Loss"][0]["y"][3] is None


class Balance(HTMLParser):
    """Collects tags and checks that each one is closed."""

    VOID = frozenset({"meta"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()
        self.links: list[str] = []
        self.scripts = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        self.links += [str(v) for k, v in attrs if k in ("src", "href")]
        self.scripts += tag == "script" and ("type", "application/json") not in attrs
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_what_starts_is_shown_and_is_no_part_of_the_training(make_run: Callable[..., Path]) -> None:
    folder = make_run(setup_s=0.5)
    before = training_windows(load_run(folder))
    started = [("engine-0", "start"), ("trainer", "load"), ("trainer", "compile")]
    rows = [{"actor": a, "what": w, "start_s": 1.0, "end_s": 9.0} for a, w in started]
    (folder / "timeline.jsonl").write_text(lines([*rows, *TIMELINE]))
    assert training_windows(load_run(folder)) == before
    text = write_report(folder).html_path.read_text()
    for part in ("engine starts", "trainer loads the model", "trainer compiles"):
        assert part in text


def test_the_page_stands_alone_and_escapes_text(make_run: Callable[..., Path]) -> None:
    folder = make_run(status="failed", error=EVIL)
    rows = [*TIMELINE, {"actor": EVIL, "what": EVIL, "start_s": 10.0, "end_s": 16.0}]
    (folder / "timeline.jsonl").write_text(lines(rows))
    text = write_report(folder).html_path.read_text()
    parser = Balance()
    parser.feed(text)
    assert parser.open == []
    assert parser.scripts == 2  # Plotly, and what calls it
    assert parser.links == []
    assert "http" not in text.replace("http-equiv", "")
    assert EVIL not in text
    assert "&lt;script&gt;" in text
    for part in ("Reward", "Staleness of the trained", "interrupted and resumed (1)", "engine-1",
                 "discarded: stale", "partial_rollout.max_staleness", "time (s)"):  # fmt: skip
        assert part in text


def test_only_the_pages_own_scripts_may_run(
    make_run: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page, "get_plotlyjs", get_plotlyjs)
    text = write_report(make_run()).html_path.read_text()
    policy = re.search(r'Content-Security-Policy" content="(.*?)"', text)
    assert policy is not None
    allowed = re.findall(r"'sha256-(.*?)'", policy[1])
    scripts = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    assert allowed == [
        base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts
    ]
    assert len(scripts) == 2 and "Plotly.newPlot" in scripts[1] and len(scripts[0]) > 1_000_000
    assert policy[1].startswith("default-src 'none'")
    assert "unsafe-eval" not in policy[1]


def test_figures_hold_what_the_run_recorded(make_run: Callable[..., Path]) -> None:
    drawn = charts(write_report(make_run()).html_path)
    steps, average = drawn["Reward"]
    assert steps["x"] == [0, 1, 2, 3, 4, 5]
    assert steps["y"] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.6])
    assert average["y"][-1] == pytest.approx(0.55)
    (ages,) = drawn["Staleness of the trained samples"]
    assert dict(zip(ages["x"], ages["y"], strict=True)) == {0: 1, 1: 1, 2: 1}
    spans = {trace["name"]: trace for trace in drawn[DETAIL]}
    assert spans["trainer waits for a batch"]["x"] == [10.0, 11.0, None, 12.0, 12.5, None]
    assert spans["trainer waits for a batch"]["y"] == [2, 2, None, 2, 2, None]
    assert spans["end of a step"]["x"][-3:] == [22.0, 22.0, None]


def test_a_long_run_shows_the_spans_of_its_middle(
    make_run: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeline, "_MAX_SPANS", 4)
    drawn = charts(write_report(make_run()).html_path)
    (detail,) = (traces for title, traces in drawn.items() if title.startswith("Each span from"))
    shown = [x for trace in detail if trace["name"] != "end of a step" for x in trace["x"]]
    assert len(shown) == 4 * 3


def test_lanes_and_charts_that_have_no_room_are_counted(make_run: Callable[..., Path]) -> None:
    """known fault: what was beyond them was left out without a word."""
    folder = make_run()
    assert " shown; " not in write_report(folder).html_path.read_text()
    parts = {f"reward/part-{i}_mean": i for i in range(13)}
    (folder / "metrics.jsonl").write_text(lines([{**row, **parts} for row in STEPS]))
    others = [{**TIMELINE[0], "actor": f"engine-{i}"} for i in range(20)]
    (folder / "timeline.jsonl").write_text(lines([*TIMELINE, *others]))
    page = write_report(folder).html_path.read_text()
    assert "17 of 21 lanes shown; timeline.jsonl has all" in page
    assert "12 of 13 charts shown; metrics.jsonl has all" in page


def test_states_that_overlap_share_a_column(make_run: Callable[..., Path]) -> None:
    drawn = charts(write_report(make_run()).html_path)
    columns: dict[tuple[float, float], float] = {}
    for trace in drawn["The whole run: share of time in each state"]:
        for x, height, base in zip(trace["x"], trace["y"], trace["base"], strict=True):
            lane = round(base)
            columns[x, lane] = columns.get((x, lane), 0.0) - height
    assert {lane for _, lane in columns} == {0, 1, 2}
    assert max(columns.values()) == pytest.approx(0.76)  # the height of a lane


def test_evaluations_are_a_table_and_none_is_no_table(make_run: Callable[..., Path]) -> None:
    folder = make_run()
    assert "held-out" not in write_report(folder).html_path.read_text()
    row = {"policy_version": 20, "num_samples": 64, "num_failed": 1, "reward_mean": 0.9063}
    row |= {"pass_at_k": {"1": 0.9063}, "response_tokens_mean": 29.4, "seconds": 4.06}
    row["suites"] = {"hard": {**row, "num_samples": 9, "reward_mean": 0.25, "seconds": None}}
    nothing = {**row, "policy_version": 30, "num_samples": 0, "reward_mean": None, "pass_at_k": {}}
    del nothing["suites"]
    (folder / "evaluations.jsonl").write_text(lines([row, nothing]))
    html = write_report(folder).html_path.read_text()
    assert '>version 20, hard</td><td class="n">0.250<' in html
    assert "version 30, hard" not in html
    for text in ("held-out", "version 20", "0.906", "1: 0.906", "29.4", "4.1 s", "version 30"):
        assert text in html


def test_the_best_evaluation_is_told_at_the_end_and_compared(make_run, tmp_path: Path) -> None:
    """known fault: the last lines of a run had the rewards of training alone."""
    rows = [
        {"policy_version": version, "num_samples": 8, "num_failed": 0, "reward_mean": reward}
        for version, reward in ((0, 0.25), (2, 0.75), (4, 0.75), (6, 0.5), (8, None))
    ]
    with_them, without = make_run("a"), make_run("b")
    (with_them / "evaluations.jsonl").write_text(lines(rows))
    told = "0.250 → 0.500  (of versions 0 and 6; best 0.750, of version 2)"
    assert ("Held-out reward", told) in write_report(with_them).headline
    assert "Held-out reward" not in dict(write_report(without).headline)
    compared = write_comparison([with_them, without], tmp_path / "compare.html")
    named = {row.name: row.values for row in compared.figures}
    assert named["held-out reward, last evaluation"] == ("0.500", "–")
    assert named["held-out reward, best evaluation"] == ("0.750, version 2", "–")
    (with_them / "evaluations.jsonl").write_text(lines(rows[3:]))
    assert ("Held-out reward", "0.500  (of version 6)") in write_report(with_them).headline
    compared = write_comparison([without, make_run("c")], tmp_path / "compare.html")
    assert not any("held-out" in row.name for row in compared.figures)


def test_the_time_of_a_step_has_what_the_trainer_waited_for_a_sync(make_run) -> None:
    """The whole sync may run beside training, and was counted into the step."""
    rows = [{**row, "weight_sync_s": 77.25, "weight_wait_s": 0.0625} for row in STEPS]
    folder = make_run()
    (folder / "metrics.jsonl").write_text(lines(rows))
    html = write_report(folder).html_path.read_text()
    chart = html[html.index("waits for a sync") - 400 :][:800]
    assert "0.0625" in chart and "77.25" not in chart
    assert "sync 0.06 s" in step_line(step_row(**rows[0]), 6)


def test_comparison_has_the_ratio_of_wall_times(
    make_run: Callable[..., Path], tmp_path: Path
) -> None:
    out = tmp_path / "docs" / "compare.html"
    compared = write_comparison([make_run("a", mode="sync", wall_s=50.0), make_run("b")], out)
    named = {row.name: row for row in compared.figures}
    assert named["wall time (s)"].cells[1:] == ("50.0", "25.0", "2.00")
    assert named["training window (s)"].cells[1:] == ("12.0", "12.0", "1.00")
    # Moving average of 2 steps, the highest of which is (0.5 + 0.6) / 2, in both.
    assert named["training to reward 0.550 (s)"].cells[1:] == ("12.0", "12.0", "1.00")
    assert not compared.settings and not compared.notes
    assert "wall time (s)" in comparison_text(compared)
    parser = Balance()
    parser.feed(out.read_text())
    assert parser.open == []
    assert "Reward against wall time" in out.read_text()


def test_comparison_names_the_runs_and_says_what_differs(
    make_run: Callable[..., Path], tmp_path: Path
) -> None:
    runs = [make_run("lr4"), make_run("lr3")]
    for run, rate in zip(runs, (1e-4, 1e-3), strict=True):
        config = json.loads((run / "config.json").read_text())
        (run / "config.json").write_text(json.dumps({**config, "train": {"learning_rate": rate}}))
    (runs[1] / "metrics.jsonl").write_text(lines(STEPS[:-1]))
    compared = write_comparison(runs, tmp_path / "compare.html")
    text = comparison_text(compared)
    assert text.splitlines()[0].split() == ["lr4", "lr3", "ratio"]
    assert compared.settings == [("train.learning_rate", ("0.0001", "0.001"), "")]
    assert "the runs have different numbers of steps: lr4 6 and lr3 5" in text
    page = (tmp_path / "compare.html").read_text()
    for told in (
        "lr4 (apr) against lr3 (apr)",
        "train.learning_rate",
        "different numbers of steps",
    ):
        assert told in page


def test_comparison_says_in_a_terminal_too_how_a_run_ended(
    make_run: Callable[..., Path], tmp_path: Path
) -> None:
    failed = make_run("b", status="failed", error="TrainError: no memory")
    compared = write_comparison([make_run("a"), failed], tmp_path / "compare.html")
    said = "b: the run failed: TrainError: no memory"
    assert f"\n  note: {said}" in comparison_text(compared)
    assert (tmp_path / "compare.html").read_text().count(said) == 1


def test_settings_that_one_run_lacks_differ_too() -> None:
    first = {"train": {"steps": 2, "lora": None}, "reward": "r:f", "algorithm": {"kwargs": {}}}
    second = {
        "train": {"steps": 2, "lora": {"rank": 4}},
        "reward": "r:g",
        "algorithm": {"kwargs": {}},
    }
    assert [row.cells[:-1] for row in other_settings(first, second)] == [
        ("train.lora", "null", "not set"), ("reward", "r:f", "r:g"),
        ("train.lora.rank", "not set", "4"),
    ]  # fmt: skip
    assert [row.values for row in other_settings(first, first, second)][1] == ("r:f", "r:f", "r:g")


def test_the_rewards_of_a_comparison_have_their_standard_errors(
    make_run: Callable[..., Path], tmp_path: Path
) -> None:
    """known fault: nothing told whether a difference is more than chance."""
    runs = [make_run("a"), make_run("b")]
    for run, rewards in zip(runs, ([0.5, 0.5, 0.5, 0.7, 0.9, 0.8], [0.25]), strict=True):
        rows = [{**STEPS[k], "reward_mean": reward} for k, reward in enumerate(rewards)]
        (run / "metrics.jsonl").write_text(lines(rows))
    named = {row.name: row for row in write_comparison(runs, tmp_path / "c.html").figures}
    # Of a run of 6 steps 3 are at an end: the deviation of 0.7, 0.9 and 0.8 is 0.1.
    error = "steps (at most 5; ± standard error)"
    assert named[f"reward, first {error}"].values == ("0.500 ± 0.000", "0.250")
    assert named[f"reward, last {error}"].values == ("0.800 ± 0.058", "0.250")


def test_a_comparison_has_more_than_two_runs(make_run: Callable[..., Path], tmp_path: Path) -> None:
    runs = [make_run(name) for name in "abc"]
    (runs[2] / "metrics.jsonl").write_text(lines(STEPS[:-1]))
    compared = write_comparison(runs, tmp_path / "c.html")
    text = comparison_text(compared)
    assert text.splitlines()[0].split() == ["a", "b", "c"]
    assert "numbers of steps: a 6 and b 6 and c 5" in text and not any(
        row.ratio or len(row.values) != 3 for row in compared.figures
    )
    page = (tmp_path / "c.html").read_text()
    assert "a (apr) against b (apr) against c (apr)<" in page and "c: moving average" in page


def test_the_reward_whose_time_is_told_was_reached_by_both(
    make_run: Callable[..., Path], tmp_path: Path
) -> None:
    runs = [make_run("a"), make_run("b")]
    for run, reward in zip(runs, (0.9, 1.0), strict=True):
        rows = [
            {**STEPS[0], "step": k, "time_s": 12.0 + k, "reward_mean": reward * (k >= begin)}
            for k in range(60)
            for begin in [55 if run is runs[1] else 0]
        ]
        (run / "metrics.jsonl").write_text(lines(rows))
    named = {row.name: row for row in write_comparison(runs, tmp_path / "c.html").figures}
    # The last five steps of b have 1.0; its moving average, of six steps, is 0.83 at most.
    # That of a is of six steps after 7 s.
    assert named["training to reward 0.833 (s)"].cells[1:] == ("7.0", "61.0", "0.11")


def test_one_batch_alone_reaches_no_reward(make_run: Callable[..., Path], tmp_path: Path) -> None:
    """known fault: the moving average of the first step was that step, so that a run whose first
    batch was a lucky one was said to have had nothing to learn."""
    runs = [make_run("a"), make_run("b")]
    for run in runs:
        rewards = [0.9] * (run is runs[0]) + [0.1] * (29 + (run is runs[1])) + [0.9] * 30
        rows = [
            {**STEPS[0], "step": k, "time_s": 12.0 + k, "reward_mean": reward}
            for k, reward in enumerate(rewards)
        ]
        (run / "metrics.jsonl").write_text(lines(rows))
    named = {row.name: row for row in write_comparison(runs, tmp_path / "c.html").figures}
    assert named["training to reward 0.900 (s)"].values == ("37.0", "37.0")


def test_helpers() -> None:
    assert covered_s([(0, 2), (1, 3), (5, 9)], (1, 6)) == 3
    assert moving_average([1, math.nan, 3], 2)[:2] == [1, 1]
    assert [duration(s) for s in (None, 8.34, 245, 7380)] == [
        "–", "8.3 s", "4 min 05 s", "2 h 03 min",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("xs", "axis"),
    [
        ([0, 1], (1, [-0.5, 1.5])),  # known fault: 1.25, 1.5 where there are two steps
        ([7], (1, [6.5, 7.5])),
        ([0, 64], (None, None)),
        ([0.5, 1.5], (None, None)),
        ([], (None, None)),
    ],
)
def test_a_short_axis_of_steps_has_no_fractions(xs: list[float], axis: tuple[Any, Any]) -> None:
    drawn = figure("Loss", [line(xs, xs, "loss", SERIES[0])], x_label="optimizer step")
    (text,) = re.findall(r'<script type="application/json">(.*?)</script>', drawn)
    found = json.loads(text)["layout"]["xaxis"]
    assert (found.get("dtick"), found.get("range")) == axis


@pytest.mark.parametrize("num_steps", [1, 2, 3, 6])
def test_a_few_steps_have_no_mean_of_the_last_ones(
    make_run: Callable[..., Path], num_steps: int
) -> None:
    run = load_run(make_run())
    chart = reward_chart(dataclasses.replace(run, steps=run.steps[:num_steps]))
    assert ("mean of the last 2 steps" in chart) == (num_steps > 2)
