"""Settings of the prompts, beside the rows themselves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ray_apr.core.checks import one_of

OnTooLong = Literal["error", "drop"]


@dataclass(frozen=True, kw_only=True)
class PromptsConfig:
    """What becomes of the rows that a run is given as prompts."""

    on_too_long: OnTooLong = "error"
    """What becomes of prompts that leave no room for ``rollout.max_response_tokens`` in the model's
    context: "error" ends the run before anything is generated and names the first one; "drop"
    leaves them out, and says how many they are. Held-out prompts that are too long are always an
    error."""

    def __post_init__(self) -> None:
        one_of("prompts", self, {"on_too_long": OnTooLong})
