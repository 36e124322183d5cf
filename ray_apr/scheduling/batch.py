"""Batches: ONE row for each rank and step, as flat columns that Arrow and the trainer understand.

Invariants:
    * Token ids go in and come out as ids; the prompt's are followed by the response's, and
      `prompt_lens` says where the response begins (invariant 5).
    * Log-probs and versions cover the response's tokens only, one each.
    * Rewards, groups, lengths and ends of responses are those of the WHOLE batch, in one order on
      all ranks, so that advantages and denominators are the same everywhere; `sample_index` says
      which of them are this rank's.
    * `loss_mask` says which response tokens enter the loss; samples without any still count for
      their group's advantages. `all_loss_lens` counts them, for denominators.

No torch here: the row is made in a Ray Data read task and turned into tensors in the train loop.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ray_apr.core.group import GroupMeta, SampleMeta
from ray_apr.core.sample import FinishReason, Sample
from ray_apr.scheduling.packing import MicroBatches, plan_micro_batches


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBatch:
    """What one rank trains at one step. Columns may be lists or NumPy arrays.

    B = samples of the whole batch, M = its mini-batches (optimizer steps of an epoch), n = samples
    of this rank, m = its micro-batches.
    """

    step: int
    policy_version: int
    """Version of the trainer at the start of the step."""
    rank: int
    token_ids: Sequence[int]
    """[sum of prompt_lens + response_lens], prompt then response, sample after sample."""
    prompt_lens: Sequence[int]
    """[n]"""
    response_lens: Sequence[int]
    """[n]"""
    micro_batch_sizes: Sequence[int]
    """[m] samples of each micro-batch, in order; 0 only if B is no multiple of the ranks."""
    mini_batch_sizes: Sequence[int]
    """[M] micro-batches of each mini-batch, in order, the same on all ranks. Mini-batch i holds the
    samples of the whole batch from i * B / M on."""
    behavior_logprobs: Sequence[float]
    """[sum of response_lens]"""
    token_versions: Sequence[int]
    """[sum of response_lens] policy version of each response token."""
    sample_index: Sequence[int]
    """[n] position in the whole batch."""
    rewards: Sequence[float]
    """[B]"""
    groups: Sequence[int]
    """[B] 0..G-1"""
    all_response_lens: Sequence[int]
    """[B]"""
    truncated: Sequence[int]
    """[B] 1 where a sample ended at a limit, of tokens or of turns."""
    loss_mask: Sequence[int]
    """[sum of response_lens] 1 for each response token that enters the loss, 0 for the others."""
    all_loss_lens: Sequence[int]
    """[B] tokens that enter the loss."""
    support_ids: bytes = b""
    """Ids that could be drawn at each response token, as 32-bit integers, token after token."""
    support_sizes: bytes = b""
    """[sum of response_lens] how many they are, as 16-bit integers; empty if all of the vocabulary
    could be drawn."""

    def __post_init__(self) -> None:
        num_samples = len(self.sample_index)
        num_response = int(sum(self.response_lens))
        sizes = {
            "prompt_lens": (len(self.prompt_lens), num_samples),
            "response_lens": (len(self.response_lens), num_samples),
            "sum of micro_batch_sizes": (int(sum(self.micro_batch_sizes)), num_samples),
            "sum of mini_batch_sizes": (
                int(sum(self.mini_batch_sizes)),
                len(self.micro_batch_sizes),
            ),
            "token_ids": (len(self.token_ids), int(sum(self.prompt_lens)) + num_response),
            "behavior_logprobs": (len(self.behavior_logprobs), num_response),
            "token_versions": (len(self.token_versions), num_response),
            "groups": (len(self.groups), len(self.rewards)),
            "all_response_lens": (len(self.all_response_lens), len(self.rewards)),
            "truncated": (len(self.truncated), len(self.rewards)),
            "loss_mask": (len(self.loss_mask), num_response),
            "all_loss_lens": (len(self.all_loss_lens), len(self.rewards)),
            "sum of loss_mask": (
                int(sum(self.loss_mask)),
                int(sum(self.all_loss_lens[i] for i in self.sample_index)),
            ),
        }
        if self.support_sizes:
            support_sizes = np.frombuffer(self.support_sizes, np.uint16)
            sizes["support_sizes"] = (len(support_sizes), num_response)
            sizes["support_ids"] = (len(self.support_ids) // 4, int(support_sizes.sum()))
        for name, (got, expected) in sizes.items():
            if got != expected:
                raise ValueError(
                    f"batch of rank {self.rank}, step {self.step}: {name} has {got} entries, "
                    f"not {expected}"
                )

    def to_row(self) -> dict[str, Any]:
        """Columns by name: whole numbers, and flat lists for Arrow."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> RankBatch:
        """Read what `to_row` made, from lists or NumPy arrays; further columns are ignored.

        Raises:
            KeyError: If a column is missing.
            ValueError: If columns do not fit each other.
        """
        values = {f.name: row[f.name] for f in dataclasses.fields(cls)}
        whole = {name: int(values[name]) for name in ("step", "policy_version", "rank")}
        return cls(**{**values, **whole})


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """A chosen batch without payload: who trains what.

    Positions in the batch count through the groups: the samples of the first, of the second, ...
    """

    step: int
    policy_version: int
    """Version of the trainer at the start of the step."""
    oldest_version: int
    """Version of the oldest token that enters the loss."""
    groups: tuple[GroupMeta, ...]
    """[G]"""
    micro_batches: tuple[MicroBatches, ...]
    """``micro_batches[rank][i]`` -> positions in the batch."""
    mini_batch_sizes: tuple[int, ...]
    """[M] micro-batches of each mini-batch, in order, on each rank."""

    @property
    def samples(self) -> tuple[SampleMeta, ...]:
        """[B]"""
        return tuple(s for group in self.groups for s in group.samples)

    @property
    def group_numbers(self) -> tuple[int, ...]:
        """[B] the group of each sample, 0..G-1."""
        return tuple(g for g, group in enumerate(self.groups) for _ in group.samples)

    def groups_of(self, rank: int) -> tuple[int, ...]:
        """Numbers of the groups whose payload this rank needs, in ascending order."""
        numbers = self.group_numbers
        return tuple(sorted({numbers[i] for mb in self.micro_batches[rank] for i in mb}))

    def rank_batch(self, rank: int, payload: Mapping[int, Sequence[Sample]]) -> RankBatch:
        """Make the row of one rank.

        Args:
            rank: The train worker.
            payload: Samples of (at least) the groups in `groups_of`, by the group's number, each in
                any order.

        Raises:
            KeyError: If a sample is missing.
            ValueError: If a sample is not the one that was planned.
        """
        metas, numbers = self.samples, self.group_numbers
        index = [i for micro_batch in self.micro_batches[rank] for i in micro_batch]
        by_id = {s.sample_id: s for g in {numbers[i] for i in index} for s in payload[g]}
        samples = [by_id[metas[i].sample_id] for i in index]
        for i, sample in zip(index, samples, strict=True):
            if SampleMeta.of(sample) != metas[i]:
                raise ValueError(f"{SampleMeta.of(sample)} was delivered, {metas[i]} was planned")
        support = [ids for s in samples for ids in s.support]
        return RankBatch(
            step=self.step,
            policy_version=self.policy_version,
            rank=rank,
            token_ids=[t for s in samples for t in (*s.prompt.token_ids, *s.response_ids)],
            prompt_lens=[len(s.prompt.token_ids) for s in samples],
            response_lens=[s.num_tokens for s in samples],
            micro_batch_sizes=[len(micro_batch) for micro_batch in self.micro_batches[rank]],
            mini_batch_sizes=list(self.mini_batch_sizes),
            behavior_logprobs=[p for s in samples for p in s.behavior_logprobs],
            token_versions=[v for s in samples for v in s.token_versions],
            sample_index=index,
            rewards=[m.reward for m in metas],
            groups=list(numbers),
            all_response_lens=[m.num_tokens for m in metas],
            truncated=[int(m.finish_reason is FinishReason.LENGTH) for m in metas],
            loss_mask=[kept for s in samples for kept in loss_mask(s, self.oldest_version)],
            all_loss_lens=[m.trainable_tokens(self.oldest_version) for m in metas],
            support_ids=b"".join(support),
            support_sizes=np.array([len(ids) // 4 for ids in support], np.uint16).tobytes(),
        )


def loss_mask(sample: Sample, oldest_version: int) -> list[int]:
    """Which response tokens of a sample enter the loss; `SampleMeta.trainable_tokens` counts them.

    Args:
        sample: A sample.
        oldest_version: Version of the oldest token that is trained (`staleness.oldest_trainable`).

    Returns:
        [response tokens], 1 for a token generated under that version or a newer one, 0 for an older
        one and for what an environment said.
    """
    return [int(kept) for kept in sample.loss_mask(oldest_version)]


def plan_batch(
    groups: Sequence[GroupMeta],
    *,
    step: int,
    policy_version: int,
    oldest_version: int = 0,
    num_ranks: int,
    micro_batch_tokens: int,
    mini_batches: int = 1,
    packed: bool = False,
) -> BatchPlan:
    """Plan a batch from its metadata alone, before any payload is fetched.

    Args:
        groups: The chosen groups, in the order of the batch.
        step: Of the trainer, from 0.
        policy_version: Version of the trainer at the start of the step.
        oldest_version: Version of the oldest token that enters the loss.
        num_ranks: Train workers.
        micro_batch_tokens: Most tokens of a micro-batch, padding included.
        mini_batches: Parts of the batch, equal in samples, that get an optimizer step each.
        packed: Whether micro-batches have no padding.

    Raises:
        ValueError: If a mini-batch has fewer samples than there are ranks, or the samples cannot be
            divided equally among mini-batches.
    """
    metas = [sample for group in groups for sample in group.samples]
    if len(metas) % mini_batches:
        raise ValueError(f"{len(metas)} samples cannot be divided into {mini_batches} mini-batches")
    lengths = [m.num_prompt_tokens + m.num_tokens for m in metas]
    size = len(metas) // mini_batches
    micro_batches: list[MicroBatches] = [()] * num_ranks
    mini_batch_sizes = []
    for begin in range(0, len(metas), size):
        planned = plan_micro_batches(
            lengths[begin : begin + size],
            num_ranks=num_ranks,
            micro_batch_tokens=micro_batch_tokens,
            packed=packed,
        )
        mini_batch_sizes.append(len(planned[0]))
        for rank, cut in enumerate(planned):
            micro_batches[rank] += tuple(tuple(begin + i for i in part) for part in cut)
    return BatchPlan(
        step=step,
        policy_version=policy_version,
        oldest_version=oldest_version,
        groups=tuple(groups),
        micro_batches=tuple(micro_batches),
        mini_batch_sizes=tuple(mini_batch_sizes),
    )


def build_rank_batches(
    samples: Sequence[Sample],
    *,
    step: int,
    policy_version: int,
    oldest_version: int = 0,
    num_ranks: int,
    micro_batch_tokens: int,
    mini_batches: int = 1,
    packed: bool = False,
) -> list[RankBatch]:
    """Make the rows of all ranks from scored samples; siblings need not be neighbours.

    The whole batch is ordered by group, in order of first appearance.

    Raises:
        RolloutError: If a sample has not ended, has no reward, or has no token.
        ValueError: If there are fewer samples than ranks.
    """
    by_group: dict[str, list[Sample]] = {}
    for sample in samples:
        by_group.setdefault(sample.group_id, []).append(sample)
    plan = plan_batch(
        [
            GroupMeta(group_id=g, sequence=n, samples=tuple(SampleMeta.of(s) for s in members))
            for n, (g, members) in enumerate(by_group.items())
        ],
        step=step,
        policy_version=policy_version,
        oldest_version=oldest_version,
        num_ranks=num_ranks,
        micro_batch_tokens=micro_batch_tokens,
        mini_batches=mini_batches,
        packed=packed,
    )
    payload = dict(enumerate(by_group.values()))
    return [plan.rank_batch(rank, payload) for rank in range(num_ranks)]
