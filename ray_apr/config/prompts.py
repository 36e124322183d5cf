"""Settings of the prompts, beside the rows themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ray_apr.core.checks import is_number, of_type, one_of, require

OnTooLong = Literal["error", "drop"]


@dataclass(frozen=True, kw_only=True)
class PromptsConfig:
    """What becomes of the rows that a run is given as prompts."""

    on_too_long: OnTooLong = "error"
    """What becomes of prompts that leave no room for ``rollout.max_response_tokens`` in the model's
    context: "error" ends the run before anything is generated and names the first one; "drop"
    leaves them out, and says how many they are. Held-out prompts that are too long are always an
    error."""
    weights: Mapping[str, float] | None = None
    """Of each source of prompts: how much of what is handed out is of it, beside the others. None:
    all rows come equally often, whatever source they are of. In YAML ``prompts.files`` says it."""
    source_column: str = "source"
    """Column with the name of a row's source, where there are `weights`."""

    def __post_init__(self) -> None:
        s = "prompts"
        one_of(s, self, {"on_too_long": OnTooLong})
        of_type(s, self, str, "text", "source_column")
        weights: Any = self.weights
        if weights is None:
            column, is_left = self.source_column, self.source_column == type(self).source_column
            require(is_left, f"{s}.source_column", column, "needs weights of sources; leave it out")
            return
        words = "a mapping from the name of each source to its weight"
        of_type(s, self, Mapping, words, "weights")
        require(bool(weights), f"{s}.weights", weights, f"must be {words}, or be left out")
        for name, weight in weights.items():
            require(isinstance(name, str), f"{s}.weights", weights, f"must be {words}")
            require(
                is_number(weight) and weight > 0,
                f"{s}.weights",
                weights,
                f"must be finite numbers above 0; leave {name} out of the prompts instead",
            )
        object.__setattr__(self, "weights", {n: float(w) for n, w in weights.items()})
