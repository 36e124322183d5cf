"""The HTTP face of the rollout servers: the same verbs, on loopback unless told otherwise.

Invariants:
    * With a control token, nothing but ``/healthz`` is answered without it, and no body is read.
    * No body is read beyond what a prompt of the model's context takes.
    * What comes in here is no rollout: engines count its tokens apart (`Origin.OUTSIDE`).
    * A bad request is answered by a 4xx, a server that cannot answer by a 503; the reply repeats
      nothing of the request that could not be written as JSON.
"""

from __future__ import annotations

import dataclasses
import hmac
import json
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from ray import serve
from starlette.requests import ClientDisconnect

from ray_apr.config import RolloutConfig
from ray_apr.core.exceptions import APRError, EngineUnavailableError, RolloutError
from ray_apr.serve.bodies import AbortBody, GenerateBody, PauseBody
from ray_apr.serve.client import ServeRolloutClient

INGRESS = "RolloutIngress"
OPEN_PATH = "/healthz"
"""Answered without a token."""
_ANY_CONTEXT = 2**20
"""Tokens of a context that is not known here."""
_BYTES_PER_TOKEN = 12
"""Ten digits, a comma and a space."""
_OTHER_BYTES = 2**16
_KIND = "content-type"


class _Reply(JSONResponse):
    """JSON in ASCII: a lone surrogate, which JSON may hold, cannot be sent as UTF-8."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode("ascii")


class _Guard:
    """What a request has to pass before the application sees it (ASGI).

    Args:
        app: What follows.
        token: What it has to bring; None asks for nothing.
        max_bytes: Longest body.
    """

    def __init__(self, app: Any, token: str | None, max_bytes: int) -> None:
        self._app = app
        self._wanted = None if token is None else f"Bearer {token}".encode()
        self._max_bytes = max_bytes

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass a request on, or refuse it.

        Waits for: what follows. Unblocked by: its answer; its calls of the servers have limits.
        """
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        given = headers.get(b"authorization", b"")
        is_open = self._wanted is None or scope["path"] == OPEN_PATH
        if not (is_open or hmac.compare_digest(given, self._wanted)):
            detail = "this needs the control token: Authorization: Bearer …"
            await _Reply({"detail": detail}, 401)(scope, receive, send)
            return
        try:
            body = await self._read(receive)
        except ClientDisconnect:
            return
        if body is None:
            detail = f"the body has more than {self._max_bytes} bytes"
            await _Reply({"detail": detail}, 413)(scope, receive, send)
            return
        waiting = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Any:
            return waiting.pop() if waiting else await receive()

        await self._app(scope, replay, send)

    async def _read(self, receive: Any) -> bytes | None:
        """The whole body; None if it is too long.

        Raises:
            ClientDisconnect: If the client has left before its end.
        """
        body = bytearray()
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":  # no body is no part of one
                raise ClientDisconnect
            body += message.get("body", b"")
            if len(body) > self._max_bytes:
                return None
            more = message.get("more_body", False)
        return bytes(body)


class _Verbs:
    """What is behind each path."""

    def __init__(self, client: Any, max_model_len: int | None) -> None:
        self._client = client
        self._max_model_len = max_model_len

    async def generate(self, body: GenerateBody) -> _Reply:
        """Continue token ids."""
        context, num_tokens = self._max_model_len, len(body.token_ids) + body.max_tokens
        if context is not None and num_tokens > context:
            detail = f"token_ids and max_tokens are {num_tokens} tokens; the context has {context}"
            raise HTTPException(422, detail)
        try:
            generation = await self._client.generate(body.request())
        except EngineUnavailableError:
            raise
        except RolloutError as error:
            raise HTTPException(400, str(error)) from error
        told = dataclasses.asdict(generation)
        for segment in told["segments"]:
            segment |= {name: list(segment[name]) for name in ("token_ids", "logprobs")}
        return _Reply(told)

    async def abort(self, body: AbortBody = AbortBody(request_ids=None)) -> _Reply:  # noqa: B008
        """Stop calls, all or by id."""
        return _Reply({"num_aborted": await self._client.abort_anywhere(body.request_ids)})

    async def pause(self, body: PauseBody = PauseBody()) -> _Reply:  # noqa: B008
        """Freeze all engines."""
        await self._client.pause(body.mode)
        return _Reply({"is_paused": True})

    async def resume(self) -> _Reply:
        """Unfreeze all engines."""
        await self._client.resume()
        return _Reply({"is_paused": False})

    async def status(self) -> _Reply:
        """One entry for each replica; the spans stay with the rollout worker."""
        return _Reply([dataclasses.asdict(s) for s in await self._client.status(drain=False)])

    async def healthz(self) -> _Reply:
        """Whether the engines that live answer, of which there is one at least."""
        await self._client.is_paused()
        return _Reply({"status": "ok"})


async def _on_error(request: Request, error: APRError) -> _Reply:
    """The servers cannot answer."""
    return _Reply({"detail": str(error)}, 503)


async def _on_bad_request(request: Request, error: RequestValidationError) -> _Reply:
    """The body is not what it must be; its values are not repeated."""
    found = [{"loc": e["loc"], "msg": e["msg"], "type": e["type"]} for e in error.errors()]
    if found and found[0]["loc"] == ("body",) and "json" not in request.headers.get(_KIND, ""):
        found[0]["msg"] = "a body is JSON, and says so: Content-Type: application/json"
    return _Reply({"detail": found}, 422)


def make_api(client: Any, *, token: str | None, max_model_len: int | None) -> FastAPI:
    """The verbs as an ASGI application.

    Args:
        client: A `ServeRolloutClient`, or what answers like one.
        token: What every request but that for health has to bring; None asks for nothing.
        max_model_len: Longest prompt + response, in tokens; None leaves it to the engines.
    """
    api = FastAPI(title="ray_apr rollout servers")
    max_bytes = _OTHER_BYTES + _BYTES_PER_TOKEN * (max_model_len or _ANY_CONTEXT)
    api.add_middleware(_Guard, token=token, max_bytes=max_bytes)
    api.add_exception_handler(APRError, _on_error)  # type: ignore[arg-type]
    api.add_exception_handler(RequestValidationError, _on_bad_request)  # type: ignore[arg-type]
    verbs = _Verbs(client, max_model_len)
    for verb in (verbs.generate, verbs.abort, verbs.pause, verbs.resume):
        api.post(f"/v1/rollouts/{verb.__name__}", response_model=None)(verb)
    api.get("/status", response_model=None)(verbs.status)
    api.get(OPEN_PATH, response_model=None)(verbs.healthz)
    return api


def build_ingress(config: RolloutConfig, max_model_len: int | None) -> Any:
    """The deployment of the HTTP ingress, to be bound with the servers: its client finds them by
    name. A replica that runs is told of another number of engines as it goes on."""
    clients: list[ServeRolloutClient] = []
    """Of the replica, in which both functions have the same list."""

    def make() -> FastAPI:
        """Runs in the replica."""
        clients.append(ServeRolloutClient(serve.get_replica_context().app_name, config))
        return make_api(clients[0], token=config.http.control_token, max_model_len=max_model_len)

    class Ingress:
        def __init__(self, *servers: Any) -> None:
            del servers

        async def reconfigure(self, told: dict[str, int]) -> None:
            """Serve calls it at the start, and at each change."""
            await clients[0].scale(told["num_engines"])

    return serve.deployment(
        serve.ingress(make)(Ingress),
        name=INGRESS,
        user_config={"num_engines": config.num_replicas},
        max_ongoing_requests=100_000,
        graceful_shutdown_timeout_s=2.0,
        ray_actor_options={"num_cpus": 0},
    )
