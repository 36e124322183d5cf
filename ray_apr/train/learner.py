"""What is trained, on one rank: model, optimizer and reference, built, restored and taken further.

Runs (`train.loop`) and replays of their steps (`train.replay`) have it from here, so that the same
checkpoint and the same batches give the same bits.
"""

from __future__ import annotations

import gc
import logging
import os
import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import numpy as np
import ray.train
import torch
from torch import nn

from ray_apr.core.messages import SamplingParams
from ray_apr.data.tokenizers import end_token_ids
from ray_apr.scheduling.batch import RankBatch
from ray_apr.train.checkpoint import Progress, load_checkpoint
from ray_apr.train.figures import Figures
from ray_apr.train.fsdp import build_model, build_optimizer, give_states_memory_of_their_own
from ray_apr.train.logprobs import measure_recomputation, warm_up
from ray_apr.train.spec import LearnerSpec
from ray_apr.train.step import train_step
from ray_apr.train.tensors import compute_device

logger = logging.getLogger(__name__)

_TOKENS_AHEAD = 8192
"""Most tokens of a micro-batch of `compile_ahead`: compiled code takes batches of all sizes."""


def prepare_process(spec: LearnerSpec, num_local: int) -> None:
    """Seed this process, and divide the cores among the engines and the train workers of this node,
    on CPU.

    Args:
        spec: What is trained.
        num_local: Train workers of this node.
    """
    seed = spec.train.seed
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    num_threads = spec.train.num_threads
    if num_threads is None:
        num_threads = max(1, len(os.sched_getaffinity(0)) // (num_local + spec.num_replicas))
    torch.set_num_threads(num_threads)


def compile_ahead(
    spec: LearnerSpec,
    device: torch.device,
    span: Callable[[str], AbstractContextManager[object]] = nullcontext,
) -> None:
    """Compile what the passes of a `Learner` need, with the first layers of its models; all ranks
    together.

    While engines start whose devices these are, it leaves less on them than a `Learner` has there,
    and gives nothing back: vLLM refuses to start where memory becomes free while it measures its
    own.

    Args:
        spec: What will be trained.
        device: Of this rank.
        span: Shows how long it takes, where it does anything.
    """
    if not spec.train.compiles(device.type):
        return
    with span("compile"):
        models = _build_models(spec, device, few_layers=True)
        num_tokens = min(spec.train.micro_batch_tokens, _TOKENS_AHEAD)
        sampling = _with_all_ends(spec.sampling, spec.model)
        _compile_passes(spec, *models, device=device, num_tokens=num_tokens, sampling=sampling)
        del models
        gc.collect()  # what FSDP made of them holds itself


class Learner:
    """The model that is trained, with all that its steps need; all ranks make it together.

    Args:
        spec: What is trained.
        device: Of this rank.
        span: Shows how long a part of the start takes, by its name.
        is_compiled: Whether this process has called `compile_ahead`.
    """

    def __init__(
        self,
        spec: LearnerSpec,
        device: torch.device,
        span: Callable[[str], AbstractContextManager[object]] = nullcontext,
        *,
        is_compiled: bool = False,
    ) -> None:
        train = spec.train
        self._spec = spec
        self._sampling = _with_all_ends(spec.sampling, spec.model)
        with span("load"):
            self.model, self.reference = _build_models(spec, device)
            self.optimizer = build_optimizer(self.model, train)
        if train.compiles(device.type) and not is_compiled:
            with span("compile"):
                _compile_passes(
                    spec, self.model, self.reference,
                    device=device, num_tokens=train.micro_batch_tokens, sampling=self._sampling,
                )  # fmt: skip
        measure_recomputation(
            self.model,
            device,
            train,
            entropy_gradients=spec.algorithm.entropy_coef > 0,
            sampling=self._sampling,
        )

    def restore(self, checkpoint: ray.train.Checkpoint | None) -> Progress:
        """Take up the state of a checkpoint; all ranks together.

        Args:
            checkpoint: Of a run; None: it begins with the model as it was loaded.
        """
        if checkpoint is None:
            return Progress(step=0, policy_version=0)
        give_states_memory_of_their_own(compute_device(self.model))
        with checkpoint.as_directory() as folder:
            progress = load_checkpoint(folder, self.model, self.optimizer)
        logger.info("restored at step %d, version %d", progress.step, progress.policy_version)
        return progress

    def train(
        self, batch: RankBatch, *, show_advantages: Callable[[torch.Tensor], None] | None = None
    ) -> Figures:
        """Take one step; all ranks together. See `train_step`."""
        return train_step(
            self.model,
            self.optimizer,
            batch,
            self._spec.algorithm,
            self._spec.train,
            sampling=self._sampling,
            reference=self.reference,
            max_response_tokens=self._spec.max_response_tokens,
            show_advantages=show_advantages,
        )


def _build_models(
    spec: LearnerSpec, device: torch.device, *, few_layers: bool = False
) -> tuple[nn.Module, nn.Module | None]:
    """The model that is trained, and the reference where there is one."""
    model = build_model(spec.model, spec.train, device, few_layers=few_layers)
    if not spec.algorithm.needs_reference:
        return model, None
    plain = replace(spec.train, lora=None)  # adapters begin without any effect
    reference = build_model(spec.model, plain, device, few_layers=few_layers)
    return model, reference.requires_grad_(False)


def _compile_passes(
    spec: LearnerSpec,
    model: nn.Module,
    reference: nn.Module | None,
    *,
    device: torch.device,
    num_tokens: int,
    sampling: SamplingParams,
) -> None:
    """Compile the passes of a step, those without gradients where a step has any."""
    train, algorithm = spec.train, spec.algorithm
    passes = [(model, True)]
    if algorithm.freezes_policy(train.mini_batches):
        passes.append((model, False))
    if reference is not None:
        passes.append((reference, False))
    for passed, gradients in passes:
        warm_up(
            passed,
            device,
            num_tokens,
            packed=train.packs(device.type),
            entropy_gradients=gradients and algorithm.entropy_coef > 0,
            sampling=sampling,
            gradients=gradients,
        )


def _with_all_ends(sampling: SamplingParams, model: str) -> SamplingParams:
    """The same with the model's own ends among the ids that end a response, where they matter."""
    if not sampling.min_tokens:
        return sampling
    ends = {*sampling.stop_token_ids, *end_token_ids(model)}
    return replace(sampling, stop_token_ids=tuple(sorted(ends)))
