"""Names of settings and columns: which one somebody may have meant, which ones rows have."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

_ALIKE = 0.7
_LEAST_PREFIX = 4
OTHER_NAMES: Mapping[str, str] = {
    **dict.fromkeys(("num_generations", "n_samples"), "group_size"),
    **dict.fromkeys(("num_epochs", "num_train_epochs", "total_epochs"), "passes"),
    **dict.fromkeys(
        ("max_tokens", "max_new_tokens", "max_completion_length"), "max_response_tokens"
    ),
    **dict.fromkeys(("num_steps", "max_steps"), "steps"),
    **dict.fromkeys(("num_engines", "replicas"), "num_replicas"),
}
"""What other libraries, or other parts of this one, call a setting."""


def nearest(name: str, known: Sequence[str]) -> list[str]:
    """Known names that may be meant, the most likely ones first; none if nothing is like it.

    A name is like another one by its letters, as its initials, as its begin, or as what other
    libraries call it.

    Args:
        name: That was written.
        known: Names that there are.

    Example:
        >>> known = ["learning_rate", "steps", "batch_size", "temperature"]
        >>> [nearest(name, known) for name in ("lr", "temprature", "batch", "zzz")]
        [['learning_rate'], ['temperature'], ['batch_size'], []]
    """
    begins = [each for each in known if len(name) >= _LEAST_PREFIX and each.startswith(name)]
    found = [
        *(each for each in known if OTHER_NAMES.get(name) == each),
        *(each for each in known if "_" in each and _initials(each) == name.lower()),
        *difflib.get_close_matches(name, known, cutoff=_ALIKE),
        *(begins if len(begins) == 1 else []),
    ]
    return list(dict.fromkeys(found))


def did_you_mean(near: Sequence[str], remedy: str, *, last: bool = False) -> str:
    """A remedy with a question before it, or after it if `last`; alone if there is no name near.

    Example:
        >>> did_you_mean(["steps"], "leave it out", last=True)
        'leave it out; did you mean steps?'
    """
    if not near:
        return remedy
    question = f"did you mean {' or '.join(near)}?"
    return f"{remedy}; {question}" if last else f"{question} {remedy}"


def names_in(rows: Iterable[Mapping[str, object]]) -> list[str]:
    """Names that any of these rows has, in the order in which they come.

    Example:
        >>> names_in([{"prompt": "1+1="}, {"answer": 2, "prompt": "1+2="}])
        ['prompt', 'answer']
    """
    return list(dict.fromkeys(name for row in rows for name in row))


def _initials(name: str) -> str:
    return "".join(part[:1] for part in name.split("_"))


def dotted(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Settings as in ``config.json`` with their dotted names; an empty mapping is a value.

    Example:
        >>> list(dotted({"mode": "apr", "train": {"steps": 2, "lora": {}}}))
        [('mode', 'apr'), ('train.steps', 2), ('train.lora', {})]
    """
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from dotted(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def last_parts(names: Iterable[str]) -> str:
    """The last parts of dotted names, each once.

    Example:
        >>> last_parts(["layers.0.q_proj", "layers.0.k_proj", "layers.1.q_proj"])
        'k_proj, q_proj'
    """
    return ", ".join(sorted({name.rpartition(".")[2] for name in names}))
