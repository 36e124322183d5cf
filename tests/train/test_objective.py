"""Every setting of the objective, on a whole update: equal to the plain formulas on the batch."""

from __future__ import annotations

import dataclasses
import math
import re

import numpy as np
import pytest
import torch

from ray_apr.algorithms import (
    group_advantages,
    icepop_weights,
    importance_weights,
    kl_estimate,
    rejection_mask,
)
from ray_apr.algorithms.advantages import overlong_penalties
from ray_apr.algorithms.losses import aggregate, policy_costs
from ray_apr.config import AlgorithmConfig
from ray_apr.core.exceptions import TrainError
from ray_apr.train.figures import Totals
from ray_apr.train.step import train_step
from tests.code_blocks import ROOT, blocks
from tests.plain_policies import TRAIN, Policies, Recorder, distance, gradients_of, load
from tests.tiny_model import make_tiny_model
from tests.train_batches import make_batches, make_samples

VERSION = 3
PAGE = ROOT / "docs/objectives.md"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"), hidden_size=32)


@pytest.fixture(scope="module")
def reference_folder(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("reference"), hidden_size=32, seed=1)


def weights_of(config, proximal, p):
    if config.importance is None or config.proximal == "behavior":
        return torch.ones_like(p.mask)
    if config.importance == "icepop":
        low, high = config.icepop_bounds
        return icepop_weights(proximal, p.behavior, p.mask, low=low, high=high)
    return importance_weights(
        proximal,
        p.behavior,
        p.mask,
        level=config.importance,
        cap=config.importance_cap,
        batch_normalize=config.importance_normalize,
    )


def expected_loss(config, model, reference, p, *, proximal=None, rows=slice(None)):
    """The loss of some rows of the batch, from the formulas alone."""
    logprobs, entropies = p.of(model)
    proximal = logprobs.detach() if proximal is None else proximal
    if config.proximal == "behavior":
        proximal = p.behavior
    kl = torch.zeros_like(p.mask)
    if reference is not None:
        with torch.no_grad():
            reference_logprobs = p.of(reference)[0]
        kl = kl_estimate(logprobs, reference_logprobs, config.kl)
    rewards = p.rewards
    if config.kl_in == "reward" and reference is not None:
        total = kl_estimate(proximal, reference_logprobs, config.kl) * p.mask
        rewards = rewards - config.kl_coef * total.sum(1).double()
    advantages = group_advantages(rewards, p.groups, p.mask, config.advantage).float()
    costs = policy_costs(
        logprobs,
        proximal,
        advantages,
        p.mask,
        loss=config.loss,
        clip_low=config.clip_low,
        clip_high=config.clip_high,
        dual_clip=config.dual_clip,
    )
    costs = costs * weights_of(config, proximal, p)
    if config.rejection is not None:
        kept = rejection_mask(
            proximal, p.behavior, p.mask, metric=config.rejection, bound=config.rejection_bound
        )
        costs = costs * kept
    if config.kl_in == "loss" and reference is not None:
        costs = costs + config.kl_coef * kl
    costs = costs - config.entropy_coef * entropies
    return aggregate(costs[rows], p.mask[rows], config.aggregation)


OBJECTIVES = {
    **{
        name: AlgorithmConfig.preset(name)
        for name in ("grpo", "dapo", "gspo", "cispo", "dr_grpo", "rloo", "reinforce_plus_plus")
    },
    "plain ppo": AlgorithmConfig(proximal="behavior"),
    "behavior gspo": AlgorithmConfig.preset("gspo", proximal="behavior"),
    "dual clip": AlgorithmConfig(proximal="behavior", dual_clip=1.5),
    "not truncated": AlgorithmConfig(importance_cap=None),
    "not weighted": AlgorithmConfig(importance=None),
    "sequence": AlgorithmConfig(importance="sequence", importance_cap=5.0),
    "normalized": AlgorithmConfig(importance_normalize=True),
    "normalized sequence": AlgorithmConfig(importance="sequence", importance_normalize=True),
    "icepop": AlgorithmConfig(importance="icepop", icepop_bounds=(0.1, 4.0)),
    "token rejection": AlgorithmConfig(rejection="token_k1", rejection_bound=(0.05, 3.0)),
    "sequence rejection": AlgorithmConfig(rejection="seq_mean_k3", rejection_bound=1.0),
    "kl": AlgorithmConfig(kl_coef=0.1),
    "kl in reward": AlgorithmConfig(kl_coef=0.01, kl_in="reward", kl="k1"),
    "entropy": AlgorithmConfig(entropy_coef=0.05),
}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_an_update_has_the_gradients_of_the_formulas(folder, reference_folder, name):
    config = OBJECTIVES[name]
    model, p = load(folder), Policies(make_samples())
    reference = load(reference_folder) if config.needs_reference else None
    loss = expected_loss(config, model, reference, p)
    expected = gradients_of(loss, model)
    for micro_batch_tokens, packing in ((64, "padded"), (4096, "packed")):
        (row,) = make_batches(
            p.samples, micro_batch_tokens=micro_batch_tokens, packed=packing == "packed"
        )
        optimizer = Recorder(model)
        train = dataclasses.replace(TRAIN, packing=packing)
        figures = train_step(model, optimizer, row, config, train, reference=reference)
        assert figures["loss"] == pytest.approx(loss.item(), rel=1e-4, abs=1e-6)
        assert distance(optimizer.gradients[0], expected) < 1e-5


@pytest.mark.parametrize("name", ["dapo", "gspo", "normalized", "kl in reward"])
def test_mini_batches_keep_the_proximal_policy_of_the_batch(folder, reference_folder, name):
    config = OBJECTIVES[name]
    p = Policies(make_samples())
    (row,) = make_batches(p.samples, micro_batch_tokens=64, mini_batches=2)
    model = load(folder)
    reference = load(reference_folder) if config.needs_reference else None
    optimizer = Recorder(model, moves=True)
    figures = train_step(model, optimizer, row, config, TRAIN, reference=reference)
    assert len(optimizer.gradients) == 2
    assert figures["ratio_mean"] != 1.0, "the second half is trained by a changed model"

    model = load(folder)
    by_hand = Recorder(model, moves=True)
    with torch.no_grad():
        proximal = p.of(model)[0]
    half = len(p.samples) // 2
    for number, rows in enumerate((slice(0, half), slice(half, None))):
        loss = expected_loss(config, model, reference, p, proximal=proximal, rows=rows)
        loss.backward()
        by_hand.step()
        by_hand.zero_grad()
        assert distance(optimizer.gradients[number], by_hand.gradients[number]) < 1e-4


@pytest.mark.parametrize(("normalizes", "in_all"), [(False, False), (True, True)])
def test_the_first_mini_batch_needs_no_pass_of_its_own(folder, normalizes, in_all):
    config = AlgorithmConfig(importance_normalize=normalizes)
    (row,) = make_batches(make_samples(), micro_batch_tokens=64, mini_batches=2)
    first, second = row.mini_batch_sizes
    model = load(folder)
    passes = []
    model.base_model.register_forward_hook(lambda *_: passes.append(torch.is_grad_enabled()))
    train_step(model, Recorder(model), row, config, TRAIN)
    assert passes.count(True) == first + second
    assert passes.count(False) == second + (first if in_all else 0)


def test_interpolated_proximal_is_between_behavior_and_current_by_version(folder):
    config = AlgorithmConfig(proximal="interpolated", importance=None, clip_high=10.0)
    p = Policies(make_samples())
    (row,) = make_batches(p.samples, mini_batches=2)
    model = load(folder)
    optimizer = Recorder(model, moves=True)
    train_step(model, optimizer, row, config, TRAIN)

    model = load(folder)
    by_hand = Recorder(model, moves=True)
    half = len(p.samples) // 2
    for progress, rows in ((0.0, slice(0, half)), (0.5, slice(half, None))):
        with torch.no_grad():
            current = p.of(model)[0]
            age = VERSION - p.versions
            alpha = age / (age + progress)  # (v_prox - v_b) / (v - v_b), versions from VERSION on
            proximal = p.behavior + alpha * (current - p.behavior)
        expected_loss(config, model, None, p, proximal=proximal, rows=rows).backward()
        by_hand.step()
        by_hand.zero_grad()
    assert distance(optimizer.gradients[1], by_hand.gradients[1]) < 1e-4


def test_functions_of_the_user_take_the_places_of_loss_and_advantage(folder):
    seen = {}

    def advantage(rewards, groups):
        seen["advantage"] = (rewards, groups)
        return rewards - rewards.mean()

    def loss(logprobs, proximal_logprobs, advantages, mask):
        seen["loss"] = (proximal_logprobs, mask)
        return -logprobs * advantages

    p = Policies(make_samples())
    model = load(folder)
    config = AlgorithmConfig(advantage=advantage, loss=loss, importance=None)
    (row,) = make_batches(p.samples)
    optimizer = Recorder(model)
    train_step(model, optimizer, row, config, TRAIN)
    advantages = (p.rewards - p.rewards.mean()).float()[:, None]
    expected = aggregate(-p.of(model)[0] * advantages, p.mask, "token-mean")
    assert distance(optimizer.gradients[0], gradients_of(expected, model)) < 1e-5
    assert torch.equal(seen["advantage"][1], p.groups)
    assert seen["loss"][0].shape == seen["loss"][1].shape


def test_a_loss_of_the_users_may_return_at_once_where_no_token_is_trained(folder):
    """Known fault: a micro-batch without any ended the run, as its costs had no gradients."""

    def loss(logprobs, proximal_logprobs, advantages, mask):
        return -logprobs * advantages if mask.any() else torch.zeros_like(mask)

    (row,) = make_batches(make_samples(), micro_batch_tokens=1, oldest_version=2)
    assert 0 in row.all_loss_lens
    figures = []
    for of_user in (loss, lambda log, p, a, m: -log * a):
        model = load(folder)
        config = AlgorithmConfig(loss=of_user)
        figures.append(train_step(model, Recorder(model), row, config, TRAIN))
    assert figures[0] == figures[1] and figures[0]["grad_norm"] > 0


def decoupled(logprobs, proximal_logprobs, advantages, mask, *, behavior_logprobs, floor=0.0):
    """A loss that corrects for the age of the tokens itself, and says how far it had to."""
    age = (proximal_logprobs - behavior_logprobs).exp().clamp(min=floor, max=2.0)
    costs = -(logprobs - proximal_logprobs).exp() * advantages * age
    return costs, {"age": age, "is_old": (age > 1.2).float()}


@pytest.mark.parametrize("packing", ["padded", "packed"])
def test_a_loss_of_the_users_has_arguments_behavior_logprobs_and_figures(folder, packing):
    p = Policies(make_samples())
    config = AlgorithmConfig(loss=decoupled, loss_kwargs={"floor": 0.6}, importance=None)
    for micro_batch_tokens in (64, 4096):
        (row,) = make_batches(
            p.samples, micro_batch_tokens=micro_batch_tokens, packed=packing == "packed"
        )
        model = load(folder)
        train = dataclasses.replace(TRAIN, packing=packing)
        optimizer = Recorder(model)
        figures = train_step(model, optimizer, row, config, train)
        advantages = group_advantages(p.rewards, p.groups, p.mask, "grpo").float()
        current = p.of(model)[0]
        costs, told = decoupled(
            current, current.detach(), advantages, p.mask, behavior_logprobs=p.behavior, floor=0.6
        )
        assert 0 < told["is_old"][p.mask > 0].mean() < 1
        expected = gradients_of(aggregate(costs, p.mask, "token-mean"), model)
        assert distance(optimizer.gradients[0], expected) < 1e-5
        for name, values in told.items():
            mean = (values * p.mask).sum().item() / p.mask.sum().item()
            assert figures[f"loss/{name}"] == pytest.approx(mean, rel=1e-4), name


def truncated(proximal_logprobs, behavior_logprobs, mask, cap):
    return (proximal_logprobs - behavior_logprobs).exp().clamp(max=cap)


def test_a_correction_of_the_users_weighs_like_the_one_that_is_built_in(folder):
    gradients, figures = [], []
    for config in (
        AlgorithmConfig(correction=truncated, correction_kwargs={"cap": 1.3}),
        AlgorithmConfig(importance="token", importance_cap=1.3),
    ):
        model = load(folder)
        optimizer = Recorder(model)
        (row,) = make_batches(make_samples(), micro_batch_tokens=64)
        figures.append(train_step(model, optimizer, row, config, TRAIN))
        gradients.append(optimizer.gradients[0])
    assert distance(*gradients) < 1e-6
    assert figures[0]["importance_weight_mean"] == pytest.approx(
        figures[1]["importance_weight_mean"]
    )
    assert figures[0]["importance_capped_fraction"] == 0 < figures[1]["importance_capped_fraction"]


def functions_of_the_docs() -> dict:
    (block,) = [b for b in blocks(PAGE) if b.name == "my_file.py"]
    own: dict = {"AlgorithmConfig": AlgorithmConfig}
    exec(compile(block.text, str(block), "exec"), own)
    return own


def test_the_functions_of_the_docs_are_given_in_python_as_the_page_says():
    """Known fault: it gave an argument that the loss beside it does not take."""
    (given,) = re.findall(r"`(AlgorithmConfig\(.+?\))`", PAGE.read_text())
    own = functions_of_the_docs()
    assert eval(given, own).loss is own["loss"]


def test_the_functions_of_the_docs_weigh_a_stale_token_once(folder):
    """Known fault: the loss of the page had the ratio that its correction has, too."""
    own = functions_of_the_docs()
    p = Policies(make_samples())
    model = load(folder)
    config = AlgorithmConfig(
        advantage=own["advantage"],
        advantage_kwargs={"scale": 0.5},
        loss=own["loss"],
        loss_kwargs={"most": 99.0},
        correction=own["correction"],
        correction_kwargs={"cap": 1.5},
    )
    (row,) = make_batches(p.samples)
    optimizer = Recorder(model)
    train_step(model, optimizer, row, config, TRAIN)
    current = p.of(model)[0]
    weights = (current.detach() - p.behavior).exp().clamp(max=1.5)
    advantages = 0.5 * (p.rewards - p.rewards.mean()).float()[:, None]
    expected = gradients_of(aggregate(-current * advantages * weights, p.mask, "token-mean"), model)
    assert distance(optimizer.gradients[0], expected) < 1e-5


def near_loss(logprobs, proximal_logprobs, advantages, mask, *, behavior_logprobs):
    near = (proximal_logprobs - behavior_logprobs).exp() < 2
    return -(logprobs - proximal_logprobs.clamp(min=-3)).exp() * advantages * near


def near_loss_in_place(logprobs, proximal_logprobs, advantages, mask, *, behavior_logprobs):
    behavior_logprobs.sub_(proximal_logprobs)
    proximal_logprobs.clamp_(min=-3)
    mask *= behavior_logprobs.neg_().exp_() < 2
    advantages *= mask
    return -logprobs.sub_(proximal_logprobs).exp() * advantages


def near_weights(proximal_logprobs, behavior_logprobs, mask):
    ratio = (proximal_logprobs - behavior_logprobs).exp()
    return ratio * (ratio < 2)


def near_weights_in_place(proximal_logprobs, behavior_logprobs, mask):
    ratio = proximal_logprobs.sub_(behavior_logprobs).exp_()
    mask *= ratio < 2
    behavior_logprobs.zero_()
    return ratio * mask


@pytest.mark.parametrize(
    ("name", "plain", "in_place"),
    [
        ("loss", near_loss, near_loss_in_place),
        ("correction", near_weights, near_weights_in_place),
    ],
)
def test_functions_of_the_users_may_change_what_they_are_given(folder, name, plain, in_place):
    """Known fault: masks, denominators and the policies of later epochs were changed with it."""
    (row,) = make_batches(make_samples(), micro_batch_tokens=64)
    train = dataclasses.replace(TRAIN, epochs=2)
    found = []
    for function in (plain, in_place):
        model = load(folder)
        config = AlgorithmConfig(aggregation="seq-mean-token-mean", **{name: function})
        optimizer = Recorder(model, moves=True)
        figures = train_step(model, optimizer, row, config, train)
        found.append((optimizer.gradients, figures))
    (expected, expected_figures), (gradients, figures) = found
    for ours, theirs in zip(gradients, expected, strict=True):
        assert distance(ours, theirs) < 1e-5
    for figure, value in expected_figures.items():
        assert figures[figure] == pytest.approx(value, rel=1e-4, abs=1e-6), figure


def test_a_loss_whose_figures_change_their_names_is_an_error(folder):
    calls = iter(range(99))

    def loss(logprobs, proximal_logprobs, advantages, mask):
        return -logprobs * advantages, {"late": logprobs} if next(calls) else {}

    (row,) = make_batches(make_samples(), micro_batch_tokens=64)
    model = load(folder)
    with pytest.raises(TrainError, match=r"figures of other names.*late"):
        train_step(model, Recorder(model), row, AlgorithmConfig(loss=loss), TRAIN)
    exchanged = [torch.zeros(2, 200, dtype=torch.float64)]
    exchanged[0][:, -1] = torch.tensor([1.0, 2.0])
    of_two_ranks = Totals(torch.zeros(3), exchanged=exchanged, of_loss=("a",))
    with pytest.raises(TrainError, match=r"figures of other names.*from rank to rank.*'a'"):
        of_two_ranks.figures(0)


def test_an_advantage_of_the_users_has_arguments(folder):
    (row,) = make_batches(make_samples())
    gradients = []
    for scale in (1.0, 2.0):
        model = load(folder)
        optimizer = Recorder(model)
        config = AlgorithmConfig(
            advantage=lambda rewards, groups, scale: (rewards - rewards.mean()) * scale,
            advantage_kwargs={"scale": scale},
        )
        train_step(model, optimizer, row, config, TRAIN)
        gradients.append(optimizer.gradients[0])
    assert distance([2 * g for g in gradients[0]], gradients[1]) < 1e-5


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"loss": lambda log, p, a, m: log.sum()},
            r"algorithm\.loss returned shape \(\), not shape",
        ),
        ({"loss": lambda log, p, a, m: (-log * a, {"x": log[:1]})}, r"figure 'x'"),
        (
            {"loss": lambda log, p, a, m: (-log * a, {str(i): log for i in range(17)})},
            "17 figures; at most 16",
        ),
        (
            {"loss": lambda log, p, a, m: (-log * a, {"x": log * math.nan})},
            "'x' of algorithm.loss is nan",
        ),
        ({"loss": lambda log, p, a, m: (-log * a, None)}, r"algorithm\.loss returned tuple, not"),
        ({"loss": lambda log, p, a, m: 3.0}, r"algorithm\.loss returned float, not"),
        ({"loss": lambda log, p, a, m: -log.detach() * a}, "returned costs without gradients"),
        ({"correction": lambda p, b, m: None}, r"algorithm\.correction returned NoneType"),
    ],
)
def test_what_functions_of_the_users_must_not_return_is_an_error(folder, settings, said):
    (row,) = make_batches(make_samples(), micro_batch_tokens=64)
    model = load(folder)
    with pytest.raises(TrainError, match=said):
        train_step(model, Recorder(model), row, AlgorithmConfig(**settings), TRAIN)


def test_an_advantage_function_that_returns_something_else_is_an_error(folder):
    config = AlgorithmConfig(advantage=lambda rewards, groups: rewards[:2])
    (row,) = make_batches(make_samples())
    model = load(folder)
    with pytest.raises(TrainError, match=r"shape \(2,\), not shape \(16,\)"):
        train_step(model, Recorder(model), row, config, TRAIN)


def test_overlong_responses_are_punished(folder):
    samples = make_samples()
    limit, buffer = 24, 8
    config = AlgorithmConfig(overlong_buffer_tokens=buffer, overlong_penalty=0.5)
    shaped = [
        dataclasses.replace(
            s, reward=s.reward - 0.5 * min(1.0, max(0.0, (s.num_tokens - limit + buffer) / buffer))
        )
        for s in samples
    ]
    gradients = []
    for given, settings in ((samples, config), (shaped, AlgorithmConfig())):
        model = load(folder)
        optimizer = Recorder(model)
        (row,) = make_batches(given)
        train_step(model, optimizer, row, settings, TRAIN, max_response_tokens=limit)
        gradients.append(optimizer.gradients[0])
    assert any(s.reward != t.reward for s, t in zip(samples, shaped, strict=True))
    assert distance(*gradients) < 1e-6


def test_overlong_penalties_of_the_paper():
    lengths = torch.tensor([1.0, 16.0, 18.0, 20.0, 25.0])
    got = overlong_penalties(lengths, max_tokens=20, buffer_tokens=4)
    assert got.tolist() == [0.0, 0.0, -0.5, -1.0, -1.0]


@pytest.mark.parametrize("name", ["forward", "interpolated", "behavior"])
def test_the_gap_of_engine_and_trainer_does_not_grow_with_the_optimizer_steps(folder, name):
    """known fault: without a pass at the update's start, the gap was that to a moved model."""
    model, samples = load(folder), make_samples()
    with torch.no_grad():
        logprobs_BT = Policies(samples).of(model)[0]
    samples = [
        dataclasses.replace(
            sample,
            segments=(
                dataclasses.replace(
                    sample.segments[0],
                    policy_version=VERSION,
                    logprobs=tuple(row_T[: sample.num_tokens].tolist()),
                ),
            ),
        )
        for sample, row_T in zip(samples, logprobs_BT, strict=True)
    ]
    (row,) = make_batches(samples, mini_batches=2)
    optimizer = Recorder(model, moves=True)
    train = dataclasses.replace(TRAIN, mini_batches=2, epochs=2)
    figures = train_step(model, optimizer, row, AlgorithmConfig(proximal=name), train)
    assert max(figures["ratio_quantiles"]) > 1.01, "the model moves"
    assert figures["kl_k3"] == pytest.approx(0.0, abs=1e-9)
    assert figures["kl_k3_by_staleness"] == pytest.approx([0.0], abs=1e-9)
    assert figures["importance_ratio_quantiles"] == pytest.approx([1.0] * 3, abs=1e-4)
    assert figures["effective_sample_size"] == pytest.approx(1.0, abs=1e-6)
    assert figures["tokens_by_staleness"] == [sum(row.loss_mask)]


def test_diagnostics_of_engine_and_trainer_by_staleness(folder):
    p = Policies(make_samples())
    model = load(folder)
    (row,) = make_batches(p.samples, micro_batch_tokens=64)
    figures = train_step(model, Recorder(model), row, AlgorithmConfig(), TRAIN)
    with torch.no_grad():
        log_ratio = (p.of(model)[0] - p.behavior).double()
    kept = p.mask != 0
    log_ratio, ages = log_ratio[kept].numpy(), (VERSION - p.versions)[kept].numpy()
    ratio = np.exp(log_ratio)
    k3 = ratio - log_ratio - 1
    assert figures["kl_k3"] == pytest.approx(k3.mean(), rel=1e-4)
    assert figures["chi2"] == pytest.approx((ratio**2).mean() - 1, rel=1e-4)
    size = ratio.sum() ** 2 / (len(ratio) * (ratio**2).sum())
    assert figures["effective_sample_size"] == pytest.approx(size, rel=1e-4)
    assert figures["importance_ratio_quantiles"] == pytest.approx(
        np.quantile(ratio, [0.01, 0.5, 0.99]).tolist(), rel=1e-4
    )
    assert figures["ratio_quantiles"] == [1.0, 1.0, 1.0]
    for age in range(1, 4):
        of_age = ages == age
        assert figures["tokens_by_staleness"][age] == of_age.sum()
        assert figures["kl_k3_by_staleness"][age] == pytest.approx(k3[of_age].mean(), rel=1e-4)
        assert figures["chi2_by_staleness"][age] == pytest.approx(
            (ratio[of_age] ** 2).mean() - 1, rel=1e-4
        )
    assert figures["tokens_by_staleness"][0] == 0


def test_rejected_and_capped_tokens_are_counted(folder):
    p = Policies(make_samples())
    model = load(folder)
    (row,) = make_batches(p.samples)
    config = AlgorithmConfig(rejection="token_k1", rejection_bound=(0.05, 3.0))
    figures = train_step(model, Recorder(model), row, config, TRAIN)
    with torch.no_grad():
        ratio = (p.of(model)[0] - p.behavior).exp()[p.mask != 0]
    outside = ((ratio < 0.05) | (ratio > 3.0)).float().mean().item()
    assert 0 < figures["rejected_fraction"] == pytest.approx(outside)
    capped = (ratio >= 2.0).float().mean().item()
    assert 0 < figures["importance_capped_fraction"] == pytest.approx(capped)
    for cap in (1.3, 1.5, 1.7, 2.3, 3.1):  # a weight at the cap is there whatever it is divided by
        config = AlgorithmConfig(importance_cap=cap, importance_normalize=True)
        figures_of_cap = train_step(model, Recorder(model), row, config, TRAIN)
        capped = (ratio >= cap).float().mean().item()
        assert figures_of_cap["importance_capped_fraction"] == pytest.approx(capped)
    assert math.isfinite(figures["loss"])
