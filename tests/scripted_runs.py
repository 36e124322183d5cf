"""Whole runs with engines that draw their tokens by chance, and what they came to."""

from __future__ import annotations

import itertools
import json
import statistics
from pathlib import Path
from typing import Any

from ray_apr.run.folder import read_rows
from ray_apr.tools.verify import verify

BACKEND = Path(__file__).with_name("scripted_backend.py")
SCRIPTED = (
    f"rollout.engine.factory={BACKEND}:ScriptedBackend", f"reward={BACKEND}:reward",
    "rollout.engine.kwargs={num_ids: 17, longest: 48}", "rollout.num_replicas=1",
    "rollout.group_size=4", "rollout.max_response_tokens=64", "train.batch_size=16",
    "train.weight_check_every=0", "scaling={num_workers: 1, use_gpu: false}", "run.resume=true",
)  # fmt: skip


def judge(folder: Path, steps: int, is_ok: bool = True) -> dict[str, Any]:
    """Whether a run that has ended kept what it promises, from its folder."""
    checks = verify(folder)
    final = json.loads((folder / "final.json").read_text())
    return {
        "ok": is_ok and all(check.ok for check in checks) and final["steps"] == steps,
        "checks": {check.name: check.seen for check in checks},
        "ledger_error": final["ledger_error"],
        "tokens_generated": final["tokens_generated"],
        "tokens_discarded": {r: n for r, n in final["tokens_discarded"].items() if n},
        "resumed_at": [row["step"] for row in read_rows(folder / "resumes.jsonl")],
    }


def spans(folder: Path) -> dict[str, float]:
    """Median seconds of each activity of the trainer, from the timeline."""
    by_name: dict[str, list[float]] = {}
    for row in read_rows(folder / "timeline.jsonl"):
        if row["actor"] == "trainer":
            by_name.setdefault(row["what"], []).append(row["end_s"] - row["start_s"])
    return {name: round(statistics.median(of), 3) for name, of in sorted(by_name.items())}


def step_s(times: list[float]) -> float | None:
    """Median seconds of a step."""
    if len(times) < 2:
        return None
    return round(statistics.median(b - a for a, b in itertools.pairwise(times)), 3)
