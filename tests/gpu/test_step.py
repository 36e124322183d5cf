"""A train step on CUDA: what it is given, and with its weights kept on the host."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch

from ray_apr.config import AlgorithmConfig, TrainConfig
from ray_apr.train.checkpoint import Progress, full_parameters, load_checkpoint, take_snapshot
from ray_apr.train.fsdp import build_model, build_optimizer
from ray_apr.train.logprobs import micro_batches, response_logprobs, warm_up
from ray_apr.train.recomputation import CudaMemory
from ray_apr.train.staging import Stager, trainer_state
from ray_apr.train.state_files import Scribe
from ray_apr.train.step import train_step
from ray_apr.train.tensors import compute_device, local_tensor
from ray_apr.weights.gathered import GatheredWeights
from tests.tiny_model import make_tiny_model
from tests.train_batches import make_batches, make_samples, process_group

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("packed", [False, True])
def test_a_micro_batch_is_the_same_on_the_device(packed):
    (row,) = make_batches(make_samples(), micro_batch_tokens=200, packed=packed)
    here, there = (
        micro_batches(row, torch.device(name), packed=packed) for name in ("cpu", "cuda")
    )
    assert len(here) > 1
    for part, moved in zip(here, there, strict=True):
        if packed:
            assert torch.equal(part.packing.position_ids, moved.packing.position_ids.cpu())
            assert torch.equal(part.packing.boundaries, moved.packing.boundaries.cpu())
            assert part.packing.longest == moved.packing.longest
        for name in {f.name for f in fields(part)} - {"packing"}:
            given, found = getattr(part, name), getattr(moved, name)
            assert found.is_cuda
            assert found.dtype == given.dtype
            assert torch.equal(given, found.cpu()), name


@pytest.fixture
def one_rank(tmp_path):
    torch.cuda.set_device(0)
    with process_group(tmp_path, backend="cpu:gloo,cuda:nccl"):
        yield


def test_a_micro_batch_waits_nowhere_for_the_device(tmp_path, one_rank):
    """known fault: Transformers read from the device whether samples are packed."""
    train = TrainConfig(packing="packed", compile=False, param_dtype="bfloat16")
    device = torch.device("cuda")
    model = build_model(str(make_tiny_model(tmp_path / "model")), train, device)
    (row,) = make_batches(make_samples(), packed=True)
    for part in micro_batches(row, device, packed=True):
        torch.cuda.set_sync_debug_mode("error")
        try:
            response_logprobs(model, part)[0].sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_offloaded_weights_train_and_travel_like_others(tmp_path, one_rank):
    folder = str(make_tiny_model(tmp_path / "model", hidden_size=64))
    config = TrainConfig(learning_rate=1e-3, packing="padded", compile=False, param_dtype="float32")
    found = {}
    for offload in (False, True):
        train = replace(config, cpu_offload=offload)
        model = build_model(folder, train, torch.device("cuda"))
        optimizer = build_optimizer(model, train)
        assert {p.device.type for p in model.parameters()} == {"cpu" if offload else "cuda"}
        gathered = GatheredWeights(model, bucket_mb=100_000 / 2**20, device=compute_device(model))
        for row in make_batches(make_samples(), micro_batch_tokens=200):
            figures = train_step(model, optimizer, row, AlgorithmConfig(), train)
        gathered.gather()
        weights = {name: weight.cpu() for name, weight in full_parameters(model)}
        for name, sent in gathered.named():
            assert sent.is_cuda
            assert torch.equal(sent.cpu(), weights[name])
        found[offload] = (weights, figures["loss"], figures["grad_norm"])
    (weights, loss, norm), (offloaded, its_loss, its_norm) = found[False], found[True]
    assert its_loss == pytest.approx(loss, abs=1e-6)
    assert its_norm == pytest.approx(norm, rel=1e-4)
    for name, weight in weights.items():
        torch.testing.assert_close(offloaded[name], weight, rtol=0, atol=2e-5)


def test_after_the_warm_up_no_batch_has_to_be_compiled_for(tmp_path, one_rank):
    """Of a width at which Inductor makes other kernels for batches of other sizes, if it may."""
    folder = str(make_tiny_model(tmp_path / "model", hidden_size=1024))
    train = TrainConfig(packing="packed", compile=True, param_dtype="bfloat16")
    device = torch.device("cuda")
    model = build_model(folder, train, device)
    warm_up(model, device, train.micro_batch_tokens, packed=True, entropy_gradients=False)
    optimizer = build_optimizer(model, train)
    tokens = set()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for num_groups, longest in ((16, 900), (8, 400), (4, 250), (2, 200), (1, 40), (1, 3)):
            samples = make_samples(num_groups=num_groups, longest=longest, seed=longest)
            limit = train.micro_batch_tokens
            (row,) = make_batches(samples, micro_batch_tokens=limit, packed=True)
            tokens.add(train_step(model, optimizer, row, AlgorithmConfig(), train)["num_tokens"])
    assert len(tokens) == 6


def test_what_is_cut_up_counts_as_taken():
    memory = CudaMemory(torch.device("cuda"))
    torch.cuda.empty_cache()
    before = memory.holes()
    whole = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    del whole
    assert memory.holes() == before, "it can go back to the driver"
    part = torch.empty(100 << 20, dtype=torch.uint8, device="cuda")
    assert memory.holes() - before == 156 << 20
    del part


def test_a_checkpoint_is_copied_beside_the_next_step_as_it_was(tmp_path, one_rank):
    """Into pinned memory, which the second copy finds: torch 2.11 pinned it anew each time, for
    seconds. Another process reads it there."""
    folder = str(make_tiny_model(tmp_path / "model", hidden_size=64))
    train = TrainConfig(learning_rate=1e-2, compile=False)
    model = build_model(folder, train, torch.device("cuda"))
    optimizer = build_optimizer(model, train)
    stager, places = Stager(model, optimizer), []
    for step in range(3):
        (row,) = make_batches(make_samples(seed=step), step=step, packed=True)
        train_step(model, optimizer, row, AlgorithmConfig(), train)
        state = trainer_state(model, optimizer)["model"]
        before = {name: local_tensor(weight).cpu() for name, weight in state.items()}
        stager.stage()
        train_step(model, optimizer, row, AlgorithmConfig(), train)
        copied = {name: local_tensor(w) for name, w in stager.wait()["model"].items()}
        for name, weight in before.items():
            assert torch.equal(copied[name], weight) and copied[name].is_pinned(), name
            assert not torch.equal(local_tensor(state[name]).cpu(), weight), name
        places.append([weight.data_ptr() for weight in copied.values()])
    assert places[0] == places[1] == places[2]
    scribe = Scribe(stager)
    take_snapshot(model, optimizer, Progress(step=3, policy_version=3), stager).write(
        tmp_path / "c", scribe=scribe
    )
    scribe.close()
    stager.close()
    state = trainer_state(model, optimizer)
    expected = {name: local_tensor(weight).cpu() for name, weight in state["model"].items()}
    train_step(model, optimizer, row, AlgorithmConfig(), train)
    load_checkpoint(tmp_path / "c", model, optimizer)
    found = trainer_state(model, optimizer)["model"]
    assert all(torch.equal(local_tensor(found[name]).cpu(), expected[name]) for name in expected)
