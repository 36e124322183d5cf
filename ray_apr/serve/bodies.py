"""Bodies of HTTP requests to the rollout servers, checked field by field.

Numbers are within what an engine's tensors hold, ids are visible ASCII, and a name that is no field
is refused: what comes in here reaches the processes that a run lives on.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from ray_apr.config.common import LEAST_TEMPERATURE, MOST_TEMPERATURE
from ray_apr.core.messages import GenerateRequest, Origin, PromptInput, SamplingParams
from ray_apr.core.protocols import PauseMode

_INT32, _INT64 = 2**31 - 1, 2**63 - 1
_MAX_STOP_IDS, _MAX_ABORTED = 1024, 100_000

TokenId = Annotated[int, Field(ge=0, le=_INT32, strict=True)]
RequestId = Annotated[str, Field(pattern=r"^[!-~]{1,256}$")]
NewRequestId = Annotated[str, Field(pattern=r'^[!"$-~]{1,256}$')]
"""Without a ``#``, which the calls of the run's samples have: an engine would hold the request for
a next call across a weight sync, and give its tokens another version."""
SessionId = Annotated[str, Field(pattern=r"^[!-~]{0,256}$")]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class GenerateBody(_Body):
    """Body of ``POST /v1/rollouts/generate``."""

    request_id: NewRequestId
    session_id: SessionId = ""
    token_ids: list[TokenId] = Field(min_length=1)
    max_tokens: int = Field(ge=1, le=_INT32, strict=True)
    temperature: float = Field(1.0, ge=LEAST_TEMPERATURE, le=MOST_TEMPERATURE, strict=True)
    top_p: float = Field(1.0, ge=1e-6, le=1, strict=True)
    top_k: int = Field(0, ge=0, le=_INT32, strict=True)
    stop_token_ids: list[TokenId] = Field([], max_length=_MAX_STOP_IDS)
    seed: int | None = Field(None, ge=0, le=_INT64, strict=True)
    ignore_eos: bool = Field(False, strict=True)

    def request(self) -> GenerateRequest:
        """What the body asks for."""
        return GenerateRequest(
            request_id=self.request_id,
            prompt=PromptInput(token_ids=tuple(self.token_ids)),
            sampling=self._sampling(),
            max_tokens=self.max_tokens,
            session_id=self.session_id or self.request_id,
        )

    def _sampling(self) -> SamplingParams:
        names = {f.name for f in dataclasses.fields(SamplingParams)}
        values = {k: v for k, v in self.model_dump().items() if k in names}
        values |= {"stop_token_ids": tuple(self.stop_token_ids), "origin": Origin.OUTSIDE}
        return SamplingParams(**values)


class AbortBody(_Body):
    """Body of ``POST /v1/rollouts/abort``; without ids, everything is aborted."""

    request_ids: list[RequestId] | None = Field(None, max_length=_MAX_ABORTED)


class PauseBody(_Body):
    """Body of ``POST /v1/rollouts/pause``."""

    mode: PauseMode = "abort"
