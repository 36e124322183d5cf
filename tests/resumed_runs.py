"""Runs that are interrupted at some steps and gone on with, and what must hold of them."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray.train

from ray_apr.tools.verify import verify
from tests.whole_runs import ONE_OF_EACH, start_run

BATCH = 32
GROUP = 4
SMALL = (
    f"train.batch_size={BATCH}", f"rollout.group_size={GROUP}", "rollout.max_response_tokens=96",
    "run.resume=true", *ONE_OF_EACH,
)  # fmt: skip
"""The arithmetic example in small steps, on one engine and one train worker."""
_END_S = 300.0


def run_once(
    folder: Path, env: dict[str, str], *overrides: str, stop_at: int | None, kill: int
) -> str:
    """Run, from where the run of this folder stands, to a step or to the end.

    Args:
        folder: Of runs; the run's is ``run`` in it.
        env: Environment of the command.
        overrides: Settings beside `SMALL`.
        stop_at: Number of the step's line after which the signal is sent, once Ray Train knows of
            a checkpoint if it is to be killed; None: to the end.
        kill: The signal.

    Returns:
        What the command said.
    """
    process = start_run(folder, env, *SMALL, *overrides)
    assert process.stdout is not None
    said = []
    for line in process.stdout:
        said.append(line)
        if stop_at is not None and line.startswith("step") and _number(line) >= stop_at:
            # it looks for new ones every two seconds
            if kill == signal.SIGKILL and not _has_checkpoint(folder / "run"):
                continue
            process.send_signal(kill)
            break
    try:
        rest, _ = process.communicate(timeout=_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        raise AssertionError("".join(said)[-4000:]) from None
    said.append(rest)
    wanted = 0 if stop_at is None else {signal.SIGINT: 130, signal.SIGKILL: -9}[kill]
    assert process.returncode == wanted, "".join(said)[-6000:]
    return "".join(said)


def _number(line: str) -> int:
    """Of a progress line, e.g. 3 of "step    3/64 ..."."""
    return int(line.split("/")[0].removeprefix("step"))


def check_run(folder: Path, *, steps: int, resumes: int) -> dict[str, Any]:
    """Check that a run that was gone on with is one whole run; returns its figures."""
    checks = verify(folder)
    assert all(check.ok for check in checks), checks
    final = json.loads((folder / "final.json").read_text())
    assert (final["status"], final["steps"]) == ("ok", steps)
    restarts = _rows(folder / "resumes.jsonl") if resumes else []
    assert len(restarts) == resumes
    discarded = final["tokens_discarded"]
    assert discarded.get("lost", 0) >= max((row["tokens_lost"] for row in restarts), default=0)
    samples = _rows(folder / "samples.jsonl")
    return {
        "steps": steps,
        "resumes": restarts,
        "checks": {check.name: check.seen for check in checks},
        "prompts_handed_out": final["prompts_position"],
        "prompts_trained": len({row["group_id"].partition("~")[0] for row in samples}),
        "prompts_pending": len(final["prompts_pending"]),
        "tokens_discarded": {reason: n for reason, n in discarded.items() if n},
        "tokens_generated": final["tokens_generated"],
        "tokens_trained": final["tokens_trained"],
        "staleness_max": max(row["staleness"] or 0 for row in samples),
    }


def _has_checkpoint(folder: Path) -> bool:
    try:
        return ray.train.Result.from_path(str(folder)).checkpoint is not None
    except RuntimeError:
        return False


def _rows(file: Path) -> Sequence[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]
