"""Settings of the rollout servers, of sampling, and of rewards."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ray_apr.checks import (
    at_least,
    is_number,
    of_type,
    one_of,
    positive,
    require,
    whole,
    whole_or_none,
)
from ray_apr.config.common import LEAST_TEMPERATURE, DType, Placement
from ray_apr.config.engine_options import check_engine_options
from ray_apr.types import SamplingParams

Device = Literal["auto", "cpu", "cuda"]
_MOST_END_IDS = 100
"""Most ids that end a response after a least number of tokens; with those of the model vLLM's GPU
worker has room for 128."""
_LARGEST_SUPPORT = 64
"""Largest top_k. Four bytes a token and id travel with each sample."""


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name, which may lead anywhere
        return host == "localhost"


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """Rollout servers, sampling and rewards."""

    engine: str | Callable[..., Any] = "vllm"
    """What engines are made by: "vllm", or a function or class of the user's that takes an
    `EngineSpec` and a replica's id and gives an `Engine` (`serve.engine`); in YAML as
    "package.module:name" or "file.py:name"."""
    num_replicas: int = 1
    """Rollout servers, each one engine."""
    group_size: int = 8
    """Samples of one prompt."""
    max_response_tokens: int = 1024
    """Budget of one response over all of its interruptions, in tokens."""
    max_model_len: int | None = None
    """Longest prompt + response of the engine, in tokens; None takes the model's own limit."""
    temperature: float = 1.0
    """Tokens are drawn from softmax(logits / temperature), and that distribution is trained."""
    top_p: float = 1.0
    """Below 1 it needs a `top_k`, within which engines say what was left of the vocabulary."""
    top_k: int = 0
    """Tokens are drawn from so many of the likeliest, at most 64: engines say with each token which
    they were, and the trainer's distribution is on the same ones. 0 takes the whole vocabulary."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end a response beside the model's end-of-sequence id."""
    stop_strings: tuple[str, ...] = ()
    """Texts that end a response, in a run with an environment a turn; the token that completes one
    is its last. Text is what the reward reads: special tokens have none."""
    min_response_tokens: int = 0
    """Tokens of a response, generated and observed, before which nothing ends it: until then no id
    that would is drawn, and the trainer's distribution is without these ids, too."""
    seed: int | None = None
    """With a seed, each request's seed is derived from it; None leaves it to the engine, which has
    less to do: vLLM draws the tokens of requests with seeds one by one."""
    engine_seed: int = 0
    """Seed of the random state of each engine, from which requests without seeds draw."""
    device: Device = "auto"
    """Where the engines run; auto takes CUDA when the cluster has GPUs."""
    dtype: DType = "float32"
    """Data type of the engine's weights."""
    tensor_parallel_size: int = 1
    """GPUs of one engine."""
    placement: Placement = "disaggregated"
    """disaggregated: engines and train workers have GPUs of their own; colocated: they have the
    same ones in turns, one engine worker and one train worker each. The engines sleep while a batch
    is trained, the train workers' memory is on the host while responses are generated."""
    num_cpus_per_replica: float = 1.0
    """Ray CPUs that a replica reserves."""
    engine_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of vLLM's engine, e.g. ``{"max_num_seqs": 64}``: those that change speed
    and memory alone (`config.engine_options`); of another engine whatever it takes."""
    prompt_column: str = "prompt"
    """Column of the dataset: text, chat messages, or token ids."""
    replay_column: str | None = None
    """Column with a list of response lengths, in tokens, of which sample i takes number i: each
    response gets exactly so long, whatever the model says. It replays a trace; None lets the model
    decide."""
    http_host: str = "127.0.0.1"
    """Address that the HTTP ingress listens at; any but loopback demands a control token."""
    http_port: int | None = None
    """Port of the HTTP ingress; None opens none."""
    control_token: str | None = field(default=None, repr=False)
    """Bearer token that all of HTTP but ``/healthz`` demands; None demands none."""
    start_timeout_s: float = 600.0
    """Limit for all servers to become ready, and for the train workers to find a place."""
    stall_timeout_s: float = 300.0
    """Longest time without a new token of an engine that has requests, pauses left out; then its
    requests end with the tokens that they have, and the engine is replaced. However long a request
    takes, it goes on while its engine does."""
    max_request_failures: int = 3
    """Failures of one sample before its group is dropped as failed."""
    max_consecutive_failures: int = 8
    """Failures in a row that stop the run: of generations, of an environment's steps, or of
    rewards, each a row of its own, which a success of its kind begins anew. What fails of one cause
    while it was under way together counts once; an engine that is gone counts as none."""
    max_turns: int | None = None
    """Most turns of a response in a run with an environment; None leaves it to the budget."""
    reward_timeout_s: float = 60.0
    """Limit for one call of the reward function, or of the environment."""
    reward_retries: int = 1
    """Further tries after such a call raised or timed out."""
    reward_concurrency: int = 16
    """Such calls at the same time."""
    num_cpus_per_reward: float = 0.0
    """Ray CPUs of one reward worker; 0 shares what is there."""
    num_reward_workers: int = 1
    """Processes that run the reward function and the environment."""

    def __post_init__(self) -> None:
        s = "rollout"
        sizes = ("num_replicas", "group_size", "max_response_tokens", "tensor_parallel_size")
        limits = ("max_request_failures", "max_consecutive_failures", "reward_concurrency")
        whole(s, self, *sizes, *limits, "top_k", "reward_retries", "num_reward_workers")
        whole(s, self, "min_response_tokens", "engine_seed")
        at_least(s, self, 1, *sizes, *limits, "num_reward_workers")
        at_least(s, self, 0, "num_cpus_per_replica", "num_cpus_per_reward", "top_k")
        at_least(s, self, 0, "reward_retries", "min_response_tokens", "engine_seed")
        positive(s, self, "temperature", "top_p", "start_timeout_s")
        positive(s, self, "stall_timeout_s", "reward_timeout_s")
        require(
            self.temperature >= LEAST_TEMPERATURE,
            f"{s}.temperature",
            self.temperature,
            f"must be at least {LEAST_TEMPERATURE}: engines draw with no smaller one",
        )
        require(self.top_p <= 1, f"{s}.top_p", self.top_p, "must be in (0, 1]")
        require(
            self.top_k <= _LARGEST_SUPPORT,
            f"{s}.top_k",
            self.top_k,
            f"must be at most {_LARGEST_SUPPORT}: the trainer has to know which tokens could be "
            "drawn, and they are recorded with each one; 0 takes the whole vocabulary",
        )
        require(
            self.top_p == 1 or self.top_k > 0,
            f"{s}.top_p",
            self.top_p,
            "must be 1 without top_k: the trainer has to know which tokens could be drawn, and "
            f"engines say it within a top_k of at most {_LARGEST_SUPPORT}; set both, e.g. "
            f"top_k = {_LARGEST_SUPPORT}",
        )
        one_of(s, self, {"device": Device, "dtype": DType, "placement": Placement})
        of_type(s, self, Mapping, "a mapping", "engine_kwargs")
        self._check_engine()
        of_type(s, self, str, "a text", "prompt_column", "http_host")
        of_type(s, self, str | None, "a text or None", "control_token", "replay_column")
        self._check_stops()
        whole_or_none(s, self, 1, "max_model_len", "http_port", "max_turns")
        whole_or_none(s, self, 0, "seed")
        if self.max_model_len is not None:
            require(
                self.max_model_len > self.max_response_tokens,
                f"{s}.max_model_len",
                self.max_model_len,
                f"must exceed max_response_tokens = {self.max_response_tokens}, to hold the prompt",
            )
        port = self.http_port
        require(port is None or port < 65536, f"{s}.http_port", port, "must be in 1..65535 or None")
        token = self.control_token
        require(
            token is None or re.fullmatch(r"[!-~]+", token) is not None,
            f"{s}.control_token",
            "…",
            "must be visible ASCII characters, at least one",
        )
        require(
            port is None or token is not None or _is_loopback(self.http_host),
            f"{s}.control_token",
            token,
            f'must be set with http_host = "{self.http_host}", which others than this machine '
            'reach; or set http_host to "127.0.0.1"',
        )

    def _check_stops(self) -> None:
        s = "rollout"
        of_type(s, self, list | tuple, "a list of token ids", "stop_token_ids")
        of_type(s, self, list | tuple, "a list of texts", "stop_strings")
        for name in ("stop_token_ids", "stop_strings"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        require(
            all(isinstance(i, int) and is_number(i) and i >= 0 for i in self.stop_token_ids),
            f"{s}.stop_token_ids",
            self.stop_token_ids,
            "must be a list of whole numbers of at least 0",
        )
        require(
            all(isinstance(text, str) and text for text in self.stop_strings),
            f"{s}.stop_strings",
            self.stop_strings,
            "must be a list of texts, none of them empty",
        )
        require(
            self.min_response_tokens <= self.max_response_tokens,
            f"{s}.min_response_tokens",
            self.min_response_tokens,
            f"must be at most max_response_tokens = {self.max_response_tokens}",
        )
        require(
            not self.min_response_tokens or len(self.stop_token_ids) <= _MOST_END_IDS,
            f"{s}.stop_token_ids",
            self.stop_token_ids,
            f"must be at most {_MOST_END_IDS} ids with min_response_tokens, which keeps each of "
            "them from being drawn; leave some out, or set min_response_tokens to 0",
        )
        for name in ("stop_token_ids", "stop_strings", "min_response_tokens"):
            require(
                self.replay_column is None or not getattr(self, name),
                f"{s}.{name}",
                getattr(self, name),
                "must be left out with replay_column, which says how long each response gets",
            )

    def _check_engine(self) -> None:
        s = "rollout"
        if self.engine == "vllm":
            check_engine_options(self.engine_kwargs)
            if self.device == "cpu":
                self.check_on_cpu()
            return
        require(
            callable(self.engine) or ":" in str(self.engine),
            f"{s}.engine",
            self.engine,
            'must be "vllm", a function that makes an engine, or in YAML "file.py:name"',
        )
        require(
            not self.is_colocated,
            f"{s}.placement",
            self.placement,
            'must be "disaggregated" where rollout.engine is your own: vLLM alone sleeps and wakes',
        )

    def check_on_cpu(self) -> None:
        """Refuse what ends an engine on CPU; where `device` is auto, once it is known.

        Raises:
            ConfigError: If prompts would be prefilled in steps although requests have seeds.
        """
        name = "enable_chunked_prefill"
        require(
            self.engine != "vllm" or self.seed is None or not self.engine_kwargs.get(name),
            f"rollout.engine_kwargs.{name}",
            self.engine_kwargs.get(name),
            "ends vLLM on CPU where requests have seeds, as it turns their generators back; leave "
            "it out, or set rollout.seed to null",
        )

    @property
    def is_colocated(self) -> bool:
        """Whether engines and train workers have the same GPUs in turns."""
        return self.placement == "colocated"

    @property
    def sampling(self) -> SamplingParams:
        """How responses are drawn; see `SamplingParams.of_call` for a single call."""
        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            stop_token_ids=self.stop_token_ids,
            stop_strings=self.stop_strings,
            min_tokens=self.min_response_tokens,
            reports_support=self.top_k > 0,
            ignore_eos=self.replay_column is not None,
        )
