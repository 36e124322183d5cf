"""A starter project: ``ray-apr init FOLDER`` writes a run that works and is made to be changed.

Its settings, model and prompts are those of `examples/arithmetic/quickstart.yaml`. In a checkout
`starter/base_model` and `starter/prompts.parquet` are links to that example; a wheel has the files.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from ray_apr.core.exceptions import ConfigError

STARTER = Path(__file__).parent / "starter"
PROMPTS = "prompts.jsonl"


def write_starter(folder: Path) -> list[str]:
    """Write the starter project.

    Args:
        folder: A new folder, or one that holds hidden files at most, such as ``.git``.

    Returns:
        Names of what was written.

    Raises:
        ConfigError: If the folder holds anything else, is a file, or cannot be made.
    """
    try:
        return _write(folder)
    except OSError as error:
        remedy = f"cannot be made ({error.strerror or error}); name a folder where you may write"
        raise ConfigError("FOLDER", str(folder), remedy) from error


def _write(folder: Path) -> list[str]:
    if folder.exists() and not folder.is_dir():
        raise ConfigError("FOLDER", str(folder), "is a file; name a new folder")
    if folder.exists() and (there := min(_visible(folder), default=None)):
        raise ConfigError("FOLDER", str(folder), f"holds {there!r} already; name a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted(STARTER.iterdir()):
        if path.name == "prompts.parquet":
            _write_prompts(path, folder / PROMPTS)
        elif path.name == "base_model":
            shutil.copytree(path, folder / path.name, copy_function=shutil.copyfile)
        elif path.is_file():
            shutil.copyfile(path, folder / path.name)  # without the mode: it is to be changed
    return sorted(_visible(folder))


def _visible(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if not path.name.startswith(".")]


def _write_prompts(rows: Path, out: Path) -> None:
    """As lines of JSON, which a text editor opens."""
    import pyarrow.parquet  # a quarter of a second, and only here

    with out.open("w", encoding="utf-8") as lines:
        for row in pyarrow.parquet.read_table(rows).to_pylist():
            lines.write(json.dumps(row) + "\n")
