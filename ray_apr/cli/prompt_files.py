"""The prompts of a settings file: which files, what becomes of them, and their rows."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray_apr.cli.hub_prompts import check_dataset_id, read_dataset
from ray_apr.cli.user_files import (
    PROMPT_SUFFIXES,
    all_columns_of,
    check_prompts,
    columns_of,
    kinds_of,
    read_json_rows,
)
from ray_apr.config import PromptsConfig
from ray_apr.config.yaml import as_mapping, check_section, section_of
from ray_apr.core.checks import from_mapping, positive, require, whole_or_none
from ray_apr.core.exceptions import ConfigError, all_lines
from ray_apr.core.names import names_in

if TYPE_CHECKING:
    import pyarrow as pa

    from ray_apr.data.rows import Origin, PromptRows


@dataclass(frozen=True, kw_only=True)
class PromptFile:
    """A file of prompts, or a dataset of a hub."""

    path: str | None = None
    """A .parquet, .jsonl or .json file; relative to the YAML file."""
    limit: int | None = None
    """Take only the first rows; None takes all."""
    dataset: str | None = None
    """Instead of a file: a dataset of the Hugging Face Hub as ``owner/name``, or a folder that is
    laid out as one, relative to the YAML file."""
    subset: str | None = None
    """Of a dataset that has several; None: the only or the default one."""
    split: str | None = None
    """Of a dataset; None: "train"."""
    revision: str | None = None
    """Of a dataset: branch, tag or commit; None: the newest."""

    def __post_init__(self) -> None:
        whole_or_none("prompts", self, 1, "limit")

    def __str__(self) -> str:
        """As a plan shows it."""
        parts = (self.dataset or self.path, self.subset, self.split)
        return ", ".join(part for part in parts if part)

    @property
    def rows_name(self) -> str:
        """Of its file, or of the dataset."""
        return Path(self.path).stem if self.path else Path(self.dataset or "").name


_SOURCE = tuple(field.name for field in dataclasses.fields(PromptFile))


@dataclass(frozen=True, kw_only=True)
class WeightedFile(PromptFile):
    """One of several files or datasets of prompts."""

    weight: float | None = None
    """How much of what is handed out is of this file, beside the others; with one of them all have
    a weight. None: rows come equally often, whatever file they are of."""
    name: str | None = None
    """What its rows have as their source, where there are weights; None: that of the file."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weight is not None:
            positive(f"prompts.files[{self.path or self.dataset}]", self, "weight")

    def __str__(self) -> str:
        """As a plan shows it."""
        return super().__str__() + (f" (weight {self.weight:g})" if self.weight else "")

    @property
    def source(self) -> str:
        """What its rows have as their source."""
        return self.name or self.rows_name


@dataclass(frozen=True, kw_only=True)
class PromptsSettings(PromptsConfig, PromptFile):
    """Where the prompts of a run come from, and what becomes of them."""

    files: tuple[WeightedFile, ...] = ()
    """Several files or datasets instead, each with settings of its own."""

    def __post_init__(self) -> None:
        files = tuple(self.files)
        object.__setattr__(self, "files", files)
        weights = {file.source: file.weight for file in files if file.weight is not None}
        if weights:
            self._check_weights(weights)
            object.__setattr__(self, "weights", weights)
        PromptsConfig.__post_init__(self)
        PromptFile.__post_init__(self)
        for name in _SOURCE if files else ():
            value = getattr(self, name)
            remedy = "must be left out beside prompts.files, each of which has its own"
            require(value is None, f"prompts.{name}", value, remedy)

    def _check_weights(self, weights: Mapping[str, float]) -> None:
        """Check that all files have weights and names, or those that were made of them."""
        without = [str(file) for file in self.files if file.weight is None]
        remedy = "have no weight, which others have; give one to all or none of them"
        require(not without, "prompts.files", without, remedy)
        _require_distinct("prompts.files", self.files)
        remedy = "must be left out beside prompts.files, each of which has its own"
        require(self.weights in (None, weights), "prompts.weights", self.weights, remedy)

    @property
    def config(self) -> PromptsConfig:
        """What the run's own processes know of it."""
        fields = dataclasses.fields(PromptsConfig)
        return PromptsConfig(**{field.name: getattr(self, field.name) for field in fields})

    @property
    def all_files(self) -> tuple[PromptFile, ...]:
        """The files, in their order."""
        return self.files or (self,)

    def __str__(self) -> str:
        """As a plan shows them."""
        return ", ".join(map(str, self.files)) or super().__str__()


@dataclass(frozen=True, kw_only=True)
class Suites:
    """Held-out prompts of several files or datasets, each one a suite; a column that one of them
    lacks is None in its rows."""

    files: tuple[WeightedFile, ...]
    column: str
    """Gets the names of the suites."""

    def __post_init__(self) -> None:
        weighted = [str(file) for file in self.files if file.weight is not None]
        remedy = "have a weight, which prompts alone have; leave it out"
        require(not weighted, "evaluation.prompts", weighted, remedy)
        _require_distinct("evaluation.prompts", self.files)

    def __str__(self) -> str:
        """As a plan shows them."""
        return ", ".join(map(str, self.files))


def suites_of(given: Any, base_dir: Path, prompt_column: str, column: str) -> PromptFile | Suites:
    """Held-out prompts: a file or dataset; or a list of them, or a folder of files, as suites.

    Args:
        given: As the user gave it.
        base_dir: What paths are relative to.
        prompt_column: Column of the prompts.
        column: Gets the names of suites.

    Raises:
        ConfigError: If a setting is wrong, or a file is none of prompts.
    """
    name = "evaluation.prompts"
    if isinstance(given, str) and (folder := base_dir / Path(given).expanduser()).is_dir():
        files = sorted(f for f in folder.iterdir() if f.suffix in PROMPT_SUFFIXES)
        remedy = "has no .parquet, .jsonl or .json file; put one for each suite there"
        require(bool(files), name, given, remedy)
        given = [str(file.resolve()) for file in files]
    if not isinstance(given, list):
        only: PromptFile = file_of(name, given, base_dir, prompt_column)
        return only
    return Suites(files=_files_of(name, given, base_dir, prompt_column), column=column)


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
        return file_of("prompts", values, base_dir, column, PromptsSettings)
    check_section("prompts", PromptsSettings, values)
    files = _files_of("prompts.files", given, base_dir, column)
    _check_columns("prompts.files", files)
    return from_mapping(PromptsSettings, "prompts", values | {"files": files})


def _files_of(name: str, given: Any, base_dir: Path, column: str) -> tuple[WeightedFile, ...]:
    """Several files or datasets that go together; arguments as of `file_of`."""
    if not isinstance(given, list) or not given:
        raise ConfigError(name, given, "must be a list of files; give at least one")
    return tuple(file_of(name, file, base_dir, column, WeightedFile) for file in given)


def file_of(
    name: str, given: Any, base_dir: Path, column: str, cls: type[PromptFile] = PromptFile
) -> Any:
    """A file or dataset of prompts, with its absolute path, after a look at it; of a dataset it is
    not looked at the rows.

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
    dataset = values.get("dataset")
    for key in ("subset", "split", "revision") if dataset is None else ("path",):
        remedy = f"belongs to {'a dataset' if dataset is None else 'a file'}; leave it out"
        require(values.get(key) is None, f"{name}.{key}", values.get(key), remedy)
    remedy = "is missing; give a .parquet, .jsonl or .json file, or a dataset"
    require(values.get("path", dataset) is not None, f"{name}.path", None, remedy)
    settings = section_of(name, cls, values)
    if dataset is None:
        checked = {"path": check_prompts(settings.path, base_dir, column, name)}
    else:
        checked = {"dataset": check_dataset_id(f"{name}.dataset", settings.dataset, base_dir)}
    return dataclasses.replace(settings, **checked)


def _section(name: str, given: Any) -> dict[str, Any]:
    return {"path": given} if isinstance(given, str) else as_mapping(name, given)


def _require_distinct(setting: str, files: Sequence[WeightedFile]) -> None:
    named = [file.source for file in files]
    remedy = "have one name; give each another `name`"
    require(len(set(named)) == len(named), setting, named, remedy)


def _check_columns(setting: str, files: Sequence[PromptFile]) -> None:
    """Check that several files have the same columns; those of datasets are read with them."""
    paths = [Path(file.path) for file in files if file.path]
    for path in paths[1:]:
        if set(columns_of(path)) != set(columns_of(paths[0])):  # a first row may lack some
            columns, of_first = all_columns_of(path), all_columns_of(paths[0])
            _require_alike(setting, str(path), columns, str(paths[0]), of_first)


def _require_alike(
    setting: str, name: str, columns: Sequence[str], first: str, of_first: Sequence[str]
) -> None:
    different = ", ".join(sorted(set(of_first) ^ set(columns)))
    remedy = f"and {first} have other columns: {different}; make them alike"
    require(not different, setting, name, remedy)


def read_prompts(prompts: PromptsSettings | PromptFile | Suites) -> PromptRows:
    """Read the file or dataset of the prompts, or all of them, one after the other.

    Rows of files with weights get a column with the name of their source.

    Raises:
        ConfigError: If one is broken, naming the first line or row that is no JSON object; a
            dataset cannot be had; or they do not go together.
    """
    from ray_apr.data.rows import PromptRows

    name, column = "evaluation.prompts", None
    files: Sequence[PromptFile]
    if isinstance(prompts, Suites):
        files, column = prompts.files, ("evaluation.suite_column", prompts.column)
    elif isinstance(prompts, PromptsSettings):
        name, files = "prompts.files" if prompts.files else "prompts", prompts.all_files
        if any(file.weight for file in prompts.files):
            column = ("prompts.source_column", prompts.source_column)
    else:
        files = [prompts]
    parts, origins = zip(*(_read(name, file, column) for file in files), strict=True)
    if not isinstance(prompts, Suites):
        of_first = set(_names(parts[0][:1]))
        for file, part in zip(files, parts, strict=True):
            if set(_names(part[:1])) != of_first:  # a first row may lack some
                _require_alike(name, str(file), _names(part), str(files[0]), _names(parts[0]))
    return PromptRows(_joined(name, files, parts), origins)


def _check_kinds(
    setting: str, files: Sequence[PromptFile], lists: Sequence[Sequence[Mapping[str, Any]]]
) -> None:
    """Check that a table can be made of rows of JSON: of one file it was seen before."""
    found: dict[str, tuple[str, PromptFile]] = {}
    for file, rows in zip(files, lists, strict=True):
        for name, kind in kinds_of(rows).items():
            of_first, first = found.setdefault(name, (kind, file))
            remedy = f"has {kind} as {name}, and {first} {of_first}; make them alike"
            require(kind == of_first, setting, str(file), remedy)


def _read(
    section: str, file: PromptFile, column: tuple[str, str] | None
) -> tuple[pa.Table | list[dict[str, Any]], Origin]:
    """Rows of a file, with a column for the name of their source if it has a setting and a name;
    and where they are from."""
    import pyarrow as pa

    from ray_apr.data.rows import Origin

    source = getattr(file, "source", None)
    rows, lines = _rows_of(section, file)
    name = Path(file.path).name if file.path else str(file.dataset)
    origin = Origin(name=name, num_rows=len(rows), lines=lines)
    if column is None:
        return rows, origin
    setting, source_column = column
    remedy = f"{file} has such a column; choose another name for that of the files' names"
    require(source_column not in _names(rows), setting, source_column, remedy)
    if isinstance(rows, pa.Table):
        rows = rows.append_column(source_column, pa.array([source] * len(rows), pa.string()))
        return rows, origin
    return [row | {source_column: source} for row in rows], origin


def _rows_of(
    section: str, file: PromptFile
) -> tuple[pa.Table | list[dict[str, Any]], Sequence[int] | None]:
    """Rows of a file or dataset, and the line of each where a person counts lines."""
    if file.dataset is not None:
        chosen = {name: getattr(file, name) for name in ("subset", "split", "revision", "limit")}
        return read_dataset(section, file.dataset, **chosen), None
    path = Path(str(file.path))
    if path.suffix != ".parquet":
        # read_json guesses types: an answer "007" would come out as the number 7
        rows, lines = read_json_rows(path)
        return rows[: file.limit], lines
    return _parquet(path)[: file.limit], None


def _parquet(path: Path) -> pa.Table:
    """Rows of a Parquet file, which are not in memory: they may be more than fit."""
    import pyarrow as pa
    import pyarrow.parquet

    from ray_apr.data.mapped import mapped_table

    def tables(parquet: pyarrow.parquet.ParquetFile) -> Iterator[pa.Table]:
        """Waits for: the disk. Unblocked by: the rows, or its error."""
        with _readable(path):
            for batch in parquet.iter_batches():
                yield pa.Table.from_batches([batch])

    with _readable(path):
        file = pyarrow.parquet.ParquetFile(path, memory_map=True)
    with file:
        return mapped_table(file.schema_arrow, tables(file))


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (ValueError, OSError) as error:  # pyarrow's errors are ValueErrors
        remedy = f"cannot be read: {all_lines(error)}"
        raise ConfigError("prompts", str(path), remedy) from error


def _names(rows: pa.Table | list[dict[str, Any]]) -> list[str]:
    """Columns; of JSON objects those that any of them has."""
    return names_in(rows) if isinstance(rows, list) else list(rows.column_names)


def _joined(setting: str, files: Sequence[PromptFile], parts: Sequence[Any]) -> Any:
    """Rows of several files, as an Arrow table if all are; None for a column that one lacks."""
    import pyarrow as pa

    from ray_apr.data.kinds import one_table

    if len(parts) == 1:
        return parts[0]
    if not all(isinstance(part, pa.Table) for part in parts):
        lists = [part.to_pylist() if isinstance(part, pa.Table) else part for part in parts]
        _check_kinds(setting, files, lists)
        lacking = dict.fromkeys(name for part in parts for name in _names(part))
        return [lacking | row for rows in lists for row in rows]
    try:
        return one_table(parts)
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        remedy = f"have columns of other types: {all_lines(error)}; make them alike"
        raise ConfigError(setting, "Parquet files", remedy) from error
