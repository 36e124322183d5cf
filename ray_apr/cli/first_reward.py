"""A dry run's look at the reward: one call, in this process, that starts nothing.

The call is ended before it starts a process, opens a connection or asks a judge: what it would have
said is unknown then, and no error.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from ray_apr.config import RolloutConfig
from ray_apr.core.exceptions import ConfigError, UserCodeError, one_line
from ray_apr.core.sample import FinishReason, Prompt, Sample, Segment
from ray_apr.core.user import RewardFunction, RewardResult
from ray_apr.data.prompts import encode_prompt, load_tokenizer
from ray_apr.data.rows import PromptRows
from ray_apr.rewards.judge import ASKS
from ray_apr.rollout.scoring import checked_reward
from ray_apr.run.spec import RunSpec

_ANSWER = "answer"
"""Column whose text is taken for the response."""
_MOST_SHOWN = 40
_LIMIT_S = 20.0
"""A reward may load what it needs at its first call."""
_WITHHELD = {
    ASKS: "asks a judge",
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


def call_reward(
    name: str | None, prompts: PromptRows, spec: RunSpec, tell: Callable[[str], None]
) -> list[str]:
    """Call the reward for the first prompt, where the model's tokenizer is here.

    Args:
        name: Of the reward, as the settings have it; None: the environment gives the rewards.
        prompts: Of the run, at least one.
        spec: Of the run.
        tell: Gets what the reward gave, or why it was not called.

    Returns:
        Warnings: a reward that is slow.

    Raises:
        ConfigError: If it raised, or gave no finite number.
    """
    if name is None or spec.reward is None:
        return []
    if spec.environment is not None:
        tell(f"reward: {name} is not called by a dry run, as it reads what an environment said")
        return []
    try:
        tokenizer = load_tokenizer(spec.model, is_here=True)
    except (OSError, ValueError):  # a warning of its own has said so
        return []
    sample = _first_sample(prompts, tokenizer, spec.rollout)
    call = _Call(spec.reward, sample)
    limit_s = min(_LIMIT_S, spec.rollout.reward.timeout_s)
    call.run(limit_s)
    place = prompts.place(0) or "prompts[0]"
    shown = f"response {(sample.response_text or '')[:_MOST_SHOWN]!r} to {place}"
    if call.would is not None:
        tell(f"reward: {name} is not called by a dry run, as it {call.would}")
    elif call.error is not None:
        remedy = f"{_said(call.error)}, for the {shown}; correct the function, or the row"
        raise ConfigError("reward", name, remedy) from call.error
    elif call.result is None:
        return [f"reward: {name} gave nothing for the {shown} in {limit_s:g} s; it was left alone"]
    else:
        parts = "".join(f", {part} {value:g}" for part, value in call.result.metrics.items())
        tell(f"reward: {name} gives {call.result.reward:g}{parts} for the {shown}")
    return []


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
            self.result = checked_reward(self._sample, value)
        except (Exception, SystemExit) as error:  # noqa: BLE001 (the user's code; it is told)
            self.error = error

    def _hook(self, event: str, _: tuple[Any, ...]) -> None:
        if self._is_watched and event in _WITHHELD:
            self.would = _WITHHELD[event]
            raise _WithheldError(f"no dry run {self.would}")


def _first_sample(prompts: PromptRows, tokenizer: Any, rollout: RolloutConfig) -> Sample:
    """The first prompt, answered with the text of its row's answer; without one, with nothing."""
    row, most = prompts.first(), rollout.max_response_tokens
    answer = row.get(_ANSWER)
    text = str(answer) if isinstance(answer, str | int | float) else ""
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


async def _awaited(value: Awaitable[Any]) -> Any:
    """Waits for: the user's reward. Unblocked by: its answer; who called leaves it at a limit."""
    return await value


def _said(error: BaseException) -> str:
    """What a reward raised, and where."""
    if isinstance(error, UserCodeError):
        return error.detail
    last = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{Path(last.filename).name}, line {last.lineno}"
    return f"raised {type(error).__name__}: {one_line(error)} ({where})"
