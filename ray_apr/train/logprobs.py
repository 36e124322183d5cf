"""Log-probs of the tokens in the loss, under the model that is trained.

Invariants:
    * A micro-batch is packed, sample after sample in one row without padding, and attention stays
      within each sample (see `attention`); or it is padded on the right, so that causal attention
      alone keeps the padding out of every real token. Positions count from 0 in each sample.
    * A micro-batch says what could be drawn where its tokens were; `head` takes their log-probs on
      that.

Axis suffixes: `_N` samples of a micro-batch, `_L` prompt + response positions, `_T` response
tokens, `_R` tokens of the loss of all samples in a row, `_K` ids that could be drawn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from ray_apr.core.messages import SamplingParams
from ray_apr.train.attention import Packing
from ray_apr.train.fsdp import StepSync, drop_gathered
from ray_apr.train.head import METHOD
from ray_apr.train.recomputation import recomputation_of
from ray_apr.weights.plan import aligned

if TYPE_CHECKING:
    from ray_apr.config import TrainConfig
    from ray_apr.scheduling.batch import RankBatch

_PLAIN = SamplingParams()


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Samples of one forward pass."""

    sample_index: torch.Tensor
    """[N], position of each sample in the whole batch."""
    input_ids: torch.Tensor
    """[N, L], prompt then response, padded on the right with 0; or packed, [1, sum of lengths]."""
    packing: Packing | None
    """Where the samples lie in a packed row; None if it is padded."""
    positions: torch.Tensor
    """[R], where in the flattened input the tokens of the loss are predicted."""
    targets: torch.Tensor
    """[R], the response tokens that enter the loss."""
    places: torch.Tensor
    """[R], where they stand in a flattened [N, T]: a mask as index would wait for the device."""
    mask: torch.Tensor
    """[N, T], 1 for a response token that enters the loss, 0 for others and for padding."""
    behavior_logprobs: torch.Tensor
    """[N, T], float32, 0 in the padding."""
    versions: torch.Tensor
    """[N, T], policy version of each response token, 0 in the padding."""
    end_ids: torch.Tensor
    """[E], ids that could not be drawn early in a response; none if nothing forbids them."""
    is_early: torch.Tensor
    """[R], whether a token was drawn without them."""
    support: torch.Tensor
    """[R, K], ids that could be drawn, int32, filled up with -1; K = 0 if all could."""

    def to(self, device: torch.device) -> MicroBatch:
        """The same on a device, moved by one copy that the host does not wait for."""
        if device.type == "cpu":
            return self
        rows = {} if self.packing is None else self.packing.tensors()
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "packing"}
        moved = _move([*rows.values(), *own.values()], device)
        packing = self.packing and replace(self.packing, **dict(zip(rows, moved, strict=False)))
        return replace(self, packing=packing, **dict(zip(own, moved, strict=True)))


def micro_batches(
    batch: RankBatch,
    device: torch.device,
    *,
    packed: bool = False,
    sampling: SamplingParams = _PLAIN,
) -> list[MicroBatch]:
    """Cut the row of a rank (`scheduling.batch.RankBatch`) into its planned micro-batches.

    Args:
        batch: The row.
        device: Where the tensors go.
        packed: Whether samples lie in one row without padding.
        sampling: What could be drawn: with `min_tokens`, early in a response none of
            `stop_token_ids`, which are then all that end one; with `reports_support` what the row
            says.

    Raises:
        ValueError: If a token of the loss has no support where all should have one.
    """
    support_sizes = np.frombuffer(batch.support_sizes, np.uint16)
    support_begins = _begins(support_sizes.astype(np.int64))
    support_ids = np.frombuffer(batch.support_ids, np.int32)
    sizes = np.asarray(batch.micro_batch_sizes)
    prompts, responses = np.asarray(batch.prompt_lens), np.asarray(batch.response_lens)
    sequence_begins = _begins(prompts + responses)
    response_begins = _begins(responses)
    token_ids = np.asarray(batch.token_ids, dtype=np.int64)
    behavior = np.asarray(batch.behavior_logprobs, dtype=np.float32)
    loss_mask = np.asarray(batch.loss_mask, dtype=bool)
    versions = np.asarray(batch.token_versions, dtype=np.int64)
    cut = []
    for first, size in zip(_begins(sizes), sizes, strict=True):
        if size == 0:
            cut.append(_empty_micro_batch(packed, sampling).to(device))
            continue
        rows = slice(int(first), int(first + size))
        begin = response_begins[rows.start]
        cut.append(
            _micro_batch(
                sample_index=np.asarray(batch.sample_index)[rows],
                prompts_N=prompts[rows],
                responses_N=responses[rows],
                token_ids=token_ids[sequence_begins[rows.start] :],
                behavior=behavior[begin:],
                loss_mask=loss_mask[begin:],
                versions=versions[begin:],
                packed=packed,
                sampling=sampling,
                support=(support_ids, support_begins[begin:], support_sizes[begin:]),
            ).to(device)
        )
    return cut


def _end_ids(sampling: SamplingParams) -> torch.Tensor:
    """[E], what could not be drawn early in a response, where no support says it."""
    matters = sampling.min_tokens and not sampling.support_size
    return torch.tensor(sampling.stop_token_ids if matters else (), dtype=torch.int64)


def _width(sampling: SamplingParams) -> int:
    """K: what engines report, and the token itself."""
    return sampling.support_size + 1 if sampling.support_size else 0


def _support(
    support: tuple[np.ndarray, np.ndarray, np.ndarray], loss_mask: np.ndarray, width: int
) -> np.ndarray:
    """[R, K] of the tokens of the loss, from (ids, begins and sizes of each response token).

    Raises:
        ValueError: If one of them has none, or more than `width`.
    """
    ids, begins, sizes = support
    if not width:
        return np.zeros((int(loss_mask.sum()), 0), np.int32)
    is_known = len(sizes) >= len(loss_mask)
    begins_R, sizes_R = (c[: len(loss_mask)][loss_mask] if is_known else c for c in (begins, sizes))
    if not is_known or np.any((sizes_R == 0) | (sizes_R > width)):
        raise ValueError(f"a token of the loss does not say which 1 to {width} could be drawn")
    rows_RK = np.full((len(sizes_R), width), -1, np.int32)
    is_id = np.arange(width) < sizes_R[:, None]
    rows_RK[is_id] = ids[(begins_R[:, None] + np.arange(width))[is_id]]
    return rows_RK


def _empty_micro_batch(packed: bool, sampling: SamplingParams = _PLAIN) -> MicroBatch:
    """One sample without a token of the loss: keeps a rank in step with the others' collectives,
    through the code that was compiled for more."""
    return _micro_batch(
        sample_index=np.zeros(1, dtype=np.int64),
        prompts_N=np.full(1, 2),
        responses_N=np.full(1, 2),
        token_ids=np.zeros(4, dtype=np.int64),
        behavior=np.zeros(2, dtype=np.float32),
        loss_mask=np.zeros(2, dtype=bool),
        versions=np.zeros(2, dtype=np.int64),
        packed=packed,
        sampling=sampling,
        support=(np.zeros(0, np.int32), np.zeros(2, int), np.zeros(2, int)),
    )


def _micro_batch(
    *,
    sample_index: np.ndarray,
    prompts_N: np.ndarray,
    responses_N: np.ndarray,
    token_ids: np.ndarray,
    behavior: np.ndarray,
    loss_mask: np.ndarray,
    versions: np.ndarray,
    packed: bool,
    sampling: SamplingParams,
    support: tuple[np.ndarray, np.ndarray, np.ndarray],
) -> MicroBatch:
    """Pad or pack the samples whose tokens stand at the front of the flat columns."""
    lengths_N = prompts_N + responses_N
    is_response_NT = np.arange(responses_N.max()) < responses_N[:, None]
    num_responses = responses_N.sum()
    flat = token_ids[: lengths_N.sum()]
    begins_N = _begins(lengths_N)
    column = np.arange(len(flat)) - np.repeat(begins_N, lengths_N)
    """Of each token, its position in its sample."""
    width = lengths_N.max()
    if packed:
        ids, place = flat[None], np.arange(len(flat))
    else:
        ids = np.zeros((len(lengths_N), width), dtype=np.int64)
        place = np.repeat(np.arange(len(lengths_N)) * width, lengths_N) + column
        ids.reshape(-1)[place] = flat
    behavior_NT = np.zeros(is_response_NT.shape, dtype=np.float32)
    behavior_NT[is_response_NT] = behavior[:num_responses]
    mask_NT = np.zeros(is_response_NT.shape, dtype=np.float32)
    mask_NT[is_response_NT] = loss_mask[:num_responses]
    versions_NT = np.zeros(is_response_NT.shape, dtype=np.int64)
    versions_NT[is_response_NT] = versions[:num_responses]
    in_response = column - np.repeat(prompts_N, lengths_N)
    is_target = in_response >= 0
    is_target[is_target] = loss_mask[:num_responses]
    target_positions_R = place[is_target]
    return MicroBatch(
        sample_index=torch.from_numpy(sample_index.astype(np.int64)),
        input_ids=torch.from_numpy(ids),
        packing=Packing.of(lengths_N) if packed else None,
        positions=torch.from_numpy(target_positions_R - 1),
        targets=torch.from_numpy(ids.reshape(-1)[target_positions_R]),
        places=torch.from_numpy(np.flatnonzero(mask_NT)),
        mask=torch.from_numpy(mask_NT),
        behavior_logprobs=torch.from_numpy(behavior_NT),
        versions=torch.from_numpy(versions_NT),
        end_ids=_end_ids(sampling),
        is_early=torch.from_numpy(in_response[is_target] < sampling.min_tokens),
        support=torch.from_numpy(_support(support, loss_mask[:num_responses], _width(sampling))),
    )


def _move(tensors: Sequence[torch.Tensor], device: torch.device) -> Iterator[torch.Tensor]:
    """Tensors of this host on a device, as views of one buffer."""
    ends = np.cumsum([aligned(t.nbytes) for t in tensors]).tolist()
    pinned = torch.empty(ends[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
    begins = [0, *ends[:-1]]
    there = pinned.numpy()  # NumPy copies in this thread; PyTorch would wake all of its own
    for begin, tensor in zip(begins, tensors, strict=True):
        there[begin : begin + tensor.nbytes] = tensor.numpy().reshape(-1).view(np.uint8)
    moved = pinned.to(device, non_blocking=True)
    for begin, tensor in zip(begins, tensors, strict=True):
        yield moved[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)


def _begins(lengths: Sequence[int] | np.ndarray) -> np.ndarray:
    """Where each of several runs of `lengths` begins."""
    return np.concatenate(([0], np.cumsum(lengths)[:-1]))


def response_logprobs(
    model: Any, batch: MicroBatch, *, temperature: float = 1.0, entropy_gradients: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the model over a micro-batch.

    Args:
        model: A model that `head.attach_response_logprobs` has seen.
        batch: The micro-batch.
        temperature: Log-probs and entropies are those of softmax(logits / temperature).
        entropy_gradients: Whether gradients flow through the entropies, too.

    Returns:
        Log-probs [N, T] with gradients, and the entropies [N, T] of the predictions, both in
        float32 and 0 outside of the mask.
    """
    arguments = {} if batch.packing is None else batch.packing.arguments()
    # no tensors of floating point: FSDP would cast them to the data type of the parameters
    drawn = (temperature, batch.end_ids, batch.is_early, batch.support)
    values_R = getattr(model, METHOD)(
        batch.input_ids, batch.positions, batch.targets, drawn, entropy_gradients, arguments
    )
    zeros = torch.zeros_like(batch.mask).flatten()
    logprobs_NT, entropies_NT = (
        zeros.index_copy(0, batch.places, values).view_as(batch.mask) for values in values_R
    )
    return logprobs_NT, entropies_NT


def warm_up(
    model: nn.Module,
    device: torch.device,
    num_tokens: int,
    *,
    packed: bool,
    entropy_gradients: bool,
    sampling: SamplingParams = _PLAIN,
    gradients: bool = True,
) -> None:
    """Compile what forward and backward pass need, on made-up samples; gradients are dropped, and
    parameters are shards again, which passes without gradients leave gathered.

    Shapes that differ in all sizes, so that the compiler learns that each of them changes: a full
    micro-batch and smaller ones, one of a single sample and the empty one. A collective of all
    ranks.

    Args:
        model: A model that `head.attach_response_logprobs` has compiled.
        device: Where it computes.
        num_tokens: Most tokens of a micro-batch.
        packed: Whether micro-batches will be packed.
        entropy_gradients: As `response_logprobs` will be called.
        sampling: As micro-batches will have it.
        gradients: Whether there is a backward pass; without one it is other code.
    """
    whole, longest = _full_shape(model, num_tokens)
    shapes = (
        (whole, longest),
        (whole - 1, longest * 3 // 4),
        (3, longest // 4),
        (1, longest // 2),
        (2, 8),
    )
    parts = [_made_up(count, length, packed, sampling) for count, length in shapes]
    for part in (*parts, _empty_micro_batch(packed, sampling)):
        _pass(model, part.to(device), entropy_gradients=entropy_gradients, gradients=gradients)
    model.zero_grad(set_to_none=True)
    drop_gathered(model)


def measure_recomputation(
    model: nn.Module,
    device: torch.device,
    train: TrainConfig,
    *,
    entropy_gradients: bool,
    sampling: SamplingParams = _PLAIN,
) -> None:
    """Have a model find out how many layers need to compute their activations again, where it
    chooses that by itself (`recomputation`); `warm_up` comes before it where a model is compiled.
    A collective of all ranks.

    Args:
        model: A model that `head.attach_response_logprobs` has seen.
        device: Where it computes.
        train: Size of a micro-batch, packing, data types.
        entropy_gradients: As `response_logprobs` will be called.
        sampling: As micro-batches will have it.
    """
    chooses = recomputation_of(model)
    if chooses is None:
        return
    count, length = _full_shape(model, train.micro_batch_tokens)
    part = _made_up(count, length, train.packs(device.type), sampling).to(device)
    run = partial(_pass, model, part, entropy_gradients=entropy_gradients, gradients=True)
    StepSync(model, train, device).after_optimizer()  # weights are gathered before each step
    chooses.measure(run, count * length)
    model.zero_grad(set_to_none=True)
    drop_gathered(model)


def _full_shape(model: Any, num_tokens: int) -> tuple[int, int]:
    """Samples of a full micro-batch, and the tokens of each."""
    config = model.config.get_text_config()
    longest = min(getattr(config, "max_position_embeddings", num_tokens), max(64, num_tokens // 8))
    return max(8, num_tokens // longest), longest


def _made_up(count: int, length: int, packed: bool, sampling: SamplingParams) -> MicroBatch:
    """So many samples of one length, all of them response but for two tokens."""
    total, responses = count * length, count * (length - 2)
    return _micro_batch(
        sample_index=np.arange(count),
        prompts_N=np.full(count, 2),
        responses_N=np.full(count, length - 2),
        token_ids=np.zeros(total, dtype=np.int64),
        behavior=np.zeros(responses, dtype=np.float32),
        loss_mask=np.ones(responses, dtype=bool),
        versions=np.zeros(responses, dtype=np.int64),
        packed=packed,
        sampling=sampling,
        support=(np.zeros(1, np.int32), np.zeros(responses, int), np.ones(responses, int)),
    )


def _pass(model: nn.Module, part: MicroBatch, *, entropy_gradients: bool, gradients: bool) -> None:
    """Forward, and backward where asked for."""
    with torch.set_grad_enabled(gradients):
        logprobs, _ = response_logprobs(model, part, entropy_gradients=entropy_gradients)
    if gradients:
        logprobs.sum().backward()
