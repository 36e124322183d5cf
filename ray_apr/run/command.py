"""The command that began a run, which its folder keeps so that ``ray-apr resume`` goes on with it.

``train`` and ``resume`` write it once the run has begun; a command that is refused writes nothing.
Neither the environment nor a control token is in it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray_apr.config.yaml import set_override
from ray_apr.core.exceptions import ConfigError
from ray_apr.run.folder import holds_run, not_written, put_text

COMMAND_FILE = "command.json"
_SECRET = "control_token"


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """What the command line was told."""

    config: str
    """Absolute path of the YAML file."""
    overrides: tuple[str, ...] = ()
    """Settings that it replaces, ``"train.steps=10"``; a later one wins."""
    withheld: tuple[str, ...] = ()
    """Keys of the overrides that are not kept, as they hold the control token."""
    working_directory: str
    """Absolute; the user's modules and files may be relative to it."""

    @classmethod
    def of(cls, config: Path, overrides: Sequence[str]) -> Command:
        """The command of this process."""
        secret = [text for text in overrides if _holds_secret(text)]
        return cls(
            config=str(config.resolve()),
            overrides=tuple(text for text in overrides if text not in secret),
            withheld=tuple(text.partition("=")[0].strip() for text in secret),
            working_directory=str(Path.cwd()),
        )

    def write(self, folder: Path) -> None:
        """Write it into a run folder, whole or not at all.

        Raises:
            ResourceError: If that cannot be done, e.g. on a full disk.
        """
        file = folder / COMMAND_FILE
        try:
            put_text(file, json.dumps(dataclasses.asdict(self), indent=2) + "\n")
        except OSError as error:
            raise not_written(file, error) from error


def _holds_secret(override: str) -> bool:
    values: dict[str, Any] = {}
    set_override(values, override)
    sections = [values]
    while sections:
        section = sections.pop()
        if _SECRET in section:
            return True
        sections += [value for value in section.values() if isinstance(value, dict)]
    return False


def read_command(folder: Path) -> Command:
    """Read the command that began the run of a folder.

    Raises:
        ConfigError: If the folder holds no run, or one that no command began.
    """
    file = folder / COMMAND_FILE
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        remedy = "holds no run; give the folder of one, e.g. runs/NAME"
        if holds_run(folder):
            remedy = (
                f"has no {COMMAND_FILE}, as its run was begun in Python: `resume` and `replay` "
                "take those of the command line; APRTrainer.restore goes on with this one"
            )
        raise ConfigError("RUN_DIR", str(folder), remedy) from error
    except (OSError, ValueError) as error:
        raise ConfigError("RUN_DIR", str(file), f"cannot be read: {error}") from error
    try:
        lists = {name: tuple(values[name]) for name in ("overrides", "withheld")}
        return Command(**values | lists)
    except (TypeError, KeyError) as error:
        remedy = "is no command of this version of ray_apr; go on with `train CONFIG --resume`"
        raise ConfigError("RUN_DIR", str(file), remedy) from error
