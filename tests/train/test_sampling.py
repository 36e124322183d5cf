"""The distribution that sampled is the one that is trained: updates of tempered, stale samples."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from ray_apr.config import AlgorithmConfig, TrainConfig
from ray_apr.core.messages import SamplingParams
from ray_apr.core.sample import FinishReason, Prompt, Sample, Segment, pack_ids
from ray_apr.train.head import attach_response_logprobs
from ray_apr.train.logprobs import micro_batches, response_logprobs
from ray_apr.train.step import train_step
from tests.train_batches import make_batches

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "arithmetic"
TRAIN = TrainConfig(max_grad_norm=1e9)


class CapturingOptimizer(torch.optim.SGD):
    """Keeps the gradients that it was given, and changes nothing."""

    def step(self, closure=None):
        del closure
        self.gradients = [p.grad.clone() for p in self.param_groups[0]["params"]]


def make_sample(number, prompt, response, logprobs, reward):
    return Sample(
        sample_id=f"p-{number}",
        group_id="p",
        prompt=prompt,
        max_response_tokens=64,
        segments=(Segment(policy_version=0, token_ids=response, logprobs=logprobs),),
        finish_reason=FinishReason.STOP,
        reward=reward,
    )


# -- a policy whose responses can be enumerated ------------------------------------------------

VOCABULARY, LENGTH = 4, 3
RESPONSES = tuple(itertools.product(range(VOCABULARY), repeat=LENGTH))
START = VOCABULARY
"""The prompt."""


class Bigram(nn.Module):
    """Logits of a token depend on the one before; with what the chunked head needs of a model."""

    def __init__(self, table):
        super().__init__()
        self.base_model = self._states
        self.table = nn.Parameter(torch.tensor(table, dtype=torch.float32))
        self.config = SimpleNamespace(
            get_text_config=lambda: SimpleNamespace(vocab_size=VOCABULARY)
        )
        attach_response_logprobs(self)

    def _states(self, input_ids, use_cache):
        del use_cache
        return SimpleNamespace(last_hidden_state=self.table[input_ids])

    def get_output_embeddings(self):
        return lambda states: 1.0 * states


def logprobs_of(table, temperature, response, mask=None):
    """Log-probs [LENGTH] of a response, in float64; where a mask [states, tokens] is given, of the
    distribution on its tokens alone."""
    logits = table / temperature
    if mask is not None:
        logits = logits.masked_fill(~mask, -torch.inf)
    logprobs = logits.log_softmax(-1)
    return torch.stack([logprobs[a, b] for a, b in itertools.pairwise((START, *response))])


def nucleus(table, temperature, top_p):
    """[states, tokens], the fewest likeliest tokens that have this share together."""
    chances, order = (table / temperature).softmax(-1).sort(descending=True)
    kept = chances.cumsum(-1) - chances < top_p
    return torch.zeros_like(kept).scatter(1, order, kept)


def cosine_with_the_true_gradient(temperature, trained_at, seed, top_p=None):
    """Of the expected update of stale samples, all of them enumerated, by the trainer's code."""
    rng = np.random.default_rng(seed)
    table = rng.normal(size=(VOCABULARY + 1, VOCABULARY))
    stale = torch.tensor(table + rng.normal(size=table.shape) * 0.5)
    mask = None if top_p is None else nucleus(stale, temperature, top_p)
    rewards = rng.normal(size=len(RESPONSES))

    current = torch.tensor(table, requires_grad=True)
    expected = sum(
        logprobs_of(current, temperature, y, mask).sum().exp() * r
        for y, r in zip(RESPONSES, rewards, strict=True)
    )
    expected.backward()

    prompt = Prompt(prompt_id="p", token_ids=(START,))
    samples = []
    for number, (response, reward) in enumerate(zip(RESPONSES, rewards, strict=True)):
        behavior = logprobs_of(stale, temperature, response, mask)
        if not behavior.isfinite().all():
            continue  # it cannot be drawn
        share = behavior.sum().exp().item()  # each response stands here once
        logprobs = tuple(behavior.tolist())
        sample = make_sample(number, prompt, response, logprobs, reward * share)
        if mask is not None:
            drawn = [mask[state].nonzero()[:, 0] for state in (START, *response[:-1])]
            support = tuple(pack_ids(ids.tolist()) for ids in drawn)
            (segment,) = sample.segments
            segments = (dataclasses.replace(segment, support=support),)
            sample = dataclasses.replace(sample, segments=segments)
        samples.append(sample)
    (row,) = make_batches(samples, micro_batch_tokens=16)
    model = Bigram(table)
    optimizer = CapturingOptimizer(model.parameters(), lr=0.0)
    algorithm = AlgorithmConfig(
        advantage=lambda rewards, _groups: rewards,
        aggregation="seq-mean-token-sum",
        importance="sequence",
        importance_cap=None,
    )
    top_k = 0 if mask is None else VOCABULARY
    sampling = SamplingParams(temperature=trained_at, top_k=top_k, reports_support=top_k > 0)
    train_step(model, optimizer, row, algorithm, TRAIN, sampling=sampling)
    update = -optimizer.gradients[0].double().flatten()
    return nn.functional.cosine_similarity(update, current.grad.flatten(), dim=0).item()


@pytest.mark.parametrize("temperature", [0.5, 0.6, 0.7, 1.0, 1.3])
def test_the_expected_update_of_stale_tempered_samples_is_the_true_gradient(temperature):
    for seed in range(4):
        assert cosine_with_the_true_gradient(temperature, temperature, seed) > 0.9999


@pytest.mark.parametrize("temperature", [0.5, 0.6, 0.7, 1.0, 1.3])
@pytest.mark.parametrize("top_p", [0.9, 0.7])
def test_it_is_so_where_tokens_were_cut_off_too(temperature, top_p):
    for seed in range(4):
        assert cosine_with_the_true_gradient(temperature, temperature, seed, top_p) > 0.9999


def test_at_another_temperature_than_that_of_the_samples_it_would_not_be():
    assert min(cosine_with_the_true_gradient(0.5, 1.0, seed) for seed in range(4)) < 0.95


# -- one batch of the arithmetic example -------------------------------------------------------

TEMPERATURE = 0.7
GROUP_SIZE = 4


@pytest.fixture(scope="module")
def arithmetic():
    """(samples, model): short responses that a stale model drew at `TEMPERATURE`, in groups."""
    sys.path.insert(0, str(EXAMPLE))
    try:
        import task
    finally:
        sys.path.remove(str(EXAMPLE))
    tokenizer = AutoTokenizer.from_pretrained(EXAMPLE / "base_model")
    model, stale = (
        AutoModelForCausalLM.from_pretrained(EXAMPLE / "base_model", dtype=torch.float32)
        for _ in range(2)
    )
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in stale.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(0.1 * parameter.std() * noise)
    rows = [r for r in pq.read_table(EXAMPLE / "prompts.parquet").to_pylist()[:64]]
    rows = sorted(rows, key=lambda r: len(r["prompt"]))[:4]
    samples = []
    for g, row in enumerate(rows):
        prompt = Prompt(prompt_id=f"p{g}", token_ids=tuple(tokenizer(row["prompt"])["input_ids"]))
        for i in range(GROUP_SIZE):
            response, logprobs = draw(stale, prompt.token_ids, tokenizer.eos_token_id, generator)
            text = tokenizer.decode(response, skip_special_tokens=True)
            reward = task.reward(SimpleNamespace(response_text=text, row=row))
            samples.append(
                Sample(
                    sample_id=f"p{g}-{i}",
                    group_id=f"p{g}",
                    prompt=prompt,
                    max_response_tokens=64,
                    segments=(Segment(policy_version=0, token_ids=response, logprobs=logprobs),),
                    finish_reason=FinishReason.STOP,
                    reward=reward + 0.1 * i,  # no group without a signal
                )
            )
    return samples, model


@torch.no_grad()
def draw(model, prompt_ids, end, generator):
    """A response and its log-probs, token by token."""
    ids, logprobs = list(prompt_ids), []
    while len(logprobs) < 32 and (not logprobs or ids[-1] != end):
        row = (model(input_ids=torch.tensor([ids])).logits[0, -1] / TEMPERATURE).softmax(-1)
        ids.append(int(torch.multinomial(row, 1, generator=generator)))
        logprobs.append(row[ids[-1]].log().item())
    return tuple(ids[len(prompt_ids) :]), tuple(logprobs)


def independent_gradients(model, samples):
    """GRPO's advantage, importance weights of tokens up to 2 and the token mean, written out in
    float64 from whole logits of one sample at a time."""
    rewards = np.array([s.reward for s in samples]).reshape(-1, GROUP_SIZE)
    mean, deviation = rewards.mean(1, keepdims=True), rewards.std(1, ddof=1, keepdims=True)
    advantages = ((rewards - mean) / (deviation + 1e-6)).flatten()
    num_tokens = sum(s.num_tokens for s in samples)
    model = model.double()
    model.zero_grad()
    for sample, advantage in zip(samples, advantages, strict=True):
        begin = len(sample.prompt.token_ids)
        ids = torch.tensor([[*sample.prompt.token_ids, *sample.response_ids]])
        logits = model(input_ids=ids).logits[0, begin - 1 : -1] / TEMPERATURE
        chosen = logits.gather(1, ids[0, begin:, None])[:, 0] - logits.logsumexp(-1)
        ratio = (chosen.detach() - torch.tensor(sample.behavior_logprobs).double()).exp()
        (-(ratio.clamp(max=2.0) * advantage * chosen).sum() / num_tokens).backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.float().zero_grad(set_to_none=True)
    return gradients


def test_one_batch_of_arithmetic_at_0_7_has_the_gradients_of_an_independent_update(arithmetic):
    samples, model = arithmetic
    expected = independent_gradients(model, samples)
    attach_response_logprobs(model)
    for trained_at, largest in ((TEMPERATURE, 1e-6), (1.0, None)):
        (row,) = make_batches(samples, micro_batch_tokens=256)
        optimizer = CapturingOptimizer(model.parameters(), lr=0.0)
        sampling = SamplingParams(temperature=trained_at)
        train_step(model, optimizer, row, AlgorithmConfig(), TRAIN, sampling=sampling)
        gap = max(
            (ours.double() - theirs).abs().max().item()
            for ours, theirs in zip(optimizer.gradients, expected, strict=True)
        )
        assert gap < largest if largest is not None else gap > 1e-3


def test_log_probs_and_entropies_are_of_the_tempered_distribution(arithmetic):
    samples, model = arithmetic
    (row,) = make_batches(samples, micro_batch_tokens=4096)
    (part,) = micro_batches(row, torch.device("cpu"))
    logprobs, entropies = response_logprobs(model, part, temperature=TEMPERATURE)
    for i, index in enumerate(part.sample_index):
        sample = samples[index]
        begin, length = len(sample.prompt.token_ids), sample.num_tokens
        ids = torch.tensor([[*sample.prompt.token_ids, *sample.response_ids]])
        with torch.no_grad():
            whole = (model(input_ids=ids).logits[0, begin - 1 : -1] / TEMPERATURE).log_softmax(-1)
        expected = whole.gather(1, ids[0, begin:, None])[:, 0]
        torch.testing.assert_close(logprobs[i, :length], expected, rtol=1e-5, atol=1e-5)
        entropy = -(whole.exp() * whole).sum(-1)
        torch.testing.assert_close(entropies[i, :length], entropy, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("packed", [False, True])
def test_early_in_a_response_the_distribution_is_without_what_would_end_it(arithmetic, packed):
    samples, model = arithmetic
    least, ends = 5, (1, 9)
    (row,) = make_batches(samples, micro_batch_tokens=4096, packed=packed)
    sampling = SamplingParams(min_tokens=least, stop_token_ids=ends)
    (part,) = micro_batches(row, torch.device("cpu"), packed=packed, sampling=sampling)
    logprobs, entropies = response_logprobs(
        model, part, temperature=TEMPERATURE, entropy_gradients=True
    )
    for i, index in enumerate(part.sample_index):
        sample = samples[index]
        begin, length = len(sample.prompt.token_ids), sample.num_tokens
        ids = torch.tensor([[*sample.prompt.token_ids, *sample.response_ids]])
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, begin - 1 : -1] / TEMPERATURE
        logits[:least, list(ends)] = -torch.inf
        whole = logits.log_softmax(-1)
        expected = whole.gather(1, ids[0, begin:, None])[:, 0]
        possible = expected.isfinite()
        torch.testing.assert_close(
            logprobs[i, :length][possible], expected[possible], rtol=1e-5, atol=1e-5
        )
        entropy = torch.special.entr(whole.exp()).sum(-1)
        torch.testing.assert_close(entropies[i, :length], entropy, rtol=1e-5, atol=1e-5)
    (logprobs * (logprobs > -1e6)).sum().add(entropies.sum()).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    model.zero_grad(set_to_none=True)


def with_support(sample, rng):
    """A sample some of whose tokens could be drawn from few ids, others from many."""
    (segment,) = sample.segments
    sets = [{i, *rng.choice(16, size=rng.integers(0, 9)).tolist()} for i in segment.token_ids]
    support = tuple(map(pack_ids, sets))
    return dataclasses.replace(sample, segments=(dataclasses.replace(segment, support=support),))


@pytest.mark.parametrize(("packed", "rows"), [(False, None), (True, None), (False, 7)])
def test_log_probs_are_of_the_distribution_on_what_could_be_drawn(
    arithmetic, packed, rows, monkeypatch
):
    samples, model = arithmetic
    rng = np.random.default_rng(0)
    samples = [with_support(s, rng) for s in samples]
    if rows is not None:
        vocabulary = model.config.vocab_size
        monkeypatch.setattr("ray_apr.train.head._CHUNK_LOGITS", rows * vocabulary)
    attach_response_logprobs(model)
    sampling = SamplingParams(top_k=8, reports_support=True)
    (row,) = make_batches(samples, micro_batch_tokens=4096, packed=packed)
    (part,) = micro_batches(row, torch.device("cpu"), packed=packed, sampling=sampling)
    logprobs, entropies = response_logprobs(
        model, part, temperature=TEMPERATURE, entropy_gradients=True
    )
    (logprobs.sum() + entropies.sum()).backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    for i, index in enumerate(part.sample_index):
        sample = samples[index]
        begin, length = len(sample.prompt.token_ids), sample.num_tokens
        ids = torch.tensor([[*sample.prompt.token_ids, *sample.response_ids]])
        logits = model(input_ids=ids).logits[0, begin - 1 : -1] / TEMPERATURE
        for t, drawable in enumerate(sample.support):
            kept = sorted(set(np.frombuffer(drawable, np.int32).tolist()))
            of_kept = logits[t, kept].log_softmax(-1)
            expected = of_kept[kept.index(sample.response_ids[t])]
            entropy = -(of_kept.exp() * of_kept).sum()
            torch.testing.assert_close(logprobs[i, t], expected, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(entropies[i, t], entropy, rtol=1e-5, atol=1e-5)
            (expected + entropy).backward(retain_graph=t + 1 < length)
    for ours, parameter in zip(gradients, model.parameters(), strict=True):
        torch.testing.assert_close(ours, parameter.grad, rtol=1e-3, atol=1e-3)
    model.zero_grad(set_to_none=True)


def test_a_token_that_does_not_say_what_could_be_drawn_is_refused(arithmetic):
    samples, _ = arithmetic
    sampling = SamplingParams(top_k=8, reports_support=True)
    (row,) = make_batches(samples, micro_batch_tokens=4096)
    with pytest.raises(ValueError, match="does not say which 1 to 73 could be drawn"):
        micro_batches(row, torch.device("cpu"), sampling=sampling)
