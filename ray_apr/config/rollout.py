"""Settings of the rollouts: their size, and sections of what they need."""

from __future__ import annotations

import functools
import json
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ray_apr.config.engine import EngineConfig
from ray_apr.config.http import HttpConfig
from ray_apr.config.journal import JournalConfig
from ray_apr.config.renamed import renew
from ray_apr.config.reward import RewardConfig
from ray_apr.config.sampling import SamplingConfig
from ray_apr.core.checks import at_least, from_mapping, of_type, require, whole, whole_or_none
from ray_apr.core.exceptions import ConfigError
from ray_apr.core.messages import SamplingParams

_OWN_VARIABLES = ("messages", "add_generation_prompt")
_C = TypeVar("_C")
_SECTIONS: Mapping[str, type] = {
    "engine": EngineConfig,
    "sampling": SamplingConfig,
    "reward": RewardConfig,
    "http": HttpConfig,
    "journal": JournalConfig,
}


def _takes_old_names(cls: type[_C]) -> type[_C]:
    """Let a config be made with the names that its settings had before they got sections."""
    make: Any = cls.__init__

    @functools.wraps(make)
    def __init__(self: Any, **given: Any) -> None:
        def warn(text: str) -> None:
            warnings.warn(text, FutureWarning, stacklevel=4)

        make(self, **renew(given, warn))

    setattr(cls, "__init__", __init__)  # noqa: B010  (mypy refuses the assignment)
    return cls


@_takes_old_names
@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """Rollout servers, groups, and sections of engines, sampling, rewards, HTTP and journal.

    Example:
        >>> RolloutConfig(num_replicas=2, sampling=SamplingConfig(temperature=0.7)).group_size
        8
    """

    num_replicas: int = 1
    """Rollout servers, each one engine."""
    group_size: int = 8
    """Samples of one prompt."""
    max_response_tokens: int = 1024
    """Budget of one response over all of its interruptions, in tokens."""
    max_turns: int | None = None
    """Most turns of a response in a run with an environment; None leaves it to the budget."""
    prompt_column: str = "prompt"
    """Column of the dataset: text, chat messages, or token ids."""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the model's chat template, as ``{enable_thinking: false}`` of Qwen3's; for
    prompts that are messages, and messages of an environment. Refused where there are neither."""
    replay_column: str | None = None
    """Column with a list of response lengths, in tokens and within `max_response_tokens`, of which
    sample i takes number i, and begins anew with a list that is shorter than the group: each
    response gets exactly so long, whatever the model says. It replays a trace; None lets the model
    decide."""
    max_request_failures: int = 3
    """Failures of one sample before its group is dropped as failed. The samples of one prompt,
    those of its other tries included, have `group_size` times as many together."""
    max_consecutive_failures: int = 8
    """Failures in a row that stop the run: of generations, of an environment's steps, or of
    rewards, each a row of its own, which a success of its kind begins anew. What fails of one cause
    while it was under way together counts once; an engine that is gone counts as none."""
    max_poison_prompts: int = 8
    """Most prompts that are set aside because they kill engines; one more ends the run."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    """What engines are made by, where they run; each section may be a mapping of its settings."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    """How responses are drawn, and what ends them."""
    reward: RewardConfig = field(default_factory=RewardConfig)
    """Calls of the reward function and the environment."""
    http: HttpConfig = field(default_factory=HttpConfig)
    """The servers' verbs over HTTP."""
    journal: JournalConfig = field(default_factory=JournalConfig)
    """What survives the death of a part."""

    def __post_init__(self) -> None:
        s = "rollout"
        for name, cls in _SECTIONS.items():
            value = getattr(self, name)
            value = {} if value is None else value  # a section without a line, in YAML
            if isinstance(value, Mapping):
                object.__setattr__(self, name, from_mapping(cls, f"{s}.{name}", value))
            of_type(s, self, cls, "a mapping of settings", name)
        sizes = ("num_replicas", "group_size", "max_response_tokens")
        limits = ("max_request_failures", "max_consecutive_failures")
        whole(s, self, *sizes, *limits)
        at_least(s, self, 1, *sizes, *limits)
        whole(s, self, "max_poison_prompts")
        at_least(s, self, 0, "max_poison_prompts")
        whole_or_none(s, self, 1, "max_turns")
        of_type(s, self, str, "a text", "prompt_column")
        of_type(s, self, str | None, "a text or None", "replay_column")
        of_type(s, self, Mapping, "a mapping of variables", "chat_template_kwargs")
        for name, value in self.chat_template_kwargs.items():
            _check_variable(f"{s}.chat_template_kwargs", name, value)
        if self.engine.device == "cpu":
            self.check_on_cpu()
        bounds = self.engine.autoscaling
        require(
            bounds is None or bounds.min_replicas <= self.num_replicas <= bounds.max_replicas,
            f"{s}.num_replicas",
            self.num_replicas,
            "must be between min_replicas and max_replicas of rollout.engine.autoscaling",
        )
        longest, budget = self.engine.max_model_len, self.max_response_tokens
        require(
            longest is None or longest > budget,
            f"{s}.engine.max_model_len",
            longest,
            f"must exceed rollout.max_response_tokens = {budget}, to hold the prompt",
        )
        require(
            self.sampling.min_tokens <= budget,
            f"{s}.sampling.min_tokens",
            self.sampling.min_tokens,
            f"must be at most rollout.max_response_tokens = {budget}",
        )
        for name in ("stop_token_ids", "stop_strings", "min_tokens"):
            require(
                self.replay_column is None or not getattr(self.sampling, name),
                f"{s}.sampling.{name}",
                getattr(self.sampling, name),
                "must be left out with replay_column, which says how long each response gets",
            )

    def check_on_cpu(self) -> None:
        """Refuse what ends an engine on CPU; where ``engine.device`` is auto, once it is known.

        Raises:
            ConfigError: If prompts would be prefilled in steps although requests have seeds, or are
                not although they would have to be, or an engine is to have several workers.
        """
        name, engine = "enable_chunked_prefill", self.engine
        require(
            engine.factory != "vllm" or engine.tensor_parallel_size == 1,
            "rollout.engine.tensor_parallel_size",
            engine.tensor_parallel_size,
            "must be 1 on CPU, where an engine has one worker; rollout.num_replicas makes more of "
            "them",
        )
        most = "max_num_scheduled_tokens"
        scheduled, longest = engine.kwargs.get(most, math.inf), engine.max_model_len or math.inf
        require(
            engine.factory != "vllm" or scheduled >= longest or bool(engine.kwargs.get(name)),
            f"rollout.engine.kwargs.{most}",
            engine.kwargs.get(most),
            "needs enable_chunked_prefill on CPU: without it vLLM never takes in a prompt that is "
            "longer; set both, or a rollout.engine.max_model_len that is at most as large",
        )
        require(
            engine.factory != "vllm" or self.sampling.seed is None or not engine.kwargs.get(name),
            f"rollout.engine.kwargs.{name}",
            engine.kwargs.get(name),
            "ends vLLM on CPU where requests have seeds, as it turns their generators back; leave "
            "it out, or set rollout.sampling.seed to null",
        )

    @property
    def is_colocated(self) -> bool:
        """Whether engines and train workers have the same GPUs."""
        return self.engine.is_colocated

    @property
    def takes_turns(self) -> bool:
        """Whether they have these in turns."""
        return self.engine.takes_turns

    @property
    def sampling_params(self) -> SamplingParams:
        """How responses are drawn; see `SamplingParams.of_call` for a single call."""
        sampling = self.sampling
        return SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            stop_token_ids=sampling.stop_token_ids,
            stop_strings=sampling.stop_strings,
            min_tokens=sampling.min_tokens,
            reports_support=sampling.top_k > 0,
            ignore_eos=self.replay_column is not None,
        )


def _check_variable(field: str, name: Any, value: Any) -> None:
    """Check a variable of a chat template."""
    is_name = isinstance(name, str) and name.isidentifier()
    require(is_name, field, name, "must have names of variables as its keys")
    require(name not in _OWN_VARIABLES, field, name, "is what ray_apr says itself; leave it out")
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        remedy = "must be a text, number, true, false or null, or lists and mappings of these"
        raise ConfigError(f"{field}.{name}", value, remedy) from error
