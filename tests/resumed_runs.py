"""Runs that are interrupted at some steps and gone on with, and what must hold of them."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import ray.train

from ray_apr.data.journal import JournalFolder
from ray_apr.data.replay import Epoch, replay
from ray_apr.data.resumption import Begin
from ray_apr.tools.verify import verify
from tests.processes import MARK, kill_all
from tests.whole_runs import ONE_OF_EACH, start_run

BATCH = 32
GROUP = 4
SMALL = (
    f"train.batch_size={BATCH}", f"rollout.group_size={GROUP}", "rollout.max_response_tokens=96",
    "run.resume=true", *ONE_OF_EACH,
)  # fmt: skip
"""The arithmetic example in small steps, on one engine and one train worker."""
_END_S = 500.0
_BY_THE_CLOCK = (
    "inflight", "held", "buffered", "tokens_generated", "tokens_discarded", "samples_interrupted",
    "samples_resumed", "unscored", "stepping", "limited_by", "waiting_for", "engines_version",
    "engines_tokens", "weight_check_gap", "weight_check_k3",
)  # fmt: skip
"""Figures of a step, beside durations, that depend on when somebody looked: at the rollout side,
which tells its state once in a while, and at the weights."""


def run_once(
    folder: Path,
    env: dict[str, str],
    *overrides: str,
    stop_at: int | None = None,
    kill: int = signal.SIGINT,
    kills_all: bool = False,
) -> str:
    """Run, from where the run of this folder stands, to a step or to the end.

    Args:
        folder: Of runs; the run's is ``run`` in it.
        env: Environment of the command.
        overrides: Settings beside `SMALL`.
        stop_at: Number of the step's line after which the signal is sent, once Ray Train knows of
            a checkpoint if it is to be killed; None: to the end.
        kill: The signal.
        kills_all: Whether all other processes of the run are killed -9 at once, too.

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
            if kills_all:
                kill_all(env[MARK])
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


def figures(folder: Path) -> list[dict[str, Any]]:
    """Figures of each step of a run in which no clock has a part."""
    return [
        {n: v for n, v in row.items() if not n.endswith("_s") and n not in _BY_THE_CLOCK}
        for row in _rows(folder / "metrics.jsonl")
    ]


def journaled_samples(folder: Path) -> tuple[pa.Table, dict[int, tuple[str, ...]]]:
    """All samples of a run that keeps all of its journal, but those of groups that were dropped,
    and the ids of the groups of each step; it has not been gone on with without its journal."""
    journal = JournalFolder.of(str(folder / "journal"), None)
    epochs = [
        Epoch(tuple(journal.frames(n, "worker")), tuple(journal.frames(n, "buffer")))
        for n in journal.epochs()
    ]
    assert journal.epochs()[0] == 0, "the run keeps all checkpoints, and with them its journal"
    end = replay(Begin(), epochs, {}, trainer_lives=False)
    assert end.replayed is not None
    return end.samples, dict(end.replayed.plan)


def _has_checkpoint(folder: Path) -> bool:
    try:
        return ray.train.Result.from_path(str(folder)).checkpoint is not None
    except RuntimeError:
        return False


def _rows(file: Path) -> Sequence[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]
