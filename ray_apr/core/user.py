"""What users implement, and what it gives back: rewards, filters, environments, callbacks."""

from __future__ import annotations

import math
import operator
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from ray_apr.core.sample import Sample

REWARD_SIGNATURE = (
    "must take one argument, as `def reward(sample)`: it is called with a Sample alone, whose "
    "`response_text` and `row` are the response and the row of the prompt"
)
"""Remedy of a function that takes something else."""
MAX_REWARD_METRICS = 64
"""Most figures beside a reward, and most names of them in a step's row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardResult:
    """A reward with figures worth logging beside it."""

    reward: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Finite numbers by name, at most `MAX_REWARD_METRICS`; the run folder has their mean, least
    and greatest of each step."""

    def __post_init__(self) -> None:
        is_text = isinstance(self.reward, str | bytes)
        reward = math.nan if is_text else _number(self.reward)
        if not math.isfinite(reward):
            raise ValueError(f"reward must be a finite number, got {self.reward!r}")
        object.__setattr__(self, "reward", reward)
        if len(self.metrics) > MAX_REWARD_METRICS:
            raise ValueError(
                f"a reward has {len(self.metrics)} metrics; at most {MAX_REWARD_METRICS} are kept"
            )
        metrics = {name: _finite(name, value) for name, value in self.metrics.items()}
        object.__setattr__(self, "metrics", metrics)


def _number(value: Any) -> float:
    """A plain number, also of NumPy's or torch's, which neither JSON nor Arrow takes; NaN of what
    is none."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _finite(name: str, value: Any) -> float:
    number = _number(value)
    if not isinstance(name, str) or not math.isfinite(number):
        raise ValueError(f"metric {name!r} of a reward must be a finite number, got {value!r}")
    return number


def _token_id(value: Any) -> int:
    """A plain number, also of NumPy's or torch's: an engine ends where it gets these, or a negative
    one; and the run where it keeps one of more than 31 bits."""
    try:
        number = operator.index(value)
    except TypeError as error:
        raise ValueError(f"token_ids of a step are whole numbers, not {value!r}") from error
    if not 0 <= number < 2**31:
        raise ValueError(f"token_ids of a step are at least 0 and below 2^31, not {number}")
    return number


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What an environment says after a turn: more to read, or that the sample is done.

    What is read is given as `token_ids`, as `text`, or as chat `messages`, which are rendered as
    the model's template continues a conversation. Only this is encoded; what the policy generated
    stays as it is.
    """

    token_ids: tuple[int, ...] = ()
    text: str = ""
    messages: tuple[Mapping[str, Any], ...] = ()
    done: bool = False
    """The sample ends with its last turn; nothing more can be read then."""
    reward: float | RewardResult | None = None
    """Of a sample that is done; None leaves it to the reward function."""
    state: Mapping[str, Any] | None = None
    """New `Sample.environment_state`, small and picklable; None keeps the old one."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_ids", tuple(map(_token_id, self.token_ids)))
        object.__setattr__(self, "messages", tuple(self.messages))
        if not isinstance(self.text, str):  # a tokenizer makes several responses of a list
            raise ValueError(f"text of a step is a str, not {self.text!r}; join a list of them")
        if self.done not in (True, False):  # "no" would end the sample
            raise ValueError(f"done of a step is True or False, not {self.done!r}")
        object.__setattr__(self, "done", bool(self.done))
        if not isinstance(self.state, Mapping | None):
            raise ValueError(f"state of a step is a mapping or None, not {self.state!r}")
        wrong = [message for message in self.messages if not isinstance(message, Mapping)]
        if wrong:  # a template may take it for a message without a role, and say nothing
            raise ValueError(f"messages of a step are mappings with a role, not {wrong[0]!r}")
        said = [name for name in ("token_ids", "text", "messages") if getattr(self, name)]
        if len(said) > 1:
            raise ValueError(f"a step says one thing, not {' and '.join(said)}")
        if self.done and said:
            raise ValueError(f"a step that is done has no {said[0]}: nobody would read them")
        if self.reward is not None:
            if not self.done:
                raise ValueError("a reward belongs to the step that is done")
            if not isinstance(self.reward, RewardResult):
                object.__setattr__(self, "reward", RewardResult(reward=self.reward))

    @property
    def result(self) -> RewardResult | None:
        """The reward with its figures; None leaves it to the reward function."""
        return self.reward if isinstance(self.reward, RewardResult) else None


RewardFunction = Callable[[Sample], float | RewardResult | Awaitable[float | RewardResult]]
"""A reward reads `sample.response_text`, `sample.row` and whatever else it needs."""

GroupFilter = Callable[[Sequence[Sample]], bool]
"""Whether a scored group may be trained. It runs inside the rollout worker and must be quick."""


class Environment(Protocol):
    """What the policy talks to between its turns: a tool, a user, a game.

    A turn ends where the engine stops by itself: at the end-of-sequence token, at one of
    ``rollout.sampling.stop_token_ids``, or with one of ``rollout.sampling.stop_strings``. Then
    `step` answers, and the policy goes on or is done. Both methods may be ``async``. They run in
    CPU worker processes, each call perhaps in another one, and a call is made again after a
    failure: all that a call needs to know is in the sample (``row``, ``turn_text``, ``turn_ids``,
    ``segments``, ``num_turns``, ``environment_state``), never in ``self``. So an
    answer is the same whether the sample was interrupted or not.

    Example:
        >>> from ray_apr.core.user import Step
        >>> class Echo(Environment):
        ...     def step(self, sample):
        ...         if sample.num_turns == 2 or sample.finish_reason:
        ...             return Step(done=True, reward=1.0)
        ...         return Step(text=sample.turn_text)
    """

    def reset(self, sample: Sample) -> Step | Awaitable[Step | None] | None:
        """Say what comes before the first turn; None, as without this method: nothing does."""
        return None

    def step(self, sample: Sample) -> Step | Awaitable[Step]:
        """Answer the last turn of `sample`.

        The last turn of ``rollout.max_turns`` is answered, too, as it may be done; otherwise what
        is said is not read, and the state kept. In a run without a reward function it is also
        called for a sample that ended by itself (``sample.finish_reason`` is LENGTH: its budget or
        its turns are spent), so about that turn once more, and must then give the reward, in a
        step that is done.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """What a callback is told of the run that it follows."""

    name: str
    folder: Path
    """The run folder, on this machine."""
    config: Mapping[str, Any]
    """All settings, as plain values (``config.json``)."""
    notes: dict[str, Any]
    """What the callback wants to know when the run is gone on with, as the id of a tracker's run;
    JSON, kept in the run folder after each of the callback's methods."""
    is_resumed: bool
    """Whether the callback has followed this run before, in another process."""


class RunCallback:
    """What follows a run from its driver: a tracker, a notifier, a plot.

    Methods are called one after the other, in a thread beside the run and other callbacks, none of
    which waits for them; a method that raises is logged, and the run goes on. Each step and
    evaluation is told once, in order, also where the run fails and begins again or is gone on with
    by another process; where a process is killed, the row at which it was may be told again.

    Example:
        >>> from ray_apr.core.user import RunCallback
        >>> class Best(RunCallback):
        ...     best = float("-inf")
        ...     def on_step(self, row):
        ...         self.best = max(self.best, row["reward_mean"])
    """

    name: str | None = None
    """Under which its notes are kept, another one for each callback; None: that of its class."""

    def on_start(self, run: RunInfo) -> None:
        """The run begins, or is gone on with. Where this raises, it is called again, and the other
        methods wait: then they are told of all that was there meanwhile."""

    def on_step(self, row: Mapping[str, Any]) -> None:
        """A step was trained; its row of ``metrics.jsonl``."""

    def on_evaluation(self, row: Mapping[str, Any]) -> None:
        """Held-out prompts were evaluated; the row of ``evaluations.jsonl``."""

    def on_checkpoint(self, step: int, path: str) -> None:
        """A checkpoint of so many trained steps is there, at a path or URI, which may be gone
        again when others have followed."""

    def on_end(self, final: Mapping[str, Any]) -> None:
        """The run has ended; what ``final.json`` has, its ``status`` ok, stopped or failed."""
