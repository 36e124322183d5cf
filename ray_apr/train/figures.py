"""The figures of a step over all ranks, the same on each of them.

Invariants:
    * Each optimizer step exchanges one row between the ranks, on their devices; the host waits for
      them once, at the end of the batch.
    * What separates engines and trainer is counted once for each token, whatever the epochs, and
      only where the log-probs of the update's start are known.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist

from ray_apr.algorithms.user import MAX_METRICS
from ray_apr.core.exceptions import TrainError
from ray_apr.core.staleness import staleness
from ray_apr.train.objective import GAPS, NUM_AGES, NUM_QUANTILE_TOKENS, SUMS, Diagnostics

if TYPE_CHECKING:
    from ray_apr.scheduling.batch import RankBatch

Figures = dict[str, float | int | list[float]]
_QUANTILES = (0.01, 0.5, 0.99)
_OTHER_NAMES = (
    "the function algorithm.loss gives figures of other names from call to call, or from rank to "
    "rank; give all of them each time"
)


@dataclass(slots=True)
class Totals:
    """Figures of the optimizer steps of one batch, over all ranks."""

    ages: torch.Tensor
    """Of this rank's samples: see `ages_of`."""
    num_epochs: int = 1
    exchanged: list[torch.Tensor] = field(default_factory=list)
    """[ranks, K] on the device, of each optimizer step; `_ENDS` says what stands where."""
    of_loss: tuple[str, ...] | None = None
    """Names of what a loss of the user's tells; None: none has been called yet."""
    are_finite: torch.Tensor | None = None
    """Whether loss and gradient have been finite in all steps so far, on the device."""
    num_steps_known: int | None = None
    """First optimizer steps whose tokens have log-probs of the update's start; None: all."""

    def add(
        self, found: list[Diagnostics], squared_norm: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take in one optimizer step, with one exchange between ranks.

        Returns:
            The gradient norm, and whether all is finite so far; both on the device.
        """
        sums = torch.stack([d.sums for d in found]).sum(dim=0)
        gaps = torch.stack([d.gaps for d in found]).sum(dim=0)
        chosen = [_some(torch.cat([getattr(d, name) for d in found])) for name in _RATIOS]
        norm_1 = squared_norm.to(sums).reshape(1)
        ages = self.ages.to(sums.device, non_blocking=True)
        told = self._told(found)
        exchanged = _exchange(torch.cat([sums, norm_1, gaps.flatten(), ages, *chosen, told]))
        self.exchanged.append(exchanged)
        loss, norm = exchanged[:, _LOSS].sum(), exchanged[:, _NORM].sum().sqrt()
        is_finite = loss.isfinite() & norm.isfinite()
        self.are_finite = is_finite if self.are_finite is None else self.are_finite & is_finite
        return norm, self.are_finite

    def _told(self, found: list[Diagnostics]) -> torch.Tensor:
        """Sums [MAX_METRICS] of what a loss of the user's tells, and a number of their names.

        Raises:
            TrainError: If it does not tell the same each time.
        """
        names = tuple(sorted(found[0].of_loss)) if self.of_loss is None else self.of_loss
        if any(tuple(sorted(d.of_loss)) != names for d in found):
            raise TrainError(f"{_OTHER_NAMES}: {sorted({n for d in found for n in d.of_loss})}")
        self.of_loss = names
        told = found[0].sums.new_zeros(MAX_METRICS + 1)
        told[-1] = zlib.crc32(repr(names).encode())
        for i, name in enumerate(names):
            told[i] = torch.stack([d.of_loss[name] for d in found]).sum()
        return told

    def figures(self, step: int) -> Figures:
        """Means over tokens, quantiles, and what separates engines and trainer.

        Raises:
            TrainError: If loss or gradient is not finite.
        """
        exchanged = torch.stack(self.exchanged).cpu()  # [optimizer steps, ranks, K]
        num_steps, num_ranks, _ = exchanged.shape
        summed = exchanged[:, :, : _ENDS[-1]].sum(dim=1)
        norms = summed[:, _NORM].sqrt().tolist()
        _check_finite(summed[:, _LOSS].tolist(), norms, step)
        sums = dict(zip(SUMS, summed.sum(dim=0).tolist(), strict=False))
        of_epoch = num_steps // self.num_epochs  # the gaps are those of the first one
        num_known = of_epoch if self.num_steps_known is None else self.num_steps_known
        tokens = _sum_of_gaps(summed[:of_epoch])[:, 0]
        gaps = _sum_of_gaps(summed[:num_known])
        age, aged, _ = summed[0, _ENDS[2] :].tolist()
        count = max(1.0, float(gaps[:, 0].sum()))
        trained = max(1.0, float(tokens.sum())) * self.num_epochs
        figures: Figures = {
            "staleness_mean": age / max(1.0, aged),
            "staleness_max": int(exchanged[0, :, _ENDS[-1] - 1].max()),
            "loss": sums["loss"] / num_steps,
            "grad_norm": sum(norms) / num_steps,
            "ratio_mean": sums["ratio"] / trained,
            "clip_fraction": sums["clipped"] / trained,
            "importance_weight_mean": sums["importance_weight"] / trained,
            "importance_capped_fraction": sums["importance_capped"] / trained,
            "rejected_fraction": sums["rejected"] / trained,
            "kl_reference": sums["kl_reference"] / trained,
            "entropy": sums["entropy"] / trained,
        }
        _, ratio, squared, k3 = gaps.sum(dim=0).tolist()
        figures["kl_k3"] = k3 / count
        figures["chi2"] = squared / count - 1
        figures["effective_sample_size"] = ratio * ratio / (count * squared) if squared else 0.0
        told = exchanged.shape[-1] - MAX_METRICS - 1
        of_names = exchanged[:, :, -1]
        if (of_names != of_names[0, 0]).any():
            raise TrainError(f"{_OTHER_NAMES}; here {sorted(self.of_loss or ())}")
        totals = exchanged[:, :, told:].sum(dim=(0, 1))
        for name, total in zip(self.of_loss or (), totals, strict=False):
            mean = float(total) / trained
            if not math.isfinite(mean):
                raise TrainError(f"step {step}: the figure {name!r} of algorithm.loss is {mean}")
            figures[f"loss/{name}"] = mean
        ratios = exchanged[:, :, _ENDS[-1] : told].reshape(num_steps, num_ranks, len(_RATIOS), -1)
        for i, (kind, name) in enumerate(_RATIOS.items()):
            num_counted = num_known if kind == "gap_ratios" else num_steps
            values = ratios[:num_counted, :, i].flatten()
            known = values[~values.isnan()]
            if len(known):
                figures[name] = torch.quantile(known, known.new_tensor(_QUANTILES)).tolist()
        ages = [a for a in range(NUM_AGES) if tokens[a] > 0]
        by_age = gaps[: max(ages, default=-1) + 1]
        means = by_age / by_age[:, :1].clamp(min=1)
        figures["tokens_by_staleness"] = tokens[: len(by_age)].tolist()
        figures["kl_k3_by_staleness"] = means[:, 3].tolist()
        figures["chi2_by_staleness"] = [
            square - 1 if known else 0.0
            for square, known in zip(means[:, 2].tolist(), by_age[:, 0].tolist(), strict=True)
        ]
        return figures


_RATIOS = {"ratios": "ratio_quantiles", "gap_ratios": "importance_ratio_quantiles"}
_ENDS = np.cumsum([len(SUMS), 1, NUM_AGES * len(GAPS), 3]).tolist()
"""Ends, in a row of what ranks exchange, of sums, gradient norm, gaps and ages; ratios follow, and
what a loss of the user's tells."""
_LOSS, _NORM = SUMS.index("loss"), _ENDS[0]


def _sum_of_gaps(summed: torch.Tensor) -> torch.Tensor:
    """[A, GAPS] of some optimizer steps [steps, K]."""
    return summed[:, _ENDS[1] : _ENDS[2]].sum(dim=0).reshape(NUM_AGES, len(GAPS))


def _some(values: torch.Tensor) -> torch.Tensor:
    """Evenly spread values [NUM_QUANTILE_TOKENS], filled up with NaN."""
    stride = max(1, -(-len(values) // NUM_QUANTILE_TOKENS))
    chosen = values[::stride]
    return torch.cat([chosen, values.new_full((NUM_QUANTILE_TOKENS - len(chosen),), math.nan)])


def ages_of(batch: RankBatch) -> torch.Tensor:
    """[3]: sum, number and maximum of the ages of this rank's samples, by their oldest tokens."""
    ages = [staleness(batch.policy_version, oldest) for oldest in oldest_versions(batch)]
    return torch.tensor([sum(ages), len(ages), max(ages, default=0)], dtype=torch.float64)


def batch_figures(batch: RankBatch) -> Figures:
    """What the whole batch is like, without any model; every rank knows it."""
    rewards = np.asarray(batch.rewards, dtype=np.float64)
    lengths = np.asarray(batch.all_response_lens)
    num_tokens = int(lengths.sum())
    return {
        "reward_mean": float(rewards.mean()),
        "reward_std": float(rewards.std()),
        "reward_min": float(rewards.min()),
        "reward_max": float(rewards.max()),
        "num_samples": len(rewards),
        "num_tokens": num_tokens,
        "num_masked_tokens": num_tokens - int(np.asarray(batch.all_loss_lens).sum()),
        "response_tokens_mean": num_tokens / len(rewards),
        "response_tokens_max": int(lengths.max()),
        "truncated_fraction": float(np.mean(batch.truncated)),
    }


def oldest_versions(batch: RankBatch) -> Sequence[int]:
    """Policy version of the oldest token in the loss, of each of this rank's samples that has
    one."""
    lengths = np.asarray(batch.response_lens)
    begins = np.concatenate(([0], np.cumsum(lengths)[:-1]))
    in_loss = np.asarray(batch.loss_mask) != 0
    none = np.iinfo(np.int64).max
    versions = np.where(in_loss, np.asarray(batch.token_versions, dtype=np.int64), none)
    oldest = np.minimum.reduceat(versions, begins)
    return oldest[oldest != none].tolist()


def _exchange(local_K: torch.Tensor) -> torch.Tensor:
    """Figures [ranks, K] of all ranks, in the order of ranks on each of them."""
    if not dist.is_initialized():
        return local_K.unsqueeze(0)
    gathered = [torch.empty_like(local_K) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, local_K)
    return torch.stack(gathered)


def _check_finite(losses: Sequence[float], norms: Sequence[float], step: int) -> None:
    """Check those of each optimizer step of a batch."""
    for number, pair in enumerate(zip(losses, norms, strict=True)):
        for name, value in zip(("loss", "grad_norm"), pair, strict=True):
            if math.isfinite(value):
                continue
            kept = f"are those after {number} of its {len(losses)} optimizer steps"
            raise TrainError(
                f"step {step}: {name} is {value}; the weights "
                f"{kept if number else 'did not change'}. Look at rewards and log-probs of this "
                "batch, lower the learning rate, or set importance_cap"
            )
