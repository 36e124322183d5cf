"""Tokens that leave vLLM's engine core in pieces (serve/vllm/scheduler.py), without a model."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("vllm")

from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.outputs import LogprobsLists
from vllm.v1.request import RequestStatus

from ray_apr.serve.vllm.scheduler import _PIECE_TOKENS, PREFILL_INTERVAL, _InPieces
from tests.vllm.schedulers import BareScheduler

pytestmark = pytest.mark.vllm


class VLLM(BareScheduler):
    """As much of vLLM's scheduler as is overridden: each request gets a token in each step."""

    def __init__(self, interval_s=None, graphs="NONE"):
        super().__init__(graphs, **({} if interval_s is None else {PREFILL_INTERVAL: interval_s}))
        self.made = {}
        self.running, self.waiting = [], []
        self.prefill_capacity_bound = False

    def add(self, name, *, client=0, kind=RequestOutputKind.FINAL_ONLY, stop=()):
        params = SimpleNamespace(output_kind=kind, stop=list(stop))
        self.requests[name] = SimpleNamespace(
            request_id=name, client_index=client, sampling_params=params
        )
        self.made[name] = []

    def schedule(self, throttle_prefills=False):
        is_idle = not self.requests or self.pause_state != PauseState.UNPAUSED
        taken = []
        if not throttle_prefills or self.prefill_capacity_bound:
            most = getattr(self, "max_num_active_reqs", self.max_num_running_reqs)
            num_free = most - len(self.running)
            taken, self.waiting = self.waiting[:num_free], self.waiting[num_free:]
            self.prefill_capacity_bound = bool(self.waiting)
            self.running += taken
        return SimpleNamespace(
            total_num_scheduled_tokens=0 if is_idle else len(self.requests),
            taken=taken,
            scheduled_new_reqs=[r for r in taken if not r.is_resumed],
            scheduled_cached_reqs=SimpleNamespace(
                resumed_req_ids={id(r) for r in taken if r.is_resumed}
            ),
        )

    def make_stats(self):
        return SimpleNamespace(num_waiting_reqs=len(self.waiting))

    def update_from_output(self, ending=()):
        outputs = {}
        for name, request in list(self.requests.items()):
            if self.pause_state != PauseState.UNPAUSED:
                continue
            token = len(self.made[name])
            self.made[name].append(token)
            width = 1 + token % 3  # that of the request of the step with the most log-probs
            ids, logprobs = np.full((1, width), token), np.full((1, width), -token / 7)
            column = ids.astype(np.int32), logprobs.astype(np.float32)
            output = EngineCoreOutput(
                name, [token], new_logprobs=LogprobsLists(*column, np.array([1]))
            )
            if name in ending:
                output.finish_reason = FinishReason.STOP
                del self.requests[name]
            outputs.setdefault(request.client_index, []).append(output)
        return {client: EngineCoreOutputs(outputs=found) for client, found in outputs.items()}


class Scheduler(_InPieces, VLLM):
    pass


class Reader:
    """What reaches the servers' processes, by client and request."""

    def __init__(self):
        self.tokens, self.ends, self.pieces = {}, {}, {}

    def take(self, by_client):
        for client, step in by_client.items():
            assert step.outputs or step.finished_requests or step.scheduler_stats
            for output in step.outputs:
                key = output.request_id
                assert key not in self.ends, "nothing comes after the end"
                self.tokens.setdefault(key, []).extend(output.new_token_ids)
                self.pieces.setdefault(key, []).append(len(output.new_token_ids))
                if output.new_token_ids:
                    logprobs = output.new_logprobs.logprobs[:, 0]
                    expected = [-t / 7 for t in output.new_token_ids]
                    np.testing.assert_allclose(logprobs, expected, rtol=1e-6)
                    assert output.new_logprobs.sampled_token_ranks.tolist() == [1] * len(logprobs)
                if output.finish_reason is not None:
                    self.ends[key] = (client, output.finish_reason)


def test_tokens_come_in_pieces_and_the_rest_with_the_end():
    scheduler, reader = Scheduler(), Reader()
    scheduler.add("a")
    for _ in range(2 * _PIECE_TOKENS + 3):
        reader.take(scheduler.update_from_output())
    reader.take(scheduler.update_from_output(ending=["a"]))
    assert reader.pieces["a"] == [_PIECE_TOKENS, _PIECE_TOKENS, 3, 1]
    assert reader.tokens == scheduler.made
    assert reader.ends == {"a": (0, FinishReason.STOP)}


def test_tokens_that_a_text_may_end_with_wait_for_no_others():
    scheduler, reader = Scheduler(), Reader()
    scheduler.add("a", stop=["###"])
    for _ in range(5):
        reader.take(scheduler.update_from_output())
    assert reader.pieces["a"] == [1] * 5


def test_who_reads_a_stream_gets_each_token():
    scheduler, reader = Scheduler(), Reader()
    scheduler.add("a", kind=RequestOutputKind.DELTA)
    for _ in range(5):
        reader.take(scheduler.update_from_output())
    assert reader.pieces["a"] == [1] * 5


def test_an_output_with_more_than_tokens_does_not_wait():
    scheduler = Scheduler()
    scheduler.add("a")
    scheduler.update_from_output()
    more = EngineCoreOutput("a", [1], prefill_stats=object())
    held, kept = scheduler._take(more, 0)
    assert held.new_token_ids == [0] and kept is more


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    return now


def decoding(is_prefill_chunk=False, is_resumed=False):
    return SimpleNamespace(is_prefill_chunk=is_prefill_chunk, is_resumed=is_resumed)


@pytest.mark.parametrize("is_resumed", [False, True])
def test_requests_are_taken_in_together_where_many_decode(is_resumed, clock):
    scheduler = Scheduler(graphs="FULL_AND_PIECEWISE")
    scheduler.waiting = [decoding(is_resumed=is_resumed) for _ in range(64)]
    assert len(scheduler.schedule().taken) == 64, "none decodes yet"
    scheduler.waiting = [decoding(is_resumed=is_resumed)]
    clock[0] += 0.099
    assert not scheduler.schedule().taken
    assert scheduler.make_stats().num_waiting_reqs == 0, "the engine has room for it"
    clock[0] += 0.002
    assert len(scheduler.schedule().taken) == 1, "it has waited long enough"
    assert scheduler.make_stats().num_waiting_reqs == 0
    scheduler.waiting = [decoding() for _ in range(5)]
    assert len(scheduler.schedule().taken) == 5, "a sixteenth of 65"


def test_who_queues_behind_a_full_engine_is_taken_in_together_with_others(clock):
    scheduler = Scheduler(interval_s=0.5)
    scheduler.waiting = [decoding() for _ in range(110)]
    scheduler.schedule()
    assert scheduler.prefill_capacity_bound
    del scheduler.running[:3]
    assert not scheduler.schedule().scheduled_new_reqs
    assert scheduler.make_stats().num_waiting_reqs == 7, "three of ten have room"
    del scheduler.running[:4]
    assert len(scheduler.schedule().scheduled_new_reqs) == 7


def test_an_engine_that_may_run_fewer_than_it_has_is_full_with_these(clock):
    scheduler = Scheduler(interval_s=0.5)
    scheduler.max_num_active_reqs = 64
    scheduler.waiting = [decoding() for _ in range(64)]
    scheduler.schedule()
    scheduler.waiting = [decoding() for _ in range(3)]
    scheduler.schedule()
    assert scheduler.make_stats().num_waiting_reqs == 3, "none of them has room"


def test_a_request_that_has_nothing_to_prefill_makes_no_other_wait_longer(clock, monkeypatch):
    scheduler = Scheduler(interval_s=0.5)
    scheduler.waiting = [decoding() for _ in range(64)]
    scheduler.schedule()
    cached = SimpleNamespace(
        total_num_scheduled_tokens=1,
        scheduled_new_reqs=["its prompt is in the cache"],
        scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=set()),
    )
    scheduler.waiting = [decoding()]
    clock[0] += 0.4
    with monkeypatch.context() as patch:
        patch.setattr(VLLM, "schedule", lambda self, throttle_prefills: cached)
        scheduler.schedule()
    clock[0] += 0.2
    assert len(scheduler.schedule().scheduled_new_reqs) == 1


def test_a_request_does_not_wait_for_a_step_that_takes_in_a_prompt_anyway(clock):
    scheduler = Scheduler(interval_s=0.5)
    scheduler.waiting = [decoding() for _ in range(50)]
    scheduler.schedule()
    scheduler.waiting, scheduler.running[7] = [decoding()], decoding(is_prefill_chunk=True)
    assert len(scheduler.schedule().scheduled_new_reqs) == 1


@pytest.mark.parametrize("graphs", ["NONE", "PIECEWISE", "FULL"])
@pytest.mark.parametrize("interval_s", [None, 0])
def test_no_request_waits_where_all_steps_are_alike(graphs, interval_s, clock):
    scheduler = Scheduler(interval_s, graphs if interval_s is None else "FULL_AND_PIECEWISE")
    scheduler.waiting = [decoding() for _ in range(90)]
    scheduler.schedule()
    scheduler.waiting = [decoding()]
    assert len(scheduler.schedule().scheduled_new_reqs) == 1


def test_where_nobody_tells_versions_pieces_outlast_a_pause(monkeypatch):
    monkeypatch.setattr("ray_apr.serve.vllm.scheduler._TELLS_VERSIONS", False)
    scheduler, reader = Scheduler(), Reader()
    for name in "ab":
        scheduler.add(name)
    reader.take(scheduler.update_from_output())
    scheduler.pause_state = PauseState.PAUSED_ALL
    assert not scheduler.has_requests()
    reader.take(scheduler.update_from_output())
    assert reader.tokens == {}
    scheduler.finish_requests(["a"], RequestStatus.FINISHED_ABORTED)
    reader.take(scheduler.update_from_output())
    assert reader.tokens == {"a": scheduler.made["a"]}, "what is frozen can be aborted"
    scheduler.pause_state = PauseState.UNPAUSED
    reader.take(scheduler.update_from_output(ending=["b"]))
    assert reader.tokens == scheduler.made


def test_an_engine_that_is_paused_hands_over_all_it_has_and_then_rests():
    scheduler, reader = Scheduler(), Reader()
    for name in "abc":
        scheduler.add(name, client=int(name == "c"))
    for _ in range(3):
        reader.take(scheduler.update_from_output())
    assert reader.tokens == {}
    scheduler.pause_state = PauseState.PAUSED_ALL
    assert scheduler.has_requests(), "or nobody would ask for the outputs"
    reader.take(scheduler.update_from_output())
    assert reader.tokens == scheduler.made
    assert not scheduler.has_requests()


@pytest.mark.parametrize("mode", ["keep", "abort"])
def test_the_first_step_after_a_pause_tells_how_long_nothing_was_made(mode, clock, monkeypatch):
    told = []
    monkeypatch.setattr("ray_apr.serve.vllm.scheduler.logger.info", lambda _, ms: told.append(ms))
    scheduler = Scheduler()
    scheduler.set_pause_state(PauseState.PAUSED_ALL)
    scheduler.set_pause_state(PauseState.UNPAUSED)
    scheduler.add("a")
    scheduler.schedule()
    assert told == [], "there was nothing to stop"
    scheduler.update_from_output()
    clock[0] += 0.005
    if mode == "keep":
        scheduler.set_pause_state(PauseState.PAUSED_ALL)
    else:
        scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
        scheduler.set_pause_state(PauseState.PAUSED_NEW)
    scheduler.schedule()
    clock[0] += 0.02
    scheduler.set_pause_state(PauseState.UNPAUSED)
    if mode == "abort":
        scheduler.schedule()
        scheduler.add("a")
    clock[0] += 0.001
    scheduler.schedule()
    scheduler.schedule()
    assert told == pytest.approx([26.0])


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("steps"), st.integers(1, 2 * _PIECE_TOKENS)),
        st.tuples(st.just("add"), st.integers(0, 2)),
        st.tuples(st.just("end"), st.integers(0, 5)),
        st.tuples(st.just("abort"), st.integers(0, 5)),
        st.tuples(st.just("abort all"), st.just(0)),
        st.tuples(st.just("pause"), st.just(0)),
        st.tuples(st.just("resume"), st.just(0)),
    ),
    max_size=30,
)


@settings(max_examples=200, deadline=None)
@given(EVENTS)
def test_every_token_comes_once_in_order_and_before_its_end(events):
    scheduler, reader, clients = Scheduler(), Reader(), {}
    for event, n in events:
        alive = sorted(scheduler.requests)
        chosen = alive[n % len(alive)] if alive else None
        if event == "add":
            name = f"r{len(clients)}"
            clients[name] = n
            scheduler.add(name, client=n)
        elif event == "steps":
            for _ in range(n):
                reader.take(scheduler.update_from_output())
        elif event == "end" and chosen and scheduler.pause_state == PauseState.UNPAUSED:
            reader.take(scheduler.update_from_output(ending=[chosen]))
        elif event == "abort" and chosen:
            assert scheduler.finish_requests([chosen], RequestStatus.FINISHED_ABORTED) == []
        elif event == "abort all":
            scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
        elif event == "pause":
            scheduler.pause_state = PauseState.PAUSED_ALL
            while scheduler.has_requests():
                reader.take(scheduler.update_from_output())
            assert all(reader.tokens.get(name, []) == made for name, made in scheduler.made.items())
        elif event == "resume":
            scheduler.pause_state = PauseState.UNPAUSED
    scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    reader.take(scheduler.update_from_output())
    assert all(reader.tokens.get(name, []) == made for name, made in scheduler.made.items())
    assert {name: client for name, (client, _) in reader.ends.items()} == clients
    assert not scheduler.has_requests()
