"""Rewards of form and length, and their weighted sums (rewards/shaping.py)."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from pathlib import Path

import pytest

from ray_apr import rewards
from ray_apr.config import EvaluationConfig, RolloutConfig
from ray_apr.core.exceptions import ConfigError, RewardError
from ray_apr.core.user import RewardResult
from ray_apr.rewards import (
    code_tests,
    exact_match,
    format_reward,
    length_penalty,
    weighted_sum,
)
from ray_apr.rollout.scoring import RewardWorker
from ray_apr.run.checks import check_spec
from tests.reward_samples import round_trip, sample_of
from tests.run_specs import run_spec


def test_format_reward_takes_the_whole_response_or_any_part():
    whole = round_trip(format_reward(r"<think>.*</think>\d+"))
    assert whole(sample_of("<think>a\nb</think>42")) == 1.0
    assert whole(sample_of("<think>a</think>42.")) == 0.0
    part = round_trip(format_reward(r"<b>", full_match=False))
    assert (part(sample_of("a<b>c")), part(sample_of("abc"))) == (1.0, 0.0)


@pytest.mark.parametrize(
    ("target", "limit", "num_tokens", "expected"),
    [
        (20, 40, 1, 0.0),
        (20, 40, 20, 0.0),
        (20, 40, 25, -0.25),
        (20, 40, 30, -0.5),
        (20, 40, 40, -1.0),
        (20, 40, 99, -1.0),
        (50, None, 75, -0.5),
        (0, 10, 5, -0.5),
    ],
)
def test_length_penalty_is_linear_between_target_and_limit(target, limit, num_tokens, expected):
    penalty = round_trip(length_penalty(target, limit))(sample_of("x", num_tokens=num_tokens))
    assert penalty == pytest.approx(expected)
    assert math.copysign(1.0, penalty) == (1.0 if expected == 0 else -1.0)


def test_length_penalty_needs_a_budget_above_its_target():
    with pytest.raises(RewardError, match="100 tokens"):
        length_penalty(100)(sample_of("x"))


def run(reward, sample):
    """As a reward worker calls it."""
    return asyncio.run(RewardWorker(reward, 2).call("score", sample, 5.0))


FORM = r"<think>(?>.*?</think>)(?>.*?<answer>)(?>.*</answer>)\s*"


@pytest.mark.parametrize(
    ("response", "value"),
    [
        ("<think>a</think> so <answer>1</answer> no <answer>2</answer>\n", 1.0),
        ("<think>a</think>b</think><answer>1</answer>", 1.0),
        ("<think>a<answer>1</answer></think>", 0.0),
        ("<think>" + "</think><answer></answer>x" * 1_600, 0.0),
    ],
)
def test_the_form_that_the_docs_ask_for_is_soon_found(response, value):
    """known fault: the one before took the cube of a response's length."""
    page = Path(__file__).resolve().parents[2] / "docs" / "rewards.md"
    assert FORM in page.read_text(encoding="utf-8")
    begin = time.process_time()
    assert format_reward(FORM)(sample_of(response)) == value
    assert time.process_time() - begin < 2


def test_weighted_sum_adds_and_records_each_part():
    async def judged(sample):
        return RewardResult(reward=0.5, metrics={"tries": 2.0})

    reward = weighted_sum(
        {
            "right": (1.0, exact_match()),
            "judge": (2, judged),
            "long": (0.5, length_penalty(0, 100)),
            "shown": (0, format_reward(r"\d+")),
        }
    )
    result = run(round_trip(reward), sample_of("42", answer="42", num_tokens=50))
    assert result.reward == pytest.approx(1.0 + 2 * 0.5 - 0.5 * 0.5)
    assert result.metrics == {
        "right": 1.0,
        "judge": 0.5,
        "judge_tries": 2.0,
        "long": -0.5,
        "shown": 1.0,
    }


def test_parts_run_at_the_same_time():
    barrier = threading.Barrier(2, timeout=5)

    def waits(sample):
        barrier.wait()
        return 1.0

    async def waits_too(sample):
        await asyncio.to_thread(barrier.wait)
        return 1.0

    assert run(weighted_sum({"a": (1, waits), "b": (1, waits_too)}), sample_of("x")).reward == 2.0


def test_weighted_sums_nest():
    inner = weighted_sum({"right": (1.0, exact_match()), "form": (1.0, format_reward("4."))})
    reward = weighted_sum({"inner": (0.5, inner)})
    result = run(reward, sample_of("42", answer="42"))
    assert (result.reward, result.metrics["inner_right"], result.metrics["inner"]) == (1, 1, 2)


@pytest.mark.parametrize(("other", "key"), [("a_b", "c"), ("a_b_c", "d")])
def test_two_metrics_of_one_name_are_no_reward(other, key):
    """known fault: one was told in the other's place."""
    a = (1, lambda sample: RewardResult(reward=1.0, metrics={"b_c": 1.0}))
    b = (1, lambda sample: RewardResult(reward=2.0, metrics={key: 2.0}))
    for parts in ({"a": a, other: b}, {other: b, "a": a}):
        with pytest.raises(RewardError, match=r"two parts .* 'a_b_c'; rename part '"):
            run(weighted_sum(parts), sample_of("42"))


async def test_plain_parts_of_many_sums_run_at_once():
    """known fault: 64 did, however many sums the setting let run, and the others timed out."""
    all_there = threading.Barrier(80, timeout=20)
    reward = weighted_sum({"waits": (1, lambda sample: float(all_there.wait() >= 0))})
    results = await asyncio.gather(*(reward(sample_of("42")) for _ in range(80)))
    assert [result.reward for result in results] == [1.0] * 80


def test_a_part_that_fails_fails_the_sum_at_once_and_keeps_its_reason():
    cancelled = []

    async def slow(sample):
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            cancelled.append(sample.sample_id)
            raise

    reward = weighted_sum({"slow": (1, slow), "right": (1, exact_match())})
    start = time.monotonic()
    with pytest.raises(RewardError) as caught:
        run(reward, sample_of("42"))
    assert time.monotonic() - start < 5
    assert (caught.value.kind, cancelled) == ("invalid", ["g0-0"])
    assert str(caught.value).count("RewardError") == 0


@pytest.mark.parametrize("value", [None, "good", "1", math.nan])
def test_a_part_without_a_number_is_named(value):
    with pytest.raises(RewardError, match="part 'odd'"):
        run(weighted_sum({"odd": (1, lambda sample: value)}), sample_of("x"))


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: format_reward("("), "format_reward.pattern"),
        (lambda: format_reward("x", full_match=None), "format_reward.full_match"),
        (lambda: length_penalty(-1), "length_penalty.target"),
        (lambda: length_penalty(1.5), "length_penalty.target"),
        (lambda: length_penalty(10, 10), "length_penalty.limit"),
        (lambda: weighted_sum({}), "weighted_sum.parts"),
        (lambda: weighted_sum([1]), "weighted_sum.parts"),
        (lambda: weighted_sum({"a": (1, exact_match)}), "weighted_sum.parts['a']"),
        (lambda: weighted_sum({"a/b": (1, exact_match())}), "weighted_sum.parts"),
        (lambda: weighted_sum({"a": exact_match()}), "weighted_sum.parts['a']"),
        (lambda: weighted_sum({"a": (math.inf, exact_match())}), "weighted_sum.parts['a']"),
        (lambda: weighted_sum({"a": (1, "right")}), "weighted_sum.parts['a']"),
    ],
)
def test_arguments_are_checked_at_once(make, field):
    with pytest.raises(ConfigError) as caught:
        make()
    assert caught.value.field == field


def test_programs_may_not_take_longer_than_the_call_that_runs_them():
    """known fault: groups with a slow program were dropped, as their rewards had failed."""
    programs = code_tests("tests", total_time_limit_s=8)
    short = RolloutConfig(reward={"timeout_s": 8})
    for given in (
        programs,
        weighted_sum({"right": (1, programs), "form": (1, format_reward("x"))}),
    ):
        with pytest.raises(
            ConfigError, match=r"timeout_s = 8: must exceed total_time_limit_s = 8 "
        ):
            check_spec(run_spec(reward=given, rollout=short))
        check_spec(run_spec(reward=given, rollout=RolloutConfig(reward={"timeout_s": 8.1})))
    check_spec(run_spec(reward=format_reward("x"), rollout=short))


@pytest.mark.parametrize("name", rewards.__all__)
def test_a_maker_in_the_place_of_a_reward_is_refused(name):
    """known fault: it was called with each sample, and failed with all of it in its error."""
    maker = getattr(rewards, name)
    with pytest.raises(ConfigError, match=rf"^reward = '{name}': makes rewards: give what {name}"):
        check_spec(run_spec(reward=maker))
    own = EvaluationConfig(suite_column="suite", rewards={"reward": exact_match})
    with pytest.raises(ConfigError, match=r"^evaluation\.rewards\.reward = .*makes rewards"):
        check_spec(run_spec(reward=exact_match("answer"), evaluation=own))
