"""Build the package's wheel without leaving anything in the tree."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
_NEEDED = ("ray_apr", "examples/arithmetic")
_FILES = ("pyproject.toml", "README.md", "LICENSE")


def build_wheel(folder: Path) -> Path:
    """Build the wheel from a copy of the tree, and return its path in `folder`."""
    copy = folder / "copy"
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "runs")
    for name in _NEEDED:
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=ignored)
    for name in _FILES:
        shutil.copy(ROOT / name, copy / name)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    call([*command, "--no-index", "-w", str(folder), str(copy)], folder=folder)
    (wheel,) = folder.glob("*.whl")
    return wheel


def call(
    command: list[str], *, folder: Path, env: dict[str, str] | None = None, limit_s: float = 120
) -> str:
    """Run a command to its end, which must be a good one; returns what it printed."""
    ended = subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, timeout=limit_s, check=False
    )
    said = ended.stdout + ended.stderr
    assert ended.returncode == 0, f"{' '.join(command)}: {said[-3000:]}"
    return said
