"""All scheduling modes on the real stack, on one trace: who is done first?

    python benchmarks/modes.py --trace trace.jsonl.gz --modes sync stream apr --repeats 5

Every run trains the same number of steps and samples. Lengths are replayed: each response gets
exactly as long as the trace says, so that the modes differ in nothing but scheduling. Modes
alternate within each repeat, in one process tree and one Ray cluster. A run is timed from the
moment when an engine begins to generate to the end of its last optimizer step.

In `sync:turns` engines and train workers of that mode have all GPUs in turns, in `sync:awake` at
the same time. Ratios are to the first of the modes that is synchronous.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import gpu_models
from calibrate import later_step_s, measure_engines, measured_cluster, predict
from cpu_time import CPUClock
from host import describe_call, gpu_names, package_versions, ray_environment

from ray_apr.tools.report.load import RunData, load_run
from ray_apr.tools.report.summary import summarize

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    """Run the benchmark and write its JSON."""
    args = _arguments()
    import ray

    from ray_apr.tools.simulator.trace import Trace

    ray.init(
        num_cpus=(8 if args.gpu else 2) * num_gpus(args) + 1,
        runtime_env=ray_environment(),
        log_to_driver=False,
        include_dashboard=True,
    )
    folder = Path(tempfile.mkdtemp(prefix="apr-modes-"))
    trace = scaled(Trace.from_file(args.trace), args)
    longest = max(s.response_tokens for _, s in trace.samples)
    context = max(g.prompt_tokens for g in trace.groups) + longest + 1
    model = args.model or make_model(folder / "model", args.hidden, args.layers, context)
    if args.shape:
        model = str(gpu_models.make_model(args.shape, folder / "real", context=max(1024, context)))
    prompts = write_prompts(trace, folder / "prompts.parquet")
    result = describe(args)
    if args.calibrate:
        result["calibration"] = measure_engines(
            model,
            rollout_config(args, longest),
            prompt_tokens=round(statistics.fmean(g.prompt_tokens for g in trace.groups)),
            max_num_seqs=args.max_num_seqs,
        )
    for repeat in range(args.repeats):
        for mode in args.modes:
            run = one_run(mode, repeat, model, prompts, folder, args)
            result["runs"].append(run)
            print(json.dumps(run), flush=True)
            result["modes"] = figures(result["runs"])
            args.out.write_text(json.dumps(result, indent=1) + "\n")
    if args.calibrate and baseline(result["modes"]):
        result["predicted"] = predicted(result, trace, args)
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result.get("predicted")))
    print(json.dumps(result["modes"], indent=1))
    ray.shutdown()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument(
        "--modes",
        nargs="+",
        default=["sync", "stream", "apr"],
        help="MODE, or MODE:turns or MODE:awake for all GPUs to both",
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--batch-prompts", type=int, default=16)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--train-workers", type=int, default=2)
    parser.add_argument("--gpu", action="store_true", help="engines and train workers on GPUs")
    parser.add_argument("--model", help="model folder; without it a random one is made")
    parser.add_argument("--shape", choices=list(gpu_models.SHAPES), help="a model of this shape")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="GPUs of each replica")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument(
        "--calibrate", action="store_true", help="measure the engines, and predict the ratios"
    )
    parser.add_argument("--scale", type=float, default=1.0, help="factor on response lengths")
    parser.add_argument(
        "--reward-seconds", type=float, help="time of each reward; else the trace's"
    )
    parser.add_argument(
        "--reward-concurrency", type=int, help="rewards at a time; without it those of a batch"
    )
    parser.add_argument(
        "--set", action="append", default=[], help="MODE.KEY=VALUE, of PartialRolloutConfig"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/modes.json")
    args = parser.parse_args()
    if strange := {mode.partition(":")[2] for mode in args.modes} - {"", "turns", "awake"}:
        parser.error(f"--modes: there is no placement {', '.join(sorted(strange))}")
    if args.calibrate and args.steps < 3:
        parser.error(
            "--calibrate reads the trainer off the steps after the first: --steps 3 or more"
        )
    if args.reward_concurrency is None:
        args.reward_concurrency = args.batch_prompts * args.group_size
    return args


def scaled(trace: Any, args: argparse.Namespace) -> Any:
    """The trace with the lengths and the reward times of this benchmark."""
    from ray_apr.tools.simulator.trace import Trace

    rows = [
        {
            "prompt_id": group.prompt_id,
            "sample_index": index,
            "prompt_tokens": max(1, group.prompt_tokens),
            "response_tokens": max(1, round(group.sample(index).response_tokens * args.scale)),
            "reward_s": group.sample(index).reward_s
            if args.reward_seconds is None
            else args.reward_seconds,
        }
        for group in trace.groups
        for index in range(args.group_size)
    ]
    return Trace(rows)


def make_model(folder: Path, hidden: int, layers: int, context: int) -> str:
    """A random Qwen3 with the tokenizer of the arithmetic example."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    base = ROOT / "examples/arithmetic/base_model"
    config = AutoConfig.from_pretrained(base)
    config.hidden_size, config.intermediate_size = hidden, 2 * hidden
    config.num_hidden_layers = layers
    config.layer_types = ["full_attention"] * layers
    config.max_position_embeddings = max(1024, context)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(base).save_pretrained(folder)
    return str(folder)


def write_prompts(trace: Any, path: Path) -> Path:
    """The trace's prompts as token ids, with the lengths and reward times of their samples."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = {
        "prompt": [[3 + i % 10 for i in range(g.prompt_tokens)] for g in trace.groups],
        "lengths": [[s.response_tokens for s in g.samples] for g in trace.groups],
        "reward_s": [[s.reward_s for s in g.samples] for g in trace.groups],
    }
    pq.write_table(pa.table(table), path)
    return path


def make_reward() -> Callable[[Any], Any]:
    """A reward that takes as long as the trace says, and is right half of the time."""

    async def reward(sample: Any) -> float:
        index = int(sample.sample_id.rpartition("-")[2])
        times = sample.row["reward_s"]
        await asyncio.sleep(times[index % len(times)])
        return float(index % 2)

    return reward


def num_gpus(args: argparse.Namespace) -> int:
    """GPUs of each run, whoever has them; processes, on CPU."""
    return int(args.replicas * args.tensor_parallel + args.train_workers)


def rollout_config(
    args: argparse.Namespace, longest: int, repeat: int = 0, placement: str = ""
) -> Any:
    """Engines as all runs of a placement have them."""
    from ray_apr import RolloutConfig

    is_colocated = bool(placement)
    return RolloutConfig(
        num_replicas=num_gpus(args) // args.tensor_parallel if is_colocated else args.replicas,
        group_size=args.group_size,
        max_response_tokens=longest,
        replay_column="lengths",
        engine={
            "placement": "colocated" if is_colocated else "disaggregated",
            "sleep": placement != "awake",
            "tensor_parallel_size": args.tensor_parallel,
            "device": "cuda" if args.gpu else "cpu",
            "dtype": "bfloat16" if args.gpu else "float32",
            "seed": repeat,
            "kwargs": {"max_num_seqs": args.max_num_seqs},
        },
        reward={"concurrency": args.reward_concurrency, "timeout_s": 600.0},
    )


def mode_config(mode: str, args: argparse.Namespace) -> Any:
    """Settings of a mode, with those replaced that the command line gives."""
    import yaml

    from ray_apr import PartialRolloutConfig

    mode, _, placement = mode.partition(":")
    given = [pair.removeprefix(f"{mode}.") for pair in args.set if pair.startswith(f"{mode}.")]
    values = {k: yaml.safe_load(v) for k, _, v in (pair.partition("=") for pair in given)}
    if placement == "turns":
        values = {"overlap_sync": False, **values}
    return PartialRolloutConfig.preset(mode, **values)


def predicted(result: dict[str, Any], trace: Any, args: argparse.Namespace) -> dict[str, Any]:
    """What the simulator says of the ratios, beside what was measured."""
    sync = baseline(result["modes"])
    sync_runs = [run for run in result["runs"] if run["mode"] == sync]
    cluster = measured_cluster(result["calibration"], sync_runs, args)
    if sync == "sync:turns":  # what its syncs took is the turn of the engines, too
        switch_s = statistics.median(s for run in sync_runs for s in run["switch_s"])
        sync_s = max(0.0, cluster.weight_sync_s - switch_s)
        cluster = dataclasses.replace(cluster, weight_sync_s=sync_s, switch_s=switch_s)
    takes_turns = dataclasses.replace(cluster, placement="colocated", rollout_gpus=None)
    runs = {
        mode: (mode_config(mode, args), takes_turns if ":" in mode else cluster)
        for mode in result["modes"]
        if mode.startswith("sync") or ":" not in mode  # the simulator knows no others
    }
    found = predict(trace, runs, seeds=args.repeats)
    for mode, times in found.items():
        measured = result["modes"][mode]
        times["sync_over_this"] = found[sync]["seconds"] / times["seconds"]
        times["later_sync_over_this"] = found[sync]["later_step_s"] / times["later_step_s"]
        times["error"] = times["sync_over_this"] / measured["sync_over_this"] - 1
        times["later_step_error"] = times["later_step_s"] / measured["later_step_s"] - 1
        times["later_error"] = times["later_sync_over_this"] / measured["later_sync_over_this"] - 1
    return {"cluster": dataclasses.asdict(cluster), "modes": found}


def one_run(
    mode: str, repeat: int, model: str, prompts: Path, folder: Path, args: argparse.Namespace
) -> dict[str, Any]:
    """Train once in a mode; returns its times and its summary."""
    import ray

    from ray_apr import APRTrainer, TrainConfig

    _, _, placement = mode.partition(":")
    name = f"{mode}-{repeat}".replace(":", "-")
    longest = max(max(row) for row in ray.data.read_parquet(str(prompts)).to_pandas()["lengths"])
    trainer = APRTrainer(
        model=model,
        prompts=ray.data.read_parquet(str(prompts)),
        reward=make_reward(),
        rollout_config=rollout_config(args, int(longest), repeat, placement),
        partial_rollout_config=mode_config(mode, args),
        train_config=TrainConfig(
            steps=args.steps,
            batch_size=args.batch_prompts * args.group_size,
            micro_batch_tokens=16384 if args.gpu else 4096,
            param_dtype="bfloat16" if args.gpu else "float32",
            num_threads=None if args.gpu else 1,
            seed=repeat,
        ),
        scaling_config=ray.train.ScalingConfig(
            num_workers=num_gpus(args) if placement else args.train_workers,
            use_gpu=args.gpu,
        ),
        run_config=ray.train.RunConfig(name=name, storage_path=str(folder)),
    )
    began, load = time.time(), os.getloadavg()[0]
    with CPUClock() as clock:
        trainer.fit()
    times = times_of(folder / name)
    generates = times["generates_at_s"]
    return {
        "mode": mode,
        "repeat": repeat,
        "num_train_workers": times["final"]["num_train_workers"],
        "cpu_s": clock.between(began + generates, began + generates + times["seconds"]),
        "with_start_s": time.time() - began,
        "load_before": load,
        **times,
    }


def times_of(run: Path) -> dict[str, Any]:
    """Of a run folder: times from its first generated token on, and what it wrote of its steps."""
    data = load_run(run)
    ends = [row["time_s"] for row in data.steps]
    generates = generates_at(data)
    summary = summarize(data)
    return {
        "generates_at_s": generates,
        "seconds": ends[-1] - generates,
        "first_step_s": ends[0] - generates,
        "generation_idle_ratio": summary["generation_idle_ratio"],
        "trainer_idle_ratio": summary["trainer_idle_ratio"],
        "start": [span for span in data.timeline if span["what"] in ("start", "load", "compile")],
        "switch_s": [s["end_s"] - s["start_s"] for s in data.timeline if s["what"] == "switch"],
        "steps": data.steps,
        "final": data.final,
    }


def generates_at(run: RunData) -> float:
    """When an engine of a run begins to generate."""
    return float(min(span["start_s"] for span in run.timeline if span["what"] == "generate"))


def baseline(modes: Iterable[str]) -> str:
    """The first of them that is synchronous; none: ""."""
    return next((mode for mode in modes if mode.partition(":")[0] == "sync"), "")


def figures(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Median, spread, and ratio of the synchronous median to each mode's.

    The steps after the first one, which may have compiled, have their own: seconds of a step, and
    trained tokens per second.
    """
    of_mode = {
        mode: [run for run in runs if run["mode"] == mode]
        for mode in dict.fromkeys(run["mode"] for run in runs)
    }
    medians = {
        mode: statistics.median(run["seconds"] for run in found) for mode, found in of_mode.items()
    }
    later = {mode: statistics.median(map(_later_step_s, found)) for mode, found in of_mode.items()}
    sync = baseline(medians)
    return {
        mode: {
            "median_s": medians[mode],
            "min_s": min(run["seconds"] for run in found),
            "max_s": max(run["seconds"] for run in found),
            "runs": len(found),
            "sync_over_this": medians[sync] / medians[mode] if sync else None,
            "later_step_s": later[mode],
            "later_tokens_per_s": statistics.median(map(_later_tokens_per_s, found)),
            "later_sync_over_this": later[sync] / later[mode] if sync else None,
        }
        for mode, found in of_mode.items()
    }


def _later_step_s(run: dict[str, Any]) -> float:
    return later_step_s([step["time_s"] for step in run["steps"]])


def _later_tokens_per_s(run: dict[str, Any]) -> float:
    tokens = sum(trained_tokens(step) for step in run["steps"][1:])
    seconds = run["steps"][-1]["time_s"] - run["steps"][0]["time_s"]
    return tokens / seconds if seconds else 0.0


def trained_tokens(step: dict[str, Any]) -> int:
    """Tokens of a step's samples that its loss has: a masked one is too old, and trains nothing."""
    return int(step["num_tokens"] - step.get("num_masked_tokens", 0))


def describe(args: argparse.Namespace) -> dict[str, Any]:
    """What ran where; the runs are added later."""
    args.out.parent.mkdir(parents=True, exist_ok=True)
    called = describe_call()
    called["machine"]["gpus"] = gpu_names() if args.gpu else []
    return {
        **called,
        "versions": package_versions(),
        "runs": [],
        "modes": {},
    }


if __name__ == "__main__":
    main()
