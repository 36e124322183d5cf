"""What the simulator knows of a machine: engines, trainer, rewards, and how GPUs are shared."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ray_apr.config.common import Placement
from ray_apr.core.checks import (
    at_least,
    from_mapping,
    is_number,
    of_type,
    one_of,
    positive,
    require,
    whole,
)
from ray_apr.core.exceptions import ConfigError

_MOST = 1e15
"""Of any number: times stay finite."""
_MOST_GPUS, _MOST_SAMPLES = 100_000, 100_000_000
"""What a simulation has room and time for."""


def _check_size(section: str, config: Any) -> None:
    """Check that no number is too large."""
    for name in (f.name for f in dataclasses.fields(config)):
        value = getattr(config, name)
        if is_number(value):
            require(value <= _MOST, f"{section}.{name}", value, f"must be at most {_MOST:g}")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """One rollout engine on one GPU.

    A decode step of n sequences with C context tokens in all lasts
    ``decode_base_s + decode_per_sequence_s * n + decode_per_context_token_s * C``.
    """

    decode_base_s: float = 0.008
    """Seconds of a decode step, whatever is in it."""
    decode_per_sequence_s: float = 0.00003
    """Seconds that each of its sequences adds."""
    decode_per_context_token_s: float = 3.7e-8
    """Seconds that each token of their contexts adds."""
    kv_capacity_tokens: int = 500_000
    """Tokens that the KV cache holds."""
    max_sequences: int = 256
    """Sequences that are decoded at the same time, at most."""
    prefill_tokens_per_s: float = 12_000.0
    """Tokens of prompts, and of responses that are resumed, that are read in a second."""
    request_overhead_s: float = 0.0
    """Seconds that taking in a request costs the engine beside its prefill."""
    resume_overhead_s: float | None = None
    """The same for a request that was interrupted, the interruption included; None: the same."""
    cores: float = 1.0
    """CPU cores that a busy engine wants; counts where ``host_cores`` is set."""
    cores_per_sequence: float = 0.0
    """What it wants more for each sequence that it decodes, e.g. to process its outputs."""

    def __post_init__(self) -> None:
        s = "cluster.engine"
        whole(s, self, "kv_capacity_tokens", "max_sequences")
        at_least(s, self, 1, "kv_capacity_tokens", "max_sequences")
        positive(s, self, "decode_base_s", "cores")
        at_least(s, self, 1e-6, "prefill_tokens_per_s")
        if self.resume_overhead_s is not None:
            at_least(s, self, 0, "resume_overhead_s")
        at_least(
            s,
            self,
            0,
            "decode_per_sequence_s",
            "decode_per_context_token_s",
            "request_overhead_s",
            "cores_per_sequence",
        )
        _check_size(s, self)


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """The optimizer's side."""

    tokens_per_s_per_gpu: float = 1850.0
    """Response tokens that one GPU trains in a second."""
    step_overhead_s: float = 2.0
    """Seconds that a step costs beside its tokens."""
    cores: float = 1.0
    """CPU cores that a GPU's train worker keeps busy; counts where ``host_cores`` is set."""

    def __post_init__(self) -> None:
        positive("cluster.trainer", self, "cores")
        at_least("cluster.trainer", self, 1e-6, "tokens_per_s_per_gpu")
        at_least("cluster.trainer", self, 0, "step_overhead_s")
        _check_size("cluster.trainer", self)


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """One step of the trainer."""

    prompts: int = 64
    """Prompts of a step, each with a group of samples."""
    group_size: int = 8
    """Samples of a prompt."""

    def __post_init__(self) -> None:
        whole("cluster.batch", self, "prompts", "group_size")
        at_least("cluster.batch", self, 1, "prompts", "group_size")

    @property
    def size(self) -> int:
        """Samples of a step: prompts * group_size."""
        return self.prompts * self.group_size


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """A simulated machine and run length."""

    gpus: int = 16
    """Of the whole machine; one stands for an engine or a train worker, whatever these run on."""
    placement: Placement = "disaggregated"
    """disaggregated: some GPUs generate, the others train; colocated: all do both, in turns."""
    rollout_gpus: int | None = None
    """GPUs that generate, where disaggregated; None finds the best number."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    """Each of the engines."""
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    """The trainer."""
    weight_sync_s: float = 0.5
    """Seconds for which a weight sync stops the engines and the trainer."""
    switch_s: float = 0.0
    """Seconds that colocated GPUs pay each time they turn from generation to training or back."""
    host_cores: float | None = None
    """CPU cores that engines and train workers share; who wants more than there are, all slow down.
    None is for GPUs, which nobody shares."""
    reward_workers: int = 256
    """Rewards that are computed at the same time."""
    sample_overhead_s: float = 0.0
    """Seconds of one core that handing a finished sample over costs beside its reward."""
    batch: BatchConfig = field(default_factory=BatchConfig)
    """What a step trains."""
    steps: int = 32
    """Steps of the trainer in the run."""
    notes: str = ""
    """For people: where the figures come from."""

    def __post_init__(self) -> None:
        s = "cluster"
        one_of(s, self, {"placement": Placement})
        whole(s, self, "gpus", "reward_workers", "steps")
        at_least(s, self, 1, "gpus", "reward_workers", "steps")
        at_least(s, self, 0, "weight_sync_s", "switch_s", "sample_overhead_s")
        of_type(s, self, str, "a text", "notes")
        if self.host_cores is not None:
            at_least(s, self, 1e-6, "host_cores")
        _check_size(s, self)
        remedy = f"must be at most {_MOST_GPUS:,}"
        require(self.gpus <= _MOST_GPUS, f"{s}.gpus", self.gpus, remedy)
        remedy = f"x batch.prompts x batch.group_size must be at most {_MOST_SAMPLES:,} samples"
        require(self.steps * self.batch.size <= _MOST_SAMPLES, f"{s}.steps", self.steps, remedy)
        if self.placement == "disaggregated":
            require(
                self.gpus >= 2,
                f"{s}.gpus",
                self.gpus,
                'must be at least 2 with placement "disaggregated"; use "colocated" for one GPU',
            )
            if self.rollout_gpus is not None:
                whole(s, self, "rollout_gpus")
                require(
                    1 <= self.rollout_gpus < self.gpus,
                    f"{s}.rollout_gpus",
                    self.rollout_gpus,
                    f"must be in 1..{self.gpus - 1}, so that both sides have a GPU",
                )

    @property
    def is_colocated(self) -> bool:
        """Whether all GPUs take turns."""
        return self.placement == "colocated"

    def num_train_gpus(self) -> int:
        """GPUs that train: all that do not generate; all of them where colocated."""
        return self.gpus if self.is_colocated else self.gpus - (self.rollout_gpus or 0)

    def slowdown(self, batches: Iterable[int], *, is_training: bool, num_handed: int) -> float:
        """How many times longer everything takes when so much wants the host's cores.

        Args:
            batches: Sequences in each of the busy engines.
            is_training: Whether the train workers are busy.
            num_handed: Finished samples that are handed over right now.
        """
        if self.host_cores is None:
            return 1.0
        engine = self.engine
        wanted = num_handed + sum(engine.cores + engine.cores_per_sequence * n for n in batches)
        wanted += self.num_train_gpus() * self.trainer.cores if is_training else 0
        return max(1.0, wanted / self.host_cores)

    def with_rollout_gpus(self, rollout_gpus: int) -> ClusterConfig:
        """The same machine with another split."""
        return dataclasses.replace(self, rollout_gpus=rollout_gpus)

    def with_batches_per_step(self, batches: int) -> ClusterConfig:
        """The same machine, where one step trains several batches."""
        batch = dataclasses.replace(self.batch, prompts=self.batch.prompts * batches)
        return dataclasses.replace(self, batch=batch)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ClusterConfig:
        """Read nested mappings.

        Raises:
            ConfigError: For an unknown key, or a value that makes no sense.
        """
        require(isinstance(values, Mapping), "cluster", values, "must be a JSON object")
        parts = {"engine": EngineConfig, "trainer": TrainerConfig, "batch": BatchConfig}
        built = {
            name: from_mapping(part, f"cluster.{name}", values[name])
            for name, part in parts.items()
            if name in values
        }
        config: ClusterConfig = from_mapping(cls, "cluster", {**values, **built})
        return config

    @classmethod
    def from_file(cls, path: str | Path) -> ClusterConfig:
        """Read a JSON file.

        Raises:
            ConfigError: If it cannot be read, is no JSON, or holds a wrong setting.
        """
        try:
            values = json.loads(Path(path).read_text())
        except (OSError, ValueError) as error:
            remedy = f"cannot be read as JSON: {error}"
            raise ConfigError("cluster", str(path), remedy) from error
        return cls.from_dict(values)
