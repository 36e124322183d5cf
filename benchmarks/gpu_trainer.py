"""The trainer's step on GPUs: ours, a bare loop with the same kernels, and TRL's.

    python benchmarks/gpu.py trainer --shape 0.6B --tokens 16384 --gpus 1 --out trainer.json

Every variant trains the same samples, of `--tokens` tokens on each GPU: forward, backward and
optimizer. Each lives in processes of its own, which take turns, round after round.

    bare        a Hugging Face model of bfloat16, packed varlen attention, layers and head compiled,
                AdamW fused; the loss is the mean log-prob
    ours        `ray_apr.train.step.train_step` under FSDP2, all bfloat16: GRPO, decoupled, TIS
    ours fp32   the same with float32 master weights and reductions (the default)
    ours torch  `ours` with PyTorch's attention where FlashAttention 4 is installed
    trl         TRL's GRPOTrainer.training_step and the optimizer, bfloat16, samples padded
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import statistics
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from host import free_port

TIMEOUT_S = 300.0
"""Limit of one turn, and of what comes before the first: loading and compiling."""
PROMPT_TOKENS = 64
GROUP_SIZE = 8
CUDA_BF16_FLOPS = 790e12
"""Of an H200, measured on a large product of random matrices."""


def response_lengths(tokens: int, count: int) -> np.ndarray:
    """Log-normal lengths [count] of responses which, with their prompts, have `tokens` tokens."""
    drawn = np.random.default_rng(0).lognormal(sigma=0.6, size=count)
    room = tokens - count * PROMPT_TOKENS
    lengths = np.maximum(1, (drawn / drawn.sum() * room).astype(int))
    lengths[lengths.argmax()] += room - lengths.sum()
    return lengths


def make_samples(tokens: int, count: int, vocabulary: int) -> list[Any]:
    """Scored samples of random tokens, in groups of `GROUP_SIZE`."""
    from ray_apr.core.sample import FinishReason, Prompt, Sample, Segment

    rng = np.random.default_rng(1)
    samples = []
    for i, length in enumerate(response_lengths(tokens, count)):
        group = f"g{i // GROUP_SIZE}"
        prompt = rng.integers(3, vocabulary, PROMPT_TOKENS).tolist()
        segment = Segment(
            token_ids=tuple(rng.integers(3, vocabulary, length).tolist()),
            logprobs=tuple([-12.0] * int(length)),
            policy_version=0,
        )
        samples.append(
            Sample(
                sample_id=f"{group}-{i}",
                group_id=group,
                prompt=Prompt(prompt_id=group, token_ids=tuple(prompt)),
                max_response_tokens=int(length),
                segments=(segment,),
                finish_reason=FinishReason.LENGTH,
                reward=float(i % 2),
            )
        )
    return samples


def measure_trainer(model: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Time all variants in turns; returns their step times and tokens per second."""
    sizes = {name: args.gpus for name in args.variants}
    if args.gpus > 1 and args.on_one:
        sizes |= {f"{n} on 1": 1 for n in args.variants if n != "trl"}
    found: dict[str, Any] = {}
    turns: dict[str, tuple[dict[str, Any], list[float]]] = {}
    for together in [{n: size} for n, size in sizes.items()] if args.one_by_one else [sizes]:
        try:
            turns |= _turns(together, model, args)
        except RuntimeError as error:
            if not args.one_by_one:
                raise
            found[next(iter(together))] = {"error": str(error).splitlines()[-1]}
    for name, (about, seconds) in turns.items():
        median = statistics.median(seconds)
        rate = args.tokens * sizes[name] / median
        found[name] = {
            **about,
            "seconds": seconds,
            "median_s": median,
            "tokens_per_s": rate,
            "mfu": 6 * about["parameters"] * rate / CUDA_BF16_FLOPS / sizes[name],
        }
    return found


def _turns(
    sizes: dict[str, int], model: Path, args: argparse.Namespace
) -> dict[str, tuple[dict[str, Any], list[float]]]:
    """Of variants in turns, on so many GPUs each: what they say of themselves, and their steps."""
    lanes = {name: Lane(name.removesuffix(" on 1"), model, args, n) for name, n in sizes.items()}
    seconds: dict[str, list[float]] = {name: [] for name in lanes}
    about = {}
    try:
        for name, lane in lanes.items():
            about[name] = lane.ask(args.warm_up)  # builds, compiles, warms up: one after the other
        for _ in range(args.repeats):
            for name, lane in lanes.items():
                answer = lane.ask(args.steps)
                seconds[name] += answer["seconds"]
                about[name] = {k: v for k, v in answer.items() if k != "seconds"}
    finally:
        for lane in lanes.values():
            lane.close()
    return {name: (about[name], seconds[name]) for name in lanes}


class Lane:
    """The processes of one variant, one for each GPU; they work when they are asked to."""

    def __init__(self, name: str, model: Path, args: argparse.Namespace, world_size: int) -> None:
        context = multiprocessing.get_context("spawn")
        port = free_port()
        self.world_size = world_size
        self._name = name
        self._pipes, self._processes = [], []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_lane, args=(name, model, args, rank, world_size, port, theirs)
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def ask(self, steps: int) -> dict[str, Any]:
        """Run steps on all GPUs; returns what rank 0 says of them."""
        for pipe in self._pipes:
            with contextlib.suppress(BrokenPipeError):  # it has sent its error, and ended
                pipe.send(steps)
        answers = []
        for pipe in self._pipes:
            if not pipe.poll(TIMEOUT_S):
                raise RuntimeError(f"{self._name} did not answer within {TIMEOUT_S} s")
            answers.append(pipe.recv())
        for answer in answers:
            if "error" in answer:
                raise RuntimeError(f"{self._name}: {answer['error']}")
        return answers[0]

    def close(self) -> None:
        """End the processes."""
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            pipe.close()
            process.join(timeout=10)
            if process.is_alive():
                process.kill()


def _lane(
    name: str,
    model: Path,
    args: argparse.Namespace,
    rank: int,
    world_size: int,
    port: int,
    pipe: Connection,
) -> None:
    import torch

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    try:
        if on_gpu:
            torch.cuda.set_device(device)
        if name.startswith("ours"):
            torch.distributed.init_process_group(
                "nccl" if on_gpu else "gloo",
                init_method=f"tcp://127.0.0.1:{port}",
                rank=rank,
                world_size=world_size,
            )
        make = {"bare": bare_step, "trl": trl_step}.get(name, our_step)
        torch.manual_seed(0)
        step, parameters = make(name, model, args, device, rank, world_size)
        while True:
            seconds = [_timed(step, device) for _ in range(pipe.recv())]
            answer = {"seconds": seconds, "parameters": parameters}
            if on_gpu:
                answer["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
                torch.cuda.empty_cache()  # the other variants need it now
            pipe.send(answer)
    except EOFError:
        return
    except Exception:  # noqa: BLE001  (raised by `ask`)
        pipe.send({"error": traceback.format_exc()})
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def _timed(step: Callable[[], object], device: Any) -> float:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def our_step(
    name: str, model: Path, args: argparse.Namespace, device: Any, rank: int, world_size: int
) -> tuple[Callable[[], object], int]:
    """`train_step` as the train loop calls it."""
    from ray_apr.config import AlgorithmConfig, TrainConfig
    from ray_apr.scheduling.batch import RankBatch, build_rank_batches
    from ray_apr.train.fsdp import build_model, build_optimizer, decoder_layers
    from ray_apr.train.logprobs import measure_recomputation, warm_up
    from ray_apr.train.step import train_step

    dtype = "bfloat16" if device.type == "cuda" else "float32"
    whole = "float32" if name == "ours fp32" else dtype
    # without the option one for the step: ranks may get a little more than their share
    micro_batch_tokens = args.micro_batch_tokens or 2 * args.tokens
    train = TrainConfig(
        batch_size=args.samples * world_size,
        micro_batch_tokens=min(args.tokens, micro_batch_tokens),
        param_dtype=dtype,
        reduce_dtype=whole,
        master_dtype=whole,
        packing="packed",
        learning_rate=1e-6,
        attention="torch" if name == "ours torch" else "auto",
        activation_checkpointing=yaml.safe_load(args.checkpointing),
    )
    sharded = build_model(str(model), train, device)
    if device.type == "cuda":  # kernels for batches of all sizes, as in a run
        warm_up(sharded, device, train.micro_batch_tokens, packed=True, entropy_gradients=False)
        measure_recomputation(sharded, device, train, entropy_gradients=False)
    optimizer, layers = build_optimizer(sharded, train), decoder_layers(sharded)
    samples = make_samples(
        args.tokens * world_size, args.samples * world_size, sharded.config.vocab_size
    )
    batch = build_rank_batches(
        samples,
        step=0,
        policy_version=0,
        num_ranks=world_size,
        micro_batch_tokens=micro_batch_tokens,
        packed=True,
    )[rank]
    columns = {
        name: value if isinstance(value, bytes) else np.asarray(value)
        for name, value in batch.to_row().items()
    }
    batch = RankBatch.from_row(columns)  # as it comes out of Ray Data
    algorithm = AlgorithmConfig()

    def step() -> object:
        found = train_step(sharded, optimizer, batch, algorithm, train)
        again = sum(getattr(layer, "gradient_checkpointing", 0) for layer in layers)
        if rank == 0:
            print(f"{name}: {again} of {len(layers)} layers computed theirs again", flush=True)
        return found

    return step, multiplied_parameters(sharded)


def bare_step(
    name: str, model: Path, args: argparse.Namespace, device: Any, rank: int, world_size: int
) -> tuple[Callable[[], object], int]:
    """The same kernels, and nothing around them."""
    del name, rank, world_size
    import torch
    from transformers import AutoModelForCausalLM

    from ray_apr.scheduling.batch import build_rank_batches
    from ray_apr.train.attention import attention_name
    from ray_apr.train.head import attach_response_logprobs
    from ray_apr.train.logprobs import (
        micro_batches,
        response_logprobs,
    )

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    plain: Any = AutoModelForCausalLM.from_pretrained(
        model, dtype=dtype, attn_implementation=attention_name(device, dtype, packed=True)
    ).to(device)
    plain.train()
    on_gpu = device.type == "cuda"
    if on_gpu:
        for layer in plain.model.layers:
            layer.forward = torch.compile(layer.forward)
    attach_response_logprobs(plain, compiled=on_gpu)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-6, fused=True)
    samples = make_samples(args.tokens, args.samples, plain.config.vocab_size)
    (row,) = build_rank_batches(
        samples, step=0, policy_version=0, num_ranks=1, micro_batch_tokens=args.tokens, packed=True
    )
    (part,) = micro_batches(row, device, packed=True)

    def step() -> None:
        logprobs, _ = response_logprobs(plain, part)
        (-logprobs.sum() / args.tokens).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step, multiplied_parameters(plain)


def trl_step(
    name: str, model: Path, args: argparse.Namespace, device: Any, rank: int, world_size: int
) -> tuple[Callable[[], object], int]:
    """TRL's step on prepared inputs: what it does once generation and rewards are there."""
    del name, rank, world_size
    os.environ["WANDB_DISABLED"] = "true"
    import datasets
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    on_gpu = device.type == "cuda"
    plain = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.bfloat16 if on_gpu else torch.float32
    )
    trainer = GRPOTrainer(
        model=plain,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=GRPOConfig(
            output_dir=str(model / "trl"),
            per_device_train_batch_size=args.samples,
            num_generations=GROUP_SIZE,
            bf16=on_gpu,
            use_cpu=not on_gpu,
            gradient_checkpointing=False,
            report_to=[],
            learning_rate=1e-6,
        ),
        train_dataset=datasets.Dataset.from_list([{"prompt": "1+1="}] * args.samples),
        processing_class=AutoTokenizer.from_pretrained(model),
    )
    trainer.model.to(device).train()
    trainer.create_optimizer()
    trainer.current_gradient_accumulation_steps = 1
    samples = make_samples(args.tokens, args.samples, plain.config.vocab_size)
    longest = max(s.num_tokens for s in samples)
    ids = torch.zeros(len(samples), longest, dtype=torch.int64)
    mask = torch.zeros(len(samples), longest, dtype=torch.int64)
    for i, sample in enumerate(samples):
        ids[i, : sample.num_tokens] = torch.tensor(sample.response_ids)
        mask[i, : sample.num_tokens] = 1
    prompts = torch.tensor([s.prompt.token_ids for s in samples])
    inputs = {
        "prompt_ids": prompts,
        "prompt_mask": torch.ones_like(prompts),
        "completion_ids": ids,
        "completion_mask": mask,
        "advantages": torch.tensor([s.reward - 0.5 for s in samples]),
        "num_items_in_batch": mask.sum(),
    }
    inputs = {key: value.to(device) for key, value in inputs.items()}
    trainer._prepare_inputs = lambda _: inputs

    def step() -> None:
        trainer.training_step(trainer.model, inputs, None)
        trainer.optimizer.step()
        trainer.optimizer.zero_grad(set_to_none=True)

    return step, multiplied_parameters(plain)


def multiplied_parameters(model: Any) -> int:
    """Parameters that each token is multiplied with: without embeddings that are no head, too."""
    number = sum(p.numel() for p in model.parameters())
    is_looked_up = not model.config.tie_word_embeddings
    return number - is_looked_up * model.get_input_embeddings().weight.numel()
