"""A text environment in gymnasium's form as one of ours."""

from __future__ import annotations

import dataclasses
import pickle
from functools import partial

import gymnasium
import pytest
from ray import cloudpickle, tune

from ray_apr.core.exceptions import ConfigError
from ray_apr.core.messages import Generation
from ray_apr.core.sample import FinishReason, Prompt, Sample, Segment
from ray_apr.rllib.environment import SEED_COLUMN, TextEnvironment, env_maker
from ray_apr.rollout.turns import turn_rules
from tests.rllib_configs import Guess


@pytest.fixture(autouse=True)
def all_are_closed():
    Guess.num_open = 0
    yield
    assert Guess.num_open == 0


def asked(sample: Sample, turn: str, reason: FinishReason = FinishReason.STOP) -> Sample:
    """A sample after a turn of the policy."""
    segment = Segment(policy_version=0, token_ids=(7,), logprobs=(0.0,))
    generation = Generation(request_id="r", segments=(segment,), finish_reason=reason)
    after = sample.append(generation, ends_turn=True)
    return dataclasses.replace(after, turn_text=turn)


def new_sample(seed: int, budget: int = 50) -> Sample:
    prompt = Prompt(prompt_id="p", token_ids=(1,), row={"prompt": "?", SEED_COLUMN: seed})
    return Sample(sample_id="s", group_id="g", prompt=prompt, max_response_tokens=budget)


def play(seed: int, *turns: str) -> tuple[list, Sample]:
    """Steps of an episode, each by an environment of its own, as in other processes."""
    sample, steps = new_sample(seed), []
    for turn in turns:
        environment = pickle.loads(
            cloudpickle.dumps(TextEnvironment(partial(Guess, {"limit": 10})))
        )
        sample = asked(sample, turn)
        steps.append(environment.step(sample))
        assert environment.step(sample) == steps[-1], "a call may be made again"
        if not steps[-1].done:
            sample = sample.observe((5,), state=steps[-1].state)
    return steps, sample


def test_an_episode_is_played_over_calls_that_share_nothing():
    steps, _ = play(17, "3", "9", "7")
    assert [step.text for step in steps[:2]] == ["higher", "lower"]
    assert steps[2].done
    assert steps[2].result.reward == pytest.approx(0.75)


def test_a_truncated_episode_is_over():
    steps, _ = play(17, "1", "2", "3", "4")
    assert [step.done for step in steps] == [False, False, False, True]
    assert steps[3].result.reward == pytest.approx(-1.0)


def test_a_turn_that_the_budget_cut_off_is_no_action():
    environment = TextEnvironment(Guess)
    _, sample = play(17, "3")
    cut = asked(sample, "7", FinishReason.LENGTH)
    assert cut.finish_reason is FinishReason.LENGTH
    step = environment.step(cut)
    assert step.done
    assert step.result.reward == pytest.approx(-0.25)


def test_an_episode_that_ends_after_its_last_turn_has_the_return_so_far():
    rules, environment = turn_rules(TextEnvironment(Guess), 1), TextEnvironment(Guess)
    assert rules is not None
    assert not rules.resets, "the prompt is the first observation"
    sample = asked(new_sample(17), "3")
    step = environment.step(sample)
    reason = rules.finish_reason(sample, step)
    assert reason is FinishReason.LENGTH
    last = environment.step(sample.finish(reason, state=step.state))
    assert last.result.reward == pytest.approx(-0.25)


def test_prompts_are_first_observations():
    rows = TextEnvironment(partial(Guess, {"limit": 5})).rows(range(3, 5), "question")
    assert rows.slice(0, 9) == [
        {"question": "below 5?", SEED_COLUMN: 3},
        {"question": "below 5?", SEED_COLUMN: 4},
    ]


def test_observations_may_be_said_by_a_chats_user():
    environment = TextEnvironment(Guess, "user")
    assert environment.prompt(0) == [{"role": "user", "content": "below 10?"}]
    step = environment.step(asked(new_sample(17), "3"))
    assert step.messages == ({"role": "user", "content": "higher"},)


def test_an_environment_is_found_by_class_function_and_name():
    tune.register_env("guess", partial(Guess))
    gymnasium.register("Guess-v0", lambda limit: Guess({"limit": limit}))
    classpath = f"{Guess.__module__}.Guess"
    for env in (Guess, partial(Guess), "guess", classpath, "Guess-v0"):
        environment = TextEnvironment(env_maker(env, {"limit": 7}))
        assert environment.prompt(0) == "below 7?"
    with pytest.raises(ConfigError, match=r"environment.env = 'CartPole-v9': is known to neither"):
        env_maker("CartPole-v9", {})


class Numbers(Guess):
    action_space = gymnasium.spaces.Discrete(10)


class Moods(Guess):
    said = 0

    def reset(self, *, seed=None, options=None):
        type(self).said += 1
        return f"hello {self.said}", {}


@pytest.mark.parametrize(
    ("env", "words"),
    [
        (Numbers, r"environment.action_space = Discrete\(10\): must be a gymnasium.spaces.Text"),
        (Moods, "environment.env = 'hello 2': says something else at the second reset"),
    ],
)
def test_what_is_no_text_environment_is_refused(env, words):
    env.num_open = 0
    with pytest.raises(ConfigError, match=words):
        TextEnvironment(env).check()
    assert env.num_open == 0
    TextEnvironment(Guess).check()
