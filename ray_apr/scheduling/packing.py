"""Packing: which rank trains which samples, in which micro-batches.

Invariants:
    * Every sample is in exactly one micro-batch of one rank.
    * All ranks have the same number of micro-batches, since each one is a round of collectives.
    * A micro-batch costs its tokens if it is packed, and ``number of samples * longest`` if it is
      padded: at most the limit; a longer sample is alone in its micro-batch.
    * The tokens of two ranks differ by no more than the longest sample.
    * No micro-batch is empty if the number of samples is a multiple of the number of ranks.
    * The plan depends on the lengths alone.
"""

from __future__ import annotations

from collections.abc import Sequence

MicroBatches = tuple[tuple[int, ...], ...]


def plan_micro_batches(
    lengths: Sequence[int], *, num_ranks: int, micro_batch_tokens: int, packed: bool = False
) -> tuple[MicroBatches, ...]:
    """Spread samples over ranks and micro-batches.

    Samples are dealt from the longest to the shortest, in rounds of one sample for each rank, the
    longest of a round to the rank with the fewest tokens so far. A round never widens the gap
    between two ranks beyond the longest sample, and all ranks get as many samples (within one), so
    the micro-batches at one position have similar lengths on all ranks.

    Args:
        lengths: Tokens of each sample, prompt and response.
        num_ranks: Train workers.
        micro_batch_tokens: Most tokens of a micro-batch, padding included.
        packed: Whether micro-batches have no padding.

    Returns:
        ``plan[rank][micro_batch]`` -> indices into `lengths`, the longest samples first.

    Raises:
        ValueError: If a number is not positive, or there are fewer samples than ranks.

    Example:
        >>> plan_micro_batches([8, 2, 7, 3], num_ranks=2, micro_batch_tokens=8)
        (((0,), (1,)), ((2,), (3,)))
    """
    if num_ranks < 1 or micro_batch_tokens < 1 or min(lengths, default=1) < 1:
        raise ValueError(
            f"num_ranks = {num_ranks}, micro_batch_tokens = {micro_batch_tokens} and the shortest "
            f"length = {min(lengths, default=1)} must all be at least 1"
        )
    if len(lengths) < num_ranks:
        raise ValueError(f"{len(lengths)} samples cannot give each of {num_ranks} ranks one")
    fill = _fill_packed if packed else _fill_padded
    plan = [fill(ranked, lengths, micro_batch_tokens) for ranked in _deal(lengths, num_ranks)]
    most = max(len(micro_batches) for micro_batches in plan)
    return tuple(_split(micro_batches, lengths, most) for micro_batches in plan)


def _deal(lengths: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Indices of each rank, the longest first."""
    by_length = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    dealt: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for start in range(0, len(by_length), num_ranks):
        emptiest_first = sorted(range(num_ranks), key=lambda r: (loads[r], r))
        chosen = by_length[start : start + num_ranks]
        for rank, index in zip(emptiest_first, chosen, strict=False):
            dealt[rank].append(index)
            loads[rank] += lengths[index]
    return dealt


def _fill_packed(indices: list[int], lengths: Sequence[int], limit: int) -> list[list[int]]:
    """Put each index, the longest first, into the first micro-batch that has room."""
    micro_batches: list[list[int]] = []
    loads: list[int] = []
    for index in indices:
        at = next((i for i, n in enumerate(loads) if n + lengths[index] <= limit), len(loads))
        if at == len(loads):
            micro_batches.append([])
            loads.append(0)
        micro_batches[at].append(index)
        loads[at] += lengths[index]
    return micro_batches


def _fill_padded(indices: list[int], lengths: Sequence[int], limit: int) -> list[list[int]]:
    """Cut indices, the longest first, into the fewest micro-batches within the limit."""
    micro_batches: list[list[int]] = []
    for index in indices:
        last = micro_batches[-1] if micro_batches else None
        if last is not None and (len(last) + 1) * lengths[last[0]] <= limit:
            last.append(index)
        else:
            micro_batches.append([index])
    return micro_batches


def _split(micro_batches: list[list[int]], lengths: Sequence[int], count: int) -> MicroBatches:
    """Halve the costliest micro-batches until there are `count`; then add empty ones."""
    parts = list(micro_batches)
    while len(parts) < count:
        costs = [len(p) * lengths[p[0]] if len(p) > 1 else 0 for p in parts]
        at = max(range(len(parts)), key=lambda i: (costs[i], -i))
        if not costs[at]:
            parts.extend([[]] * (count - len(parts)))
            break
        half = (len(parts[at]) + 1) // 2
        parts[at : at + 1] = [parts[at][:half], parts[at][half:]]
    return tuple(tuple(p) for p in parts)
