"""The prompts of a settings file: which files, what becomes of them, and their rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray_apr.cli.user_files import check_prompts, columns_of, read_json_rows
from ray_apr.config import PromptsConfig
from ray_apr.config.yaml import as_mapping, section_of
from ray_apr.core.checks import positive, require, whole_or_none
from ray_apr.core.exceptions import ConfigError

if TYPE_CHECKING:
    import pyarrow as pa

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
class WeightedFile(PromptFile):
    """One of several files of prompts."""

    weight: float | None = None
    """How much of what is handed out is of this file, beside the others; with one of them all have
    a weight. None: rows come equally often, whatever file they are of."""
    name: str | None = None
    """What its rows have as their source, where there are weights; None: that of the file."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weight is not None:
            positive(f"prompts.files[{self.path}]", self, "weight")

    @property
    def source(self) -> str:
        """What its rows have as their source."""
        return self.name or Path(self.path).stem


@dataclass(frozen=True, kw_only=True)
class PromptsSettings(PromptsConfig):
    """Where the prompts of a run come from, and what becomes of them."""

    path: str | None = None
    """A .parquet, .jsonl or .json file; relative to the YAML file."""
    limit: int | None = None
    """Take only the first rows of `path`; None takes all."""
    files: tuple[WeightedFile, ...] = ()
    """Several files instead, each with settings of its own."""

    def __post_init__(self) -> None:
        files = tuple(self.files)
        object.__setattr__(self, "files", files)
        weights = {file.source: file.weight for file in files if file.weight is not None}
        if weights:
            self._check_weights(weights)
            object.__setattr__(self, "weights", weights)
        super().__post_init__()
        whole_or_none("prompts", self, 1, "limit")
        for name in ("path", "limit") if files else ():
            value = getattr(self, name)
            remedy = "must be left out beside prompts.files, each of which has its own"
            require(value is None, f"prompts.{name}", value, remedy)

    def _check_weights(self, weights: Mapping[str, float]) -> None:
        """Check that all files have weights and names, or those that were made of them."""
        without = [file.path for file in self.files if file.weight is None]
        remedy = "have no weight, which others have; give one to all or none of them"
        require(not without, "prompts.files", without, remedy)
        named = [file.source for file in self.files]
        remedy = "have one name; give each another `name`"
        require(len(set(named)) == len(named), "prompts.files", named, remedy)
        remedy = "must be left out beside prompts.files, each of which has its own"
        require(self.weights in (None, weights), "prompts.weights", self.weights, remedy)

    @property
    def config(self) -> PromptsConfig:
        """What the run's own processes know of it."""
        names = [field.name for field in dataclasses.fields(PromptsConfig)]
        return PromptsConfig(**{name: getattr(self, name) for name in names})

    @property
    def all_files(self) -> tuple[PromptFile, ...]:
        """The files, in their order."""
        if self.files:
            return self.files
        return (PromptFile(path=self.path or "", limit=self.limit),)

    def __str__(self) -> str:
        """As a plan shows them."""
        shown = (
            file.path + (f" (weight {file.weight:g})" if file.weight else "") for file in self.files
        )
        return ", ".join(shown) or str(self.path)


def prompts_of(given: Any, base_dir: Path, column: str) -> PromptsSettings:
    """The settings of a run's prompts, with absolute paths, after a look at the files.

    Args:
        given: The section, the path of a file alone, or a list of files.
        base_dir: What a path is relative to.
        column: Name of the prompt column.

    Raises:
        ConfigError: If a setting is wrong, or a file is none of prompts.
    """
    values = {"files": given} if isinstance(given, list) else _section("prompts", given)
    given = values.pop("files", None)
    if given is None:
        _require_path("prompts", values)
    settings: PromptsSettings = section_of("prompts", PromptsSettings, values)
    if given is None:
        path = check_prompts(str(settings.path), base_dir, column)
        return dataclasses.replace(settings, path=path)
    if not isinstance(given, list) or not given:
        raise ConfigError("prompts.files", given, "must be a list of files; give at least one")
    files = [file_of("prompts.files", file, base_dir, column, WeightedFile) for file in given]
    _check_columns(files)
    return dataclasses.replace(settings, files=tuple(files))


def file_of(
    name: str, given: Any, base_dir: Path, column: str, cls: type[PromptFile] = PromptFile
) -> Any:
    """A file of prompts, with its absolute path, after a look at it.

    Args:
        name: Of the section.
        given: The section, or the path of the file alone.
        base_dir: What a path is relative to.
        column: Name of the prompt column.
        cls: Class of its settings.

    Raises:
        ConfigError: If a setting is wrong, or the file is none of prompts.
    """
    values = _section(name, given)
    _require_path(name, values)
    settings = section_of(name, cls, values)
    return dataclasses.replace(settings, path=check_prompts(settings.path, base_dir, column))


def _section(name: str, given: Any) -> dict[str, Any]:
    return {"path": given} if isinstance(given, str) else as_mapping(name, given)


def _require_path(name: str, values: Mapping[str, Any]) -> None:
    remedy = "is missing; give a .parquet, .jsonl or .json file"
    require(values.get("path") is not None, f"{name}.path", None, remedy)


def _check_columns(files: Sequence[PromptFile]) -> None:
    """Check that several files have the same columns."""
    first = columns_of(Path(files[0].path))
    for file in files[1:]:
        different = sorted(set(first) ^ set(columns_of(Path(file.path))))
        remedy = f"and {files[0].path} have other columns: {', '.join(different)}; make them alike"
        require(not different, "prompts.files", file.path, remedy)


def read_prompts(prompts: PromptsSettings | PromptFile) -> PromptRows:
    """Read the file of the prompts, or all of them, one after the other.

    Rows of files with weights get a column with the name of their source.

    Raises:
        ConfigError: If one is broken, naming the first line or row that is no JSON object; or they
            do not go together.
    """
    from ray_apr.data.rows import PromptRows

    if isinstance(prompts, PromptFile):
        return PromptRows(_read(prompts))
    is_weighted = any(file.weight is not None for file in prompts.files)
    column = prompts.source_column if is_weighted else None
    return PromptRows(_joined([_read(file, column) for file in prompts.all_files]))


def _read(file: PromptFile, source_column: str | None = None) -> pa.Table | list[dict[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet

    path, source = Path(file.path), getattr(file, "source", None)
    if path.suffix == ".parquet":
        try:
            table = pyarrow.parquet.read_table(path)
        except (ValueError, OSError) as error:  # pyarrow's errors are ValueErrors
            remedy = f"cannot be read: {' '.join(str(error).split())}"
            raise ConfigError("prompts", file.path, remedy) from error
        table = table if file.limit is None else table.slice(0, file.limit)
        names = table.column_names
        if source_column is not None and source_column not in names:
            return table.append_column(source_column, pa.array([source] * len(table), pa.string()))
        rows: Any = table
    else:
        # read_json guesses types: an answer "007" would come out as the number 7
        rows = read_json_rows(path)[: file.limit]
        names = sorted({name for row in rows for name in row})
        if source_column is not None and source_column not in names:
            return [row | {source_column: source} for row in rows]
    if source_column is not None:
        remedy = f"{file.path} has such a column; choose another name for that of the files' names"
        raise ConfigError("prompts.source_column", source_column, remedy)
    return rows


def _joined(parts: Sequence[Any]) -> Any:
    """Rows of several files; as Arrow tables if all of them are."""
    import pyarrow as pa

    if len(parts) == 1:
        return parts[0]
    if not all(isinstance(part, pa.Table) for part in parts):
        lists = (part.to_pylist() if isinstance(part, pa.Table) else part for part in parts)
        return [row for rows in lists for row in rows]
    try:
        return pa.concat_tables([part.select(parts[0].column_names) for part in parts])
    except ValueError as error:  # as pyarrow's errors are
        remedy = f"have columns of other types: {' '.join(str(error).split())}; make them alike"
        raise ConfigError("prompts.files", "Parquet files", remedy) from error
