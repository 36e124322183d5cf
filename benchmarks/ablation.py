"""What stale data does to learning, by objective: the arithmetic task with a forced staleness.

    python benchmarks/ablation.py --staleness 0 2 4 8 --seeds 0 1 2 --jobs 2

The whole batch of step k is sampled by the policy of step k - staleness, so that the age is exact
and no scheduling comes in; a real run mixes ages up to its bound. What learns is the project's own
`train_step`. Each run is one process on one thread. After every `--evaluate-every` steps the
current policy answers prompts that are not trained, which is what the curves and the table show.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import statistics
import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from host import describe_call

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "arithmetic"
OBJECTIVES: dict[str, tuple[str, dict[str, Any]]] = {
    "PPO on behavior ratio": ("dapo", {"proximal": "behavior"}),
    "decoupled": ("dapo", {"importance_cap": None}),
    "decoupled + TIS": ("dapo", {}),
    "GSPO": ("gspo", {"proximal": "forward"}),
    "CISPO": ("cispo", {"proximal": "forward"}),
}
"""Name -> preset of `AlgorithmConfig`, and what replaces its settings."""
SAME_ON_POLICY = ("PPO on behavior ratio", "decoupled")
"""With fresh data these are "decoupled + TIS": all three policies agree, and no weight is not 1."""
GROUP_SIZE = 8
LONGEST = 192
HELD_OUT, HELD_OUT_SAMPLES = 128, 4
"""Prompts at the end of the file that are not trained, and responses to each."""


def main() -> None:
    """Run all that is asked for, and write the JSON, the table and the plot."""
    args = _arguments()
    cases = [
        (name, staleness, seed, args)
        for seed in args.seeds
        for staleness in args.staleness
        for name in args.objectives
        if staleness or name not in SAME_ON_POLICY
    ]
    runs = _done_before(args)
    done = {(run["objective"], run["staleness"], run["seed"]) for run in runs}
    cases = [case for case in cases if case[:3] not in done]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with multiprocessing.get_context("spawn").Pool(args.jobs, maxtasksperchild=1) as pool:
        for run in pool.imap_unordered(one_run, cases):
            runs.append(run)
            args.out.write_text(json.dumps(describe(args, runs)) + "\n")
            last = run["held_out"][-1]
            print(f"{run['objective']}, {run['staleness']}, {run['seed']}: {last:.3f}", flush=True)
    print(table(runs))
    args.plot.parent.mkdir(exist_ok=True)
    args.plot.write_text(plots(runs))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--objectives", nargs="+", choices=OBJECTIVES, default=list(OBJECTIVES))
    parser.add_argument("--staleness", nargs="+", type=int, default=[0, 2, 4, 8])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--mini-batches", type=int, default=2)
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--lr-schedule", choices=["constant", "linear"], default="constant")
    parser.add_argument("--evaluate-every", type=int, default=8)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/ablation.json")
    parser.add_argument("--plot", type=Path, default=ROOT / "runs/ablation.html")
    return parser.parse_args()


def _done_before(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Runs of an earlier, shorter call with the same settings, which need not be made again."""
    if not args.out.exists():
        return []
    earlier, now = json.loads(args.out.read_text()), json.loads(json.dumps(describe(args, [])))
    if any(earlier[key] != now[key] for key in ("settings", "objectives", "torch")):
        raise SystemExit(f"{args.out} is of other settings; give another --out, or move it away")
    runs: list[dict[str, Any]] = earlier["runs"]
    return runs


def one_run(case: tuple[str, int, int, argparse.Namespace]) -> dict[str, Any]:
    """Train once; returns its curves."""
    name, staleness, seed, args = case
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from ray_apr import AlgorithmConfig, TrainConfig
    from ray_apr.scheduling.batch import build_rank_batches
    from ray_apr.train.fsdp import build_optimizer
    from ray_apr.train.head import attach_response_logprobs
    from ray_apr.train.step import train_step

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    began = time.monotonic()
    tokenizer = AutoTokenizer.from_pretrained(EXAMPLE / "base_model")
    model, behavior = (
        AutoModelForCausalLM.from_pretrained(EXAMPLE / "base_model", dtype=torch.float32)
        for _ in range(2)
    )
    attach_response_logprobs(model)
    train = TrainConfig(
        steps=args.steps,
        batch_size=args.batch_size,
        mini_batches=args.mini_batches,
        learning_rate=args.learning_rate,
        lr_schedule=args.lr_schedule,
        betas=(0.9, 0.95),
        micro_batch_tokens=2048,
        seed=seed,
    )
    optimizer = build_optimizer(model, train)
    preset, settings = OBJECTIVES[name]
    algorithm = AlgorithmConfig.preset(preset, **settings)
    rows, held_out = _prompts(seed)
    states: deque[dict[str, Any]] = deque(maxlen=staleness + 1)
    curves: dict[str, list[Any]] = {"reward": [], "kl_k3": [], "held_out": [], "held_out_step": []}
    num_groups = args.batch_size // GROUP_SIZE
    for step in range(args.steps + 1):
        states.append({key: value.clone() for key, value in model.state_dict().items()})
        if step % args.evaluate_every == 0 or step == args.steps:
            behavior.load_state_dict(states[-1])
            samples = _sample(behavior, tokenizer, held_out, HELD_OUT_SAMPLES, step)
            curves["held_out"].append(statistics.fmean(s.reward for s in samples))
            curves["held_out_step"].append(step)
        if step == args.steps:
            break
        behavior.load_state_dict(states[0])
        chosen = [rows[(step * num_groups + i) % len(rows)] for i in range(num_groups)]
        version = max(0, step - staleness)
        batch = build_rank_batches(
            _sample(behavior, tokenizer, chosen, GROUP_SIZE, version),
            step=step,
            policy_version=step,
            oldest_version=version,
            num_ranks=1,
            micro_batch_tokens=train.micro_batch_tokens,
            mini_batches=train.mini_batches,
            packed=train.packs("cpu"),
        )[0]
        figures = train_step(model, optimizer, batch, algorithm, train)
        curves["reward"].append(figures["reward_mean"])
        curves["kl_k3"].append(figures["kl_k3"])
    seconds = time.monotonic() - began
    return {"objective": name, "staleness": staleness, "seed": seed, "seconds": seconds, **curves}


def _prompts(seed: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Prompts to train, in the order of a seed, and those to evaluate, the same for all seeds."""
    import pyarrow.parquet as pq

    rows = pq.read_table(EXAMPLE / "prompts.parquet").to_pylist()
    return random.Random(seed).sample(rows[:-HELD_OUT], len(rows) - HELD_OUT), rows[-HELD_OUT:]


def _sample(
    model: Any, tokenizer: Any, rows: Sequence[dict[str, Any]], num_samples: int, version: int
) -> list[Any]:
    """Sample and score `num_samples` responses to each prompt, as whole samples."""
    sys.path.insert(0, str(EXAMPLE))
    import task

    from ray_apr.core.sample import FinishReason, Prompt, Sample, Segment

    asked = [(row, str(n), i) for n, row in enumerate(rows) for i in range(num_samples)]
    prompts = [tokenizer(row["prompt"], add_special_tokens=False).input_ids for row, *_ in asked]
    answers = _respond(model, prompts, tokenizer.pad_token_id, tokenizer.eos_token_id)
    samples = []
    for (row, group_id, i), prompt, (ids, logprobs) in zip(asked, prompts, answers, strict=True):
        text = tokenizer.decode(ids, skip_special_tokens=True)
        is_right = task.final_answer(text) == row["answer"]
        samples.append(
            Sample(
                sample_id=f"{group_id}-{i}",
                group_id=group_id,
                prompt=Prompt(prompt_id=group_id, token_ids=tuple(prompt), row=row),
                max_response_tokens=LONGEST,
                segments=(
                    Segment(policy_version=version, token_ids=tuple(ids), logprobs=tuple(logprobs)),
                ),
                finish_reason=FinishReason.STOP,
                reward=float(is_right),
            )
        )
    return samples


def _respond(
    model: Any, prompts: Sequence[Sequence[int]], pad: int, eos: int
) -> list[tuple[list[int], list[float]]]:
    """Token ids and log-probs of one response to each prompt, at temperature 1."""
    import torch

    width = max(map(len, prompts))
    input_ids = torch.tensor([[pad] * (width - len(p)) + list(p) for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    answers: list[tuple[list[int], list[float]]] = [([], []) for _ in prompts]
    alive = torch.arange(len(prompts))
    cache = None
    with torch.inference_mode():
        for _ in range(LONGEST):
            positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -input_ids.shape[1] :]
            out = model(
                input_ids=input_ids,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
            )
            cache = out.past_key_values
            logprobs = out.logits[:, -1].float().log_softmax(-1)
            chosen = torch.multinomial(logprobs.exp(), 1)
            found = logprobs.gather(1, chosen).squeeze(1)
            for i, token, logprob in zip(
                alive.tolist(), chosen.squeeze(1).tolist(), found.tolist(), strict=True
            ):
                answers[i][0].append(token)
                answers[i][1].append(logprob)
            going = (chosen.squeeze(1) != eos).nonzero().squeeze(1)
            if not len(going):
                break
            if len(going) < len(alive):
                cache.batch_select_indices(going)
            alive, input_ids = alive[going], chosen[going]
            mask = torch.cat([mask[going], mask.new_ones(len(going), 1)], dim=1)
    return answers


def describe(args: argparse.Namespace, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The whole result."""
    import torch

    return {
        **describe_call(),
        "torch": torch.__version__,
        "objectives": OBJECTIVES,
        "settings": {
            k: v for k, v in vars(args).items() if isinstance(v, int | float | str) and k != "jobs"
        },
        "runs": runs,
    }


def table(runs: list[dict[str, Any]]) -> str:
    """Held-out accuracy at the end, mean and spread over seeds, as Markdown."""
    ages = sorted({run["staleness"] for run in runs})
    lines = ["| objective | " + " | ".join(f"staleness {age}" for age in ages) + " |"]
    lines.append("| --- |" + " --- |" * len(ages))
    for name in OBJECTIVES:
        cells = []
        for age in ages:
            last = [
                run["held_out"][-1]
                for run in runs
                if run["objective"] == name and run["staleness"] == age
            ]
            spread = f" ({min(last):.3f} to {max(last):.3f})" if len(last) > 1 else ""
            same = "as decoupled + TIS" if age == 0 and name in SAME_ON_POLICY else ""
            cells.append(f"{statistics.fmean(last):.3f}{spread}" if last else same)
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def plots(runs: list[dict[str, Any]]) -> str:
    """One chart of learning curves for each staleness; the mean over seeds."""
    from ray_apr.tools.report.figures import SERIES, figure, line
    from ray_apr.tools.report.page import page

    charts = []
    for age in sorted({run["staleness"] for run in runs}):
        of_age = [run for run in runs if run["staleness"] == age]
        traces = []
        for name, color in zip(OBJECTIVES, SERIES, strict=False):
            curves = [run["held_out"] for run in of_age if run["objective"] == name]
            if curves:
                means = [statistics.fmean(values) for values in zip(*curves, strict=True)]
                traces.append(line(of_age[0]["held_out_step"], means, name, color))
        charts.append(
            figure(
                f"Held-out accuracy, all data {age} versions old",
                traces,
                x_label="optimizer step (batches)",
                y_label="accuracy",
            )
        )
    subtitle = "mean over seeds; benchmarks/ablation.py"
    return page("Objectives and the age of the data", subtitle, "".join(charts))


if __name__ == "__main__":
    main()
