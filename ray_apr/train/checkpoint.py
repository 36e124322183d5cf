"""Checkpoints of the trainer, and the trained model in Hugging Face's format.

A checkpoint folder holds the sharded state of all ranks (``torch.distributed.checkpoint``, readable
by any number of ranks), one random state a rank, ``progress.json``, and what the rollout side goes
on with, ``rollout.json`` and ``samples.arrow``. Every rank writes its own files, all of them into
one folder, or into folders that Ray Train merges into one. `train.saving` says when.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import json
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from huggingface_hub import split_torch_state_dict_into_shards, try_to_load_from_cache
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.state_dict import set_state_dict
from transformers import AutoConfig, AutoTokenizer
from transformers.utils import GENERATION_CONFIG_NAME

from ray_apr.core.exceptions import TrainError
from ray_apr.core.threads import in_thread
from ray_apr.data.resumption import PROGRESS_FILE, ROLLOUT_FILE, SAMPLES_FILE, RolloutProgress
from ray_apr.data.saved_samples import write_samples
from ray_apr.train.checksums import OF_ROLLOUT, check_files, checksums, write_checksums
from ray_apr.train.fsdp import drop_gathered
from ray_apr.train.staging import Stager, trainer_state
from ray_apr.train.state_files import FilesWriter, Scribe, StatePlanner
from ray_apr.weights.adapters import adapter_settings, merged_parameters
from ray_apr.weights.wire import wire_tensors

HF_FOLDER = "hf"
_TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "chat_template*",
    GENERATION_CONFIG_NAME,
)
_TEMPLATES = "additional_chat_templates"
"""A folder."""
_SHARD_SIZE = "4GB"
_INDEX_FILE = ".metadata"
"""Of the shards, by torch on rank 0; those of a rank begin with two underscores and its number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where a run stood when its checkpoint was written."""

    step: int
    """The next optimizer step."""
    policy_version: int
    lora_rank: int | None = None
    """Of the model's adapters; 0: it has none; None: a checkpoint of an older version."""
    lora_alpha: float | None = None
    """The same, which the adapters' weights do not show."""
    lora_layers: str | None = None
    """Last parts of the names of the layers that have them; None: as of alpha."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """This rank's part of the trainer's state at one moment."""

    state: Callable[[], dict[str, Any]]
    """Gives that of the model and of its optimizer, or waits for its copy."""
    random: dict[str, Any]
    progress: Progress

    def write(
        self,
        folder: str | Path,
        group: dist.ProcessGroup | None = None,
        scribe: Scribe | None = None,
    ) -> None:
        """Write this rank's files; all ranks call this together.

        Args:
            folder: A folder of this rank, or one that all ranks share; made if it is not there.
            group: What the ranks agree in; None: the one that they all compute in.
            scribe: Of the stager that has the copy; None: this process writes.

        Waits for: the copy, and the other ranks. Unblocked by: these, or the group's limit.

        Raises:
            CheckpointException: On all ranks, of torch, if one of them could not write.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        writer = FilesWriter(folder, scribe)
        dcp.save(
            self.state(),
            storage_writer=writer,
            planner=StatePlanner(),
            process_group=group,
        )
        rank = dist.get_rank()
        files = [folder / _random_file(rank)]
        torch.save(self.random, files[0])
        if rank == 0:
            known = {n: value for n, value in asdict(self.progress).items() if value is not None}
            (folder / PROGRESS_FILE).write_text(json.dumps(known), encoding="utf-8")
            files += [folder / PROGRESS_FILE, folder / _INDEX_FILE]
        write_checksums(folder, rank, writer.checksums | checksums(files))


def take_snapshot(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    progress: Progress,
    stager: Stager | None = None,
) -> Snapshot:
    """The state of now; all ranks call this together.

    Args:
        model: The sharded model.
        optimizer: Its optimizer.
        progress: Step and policy version.
        stager: Copies the state to the host, so that it may be written while training goes on,
            until the next one is taken. None: it has to be written before.
    """
    drop_gathered(model)
    if stager is not None:
        stager.stage()
    return Snapshot(
        state=partial(trainer_state, model, optimizer) if stager is None else stager.wait,
        random=_random_state(),
        progress=replace(progress, **adapter_settings(model)),
    )


def save_rollout(folder: str | Path, rollout: RolloutProgress, samples: pa.Table) -> None:
    """Write the rollout side's part of a checkpoint; rank 0 calls this.

    Args:
        folder: Of the checkpoint; it exists.
        rollout: Where the rollout side stands.
        samples: Its samples (`saved_samples`).
    """
    digest = write_samples(Path(folder) / SAMPLES_FILE, samples)
    rollout = replace(rollout, samples_digest=digest)
    file = Path(folder) / ROLLOUT_FILE
    file.write_text(rollout.to_json(), encoding="utf-8")
    write_checksums(file.parent, OF_ROLLOUT, checksums([file]))


def load_checkpoint(
    folder: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer
) -> Progress:
    """Restore what `Snapshot.write` wrote; all ranks call this together.

    The optimizer gets its states, and keeps the settings that it was made with. Ranks that the
    checkpoint has no random state for (more ranks than before) keep their own.

    Raises:
        TrainError: If the folder holds no checkpoint of ours, or one of another model.
        ConfigError: On all ranks, if files are not what was written; each rank looks at some.
    """
    folder = Path(folder)
    if not (folder / PROGRESS_FILE).is_file():
        raise TrainError(f"{folder} holds no checkpoint of a run: {PROGRESS_FILE} is missing")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    checked = in_thread(lambda: check_files(folder, rank, num_ranks), "apr-checksums")
    state = trainer_state(model, optimizer)
    try:
        dcp.load(state, checkpoint_id=str(folder))
    except CheckpointException as error:
        _end_together(checked)  # which names the file that torch failed of
        remedy = "see whether model and train.lora are those that it was written with"
        raise TrainError(f"{folder} cannot be read, or does not fit; {remedy}") from error
    _end_together(checked)
    settings = [
        {name: value for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    for group, of_this_run in zip(optimizer.param_groups, settings, strict=True):
        group.update(of_this_run)
    random_file = folder / _random_file(dist.get_rank())
    if random_file.is_file():
        _set_random_state(torch.load(random_file, weights_only=True))
    return Progress(**json.loads((folder / PROGRESS_FILE).read_text(encoding="utf-8")))


def _end_together(work: concurrent.futures.Future[None]) -> None:
    """Raise on all ranks what the first of them has failed of.

    Waits for: a thread that reads the files, then the other ranks. Unblocked by: their end, or the
    limit of collectives.
    """
    errors: list[BaseException | None] = [None] * dist.get_world_size()
    concurrent.futures.wait([work])
    dist.all_gather_object(errors, work.exception())
    for error in errors:
        if error is not None:
            raise error


def export_hf(folder: str | Path, model: Any, source: str) -> None:
    """Write the trained model as Hugging Face's libraries and vLLM read it; all ranks call this.

    Rank 0 writes; the others only give their shards. Names and shapes are those of the source. The
    parameters get its data type, too; saved buffers, which do not learn, keep theirs.

    Args:
        folder: Where rank 0 writes.
        model: The sharded model.
        source: Folder or hub id that it was loaded from: config and tokenizer come from there.
    """
    config = AutoConfig.from_pretrained(source)
    dtype = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
    is_writer = not dist.is_initialized() or dist.get_rank() == 0
    buffers = {name for name, _ in model.named_buffers()}
    weights = {}
    for name, weight in full_parameters(model):
        if is_writer:
            to = weight.dtype if name in buffers else dtype
            weights[name] = weight.to("cpu", to, copy=True)  # of its own: files hold no views
    if not is_writer:
        return
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    _write_weights(folder, weights)
    config.save_pretrained(folder)
    _write_tokenizer(folder, source)


@torch.no_grad()
def full_parameters(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and whole values of all tensors of the model's checkpoint: parameters and saved
    buffers, tied ones once and adapters merged; all ranks together.

    Raises:
        WeightSyncError: If the checkpoint cannot be made of them.
    """
    drop_gathered(model)
    seen = set()
    saved = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) not in seen:
            seen.add(id(value))
            saved[name] = value
    merged = merged_parameters(model, saved)
    tensors = wire_tensors(model, {name: tuple(p.base.shape) for name, p in merged.items()})
    for source, parts in itertools.groupby(tensors, key=lambda tensor: tensor.source):
        whole = merged[source].full()
        for tensor in parts:
            yield tensor.name, tensor.of(whole)


def _write_weights(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    """Write safetensors, and an index if they need several files.

    safetensors writes files that only their owner may read; they get the mode of any other file.
    """
    plan = split_torch_state_dict_into_shards(
        weights, filename_pattern="model{suffix}.safetensors", max_shard_size=_SHARD_SIZE
    )
    for file, names in plan.filename_to_tensors.items():
        path = folder / file
        path.touch()
        mode = path.stat().st_mode
        save_file({n: weights[n] for n in names}, path, metadata={"format": "pt"})
        path.chmod(mode)
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        text = json.dumps(index, indent=2)
        (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")


def _write_tokenizer(folder: Path, source: str) -> None:
    """Copy the tokenizer's files from the source folder, or save a hub model's tokenizer."""
    if not Path(source).is_dir():
        AutoTokenizer.from_pretrained(source).save_pretrained(folder)
        ends = try_to_load_from_cache(source, GENERATION_CONFIG_NAME)
        if isinstance(ends, str):  # the model was loaded from there, too
            shutil.copy2(ends, folder / GENERATION_CONFIG_NAME)
        return
    for pattern in _TOKENIZER_FILES:
        for file in filter(Path.is_file, Path(source).glob(pattern)):
            shutil.copy2(file, folder / file.name)
    templates = Path(source) / _TEMPLATES
    if templates.is_dir():
        shutil.copytree(templates, folder / _TEMPLATES, dirs_exist_ok=True)


def _random_file(rank: int) -> str:
    return f"random-{rank}.pt"


def _random_state() -> dict[str, Any]:
    """Random states of this rank: torch's, and those of Python and NumPy, of which an objective of
    the user's may draw. In types that ``torch.load`` takes without pickled code."""
    of_numpy: Any = np.random.get_state()
    kind, keys, *rest = of_numpy
    state: dict[str, Any] = {"cpu": torch.get_rng_state(), "python": random.getstate()}
    state["numpy"] = (kind, torch.from_numpy(keys.astype(np.int64)), *rest)
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["cpu"])
    if "python" in state:  # an older checkpoint has torch's alone
        random.setstate(state["python"])
        kind, keys, *rest = state["numpy"]
        np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
