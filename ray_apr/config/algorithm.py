"""Settings of the objective: advantages, loss, and the correction for off-policy data."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ray_apr.core.checks import (
    at_least,
    from_mapping,
    is_number,
    of_type,
    one_of,
    positive,
    require,
    whole_or_none,
)

Estimator = Literal["grpo", "dr_grpo", "rloo", "reinforce_plus_plus_baseline"]
Loss = Literal["ppo", "gspo", "cispo"]
Aggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"]
Proximal = Literal["forward", "interpolated", "behavior"]
Importance = Literal["token", "sequence", "icepop"]
Rejection = Literal[
    "token_k1", "seq_sum_k1", "seq_mean_k1", "token_k3", "seq_mean_k3", "seq_max_k3"
]
KLKind = Literal["k1", "k2", "k3"]
KLPlace = Literal["loss", "reward"]

_PRESETS: Mapping[str, Mapping[str, Any]] = {
    "grpo": {"aggregation": "seq-mean-token-mean", "clip_high": 0.2},
    "dapo": {"aggregation": "token-mean", "clip_low": 0.2, "clip_high": 0.28},
    "gspo": {
        "loss": "gspo",
        "aggregation": "seq-mean-token-mean",
        "clip_low": 3e-4,
        "clip_high": 4e-4,
        "proximal": "behavior",
    },
    "cispo": {
        "loss": "cispo",
        "aggregation": "token-mean",
        "clip_low": 1.0,
        "clip_high": 4.0,
        "proximal": "behavior",
    },
    "dr_grpo": {
        "advantage": "dr_grpo",
        "aggregation": "seq-mean-token-sum",
        "clip_high": 0.2,
    },
    "rloo": {"advantage": "rloo", "aggregation": "seq-mean-token-sum", "clip_high": 0.2},
    "reinforce_plus_plus": {
        "advantage": "reinforce_plus_plus_baseline",
        "aggregation": "token-mean",
        "clip_high": 0.2,
    },
}

_CLIPS = ("clip_low", "clip_high")


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    """Advantage estimator, loss and off-policy correction.

    Three policies: the behavior policies that sampled the tokens, the proximal policy at the start
    of a batch's update, and the current one that is optimised. The importance weight is
    proximal / behavior; the loss clips current / proximal.
    """

    advantage: Estimator | Callable[..., Any] = "grpo"
    """See `algorithms.group_advantages`; or a function of the user's
    (`algorithms.user.advantages_of`)."""
    advantage_kwargs: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Further arguments of an advantage function of the user's."""
    loss: Loss | Callable[..., Any] = "ppo"
    """See `algorithms.policy_loss`; or a function of the user's (`algorithms.user.costs_of`), whose
    costs are weighted and aggregated as those of the others."""
    loss_kwargs: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Further arguments of a loss function of the user's."""
    aggregation: Aggregation = "token-mean"
    """How token losses become one number; denominators count the whole batch over all ranks."""
    clip_low: float = 0.2
    """The ratio of policies is clipped below at 1 - clip_low; a loss of the user's gets neither."""
    clip_high: float = 0.28
    """... and above at 1 + clip_high (DAPO's clip-higher)."""
    dual_clip: float | None = None
    """Bound c > 1 of the loss for negative advantages, of ppo and gspo; None leaves it out."""
    proximal: Proximal = "forward"
    """Where the proximal log-probs come from. forward: the model at the start of the update (with
    one optimizer step a batch it costs no pass of its own); interpolated: between behavior and
    current by their versions (AReaL), without a pass; behavior: those of the engine, which makes it
    plain PPO without any correction, and is the old policy of GSPO and CISPO: the one that sampled
    (2507.18071, eq. 5; 2506.13585, eq. 4). Their loss is all in the ratio to it, which is 1 in the
    first optimizer step of a batch with any other choice."""
    importance: Importance | None = "token"
    """Weight of a token's loss. token, sequence: the ratio of a token or of the whole response,
    truncated at `importance_cap`; icepop: the token's ratio, and 0 outside of `icepop_bounds`
    (2510.18855); None: no weight. With ``proximal="behavior"``, where no weight is, sequence and
    icepop are refused."""
    importance_cap: float | None = 2.0
    """Largest importance weight (TIS); None does not truncate. Another bound is refused with
    ``proximal="behavior"``."""
    importance_normalize: bool = False
    """Divide the weights by their mean over the whole batch."""
    icepop_bounds: tuple[float, float] = (0.5, 5.0)
    """Smallest and largest ratio that IcePop keeps."""
    correction: Callable[..., Any] | None = None
    """A function of the user's in the place of `importance` and `rejection`
    (`algorithms.user.weights_of`), which are refused beside it; None: those."""
    correction_kwargs: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Further arguments of a correction function of the user's."""
    rejection: Rejection | None = None
    """Metric by which tokens or responses too far from the policy are taken out of the loss; see
    `algorithms.rejection_mask`. Refused with ``proximal="behavior"``, whose ratio is 1."""
    rejection_bound: float | tuple[float, float] = 2.0
    """Largest value that is kept, or (smallest, largest) ratio for the k1 metrics."""
    kl_coef: float = 0.0
    """Factor of the KL divergence from the reference policy, which is the model that `model` names;
    above 0 each train worker holds a shard of it."""
    kl: KLKind = "k3"
    """Estimator of that divergence; see `algorithms.kl_estimate`. k1, whose gradient does not see
    the reference, is refused in the loss."""
    kl_in: KLPlace = "loss"
    """loss: a term beside the policy loss, with gradients; reward: its sum over the response under
    the proximal policy is taken off the reward."""
    entropy_coef: float = 0.0
    """Factor of the entropy bonus."""
    overlong_buffer_tokens: int | None = None
    """DAPO's soft overlong punishment (2503.14476, eq. 13): within this many tokens below
    ``rollout.max_response_tokens`` the reward falls linearly, by `overlong_penalty` at the limit.
    None punishes no length."""
    overlong_penalty: float = 1.0
    """What the soft overlong punishment takes off the reward at the limit."""
    overlong_filter: bool = False
    """DAPO's overlong filtering (2503.14476, section 3.4): responses that ended at the limit, of
    tokens or of turns, are left out of the loss, with KL and entropy. Their rewards still count for
    the advantages of their group, and their tokens in denominators."""

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> AlgorithmConfig:
        """Settings of a published objective, with single settings replaced.

        GSPO's and CISPO's ratio is that of the current to the behavior policy. The others keep the
        correction for stale data (token-level truncated importance weights), which the papers,
        being on-policy, do not have. None has a KL term unless `kl_coef` is given.

        Args:
            name: ``"grpo"`` (2402.03300, eq. 3: mean over a response, then over responses),
                ``"dapo"`` (2503.14476, eq. 8: clip-higher, mean over tokens; its filter is
                `PartialRolloutConfig.filter_zero_variance`), ``"gspo"`` (2507.18071, eq. 5: clipped
                ratio of the sequence), ``"cispo"`` (2506.13585, eq. 4: clipped weight, no lower
                bound; the upper one as in 2510.13786), ``"dr_grpo"`` (2503.20783, eq. 2: no
                division by length or deviation), ``"rloo"`` (2402.14740, eq. 8) or
                ``"reinforce_plus_plus"`` (2501.03262, eq. 9: baseline of the group, whitened).
            overrides: Fields of this class. Beside a loss of the user's the clip of the preset is
                left out.

        Raises:
            ConfigError: For an unknown name, or settings that make no sense.

        Example:
            >>> AlgorithmConfig.preset("gspo").loss
            'gspo'
        """
        require(
            name in tuple(_PRESETS),
            "algorithm.preset",
            name,
            f"must be one of {', '.join(_PRESETS)}",
        )
        values = {**_PRESETS[name], **overrides}
        if callable(values.get("loss")):
            values = {k: v for k, v in values.items() if k not in _CLIPS or k in overrides}
        config: AlgorithmConfig = from_mapping(cls, "algorithm", values)
        return config

    @property
    def needs_reference(self) -> bool:
        """Whether the reference policy is asked for its log-probs."""
        return self.kl_coef > 0

    @property
    def freezes_all(self) -> bool:
        """Whether something of the whole batch depends on the proximal log-probs, so that no
        optimizer step gives its own."""
        in_reward = self.needs_reference and self.kl_in == "reward"
        return self.importance_normalize or in_reward

    def freezes_policy(self, mini_batches: int) -> bool:
        """Whether an update of so many mini-batches begins with passes of the policy that have no
        gradients; see `train.objective.frozen_policies`."""
        return self.proximal == "forward" and (mini_batches > 1 or self.freezes_all)

    def __post_init__(self) -> None:
        s = "algorithm"
        literals = {"advantage": Estimator, "loss": Loss}
        one_of(s, self, {k: v for k, v in literals.items() if not callable(getattr(self, k))})
        one_of(s, self, {"aggregation": Aggregation, "proximal": Proximal})
        one_of(s, self, {"kl": KLKind, "kl_in": KLPlace})
        positive(s, self, "clip_low", "clip_high")
        require(self.clip_low <= 1, f"{s}.clip_low", self.clip_low, "must be in (0, 1]")
        if self.dual_clip is not None:
            positive(s, self, "dual_clip")
            require(self.dual_clip > 1, f"{s}.dual_clip", self.dual_clip, "must exceed 1")
        if self.importance is not None:
            one_of(s, self, {"importance": Importance})
        if self.importance_cap is not None:
            positive(s, self, "importance_cap")
        of_type(s, self, bool, "true or false", "importance_normalize", "overlong_filter")
        if self.rejection is not None:
            one_of(s, self, {"rejection": Rejection})
        self._check_bounds()
        at_least(s, self, 0, "kl_coef", "entropy_coef", "overlong_penalty")
        whole_or_none(s, self, 1, "overlong_buffer_tokens")
        is_forward = self.proximal == "forward"
        require(
            is_forward or self.kl_coef == 0 or self.kl_in == "loss",
            f"{s}.kl_in",
            self.kl_in,
            'needs proximal="forward", whose log-probs are known before the update; or "loss"',
        )
        require(
            self.kl != "k1" or self.kl_coef == 0 or self.kl_in == "reward",
            f"{s}.kl",
            self.kl,
            'needs kl_in="reward": in the loss its gradient does not depend on the reference; '
            'or "k2" or "k3"',
        )
        require(
            is_forward or not self.importance_normalize,
            f"{s}.importance_normalize",
            self.importance_normalize,
            'needs proximal="forward", whose log-probs are known before the update',
        )
        self._check_inert()
        for name, num_given in _NUM_GIVEN.items():
            _check_function(name, getattr(self, name), num_given, getattr(self, f"{name}_kwargs"))

    def _check_inert(self) -> None:
        """Refuse what the loss that is asked for would not look at."""
        s = "algorithm"
        require(
            self.dual_clip is None or self.loss in ("ppo", "gspo"),
            f"{s}.dual_clip",
            self.dual_clip,
            'needs loss="ppo" or "gspo"; no other one takes a bound: leave it out',
        )
        for name in _CLIPS:
            require(
                isinstance(self.loss, str) or getattr(self, name) == getattr(type(self), name),
                f"{s}.{name}",
                getattr(self, name),
                "has no meaning beside a loss of your own, which does not get it: leave it out, or "
                "give it by algorithm.loss_kwargs",
            )
        require(
            self.correction is None or self.proximal != "behavior",
            f"{s}.correction",
            function_name(self.correction),
            'has no meaning with proximal="behavior", whose ratio to the behavior policy is 1; '
            'leave it out, or set proximal="forward"',
        )
        for name in ("importance", "importance_cap", "importance_normalize", "rejection"):
            require(
                self.correction is None or getattr(self, name) == getattr(type(self), name),
                f"{s}.{name}",
                getattr(self, name),
                "has no meaning beside algorithm.correction, which takes its place; leave it out",
            )
        require(
            self.importance is not None or not self.importance_normalize,
            f"{s}.importance_normalize",
            self.importance_normalize,
            "has no meaning without importance weights: leave it out, or set algorithm.importance",
        )
        level, buffer = self.importance, self.overlong_buffer_tokens
        looked_at = {
            "importance_cap": (level in ("token", "sequence"), "importance token or sequence"),
            "icepop_bounds": (level == "icepop", "importance icepop"),
            "rejection_bound": (self.rejection is not None, "rejection"),
            "overlong_penalty": (buffer is not None, "overlong_buffer_tokens"),
        }
        for name, (is_looked_at, needed) in looked_at.items():
            value = getattr(self, name)
            require(
                is_looked_at or value in (getattr(type(self), name), None),
                f"{s}.{name}",
                value,
                f"has no meaning without {needed}: leave it out",
            )
        if self.proximal != "behavior":
            return
        unused = {
            "rejection": self.rejection is None,
            "importance": self.importance in ("token", None),
            "importance_cap": self.importance_cap in (type(self).importance_cap, None),
        }
        for name, is_left in unused.items():
            require(
                is_left,
                f"{s}.{name}",
                getattr(self, name),
                'has no meaning with proximal="behavior", whose ratio to the behavior policy is 1; '
                'leave it out, or set proximal="forward"',
            )

    def _check_bounds(self) -> None:
        s, pair = "algorithm", "must be two numbers (low, high) with 0 <= low < high"
        object.__setattr__(self, "icepop_bounds", _pair(self.icepop_bounds))
        object.__setattr__(self, "rejection_bound", _pair(self.rejection_bound))
        require(_is_pair(self.icepop_bounds), f"{s}.icepop_bounds", self.icepop_bounds, pair)
        fresh = "must have 1 within: the policy's own data has that ratio, and would be left out"
        low, high = self.icepop_bounds
        require(low <= 1 <= high, f"{s}.icepop_bounds", self.icepop_bounds, fresh)
        if not isinstance(self.rejection_bound, tuple):
            positive(s, self, "rejection_bound")
            is_kept = self.rejection_bound >= 1 or not (self.rejection or "").endswith("k1")
            require(is_kept, f"{s}.rejection_bound", self.rejection_bound, fresh)
            return
        require(_is_pair(self.rejection_bound), f"{s}.rejection_bound", self.rejection_bound, pair)
        require(
            self.rejection is None or self.rejection.endswith("k1"),
            f"{s}.rejection_bound",
            self.rejection_bound,
            f"must be one number for {self.rejection}",
        )
        low, high = self.rejection_bound
        require(low <= 1 <= high, f"{s}.rejection_bound", self.rejection_bound, fresh)


_NUM_GIVEN = {"advantage": 2, "loss": 4, "correction": 3}
"""Functions that the user may give, and how many arguments they get without their names."""


def function_name(function: object) -> str | None:
    """Where a function of the user's is defined; None for None."""
    if function is None:
        return None
    while isinstance(function, functools.partial):
        function = function.func
    named: Any = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}:{named.__qualname__}"


def _check_function(name: str, function: object, num_given: int, kwargs: Any) -> None:
    """Check that a function of the user's takes what it is given."""
    key = f"algorithm.{name}_kwargs"
    is_texts = isinstance(kwargs, Mapping) and all(isinstance(k, str) for k in kwargs)
    require(is_texts, key, kwargs, "must be a mapping of names to values")
    if not callable(function):
        require(not kwargs, key, kwargs, f"needs a function of your own as algorithm.{name}")
        require(
            name != "correction" or function is None,
            f"algorithm.{name}",
            function,
            "must be a function, or None",
        )
        return
    require(
        not inspect.isclass(function),
        f"algorithm.{name}",
        function_name(function),
        "must be a function, or an object that is called as one; give an object of this class",
    )
    try:
        signature = inspect.signature(function)
    except ValueError:  # of compiled code, which says nothing of its arguments
        return
    given = {
        n: None for n in ("behavior_logprobs",) if n in signature.parameters and name == "loss"
    }
    try:
        signature.bind(*[None] * num_given, **given, **kwargs)
    except TypeError as error:
        require(
            False,
            key if kwargs else f"algorithm.{name}",
            dict(kwargs) if kwargs else function_name(function),
            f"the function gets {num_given} tensors and {sorted(kwargs) or 'nothing else'}: {error}"
            " (docs/objectives.md)",
        )


def _pair(value: Any) -> Any:
    """Lists, as YAML has them, become tuples."""
    return tuple(value) if isinstance(value, list) else value


def _is_pair(value: Any) -> bool:
    is_two = isinstance(value, tuple) and len(value) == 2 and all(map(is_number, value))
    return is_two and 0 <= value[0] < value[1]
