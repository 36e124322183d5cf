"""Samples as an Arrow table: what a checkpoint has of responses under way.

A row is a sample; rows of a group follow each other. Token ids, log-probs and policy versions come
back as they were, bit by bit. Of the prompt a row has the id and a digest of its token ids.

Whoever reads such a table must trust its writer: the state of an environment is pickled.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import ray.cloudpickle

from ray_apr.core.exceptions import ConfigError
from ray_apr.core.packed import LogProbs, Packed, TokenIds
from ray_apr.core.sample import FinishReason, Prompt, Sample, Segment, pack_ids

_PLAIN = (
    "sample_id", "group_id", "max_response_tokens", "num_interruptions", "num_turns",
    "awaits_step", "turn_text", "response_text", "reward", "num_deaths",
)  # fmt: skip
"""Fields of a sample that are columns of the same name."""
SCHEMA = pa.schema(
    {
        "sample_id": pa.string(),
        "group_id": pa.string(),
        "is_handed_over": pa.bool_(),
        "prompt_digest": pa.string(),
        "max_response_tokens": pa.int32(),
        "num_interruptions": pa.int32(),
        "num_deaths": pa.int32(),
        "num_turns": pa.int32(),
        "awaits_step": pa.bool_(),
        "turn_text": pa.large_string(),
        "response_text": pa.large_string(),
        "reward": pa.float64(),
        "reward_metrics": pa.string(),  # JSON
        "finish_reason": pa.string(),
        "environment_state": pa.large_binary(),  # pickled; null where there is none
        "num_generated": pa.int32(),
        "segment_versions": pa.list_(pa.int32()),
        "segment_lengths": pa.list_(pa.int32()),
        "segment_generated": pa.list_(pa.bool_()),
        "token_ids": pa.large_list(pa.int32()),
        "logprobs": pa.large_list(pa.float64()),
        "support": pa.large_list(pa.large_binary()),
    }
)


_MADE: Mapping[str, Callable[[Sample], Any]] = {
    "prompt_digest": lambda s: _digest(s.prompt),
    "reward_metrics": lambda s: json.dumps(dict(s.reward_metrics)),
    "finish_reason": lambda s: s.finish_reason and s.finish_reason.value,
    "environment_state": lambda s: (
        ray.cloudpickle.dumps(s.environment_state) if s.environment_state else None
    ),
    "num_generated": lambda s: s.num_generated,
    "segment_versions": lambda s: [segment.policy_version for segment in s.segments],
    "segment_lengths": lambda s: [len(segment.token_ids) for segment in s.segments],
    "segment_generated": lambda s: [segment.is_generated for segment in s.segments],
    "support": lambda s: s.support,
}
"""Columns that are made of a sample."""


def samples_table(
    live: Iterable[Sequence[Sample]], handed_over: Iterable[Sequence[Sample]] = ()
) -> pa.Table:
    """The samples of some groups as a table of `SCHEMA`: those in the buffer first.

    Made to run in a thread beside an event loop: it holds the interpreter for a sample at a time.
    """
    in_buffer = list(itertools.chain.from_iterable(handed_over))
    samples = [*in_buffer, *itertools.chain.from_iterable(live)]
    columns = {name: [getattr(sample, name) for sample in samples] for name in _PLAIN}
    columns["is_handed_over"] = [i < len(in_buffer) for i in range(len(samples))]
    columns |= {name: [of(sample) for sample in samples] for name, of in _MADE.items()}
    arrays = {name: pa.array(column, SCHEMA.field(name).type) for name, column in columns.items()}
    segments = [segment for sample in samples for segment in sample.segments]
    ends = list(itertools.accumulate((sample.num_tokens for sample in samples), initial=0))
    arrays["token_ids"] = _lists([s.token_ids for s in segments], ends, TokenIds, pa.int32())
    arrays["logprobs"] = _lists([s.logprobs for s in segments], ends, LogProbs, pa.float64())
    return pa.Table.from_pydict(arrays, schema=SCHEMA)


def _lists(
    parts: Sequence[Any], ends: Sequence[int], of: type[Packed[Any]], kind: pa.DataType
) -> pa.Array:
    """Lists of numbers that are in several parts each."""
    buffer = pa.allocate_buffer(ends[-1] * of.WIDTH)
    view, offset = memoryview(buffer).cast("B"), 0
    for part in parts:
        data = part.data
        view[offset : offset + len(data)] = data
        offset += len(data)
    flat = pa.Array.from_buffers(kind, ends[-1], [None, buffer])
    return pa.LargeListArray.from_arrays(pa.array(ends, pa.int64()), flat)


def groups_of(
    table: pa.Table, prompt_of: Callable[[str], Prompt]
) -> tuple[list[tuple[Sample, ...]], list[tuple[Sample, ...]]]:
    """The live groups of a table, and those that were handed over, in its order.

    Args:
        table: Of `samples_table`.
        prompt_of: Gives the prompt of a group's id.

    Raises:
        ConfigError: If a prompt has other tokens than when the table was written.
    """
    rows = table.drop_columns(["token_ids", "logprobs"]).to_pylist()
    tokens = [table[name].combine_chunks() for name in ("token_ids", "logprobs")]
    live: dict[str, list[Sample]] = {}
    handed_over: dict[str, list[Sample]] = {}
    prompts: dict[str, Prompt] = {}
    for index, row in enumerate(rows):
        group_id = row["group_id"]
        if group_id not in prompts:
            prompts[group_id] = _checked(prompt_of(group_id), row["prompt_digest"])
        ids, logprobs = (column[index].values.to_numpy().tobytes() for column in tokens)
        sample = _sample(row, prompts[group_id], TokenIds(ids), LogProbs(logprobs))
        groups = handed_over if row["is_handed_over"] else live
        groups.setdefault(group_id, []).append(sample)
    return [tuple(group) for group in live.values()], [tuple(g) for g in handed_over.values()]


def _sample(row: dict[str, Any], prompt: Prompt, ids: TokenIds, logprobs: LogProbs) -> Sample:
    segments, begin, support = [], 0, row["support"]
    for version, length, is_generated in zip(
        row["segment_versions"], row["segment_lengths"], row["segment_generated"], strict=True
    ):
        end = begin + length
        segments.append(
            Segment(
                policy_version=version,
                token_ids=ids[begin:end],
                logprobs=logprobs[begin:end],
                is_generated=is_generated,
                support=tuple(support[begin:end]) if is_generated else (),
            )
        )
        begin = end
    reason, state = row["finish_reason"], row["environment_state"]
    return Sample(
        **{name: row[name] for name in _PLAIN if name in row},  # older ones have fewer
        prompt=prompt,
        segments=tuple(segments),
        finish_reason=None if reason is None else FinishReason(reason),
        environment_state={} if state is None else ray.cloudpickle.loads(state),
        reward_metrics=json.loads(row["reward_metrics"]),
    )


def _digest(prompt: Prompt) -> str:
    return hashlib.blake2b(pack_ids(prompt.token_ids), digest_size=8).hexdigest()


def _checked(prompt: Prompt, digest: str) -> Prompt:
    if _digest(prompt) != digest:
        raise ConfigError(
            "prompts",
            f"prompt {prompt.prompt_id}",
            "has other tokens than the checkpoint's responses continue; give the same dataset and "
            "tokenizer, or begin a new run with the checkpoint's model",
        )
    return prompt


def write_samples(file: Path, table: pa.Table) -> str:
    """Write a table as an Arrow file; returns the digest that `read_samples` wants."""
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    with file.open("rb") as written:
        return hashlib.file_digest(written, "sha256").hexdigest()


def read_samples(data: bytes, digest: str) -> pa.Table:
    """Read what `write_samples` wrote.

    Raises:
        ValueError: If it is not what was written.
    """
    if hashlib.sha256(data).hexdigest() != digest:
        raise ValueError("the file is not what was written")
    return pa.ipc.open_file(pa.py_buffer(data)).read_all()
