"""What is known of scored samples and groups where their tokens are not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ray_apr.core.exceptions import RolloutError
from ray_apr.core.sample import FinishReason, Sample, Segment


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleMeta:
    """What the buffer knows of a scored sample; the samples themselves are beside it, pickled."""

    sample_id: str
    group_id: str
    num_prompt_tokens: int
    num_tokens: int
    """Response tokens, generated and observed."""
    oldest_version: int
    newest_version: int
    reward: float
    finish_reason: FinishReason
    num_interruptions: int
    version_tokens: tuple[tuple[int, int], ...]
    """(policy version, tokens generated under it), oldest first, each version once."""
    reward_metrics: Mapping[str, float] = field(default_factory=dict)
    num_turns: int = 1
    """Turns of the policy; 1 in a run without an environment."""

    @property
    def num_generated(self) -> int:
        """Response tokens that an engine made: those that the ledger counts."""
        return sum(tokens for _, tokens in self.version_tokens)

    def trainable_tokens(self, oldest_version: int) -> int:
        """Generated tokens of `oldest_version` or newer."""
        return sum(tokens for version, tokens in self.version_tokens if version >= oldest_version)

    def trained_version(self, oldest_version: int) -> int | None:
        """Version of its first token of `oldest_version` or newer; None if there is none."""
        return next((v for v, _ in self.version_tokens if v >= oldest_version), None)

    @classmethod
    def of(cls, sample: Sample) -> SampleMeta:
        """Describe a finished, scored sample.

        Raises:
            RolloutError: If it has not ended, has no reward, or has no token.
        """
        oldest, newest = sample.oldest_version, sample.newest_version
        if (
            sample.finish_reason is None
            or sample.reward is None
            or oldest is None
            or newest is None
        ):
            raise RolloutError(f"sample {sample.sample_id} is not finished and scored")
        return cls(
            sample_id=sample.sample_id,
            group_id=sample.group_id,
            num_prompt_tokens=len(sample.prompt.token_ids),
            num_tokens=sample.num_tokens,
            oldest_version=oldest,
            newest_version=newest,
            reward=sample.reward,
            finish_reason=sample.finish_reason,
            num_interruptions=sample.num_interruptions,
            version_tokens=_version_tokens(sample.segments),
            reward_metrics=sample.reward_metrics,
            num_turns=max(1, sample.num_turns),
        )


def num_by_version(groups: Iterable[Sequence[Sample]]) -> Counter[int]:
    """Samples of scored groups, by the version of the oldest token of their group."""
    counted: Counter[int] = Counter()
    for group in groups:
        versions = (sample.oldest_version for sample in group)
        counted[min(version for version in versions if version is not None)] += len(group)
    return counted


def _version_tokens(segments: Iterable[Segment]) -> tuple[tuple[int, int], ...]:
    """Generated tokens by version, oldest first."""
    tokens: dict[int, int] = {}
    for segment in segments:
        if segment.is_generated:
            version = segment.policy_version
            tokens[version] = tokens.get(version, 0) + len(segment.token_ids)
    return tuple(tokens.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMeta:
    """A whole group in the buffer: it trains whole or not at all (invariant 4)."""

    group_id: str
    sequence: int
    """Order of arrival in the buffer."""
    samples: tuple[SampleMeta, ...]

    @property
    def oldest_version(self) -> int:
        """Version of the oldest token of the group."""
        return min(s.oldest_version for s in self.samples)

    @property
    def newest_version(self) -> int:
        """Version of the newest token of the group."""
        return max(s.newest_version for s in self.samples)

    @property
    def num_tokens(self) -> int:
        """Response tokens of the group, generated and observed."""
        return sum(s.num_tokens for s in self.samples)

    @property
    def num_generated(self) -> int:
        """Response tokens of the group that an engine made: those that the ledger counts."""
        return sum(s.num_generated for s in self.samples)
