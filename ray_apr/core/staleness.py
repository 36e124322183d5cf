"""Version arithmetic: the only place where policy versions are added or subtracted.

Invariants:
    * ``policy_version`` is an integer, 0 for the base model, +1 for each step: for each
      batch that is trained, however many optimizer steps that takes (``train.mini_batches``,
      ``train.epochs``).
    * ``staleness`` = trainer's version at consumption - version of the OLDEST segment; the time a
      sample spends in a queue therefore counts.
    * Capacity counts what is alive now, not what was ever started, so that it stays right when a
      run is restored at a version > 0 (a counter that restarts at 0 would open the gate wide).
"""

from __future__ import annotations

import math
from collections.abc import Mapping


def next_version(policy_version: int) -> int:
    """Version of the policy after one more batch."""
    return policy_version + 1


def staleness(policy_version: int, oldest_version: int) -> int:
    """Age in versions of a sample when version `policy_version` is about to be trained.

    Raises:
        ValueError: If the sample is newer than the trainer.
    """
    age = policy_version - oldest_version
    if age < 0:
        raise ValueError(
            f"sample of version {oldest_version} is newer than the trainer at {policy_version}"
        )
    return age


def is_stale(policy_version: int, oldest_version: int, max_staleness: int) -> bool:
    """Whether a sample may no longer be trained at `policy_version`."""
    return staleness(policy_version, oldest_version) > max_staleness


def oldest_trainable(policy_version: int, max_staleness: int) -> int:
    """Version of the oldest token that may be trained at `policy_version`."""
    return policy_version - max_staleness


def leaves_none_behind(
    ready_by_version: Mapping[int, int],
    unfinished_by_version: Mapping[int, int],
    *,
    policy_version: int,
    max_staleness: int,
    batch_size: int,
) -> bool:
    """Whether a batch of the oldest ready samples lets every other one be trained in time.

    Earliest deadline first: of all samples whose oldest token has version v or an older one, at
    most ``B * (v - (p - eta))`` can be left to the batches after this one, which trains at p.

    Args:
        ready_by_version: Samples that can be trained, by the version of their oldest token.
        unfinished_by_version: Samples that still generate or wait for their reward.
        policy_version: Version p that the batch trains at.
        max_staleness: The bound eta, in policy versions.
        batch_size: Samples B of one step.
    """
    ready = total = 0
    oldest = oldest_trainable(policy_version, max_staleness)
    for version in sorted({*ready_by_version, *unfinished_by_version}):
        ready += ready_by_version.get(version, 0)
        total += ready_by_version.get(version, 0) + unfinished_by_version.get(version, 0)
        due = total - batch_size * max(0, version - oldest)
        if ready < min(due, batch_size):
            return False
    return True


def staleness_capacity(*, batch_size: int, max_staleness: int, num_live: int) -> int:
    """How many more samples may be started without breaking the staleness bound.

    AReaL (2505.24298, eq. 3) admits sample N only while ``floor((N-1)/B) <= i + eta``, i.e.
    ``(eta + i + 1) * B - (accepted + running)``. At version i exactly ``i * B`` of the accepted
    ones are trained, which leaves ``(eta + 1) * B - live``.

    Args:
        batch_size: Samples of one step.
        max_staleness: The bound eta, in policy versions.
        num_live: Samples that were started and are neither trained nor dropped; those of the step
            that is being trained count as live until it ends.

    Returns:
        Number of samples, never negative.
    """
    return max(0, (max_staleness + 1) * batch_size - num_live)


def supplementation_capacity(
    *, batch_size: int, oversampling_factor: float, num_unfinished: int
) -> int:
    """How many more samples may generate at once: ``ceil(factor * B) - unfinished``, at least 0.

    Args:
        batch_size: Samples of one step.
        oversampling_factor: Samples kept under generation, in batches (>= 1).
        num_unfinished: Samples waiting, in flight or interrupted.
    """
    return max(0, math.ceil(oversampling_factor * batch_size) - num_unfinished)


def num_untrained(
    *, num_buffered: int, batch_size: int, trainer_version: int, policy_version: int
) -> int:
    """How many samples the buffer holds for steps from `policy_version` on, at least 0.

    The buffer and the engines learn of a finished step at different moments. Each step makes one
    version and trains one batch, so the count is corrected by a batch for each version between:
    samples of a finished step that the buffer has not yet been told of are no longer live, and
    those that it has already dropped stay live until the engines have the version they made
    (otherwise ``max_staleness=0`` would start a batch under the old weights).

    Args:
        num_buffered: Samples that the buffer reported.
        batch_size: Samples of one step.
        trainer_version: Version of the trainer when the buffer reported: it has been told that
            every step before this version is trained.
        policy_version: Version of the engines.
    """
    return max(0, num_buffered + batch_size * (trainer_version - policy_version))
