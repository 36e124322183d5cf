"""What the benchmarks make of what they measured."""

from __future__ import annotations

import argparse
import importlib
import json
import random
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.killed_parts import KINDS
from tests.traces import make_trace
from tests.unit.test_batch_ahead import put

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks/results"


@pytest.fixture
def benchmark_named(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports one of them by its name."""
    for folder in ("benchmarks/peers", "benchmarks"):
        monkeypatch.syspath_prepend(str(ROOT / folder))
    return importlib.import_module


@pytest.fixture
def compare(benchmark_named: Any) -> ModuleType:
    return benchmark_named("compare")


def test_what_a_later_choice_would_have_replaced_is_counted(benchmark_named: Any) -> None:
    ahead = benchmark_named("chosen_ahead")
    counting = ahead.CountingStock(
        batch_size=2, max_staleness=4, on_stale="mask", num_ranks=1, micro_batch_tokens=64
    )
    for name, version in (("first", 0), ("newer", 1), ("newest", 1)):
        put(counting, name, version)
    for step, late in ((0, []), (1, [("older", 0)]), (2, [])):
        counting.grant(step, 1 + step, float(step))
        counting.choose(float(step))
        for name, version in late:
            put(counting, name, version)
        counting.end_step(step, step + 0.5)
    assert (ahead.CountingStock.num_chosen, ahead.CountingStock.num_ahead) == (6, 4)
    assert ahead.CountingStock.num_replaced == 2, "of step 2, by one that came while 1 was trained"


# -- beside a peer ---------------------------------------------------------------------------------


def peer_run(*ends: float, system: str = "trl", rewards: tuple[float, ...] = ()) -> dict[str, Any]:
    """A run whose steps ended at these times after its first generation."""
    steps = [
        {"time_s": end, "reward_mean": reward, "num_tokens": 10}
        for end, reward in zip(ends, rewards or [0.5] * len(ends), strict=True)
    ]
    return {"system": system, "repeat": 0, "start_s": 30.0, "steps": steps}


def test_verls_steps_are_stamped_as_they_come(benchmark_named, tmp_path: Path):
    log = tmp_path / "verl.jsonl"
    row = {"critic/score/mean": 0.5, "response_length/mean": 3.0, "timing_s/step": 2.0}
    steps = benchmark_named("verl_modes").Steps(log)
    whole = json.dumps({"step": 1, "data": row}) + "\n"
    before = time.time()
    log.write_text(whole + whole[:5])  # a line that is being written
    steps.look()

    found = steps.found({"batch_size": 4})
    assert found["steps"] == [{"time_s": pytest.approx(2.0), "reward_mean": 0.5, "num_tokens": 12}]
    assert before <= found["first_generation"] + 2.0 <= time.time()


def test_verls_engines_have_gpus_of_their_own_in_separate_async_alone(benchmark_named):
    task = {
        "kind": "spelling", "gpus": 2, "batch_size": 256, "group_size": 8, "steps": 4,
        "max_response_tokens": 256, "max_model_len": 512, "model": "m", "learning_rate": 1e-5,
        "memory_share": 0.4, "liger": False,
    }  # fmt: skip
    command = benchmark_named("verl_modes").command
    together = command("sync", 0, task, Path("p"))
    apart = command("separate_async", 0, task, Path("p"))
    assert "trainer.n_gpus_per_node=2" in together
    assert {"trainer.n_gpus_per_node=1", "actor_rollout_ref.rollout.n_gpus_per_node=1"} < set(apart)
    assert not any("rollout.n_gpus_per_node" in given for given in together)


def test_a_steps_seconds_leave_the_first_two_steps_out(compare):
    """Both sides compile in them, and engines fill."""
    assert compare.step_seconds(peer_run(50.0, 60.0, 63.0, 67.0)) == [3.0, 4.0]


def test_a_curve_is_the_mean_of_the_last_four_rewards(compare):
    run = peer_run(1, 2, 3, 4, 5, rewards=(0.0, 1.0, 0.5, 0.5, 1.0))
    assert compare.curve(run) == pytest.approx([0.0, 0.5, 0.5, 0.5, 0.75])


def test_a_goal_is_reached_at_the_end_of_the_step_whose_curve_has_it(compare):
    run = peer_run(1, 2, 3, 4, 5, rewards=(0.0, 1.0, 0.5, 0.5, 1.0))
    assert compare.seconds_to(0.5, run) == 2
    assert compare.seconds_to(0.7, run) == 5
    assert compare.seconds_to(0.8, run) is None


def test_another_system_begins_each_turn(compare):
    assert list(compare.turns(["trl", "sync", "apr"], [5, 6, 7, 8])) == [
        ("trl", 5), ("sync", 5), ("apr", 5),
        ("sync", 6), ("apr", 6), ("trl", 6),
        ("apr", 7), ("trl", 7), ("sync", 7),
        ("trl", 8), ("sync", 8), ("apr", 8),
    ]  # fmt: skip


def test_systems_have_medians_of_their_own_runs_and_count_failures(compare):
    runs = [
        peer_run(10, 12, 14, 16),
        peer_run(10, 12, 15, 18),
        {"system": "trl", "repeat": 2, "failed": "TimeoutExpired", "log": ""},
        {"system": "apr", "repeat": 0, "failed": "CalledProcessError", "log": ""},
    ]
    found = compare.figures(runs, [0.4, 0.6])
    assert found == {
        "trl": {
            "runs": 2, "failed": 1, "start_s": 30.0, "seconds": 17, "step_s": 2.5,
            "tokens_per_s": pytest.approx(4.375), "reward_last": 0.5,
            "seconds_to_reward": {"0.4": [10, 10], "0.6": [None, None]},
        },
        "apr": {"runs": 0, "failed": 1},
    }  # fmt: skip


def test_tokens_of_ours_are_those_of_the_loss(compare, tmp_path, monkeypatch):
    def end_early(command: list[str], out: Any, limit_s: float) -> dict[str, str]:
        (tmp_path / "apr--0").mkdir()
        for name in ("metrics.jsonl", "config.json"):
            (tmp_path / "apr--0" / name).touch()
        return {"failed": "not done"}

    row = {"time_s": 9.0, "reward_mean": 0.5, "num_tokens": 10, "num_masked_tokens": 3}
    data = argparse.Namespace(steps=[row], timeline=[{"what": "generate", "start_s": 5.0}])
    monkeypatch.setattr(compare, "run_to_end", end_early)
    monkeypatch.setattr(compare, "load_run", lambda _: data)
    task = {
        "kind": "spelling", "gpus": 2, "batch_size": 256, "group_size": 8, "steps": 4, "model": "m",
        "max_response_tokens": 256, "max_model_len": 512, "learning_rate": 1e-5, "prompts": "p",
        "reward": "r",
    }  # fmt: skip
    args = argparse.Namespace(max_num_seqs=256, set=[], limit=1.0)
    found = compare.our_run("apr", 0, task, tmp_path, None, args)
    assert found["steps"] == [{"time_s": 4.0, "num_tokens": 7, "reward_mean": 0.5}]


def peer_task(compare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Any:
    """The replay's task for a trace of 48 prompts, and its prompts."""
    trace = tmp_path / "trace.jsonl"
    rows = [
        {
            "prompt_id": group.prompt_id, "sample_index": index,
            "prompt_tokens": group.prompt_tokens, "response_tokens": sample.response_tokens,
        }
        for group in make_trace(48, seed=3).groups for index, sample in enumerate(group.samples)
    ]  # fmt: skip
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    contexts: list[int] = []

    def make_model(shape: str, folder: Path, *, context: int) -> Path:
        contexts.append(context)
        return folder

    monkeypatch.setattr(compare.gpu_models, "make_model", make_model)
    args = {
        "task": "replay", "trace": trace, "scale": 1.0, "group_size": 4, "reward_seconds": 0.0,
        "batch_prompts": 4, "steps": 2, "shape": "tiny", "gpus": 2, "learning_rate": 1e-4,
        "trl_memory": 0.4, "trl_rows": 2, "trl_liger": False, **options,
    }  # fmt: skip
    task = compare.replay_task(tmp_path, argparse.Namespace(**args))
    return task, pq.read_table(tmp_path / "prompts.parquet").to_pylist(), contexts[0]


def test_a_replay_asks_for_the_lengths_of_the_trace(compare, tmp_path, monkeypatch):
    task, prompts, context = peer_task(compare, tmp_path, monkeypatch)
    groups = make_trace(48, seed=3).groups[:32]  # of two steps, and of six to run ahead
    sizes = [[group.sample(i).response_tokens for i in range(4)] for group in groups]
    assert [row["lengths"] for row in prompts] == sizes
    assert len({row["prompt"] for row in prompts}) == 32
    longest = max(map(max, sizes))
    assert task["max_response_tokens"] == longest
    assert task["max_model_len"] == max(len(row["prompt"]) for row in prompts) + longest + 1
    assert context == max(1024, task["max_model_len"])


def test_a_replay_is_scaled_to_whole_tokens(compare, tmp_path, monkeypatch):
    _, whole, _ = peer_task(compare, tmp_path, monkeypatch)
    _, half, _ = peer_task(compare, tmp_path, monkeypatch, scale=0.5)
    for before, after in zip(whole, half, strict=True):
        assert after["lengths"] == [max(1, round(0.5 * n)) for n in before["lengths"]]


def test_steps_of_a_peer_count_where_all_of_its_processes_have_written_them(compare, tmp_path):
    lines = [
        {"time": 10.0 + i, "reward_mean": i / 10, "num_tokens": 5, "generation": [8.0 + i, 9.0 + i],
         "sync_s": 0.5}
        for i in range(3)
    ]  # fmt: skip
    for rank, count in ((0, 3), (1, 2)):
        (tmp_path / f"result.json.{rank}").write_text(
            "".join(json.dumps(line | {"reward_s": rank}) + "\n" for line in lines[:count])
        )
    found = compare.trl_steps(tmp_path / "result.json", 2)
    assert found["first_generation"] == 8.0 and found["generation_s"] == [1.0, 1.0]
    assert found["reward_s"] == [1, 1], "of the process that waited longest"
    assert found["steps"] == [
        {"time_s": 2.0, "reward_mean": 0.0, "num_tokens": 10},
        {"time_s": 3.0, "reward_mean": 0.1, "num_tokens": 10},
    ]
    assert compare.trl_steps(tmp_path / "result.json", 3) == {}


def test_programs_are_scored_by_what_they_return(benchmark_named, monkeypatch):
    programs = benchmark_named("programs")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    draw, right = random.Random(0), "```python\ndef f(a):\n    return {}\n```"
    values = {"the largest number": "max(a)", "the sum of the list a.": "sum(a)"}
    found = []
    while len(found) < 4:
        row = programs.one_row(draw)
        asked = row["prompt"][0]["content"]
        for what, value in values.items():
            if what in asked:
                found += [(right.format(value), row["tests"], 1.0)]
                found += [("Sure: " + right.format(f"{value} + 1"), row["tests"], 0.0)]
    texts, tests, scores = zip(*found, strict=True)
    said = [[{"role": "assistant", "content": text}] for text in texts]
    assert programs.trl_reward(said, list(tests), prompts=None) == list(scores)


def test_a_run_beyond_its_limit_leaves_no_process(compare, tmp_path):
    child = tmp_path / "child"
    script = f"setsid sleep 100 & echo $! > {child}; wait"
    found = compare.run_to_end(["bash", "-c", script], None, 1.0)
    assert found == {"failed": "not done after 1 s"}
    pid = int(child.read_text())
    deadline = time.monotonic() + 10
    while _is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _is_running(pid)
    assert compare.run_to_end(["false"], None, 10.0) == {"failed": "exit 1"}
    assert compare.run_to_end(["true"], None, 10.0) == {}


def _is_running(pid: int) -> bool:
    """Whether it lives, and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("text", ["enots", "ENOTS ", "enotsx", "enosx", "stone", "", "x", "en"])
def test_words_are_scored_as_reasoning_gym_does(benchmark_named, text):
    score = benchmark_named("spelling").score(text, "enots")
    gym = pytest.importorskip("reasoning_gym").create_dataset("spell_backward", size=1, seed=0)
    assert score == pytest.approx(gym.score_answer(text.strip(), {"answer": "enots"}))


# -- modes -----------------------------------------------------------------------------------------


def mode_run(mode: str, *ends: float) -> dict[str, Any]:
    steps = [{"time_s": 5.0 + end, "num_tokens": 100} for end in ends]
    return {"mode": mode, "seconds": ends[-1], "steps": steps}


def test_modes_are_compared_with_the_synchronous_one(benchmark_named):
    modes = benchmark_named("modes")
    runs = [
        mode_run("sync:turns", 4, 8, 12), mode_run("sync:turns", 4, 9, 14),
        mode_run("apr", 3, 5, 7),
    ]  # fmt: skip
    found = modes.figures(runs)
    assert modes.baseline(found) == "sync:turns"
    assert found["sync:turns"]["median_s"] == 13 and found["sync:turns"]["sync_over_this"] == 1
    apr = found["apr"]
    assert (apr["median_s"], apr["runs"]) == (7, 1)
    assert apr["sync_over_this"] == pytest.approx(13 / 7)
    assert (apr["later_step_s"], apr["later_tokens_per_s"]) == (2, 50)
    assert apr["later_sync_over_this"] == pytest.approx(4.5 / 2)


def test_tokens_that_are_too_old_for_the_loss_are_not_trained(benchmark_named):
    run = mode_run("apr", 3, 5, 7)
    run["steps"][2]["num_masked_tokens"] = 60
    found = benchmark_named("modes").figures([run])
    assert found["apr"]["later_tokens_per_s"] == (100 + 40) / 4


@pytest.mark.parametrize(("given", "at_once"), [((), 12), (("--reward-concurrency", "16"), 16)])
def test_no_reward_of_a_batch_waits_for_another_one_s(benchmark_named, monkeypatch, given, at_once):
    call = ["modes.py", "--trace", "t", "--batch-prompts", "3", "--group-size", "4", *given]
    monkeypatch.setattr(sys, "argv", call)
    assert benchmark_named("modes")._arguments().reward_concurrency == at_once


def test_without_a_synchronous_mode_nothing_is_compared(benchmark_named):
    modes = benchmark_named("modes")
    found = modes.figures([mode_run("apr", 3, 5, 7), mode_run("stream", 3, 6, 9)])
    assert modes.baseline(found) == ""
    assert {row["sync_over_this"] for row in found.values()} == {None}


def test_settings_of_a_mode_are_its_own(benchmark_named):
    modes = benchmark_named("modes")
    args = argparse.Namespace(set=["apr.max_staleness=2", "stream.admission=batch"])
    assert modes.mode_config("apr", args).max_staleness == 2
    assert modes.mode_config("stream", args).admission == "batch"
    assert modes.mode_config("sync:awake", args).overlap_sync is False


# -- what is kept ----------------------------------------------------------------------------------


FILES = sorted(path.name for path in RESULTS.glob("*.json"))


@pytest.mark.parametrize("name", [n for n in FILES if n.startswith(("modes-", "learning-"))])
def test_ratios_of_modes_follow_from_their_runs(benchmark_named, name):
    result = json.loads((RESULTS / name).read_text())
    found = benchmark_named("modes").figures(result["runs"])
    for mode, row in result["modes"].items():  # that of an older file has fewer figures
        known = found[mode].keys() & row.keys()
        assert {key: found[mode][key] for key in known} == {key: row[key] for key in known}
        assert known >= {"median_s", "runs"}


@pytest.mark.parametrize("name", [n for n in FILES if n.startswith("kills-")])
def test_costs_of_deaths_follow_from_their_runs(benchmark_named, name):
    result = json.loads((RESULTS / name).read_text())
    found = benchmark_named("kills").summary(result["runs"])
    assert {key: result[key] for key in found} == found
    assert set(found["lost_s"]) <= set(KINDS)


@pytest.mark.parametrize("name", [n for n in FILES if n.startswith("peers-")])
def test_figures_of_peers_follow_from_their_runs(compare, name):
    result = json.loads((RESULTS / name).read_text())
    rewards = [0.1, 0.15, 0.3] if "spelling" in name else [0.6, 0.7, 0.8]
    assert compare.figures(result["runs"], rewards) == result["systems"]


def test_the_cost_of_trackers_is_of_medians(benchmark_named):
    def run(seconds, step_s, cpu_step_s):
        return {"seconds": seconds, "step_s": step_s, "cpu_step_s": cpu_step_s}

    without = [run(50, 1.0, 0.1), run(52, 1.25, 0.1), run(54, 1.5, 0.4)]
    tracked = [run(52, 1.25, 0.125), run(52, 1.5, 0.125), run(60, 2.0, 0.1)]
    found = benchmark_named("trackers").cost({"without": without, "with": tracked})
    assert found == pytest.approx(
        {
            "ratio_of_runs": 1.0, "ratio_of_steps": 1.2,
            "cpu_s_more_a_step": 0.025, "cpu_share_of_a_step": 0.02,
        }
    )  # fmt: skip


def test_what_is_advised_is_what_the_second_run_follows(benchmark_named):
    for name, (advice, settings, _, followed) in benchmark_named("advice").CASES.items():
        setting, _, value = followed.partition("=")
        assert advice == f"{setting}: {value}", name
        assert settings.get(setting) != value


# -- small ones ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("others", "left"),
    [
        ([], [(0, 10)]),
        ([(2, 4)], [(0, 2), (4, 10)]),
        ([(-5, 1), (9, 20)], [(1, 9)]),
        ([(2, 4), (3, 6)], [(0, 2), (6, 10)]),
        ([(-1, 11)], []),
        ([(20, 30)], [(0, 10)]),
    ],
)
def test_what_is_left_of_a_span(benchmark_named, others, left):
    assert benchmark_named("churn").without((0, 10), others) == left


def test_every_kind_is_killed_as_often_as_the_others(benchmark_named):
    order = benchmark_named("kills").order(5, list(KINDS))
    for _ in range(3):
        assert sorted(next(order) for _ in KINDS) == sorted(KINDS)


def test_a_table_has_the_mean_and_the_spread_of_seeds(benchmark_named):
    ablation = benchmark_named("ablation")
    name = next(iter(ablation.OBJECTIVES))
    runs = [
        {"objective": name, "staleness": age, "held_out": [0.1, end]}
        for age, end in ((0, 0.5), (0, 0.75), (4, 0.25))
    ]
    lines = ablation.table(runs).splitlines()
    assert lines[0] == "| objective | staleness 0 | staleness 4 |"
    assert f"| {name} | 0.625 (0.500 to 0.750) | 0.250 |" in lines


def test_a_token_and_a_step_are_fitted_whatever_one_slow_step_took(benchmark_named):
    calibrate = benchmark_named("calibrate")
    points = [(100, 2.0), (200, 3.0), (300, 4.0), (400, 50.0), (500, 6.0)]
    assert calibrate._fitted(points) == pytest.approx((0.01, 1.0))
    assert calibrate._fitted([(100, 2.0), (200, 4.0)]) == pytest.approx((0.02, 0.0))


def test_steps_of_one_size_say_nothing_of_what_a_step_costs_beside_its_tokens(benchmark_named):
    calibrate = benchmark_named("calibrate")
    line = [(n, 0.5 + n * 1e-5) for n in (100_000, 150_000, 220_000)]
    assert calibrate._fitted(line) == pytest.approx((1e-5, 0.5))
    # four H200s with sync:awake: through these a line has next to no slope
    alike = [(178_009, 1.607), (175_843, 1.285), (236_892, 1.399), (233_052, 1.22)]
    slope, overhead = calibrate._fitted(alike)
    assert overhead == 0.0 and slope == pytest.approx(6.6e-6, rel=0.02)
