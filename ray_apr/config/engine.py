"""Settings of one engine, which all engines of a run share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ray_apr.config.autoscaling import AutoscalingConfig
from ray_apr.config.common import AutoDType, Placement
from ray_apr.config.engine_options import check_engine_options
from ray_apr.core.checks import (
    at_least,
    from_mapping,
    of_type,
    one_of,
    positive,
    require,
    whole,
    whole_or_none,
)

Device = Literal["auto", "cpu", "cuda"]


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What engines are made by, where they run, and how long they may take."""

    factory: str | Callable[..., Any] = "vllm"
    """What engines are made by: "vllm", or a function or class of the user's that takes an
    `EngineSpec` and a replica's id and gives an `Engine` (`serve.engine`); in YAML as
    "package.module:name" or "file.py:name"."""
    device: Device = "auto"
    """Where the engines run; auto takes CUDA when the cluster has GPUs."""
    dtype: AutoDType = "auto"
    """Data type of the engine's weights, and of those on their way to it; auto: bfloat16 on CUDA,
    float32 on CPU."""
    tensor_parallel_size: int = 1
    """GPUs of one engine."""
    placement: Placement = "disaggregated"
    """disaggregated: engines and train workers have GPUs of their own; colocated: they have the
    same ones, one engine worker and one train worker each."""
    sleep: bool = True
    """What colocated engines do while a batch is trained. true: they take turns with the train
    workers, and sleep meanwhile; the train workers' memory is on the host while responses are
    generated. false: both are on the GPU at all times, which has to hold them together."""
    num_cpus_per_replica: float = 1.0
    """Ray CPUs that a replica reserves; beside them it has one for each GPU of an engine that has
    several."""
    max_model_len: int | None = None
    """Longest prompt + response of the engine, in tokens; None takes the model's own limit."""
    seed: int = 0
    """Seed of the random state of each engine, from which requests without seeds draw."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of vLLM's engine, e.g. ``{"max_num_seqs": 64}``: those that change speed
    and memory alone (`config.engine_options`); of another engine whatever it takes."""
    autoscaling: AutoscalingConfig | None = None
    """When the run asks for more or fewer engines by itself; None: it never does."""
    start_timeout_s: float = 600.0
    """Limit for all servers to become ready, for the train workers to find a place, and for each
    worker of the reward to start."""
    stall_timeout_s: float = 300.0
    """Longest time without a new token of an engine that has requests, pauses and waits for a
    weight group left out; then its requests end with the tokens that they have, and the engine is
    replaced. However long a request takes, it goes on while its engine does."""

    def __post_init__(self) -> None:
        s = "rollout.engine"
        whole(s, self, "tensor_parallel_size", "seed")
        at_least(s, self, 1, "tensor_parallel_size")
        at_least(s, self, 0, "num_cpus_per_replica", "seed")
        require(self.seed < 2**32, f"{s}.seed", self.seed, "must be below 2**32")
        positive(s, self, "start_timeout_s", "stall_timeout_s")
        one_of(s, self, {"device": Device, "dtype": AutoDType, "placement": Placement})
        of_type(s, self, bool, "true or false", "sleep")
        of_type(s, self, Mapping, "a mapping", "kwargs")
        given: Any = self.autoscaling
        if isinstance(given, Mapping):
            made = from_mapping(AutoscalingConfig, f"{s}.autoscaling", given)
            object.__setattr__(self, "autoscaling", made)
        kind = AutoscalingConfig | None
        of_type(s, self, kind, "a mapping of settings, or null", "autoscaling")
        require(
            self.autoscaling is None or not self.is_colocated,
            f"{s}.autoscaling",
            self.autoscaling,
            'must be null with placement "colocated": engines that share GPUs with train workers '
            "neither come nor go",
        )
        whole_or_none(s, self, 1, "max_model_len")
        if self.factory == "vllm":
            check_engine_options(self.kwargs)
            return
        require(
            callable(self.factory) or ":" in str(self.factory),
            f"{s}.factory",
            self.factory,
            'must be "vllm", a function that makes an engine, or in YAML "file.py:name"',
        )
        require(
            not self.is_colocated,
            f"{s}.placement",
            self.placement,
            f'must be "disaggregated" where {s}.factory is your own: vLLM alone sleeps and wakes',
        )

    def resources(self, *, on_gpus: bool) -> dict[str, float]:
        """What Ray reserves for one engine where it has GPUs of its own."""
        size = self.tensor_parallel_size
        cpus = self.num_cpus_per_replica + (size if on_gpus and size > 1 else 0)
        wanted = {"CPU": cpus, "GPU": float(size if on_gpus else 0)}
        return {name: amount for name, amount in wanted.items() if amount}

    @property
    def is_colocated(self) -> bool:
        """Whether engines and train workers have the same GPUs."""
        return self.placement == "colocated"

    @property
    def takes_turns(self) -> bool:
        """Whether they have these in turns."""
        return self.is_colocated and self.sleep
