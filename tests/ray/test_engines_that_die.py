"""Runs whose engines die again and again, or all at one moment."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from ray_apr.data.tokenizers import encode_prompt, load_tokenizer
from ray_apr.run.folder import read_rows
from ray_apr.scheduling.order import prompt_order
from ray_apr.scheduling.suspects import CONVICTED
from ray_apr.tools.verify import verify
from tests.killed_parts import SMALL, KilledRun
from tests.poison_plugin import poisoned
from tests.whole_runs import CONFIG

pytestmark = [
    pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow, pytest.mark.long,
    pytest.mark.timeout(900),
]  # fmt: skip

NO_RESTART = "run.max_failures=0"


def check(folder: Path, steps: int) -> dict:
    """That a run reached its last step by itself, and kept what it promises."""
    checks = verify(folder)
    assert all(check.ok for check in checks), checks
    final = json.loads((folder / "final.json").read_text())
    assert (final["status"], final["steps"], final["ledger_error"]) == ("ok", steps, 0)
    assert not read_rows(folder / "resumes.jsonl") and not read_rows(folder / "restarts.jsonl")
    return final


@pytest.mark.parametrize(("num_engines", "steps"), [(1, 12), (2, 300)])
def test_a_prompt_that_kills_its_engine_is_set_aside_and_the_run_reaches_its_last_step(
    tmp_path, marked, num_engines, steps
):
    mark, env = marked
    prompts = pq.read_table(CONFIG.parent / "prompts.parquet")["prompt"]
    row = int(prompt_order(len(prompts), seed=0, epoch=0)[20])
    tokenizer = load_tokenizer(str(CONFIG.parent / "base_model"))
    env = poisoned(env, tmp_path / "plugin", encode_prompt(tokenizer, prompts[row].as_py()))
    run = KilledRun(
        tmp_path, mark, env,
        (*SMALL, NO_RESTART, f"train.steps={steps}", f"rollout.num_replicas={num_engines}"),
    )  # fmt: skip
    run.start()
    assert run.end(800) == 0, run.tail
    final = check(tmp_path / "run", steps)
    (found,) = read_rows(tmp_path / "run" / "poison.jsonl")
    assert (found["row"], found["deaths"]) == (row, CONVICTED)
    assert CONVICTED <= len(final["engines"]) - num_engines <= 2 * CONVICTED, "one after each death"
    assert final["tokens_discarded"].get("poison", 0) == 0, "it died as it went in"


@pytest.mark.parametrize(
    ("kind", "num_engines", "settings"),
    [
        ("replica", 1, ("mode=apr",)),
        ("engine core", 2, ("mode=sync", "scaling={num_workers: 2, use_gpu: false}")),
    ],
)
def test_a_run_whose_engines_all_die_at_one_moment_goes_on(
    tmp_path, marked, kind, num_engines, settings
):
    mark, env = marked
    run = KilledRun(
        tmp_path, mark, env,
        (*SMALL, NO_RESTART, "train.steps=12", f"rollout.num_replicas={num_engines}", *settings),
    )  # fmt: skip
    run.start()
    run.wait_for_step(5)
    assert run.kill_all(kind) == num_engines, run.tail
    assert run.end(400) == 0, run.tail
    final = check(tmp_path / "run", 12)
    assert len(final["engines"]) == 2 * num_engines
