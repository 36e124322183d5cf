"""The run folder: where it is, and whether a run has begun in it."""

from __future__ import annotations

import fcntl
from pathlib import Path

from ray_apr.core.exceptions import ConfigError

LOCK_FILE = ".lock"
"""File of a run folder that is locked by the process that trains it."""


def run_folder(storage_path: str, name: str) -> Path:
    """Folder of a run, absolute; one under ``runs/`` where its storage is remote."""
    root = Path("runs" if "://" in storage_path else storage_path)
    return root.expanduser().resolve() / name


def holds_run(folder: Path) -> bool:
    """Whether a folder is that of a run that has begun."""
    return (folder / "metrics.jsonl").exists()


def check_new_folder(folder: Path) -> None:
    """Check that a run folder holds no run yet, which would be gone on with.

    Raises:
        ConfigError: If it does.
    """
    if holds_run(folder):
        raise ConfigError(
            "run.name",
            folder.name,
            f"{folder} holds a run already; choose another name, or go on with it (--resume, in "
            "YAML run.resume: true)",
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
