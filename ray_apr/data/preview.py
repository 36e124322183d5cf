"""What a dry run sees of the prompts: every one is encoded as the run will do it, without Ray."""

from __future__ import annotations

import time
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ray_apr.core.exceptions import one_line
from ray_apr.data.encoding import LengthLimit
from ray_apr.data.rows import PromptRows
from ray_apr.data.tokenizers import encode_prompt

_AT_ONCE = 256
_MOST_SHOWN = 12


def preview(
    rows: PromptRows,
    tokenizer: Any,
    limit: LengthLimit,
    *,
    limit_s: float,
    num_ids: int,
) -> list[str]:
    """Encode the prompts, as many as the time allows.

    Args:
        rows: The prompts.
        tokenizer: That of the model.
        limit: Of their lengths; it counts them, and says what messages call them.
        limit_s: Time after which the rest is left out.
        num_ids: How many token ids there are.

    Returns:
        What is no error, but worth knowing.

    Raises:
        ConfigError: Names the first row that the run would refuse.
    """
    name, column = limit.name, limit.column
    end = time.monotonic() + limit_s
    lost: Counter[str] = Counter()
    warnings = []
    for start in range(0, len(rows), _AT_ONCE):
        if time.monotonic() > end:
            warnings.append(
                f"{name}: the first {start} of {len(rows)} rows were looked at, in {limit_s:g} s"
            )
            break
        prompts = [row.get(column) for row in rows.slice(start, start + _AT_ONCE)]
        encoded = [
            encode_prompt(tokenizer, prompt, field=limit.field(start + i), num_ids=num_ids)
            for i, prompt in enumerate(prompts)
        ]
        limit.fits([len(ids) for ids in encoded])
        for prompt, ids in zip(prompts, encoded, strict=True):
            lost.update(lost_characters(tokenizer, prompt, ids))
    is_whole = limit.num_seen == len(rows)
    if (is_whole or limit.num_left) and (said := limit.end()):  # the rest may fit
        warnings.append(said)
    if lost:
        shown = " ".join(repr(character) for character, _ in lost.most_common(_MOST_SHOWN))
        more = f" and {len(lost) - _MOST_SHOWN} more" if len(lost) > _MOST_SHOWN else ""
        warnings.append(
            f"{name}: the tokenizer does not know {shown}{more}, in up to {max(lost.values())} "
            "rows: the model does not see them"
        )
    return warnings


def gaps_of(rows: PromptRows, name: str) -> list[str]:
    """Say which rows lack a column that the others have: a reward may need it.

    Args:
        rows: The prompts.
        name: What messages call them.
    """
    said = []
    for column, lacking, others in rows.gaps():
        has = "has" if len(lacking) == 1 else f"and {len(lacking) - 1} more have"
        said.append(
            f"{name}: {rows.place(lacking[0])} {has} no {column!r}, beside {others} that have one: "
            "the reward gets None there"
        )
    return said


def untyped_of(rows: PromptRows, name: str) -> list[str]:
    """Say which columns Arrow has no type for: whether Ray Data takes them depends on their rows.

    Args:
        rows: The prompts.
        name: What messages call them.
    """
    return [
        f"{name}: no type of Arrow's holds all values of {column!r} ({one_line(error)}): the run "
        "may refuse them; make them alike, or leave the column out"
        for column, error in rows.untyped()
    ]


def lost_characters(tokenizer: Any, prompt: Any, ids: Sequence[int]) -> set[str]:
    """Characters of a prompt that its tokens do not hold; spaces, case and forms do not count."""
    text = "".join(_texts(prompt))
    if not text:
        return set()
    seen = _normal(tokenizer.decode(list(ids)))
    return {c for c in set(text) if _normal(c).strip() and not set(_normal(c)) <= set(seen)}


def _texts(prompt: Any) -> Iterable[str]:
    if isinstance(prompt, str):
        yield prompt
    elif isinstance(prompt, Sequence):
        for message in prompt:
            content = message.get("content") if isinstance(message, Mapping) else None
            if isinstance(content, str):
                yield content


def _normal(text: str) -> str:
    return unicodedata.normalize("NFKD", text).casefold()
