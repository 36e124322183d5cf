"""A dry run's look at each reward: one call, in this process, that starts nothing.

The call is ended before it starts a process, opens a connection or asks a judge: what it would have
said is unknown then, and no error.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import sys
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ray_apr.config import EvaluationConfig, RolloutConfig
from ray_apr.core.exceptions import ConfigError, UserCodeError, one_line, raised_by_user
from ray_apr.core.sample import FinishReason, Prompt, Sample, Segment
from ray_apr.core.user import RewardFunction, RewardResult
from ray_apr.data.rows import PromptRows
from ray_apr.data.tokenizers import encode_prompt, load_tokenizer, with_template_kwargs
from ray_apr.rewards.answers import as_result
from ray_apr.rewards.jails import RUNS
from ray_apr.rewards.judge import ASKS
from ray_apr.run.spec import RunSpec

if TYPE_CHECKING:
    from ray_apr.cli.settings import RunSettings

_ANSWERS = ("answer", "solution", "ground_truth", "target", "expected", "gold", "label")
"""Columns, the first of which that a row has is taken for the response."""
_MOST_SHOWN = 40
_LIMIT_S = 20.0
"""A reward may load what it needs at its first call."""
_WANTS_MORE = "; as it should, if it wants more than the bare answer, such as a form around it"
_WITHHELD = {
    ASKS: "asks a judge",
    RUNS: "starts a process",
    "socket.connect": "opens a connection",
    "socket.getaddrinfo": "opens a connection",
    "subprocess.Popen": "starts a process",
    "os.fork": "starts a process",
    "os.forkpty": "starts a process",
    "os.posix_spawn": "starts a process",
    "os.system": "starts a process",
}
"""Audit events of Python, and what a call would do at them."""


class _WithheldError(RuntimeError):
    """What a call was about to do is not done in a dry run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Called:
    """A reward, and the prompt that it is called for."""

    setting: str
    name: str
    """As the settings have it."""
    reward: RewardFunction
    row: Mapping[str, Any]
    """Of the prompt."""
    place: str
    """Where a person finds it."""


def rewards_of(
    settings: RunSettings, rows: Mapping[str, PromptRows], spec: RunSpec
) -> Iterator[Called]:
    """The reward of a run and those of its suites, each with the first prompt that it is for, and
    that of the run with the first held-out one of each suite that has none of its own, too.

    Args:
        settings: Of the run.
        rows: Prompts, by their setting.
        spec: Of the run.
    """
    own = {} if spec.evaluation is None else spec.evaluation.rewards
    for setting, prompts in rows.items():
        for suite, index in _firsts(prompts, setting, spec.evaluation).items():
            is_own = setting != "prompts" and suite in own
            reward = own[suite] if is_own else spec.reward
            name = settings.evaluation_rewards[suite] if is_own else settings.reward
            if reward is not None and name is not None:
                yield Called(
                    setting=f"evaluation.rewards.{suite}" if is_own else "reward",
                    name=name,
                    reward=reward,
                    row=prompts.row(index),
                    place=prompts.place(index) or f"{setting}[{index}]",
                )


def _firsts(
    prompts: PromptRows, setting: str, evaluation: EvaluationConfig | None
) -> dict[str, int]:
    """The first row of each suite, in their order; "" is all of those that have no suites."""
    if setting != "prompts" and evaluation is None:
        return {}
    if setting == "prompts" or evaluation is None or evaluation.suite_column is None:
        return {"": 0}
    firsts: dict[str, int] = {}
    for index, suite in enumerate(prompts.column(evaluation.suite_column)):
        firsts.setdefault(str(suite), index)
    return firsts


def call_rewards(
    rewards: Iterable[Called], spec: RunSpec, tell: Callable[[str], None]
) -> list[str]:
    """Call each reward once, where the model's tokenizer is here.

    Args:
        rewards: What is called; none where the environment gives the rewards.
        spec: Of the run.
        tell: Gets what a reward gave, or why it was not called.

    Returns:
        Warnings: a reward that is slow, or whose judge has no key here.

    Raises:
        ConfigError: If one raised, or gave no finite number.
    """
    try:
        tokenizer = load_tokenizer(spec.model, is_here=True)
    except (OSError, ValueError):  # a warning of its own has said so
        return []
    tokenizer = with_template_kwargs(tokenizer, spec.rollout.chat_template_kwargs)
    warnings = []
    left: set[str] = set()
    """What was not called, or did not answer: it is told once."""
    for called in rewards:
        said = f"{called.setting}: {called.name}"
        if said in left:
            continue
        if spec.environment is not None:
            tell(f"{said} is not called by a dry run, as it reads what an environment said")
            left.add(said)
            continue
        sample = _first_sample(called.row, tokenizer, spec.rollout)
        call = _Call(called.reward, sample)
        limit_s = min(_LIMIT_S, spec.rollout.reward.timeout_s)
        call.run(limit_s)
        column, text = _answer_of(called.row)
        shown = f"response {text[:_MOST_SHOWN]!r}{column and f', its {column},'} to {called.place}"
        if call.result is None:
            left.add(said)
        if call.would is not None:
            tell(f"{said} is not called by a dry run, as it {call.would}")
            if call.unset_key is not None:
                warnings.append(
                    f"{said}: {call.unset_key} is not set here, which its judge's api_key_env "
                    "names; the reward's processes need it"
                )
        elif call.error is not None:
            remedy = f"{_said(call.error)}, for the {shown}; correct the function, or the row"
            raise ConfigError(called.setting, called.name, remedy) from call.error
        elif call.result is None:
            warnings.append(
                f"{said} gave nothing for the {shown} in {limit_s:g} s; it was left alone"
            )
        else:
            parts = "".join(f", {part} {value:g}" for part, value in call.result.metrics.items())
            value = call.result.reward
            doubt = _WANTS_MORE if column and value == 0 else ""
            tell(f"{said} gives {value:g}{parts} for the {shown}{doubt}")
    return warnings


class _Call:
    """A call of the reward that is ended where it is about to do more than compute."""

    def __init__(self, reward: RewardFunction, sample: Sample) -> None:
        self._reward = reward
        self._sample = sample
        self._is_watched = False
        self.result: RewardResult | None = None
        self.error: BaseException | None = None
        self.would: str | None = None
        """What it was kept from."""
        self.unset_key: str | None = None
        """The environment variable that this process lacks, with the key of a judge."""

    def run(self, limit_s: float) -> None:
        """Call it, in a thread that is left alone at the limit.

        Waits for: the user's function. Unblocked by: its answer, or the limit.
        """
        sys.addaudithook(self._hook)  # for good: Python takes none away
        thread = threading.Thread(target=self._run, name="first-reward", daemon=True)
        self._is_watched = True
        thread.start()
        thread.join(timeout=limit_s)
        self._is_watched = False

    def _run(self) -> None:
        try:
            value = self._reward(self._sample)
            if inspect.isawaitable(value):
                value = asyncio.run(_awaited(value))
            self.result = as_result(self._sample, value)
        except (Exception, SystemExit) as error:  # noqa: BLE001 (the user's code; it is told)
            self.error = error

    def _hook(self, event: str, about: tuple[Any, ...]) -> None:
        if self._is_watched and event in _WITHHELD:
            self.would = _WITHHELD[event]
            if event == ASKS and about[0] is not None and not os.environ.get(about[0]):
                self.unset_key = about[0]
            raise _WithheldError(f"no dry run {self.would}")


def _first_sample(row: Mapping[str, Any], tokenizer: Any, rollout: RolloutConfig) -> Sample:
    """A prompt, answered with the text of its row's answer; without one, with nothing."""
    most = rollout.max_response_tokens
    _, text = _answer_of(row)
    ids = tuple(encode_prompt(tokenizer, text))[:most] if text else ()
    segment = Segment(policy_version=0, token_ids=ids, logprobs=(0.0,) * len(ids))
    asked = tuple(encode_prompt(tokenizer, row[rollout.prompt_column]))
    return Sample(
        sample_id="e0-0-0",
        group_id="e0-0",
        prompt=Prompt(prompt_id="e0-0", token_ids=asked, row=row),
        max_response_tokens=most,
        segments=(segment,) if ids else (),
        finish_reason=FinishReason.STOP,
        response_text=text,
    )


def _answer_of(row: Mapping[str, Any]) -> tuple[str, str]:
    """The column of a row's answer and its text; two empty texts where it has none."""
    for name in _ANSWERS:
        if isinstance(answer := row.get(name), str | int | float):
            return name, str(answer)
    return "", ""


async def _awaited(value: Awaitable[Any]) -> Any:
    """Waits for: the user's reward. Unblocked by: its answer; who called leaves it at a limit."""
    return await value


def _said(error: BaseException) -> str:
    """What a reward raised, and where."""
    if isinstance(error, UserCodeError):
        return error.detail
    return f"raised {type(error).__name__}: {one_line(error)} ({raised_by_user(error)})"
