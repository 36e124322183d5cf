"""Settings with which a run goes on, where they are others than before."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ray_apr.config import EvaluationConfig, Sections
from ray_apr.core.names import dotted
from ray_apr.run.folder import CHECKPOINTS, CONFIG_FILE, object_or_empty

if TYPE_CHECKING:
    from ray_apr.run.spec import RunSpec

_NO_SETTINGS = ("rollout.num_replicas", CHECKPOINTS)
"""What changes by itself, which a row of ``ranks.jsonl`` has anyway; and where checkpoints are."""

_DIGESTS = "digests."
"""Before the name of what a file of the user's defines: SHA-256 of the file."""

Changed = Mapping[str, tuple[Any, Any]]
"""Dotted names of settings, with the value before and the one now."""


def changed_settings(spec: RunSpec) -> Changed:
    """Settings that are others than in the run folder's ``config.json``; none where it has none.

    Of a setting that it lacks, as an older version had none, the value before is the default.
    """
    written = object_or_empty(spec.folder / CONFIG_FILE)
    if not written:
        return {}
    evaluation = EvaluationConfig() if written.get("evaluation") else None
    left = Sections(evaluation=evaluation)
    default, before = (dict(dotted(part)) for part in (_plain(dataclasses.asdict(left)), written))
    now = dict(dotted(_plain(spec.describe())))
    pairs = {
        name: (before.get(name, default.get(name)), now.get(name)) for name in {**before, **now}
    }
    return {
        name: pair
        for name, pair in pairs.items()
        if pair[0] != pair[1]
        and name not in _NO_SETTINGS
        and not (is_digest(name) and None in pair)
    }


def _plain(settings: Mapping[str, Any]) -> Any:
    """Settings as ``config.json`` has them."""
    return json.loads(json.dumps(settings, default=str))


def is_digest(name: str) -> bool:
    """Whether a dotted name is of digests of files, of which a missing one says nothing: a folder
    of an older version has not all of them, and code that is another one has another name, too."""
    return f"{name}.".startswith(_DIGESTS)


def changed_after(rows: Iterable[Mapping[str, Any]], step: int) -> Changed:
    """What a run changed after a step: the value of that step, and the last one.

    Args:
        rows: Of ``ranks.jsonl``.
        step: As in ``metrics.jsonl``.
    """
    found: dict[str, tuple[Any, Any]] = {}
    for row in rows:
        if row["step"] > step:
            for name, (before, now) in row.get("changed", {}).items():
                found[name] = (found.get(name, (before,))[0], now)
    return found


def changed_text(changed: Changed) -> str:
    """Settings that changed, in words.

    Example:
        >>> changed_text({"train.steps": (8, 16), "environment": (None, "tools:Calculator")})
        'train.steps 8 → 16, environment null → "tools:Calculator"'
        >>> changed_text({"digests.algorithm.loss": ("6f1c", "02ab")})
        'the file of algorithm.loss'
    """
    return ", ".join(
        f"the file of {name.removeprefix(_DIGESTS)}"
        if is_digest(name)
        else f"{name} {json.dumps(before)} → {json.dumps(now)}"
        for name, (before, now) in changed.items()
    )
