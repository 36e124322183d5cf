"""Whether engines have the trainer's weights: what both score, and how far apart they may be.

Both sides compute the log-probs of the same few sequences, the trainer from the model that it has
gathered, the engine from what it has received. Pure: neither torch nor ray.

Two rules find a mismatch:
    * The log-probs differ by more than rounding explains (`Limits`).
    * The trainer's have moved since the last check by more than rounding, and the engine's have not
      followed: it still has the weights of the version before (`follows`).
"""

from __future__ import annotations

import math
import random
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

NUM_SEQUENCES = 4
SEQUENCE_TOKENS = 64
"""Log-probs of 252 tokens; a forward pass of 256."""

Logprobs = Sequence[Sequence[float]]
"""Of each sequence, one number for each token but the first."""
Probes = Mapping[str, Sequence[Sequence[float]]]
"""By module: for each of its outputs that are looked at apart (an expert), some projections."""

_ROUNDING = {"float32": 2.0**-24, "bfloat16": 2.0**-8}
"""Largest relative error of rounding to a data type."""
_GAP_FACTOR = {"float32": 1024.0, "bfloat16": 32.0}
_MODULE_LIMIT = {"float32": 1e-3, "bfloat16": 0.04}
"""Relative difference of a module's output beyond which it is named."""
_STANDS_STILL = 0.5
"""At a token an engine has not followed that has moved by less than this share of the trainer's
way."""
_MOST = 0.7
"""Share of the tokens at which one with stale weights has not."""
_NUM_NAMED = 4
_LARGEST_EXPONENT = 50.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Largest differences of log-probs, in nats, that rounding explains."""

    gap: float
    """Of a single token."""
    k3: float
    """Mean over the tokens of exp(d) - 1 - d (k3 of http://joschu.net/blog/kl-approx.html)."""

    @classmethod
    def of(
        cls, dtypes: Sequence[str], *, num_layers: int, ours: Logprobs, tolerance: float
    ) -> Limits:
        """Limits of a pair of models.

        A log-prob carries the rounding errors of every layer, which add up like a random walk, in
        proportion to the size of the logits, of which that of the log-probs tells: a gap of
        factor * rounding * sqrt(1 + layers) * max(1, mean of -log-probs). docs/weight_check.md has
        the measurements behind the factor. A k3 at its limit belongs to gaps an eighth as
        large, all over.

        Args:
            dtypes: In which the two compute; the coarser one decides.
            num_layers: Decoder layers.
            ours: The trainer's log-probs.
            tolerance: Factor of the gap.
        """
        dtype = max(dtypes, key=lambda name: _ROUNDING[name])
        values = _flat(ours)
        size = max(1.0, -sum(values) / max(1, len(values)))
        noise = _ROUNDING[dtype] * math.sqrt(1 + num_layers) * size
        gap = tolerance * _GAP_FACTOR[dtype] * noise
        return cls(gap=gap, k3=gap * gap / 128)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """How far apart the two are."""

    gap: float
    """Largest absolute difference of a log-prob; NaN where one is, or is missing."""
    k3: float
    num_tokens: int

    def is_within(self, limits: Limits) -> bool:
        """Whether rounding explains it; never with a NaN."""
        return self.gap <= limits.gap and self.k3 <= limits.k3


def canary_sequences(vocab_size: int, longest: int) -> tuple[tuple[int, ...], ...]:
    """Fixed token ids of a model, from the middle of its vocabulary: special ones are at its ends.

    Args:
        vocab_size: Of the model.
        longest: Most tokens of a sequence.
    """
    rng = random.Random(0)
    ids = range(vocab_size // 8, vocab_size - vocab_size // 8)
    length = min(longest, SEQUENCE_TOKENS)
    return tuple(tuple(rng.choice(ids) for _ in range(length)) for _ in range(NUM_SEQUENCES))


def compare(ours: Logprobs, theirs: Logprobs) -> Comparison:
    """Compare the log-probs of the trainer and of an engine, which may have cut all sequences to
    one length; what is missing otherwise counts as NaN."""
    longest = max(map(len, theirs), default=0)
    is_whole = [min(len(values), longest) for values in ours] == [len(values) for values in theirs]
    gaps = _differences(ours, theirs)
    if not gaps or not is_whole or not all(map(math.isfinite, gaps)):
        return Comparison(gap=math.nan, k3=math.nan, num_tokens=len(gaps))
    largest = max(map(abs, gaps))
    k3 = sum(math.expm1(min(d, _LARGEST_EXPONENT)) - d for d in gaps) / len(gaps)
    return Comparison(gap=largest, k3=k3, num_tokens=len(gaps))


def follows(
    ours: Logprobs, theirs: Logprobs, ours_before: Logprobs, theirs_before: Logprobs
) -> bool:
    """Whether an engine has gone along with the trainer since a check that both passed.

    An engine with stale weights stands still, whatever its rounding errors are: a step that is too
    small for `Limits` shows here. One that has followed may stand still at some tokens, where
    rounding undoes the step, but not at most. It is looked at once the trainer has moved by more
    than the two differed before (by the medians of the tokens); else rounding to the engine's data
    type may have eaten the step.
    """
    ours_moved = [abs(d) for d in _differences(ours, ours_before)]
    theirs_moved = [abs(d) for d in _differences(theirs, theirs_before)]
    noise = [abs(d) for d in _differences(ours_before, theirs_before)]
    pairs = list(zip(ours_moved, theirs_moved, strict=False))
    if not pairs or statistics.median(a for a, _ in pairs) <= statistics.median(noise):
        return True
    return sum(b <= _STANDS_STILL * a for a, b in pairs) < _MOST * len(pairs)


def _differences(a: Logprobs, b: Logprobs) -> list[float]:
    return [x - y for xs, ys in zip(a, b, strict=False) for x, y in zip(xs, ys, strict=False)]


def _flat(logprobs: Logprobs) -> list[float]:
    return [value for values in logprobs for value in values]


# -- which modules ---------------------------------------------------------------------------------


def worst_modules(ours: Probes, theirs: Probes, dtypes: Sequence[str]) -> str:
    """Name the groups whose modules compute otherwise in the engine, the worst ones first.

    Args:
        ours: Projections of the trainer's modules.
        theirs: Those of the engine's, by the same names where it has the same modules.
        dtypes: In which the two compute.

    Returns:
        As "layer 1 (k_proj by 140 %, q_proj by 98 %), head (by 12 %)".
    """
    limit = max(_MODULE_LIMIT[dtype] for dtype in dtypes)
    groups: dict[str, list[tuple[float, str]]] = {}
    num_compared = 0
    for name, rows in ours.items():
        found = theirs.get(name) or _of_same_place(name, theirs)
        if found is None or len(found) != len(rows):
            continue
        num_compared += 1
        for number, (a, b) in enumerate(zip(rows, found, strict=True)):
            difference = _relative(a, b)
            if not difference <= limit:
                group, part = _place(name, number if len(rows) > 1 else None)
                groups.setdefault(group, []).append((difference, part))
    unseen = "" if num_compared == len(ours) else f"; {len(ours) - num_compared} not compared"
    if not groups:
        return f"not localised: {num_compared} modules compute alike{unseen}"
    ranked = sorted(groups.items(), key=lambda item: -max(d for d, _ in item[1]))
    named = [f"{group} ({_parts(found)})" for group, found in ranked[:_NUM_NAMED]]
    more = f" and {len(ranked) - _NUM_NAMED} more groups" if len(ranked) > _NUM_NAMED else ""
    return ", ".join(named) + more + unseen


def _parts(found: list[tuple[float, str]]) -> str:
    worst = sorted(found, reverse=True)[:_NUM_NAMED]
    return ", ".join(f"{part} by {100 * d:.3g} %".strip() for d, part in worst)


def _relative(a: Sequence[float], b: Sequence[float]) -> float:
    size = max(math.hypot(*a), math.hypot(*b))
    return math.dist(a, b) / size if size else 0.0


def _place(name: str, expert: int | None) -> tuple[str, str]:
    """Group of a module, and what it is called there."""
    layer = re.search(r"\.(\d+)\.", name)
    last = name.rpartition(".")[2]
    if layer is not None and expert is not None:
        return f"experts of layer {layer[1]}", f"expert {expert}"
    if layer is not None:
        return f"layer {layer[1]}", last
    if last == "lm_head":
        return "head", ""
    return ("embedding", "") if "emb" in last or last == "wte" else (last, "")


def _of_same_place(name: str, probes: Probes) -> Sequence[Sequence[float]] | None:
    """A module with another path, but the same group and name, if there is just one."""
    place = _place(name, None)
    found = [rows for other, rows in probes.items() if _place(other, None) == place]
    return found[0] if len(found) == 1 else None
