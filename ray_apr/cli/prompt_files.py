"""The prompts of a settings file: which files, what becomes of them, and their rows."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray_apr.cli.user_files import check_prompts, read_json_rows
from ray_apr.config import PromptsConfig
from ray_apr.config.yaml import as_mapping, section_of
from ray_apr.core.checks import whole_or_none
from ray_apr.core.exceptions import ConfigError

if TYPE_CHECKING:
    from ray_apr.data.rows import PromptRows


@dataclass(frozen=True, kw_only=True)
class PromptFile:
    """A file of prompts."""

    path: str
    """A .parquet, .jsonl or .json file; relative to the YAML file."""
    limit: int | None = None
    """Take only the first rows; None takes all."""

    def __post_init__(self) -> None:
        whole_or_none("prompts", self, 1, "limit")


@dataclass(frozen=True, kw_only=True)
class PromptsSettings(PromptFile, PromptsConfig):
    """Where the prompts of a run come from, and what becomes of them."""

    def __post_init__(self) -> None:
        PromptFile.__post_init__(self)
        PromptsConfig.__post_init__(self)


def prompts_of(name: str, cls: type, given: Any, base_dir: Path, column: str) -> Any:
    """The settings of prompts, with an absolute path, after a look at the file.

    Args:
        name: Of the section.
        cls: Class of its settings.
        given: The section, or the path of the file alone.
        base_dir: What a path is relative to.
        column: Name of the prompt column.

    Raises:
        ConfigError: If a setting is wrong, or the file is none of prompts.
    """
    values = {"path": given} if isinstance(given, str) else as_mapping(name, given)
    if values.get("path") is None:
        raise ConfigError(f"{name}.path", None, "is missing; give a .parquet, .jsonl or .json file")
    settings = section_of(name, cls, values)
    return dataclasses.replace(settings, path=check_prompts(settings.path, base_dir, column))


def read_prompts(prompts: PromptFile) -> PromptRows:
    """Read the prompts file.

    Raises:
        ConfigError: If it is broken; names the first line or row that is no JSON object.
    """
    import pyarrow.parquet

    from ray_apr.data.rows import PromptRows

    if not prompts.path.endswith(".parquet"):
        # read_json guesses types: an answer "007" would come out as the number 7
        return PromptRows(read_json_rows(Path(prompts.path))[: prompts.limit])
    try:
        table = pyarrow.parquet.read_table(prompts.path)
    except (ValueError, OSError) as error:  # pyarrow's errors are ValueErrors
        remedy = f"cannot be read: {' '.join(str(error).split())}"
        raise ConfigError("prompts", prompts.path, remedy) from error
    return PromptRows(table if prompts.limit is None else table.slice(0, prompts.limit))
