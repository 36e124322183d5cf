"""The call of the reward in a dry run (cli/first_reward.py)."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest

from ray_apr.cli import first_reward
from ray_apr.cli.first_reward import call_rewards, rewards_of
from ray_apr.config import EvaluationConfig
from ray_apr.core.exceptions import ConfigError
from ray_apr.core.user import Environment, RewardResult
from ray_apr.data.rows import Origin, PromptRows
from ray_apr.rewards import code_tests, exact_match, length_penalty, llm_judge, weighted_sum
from tests.run_specs import run_spec

MODEL = str(Path(__file__).parents[2] / "examples" / "arithmetic" / "base_model")
ROWS = [{"prompt": "1+1=", "answer": 2}, {"prompt": "1+2=", "answer": 3, "hint": "count"}]
LINES = [Origin(name="sums.jsonl", num_rows=2, lines=[1, 3])]
JUDGE = llm_judge("{response}", base_url="http://127.0.0.1:9", model="m")


def call(reward, rows=ROWS, suites=("easy", "hard", "hard"), **spec):
    """What is told, and the warnings."""
    told: list[str] = []
    spec = run_spec(**{"model": MODEL, "reward": reward} | spec)
    settings = SimpleNamespace(
        reward="task.py:reward", evaluation_rewards=dict.fromkeys(suites, "own.py:own")
    )
    held_out = PromptRows([{"suite": name, "prompt": "1+1="} for name in suites])
    prompts = {"prompts": PromptRows(rows, LINES), "evaluation.prompts": held_out}
    warnings = call_rewards(rewards_of(settings, prompts, spec), spec, told.append)
    return told, warnings


def test_value_and_parts_are_told_of_the_answer_of_the_first_row():
    def reward(sample):
        assert sample.row == {"prompt": "1+1=", "answer": 2, "hint": None}
        assert len(sample.prompt.token_ids) == 4 and sample.num_generated == 1
        return RewardResult(
            reward=0.5, metrics={"form": 0.25, "right": sample.response_text == "2"}
        )

    said = "gives 0.5, form 0.25, right 1 for the response '2', its answer, to sums.jsonl, line 1"
    assert call(reward) == ([f"reward: task.py:reward {said}"], [])
    parts = {"right": (1.0, exact_match("answer")), "length": (1.0, length_penalty(target=1))}
    ((told,), _) = call(weighted_sum(parts))
    assert "gives 1, " in told


@pytest.mark.parametrize("column", ["solution", "ground_truth", "target", "gold"])
def test_an_answer_may_have_another_usual_name(column):
    """known fault: the reward of such a row was called with nothing, so that one that compares a
    text with a number gave 0 as any right one would."""

    def reward(sample):
        return float(sample.response_text == sample.row[column])  # a text is no number

    ((told,), _) = call(reward, [{"prompt": "1+1=", "level": 7, column: 2}])
    assert f"gives 0 for the response '2', its {column}, to sums.jsonl, line 1; as it sh" in told
    ((told,), _) = call(lambda sample: 1.0, [{"prompt": "1+1=", column: 2}])
    assert told.endswith("to sums.jsonl, line 1")
    ((told,), _) = call(lambda sample: 0.0, [{"prompt": "1+1="}])
    assert told.endswith("to sums.jsonl, line 1")


def test_a_row_without_an_answer_is_answered_with_nothing():
    async def reward(sample):
        await asyncio.sleep(0)
        return float(sample.response_text == "" and sample.num_tokens == 0)

    for answer in ({}, {"answer": None}, {"answer": ["2"]}, {"gold": {"value": 2}}):
        rows = pa.Table.from_pylist([{"prompt": "1+1="} | answer])
        ((told,), _) = call(reward, rows)
        assert told.startswith("reward: task.py:reward gives 1 for the response '' to sums.jsonl")


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (
            lambda sample: sample.row["solution"],
            r"raised KeyError: 'solution' (test_first_reward.py",
        ),
        (lambda sample: "good", "returned 'good'; must be a finite number, or a RewardResult"),
        (lambda sample: "1", "returned '1'; must be a finite number"),
        (lambda sample: float("nan"), "returned nan; must be a finite number"),
        (lambda sample: sys.exit("no"), "raised SystemExit: no"),
        (exact_match("solution"), "its row has no column 'solution'"),
    ],
)
def test_a_reward_that_fails_is_refused_with_its_row(reward, message):
    with pytest.raises(ConfigError, match=re.escape(message)) as refused:
        call(reward)
    assert str(refused.value).startswith("reward = 'task.py:reward': ")
    assert "for the response '2', its answer, to sums.jsonl, line 1; correct" in str(refused.value)


def asks_itself(sample):
    """A reward that makes a zero of every failure."""
    try:
        urllib.request.urlopen("http://127.0.0.1:9", timeout=5)
    except Exception:  # noqa: BLE001 (as users do)
        return 0.0
    return 1.0


@pytest.mark.parametrize(
    ("reward", "would"),
    [
        (JUDGE, "asks a judge"),
        (weighted_sum({"a": (1.0, JUDGE), "b": (1.0, exact_match("answer"))}), "asks a judge"),
        (code_tests("tests"), "starts a process"),
        (lambda sample: os.system("true"), "starts a process"),
        (lambda sample: subprocess.run(["true"], check=True).returncode, "starts a process"),
        (asks_itself, "opens a connection"),
    ],
)
def test_a_reward_that_would_do_more_than_compute_is_named_as_not_called(reward, would):
    tests = [{"input": "", "output": "1\n"}]
    told, warnings = call(reward, [{"prompt": "1+1=", "answer": "print(1)", "tests": tests}])
    assert told == [f"reward: task.py:reward is not called by a dry run, as it {would}"]
    assert warnings == []


def test_a_judge_whose_key_is_not_set_is_a_warning(monkeypatch):
    """The run asked in vain, once its engines were there."""
    judge = llm_judge("{response}", base_url="http://127.0.0.1:9", model="m", api_key_env="A_KEY")
    monkeypatch.delenv("A_KEY", raising=False)
    told, (warning,) = call(judge)
    assert told == ["reward: task.py:reward is not called by a dry run, as it asks a judge"]
    assert warning.startswith("reward: task.py:reward: A_KEY is not set here")
    monkeypatch.setenv("A_KEY", "secret")
    assert call(judge) == (told, [])


def test_nothing_is_kept_from_others_afterwards():
    call(asks_itself)
    subprocess.run(["true"], check=True)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(closed.getsockname(), 5)


def test_a_reward_that_does_not_answer_is_a_warning(monkeypatch):
    monkeypatch.setattr(first_reward, "_LIMIT_S", 0.1)
    go_on = threading.Event()
    told, (warning,) = call(lambda sample: float(go_on.wait(10)))
    go_on.set()
    assert (
        told == []
        and "gave nothing for the response '2', its answer, to sums.jsonl, line 1 in 0.1 s"
        in warning
    )


def test_without_a_reward_or_beside_an_environment_nothing_is_called():
    class Echo(Environment):
        pass

    told, _ = call(lambda sample: 1 / 0, environment=Echo())
    assert told == [
        "reward: task.py:reward is not called by a dry run, as it reads what an environment said"
    ]
    assert call(None, environment=Echo()) == ([], [])
    assert call(lambda sample: 1 / 0, model="owner/not-here") == ([], [])


def test_the_reward_of_a_suite_is_called_for_its_first_prompt():
    def evaluated(own):
        config = EvaluationConfig(suite_column="suite", rewards={"hard": own})
        return call(lambda sample: 1.0, evaluation=config)

    (_, easy, told), warnings = evaluated(lambda sample: 0.5 * (sample.row["suite"] == "hard"))
    name = "evaluation.rewards.hard"
    assert easy == "reward: task.py:reward gives 1 for the response '' to evaluation.prompts[0]"
    assert (told, warnings) == (
        f"{name}: own.py:own gives 0.5 for the response '' to evaluation.prompts[1]",
        [],
    )
    with pytest.raises(ConfigError, match="ZeroDivisionError") as refused:
        evaluated(lambda sample: 1 / 0)
    assert refused.value.field == name


def test_the_reward_of_a_suite_without_a_name_is_not_that_of_the_run():
    """known fault: it was called for the prompts, too, and the reward of the run never."""
    own = EvaluationConfig(suite_column="suite", rewards={"": lambda sample: 0.5})
    told, _ = call(lambda sample: 1.0, suites=("easy", ""), evaluation=own)
    assert [line.partition(" for ")[0] for line in told] == [
        "reward: task.py:reward gives 1",
        "reward: task.py:reward gives 1",
        "evaluation.rewards.: own.py:own gives 0.5",
    ]


@pytest.mark.parametrize("config", [{}, {"suite_column": "suite"}])
def test_a_reward_that_held_out_prompts_have_no_column_for_is_refused(config):
    """known fault: the dry run said nothing, and each evaluation of the run failed."""
    evaluation = EvaluationConfig(**config)
    with pytest.raises(
        ConfigError, match=r"^reward = .*KeyError: 'answer'.*evaluation\.prompts\[0"
    ):
        call(lambda sample: float(sample.row["answer"]), evaluation=evaluation)
    told, warnings = call(JUDGE, evaluation=evaluation)
    assert (len(told), warnings) == (1, []), "what is not called is told once"
