"""Trained samples of a run folder, read by a person: which ones, and their texts by policy version.

Texts come from the token ids, segment by segment, where the run's tokenizer is at hand; else a
response is one piece.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import pyarrow as pa

from ray_apr.core.exceptions import ConfigError, one_line
from ray_apr.run.failed_groups import DROPPED_FILE
from ray_apr.run.folder import CONFIG_FILE, read_object, read_rows
from ray_apr.run.trained_samples import SAMPLES_FOLDER, read_step, saved_steps

Decode = Callable[[Sequence[int]], str]
Order = Literal["worst", "best", "longest"]
ORDERS: tuple[Order, ...] = get_args(Order)
_BROKEN = "\ufffd"
"""What a tokenizer makes of the first bytes of a character whose others are in the next token."""
_CONTEXT = 8
"""Tokens before a segment that may have a say in how its first ones are written."""
_MOST_COLUMNS, _LONGEST_COLUMN = 12, 200
"""Of the row of the dataset: how many are shown, and how many characters of each."""
_COLORS = (36, 33, 35, 32, 34, 31)
"""Of a terminal, for policy versions in turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Text that was made under one policy version."""

    text: str
    policy_version: int | None
    """None where it is not known of which one."""
    is_generated: bool
    """False for what an environment said."""


def tokenizer_of(folder: Path) -> Decode | None:
    """What decodes token ids of a run; None if its tokenizer is not on this machine."""
    config = folder / CONFIG_FILE
    try:
        model = read_object(config).get("model", "")
    except (FileNotFoundError, ConfigError):
        return None
    file = Path(model) / "tokenizer.json"
    if file.is_file():  # without Transformers, which imports torch for seconds
        from tokenizers import Tokenizer

        fast = Tokenizer.from_file(str(file))
        return lambda ids: str(fast.decode(list(ids), skip_special_tokens=True))
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    except (OSError, ValueError):
        return None
    return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True))


def pieces_of(row: Mapping[str, Any], decode: Decode | None) -> list[Piece]:
    """The response of a sample, a piece for each of its segments.

    The pieces together are the response: each is as long as what its ids add to the text of the few
    ids before them, and a character that two segments share is of the second one.

    Args:
        row: Of the file of samples.
        decode: Of the run's tokenizer.
    """
    versions, lengths = row["segment_versions"], row["segment_lengths"]
    text: str = row["response_text"] or ""
    if len(versions) == 1:
        return [Piece(text=text, policy_version=versions[0], is_generated=True)]
    if decode is None:
        return [Piece(text=text, policy_version=None, is_generated=True)]
    ids, pieces, first, begin = row["token_ids"], [], 0, 0
    for version, length, is_generated in zip(
        versions, lengths, row["segment_generated"], strict=True
    ):
        last, end = first + length, len(text)
        if last < len(ids):
            known = max(0, first - _CONTEXT)
            before, after = decode(ids[known:first]), decode(ids[known:last])
            added = len(after.rstrip(_BROKEN)) - len(before.rstrip(_BROKEN))
            end = min(begin + max(0, added), len(text))
        pieces.append(
            Piece(text=text[begin:end], policy_version=version, is_generated=is_generated)
        )
        first, begin = last, end
    return pieces


def all_samples(
    folder: Path, step: int | None = None, sample_id: str | None = None
) -> Iterator[dict[str, Any]]:
    """Saved samples of a run, or of one of its steps, in order; or the one of an id.

    Raises:
        ConfigError: If there are none; or, once all others have come, if a file cannot be read.
    """
    steps = saved_steps(folder)
    if not steps:
        remedy = (
            f"has no samples in {SAMPLES_FOLDER}/: it is no run folder, no step of it is trained "
            "yet, or the run saves none (train.save_samples = 0)"
        )
        raise ConfigError("RUN_DIR", str(folder), remedy)
    if step is not None and step not in steps:
        raise ConfigError("--step", step, f"has no saved samples; there are {_ranges(steps)}")
    broken: list[ConfigError] = []
    for each in steps if step is None else [step]:
        try:
            yield from read_step(folder, each, sample_id)
        except (OSError, pa.ArrowInvalid) as error:
            remedy = f"cannot be read: {one_line(error)}; name another step, or remove its file"
            broken.append(ConfigError("--step", each, remedy))
    if broken:
        raise broken[0]


def select(
    folder: Path,
    *,
    step: int | None = None,
    order: Order = "worst",
    number: int = 5,
    sample_id: str | None = None,
) -> list[dict[str, Any]]:
    """Some saved samples of a run.

    Args:
        folder: Of the run.
        step: As in metrics.jsonl, from 0; None: the last one that is saved, or with `sample_id`
            all of them.
        order: Which come first: of the least reward, of the largest, the longest.
        number: How many.
        sample_id: The one of this id alone.

    Raises:
        ConfigError: If there is none, or the number is none.
    """
    if number < 1:
        raise ConfigError(f"--{order}", number, "must be at least 1")
    if sample_id is not None:
        dropped = _why_dropped(folder, sample_id)
        if dropped is not None and not saved_steps(folder):
            raise ConfigError("--id", sample_id, dropped)
        found = next(all_samples(folder, step, sample_id), None)
        if found is None:
            remedy = dropped or "was not trained, or is not among the saved ones"
            raise ConfigError("--id", sample_id, remedy)
        return [found]
    if step is None:
        step = max(saved_steps(folder), default=None)
    key: Callable[[dict[str, Any]], float] = {
        "worst": lambda row: row["reward"],
        "best": lambda row: -row["reward"],
        "longest": lambda row: -row["num_generated"],
    }[order]
    return sorted(all_samples(folder, step), key=key)[:number]


def _why_dropped(folder: Path, sample_id: str) -> str | None:
    """Why the group of a sample was dropped; None if it was not."""
    group_id = sample_id.rpartition("-")[0]
    rows = [row for row in read_rows(folder / DROPPED_FILE) if row["group_id"] == group_id]
    if not rows:
        return None
    error = f": {rows[-1]['error']}" if "error" in rows[-1] else ""
    return (
        f"was not trained: its group {group_id} was dropped as {rows[-1]['reason']}{error} "
        f"({DROPPED_FILE}); a sample that was dropped has no saved text"
    )


def as_text(row: Mapping[str, Any], decode: Decode | None, *, has_colors: bool = False) -> str:
    """A sample as lines for a terminal: what the policy says begins with →, what an environment
    says between its turns with ←.

    Args:
        row: Of the file of samples.
        decode: Of the run's tokenizer.
        has_colors: Whether the terminal shows colours: one for each policy version in turn.
    """
    parts = "".join(f", {name} {value:g}" for name, value in row["reward_metrics"].items())
    staleness = "none in the loss" if row["staleness"] is None else row["staleness"]
    head = (
        f"── {row['sample_id']}, step {row['step']} (counted from 0): "
        f"reward {row['reward']:g}{parts}; "
        f"{row['num_generated']} tokens, ended by {row['finish_reason']}; staleness {staleness}, "
        f"interrupted {row['num_interruptions']} times, turns {row['num_turns']}"
    )
    heard = sum(row["segment_lengths"]) - row["num_generated"]
    if heard:
        head += f", in which the environment said {heard} tokens"
    lines = [head, _printable(row["prompt"]), "→ "]
    is_policy = True
    for piece in pieces_of(row, decode):
        version = piece.policy_version
        if piece.text and piece.is_generated != is_policy:
            is_policy = piece.is_generated
            lines.append("→ " if is_policy else "← ")
        if has_colors and version is not None and piece.text:
            style = f"{_COLORS[version % len(_COLORS)]}{'' if piece.is_generated else ';2'}"
            lines[-1] += f"\x1b[{style}m{_printable(piece.text)}\x1b[0m"
        else:
            lines[-1] += _printable(piece.text)
    lines += _columns(row)
    tokens: dict[int, int] = {}
    for version, length, is_generated in zip(
        row["segment_versions"], row["segment_lengths"], row["segment_generated"], strict=True
    ):
        if is_generated:
            tokens[version] = tokens.get(version, 0) + length
    lines.append("by version: " + ", ".join(f"v{v} {n} tokens" for v, n in tokens.items()))
    return "\n".join(lines)


def _columns(row: Mapping[str, Any]) -> Iterator[str]:
    """What the row of the dataset has beside the prompt, a line each."""
    values: Mapping[str, Any] = json.loads(row.get("prompt_row") or "{}")
    texts = {
        name: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        for name, value in values.items()
        if row["prompt"] not in (value, json.dumps(value))
    }
    for name, text in itertools.islice(texts.items(), _MOST_COLUMNS):
        line = text.replace("\n", "\\n")
        cut = line if len(line) <= _LONGEST_COLUMN else f"{line[: _LONGEST_COLUMN - 1]}…"
        yield f"row: {_printable(name)} = {_printable(cut)}"
    if len(texts) > _MOST_COLUMNS:
        yield f"row: … and {len(texts) - _MOST_COLUMNS} more columns"


def _printable(text: str) -> str:
    """A text of a model without what would steer the terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


def _ranges(steps: Sequence[int]) -> str:
    """Numbers in order, as 0-3, 7."""
    found: list[list[int]] = []
    for step in steps:
        if found and step == found[-1][1] + 1:
            found[-1][1] = step
        else:
            found.append([step, step])
    return ", ".join(f"{a}-{b}" if a != b else f"{a}" for a, b in found)
