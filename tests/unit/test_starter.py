"""What `ray-apr init` writes, from a checkout and from a wheel."""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import shutil
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest
import yaml

from ray_apr.cli import main as cli
from ray_apr.cli.init import write_starter
from tests.wheels import ROOT, build_wheel, call

EXAMPLE = ROOT / "examples" / "arithmetic"
WRITTEN = ["README.md", "base_model", "prompts.jsonl", "reward.py", "run.yaml"]


def test_the_starter_passes_a_dry_run(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert cli.main(["init", "my runs/first"]) == 0
    assert "cd 'my runs/first'\n  ray-apr train run.yaml --dry-run\n" in capsys.readouterr().out
    folder = tmp_path / "my runs" / "first"
    assert sorted(path.name for path in folder.iterdir()) == WRITTEN
    assert not any(path.is_symlink() for path in folder.rglob("*"))
    assert cli.main(["train", str(folder / "run.yaml"), "--dry-run"]) == 0
    said = capsys.readouterr()
    assert said.out.endswith("dry run: nothing was started\n")
    assert "warning:" not in said.err


def test_a_folder_that_cannot_be_made_is_told_and_one_is_no_file_of_settings(tmp_path, capsys):
    """known fault: the first was an error without a remedy, the second "cannot be read as text"."""
    assert cli.main(["init", "/proc/mine"]) == 2
    assert "FOLDER = '/proc/mine': cannot be made (" in capsys.readouterr().err
    (tmp_path / "run.yaml").write_text("model: m")
    assert cli.main(["train", str(tmp_path)]) == 2
    assert "is a folder; name its file of settings (.yaml: run.yaml)" in capsys.readouterr().err


def test_an_empty_folder_that_cannot_be_written_to_is_told(tmp_path, monkeypatch, capsys):
    """known fault: a bare PermissionError."""

    def denied(_from, to):
        raise PermissionError(errno.EACCES, "Permission denied", str(to))

    monkeypatch.setattr(shutil, "copyfile", denied)
    assert cli.main(["init", str(tmp_path)]) == 2
    assert "cannot be made (Permission denied); name a folder where" in capsys.readouterr().err


def test_a_folder_that_holds_files_is_refused_and_left(tmp_path, capsys) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    assert cli.main(["init", str(tmp_path)]) == 2
    assert "holds 'mine.txt' already; name a new folder" in capsys.readouterr().err
    assert cli.main(["init", str(tmp_path / "mine.txt")]) == 2
    assert "is a file; name a new folder" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_a_new_repository_is_taken(tmp_path) -> None:
    """known fault: `git init` and then `ray-apr init .` was refused for the folder .git."""
    (tmp_path / ".git").mkdir()
    assert write_starter(tmp_path) == WRITTEN


def test_it_is_the_quickstart_in_settings_prompts_and_reward(tmp_path) -> None:
    write_starter(tmp_path)
    ours, quickstart = (
        yaml.safe_load(file.read_text())
        for file in (tmp_path / "run.yaml", EXAMPLE / "quickstart.yaml")
    )
    changed = {key for key in ours | quickstart if ours.get(key) != quickstart.get(key)}
    assert changed == {"prompts", "reward"}
    rows = [json.loads(line) for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    assert rows == pq.read_table(EXAMPLE / "prompts.parquet").to_pylist()
    own, of_example = (_reward(tmp_path / "reward.py"), _reward(EXAMPLE / "task.py"))
    for text in ("1+2+0=03,3", "1+2+0=03, 3", "3", "1+2+0=04,4", ",3,", ""):
        sample = SimpleNamespace(response_text=text, row={"answer": "3"})
        assert own(sample) == of_example(sample), text


def _reward(file: Path):
    spec = importlib.util.spec_from_file_location(f"starter_{file.stem}", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.reward


@pytest.mark.slow
def test_a_wheel_has_what_init_writes(tmp_path) -> None:
    wheel, unpacked = build_wheel(tmp_path), tmp_path / "unpacked"
    with zipfile.ZipFile(wheel) as files:
        names = files.namelist()
        files.extractall(unpacked)
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "ray_apr").rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == modules
    assert "ray_apr/cli/starter/base_model/model.safetensors" in names
    env = {**os.environ, "PYTHONPATH": str(unpacked)}
    call([sys.executable, "-m", "ray_apr", "init", "mine"], folder=tmp_path, env=env)
    ours, theirs = tmp_path / "mine", tmp_path / "theirs"
    write_starter(theirs)
    written = [path.relative_to(theirs) for path in theirs.rglob("*") if path.is_file()]
    assert len(written) > len(WRITTEN)
    for name in written:
        assert (ours / name).read_bytes() == (theirs / name).read_bytes()
