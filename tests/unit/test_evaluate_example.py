"""The example that evaluates alone: it shows the figures of its own run."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest
import ray

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "evaluate.py"


class Begun(Exception):
    """The example has come to its run."""


@pytest.fixture
def evaluate(monkeypatch, tmp_path):
    """Runs the example up to where its run would begin."""

    def begin(**_):
        raise Begun

    def run(*args):
        monkeypatch.setattr(sys, "argv", ["evaluate.py", "--storage", str(tmp_path), *args])
        runpy.run_path(str(EXAMPLE), run_name="__main__")

    monkeypatch.setattr(ray, "init", begin)
    return run


def test_a_name_that_is_taken_is_refused(evaluate, tmp_path, capsys):
    """The figures of that run are there already, and would be taken for those of this one."""
    with pytest.raises(Begun):
        evaluate("--name", "evaluate")
    (tmp_path / "evaluate").mkdir()
    with pytest.raises(SystemExit):
        evaluate("--name", "evaluate")
    assert "choose another --name" in capsys.readouterr().err


def test_each_evaluation_has_a_name_of_its_own(evaluate, tmp_path):
    (tmp_path / "evaluate").mkdir()
    with pytest.raises(Begun):
        evaluate()


def test_its_prompts_may_be_json_lines(monkeypatch, tmp_path):
    """known fault: Ray found "no files" in a file that it was given; a folder of Parquet was read
    as text, and a line ended within a string that has a separator of lines."""
    monkeypatch.setattr(ray.data, "from_items", list)
    monkeypatch.setattr(ray.data, "read_parquet", lambda path: path)
    read_rows = runpy.run_path(str(EXAMPLE))["read_rows"]
    row = {"prompt": "1\u2028+1=", "answer": "2"}
    file = tmp_path / "held.jsonl"
    lines = f"{json.dumps(row, ensure_ascii=False)}\n\n{json.dumps(row)}\n"
    file.write_text(lines, encoding="utf-8")
    assert read_rows(file) == [row, row]
    for parquet in (tmp_path / "held.parquet", tmp_path):
        assert read_rows(parquet) == str(parquet)
