"""Tokens within a block of vLLM's KV cache are passed over, and nothing else differs
(serve/vllm/blocks.py)."""

from __future__ import annotations

import random
from collections import Counter

import pytest

pytest.importorskip("vllm")

from vllm.v1.request import RequestStatus

from ray_apr.serve.vllm import scheduler as ours
from ray_apr.serve.vllm.blocks import look_at_ends_only
from tests.tiny_model import make_tiny_model
from tests.vllm.schedulers import BLOCK, made_tokens, real_request, real_scheduler

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"))


class Engine:
    """A scheduler that is stepped as an engine core steps it."""

    def __init__(self, scheduler, *, is_async=True):
        self.scheduler, self.requests, self.under_way = scheduler, {}, []
        self.num_ahead = 1 if is_async else 0

    def add(self, name, prompt, max_tokens):
        self.requests[name] = real_request(name, prompt, max_tokens)
        self.scheduler.add_request(self.requests[name])

    def abort(self, name):
        self.scheduler.finish_requests([name], RequestStatus.FINISHED_ABORTED)

    def step(self, token):
        """Make a step; what was decided of it, and what the cache has after it."""
        step = self.scheduler.schedule()
        is_made = step.total_num_scheduled_tokens > 0
        self.under_way += [step] * is_made
        if len(self.under_way) > (self.num_ahead if is_made else 0):
            done = self.under_way.pop(0)
            self.scheduler.update_from_output(done, made_tokens(done, self.requests, token))
        cached, pool = step.scheduled_cached_reqs, self.scheduler.kv_cache_manager.block_pool
        return (
            dict(step.num_scheduled_tokens),
            [(n.req_id, n.block_ids, n.num_computed_tokens) for n in step.scheduled_new_reqs],
            dict(zip(cached.req_ids, cached.new_block_ids, strict=True)),
            [request.request_id for request in self.scheduler.running],
            pool.get_num_free_blocks(),
            [block.block_id for block in pool.blocks if block.block_hash is not None],
        )


@pytest.mark.parametrize("is_async", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_each_step_is_as_without_it(model, monkeypatch, is_async, seed):
    def engine():
        made = real_scheduler(ours.make_scheduler, model, num_blocks=24, is_async=is_async)
        return Engine(made, is_async=is_async)

    quick = engine()
    with monkeypatch.context() as patch:
        patch.setattr(ours, "look_at_ends_only", lambda manager: False)
        plain = engine()
    rng = random.Random(seed)
    prompts = [[rng.randrange(3, 40) for _ in range(n)] for n in (5, 16, 31, 32, 33, 60)]
    num_shared = 0
    for number in range(500):
        if rng.random() < 0.1:
            prompt, max_tokens = rng.choice(prompts), rng.randrange(1, 120)
            for one in (quick, plain):
                one.add(f"{number}", prompt, max_tokens)
        if rng.random() < 0.02 and plain.scheduler.requests:
            name = rng.choice(sorted(plain.scheduler.requests))
            for one in (quick, plain):
                one.abort(name)
        token = rng.randrange(3, 40)
        decided = plain.step(token)
        assert quick.step(token) == decided, f"step {number}"
        num_shared += sum(shared for _, _, shared in decided[1])
    preemptions = [request.num_preemptions for request in plain.requests.values()]
    assert len(preemptions) > 30 and max(preemptions) > 0 and num_shared > 0


def looks(scheduler):
    """Counts the calls that reach the groups of a scheduler's blocks."""
    found = Counter()
    coordinator = scheduler.kv_cache_manager.coordinator
    for name in ("allocate_new_blocks", "cache_blocks"):
        call = getattr(coordinator, name)

        def counted(*args, _name=name, _call=call, **kwargs):
            found[_name] += 1
            return _call(*args, **kwargs)

        setattr(coordinator, name, counted)
    return found


def test_two_tokens_of_a_block_are_looked_at(model):
    engine = Engine(real_scheduler(ours.make_scheduler, model, num_blocks=99))
    engine.add("a", list(range(3, 3 + BLOCK)), 8 * BLOCK)
    for _ in range(4):
        engine.step(5)
    found = looks(engine.scheduler)
    for _ in range(4 * BLOCK):
        engine.step(5)
    assert found == {"allocate_new_blocks": 8, "cache_blocks": 8}


def test_layers_with_a_window_look_at_each_token(model):
    scheduler = real_scheduler(ours.make_scheduler, model, num_blocks=99, window=32)
    assert look_at_ends_only(scheduler.kv_cache_manager) is False
    engine = Engine(scheduler)
    engine.add("a", list(range(3, 3 + BLOCK)), 8 * BLOCK)
    for _ in range(4):
        engine.step(5)
    found = looks(engine.scheduler)
    for _ in range(BLOCK):
        engine.step(5)
    assert found["allocate_new_blocks"] == BLOCK
