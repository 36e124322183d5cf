"""Prompts of a dataset of a hub, or of a folder that is laid out as one (cli/hub_prompts.py)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ray_apr.cli import hub_prompts
from ray_apr.cli.prompt_files import file_of, prompts_of, read_prompts
from ray_apr.core.exceptions import ConfigError
from tests.hub_server import ID, ROWS, hub

SUMS = {"prompt": ["1+1=", "1+2=", "1+3="], "answer": ["2", "3", "4"]}
CARD = """\
---
configs:
- config_name: easy
  data_files: [{split: train, path: easy.parquet}]
- config_name: hard
  data_files: [{split: train, path: hard.parquet}, {split: test, path: held.parquet}]
---
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the datasets `plain`, of one subset, and `two`, of two."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "plain" / "data").mkdir(parents=True)
    pq.write_table(pa.table(SUMS), tmp_path / "plain" / "data" / "train-00000-of-00001.parquet")
    (tmp_path / "two").mkdir()
    for name in ("easy", "hard", "held"):
        table = pa.table({"prompt": [name], "answer": ["1"]})
        pq.write_table(table, tmp_path / "two" / f"{name}.parquet")
    (tmp_path / "two" / "README.md").write_text(CARD)
    rows = [{"answer": "9", "prompt": "4+5="}]
    (tmp_path / "more.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def read(folder: Path, given):
    return read_prompts(prompts_of(given, folder, "prompt"))


def test_a_split_of_a_dataset_is_the_prompts(folder: Path) -> None:
    rows = read(folder, {"dataset": "plain", "limit": 2, "on_too_long": "drop"})
    assert rows.slice(0, 9) == [
        {"prompt": "1+1=", "answer": "2"}, {"prompt": "1+2=", "answer": "3"},
    ]  # fmt: skip
    hard = read(folder, {"dataset": "two", "subset": "hard"})
    assert hard.column("prompt") == ["hard"]
    given = {"dataset": "two", "subset": "hard", "split": "test"}
    held_out = read_prompts(file_of("evaluation.prompts", given, folder, "prompt"))
    assert held_out.column("prompt") == ["held"]
    assert str(prompts_of(given, folder, "prompt")) == f"{folder / 'two'}, hard, test"


def test_a_dataset_goes_together_with_files(folder: Path) -> None:
    files = [{"dataset": "plain", "weight": 2}, {"path": "more.jsonl", "weight": 1}]
    settings = prompts_of(files, folder, "prompt")
    assert settings.weights == {"plain": 2.0, "more": 1.0}
    assert read_prompts(settings).column("source") == ["plain"] * 3 + ["more"]
    (folder / "more.jsonl").write_text('{"prompt": "4+5=", "level": 1}\n')
    with pytest.raises(ConfigError, match=r"other columns: answer, level; make them alike"):
        read(folder, files)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"dataset": "none"}, r"prompts\.dataset = 'none': there is no folder .* owner/name"),
        ({"dataset": "plain", "path": "a"}, r"prompts\.path = 'a': belongs to a file; leave"),
        ({"path": "more.jsonl", "split": "a"}, r"prompts\.split = 'a': belongs to a dataset"),
        ({"split": "a"}, r"prompts\.split = 'a': belongs to a dataset"),
        ({"limit": 3}, r"prompts\.path = None: is missing; .* or a dataset"),
        ({"dataset": 3}, r"prompts\.dataset = 3: must be text"),
        ({"dataset": "plain", "split": "dev"}, r"prompts\.split = 'dev': .*\['train'\]; name an"),
        ({"dataset": "plain", "subset": "b"}, r"prompts\.subset = 'b': .*\['default'\]; name an"),
        ({"dataset": "two"}, r"prompts\.subset = None: .*\['easy', 'hard'\]"),
        ({"dataset": "plain", "split": "train[:0]"}, r"split = 'train\[:0\]': .* no data"),
        ({"dataset": "cache"}, r"prompts\.dataset = .*cache': cannot be had: .*; correct the id"),
        ({"files": [{"dataset": "two"}]}, r"prompts\.files\.subset = None"),
        ({"files": ["more.jsonl"], "split": "a"}, r"prompts\.split = 'a': must be left out"),
    ],
)
def test_what_a_dataset_has_not_is_named(folder: Path, given, message) -> None:
    (folder / "cache").mkdir(exist_ok=True)
    with pytest.raises(ConfigError, match=message):
        read(folder, given)


def test_errors_of_held_out_prompts_name_their_section(folder: Path) -> None:
    given = {"dataset": "plain", "split": "test"}
    held_out = file_of("evaluation.prompts", given, folder, "prompt")
    with pytest.raises(ConfigError, match=r"evaluation\.prompts\.split = 'test'"):
        read_prompts(held_out)


def test_without_the_package_a_dataset_is_refused(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(hub_prompts.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"'org/sums': needs .*pip install 'ray-apr\[hub\]'"):
        prompts_of({"dataset": "org/sums"}, tmp_path, "prompt")


def test_a_dataset_of_a_hub_is_read_at_its_revision(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    code = (
        "import json, sys; from ray_apr.cli.hub_prompts import read_dataset;"
        "rows = read_dataset('prompts', sys.argv[1], revision='v1').to_pylist();"
        "print(json.dumps(rows));"
        "read_dataset('prompts', 'org/none')"
    )
    with hub() as (url, asked):
        env = os.environ | {"HF_ENDPOINT": url, "HF_HOME": str(tmp_path), "HF_TOKEN": ""}
        done = subprocess.run(
            [sys.executable, "-c", code, ID], env=env, capture_output=True, text=True, timeout=60,
            check=False,
        )  # fmt: skip
    assert json.loads(done.stdout) == ROWS
    assert f"/api/datasets/{ID}/revision/v1" in asked
    assert "prompts.dataset = 'org/none': cannot be had: " in done.stderr
