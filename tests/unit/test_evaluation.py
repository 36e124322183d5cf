"""Evaluation beside a run: pass@k, interruptions, failures, what is counted."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools

import pytest

from ray_apr.config import EvaluationConfig, RolloutConfig
from ray_apr.core.exceptions import (
    ConfigError,
    EngineDiedError,
    EngineUnavailableError,
    NoEngineError,
    RewardError,
    RolloutError,
)
from ray_apr.core.messages import Origin
from ray_apr.core.sample import Prompt
from ray_apr.core.user import RewardResult, Step
from ray_apr.rollout import evaluation as module
from ray_apr.rollout.evaluated import pass_at_k, summarize
from ray_apr.rollout.evaluation import Evaluator
from ray_apr.run.evaluations import evaluation_line
from ray_apr.scheduling.live import TurnRules
from tests.fakes import FIRST_OBSERVED, FIRST_TOKEN, ScriptedEngine

PROMPTS = [Prompt(prompt_id=str(i), token_ids=(1, 2, 3), row={"answer": i}) for i in range(4)]


class Tokenizer:
    def decode(self, ids, skip_special_tokens):
        assert skip_special_tokens
        return " ".join(map(str, ids))


class FakeScorer:
    """Scores by `rewards`, by prompt and number of the sample; an error is raised."""

    def __init__(self, rewards):
        self.rewards = rewards
        self.spans = []

    async def score(self, sample):
        assert sample.response_text
        self.spans.append({})
        value = self.rewards.get(sample.sample_id.split("-", 2)[2], 1.0)
        if isinstance(value, Exception):
            raise value
        return RewardResult(reward=value)

    def take_spans(self):
        spans, self.spans = self.spans, []
        return spans

    def close(self):
        pass


class FakeRecorder:
    def __init__(self):
        self.kept = {}
        self.record_evaluation = self.last_evaluation = self

    async def remote(self, row=None, samples=()):
        if row is None:
            return self.kept.get("evaluation", [{}])[-1]
        self.kept.setdefault("evaluation", []).append(row)
        self.kept.setdefault("evaluation_sample", []).extend(samples)
        return None


@pytest.fixture
def make():
    def build(
        engine, rewards=(), scorer=None, turns=None, budget=8, recorder=None, seed=None, **settings
    ):
        recorder = recorder or FakeRecorder()
        sampling = {"seed": seed}
        evaluator = Evaluator(
            rollout=RolloutConfig(
                max_response_tokens=budget, max_request_failures=2, sampling=sampling
            ),
            config=EvaluationConfig(**settings),
            tokenizer=Tokenizer(),
            make_prompts=lambda: PROMPTS,
            make_client=lambda: engine,
            make_scorer=lambda: scorer or FakeScorer(dict(rewards)),
            recorder=recorder,
            turns=turns,
        )
        return evaluator, recorder.kept

    return build


async def until_done(engine, task):
    for _ in range(500):
        engine.advance(1)
        await asyncio.sleep(0.001)
        if task.done():
            return await task
    raise AssertionError("the evaluation does not end")


async def test_rows_of_an_evaluation(make):
    engine = ScriptedEngine(default_length=4, auto=1, policy_version=3)
    rewards = {"0-0": 0.0, "0-1": 1.0, "1-0": 0.0, "1-1": 0.0}
    evaluator, kept = make(engine, rewards, samples=2, temperature=1.0, at_start=False)
    await evaluator.start(0)
    row = await evaluator.evaluate(3)
    assert kept["evaluation"] == [row]
    assert row["num_samples"] == 8 and row["num_failed"] == 0
    assert row["reward_mean"] == pytest.approx(5 / 8)
    assert row["pass_at_k"] == {"1": pytest.approx(5 / 8), "2": pytest.approx(3 / 4)}
    assert row["oldest_version"] == row["newest_version"] == 3
    assert row["response_tokens_mean"] == 4 and row["num_tokens"] == 32
    samples = kept["evaluation_sample"]
    assert len(samples) == 8 and {s["policy_version"] for s in samples} == {3}
    assert samples[0]["response"] == " ".join(str(FIRST_TOKEN + i) for i in range(4))


async def test_each_suite_has_figures_of_its_own(make):
    engine = ScriptedEngine(auto=1)
    rewards = {"0-0": RewardError("0-0", "raised", "no judge"), "1-0": 0.5}
    evaluator, kept = make(engine, rewards, at_start=False, suite_column="answer")
    await evaluator.start(0)
    row = await evaluator.evaluate(0)
    suites = kept["evaluation"][0]["suites"]
    assert list(suites) == ["0", "1", "2", "3"] and row["num_samples"] == 3
    assert (suites["0"]["num_samples"], suites["0"]["num_failed"]) == (0, 1)
    assert (suites["1"]["reward_mean"], suites["2"]["reward_mean"]) == (0.5, 1.0)
    assert [s["suite"] for s in kept["evaluation_sample"]] == ["1", "2", "3"]


async def test_a_suite_has_its_own_number_of_samples_temperature_and_budget(make):
    asked = {}

    class Engine(ScriptedEngine):
        async def generate(self, request):
            asked[request.sample_id] = request
            return await super().generate(request)

    suites = {
        "1": {"samples": 4, "temperature": 0.7, "top_p": 0.9},
        "2": {"max_response_tokens": 3},
    }
    engine, rewards = Engine(default_length=5, auto=1), {"1-0": 0.0, "1-1": 0.0}
    evaluator, kept = make(engine, rewards, at_start=False, suite_column="answer", suites=suites)
    await evaluator.start(0)
    row = await evaluator.evaluate(0)
    drawn = {i: asked[f"evaluation-0-{i}-0"].sampling for i in range(4)}
    assert [(s.temperature, s.top_p, s.top_k) for s in drawn.values()] == [
        (1.0, 1.0, 1), (0.7, 0.9, 0), (1.0, 1.0, 1), (1.0, 1.0, 1)
    ]  # fmt: skip
    assert [row["suites"][name]["num_samples"] for name in "0123"] == [1, 4, 1, 1]
    assert [s["suite"] for s in kept["evaluation_sample"]] == ["0", "1", "1", "1", "1", "2", "3"]
    assert row["suites"]["1"]["pass_at_k"] == {"1": 0.5, "2": pytest.approx(5 / 6), "4": 1.0}
    assert row["num_samples"] == 7 and row["pass_at_k"] == {"1": pytest.approx(3.5 / 4)}
    assert (row["suites"]["2"]["num_tokens"], row["suites"]["3"]["num_tokens"]) == (3, 5)


async def test_no_engine_answers_by_weights_that_are_older_than_the_version(make):
    """known fault: the evaluation of the base model left a client that asked for version 0, and one
    that Serve had started again meanwhile answered the next evaluation with that model."""
    asked = []

    class Engine(ScriptedEngine):
        async def generate(self, request):
            asked.append(request.min_policy_version)
            return await super().generate(request)

    evaluator, _ = make(Engine(auto=1, policy_version=10))
    for version in (0, 10):
        await evaluator.evaluate(version)
    assert asked == [0] * 4 + [10] * 4


async def test_it_asks_greedily_and_apart_from_the_run(make):
    asked = []

    class Engine(ScriptedEngine):
        async def generate(self, request):
            asked.append(request.sampling)
            return await super().generate(request)

    evaluator, _ = make(Engine(auto=1), at_start=False)
    await evaluator.start(0)
    await evaluator.evaluate(0)
    assert all(s.origin is Origin.EVALUATION and s.top_k == 1 for s in asked) and len(asked) == 4


async def test_requests_that_draw_have_seeds_where_the_rollouts_have(make):
    """known fault: `rollout.sampling.seed` left evaluations to the engines' own random state, so
    that two runs of one seed evaluated one model differently."""

    async def seeds(seed, temperature):
        asked = {}

        class Engine(ScriptedEngine):
            async def generate(self, request):
                asked[request.sample_id] = request.sampling.seed
                return await super().generate(request)

        samples = 2 if temperature else 1
        evaluator, _ = make(Engine(auto=1), seed=seed, samples=samples, temperature=temperature)
        await evaluator.evaluate(0)
        return asked

    first, again, other = [await seeds(seed, 1.0) for seed in (5, 5, 6)]
    assert first == again and len(set(first.values())) == 8, "siblings draw differently"
    assert not set(first.values()) & set(other.values())
    assert set((await seeds(None, 1.0)).values()) == {None}
    assert set((await seeds(5, 0.0)).values()) == {None}, "nothing is drawn"


async def test_an_interrupted_response_goes_on_with_its_tokens(make):
    engine = ScriptedEngine(default_length=6)
    evaluator, kept = make(engine, at_start=False)
    await evaluator.start(0)
    task = asyncio.create_task(evaluator.evaluate(0))
    await asyncio.sleep(0.01)
    engine.advance(2)
    await engine.abort(None)
    engine.policy_version = 1
    row = await until_done(engine, task)
    assert row["num_samples"] == 4 and (row["oldest_version"], row["newest_version"]) == (0, 1)
    assert [s["num_interruptions"] for s in kept["evaluation_sample"]] == [1] * 4


async def test_failures_are_counted_and_in_no_mean(make):
    engine = ScriptedEngine(auto=1)
    engine.fail = {"evaluation-0-2-0": [RolloutError("once"), RolloutError("twice")]}
    rewards = {"0-0": RewardError("0-0", "raised", "no judge"), "1-0": 0.5}
    evaluator, _ = make(engine, rewards, at_start=False)
    await evaluator.start(0)
    row = await evaluator.evaluate(0)
    assert (row["num_samples"], row["num_failed"]) == (2, 2)
    assert row["reward_mean"] == pytest.approx(0.75)


async def test_why_responses_failed_is_told(make):
    """known fault: "no reward, 4 failed" was all that was said of a reward that raised."""
    rewards = {"0-0": RewardError("0-0", "raised", "no judge")}
    evaluator, kept = make(ScriptedEngine(auto=1), scorer=FakeScorer(rewards), at_start=False)
    await evaluator.start(0)
    row = await evaluator.evaluate(0)
    assert kept["evaluation"][0]["error"] == "reward of sample 0-0 raised: no judge"
    assert evaluation_line(row).endswith(
        "│ 1 failed; the last: reward of sample 0-0 raised: no judge"
    )
    rewards.clear()
    assert "error" not in await evaluator.evaluate(1), "it is not that of the one before"


async def test_why_responses_failed_is_told_as_of_dropped_groups(make):
    """known fault: an error with the whole response in it filled the terminal, and one of an engine
    said neither what it was nor of which sample."""
    rewards = {"0-0": RewardError("0-0", "raised", "so long " * 1000)}
    evaluator, _ = make(ScriptedEngine(auto=1), scorer=FakeScorer(rewards), at_start=False)
    await evaluator.start(0)
    assert len((await evaluator.evaluate(0))["error"]) == 500
    rewards["0-0"] = RolloutError("no such token")
    row = await evaluator.evaluate(1)
    assert row["error"].endswith(": RolloutError: no such token")
    assert row["error"].startswith("sample evaluation-1-")


async def test_responses_wait_for_an_engine_that_is_gone_and_not_for_ever(make, monkeypatch):
    monkeypatch.setattr(module, "_ENGINE_PAUSE_S", 0.001)
    engine = ScriptedEngine(auto=1)
    engine.fail = {
        "evaluation-0-2-0": [EngineUnavailableError("gone") for _ in range(5)],
        "evaluation-0-1-0": [EngineUnavailableError("gone") for _ in range(10_000)],
    }
    evaluator, _ = make(engine, at_start=False)
    evaluator._rollout = RolloutConfig(max_request_failures=2, engine={"stall_timeout_s": 1.0})
    await evaluator.start(0)
    before = await evaluator.progress()
    row = await evaluator.evaluate(0)
    assert (row["num_samples"], row["num_failed"]) == (3, 1)
    assert await evaluator.progress() != before


async def test_without_any_engine_it_ends_after_one_limit(make, monkeypatch):
    """It waited for so long again for each prompt that got a slot."""
    monkeypatch.setattr(module, "_ENGINE_PAUSE_S", 0.001)
    engine = ScriptedEngine(auto=1)
    engine.fail = {
        f"evaluation-0-{i}-0": [EngineUnavailableError("gone") for _ in range(10_000)]
        for i in range(len(PROMPTS))
    }
    evaluator, kept = make(engine, at_start=False, max_inflight=1)
    evaluator._rollout = RolloutConfig(max_request_failures=2, engine={"stall_timeout_s": 0.2})
    await evaluator.start(0)
    with pytest.raises(NoEngineError) as caught:
        await evaluator.evaluate(0)
    assert str(caught.value) == (
        "version 0 is not evaluated: no engine has answered for 0.2 s "
        "(rollout.engine.stall_timeout_s); gone"
    )
    assert {call[0].partition("#")[0] for call in engine.calls} == {"evaluation-0-0-0"}
    assert not kept
    row = await evaluator.evaluate(1)  # engines are back
    assert (row["num_samples"], row["num_failed"]) == (4, 0)


async def test_a_prompt_that_kills_engines_is_failed_and_not_evaluated_again(make, monkeypatch):
    """It killed engines without end, as long as there were any."""
    monkeypatch.setattr(module, "_ENGINE_PAUSE_S", 0.001)
    engine = ScriptedEngine(auto=1)
    engine.fail = {
        f"evaluation-{version}-1-0": [EngineDiedError("dead") for _ in range(10_000)]
        for version in range(2)
    }
    engine.fail["evaluation-0-2-0"] = [EngineDiedError("dead")]
    evaluator, _ = make(engine, at_start=False)
    await evaluator.start(0)
    for version in range(2):
        row = await evaluator.evaluate(version)
        assert (row["num_samples"], row["num_failed"]) == (3, 1)
    names = [call[0].partition("#")[0] for call in engine.calls]
    assert names.count("evaluation-0-1-0") == evaluator._rollout.max_request_failures
    assert "evaluation-1-1-0" not in names


@pytest.mark.parametrize(("version", "left_out"), [(20, 1), (10, 0)])
async def test_a_version_that_comes_due_meanwhile_is_left_out_but_the_last_one_is_not(
    make, version, left_out
):
    """known fault: where the last one had come due meanwhile, its own row said that one was left
    out."""
    engine = ScriptedEngine(default_length=4)
    evaluator, kept = make(engine)
    first = asyncio.create_task(evaluator.start(0))
    await asyncio.sleep(0.01)
    assert await evaluator.evaluate(10) == {}
    last = asyncio.create_task(evaluator.evaluate(version, is_last=True))
    assert (await until_done(engine, last))["policy_version"] == version
    await first
    assert [row["policy_version"] for row in kept["evaluation"]] == [0, version]
    assert [row.get("num_left_out", 0) for row in kept["evaluation"]] == [0, left_out]
    lines = [evaluation_line(row) for row in kept["evaluation"]]
    said = ["│ 1 due since the last one left out" in line for line in lines]
    assert said == [False, left_out == 1]


async def test_it_keeps_no_spans_of_rewards(make):
    """known fault: it kept all of them, as long as the run went on."""
    scorer = FakeScorer({})
    evaluator, _ = make(ScriptedEngine(auto=1), scorer=scorer, at_start=False)
    await evaluator.start(0)
    assert (await evaluator.evaluate(1))["num_samples"] == 4
    assert scorer.spans == []


async def test_no_version_is_evaluated_twice(make):
    evaluator, kept = make(ScriptedEngine(auto=1), at_start=False)
    await evaluator.start(0)
    rows = await asyncio.gather(evaluator.evaluate(6), evaluator.evaluate(6, is_last=True))
    assert rows[0] == rows[1] and len(kept["evaluation"]) == 1


async def test_no_version_is_evaluated_twice_where_the_evaluator_dies_between(make):
    """The last version was due, and evaluated; the next evaluator is asked for it at the end."""
    recorder, engine = FakeRecorder(), ScriptedEngine(auto=1)
    before, kept = make(engine, recorder=recorder)
    row = await before.evaluate(6)
    after, _ = make(engine, recorder=recorder)
    assert await after.evaluate(6, is_last=True) == row
    assert len(kept["evaluation"]) == 1 and len(kept["evaluation_sample"]) == 4


async def test_the_evaluation_of_the_base_model_is_a_call_that_ray_makes_again(make):
    """It was a task of its own: an evaluator that died under it never evaluated the base model."""
    engine = ScriptedEngine(default_length=4)
    evaluator, kept = make(engine)
    call = asyncio.create_task(evaluator.start(0))
    await asyncio.sleep(0.01)
    assert engine.running and not call.done()
    await until_done(engine, call)
    assert [row["policy_version"] for row in kept["evaluation"]] == [0]


async def test_at_most_so_many_responses_are_under_way(make):
    engine = ScriptedEngine(default_length=4)
    evaluator, _ = make(engine, max_inflight=3, at_start=False)
    await evaluator.start(0)
    task = asyncio.create_task(evaluator.evaluate(0))
    await asyncio.sleep(0.01)
    assert len(engine.running) == 3
    assert (await until_done(engine, task))["num_samples"] == 4


async def test_stop_ends_what_is_under_way(make):
    engine = ScriptedEngine(default_length=4)
    evaluator, kept = make(engine, at_start=False)
    await evaluator.start(0)
    task = asyncio.create_task(evaluator.evaluate(0))
    await asyncio.sleep(0.01)
    await evaluator.stop()
    await engine.abort(None)
    assert await asyncio.wait_for(task, 5) == {}
    assert not kept


async def test_an_unexpected_error_is_logged_although_nobody_waits(make, caplog):
    rewards = {"1-0": ZeroDivisionError("a bug")}
    evaluator, kept = make(ScriptedEngine(auto=1), rewards, at_start=False)
    await evaluator.start(0)
    with pytest.raises(ZeroDivisionError):
        await evaluator.evaluate(7)
    assert "the evaluation of version 7 broke off" in caplog.text and "a bug" in caplog.text
    assert not kept


class Game(FakeScorer):
    """Says a token before the first turn and after each; gives the reward after `num_turns`."""

    def __init__(self, num_turns):
        super().__init__({})
        self.num_turns = num_turns
        self.heard = []

    async def reset(self, sample):
        return Step(token_ids=(FIRST_OBSERVED,), state={"turns": 0})

    async def step(self, sample):
        self.heard.append((sample.turn_text, sample.environment_state["turns"]))
        if sample.num_turns == self.num_turns:
            return Step(done=True, reward=0.25)
        here = FIRST_OBSERVED + sample.num_tokens
        return Step(token_ids=(here,), state={"turns": sample.num_turns})


async def evaluate_game(make, num_turns, **settings):
    game, engine = Game(num_turns), ScriptedEngine(default_length=99, turn_length=3, auto=1)
    evaluator, kept = make(engine, scorer=game, at_start=False, **settings)
    await evaluator.start(0)
    row = await asyncio.wait_for(evaluator.evaluate(0), 5)
    return row, kept["evaluation_sample"], game


async def test_an_environment_answers_turn_by_turn_and_gives_the_reward(make):
    row, samples, game = await evaluate_game(make, 2, budget=50, turns=TurnRules(resets=True))
    assert (row["num_samples"], row["num_failed"], row["reward_mean"]) == (4, 0, 0.25)
    assert [s["num_tokens"] for s in samples] == [1 + 3 + 1 + 3] * 4
    assert set(game.heard) == {("1001 1002 1003", 0), ("1005 1006 1007", 1)}


async def test_a_turn_that_the_budget_cut_can_be_read(make):
    scored, score = [], Game.score

    async def kept(self, sample):
        scored.append(sample.turn_text)
        return await score(self, sample)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Game, "score", kept)
        await evaluate_game(make, 99, budget=7, turns=TurnRules(resets=True))
    assert set(scored) == {"1005 1006"}


async def test_the_reward_function_scores_what_the_environment_leaves_open(make):
    rules = TurnRules(resets=True, max_turns=2)
    row, samples, _ = await evaluate_game(make, 99, budget=50, turns=rules)
    assert row["reward_mean"] == 1.0, "two turns were all there could be"
    assert {s["finish_reason"] for s in samples} == {"length"}
    row, samples, _ = await evaluate_game(make, 99, budget=9, turns=TurnRules(resets=True))
    assert row["reward_mean"] == 1.0, "the budget ended it"
    assert {s["finish_reason"] for s in samples} == {"length"}


@pytest.mark.parametrize(("n", "passed", "k"), [(4, 0, 2), (4, 1, 2), (5, 3, 2), (5, 5, 1)])
def test_pass_at_k_counts_subsets(n, passed, k):
    flags = [True] * passed + [False] * (n - passed)
    subsets = list(itertools.combinations(flags, k))
    assert pass_at_k(n, passed, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_nothing_scored_has_no_mean():
    row = summarize([None, None], EvaluationConfig())
    assert row["num_failed"] == 2 and row["reward_mean"] is None
    assert row["pass_at_k"] == {}


def test_when_a_version_is_due():
    config = EvaluationConfig(every=5)
    assert [v for v in range(11) if config.is_due(v)] == [0, 5, 10]
    assert not dataclasses.replace(config, at_start=False).is_due(0)


def test_the_first_version_that_is_synced_past_a_multiple_is_due():
    config, synced = EvaluationConfig(every=10), range(0, 64, 3)  # sync_every = 3
    due = [new for old, new in itertools.pairwise(synced) if config.is_due(new, old)]
    assert due == [12, 21, 30, 42, 51, 60]
    often = EvaluationConfig(every=2)
    assert all(often.is_due(new, old) for old, new in itertools.pairwise(synced))
    assert not config.is_due(20, 20), "the same weights once more"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("every", 0),
        ("samples", 2),
        ("temperature", -1),
        ("temperature", 0.005),
        ("temperature", 2.01),
        ("top_p", 1.1),
        ("max_inflight", 0),
        ("at_start", 1),
        ("timeout_s", 0),
        ("max_response_tokens", 0),
        ("pass_threshold", "1"),
        ("rewards", [len]),
        ("rewards", {"hard": len}),
        ("rewards", {"hard": 1.0}),
        ("rewards", {1: len}),
    ],
)
def test_senseless_settings_are_refused(name, value):
    with pytest.raises(ConfigError, match=f"evaluation.{name}"):
        EvaluationConfig(**{name: value})


async def test_one_that_was_started_again_hears_of_engines_that_come_or_go(make):
    """known fault: it had no client yet, and the request for engines was undone."""
    engine = ScriptedEngine()
    evaluator, _ = make(engine, at_start=False)
    await evaluator.scale(3)
    assert (await engine.weight_group_state()).num_workers == 3
