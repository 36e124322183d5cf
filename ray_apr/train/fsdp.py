"""The model under FSDP2, its optimizer, and the learning rate.

Invariants:
    * Master weights and optimizer states are shards of `TrainConfig.master_dtype`; the forward pass
      runs in `TrainConfig.param_dtype`. With `TrainConfig.lora` only adapters have gradients and
      states. With `TrainConfig.cpu_offload` a GPU has only what it computes with.
    * Dropout and the routers' noise are off: the log-probs of a sample do not depend on a random
      state.
    * FSDP averages gradients over ranks; `gradient_scale` undoes that, so that the ranks' losses
      add up to the loss of the whole batch.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import AutoConfig, AutoModelForCausalLM

from ray_apr.config import LoRAConfig, TrainConfig
from ray_apr.core.architectures import check_config
from ray_apr.core.checks import require
from ray_apr.core.exceptions import ConfigError
from ray_apr.train.attention import attention_name
from ray_apr.train.compilation import compile_layer
from ray_apr.train.head import attach_response_logprobs
from ray_apr.train.recomputation import CudaMemory, attach_recomputation
from ray_apr.train.tensors import local_tensor

logger = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_MEMORY_SHARE = 0.15
"""A whole model may stay gathered, or its gradients unreduced, within this share of the memory."""
_UNIT_BYTES = 128 * 2**20
_KEPT_OPS = {
    "aten::mm",
    "aten::addmm",
    "aten::bmm",
    "aten::_grouped_mm",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "torch_attn::_varlen_attn",
    "ray_apr::flash_attention",
}
"""What costs more to compute again than to keep."""


def build_model(
    model: str, train: TrainConfig, device: torch.device, *, few_layers: bool = False
) -> nn.Module:
    """Load a causal language model and shard it over the default process group.

    A single rank that has one data type for everything keeps a plain model: there is nothing to
    shard or to cast, and FSDP would copy the weights for each step.

    Args:
        model: Folder in Hugging Face's format, or hub id.
        train: Data types, activation checkpointing, adapters.
        device: Where this rank computes.
        few_layers: Whether only as many of its first layers stay as are of all kinds.

    Returns:
        The model, with the method of `head.attach_response_logprobs`, and where activation
        checkpointing is "auto" on CUDA with what `recomputation_of` returns. Parameter names are
        those of Hugging Face; tied weights stay tied.

    Raises:
        ConfigError: If the model is none that can be trained (`architectures`), or an adapter has
            no layer or a tied one.
    """
    dtype = _DTYPES[train.dtype_on(device.type)]
    packed = train.packs(device.type)
    attention = attention_name(device, dtype, packed=packed, attention=train.attention)
    loaded = _load(model, _DTYPES[train.master_dtype], attention)
    if train.lora is not None:
        _add_adapters(loaded, train.lora, train.seed)
    if few_layers:
        layers = decoder_layers(loaded)
        del layers[_num_of_all_kinds(layers) :]
    checkpoints = train.checkpoints(device.type)
    if checkpoints:
        options: dict[str, Any] = {"use_reentrant": False}
        if checkpoints == "selective":
            options["context_fn"] = partial(create_selective_checkpoint_contexts, _kept)
        loaded.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    loaded.train()
    compiles = train.compiles(device.type)
    if compiles:  # forward alone: FSDP's hooks, and a checkpoint around it, stay outside
        for layer in decoder_layers(loaded):
            layer.forward = compile_layer(layer.forward)  # type: ignore[method-assign]
    offloads = train.cpu_offload and device.type != "cpu"
    is_uniform = train.dtype_on(device.type) == train.master_dtype == train.reduce_dtype
    if dist.get_world_size() == 1 and is_uniform and not offloads:
        loaded.to(device)
    else:
        _shard(loaded, train, device, offloads=offloads)
    attach_response_logprobs(loaded, compiled=compiles)
    if checkpoints == "auto":
        attach_recomputation(loaded, _units(decoder_layers(loaded), dtype), CudaMemory(device))
    return loaded


def _shard(model: nn.Module, train: TrainConfig, device: torch.device, *, offloads: bool) -> None:
    """Have FSDP2 shard a model in place."""
    dtype = _DTYPES[train.dtype_on(device.type)]
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=_DTYPES[train.reduce_dtype])
    sharding: dict[str, Any] = {
        "mesh": _mesh(train.shard_ranks, device),
        "mp_policy": policy,
        "reshard_after_forward": not fits_whole(model, train.dtype_on(device.type), device),
    }
    if offloads:
        sharding["offload_policy"] = CPUOffloadPolicy()
    for unit in _units(decoder_layers(model), dtype):
        fully_shard(unit, **sharding)
    fully_shard(model, **sharding)


def _kept(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Whether selective checkpointing keeps the result of an operation."""
    del context, args, kwargs
    is_kept = op.name() in _KEPT_OPS
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


def _mesh(shard_ranks: int | None, device: torch.device) -> DeviceMesh:
    """All ranks in one row of shards, or in several copies of the model (HSDP)."""
    ranks = dist.get_world_size()
    if shard_ranks is None or shard_ranks == ranks:
        return init_device_mesh(device.type, (ranks,))
    shape = (ranks // shard_ranks, shard_ranks)
    return init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))


def _load(model: str, dtype: torch.dtype, attention: str) -> Any:
    """Load the weights, with dropout and noise off."""
    config = AutoConfig.from_pretrained(model)
    check_config(model, config.to_dict())
    for name, value in config.to_dict().items():
        if name.endswith(("dropout", "_pdrop", "jitter_noise")) and isinstance(value, float):
            setattr(config, name, 0.0)
    return AutoModelForCausalLM.from_pretrained(
        model, config=config, dtype=dtype, attn_implementation=attention
    )


def _add_adapters(model: Any, lora: LoRAConfig, seed: int) -> None:
    """Give layers an adapter, the same on all ranks, and freeze all else.

    peft sees the model inside of another module: of one that it knows by its config it takes names
    for those of experts, and gives adapters to parameters that are no layers.
    """
    from peft import LoraConfig, inject_adapter_in_model

    names, name = lora.target_modules, "train.lora.target_modules"
    outer = nn.ModuleDict({"inner": model})
    head = model.get_output_embeddings()
    linear = [p for p, m in outer.named_modules() if isinstance(m, nn.Linear) and m is not head]
    if names == "all-linear":
        names = tuple(linear)
    settings = LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=list(names))
    num_owners = Counter(id(p) for m in model.modules() for p in m.parameters(recurse=False))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            inject_adapter_in_model(settings, outer)
        except ValueError as error:
            raise ConfigError(name, names, f"peft says: {error}") from error
    for path, module in model.named_modules():
        if getattr(module, "lora_embedding_A", None):
            raise ConfigError(name, names, f"leave out {path}, which is an embedding")
        if hasattr(module, "lora_A") and num_owners[id(module.get_base_layer().weight)] > 1:
            raise ConfigError(name, names, f"leave out {path}, whose weights are tied to others")
    if names is lora.target_modules:  # peft passes over a name that is of no layer beside others
        adapted = [f".{path}" for path, m in model.named_modules() if hasattr(m, "lora_A")]
        wrong = [one for one in names if not any(path.endswith(f".{one}") for path in adapted)]
        there = ", ".join(sorted({path.rpartition(".")[2] for path in linear}))
        remedy = f"no layer is called {', '.join(wrong)}; linear ones are {there}"
        require(not wrong, name, names, remedy)


def decoder_layers(model: Any) -> nn.ModuleList:
    """The decoder layers: the longest list of modules in the base model."""
    lists = [m for m in model.base_model.modules() if isinstance(m, nn.ModuleList)]
    return max(lists, key=len, default=nn.ModuleList())


def _num_of_all_kinds(layers: Iterable[nn.Module]) -> int:
    """How many first layers have each kind of layer; at least two, as the first one's input is of
    the embedding."""
    kinds = [_kind(layer) for layer in layers]
    return max(2, 1 + max(map(kinds.index, kinds), default=0))


def _kind(layer: nn.Module) -> str:
    """What the compiler tells layers apart by: their modules, and the settings of these but for the
    layer's number. Some attend within a window or without positions, some have experts."""
    modules = [(name, type(m), vars(m).items()) for name, m in layer.named_modules()]
    plain = (bool, int, float, str)
    return repr(
        [
            (name, kind, [(n, v) for n, v in values if n != "layer_idx" and isinstance(v, plain)])
            for name, kind, values in modules
        ]
    )


def _units(layers: Iterable[nn.Module], dtype: torch.dtype) -> list[list[nn.Module]]:
    """Neighbouring layers that are gathered and reduced together: each unit costs the host time,
    which a GPU that is done with small layers would wait for."""
    units: list[list[nn.Module]] = []
    size = _UNIT_BYTES
    for layer in layers:
        if size >= _UNIT_BYTES:
            units.append([])
            size = 0
        units[-1].append(layer)
        size += sum(p.numel() for p in layer.parameters()) * dtype.itemsize
    return units


def fits_whole(model: nn.Module, dtype: str, device: torch.device) -> bool:
    """Whether all parameters in `dtype` fit on the device beside everything else.

    Gathered once a step instead of once a micro-batch and pass, they save communication.
    """
    if device.type == "cpu":
        return True
    num_bytes = sum(p.numel() for p in model.parameters()) * _DTYPES[dtype].itemsize
    memory = torch.cuda.get_device_properties(device).total_memory
    return num_bytes <= _MEMORY_SHARE * memory


class StepSync:
    """When weights are gathered and gradients reduced: once a step, where memory allows it.

    Args:
        model: The sharded model.
        train: Data types.
        device: Where this rank computes.
    """

    def __init__(self, model: nn.Module, train: TrainConfig, device: torch.device) -> None:
        self._model = model
        self._defers = fits_whole(model, train.reduce_dtype, device)
        self._keeps = fits_whole(model, train.dtype_on(device.type), device)

    def before_backward(self, *, is_last: bool) -> None:
        """Prepare for one micro-batch: gradients of the last one are reduced."""
        if not isinstance(self._model, FSDPModule):
            return
        if self._defers:
            self._model.set_requires_gradient_sync(is_last)
        if self._keeps:
            self._model.set_reshard_after_backward(is_last)
        self._model.set_is_last_backward(is_last)

    def after_optimizer(self) -> None:
        """Gather the weights of the next forward pass.

        The host queues it while the device is busy with this step; at the next one's start the
        device would wait for it.

        Waits for: the other ranks. Unblocked by: their part, or the limit of collectives.
        """
        if not self._keeps:
            return
        units = [m for m in self._model.modules() if isinstance(m, FSDPModule)]
        for handle in [unit.unshard(async_op=True) for unit in units]:
            if handle is not None:
                handle.wait()


def drop_gathered(model: nn.Module) -> None:
    """Have a model's parameters be shards again, as `StepSync.after_optimizer` may have gathered
    them."""
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            unit.reshard()


def gradient_scale(model: nn.Module) -> float:
    """Factor of the loss that undoes FSDP's average over ranks."""
    return float(dist.get_world_size()) if isinstance(model, FSDPModule) else 1.0


@torch.no_grad()  # a shard is handed out without a node of autograd then
def squared_gradient_norm(model: nn.Module) -> torch.Tensor:
    """This rank's part of the sum of squares of all gradients, in float64 (ranks add theirs up)."""
    given = [p.grad for p in model.parameters() if p.grad is not None]
    grads = [local_tensor(g) for g in given]
    norms = torch.stack(torch._foreach_norm([g for g in grads if g.numel()]))
    return norms.double().square().sum() / _num_copies(given[0])


def _num_copies(tensor: torch.Tensor) -> int:
    """How many ranks hold each shard."""
    if not isinstance(tensor, DTensor):
        return 1
    replicated = (i for i, placed in enumerate(tensor.placements) if placed.is_replicate())
    return math.prod(tensor.device_mesh.size(i) for i in replicated)


def build_optimizer(model: nn.Module, train: TrainConfig) -> torch.optim.AdamW:
    """AdamW over the shards that learn; the weight decay leaves vectors (norms, biases) alone."""
    drop_gathered(model)
    learning = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in learning if p.ndim > 1]
    vectors = [p for p in learning if p.ndim <= 1]
    groups: list[dict[str, Any]] = [
        {"params": matrices},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [g for g in groups if g["params"]],
        lr=train.learning_rate,
        betas=train.betas,
        eps=train.eps,
        weight_decay=train.weight_decay,
        fused=True,
    )


def give_states_memory_of_their_own(device: torch.device) -> None:
    """Call this before an optimizer's states are made, by its first step or from a checkpoint.

    They would else lie in what passes have left, and leave holes beside them for good.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()


def limit_next_step(
    optimizer: torch.optim.Optimizer,
    norm: torch.Tensor,
    max_norm: float,
    *,
    is_finite: torch.Tensor,
) -> None:
    """Have the optimizer's next step clip the gradients, or do nothing, without waiting for it
    (but for `TrainConfig.cpu_offload`: the host steps then).

    Args:
        optimizer: From `build_optimizer`: PyTorch's fused optimizers read both while they run.
        norm: Norm of all gradients, float64.
        max_norm: Gradients are scaled down to it.
        is_finite: Whether there may be a step.
    """
    device = optimizer.param_groups[0]["params"][0].device
    scale = (norm / max_norm).clamp(min=1)
    optimizer.grad_scale = scale.to(device, torch.float32)  # type: ignore[attr-defined]
    optimizer.found_inf = (~is_finite).to(device, torch.float32)  # type: ignore[attr-defined]


def learning_rate(train: TrainConfig, step: int) -> float:
    """Learning rate of `step`: linear warm-up, then constant or falling to 0 at ``steps``."""
    if step < train.warmup_steps:
        return train.learning_rate * (step + 1) / train.warmup_steps
    left = max(1, train.num_steps - train.warmup_steps)
    done = min(1.0, (step - train.warmup_steps) / left)
    if train.lr_schedule == "linear":
        return train.learning_rate * (1 - done)
    if train.lr_schedule == "cosine":
        return train.learning_rate * 0.5 * (1 + math.cos(math.pi * done))
    return train.learning_rate


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    """Set the learning rate of all parameter groups."""
    for group in optimizer.param_groups:
        group["lr"] = value
