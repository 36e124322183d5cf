"""vLLM's scheduler, which takes requests in together, and hands tokens over in pieces.

    requests ─► together, every 100 ms ─► steps of the model ─► token, log-prob
                                                                        │
           the server's process ◄─ 16 tokens, end or pause ─ piece of a request

vLLM takes in a request with the next step. A step that only decodes is one CUDA graph; one that
also takes in a prompt, of however few tokens, is launched piece by piece. Where responses are
short, some request ends and another one begins in nearly every step, so that nearly none is a
graph.

vLLM's engine core sends each new token of each request by itself. Only the last output of a request
is used here, yet to take in a token with its log-prob costs the server's process more than five
times as much CPU as one in a piece. Figures of both: docs/performance.md, "Generation".

Invariants:
    * A request's tokens leave in their order, all of them before its end; also where it is aborted.
    * Where vLLM tells the version of tokens, a paused engine holds none: weights change only then,
      so a piece has tokens of one version.
    * Tokens of a request with stop strings wait for no others.
    * A request waits for others no longer than the interval, and only where many others decode.
"""

from __future__ import annotations

import operator
import time
from collections import defaultdict
from typing import Any

import numpy as np
from vllm.sampling_params import RequestOutputKind

from ray_apr.serve.vllm.private import (
    AsyncScheduler,
    EngineCoreOutput,
    EngineCoreOutputs,
    FinishReason,
    LogprobsLists,
    PauseState,
    Request,
    RequestStatus,
    Scheduler,
    init_logger,
)

logger = init_logger("vllm.ray_apr")
"""Under vLLM's, whose settings it has."""

_PIECE_TOKENS = 16
"""Tokens of a piece: few enough that a pause, which waits for all pieces, does not get long."""
_PREFILL_INTERVAL_S = 0.1
"""Requests are taken in at most so often, unless many wait."""
_MANY = 1 / 16
"""So many: a share of those that decode."""
PREFILL_INTERVAL = "ray_apr_prefill_interval_s"
"""Key of vLLM's ``additional_config`` that sets another interval; 0 takes in each one at once."""
_TELLS_VERSIONS = "weight_version" in EngineCoreOutputs.__struct_fields__
"""Whether outputs carry the version under which their tokens were made; vLLM 0.26 has none."""
_OWN = ("request_id", "new_token_ids", "new_logprobs")
_OTHERS = {
    name: default
    for name, default in zip(
        reversed(EngineCoreOutput.__struct_fields__),
        reversed(EngineCoreOutput.__struct_defaults__),
        strict=False,
    )
    if name not in _OWN
}
"""Fields that an output with nothing but tokens and log-probs leaves at their defaults."""
_others_of = operator.attrgetter(*_OTHERS)
_DEFAULTS = tuple(_OTHERS.values())


class _Piece:
    """Tokens of one request that have not left."""

    __slots__ = ("client", "logprobs", "token_ids")

    def __init__(self, client: int) -> None:
        self.client = client
        self.token_ids: list[int] = []
        self.logprobs: list[Any] = []

    def add(self, output: EngineCoreOutput) -> None:
        self.token_ids += output.new_token_ids
        if output.new_logprobs is not None:
            self.logprobs.append(output.new_logprobs)

    def output(self, request_id: str) -> EngineCoreOutput:
        logprobs = None
        if self.logprobs:
            # a step's are as wide as the request with the most asked for; this one needs no more
            width = min(found[1].shape[1] for found in self.logprobs)
            ids, values, ranks = zip(*(found[:3] for found in self.logprobs), strict=True)
            logprobs = LogprobsLists(
                np.concatenate([i[:, :width] for i in ids]),
                np.concatenate([v[:, :width] for v in values]),
                np.concatenate(ranks),
            )
        return EngineCoreOutput(request_id, self.token_ids, new_logprobs=logprobs)


class _InPieces:
    """What is added to either of vLLM's schedulers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._pieces: dict[str, _Piece] = {}
        self._aborted: dict[int, list[EngineCoreOutput]] = defaultdict(list)
        """Ends of requests, with the rest of their tokens; by client."""
        self._last_step_s = 0.0
        """When tokens were made last."""
        self._is_stopped = False
        """Whether a pause has come between, while there were requests."""
        self._interval_s = _prefill_interval_s(self.vllm_config)  # type: ignore[attr-defined]
        self._last_prefill_s = 0.0
        """When requests were taken in last."""
        self._num_gathered = 0
        """Requests that have to wait for others, of which vLLM says that they queue."""

    def has_requests(self) -> bool:
        """Whether there is something to do: also to hand over, of which vLLM does not know."""
        to_hand_over = self._aborted or (self._pieces and self._must_hand_over)
        return bool(to_hand_over) or super().has_requests()  # type: ignore[misc]

    def update_from_output(self, *args: Any, **kwargs: Any) -> dict[int, EngineCoreOutputs]:
        """The step's outputs of each client, without those that wait for the rest of a piece."""
        by_client = super().update_from_output(*args, **kwargs)  # type: ignore[misc]
        if any(step.outputs for step in by_client.values()):
            self._last_step_s = time.perf_counter()
        for client, step in list(by_client.items()):
            step.outputs = [kept for o in step.outputs for kept in self._take(o, client)]
            if not (step.outputs or step.finished_requests or step.scheduler_stats):
                del by_client[client]
        if self._must_hand_over:
            for request_id, piece in self._pieces.items():
                _of(by_client, piece.client).outputs.append(piece.output(request_id))
            self._pieces.clear()
        for client, outputs in self._aborted.items():
            _of(by_client, client).outputs.extend(outputs)
        self._aborted.clear()
        return by_client

    def finish_requests(self, request_ids: Any, finished_status: RequestStatus) -> list[Request]:
        """End requests from outside. Those that are aborted end in the next step's outputs, so that
        vLLM has no end to send for them."""
        ended = super().finish_requests(request_ids, finished_status)  # type: ignore[misc]
        is_abort = finished_status == RequestStatus.FINISHED_ABORTED
        for request in ended:
            piece = self._pieces.pop(request.request_id, None)
            if is_abort:
                piece = piece or _Piece(request.client_index)
                end = piece.output(request.request_id)
                end.finish_reason = FinishReason.ABORT
                self._aborted[piece.client].append(end)
        return [] if is_abort else ended

    def set_pause_state(self, pause_state: PauseState) -> None:
        """Begin or end a pause."""
        is_stop = pause_state != PauseState.UNPAUSED and self.has_requests()
        self._is_stopped = self._is_stopped or is_stop
        super().set_pause_state(pause_state)  # type: ignore[misc]

    def schedule(self, throttle_prefills: bool = False) -> Any:
        """The next step; the first one after a stop says how long none was made, for whatever
        reason: a pause, or requests that came late."""
        self._num_gathered = self._num_to_gather()
        if self._num_gathered:
            self.prefill_capacity_bound = False  # vLLM would not hold requests where others queue
        step = super().schedule(throttle_prefills or self._num_gathered > 0)  # type: ignore[misc]
        takes_in = step.scheduled_new_reqs or step.scheduled_cached_reqs.resumed_req_ids
        if takes_in and not self._num_gathered:  # else they have nothing to prefill
            self._last_prefill_s = time.perf_counter()
        if self._is_stopped and step.total_num_scheduled_tokens:
            self._is_stopped = False
            stopped_s = time.perf_counter() - self._last_step_s
            logger.info("generation stopped for %.2f ms", 1e3 * stopped_s)
        return step

    def make_stats(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's figures; a request that waits for others is none that the engine has no room
        for."""
        stats = super().make_stats(*args, **kwargs)  # type: ignore[misc]
        if stats is not None:
            stats.num_waiting_reqs = max(0, stats.num_waiting_reqs - self._num_gathered)
        return stats

    def _num_to_gather(self) -> int:
        """How many requests wait for others to be taken in with; 0 once it is worth a step."""
        if time.perf_counter() - self._last_prefill_s >= self._interval_s:
            return 0
        running: list[Request] = self.running  # type: ignore[attr-defined]
        most: int = self.max_num_running_reqs  # type: ignore[attr-defined]
        most = getattr(self, "max_num_active_reqs", most)  # vLLM 0.26 has none
        num_ready = min(len(self.waiting), most - len(running))  # type: ignore[attr-defined]
        if num_ready <= 0 or num_ready >= len(running) * _MANY:
            return 0
        return 0 if any(request.is_prefill_chunk for request in running) else num_ready

    @property
    def _must_hand_over(self) -> bool:
        """Whether no piece may stay."""
        return _TELLS_VERSIONS and self.pause_state != PauseState.UNPAUSED  # type: ignore[attr-defined]

    def _take(self, output: EngineCoreOutput, client: int) -> list[EngineCoreOutput]:
        """What leaves now that this output has come."""
        request_id = output.request_id
        piece = self._pieces.get(request_id)
        if self._may_wait(output):
            if piece is None:
                piece = self._pieces[request_id] = _Piece(client)
            piece.add(output)
            if len(piece.token_ids) < _PIECE_TOKENS:
                return []
            del self._pieces[request_id]
            return [piece.output(request_id)]
        if piece is None:
            return [output]
        del self._pieces[request_id]
        return [piece.output(request_id), output]

    def _may_wait(self, output: EngineCoreOutput) -> bool:
        request = self.requests.get(output.request_id)  # type: ignore[attr-defined]
        params = None if request is None else request.sampling_params
        if params is None or params.output_kind != RequestOutputKind.FINAL_ONLY:
            return False
        if params.stop:  # the server's process looks for them, and ends the request
            return False
        return all(map(operator.is_, _others_of(output), _DEFAULTS))


def _prefill_interval_s(vllm_config: Any) -> float:
    """As it was set; else 0 where a step that takes requests in is like any other."""
    given = vllm_config.additional_config
    if isinstance(given, dict) and PREFILL_INTERVAL in given:
        return float(given[PREFILL_INTERVAL])
    graphs = vllm_config.compilation_config.cudagraph_mode
    is_costly = graphs is not None and graphs.decode_mode() != graphs.mixed_mode()
    return _PREFILL_INTERVAL_S if is_costly else 0.0


def _of(by_client: dict[int, EngineCoreOutputs], client: int) -> EngineCoreOutputs:
    """The outputs of one client, made where there are none."""
    if client not in by_client:
        by_client[client] = EngineCoreOutputs(outputs=[])
    return by_client[client]


class _SyncScheduler(_InPieces, Scheduler):  # type: ignore[misc]
    pass


class _AsyncScheduler(_InPieces, AsyncScheduler):  # type: ignore[misc]
    pass


def make_scheduler(*, vllm_config: Any, **kwargs: Any) -> Scheduler:
    """The scheduler of an engine core (``scheduler_cls``), of the kind that vLLM would take."""
    is_async = vllm_config.scheduler_config.async_scheduling
    return (_AsyncScheduler if is_async else _SyncScheduler)(vllm_config=vllm_config, **kwargs)
