"""Settings of the buffer and of the optimizer's side."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from ray_apr.config.common import AutoDType, DType, dtype_on
from ray_apr.core.checks import (
    at_least,
    from_mapping,
    is_number,
    of_type,
    one_of,
    positive,
    require,
    whole,
    whole_or_none,
)
from ray_apr.core.exceptions import ConfigError

Packing = Literal["auto", "packed", "padded"]
Attention = Literal["auto", "torch", "flash_attention_4"]
Schedule = Literal["constant", "linear", "cosine"]
WeightTransport = Literal["auto", "nccl", "gloo", "shared"]

_ENDS = ("steps", "total_samples", "passes")
"""Settings of which one says where a run ends."""
_DEFAULT_STEPS = 100


@dataclass(frozen=True, kw_only=True)
class BufferConfig:
    """The sample buffer and the stream to the trainer."""

    wait_timeout_s: float = 300.0
    """Longest time that the trainer waits for a batch while nothing moves: no token, no reward, no
    engine; then the run fails with a diagnosis. However long a batch takes, it is waited for while
    anything does."""
    poll_timeout_s: float = 20.0
    """Longest single call that waits inside the buffer; callers then call again."""

    def __post_init__(self) -> None:
        positive("buffer", self, "wait_timeout_s", "poll_timeout_s")


@dataclass(frozen=True, kw_only=True)
class LoRAConfig:
    """Low-rank adapters (2106.09685), made by peft: they are trained, the model's own weights stay.

    The engines and the exported model get both merged, so that neither knows of adapters.
    """

    rank: int = 16
    """Of the two factors that an adapter is the product of."""
    alpha: float = 32.0
    """What an adapter adds is scaled by alpha / rank."""
    target_modules: str | tuple[str, ...] = "all-linear"
    """Names of the layers with an adapter, such as ("q_proj", "v_proj"); all-linear: every linear
    layer but the head."""

    def __post_init__(self) -> None:
        s = "train.lora"
        whole(s, self, "rank")
        at_least(s, self, 1, "rank")
        positive(s, self, "alpha")
        if self.target_modules != "all-linear":
            of_type(s, self, list | tuple, '"all-linear" or a list of names', "target_modules")
            object.__setattr__(self, "target_modules", tuple(self.target_modules))
            require(
                bool(self.target_modules) and all(isinstance(n, str) for n in self.target_modules),
                f"{s}.target_modules",
                self.target_modules,
                "must name at least one layer",
            )
        require(
            importlib.util.find_spec("peft") is not None,
            s,
            self,
            "needs peft, which is not installed: pip install 'ray-apr[lora]'",
        )


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The optimizer's side: batch, learning rate, memory, checkpoints, weight sync."""

    steps: int | None = None
    """Batches of the run; the policy version rises by one with each. The run ends after so many, or
    as `total_samples` or `passes` says, of which one at most is given; without any after 100."""
    total_samples: int | None = None
    """Samples that the run trains: as many batches as they fill, rounded up."""
    passes: int | None = None
    """Passes over the prompts: as many batches as their groups fill, rounded down, once the prompts
    are counted at the run's begin (docs/prompts.md). What trains a batch several times is
    `epochs`."""
    batch_size: int = 128
    """Samples of one batch over all train workers; a multiple of the group size."""
    mini_batches: int = 1
    """Optimizer steps of one epoch, each on a part of the batch's groups; the proximal policy stays
    that of the batch's start, and the policy version rises by one for the batch."""
    epochs: int = 1
    """Times that each batch is trained (not those over all prompts, which are `passes`), its
    mini-batches in the same order; the same holds for all of its optimizer steps, and the learning
    rate is that of the batch."""
    learning_rate: float = 1e-6
    """Of AdamW, once warmed up."""
    lr_schedule: Schedule = "constant"
    """What the learning rate does after the warm-up: it stays, or falls to 0 at `steps`, as a line
    or half a cosine wave."""
    warmup_steps: int = 0
    """Steps of linear warm-up."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's."""
    eps: float = 1e-8
    """AdamW's."""
    weight_decay: float = 0.0
    """AdamW's; norms and biases are left alone."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this global norm."""
    micro_batch_tokens: int = 16384
    """Prompt + response tokens of one forward pass on one worker, padding included."""
    packing: Packing = "auto"
    """packed: samples one after the other in one row, without padding; padded: one row a sample;
    auto: packed on CUDA. Attention never leaves a sample."""
    attention: Attention = "auto"
    """What computes attention of packed samples in half precision on CUDA. torch: PyTorch's own;
    flash_attention_4: the package flash-attn-4, on Hopper; auto: that one where it is installed."""
    activation_checkpointing: bool | Literal["auto", "selective"] = "auto"
    """Compute activations again in the backward pass instead of keeping them: all of a layer's, or
    with "selective" those between its matrix products and attention, whose results are kept. auto:
    on CUDA, in as many layers as the memory left for a micro-batch asks for; none on CPU."""
    compile: bool | Literal["auto"] = "auto"
    """Compile each decoder layer and the scoring of the head; auto: on CUDA, unless
    activation_checkpointing is "selective", which cannot look into compiled layers."""
    cpu_offload: bool = False
    """On CUDA, keep master weights, gradients and optimizer states in the host's memory, and step
    there: less memory of the GPU, and much slower."""
    lora: LoRAConfig | None = None
    """Train low-rank adapters instead of the whole model; a mapping of its settings will do."""
    shard_ranks: int | None = None
    """Train workers that share one copy of the model (HSDP); a divisor of their number, best those
    of one node. None shards over all of them (FSDP)."""
    param_dtype: AutoDType = "auto"
    """Data type of the forward and backward pass; auto: bfloat16 on CUDA, float32 on CPU."""
    master_dtype: DType = "float32"
    """Data type of the weights that the optimizer steps, and of its states. In bfloat16 a small
    step may round to none."""
    reduce_dtype: DType = "float32"
    """Data type of the gradients' reduction."""
    checkpoint_every: int = 0
    """Steps between checkpoints; 0 writes one at the end only."""
    num_checkpoints_to_keep: int = 2
    """Checkpoints that stay at most: the newest ones."""
    hours_to_keep_checkpoints: float | None = None
    """Of these, those that are older go when one is added; the newest always stays. None: no limit
    of their age."""
    export_checkpoints: bool = False
    """Give each checkpoint the model in Hugging Face's format, ``hf/``, which the last one always
    has, so that any of them can be served, or loaded by other libraries. Training waits while such
    a checkpoint is written."""
    save_samples: float = 1.0
    """Share of the trained groups whose samples the run folder keeps with their texts, in
    ``samples/``; 0 keeps none."""
    report_every: int = 10
    """Steps between reports to Ray Train, and through it to Ray Tune; the last step is always
    reported, and the run folder has every step. 1 reports each step: Ray Train's controller takes
    about two reports a second, and makes a faster worker wait."""
    weight_transport: str | Callable[..., Any] = "auto"
    """How weights travel: "nccl" between GPUs, "gloo" on CPU, "shared" where engines and train
    workers have the same devices (rollout.engine.placement); auto takes the one that fits. Or a
    transport of the user's, what makes a `WeightSender` of `GatheredWeights` (docs/transports.md);
    in YAML as "package.module:Class" or "file.py:Class"."""
    weight_bucket_mb: float = 256.0
    """Size of one broadcast of the weight sync, in MiB. An engine on a GPU keeps three of them."""
    weight_sync_timeout_s: float = 120.0
    """Limit for one weight sync; engines resume by themselves after it."""
    weight_check_every: int | Literal["auto"] = "auto"
    """Weight syncs from one check to the next: engines and trainer score a few sequences, and the
    run stops where they differ by more than rounding explains. auto: the first two, and then as
    many as take 1 % of the time, at most all; 0: none."""
    weight_check_tolerance: float = 1.0
    """Factor of the largest difference that rounding explains (docs/weight_check.md); larger where
    an engine's kernels round more than those that were measured."""
    profile_steps: tuple[int, ...] = ()
    """Steps of the run, from 0, that every train worker profiles with torch.profiler; ``ray-apr
    trace`` puts them beside what engines and trainer did (docs/profiles.md). Each takes seconds
    more."""
    num_threads: int | None = None
    """CPU threads of one train worker; None divides the cores among engines and workers."""
    seed: int = 0
    """Seed of the prompt order and of the trainer; that of requests: ``rollout.sampling.seed``."""

    def __post_init__(self) -> None:
        s = "train"
        counts: tuple[str, ...] = ("batch_size", "mini_batches", "epochs")
        counts += ("micro_batch_tokens", "num_checkpoints_to_keep", "report_every")
        whole(s, self, *counts, "warmup_steps", "checkpoint_every", "seed")
        at_least(s, self, 1, *counts)
        whole_or_none(s, self, 1, *_ENDS)
        first, *others = [name for name in _ENDS if getattr(self, name) is not None] or [""]
        require(
            not others,
            f"{s}.{first}",
            getattr(self, first, None),
            f"says where the run ends, and so does {s}.{', '.join(others)}; leave one of them out",
        )
        at_least(s, self, 0, "warmup_steps", "checkpoint_every", "weight_decay", "seed")
        require(self.seed < 2**32, f"{s}.seed", self.seed, "must be below 2**32")
        self._check_weight_check()
        positive(s, self, "learning_rate", "eps", "max_grad_norm")
        positive(s, self, "weight_bucket_mb", "weight_sync_timeout_s")
        require(
            is_number(self.save_samples) and 0 <= self.save_samples <= 1,
            f"{s}.save_samples",
            self.save_samples,
            "must be a share from 0 to 1",
        )
        if self.hours_to_keep_checkpoints is not None:
            positive(s, self, "hours_to_keep_checkpoints")
        transport = self.weight_transport
        require(
            callable(transport) or ":" in str(transport) or transport in get_args(WeightTransport),
            f"{s}.weight_transport",
            transport,
            f"must be one of {', '.join(get_args(WeightTransport))}, or a transport of your own, "
            'in YAML as "file.py:Class"',
        )
        one_of(s, self, {"lr_schedule": Schedule, "packing": Packing, "attention": Attention})
        one_of(s, self, {"param_dtype": AutoDType, "master_dtype": DType, "reduce_dtype": DType})
        if self.activation_checkpointing not in ("auto", "selective"):
            words = 'true or false, or "selective", or "auto"'
            of_type(s, self, bool, words, "activation_checkpointing")
        of_type(s, self, bool, "true or false", "cpu_offload", "export_checkpoints")
        if self.compile != "auto":
            of_type(s, self, bool, 'true or false, or "auto"', "compile")
        require(
            self.compile is not True or self.activation_checkpointing != "selective",
            f"{s}.compile",
            self.compile,
            'must not be true where activation_checkpointing is "selective"; choose one of them',
        )
        steps = tuple(self.profile_steps) if isinstance(self.profile_steps, list | tuple) else (-1,)
        require(
            all(type(step) is int and step >= 0 for step in steps),
            f"{s}.profile_steps",
            self.profile_steps,
            "must be a list of whole numbers of at least 0",
        )
        object.__setattr__(self, "profile_steps", steps)
        of_type(s, self, list | tuple, "two numbers in [0, 1)", "betas")
        object.__setattr__(self, "betas", tuple(self.betas))
        require(
            len(self.betas) == 2 and all(is_number(b) and 0 <= b < 1 for b in self.betas),
            f"{s}.betas",
            self.betas,
            "must be two numbers in [0, 1)",
        )
        lora: Any = self.lora
        if isinstance(lora, Mapping):
            object.__setattr__(self, "lora", from_mapping(LoRAConfig, f"{s}.lora", lora))
        of_type(s, self, LoRAConfig | None, "a mapping of settings, or null", "lora")
        whole_or_none(s, self, 1, "num_threads", "shard_ranks")

    def _check_weight_check(self) -> None:
        s = "train"
        if self.weight_check_every != "auto":
            of_type(s, self, int, 'a whole number, or "auto"', "weight_check_every")
            at_least(s, self, 0, "weight_check_every")
        positive(s, self, "weight_check_tolerance")
        require(
            self.weight_check_every != 0
            or self.weight_check_tolerance == TrainConfig.weight_check_tolerance,
            f"{s}.weight_check_tolerance",
            self.weight_check_tolerance,
            "has no meaning with weight_check_every = 0, which checks nothing; leave it out",
        )

    def with_steps(
        self, *, step_size: int, group_size: int, num_prompts: int | None = None
    ) -> TrainConfig:
        """The same with `steps` instead of `total_samples` or `passes`.

        Args:
            step_size: Samples of one step.
            group_size: Samples of one prompt.
            num_prompts: Prompts of a pass; None: they are not counted yet, and `passes` stays.

        Raises:
            ConfigError: If the prompts fill no batch, or a step is to be profiled that is none.
        """
        steps = self.steps
        if self.total_samples is not None:
            steps = -(-self.total_samples // step_size)
        elif self.passes is not None:
            if num_prompts is None:
                return self
            num_groups, in_batch = self.passes * num_prompts, step_size // group_size
            steps = num_groups // in_batch
            require(
                steps > 0,
                "train.passes",
                self.passes,
                f"over {num_prompts} prompts fills no batch of {in_batch} groups; raise it, or "
                "lower train.batch_size",
            )
        steps = _DEFAULT_STEPS if steps is None else steps
        require(
            max(self.profile_steps, default=0) < steps,
            "train.profile_steps",
            self.profile_steps,
            f"must be among the steps of the run, which count from 0 to {steps - 1}",
        )
        return replace(self, steps=steps, total_samples=None, passes=None)

    @property
    def num_steps(self) -> int:
        """`steps` of a run that begins: those of `with_steps`."""
        assert self.total_samples is None and self.passes is None, "with_steps comes first"
        return _DEFAULT_STEPS if self.steps is None else self.steps

    @property
    def num_optimizer_steps(self) -> int:
        """Optimizer steps of one batch: mini_batches x epochs."""
        return self.mini_batches * self.epochs

    def check_workers(self, num_workers: int) -> None:
        """Check the settings against the number of train workers.

        Raises:
            ConfigError: If a batch cannot be divided among them, or they not into copies.
        """
        size = self.batch_size // self.mini_batches
        require(
            size % num_workers == 0,
            "train.batch_size",
            self.batch_size,
            f"must be a multiple of mini_batches x train workers = {self.mini_batches} x "
            f"{num_workers}",
        )
        require(
            num_workers % (self.shard_ranks or 1) == 0,
            "train.shard_ranks",
            self.shard_ranks,
            f"must divide the {num_workers} train workers",
        )

    def takes_workers(self, num_workers: int) -> bool:
        """Whether so many train workers can divide a batch, and themselves into copies."""
        try:
            self.check_workers(num_workers)
        except ConfigError:
            return False
        return True

    def compiles(self, device: str) -> bool:
        """Whether layers are compiled on a device, ``"cpu"`` or ``"cuda"``."""
        if self.compile == "auto":
            return device == "cuda" and self.activation_checkpointing != "selective"
        return self.compile

    def checkpoints(self, device: str) -> bool | Literal["auto", "selective"]:
        """`activation_checkpointing` on a device, ``"cpu"`` or ``"cuda"``."""
        if self.activation_checkpointing == "auto" and device == "cpu":
            return False
        return self.activation_checkpointing

    def dtype_on(self, device: str) -> DType:
        """Data type of the forward and backward pass on a device, ``"cpu"`` or ``"cuda"``."""
        return dtype_on(device, self.param_dtype)

    def packs(self, device: str) -> bool:
        """Whether samples are packed on a device, ``"cpu"`` or ``"cuda"``."""
        return device == "cuda" if self.packing == "auto" else self.packing == "packed"
