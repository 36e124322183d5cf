"""Arguments of ``simulate`` and ``tune``; every command line loads this, and it only argparse."""

from __future__ import annotations

import argparse
from pathlib import Path

MODES = "sync, one_step_off, stream, async, in_flight, apr"
_COLUMNS = "prompt_id, sample_index, prompt_tokens, response_tokens, reward_s"


def add_simulate_arguments(parser: argparse.ArgumentParser) -> None:
    """What ``simulate`` takes."""
    _add_common(parser)
    parser.add_argument("trace_file", metavar="TRACE", nargs="?", type=Path, help="as --trace")
    parser.add_argument(
        "--mode", default="apr", metavar="NAME", help=f"preset: {MODES}; default: apr"
    )
    parser.add_argument(
        "--placement",
        choices=("disaggregated", "colocated"),
        help="instead of the one of the cluster file",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="overrides",
        help="replace one setting of partial_rollout, e.g. max_staleness=2; may be repeated",
    )


def add_tune_arguments(parser: argparse.ArgumentParser) -> None:
    """What ``tune`` takes."""
    _add_common(parser)
    parser.add_argument("trace_file", metavar="TRACE", nargs="?", type=Path, help="as --trace")
    parser.add_argument(
        "--max-staleness",
        type=int,
        metavar="N",
        help="oldest token that may be trained, in policy versions; default: that of the mode",
    )
    parser.add_argument(
        "--mode",
        default="apr",
        metavar="NAME",
        help=f"preset whose settings are tuned: {MODES}; default: apr",
    )


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help=f"Parquet or JSON lines, plain or gzipped, a row for each sample: {_COLUMNS}",
    )
    parser.add_argument(
        "--run",
        type=Path,
        metavar="RUN_DIR",
        help="instead of a trace: the lengths that a run has measured",
    )
    parser.add_argument(
        "--cluster",
        type=Path,
        metavar="FILE",
        help="JSON: engines, trainer, batch, steps, ... (docs/simulator.md has the keys); "
        "default: that of the run of --run, else 16 GPUs",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="order of the prompts")
    parser.add_argument("--json", action="store_true", help="print one JSON object, nothing else")
