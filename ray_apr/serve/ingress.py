"""The HTTP face of the rollout servers: the same verbs, on loopback unless told otherwise."""

from __future__ import annotations

import dataclasses
import hmac
from typing import Any

from fastapi import FastAPI, Header, HTTPException, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field
from ray import serve

from ray_apr.config import RolloutConfig
from ray_apr.exceptions import EngineUnavailableError, RolloutError
from ray_apr.protocols import PauseMode
from ray_apr.serve.client import ServeRolloutClient
from ray_apr.serve.names import INGRESS
from ray_apr.types import SamplingParams


class GenerateRequest(BaseModel):
    """Body of ``POST /v1/rollouts/generate``."""

    request_id: str
    session_id: str = ""
    token_ids: list[int] = Field(min_length=1)
    max_tokens: int = Field(ge=1)
    temperature: float = Field(1.0, gt=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)
    stop_token_ids: list[int] = []
    seed: int | None = None
    ignore_eos: bool = False

    def sampling(self) -> SamplingParams:
        """The sampling part."""
        names = {f.name for f in dataclasses.fields(SamplingParams)}
        values = {k: v for k, v in self.model_dump().items() if k in names}
        return SamplingParams(**{**values, "stop_token_ids": tuple(self.stop_token_ids)})


class AbortRequest(BaseModel):
    """Body of ``POST /v1/rollouts/abort``; without ids, everything is aborted."""

    request_ids: list[str] | None = None


class PauseRequest(BaseModel):
    """Body of ``POST /v1/rollouts/pause``."""

    mode: PauseMode = "abort"


http = FastAPI(title="ray_apr rollout servers")


@http.exception_handler(RolloutError)
async def _on_rollout_error(request: Request, error: RolloutError) -> JSONResponse:
    """An engine that cannot answer is a 503, a request that it refuses a 400."""
    code = 503 if isinstance(error, EngineUnavailableError) else 400
    return JSONResponse({"detail": str(error)}, status_code=code)


@serve.ingress(http)
class RolloutIngress:
    """The verbs over HTTP; abort, pause and resume demand the control token if one is set."""

    def __init__(self, servers: Any, config: RolloutConfig) -> None:
        del servers  # bound so that Serve starts them; the client finds them by name
        app_name = serve.get_replica_context().app_name
        self._client = ServeRolloutClient(app_name, config)
        self._token = config.control_token

    def _authorize(self, authorization: str | None) -> None:
        """Refuse a control verb without the token."""
        given = (authorization or "").removeprefix("Bearer ").encode()
        if self._token is not None and not hmac.compare_digest(given, self._token.encode()):
            raise HTTPException(401, "this verb needs the control token: Authorization: Bearer …")

    @http.post("/v1/rollouts/generate")
    async def generate(self, body: GenerateRequest) -> dict[str, Any]:
        """Continue token ids."""
        generation = await self._client.generate(
            request_id=body.request_id,
            session_id=body.session_id or body.request_id,
            token_ids=body.token_ids,
            sampling=body.sampling(),
            max_tokens=body.max_tokens,
        )
        return dataclasses.asdict(generation)

    @http.post("/v1/rollouts/abort")
    async def abort(
        self, body: AbortRequest, authorization: str | None = Header(None)
    ) -> dict[str, int]:
        """Stop calls, all or by id."""
        self._authorize(authorization)
        ids = body.request_ids
        return {"num_aborted": await self._client.abort_anywhere(ids)}

    @http.post("/v1/rollouts/pause")
    async def pause(
        self, body: PauseRequest, authorization: str | None = Header(None)
    ) -> dict[str, bool]:
        """Freeze all engines."""
        self._authorize(authorization)
        await self._client.pause(body.mode)
        return {"is_paused": True}

    @http.post("/v1/rollouts/resume")
    async def resume(self, authorization: str | None = Header(None)) -> dict[str, bool]:
        """Unfreeze all engines."""
        self._authorize(authorization)
        await self._client.resume()
        return {"is_paused": False}

    @http.get("/status")
    async def status(self) -> list[dict[str, Any]]:
        """One entry for each replica; the spans stay with the rollout worker."""
        return [dataclasses.asdict(s) for s in await self._client.status(drain=False)]

    @http.get("/healthz")
    async def healthz(self) -> dict[str, str]:
        """Whether all engines answer."""
        await self._client.is_paused()
        return {"status": "ok"}


def build_ingress(servers: Any, config: RolloutConfig) -> serve.Application:
    """Put the HTTP ingress in front of bound servers."""
    deployment = serve.deployment(
        RolloutIngress,
        name=INGRESS,
        max_ongoing_requests=100_000,
        graceful_shutdown_timeout_s=2.0,
        ray_actor_options={"num_cpus": 0},
    )
    return deployment.bind(servers, config)
