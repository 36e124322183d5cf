"""What one engine is built from: one frozen value, from the controller to the engine itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ray_apr.config import (
    KVCache,
    PartialRolloutConfig,
    RolloutConfig,
    goes_on_across_syncs,
    parks_requests,
)
from ray_apr.config.common import DType, dtype_on
from ray_apr.config.engine import Device

SCORE_LIMIT_S = 20.0
"""Longest that an engine which goes on may take to score; the calls that wait do so as long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """One engine; all engines of a run have the same."""

    model: str
    """Folder or hub id."""
    factory: str | Callable[..., Any] = "vllm"
    """Makes the engine of this spec and a replica's id (`serve.engine`)."""
    device: Device = "auto"
    """Known once the cluster is: an engine never sees "auto"."""
    dtype: DType = "float32"
    """Of the weights."""
    tensor_parallel_size: int = 1
    """Workers of the engine, each with a GPU where there are any."""
    max_model_len: int | None = None
    """Longest prompt + response, in tokens; None takes the model's."""
    seed: int = 0
    """Of the random state that requests without seeds draw from."""
    support_size: int = 0
    """Most ids that a generation is asked to say could be drawn at a token."""
    kv_cache: KVCache = "recompute"
    """What becomes of KV entries of old weights at a weight sync."""
    parks: bool = False
    """Whether requests stay in the engine while a weight sync interrupts their calls."""
    needs_attestation: bool = False
    """Whether requests go on across weight syncs, so that the engine has to tell the version of
    each token."""
    shares_device: bool = False
    """Whether a train worker is on the engine's device, too."""
    takes_turns: bool = False
    """Whether they have it in turns: the engine sleeps from the start on, and wakes for each set of
    weights."""
    evaluates: bool = False
    """Whether some requests are evaluations, which go first in the engine's queue."""
    most_requests: int | None = None
    """Requests that can be alive at once in all engines together; None: unknown."""
    weight_check_every: int | Literal["auto"] = 0
    """Weight syncs from one to the next after which the engine scores sequences; 0: none."""
    profile_steps: tuple[int, ...] = ()
    """Policy versions under which it tells each of its steps."""
    stall_timeout_s: float = 300.0
    """Longest time without progress of an engine that has requests and is not paused."""
    engine_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments: of vLLM's ``AsyncEngineArgs``, or what another engine takes."""

    @classmethod
    def of_run(
        cls,
        model: str,
        rollout: RolloutConfig,
        partial_rollout: PartialRolloutConfig | None = None,
        *,
        max_model_len: int | None = None,
        evaluates: bool = False,
        most_requests: int | None = None,
        weight_check_every: int | Literal["auto"] = 0,
        profile_steps: tuple[int, ...] = (),
    ) -> EngineSpec:
        """What a run's settings say of its engines.

        Args:
            model: Folder or hub id.
            rollout: Devices, engine arguments, sampling.
            partial_rollout: What a sync does with requests; None: it leaves none in an engine.
            max_model_len: Longest prompt + response, in tokens; None takes the model's.
            evaluates: Whether some requests are evaluations.
            most_requests: That can be alive at once; None: unknown.
            weight_check_every: How often the trainer checks the engines' weights.
            profile_steps: Steps of the trainer that are profiled.
        """
        across = partial_rollout is not None and goes_on_across_syncs(partial_rollout, rollout)
        return cls(
            model=model,
            factory=rollout.engine.factory,
            device=rollout.engine.device,
            dtype=dtype_on(rollout.engine.device, rollout.engine.dtype),
            tensor_parallel_size=rollout.engine.tensor_parallel_size,
            max_model_len=max_model_len,
            seed=rollout.engine.seed,
            support_size=rollout.sampling_params.support_size,
            kv_cache="recompute" if partial_rollout is None else partial_rollout.kv_cache,
            parks=partial_rollout is not None and parks_requests(partial_rollout, rollout),
            needs_attestation=across,
            shares_device=rollout.is_colocated,
            takes_turns=rollout.takes_turns,
            evaluates=evaluates,
            most_requests=most_requests,
            weight_check_every=weight_check_every,
            profile_steps=profile_steps,
            stall_timeout_s=rollout.engine.stall_timeout_s,
            engine_kwargs=rollout.engine.kwargs,
        )
