"""The run folder: where it is, whether a run has begun in it, and its files of rows."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, BinaryIO

from ray_apr.core.exceptions import ConfigError, ResourceError, one_line

_PIECE = 1 << 16
CONFIG_FILE = "config.json"
RESUMES_FILE = "resumes.jsonl"
"""File of the run folder with a row each time that the run was gone on with."""
_SCHEMES = ("file", "s3", "gs", "gcs", "hdfs", "viewfs", "abfs", "abfss", "hf")
"""Of what `pyarrow.fs.FileSystem.from_uri` takes, as Ray Train does."""
CHECKPOINTS = "checkpoints"
"""Key of `CONFIG_FILE`: where a run's checkpoints are, as a URI, if they are not in its folder."""
LOCK_FILE = ".lock"
"""File of a run folder that is locked by the process that trains it."""
_LOOK_S, _PAUSE_S = 0.5, 0.02


def is_remote(storage_path: str) -> bool:
    """Whether it is a URI, and no folder."""
    return "://" in storage_path


def absolute(path: str) -> str:
    """The absolute path of a folder; a URI as it is."""
    return path if is_remote(path) else str(Path(path).expanduser().resolve())


def run_folder(storage_path: str, name: str) -> Path:
    """Folder of a run, absolute; one under ``runs/`` where its storage is remote."""
    return Path(absolute("runs" if is_remote(storage_path) else storage_path), name)


def check_storage(setting: str, storage_path: str) -> None:
    """Check that pyarrow has a filesystem for a URI; nothing is asked of a storage.

    Raises:
        ConfigError: If it has none.
    """
    scheme = storage_path.partition("://")[0]
    if is_remote(storage_path) and scheme not in _SCHEMES:
        remedy = f"must be a folder, or a URI that begins with one of {', '.join(_SCHEMES)}"
        raise ConfigError(setting, storage_path, f"{remedy}, each followed by ://")


def check_run_name(setting: str, name: str) -> None:
    """Check that a run folder can be called so, as Ray Train's would be elsewhere, and a run: its
    name labels Ray's metrics, which end Ray's parts where it is not ASCII.

    Raises:
        ConfigError: If it cannot.
    """
    if name in ("", ".", "..") or len(name.encode()) > 255 or {*name} & {"/", "\0"}:
        raise ConfigError(setting, name, "must be the name of one folder, without a slash")
    if not (name.isascii() and name.isprintable()):
        remedy = "must be of ASCII characters: Ray's metrics carry it, and take no others"
        raise ConfigError(setting, name, remedy)


def holds_run(folder: Path) -> bool:
    """Whether a folder is that of a run that has begun."""
    return (folder / "metrics.jsonl").exists()


def came_to_nothing(folder: Path) -> bool:
    """Whether the run of a folder made no token: nothing was trained, and nothing is lost with it,
    as of a run that found a prompt too long when it encoded them."""
    rows = ("metrics.jsonl", "samples.jsonl", "ended.jsonl")
    if not holds_run(folder) or any(map(_has_content, (folder / name for name in rows))):
        return False
    kept = (*folder.glob("checkpoint_*/*"), *folder.glob("journal/*"))
    spans = read_rows(folder / "timeline.jsonl")
    return not any(map(_has_content, kept)) and all(row["what"] != "generate" for row in spans)


def _has_content(path: Path) -> bool:
    return path.is_dir() or (path.is_file() and path.stat().st_size > 0)


def check_new_folder(folder: Path) -> None:
    """Check that a run folder can be made, and holds no run yet, which would be gone on with; one
    that came to nothing, and that nobody trains now, is no run.

    Raises:
        ConfigError: If it cannot, or does.
    """
    there = next(path for path in folder.absolute().parents if path.exists())
    if not (there.is_dir() and os.access(there, os.W_OK)):
        remedy = f"must be a folder that may be written to; {there} is none"
        raise ConfigError("run.storage_path", str(folder.parent), remedy)
    if holds_run(folder) and (is_held(folder) or not came_to_nothing(folder)):
        raise ConfigError(
            "run.name",
            folder.name,
            f"{folder} holds a run already; choose another name, or go on with it: with --resume "
            f"(in YAML run.resume: true), or by `ray-apr resume {folder}`",
        )


def is_held(folder: Path) -> bool:
    """Whether a process trains the run of a folder now (`resume.hold_folder`)."""
    try:
        with (folder / LOCK_FILE).open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks: a run that has ended says so
        return holds_run(folder) and not (folder / "final.json").exists()


def lock(file: IO[str]) -> None:
    """Lock the open `LOCK_FILE` of a folder for this process.

    Waits for: who looks whether it is held (`is_held`), and locks it for that moment. Unblocked
    by: its end, or `_LOOK_S`.

    Raises:
        BlockingIOError: If another process holds it.
        OSError: If the file system has no locks.
    """
    deadline = time.monotonic() + _LOOK_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_PAUSE_S)
        else:
            return


def add_row(file: Path, row: Mapping[str, Any]) -> None:
    """Write a row at the end of a file of rows, in the place of a last line that was cut off.

    Raises:
        ResourceError: If that cannot be done, e.g. on a full disk.
    """
    try:
        end_with_a_line(file)
    except OSError as error:
        raise not_written(file, error) from error
    with open_rows(file) as rows:
        append(rows, json.dumps(row) + "\n")


def open_rows(file: Path) -> BinaryIO:
    """A file of rows, for `append`."""
    return file.open("ab", buffering=0)


def append(rows: BinaryIO, lines: str) -> None:
    """Write lines at the end of a file of `open_rows`: all of them are there then, or none.

    Raises:
        ResourceError: If that cannot be done, e.g. on a full disk.
    """
    end, left = rows.seek(0, os.SEEK_END), memoryview(lines.encode())
    try:
        while left:
            left = left[rows.write(left) :]
    except OSError as error:
        with contextlib.suppress(OSError):
            rows.truncate(end)
        raise not_written(Path(rows.name), error) from error


def last_lines(file: Path, most: int) -> list[str]:
    """Whole lines of a file's end, which has this many bytes; none if there is no such file."""
    if not file.exists():
        return []
    with file.open("rb") as rows:
        size = rows.seek(0, os.SEEK_END)
        rows.seek(max(0, size - most))
        lines = rows.read().splitlines(keepends=True)
    if size > most:
        del lines[0]
    return [line.decode(errors="replace") for line in lines if line.endswith(b"\n")]


def last_row(file: Path) -> dict[str, Any]:
    """Last whole row of a file, read from its end; an empty one if there is none.

    Raises:
        ConfigError: If it is no JSON.
    """
    most, size = _PIECE, file.stat().st_size if file.exists() else 0
    while not (lines := last_lines(file, most)) and most < size:
        most *= 4
    return object_of(lines[-1].encode(), file) if lines else {}


def end_with_a_line(file: Path) -> None:
    """Take a last line off that was cut off."""
    if not file.exists():
        return
    with file.open("rb+") as rows:
        size = at = rows.seek(0, os.SEEK_END)
        while at > 0:
            begin = max(0, at - _PIECE)
            rows.seek(begin)
            newline = rows.read(at - begin).rfind(b"\n")
            if newline >= 0:
                at = begin + newline + 1
                break
            at = begin
        if at < size:
            rows.truncate(at)


def not_written(file: Path, error: OSError) -> ResourceError:
    """The error of a file of a run folder that cannot be written."""
    return ResourceError(
        f"{file} cannot be written: {one_line(error)}; make room in {file.parent} or mend its file "
        "system, then go on with the run (--resume): what was written before is whole"
    )


def read_rows(file: Path) -> list[dict[str, Any]]:
    """Rows of a file, none if there is no such file; a last line that was cut off is no row.

    Raises:
        ConfigError: If a line is no JSON.
    """
    if not file.is_file():
        return []
    with file.open("rb") as lines:
        whole = enumerate((line for line in lines if line.endswith(b"\n")), start=1)
        return [object_of(line, file, number) for number, line in whole]


def keep_rows(
    file: Path,
    is_kept: Callable[[Mapping[str, Any]], bool],
    *,
    before_drop: Callable[[int], None] = lambda _: None,
) -> tuple[int, int]:
    """Keep some rows of a file, without a last line that was cut off.

    Args:
        file: JSON lines; it need not be there.
        is_kept: Whether a row stays.
        before_drop: Gets how many go, while all are still there.

    Returns:
        How many stay, and how many go.

    Raises:
        ConfigError: If a line is no JSON; the file stays as it is.
        ResourceError: If it cannot be written, as on a full disk; the same.
    """
    num_kept = num_dropped = 0
    new = file.with_name(f"{file.name}.new")
    try:
        if not file.exists():
            before_drop(0)
            return 0, 0
        with file.open("rb") as rows, new.open("wb") as kept:
            for line in rows:
                if not line.endswith(b"\n"):
                    break
                if is_kept(object_of(line, file, num_kept + num_dropped + 1)):
                    kept.write(line)
                    num_kept += 1
                else:
                    num_dropped += 1
            kept.flush()
            os.fsync(kept.fileno())
        before_drop(num_dropped)
        new.replace(file)
    except OSError as error:
        raise not_written(file, error) from error
    finally:
        new.unlink(missing_ok=True)  # which takes room
    return num_kept, num_dropped


def read_object(file: Path) -> dict[str, Any]:
    """A JSON file that is there.

    Raises:
        ConfigError: If it is no JSON.
    """
    return object_of(file.read_bytes(), file)


def object_or_empty(file: Path) -> dict[str, Any]:
    """A JSON object; an empty one if it is missing or damaged."""
    try:
        return read_object(file)
    except (OSError, ConfigError):
        return {}


def object_of(text: bytes, file: Path, line: int | None = None) -> dict[str, Any]:
    """The JSON object that a text of a run folder has.

    Args:
        text: Of the whole file, or of a line.
        file: Where it is.
        line: Its number there, from 1; None: it is the whole file.

    Raises:
        ConfigError: If it is none.
    """
    try:
        found: dict[str, Any] = {**json.loads(text)}
    except (ValueError, TypeError) as error:  # no JSON, no UTF-8, or no object
        place = str(file) if line is None else f"{file}, line {line}"
        raise ConfigError("RUN_DIR", place, f"is cut off or no JSON ({error})") from error
    return found


def put_text(file: Path, text: str) -> None:
    """Write a file, whole or not at all.

    Raises:
        OSError: If that cannot be done; the file is as before.
    """
    new = file.with_name(f".{file.name}.new")
    try:
        new.write_text(text, encoding="utf-8")
        new.replace(file)
    except OSError:
        new.unlink(missing_ok=True)
        raise
