"""Requests that stay in vLLM's engine core while their calls are interrupted, without a model
(serve/vllm/parking.py)."""

from __future__ import annotations

import itertools
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

from ray_apr.serve.vllm.names import PARKING_LIMIT_S
from ray_apr.serve.vllm.scheduler import _PIECE_TOKENS, _InPieces
from tests.vllm.schedulers import BareScheduler

pytestmark = pytest.mark.vllm

PROMPT = [-1, -2, -3]
BUDGET = 100


class Request:
    """As much of vLLM's as is read. A sample's n-th token is n."""

    def __init__(self, request_id, made, *, salt="group", **changed):
        params = {
            "temperature": 1.0, "top_p": 1.0, "top_k": 0, "logprobs": 0, "stop_token_ids": [],
            "ignore_eos": False, "output_kind": RequestOutputKind.FINAL_ONLY, "stop": [],
        }  # fmt: skip
        self.request_id, self.cache_salt, self.client_index = request_id, salt, 0
        self.sampling_params = SimpleNamespace(**params | changed)
        self.prompt_token_ids = [*PROMPT, *range(made)]
        self.all_token_ids = list(self.prompt_token_ids)
        self.num_prompt_tokens = len(self.all_token_ids)
        self.max_tokens = BUDGET - made
        self.events = []

    @property
    def num_tokens(self):
        return len(self.all_token_ids)

    def record_event(self, event_type):
        self.events.append(event_type)

    def take_events(self):
        events, self.events = self.events, []
        return events or None


class VLLM(BareScheduler):
    """As much of vLLM's scheduler as is overridden: each request gets a token in each step."""

    log_stats = True
    running = waiting = ()

    def add_request(self, request):
        self.requests[request.request_id] = request

    def schedule(self, throttle_prefills=False):
        ids = list(self.requests) if self.pause_state == PauseState.UNPAUSED else []
        return SimpleNamespace(
            total_num_scheduled_tokens=len(ids), ids=ids, scheduled_new_reqs=(),
            scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=()),
        )  # fmt: skip

    def update_from_output(self, step, ending=()):
        outputs = []
        for name in step.ids:
            request = self.requests.get(name)
            if request is None:  # it has ended meanwhile
                continue
            token = request.num_tokens - len(PROMPT)
            request.all_token_ids.append(token)
            column = np.full((1, 1), token), np.full((1, 1), -token / 7)
            output = EngineCoreOutput(
                name, [token], new_logprobs=LogprobsLists(*column, np.array([1]))
            )
            if name in ending or token == BUDGET - 1:
                output.finish_reason = FinishReason.STOP
                del self.requests[name]
            outputs.append(output)
        return {0: EngineCoreOutputs(outputs=outputs)} if outputs else {}


class Scheduler(_InPieces, VLLM):
    parks = True


class Engine:
    """The server's side of a core: calls of samples, each of which goes on where the last one has
    ended."""

    def __init__(self):
        self.core = Scheduler()
        self.version = 0
        self.made_under = {}
        """Version of each token of a sample."""
        self.calls = {}
        """Those under way: sample, version, tokens before, tokens of it."""
        self.had = {}
        """Tokens of each sample whose calls have ended."""
        self.ended = {}
        self.events = []
        self.pieces = []
        """Tokens of each output."""
        self._numbers = itertools.count()
        self._under_way = None

    def call(self, sample, **changed):
        made = self.had.setdefault(sample, 0)
        call_id = f"{sample}#{next(self._numbers)}"
        self.calls[call_id] = SimpleNamespace(
            sample=sample, version=self.version, had=made, tokens=[]
        )
        self.core.add_request(Request(call_id, made, **changed))
        return call_id

    def step(self, ending=()):
        self.begin_step()
        self.end_step(ending)

    def begin_step(self):
        self.end_step()
        self._under_way = self.core.schedule()

    def end_step(self, ending=()):
        if self._under_way is None:
            return
        step, self._under_way = self._under_way, None
        for name in step.ids:
            if (request := self.core.requests.get(name)) is not None:
                of_sample = self.made_under.setdefault(name.partition("#")[0], {})
                of_sample[request.num_tokens - len(PROMPT)] = self.version
        for told in self.core.update_from_output(step, ending).values():
            for output in told.outputs:
                self.take(output)

    def take(self, output):
        call = self.calls[output.request_id]  # nothing comes after its end
        self.events += output.events or ()
        self.pieces.append(len(output.new_token_ids))
        call.tokens += output.new_token_ids
        if output.new_token_ids:
            expected = [-token / 7 for token in output.new_token_ids]
            np.testing.assert_allclose(output.new_logprobs.logprobs[:, 0], expected)
        if output.finish_reason is None:
            return
        del self.calls[output.request_id]
        made = range(call.had, call.had + len(call.tokens))
        assert call.tokens == list(made), "no token is lost, and none comes twice"
        assert {self.made_under[call.sample][token] for token in made} <= {call.version}
        self.had[call.sample] += len(call.tokens)
        self.ended[call.sample] = output.finish_reason

    def pause(self, state=PauseState.PAUSED_NEW):
        self.core.set_pause_state(state)
        while self._under_way is not None or self.core.has_requests():
            self.step()

    def resume(self, is_new=True):
        self.version += is_new
        self.core.set_pause_state(PauseState.UNPAUSED)

    def abort(self, call_ids):
        assert self.core.finish_requests(call_ids, RequestStatus.FINISHED_ABORTED) == []


def with_request_without_call():
    """An engine whose sample has one token, and whose request has made another one since."""
    engine = Engine()
    engine.call("a")
    engine.step()
    engine.pause()
    engine.resume()
    engine.step()
    return engine


def test_the_next_call_gets_what_its_request_has_made_meanwhile():
    engine = Engine()
    engine.call("a")
    for _ in range(5):
        engine.step()
    engine.pause()
    assert list(engine.calls) == ["a#0"] and not engine.pieces, "all waits for the pause's end"
    engine.resume()
    for _ in range(_PIECE_TOKENS + 3):
        engine.step()
    assert engine.had["a"] == 5 and not engine.calls
    assert list(engine.core.requests) == ["a#0"], "it goes on by itself"
    call = engine.call("a")
    assert list(engine.core.requests) == ["a#0"]
    engine.step()
    assert len(engine.calls[call].tokens) == _PIECE_TOKENS
    engine.step(ending=["a#0"])
    assert engine.had["a"] == 5 + _PIECE_TOKENS + 5
    assert engine.ended == {"a": FinishReason.STOP}
    assert [event.name for event in engine.events] == ["QUEUED", "SCHEDULED"]


@pytest.mark.parametrize("num_made", [_PIECE_TOKENS + 3, 2 * _PIECE_TOKENS - 1])
@pytest.mark.parametrize("ends", [True, False])
def test_what_a_request_has_made_meanwhile_leaves_before_the_next_tokens(num_made, ends):
    """known fault: an end or a whole piece of the next step left first. After an end the tokens
    were lost: the response lacked them."""
    engine = Engine()
    engine.call("a")
    engine.step()
    engine.pause()
    engine.resume()
    for _ in range(num_made):
        engine.step()
    call = engine.call("a")
    engine.step(ending=["a#0"] if ends else ())
    if not ends:
        assert engine.calls[call].tokens == list(range(1, 1 + sum(engine.pieces[1:])))
        engine.abort([call])
        engine.step()
    assert engine.had == {"a": 1 + num_made + 1}


def test_a_pause_that_freezes_calls_leaves_them_with_their_requests():
    engine = Engine()
    engine.call("a")
    engine.step()
    engine.pause(PauseState.PAUSED_ALL)
    assert engine.pieces == [1], "of the old weights, whoever tells versions"
    engine.resume(is_new=False)
    engine.step()
    assert list(engine.calls) == ["a#0"]


@pytest.mark.parametrize("num_made", [0, 1])
def test_the_first_output_of_a_prefill_is_that_with_its_figures(num_made, monkeypatch):
    """vLLM's front counts the tokens of a prompt at the first output of its call alone."""
    engine = Engine()
    engine.call("a")
    engine.pause()
    engine.resume()
    request = engine.core.requests["a#0"]
    prefill = EngineCoreOutput("a#0", [0], prefill_stats=SimpleNamespace(), events=["SCHEDULED"])
    told = []
    monkeypatch.setattr(engine, "take", told.append)
    (end,) = engine.core.update_from_output(SimpleNamespace(ids=[]))[0].outputs
    monkeypatch.setattr(
        VLLM, "update_from_output", lambda *_: {0: EngineCoreOutputs(outputs=[prefill])}
    )
    if num_made:
        engine.step()
    engine.had["a"] = 0
    engine.call("a")
    engine.step()
    assert request.events == [] and end.finish_reason == FinishReason.ABORT
    assert told[0] is prefill and prefill.request_id == "a#1"


def test_a_request_that_ends_before_its_next_call_has_its_end_for_it():
    engine = Engine()
    engine.call("a")
    engine.step()
    engine.pause()
    engine.resume()
    for _ in range(4):
        engine.step()
    engine.step(ending=["a#0"])
    assert not engine.core.requests
    engine.call("a")
    assert engine.core.has_requests(), "or nobody would ask for it"
    engine.step()
    assert engine.had == {"a": 6} and engine.ended == {"a": FinishReason.STOP}
    assert engine.pieces == [1, 4, 1], "in pieces, as if it had had the call all the time"
    assert not engine.core.has_requests()


def test_a_request_goes_through_several_pauses_and_can_be_aborted():
    engine = Engine()
    for _ in range(3):
        call = engine.call("a")
        engine.step()
        engine.pause()
        engine.resume()
        engine.step()
    assert list(engine.core.requests) == ["a#0"]
    call = engine.call("a")
    engine.step()
    engine.abort([call])
    engine.step()
    assert engine.had == {"a": 7} and not engine.core.requests and not engine.calls
    engine.call("a")
    assert list(engine.core.requests) == ["a#4"], "the id of an ended request is nobody's"


def test_frozen_calls_can_be_aborted():
    engine = Engine()
    call = engine.call("a")
    engine.step()
    engine.pause()
    engine.abort([call])
    assert engine.core.has_requests()
    engine.pause()
    assert engine.had == {"a": 1} and not engine.core.requests


@pytest.mark.parametrize(
    "changed",
    [{"salt": "another"}, {"temperature": 0.5}, {"top_k": 3}, {"stop_token_ids": [7]}],
)
def test_a_call_that_asks_for_something_else_begins_anew(changed):
    engine = with_request_without_call()
    engine.call("a", **changed)
    assert "a#1" in engine.core.requests
    assert ("a#0" in engine.core.requests) == ("salt" in changed), "no other call asks for it"
    engine.abort(["a#1"])
    engine.step()
    assert not engine.calls


@pytest.mark.parametrize("change", ["budget", "tokens"])
def test_a_call_with_other_tokens_or_another_budget_begins_anew(change):
    engine = with_request_without_call()
    request = Request("a#1", 1)
    if change == "budget":
        request.max_tokens -= 1
    else:
        request.prompt_token_ids[-1] += 1
    engine.core.add_request(request)
    assert list(engine.core.requests) == ["a#1"]


def test_nobody_hears_of_the_end_of_a_request_without_a_call():
    engine = with_request_without_call()
    assert not engine.calls and engine.core.requests
    engine.abort(None)
    engine.step()
    assert not engine.core.requests and engine.pieces == [1]


@pytest.mark.parametrize(
    "changed", [{"stop": ["###"]}, {"output_kind": RequestOutputKind.DELTA}, {"salt": None}]
)
def test_a_request_that_may_not_stay_ends_in_the_pause(changed):
    engine = Engine()
    engine.call("a", **changed)
    engine.step()
    engine.pause()
    assert engine.had == {"a": 1} and not engine.core.requests


def test_a_request_that_no_call_takes_over_is_ended(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    engine = Engine()
    engine.call("a")
    engine.step()
    engine.pause()
    now[0] += 60.0  # of a long sync
    engine.resume()
    now[0] += PARKING_LIMIT_S
    engine.step()
    assert list(engine.core.requests) == ["a#0"]
    now[0] += 0.001
    engine.step()
    assert not engine.core.requests and engine.had == {"a": 1}
    engine.call("a")
    assert list(engine.core.requests) == ["a#1"]


def test_a_request_that_no_call_has_taken_over_does_not_outlast_the_next_pause():
    engine = with_request_without_call()
    engine.pause()
    assert not engine.core.requests
    engine.resume()
    engine.call("a")
    engine.step()
    engine.pause()
    engine.resume()
    engine.step()
    assert engine.had == {"a": 2}


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(
            ["steps", "half a step", "calls", "end", "abort", "pause", "resume", "clock", "sync"]
        ),
        st.integers(0, 2 * _PIECE_TOKENS),
    ),
    max_size=40,
)


@settings(max_examples=300, deadline=None)
@given(EVENTS)
def test_each_call_has_the_tokens_of_one_version_and_each_sample_has_each_once(events):
    engine, now = Engine(), [0.0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("time.perf_counter", lambda: now[0])
        for event, n in events:
            is_paused = engine.core.pause_state != PauseState.UNPAUSED
            under_way = {call.sample: call_id for call_id, call in engine.calls.items()}
            sample = f"s{n % 3}"
            if event == "steps" and not is_paused:
                for _ in range(n):
                    engine.step()
            elif event == "half a step" and not is_paused:
                engine.begin_step()
            elif event == "calls" and not is_paused:
                for each in ("s0", "s1", "s2")[: 1 + n % 3]:
                    if each not in under_way and engine.ended.get(each) != FinishReason.STOP:
                        engine.call(each)
            elif event == "end" and not is_paused and engine.core.requests:
                engine.step(ending=[sorted(engine.core.requests)[n % len(engine.core.requests)]])
            elif event == "abort" and sample in under_way:
                engine.abort([under_way[sample]])
            elif event == "pause":
                engine.pause()
            elif event == "resume" and is_paused:
                engine.resume(is_new=bool(n % 2))
            elif event == "sync":
                engine.pause()
                engine.resume()
            elif event == "clock":
                now[0] += n / 10
        engine.pause()
        engine.core.finish_requests(None, RequestStatus.FINISHED_ABORTED)
        engine.resume()
        engine.step()
    assert not engine.calls and not engine.core.requests and not engine.core.has_requests()
    assert not any(vars(engine.core._parking).values()), "nothing is remembered for good"
