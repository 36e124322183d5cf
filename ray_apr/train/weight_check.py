"""The trainer's side of the check after a weight sync (`weights.check`).

    gather ─► record: score, probe (all ranks) ─► sync ─► verify: the engines' scores (rank 0)

Invariants, kept by `WeightCheck`:
    * What is recorded belongs to the weights that were gathered: the optimizer has not stepped in
      between, whatever it does while they travel.
    * It comes from the model's own forward pass, so that it shares no code with what names, merges,
      gathers, sends and loads weights.
    * All ranks record at the same syncs: where that is a matter of time, by rank 0's clock.
    * A mismatch raises; nothing tries it again. A replica that says no scores is named in the log,
      and is an error when it has said none at several checks in a row.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ray_apr.config import TrainConfig
from ray_apr.core.exceptions import RolloutError, WeightMismatchError, WeightSyncError
from ray_apr.core.sample import FinishReason, Prompt, Sample, Segment
from ray_apr.scheduling.batch import build_rank_batches
from ray_apr.train.fsdp import decoder_layers
from ray_apr.train.logprobs import MicroBatch, micro_batches, response_logprobs
from ray_apr.train.span import Span
from ray_apr.train.tensors import compute_device
from ray_apr.weights.check import (
    Comparison,
    Limits,
    Logprobs,
    canary_sequences,
    compare,
    follows,
    worst_modules,
)
from ray_apr.weights.probes import one_expert_each, probe_input, projections

if TYPE_CHECKING:
    from ray_apr.core.messages import WeightScores
    from ray_apr.train.control import RunControl

logger = logging.getLogger(__name__)

_MOST_TIME = 0.01
"""Share of a run's time that checks may take, if nobody says how many there are to be."""
_FIRST_CHECKS = 2
"""Syncs that have one in any case: an engine that keeps its first weights shows at the second, and
only that one costs what a check costs later."""
_MOST_UNCHECKED = 10
"""Checks in a row that a replica may miss: an engine full of calls that syncs freeze in it has no
place for the sequences until one ends, but not for ever."""

Probe = Callable[[], torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Record:
    """The gathered model, by what it computes."""

    policy_version: int
    logprobs: Logprobs
    outputs: Mapping[str, torch.Tensor]
    """Of each module, for its known input; where the model computes."""
    duration_s: float


class WeightCheck:
    """Compares each engine with the trainer after a weight sync.

    Args:
        model: From `fsdp.build_model`.
        train: How often, how strictly, and how the trainer computes.
    """

    def __init__(self, model: nn.Module, train: TrainConfig) -> None:
        self._model = model
        self._train = train
        config: Any = model.config
        config = config.get_text_config()
        longest = getattr(config, "max_position_embeddings", None) or 1 << 20
        self.sequences = canary_sequences(config.vocab_size, longest)
        self._batch = _micro_batch(self.sequences, compute_device(model), train)
        self._token_ids = sorted({i for sequence in self.sequences for i in sequence})
        self._layers = decoder_layers(model)
        self._probes = _probes_by_layer(model, self._layers, self._token_ids)
        self._num_syncs = 0
        self._recorded_at = 0.0
        self._cost_s = 0.0
        """Of the last check; rank 0 knows."""
        self._record: _Record | None = None
        self._passed: dict[str, tuple[Logprobs, Logprobs]] = {}
        """What trainer and engine scored at the last check of each replica."""
        self._unchecked: dict[str, int] = {}
        """Checks in a row that a replica of the group has missed."""

    def record(self, policy_version: int) -> None:
        """Score and probe the model as it is, if the next sync is due for a check; a collective of
        all train workers."""
        self._record = None
        number = self._num_syncs
        self._num_syncs += 1
        if not self._is_due(number):
            return
        found: dict[str, torch.Tensor] = {}
        as_written = torch.compiler.set_stance("force_eager")  # few tokens are not worth 3 to 10 s
        with Span() as recorded, torch.no_grad(), as_written, self._probing(found):
            logprobs_NT, _ = response_logprobs(self._model, self._batch)
            logprobs = logprobs_NT[self._batch.sample_index.argsort()].tolist()
        self._record = _Record(policy_version, logprobs, found, recorded.duration_s)
        self._recorded_at = time.monotonic()

    def _is_due(self, number: int) -> bool:
        """Whether a sync has a check; the same on all ranks."""
        every = self._train.weight_check_every
        if every != "auto":
            return every > 0 and number % every == 0
        if number < _FIRST_CHECKS:
            return True
        is_due = self._cost_s <= _MOST_TIME * (time.monotonic() - self._recorded_at)
        if dist.get_world_size() == 1:
            return is_due
        said = torch.tensor([is_due], dtype=torch.uint8, device=compute_device(self._model))
        dist.broadcast(said, 0)
        return bool(said.item())

    @contextlib.contextmanager
    def _probing(self, found: dict[str, torch.Tensor]) -> Iterator[None]:
        """While the model runs: probe each layer right before it does, when FSDP has gathered its
        weights; with the first one, what is outside of all of them."""

        def hook(layer: nn.Module, *_: Any) -> None:
            probes = self._probes[id(layer)]
            for name, probe in list(probes.items()):
                try:
                    found[name] = probe()
                except Exception as error:  # noqa: BLE001  (a model's own kinds of modules)
                    logger.warning("%s is not localised after a mismatch: %s", name, error)
                    del probes[name]

        handles = [layer.register_forward_pre_hook(hook) for layer in self._layers]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def announce(self, control: RunControl) -> None:
        """Tell the engines, before a sync, what to score after it."""
        if self._record is not None:
            control.expect_scores(self._record.policy_version, self.sequences)

    def verify(self, control: RunControl) -> dict[str, float]:
        """Compare, after a sync.

        Returns:
            ``weight_check_gap`` and ``weight_check_k3`` of the engine that is farthest off, and
            ``weight_check_s``: what the trainer, and the slowest engine before it went on, spent
            scoring. Nothing if no check was due.

        Raises:
            WeightMismatchError: If an engine computes otherwise than the trainer.
            WeightSyncError: If one could not be checked for a long time.
        """
        record, self._record = self._record, None
        if record is None:
            return {}
        found = self._scores(record, control)
        checked = [self._checked(record, scores, control) for scores in found]
        self._passed |= {s.replica_id: (record.logprobs, s.logprobs) for s in found}
        self._note_unchecked(record, control.members - {s.replica_id for s in found})
        if not found:
            return {}
        self._cost_s = record.duration_s + max(scores.duration_s for scores in found)
        return {
            "weight_check_gap": max(comparison.gap for comparison in checked),
            "weight_check_k3": max(comparison.k3 for comparison in checked),
            "weight_check_s": self._cost_s,
        }

    def _scores(self, record: _Record, control: RunControl) -> list[WeightScores]:
        """What the engines say of these weights; nothing if one does not answer."""
        try:
            said = control.weight_scores()
        except RolloutError as error:
            logger.warning("version %d is not checked: %s", record.policy_version, error)
            return []
        return [scores for scores in said if scores.policy_version == record.policy_version]

    def _note_unchecked(self, record: _Record, replicas: Collection[str]) -> None:
        """Say which replicas were not checked; it is an error after `_MOST_UNCHECKED` in a row."""
        self._unchecked = {replica: self._unchecked.get(replica, 0) + 1 for replica in replicas}
        if not replicas:
            return
        names = ", ".join(sorted(replicas))
        logger.warning("not checked at version %d: %s", record.policy_version, names)
        num_missed = max(self._unchecked.values())
        if num_missed >= _MOST_UNCHECKED:
            raise WeightSyncError(
                f"{num_missed} checks in a row, up to version {record.policy_version}, had no "
                f"scores from one of {names}. If long calls fill the engine across syncs, lower "
                "partial_rollout.max_inflight; train.weight_check_every: 0 checks nothing"
            )

    def _checked(self, record: _Record, scores: WeightScores, control: RunControl) -> Comparison:
        device = compute_device(self._model).type
        dtypes = (self._train.dtype_on(device), scores.dtype)
        tolerance = self._train.weight_check_tolerance
        limits = Limits.of(
            dtypes, num_layers=len(self._layers), ours=record.logprobs, tolerance=tolerance
        )
        comparison = compare(record.logprobs, scores.logprobs)
        before = self._passed.get(scores.replica_id)
        if not comparison.is_within(limits):
            found = ""
        elif before is not None and not follows(record.logprobs, scores.logprobs, *before):
            found = "it has not moved with the trainer and seems to have the weights of before; "
        else:
            return comparison
        theirs = control.probe_weights(scores.replica_id, self._token_ids)
        ours = {name: projections(outputs).tolist() for name, outputs in record.outputs.items()}
        raise WeightMismatchError(
            f"{scores.replica_id} does not compute like the trainer at version "
            f"{record.policy_version}: {found}log-probs of {comparison.num_tokens} tokens differ "
            f"by up to {comparison.gap:.3g} (limit {limits.gap:.3g}), mean k3 {comparison.k3:.3g} "
            f"(limit {limits.k3:.3g}). Worst: {worst_modules(ours, theirs, dtypes)}. The samples "
            "of this version are not to be trusted. Is the model's architecture supported? Where "
            "this is rounding, raise train.weight_check_tolerance"
        )


def _micro_batch(
    sequences: Sequence[tuple[int, ...]], device: torch.device, train: TrainConfig
) -> MicroBatch:
    """The sequences as samples of one group, with a prompt of one token."""
    samples = [
        Sample(
            sample_id=str(i),
            group_id="",
            prompt=Prompt(prompt_id="", token_ids=sequence[:1]),
            max_response_tokens=len(sequence),
            segments=(
                Segment(
                    policy_version=0,
                    token_ids=sequence[1:],
                    logprobs=(0.0,) * (len(sequence) - 1),
                ),
            ),
            finish_reason=FinishReason.LENGTH,
            reward=0.0,
        )
        for i, sequence in enumerate(sequences)
    ]
    packed = train.packs(device.type)
    num_tokens = sum(map(len, sequences))
    (batch,) = build_rank_batches(
        samples,
        step=0,
        policy_version=0,
        num_ranks=1,
        micro_batch_tokens=num_tokens,
        packed=packed,
    )
    (part,) = micro_batches(batch, device, packed=packed)
    return part


# -- what the model's modules compute --------------------------------------------------------------


def _probes_by_layer(
    model: nn.Module, layers: list[nn.Module], token_ids: list[int]
) -> dict[int, dict[str, Probe]]:
    """Probes of all modules that have weights, by the layer before which they run."""
    owners = {id(m): id(layer) for layer in layers for m in layer.modules()}
    first = id(layers[0]) if layers else 0
    probes: dict[int, dict[str, Probe]] = {id(layer): {} for layer in layers}
    taken: tuple[str, ...] = ()
    for name, module in model.named_modules(remove_duplicate=False):
        if name.startswith(taken):
            continue  # a part of one that is probed as a whole, such as an adapter
        probe = _probe_of(module, token_ids)
        if probe is not None:
            probes.setdefault(owners.get(id(module), first), {})[name] = probe
            taken += (f"{name}.",)
    return probes


def _probe_of(module: Any, token_ids: list[int]) -> Probe | None:
    """How to run a module on its known input; None if it only holds others, or is of no kind that
    is known."""
    own = module._parameters
    weight = own.get("weight")
    if isinstance(module, nn.Embedding):
        return lambda: F.embedding(
            torch.tensor(token_ids, device=module.weight.device), module.weight
        ).reshape(1, -1)
    if isinstance(module, nn.Linear) or hasattr(module, "lora_A"):
        size = module.in_features
        return lambda: module(probe_input(size, next(module.parameters())))
    if weight is None and any(p is not None and p.ndim == 3 for p in own.values()):
        return lambda: _experts(module)
    if weight is not None and weight.ndim == 2:  # a router, which goes on to choose
        size = weight.shape[1]
        return lambda: F.linear(probe_input(size, module.weight), module.weight, own.get("bias"))
    if weight is not None and weight.ndim == 1:
        size = len(weight)
        return lambda: module(probe_input(size, module.weight))
    return None


def _experts(module: Any) -> torch.Tensor:
    """Outputs [E, H] of the experts, as Transformers calls them."""
    weight = next(module.parameters())
    chosen, weights = one_expert_each(len(weight), 1, weight)
    size = module.hidden_dim if hasattr(module, "hidden_dim") else module.hidden_size
    x = probe_input(size, weight).expand(len(weight), -1)
    outputs: torch.Tensor = module(x, chosen, weights.to(weight.dtype))
    return outputs
