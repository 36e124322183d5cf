"""What an evaluation tells of its samples."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from ray_apr.config import EvaluationConfig
from ray_apr.core.sample import Sample


def summarize(samples: Sequence[Sample | None], config: EvaluationConfig) -> dict[str, Any]:
    """Means over the samples, and pass@k for k = 1, 2, 4, ... up to the samples of a prompt, where
    suites have other numbers of them up to the fewest.

    pass@k is the unbiased estimate of 2107.03374, eq. 1, over prompts without a failed sample.

    Args:
        samples: Scored ones; None stands for one that failed.
        config: What passes, and how many samples a prompt has.
    """
    scored = [s for s in samples if s is not None]
    rewards = [s.reward for s in scored if s.reward is not None]
    passed: dict[str, list[bool]] = {}
    asked: dict[str, int] = {}
    for sample in scored:
        has_passed = sample.reward is not None and sample.reward >= config.pass_threshold
        of_group = passed.setdefault(sample.group_id, [])
        of_group.append(has_passed)
        if len(of_group) == 1:
            asked[sample.group_id] = config.of_row(sample.row).samples
    whole = [p for group, p in passed.items() if len(p) == asked[group]]
    fewest = min(map(len, whole), default=0)
    ks = [2**i for i in range(fewest.bit_length())]
    versions = [v for s in scored for v in s.token_versions]
    return {
        "num_samples": len(scored),
        "num_failed": len(samples) - len(scored),
        "reward_mean": statistics.fmean(rewards) if rewards else None,
        "reward_min": min(rewards, default=None),
        "reward_max": max(rewards, default=None),
        "num_turns": sum(max(1, s.num_turns) for s in scored),
        "pass_at_k": {
            str(k): statistics.fmean(pass_at_k(len(p), sum(p), k) for p in whole) for k in ks
        },
        "response_tokens_mean": statistics.fmean(s.num_tokens for s in scored) if scored else 0.0,
        "num_tokens": sum(s.num_tokens for s in scored),
        "oldest_version": min(versions, default=None),
        "newest_version": max(versions, default=None),
    }


def by_suite(
    samples: Sequence[Sample | None], suites: Sequence[str], config: EvaluationConfig
) -> dict[str, dict[str, Any]]:
    """What `summarize` gives of each suite, in the order of their first samples.

    Args:
        samples: Of all suites.
        suites: Name of each one's suite.
        config: As of `summarize`.
    """
    found: dict[str, list[Sample | None]] = {}
    for sample, suite in zip(samples, suites, strict=True):
        found.setdefault(suite, []).append(sample)
    return {suite: summarize(of_suite, config) for suite, of_suite in found.items()}


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """Chance that of k samples without replacement at least one passed (2107.03374, eq. 1).

    Example:
        >>> pass_at_k(4, 1, 2)
        0.5
    """
    return 1.0 - math.comb(num_samples - num_passed, k) / math.comb(num_samples, k)


def sample_row(policy_version: int, sample: Sample) -> dict[str, Any]:
    """Row of the table of samples of all evaluations."""
    return {
        "policy_version": policy_version,
        "prompt_id": sample.prompt.prompt_id,
        "response": sample.response_text,
        "reward": sample.reward,
        "num_tokens": sample.num_tokens,
        "num_interruptions": sample.num_interruptions,
        "finish_reason": None if sample.finish_reason is None else sample.finish_reason.value,
    }
