"""Prompts of a dataset of the Hugging Face Hub, or of a folder that is laid out as one."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from ray_apr.core.checks import require
from ray_apr.core.exceptions import ConfigError, all_lines
from ray_apr.run.model import HUB_ID

if TYPE_CHECKING:
    import pyarrow as pa

_SPLIT = "train"
"""Where none is given."""


def check_dataset_id(name: str, given: str, base_dir: Path) -> str:
    """Return the absolute folder of a dataset, or a hub id as it is; the hub is not asked.

    Args:
        name: Of the setting.
        given: As the user gave it.
        base_dir: What a folder is relative to.

    Raises:
        ConfigError: If it is neither, or what reads it is not installed.
    """
    folder = (base_dir / Path(given).expanduser()).resolve()
    remedy = f"there is no folder {folder}; correct the path, or give a hub id as owner/name"
    require(folder.is_dir() or HUB_ID.fullmatch(given) is not None, name, given, remedy)
    remedy = "needs the package datasets: pip install 'ray-apr[hub]'; or give a file as `path`"
    require(importlib.util.find_spec("datasets") is not None, name, given, remedy)
    return str(folder) if folder.is_dir() else given


def read_dataset(
    name: str,
    dataset: str,
    *,
    subset: str | None = None,
    split: str | None = None,
    revision: str | None = None,
    limit: int | None = None,
) -> pa.Table:
    """Read a split; its columns stay in the files of the cache, which are mapped into memory.

    Waits for: the hub. Unblocked by: its answers, or the time limits and retries of the package
    datasets.

    Args:
        name: Of the section of the settings.
        dataset: Hub id or folder.
        subset: Of a dataset that has several; None: its only or its default one.
        split: None: "train".
        revision: Branch, tag or commit; None: the newest.
        limit: Take only the first rows; None takes all.

    Raises:
        ConfigError: If the dataset, the subset or the split cannot be had.
    """
    import datasets

    split = split or _SPLIT
    try:
        # each step refuses by a ValueError what the user chose for it
        field, given = "subset", subset
        builder = datasets.load_dataset_builder(dataset, subset, revision=revision)
        field, given = "dataset", dataset
        builder.download_and_prepare()
        field, given = "split", split
        table = builder.as_dataset(split=split).with_format("arrow")[:limit]
    except ValueError as error:
        raise ConfigError(f"{name}.{field}", given, f"{all_lines(error)}; name another") from error
    except (OSError, datasets.exceptions.DatasetsError) as error:
        remedy = (
            f"cannot be had: {all_lines(error)}; correct the id or the revision, log in "
            "(HF_TOKEN), or load it where there is a network and give its folder, or a file as "
            "`path`"
        )
        raise ConfigError(f"{name}.dataset", dataset, remedy) from error
    return table.replace_schema_metadata(None)
