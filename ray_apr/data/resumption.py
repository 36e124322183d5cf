"""What a checkpoint says of a run beside weights and optimizer: prompts, and figures that count on.

Seeds of requests are no state: each follows from ``rollout.sampling.seed``, the sample's id
and its tokens.

Pure: no ray, no torch.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ray_apr.core.ledger import LedgerSnapshot
from ray_apr.scheduling.order import prompt_position

if TYPE_CHECKING:
    from ray_apr.rollout.worker import RolloutSummary
    from ray_apr.scheduling.stock import BufferStats

PROGRESS_FILE = "progress.json"
"""File of a checkpoint with the step and the policy version that it goes on with."""
ROLLOUT_FILE = "rollout.json"
"""File of a checkpoint with its `RolloutProgress`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """Figures of a run that a resumed one counts on; tokens as in the ledger."""

    samples_trained: int = 0
    tokens_trained: int = 0
    samples_interrupted: int = 0
    samples_resumed: int = 0
    tokens_generated: int = 0
    tokens_discarded: Mapping[str, int] = field(default_factory=dict)
    """By reason."""

    @classmethod
    def of(cls, summary: RolloutSummary, stats: BufferStats) -> Counters:
        """What the rollout worker and the buffer have counted since they began."""
        ledger = summary.ledger + stats.ledger
        return cls(
            samples_trained=stats.trained_samples,
            tokens_trained=ledger.trained,
            samples_interrupted=summary.samples_interrupted,
            samples_resumed=summary.samples_resumed,
            tokens_generated=ledger.generated,
            tokens_discarded=ledger.discarded,
        )

    @property
    def ledger(self) -> LedgerSnapshot:
        """The tokens as a ledger; closed once all else is lost (`lose`)."""
        return LedgerSnapshot(
            generated=self.tokens_generated,
            trained=self.tokens_trained,
            discarded=self.tokens_discarded,
        )

    def __add__(self, other: Counters) -> Counters:
        names = [f.name for f in dataclasses.fields(self) if f.name != "tokens_discarded"]
        reasons = {*self.tokens_discarded, *other.tokens_discarded}
        discarded = {
            r: self.tokens_discarded.get(r, 0) + other.tokens_discarded.get(r, 0)
            for r in sorted(reasons)
        }
        sums = {name: getattr(self, name) + getattr(other, name) for name in names}
        return Counters(**sums, tokens_discarded=discarded)

    @property
    def status(self) -> dict[str, int]:
        """What a step's row counts, too, under the names that it has there."""
        return {
            "tokens_generated": self.tokens_generated,
            "tokens_discarded": sum(self.tokens_discarded.values()),
            "samples_interrupted": self.samples_interrupted,
            "samples_resumed": self.samples_resumed,
        }

    def lose(self, num_generated: int) -> tuple[Counters, int]:
        """These figures once all is lost that is neither trained nor discarded.

        Args:
            num_generated: Tokens that were generated in the end, if that is more.

        Returns:
            They, with the loss among the discards as ``lost``; and the tokens lost.
        """
        generated = max(self.tokens_generated, num_generated)
        placed = self.tokens_trained + sum(self.tokens_discarded.values())
        lost = Counters(
            tokens_generated=generated - self.tokens_generated,
            tokens_discarded={"lost": generated - placed},
        )
        return self + lost, generated - placed


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutProgress:
    """Where the rollout side stood when a checkpoint was written."""

    seed: int
    """Of the prompts' order."""
    num_prompts: int
    """Prompts of the dataset."""
    position: int
    """Prompts handed out; `PromptSource`."""
    pending: tuple[int, ...]
    """Positions of those that were neither trained nor dropped: they come first."""
    counters: Counters
    """Figures of the run until then."""

    @classmethod
    def of(
        cls, summary: RolloutSummary, stats: BufferStats, *, seed: int, before: Counters
    ) -> RolloutProgress:
        """What the rollout worker said, and the buffer after it."""
        held = (prompt_position(group, summary.num_prompts) for group in stats.held_groups)
        return cls(
            seed=seed,
            num_prompts=summary.num_prompts,
            position=summary.prompts_position,
            pending=tuple(sorted({*summary.pending_prompts, *held})),
            counters=before + Counters.of(summary, stats),
        )

    def to_json(self) -> str:
        """Text that `from_json` reads."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> RolloutProgress:
        """Read what `to_json` made."""
        values: dict[str, Any] = json.loads(text)
        counters = Counters(**values.pop("counters"))
        return cls(**{**values, "pending": tuple(values["pending"])}, counters=counters)


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """Where a run begins: anew, or with a checkpoint."""

    step: int = 0
    policy_version: int = 0
    checkpoint: Any = None
    """A `ray.train.Checkpoint`, or None."""
    rollout: RolloutProgress | None = None
    """None: nothing was generated yet."""
    is_resumed: bool = False
    """Whether the run folder holds this run already."""
    num_rows: int = 0
    """Steps whose rows the run folder holds."""
    before: Counters = field(default_factory=Counters)
    """What the run folder counts so far."""
    last_version: int | None = None
    """The policy version, where it was evaluated already or was not due for that."""

    @property
    def num_pending(self) -> int:
        """Prompts that are handed out once more."""
        return 0 if self.rollout is None else len(self.rollout.pending)
