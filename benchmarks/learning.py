"""Does a mode learn as much as the synchronous one, and how much sooner?

    python benchmarks/learning.py --gpu --hidden-size 512 --num-layers 10 --out learning.json

Makes a base model for the arithmetic example, then trains it in each mode by `python -m ray_apr
train examples/arithmetic/quickstart.yaml`, in turns, with the same steps and samples. A run is
timed from the moment when an engine begins to generate to the end of its last optimizer step; its
reward is the mean over the last steps. Without --hidden-size the example's own model is trained.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import modes

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.whole_runs import TWO_OF_EACH

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "arithmetic"
MAKING_LIMIT_S, RUN_LIMIT_S = 400, 900


def main() -> None:
    """Run all that is asked for, and write the JSON."""
    args = _arguments()
    result = modes.describe(args)
    with tempfile.TemporaryDirectory(prefix="apr-learning-") as folder:
        model = make_base_model(Path(folder) / "model", args)
        result["parameters"] = num_parameters(model)
        for repeat in range(args.repeats):
            for mode in args.modes:
                run = one_run(mode, repeat, model, Path(folder), args)
                result["runs"].append(run)
                result["modes"] = figures(result["runs"], args)
                args.out.write_text(json.dumps(result, indent=1) + "\n")
                print(json.dumps(result["modes"]), flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--modes", nargs="+", default=["sync", "apr"])
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--last", type=int, default=16, help="steps at the end for the reward")
    parser.add_argument("--model", type=Path, help="a base model that is there already")
    parser.add_argument("--hidden-size", type=int, help="of a base model made for this call")
    parser.add_argument("--num-layers", type=int, default=4, help="of that model")
    parser.add_argument("--warm-up-lr", type=float, default=1e-3, help="that model's, supervised")
    parser.add_argument("--gpu", action="store_true", help="engines and train workers on GPUs")
    parser.add_argument("--of-each", type=int, default=1, help="engines and train workers on GPUs")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="of `ray_apr train`"
    )
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def make_base_model(folder: Path, args: argparse.Namespace) -> Path:
    """The model that the runs begin with."""
    if args.model is not None or args.hidden_size is None:
        return args.model or EXAMPLE / "base_model"
    command = [
        sys.executable, str(EXAMPLE / "make_base_model.py"), "--output", str(folder),
        "--hidden-size", str(args.hidden_size), "--num-layers", str(args.num_layers),
        "--lr", str(args.warm_up_lr), "--device", "cuda" if args.gpu else "cpu",
    ]  # fmt: skip
    subprocess.run(command, check=True, timeout=MAKING_LIMIT_S)
    return folder


def num_parameters(model: Path) -> int:
    """Of a model folder."""
    from transformers import AutoModelForCausalLM

    return sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(model).parameters())


def one_run(
    mode: str, repeat: int, model: Path, folder: Path, args: argparse.Namespace
) -> dict[str, Any]:
    """Train once; returns its times and its rewards."""
    name = f"{mode}-{repeat}"
    settings = [
        f"mode={mode}", f"model={model}", f"run.storage_path={folder}", f"run.name={name}",
        f"train.seed={repeat}", *(on_gpus(args.of_each) if args.gpu else TWO_OF_EACH), *args.set,
    ]  # fmt: skip
    pairs = [part for setting in settings for part in ("--set", setting)]
    config = str(EXAMPLE / "quickstart.yaml")
    command = [sys.executable, "-m", "ray_apr", "train", config, *pairs]
    subprocess.run(command, check=True, timeout=RUN_LIMIT_S)
    return {"mode": mode, "repeat": repeat, **modes.times_of(folder / name)}


def on_gpus(of_each: int) -> list[str]:
    """Settings of so many engines and so many train workers, each with a GPU of its own."""
    return [
        "rollout.engine.device=cuda", f"rollout.num_replicas={of_each}",
        "rollout.engine.dtype=bfloat16", "rollout.engine.kwargs={max_num_seqs: 256}",
        "train.param_dtype=bfloat16", "train.micro_batch_tokens=16384",
        f"scaling={{num_workers: {of_each}, use_gpu: true}}", f"ray.num_cpus={16 * of_each}",
    ]  # fmt: skip


def figures(runs: list[dict[str, Any]], args: argparse.Namespace) -> dict[str, Any]:
    """Times and rewards of each mode."""
    found = modes.figures(runs)
    for mode, row in found.items():
        of_mode = [run for run in runs if run["mode"] == mode]
        rewards = [step["reward_mean"] for run in of_mode for step in run["steps"][-args.last :]]
        row |= {
            "reward_first": statistics.fmean(r["steps"][0]["reward_mean"] for r in of_mode),
            "reward_last": statistics.fmean(rewards),
            "staleness_max": max(s["staleness_max"] for run in of_mode for s in run["steps"]),
            "ledger_error": [run["final"]["ledger_error"] for run in of_mode],
        }
    return found


if __name__ == "__main__":
    main()
