"""The engine adapter on real vLLM: partial rollouts, aborts at any moment, pauses, weight syncs."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import os
import pickle
import signal
import time

import pytest
import torch
from transformers import AutoTokenizer

from ray_apr.config import PartialRolloutConfig, RolloutConfig
from ray_apr.core.exceptions import (
    ConfigError,
    EngineUnavailableError,
    RolloutError,
    WeightSyncError,
)
from ray_apr.core.messages import Generation, Origin, SamplingParams, WeightGroup
from ray_apr.core.sample import FinishReason, Prompt, Sample, Segment
from ray_apr.train.head import attach_response_logprobs
from ray_apr.train.logprobs import micro_batches, response_logprobs
from ray_apr.weights.gathered import GatheredWeights
from ray_apr.weights.transports.shared import SharedSender
from tests.fakes import generate_request
from tests.tiny_model import make_tiny_model
from tests.train_batches import make_batches
from tests.vllm.engines import (
    FREE,
    GREEDY,
    PROMPT,
    Trainer,
    hf_logprobs,
    ids_of,
    largest_gap,
    logprobs_of,
    make_engine,
    running,
    versions_of,
)

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(300)]

numbers = itertools.count()


BOTH = pytest.mark.parametrize("parts", ["tied", "untied"], indirect=True, scope="module")
"""For tests of weights: an output layer that shares the embedding's, and one of its own."""


@pytest.fixture(scope="module", params=["tied"])
def parts(request, tmp_path_factory):
    """(run, engine, trainer): one event loop for all tests of the module."""
    folder = make_tiny_model(tmp_path_factory.mktemp("model"), tie=request.param == "tied")
    with parts_of(folder) as found:
        yield found


@contextlib.contextmanager
def parts_of(folder, **settings):
    with asyncio.Runner() as runner:
        context = running(make_engine(folder, **settings))
        engine = runner.run(context.__aenter__())
        try:
            yield runner.run, engine, Trainer(folder)
        finally:
            runner.run(context.__aexit__(None, None, None))


async def generate(engine, *, name=None, ids=PROMPT, sampling=GREEDY, max_tokens=64, session=""):
    return await engine.generate(
        generate_request(
            request_id=name or f"r{next(numbers)}",
            token_ids=ids,
            sampling=sampling,
            max_tokens=max_tokens,
            session_id=session,
        )
    )


def start(engine, **kwargs):
    return asyncio.create_task(generate(engine, **kwargs))


def new_sample(budget):
    prompt = Prompt(prompt_id="g", token_ids=PROMPT)
    return Sample(sample_id="s", group_id="g", prompt=prompt, max_response_tokens=budget)


async def until_busy(engine, at_least=1):
    async with asyncio.timeout(20):
        while engine.status(drain=False).num_running < at_least:  # noqa: ASYNC110
            await asyncio.sleep(0.002)


async def until_made(engine, before, count):
    """Until so many tokens more than before have left the core; the first of a call does alone."""
    async with asyncio.timeout(20):
        while engine.status(drain=False).tokens_made < before + count:  # noqa: ASYNC110
            await asyncio.sleep(0.002)


def trained_logprobs(model, sample, sampling):
    """Log-probs of a response as the trainer computes them."""
    attach_response_logprobs(model)
    (row,) = make_batches([dataclasses.replace(sample, reward=0.0)])
    (part,) = micro_batches(row, torch.device("cpu"), sampling=sampling)
    with torch.no_grad():
        logprobs, _ = response_logprobs(model, part, temperature=sampling.temperature)
    return logprobs[0].tolist()


def test_the_class_of_a_model_is_looked_at_in_a_fork(parts, tmp_path, monkeypatch):
    from vllm.model_executor.models.registry import ModelRegistry

    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))  # which knows no class yet
    monkeypatch.setattr("subprocess.run", None)
    found = ModelRegistry.models["Qwen3MoeForCausalLM"].inspect_model_cls()
    assert found.is_text_generation_model
    assert list(tmp_path.rglob("*Qwen3MoeForCausalLM.json"))


@BOTH
@pytest.mark.parametrize("seed", [None, 7])
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_log_probs_are_those_that_the_trainer_computes(parts, temperature, seed):
    run, engine, trainer = parts
    sampling = SamplingParams(temperature=temperature, seed=seed, ignore_eos=True)
    generation = run(generate(engine, sampling=sampling))
    assert generation.finish_reason is FinishReason.LENGTH
    assert generation.num_tokens == 64
    trained = trained_logprobs(trainer.model, new_sample(64).append(generation), sampling)
    assert largest_gap(logprobs_of(generation), trained) < 1e-4
    expected = hf_logprobs(trainer.model, PROMPT, ids_of(generation), temperature=temperature)
    assert largest_gap(trained, expected) < 1e-4


def test_an_evaluation_beside_rollouts_leaves_their_log_probs_alone(parts):
    run, engine, trainer = parts
    tempered = SamplingParams(temperature=0.7, ignore_eos=True)
    greedy = SamplingParams(top_k=1, ignore_eos=True, origin=Origin.EVALUATION)
    truncated = SamplingParams(
        temperature=0.6, top_p=0.9, ignore_eos=True, origin=Origin.EVALUATION
    )

    async def body():
        calls = (generate(engine, sampling=s) for s in (tempered, greedy, truncated, tempered))
        return await asyncio.gather(*calls)

    first, likeliest, _, last = run(body())
    for generation in (first, last):
        trained = trained_logprobs(trainer.model, new_sample(64).append(generation), tempered)
        assert largest_gap(logprobs_of(generation), trained) < 1e-4
    assert ids_of(likeliest) == ids_of(run(generate(engine)))


def test_an_interrupted_and_resumed_sample_equals_the_uninterrupted_one(parts):
    run, engine, _ = parts

    async def body():
        whole = await generate(engine, max_tokens=400)
        sample = new_sample(400)
        for call in itertools.count():
            task = start(
                engine, name=f"s#{call}", ids=(*PROMPT, *sample.response_ids),
                max_tokens=sample.remaining_budget,
            )  # fmt: skip
            await until_busy(engine)
            await asyncio.sleep(0.05 * (call + 1))  # a busy machine takes longer to its first token
            if sample.num_interruptions < 3:
                await engine.abort([f"s#{call}"])
            sample = sample.append(await task)
            if sample.finish_reason is not None:
                break
        return whole, sample

    whole, sample = run(body())
    assert sample.num_interruptions >= 1
    assert sample.response_ids == ids_of(whole)
    assert largest_gap(sample.behavior_logprobs, logprobs_of(whole)) < 1e-5


def test_a_truncated_distribution_is_the_trainer_s_on_the_ids_that_the_engine_names(parts):
    run, engine, trainer = parts
    evaluations = [
        SamplingParams(top_k=1, ignore_eos=True, origin=Origin.EVALUATION),
        SamplingParams(temperature=0.6, top_p=0.9, ignore_eos=True, origin=Origin.EVALUATION),
    ]

    async def body(sampling):
        others = [start(engine, sampling=s, max_tokens=20) for s in evaluations]
        sample = await to_the_end(engine, new_sample(64), sampling, num_interruptions=2)
        await asyncio.gather(*others)
        return sample

    for settings in (
        {"top_k": 6},
        {"temperature": 0.7, "top_k": 6, "top_p": 0.9},
        {"temperature": 1.3, "top_k": 12, "top_p": 0.8, "min_tokens": 20},
        {"temperature": 0.7, "top_k": 64, "top_p": 0.9, "min_tokens": 20},
    ):
        config = RolloutConfig(sampling={**settings, "stop_token_ids": (1, 2, 3)})
        sampling = config.sampling_params
        seen = set()
        for _ in range(20):  # a response that a stop token ends early may show one size only
            sample = run(body(sampling))
            sizes = [len(ids) // 4 for ids in sample.support]
            assert len(sizes) == sample.num_tokens and max(sizes) <= settings["top_k"]
            trained = trained_logprobs(trainer.model, sample, sampling)
            assert largest_gap(sample.behavior_logprobs, trained) < 1e-4
            seen.update(sizes)
            if len(seen) > 1 or "top_p" not in settings:
                break
        assert len(seen) > 1 if "top_p" in settings else seen == {6}


async def to_the_end(engine, sample, sampling, *, name="", num_interruptions=0):
    """Call after call until a sample ends, with so many real interruptions."""
    while sample.finish_reason is None:
        task = start(
            engine, name=f"{name or 's'}#{next(numbers)}", ids=(*PROMPT, *sample.response_ids),
            sampling=sampling.of_call(sample), max_tokens=sample.remaining_budget,
        )  # fmt: skip
        if sample.num_interruptions < num_interruptions:
            await until_busy(engine)
            await asyncio.sleep(0.01 + 0.02 * sample.num_interruptions)
            await engine.abort()
        sample = sample.append(await task)
    return sample


def begun(whole, cut, budget):
    """A sample that was interrupted after its first tokens."""
    kept = Segment(
        policy_version=0, token_ids=ids_of(whole)[:cut], logprobs=tuple(logprobs_of(whole)[:cut])
    )
    reason = FinishReason.ABORT
    generation = Generation(request_id="r", segments=(kept,), finish_reason=reason)
    return new_sample(budget).append(generation)


def test_a_stop_string_ends_an_interrupted_response_where_it_ends_the_uninterrupted_one(parts):
    run, engine, _ = parts
    tokenizer = AutoTokenizer.from_pretrained(engine._spec.model)

    async def body():
        free = await generate(engine, max_tokens=300)
        text = tokenizer.decode(ids_of(free), skip_special_tokens=True)
        starts = [text.find(text[i : i + 4]) for i in range(len(text) - 4)]
        latest = max(starts)
        stop = text[latest : latest + 4]
        sampling = dataclasses.replace(GREEDY, stop_strings=("no such text", stop))
        whole = await generate(engine, sampling=sampling, max_tokens=300)
        assert whole.finish_reason is FinishReason.STOP
        ended = tokenizer.decode(ids_of(whole), skip_special_tokens=True)
        assert ended.endswith(stop) and len(ended) == latest + 4
        assert ids_of(whole) == ids_of(free)[: whole.num_tokens]
        before = engine.status().tokens_generated
        cuts = range(max(1, whole.num_tokens - 6), whole.num_tokens)
        resumed = [await to_the_end(engine, begun(whole, c, 300), sampling) for c in cuts]
        for sample in resumed:
            assert sample.response_ids == ids_of(whole)
            assert sample.finish_reason is FinishReason.STOP
            assert largest_gap(sample.behavior_logprobs, logprobs_of(whole)) < 1e-4
        made = sum(whole.num_tokens - cut for cut in cuts)
        assert engine.status().tokens_generated - before == made, "what was cut off is none"
        aborted = await to_the_end(engine, new_sample(300), sampling, num_interruptions=3)
        assert aborted.response_ids == ids_of(whole)

        late = dataclasses.replace(sampling, min_tokens=whole.num_tokens)
        past = await generate(engine, sampling=late, max_tokens=300)
        assert past.num_tokens > whole.num_tokens, "too early to end it"
        sample = await to_the_end(engine, begun(past, whole.num_tokens - 2, 300), late)
        assert sample.response_ids == ids_of(past)

    run(body())


def test_the_least_tokens_are_those_of_the_response_and_trained_as_they_were_drawn(parts):
    run, engine, trainer = parts
    ends = tuple(range(0, 12))  # with the model's own
    sampling = SamplingParams(temperature=0.7, min_tokens=20, stop_token_ids=ends[1:])
    greedy = dataclasses.replace(sampling, temperature=0.0)

    async def body():
        samples = [await to_the_end(engine, new_sample(64), sampling) for _ in range(4)]
        whole = await generate(engine, sampling=greedy)
        cuts = range(2, whole.num_tokens, 5)
        resumed = [await to_the_end(engine, begun(whole, c, 64), greedy) for c in cuts]
        assert all(s.response_ids == ids_of(whole) for s in resumed)
        return samples

    samples = run(body())
    assert any(s.finish_reason is FinishReason.STOP for s in samples)
    all_ends = dataclasses.replace(sampling, stop_token_ids=ends)
    for sample in samples:
        assert sample.num_tokens > 20 or sample.finish_reason is not FinishReason.STOP
        assert not set(sample.response_ids[:20]) & set(ends)
        trained = trained_logprobs(trainer.model, sample, all_ends)
        assert largest_gap(sample.behavior_logprobs, trained) < 1e-4


def test_aborts_at_any_moment(parts):
    """prime-rl#2841: an abort at the wrong moment killed the engine."""
    run, engine, _ = parts

    async def body():
        prefill = start(engine, name="prefill", ids=PROMPT * 40, max_tokens=300)
        await asyncio.sleep(0)
        assert await engine.abort(["prefill"]) == 1
        assert (await prefill).finish_reason is FinishReason.ABORT

        for wait_s in (0.1, 0.3, 0.9, 2.7):  # a busy machine takes longer to its first token
            decode = start(engine, name="decode", max_tokens=400)
            await until_busy(engine)
            await asyncio.sleep(wait_s)
            assert await engine.abort(["decode"]) == 1
            assert await engine.abort(["decode"]) in (0, 1), "twice"
            partial = await decode
            assert partial.finish_reason is FinishReason.ABORT
            if partial.num_tokens:
                break
        assert 0 < partial.num_tokens < 400

        done = await generate(engine, name="done", max_tokens=2)
        assert await engine.abort(["done", "unknown"]) == 0
        assert done.finish_reason is FinishReason.LENGTH

        many = [start(engine, max_tokens=400) for _ in range(8)]
        await until_busy(engine, 8)
        assert await engine.abort(None) == 8
        assert {(await task).finish_reason for task in many} == {FinishReason.ABORT}
        assert (await generate(engine)).num_tokens == 64, "the engine is fine"

    run(body())


@pytest.mark.parametrize("how", ["abort", "pause"])
def test_tokens_leave_the_core_in_pieces_and_an_abort_brings_the_rest(parts, how, monkeypatch):
    run, engine, _ = parts
    processor = engine._core.llm.output_processor
    process, pieces = processor.process_outputs, []

    def recorded(outputs, *args, **kwargs):
        known = [output for output in outputs if processor.request_states.get(output.request_id)]
        pieces.extend(len(output.new_token_ids) for output in known)
        return process(outputs, *args, **kwargs)

    monkeypatch.setattr(processor, "process_outputs", recorded)

    async def body():
        begun = time.monotonic()
        whole = await generate(engine, max_tokens=100)
        piece_s = (time.monotonic() - begun) * 16 / 100
        assert pieces == [1, *[16] * 6, 2, 1]
        for part_of_piece in (0.5, 0.25, 0.75, 0.4, 0.6, 0.1, 0.9, 0.5):
            pieces.clear()
            task = start(engine, max_tokens=400)
            async with asyncio.timeout(20):
                while len(pieces) < 2:  # noqa: ASYNC110
                    await asyncio.sleep(0)
            await asyncio.sleep(part_of_piece * piece_s)
            if how == "abort":
                assert await engine.abort(None) == 1
            else:
                await engine.pause("abort")
                await engine.resume()
            part = await task
            assert part.finish_reason is FinishReason.ABORT
            assert ids_of(part)[:17] == ids_of(whole)[:17]
            assert part.num_tokens == sum(pieces)
            if pieces[-1] > 0:
                return
        pytest.fail("each time the core had no more than whole pieces")

    run(body())


@pytest.mark.parametrize("how", ["abort", "pause"])
def test_a_call_on_its_way_in_is_interrupted_too(parts, how, monkeypatch, caplog):
    run, engine, _ = parts
    add_request, reached, may_enter = engine._core.llm.add_request, asyncio.Event(), asyncio.Event()

    async def add_later(*args, **kwargs):
        reached.set()
        await may_enter.wait()
        return await add_request(*args, **kwargs)

    monkeypatch.setattr(engine._core.llm, "add_request", add_later)

    async def body():
        task = start(engine, max_tokens=400)
        await reached.wait()
        stopping = asyncio.create_task(engine.pause("abort") if how == "pause" else engine.abort())
        await asyncio.sleep(0.05)
        assert not stopping.done()
        may_enter.set()
        await stopping
        await engine.resume()
        generation = await task
        assert generation.finish_reason is FinishReason.ABORT
        assert generation.num_tokens < 400

    run(body())
    assert "without what the core has" not in caplog.text


def test_a_cancelled_call_frees_the_engine(parts):
    run, engine, _ = parts

    async def body():
        task = start(engine, max_tokens=500)
        await until_busy(engine)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert engine.status().num_running == 0
        assert engine._core.llm.output_processor.get_num_unfinished_requests() == 0, "vLLM's own"

    run(body())


@pytest.mark.parametrize("mode", ["abort", "keep"])
def test_a_request_sent_while_paused_runs_after_resume(parts, mode):
    """vllm#33926: it slipped in; verl#7511: it never ran."""
    run, engine, _ = parts

    async def body():
        early = start(engine, max_tokens=300)
        await until_busy(engine)
        await engine.pause(mode)
        assert engine.is_paused
        late, unwanted = start(engine), start(engine, name="unwanted")
        await asyncio.sleep(0.2)
        assert not late.done()
        assert await engine.abort(["unwanted"]) == 1
        assert (await unwanted).num_tokens == 0
        assert early.done() == (mode == "abort")
        await engine.resume()
        await engine.resume()  # harmless
        expected = FinishReason.ABORT if mode == "abort" else FinishReason.LENGTH
        assert (await early).finish_reason is expected
        assert (await late).num_tokens == 64

    run(body())


def test_seeds_budget_and_stop_tokens_are_obeyed(parts):
    run, engine, _ = parts

    async def body():
        seeded = SamplingParams(seed=7, ignore_eos=True)
        first, second = [ids_of(await generate(engine, sampling=seeded)) for _ in range(2)]
        assert first == second
        siblings = await asyncio.gather(*(generate(engine, sampling=FREE) for _ in range(4)))
        assert len({ids_of(s) for s in siblings}) == 4
        stop = first[3]
        stopping = SamplingParams(seed=7, ignore_eos=True, stop_token_ids=(stop,))
        stopped = await generate(engine, sampling=stopping)
        assert stopped.finish_reason is FinishReason.STOP
        assert ids_of(stopped) == first[: first.index(stop) + 1], "the stop token is kept"

    run(body())


def test_more_seeded_prompts_than_one_step_prefills_harm_nobody(parts):
    run, engine, _ = parts
    seeded = SamplingParams(seed=7, ignore_eos=True)

    async def body():
        prompts = [tuple(1 + (7 * i + j) % 40 for j in range(400)) for i in range(12)]
        calls = (generate(engine, ids=ids, sampling=seeded, max_tokens=4) for ids in prompts)
        generations = await asyncio.gather(*calls)
        assert [len(ids_of(g)) for g in generations] == [4] * 12

    run(body())


def test_tokens_of_evaluations_are_counted_apart(parts):
    run, engine, _ = parts

    async def body():
        before = engine.status()
        held_out = SamplingParams(top_k=1, ignore_eos=True, origin=Origin.EVALUATION)
        assert ids_of(await generate(engine, sampling=held_out)) == ids_of(await generate(engine))
        after = engine.status()
        assert after.tokens_generated - before.tokens_generated == 64
        assert after.tokens_evaluated - before.tokens_evaluated == 64

    run(body())


def test_an_engine_whose_core_stands_still_gives_its_calls_back_with_their_tokens(parts):
    """Its calls waited for ten minutes, and their tokens were lost."""
    run, engine, trainer = parts

    async def body():
        before = engine.status()
        engine._stall.limit_s = 1.5
        engine._stall_task.cancel()
        engine._watch()
        (core,) = engine._core.llm.engine_core.resources.engine_manager.processes
        calls = [start(engine, sampling=FREE, max_tokens=400, name=f"still{i}") for i in range(4)]
        async with asyncio.timeout(60):
            while engine.status().tokens_made < before.tokens_made + 4 * 32:  # noqa: ASYNC110
                await asyncio.sleep(0.002)
        os.kill(core.pid, signal.SIGSTOP)
        try:
            async with asyncio.timeout(10):
                generations = await asyncio.gather(*calls)
            assert {g.finish_reason for g in generations} == {FinishReason.ABORT}
            made = sum(g.num_tokens for g in generations)
            assert made >= 4 * 32
            assert engine.status().tokens_generated == before.tokens_generated + made
            assert engine.status().is_stalled
            with pytest.raises(
                EngineUnavailableError, match=r"for 1.5 s \(rollout.engine.stall_timeout_s"
            ):
                await engine.check_health()
            with pytest.raises(EngineUnavailableError, match=r"rollout.engine.stall_timeout_s"):
                await generate(engine)
        finally:
            os.kill(core.pid, signal.SIGCONT)
        async with asyncio.timeout(20):
            while engine.status().is_stalled:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        engine._stall.limit_s = 300.0
        for generation in generations:  # each goes on where it was
            ids = (*PROMPT, *ids_of(generation))
            rest = await generate(engine, ids=ids, max_tokens=8)
            expected = hf_logprobs(trainer.model, ids, ids_of(rest))
            assert largest_gap(logprobs_of(rest), expected) < 1e-3

    run(body())


def test_bad_requests_are_refused_and_cost_nothing(parts):
    run, engine, _ = parts

    async def body():
        with pytest.raises(RolloutError, match="budget of 0"):
            await generate(engine, max_tokens=0)
        with pytest.raises(RolloutError):
            await generate(engine, ids=(1,) * 600)
        task = start(engine, name="twin", max_tokens=100)
        await until_busy(engine)
        with pytest.raises(RolloutError, match="under way already"):
            await generate(engine, name="twin")
        assert (await task).num_tokens == 100

    run(body())


def test_status_counts_what_was_handed_out(parts):
    run, engine, _ = parts

    async def body():
        before = engine.status()
        generation = await generate(engine)
        after = engine.status()
        assert after.tokens_generated - before.tokens_generated == generation.num_tokens
        assert after.busy_s > before.busy_s
        assert "generate" in {what for what, _, _ in after.spans}
        starts = [start for _, start, _ in after.spans]
        assert starts == sorted(starts)

    run(body())


# -- weight syncs; they change the weights, so they come last --------------------------------------


@BOTH
def test_after_each_sync_log_probs_equal_the_trainer_s(parts):
    run, engine, trainer = parts

    async def body():
        await trainer.join(engine)
        for version in (1, 2):
            cached = await generate(engine, ids=PROMPT * 30)  # fills the prefix cache
            trainer.change()
            await trainer.sync(engine, version)
            generation = await generate(engine, ids=PROMPT * 30, sampling=FREE)
            assert set(versions_of(generation)) == {version}
            expected = hf_logprobs(trainer.model, PROMPT * 30, ids_of(generation))
            assert largest_gap(logprobs_of(generation), expected) < 1e-4
            assert set(versions_of(cached)) == {version - 1}

    run(body())


@BOTH
def test_a_sync_while_64_requests_run_interrupts_them_with_attested_versions(parts):
    """verl#7990: a sync with many requests under way never ended."""
    run, engine, trainer = parts

    async def body():
        before = engine.status(drain=False).tokens_made
        tasks = [start(engine, sampling=FREE, max_tokens=300) for _ in range(64)]
        await until_made(engine, before, 64 * 17)
        trainer.change()
        await trainer.sync(engine, 3)
        partials = await asyncio.gather(*tasks)
        assert {p.finish_reason for p in partials} == {FinishReason.ABORT}
        assert {v for p in partials for v in versions_of(p)} == {2}
        longest = max(partials, key=lambda p: p.num_tokens)
        sample = new_sample(320).append(longest)
        prompt = (*PROMPT, *sample.response_ids)
        resumed = await generate(engine, ids=prompt, sampling=FREE, max_tokens=20)
        expected = hf_logprobs(trainer.model, prompt, ids_of(resumed))
        assert largest_gap(logprobs_of(resumed), expected) < 1e-4
        both = sample.append(resumed).segments
        assert [(s.policy_version, len(s.token_ids)) for s in both] == [
            (2, longest.num_tokens), (3, 20),
        ]  # fmt: skip

    run(body())


@BOTH
def test_a_kept_request_carries_both_versions_and_goes_on_under_the_new_weights(parts):
    """AReaL#1569: tokens got a version that had never served them."""
    run, engine, trainer = parts

    async def body():
        before = engine.status(drain=False).tokens_made
        tasks = [start(engine, sampling=FREE, max_tokens=400) for _ in range(8)]
        await until_made(engine, before, 8 * 17)
        trainer.change()
        await trainer.sync(engine, 4, mode="keep")
        for generation in await asyncio.gather(*tasks):
            old, new = generation.segments
            assert (old.policy_version, new.policy_version) == (3, 4)
            assert generation.num_tokens == 400
            prompt = (*PROMPT, *old.token_ids)
            expected = hf_logprobs(trainer.model, prompt, new.token_ids)
            assert largest_gap(new.logprobs[1:], expected[1:]) < 1e-4, "the cache is recomputed"

    run(body())


@BOTH
def test_new_requests_never_use_the_prefix_cache_of_older_weights(parts, monkeypatch):
    run, engine, trainer = parts
    monkeypatch.setattr(engine, "_keeps_kv", True)  # a pause then leaves all cached blocks

    async def body():
        version = engine.status().policy_version + 1
        await generate(engine, ids=PROMPT * 30)  # fills the prefix cache
        trainer.change()
        await trainer.sync(engine, version, mode="keep")
        generation = await generate(engine, ids=PROMPT * 30, sampling=FREE)
        assert set(versions_of(generation)) == {version}
        expected = hf_logprobs(trainer.model, PROMPT * 30, ids_of(generation))
        assert largest_gap(logprobs_of(generation), expected) < 1e-4

    run(body())


def test_kv_entries_that_are_kept_serve_their_own_session_alone(parts, monkeypatch):
    run, engine, trainer = parts
    monkeypatch.setattr(engine, "_keeps_kv", True)

    async def body():
        await trainer.join(engine)
        first = start(engine, session="mine", ids=(*PROMPT,) * 20, max_tokens=300)
        await until_busy(engine)
        while not first.done() and engine.status(drain=False).kv_usage == 0:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
        await asyncio.sleep(0.1)
        trainer.change()
        await trainer.sync(engine, engine.status().policy_version + 1)
        partial = await first
        ids = (*(*PROMPT,) * 20, *ids_of(partial))
        resumed = await generate(engine, session="mine", ids=ids, max_tokens=8)
        fresh = await generate(engine, session="other", ids=ids, max_tokens=8)
        return ids, partial, resumed, fresh

    ids, partial, resumed, fresh = run(body())
    assert partial.finish_reason is FinishReason.ABORT
    new = hf_logprobs(trainer.model, ids, ids_of(fresh))
    assert largest_gap(logprobs_of(fresh), new) < 1e-4, "nothing of the old weights"
    mixed = hf_logprobs(trainer.model, ids, ids_of(resumed))
    assert largest_gap(logprobs_of(resumed), mixed) > 1e-3, "its own KV entries were used again"
    assert set(versions_of(resumed)) == {engine.status().policy_version}


def test_a_pause_that_waits_lets_requests_end_first(parts):
    """vime#294: draining behind a closed gate hung."""
    run, engine, _ = parts

    async def body():
        running = [start(engine, max_tokens=100) for _ in range(4)]
        await until_busy(engine, 4)
        await engine.pause("wait")
        try:
            late = start(engine, max_tokens=4)
            await asyncio.sleep(0.05)
            assert all(task.done() for task in running) and not late.done()
        finally:
            await engine.resume()
        return [await task for task in running], await late

    ended, late = run(body())
    assert {g.finish_reason for g in ended} == {FinishReason.LENGTH}
    assert {g.num_tokens for g in ended} == {100}
    assert late.num_tokens == 4


def test_status_tells_the_queue_and_the_kv_use(parts):
    run, engine, _ = parts

    async def body():
        before = engine.status()
        calls = [start(engine, max_tokens=60) for _ in range(200)]
        seen = []
        while not all(call.done() for call in calls):
            seen.append(engine.status(drain=False))
            await asyncio.sleep(0.01)
        await asyncio.gather(*calls)
        return before, seen, engine.status()

    before, seen, after = run(body())
    assert max(s.num_queued for s in seen) > 0, "64 of 200 run at once"
    assert 0 < max(s.kv_usage for s in seen) <= 1
    assert after.num_ended == before.num_ended + 200


def test_requests_that_come_late_are_taken_in_together(tmp_path):
    from ray_apr.serve.vllm.scheduler import PREFILL_INTERVAL

    many = 17  # of which the 17th is the last one that goes in alone
    interval = {PREFILL_INTERVAL: 60}
    engine = make_engine(make_tiny_model(tmp_path / "model"), additional_config=interval)

    async def body(num_late):
        before = engine.status(drain=False).tokens_made
        others = [start(engine, max_tokens=400) for _ in range(many)]
        await until_made(engine, before, many)
        late = [start(engine, max_tokens=2) for _ in range(num_late)]
        done, _ = await asyncio.wait((*others, *late), return_when=asyncio.FIRST_COMPLETED)
        queued = engine.status().num_queued
        await asyncio.gather(*others, *late)
        return len(done & set(late)), queued

    async def both():
        async with running(engine):
            await start(engine, max_tokens=2)  # a first step may take longer than `body` waits
            return [await body(num_late) for num_late in (1, 2)]

    (alone, queued), (together, _) = asyncio.run(both())
    assert (alone, queued) == (0, 0), "it waits, but for no room in the engine"
    assert together == 2


@BOTH
@pytest.mark.parametrize("num_arrived", [0, 1, 2])
def test_a_sync_that_breaks_leaves_no_engine_paused_and_no_wrong_answer(parts, num_arrived):
    """AReaL#1160, OpenRLHF#1262, trl#5892: an error left engines paused for good."""
    run, engine, trainer = parts

    async def body():
        trainer.sender.gather()
        assert len(trainer.sender.weights.staged) > num_arrived
        before = engine.status().policy_version
        trainer.change()
        await engine.pause("abort")
        try:
            receiving = asyncio.create_task(engine.receive_weights(before + 1))
            await asyncio.to_thread(trainer.broadcast, num_arrived)
            await asyncio.sleep(0.1)
            trainer.collective.destroy_group()  # the trainer dies
            with pytest.raises(WeightSyncError, match="engine-0"):
                await receiving
        finally:
            await engine.resume()
        assert not engine.is_paused
        with pytest.raises(EngineUnavailableError, match="undefined after a broken weight sync"):
            await generate(engine)
        await trainer.join(engine)
        trainer.change()
        await trainer.sync(engine, before + 2)
        generation = await generate(engine, sampling=FREE)
        assert set(versions_of(generation)) == {before + 2}
        expected = hf_logprobs(trainer.model, PROMPT, ids_of(generation))
        assert largest_gap(logprobs_of(generation), expected) < 1e-4

    run(body())


async def begin_broken_sync(engine, trainer, mode):
    """A sync whose trainer dies before it has sent anything; the engine is left paused."""
    await engine.pause(mode)
    receiving = asyncio.create_task(engine.receive_weights(engine.policy_version + 1))
    await asyncio.sleep(0.1)
    trainer.collective.destroy_group()
    with pytest.raises(WeightSyncError):
        await receiving


@BOTH
def test_a_sync_that_breaks_gives_frozen_requests_back_with_their_tokens(parts):
    run, engine, trainer = parts

    async def body():
        version = engine.status().policy_version
        before = engine.status(drain=False).tokens_made
        tasks = [start(engine, sampling=FREE, max_tokens=450) for _ in range(4)]
        await until_made(engine, before, 4 * 17)
        await begin_broken_sync(engine, trainer, "keep")
        assert not any(task.done() for task in tasks)
        await engine.resume()
        for generation in await asyncio.gather(*tasks):
            assert generation.finish_reason is FinishReason.ABORT
            assert set(versions_of(generation)) == {version}
            expected = hf_logprobs(trainer.model, PROMPT, ids_of(generation))
            assert largest_gap(logprobs_of(generation), expected) < 1e-4
        await trainer.join(engine)
        await trainer.sync(engine, version + 2)
        assert set(versions_of(await generate(engine))) == {version + 2}

    run(body())


@pytest.fixture(scope="module")
def parking(tmp_path_factory):
    """(run, engine, trainer) of a run whose requests stay while a sync interrupts their calls."""
    folder = make_tiny_model(tmp_path_factory.mktemp("parking"))
    with parts_of(folder, partial_rollout=PartialRolloutConfig()) as (run, engine, trainer):
        run(trainer.join(engine))
        yield run, engine, trainer


def next_calls(engine, samples, number):
    return [
        start(
            engine, name=f"{name}#{number}", ids=(*PROMPT, *sample.response_ids),
            max_tokens=sample.remaining_budget, session="group",
        )
        for name, sample in samples.items()
    ]  # fmt: skip


async def ended(samples, calls):
    """The samples with what their calls have made."""
    made = zip(samples.items(), await asyncio.gather(*calls), strict=True)
    return {name: sample.append(generation) for (name, sample), generation in made}


def test_requests_stay_while_a_sync_interrupts_their_calls(parking):
    run, engine, trainer = parking

    async def body():
        whole = await generate(engine, max_tokens=400)
        version = engine.policy_version
        samples = {f"s{i}": new_sample(400) for i in range(8)}
        before = engine.status(drain=False).tokens_made
        calls = next_calls(engine, samples, 0)
        await until_made(engine, before, 8 * 17)
        await trainer.sync(engine, version + 1)  # of the weights that it has
        samples = await ended(samples, calls)
        assert all(s.policy_version == version for x in samples.values() for s in x.segments)
        made = {name: sample.num_tokens for name, sample in samples.items()}
        await asyncio.sleep(0.2)  # their way to the rollout worker and back
        status = engine.status(drain=False)
        assert status.kv_usage > 0, "no call is inside, but their requests are"
        calls = next_calls(engine, samples, 1)
        await until_made(engine, status.tokens_made, 8)
        await engine.pause("abort")
        await engine.resume()
        samples = await ended(samples, calls)
        for name, sample in samples.items():
            assert sample.num_tokens > made[name]
        left = {name: s for name, s in samples.items() if s.finish_reason is None}
        samples |= await ended(left, next_calls(engine, left, 2))
        for sample in samples.values():
            assert sample.response_ids == ids_of(whole)
            assert largest_gap(sample.behavior_logprobs, logprobs_of(whole)) < 1e-4
            versions = {s.policy_version for s in sample.segments[1:]}
            assert (sample.segments[0].policy_version, versions) == (version, {version + 1})

    run(body())


def test_a_call_on_its_way_in_has_the_version_that_it_began_with(parking, monkeypatch):
    run, engine, trainer = parking
    add_request, reached, may_enter = engine._core.llm.add_request, asyncio.Event(), asyncio.Event()
    until_entered = engine._calls.until_entered

    async def add_later(*args, **kwargs):
        reached.set()
        await may_enter.wait()
        return await add_request(*args, **kwargs)

    async def make_some(calls):
        await until_entered(calls)
        await asyncio.sleep(0.1)  # more than a piece of tokens, and part of another one

    monkeypatch.setattr(engine._core.llm, "add_request", add_later)
    monkeypatch.setattr(engine._calls, "until_entered", make_some)

    async def body():
        version = engine.policy_version
        calls = next_calls(engine, {"w": new_sample(400)}, 0)
        await reached.wait()
        syncing = asyncio.create_task(trainer.sync(engine, version + 1))
        await asyncio.sleep(0.05)
        may_enter.set()
        await syncing
        (generation,) = await asyncio.gather(*calls)
        assert generation.finish_reason is FinishReason.ABORT and generation.num_tokens > 1
        assert {s.policy_version for s in generation.segments} == {version}

    run(body())


def test_requests_that_stay_are_held_while_their_next_calls_are_on_their_way(parking):
    run, engine, _ = parking

    async def body():
        samples = {f"h{i}": new_sample(450) for i in range(4)}
        before = engine.status(drain=False).tokens_made
        calls = next_calls(engine, samples, 0)
        await until_made(engine, before, 4)
        await engine.pause("abort")
        await engine.resume()
        samples = await ended(samples, calls)
        status = engine.status(drain=False)
        assert status.num_running == 4, "or the adaptive limit would become 1: KV entries are full"
        await asyncio.gather(*next_calls(engine, samples, 1))
        assert engine.status(drain=False).num_running <= 4

    run(body())


def test_requests_from_outside_are_not_held(parking):
    """known fault: they counted as running for 2 s, though no other call was to come."""
    run, engine, _ = parking
    sampling = SamplingParams(ignore_eos=True, origin=Origin.OUTSIDE)

    async def body():
        before = engine.status(drain=False).tokens_made
        call = generate_request("o", token_ids=PROMPT, sampling=sampling, max_tokens=450)
        answer = asyncio.create_task(engine.generate(call))
        await until_made(engine, before, 4)
        await engine.pause("abort")
        await engine.resume()
        assert (await answer).finish_reason is FinishReason.ABORT
        assert engine.status(drain=False).num_running == 0

    run(body())


def test_a_session_from_outside_meets_no_kv_entries_of_older_weights(parking):
    """known fault: who asked again in a session got an answer that was computed in part from the
    prompt's KV entries of whatever weights had met it first."""
    run, engine, trainer = parking
    sampling = dataclasses.replace(FREE, origin=Origin.OUTSIDE)

    async def body():
        version = engine.status(drain=False).policy_version + 1
        ask = {"ids": PROMPT * 30, "sampling": sampling, "max_tokens": 8, "session": "chat"}
        await generate(engine, **ask)
        trainer.change()
        await trainer.sync(engine, version)
        answer = await generate(engine, **ask)
        assert set(versions_of(answer)) == {version}
        expected = hf_logprobs(trainer.model, PROMPT * 30, ids_of(answer))
        assert largest_gap(logprobs_of(answer), expected) < 1e-4

    run(body())


def test_requests_leave_their_places_to_sequences_that_are_scored(parking):
    """Beside an engine that is full of them, scores would wait until nobody takes them over."""
    run, engine, _ = parking

    async def body():
        samples = {f"w{i}": new_sample(450) for i in range(64)}  # max_num_seqs
        before = engine.status(drain=False).tokens_made
        calls = next_calls(engine, samples, 0)
        await until_made(engine, before, 64)
        engine.expect_scores(engine.policy_version, [PROMPT, PROMPT])
        await engine.pause("abort")
        await engine.resume()
        assert len(engine.scores.logprobs) == 2
        assert engine.status(drain=False).num_running == 0
        samples = await ended(samples, calls)
        assert any(sample.num_tokens for sample in samples.values())

    run(body())


def test_an_abort_in_a_sync_waits_for_no_call_that_this_ends_anyway(parking):
    run, engine, trainer = parking

    async def body():
        version = engine.policy_version
        samples = {f"a{i}": new_sample(450) for i in range(4)}
        before = engine.status(drain=False).tokens_made
        calls = next_calls(engine, samples, 0)
        await until_made(engine, before, 4)
        await engine.pause("abort")
        receiving = asyncio.create_task(engine.receive_weights(version + 1))
        await asyncio.sleep(0.1)  # the core waits for weights
        async with asyncio.timeout(5):
            assert await engine.abort() == 4
        trainer.sender.gather()
        await asyncio.to_thread(trainer.broadcast)
        await receiving
        await engine.resume()
        samples = await ended(samples, calls)
        assert {s.policy_version for x in samples.values() for s in x.segments} == {version}

    run(body())


def test_a_sync_that_breaks_ends_requests_that_would_stay(parking):
    run, engine, trainer = parking

    async def body():
        version = engine.policy_version
        before = engine.status(drain=False).tokens_made
        samples, calls = {f"b{i}": new_sample(450) for i in range(4)}, []
        for name, sample in samples.items():
            calls += next_calls(engine, {name: sample}, 0)
            await until_made(engine, before, 17)
            before = engine.status(drain=False).tokens_made
            await asyncio.sleep(0.004)
        await begin_broken_sync(engine, trainer, "abort")
        await engine.resume()
        samples = await ended(samples, calls)
        assert engine.status(drain=False).num_running == 0, "nothing stays"
        of_pieces = ((sample.num_tokens - 1) % 16 for sample in samples.values())
        assert any(of_pieces), "the first token leaves alone, then pieces of 16, and the rest"
        await trainer.join(engine)
        trainer.change()
        await trainer.sync(engine, version + 2)
        again = {name: new_sample(450) for name in samples}
        again = await ended(again, next_calls(engine, again, 1))
        for old, new in zip(samples.values(), again.values(), strict=True):
            assert {s.policy_version for s in old.segments} == {version}
            assert {s.policy_version for s in new.segments} == {version + 2}
            expected = hf_logprobs(trainer.model, PROMPT, new.response_ids)
            assert largest_gap(new.behavior_logprobs, expected) < 1e-4

    run(body())


def test_a_sync_that_its_caller_gave_up_ends_by_itself(parts):
    run, engine, trainer = parts

    async def body():
        version = engine.status().policy_version
        frozen = start(engine, sampling=FREE, max_tokens=450)
        await until_busy(engine)
        await engine.pause("keep")
        receiving = asyncio.create_task(engine.receive_weights(version + 1))
        await asyncio.sleep(0.1)
        receiving.cancel()
        resuming = asyncio.create_task(engine.resume())
        assert (await frozen).finish_reason is FinishReason.ABORT
        with pytest.raises(asyncio.CancelledError):
            await receiving
        trainer.change()
        await asyncio.to_thread(trainer.broadcast)  # too late, but whole
        await resuming
        await trainer.sync(engine, version + 2)
        generation = await generate(engine, sampling=FREE)
        assert set(versions_of(generation)) == {version + 2}
        expected = hf_logprobs(trainer.model, PROMPT, ids_of(generation))
        assert largest_gap(logprobs_of(generation), expected) < 1e-4

    run(body())


@BOTH
def test_an_engine_that_slept_reads_the_weights_of_the_trainer_on_its_device(parts):
    run, engine, trainer = parts

    async def body():
        version = engine.status().policy_version + 1
        sender = SharedSender(GatheredWeights(trainer.model, bucket_mb=0.125))
        endpoint = pickle.dumps(sender.open(1, host="127.0.0.1", timeout_s=20.0))
        await engine.join_weight_group(WeightGroup(timeout_s=20.0, endpoint=endpoint), 1)
        running = start(engine, sampling=FREE, max_tokens=450)
        await until_busy(engine)
        await engine.sleep("abort")
        assert (await running).finish_reason is FinishReason.ABORT
        waiting = start(engine, sampling=FREE)
        trainer.change()
        sender.gather()
        with pytest.raises(WeightSyncError, match="no train worker shares cpu of"):
            await engine.receive_weights(version, pickle.dumps({"GPU-7": []}))
        await engine.receive_weights(version, pickle.dumps(sender.prepare()))
        sender.release()
        await engine.resume()
        generation = await waiting
        assert set(versions_of(generation)) == {version}
        expected = hf_logprobs(trainer.model, PROMPT, ids_of(generation))
        assert largest_gap(logprobs_of(generation), expected) < 1e-4

    run(body())


@pytest.mark.parametrize("arrives", [True, False])
def test_a_paused_engine_may_get_the_version_that_a_request_needs(parts, arrives):
    run, engine, trainer = parts

    async def body():
        await trainer.join(engine)
        version = engine.policy_version + 1
        needs = {"token_ids": PROMPT, "sampling": GREEDY, "max_tokens": 4}
        call = engine.generate(
            generate_request(request_id="newer", min_policy_version=version, **needs)
        )
        await engine.pause("abort")
        waiting = asyncio.create_task(call)
        await asyncio.sleep(0.05)
        assert not waiting.done()
        if arrives:
            await trainer.sync(engine, version)
            assert versions_of(await waiting) == [version] * 4
            return
        await engine.resume()
        with pytest.raises(EngineUnavailableError, match=f"does not have version {version} yet"):
            await waiting

    run(body())


def test_weights_are_only_received_while_paused(parts):
    run, engine, _ = parts
    with pytest.raises(WeightSyncError, match="must be paused"):
        run(engine.receive_weights(11))


# -- engines that cannot start ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "reason"),
    [
        ({"no_such_argument": 1}, ConfigError, "no_such_argument"),
        ({"max_num_seqs": -1}, ConfigError, "max_num_seqs"),
        ({"num_gpu_blocks_override": 1}, EngineUnavailableError, "cache blocks|KV cache"),
    ],
)
def test_an_engine_that_cannot_start_says_why(tmp_path, arguments, error, reason):
    engine = make_engine(make_tiny_model(tmp_path / "model"), **arguments)
    try:
        with pytest.raises(error, match=reason):
            asyncio.run(engine.start())
    finally:
        engine.shutdown()
