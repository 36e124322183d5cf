"""What a run's settings point at: prompts file, reward function, environment.

The checks read files and import nothing of the user's; `load_code` does, at run time.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib
import importlib.util
import json
import sys
from array import array
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from ray_apr.core.exceptions import ConfigError
from ray_apr.core.names import names_in
from ray_apr.core.user import Environment

_KINDS: dict[type, str] = {
    str: "a text", int: "a number", float: "a number", bool: "true or false", list: "a list",
    dict: "an object",
}  # fmt: skip
"""Of values in JSON; null goes with all."""
PROMPT_SUFFIXES = (".parquet", ".jsonl", ".json")
"""Of files of prompts."""
_ENCODING = "utf-8-sig"
"""Of those of JSON: some programs begin a file with a byte order mark."""


def check_prompts(path: str, base_dir: Path, column: str, setting: str = "prompts") -> str:
    """Return the absolute path of a prompts file, after a look at its columns.

    Args:
        path: As it was given.
        base_dir: What it is relative to.
        column: Of the prompts.
        setting: That names the file.

    Raises:
        ConfigError: If it is missing, of another kind, broken, empty, or without the column.
    """
    file = (base_dir / Path(path).expanduser()).resolve()
    if file.suffix not in PROMPT_SUFFIXES:
        raise ConfigError(setting, path, "must be a .parquet, .jsonl or .json file")
    if not file.is_file():
        raise ConfigError(setting, path, f"there is no file {file}; make it or correct the path")
    try:
        names = columns_of(file)
    except ConfigError:
        raise
    except (ValueError, OSError) as error:
        remedy = f"cannot be read as {file.suffix[1:]}: {error}"
        raise ConfigError(setting, path, remedy) from error
    if column not in names:
        raise ConfigError(
            "rollout.prompt_column",
            column,
            f"{file.name} has no such column, only {', '.join(names)}; name the one of the prompts",
        )
    return str(file)


def columns_of(file: Path) -> list[str]:
    """Columns of the first row.

    Raises:
        ValueError: If there is none (pyarrow's errors are ValueErrors).
        ConfigError: If two have the same name, or the file is no UTF-8.
    """
    if file.suffix == ".parquet":
        import pyarrow.parquet  # a quarter of a second, and only for this kind of file

        meta = pyarrow.parquet.read_metadata(file)
        if meta.num_rows == 0:
            raise ValueError("it has no rows")
        names = list(meta.schema.to_arrow_schema().names)
        if twice := sorted({name for name in names if names.count(name) > 1}):
            remedy = f"has more than one column {', '.join(map(repr, twice))}; rename or remove one"
            raise ConfigError("prompts", file.name, remedy)
        return names
    with _is_utf8(file), file.open(encoding=_ENCODING) as lines:
        if file.suffix == ".json":
            rows = json.load(lines, object_pairs_hook=_object)
            first = rows[0] if isinstance(rows, list) and rows else None
        else:
            line = next((line for line in lines if line.strip()), None)
            first = None if line is None else json.loads(line, object_pairs_hook=_object)
    if not isinstance(first, dict):
        raise ValueError("it holds no rows, i.e. JSON objects")
    return list(first)


def all_columns_of(file: Path) -> list[str]:
    """Columns that any row has; raises what `columns_of` and `read_json_rows` raise."""
    if file.suffix == ".parquet":
        return columns_of(file)
    rows, _ = read_json_rows(file)
    return names_in(rows)


def read_json_rows(file: Path) -> tuple[list[dict[str, Any]], Sequence[int] | None]:
    """Read all rows of a .jsonl file, or of a .json file that holds one list.

    Returns:
        The rows; and of a .jsonl file the line of each, from 1.

    Raises:
        ConfigError: Names the first row that is no JSON object, has half of a character, or has
            another kind of value in a column than the rows before, of which no table can be made;
            or the first line that is no UTF-8.
    """
    with _is_utf8(file):
        text = file.read_text(encoding=_ENCODING)
    has_lines = file.suffix != ".json"
    unit = "line" if has_lines else "row"

    def where(number: int) -> str:
        return f"{file.name}, {unit} {number}"

    if not has_lines:
        numbered = list(enumerate(json.loads(text, object_pairs_hook=_object)))
    else:
        numbered = []
        for number, line in enumerate(text.split("\n"), start=1):
            try:
                if line.strip():
                    numbered.append((number, json.loads(line, object_pairs_hook=_object)))
            except ValueError as error:
                raise ConfigError("prompts", where(number), f"cannot be read: {error}") from error
    kinds: dict[str, tuple[str, int]] = {}
    may_have_halves = "\\ud" in text or "\\uD" in text
    for number, row in numbered:
        if not isinstance(row, dict):
            remedy = "is no JSON object with a prompt; correct it"
            raise ConfigError("prompts", where(number), remedy)
        if may_have_halves:
            _check_characters(where(number), row)
        for name, value in row.items():
            if (kind := _KINDS.get(type(value))) is None:
                continue
            of_first, first = kinds.setdefault(name, (kind, number))
            if kind != of_first:
                remedy = f"has {kind} as {name}, and {unit} {first} {of_first}; make them alike"
                raise ConfigError("prompts", where(number), remedy)
    lines = array("Q", (number for number, _ in numbered)) if has_lines else None
    return [row for _, row in numbered], lines


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, of which Python would keep the last of two values with the same name."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"an object has {twice!r} twice; rename or remove one")
    return found


def kinds_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Of each column of rows from one file the kind of its values, in words, where it has any."""
    return {
        name: kind
        for row in rows
        for name, value in row.items()
        if (kind := _KINDS.get(type(value))) is not None
    }


@contextlib.contextmanager
def _is_utf8(file: Path) -> Iterator[None]:
    try:
        yield
    except UnicodeDecodeError as error:
        lines = enumerate(file.read_bytes().splitlines(), start=1)
        number = next(n for n, line in lines if line.decode(errors="ignore").encode() != line)
        remedy = f"is no UTF-8: {error.reason}; save the file as UTF-8"
        raise ConfigError("prompts", f"{file.name}, line {number}", remedy) from error


def _check_characters(where: str, row: Mapping[str, Any]) -> None:
    for name, value in row.items():
        try:
            json.dumps([name, value], ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = error.object[error.start]
            remedy = f"has {half!r} in {name!r}, half of a character; correct it"
            raise ConfigError("prompts", where, remedy) from error


def _split(key: str, spec: str) -> tuple[str, str]:
    where, colon, name = spec.rpartition(":")
    if not colon or not where or not name.isidentifier():
        raise ConfigError(key, spec, 'must be "package.module:name" or "file.py:name"')
    return where, name


def check_code(key: str, spec: str, base_dir: Path) -> str:
    """Check that a file of the user's defines a name, or that its package is installed.

    Args:
        key: The setting, ``"reward"`` or ``"environment"``.
        spec: ``"package.module:name"`` or ``"file.py:name"``.
        base_dir: Folder that a file is relative to.

    Raises:
        ConfigError: If not; names what the file does define.
    """
    where, name = _split(key, spec)
    if where.endswith(".py"):
        file = (base_dir / Path(where).expanduser()).resolve()
        if not file.is_file():
            remedy = f"there is no file {file}; correct the path"
            raise ConfigError(key, spec, remedy)
        _check_defined(key, spec, name, file)
    elif not _is_found(where.split(".")[0]):
        raise ConfigError(
            key, spec, f"there is no module {where}; install it, or give file.py:name"
        )
    return spec


def _is_found(module: str) -> bool:
    try:
        return module in sys.modules or importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _check_defined(key: str, spec: str, name: str, file: Path) -> None:
    try:
        body = ast.parse(file.read_text(encoding="utf-8"), filename=str(file)).body
    except (SyntaxError, UnicodeDecodeError) as error:
        raise ConfigError(key, spec, f"{file.name} is not valid Python: {error}") from error
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    functions = [n.name for n in body if isinstance(n, kinds)]
    others = {t.id for n in ast.walk(ast.Module(body, [])) for t in _bound_names(n)}
    imported = {
        (alias.asname or alias.name)
        for n in body
        if isinstance(n, ast.Import | ast.ImportFrom)
        for alias in n.names
    }
    if name not in functions and name not in others | imported and "*" not in imported:
        made = (n for n in body if isinstance(n, ast.Assign) and isinstance(n.value, ast.Call))
        functions += [t.id for n in made for t in n.targets if isinstance(t, ast.Name)]
        known = ", ".join(functions) or "no function at all"
        raise ConfigError(key, spec, f"{file.name} defines no {name}; it defines {known}")


def _bound_names(node: ast.AST) -> list[ast.Name]:
    if not isinstance(node, ast.Name) or not isinstance(node.ctx, ast.Store):
        return []
    return [node]


def load_code(key: str, spec: str, base_dir: Path) -> Any:
    """Import a name of the user's so that it can be sent to Ray workers.

    What is from a file travels by value, together with the modules and packages that its file
    imports from its own folder, or from one that it adds to `sys.path`, because workers cannot
    import them. Run this where ray is available.

    Args:
        key: The setting, ``"reward"`` or ``"environment"``.
        spec: ``"package.module:name"`` or ``"file.py:name"``.
        base_dir: Folder that a file is relative to.

    Raises:
        ConfigError: If the import raises, or the name is missing.
    """
    where, name = _split(key, spec)
    try:
        module = (
            _load_file((base_dir / Path(where).expanduser()).resolve())
            if where.endswith(".py")
            else importlib.import_module(where)
        )
    except (Exception, SystemExit) as error:
        remedy = f"importing {where} raised {type(error).__name__}: {error}"
        raise ConfigError(key, spec, remedy) from error
    value = getattr(module, name, None)
    if value is None:
        raise ConfigError(key, spec, f"{where} has no {name}; correct the name")
    return value


def load_function(key: str, spec: str, base_dir: Path) -> Callable[..., Any]:
    """Import a function of the user's; see `load_code`.

    Raises:
        ConfigError: If it cannot be imported, or is no function.
    """
    function = load_code(key, spec, base_dir)
    if not callable(function):
        raise ConfigError(key, spec, f"is no function but {type(function).__name__}")
    return function  # type: ignore[no-any-return]


def load_environment(spec: str, base_dir: Path) -> Environment:
    """Import an environment, or make one of the class that is named; see `load_code`.

    Raises:
        ConfigError: If it cannot be imported or made, or has no method `step`.
    """
    value = load_code("environment", spec, base_dir)
    if isinstance(value, type):
        try:
            value = value()
        except (Exception, SystemExit) as error:
            remedy = f"making one raised {type(error).__name__}: {error}"
            raise ConfigError("environment", spec, remedy) from error
    if not callable(getattr(value, "step", None)):
        raise ConfigError("environment", spec, "must have a method step(sample) -> Step")
    return value  # type: ignore[no-any-return]


def _load_file(file: Path) -> ModuleType:
    """Import a file under a name of its own (no clash with an installed module of its stem)."""
    import ray.cloudpickle

    digest = hashlib.sha256(str(file).encode()).hexdigest()[:8]
    module_name = f"_apr_user_{file.stem}_{digest}"
    spec = importlib.util.spec_from_file_location(module_name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot import {file}")
    module = importlib.util.module_from_spec(spec)
    before, path = set(sys.modules), set(sys.path)
    sys.modules[module_name] = module
    sys.path.insert(0, str(file.parent))
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[module_name]
        raise
    finally:
        sys.path.remove(str(file.parent))
    homes = {file.parent, *(Path(added).resolve() for added in set(sys.path) - path)}
    for new in {name.partition(".")[0] for name in set(sys.modules) - before} | {module_name}:
        if new in sys.modules and _is_in(homes, sys.modules[new]):
            ray.cloudpickle.register_pickle_by_value(sys.modules[new])  # and all below it
    return module


def _is_in(folders: Collection[Path], module: ModuleType) -> bool:
    """Whether a module, or a package, was found in one of some folders."""
    places = [*getattr(module, "__path__", ()), getattr(module, "__file__", None)]
    return any(place and Path(place).resolve().parent in folders for place in places)
