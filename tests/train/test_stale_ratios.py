"""GSPO and CISPO on stale data, several epochs a batch, and responses that are filtered out."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from ray_apr.algorithms import importance_weights
from ray_apr.config import AlgorithmConfig
from ray_apr.core.sample import FinishReason
from ray_apr.train.logprobs import MicroBatch
from ray_apr.train.objective import Frozen, Whole, backward
from ray_apr.train.step import train_step
from tests.loss_oracle import CASES
from tests.plain_policies import TRAIN, Policies, Recorder, distance, gradients_of, load
from tests.tiny_model import make_tiny_model
from tests.train_batches import make_batches, make_samples


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"), hidden_size=32)


@pytest.fixture(scope="module")
def stale(folder):
    """Samples whose behavior policy is near the model: some tokens beyond a clip, some not."""
    p = Policies(make_samples())
    with torch.no_grad():
        logprobs = p.of(load(folder))[0]
    noise = 0.3 * torch.randn(logprobs.shape, generator=torch.Generator().manual_seed(0))
    moved = (logprobs + noise).clamp(max=-1e-3)
    samples = []
    for sample, row in zip(p.samples, moved, strict=True):
        (segment,) = sample.segments
        behavior = tuple(row[: sample.num_tokens].tolist())
        segments = (dataclasses.replace(segment, logprobs=behavior),)
        samples.append(dataclasses.replace(sample, segments=segments))
    return samples


def update_of(folder, samples, algorithm):
    """(gradients of one optimizer step, figures)."""
    (row,) = make_batches(samples, micro_batch_tokens=64)
    model = load(folder)
    optimizer = Recorder(model)
    figures = train_step(model, optimizer, row, algorithm, TRAIN)
    return optimizer.gradients[0], figures


def grpo_advantages(samples):
    rewards = np.array([s.reward for s in samples]).reshape(-1, 4)
    centred = rewards - rewards.mean(1, keepdims=True)
    return torch.tensor((centred / (rewards.std(1, ddof=1, keepdims=True) + 1e-6)).flatten())


def gspo_by_the_paper(logprobs, p, advantages, low, high):
    """2507.18071, eq. 5 and 7, whose old policy sampled the response."""
    terms = []
    for i, sample in enumerate(p.samples):
        gap = (logprobs[i] - p.behavior[i])[: sample.num_tokens]
        s, a = gap.mean().exp(), advantages[i]
        terms.append(torch.minimum(s * a, s.clamp(1 - low, 1 + high) * a))
    return -torch.stack(terms).mean()


def cispo_by_the_paper(logprobs, p, advantages, low, high):
    """2506.13585, eq. 4 and 5, whose old policy sampled the token."""
    total, num_tokens = 0.0, 0
    for i, sample in enumerate(p.samples):
        own = logprobs[i, : sample.num_tokens]
        ratio = (own - p.behavior[i, : sample.num_tokens]).exp()
        total = total + (ratio.clamp(1 - low, 1 + high).detach() * advantages[i] * own).sum()
        num_tokens += sample.num_tokens
    return -total / num_tokens


@pytest.mark.parametrize(
    ("preset", "by_the_paper", "clips"),
    [
        ("gspo", gspo_by_the_paper, {}),
        ("gspo", gspo_by_the_paper, {"clip_low": 0.1, "clip_high": 0.1}),
        ("cispo", cispo_by_the_paper, {}),
        ("cispo", cispo_by_the_paper, {"clip_low": 0.1, "clip_high": 0.2}),
    ],
)
def test_gspo_and_cispo_have_the_gradients_of_their_papers(
    folder, stale, preset, by_the_paper, clips
):
    algorithm = AlgorithmConfig.preset(preset, **clips)
    model, p = load(folder), Policies(stale)
    loss = by_the_paper(
        p.of(model)[0], p, grpo_advantages(stale), algorithm.clip_low, algorithm.clip_high
    )
    expected = gradients_of(loss, model)
    ours, figures = update_of(folder, stale, algorithm)
    assert distance(ours, expected) < 1e-5
    assert figures["ratio_mean"] != 1.0
    assert (figures["clip_fraction"] > 0) == (preset == "gspo" or bool(clips))


@pytest.mark.parametrize(
    ("preset", "like"),
    [("gspo", {"aggregation": "seq-mean-token-mean"}), ("cispo", {"aggregation": "token-mean"})],
)
def test_with_one_optimizer_step_gspo_and_cispo_are_not_grpo_and_dapo(folder, preset, like):
    theirs = AlgorithmConfig(**like)
    samples = make_samples()  # far from the model: CISPO's weight goes up to 5, TIS to 2
    ours, _ = update_of(folder, samples, AlgorithmConfig.preset(preset))
    clipped_ppo, _ = update_of(folder, samples, theirs)
    assert distance(ours, clipped_ppo) > 0.1
    inert, _ = update_of(folder, samples, AlgorithmConfig.preset(preset, proximal="forward"))
    assert distance(inert, clipped_ppo) < 1e-6, "the ratio to the current policy itself"


ORACLE = [
    (case, expected)
    for case in CASES
    for expected in case["losses"]
    if expected["loss"] in ("gspo", "cispo") and expected["importance"] is None
]


class GivenLogprobs:
    """A model whose log-probs of the responses are its parameters."""

    def __init__(self, values_R):
        self.values_R = values_R.requires_grad_()

    def response_logprobs(self, *_):
        return self.values_R, torch.zeros_like(self.values_R)


@pytest.mark.parametrize(("case", "expected"), ORACLE)
def test_an_update_against_the_behavior_policy_equals_an_independent_implementation(case, expected):
    mask = torch.tensor(case["mask"])
    places = mask.flatten().nonzero()[:, 0]
    old = torch.tensor(case["proximal_logprobs"])
    part = MicroBatch(
        sample_index=torch.arange(len(mask)),
        input_ids=torch.zeros(1, 1, dtype=torch.int64),
        packing=None,
        positions=places,
        targets=places,
        places=places,
        mask=mask,
        behavior_logprobs=old,
        versions=torch.zeros(mask.shape, dtype=torch.int64),
        end_ids=torch.zeros(0, dtype=torch.int64),
        is_early=torch.zeros(len(places), dtype=torch.bool),
        support=torch.zeros(len(places), 0, dtype=torch.int32),
    )
    model = GivenLogprobs(torch.tensor(case["current_logprobs"]).flatten()[places])
    algorithm = AlgorithmConfig(
        loss=expected["loss"],
        aggregation=expected["aggregation"],
        clip_low=expected["clip_low"],
        clip_high=expected["clip_high"],
        dual_clip=expected["dual_clip"],
        proximal="behavior",
    )
    advantages_BT = torch.tensor(case["advantages"][expected["advantage"]])
    advantages_B = advantages_BT[torch.arange(len(mask)), mask.argmax(1)]
    assert torch.equal(advantages_B[:, None] * mask, advantages_BT * mask)
    lengths = mask.sum(1)
    is_token_mean = expected["aggregation"] == "token-mean"
    whole = Whole(
        advantages_B=advantages_B,
        kept_B=torch.ones(len(mask)),
        normalizer=float(lengths.sum() if is_token_mean else (lengths > 0).sum()),
        policy_version=1,
        temperature=1.0,
        progress=0.0,
        mean_weight=1.0,
        loss_scale=1.0,
    )
    found = backward(model, part, Frozen(), algorithm, whole)
    assert found.sums[0].item() == pytest.approx(expected["value"], abs=1e-6)
    gradients = torch.tensor(expected["grad"]).flatten()[places]
    torch.testing.assert_close(model.values_R.grad, gradients, rtol=0, atol=1e-6)


def test_epochs_keep_the_proximal_policy_of_the_batch_s_start(folder, stale):
    algorithm = AlgorithmConfig(clip_low=0.01, clip_high=0.01)
    train = dataclasses.replace(TRAIN, epochs=2, mini_batches=2)
    (row,) = make_batches(stale, micro_batch_tokens=64, mini_batches=2)
    model = load(folder)
    optimizer = Recorder(model, moves=True)
    figures = train_step(model, optimizer, row, algorithm, train)
    assert len(optimizer.gradients) == 4

    model, p = load(folder), Policies(stale)
    by_hand = Recorder(model, moves=True)
    advantages = grpo_advantages(stale)[:, None]
    with torch.no_grad():
        proximal = p.of(model)[0]
    weights = importance_weights(proximal, p.behavior, p.mask, cap=2.0)
    half = len(stale) // 2
    clipped = 0
    for number, rows in enumerate([slice(0, half), slice(half, None)] * 2):
        ratio = (p.of(model)[0] - proximal).exp()
        costs = -torch.minimum(ratio * advantages, ratio.clamp(0.99, 1.01) * advantages)
        (costs * weights * p.mask)[rows].sum().div(p.mask[rows].sum()).backward()
        with torch.no_grad():
            outside = (ratio > 1.01) & (advantages > 0) | (ratio < 0.99) & (advantages < 0)
            clipped += (outside & (p.mask != 0))[rows].sum().item()
        by_hand.step()
        by_hand.zero_grad()
        assert distance(optimizer.gradients[number], by_hand.gradients[number]) < 1e-4
    num_tokens = p.mask.sum().item()
    assert figures["clip_fraction"] == pytest.approx(clipped / (2 * num_tokens), abs=2e-3)
    assert sum(figures["tokens_by_staleness"]) == figures["num_tokens"] == num_tokens


def test_what_separates_engine_and_trainer_is_of_the_first_epoch(folder, stale):
    """The quantiles were of all epochs, where the policy has left the one that begins the batch."""
    found = []
    for epochs in (1, 2):
        train = dataclasses.replace(TRAIN, epochs=epochs, mini_batches=2)
        (row,) = make_batches(stale, micro_batch_tokens=64, mini_batches=2)
        model = load(folder)
        algorithm = AlgorithmConfig(proximal="behavior")
        found.append(train_step(model, Recorder(model, moves=True), row, algorithm, train))
    one, two = found
    assert two["importance_ratio_quantiles"] == one["importance_ratio_quantiles"]
    assert two["ratio_quantiles"] != one["ratio_quantiles"], "of all optimizer steps"
    assert two["tokens_by_staleness"] == one["tokens_by_staleness"]


@pytest.mark.parametrize("epochs", [1, 3])
def test_a_single_mini_batch_needs_no_forward_pass_of_its_own(folder, stale, epochs):
    (row,) = make_batches(stale, micro_batch_tokens=64)
    model = load(folder)
    passes = []
    model.base_model.register_forward_hook(lambda *_: passes.append(torch.is_grad_enabled()))
    train = dataclasses.replace(TRAIN, epochs=epochs)
    train_step(model, Recorder(model), row, AlgorithmConfig(), train)
    assert passes == [True] * epochs * len(row.micro_batch_sizes)


@pytest.mark.parametrize("settings", [{}, {"entropy_coef": 0.1}])
@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean"])
def test_truncated_responses_leave_the_loss_and_nothing_else(folder, stale, aggregation, settings):
    samples = [
        dataclasses.replace(s, finish_reason=FinishReason.LENGTH) if i % 3 == 0 else s
        for i, s in enumerate(stale)
    ]
    truncated = torch.tensor([i % 3 == 0 for i in range(len(samples))])
    algorithm = AlgorithmConfig(aggregation=aggregation, overlong_filter=True, **settings)
    ours, figures = update_of(folder, samples, algorithm)

    model, p = load(folder), Policies(samples)
    logprobs, entropies = p.of(model)
    advantages = grpo_advantages(samples)[:, None]  # with the rewards of all
    weights = importance_weights(logprobs.detach(), p.behavior, p.mask, cap=2.0)
    costs = -advantages * weights * logprobs - settings.get("entropy_coef", 0.0) * entropies
    costs = (costs * p.mask)[~truncated]
    if aggregation == "token-mean":
        loss = costs.sum() / p.mask.sum()  # of all responses
    else:
        loss = (costs.sum(1) / p.mask.sum(1)[~truncated]).sum() / len(samples)
    assert distance(ours, gradients_of(loss, model)) < 1e-5
    assert figures["truncated_fraction"] == pytest.approx(truncated.float().mean().item())

    kept, _ = update_of(folder, samples, dataclasses.replace(algorithm, overlong_filter=False))
    assert distance(kept, ours) > 0.01


def test_a_loss_of_the_user_is_not_diagnosed_as_clipped(folder, stale):
    def loss(logprobs, proximal_logprobs, advantages, mask):
        del mask
        return -(logprobs - proximal_logprobs).exp() * advantages

    _, figures = update_of(folder, stale, AlgorithmConfig(loss=loss, proximal="behavior"))
    assert "clip_fraction" not in figures
    assert figures["ratio_mean"] != 1.0
