"""Log-probs of trainer and engine after many weight syncs: how far apart, against the limits.

    python benchmarks/weight_check.py --out benchmarks/results/weight-check.json
    python benchmarks/weight_check.py --device cuda --out benchmarks/results/weight-check-gpu.json

One vLLM engine and one train worker, in one process without Ray. The trainer takes AdamW steps on
sequences of a fixed random Markov chain, so that the model grows sharp; every step is followed by a
sync with its check, which raises on a false alarm. Cases are pairs of data types, and for bfloat16
several depths: rounding adds up over the layers. On GPUs (two of them: trainer and engine) the
model has the shape of Qwen3-0.6B, and the engine CUDA graphs.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import gpu_models
import numpy as np
import torch
from host import ROOT, describe_call, gpu_names, package_versions

from ray_apr.core.exceptions import WeightMismatchError
from ray_apr.train.attention import Packing
from ray_apr.train.logprobs import response_logprobs
from ray_apr.weights.check import Limits

sys.path.insert(0, str(ROOT))
from tests.tiny_model import make_tiny_model
from tests.train_batches import process_group
from tests.vllm.engines import SyncingTrainer, started

QUICKSTART = ROOT / "examples" / "arithmetic" / "base_model"
DEPTHS = (2, 8, 24)
LEARNING_RATE = 1e-3
DEEP_LEARNING_RATE = 1e-4
"""Of more than eight layers, which would diverge."""
CHAIN_TOKENS = 512
"""Token ids of the Markov chain, or the whole of a smaller vocabulary."""
EXTRA_TOLERANCE = 1e6
"""The check itself must not end a measurement; false alarms are counted here."""


class Learner:
    """AdamW on sequences of a Markov chain, in which three tokens may follow each token."""

    def __init__(self, model: Any) -> None:
        self._model = model
        is_deep = model.config.num_hidden_layers > 8
        rate = DEEP_LEARNING_RATE if is_deep else LEARNING_RATE
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
        self._random = torch.Generator().manual_seed(0)
        size = min(model.config.vocab_size, CHAIN_TOKENS)
        self._next = torch.randint(size, (size, 3), generator=self._random)
        self._device = next(model.parameters()).device
        packing = Packing.of(np.full(16, 48))  # as the trainer's attention on CUDA wants it
        self._arguments = {
            name: value.to(self._device) if isinstance(value, torch.Tensor) else value
            for name, value in packing.arguments().items()
        }

    def step(self) -> float:
        """One step on 16 sequences of 48 tokens; returns the loss."""
        columns = [torch.randint(len(self._next), (16,), generator=self._random)]
        for _ in range(47):
            branch = torch.randint(3, (16,), generator=self._random)
            columns.append(self._next[columns[-1], branch])
        ids = torch.stack(columns, dim=1).to(self._device)
        row = ids.reshape(1, -1)
        loss = self._model(input_ids=row, labels=row, use_cache=False, **self._arguments).loss
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return float(loss)


def measure(
    folder: Path, engine_dtype: str, train_dtype: str, num_syncs: int, device: str
) -> dict[str, Any]:
    """Step and sync `num_syncs` times."""
    gaps, k3s, gap_limits, seconds = (
        [],
        [],
        [],
        {"check": [], "trainer": [], "engine": [], "sync": []},
    )
    false_alarms = 0
    with started(folder, device=device, dtype=engine_dtype, max_model_len=128) as control:
        trainer = SyncingTrainer(
            folder, control, device=device, dtype=engine_dtype, param_dtype=train_dtype,
            weight_check_tolerance=EXTRA_TOLERANCE,
        )  # fmt: skip
        learner = Learner(trainer.model)
        num_layers = trainer.model.config.num_hidden_layers
        before = None
        for _ in range(num_syncs):
            loss = learner.step()
            if not math.isfinite(loss):
                raise SystemExit("the model diverged: there is nothing to compare")
            begin = time.perf_counter()
            try:
                figures = trainer.sync(size=0.0)
            except WeightMismatchError as error:
                print(error)
                false_alarms += 1
                continue
            seconds["sync"].append(time.perf_counter() - begin)
            scores = control.engine.scorer.result
            ours = _scores(trainer)
            limits = Limits.of(
                (engine_dtype, train_dtype), num_layers=num_layers, ours=ours, tolerance=1.0
            )
            gaps.append(figures["weight_check_gap"])
            k3s.append(figures["weight_check_k3"])
            gap_limits.append(limits.gap)
            seconds["check"].append(figures["weight_check_s"])
            seconds["engine"].append(scores.duration_s)
            seconds["trainer"].append(figures["weight_check_s"] - scores.duration_s)
            false_alarms += not (gaps[-1] <= limits.gap and k3s[-1] <= limits.k3)
            before = ours
        size = -statistics.mean(p for ps in before for p in ps)
    return {
        "engine_dtype": engine_dtype,
        "param_dtype": train_dtype,
        "layers": num_layers,
        "syncs": num_syncs,
        "false_alarms": false_alarms,
        "gap": {"median": statistics.median(gaps), "max": max(gaps)},
        "k3": {"median": statistics.median(k3s), "max": max(k3s)},
        "gap_limit": {"min": min(gap_limits), "max": max(gap_limits)},
        "largest_share_of_limit": {
            "gap": max(g / limit for g, limit in zip(gaps, gap_limits, strict=True)),
            "k3": max(k / (limit**2 / 128) for k, limit in zip(k3s, gap_limits, strict=True)),
        },
        "last": {"loss": loss, "mean_minus_logprob": size},
        "seconds": {what: statistics.median(values) for what, values in seconds.items()},
        "gaps": [float(f"{gap:.4g}") for gap in gaps],
        "k3s": [float(f"{k3:.4g}") for k3 in k3s],
    }


def _scores(trainer: SyncingTrainer) -> list[list[float]]:
    with torch.no_grad():
        return response_logprobs(trainer.model, trainer.check._batch)[0].tolist()


Case = tuple[str, Path, str, str]
"""Name, model, data types of the engine and of the trainer."""


def cases_on_cpu(folder: Path) -> list[Case]:
    """The quickstart's model, and random ones of several depths."""
    cases = [("quickstart", QUICKSTART, "float32", "float32")]
    cases += [("quickstart", QUICKSTART, "bfloat16", t) for t in ("float32", "bfloat16")]
    for depth in DEPTHS:
        model = make_tiny_model(folder / f"{depth}", num_layers=depth, tie=False)
        cases += [(f"{depth} layers", model, "bfloat16", "bfloat16")]
        if depth == DEPTHS[-1]:
            cases += [(f"{depth} layers", model, "float32", "float32")]
    return cases


def cases_on_cuda(folder: Path) -> list[Case]:
    """A random model of a real shape."""
    model = gpu_models.make_model("0.6B", folder / "0.6B", context=128)
    return [("0.6B", model, "bfloat16", dtype) for dtype in ("bfloat16", "float32")]


def main() -> None:
    """Measure all cases and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--syncs", type=int, default=200)
    parser.add_argument("--cases", type=int, nargs="*", help="numbers of the cases; all by default")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    result = {"call": describe_call(), "packages": package_versions(), "cases": []}
    on_cuda = args.device == "cuda"
    if on_cuda:
        result["call"]["machine"]["gpus"] = gpu_names()  # this process begins with all of them
        os.environ["CUDA_VISIBLE_DEVICES"] = "1"  # those of the engine
    backend = "cpu:gloo,cuda:nccl" if on_cuda else "gloo"
    with tempfile.TemporaryDirectory() as folder, process_group(Path(folder), backend=backend):
        cases = cases_on_cuda(Path(folder)) if on_cuda else cases_on_cpu(Path(folder))
        for number, (name, model, engine_dtype, train_dtype) in enumerate(cases):
            if args.cases and number not in args.cases:
                continue
            case = {
                "model": name,
                **measure(model, engine_dtype, train_dtype, args.syncs, args.device),
            }
            result["cases"].append(case)
            brief = {k: v for k, v in case.items() if k not in ("gaps", "k3s")}
            print(json.dumps(brief), flush=True)
            args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
