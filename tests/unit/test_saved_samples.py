"""Samples of a checkpoint come back as they were (data/saved_samples.py)."""

from __future__ import annotations

import math

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_apr.core.exceptions import ConfigError
from ray_apr.core.sample import FinishReason, Prompt, Sample, Segment, pack_ids
from ray_apr.data.saved_samples import (
    SCHEMA,
    groups_of,
    read_samples,
    samples_table,
    write_samples,
)

PROMPT = Prompt(prompt_id="e0-1", token_ids=(5, 6, 2**31 - 1), row={"answer": "4"})


@st.composite
def segments(draw):
    found, version, with_support = [], 0, draw(st.booleans())
    for _ in range(draw(st.integers(0, 4))):
        version += draw(st.integers(0, 2))
        size = draw(st.integers(1, 5))
        is_generated = draw(st.booleans())
        floats = st.floats(max_value=0, allow_nan=False)
        found.append(
            Segment(
                policy_version=version,
                token_ids=tuple(draw(st.integers(0, 2**31 - 1)) for _ in range(size)),
                logprobs=tuple(draw(floats) if is_generated else 0.0 for _ in range(size)),
                is_generated=is_generated,
                support=tuple(pack_ids(range(n, 9)) for n in range(size))
                if with_support and is_generated
                else (),
            )
        )
    return tuple(found)


@st.composite
def samples(draw, name="e0-1-0"):
    has_ended = draw(st.booleans())
    return Sample(
        sample_id=name,
        group_id=PROMPT.prompt_id,
        prompt=PROMPT,
        max_response_tokens=draw(st.integers(20, 2**31 - 1)),
        segments=draw(segments()),
        finish_reason=draw(st.sampled_from(FinishReason)) if has_ended else None,
        num_interruptions=draw(st.integers(0, 5)),
        num_deaths=draw(st.integers(0, 5)),
        num_turns=draw(st.integers(0, 5)),
        awaits_step=draw(st.booleans()),
        environment_state=draw(st.sampled_from([{}, {"board": {1, 2}}, {"at": ("a", b"b")}])),
        turn_text=draw(st.none() | st.text()),
        response_text=draw(st.none() | st.text()),
        reward=draw(st.none() | st.floats(allow_nan=False)),
        reward_metrics=draw(st.sampled_from([{}, {"form": 0.1, "length": math.inf}])),
    )


@settings(max_examples=100, deadline=None)
@given(first=samples(), second=samples("e0-1-1"), handed_over=st.booleans())
def test_samples_come_back_as_they_were(tmp_path_factory, first, second, handed_over):
    group = (first, second)
    table = samples_table([] if handed_over else [group], [group] if handed_over else [])
    file = tmp_path_factory.mktemp("checkpoint") / "samples.arrow"
    digest = write_samples(file, table)
    live, in_buffer = groups_of(read_samples(file.read_bytes(), digest), lambda name: PROMPT)
    assert (live, in_buffer) == (([], [group]) if handed_over else ([group], []))
    assert sum(table["num_generated"].to_pylist()) == first.num_generated + second.num_generated


def test_a_table_without_the_count_of_engines_that_died_is_read():
    sample = Sample(sample_id="e0-1-0", group_id="e0-1", prompt=PROMPT, max_response_tokens=4)
    older = samples_table([(sample,)]).drop_columns(["num_deaths"])
    assert groups_of(older, lambda name: PROMPT) == ([(sample,)], [])


def test_no_samples_are_a_table_too(tmp_path):
    digest = write_samples(tmp_path / "samples.arrow", samples_table([]))
    table = read_samples((tmp_path / "samples.arrow").read_bytes(), digest)
    assert groups_of(table, lambda name: PROMPT) == ([], [])


def test_a_file_that_was_cut_off_is_not_read(tmp_path):
    file = tmp_path / "samples.arrow"
    digest = write_samples(file, samples_table([]))
    with pytest.raises(ValueError, match="not what was written"):
        read_samples(file.read_bytes()[:-1], digest)


def test_a_response_does_not_go_on_after_another_prompt():
    sample = Sample(sample_id="e0-1-0", group_id="e0-1", prompt=PROMPT, max_response_tokens=4)
    other = Prompt(prompt_id="e0-1", token_ids=(5, 6))
    with pytest.raises(ConfigError, match=r"prompts = .*e0-1.*other tokens.*same dataset"):
        groups_of(samples_table([(sample,)]), lambda name: other)


def test_text_and_bytes_of_all_samples_may_be_more_than_two_gigabytes():
    of_ids = {"sample_id", "group_id", "prompt_digest", "finish_reason", "reward_metrics"}
    for field in SCHEMA:
        kind = field.type.value_type if pa.types.is_large_list(field.type) else field.type
        assert field.name in of_ids or kind not in (pa.string(), pa.binary()), field
