"""The model of a run: a folder that is here, or a hub id whose config is read once it can be."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ray_apr.core.architectures import check_config, check_divides, check_on_cpu, read_config
from ray_apr.core.checks import require
from ray_apr.core.exceptions import ConfigError, all_lines
from ray_apr.core.imports import finish_imports

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
"""``owner/name``."""
_LONGEST_HEADER = 100_000_000
"""Bytes of a header, as safetensors itself limits it."""
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


def check_model(model: str, base_dir: Path = Path()) -> str:
    """Return the absolute folder of a model, or a hub id ``owner/name`` as it is.

    Args:
        model: As the user gave it.
        base_dir: What a relative folder is relative to.

    Raises:
        ConfigError: If it is neither, a model that cannot be trained, or one without a tokenizer.
    """
    folder = (base_dir / Path(model).expanduser()).resolve()
    if folder.is_dir():
        read_config(model, folder)
        require(
            any((folder / name).is_file() for name in _TOKENIZER_FILES),
            "model",
            model,
            "the folder has no tokenizer; save one beside the weights "
            "(tokenizer.save_pretrained(folder))",
        )
        return str(folder)
    # beside a YAML file that is the folder which was meant
    beside = base_dir != Path() and (base_dir / model.split("/")[0]).is_dir()
    require(
        HUB_ID.fullmatch(model) is not None and not beside,
        "model",
        model,
        f"there is no folder {folder}; make the model first, correct the path, or give a hub "
        "id as owner/name",
    )
    return model


def context_of(model: str) -> int | None:
    """Longest prompt + response of a model, in tokens; None for a hub id, or if it has no limit."""
    folder = Path(model)
    context = read_config(model, folder).get("max_position_embeddings") if folder.is_dir() else None
    return int(context) if context else None


def num_ids_of(model: str) -> int | None:
    """Token ids that a model has a row for, from 0 on; None for a hub id, or if it does not say."""
    folder = Path(model)
    config = read_config(model, folder) if folder.is_dir() else {}
    count = config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size")
    return int(count) if count else None


def kv_values_of(model: str) -> int | None:
    """Keys and values of a token, in numbers, where each layer has those of each token; None for a
    hub id, and where they are compressed (MLA)."""
    folder = Path(model)
    config = read_config(model, folder) if folder.is_dir() else {}
    text = config.get("text_config") or config
    if not text or text.get("kv_lora_rank"):
        return None
    heads = int(text["num_attention_heads"])
    size = text.get("head_dim") or text["hidden_size"] // heads
    return 2 * int(text["num_hidden_layers"] * (text.get("num_key_value_heads") or heads) * size)


def num_parameters(model: str) -> int | None:
    """Parameters of a model, from the headers of its weights; None where its weights are not in a
    folder, or not in files of safetensors.

    Args:
        model: Folder or hub id.
    """
    shapes = []
    for file in Path(model).glob("*.safetensors"):
        try:
            with file.open("rb") as weights:
                length = int.from_bytes(weights.read(8), "little")
                header = json.loads(weights.read(min(length, _LONGEST_HEADER)))
            shapes += [tensor["shape"] for name, tensor in header.items() if name != "__metadata__"]
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None  # who loads it says what is wrong with it
    return sum(map(math.prod, shapes)) if shapes else None


def check_hub_model(model: str, *, is_here: bool = False) -> None:
    """Refuse a hub id's model that cannot be trained, once its config can be read; a folder's was
    checked by `check_model`.

    Args:
        model: Folder or hub id.
        is_here: Read only what is on this machine.

    Raises:
        ConfigError: If it is refused, or cannot be had.
    """
    if not Path(model).is_dir():
        check_config(model, _hub_config(model, is_here=is_here))


def check_engine(model: str, factory: object, device: str, num_gpus: int) -> None:
    """Refuse a model that its engines do not compute, as some on CPU.

    Args:
        model: Folder, or hub id whose config is on this machine (`check_hub_model`).
        factory: What makes the engines.
        device: Where they run.
        num_gpus: Of each of them there, `EngineConfig.tensor_parallel_size`.

    Raises:
        ConfigError: If it is refused, or cannot be had.
    """
    if factory != "vllm" or (device != "cpu" and num_gpus == 1):
        return
    folder = Path(model)
    is_here = folder.is_dir()
    config = read_config(model, folder) if is_here else _hub_config(model, is_here=True)
    if device == "cpu":
        check_on_cpu(model, config)
    else:
        check_divides(config, num_gpus)


def _hub_config(model: str, *, is_here: bool) -> Mapping[str, Any]:
    finish_imports()
    from transformers import PretrainedConfig

    try:
        config, _ = PretrainedConfig.get_config_dict(model, local_files_only=is_here)
    except OSError as error:
        remedy = f"is no folder, and the hub does not give it: {all_lines(error)}"
        raise ConfigError("model", model, remedy) from error
    return dict(config)
