from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from ray_apr.train import head
from ray_apr.train import logprobs as module
from ray_apr.train.head import attach_response_logprobs
from ray_apr.train.logprobs import micro_batches, response_logprobs
from tests.tiny_model import make_tiny_model
from tests.train_batches import make_batches, make_samples

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = make_tiny_model(tmp_path_factory.mktemp("model"))
    loaded = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa")
    attach_response_logprobs(loaded)
    return loaded


def reference(model, sample):
    """Log-probs of one sample alone, without padding, through the model's own forward."""
    ids = torch.tensor([[*sample.prompt.token_ids, *sample.response_ids]])
    logits = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
    begin = len(sample.prompt.token_ids) - 1
    logits = logits[begin:]
    return logits.gather(1, torch.tensor(sample.response_ids)[:, None])[:, 0], logits


@pytest.mark.parametrize("packed", [False, True])
def test_equals_each_sample_alone(model, packed):
    samples = make_samples()
    (row,) = make_batches(samples, packed=packed)
    parts = micro_batches(row, CPU, packed=packed)
    assert len(parts) > 2
    seen = []
    for part in parts:
        logprobs, entropy = response_logprobs(model, part)
        assert logprobs.dtype == torch.float32
        total_entropy = 0.0
        for i, index in enumerate(part.sample_index):
            expected, logits = reference(model, samples[index])
            length = len(expected)
            torch.testing.assert_close(logprobs[i, :length], expected, rtol=1e-5, atol=1e-5)
            assert not logprobs[i, length:].any()
            assert part.mask[i].tolist() == [1.0] * length + [0.0] * (len(part.mask[i]) - length)
            behavior = part.behavior_logprobs[i]
            assert behavior[:length].tolist() == pytest.approx(samples[index].behavior_logprobs)
            assert not behavior[length:].any()
            total_entropy += -(logits.exp() * logits).sum().item()
            seen.append(index)
        assert entropy.sum().item() == pytest.approx(total_entropy, rel=1e-5)
        assert not entropy[part.mask == 0].any()
        assert not entropy.requires_grad
    assert sorted(seen) == list(range(len(samples)))


def test_chunks_of_the_head_change_neither_values_nor_gradients(model, monkeypatch):
    (row,) = make_batches(make_samples(), micro_batch_tokens=4096)
    (part,) = micro_batches(row, CPU)
    results = []
    for limit in (2**26, 5 * model.config.vocab_size):
        monkeypatch.setattr(head, "_CHUNK_LOGITS", limit)
        model.zero_grad()
        logprobs, entropy = response_logprobs(model, part)
        (logprobs * part.mask.cumsum(1)).sum().backward()
        grads = {n: p.grad.clone() for n, p in model.named_parameters()}
        results.append((logprobs.detach(), entropy, grads))
    (whole, whole_entropy, whole_grads), (chunked, entropy, grads) = results
    torch.testing.assert_close(chunked, whole)
    torch.testing.assert_close(entropy, whole_entropy)
    torch.testing.assert_close(grads, whole_grads, rtol=1e-4, atol=1e-4)


def test_logits_exist_at_response_positions_only(model, monkeypatch):
    (row,) = make_batches(make_samples(), micro_batch_tokens=4096)
    (part,) = micro_batches(row, CPU)
    shapes = []
    head = model.get_output_embeddings()
    hook = head.register_forward_hook(lambda _m, _in, out: shapes.append(tuple(out.shape)))
    response_logprobs(model, part)
    hook.remove()
    assert shapes == [(int(np.sum(row.response_lens)), model.config.vocab_size)]


def test_columns_may_be_arrays_and_micro_batches_empty(model):
    (row,) = make_batches(make_samples())
    columns = {k: np.asarray(v) if isinstance(v, list) else v for k, v in row.to_row().items()}
    columns["micro_batch_sizes"] = np.asarray([*row.micro_batch_sizes, 0])
    columns["mini_batch_sizes"] = columns["mini_batch_sizes"] + 1
    parts = micro_batches(type(row).from_row(columns), CPU)
    for part, expected in zip(parts, micro_batches(row, CPU), strict=False):
        assert torch.equal(part.input_ids, expected.input_ids)
        assert torch.equal(part.behavior_logprobs, expected.behavior_logprobs)
    model.zero_grad()
    logprobs, entropy = response_logprobs(model, parts[-1])
    logprobs.sum().backward()
    assert logprobs.tolist() == entropy.tolist() == [[0.0, 0.0]]
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_masked_tokens_are_read_but_not_predicted(model):
    samples = make_samples(num_segments=3)
    (row,) = make_batches(samples, micro_batch_tokens=4096, oldest_version=1)
    (whole,) = make_batches(samples, micro_batch_tokens=4096)
    (part,), (whole_part,) = micro_batches(row, CPU), micro_batches(whole, CPU)
    assert torch.equal(part.input_ids, whole_part.input_ids)
    assert len(part.targets) == part.mask.sum() == sum(row.loss_mask) < len(whole_part.targets)
    logprobs, _ = response_logprobs(model, part)
    expected, _ = response_logprobs(model, whole_part)
    torch.testing.assert_close(logprobs, expected * part.mask)
    for i, index in enumerate(part.sample_index):
        mask = [float(version >= 1) for version in samples[index].token_versions]
        assert part.mask[i, : len(mask)].tolist() == mask
        assert not part.mask[i, len(mask) :].any()


def test_tensors_that_move_together_keep_their_values_types_and_shapes():
    tensors = [
        torch.arange(5), torch.zeros(0, dtype=torch.int64), torch.rand(3, 4).T,
        torch.arange(7, dtype=torch.int32), torch.ones(1, 1),
    ]  # fmt: skip
    moved = list(module._move(tensors, CPU))
    assert len({t.untyped_storage().data_ptr() for t in moved}) == 1
    for tensor, other in zip(tensors, moved, strict=True):
        assert torch.equal(tensor, other)
        assert tensor.dtype == other.dtype
