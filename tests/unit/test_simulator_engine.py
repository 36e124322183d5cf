"""The engine model jumps from event to event; a model that takes each step must agree with it."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_apr.tools.simulator.cluster import EngineConfig
from ray_apr.tools.simulator.engine import EngineModel, Request

# odd numbers, so that nothing falls on the boundary of a step by chance
CONFIG = dict(
    decode_base_s=0.0101,
    decode_per_sequence_s=0.00037,
    decode_per_context_token_s=1.3e-6,
    prefill_tokens_per_s=9_973.0,
)


@dataclass(eq=False)
class Job:
    name: str
    context: int
    tokens: int
    made: int = 0
    end: tuple[int, float] | None = None


@dataclass
class StepByStep:
    """The same engine, one decode step at a time."""

    config: EngineConfig
    at: float = 0.0
    steps: int = 0
    generated: int = 0
    preempted: int = 0
    running: list[Job] = field(default_factory=list)
    queue: list[Job] = field(default_factory=list)
    cached: OrderedDict[str, int] = field(default_factory=OrderedDict)

    @property
    def context(self) -> int:
        return sum(job.context + job.made for job in self.running)

    def step_s(self) -> float:
        c = self.config
        per_sequence = c.decode_per_sequence_s * len(self.running)
        return c.decode_base_s + per_sequence + c.decode_per_context_token_s * self.context

    def run_until(self, now: float) -> None:
        while self.running:
            if self.at + self.step_s() > now and not self.overflows():
                break
            if self.overflows():
                if self.at > now:
                    break
                while self.overflows():
                    self.queue.insert(0, self.running.pop())
                    self.preempted += 1
                self.shrink()
                self.admit()
                continue
            self.at += self.step_s()
            self.steps += 1
            self.generated += len(self.running)
            for job in self.running:
                job.made += 1
            ended = [job for job in self.running if job.made == job.tokens]
            for job in ended:
                job.end = (self.steps, self.at)
                self.running.remove(job)
            if ended:
                self.admit()
        if not self.running:
            self.at = max(self.at, now)

    def overflows(self) -> bool:
        full = self.context + len(self.running) > self.config.kv_capacity_tokens
        return full and len(self.running) > 1

    def admit(self) -> None:
        while self.queue and len(self.running) < self.config.max_sequences:
            job = self.queue[0]
            size = job.context + job.made
            needed = self.context + len(self.running) + size
            if self.running and needed >= self.config.kv_capacity_tokens:
                break
            prefill = max(0, size - self.cached.pop(job.name, 0))
            self.at += prefill / self.config.prefill_tokens_per_s
            self.running.append(self.queue.pop(0))
        self.shrink()

    def shrink(self) -> None:
        room = self.config.kv_capacity_tokens - self.context
        while self.cached and sum(self.cached.values()) > room:
            self.cached.popitem(last=False)

    def stop(self, job: Job, *, keep: bool) -> None:
        if job in self.queue:
            self.queue.remove(job)
        else:
            self.running.remove(job)
            if keep:
                self.cached[job.name] = job.context + job.made


def check_same_state(model: EngineModel, slow: StepByStep) -> None:
    capacity = slow.config.kv_capacity_tokens
    assert model._context + model._num_cached <= capacity or model.num_running <= 1
    assert model._context == slow.context
    assert model._num_cached == sum(slow.cached.values())
    assert model.num_queued == len(slow.queue)


operations = st.lists(
    st.tuples(
        st.integers(1, 120),  # time since the operation before, in 3.7 ms
        st.sampled_from(["submit", "submit", "submit", "stop", "keep"]),
        st.integers(0, 30),  # which one is stopped
        st.integers(0, 120),  # prompt
        st.integers(1, 150),  # response
    ),
    min_size=1,
    max_size=25,
)


@given(operations, st.sampled_from([150, 400, 10_000]), st.sampled_from([1, 3, 32]))
@settings(max_examples=120, deadline=None)
def test_jumps_agree_with_single_steps(ops, capacity, max_sequences):
    config = EngineConfig(kv_capacity_tokens=capacity, max_sequences=max_sequences, **CONFIG)
    model, slow = EngineModel(config), StepByStep(config)
    requests: dict[str, Request] = {}
    jobs: dict[str, Job] = {}
    ends: dict[str, tuple[int, float]] = {}

    def run_model(until: float) -> None:
        time = model.next_event()
        while time is not None and time <= until:
            for request in model.on_event(time):
                ends[request.sample_id] = (model._steps, time)
            time = model.next_event()

    now = 0.000123
    for gap, what, which, prompt, response in ops:
        now += gap * 0.0037
        run_model(now)
        slow.run_until(now)
        alive = [name for name in requests if name not in ends]
        if what == "submit":
            name = f"s{len(requests)}"
            requests[name] = Request(name, prompt, response, False)
            jobs[name] = Job(name, prompt, response)
            model.submit(requests[name], now)
            slow.queue.append(jobs[name])
            slow.admit()
        elif alive:
            name = alive[which % len(alive)]
            model.stop(requests[name], now, keep=what == "keep")
            slow.stop(jobs[name], keep=what == "keep")
            assert model.made(requests[name]) == jobs[name].made
            ends[name] = jobs[name].end = (-1, now)
            model.settle(now)
            run_model(now)  # without that request, the present step is shorter
            slow.run_until(now)
            slow.admit()
        check_same_state(model, slow)
    run_model(1e9)
    slow.run_until(1e9)
    assert set(ends) == set(requests), "every request ends"
    for name, (steps, time) in ends.items():
        assert jobs[name].end == (steps, pytest.approx(time, abs=config.decode_base_s))
    assert model.tokens_generated == slow.generated
    assert model.num_preempted == slow.preempted


def test_one_request_alone_may_exceed_the_capacity():
    model = EngineModel(EngineConfig(kv_capacity_tokens=10, **CONFIG))
    model.submit(Request("s", 50, 20, False), 0.0)
    (ended,) = model.on_event(model.next_event() or 0.0)
    assert ended.sample_id == "s" and model.tokens_generated == 20


def test_a_stopped_request_leaves_its_room_to_the_queue():
    model = EngineModel(EngineConfig(max_sequences=1, **CONFIG))
    first, second = Request("a", 5, 100, False), Request("b", 5, 100, False)
    model.submit(first, 0.0)
    model.submit(second, 0.0)
    assert (model.num_running, model.num_queued) == (1, 1)
    model.stop(first, 0.1, keep=False)
    model.settle(0.1)
    assert (model.num_running, model.num_queued) == (1, 0)
    assert model.next_event() is not None


def test_kept_entries_save_the_prefill_and_recompute_pays_it():
    for keep, reprefilled in ((True, 0), (False, 5 + 10)):
        model = EngineModel(EngineConfig(**CONFIG))
        request = Request("a", 5, 100, False)
        model.submit(request, 0.0)
        model.stop(request, 10 * 0.0106 + 5 / 9_973, keep=keep)
        assert model.made(request) == 10
        model.submit(Request("a", 15, 90, True), 1.0)
        assert model.tokens_reprefilled == reprefilled
    model.recompute(1.0)
    assert model.tokens_reprefilled == 15 + 15


def test_a_frozen_engine_makes_nothing_and_is_not_busy():
    model = EngineModel(EngineConfig(**CONFIG))
    request = Request("a", 0, 50, False)
    model.submit(request, 0.0)
    before = model.next_event()
    model.delay(0.0, 100.0)
    assert model.next_event() == pytest.approx(before + 100.0)
    model.on_event(model.next_event())
    assert model.made(request) == 50
    model.close(200.0)
    assert model.busy_s == pytest.approx(before)


@pytest.mark.parametrize(
    ("is_resumed", "resume_overhead_s", "overhead_s"),
    [(False, None, 0.2), (False, 0.7, 0.2), (True, None, 0.2), (True, 0.7, 0.7)],
)
def test_taking_a_request_in_costs_what_its_kind_costs(is_resumed, resume_overhead_s, overhead_s):
    models = [
        EngineModel(EngineConfig(**CONFIG, **overheads))
        for overheads in (
            {},
            {"request_overhead_s": 0.2, "resume_overhead_s": resume_overhead_s},
        )
    ]
    for model in models:
        model.submit(Request("a", 10, 5, is_resumed), 0.0)
    free, dear = (model.next_event() for model in models)
    assert dear == pytest.approx(free + overhead_s)
