"""Inside vLLM's worker process: what each module of the model computes (`weights.probes`).

Called once log-probs have told that the weights are not the trainer's. Modules are named as in the
checkpoint: what vLLM fuses is taken apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ray_apr.serve.vllm.private import (
    LinearBase,
    VocabParallelEmbedding,
    init_logger,
    set_current_vllm_config,
)
from ray_apr.weights.probes import one_expert_each, probe_input, projections

logger = init_logger("vllm.ray_apr")
"""Under vLLM's, whose settings it has."""


class WeightProbe:
    """What is added to vLLM's worker (`serve.vllm.names.WORKER_EXTENSION`)."""

    model_runner: Any
    vllm_config: Any

    @torch.no_grad()
    def ray_apr_probe(self, token_ids: list[int]) -> dict[str, list[list[float]]]:
        """Projections of what each module computes, by its name.

        Args:
            token_ids: Rows of the embedding.

        Returns:
            Nothing where the model is spread over several workers.
        """
        if self.vllm_config.parallel_config.world_size > 1:
            return {}
        model = self.model_runner.get_model()
        found: dict[str, torch.Tensor] = {}
        dtype = self.vllm_config.model_config.dtype
        like = torch.empty(0, dtype=dtype, device=next(model.parameters()).device)
        with set_current_vllm_config(self.vllm_config):
            for name, module in model.named_modules(remove_duplicate=False):
                try:
                    found.update(_probes(name, module, model, like, token_ids))
                except Exception as error:  # noqa: BLE001  (vLLM's many kinds of layers)
                    logger.warning("%s cannot be probed: %s", name, error)
        return {name: projections(y).tolist() for name, y in found.items()}


def _probes(
    name: str, module: Any, model: Any, like: torch.Tensor, token_ids: Sequence[int]
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name in the checkpoint, outputs [N, M]) of a module; nothing of those that only hold
    others."""
    if isinstance(module, VocabParallelEmbedding):  # a head is one, too; a tied one has both uses
        if name.endswith("lm_head"):
            x = probe_input(module.embedding_dim, like)
            y = module.quant_method.apply(module, x, bias=getattr(module, "bias", None))
            yield name, y[:, : module.org_vocab_size]
        else:
            ids = torch.tensor(token_ids, device=like.device)
            yield name, module(ids).reshape(1, -1)
    elif isinstance(module, LinearBase):
        x = probe_input(module.input_size, like)
        y = module.quant_method.apply(module, x, bias=module.bias)
        yield from _taken_apart(name, y, getattr(module, "output_sizes", None), model)
    elif hasattr(module, "w13_weight") and hasattr(module, "quant_method"):
        chosen, weights = one_expert_each(module.global_num_experts, module.top_k, like)
        x = probe_input(module.hidden_size, like).expand(len(chosen), -1).contiguous()
        y = module.quant_method.apply(module, x, weights, chosen.int(), None, None)
        yield name.removesuffix(".routed_experts"), y
    elif (weight := module._parameters.get("weight")) is not None and weight.ndim == 1:
        y = module(probe_input(len(weight), like))
        yield name, y[0] if isinstance(y, tuple) else y


def _taken_apart(
    name: str, y: torch.Tensor, sizes: Sequence[int] | None, model: Any
) -> Iterator[tuple[str, torch.Tensor]]:
    """The outputs of the layers of the checkpoint that vLLM has fused into one."""
    path, dot, last = name.rpartition(".")
    parts = getattr(model, "packed_modules_mapping", {}).get(last, [last])
    if sizes is None or len(parts) != len(sizes):
        yield name, y
        return
    for part, piece in zip(parts, y.split(list(sizes), dim=-1), strict=True):
        yield f"{path}{dot}{part}", piece
