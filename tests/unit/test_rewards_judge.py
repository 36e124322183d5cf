"""Rewards by another model, against a small server on loopback (rewards/judge.py)."""

from __future__ import annotations

import asyncio
import json
import re

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from ray_apr.core.exceptions import ConfigError, RewardError
from ray_apr.rewards import llm_judge
from ray_apr.rewards.judge import SCORE
from tests.reward_samples import round_trip, sample_of

TEMPLATE = "Question: {row[question]} Answer: {response} Reply with Score: <0..10> and {{}}."
SAMPLE = sample_of("forty-two {row}", question="6 x 7?")


class Judge:
    """A chat endpoint that answers as its script says, one entry a call, the last one for ever.

    An entry is a verdict, an HTTP status, or a response.
    """

    def __init__(self, *script) -> None:
        self.script = list(script)
        self.requests: list[tuple[dict, dict]] = []

    async def answer(self, request: web.Request) -> web.Response:
        self.requests.append((await request.json(), dict(request.headers)))
        entry = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        if entry == "hang":
            await asyncio.sleep(30)
        if isinstance(entry, float):
            await asyncio.sleep(entry)
            entry = "Score: 4"
        if isinstance(entry, web.Response):
            return entry
        if isinstance(entry, int):
            return web.Response(status=entry, text="not now")
        return web.json_response({"choices": [{"message": {"content": entry}}]})


@pytest.fixture
async def serve():
    """Start a judge; returns its base URL."""
    servers = []

    async def start(judge: Judge) -> str:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", judge.answer)
        server = TestServer(app)
        await server.start_server(shutdown_timeout=0.1)
        servers.append(server)
        return str(server.make_url("/v1"))

    yield start
    for server in servers:
        await server.close()


def judge_at(url: str, **options):
    """A judge as a worker gets it, which does not wait long."""
    options = {"maximum": 10, "timeout_s": 5, "backoff_s": 0.01, "model": "m", **options}
    return round_trip(llm_judge(TEMPLATE, base_url=url, **options))


async def test_the_prompt_goes_out_and_the_last_score_comes_back(serve):
    judge = Judge("Score: 3. On second thought, score = 7.5")
    result = await judge_at(await serve(judge), options={"max_tokens": 9})(SAMPLE)
    assert (result.reward, result.metrics) == (7.5, {"judge_tries": 1.0})
    body, headers = judge.requests[0]
    text = "Question: 6 x 7? Answer: forty-two {row} Reply with Score: <0..10> and {}."
    message = {"role": "user", "content": text}
    assert body == {"model": "m", "messages": [message], "max_tokens": 9}
    assert "Authorization" not in headers


@pytest.mark.parametrize(
    ("verdict", "score"),
    [
        ("**Score:** 8", 8.0),
        ("Score: **8**, because", 8.0),
        ("Score: 7.", 7.0),
        ("Score: 8, as it is short", 8.0),
        ("Score: 0,75", None),
        ("Score = 1e-1", None),
        ("Underscore: 3", None),
    ],
)
def test_a_verdict_is_a_whole_number_after_the_word(verdict, score):
    found = re.search(SCORE, verdict)
    assert (None if found is None else float(found[1])) == score


async def test_the_key_is_sent_and_kept_nowhere(serve, monkeypatch):
    judge = Judge("Score: 1")
    reward = judge_at(await serve(judge), api_key_env="APR_TEST_KEY")
    with pytest.raises(ConfigError, match="APR_TEST_KEY"):
        await reward(SAMPLE)
    monkeypatch.setenv("APR_TEST_KEY", "secret-1")
    assert (await reward(SAMPLE)).reward == 1.0
    assert judge.requests[0][1]["Authorization"] == "Bearer secret-1"
    assert "secret-1" not in repr(reward) + repr(vars(reward.backend))


async def test_what_passes_is_tried_again(serve):
    judge = Judge(503, 429, "Score: 4")
    result = await judge_at(await serve(judge))(SAMPLE)
    assert (result.reward, result.metrics) == (4.0, {"judge_tries": 3.0})


async def test_the_server_says_how_long_to_wait(serve):
    busy = web.Response(status=429, headers={"Retry-After": "0.4"})
    start = asyncio.get_running_loop().time()
    assert (await judge_at(await serve(Judge(busy, "Score: 4")))(SAMPLE)).reward == 4.0
    assert asyncio.get_running_loop().time() - start >= 0.4


async def test_tries_are_bounded(serve):
    judge = Judge(500)
    with pytest.raises(RewardError, match="HTTP 500") as caught:
        await judge_at(await serve(judge), max_retries=2)(SAMPLE)
    assert (caught.value.kind, len(judge.requests)) == ("raised", 3)


async def test_a_slow_judge_is_a_timeout(serve):
    judge = Judge("hang")
    with pytest.raises(RewardError) as caught:
        await judge_at(await serve(judge), timeout_s=0.2, max_retries=1)(SAMPLE)
    assert (caught.value.kind, len(judge.requests)) == ("timeout", 2)


async def test_no_limit_but_the_judges_counts(serve, monkeypatch):
    """aiohttp's 300 s ended what a longer `timeout_s` allows."""
    short = aiohttp.ClientTimeout(total=0.05)
    monkeypatch.setattr(aiohttp.client, "DEFAULT_TIMEOUT", short)
    reward = judge_at(await serve(Judge(0.3)), max_retries=0)
    assert (await reward(SAMPLE)).reward == 4.0


async def test_a_refusal_is_not_tried_again(serve):
    judge = Judge(401)
    with pytest.raises(RewardError, match="HTTP 401"):
        await judge_at(await serve(judge))(SAMPLE)
    assert len(judge.requests) == 1


async def test_nobody_there_is_no_zero(unused_tcp_port):
    with pytest.raises(RewardError, match="the last") as caught:
        await judge_at(f"http://127.0.0.1:{unused_tcp_port}/v1", max_retries=1)(SAMPLE)
    assert caught.value.kind == "raised"


@pytest.mark.parametrize("verdict", ["", "very good", "Score: 11", "Score: -1", "Score: ten"])
async def test_a_malformed_verdict_is_no_zero(serve, verdict):
    judge = Judge(verdict)
    with pytest.raises(
        RewardError, match=r"holds no number in \[0, 10\] that pattern finds"
    ) as caught:
        await judge_at(await serve(judge))(SAMPLE)
    assert (caught.value.kind, len(judge.requests)) == ("invalid", 1)


@pytest.mark.parametrize(("verdict", "score"), [("Score: 1", None), ("Score: 1, as it is", 1.0)])
async def test_a_number_that_may_be_cut_off_is_no_reward(serve, verdict, score):
    """known fault: of a judge without tokens for the 0 of its 10 the reward was 1."""
    choice = {"message": {"content": verdict}, "finish_reason": "length"}
    reward = judge_at(await serve(Judge(web.json_response({"choices": [choice]}))))
    if score is None:
        with pytest.raises(RewardError, match="cut off in its number; raise max_tokens"):
            await reward(SAMPLE)
    else:
        assert (await reward(SAMPLE)).reward == score


@pytest.mark.parametrize("text", ["no JSON", "{}", "[]", json.dumps({"choices": []})])
async def test_an_answer_of_another_form_is_no_zero(serve, text):
    with pytest.raises(RewardError, match="chat completion"):
        await judge_at(await serve(Judge(web.Response(text=text))))(SAMPLE)


async def test_a_row_without_the_column_is_no_zero():
    with pytest.raises(RewardError, match="question"):
        await judge_at("http://127.0.0.1:9/v1")(sample_of("x"))


class FakeHandle:
    """Stands for a Serve handle; answers by what it is told."""

    def __init__(self, answer) -> None:
        self.answer = answer

    async def remote(self, prompt: str):
        return self.answer(prompt)


async def test_a_serve_handle_is_asked_with_the_prompt():
    handle = FakeHandle(lambda prompt: f"Score: {len(prompt.split()) / 10}")
    reward = round_trip(llm_judge("{response}", handle=handle))
    assert (await reward(sample_of("one two three"))).reward == 0.3
    with pytest.raises(RewardError, match="must be a text"):
        await llm_judge("{response}", handle=FakeHandle(lambda prompt: 3))(SAMPLE)


@pytest.mark.parametrize(
    ("verdict", "maximum", "score"),
    [
        ("Score: 8/10", 10, 8.0),
        ("**Score:** 0.5 / **1.0**, as it is half right", 1, 0.5),
        ("Score: 1 / 2 of it is right. Score: 9/10", 10, 9.0),
        ("Score: 1/10", 1, None),
        ("Score: 3 /5", 10, None),
        ("Score: 1 out of 10", 1, None),
        ("**Score: 8** out of **10**", 10, 8.0),
        ("Score: **85** %", 100, 85.0),
        ("Score: 1% of it is right", 1, None),
    ],
)
async def test_a_verdict_of_another_scale_is_no_reward(verdict, maximum, score):
    """known fault: 1/10 was the best that a judge with a scale of 0 to 1 could say."""
    reward = llm_judge("{response}", handle=FakeHandle(lambda _: verdict), maximum=maximum)
    if score is not None:
        assert (await reward(SAMPLE)).reward == score
        return
    with pytest.raises(RewardError, match=rf"out of \d+, not of {maximum} \(maximum\)") as caught:
        await reward(SAMPLE)
    assert caught.value.kind == "invalid"


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"template": "no field"}, "template"),
        ({"template": "{response} {question}"}, "template"),
        ({"template": "{response} {"}, "template"),
        ({"template": 3}, "template"),
        ({"base_url": None}, "base_url"),
        ({"handle": FakeHandle(str)}, "base_url"),
        ({"base_url": "127.0.0.1:8000"}, "base_url"),
        ({"model": None}, "model"),
        ({"options": 3}, "options"),
        ({"options": {"messages": []}}, "options"),
        ({"options": {"stream": True}}, "options"),
        ({"api_key_env": 3}, "api_key_env"),
        ({"pattern": "("}, "pattern"),
        ({"pattern": "score"}, "pattern"),
        ({"minimum": 1.0}, "maximum"),
        ({"maximum": float("nan")}, "maximum"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"max_retries": -1}, "max_retries"),
        ({"backoff_s": -1}, "backoff_s"),
    ],
)
def test_arguments_are_checked_at_once(options, field):
    options = {"base_url": "http://127.0.0.1:9/v1", "model": "m", **options}
    with pytest.raises(ConfigError) as caught:
        llm_judge(options.pop("template", TEMPLATE), **options)
    assert caught.value.field == f"llm_judge.{field}"


@pytest.mark.parametrize(
    "given", [{"model": "m"}, {"api_key_env": "JUDGE_API_KEY"}, {"options": {"temperature": 0.5}}]
)
def test_what_a_handle_would_not_obey_is_refused(given):
    with pytest.raises(ConfigError, match="leave it out") as caught:
        llm_judge("{response}", handle=FakeHandle(str), **given)
    assert caught.value.field == f"llm_judge.{next(iter(given))}"


def test_a_handle_must_be_one():
    with pytest.raises(ConfigError, match=r"llm_judge\.handle"):
        llm_judge("{response}", handle="judge")
