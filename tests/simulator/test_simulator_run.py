"""Whole simulated runs: they end, lose no token, keep the bound, repeat, and favour no length."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from pathlib import Path
from typing import get_args

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from ray_apr.config import Mode, PartialRolloutConfig
from ray_apr.core.exceptions import ConfigError
from ray_apr.data.prompts import TOKEN_IDS, PromptSource
from ray_apr.tools.simulator.cluster import ClusterConfig
from ray_apr.tools.simulator.run import Simulation
from ray_apr.tools.simulator.study import best_split, bound_tokens_per_s, climb, study
from ray_apr.tools.simulator.trace import Trace
from tests.traces import make_cluster, make_trace

MODES = get_args(Mode)
PLACEMENTS = ("disaggregated", "colocated")
TRACES = (
    make_trace(48),
    make_trace(48, seed=1, tail_share=0.3, tail=(400, 3000), reward_s=5.0),
    make_trace(48, seed=2, tail_share=0.0, reward_s=0.01),
    make_trace(48, seed=3, tail_share=0.05, tail=(2000, 5000), reward_s=20.0),
)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_runs_to_its_end(mode, placement):
    cluster = make_cluster(placement=placement)
    result = study(make_trace(), cluster, PartialRolloutConfig.preset(mode)).to_dict()
    assert result["mode"] == mode and result["steps"] == 8
    assert result["ledger_error"] == 0
    assert result["rollout_gpus"] == (4 if placement == "colocated" else 2)
    assert 0 < result["trained_tokens_per_s"] <= result["bound_tokens_per_s"]
    assert 0 <= result["generation_idle_ratio"] < 1 and 0 <= result["trainer_idle_ratio"] < 1
    placed = result["tokens_trained"] + result["tokens_discarded"] + result["tokens_held"]
    assert result["tokens_generated"] == placed
    assert sum(result["tokens_discarded_by_reason"].values()) == result["tokens_discarded"]
    bound = PartialRolloutConfig.preset(mode).max_staleness
    assert result["staleness_mean"] <= result["staleness_max"] <= bound


def test_the_page_of_the_simulator_tells_each_figure():
    told = (Path(__file__).parents[2] / "docs" / "simulator.md").read_text("utf-8")
    figures = study(make_trace(), make_cluster(), PartialRolloutConfig.preset("apr")).to_dict()
    assert [name for name in figures if f"`{name}`" not in told] == []


def test_asynchrony_pays_on_a_long_tail():
    rates = {
        mode: study(
            make_trace(), make_cluster(), PartialRolloutConfig.preset(mode)
        ).trained_tokens_per_s
        for mode in ("sync", "async", "apr")
    }
    assert rates["apr"] > 1.5 * rates["async"] and rates["async"] > rates["sync"]


def test_a_seed_gives_one_result_and_another_seed_another_one():
    config = PartialRolloutConfig.preset("apr", filter_zero_variance=True)
    first, again, other = (
        study(make_trace(), make_cluster(), config, seed=seed).to_dict() for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other


@st.composite
def any_config(draw):
    bound = draw(st.integers(0, 6))
    interrupt = draw(st.sampled_from(["never", "weight_sync", "batch_full"]))
    values = dict(
        max_staleness=bound,
        oversampling_factor=min(bound + 1, draw(st.sampled_from([1.0, 1.3, 2.0, 3.0]))),
        admission=draw(st.sampled_from(["stream", "stream", "batch"])),
        interrupt=interrupt,
        drain=interrupt == "never" and draw(st.booleans()),
        after_interrupt=draw(st.sampled_from(["resume", "restart", "discard"])),
        kv_cache=draw(st.sampled_from(["keep", "recompute"])),
        resume_order=draw(st.sampled_from(["oldest_version", "fifo", "most_tokens"])),
        tail_round=draw(st.sampled_from([None, None, 1, 3, 50])),
        on_stale=draw(st.sampled_from(["evict", "mask", "wait", "wait"])),
        sync_every=draw(st.integers(1, min(3, bound + 1))),
        overlap_sync=draw(st.booleans()),
        max_inflight=draw(st.sampled_from(["adaptive", None, 3, 20, 64])),
        max_live_batches=draw(st.sampled_from([None, 1, 2, 4])),
        overlap_rewards=draw(st.booleans()),
        filter_zero_variance=draw(st.booleans()),
        max_filter_retries=draw(st.sampled_from([0, 2])),
    )
    try:
        return PartialRolloutConfig(**values)
    except ConfigError:
        assume(False)


@given(
    config=any_config(),
    trace=st.sampled_from(TRACES),
    placement=st.sampled_from(PLACEMENTS),
    kv_capacity=st.sampled_from([1500, 6000, 10**6]),
    max_sequences=st.sampled_from([4, 32]),
    rollout_gpus=st.integers(1, 3),
    reward_workers=st.sampled_from([1, 16]),
    weight_sync_s=st.sampled_from([0.0, 0.2, 3.0]),
    host_cores=st.sampled_from([None, None, 1, 2.5]),
    sample_overhead_s=st.sampled_from([0.0, 0.0, 0.02]),
    seed=st.integers(0, 3),
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_settings_end_and_keep_ledger_and_bound(
    config, trace, placement, kv_capacity, max_sequences, rollout_gpus, reward_workers,
    weight_sync_s, host_cores, sample_overhead_s, seed,
):  # fmt: skip
    engine = dataclasses.replace(
        make_cluster().engine, kv_capacity_tokens=kv_capacity, max_sequences=max_sequences
    )
    cluster = make_cluster(
        engine=engine,
        placement=placement,
        rollout_gpus=rollout_gpus,
        reward_workers=reward_workers,
        weight_sync_s=weight_sync_s,
        host_cores=host_cores,
        sample_overhead_s=sample_overhead_s,
        steps=6,
    )
    outcome = Simulation(trace, cluster, config, seed=seed).run()
    assert outcome.ledger.error == 0
    assert outcome.staleness_max <= config.max_staleness
    assert len(outcome.step_ends) == 6
    if config.on_stale == "wait":
        assert outcome.ledger.discarded["stale"] == 0, "waiting was to avoid this"
    if config.on_stale != "mask":
        assert outcome.ledger.discarded["masked"] == 0


@pytest.mark.parametrize(("on_stale", "least"), [("mask", 0.85), ("wait", 0.98), ("evict", None)])
def test_mask_and_wait_train_long_prompts_as_often_as_short_ones(on_stale, least):
    trace = make_trace(200, tail=(900, 1400), seed=3)
    cluster = make_cluster(
        steps=100, engine=dataclasses.replace(make_cluster().engine, kv_capacity_tokens=60_000)
    )
    config = PartialRolloutConfig.preset("apr", on_stale=on_stale, max_staleness=3)
    results = [study(trace, cluster, config, seed=seed).to_dict() for seed in range(8)]
    shares, undecided = (
        [statistics.fmean(of_decile) for of_decile in zip(*(r[key] for r in results), strict=True)]
        for key in ("trained_share_by_length_decile", "undecided_share_by_length_decile")
    )
    if least is None:
        assert min(shares[:9]) > 0.98 and shares[9] < 0.4
    else:
        assert min(shares) >= least
    assert max(undecided) < 0.1


def wall_s(mode, **changes):
    config = PartialRolloutConfig.preset(mode)
    return Simulation(make_trace(), make_cluster(**changes), config).run().wall_s


@pytest.mark.parametrize("mode", MODES)
def test_enough_cores_for_all_change_nothing(mode):
    assert wall_s(mode, host_cores=4) == wall_s(mode)


def test_those_who_share_a_core_pay_only_while_both_are_busy():
    one_engine = dict(rollout_gpus=1, gpus=2)
    assert wall_s("sync", host_cores=1, **one_engine) == pytest.approx(
        wall_s("sync", **one_engine)
    ), "one at a time"
    apart, shared = (wall_s("apr", host_cores=cores, **one_engine) for cores in (None, 1))
    assert apart < shared <= 2 * apart


def test_a_host_with_half_the_cores_generates_at_half_the_speed():
    work = dict(gpus=3, weight_sync_s=0, steps=1)
    trainer = dataclasses.replace(make_cluster().trainer, step_overhead_s=0)
    apart, shared = (wall_s("sync", host_cores=c, trainer=trainer, **work) for c in (2, 1))
    assert 1.15 * apart < shared < 2 * apart, "in the tail one engine has the core to itself"


def test_samples_that_are_handed_over_want_a_core_each():
    plain, alone, shared = (
        wall_s("sync", host_cores=cores, sample_overhead_s=seconds, reward_workers=100)
        for cores, seconds in ((4, 0.0), (None, 0.05), (1, 0.05))
    )
    batch, steps = make_cluster().batch.size, make_cluster().steps
    assert alone == pytest.approx(plain + steps * 0.05), "only the last one is waited for"
    assert shared > plain + steps * batch * 0.05


def test_best_split_is_found():
    trace, cluster = make_trace(), make_cluster(rollout_gpus=None, gpus=6)
    config = PartialRolloutConfig.preset("apr")
    rates = {
        k: study(trace, cluster.with_rollout_gpus(k), config).trained_tokens_per_s
        for k in range(1, 6)
    }
    assert best_split(trace, cluster, config) == max(rates, key=rates.__getitem__)
    assert study(trace, cluster, config).to_dict()["rollout_gpus"] == best_split(
        trace, cluster, config
    )


@given(st.integers(1, 400), st.integers(1, 400), st.integers(1, 400))
def test_climbing_finds_the_top_of_one_hill(high, start, top):
    start, top = min(start, high), min(top, high)
    assert climb(lambda n: -abs(n - top), start, 1, high) == top


def test_bound_is_that_of_the_best_integer_split():
    rows = [{"prompt_id": "p", "sample_index": 0, "prompt_tokens": 0, "response_tokens": 100}]
    cluster = make_cluster()
    engine, trainer = cluster.engine, cluster.trainer
    step_s = engine.decode_base_s + 32 * (
        engine.decode_per_sequence_s + engine.decode_per_context_token_s * 50
    )
    tokens = 8 * 32 * 100
    generation, training = tokens / (32 / step_s), tokens / trainer.tokens_per_s_per_gpu
    best = min(
        max(generation / k, training / (4 - k) + 8 * trainer.step_overhead_s) for k in (1, 2, 3)
    )
    assert bound_tokens_per_s(Trace(rows), cluster) == pytest.approx(tokens / best)
    turns = (generation + training) / 4 + 8 * trainer.step_overhead_s
    colocated = dataclasses.replace(cluster, placement="colocated")
    assert bound_tokens_per_s(Trace(rows), colocated) == pytest.approx(tokens / turns)


@pytest.mark.parametrize("gpus", [1, 2, 3])
def test_colocated_gpus_stay_within_their_bound(gpus):
    """known fault: the bound was that of the best split, and a run on two GPUs trained 191 % of it,
    where generating and training take very different times."""
    rows = [
        {"prompt_id": str(p), "sample_index": i, "prompt_tokens": 20, "response_tokens": 500}
        for p in range(24) for i in range(4)
    ]  # fmt: skip
    cluster = make_cluster(placement="colocated", rollout_gpus=None, gpus=gpus)
    trainer = dataclasses.replace(cluster.trainer, tokens_per_s_per_gpu=1e5, step_overhead_s=0.1)
    cluster = dataclasses.replace(cluster, trainer=trainer)
    result = study(Trace(rows), cluster, PartialRolloutConfig.preset("sync"))
    assert 0 < result.trained_tokens_per_s <= result.bound_tokens_per_s


def test_a_negative_seed_is_refused():
    config = PartialRolloutConfig.preset("apr")
    with pytest.raises(ConfigError, match=r"seed = -1: must be at least 0"):
        Simulation(make_trace(), make_cluster(), config, seed=-1).run()


def test_prompts_come_in_the_order_of_a_run_with_that_seed():
    trace = make_trace(30)
    ids = [group.prompt_id for group in trace.groups]
    table = pa.table({"name": ids, TOKEN_IDS: [[1]] * len(ids)})
    source = PromptSource([table], seed=5)
    simulated = itertools.islice(trace.cycle(5), 3 * len(ids))
    assert [group.prompt_id for group in simulated] == [
        source.next().row["name"] for _ in range(3 * len(ids))
    ]


@pytest.mark.parametrize(
    ("cluster", "message"),
    [
        (
            {"engine": {"prefill_tokens_per_s": 1e300}},
            r"engine\.prefill_tokens_per_s = 1e\+300: .* at most 1e\+15",
        ),
        (
            {"engine": {"decode_base_s": 1e300}},
            r"decode_base_s = 1e\+300: .* at most 1,000,000,000",
        ),
        ({"engine": {"prefill_tokens_per_s": 1e-300}}, r"prefill_tokens_per_s = 1e-300: .* 1e-06"),
        ({"weight_sync_s": 1e308}, r"weight_sync_s = 1e\+308: .* at most 1,000,000,000"),
        ({"host_cores": 1e-300}, r"host_cores = 1e-300: .* of at least 1e-06"),
        ({"gpus": 10**12}, r"gpus = 10+: must be at most 100,000"),
        ({"steps": 10**12}, r"steps = 10+: x batch\.prompts .* at most 100,000,000 samples"),
        ({"batch": {"prompts": 10**8}}, r"steps = 32: x batch\.prompts x batch\.group_size"),
    ],
)
def test_what_no_simulation_comes_to_an_end_with_is_refused(cluster, message):
    """known fault: it ended with an OverflowError that named nothing, or not at all."""
    with pytest.raises(ConfigError, match=rf"^cluster\..*{message}"):
        ClusterConfig.from_dict(cluster)


@pytest.mark.parametrize("name", ["sample_index", "prompt_tokens", "response_tokens"])
def test_numbers_of_a_trace_that_no_float_holds_are_refused(name):
    row = {"prompt_id": "p", "sample_index": 0, "prompt_tokens": 1, "response_tokens": 1}
    with pytest.raises(
        ConfigError, match=rf"trace row 0\.{name} = 10+: .*at most 1,000,000,000,000"
    ):
        Trace([row | {name: 10**400}])
