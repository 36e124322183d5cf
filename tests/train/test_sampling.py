"""The distribution that sampled is the one that is trained: updates of tempered, stale samples."""

from __future__ import annotations

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
from ray_apr.train.logprobs import attach_response_logprobs, micro_batches, response_logprobs
from ray_apr.train.step import train_step
from ray_apr.types import FinishReason, Prompt, Sample, SamplingParams, Segment
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

VOCABULARY, LENGTH = 3, 3
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


def logprobs_of(table, temperature, response):
    """Log-probs [LENGTH] of a response, in float64."""
    logprobs = (table / temperature).log_softmax(-1)
    return torch.stack([logprobs[a, b] for a, b in itertools.pairwise((START, *response))])


def cosine_with_the_true_gradient(temperature, trained_at, seed):
    """Of the expected update of stale samples, all of them enumerated, by the trainer's code."""
    rng = np.random.default_rng(seed)
    table = rng.normal(size=(VOCABULARY + 1, VOCABULARY)) * 1.5
    stale = torch.tensor(table + rng.normal(size=table.shape) * 0.5)
    rewards = rng.normal(size=len(RESPONSES))

    current = torch.tensor(table, requires_grad=True)
    expected = sum(
        logprobs_of(current, temperature, y).sum().exp() * r
        for y, r in zip(RESPONSES, rewards, strict=True)
    )
    expected.backward()

    prompt = Prompt(prompt_id="p", token_ids=(START,))
    samples = []
    for number, (response, reward) in enumerate(zip(RESPONSES, rewards, strict=True)):
        behavior = logprobs_of(stale, temperature, response)
        share = behavior.sum().exp().item() * len(RESPONSES)  # each response stands here once
        logprobs = tuple(behavior.tolist())
        samples.append(make_sample(number, prompt, response, logprobs, reward * share))
    (row,) = make_batches(samples, micro_batch_tokens=16)
    model = Bigram(table)
    optimizer = CapturingOptimizer(model.parameters(), lr=0.0)
    algorithm = AlgorithmConfig(
        advantage=lambda rewards, _groups: rewards,
        aggregation="seq-mean-token-sum",
        importance="sequence",
        importance_cap=None,
    )
    sampling = SamplingParams(temperature=trained_at)
    train_step(model, optimizer, row, algorithm, TRAIN, sampling=sampling)
    update = -optimizer.gradients[0].double().flatten()
    return nn.functional.cosine_similarity(update, current.grad.flatten(), dim=0).item()


@pytest.mark.parametrize("temperature", [0.5, 0.6, 0.7, 1.0, 1.3])
def test_the_expected_update_of_stale_tempered_samples_is_the_true_gradient(temperature):
    for seed in range(4):
        assert cosine_with_the_true_gradient(temperature, temperature, seed) > 0.9999


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
    (part,) = micro_batches(row, torch.device("cpu"), packed=packed, min_tokens=least, end_ids=ends)
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
