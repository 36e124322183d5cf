"""Rows of one rank and step (scheduling/batch.py)."""

from __future__ import annotations

import dataclasses

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_apr.core.exceptions import RolloutError
from ray_apr.core.group import GroupMeta, SampleMeta
from ray_apr.core.sample import FinishReason, Prompt, Sample, Segment, pack_ids
from ray_apr.scheduling.batch import BatchPlan, RankBatch, build_rank_batches, loss_mask, plan_batch


def make_sample(number, group, num_prompt, num_response, versions=(0,)):
    """A scored sample: prompt ids below 100, response ids number * 1000 + position."""
    ids = [number * 1000 + i for i in range(num_response)]
    share = -(-num_response // len(versions))
    segments = tuple(
        Segment(
            policy_version=v,
            token_ids=tuple(ids[k * share : (k + 1) * share]),
            logprobs=tuple(-float(i) for i in ids[k * share : (k + 1) * share]),
        )
        for k, v in enumerate(versions)
        if ids[k * share : (k + 1) * share]
    )
    return Sample(
        sample_id=f"s{number}",
        group_id=f"g{group}",
        prompt=Prompt(prompt_id=f"p{group}", token_ids=tuple(range(1, num_prompt + 1))),
        max_response_tokens=100,
        segments=segments,
        finish_reason=FinishReason.STOP,
        reward=float(number),
    )


SAMPLES = [
    make_sample(0, 0, 3, 5),
    make_sample(1, 0, 3, 2, versions=(0, 2)),
    make_sample(2, 1, 4, 7, versions=(1, 2)),
    make_sample(3, 1, 4, 1),
]
SETTINGS = {"step": 6, "policy_version": 13, "num_ranks": 2, "micro_batch_tokens": 16}


def unpack(batch):
    """(position, prompt, response, log-probs, versions) of each sample of a row."""
    token, response = 0, 0
    for i, prompt_len, response_len in zip(
        batch.sample_index, batch.prompt_lens, batch.response_lens, strict=True
    ):
        prompt = batch.token_ids[token : token + prompt_len]
        token += prompt_len + response_len
        last = response + response_len
        yield (
            int(i),
            list(prompt),
            list(batch.token_ids[token - response_len : token]),
            list(batch.behavior_logprobs[response:last]),
            list(batch.token_versions[response:last]),
        )
        response = last


def check(batches, samples):
    seen = []
    for batch in batches:
        for i, prompt, response, logprobs, versions in unpack(batch):
            sample = samples[i]
            assert prompt == list(sample.prompt.token_ids)
            assert response == list(sample.response_ids)
            assert logprobs == list(sample.behavior_logprobs)
            assert versions == list(sample.token_versions)
            seen.append(i)
        assert list(batch.rewards) == [s.reward for s in samples]
        assert list(batch.all_response_lens) == [s.num_tokens for s in samples]
    assert sorted(seen) == list(range(len(samples)))


def test_rows_hold_every_sample_once_and_the_whole_batch_beside():
    batches = build_rank_batches(SAMPLES, **SETTINGS)
    check(batches, SAMPLES)
    assert [b.rank for b in batches] == [0, 1]
    assert {(b.step, b.policy_version) for b in batches} == {(6, 13)}
    assert all(list(b.groups) == [0, 0, 1, 1] for b in batches)
    assert len({len(b.micro_batch_sizes) for b in batches}) == 1


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 30)), min_size=4, max_size=24))
def test_rows_over_any_lengths(sizes):
    samples = [make_sample(n, n // 2, p, r, versions=(0, 3)) for n, (p, r) in enumerate(sizes)]
    check(build_rank_batches(samples, **SETTINGS), samples)


def test_siblings_that_are_apart_come_together():
    apart = [SAMPLES[0], SAMPLES[2], SAMPLES[1], SAMPLES[3]]
    batches = build_rank_batches(apart, **SETTINGS)
    check(batches, SAMPLES)
    assert list(batches[0].groups) == [0, 0, 1, 1]


def test_row_survives_arrow():
    for batch in build_rank_batches(SAMPLES, **SETTINGS):
        table = pa.table({name: pa.array([value]) for name, value in batch.to_row().items()})
        read = RankBatch.from_row(table.to_pylist()[0])
        assert read == batch


def test_row_is_read_from_numpy():
    batch = build_rank_batches(SAMPLES, **SETTINGS)[0]
    row = {name: np.asarray(value) for name, value in batch.to_row().items()}
    read = RankBatch.from_row({**row, "step": np.int64(6)})
    assert read.step == 6 and isinstance(read.step, int)
    assert list(unpack(read)) == list(unpack(batch))


@pytest.mark.parametrize(
    "column",
    [
        "token_ids",
        "prompt_lens",
        "response_lens",
        "micro_batch_sizes",
        "behavior_logprobs",
        "token_versions",
        "groups",
        "all_response_lens",
        "loss_mask",
        "all_loss_lens",
        "truncated",
    ],
)
def test_columns_that_do_not_fit_each_other_are_refused(column):
    row = build_rank_batches(SAMPLES, **SETTINGS)[0].to_row()
    with pytest.raises(ValueError, match="entries, not"):
        RankBatch.from_row({**row, column: [*row[column], 1]})


def with_support(sample):
    segments = tuple(
        dataclasses.replace(s, support=tuple(pack_ids({t, 7}) for t in s.token_ids))
        for s in sample.segments
    )
    return dataclasses.replace(sample, segments=segments)


def test_supports_travel_with_their_tokens_and_survive_arrow():
    samples = [with_support(s) for s in SAMPLES]
    for batch in build_rank_batches(samples, **SETTINGS):
        table = pa.table({name: pa.array([value]) for name, value in batch.to_row().items()})
        columns = {name: table[name].to_numpy()[0] for name in table.column_names}
        read = RankBatch.from_row(columns)
        expected = [ids for i in read.sample_index for ids in samples[i].support]
        assert read.support_ids == b"".join(expected)
        sizes = np.frombuffer(read.support_sizes, np.uint16)
        assert sizes.tolist() == [len(ids) // 4 for ids in expected]
        for name in ("support_ids", "support_sizes"):
            with pytest.raises(ValueError, match="entries, not"):
                RankBatch.from_row({**columns, name: columns[name][:-4]})
    assert build_rank_batches(SAMPLES, **SETTINGS)[0].support_sizes == b""


def test_responses_that_ended_at_a_limit_are_known_on_all_ranks():
    samples = [
        dataclasses.replace(s, finish_reason=FinishReason.LENGTH) if i in (1, 2) else s
        for i, s in enumerate(SAMPLES)
    ]
    for batch in build_rank_batches(samples, **SETTINGS):
        assert batch.truncated == [0, 1, 1, 0]


def test_missing_column_is_refused():
    row = build_rank_batches(SAMPLES, **SETTINGS)[0].to_row()
    del row["rewards"]
    with pytest.raises(KeyError):
        RankBatch.from_row(row)


def metas(samples):
    groups = {}
    for s in samples:
        groups.setdefault(s.group_id, []).append(SampleMeta.of(s))
    return [
        GroupMeta(group_id=g, sequence=n, samples=tuple(m))
        for n, (g, m) in enumerate(groups.items())
    ]


def test_plan_needs_the_payload_of_a_ranks_own_groups_only():
    groups = [make_sample(0, 0, 1, 9), make_sample(1, 1, 1, 9)]
    plan = plan_batch(metas(groups), **SETTINGS)
    assert isinstance(plan, BatchPlan)
    for rank in (0, 1):
        (number,) = plan.groups_of(rank)
        batch = plan.rank_batch(rank, {number: [groups[number]]})
        assert list(batch.sample_index) == [number]
    with pytest.raises(KeyError):
        plan.rank_batch(0, {1 - plan.groups_of(0)[0]: []})


def test_payload_may_come_in_any_order_but_must_be_what_was_planned():
    plan = plan_batch(metas(SAMPLES), **SETTINGS)
    payload = {0: SAMPLES[1::-1], 1: SAMPLES[:1:-1]}
    check([plan.rank_batch(r, payload) for r in (0, 1)], SAMPLES)
    payload[1] = [dataclasses.replace(s, reward=9.0) for s in payload[1]]
    with pytest.raises(ValueError, match="was planned"):
        [plan.rank_batch(r, payload) for r in (0, 1)]


def test_sample_without_reward_is_never_a_zero_reward():
    with pytest.raises(RolloutError, match="not finished and scored"):
        build_rank_batches([*SAMPLES[:3], dataclasses.replace(SAMPLES[3], reward=None)], **SETTINGS)


def test_tokens_of_the_oldest_version_or_newer_enter_the_loss():
    sample = make_sample(0, 0, 2, 5, versions=(3, 4, 6))
    assert loss_mask(sample, 0) == [1, 1, 1, 1, 1]
    assert loss_mask(sample, 4) == [0, 0, 1, 1, 1]
    assert loss_mask(sample, 5) == [0, 0, 0, 0, 1]
    assert loss_mask(sample, 7) == [0, 0, 0, 0, 0]


@settings(deadline=None)
@given(st.integers(0, 4), st.integers(1, 3))
def test_mask_and_counts_agree_on_every_rank(oldest_version, num_ranks):
    settings = {**SETTINGS, "num_ranks": num_ranks, "oldest_version": oldest_version}
    batches = build_rank_batches(SAMPLES, **settings)
    check(batches, SAMPLES)
    for batch in batches:
        expected = [loss_mask(SAMPLES[i], oldest_version) for i in batch.sample_index]
        assert list(batch.loss_mask) == [kept for mask in expected for kept in mask]
        assert list(batch.all_loss_lens) == [sum(loss_mask(s, oldest_version)) for s in SAMPLES]


def test_a_mask_that_its_counts_contradict_is_refused():
    row = build_rank_batches(SAMPLES, **SETTINGS)[0].to_row()
    with pytest.raises(ValueError, match="sum of loss_mask has"):
        RankBatch.from_row({**row, "loss_mask": [0, *row["loss_mask"][1:]]})
