"""Buckets of a weight broadcast, and what engines need to know of them."""

from __future__ import annotations

import pickle

import pytest
import ray.cloudpickle
from hypothesis import given
from hypothesis import strategies as st

from ray_apr.core.exceptions import WeightSyncError
from ray_apr.weights.plan import ALIGNMENT, ITEM_BYTES, ParamSpec, plan_buckets
from ray_apr.weights.transports.gloo import GlooEndpoint
from ray_apr.weights.transports.nccl import NCCLEndpoint
from ray_apr.weights.transports.shared import SharedEndpoint

shapes = st.lists(st.integers(0, 40), max_size=3).map(tuple)
models = st.lists(st.tuples(shapes, st.sampled_from(sorted(ITEM_BYTES))), max_size=30).map(
    lambda rows: [ParamSpec(f"p{i}", shape, dtype) for i, (shape, dtype) in enumerate(rows)]
)


@given(models, st.integers(1, 20_000))
def test_every_parameter_lies_whole_and_aligned_in_one_bucket_in_order(params, bucket_bytes):
    buckets = plan_buckets(params, bucket_bytes)
    assert [s.param for b in buckets for s in b.slices] == params
    start = 0
    for bucket in buckets:
        assert bucket.offset == start
        start += bucket.num_bytes
        end = 0
        for piece in bucket.slices:
            assert piece.offset % ALIGNMENT == 0
            assert piece.offset >= end, "slices do not overlap"
            end = piece.offset + piece.param.num_bytes
        assert end <= bucket.num_bytes < end + ALIGNMENT


@given(models, st.integers(1, 20_000))
def test_only_a_single_large_parameter_makes_a_bucket_too_large(params, bucket_bytes):
    for bucket in plan_buckets(params, bucket_bytes):
        used = bucket.slices[-1].offset + bucket.slices[-1].param.num_bytes
        filled = [s for s in bucket.slices if s.param.num_bytes]
        assert used <= bucket_bytes or len(filled) == 1


@given(models, st.integers(1, 20_000))
def test_both_sides_compute_the_same_plan_from_what_crosses_the_wire(params, bucket_bytes):
    common = {"params": tuple(params), "bucket_bytes": bucket_bytes}
    group = {"host": "127.0.0.1", "world_size": 3, "group_name": "g", "timeout_s": 2.5, **common}
    for endpoint in (
        GlooEndpoint(port=1234, **group),
        NCCLEndpoint(nccl_id="00ff", **group),
        SharedEndpoint(**common),
    ):
        there = pickle.loads(ray.cloudpickle.dumps(endpoint))
        assert there == endpoint
        assert plan_buckets(there.params, there.bucket_bytes) == plan_buckets(params, bucket_bytes)


def test_a_parameter_larger_than_a_bucket_gets_one_of_its_own():
    params = [ParamSpec(n, (size,), "float32") for n, size in (("a", 4), ("b", 4096), ("c", 4))]
    plan = plan_buckets(params, 1024)
    assert [[s.param.name for s in b.slices] for b in plan] == [["a"], ["b"], ["c"]]
    assert [b.num_bytes for b in plan] == [64, 4 * 4096, 64]


def test_a_model_without_parameters_has_no_bucket():
    assert plan_buckets([], 1024) == ()


def test_a_name_that_comes_twice_is_refused():
    twice = [ParamSpec("head", (2,), "float32")] * 2
    with pytest.raises(WeightSyncError, match="head would be sent twice; send tied ones once"):
        plan_buckets(twice, 1024)


def test_an_unknown_data_type_is_refused():
    with pytest.raises(WeightSyncError, match="data type int4; send one of float32"):
        plan_buckets([ParamSpec("w", (2,), "int4")], 1024)
