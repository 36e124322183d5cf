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
from typing import Any

from ray_apr.config import RolloutConfig
from ray_apr.core.exceptions import ConfigError
from ray_apr.core.ledger import LedgerSnapshot
from ray_apr.core.messages import ServerStatus
from ray_apr.scheduling.intake import SchedulerState
from ray_apr.scheduling.order import prompt_position
from ray_apr.scheduling.stock import BufferStats

LIST_FILE = "checkpoint_manager_snapshot.json"
"""Ray Train's list of a run's checkpoints, in the folder that has them."""
LIST_COPY_FILE = "checkpoint_list_copy.json"
"""Copy of that list beside it, of the last checkpoint that is durable: Ray Train writes its list in
place, so that a full disk or a kill may cut it off."""
PROGRESS_FILE = "progress.json"
"""File of a checkpoint with the step and the policy version that it goes on with."""
ROLLOUT_FILE = "rollout.json"
"""File of a checkpoint with its `RolloutProgress`."""
SAMPLES_FILE = "samples.arrow"
"""File of a checkpoint with the samples under way."""
WEIGHTS = "prompts.weights"
"""Of the settings of samples (`sampled_with`): that which the order of the prompts follows from."""
FORMAT = 3
"""Of `RolloutProgress`. 2, without stops, 1, without a journal, and 0, without samples, are read,
too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSummary:
    """Final figures of the rollout side."""

    ledger: LedgerSnapshot
    samples_interrupted: int
    """Times that a sample with tokens was stopped before its end."""
    samples_resumed: int
    """Times that such a sample was continued."""
    prompts_position: int
    """Prompts handed out."""
    num_prompts: int
    """Prompts of the dataset."""
    pending_prompts: tuple[int, ...]
    """Positions of those handed out that are neither in the buffer nor dropped."""
    engines: tuple[ServerStatus, ...]
    """As they were when they were last asked."""
    sampled: Mapping[str, Any]
    """Settings that samples are made with (`sampled_with`)."""


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
        """The tokens as a ledger; its error is what a run goes on with, once all else is lost
        (`lose`)."""
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

    def __sub__(self, other: Counters) -> Counters:
        """What has come since an earlier moment."""
        names = [f.name for f in dataclasses.fields(other) if f.name != "tokens_discarded"]
        discarded = {reason: -n for reason, n in other.tokens_discarded.items()}
        negative = {name: -getattr(other, name) for name in names}
        return self + Counters(**negative, tokens_discarded=discarded)

    def without_training(self) -> Counters:
        """The same, of a buffer, once the trainer has begun again with a checkpoint."""
        discarded = {r: n for r, n in self.tokens_discarded.items() if r != "masked"}
        return Counters(tokens_discarded=discarded)

    @property
    def status(self) -> dict[str, int]:
        """What a step's row counts, too, under the names that it has there."""
        return {
            "tokens_generated": self.tokens_generated,
            "tokens_discarded": sum(self.tokens_discarded.values()),
            "samples_interrupted": self.samples_interrupted,
            "samples_resumed": self.samples_resumed,
        }

    def lose(self, num_generated: int, num_kept: int = 0) -> tuple[Counters, int]:
        """These figures once all is lost that is neither trained nor discarded nor kept.

        Args:
            num_generated: Tokens that were generated in the end, if that is more.
            num_kept: Tokens that the run goes on with.

        Returns:
            They, with the loss among the discards as ``lost``; and the tokens lost.
        """
        generated = max(self.tokens_generated, num_generated)
        placed = self.tokens_trained + sum(self.tokens_discarded.values()) + num_kept
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
    retries: tuple[str, ...] = ()
    """Ids of those of the pending prompts that wait to be tried again (`SchedulerState`)."""
    num_long_retries: int = 0
    num_stops: Mapping[str, int] = field(default_factory=dict)
    """Of those and of the prompts of samples under way; with an older format all further tries
    count as filtered."""
    num_owed: int = 0
    sampled: Mapping[str, Any] = field(default_factory=dict)
    """Settings that the samples were made with (`sampled_with`)."""
    samples_digest: str | None = None
    """Of `SAMPLES_FILE`; None: the checkpoint has none."""
    epoch: int = 0
    """Of the journal, that follows the checkpoint."""
    format: int = FORMAT

    @classmethod
    def of(
        cls,
        summary: RolloutSummary,
        stats: BufferStats,
        *,
        seed: int,
        before: Counters,
        state: SchedulerState,
        epoch: int = 0,
    ) -> RolloutProgress:
        """What the rollout worker and the buffer said of one moment."""
        held = (prompt_position(group, summary.num_prompts) for group in stats.held_groups)
        return cls(
            seed=seed,
            num_prompts=summary.num_prompts,
            position=summary.prompts_position,
            pending=tuple(sorted({*summary.pending_prompts, *held})),
            counters=before + Counters.of(summary, stats),
            retries=state.retries,
            num_long_retries=state.num_long_retries,
            num_stops=state.num_stops,
            num_owed=state.num_owed,
            sampled=summary.sampled,
            epoch=epoch,
        )

    def without_samples(self) -> RolloutProgress:
        """The same where the samples are given up: all pending prompts begin anew."""
        return dataclasses.replace(
            self, retries=(), num_long_retries=0, num_stops={}, num_owed=0, samples_digest=None
        )

    def to_json(self) -> str:
        """Text of an object that `from_values` reads."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> RolloutProgress:
        """Read what `to_json` made, of this format or an older one.

        Args:
            values: The object of its text.

        Raises:
            ConfigError: If the format is newer.
        """
        values = {"format": 0, **values}
        if values["format"] > FORMAT:
            raise ConfigError(
                "checkpoint",
                f"format {values['format']}",
                f"this ray_apr reads formats up to {FORMAT}; go on with the one that wrote it",
            )
        counters = Counters(**values.pop("counters"))
        lists = {name: tuple(values.get(name, ())) for name in ("pending", "retries")}
        return cls(**values | lists, counters=counters)


def read_file(checkpoint: Any, name: str) -> bytes:
    """Read a file of a checkpoint.

    Args:
        checkpoint: A `ray.train.Checkpoint`.
        name: Of the file in it.

    Raises:
        ConfigError: If it has no such file.
        OSError: If it cannot be read.
    """
    try:
        with checkpoint.filesystem.open_input_file(f"{checkpoint.path}/{name}") as file:
            return bytes(file.read())
    except FileNotFoundError as error:
        raise ConfigError(
            "checkpoint", checkpoint.path, f"is none of a run of ray_apr: it has no {name}"
        ) from error


def read_json(checkpoint: Any, name: str) -> dict[str, Any]:
    """Read a file of a checkpoint that holds a JSON object.

    Args:
        checkpoint: A `ray.train.Checkpoint`.
        name: Of the file in it.

    Raises:
        ConfigError: If it has no such file, or a damaged one.
        OSError: If it cannot be read.
    """
    text = read_file(checkpoint, name)
    try:
        return {**json.loads(text)}
    except (ValueError, TypeError) as error:  # no JSON, no UTF-8, or no object
        raise ConfigError(
            "checkpoint", checkpoint.path, f"{name} is damaged: {error}; take another one"
        ) from error


def read_rollout(checkpoint: Any) -> RolloutProgress:
    """Read where the rollout side stood when a checkpoint was written.

    Raises:
        ConfigError: If the checkpoint is of no run, damaged, or of a newer format.
        OSError: If it cannot be read.
    """
    return RolloutProgress.from_values(read_json(checkpoint, ROLLOUT_FILE))


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """What the journal says beside the samples (`data.replay`)."""

    plan: Mapping[int, tuple[str, ...]]
    """Ids of the groups of each step that is trained as it was before."""
    policy_version: int
    """Of the engines."""
    goes_on_at: int
    """Policy version from which on engines generate: that of the newest token."""
    takes_over: bool = False
    """Whether trainer and engines live, which a worker and a buffer served that are dead."""
    granted: tuple[int, int] | None = None
    """Step that a trainer which lives waits for or trains, and its policy version."""
    trained: tuple[int, Mapping[str, float]] | None = None
    """Last step of such a trainer, and what it was told at its end."""
    received: Mapping[str, int] = field(default_factory=dict)
    """Tokens that had come from each engine that lives."""
    ended: tuple[Mapping[str, Any], ...]
    """Rows of samples that have ended, some of which the run folder may not have."""
    dropped: tuple[Mapping[str, Any], ...]
    """The same of groups that were dropped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """Where a run begins: anew, or with a checkpoint and a journal."""

    step: int = 0
    policy_version: int = 0
    lora_rank: int | None = None
    """Of the checkpoint's adapters; 0: it has none; None: it does not say."""
    lora_alpha: float | None = None
    """The same; None: it has none, or does not say."""
    lora_layers: str | None = None
    """Last parts of the names of the layers that have them; None: as of alpha."""
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
    """The newest policy version that the run folder has an evaluation of, or without any the one
    before the run's first; None: that is now."""
    samples: Any = field(default=None, compare=False, repr=False)
    """Arrow table of the samples that it goes on with (`saved_samples`), or None."""
    replayed: Replayed | None = field(default=None, compare=False, repr=False)
    """What the journal says, or None."""
    epoch: int = 0
    """Of the journal, that begins with it."""

    @property
    def of_engines(self) -> int:
        """Policy version of the engines."""
        return self.policy_version if self.replayed is None else self.replayed.policy_version

    @property
    def num_samples(self) -> int:
        """Samples that it goes on with."""
        return 0 if self.samples is None else self.samples.num_rows

    @property
    def num_kept(self) -> int:
        """Tokens of these that engines made."""
        return 0 if self.samples is None else sum(self.samples["num_generated"].to_pylist())

    @property
    def prompts_again(self) -> tuple[int, ...]:
        """Positions of the prompts that are handed out once more: of those that were neither
        trained nor dropped, the ones without samples."""
        if self.rollout is None:
            return ()
        groups = [] if self.samples is None else self.samples["group_id"].unique().to_pylist()
        known = {
            prompt_position(group_id, self.rollout.num_prompts)
            for group_id in (*groups, *self.rollout.retries)
        }
        return tuple(position for position in self.rollout.pending if position not in known)


def sampled_with(
    config: RolloutConfig, *, resets: bool | None, weights: Mapping[str, float] | None = None
) -> dict[str, Any]:
    """Settings without which samples under way cannot go on, as JSON has them.

    Args:
        config: Of the rollout.
        resets: Whether the environment speaks first; None: there is none.
        weights: Of the prompts' sources, which fix their order; None: they have none.
    """
    names = ("group_size", "max_turns", "max_response_tokens")
    settings = {f"rollout.{name}": getattr(config, name) for name in names}
    if config.chat_template_kwargs:
        settings["rollout.chat_template_kwargs"] = dict(config.chat_template_kwargs)
    settings["rollout.sampling"] = dataclasses.asdict(config.sampling)
    settings["environment"] = "none" if resets is None else {"resets": resets}
    if weights is not None:
        settings[WEIGHTS] = weights
    found: dict[str, Any] = json.loads(json.dumps(settings))
    return found
