"""ray_apr and a peer in turns, on the same GPUs, model, prompts, rewards, batch and learning rate.

    python benchmarks/peers/compare.py --task arithmetic --gpus 1 --out arithmetic.json \
        --systems trl sync:awake apr:awake
    python benchmarks/peers/compare.py --task replay --trace trace.jsonl.gz --scale 0.25 \
        --gpus 2 --systems trl sync:awake apr --out replay.json

`arithmetic` trains a small model that this makes first, and asks how soon it has learned.
`replay` trains a model of `--shape` with random weights, whose responses get as long as the trace
says: what is left is the time of generation, hand-over and training. `spelling` trains a real model
(`spelling.py` makes both of its inputs):

    python benchmarks/peers/compare.py --task spelling --model smollm2 --prompts spelling.parquet \
        --gpus 2 --rewards 0.1 0.15 0.3 --learning-rate 2e-5 --systems trl sync:awake apr \
        --trl-liger --out spelling.json

`programs` trains that model to write functions (`programs.py` makes the prompts), whose reward runs
them in the sandbox.

A system is `trl` (colocated vLLM), `verl:MODE` (`verl_modes.py`; spelling alone), or a mode of
ray_apr: MODE has half of the GPUs for its engines, MODE:awake and MODE:turns have engine and train
worker on each (`benchmarks/modes.py`).

Each system is a process of its own, timed from its start, from its first generation, and at the end
of each step.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import gpu_models
import host
import learning
import modes
import programs
import verl_modes

from ray_apr.tools.report.load import load_run
from tests.processes import kill_all, marked_environment

EXAMPLE = learning.EXAMPLE
REPLAY_REWARD = """
def reward(sample):
    return float(int(sample.sample_id.rpartition("-")[2]) % 2)
"""
OF_STEP = (
    "reward_mean", "trainer_wait_s", "trainer_step_s", "weight_wait_s",
    "weight_sync_s", "generation_stopped_s", "staleness_mean",
)  # fmt: skip
"""Of a step of ours, beside its time and tokens; a peer has the reward alone."""
OF_RUN = ("start", "trainer_idle_ratio", "generation_idle_ratio")
END_LIMIT_S = 45.0
"""Of what has exceeded its own limit, and was told to end."""
RUNNING_MEAN = 4
"""Steps whose mean reward has to reach a threshold."""


def main() -> None:
    """Run all that is asked for, and write the JSON."""
    args = _arguments()
    result = modes.describe(args)
    with tempfile.TemporaryDirectory(prefix="apr-peers-") as path:
        folder = Path(path)
        task = TASKS[args.task](folder, args)
        result["task"] = {k: v for k, v in task.items() if k not in ("model", "prompts", "reward")}
        for system, seed in turns(args.systems, args.seeds):
            run = one_run(system, seed, task, folder, args)
            result["runs"].append(run)
            result["systems"] = figures(result["runs"], args.rewards)
            args.out.write_text(json.dumps(result, indent=1) + "\n")
            print(system, json.dumps(result["systems"][system]), flush=True)


def turns(systems: list[str], seeds: list[int]) -> Iterator[tuple[str, int]]:
    """Each system with each seed; another system begins the next turn, as the first run of all
    compiles, and later ones take what it has compiled."""
    for turn, seed in enumerate(seeds):
        first = turn % len(systems)
        for system in systems[first:] + systems[:first]:
            yield system, seed


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--task", choices=list(TASKS), required=True)
    parser.add_argument("--systems", nargs="+", default=["trl", "sync:awake", "apr"])
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="a turn of all each")
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--batch-prompts", type=int, default=32)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=3e-5)
    parser.add_argument("--rewards", type=float, nargs="+", default=[0.6, 0.7, 0.8])
    parser.add_argument("--hidden-size", type=int, default=512, help="arithmetic: of its model")
    parser.add_argument("--num-layers", type=int, default=10, help="arithmetic: of its model")
    parser.add_argument("--warm-up-lr", type=float, default=1e-3, help="arithmetic: supervised")
    parser.add_argument("--trace", type=Path, help="replay: lengths of responses")
    parser.add_argument("--scale", type=float, default=0.25, help="replay: factor on them")
    parser.add_argument(
        "--model", type=Path, help="spelling, programs: folder of a model that can chat"
    )
    parser.add_argument("--prompts", type=Path, help="the same: Parquet file")
    parser.add_argument("--shape", default="0.6B", choices=list(gpu_models.SHAPES))
    parser.add_argument("--max-num-seqs", type=int, default=256, help="of our engines")
    parser.add_argument("--set", action="append", default=[], metavar="A.B=C", help="of our runs")
    parser.add_argument("--trl-rows", type=int, default=256, help="TRL's micro batch, of a GPU")
    parser.add_argument(
        "--trl-memory", type=float, default=0.4, help="TRL's, verl's share for vLLM"
    )
    parser.add_argument("--trl-liger", action="store_true", help="TRL, verl: with Liger's layers")
    parser.add_argument("--limit", type=float, default=400.0, help="seconds of one run")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.gpu, args.reward_seconds = True, 0.0
    if args.task == "replay" and args.trace is None:
        parser.error("--task replay needs --trace")
    if args.task in CHATS and None in (args.model, args.prompts):
        parser.error(f"--task {args.task} needs --model and --prompts")
    for system in args.systems:
        peer, _, mode = system.partition(":")
        if peer == "verl" and (mode not in verl_modes.MODES or args.task != "spelling"):
            parser.error(f"{system}: verl:MODE runs --task spelling, in {verl_modes.MODES}")
    return args


def arithmetic_task(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """The arithmetic example with a model made for this call."""
    model = learning.make_base_model(folder / "model", args)
    return {
        **common(args),
        "model": str(model),
        "parameters": learning.num_parameters(model),
        "prompts": str(EXAMPLE / "prompts.parquet"),
        "reward": f"{EXAMPLE / 'task.py'}:reward",
        "max_response_tokens": 192,
        "max_model_len": 256,
    }


def replay_task(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Prompts that differ in their digits, as many as the steps take and some to run ahead."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from ray_apr.tools.simulator.trace import Trace

    groups = modes.scaled(Trace.from_file(args.trace), args).groups
    groups = groups[: args.batch_prompts * (args.steps + 6)]
    lengths = [[sample.response_tokens for sample in group.samples] for group in groups]
    longest = max(map(max, lengths))
    texts = [f"{i:0{max(8, group.prompt_tokens)}d}" for i, group in enumerate(groups)]
    pq.write_table(pa.table({"prompt": texts, "lengths": lengths}), folder / "prompts.parquet")
    (folder / "rewards.py").write_text(REPLAY_REWARD)
    context = max(map(len, texts)) + longest + 1
    model = gpu_models.make_model(args.shape, folder / "model", context=max(1024, context))
    return {
        **common(args),
        "model": str(model),
        "prompts": str(folder / "prompts.parquet"),
        "reward": f"{folder / 'rewards.py'}:reward",
        "max_response_tokens": longest,
        "max_model_len": context,
    }


def chat_task(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """A real model, asked what a script of this folder scores."""
    del folder
    return {
        **common(args),
        "model": str(args.model.resolve()),
        "parameters": learning.num_parameters(args.model),
        "prompts": str(args.prompts.resolve()),
        "reward": f"{Path(__file__).with_name(args.task + '.py')}:reward",
        "max_response_tokens": 256,
        "max_model_len": 512,
    }


def common(args: argparse.Namespace) -> dict[str, Any]:
    """What all tasks hand to every system."""
    return {
        "kind": args.task,
        "gpus": args.gpus,
        "steps": args.steps,
        "batch_size": args.batch_prompts * args.group_size,
        "group_size": args.group_size,
        "learning_rate": args.learning_rate,
        "memory_share": args.trl_memory,
        "micro_batch_rows": args.trl_rows,
        "liger": args.trl_liger,
    }


def one_run(
    system: str, seed: int, task: dict[str, Any], folder: Path, args: argparse.Namespace
) -> dict[str, Any]:
    """Train once; a run that fails or exceeds its limit says so, with the end of its log beside the
    steps that it has done."""
    run = PEERS.get(system.partition(":")[0], our_run)
    log = args.out.with_name(f"{args.out.stem}-{system.replace(':', '-')}-{seed}.log")
    began = time.time()
    with memory_peaks() as peaks, log.open("w") as out:
        found = run(system, seed, task, folder, out, args)
    if "failed" in found:
        found["log"] = log.read_text()[-2000:]
    if "first_generation" in found:
        found["start_s"] = found.pop("first_generation") - began
    return {"system": system, "seed": seed, "gpu_memory_peak_gib": dict(peaks), **found}


def our_run(
    system: str, seed: int, task: dict[str, Any], folder: Path, out: Any, args: argparse.Namespace
) -> dict[str, Any]:
    """`ray-apr train` in a mode."""
    mode, _, placement = system.partition(":")
    name = f"{mode}-{placement}-{seed}"
    replicas = task["gpus"] if placement else task["gpus"] // 2
    settings = {
        "mode": mode, "model": task["model"], "prompts": task["prompts"], "reward": task["reward"],
        "rollout": {
            "num_replicas": replicas, "group_size": task["group_size"],
            "max_response_tokens": task["max_response_tokens"],
            "engine": {
                "max_model_len": task["max_model_len"],
                "device": "cuda", "dtype": "bfloat16", "sleep": placement != "awake",
                "placement": "colocated" if placement else "disaggregated",
                "kwargs": {"max_num_seqs": args.max_num_seqs},
            },
        },
        "partial_rollout": {"overlap_sync": False} if placement == "turns" else {},
        "train": {
            "steps": task["steps"], "batch_size": task["batch_size"], "seed": seed,
            "learning_rate": task["learning_rate"], "betas": [0.9, 0.95],
            "param_dtype": "bfloat16", "micro_batch_tokens": 16384,
        },
        "scaling": {"num_workers": task["gpus"] - (0 if placement else replicas), "use_gpu": True},
        "run": {"name": name, "storage_path": str(folder)},
        "ray": {"num_cpus": 8 * task["gpus"] + 1},
    }  # fmt: skip
    if task["kind"] == "replay":
        settings["rollout"]["replay_column"] = "lengths"
    if task["kind"] == "programs":
        settings["rollout"]["reward"] = {"concurrency": programs.at_a_time(), "num_workers": 2}
    config = folder / f"{name}.yaml"
    config.write_text(json.dumps(settings))  # JSON is YAML
    own = [f"--set={setting}" for setting in args.set]
    command = [sys.executable, "-m", "ray_apr", "train", str(config), *own]
    ended = run_to_end(command, out, args.limit)
    if not (folder / name / "metrics.jsonl").exists():
        return ended
    data = load_run(folder / name)
    if not data.steps:
        return ended
    first = modes.generates_at(data)
    steps = [
        {
            "time_s": row["time_s"] - first,
            "num_tokens": modes.trained_tokens(row),
            **{key: row[key] for key in OF_STEP if key in row},
        }
        for row in data.steps
    ]
    run_began = (folder / name / "config.json").stat().st_mtime  # written as the clock starts
    found = {**ended, "first_generation": run_began + first, "steps": steps}
    if not ended:
        times = modes.times_of(folder / name)
        found |= {key: times[key] for key in OF_RUN}
        found["ledger_error"] = times["final"]["ledger_error"]
    return found


def trl_run(
    system: str, seed: int, task: dict[str, Any], folder: Path, out: Any, args: argparse.Namespace
) -> dict[str, Any]:
    """TRL's GRPOTrainer, one process for each GPU."""
    asked = folder / f"trl-{seed}.json"
    result = asked.with_name(f"trl-{seed}-result.json")
    asked.write_text(json.dumps({**task, "seed": seed, "out": str(result)}))
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(task["gpus"]),
        "--master_port", str(host.free_port()),
        str(Path(__file__).with_name("trl_colocate.py")), str(asked),
    ]  # fmt: skip
    ended = run_to_end(command, out, args.limit)
    found = json.loads(result.read_text()) if result.exists() else {}
    return {**ended, **trl_steps(result, task["gpus"]), **found}


def verl_run(
    system: str, seed: int, task: dict[str, Any], folder: Path, out: Any, args: argparse.Namespace
) -> dict[str, Any]:
    """verl in a mode of its V1 trainer."""
    mode = system.partition(":")[2]
    prompts, log = folder / "verl.parquet", folder / f"verl-{mode}-{seed}.jsonl"
    verl_modes.write_prompts(task, prompts)
    steps = verl_modes.Steps(log)
    command = verl_modes.command(mode, seed, task, prompts)
    with host.looking(steps.look, verl_modes.LOOK_S):
        ended = run_to_end(command, out, args.limit, verl_modes.environment(log))
    steps.look()
    return {**ended, **steps.found(task)}


PEERS = {"trl": trl_run, "verl": verl_run}


def run_to_end(
    command: list[str], out: Any, limit_s: float, more: dict[str, str] | None = None
) -> dict[str, str]:
    """Run a command, with more variables, and leave none of its processes; says how it failed, if
    it did."""
    mark, env = marked_environment()
    env |= more or {}
    process = subprocess.Popen(command, stdout=out, stderr=out, env=env)
    try:
        code = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_LIMIT_S)
        return {"failed": f"not done after {limit_s:g} s"}
    finally:
        kill_all(mark)  # torchrun's processes have sessions of their own
        process.wait()
    return {"failed": f"exit {code}"} if code else {}


def trl_steps(result: Path, num_ranks: int) -> dict[str, Any]:
    """Steps that all processes have written; nothing if there is none."""
    files = [Path(f"{result}.{rank}") for rank in range(num_ranks)]
    ranks = [
        [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        for file in files
    ]
    rows = list(zip(*ranks, strict=False))
    if not rows:
        return {}
    first = rows[0][0]["generation"][0]
    return {
        "first_generation": first,
        "steps": [
            {
                "time_s": row[0]["time"] - first,
                "reward_mean": row[0]["reward_mean"],
                "num_tokens": sum(of_rank["num_tokens"] for of_rank in row),
            }
            for row in rows
        ],
        "generation_s": [row[0]["generation"][1] - row[0]["generation"][0] for row in rows],
        "sync_s": [row[0]["sync_s"] for row in rows],
        "reward_s": [max(of_rank["reward_s"] for of_rank in row) for row in rows],
    }


def figures(runs: list[dict[str, Any]], rewards: list[float]) -> dict[str, Any]:
    """Of each system: medians over its runs, and its failures."""
    found: dict[str, Any] = {}
    for system in dict.fromkeys(run["system"] for run in runs):
        of_system = [run for run in runs if run["system"] == system]
        whole = [run for run in of_system if "failed" not in run]
        row: dict[str, Any] = {"runs": len(whole), "failed": len(of_system) - len(whole)}
        if whole:
            row |= {
                "start_s": statistics.median(run["start_s"] for run in whole),
                "seconds": statistics.median(run["steps"][-1]["time_s"] for run in whole),
                "step_s": statistics.median(s for run in whole for s in step_seconds(run)),
                "tokens_per_s": statistics.median(tokens_per_s(run) for run in whole),
                "reward_last": statistics.median(curve(run)[-1] for run in whole),
                "seconds_to_reward": {
                    str(goal): [seconds_to(goal, run) for run in whole] for goal in rewards
                },
            }
        found[system] = row
    return found


def step_seconds(run: dict[str, Any]) -> list[float]:
    """Seconds from the end of a step to the next one's, after the first two steps."""
    ends = [step["time_s"] for step in run["steps"]]
    return [after - before for before, after in itertools.pairwise(ends[1:])]


def tokens_per_s(run: dict[str, Any]) -> float:
    """Trained tokens of responses in a second, from the end of the first step on."""
    first, *later = run["steps"]
    seconds = later[-1]["time_s"] - first["time_s"]
    return float(sum(step["num_tokens"] for step in later) / seconds)


def curve(run: dict[str, Any]) -> list[float]:
    """Mean reward of the last steps at each step."""
    rewards = [step["reward_mean"] for step in run["steps"]]
    return [
        statistics.fmean(rewards[max(0, end - RUNNING_MEAN) : end])
        for end in range(1, len(rewards) + 1)
    ]


def seconds_to(goal: float, run: dict[str, Any]) -> float | None:
    """From the first generation to the end of the step whose running mean reaches the goal."""
    pairs = zip(run["steps"], curve(run), strict=True)
    return next((step["time_s"] for step, reward in pairs if reward >= goal), None)


CHATS = ("spelling", "programs")
TASKS = {
    "arithmetic": arithmetic_task,
    "replay": replay_task,
    **dict.fromkeys(CHATS, chat_task),
}


@contextlib.contextmanager
def memory_peaks() -> Iterator[dict[str, float]]:
    """Most GiB in use of each GPU that this call may use, looked at twice a second."""
    peaks: dict[str, float] = {}
    query = ["nvidia-smi", "--query-gpu=index,memory.used", "--format=csv,noheader,nounits"]
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        query += ["-i", visible]

    def look() -> None:
        lines = subprocess.run(query, check=True, capture_output=True, text=True, timeout=30).stdout
        for line in lines.splitlines():
            index, used = line.split(",")
            peaks[index] = max(peaks.get(index, 0.0), float(used) / 1024)

    with host.looking(look, 0.5):
        yield peaks


if __name__ == "__main__":
    main()
