"""What the pages say of some measurements follows from their files."""

from __future__ import annotations

import importlib
import itertools
import json
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean, median
from types import ModuleType
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks/results"


class Timed(NamedTuple):
    """Seconds from the command to the first generation, from there to a reward of 0.15, and tokens
    trained per second."""

    start_s: float
    reward_s: float
    tokens_per_s: float


class Ratios(NamedTuple):
    """A peer's run over one of ours, of one host and seed."""

    generation: float
    command: float
    tokens: float


@pytest.fixture
def compare(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    for folder in ("benchmarks/peers", "benchmarks"):
        monkeypatch.syspath_prepend(str(ROOT / folder))
    return importlib.import_module("compare")


def result(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())


def words(page: str) -> str:
    return " ".join((ROOT / page).read_text(encoding="utf-8").split())


def timed(compare: ModuleType, run: dict[str, Any]) -> Timed:
    goal = compare.seconds_to(0.15, run)
    return Timed(run["start_s"], goal, compare.tokens_per_s(run))


def pairs(compare: ModuleType, runs: list[dict[str, Any]], ours: str) -> Iterable[list[Ratios]]:
    """Of each run of TRL, its ratios to ours of the same seed; runs are of one host."""
    for peer in (run for run in runs if run["system"] == "trl"):
        trl = timed(compare, peer)
        found = [
            timed(compare, run)
            for run in runs
            if run["system"] == ours and run["seed"] == peer["seed"]
        ]
        for start_s, _, reward_s, _, tokens_per_s in peer.get("printed", ()):
            found.append(Timed(start_s, reward_s, tokens_per_s))
        if found:
            yield [
                Ratios(
                    trl.reward_s / of_ours.reward_s,
                    (trl.start_s + trl.reward_s) / (of_ours.start_s + of_ours.reward_s),
                    of_ours.tokens_per_s / trl.tokens_per_s,
                )
                for of_ours in found
            ]


def test_ranges_beside_trl_have_every_pair_with_both_on_both_gpus(compare: ModuleType) -> None:
    ahead, seeds = result("peers-spelling-ahead-2xh200"), result("peers-spelling-seeds-2xh200")
    for run in seeds["runs"]:
        if run["system"] == "trl" and (row := seeds["printed"].get(f"apr:awake {run['seed']}")):
            run["printed"] = [row]
    staleness = result("peers-spelling-staleness-2xh200")["runs"]
    for run in staleness:
        run["system"] = run["system"].removesuffix(", bound 4")
    hosts = [
        ahead["runs"], ahead["before"], seeds["runs"], staleness,
        result("peers-spelling-blocks-2xh200")["runs"],
    ]  # fmt: skip
    of_trl = [pair for runs in hosts for pair in pairs(compare, runs, "apr:awake")]
    assert (len(of_trl), len(hosts)) == (10, 5)
    of_each = list(zip(*itertools.chain.from_iterable(of_trl), strict=True))
    low, high = Ratios(*map(min, of_each)), Ratios(*map(max, of_each))
    mean = fmean(fmean(ratios.generation for ratios in pair) for pair in of_trl)
    soon = f"{low.generation:.1f} to {high.generation:.1f} times as soon from the first "
    command = f"{low.command:.1f} to {high.command:.1f} times from the command on"
    tokens = f"{low.tokens:.1f} to {high.tokens:.1f} times as many tokens"
    told = f"{soon}generation on, {mean:.1f} on average, and {command}; {tokens}"
    assert told in words("docs/comparison.md")
    assert f"{soon}token on, and {command} (ten pairs" in words("README.md")
    assert tokens in words("README.md")


def test_a_gpu_for_each_is_compared_from_the_first_generation_on(compare: ModuleType) -> None:
    found = list(pairs(compare, result("peers-spelling-2xh100")["runs"], "apr"))
    (first,), (second,) = found
    told = f"{first.generation:.1f} and {second.generation:.1f} times as soon from the first "
    assert told + "generation on" in words("docs/comparison.md")


def test_every_reward_of_the_programs_counts(compare: ModuleType) -> None:
    trl, apr = result("peers-programs-1xh200")["runs"]
    goals = (0.2, 0.5, 0.7, 0.8)
    ratios = [compare.seconds_to(goal, trl) / compare.seconds_to(goal, apr) for goal in goals]
    told = f"mean rewards of 0.2 to 0.8 are reached {min(ratios):.1f} to {max(ratios):.1f} times"
    assert told in words("docs/comparison.md")


def test_ratios_of_the_programs_on_two_gpus_are_those_of_their_printed_lines(
    compare: ModuleType,
) -> None:
    measured = result("peers-programs-2xh200")
    generation, command, tokens = [], [], []
    for seed in (1, 2):
        trl, apr = (measured["printed"][f"{system} {seed}"] for system in ("trl", "apr:awake"))
        for goal, trl_s in trl["seconds_to_reward"].items():
            apr_s = apr["seconds_to_reward"][goal]
            generation.append(trl_s / apr_s)
            command.append((trl["start_s"] + trl_s) / (apr["start_s"] + apr_s))
        tokens.append(apr["tokens_per_s"] / trl["tokens_per_s"])
        (run,) = (run for run in measured["runs"] if run["seed"] == seed)
        assert compare.seconds_to(0.5, run) == apr["seconds_to_reward"]["0.5"]
    soon = f"{min(generation):.1f} to {max(generation):.1f} times as soon from the first "
    start = f"{min(command):.1f} to {max(command):.1f} times from the command on"
    many = f"{min(tokens):.1f} and {max(tokens):.1f} times as many tokens (two pairs)"
    assert f"{soon}generation on, and {start}; {many}" in words("docs/comparison.md")


def test_performance_says_what_engines_idled_at_most() -> None:
    (run,) = (run for run in result("modes-4xh200")["runs"] if run["mode"] == "apr")
    idle = [engine["uptime_s"] - engine["busy_s"] for engine in run["final"]["engines"]]
    first, second = (100 * seconds / run["seconds"] for seconds in idle)
    assert f"| at most {first:.1f} and {second:.1f} % |" in words("docs/performance.md")


def test_performance_says_what_a_learning_run_trained_in_a_second() -> None:
    rows = {
        run["mode"]: sum(step["num_tokens"] for step in run["steps"]) / run["seconds"]
        for run in result("learning-2xh200")["runs"]
    }
    told = f"| trained tokens per second | {rows['sync']:,.0f} | {rows['apr']:,.0f} |"
    assert told in words("docs/performance.md")


def test_performance_says_how_long_the_trainer_of_short_steps_waited() -> None:
    waits: dict[str, list[float]] = {}
    for run in result("hand-over-2xh100")["runs"]:
        if "train.steps=96" in run["more"]:
            waits.setdefault(run["commit"], []).append(fmean(run["trainer_wait_s"][1:]))
    found = {f"{fmean(of_commit):.2f}" for of_commit in waits.values()}
    assert [len(of_commit) for of_commit in waits.values()] == [4, 4]
    (mean,) = found
    assert f"the trainer waited {mean} s a step on the mean" in words("docs/performance.md")


def test_the_simulator_s_page_has_every_prediction_of_four_gpus() -> None:
    measured = result("modes-4xh200")
    for row in (measured["predicted"], *measured["predicted_later"]):
        told = f"{row['sync_over_this']['apr']:.2f} ({row['error']['apr']:+.0%})"
        assert told.replace("%", " %") in words("docs/simulator.md")


def test_performance_says_what_choosing_a_batch_ahead_costs() -> None:
    def mean(trace: str, trainer: str, chosen: str, figure: str) -> float:
        named = {"trace": trace, "trainer": trainer, "chosen": chosen}
        rows = result("chosen-ahead")["rows"]
        return fmean(row[figure] for row in rows if named.items() <= row.items())

    told = words("docs/performance.md")
    cells = []
    for chosen in ("ahead", "0.5 s ahead", "at the step"):
        replaced, masked, age = (
            mean("gsm8k-16k", "slower", chosen, figure)
            for figure in ("replaced", "masked", "staleness_mean")
        )
        share = f"{replaced:.1%}" if replaced else "0"
        cells.append(f"| {share} | {masked:.1%}".replace("%", " %") + f" | {age:.2f} |")
        assert f"before ends, as runs do {cells[0]}" in told
    assert f"| 0.5 s before {cells[1]} | as the step begins {cells[2]}" in told
    share = mean("dapo-17k", "slower", "ahead", "replaced")
    assert f"there, {share:.1%} would".replace("%", " %") in told
    step_s, masked = (mean("gsm8k-16k", "measured", "ahead", f) for f in ("step_s", "masked"))
    assert f"`apr` take {step_s:.1f} s a step, and {masked:.0%} of its".replace("%", " %") in told


def test_performance_says_how_much_a_padding_trainer_computes(compare: ModuleType) -> None:
    make_samples = pytest.importorskip("gpu_trainer").make_samples
    samples = make_samples(16384, 16, 151936)
    lengths = [len(sample.prompt.token_ids) + sample.num_tokens for sample in samples]
    assert sum(lengths) == 16384
    times = len(lengths) * max(lengths) / sum(lengths)
    told = f"which makes {times:.1f} times as many positions as there are tokens"
    assert told in words("docs/performance.md")


def test_performance_says_when_the_first_tokens_of_two_h100_came() -> None:
    (_, *these), others = (result("start-2xh100")["runs"][key] for key in ("this", "beside"))
    first, second, third, fourth = (run["first_tokens_s"] for run in (*these, *others))
    told = f"after {first:.1f} and {second:.1f} s where"
    assert told in words("docs/performance.md")
    assert f"after {third:.1f} and {fourth:.1f} where" in words("docs/performance.md")


def test_the_ratio_to_awake_sync_of_four_gpus_is_told_without_its_wait_for_rewards() -> None:
    measured = result("modes-4xh200-calibrated")
    (sync,) = (run for run in measured["runs"] if run["mode"] == "sync:awake")
    rewards_s = 2048 * sync["steps"][-1]["reward_s"] / 16
    of_modes = measured["modes"]
    step_s = of_modes["sync:awake"]["later_step_s"] - rewards_s
    ratio = step_s / of_modes["apr"]["later_step_s"]
    told = words("docs/performance.md")
    assert f"{rewards_s:.1f} s of a step of `sync` on four GPUs, half of it on two" in told
    assert f"({step_s:.1f} s a step) | | 2.9 | {ratio:.1f} |" in told
    assert f"the ratio of the third is {ratio:.1f}" in words("README.md")


def test_ratios_to_awake_sync_of_two_gpus_are_those_of_their_file() -> None:
    measured = result("modes-awake-2xh200")
    of_modes, runs = measured["modes"], {run["mode"]: run for run in measured["runs"]}
    sync, ours = of_modes["sync:awake"], [of_modes["apr"], of_modes["apr:awake"]]
    times = [f"{of_mode['later_sync_over_this']:.1f}" for of_mode in ours]
    tokens = [f"{m['later_tokens_per_s'] / sync['later_tokens_per_s']:.1f}" for m in ours]
    told = words("docs/performance.md")
    first, second = zip(times, tokens, strict=True)
    assert f"| | {' and '.join(first)} | {' and '.join(second)} |" in told
    for what, figure in (
        ("seconds of a step", lambda mode: f"{of_modes[mode]['later_step_s']:.1f}"),
        ("trained tokens per second", lambda mode: f"{of_modes[mode]['later_tokens_per_s']:,.0f}"),
        ("trainer waits for a batch", lambda mode: f"{runs[mode]['trainer_idle_ratio']:.0%}"),
    ):
        cells = [figure(mode).replace("%", " %") for mode in ("sync:awake", "apr", "apr:awake")]
        assert f"| {what} | {' | '.join(cells)} |" in told
    for of_mode, ratio, of_tokens in zip(ours, times, tokens, strict=True):
        row = f"{sync['later_step_s']:.1f} s a step | {of_mode['later_step_s']:.1f} s a step |"
        assert f"| {row} {ratio} | {of_tokens} |" in words("README.md")
    modes, told = measured["predicted"]["modes"], words("docs/simulator.md")
    sync_s, apr_s = (modes[mode]["seconds"] for mode in ("sync:awake", "apr"))
    assert f"{sync_s:.1f} s for `sync`, which took {sync['median_s']:.1f}" in told
    assert f"{apr_s:.1f} for `apr`, which took {ours[0]['median_s']:.1f}" in told
    ratio, error = modes["apr"]["sync_over_this"], modes["apr"]["error"]
    to = f"{ratio:.2f} for {ours[0]['sync_over_this']:.2f} ({error:+.0%})"
    assert f"a ratio of {to}".replace("%", " %") in told


DEATHS = {
    "an engine core, a replica": ("engine core", "replica"),
    "the rollout worker": ("rollout worker",),
    "the buffer": ("buffer",),
    "the recorder": ("recorder",),
    "the evaluator, a reward worker": ("evaluator", "reward worker"),
    "Serve's controller": ("Serve controller",),
    "a train worker": ("train worker",),
    "Ray Train's controller": ("train controller",),
    "a read task of Ray Data": ("read task",),
    "the driver, with `--resume`": ("driver",),
    "the raylet of a second node": ("raylet",),
}


def test_what_each_death_costs_is_what_the_kills_cost() -> None:
    on_two = result("kills-2cpu")["runs"]
    on_sixteen = [run for run in result("kills-16cpu")["runs"] if run["seed"] >= 501]
    told = (ROOT / "docs/failures.md").read_text(encoding="utf-8")
    for row, kinds in DEATHS.items():
        cells = [row]
        for runs in (on_two, on_sixteen):
            lost = [
                kill["lost_s"]
                for run in runs
                for kill in run["kills"]
                if kill["killed"] and kill["part"] in kinds
            ]
            cells += [seconds(median(lost)), seconds(max(lost)), str(len(lost))]
        assert f"| {' | '.join(cells)} |" in told


def seconds(value: float) -> str:
    return f"{value:.1f}" if value < 9.95 else f"{value:.0f}"
