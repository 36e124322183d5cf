"""When the batch of the next step is chosen (scheduling/stock.py)."""

from __future__ import annotations

import math

from ray_apr.core.group import SampleMeta
from ray_apr.core.messages import FinishReason
from ray_apr.scheduling.stock import LEAD_S, Stock


def stock_of(*versions, num_steps=None):
    """A stock with a group of two samples for each version, at step 0."""
    stock = Stock(
        batch_size=2, max_staleness=1, on_stale="evict", num_ranks=1, micro_batch_tokens=64,
        num_steps=num_steps,
    )  # fmt: skip
    for number, version in enumerate(versions):
        put(stock, f"g{number}", version)
    stock.grant(0, 0, 0.0)
    return stock


def put(stock, name, version):
    samples = [
        SampleMeta(
            sample_id=f"{name}-{i}", group_id=name, num_prompt_tokens=1, num_tokens=3,
            oldest_version=version, newest_version=version, reward=0.0,
            finish_reason=FinishReason.STOP, num_interruptions=0, version_tokens=((version, 3),),
        )
        for i in range(2)
    ]  # fmt: skip
    stock.put(samples, name)


def steps_of(stock):
    return [grant.step for grant in stock.batches]


def train(stock, step, begin_s, end_s):
    """A step from the moment that it has its batch to its end, and the grant of the next one."""
    stock.choose(begin_s)
    stock.end_step(step, end_s)
    stock.grant(step + 1, step + 1, end_s)


def test_it_is_chosen_shortly_before_the_step_ends_if_it_takes_as_long_as_the_last_one():
    stock = stock_of(0, 0, 0, 0)
    train(stock, 0, 5.0, 105.0)
    stock.choose(105.0)
    due_s = 100.0 - LEAD_S
    assert steps_of(stock) == [1] and stock.next_in_s(105.0) == due_s
    stock.choose(104.9 + due_s)
    assert steps_of(stock) == [1] and stock.next_batch(1) is None
    put(stock, "late", 1)  # the others of version 0 are too old for step 2, and this one is not
    assert stock.next_in_s(105.0 + due_s) == 0
    evicted = stock.choose(105.0 + due_s)
    assert steps_of(stock) == [1, 2] and len(evicted) == 2
    assert stock.next_batch(1).refs == ("late",) and stock.next_in_s(300.0) == math.inf


def test_a_step_that_ends_early_has_the_next_one_chosen_at_its_end():
    stock = stock_of(0, 0, 0)
    train(stock, 0, 0.0, 100.0)
    stock.choose(100.0)
    assert steps_of(stock) == [1]
    put(stock, "late", 1)
    stock.end_step(1, 103.0)
    assert stock.next_in_s(103.0) == math.inf, "no step has a batch"
    stock.grant(2, 2, 103.0)
    stock.choose(103.0)
    assert stock.granted.refs == ("late",)
    assert stock.next_in_s(103.0) == 3.0 - LEAD_S, "of the last step"


def test_steps_that_are_shorter_than_the_way_of_a_batch_have_theirs_at_once():
    stock = stock_of(0, 0, 0)
    train(stock, 0, 0.0, LEAD_S / 2)
    put(stock, "new", 1)
    stock.choose(LEAD_S / 2)
    assert steps_of(stock) == [1, 2]


def test_no_batch_is_due_after_the_last_step_nor_before_the_granted_one():
    stock = stock_of(0, 0, num_steps=1)
    assert stock.next_in_s(9.0) == math.inf
    stock.choose(9.0)
    assert steps_of(stock) == [0] and stock.next_in_s(9e9) == math.inf
