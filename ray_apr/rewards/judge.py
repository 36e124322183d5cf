"""Rewards by another language model: an OpenAI-compatible endpoint, or a Ray Serve handle."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import string
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ray_apr.core.checks import is_number, of_type, positive, require, whole
from ray_apr.core.exceptions import ConfigError, RewardError
from ray_apr.core.sample import Sample
from ray_apr.core.user import RewardFunction, RewardResult
from ray_apr.rewards.answers import compiled, last_found, response_of

SCORE = (
    r"(?i)(?<![a-z])score[\s*_]*[:=][\s*_]*(-?\d+(?:\.\d+)?)"
    r"(?!\d|[.,]\d|e[-+]?\d)"
)
"""A verdict such as ``Score: 0.7``, in bold face, too; no part of ``0,7`` or ``1e-1``."""

_SCALE = re.compile(r"(?i)[\s*_]*(?:(?:/|out\s+of\s)[\s*_]*(\d+(?:\.\d+)?)|%)")
"""What may follow the number: the greatest one that there is; 100 of a percentage."""

ASKS = "ray_apr.llm_judge"
"""Audit event of a judge that is about to be asked; its argument is the environment variable of its
key, or None."""
_FIELDS = ("response", "row")
_OWN_FIELDS = ("model", "messages", "stream")
"""Of a request; a stream would be another kind of answer."""
_RETRIED = (408, 409, 425, 429)
"""HTTP statuses that may pass, beside 5xx: time-outs and too many requests."""
_MAX_PAUSE_S = 30.0


class _PassingError(Exception):
    """What may be gone at the next try; `pause_s` is how long the server asks to wait."""

    def __init__(self, detail: str, pause_s: float = 0.0) -> None:
        super().__init__(detail, pause_s)
        self.detail = detail
        self.pause_s = pause_s


class _Verdict(NamedTuple):
    """What a judge answered."""

    text: str
    is_cut: bool = False
    """Whether it had no tokens left to go on with."""


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """Where an OpenAI-compatible server answers."""

    base_url: str
    model: str
    api_key_env: str | None
    options: Mapping[str, Any]

    def __post_init__(self) -> None:
        s = "llm_judge"
        of_type(s, self, str, "a text", "base_url", "model")
        of_type(s, self, str | None, "the name of an environment variable, or None", "api_key_env")
        of_type(s, self, Mapping, "a mapping", "options")
        require(
            self.base_url.startswith(("http://", "https://")),
            f"{s}.base_url",
            self.base_url,
            'must begin with http:// or https://, such as "http://127.0.0.1:8000/v1"',
        )
        require(bool(self.model), f"{s}.model", self.model, "must name a model of the endpoint")
        for name in self.options:
            remedy = "is what llm_judge itself sends; leave it out"
            require(name not in _OWN_FIELDS, f"{s}.options", name, remedy)

    async def ask(self, prompt: str, sample_id: str) -> _Verdict:
        """Return the answer to a prompt; one try.

        Waits for: the endpoint. Unblocked by: its answer, or the judge's `timeout_s`.

        Raises:
            _PassingError: If another try may work.
            RewardError: If not.
        """
        import aiohttp  # a dependency of Ray Serve and of vLLM; not cheap to import

        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": prompt}],
            **self.options,
        }
        url = f"{self.base_url.rstrip('/')}/chat/completions"
        try:
            async with (
                # aiohttp's own limit of 300 s would end what the judge's lets go on
                aiohttp.ClientSession(
                    headers=self._headers(), timeout=aiohttp.ClientTimeout(total=None)
                ) as session,
                session.post(url, json=body, allow_redirects=False) as answer,
            ):
                text = await answer.text(errors="replace")
        except (aiohttp.ClientError, ConnectionError) as error:
            raise _PassingError(f"{type(error).__name__}: {error}") from error
        if answer.status in _RETRIED or answer.status >= 500:
            raise _PassingError(
                f"HTTP {answer.status}: {text[:200]}", _seconds(answer.headers.get("Retry-After"))
            )
        if answer.status != 200:
            detail = f"the judge at {url} answered HTTP {answer.status}: {text[:200]}"
            raise RewardError(sample_id, "raised", detail)
        return _content(text, sample_id)

    def _headers(self) -> dict[str, str]:
        """The key is read where the call is made, and kept nowhere."""
        if self.api_key_env is None:
            return {}
        key = os.environ.get(self.api_key_env)
        if not key:
            remedy = "is not set in the reward's process; pass it on in Ray's runtime_env"
            raise ConfigError("llm_judge.api_key_env", self.api_key_env, remedy)
        return {"Authorization": f"Bearer {key}"}


@dataclass(frozen=True, kw_only=True)
class Handle:
    """A Ray Serve handle whose deployment takes a prompt and returns a text."""

    handle: Any = field(repr=False)

    def __post_init__(self) -> None:
        require(
            callable(getattr(self.handle, "remote", None)),
            "llm_judge.handle",
            self.handle,
            "must be a Ray Serve handle, with .remote(prompt)",
        )

    async def ask(self, prompt: str, sample_id: str) -> _Verdict:
        """Return the answer to a prompt; one try.

        Waits for: the deployment. Unblocked by: its answer, or the judge's `timeout_s`.

        Raises:
            RewardError: If it is no text.
        """
        answer = await self.handle.remote(prompt)
        if not isinstance(answer, str):
            detail = f"the judge's deployment returned {repr(answer)[:200]}; must be a text"
            raise RewardError(sample_id, "invalid", detail)
        return _Verdict(answer)


def _seconds(text: str | None) -> float:
    """What a Retry-After header says, as far as it is a number of seconds."""
    try:
        return max(0.0, float(text or 0))
    except ValueError:
        return 0.0


def _content(text: str, sample_id: str) -> _Verdict:
    """The first choice of a chat completion."""
    choice, content = {}, None
    try:
        choice = json.loads(text)["choices"][0]
        content = choice["message"]["content"]
    except (ValueError, LookupError, TypeError):
        pass
    if not isinstance(content, str):
        detail = f"the judge's endpoint answered no chat completion with text: {text[:200]!r}"
        raise RewardError(sample_id, "invalid", detail)
    return _Verdict(content, choice.get("finish_reason") == "length")


@dataclass(frozen=True, kw_only=True)
class LLMJudge:
    """What `llm_judge` returns; its fields are the maker's arguments."""

    template: str
    backend: Endpoint | Handle
    pattern: re.Pattern[str]
    minimum: float
    maximum: float
    timeout_s: float
    max_retries: int
    backoff_s: float

    def __post_init__(self) -> None:
        s = "llm_judge"
        _check_template(self.template)
        require(
            self.pattern.groups >= 1,
            f"{s}.pattern",
            self.pattern.pattern,
            "needs a group around the number, such as (\\d+)",
        )
        for name in ("minimum", "maximum"):
            value = getattr(self, name)
            require(is_number(value), f"{s}.{name}", value, "must be a finite number")
        require(
            self.maximum > self.minimum,
            f"{s}.maximum",
            self.maximum,
            f"must exceed minimum = {self.minimum}",
        )
        positive(s, self, "timeout_s", "backoff_s")
        whole(s, self, "max_retries")
        require(self.max_retries >= 0, f"{s}.max_retries", self.max_retries, "must be 0 or more")

    async def __call__(self, sample: Sample) -> RewardResult:
        """The number in the verdict, with `judge_tries`."""
        prompt = self._prompt(sample)
        sys.audit(ASKS, getattr(self.backend, "api_key_env", None))
        for num_tries in range(1, self.max_retries + 2):
            try:
                async with asyncio.timeout(self.timeout_s):
                    verdict = await self.backend.ask(prompt, sample.sample_id)
                break
            except TimeoutError:
                kind, detail, asked_s = "timeout", f"the judge took over {self.timeout_s:g} s", 0.0
            except _PassingError as error:
                kind, detail, asked_s = "raised", error.detail, error.pause_s
            if num_tries > self.max_retries:
                raise RewardError(sample.sample_id, kind, f"{detail} (try {num_tries}, the last)")
            await asyncio.sleep(self._pause_s(num_tries, asked_s))
        return RewardResult(
            reward=self._number(verdict, sample), metrics={"judge_tries": float(num_tries)}
        )

    def _pause_s(self, num_tries: int, asked_s: float) -> float:
        """Doubles with each try, with jitter so that many calls do not come back at once."""
        pause_s: float = self.backoff_s * 2 ** (num_tries - 1) * random.uniform(0.5, 1.0)
        return min(max(pause_s, asked_s), _MAX_PAUSE_S)

    def _prompt(self, sample: Sample) -> str:
        try:
            return self.template.format(response=response_of(sample), row=sample.row)
        except (LookupError, AttributeError, ValueError, TypeError) as error:
            detail = f"its row does not fit the judge's template: {type(error).__name__}: {error}"
            raise RewardError(sample.sample_id, "invalid", detail) from error

    def _number(self, answer: _Verdict, sample: Sample) -> float:
        verdict = answer.text
        found = last_found(self.pattern, verdict)
        if answer.is_cut and found and found.end(1) == len(verdict):  # the begin of a 10, perhaps
            detail = "the judge's verdict is cut off in its number; raise max_tokens in options"
            raise RewardError(sample.sample_id, "invalid", f"{detail}: {verdict[-200:]!r}")
        number: float | None = None
        with contextlib.suppress(ValueError):
            number = float((found and found[1]) or "")
        if number is None or not self.minimum <= number <= self.maximum:
            what = f"number in [{self.minimum:g}, {self.maximum:g}] that pattern finds"
            detail = f"the judge's verdict holds no {what}: {verdict[-200:]!r}"
            raise RewardError(sample.sample_id, "invalid", detail)
        scale = found and _SCALE.match(verdict, found.end())
        out_of = scale and (scale[1] or "100")
        if out_of and float(out_of) != self.maximum:
            detail = f"the judge's verdict is out of {out_of}, not of {self.maximum:g} (maximum)"
            raise RewardError(sample.sample_id, "invalid", f"{detail}: {verdict[-200:]!r}")
        return number


def _check_template(template: str) -> None:
    name = "llm_judge.template"
    require(isinstance(template, str), name, template, "must be a text with {response}")
    try:
        fields = [part[1] for part in string.Formatter().parse(template) if part[1] is not None]
    except ValueError as error:
        remedy = f"is no template ({error}); write {{{{ and }}}} for braces"
        raise ConfigError(name, template, remedy) from error
    for named in fields:
        require(
            re.split(r"[.\[]", named)[0] in _FIELDS,
            name,
            template,
            f"{{{named}}} is unknown; use {{response}} and {{row[column]}}",
        )
    require("response" in fields, name, template, "must hold {response}, the text to be judged")


def llm_judge(
    template: str,
    *,
    base_url: str | None = None,
    model: str | None = None,
    api_key_env: str | None = None,
    options: Mapping[str, Any] | None = None,
    handle: Any = None,
    pattern: str | re.Pattern[str] = SCORE,
    minimum: float = 0.0,
    maximum: float = 1.0,
    timeout_s: float = 15.0,
    max_retries: int = 2,
    backoff_s: float = 1.0,
) -> RewardFunction:
    """Make a reward that is the number in another model's verdict on the response.

    Args:
        template: What the judge reads: ``{response}``, the response's text, and
            ``{row[question]}``, a column of the prompt's row; ``{{`` and ``}}`` stand for braces.
        base_url: Of an OpenAI-compatible endpoint, such as ``"http://127.0.0.1:8000/v1"``; the
            call is ``POST <base_url>/chat/completions``.
        model: Name of the endpoint's model.
        api_key_env: Name of the environment variable, in the reward's process, that holds the key.
            The key itself is read at each call and kept nowhere. None sends no key.
        options: Further fields of the request. None is ``{"temperature": 0.0}``.
        handle: Instead of an endpoint, a Ray Serve handle; ``handle.remote(prompt)`` must answer
            with the verdict's text.
        pattern: Group 1 of its last match in the verdict is the number. A text is compiled with
            ``re.DOTALL``. ``/`` or ``out of`` and a number may follow, which must be `maximum`, or
            ``%`` where that is 100.
        minimum: Least number of a verdict.
        maximum: Greatest number of a verdict.
        timeout_s: Limit of one try, in seconds.
        max_retries: Further tries after a time-out, a broken connection, or HTTP 408, 409, 425,
            429 and 5xx. All tries and pauses must fit in ``rollout.reward.timeout_s``.
        backoff_s: Pause before the second try, in seconds; it doubles with each further one, is
            shortened by up to a half at random, follows ``Retry-After``, and is 30 s at most.

    Returns:
        An async function of a finished `Sample` that returns a `RewardResult` with the metric
        ``judge_tries``. It raises `RewardError` when the last try has failed, the endpoint
        refuses, or the verdict holds no number in the range, and `ConfigError` when the key's
        variable is not set. What a Serve handle raises is passed on.

    Raises:
        ConfigError: For an argument that cannot be used.

    Example:
        >>> reward = llm_judge(
        ...     "Question: {row[question]}\\nAnswer: {response}\\n"
        ...     "How good is it, from 0 to 10? End with `Score: <number>`.",
        ...     base_url="http://127.0.0.1:8000/v1",
        ...     model="judge",
        ...     maximum=10,
        ... )
    """
    require(
        (base_url is None) != (handle is None),
        "llm_judge.base_url",
        base_url,
        "give either base_url and model, or handle",
    )
    backend: Endpoint | Handle
    if base_url is None:
        given = {"model": model, "api_key_env": api_key_env, "options": options}
        for name, value in given.items():
            remedy = "is for base_url: a handle gets the prompt alone; leave it out"
            require(value is None, f"llm_judge.{name}", value, remedy)
        backend = Handle(handle=handle)
    else:
        backend = Endpoint(
            base_url=base_url,
            model="" if model is None else model,
            api_key_env=api_key_env,
            options={"temperature": 0.0} if options is None else options,
        )
    return LLMJudge(
        template=template,
        backend=backend,
        pattern=compiled("llm_judge.pattern", pattern),
        minimum=minimum,
        maximum=maximum,
        timeout_s=timeout_s,
        max_retries=max_retries,
        backoff_s=backoff_s,
    )
