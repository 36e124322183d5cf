"""``final.json``: the last counters of a run, and how it ended."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray_apr.core.exceptions import FolderTakenError, ResourceError, Stopped, one_line
from ray_apr.run.causes import cause_of, write_error_log
from ray_apr.run.folder import not_written, put_text
from ray_apr.scheduling.order import prompt_position

if TYPE_CHECKING:
    from ray_apr.core.messages import ServerStatus
    from ray_apr.data.resumption import Begin, Counters, RolloutSummary
    from ray_apr.run.spec import RunSpec
    from ray_apr.scheduling.stock import BufferStats

logger = logging.getLogger(__name__)

FINAL_FILE = "final.json"
"""File of the run folder with the last counters, and how the run ended."""
ERROR_LOG = "error.log"
"""File of the run folder with the tracebacks of a run that failed."""


def final_figures(
    spec: RunSpec,
    summary: RolloutSummary | None,
    stats: BufferStats | None,
    num_steps: int | None,
    before: Counters,
) -> dict[str, Any]:
    """The run's last counters, without those of an actor that did not answer.

    The ledger is that of the rollout worker and that of the buffer together. The engines count what
    they hand out apart from it: `ledger_error` is what they generated and no place has. Steps are
    those that were recorded.

    Args:
        spec: What ran.
        summary: Of the rollout worker; None if it did not answer.
        stats: Of the buffer; None if it did not answer.
        num_steps: Rows of the run folder; None if the recorder did not answer.
        before: What the run folder counted when this run began.
    """
    figures: dict[str, Any] = {
        "mode": spec.partial_rollout.mode,
        "seed": spec.train.seed,
        "steps": num_steps,
        "max_staleness": spec.partial_rollout.max_staleness,
        "batch_size": spec.step_size,
        "num_replicas": spec.rollout.num_replicas,
        "num_train_workers": spec.scaling.num_workers,
        "ledger_error": None,
    }
    if num_steps is None:
        del figures["steps"]
    if stats is not None:
        figures |= {
            "samples_trained": before.samples_trained + stats.trained_samples,
            "tokens_trained": before.tokens_trained + stats.ledger.trained,
            "read_ahead_max": stats.read_ahead_max,
        }
    if summary is not None:
        generated = sum(engine.tokens_generated for engine in summary.engines)
        figures |= {
            "samples_interrupted": before.samples_interrupted + summary.samples_interrupted,
            "samples_resumed": before.samples_resumed + summary.samples_resumed,
            "tokens_generated": before.tokens_generated + generated,
            "tokens_outside": sum(engine.tokens_outside for engine in summary.engines),
            "tokens_interrupted": summary.ledger.interrupted,
            "num_prompts": summary.num_prompts,
            "prompts_position": summary.prompts_position,
            "engines": [_engine_figures(engine) for engine in summary.engines],
        }
    if summary is not None and stats is not None:
        ledger = before.ledger + summary.ledger + stats.ledger
        uncounted = figures["tokens_generated"] - ledger.generated
        held = {prompt_position(group, summary.num_prompts) for group in stats.held_groups}
        figures |= {
            "prompts_pending": sorted({*summary.pending_prompts, *held}),
            "tokens_buffered": ledger.pending + ledger.buffered,
            "tokens_discarded": ledger.discarded,
            "ledger_error": uncounted + ledger.error,
        }
    return figures


def _engine_figures(engine: ServerStatus) -> dict[str, Any]:
    names = ("replica_id", "policy_version", "uptime_s", "busy_s", "paused_s", "tokens_generated")
    return {name: getattr(engine, name) for name in names}


def write_final(folder: Path, figures: Mapping[str, Any], error: BaseException | None) -> None:
    """Write the last counters of a run, and how it ended; nothing of one that another driver has.

    Raises:
        ResourceError: If they cannot be written, and the run has not failed anyhow.
    """
    if isinstance(error, FolderTakenError):
        return
    try:
        write_json(folder / FINAL_FILE, {**figures, **_outcome(error)})
    except ResourceError as full:
        if error is None:
            raise
        logger.error("%s", full)


def write_outcome(folder: Path, error: BaseException) -> None:
    """Write anew how a run ended whose last attempt may have written its counters."""
    with contextlib.suppress(FileNotFoundError):
        write_final(folder, json.loads((folder / FINAL_FILE).read_text(encoding="utf-8")), error)


def write_end_of_start(spec: RunSpec, begin: Begin, error: BaseException, wall_s: float) -> None:
    """Write how a run ended that came to nothing: its parts could not be made."""
    taken = spec.taken_over
    if not isinstance(error, Stopped):
        log = spec.folder / ERROR_LOG
        if write_error_log(log, error, taken or cause_of(error)):
            error.add_note(f"traceback: {log}")
    final = final_figures(spec, None, None, begin.num_rows, begin.before)
    write_final(spec.folder, final | {"setup_s": None, "wall_s": wall_s}, taken or error)


def _outcome(error: BaseException | None) -> dict[str, str | None]:
    """How the run ended."""
    if error is None:
        return {"status": "ok", "error": None}
    if isinstance(error, Stopped):
        return {"status": "stopped", "error": str(error)}
    return {"status": "failed", "error": f"{type(error).__name__}: {one_line(error)}"}


def write_json(path: Path, value: Any) -> None:
    """Write a value as a file that people can read, whole or not at all.

    Raises:
        ResourceError: If that cannot be done, e.g. on a full disk.
    """
    try:
        put_text(path, json.dumps(value, indent=2, default=str) + "\n")
    except OSError as error:
        raise not_written(path, error) from error
