"""Rewards: finite numbers or classified failures, never zeros (rollout/scoring.py)."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
import math
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from ray import cloudpickle
from ray.exceptions import OutOfMemoryError, RayActorError

from ray_apr.config import RolloutConfig
from ray_apr.core.exceptions import RewardError, StepError, UserCodeError
from ray_apr.core.messages import Generation
from ray_apr.core.sample import FinishReason, Prompt, Sample, Segment
from ray_apr.core.user import RewardResult, Step
from ray_apr.rewards import weighted_sum
from ray_apr.rollout import scoring
from ray_apr.rollout.failures import told
from ray_apr.rollout.scoring import RewardWorker, Scorer
from tests.fakes import unless_dead

SAMPLE = Sample(
    sample_id="g0-0",
    group_id="g0",
    prompt=Prompt(prompt_id="g0", token_ids=(1,)),
    max_response_tokens=4,
    response_text="7",
)


class InProcessWorker:
    """A reward worker without Ray: `.exchange.remote` is the plain coroutine."""

    def __init__(self, reward, environment=None) -> None:
        worker = RewardWorker(reward, 4, environment)
        self.exchange = self
        self.remote = worker.exchange
        self.lives = SimpleNamespace(remote=worker.lives)


@pytest.fixture
def score(monkeypatch):
    """Score SAMPLE with a reward function; returns (result or error, workers made)."""
    monkeypatch.setattr(scoring.ray, "kill", lambda worker: None)
    monkeypatch.setattr(scoring, "_GRACE_S", 0.2)

    def run(reward, **config):
        made = []

        def make():
            made.append(InProcessWorker(reward))
            return made[-1]

        async def main():
            scorer = Scorer(reward, RolloutConfig(reward=config), make_worker=make)
            try:
                return await scorer.score(SAMPLE)
            except RewardError as error:
                return error

        return asyncio.run(main()), len(made)

    return run


def test_plain_and_async_functions_and_results_are_taken(score):
    async def later(sample):
        return 0.25

    assert score(lambda s: float(s.response_text))[0].reward == 7.0
    assert score(later)[0].reward == 0.25
    result = score(lambda s: RewardResult(reward=1.0, metrics={"digits": 2.0}))[0]
    assert (result.reward, result.metrics) == (1.0, {"digits": 2.0})


@pytest.mark.parametrize("value", [math.nan, math.inf, None, "right"])
def test_what_is_no_finite_number_is_invalid(score, value):
    error, _ = score(lambda s: value)
    assert isinstance(error, RewardError)
    assert error.kind == "invalid"
    assert repr(value) in str(error)


def test_of_a_long_answer_the_begin_is_told(score):
    error, _ = score(lambda s: list(range(100_000)))
    assert len(str(error)) < 500
    error = ask("step", list(range(100_000)), after_a_turn())
    assert len(str(error)) < 500


def test_an_exception_is_retried_and_then_raised_with_its_text(score):
    calls = []

    def reward(sample):
        calls.append(sample.sample_id)
        raise KeyError("answer")

    error, _ = score(reward, retries=2)
    assert (error.kind, len(calls)) == ("raised", 3)
    assert "KeyError" in str(error)


def test_an_error_of_a_library_is_told_with_the_line_that_called_it(score):
    """known fault: it was "decoder.py, line 355" where a response is no JSON."""

    def reward(sample):
        return float(json.loads("no JSON")["score"])

    line = reward.__code__.co_firstlineno + 1
    error, _ = score(reward)
    assert f"raised: JSONDecodeError (test_scoring.py, line {line}): Expecting" in str(error)


def test_an_error_of_a_compiled_library_is_told_with_the_line_that_called_it(score):
    """known fault: it was "_generator.pyx, line 869", of a file that is nowhere."""

    def reward(sample):
        return float(np.random.default_rng(0).choice([]))

    line = reward.__code__.co_firstlineno + 1
    error, _ = score(reward)
    assert f"raised: ValueError (test_scoring.py, line {line}): a cannot be empty" in str(error)


def test_an_error_of_a_result_is_told_with_the_line_that_made_it(score):
    """known fault: it was "<string>, line 5", where a dataclass has its methods."""

    def reward(sample):
        return RewardResult(reward=None)

    line = reward.__code__.co_firstlineno + 1
    error, _ = score(reward)
    assert f"raised: ValueError (test_scoring.py, line {line}): reward must be" in str(error)


@pytest.mark.parametrize("awaits", [False, True])
@pytest.mark.parametrize("is_part", [False, True])
def test_an_exception_is_told_with_its_line(score, awaits, is_part):
    """known fault: a KeyError of a long reward did not say where, but in a dry run."""

    def plain(sample):
        return sample.row["anser"]

    async def awaited(sample):
        return plain(sample)

    reward = awaited if awaits else plain
    error, _ = score(weighted_sum({"right": (1.0, reward)}) if is_part else reward)
    line = plain.__code__.co_firstlineno + 1
    assert str(error).endswith(f"raised: KeyError (test_scoring.py, line {line}): 'anser'")


def test_a_long_error_is_told_with_its_line_too(score):
    """known fault: the line came last, and was cut off of what a row of dropped.jsonl has."""

    def reward(sample):
        raise ValueError("so long " * 1000)

    error, _ = score(reward)
    line = reward.__code__.co_firstlineno + 1
    assert f"ValueError (test_scoring.py, line {line}): so long" in told(error, "")


@pytest.mark.parametrize("end", [SystemExit(1), KeyboardInterrupt(), asyncio.CancelledError()])
@pytest.mark.parametrize("awaits", [False, True])
@pytest.mark.parametrize("is_part", [False, True])
def test_code_that_ends_its_process_or_its_task_ends_neither(score, end, awaits, is_part):
    def plain(sample):
        raise end

    async def awaited(sample):
        raise end

    reward = awaited if awaits else plain
    reward = weighted_sum({"ends": (1.0, reward)}) if is_part else reward
    error, workers = score(reward, retries=1)
    assert (error.kind, workers) == ("raised", 1)
    assert type(end).__name__ in str(error)


@pytest.mark.parametrize("is_part", [False, True])
def test_a_plain_function_that_raises_stop_iteration_has_raised(score, is_part):
    """known fault: no future takes one on CPython 3.11, so that the call ran into its limit."""

    def reward(sample):
        return next(word for word in sample.response_text.split() if word == "answer")

    where = f"test_scoring.py, line {reward.__code__.co_firstlineno + 1}"
    reward = weighted_sum({"first": (1.0, reward)}) if is_part else reward
    error, workers = score(reward, timeout_s=2, retries=0)
    assert (error.kind, workers) == ("raised", 1)
    assert f"RuntimeError ({where}): raised StopIteration; give next() a default" in str(error)


def test_a_reward_error_of_the_function_is_passed_on_as_it_is(score):
    def reward(sample):
        raise RewardError(sample.sample_id, "invalid", "its row has no answer")

    error, _ = score(reward, retries=0)
    assert error.args == ("g0-0", "invalid", "its row has no answer")


def test_a_second_try_that_works_counts(score):
    calls = []

    def reward(sample):
        calls.append(1)
        if len(calls) == 1:
            raise OSError("flaky judge")
        return 1.0

    assert score(reward, retries=1)[0].reward == 1.0


def test_an_async_call_over_its_limit_is_cancelled_in_place(score):
    async def never(sample):
        await asyncio.Event().wait()

    error, workers = score(never, timeout_s=0.05, retries=1)
    assert (error.kind, workers) == ("timeout", 1)


def raises(sample):
    raise OSError("no judge")


@pytest.mark.parametrize("others", [None, {}, {"raises": (1.0, raises)}])
def test_a_call_that_does_not_return_costs_its_worker(score, others):
    """Alone, as a part of a sum, and beside a part that has failed."""
    release = threading.Event()

    def never(sample):
        release.wait(30)

    begin = time.monotonic()
    threading.Timer(3.0, release.set).start()  # lets the pool's threads end with the test
    reward = never if others is None else weighted_sum({"never": (1.0, never), **others})
    error, workers = score(reward, timeout_s=0.05, retries=1)
    assert (error.kind, workers) == ("timeout", 3)
    assert time.monotonic() - begin < 10


async def test_a_worker_that_ray_has_killed_for_its_memory_is_replaced_and_the_call_made_again(
    monkeypatch,
):
    killed, made = [], []
    monkeypatch.setattr(scoring.ray, "kill", killed.append)

    def make():
        made.append(InProcessWorker(lambda sample: 1.0))
        if len(made) == 1:
            made[0].remote = out_of_memory
        return made[-1]

    async def out_of_memory(requests):
        raise OutOfMemoryError("the node ran low")

    scorer = Scorer(lambda sample: 1.0, RolloutConfig(reward={"retries": 0}), make_worker=make)
    results = await asyncio.gather(*(scorer.score(SAMPLE) for _ in range(5)))
    assert [result.reward for result in results] == [1.0] * 5
    assert killed == made[:1] and len(made) == 2


class StartsSlowly(InProcessWorker):
    """Its process takes some time before it answers anything; with None it dies in its start."""

    def __init__(self, reward, start_s) -> None:
        super().__init__(reward)
        self._takes, self.remote, self._start_s = self.remote, self._remote, start_s
        self._made_s = time.monotonic()

    async def _remote(self, requests):
        if self._start_s is None:
            raise RayActorError()
        await asyncio.sleep(max(0.0, self._made_s + self._start_s - time.monotonic()))
        return await self._takes(requests)


@pytest.fixture
def scores(monkeypatch):
    """Score SAMPLE some times at once where a worker starts in so many seconds; returns (results or
    errors, workers made)."""
    killed = []
    monkeypatch.setattr(scoring.ray, "kill", killed.append)
    monkeypatch.setattr(scoring, "_GRACE_S", 0.05)

    async def run(reward, start_s, count, **config):
        made = []

        def make():
            made.append(StartsSlowly(reward, start_s))
            return made[-1]

        config = RolloutConfig(reward={"timeout_s": 0.05, "retries": 0}, **config)
        scorer = Scorer(reward, config, make_worker=make)
        results = await asyncio.gather(
            *(scorer.score(SAMPLE) for _ in range(count)), return_exceptions=True
        )
        assert killed == made[: len(killed)] and all(calls.load == 0 for calls in scorer._workers)
        return results, len(made)

    return run


async def test_the_start_of_a_worker_is_not_the_time_of_a_call(scores):
    """known fault: each worker after one that hung was killed while it started."""
    results, workers = await scores(lambda sample: 1.0, 0.5, 5)
    assert [result.reward for result in results] == [1.0] * 5 and workers == 1


async def test_a_worker_that_does_not_start_is_replaced_after_a_limit_of_its_own(scores):
    results, workers = await scores(lambda sample: 1.0, 60, 5, engine={"start_timeout_s": 0.2})
    assert {result.kind for result in results} == {"timeout"} and workers == 2
    assert "did not start within 0.2 s (rollout.engine.start_timeout_s)" in str(results[0])


async def test_workers_that_die_in_their_start_end_a_call(scores):
    (error,), workers = await scores(lambda sample: 1.0, None, 1)
    assert error.kind == "raised" and "died again and again" in str(error)
    assert workers == 1 + (1 + RolloutConfig().reward.concurrency)


class Mortal(InProcessWorker):
    """Its process ends as soon as it gets a call for a sample "bad"; others take a moment."""

    def __init__(self) -> None:
        super().__init__(self._score)
        self._takes, self.remote, self._death = self.remote, self._remote, asyncio.Event()

    async def _score(self, sample):
        if sample.sample_id == "bad":
            self._death.set()
        await asyncio.sleep(0.01)
        return 1.0

    async def _remote(self, requests):
        return await unless_dead(self._takes(requests), self._death)


async def score_with_a_bad_one(kind, config, number):
    """Score so many samples, and a bad one among the first: (its error, rewards of the others,
    workers of this kind that were made)."""
    made = []

    def make():
        made.append(kind())
        return made[-1]

    scorer = Scorer(lambda sample: 1.0, RolloutConfig(reward=config), make_worker=make)
    names = [f"g0-{i}" for i in range(number)]
    names.insert(9, "bad")
    async with asyncio.timeout(60):
        results = await asyncio.gather(
            *(scorer.score(dataclasses.replace(SAMPLE, sample_id=name)) for name in names),
            return_exceptions=True,
        )
    error = results.pop(9)
    return error, [result.reward for result in results], made


class Stuck(InProcessWorker):
    """Its process does nothing any more once it has a call for a sample "bad"."""

    def __init__(self) -> None:
        super().__init__(lambda sample: 1.0)
        self._takes, self.remote, self.lives = self.remote, self._remote, SimpleNamespace()
        self.lives.remote = functools.partial(self._remote, ())
        self._killed, self._is_stuck = asyncio.Event(), False

    def kill(self):
        self._killed.set()

    async def _remote(self, requests):
        names = [cloudpickle.loads(pickled)[1].sample_id for _, pickled in requests]
        self._is_stuck = self._is_stuck or "bad" in names
        if self._is_stuck or self._killed.is_set():
            await self._killed.wait()
            raise RayActorError()
        return await self._takes(requests)


@pytest.mark.parametrize("concurrency", [1, 16])
async def test_a_call_that_keeps_the_interpreter_costs_no_other_call(monkeypatch, concurrency):
    """known fault: so it did each one that had begun in the same moment."""
    monkeypatch.setattr(scoring.ray, "kill", lambda worker: worker.kill())
    monkeypatch.setattr(scoring, "_GRACE_S", 0.2)
    config = {"concurrency": concurrency, "timeout_s": 0.2, "retries": 0}
    error, rewards, made = await score_with_a_bad_one(Stuck, config, 30)
    assert (error.kind, error.sample_id) == ("timeout", "bad")
    assert rewards == [1.0] * 30
    assert len(made) == 3


@pytest.mark.parametrize("num_workers", [1, 3])
@pytest.mark.parametrize("concurrency", [1, 16, 50])
async def test_a_call_that_ends_its_process_costs_no_other_call(
    monkeypatch, concurrency, num_workers
):
    """known fault: all calls that were in a worker failed with it, after 34 workers."""
    monkeypatch.setattr(scoring.ray, "kill", lambda worker: None)
    config = {"concurrency": concurrency, "num_workers": num_workers}
    error, rewards, made = await score_with_a_bad_one(Mortal, config, 60)
    assert (error.kind, error.sample_id) == ("raised", "bad")
    assert rewards == [1.0] * 60
    assert len(made) <= num_workers + concurrency.bit_length() + 1


# -- environments ----------------------------------------------------------------------------------


class Game:
    """An environment that answers as it is told to."""

    def __init__(self, answer) -> None:
        self.answer = answer

    def reset(self, sample):
        return self.answer

    def step(self, sample):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def after_a_turn(reason=FinishReason.STOP):
    segment = Segment(policy_version=0, token_ids=(7,), logprobs=(0.0,))
    generation = Generation(request_id="r", segments=(segment,), finish_reason=reason)
    return SAMPLE.append(generation, ends_turn=True)


def ask(what, answer, sample):
    """What the scorer makes of an environment's answer: a value or an error."""
    worker = InProcessWorker(None, Game(answer))

    async def main():
        config = RolloutConfig(reward={"retries": 0})
        scorer = Scorer(None, config, Game(answer), make_worker=lambda: worker)
        try:
            return await getattr(scorer, what)(sample)
        except UserCodeError as error:
            return error

    return asyncio.run(main())


def test_steps_are_taken_and_silence_is_one_before_the_first_turn():
    step = Step(text="06")
    assert ask("step", step, after_a_turn()) == step
    assert ask("reset", step, SAMPLE) == step
    assert ask("reset", None, SAMPLE) == Step()


@pytest.mark.parametrize(
    ("what", "answer", "kind", "says"),
    [
        ("step", None, "invalid", "must be a Step"),
        ("step", 1.0, "invalid", "must be a Step"),
        ("reset", Step(done=True), "invalid", "before the first turn"),
        ("step", Step(state={"n": 1}), "invalid", "says nothing after a turn"),
        ("step", ValueError("no tool"), "raised", "no tool"),
    ],
)
def test_what_is_no_step_is_an_error_with_its_kind(what, answer, kind, says):
    error = ask(what, answer, SAMPLE if what == "reset" else after_a_turn())
    assert isinstance(error, StepError)
    assert error.kind == kind
    assert says in str(error)


def test_without_a_reward_function_the_environment_gives_the_reward_of_what_ended_by_itself():
    spent = after_a_turn(FinishReason.LENGTH)
    assert ask("score", Step(done=True, reward=0.5), spent).reward == 0.5
    error = ask("score", Step(done=True), spent)
    assert isinstance(error, StepError)
    assert "without a reward" in str(error)


async def test_the_times_in_which_calls_ran_are_spans(monkeypatch):
    monkeypatch.setattr(scoring, "_APART_S", 0.1)
    ends = asyncio.Queue()

    async def reward(sample):
        await ends.get()
        return 1.0

    scorer = Scorer(reward, RolloutConfig(), make_worker=lambda: InProcessWorker(reward))
    assert scorer.take_spans() == []
    calls = [asyncio.create_task(scorer.score(SAMPLE)) for _ in range(2)]
    await asyncio.sleep(0.01)  # they begin
    await asyncio.sleep(0.03)
    ends.put_nowait(1)
    await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
    (first,) = scorer.take_spans()
    assert (first["actor"], first["what"]) == ("rewards", "score")
    assert first["end_s"] - first["start_s"] >= 0.03
    await asyncio.sleep(0.03)
    ends.put_nowait(2)
    await asyncio.wait(calls)
    (second,) = scorer.take_spans()
    assert second["start_s"] == first["end_s"], "one call went on"
    await asyncio.sleep(0.3)
    for _ in range(3):
        ends.put_nowait(3)
        await scorer.score(SAMPLE)
    (third,) = scorer.take_spans()
    assert third["start_s"] > second["end_s"] and scorer.take_spans() == []


async def test_a_rewards_time_is_that_of_its_call_without_the_wait_for_a_slot():
    async def reward(sample):
        await asyncio.sleep(0.1)
        return 1.0

    one_by_one = RolloutConfig(reward={"concurrency": 1})
    scorer = Scorer(reward, one_by_one, make_worker=lambda: InProcessWorker(reward))
    assert scorer.mean_reward_s is None
    await asyncio.gather(*(scorer.score(SAMPLE) for _ in range(4)))
    assert 0.1 <= scorer.mean_reward_s < 0.2, "with the wait the mean would be 0.25"


async def test_answers_of_an_environment_are_spans_of_their_own():
    class Says:
        async def reset(self, sample):
            return Step(text="a")

    scorer = Scorer(
        None, RolloutConfig(), Says(), make_worker=lambda: InProcessWorker(None, Says())
    )
    await scorer.reset(SAMPLE)
    (span,) = scorer.take_spans()
    assert (span["actor"], span["what"]) == ("environment", "answer")
    assert scorer.mean_reward_s is None
