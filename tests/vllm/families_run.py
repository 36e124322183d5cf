"""One family through the whole path of weights: trainer, syncs, a real engine, export and back.

``python -m tests.vllm.families_run FAMILY`` prints the gaps as one line of JSON. ``--device cuda``
needs two GPUs: the trainer has the first one, the engine the second.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from ray_apr.config import TrainConfig
from ray_apr.core.sample import FinishReason, Prompt, Sample
from ray_apr.train.checkpoint import export_hf
from ray_apr.train.fsdp import build_model
from ray_apr.train.logprobs import micro_batches, response_logprobs
from tests.fakes import generate_request
from tests.families import disturb, make_family
from tests.train_batches import make_batches, process_group
from tests.vllm.engines import (
    FREE,
    PROMPT,
    Trainer,
    largest_gap,
    make_engine,
    running,
)

_PROMPTS = (PROMPT * 15, PROMPT, PROMPT[:1] + PROMPT * 6)
"""Longer and shorter than the windows and the rotary embedding's original context."""
_RESPONSE_TOKENS = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Gaps:
    """Largest differences of log-probs between an engine and the trainer, in nats."""

    before: float
    """Weights that vLLM loaded from the checkpoint."""
    sync_1: float
    sync_2: float
    exported: float
    """A second engine, which loaded the export."""
    moved: float
    """How much a sync moved the log-probs of the tokens before it: what a missed one would cost."""


def run_family(name: str, folder: Path, *, device: str = "cpu", dtype: str = "float32") -> Gaps:
    """Take a family through two syncs and an export.

    Args:
        name: Of the family.
        folder: For its files.
        device: "cpu" or "cuda".
        dtype: In which the engine computes, and the weights travel; the trainer's is float32.

    Raises:
        AssertionError: If the export is not what the trainer holds.
    """
    source = make_family(name, folder / "model")
    on_cuda = device == "cuda"
    with process_group(folder, backend="cpu:gloo,cuda:nccl" if on_cuda else "gloo"):
        model = build_model(str(source), TrainConfig(compile=False), torch.device(device))
        if on_cuda:  # for the engine's processes; this one has begun with the first
            os.environ |= {"CUDA_VISIBLE_DEVICES": "1", "TRITON_F32_DEFAULT": "ieee"}
        return asyncio.run(_gaps(model, source, folder / "export", device, dtype))


async def _gaps(model: Any, source: Path, export: Path, device: str, dtype: str) -> Gaps:
    gaps, moved = [], []
    trainer = Trainer(source, model, wire_dtype=dtype)
    async with running(make_engine(source, device=device, dtype=dtype)) as engine:
        gaps.append(await _gap(engine, model, "r0"))
        await trainer.join(engine)
        for version in (1, 2):
            before = {n: p.detach().clone() for n, p in model.named_parameters()}
            samples = await _samples(engine, f"b{version}")
            disturb(model, 0.05)
            assert all(not torch.equal(p, before[n]) for n, p in model.named_parameters())
            moved.append(max(_gap_of(model, samples, packed=False)))
            await trainer.sync(engine, version)
            gaps.append(await _gap(engine, model, f"r{version}"))
    export_hf(export, model, str(source))
    _check_export(export, source, model)
    async with running(make_engine(export, device=device, dtype=dtype)) as engine:
        gaps.append(await _gap(engine, model, "e"))
    before, first, second, exported = gaps
    return Gaps(before=before, sync_1=first, sync_2=second, exported=exported, moved=min(moved))


def _check_export(export: Path, source: Path, model: Any) -> None:
    """Names and shapes of the source's files, and what Transformers reads is the trainer's."""
    from transformers import AutoModelForCausalLM

    files = [load_file(f / "model.safetensors") for f in (export, source)]
    ours, theirs = ({n: t.shape for n, t in file.items()} for file in files)
    assert ours == theirs
    loaded = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32).state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(loaded[name], value.cpu()), name


async def _gap(engine: Any, model: Any, label: str) -> float:
    samples = await _samples(engine, label)
    return max(_gap_of(model, samples, packed=False) + _gap_of(model, samples, packed=True))


async def _samples(engine: Any, label: str) -> list[Sample]:
    """Samples of an engine, all generated at once."""
    generations = await asyncio.gather(
        *(
            engine.generate(
                generate_request(
                    request_id=f"{label}-{i}",
                    token_ids=prompt,
                    sampling=FREE,
                    max_tokens=_RESPONSE_TOKENS,
                    session_id="",
                )
            )
            for i, prompt in enumerate(_PROMPTS)
        )
    )
    return [
        Sample(
            sample_id=f"s{i}",
            group_id=f"g{i}",
            prompt=Prompt(prompt_id=f"p{i}", token_ids=prompt),
            max_response_tokens=_RESPONSE_TOKENS,
            segments=generation.segments,
            finish_reason=FinishReason.LENGTH,
            reward=0.0,
        )
        for i, (prompt, generation) in enumerate(zip(_PROMPTS, generations, strict=True))
    ]


def _gap_of(model: Any, samples: list[Sample], *, packed: bool) -> list[float]:
    """Largest gap of each sample, in the trainer's own forward pass."""
    (row,) = make_batches(samples, packed=packed, micro_batch_tokens=512)
    gaps = []
    device = next(model.parameters()).device
    with torch.no_grad():
        for part in micro_batches(row, device, packed=packed):
            logprobs, _ = response_logprobs(model, part)
            for i, index in enumerate(part.sample_index):
                sample = samples[int(index)]
                theirs = [p for s in sample.segments for p in s.logprobs]
                gaps.append(largest_gap(logprobs[i, : len(theirs)].tolist(), theirs))
    return gaps


def main() -> None:
    """Try one family and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("family")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        gaps = run_family(args.family, Path(scratch), device=args.device, dtype=args.dtype)
    sys.stdout.write(json.dumps(asdict(gaps)) + "\n")


if __name__ == "__main__":
    main()
