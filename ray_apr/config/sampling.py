"""How responses are drawn, and what ends them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ray_apr.config.common import LEAST_TEMPERATURE, MOST_TEMPERATURE
from ray_apr.core.checks import (
    at_least,
    is_whole,
    of_type,
    positive,
    require,
    whole,
    whole_or_none,
)

if TYPE_CHECKING:
    from ray_apr.core.sample import Sample

_MOST_END_IDS = 100
"""Most ids that end a response after a least number of tokens; with those of the model vLLM's GPU
worker has room for 128."""
_LARGEST_SUPPORT = 64
"""Largest top_k. Four bytes a token and id travel with each sample."""


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """The distribution that responses are drawn from, and what ends them."""

    temperature: float = 1.0
    """Tokens are drawn from softmax(logits / temperature), and that distribution is trained."""
    top_p: float = 1.0
    """Below 1 it needs a `top_k`, within which engines say what was left of the vocabulary."""
    top_k: int = 0
    """Tokens are drawn from so many of the likeliest, 2 to 64: engines say with each token which
    they were, and the trainer's distribution is on the same ones. 0 takes the whole vocabulary."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end a response beside the model's end-of-sequence id."""
    stop_strings: tuple[str, ...] = ()
    """Texts that end a response, in a run with an environment a turn; the token that completes one
    is its last. Text is what the reward reads: special tokens have none."""
    min_tokens: int = 0
    """Tokens of a response, generated and observed, before which nothing ends it: until then no id
    that would is drawn, and the trainer's distribution is without these ids, too."""
    seed: int | None = None
    """With a seed, each request's seed is derived from it, that of an evaluation which draws, too;
    None leaves it to the engine, which has less to do: vLLM draws the tokens of requests with seeds
    one by one."""

    def __post_init__(self) -> None:
        s = "rollout.sampling"
        whole(s, self, "top_k", "min_tokens")
        at_least(s, self, 0, "top_k", "min_tokens")
        positive(s, self, "temperature", "top_p")
        whole_or_none(s, self, 0, "seed")
        require(
            LEAST_TEMPERATURE <= self.temperature <= MOST_TEMPERATURE,
            f"{s}.temperature",
            self.temperature,
            f"must be at least {LEAST_TEMPERATURE} and at most {MOST_TEMPERATURE:g}: engines draw "
            "with no other",
        )
        require(self.top_p <= 1, f"{s}.top_p", self.top_p, "must be in (0, 1]")
        require(
            self.top_k != 1,
            f"{s}.top_k",
            self.top_k,
            "must be 0, or at least 2: the likeliest token alone has probability 1 whatever the "
            "weights are, and nothing is learned from it",
        )
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
        self._check_stops(s)

    def seed_of(self, sample: Sample) -> int | None:
        """Seed of a sample's next request: siblings and continuations draw differently."""
        if self.seed is None:
            return None
        source = f"{self.seed}/{sample.sample_id}/{sample.num_tokens}"
        return int.from_bytes(hashlib.blake2b(source.encode(), digest_size=4).digest(), "big")

    def _check_stops(self, s: str) -> None:
        of_type(s, self, list | tuple, "a list of token ids", "stop_token_ids")
        of_type(s, self, list | tuple, "a list of texts", "stop_strings")
        for name in ("stop_token_ids", "stop_strings"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        require(
            all(is_whole(i, 0) for i in self.stop_token_ids),
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
            not self.min_tokens or len(self.stop_token_ids) <= _MOST_END_IDS,
            f"{s}.stop_token_ids",
            self.stop_token_ids,
            f"must be at most {_MOST_END_IDS} ids with min_tokens, which keeps each of them from "
            "being drawn; leave some out, or set min_tokens to 0",
        )
