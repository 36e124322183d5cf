"""The HTTP face of the rollout servers, over scripted engines (serve/ingress, serve/bodies)."""

from __future__ import annotations

import json
import socket
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ray_apr.config import RolloutConfig
from ray_apr.core.exceptions import ConfigError, EngineUnavailableError
from ray_apr.core.messages import Origin
from ray_apr.run.preflight import check_port
from ray_apr.serve.ingress import make_api
from tests.fakes import OutsideClient

TOKEN = "secret"
GOOD = {"request_id": "r", "token_ids": [5, 6], "max_tokens": 4}
GENERATE = "/v1/rollouts/generate"


def browser(api) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(api, raise_app_exceptions=False)
    headers = {"content-type": "application/json"}  # else the API looks at no body
    return httpx.AsyncClient(transport=transport, base_url="http://servers", headers=headers)


@pytest.fixture
async def http():
    """(client of the API, the scripted engines); no token."""
    engines = OutsideClient()
    async with browser(make_api(engines, token=None, max_model_len=512)) as client:
        yield client, engines


async def test_generate_answers_with_tokens_of_no_rollout(http):
    client, engines = http
    reply = await client.post(GENERATE, json=GOOD)
    assert reply.status_code == 200
    assert len(reply.json()["segments"][0]["token_ids"]) == 4
    assert [s.origin for s in engines.asked] == [Origin.OUTSIDE]


@pytest.mark.parametrize("verb", ["abort", "pause"])
async def test_verbs_whose_body_says_nothing_need_none(http, verb):
    client, _ = http
    reply = await client.post(f"/v1/rollouts/{verb}")
    assert reply.status_code == 200


@pytest.mark.parametrize("path", [GENERATE, "/v1/rollouts/abort", "/v1/rollouts/pause",
                                  "/v1/rollouts/resume", "/status", "/openapi.json"])  # fmt: skip
async def test_every_verb_but_health_needs_the_token(path):
    async with browser(make_api(OutsideClient(), token=TOKEN, max_model_len=512)) as client:
        verb = "GET" if path in ("/status", "/openapi.json") else "POST"
        for given_token in ("", "Bearer wrong", f"Basic {TOKEN}", TOKEN):
            headers = {"Authorization": given_token}
            reply = await client.request(verb, path, headers=headers, content=b"not json")
            assert reply.status_code == 401, (path, given_token)
        good = await client.get("/status", headers={"Authorization": f"Bearer {TOKEN}"})
        assert good.status_code == 200
        assert (await client.get("/healthz")).status_code == 200


@pytest.mark.parametrize(
    "change",
    [
        {"token_ids": []},
        {"token_ids": [-1]},
        {"token_ids": [2**31]},
        {"token_ids": [10**400]},
        {"token_ids": [True]},
        {"token_ids": ["5"]},
        {"token_ids": [5] * 509},
        {"max_tokens": 511},
        {"max_tokens": 0},
        {"max_tokens": 2**64},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"temperature": 0},
        {"temperature": 1e-300},
        {"temperature": 2.01},
        {"temperature": True},
        {"temperature": "0.5"},
        {"top_p": 0},
        {"top_p": 1.1},
        {"top_p": True},
        {"top_k": -1},
        {"top_k": 2**31},
        {"seed": 2**63},
        {"seed": -1},
        {"stop_token_ids": [-5]},
        {"stop_token_ids": [1] * 1025},
        {"request_id": ""},
        {"request_id": "\ud800"},
        {"request_id": "a\nb"},
        {"request_id": "e0-1-0#3"},
        {"request_id": "ü"},
        {"request_id": "x" * 257},
        {"session_id": "\u202e"},
        {"temprature": 0.5},
        {"\udfff": 1},
        {"ignore_eos": "maybe"},
    ],
)
async def test_what_no_engine_can_take_is_a_422(http, change):
    client, engines = http
    reply = await client.post(GENERATE, content=json.dumps({**GOOD, **change}))
    assert reply.status_code == 422, reply.text
    assert reply.json()["detail"] and not engines.asked


async def test_a_call_of_a_sample_can_be_aborted(http):
    reply = await http[0].post("/v1/rollouts/abort", json={"request_ids": ["e0-1-0#3"]})
    assert reply.status_code == 200


@pytest.mark.parametrize("body", [b"", b"{", b"\xff\xfe", b"[" * 50_000, b"1" * 5_000, b"null"])
async def test_a_body_that_is_no_json_is_a_4xx(http, body):
    reply = await http[0].post(GENERATE, content=body)
    assert 400 <= reply.status_code < 500


@pytest.mark.parametrize("kind", ["", "text/plain", "application/x-www-form-urlencoded"])
async def test_a_body_that_does_not_say_it_is_json_is_told_to(http, kind):
    """As curl does not."""
    client, _ = http
    reply = await client.post(
        "/v1/rollouts/abort", content=b'{"request_ids": ["r"]}', headers={"content-type": kind}
    )
    assert reply.status_code == 422
    assert "Content-Type: application/json" in reply.json()["detail"][0]["msg"]


async def test_a_body_beyond_the_models_context_is_not_read(http):
    client, engines = http
    sent = 0

    async def endless():
        nonlocal sent
        while True:
            sent += 1
            yield b" " * 10_000

    reply = await client.post(GENERATE, content=endless())
    assert (reply.status_code, sent) == (413, 8)
    assert not engines.asked


@pytest.mark.parametrize("verb", ["abort", "pause"])
async def test_a_client_that_left_before_its_body_asked_for_nothing(verb):
    """Without a body a verb is for all requests."""
    api = make_api(object(), token=None, max_model_len=512)  # which answers to no verb
    scope = {
        "type": "http", "method": "POST", "path": f"/v1/rollouts/{verb}", "query_string": b"",
        "headers": [(b"content-length", b"22")],
    }  # fmt: skip
    arrived = iter([
        {"type": "http.request", "body": b'{"req', "more_body": True}, {"type": "http.disconnect"},
    ])  # fmt: skip
    sent = []

    async def receive():
        return next(arrived)

    async def send(message):
        sent.append(message)

    await api(scope, receive, send)
    assert sent == []


async def test_an_engine_that_cannot_answer_is_a_503(http):
    client, engines = http
    engines.error = EngineUnavailableError("engine-0 is dead")
    for verb, path in (("POST", GENERATE), ("GET", "/status"), ("GET", "/healthz")):
        reply = await client.request(verb, path, json=GOOD if verb == "POST" else None)
        assert (reply.status_code, reply.json()["detail"]) == (503, "engine-0 is dead")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "node-7"])
def test_a_host_that_others_reach_needs_a_token(host):
    with pytest.raises(ConfigError, match="which others than this machine reach") as caught:
        RolloutConfig(http={"host": host, "port": 8000})
    assert caught.value.field == "rollout.http.control_token"
    RolloutConfig(http={"host": host, "port": 8000, "control_token": TOKEN})


@pytest.mark.parametrize(("name", "given"), [("host", "0.0.0.0"), ("control_token", TOKEN)])
def test_what_says_how_http_is_reached_needs_a_port(name, given):
    """known fault: nothing listened, and nobody was told."""
    with pytest.raises(ConfigError, match=r"without rollout\.http\.port") as caught:
        RolloutConfig(http={name: given})
    assert caught.value.field == f"rollout.http.{name}" and TOKEN not in str(caught.value)
    RolloutConfig(http={"host": "127.0.0.1"})


def test_loopback_needs_no_token_and_an_empty_one_is_none():
    for host in ("127.0.0.1", "localhost", "::1", "127.1.2.3"):
        RolloutConfig(http={"host": host, "port": 8000})
    for token in ("", "two words", "schlüssel"):
        with pytest.raises(ConfigError, match="visible ASCII") as caught:
            RolloutConfig(http={"control_token": token})
        assert "schl" not in str(caught.value), "a secret is not repeated"


def test_a_port_is_tried_at_its_host():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ConfigError, match="choose another") as caught:
            check_port(RolloutConfig(http={"port": port}))
        assert caught.value.field == "rollout.http.port"
    http = {"host": "203.0.113.1", "port": port, "control_token": TOKEN}  # of documents
    with pytest.raises(ConfigError, match="no address of this machine") as caught:
        check_port(RolloutConfig(http=http))
    assert caught.value.field == "rollout.http.host"


def test_a_port_at_an_ipv6_address_is_tried():
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6) as server:
            port = server.getsockname()[1]
            with pytest.raises(ConfigError, match="choose another"):
                check_port(RolloutConfig(http={"host": "::1", "port": port}))
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error}")
    check_port(RolloutConfig(http={"host": "::1", "port": port}))


NUMBERS = st.one_of(
    st.integers(), st.sampled_from([0, -1, 2**31, 2**63, 2**64, 10**400]), st.floats(),
)  # fmt: skip
VALUES = st.one_of(
    NUMBERS, st.booleans(), st.none(), st.text(st.characters(codec=None), max_size=8),
    st.lists(NUMBERS, max_size=4), st.just({}),
)  # fmt: skip
BODIES = st.one_of(
    VALUES,
    st.dictionaries(
        st.sampled_from([*GOOD, "temperature", "top_p", "top_k", "stop_token_ids", "seed",
                         "session_id", "ignore_eos", "mode", "request_ids"]),
        VALUES, max_size=5,
    ).map(lambda change: GOOD | change),
    st.dictionaries(st.text(st.characters(codec=None), max_size=4), VALUES, max_size=3),
)  # fmt: skip


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(path=st.sampled_from([GENERATE, "/v1/rollouts/abort", "/v1/rollouts/pause"]), body=BODIES)
async def test_no_body_is_answered_by_a_500(path: str, body: Any):
    async with browser(make_api(OutsideClient(), token=None, max_model_len=512)) as client:
        reply = await client.post(path, content=json.dumps(body))
    assert reply.status_code < 500, reply.text
    reply.json()
