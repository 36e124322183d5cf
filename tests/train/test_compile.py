"""Compiled layers on a CPU: attention is stood in for, as flash attention needs a GPU."""

from __future__ import annotations

import weakref
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Glm4MoeConfig,
    Olmo3Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)

from ray_apr.config import AlgorithmConfig, TrainConfig
from ray_apr.core.messages import SamplingParams
from ray_apr.train import attention, fsdp, head, logprobs
from ray_apr.train import learner as learner_module
from ray_apr.train.compilation import compile_for_all_sizes
from ray_apr.train.fsdp import build_model, build_optimizer, decoder_layers
from ray_apr.train.learner import Learner, compile_ahead
from ray_apr.train.logprobs import warm_up
from ray_apr.train.spec import LearnerSpec
from ray_apr.train.step import train_step
from ray_apr.train.weight_check import WeightCheck
from tests.tiny_model import make_tiny_model
from tests.train_batches import make_batches, make_samples, process_group

CPU = torch.device("cpu")
COMPILE = torch.compile
TRAIN = TrainConfig(learning_rate=1e-3, packing="packed", compile=True, micro_batch_tokens=512)


def mean_value(q, k, v, boundaries, _boundaries, longest, _longest, **_):
    """Not attention, but with its arguments, all of which it reads."""
    return q + (k.mean() + v.mean() + boundaries[-1]) / longest


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Packed attention and compilation as on CUDA, with a compiler that only traces."""
    monkeypatch.setattr(attention, "varlen_attn", mean_value)
    cuda = torch.device("cuda")
    name = attention.attention_name(cuda, torch.bfloat16, packed=True, attention="torch")
    assert name == attention.VARLEN
    monkeypatch.setattr(fsdp, "attention_name", lambda *_, **__: name)
    graphs: list[torch.fx.GraphModule] = []

    def trace(graph, _):
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(
        torch, "compile", lambda f, *, dynamic, **_: COMPILE(f, dynamic=dynamic, backend=trace)
    )
    torch._dynamo.reset()
    yield graphs
    torch._dynamo.reset()


def test_after_the_warm_up_no_batch_has_to_be_compiled_for(tmp_path, as_on_a_gpu, monkeypatch):
    sampling = SamplingParams(temperature=0.7, min_tokens=3, stop_token_ids=(0, 5))
    folder = make_tiny_model(tmp_path / "model", hidden_size=32)
    with process_group(tmp_path):
        model = build_model(str(folder), TRAIN, CPU)
        vocabulary = model.config.vocab_size
        monkeypatch.setattr(head, "_CHUNK_LOGITS_COMPILED", 64 * vocabulary)
        head.attach_response_logprobs(model, compiled=True)
        limit = TRAIN.micro_batch_tokens
        warm_up(model, CPU, limit, packed=True, entropy_gradients=False, sampling=sampling)
        assert len(as_on_a_gpu) == 2, "layers and head, each once"
        inputs = [
            n.meta["example_value"]
            for g in as_on_a_gpu
            for n in g.graph.find_nodes(op="placeholder")
        ]
        assert torch.float64 not in {getattr(given, "dtype", None) for given in inputs}, "constants"
        wide = [x.shape for x in inputs if isinstance(x, torch.Tensor) and x.dim() > 1]
        wide = [shape for shape in wide if isinstance(shape[-2], torch.SymInt)]
        assert len(wide) >= 2 and {type(shape[-1]) for shape in wide} == {int}, "no variables"
        optimizer = build_optimizer(model, TRAIN)
        with torch._dynamo.config.patch(error_on_recompile=True):
            empty = logprobs._empty_micro_batch(True, sampling)
            (tiny,) = make_samples(num_groups=1, group_size=1, longest=1)
            (row,) = make_batches([tiny], packed=True)
            (one,) = logprobs.micro_batches(row, CPU, packed=True, sampling=sampling)
            assert len(one.targets) == 1  # known fault: the head was compiled once more for it
            for part in (empty, one):
                logprobs.response_logprobs(model, part, temperature=0.7)[0].sum().backward()
            for step, limit in enumerate((512, 200, 96, 512, 64)):
                samples = make_samples(num_segments=1 + step % 3)
                (row,) = make_batches(samples, step=step, micro_batch_tokens=limit, packed=True)
                train_step(model, optimizer, row, AlgorithmConfig(), TRAIN, sampling=sampling)


class NoValueIsRead(TorchDispatchMode):
    """On a GPU it would wait there until the device has computed it."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert function is not torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


def test_a_micro_batch_waits_nowhere_for_the_device(tmp_path, as_on_a_gpu):
    """known fault: Transformers read from the device whether samples are packed."""
    folder = make_tiny_model(tmp_path / "model", hidden_size=32)
    with process_group(tmp_path):
        model = build_model(str(folder), TRAIN, CPU)
        (row,) = make_batches(make_samples(), packed=True)
        for part in logprobs.micro_batches(row, CPU, packed=True):
            with NoValueIsRead():
                logprobs.response_logprobs(model, part)[0].sum().backward()


def test_a_weight_check_compiles_nothing(tmp_path, as_on_a_gpu):
    """known fault: the trainer compiled for 9 s in its first sync, then for 3 to 10 s before."""
    folder = make_tiny_model(tmp_path / "model", hidden_size=32)
    with process_group(tmp_path):
        check = WeightCheck(build_model(str(folder), TRAIN, CPU), TRAIN)
        check.record(1)
    assert check._record is not None and not as_on_a_gpu


@pytest.mark.parametrize(
    "train, algorithm",
    [
        (replace(TRAIN, mini_batches=2), AlgorithmConfig()),
        (TRAIN, AlgorithmConfig(importance_normalize=True)),
        (TRAIN, AlgorithmConfig(kl_coef=0.1)),
        (TRAIN, AlgorithmConfig(kl_coef=0.1, kl_in="reward")),
    ],
)
def test_a_learner_compiles_the_passes_without_gradients_where_a_step_has_some(
    tmp_path, as_on_a_gpu, train, algorithm
):
    folder = make_tiny_model(tmp_path / "model", hidden_size=32)
    spec = LearnerSpec(
        model=str(folder), train=train, algorithm=algorithm, sampling=SamplingParams(),
        max_response_tokens=64, num_replicas=1,
    )  # fmt: skip
    with process_group(tmp_path):
        learner = Learner(spec, CPU)
        with torch._dynamo.config.patch(error_on_recompile=True):
            num_graphs = len(as_on_a_gpu)
            (row,) = make_batches(
                make_samples(), step=0, micro_batch_tokens=96, packed=True,
                mini_batches=train.mini_batches,
            )  # fmt: skip
            learner.train(row)
    assert len(as_on_a_gpu) == num_graphs


@pytest.mark.parametrize(
    "train, algorithm, num_graphs",
    [
        (TRAIN, AlgorithmConfig(), 2),
        (replace(TRAIN, param_dtype="bfloat16"), AlgorithmConfig(), 2),
        (replace(TRAIN, mini_batches=2), AlgorithmConfig(kl_coef=0.1), 6),
    ],
)
def test_what_was_compiled_ahead_serves_the_whole_model(
    tmp_path, as_on_a_gpu, train, algorithm, num_graphs, monkeypatch
):
    """Layer and head, once for each kind of pass.

    known faults: a trainer beside awake engines began to compile when these were there; under FSDP,
    as with two data types, a second layer was compiled for.
    """
    built, models, attach = [], weakref.WeakSet(), fsdp.attach_response_logprobs

    def count(model, **given):
        built.append(len(decoder_layers(model)))
        models.add(model)
        attach(model, **given)

    monkeypatch.setattr(fsdp, "attach_response_logprobs", count)
    folder = make_tiny_model(tmp_path / "model", hidden_size=32, num_layers=5)
    spec = LearnerSpec(
        model=str(folder), train=train, algorithm=algorithm, sampling=SamplingParams(),
        max_response_tokens=64, num_replicas=1,
    )  # fmt: skip
    with process_group(tmp_path):
        compile_ahead(spec, CPU)
        assert len(as_on_a_gpu) == num_graphs
        assert not models, "they would have memory that the whole model needs"
        monkeypatch.setattr(learner_module, "warm_up", None)  # once is enough
        with torch._dynamo.config.patch(error_on_recompile=True):
            learner = Learner(spec, CPU, is_compiled=True)
            (row,) = make_batches(
                make_samples(), step=0, micro_batch_tokens=96, packed=True,
                mini_batches=train.mini_batches,
            )  # fmt: skip
            learner.train(row)
    assert len(as_on_a_gpu) == num_graphs
    num_models = 1 + bool(algorithm.kl_coef)
    assert built == [2] * num_models + [5] * num_models


def test_nothing_is_built_ahead_where_nothing_is_compiled(tmp_path, monkeypatch):
    monkeypatch.setattr(learner_module, "_build_models", None)
    spec = LearnerSpec(
        model="none", train=TrainConfig(), algorithm=AlgorithmConfig(), sampling=SamplingParams(),
        max_response_tokens=64, num_replicas=1,
    )  # fmt: skip
    compile_ahead(spec, CPU)


class Layer(torch.nn.Module):
    """A decoder layer by its number and the kind of its attention."""

    def __init__(self, number, kind):
        super().__init__()
        self.attention = torch.nn.Identity()
        self.attention.layer_idx, self.attention.kind = number, kind


@pytest.mark.parametrize(
    "kinds, num_layers",
    [
        (["full"], 2),
        (["full"] * 4, 2),
        (["sliding"] * 5 + ["full"], 6),
        (["linear", "full"] * 3, 2),
    ],
)
def test_as_many_layers_stay_as_have_all_kinds(kinds, num_layers):
    layers = [Layer(number, kind) for number, kind in enumerate(kinds)]
    assert fsdp._num_of_all_kinds(layers) == num_layers


@pytest.mark.parametrize(
    "config, num_layers",
    [
        (SmolLM3Config(no_rope_layer_interval=4), 4),
        (Qwen3MoeConfig(mlp_only_layers=[0, 1], num_experts=4), 3),
        (DeepseekV3Config(first_k_dense_replace=3), 4),
        (Olmo3Config(), 4),
        (Glm4MoeConfig(first_k_dense_replace=1), 2),
        (Qwen3Config(), 2),
    ],
)
def test_layers_without_positions_and_with_experts_are_kinds_of_their_own(config, num_layers):
    """known fault: only their windows told them apart, so that what was compiled ahead of the
    engines was not all that the first step needed."""
    config.num_hidden_layers = 5
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert len(decoder_layers(model)) == 5
    assert fsdp._num_of_all_kinds(decoder_layers(model)) == num_layers


def test_the_scoring_of_few_ids_is_compiled_for_all_sizes_and_temperatures():
    torch._dynamo.reset()
    score = COMPILE(head._score, backend="eager")
    layer = torch.nn.Linear(8, 40, bias=False)

    def step(rows, temperature):
        support = torch.randint(0, 40, (rows, 13), dtype=torch.int32)
        support[:, 5:] = -1
        drawn = torch.tensor(temperature), torch.zeros(0, dtype=torch.int64)
        early, targets = torch.zeros(rows, dtype=torch.bool), support[:, 0].long()
        hidden = torch.randn(rows, 8, requires_grad=True)
        logprobs, _ = score(layer, hidden, targets, *drawn, early, support, False)
        logprobs.sum().backward()

    for rows in (64, 40, 9, 1, 0):
        step(rows, 0.7)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for rows in (63, 2, 17, 1, 0):
            step(rows, 1.3)
    torch._dynamo.reset()


def test_the_compiler_is_told_not_to_guard_sizes(monkeypatch):
    told = {}
    monkeypatch.setattr(torch, "compile", lambda function, **asked: told.update(asked))
    compile_for_all_sizes(len)
    options = {"triton.mix_order_reduction_non_strict_mode": True}
    assert told == {"dynamic": True, "options": options}
