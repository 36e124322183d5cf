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
    * Where requests stay across a pause (`serve.vllm.parking`), its end is that of their calls: no
      step is under way then, and what they have is of the old weights. Their ends would hold up
      what is told during the pause.
    * A request waits for others no longer than the interval, and only where many others decode.
"""

from __future__ import annotations

import operator
import time
from collections import defaultdict
from typing import Any

import numpy as np
from vllm.sampling_params import RequestOutputKind

from ray_apr.serve.vllm.blocks import look_at_ends_only
from ray_apr.serve.vllm.names import PARKING_LIMIT_S
from ray_apr.serve.vllm.parking import Parked, Parking
from ray_apr.serve.vllm.private import (
    AsyncScheduler,
    EngineCoreEventType,
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

    __slots__ = ("client", "events", "logprobs", "token_ids")

    def __init__(self, client: int, events: Any = None) -> None:
        self.client = client
        self.events = events
        self.token_ids: list[int] = []
        self.logprobs: list[Any] = []

    def add(self, output: EngineCoreOutput) -> None:
        self.token_ids += output.new_token_ids
        if output.new_logprobs is not None:
            self.logprobs.append(output.new_logprobs)

    def output(self, request_id: str) -> EngineCoreOutput:
        logprobs = None
        if self.logprobs:
            columns: list[Any] = list(zip(*self.logprobs, strict=True))[:3]
            widths = {found.shape[1] for found in columns[0]}
            if len(widths) > 1:  # as wide as the request of a step with the most asked for
                columns[:2] = [[f[:, : min(widths)] for f in found] for found in columns[:2]]
            logprobs = LogprobsLists(*map(np.concatenate, columns))
        return EngineCoreOutput(
            request_id, self.token_ids, new_logprobs=logprobs, events=self.events
        )


class _InPieces:
    """What is added to either of vLLM's schedulers."""

    parks = False
    """Whether requests stay across a pause that interrupts their calls."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._pieces: dict[str, _Piece] = {}
        self._ready: dict[int, list[EngineCoreOutput]] = defaultdict(list)
        """What leaves with the next step, such as ends of requests that are aborted; by client."""
        self._parking = Parking()
        self._is_parking = False
        """Whether the end of this pause is that of all calls."""
        self._drop_at_s = 0.0
        """When requests that nobody has taken over are ended."""
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
        to_hand_over = self._ready or (self._pieces and self._must_hand_over)
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
                _of(by_client, piece.client).outputs.append(self._of_piece(request_id, piece))
            self._pieces.clear()
        for client, outputs in self._ready.items():
            _of(by_client, client).outputs[:0] = outputs  # older than those of the step
        self._ready.clear()
        return by_client

    def add_request(self, request: Request) -> None:
        """Take a request in; one that goes on with what is here takes that over."""
        parked = self._parking.pop(request)
        if parked is not None and parked.goes_on_as(request):
            self._go_on(parked, request.request_id)
            return
        if parked is not None:
            self._end_silently([parked.request.request_id])
        super().add_request(request)  # type: ignore[misc]

    def finish_requests(self, request_ids: Any, finished_status: RequestStatus) -> list[Request]:
        """End requests from outside. Those that are aborted end in the next step's outputs, so that
        vLLM has no end to send for them."""
        if request_ids is not None:
            given = [request_ids] if isinstance(request_ids, str) else request_ids
            request_ids = [self._parking.id_of(call_id) for call_id in given]
        ended = super().finish_requests(request_ids, finished_status)  # type: ignore[misc]
        is_abort = finished_status == RequestStatus.FINISHED_ABORTED
        for request in ended:
            if self._parking.drop(request.request_id):
                continue
            if is_abort:
                self._end_call(request)
            else:
                self._pieces.pop(request.request_id, None)
        return [] if is_abort else ended

    def set_pause_state(self, pause_state: PauseState) -> None:
        """Begin or end a pause. One that waits (`serve.vllm.engine` lets no core wait, but tells it
        so) ends the calls of requests that stay."""
        is_stop = pause_state != PauseState.UNPAUSED and self.has_requests()
        self._is_stopped = self._is_stopped or is_stop
        parks = self.parks and pause_state == PauseState.PAUSED_NEW
        super().set_pause_state(PauseState.PAUSED_ALL if parks else pause_state)  # type: ignore[misc]
        if pause_state != PauseState.UNPAUSED:
            self._end_silently(self._parking.drop_all())  # those of the last pause
        if parks:
            self._is_parking = True
            leave = [i for i, r in self._requests.items() if not self._parking.may_stay(r)]
            self.finish_requests(leave, RequestStatus.FINISHED_ABORTED)
        elif pause_state == PauseState.UNPAUSED and self._is_parking:
            self._is_parking = False
            self._drop_at_s = time.perf_counter() + PARKING_LIMIT_S
            for request in self._requests.values():
                self._end_call(request)
                self._parking.park(request)

    def schedule(self, throttle_prefills: bool = False) -> Any:
        """The next step; the first one after a stop says how long none was made, for whatever
        reason: a pause, or requests that came late."""
        if self._parking and time.perf_counter() > self._drop_at_s:
            self._end_silently(self._parking.drop_all())
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
    def _requests(self) -> dict[str, Request]:
        return self.requests  # type: ignore[attr-defined, no-any-return]

    @property
    def _must_hand_over(self) -> bool:
        """Whether no piece may stay."""
        is_paused = self.pause_state != PauseState.UNPAUSED  # type: ignore[attr-defined]
        return _TELLS_VERSIONS and is_paused and not self._is_parking

    def _take(
        self, output: EngineCoreOutput, client: int, request: Request | None = None
    ) -> list[EngineCoreOutput]:
        """What leaves now that this output has come, of a request that the scheduler still has or
        that is given."""
        request_id = output.request_id
        piece = self._pieces.get(request_id)
        if piece is None and (parked := self._parking.of(request_id)) is not None:
            parked.outputs.append(output)
            return []
        if _is_only_tokens(output):
            if piece is None and _is_read_whole(request or self._requests.get(request_id)):
                piece = self._pieces[request_id] = _Piece(client)
            if piece is not None:
                piece.add(output)
                if len(piece.token_ids) < _PIECE_TOKENS:
                    return []
                del self._pieces[request_id]
                return [self._of_piece(request_id, piece)]
        leaves = []
        if piece is not None:
            del self._pieces[request_id]
            leaves.append(self._of_piece(request_id, piece))
        self._parking.address(output)
        return [*leaves, output]

    def _of_piece(self, request_id: str, piece: _Piece) -> EngineCoreOutput:
        output = piece.output(request_id)
        self._parking.address(output)
        return output

    def _end_call(self, request: Request) -> None:
        """End the call of a request with what it has."""
        piece = self._pieces.pop(request.request_id, None) or _Piece(request.client_index)
        end = piece.output(request.request_id)
        end.finish_reason = FinishReason.ABORT
        self._parking.address(end)
        self._ready[piece.client].append(end)

    def _go_on(self, parked: Parked, call_id: str) -> None:
        """Give a request another call, and tell that what it has made."""
        request = parked.request
        self._parking.name(request.request_id, call_id)
        client, request_id = request.client_index, request.request_id
        if parked.has_begun and self.log_stats:  # type: ignore[attr-defined]
            request.record_event(EngineCoreEventType.QUEUED)
            request.record_event(EngineCoreEventType.SCHEDULED)
            self._pieces[request_id] = _Piece(client, request.take_events())
        for output in parked.outputs:
            self._ready[client] += self._take(output, client, request)

    def _end_silently(self, request_ids: list[str]) -> None:
        """End requests that have no call."""
        aborted = RequestStatus.FINISHED_ABORTED
        super().finish_requests(request_ids, aborted)  # type: ignore[misc]


def _is_read_whole(request: Request | None) -> bool:
    """Whether nobody reads single tokens of a request."""
    params = None if request is None else request.sampling_params
    return bool(
        params is not None
        and params.output_kind == RequestOutputKind.FINAL_ONLY
        and not params.stop  # the server's process looks for them, and ends the request
    )


def _is_only_tokens(output: EngineCoreOutput) -> bool:
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
    kind = _AsyncScheduler if is_async else _SyncScheduler
    scheduler = kind(vllm_config=vllm_config, **kwargs)
    look_at_ends_only(scheduler.kv_cache_manager)
    return scheduler


def make_parking_scheduler(**kwargs: Any) -> Scheduler:
    """The same, where requests stay across a pause without their calls."""
    scheduler = make_scheduler(**kwargs)
    scheduler.parks = True
    return scheduler
