"""Generation through the whole path, against vLLM's own offline engine on the same requests.

    python benchmarks/gpu.py rollout --shape 0.6B --out rollout.json

Both generate the same number of responses of the same lengths on one GPU, `--inflight` at a time,
with log-probs. The offline engine is measured before and after ours, which is a synchronous run of
a few steps: scheduler, Serve, scoring, buffer, and a trainer on another GPU (`--colocated`: on the
same one). Its rate is that of a step's tokens over the time from the first request until the last
response, and until the trainer has the batch (which adds Ray Data).
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from host import ray_environment

from ray_apr.tools.report.load import load_run

GROUP_SIZE = 8
PROMPT_TOKENS = 64


def measure_rollout(model: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Offline, ours, offline; returns tokens per second of each."""
    prompts, lengths = requests(args)
    offline = [offline_turns(model, prompts, lengths, args)]
    ours = our_steps(model, prompts, lengths, args)
    offline.append(offline_turns(model, prompts, lengths, args))
    rates = [turn["tokens_per_s"] for half in offline for turn in half]
    best = statistics.median(rates)
    return {
        "offline": offline,
        "ours": ours,
        "offline_tokens_per_s": best,
        "ours_over_offline": statistics.median(s["tokens_per_s"] for s in ours) / best,
        "ours_with_ray_data_over_offline": statistics.median(
            s["tokens_per_s_to_trainer"] for s in ours
        )
        / best,
    }


def requests(args: argparse.Namespace) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts, and the lengths of each one's responses: log-normal, up to `--longest`."""
    rng = np.random.default_rng(0)
    num_groups = args.samples // GROUP_SIZE
    drawn = rng.lognormal(np.log(args.longest / 4), 0.5, (num_groups, GROUP_SIZE))
    lengths = np.clip(drawn, 8, args.longest).astype(int).tolist()
    prompts = rng.integers(3, 500, (num_groups, PROMPT_TOKENS)).tolist()
    return prompts, lengths


# -- vLLM offline ----------------------------------------------------------------------------------


def offline_turns(
    model: Path,
    prompts: list[list[int]],
    lengths: list[list[int]],
    args: argparse.Namespace,
) -> list[dict[str, float]]:
    """Seconds and rates of a few turns, in a process of their own."""
    # not multiprocessing's own pool, whose processes may have no children
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_offline, str(model), prompts, lengths, args).result()


def _offline(
    model: str, prompts: list[list[int]], lengths: list[list[int]], args: argparse.Namespace
) -> list[dict[str, float]]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
    os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[0]
    os.environ["VLLM_LOGGING_LEVEL"] = "WARNING"
    from vllm import LLM, SamplingParams

    llm = LLM(model, **engine_kwargs(args), max_model_len=args.context, dtype="auto")
    rows = [
        (
            {"prompt_token_ids": prompt},
            SamplingParams(max_tokens=n, ignore_eos=True, logprobs=0, detokenize=False),
        )
        for prompt, group in zip(prompts, lengths, strict=True)
        for n in group
    ]
    texts, params = [row[0] for row in rows], [row[1] for row in rows]
    llm.generate(texts[:64], params[:64], use_tqdm=False)
    found = []
    for _ in range(args.repeats):
        llm.reset_prefix_cache()
        began = time.perf_counter()
        outputs = llm.generate(texts, params, use_tqdm=False)
        seconds = time.perf_counter() - began
        tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        found.append({"seconds": seconds, "tokens": tokens, "tokens_per_s": tokens / seconds})
    return found


def engine_kwargs(args: argparse.Namespace) -> dict[str, Any]:
    """Settings of both engines."""
    import torch

    from ray_apr.serve.vllm.arguments import CPU_ARGUMENTS

    device = {"gpu_memory_utilization": 0.8} if torch.cuda.is_available() else CPU_ARGUMENTS
    return {"max_num_seqs": args.inflight, "enable_prefix_caching": True, **device}


# -- ours ------------------------------------------------------------------------------------------


def our_steps(
    model: Path,
    prompts: Sequence[list[int]],
    lengths: Sequence[list[int]],
    args: argparse.Namespace,
) -> list[dict[str, float]]:
    """Rates of the steps of a synchronous run, without the first."""
    import ray
    import torch

    from ray_apr import APRTrainer, PartialRolloutConfig, RolloutConfig, TrainConfig

    on_gpu = torch.cuda.is_available()
    num_cpus = (os.cpu_count() or 1) + 1  # those of server and trainer, and some for Ray Data
    ray.init(num_cpus=num_cpus, runtime_env=ray_environment(), log_to_driver=False)
    folder = model.parent
    try:
        trainer = APRTrainer(
            model=str(model),
            prompts=ray.data.from_items(
                [{"prompt": p, "lengths": n} for p, n in zip(prompts, lengths, strict=True)]
            ),
            reward=first_token_is_even,
            rollout_config=RolloutConfig(
                num_replicas=1,
                group_size=GROUP_SIZE,
                max_response_tokens=args.longest,
                replay_column="lengths",
                engine={
                    "max_model_len": args.context,
                    "placement": "colocated" if args.colocated else "disaggregated",
                    "device": "cuda" if on_gpu else "cpu",
                    "dtype": "bfloat16" if on_gpu else "float32",
                    "kwargs": engine_kwargs(args),
                },
            ),
            partial_rollout_config=PartialRolloutConfig.preset("sync"),
            train_config=TrainConfig(
                steps=args.repeats + 1,
                batch_size=args.samples,
                micro_batch_tokens=32768,
                learning_rate=1e-8,
                param_dtype="bfloat16" if on_gpu else "float32",
            ),
            scaling_config=ray.train.ScalingConfig(num_workers=1, use_gpu=on_gpu),
            run_config=ray.train.RunConfig(name="rollout", storage_path=str(folder)),
        )
        trainer.fit()
    finally:
        ray.shutdown()
    return step_rates(folder / "rollout")


def first_token_is_even(sample: Any) -> float:
    """A reward that costs nothing."""
    return float(sample.response_ids[0] % 2 == 0)


def step_rates(run: Path) -> list[dict[str, float]]:
    """Rates of the steps of a run folder, from the spans in which the engine generated."""
    data = load_run(run)
    steps, spans = data.steps, data.timeline
    waits = sorted(
        (s["start_s"], s["end_s"]) for s in spans if s["actor"] == "trainer" and s["what"] == "wait"
    )
    busy = sorted((s["start_s"], s["end_s"]) for s in spans if s["what"] == "generate")
    found = []
    for step, (begin, end) in list(zip(steps, waits, strict=True))[1:]:
        # the engine begins when the sync resumes it, a moment before the trainer waits
        within = [(b, e) for b, e in busy if b < end and e > begin]
        seconds = max(e for _, e in within) - min(b for b, _ in within)
        found.append(
            {
                "tokens": step["num_tokens"],
                "generate_s": seconds,
                "tokens_per_s": step["num_tokens"] / seconds,
                "wait_s": end - begin,
                "weight_sync_s": step["weight_sync_s"],
                "tokens_per_s_to_trainer": step["num_tokens"] / max(end - begin, seconds),
            }
        )
    return found
