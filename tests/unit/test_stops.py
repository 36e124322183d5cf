"""What ends a response, over interruptions: each call knows what earlier ones made."""

from __future__ import annotations

import pytest
from transformers import AutoTokenizer

from ray_apr.config import RolloutConfig
from ray_apr.core.exceptions import ConfigError
from ray_apr.core.messages import Generation, SamplingParams
from ray_apr.core.sample import FinishReason, Prompt, Sample, Segment
from ray_apr.data.tokenizers import end_token_ids
from ray_apr.serve.vllm.outputs import end_of_straddling_stop, up_to
from tests.fakes import ScriptedEngine
from tests.rollout_run import running, until, without_ray
from tests.tiny_model import make_tiny_model


def segment(*ids, version=0):
    return Segment(policy_version=version, token_ids=ids, logprobs=(-1.0,) * len(ids))


def sample(*ids, budget=16):
    new = Sample(
        sample_id="p-0",
        group_id="p",
        prompt=Prompt(prompt_id="p", token_ids=(1,)),
        max_response_tokens=budget,
    )
    if not ids:
        return new
    reason = FinishReason.ABORT
    return new.append(Generation(request_id="r", segments=(segment(*ids),), finish_reason=reason))


def test_more_end_ids_than_vllm_has_room_for_are_refused_with_least_tokens():
    """vLLM's GPU worker raised, and the engine was dead."""
    with pytest.raises(ConfigError, match=r"rollout\.sampling\.stop_token_ids.*at most 100 ids"):
        RolloutConfig(sampling={"stop_token_ids": tuple(range(101)), "min_tokens": 1})
    RolloutConfig(sampling={"stop_token_ids": tuple(range(101))})
    RolloutConfig(sampling={"stop_token_ids": tuple(range(100)), "min_tokens": 1})


def test_each_call_has_the_rest_of_the_least_tokens_and_carries_its_turn():
    sampling = SamplingParams(min_tokens=5, stop_strings=("ab",))
    first = sampling.of_call(sample(), seed=3)
    assert (first.min_tokens, first.num_carried, first.seed) == (5, 0, 3)
    later = sampling.of_call(sample(7, 8))
    assert (later.min_tokens, later.num_carried, later.seed) == (3, 2, None)
    assert sampling.of_call(sample(*range(9))).min_tokens == 0
    assert SamplingParams(min_tokens=5).of_call(sample(7, 8)).num_carried == 0


def test_a_stop_string_begins_in_its_own_turn_and_observed_tokens_count_as_made():
    sampling = SamplingParams(min_tokens=9, stop_strings=("ab",))
    stop = Generation(request_id="r", segments=(segment(7, 8),), finish_reason=FinishReason.STOP)
    turn = sample().append(stop, ends_turn=True).observe((20, 21, 22))
    call = sampling.of_call(turn)
    assert (call.num_carried, call.min_tokens) == (0, 4)
    aborted = Generation(request_id="s", segments=(segment(9),), finish_reason=FinishReason.ABORT)
    call = sampling.of_call(turn.append(aborted))
    assert (call.num_carried, call.min_tokens) == (1, 3)


async def test_the_worker_says_what_earlier_calls_made(monkeypatch):
    without_ray(monkeypatch)
    engine, seen = ScriptedEngine(default_length=6), []
    generate = engine.generate

    async def watched(request):
        seen.append(request.sampling)
        return await generate(request)

    engine.generate = watched
    rollout = {"sampling": {"min_tokens": 4, "stop_strings": ("ab",)}}
    async with running(engine, rollout=rollout, max_staleness=2, oversampling_factor=1.0) as run:
        await until(lambda: len(engine.running) == 4)
        engine.advance(3)
        await run.sync(1)
        await until(lambda: len(engine.running) == 4)
        engine.advance(10)
        await run.step(1)
    calls = [(s.min_tokens, s.num_carried, s.stop_strings) for s in seen[:8]]
    assert calls == [(4, 0, ("ab",))] * 4 + [(1, 3, ("ab",))] * 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize(
    ("carried", "new", "stops", "least", "expected"),
    [
        ("12=3", "4;56", ("34;",), 0, 2),
        ("12=3", "4;56", ("34;", "34"), 0, 1),
        ("12=3", "4;56", ("34;",), 2, None),  # complete before the least tokens
        ("12=34", "34;5", ("34;",), 0, None),  # of the new call alone: vLLM's own check
        ("12=3", "4", ("34;",), 0, None),
        ("12=3", "", ("34;",), 0, None),
        ("", "34;", ("34;",), 0, None),
        ("3", "4;", ("34;",), 0, 2),
        ("34;3", "5634;", ("34;",), 0, None),
        ("aaaa", "aaaa", ("aaa",), 1, 2),
        ("12=3", "4;56", (";",), 0, None),
    ],
)
def test_a_stop_string_across_two_calls_ends_with_the_token_that_completes_it(
    tokenizer, carried, new, stops, least, expected
):
    before, after = (tokenizer(text)["input_ids"] for text in (carried, new))
    sampling = SamplingParams(stop_strings=stops, min_tokens=least, num_carried=len(before))
    request = [*tokenizer("34;3=")["input_ids"], *before]
    assert end_of_straddling_stop(tokenizer, sampling, request, after) == expected


class Bytes:
    """A tokenizer of bytes, as byte-level BPE is without merges."""

    def decode(self, ids, skip_special_tokens):
        assert skip_special_tokens
        return bytes(ids).decode("utf-8", errors="replace")


@pytest.mark.parametrize("cut", range(1, 12))
def test_a_character_that_is_cut_in_two_is_found(cut):
    ids = list("aé→b;→cd".encode())
    sampling = SamplingParams(stop_strings=("→b;→",), num_carried=cut)
    end = len("aé→b;→".encode())
    inside = len("aé".encode())
    expected = end - cut if inside + 3 <= cut < end else None
    found = end_of_straddling_stop(Bytes(), sampling, ids[:cut], ids[cut:])
    if inside < cut < inside + 3:  # no character of the string is whole: vLLM's stream has it
        assert found in (None, end - cut)
    else:
        assert found == expected


def test_what_follows_the_end_is_cut_off_by_segment():
    segments = (segment(1, 2), segment(3, 4, version=1), segment(5, version=2))
    assert up_to(segments, 3) == (segment(1, 2), segment(3, version=1))
    assert up_to(segments, 2) == segments[:1]
    assert up_to(segments, 9) == segments


def test_the_ends_of_a_model_are_those_of_its_tokenizer_and_generation_config(folder, tmp_path):
    import json
    import shutil

    assert end_token_ids(str(folder)) == (0,)
    several = tmp_path / "several"
    shutil.copytree(folder, several)
    path = several / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": [0, 7]}))
    assert end_token_ids(str(several)) == (0, 7)
    path.unlink()
    assert end_token_ids(str(several)) == (0,)
