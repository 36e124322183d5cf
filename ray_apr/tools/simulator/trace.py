"""Traces: measured or made lengths, one row a sample, that a simulation or a benchmark replays."""

from __future__ import annotations

import gzip
import io
import itertools
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray_apr.core.checks import is_number, is_whole
from ray_apr.core.exceptions import ConfigError
from ray_apr.scheduling.order import prompt_order

COLUMNS = ("prompt_id", "sample_index", "prompt_tokens", "response_tokens", "reward_s")
_MOST = 10**12
"""Of any number of a row."""
_GZIP, _PARQUET = b"\x1f\x8b", b"PAR1"


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
        """All prompts without end, in the order in which a run of this seed has them."""
        for epoch in itertools.count():
            order = prompt_order(len(self.groups), seed=seed, epoch=epoch)
            yield from (self.groups[number] for number in order)

    @classmethod
    def from_file(cls, path: str | Path) -> Trace:
        """Read Parquet or JSON lines, plain or gzipped; the content says which, not the name.

        Raises:
            ConfigError: If the file cannot be read, or holds no trace.
        """
        try:
            data = Path(path).expanduser().read_bytes()
            if data.startswith(_GZIP):
                data = gzip.decompress(data)
        except (OSError, EOFError, zlib.error) as error:
            raise ConfigError("trace", str(path), f"cannot be read: {error}") from error
        return cls(_parquet(data, path) if data.startswith(_PARQUET) else _json_lines(data, path))


def _parquet(data: bytes, path: str | Path) -> list[dict[str, Any]]:
    import pyarrow  # slow to load, and only needed here
    import pyarrow.parquet

    try:
        rows: list[dict[str, Any]] = pyarrow.parquet.read_table(io.BytesIO(data)).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError("trace", str(path), f"cannot be read as Parquet: {error}") from error
    return rows


def _json_lines(data: bytes, path: str | Path) -> list[dict[str, Any]]:
    rows = []
    for number, line in enumerate(data.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            rows.append(json.loads(line))
        except ValueError as error:  # no JSON, or no UTF-8
            remedy = f"line {number} cannot be read as JSON: {error}; give Parquet or JSON lines"
            raise ConfigError("trace", str(path), remedy) from error
    return rows


def _checked(number: int, row: Any) -> tuple[str, int, int, TraceSample]:
    """The values of a row; prompt id, sample index, prompt tokens, and the rest."""
    name = f"trace row {number}"
    if not isinstance(row, Mapping):
        raise ConfigError(name, row, f"must be an object with {', '.join(COLUMNS)}")
    missing = [column for column in COLUMNS[:-1] if row.get(column) is None]
    if missing:
        raise ConfigError(name, dict(row), f"lacks {', '.join(missing)}")
    for column, minimum in (("sample_index", 0), ("prompt_tokens", 0), ("response_tokens", 1)):
        value = row[column]
        if not is_whole(value, minimum) or value > _MOST:
            remedy = f"must be a whole number of at least {minimum}, and at most {_MOST:,}"
            raise ConfigError(f"{name}.{column}", value, remedy)
    reward_s = row.get("reward_s", 0.0)
    if not is_number(reward_s) or reward_s < 0:
        raise ConfigError(f"{name}.reward_s", reward_s, "must be seconds of at least 0")
    sample = TraceSample(response_tokens=row["response_tokens"], reward_s=float(reward_s))
    return str(row["prompt_id"]), row["sample_index"], row["prompt_tokens"], sample
