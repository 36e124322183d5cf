"""Requests that stay in vLLM's engine core across a weight sync that interrupts their calls.

    the engine   pause ─ new weights ─ resume ─► the request goes on, and keeps what it makes ─┐
                                          └─► its call ends with what it had                   │
    the sample                                          waits for its turn ─► its next call ◄──┘

A call that is interrupted comes back as one that goes on with its tokens. To end the request for
that, and to take in a new one, is what such a stop consists of: the engine would wait for 256 ends
to get to the rollout worker and for 256 calls to come back, and would prefill what it had.

Invariants, kept by `Parking` and the scheduler that has it:
    * A call has the tokens of one version: it has ended before the weights change, and the next one
      has what was made since.
    * A request is taken over only by the call of its sample that goes on with just its tokens, by
      the same sampling parameters, up to the same budget.
    * One that nobody takes over is ended: after `PARKING_LIMIT_S`, and at the next pause.
"""

from __future__ import annotations

import operator
from typing import Any

from vllm.sampling_params import RequestOutputKind

from ray_apr.serve.vllm.private import EngineCoreOutput, Request

_CALL = "#"
"""Before the number of a sample's call, in a request's id (`core.messages.GenerateRequest`)."""
_same_of = operator.attrgetter(
    "temperature", "top_p", "top_k", "logprobs", "stop_token_ids", "ignore_eos"
)
"""Sampling parameters that a sample's calls have in common."""


class Parked:
    """A request without a call.

    Args:
        request: vLLM's.
    """

    __slots__ = ("_num_tokens", "outputs", "request")

    def __init__(self, request: Request) -> None:
        self.request = request
        self.outputs: list[EngineCoreOutput] = []
        """Of the steps since."""
        self._num_tokens = request.num_tokens

    @property
    def has_begun(self) -> bool:
        """Whether it had made tokens: the first one comes with what vLLM tells of the prefill."""
        return bool(self._num_tokens > self.request.num_prompt_tokens)

    def goes_on_as(self, call: Request) -> bool:
        """Whether a call asks for just what the request goes on with."""
        request, num_tokens = self.request, self._num_tokens
        num_made = num_tokens - request.num_prompt_tokens
        return bool(
            call.max_tokens == request.max_tokens - num_made
            and _same_of(call.sampling_params) == _same_of(request.sampling_params)
            and call.prompt_token_ids == request.all_token_ids[:num_tokens]
        )


class Parking:
    """The requests of an engine core that have no call, and those that have got another one."""

    def __init__(self) -> None:
        self._parked: dict[tuple[str, str], Parked] = {}
        """By what the next call has in common with the last one."""
        self._by_id: dict[str, Parked] = {}
        self._names: dict[str, str] = {}
        """Of requests that were taken over: the id of their call."""
        self._ids: dict[str, str] = {}
        """The other way round."""

    def __bool__(self) -> bool:
        return bool(self._by_id)

    @staticmethod
    def may_stay(request: Request) -> bool:
        """Whether a request may go on without its call: that of a sample, of which nobody reads
        single tokens or looks for stop strings in them."""
        params = request.sampling_params
        return bool(
            params is not None
            and params.output_kind == RequestOutputKind.FINAL_ONLY
            and not params.stop
            and request.cache_salt
            and _CALL in request.request_id
        )

    def park(self, request: Request) -> None:
        """The call of a request has ended."""
        parked = self._by_id[request.request_id] = Parked(request)
        self._parked[_key(request.request_id, request.cache_salt)] = parked

    def of(self, request_id: str) -> Parked | None:
        """The request of an id, if it has no call."""
        return self._by_id.get(request_id)

    def pop(self, call: Request) -> Parked | None:
        """Take out the request of a call's sample, if it is here."""
        parked = self._parked.pop(_key(call.request_id, call.cache_salt), None)
        if parked is not None:
            del self._by_id[parked.request.request_id]
        return parked

    def name(self, request_id: str, call_id: str) -> None:
        """A request has got another call."""
        self._names[request_id] = call_id
        self._ids[call_id] = request_id

    def drop(self, request_id: str) -> bool:
        """Forget a request that has ended; whether it had no call, so that nobody hears of it."""
        parked = self._by_id.pop(request_id, None)
        if parked is None:
            return False
        self._parked.pop(_key(request_id, parked.request.cache_salt), None)
        return True

    def drop_all(self) -> list[str]:
        """Forget all requests without a call; their ids."""
        ids = list(self._by_id)
        self._by_id.clear()
        self._parked.clear()
        return ids

    def id_of(self, call_id: str) -> str:
        """Id of the request that a call has."""
        return self._ids.get(call_id, call_id)

    def address(self, output: EngineCoreOutput) -> None:
        """Give an output that leaves the id of its call."""
        name = self._names.get(output.request_id)
        if name is None:
            return
        if output.finish_reason is not None:
            self._forget_name(output.request_id)
        output.request_id = name

    def _forget_name(self, request_id: str) -> None:
        name: Any = self._names.pop(request_id, None)
        self._ids.pop(name, None)


def _key(request_id: str, cache_salt: str | None) -> tuple[str, str]:
    return request_id.partition(_CALL)[0], cache_salt or ""
