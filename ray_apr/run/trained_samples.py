"""The samples that a run has trained, with their texts: Parquet files of its folder, one a step.

    samples/step-000012.parquet        ray.data.read_parquet("RUN_DIR/samples")

A file is written whole, after its step has ended. Where a run goes on from a checkpoint, the files
of the steps after it go, as those rows of ``samples.jsonl`` do.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ray_apr.core.sample import Prompt, Sample
from ray_apr.run.folder import not_written

SAMPLES_FOLDER = "samples"
_FILE = re.compile(r"step-(\d{6,})\.parquet")
_OF_STEP = {
    "step": pa.int32(),
    "staleness": pa.int32(),  # null: no token of it is in the loss
    "num_masked_tokens": pa.int32(),
    "num_turns": pa.int32(),
    "num_prompt_tokens": pa.int32(),
    "prompt": pa.large_string(),
    "prompt_row": pa.large_string(),
}
_OF_SAMPLE = (
    "sample_id", "group_id", "response_text", "reward", "reward_metrics", "finish_reason",
    "num_interruptions", "num_generated", "segment_versions", "segment_lengths",
    "segment_generated", "token_ids",
)  # fmt: skip


def table_of(
    rows: Sequence[Mapping[str, Any]], samples: Sequence[Sample], prompt_column: str
) -> pa.Table:
    """The samples of a step as a table.

    Args:
        rows: What the buffer knows of the step's samples (`scheduling.stock.sample_rows`); those
            whose sample is not given are left out.
        samples: Some of them, with their texts.
        prompt_column: Of the dataset.

    Returns:
        A row a sample: what ``samples.jsonl`` has of its age; ``prompt`` as a text, the row of
        the dataset as JSON; ``response_text``, reward and its parts (JSON); ``token_ids`` of the
        response, and of each segment the policy version, the number of tokens, and whether an
        engine generated it.
    """
    from ray_apr.data.saved_samples import samples_table  # with Ray, which a reader need not load

    by_id = {row["sample_id"]: row for row in rows}
    found = [by_id[sample.sample_id] for sample in samples]
    prompts = {sample.group_id: sample.prompt for sample in samples}
    prompt_rows = {
        name: json.dumps(dict(prompt.row), default=_plain) for name, prompt in prompts.items()
    }
    columns: dict[str, list[Any]] = {
        "prompt": [prompt_text(sample.prompt, prompt_column) for sample in samples],
        "prompt_row": [prompt_rows[sample.group_id] for sample in samples],
    }
    for name in _OF_STEP.keys() - columns.keys():
        columns[name] = [row[name] for row in found]
    made = samples_table([samples])
    arrays = {name: pa.array(columns[name], kind) for name, kind in _OF_STEP.items()}
    return pa.table({**arrays, **{name: made[name] for name in _OF_SAMPLE}})


def prompt_text(prompt: Prompt, column: str) -> str:
    """What a person reads of a prompt: its text, or messages and whatever else it is as JSON."""
    value = prompt.row.get(column)
    return value if isinstance(value, str) else json.dumps(value, default=_plain)


def _plain(value: Any) -> Any:
    """What JSON takes in place of a value that it does not: of arrays lists, of bytes their
    number."""
    if isinstance(value, bytes | bytearray):
        return f"<{len(value)} bytes>"
    return value.tolist() if hasattr(value, "tolist") else str(value)


def write_step(folder: Path, step: int, table: pa.Table) -> None:
    """Write the samples of a step into a run folder, whole or not at all.

    Raises:
        ResourceError: If that cannot be done, e.g. on a full disk.
    """
    file = _file(folder, step)
    new = file.with_name(f".{file.name}.new")
    try:
        file.parent.mkdir(exist_ok=True)
        pq.write_table(table, new, compression="zstd")
        with new.open("rb") as written:
            os.fsync(written.fileno())
        new.replace(file)
    except OSError as error:
        new.unlink(missing_ok=True)
        raise not_written(file, error) from error


def saved_steps(folder: Path) -> list[int]:
    """Steps of a run folder whose samples are there, in order."""
    files = (folder / SAMPLES_FOLDER).glob("step-*.parquet")
    return sorted(int(found[1]) for file in files if (found := _FILE.fullmatch(file.name)))


def read_step(folder: Path, step: int, sample_id: str | None = None) -> list[dict[str, Any]]:
    """The samples of a step, a mapping of columns each.

    Args:
        folder: Of the run.
        step: One of `saved_steps`.
        sample_id: This one alone; None takes all.

    Raises:
        OSError: If the file is gone, or cannot be read.
        pa.ArrowInvalid: If it is no file of samples, as a crash of the machine may leave it.
    """
    wanted = None if sample_id is None else [("sample_id", "=", sample_id)]
    table = pq.read_table(_file(folder, step), filters=wanted)
    rows: list[dict[str, Any]] = table.to_pylist()
    for row in rows:
        row["reward_metrics"] = json.loads(row["reward_metrics"])
    return rows


def drop_from(folder: Path, step: int) -> None:
    """Remove the samples of a step and of all after it, which are trained once more."""
    for late in saved_steps(folder):
        if late >= step:
            _file(folder, late).unlink(missing_ok=True)


def _file(folder: Path, step: int) -> Path:
    return folder / SAMPLES_FOLDER / f"step-{step:06d}.parquet"
