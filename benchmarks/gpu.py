"""Speed on GPUs, one subject a call: each compares its variants in turns, on one machine.

    python benchmarks/gpu.py trainer --shape 0.6B --gpus 1 --out results/gpu-trainer.json
    python benchmarks/gpu.py sync --shape 4B --gpus 2 --out results/gpu-sync-4B.json
    python benchmarks/gpu.py rollout --shape 0.6B [--colocated] --out results/gpu-rollout.json
    python benchmarks/gpu.py engine --shape 0.6B --out results/gpu-engine.json

docs/performance.md says what the figures mean.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from gpu_engine import VARIANTS, measure_engine
from gpu_models import SHAPES, make_model
from gpu_rollout import measure_rollout
from gpu_sync import measure_sync
from gpu_trainer import measure_trainer
from host import describe_call, gpu_names, package_versions


def main() -> None:
    """Measure one subject and write its JSON."""
    args = _arguments()
    result = describe(args)
    with tempfile.TemporaryDirectory(prefix="apr-gpu-") as folder:
        model = args.model or make_model(args.shape, Path(folder) / "model", context=args.context)
        result["found"] = args.measure(model, args)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result["found"], indent=1))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    subjects = parser.add_subparsers(required=True)
    trainer = subjects.add_parser("trainer", help="forward, backward and optimizer")
    trainer.set_defaults(measure=measure_trainer)
    trainer.add_argument("--gpus", type=int, default=1)
    trainer.add_argument("--tokens", type=int, default=16384, help="of one step on one GPU")
    trainer.add_argument("--samples", type=int, default=16, help="of one step on one GPU")
    trainer.add_argument(
        "--micro-batch-tokens", type=int, help="of ours; without it a step is one micro-batch"
    )
    trainer.add_argument("--steps", type=int, default=10, help="of one turn")
    trainer.add_argument("--warm-up", type=int, default=4, help="steps before the first turn")
    trainer.add_argument(
        "--variants", nargs="+", default=["bare", "ours", "ours fp32", "trl"],
        choices=["bare", "ours", "ours fp32", "ours torch", "trl"],
    )  # fmt: skip
    trainer.add_argument(
        "--on-one", action=argparse.BooleanOptionalAction, default=True,
        help="with several --gpus, each variant on one of them, too",
    )  # fmt: skip
    trainer.add_argument(
        "--checkpointing", default="auto", help="train.activation_checkpointing of ours"
    )
    trainer.add_argument(
        "--one-by-one", action="store_true", help="no turns: variants that fit alone only"
    )
    sync = subjects.add_parser("sync", help="weights from a trainer to engines that generate")
    sync.set_defaults(measure=measure_sync)
    sync.add_argument("--gpus", type=int, default=2, help="one of them for the trainer")
    sync.add_argument("--bucket-mb", type=float, default=256.0)
    sync.add_argument("--inflight", type=int, default=256, help="requests of each replica")
    sync.add_argument("--tensor-parallel", type=int, default=1, help="GPUs of each replica")
    rollout = subjects.add_parser("rollout", help="the whole path against vLLM's offline engine")
    rollout.set_defaults(measure=measure_rollout)
    rollout.add_argument("--inflight", type=int, default=256, help="requests at a time")
    rollout.add_argument("--samples", type=int, default=1024, help="of one step")
    rollout.add_argument("--longest", type=int, default=1536, help="tokens of a response")
    rollout.add_argument(
        "--colocated", action="store_true", help="engine and trainer on one GPU, in turns"
    )
    engine = subjects.add_parser("engine", help="one engine, with vLLM's scheduler and with ours")
    engine.set_defaults(measure=measure_engine)
    engine.add_argument("--inflight", type=int, default=256, help="requests at a time")
    engine.add_argument(
        "--variants", nargs="+", default=["vllm", "ours", "ours, at once"], choices=list(VARIANTS)
    )
    for subject in (trainer, sync, rollout, engine):
        subject.add_argument("--shape", choices=list(SHAPES), default="0.6B")
        subject.add_argument("--model", type=Path, help="one of that shape that is there already")
        subject.add_argument("--repeats", type=int, default=3, help="turns of each variant")
        subject.add_argument("--context", type=int, default=32768)
        subject.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def describe(args: argparse.Namespace) -> dict[str, Any]:
    """Command, date, machine and versions."""
    called = describe_call()
    called["machine"]["gpus"] = gpu_names()
    settings = {k: v for k, v in vars(args).items() if isinstance(v, int | float | str | list)}
    return {**called, "versions": package_versions(), "settings": settings}


if __name__ == "__main__":
    main()
