"""Peak memory of the log-probs of 8k response tokens at a vocabulary of 151,936: ours and naive.

    python benchmarks/logprob_memory.py --out benchmarks/results/logprob-memory.json

Forward and backward of one packed micro-batch through a one-layer Qwen3 with random weights, where
the head is what counts. Naive is what most trainers begin with: the logits of all positions, their
log-softmax in float32, and a gather. On CUDA the allocator tells the peak; on CPU each runs in a
process of its own, whose resident memory counts beyond what it had before the pass.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import resource
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from ray_apr.train.attention import Packing, attention_name
from ray_apr.train.head import attach_response_logprobs
from ray_apr.train.logprobs import MicroBatch, response_logprobs

VOCABULARY, HIDDEN = 151_936, 1024
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
_RSS_UNIT = 1024 if sys.platform == "linux" else 1


def main() -> None:
    """Measure both, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--naive-tokens", type=int, help="fewer, where memory is short")
    parser.add_argument("--sample-tokens", type=int, default=1024)
    parser.add_argument("--out", type=Path, default=Path("logprob-memory.json"))
    args = parser.parse_args()
    naive_tokens = args.naive_tokens or args.tokens
    found = {}
    for name, tokens in (("naive", naive_tokens), ("ours", naive_tokens), ("ours", args.tokens)):
        # a process for each: what one of them needed must not show in the other
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            found[f"{name}-{tokens}"] = pool.apply(measure, (name, tokens, args.sample_tokens))
    naive, ours = found[f"naive-{naive_tokens}"], found[f"ours-{args.tokens}"]
    same = found[f"ours-{naive_tokens}"]
    result = {
        "device": torch.cuda.get_device_name() if DEVICE.type == "cuda" else platform.machine(),
        "dtype": str(DTYPE),
        "torch": torch.__version__,
        "vocabulary": VOCABULARY,
        "runs": found,
        "peak_over_naive": ours["peak_bytes"] / naive["peak_bytes"],
        "difference_per_token": abs(same["sum"] - naive["sum"]) / naive_tokens,
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


def make_model() -> Any:
    """One layer of Qwen3-0.6B's shape."""
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=3072, num_hidden_layers=1,
        num_attention_heads=16, num_key_value_heads=8, head_dim=128, tie_word_embeddings=True,
        attn_implementation=attention_name(DEVICE, DTYPE, packed=True),
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config).to(DEVICE, DTYPE)
    attach_response_logprobs(model, compiled=DEVICE.type == "cuda")
    return model


def make_batch(tokens: int, sample_tokens: int) -> MicroBatch:
    """Random samples in one row; all tokens but the first of each are in the loss."""
    count = tokens // sample_tokens
    ids = torch.randint(0, VOCABULARY, (1, tokens))
    targets_R = torch.arange(tokens).view(count, sample_tokens)[:, 1:].flatten()
    shape = (count, sample_tokens - 1)
    return MicroBatch(
        sample_index=torch.arange(count),
        input_ids=ids,
        packing=Packing.of(np.full(count, sample_tokens)),
        positions=targets_R - 1,
        targets=ids[0, targets_R],
        places=torch.arange(len(targets_R)),
        mask=torch.ones(shape),
        behavior_logprobs=torch.zeros(shape),
        versions=torch.zeros(shape, dtype=torch.int64),
        end_ids=torch.zeros(0, dtype=torch.int64),
        is_early=torch.zeros(len(targets_R), dtype=torch.bool),
        support=torch.zeros(len(targets_R), 0, dtype=torch.int32),
    )


def ours(model: Any, batch: MicroBatch) -> torch.Tensor:
    """Log-probs of the tokens of the loss, the head in chunks."""
    return response_logprobs(model, batch)[0].sum()


def naive(model: Any, batch: MicroBatch) -> torch.Tensor:
    """All logits at once."""
    assert batch.packing is not None
    logits = model(input_ids=batch.input_ids, use_cache=False, **batch.packing.arguments()).logits
    logprobs = logits[0].float().log_softmax(dim=-1)
    return logprobs[batch.positions].gather(1, batch.targets[:, None]).sum()


def measure(name: str, tokens: int, sample_tokens: int) -> dict[str, float]:
    """Peak of the memory beyond weights and gradients, and time, of forward and backward."""
    torch.manual_seed(0)
    model, batch = make_model(), make_batch(tokens, sample_tokens)
    function = {"naive": naive, "ours": ours}[name]
    small = make_batch(sample_tokens // 8, sample_tokens // 8)
    function(model, small).backward()  # gradients exist from here on
    before = allocated()
    began = time.perf_counter()
    total = function(model, batch)
    total.backward()
    peak = allocated(peak=True)
    return {
        "peak_bytes": peak - before,
        "seconds": time.perf_counter() - began,
        "sum": total.item(),
    }


def allocated(*, peak: bool = False) -> int:
    """Bytes in use now, or at most so far."""
    if DEVICE.type == "cpu":  # the peak so far: the small pass needed less than the large one will
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RSS_UNIT
    torch.cuda.synchronize()
    if peak:
        return torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


if __name__ == "__main__":
    main()
