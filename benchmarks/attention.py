"""Attention over packed samples on a GPU, forward and backward, kernel beside kernel.

    python benchmarks/attention.py --out results/attention.json

`torch` is PyTorch's variable-length attention as the trainer calls it, `flash` FlashAttention 4,
the package flash-attn-4. Each case is run in turns; "first_s" is its first call, which compiles
where heads and sizes are new to the process and to the package's files of compiled kernels.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from host import describe_call, gpu_names, package_versions

from ray_apr.train.attention import Packing, flash_4_attention, varlen_attention

SHAPES = {
    "4B": (32, 8, 128, 128),
    "0.6B": (16, 8, 128, 128),
    "135M": (9, 3, 64, 64),
    "latent": (16, 16, 192, 128),
}
"""Heads, key heads, head size, and that of the values."""
LENGTHS = {
    "16 of 1k": [1024] * 16,
    "1 to 4k": [4096, 3000, 2500, 2000, 1500, 1024, 900, 600, 400, 364],
    "1 of 16k": [16384],
    "1 of 64k": [65536],
}
Attention = Callable[..., torch.Tensor]


def main() -> None:
    """Measure the cases that are asked for and write their JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--lengths", nargs="+", choices=LENGTHS, default=list(LENGTHS))
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    result = describe_call()
    result["gpus"], result["packages"] = gpu_names(), package_versions()
    result["found"] = [
        measure(shape, lengths, args.variants, args.turns)
        for shape in args.shapes
        for lengths in args.lengths
    ]
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    for case in result["found"]:
        print(json.dumps(case))


def measure(shape: str, lengths: str, variants: list[str], turns: int) -> dict[str, Any]:
    """Milliseconds of each variant on one shape and one batch, medians of turns."""
    heads, key_heads, size, value_size = SHAPES[shape]
    packing = Packing.of(np.array(LENGTHS[lengths]))
    total = sum(LENGTHS[lengths])
    torch.manual_seed(0)
    sizes = [(heads, size), (key_heads, size), (key_heads, value_size)]
    inputs = [
        torch.randn(1, n, total, d, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for n, d in sizes
    ]
    gradient = torch.randn(1, total, heads, value_size, device="cuda", dtype=torch.bfloat16)
    boundaries = packing.boundaries.cuda()
    found: dict[str, Any] = {"shape": shape, "lengths": lengths}
    results: dict[str, list[torch.Tensor]] = {}
    for name in variants:
        call = VARIANTS[name]
        start = time.perf_counter()
        out = call(*inputs, boundaries, packing.longest)
        gradients = torch.autograd.grad(out, inputs, gradient)
        torch.cuda.synchronize()
        results[name] = [out.detach(), *gradients]
        found[name] = {"first_s": round(time.perf_counter() - start, 3), "forward": [], "both": []}
    for _ in range(turns):
        for name in results:
            found[name]["forward"].append(_timed(VARIANTS[name], inputs, boundaries, packing))
            found[name]["both"].append(
                _timed(VARIANTS[name], inputs, boundaries, packing, gradient)
            )
    squares = sum(n * n for n in LENGTHS[lengths])
    flops = 3.5 * heads * squares * (size + value_size)  # forward, and 2.5 times it backward
    for name in results:
        for part in ("forward", "both"):
            found[name][part] = round(statistics.median(found[name][part]), 3)
        found[name]["tflops"] = round(flops / found[name]["both"] / 1e9, 1)
        found[name]["off"] = [  # of the first variant: of the result, and of each gradient
            round(float((a - b).abs().max() / b.abs().max()), 5)
            for a, b in zip(results[name], results[variants[0]], strict=True)
        ]
    return found


def _timed(
    call: Attention,
    inputs: list[torch.Tensor],
    boundaries: torch.Tensor,
    packing: Packing,
    gradient: torch.Tensor | None = None,
) -> float:
    """Milliseconds of one call, with its gradients where one of the result is given."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    out = call(*inputs, boundaries, packing.longest)
    if gradient is not None:
        torch.autograd.grad(out, inputs, gradient)
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


def _of_trainer(attention: Callable[..., Any]) -> Attention:
    def call(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        boundaries: torch.Tensor,
        longest: int,
    ) -> torch.Tensor:
        out, _ = attention(
            torch.nn.Identity(), query, key, value, None,
            cu_seq_lens_q=boundaries, max_length_q=longest,
        )  # fmt: skip
        return torch.as_tensor(out)

    return call


VARIANTS: dict[str, Attention] = {
    "torch": _of_trainer(varlen_attention),
    "flash": _of_trainer(flash_4_attention),
}


if __name__ == "__main__":
    main()
