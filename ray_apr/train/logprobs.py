"""Log-probs of the tokens in the loss, under the model that is trained.

Invariants:
    * A micro-batch is packed, sample after sample in one row without padding, and attention stays
      within each sample (see `attention`); or it is padded on the right, so that causal attention
      alone keeps the padding out of every real token. Positions count from 0 in each sample.
    * Logits exist only at positions that predict a token of the loss, and no more than
      `_CHUNK_LOGITS` (`_CHUNK_LOGITS_COMPILED`) of them at a time; larger micro-batches compute
      them again in the backward pass.
    * Log-probs are those of the distribution that the engines draw from, whose log-probs they hand
      out: of logits / temperature, and early in a response without what would end it; in float32
      whatever the forward pass runs in.

Axis suffixes: `_N` samples of a micro-batch, `_L` prompt + response positions, `_T` response
tokens, `_R` tokens of the loss of all samples in a row, `_V` vocabulary.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.utils.checkpoint import checkpoint

from ray_apr.train.attention import Packing
from ray_apr.train.compilation import compile_for_all_sizes
from ray_apr.weights.plan import aligned

if TYPE_CHECKING:
    from ray_apr.data.batch import RankBatch

_CHUNK_LOGITS = 2**26
_CHUNK_LOGITS_COMPILED = 2**28
"""A compiled chunk makes no float32 copies of its logits, and large ones keep a GPU busier."""
_METHOD = "response_logprobs"
_FORBIDDEN = -1e30
"""Logit of an id that cannot be drawn: no probability, and none of infinity's traps."""


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
    min_tokens: int = 0,
    end_ids: Sequence[int] = (),
) -> list[MicroBatch]:
    """Cut the row of a rank (`data.batch.RankBatch`) into its planned micro-batches.

    Args:
        batch: The row.
        device: Where the tensors go.
        packed: Whether samples lie in one row without padding.
        min_tokens: Response tokens that were drawn without `end_ids`.
        end_ids: Ids that end a response.
    """
    ends = _Ends(min_tokens, tuple(end_ids) if min_tokens else ())
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
            cut.append(_empty_micro_batch(ends).to(device))
            continue
        rows = slice(int(first), int(first + size))
        cut.append(
            _micro_batch(
                sample_index=np.asarray(batch.sample_index)[rows],
                prompts_N=prompts[rows],
                responses_N=responses[rows],
                token_ids=token_ids[sequence_begins[rows.start] :],
                behavior=behavior[response_begins[rows.start] :],
                loss_mask=loss_mask[response_begins[rows.start] :],
                versions=versions[response_begins[rows.start] :],
                packed=packed,
                ends=ends,
            ).to(device)
        )
    return cut


class _Ends(NamedTuple):
    """Ids that were not drawn among the first tokens of a response."""

    min_tokens: int
    ids: tuple[int, ...]


_NO_ENDS = _Ends(0, ())


def _empty_micro_batch(ends: _Ends = _NO_ENDS) -> MicroBatch:
    """One position and no response: keeps a rank in step with the others' collectives."""
    return MicroBatch(
        sample_index=torch.zeros(1, dtype=torch.int64),
        input_ids=torch.zeros(1, 1, dtype=torch.int64),
        packing=None,
        positions=torch.zeros(0, dtype=torch.int64),
        targets=torch.zeros(0, dtype=torch.int64),
        places=torch.zeros(0, dtype=torch.int64),
        mask=torch.zeros(1, 1),
        behavior_logprobs=torch.zeros(1, 1),
        versions=torch.zeros(1, 1, dtype=torch.int64),
        end_ids=torch.tensor(ends.ids, dtype=torch.int64),
        is_early=torch.zeros(0, dtype=torch.bool),
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
    ends: _Ends = _NO_ENDS,
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
        end_ids=torch.tensor(ends.ids, dtype=torch.int64),
        is_early=torch.from_numpy(in_response[is_target] < ends.min_tokens),
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


def attach_response_logprobs(model: nn.Module, *, compiled: bool = False) -> None:
    """Give a causal language model the method that `response_logprobs` calls.

    Under FSDP2 the method counts as a forward pass of the root, which gathers the head's weights;
    calling the base model and the head from outside would not.

    Args:
        model: The model.
        compiled: Whether the scoring of the head's logits is compiled into few kernels.
    """
    score, chunk_logits = _score, _CHUNK_LOGITS
    if compiled:
        score, chunk_logits = compile_for_all_sizes(_score), _CHUNK_LOGITS_COMPILED
    method = partial(_response_logprobs, score, chunk_logits)
    setattr(model, _METHOD, types.MethodType(method, model))
    register_fsdp_forward_method(model, _METHOD)


def response_logprobs(
    model: Any, batch: MicroBatch, *, temperature: float = 1.0, entropy_gradients: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the model over a micro-batch.

    Args:
        model: A model that `attach_response_logprobs` has seen.
        batch: The micro-batch.
        temperature: Log-probs and entropies are those of softmax(logits / temperature).
        entropy_gradients: Whether gradients flow through the entropies, too.

    Returns:
        Log-probs [N, T] with gradients, and the entropies [N, T] of the predictions, both in
        float32 and 0 outside of the mask.
    """
    arguments = {} if batch.packing is None else batch.packing.arguments()
    # no tensors of floating point: FSDP would cast them to the data type of the parameters
    drawn = (temperature, batch.end_ids, batch.is_early)
    values_R = getattr(model, _METHOD)(
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
    end_ids: Sequence[int] = (),
) -> None:
    """Compile what forward and backward pass need, on made-up samples; gradients are dropped.

    Shapes that differ in all sizes, so that the compiler learns that each of them changes: a full
    micro-batch and smaller ones, one of a single sample and the empty one. A collective of all
    ranks.

    Args:
        model: A model that `attach_response_logprobs` has compiled.
        device: Where it computes.
        num_tokens: Most tokens of a micro-batch.
        packed: Whether micro-batches will be packed.
        entropy_gradients: As `response_logprobs` will be called.
        end_ids: As micro-batches will have them.
    """
    config: Any = model.config
    context = getattr(config.get_text_config(), "max_position_embeddings", num_tokens)
    longest = min(context, max(64, num_tokens // 8))
    whole = max(8, num_tokens // longest)
    shapes = (
        (whole, longest),
        (whole - 1, longest * 3 // 4),
        (3, longest // 4),
        (1, longest // 2),
        (2, 8),
    )
    parts, ends = [], _Ends(1, tuple(end_ids))
    for count, length in shapes:
        total, responses = count * length, count * (length - 2)
        part = _micro_batch(
            sample_index=np.arange(count),
            prompts_N=np.full(count, 2),
            responses_N=np.full(count, length - 2),
            token_ids=np.zeros(total, dtype=np.int64),
            behavior=np.zeros(responses, dtype=np.float32),
            loss_mask=np.ones(responses, dtype=bool),
            versions=np.zeros(responses, dtype=np.int64),
            packed=packed,
            ends=ends,
        )
        parts.append(part)
    for part in (*parts, _empty_micro_batch(ends)):
        logprobs, _ = response_logprobs(model, part.to(device), entropy_gradients=entropy_gradients)
        logprobs.sum().backward()
    model.zero_grad(set_to_none=True)


def _response_logprobs(
    score: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    chunk_logits: int,
    model: Any,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    targets: torch.Tensor,
    drawn: tuple[float, torch.Tensor, torch.Tensor],
    entropy_gradients: bool,
    arguments: Mapping[str, Any],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs [R] of `targets`, and the entropies [R]."""
    output = model.base_model(input_ids=input_ids, use_cache=False, **arguments)
    hidden = output.last_hidden_state.flatten(0, 1)
    head = model.get_output_embeddings()
    temperature, end_ids, is_early = drawn
    # a tensor: the compiler would compile again for each number
    divisor = torch.full((), temperature, dtype=torch.float32, device=hidden.device)
    rows = max(1, chunk_logits // model.config.get_text_config().vocab_size)
    if len(targets) <= rows:
        rows_R = hidden.index_select(0, positions)
        return score(head, rows_R, targets, divisor, end_ids, is_early, entropy_gradients)
    num_chunks = -(-len(targets) // rows)
    parts = [
        # copies of their own, of about one size: the compiler tells views and single rows apart
        checkpoint(
            score,
            head,
            hidden.index_select(0, chunk),
            target_chunk.clone(),
            divisor,
            end_ids,
            early_chunk.clone(),
            entropy_gradients,
            use_reentrant=False,
        )
        for chunk, target_chunk, early_chunk in zip(
            *(t.tensor_split(num_chunks) for t in (positions, targets, is_early)), strict=True
        )
    ]
    logprobs, entropies = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def _score(
    head: nn.Module,
    hidden_R: torch.Tensor,
    targets_R: torch.Tensor,
    temperature: torch.Tensor,
    end_ids_E: torch.Tensor,
    is_early_R: torch.Tensor,
    entropy_gradients: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs [R] and entropies [R] of one chunk, in float32."""
    # changed in place, as the engines do: no further copy of the logits, and no loss in bfloat16
    logits_RV = head(hidden_R).float().div_(temperature)
    if len(end_ids_E):
        added_R1 = (_FORBIDDEN * is_early_R).unsqueeze(1)
        logits_RV.index_add_(1, end_ids_E, added_R1.expand(-1, len(end_ids_E)))
    logprobs_RV = logits_RV.log_softmax(dim=-1)
    with torch.set_grad_enabled(entropy_gradients and torch.is_grad_enabled()):
        entropies_R = -(logprobs_RV.exp() * logprobs_RV).sum(dim=-1)
    return -F.nll_loss(logprobs_RV, targets_R, reduction="none"), entropies_R
