"""The arithmetic example: its reward, prompts and base model folder."""

from __future__ import annotations

import importlib.util
import json
import random
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pyarrow.parquet as pq
import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "arithmetic"


def load_task() -> ModuleType:
    """Import the example's `task.py`, which lies outside the package."""
    spec = importlib.util.spec_from_file_location("arithmetic_task", EXAMPLE / "task.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


task = load_task()


@pytest.fixture(scope="module")
def rows() -> list[dict]:
    """All rows of the example's prompts."""
    return pq.read_table(EXAMPLE / "prompts.parquet").to_pylist()


def score(response: str, answer: str) -> float:
    """Reward of a response to a row with that answer."""
    return task.reward(SimpleNamespace(response_text=response, row={"answer": answer}))


def reference(row: dict) -> str:
    """The careful student's response to a row."""
    return task.worked_answer(*task.parse_prompt(row["prompt"]))


def test_worked_answer_writes_columns_then_answer() -> None:
    assert task.worked_answer(12, 94) == "2+4+0=06;1+9+0=10,106"
    assert task.worked_answer(7, 58) == "7+8+0=15;0+5+1=06,65"


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("2+4+0=06;1+9+0=10,106", 1.0),
        ("anything,106", 1.0),
        ("2+4+0=06;1+9+0=10,107", 0.0),
        ("2+4+0=06;1+9+0=10,1060", 0.0),
        ("2+4+0=06;1+9+0=10,106,7", 0.0),
        ("2+4+0=06;1+9+0=10,", 0.0),
        ("106", 0.0),
        ("", 0.0),
    ],
)
def test_reward_is_exact(response: str, expected: float) -> None:
    assert score(response, "106") == expected


def test_reference_answers_earn_one(rows: list[dict]) -> None:
    assert all(score(reference(row), row["answer"]) == 1.0 for row in rows)


def test_careless_answers_are_well_formed_and_mostly_wrong() -> None:
    rng = random.Random(0)
    scores = []
    for _ in range(500):
        left, right = task.sample_operands(rng, 3)
        response = task.worked_answer(left, right, mistake_probability=0.5, rng=rng)
        assert response.count("=") == 3
        assert task.final_answer(response).isdigit()
        scores.append(score(response, str(left + right)))
    assert 0.05 < sum(scores) / len(scores) < 0.25  # 0.5 ** 3, and few mistakes that cancel


def test_mistakes_need_a_source_of_randomness() -> None:
    with pytest.raises(ValueError, match="rng"):
        task.worked_answer(1, 2, mistake_probability=0.1)


def test_rows_have_the_columns_and_right_answers(rows: list[dict]) -> None:
    assert len(rows) == 4096
    assert set(rows[0]) == {"prompt", "answer", "num_digits"}
    for row in rows:
        left, right = task.parse_prompt(row["prompt"])
        assert row["answer"] == str(left + right)
        assert len(str(left)) == len(str(right)) == row["num_digits"]
        assert len(row["prompt"]) <= 32


def test_response_lengths_have_a_long_tail(rows: list[dict]) -> None:
    lengths = sorted(len(reference(row)) + 1 for row in rows)  # + 1: the end-of-sequence token
    median, p99 = lengths[len(lengths) // 2], lengths[int(0.99 * len(lengths))]
    assert p99 >= 5 * median
    assert lengths[-1] <= 190


def test_base_model_folder_is_small_and_has_a_tokenizer() -> None:
    folder = EXAMPLE / "base_model"
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 4 * 2**20
    assert (folder / "model.safetensors").exists()
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    assert set(task.ALPHABET) <= set(vocabulary)
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["Qwen3ForCausalLM"]


def test_prompts_are_small_on_disk() -> None:
    assert (EXAMPLE / "prompts.parquet").stat().st_size < 200_000
