"""Traces: measured or made lengths, one row a sample, that a simulation or a benchmark replays."""

from __future__ import annotations

import gzip
import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray_apr.exceptions import ConfigError

COLUMNS = ("prompt_id", "sample_index", "prompt_tokens", "response_tokens", "reward_s")


@dataclass(frozen=True, slots=True)
class TraceSample:
    """One response."""

    response_tokens: int
    reward_s: float
    """Time that its reward takes."""


@dataclass(frozen=True, slots=True)
class TraceGroup:
    """One prompt with its responses."""

    prompt_id: str
    prompt_tokens: int
    samples: tuple[TraceSample, ...]
    decile: int
    """0 ... 9: where its longest response is among those of all prompts."""

    def sample(self, index: int) -> TraceSample:
        """Response `index`; a trace with smaller groups is cycled."""
        return self.samples[index % len(self.samples)]


class Trace:
    """Prompts of a trace.

    Args:
        rows: Mappings with the columns of `COLUMNS`.

    Raises:
        ConfigError: If there is no row, a column is missing, or a value makes no sense.
    """

    def __init__(self, rows: Sequence[Mapping[str, Any]]) -> None:
        by_prompt: dict[str, list[tuple[int, int, TraceSample]]] = {}
        for number, row in enumerate(rows):
            prompt_id, index, prompt_tokens, sample = _checked(number, row)
            by_prompt.setdefault(prompt_id, []).append((index, prompt_tokens, sample))
        if not by_prompt:
            raise ConfigError("trace", 0, "has no row; give one row for each sample")
        longest = {p: max(s.response_tokens for _, _, s in m) for p, m in by_prompt.items()}
        ranked = sorted(by_prompt, key=lambda p: (longest[p], p))
        deciles = {p: 10 * rank // len(ranked) for rank, p in enumerate(ranked)}
        self.groups: tuple[TraceGroup, ...] = tuple(
            TraceGroup(
                prompt_id,
                members[0][1],
                tuple(s for _, _, s in sorted(members, key=lambda m: m[0])),
                deciles[prompt_id],
            )
            for prompt_id, members in by_prompt.items()
        )

    @property
    def samples(self) -> Iterator[tuple[TraceGroup, TraceSample]]:
        """Each sample with its group."""
        return ((group, sample) for group in self.groups for sample in group.samples)

    def cycle(self, seed: int) -> Iterator[TraceGroup]:
        """All prompts without end, in a new order of the seed in each epoch."""
        generator = random.Random(seed)
        order = list(self.groups)
        while True:
            generator.shuffle(order)
            yield from order

    @classmethod
    def from_file(cls, path: str | Path) -> Trace:
        """Read Parquet or JSON lines, plain or gzipped.

        Raises:
            ConfigError: If the file cannot be read.
        """
        path = Path(path)
        try:
            return cls(_read(path))
        except (OSError, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            remedy = f"cannot be read as Parquet or JSON lines: {error}"
            raise ConfigError("trace", str(path), remedy) from error


def _read(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".parquet":
        import pyarrow.parquet  # slow to load, and only needed here

        rows: list[dict[str, Any]] = pyarrow.parquet.read_table(path).to_pylist()
        return rows
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return [json.loads(line) for line in text.splitlines() if line.strip()]


def _checked(number: int, row: Mapping[str, Any]) -> tuple[str, int, int, TraceSample]:
    """The values of a row; prompt id, sample index, prompt tokens, and the rest."""
    missing = [column for column in COLUMNS[:-1] if column not in row]
    if missing:
        raise ConfigError(
            "trace", f"row {number}", f"lacks {', '.join(missing)}; needs {', '.join(COLUMNS)}"
        )
    values = [row["sample_index"], row["prompt_tokens"], row["response_tokens"]]
    reward_s = row.get("reward_s", 0.0)
    whole = all(isinstance(v, int) and not isinstance(v, bool) and v >= 0 for v in values)
    if not whole or values[2] < 1:
        raise ConfigError(
            f"trace row {number}", dict(row), "sizes must be whole numbers, response_tokens over 0"
        )
    if not isinstance(reward_s, int | float) or not math.isfinite(reward_s) or reward_s < 0:
        raise ConfigError(f"trace row {number}.reward_s", reward_s, "must be seconds of at least 0")
    sample = TraceSample(response_tokens=values[2], reward_s=float(reward_s))
    return str(row["prompt_id"]), values[0], values[1], sample
