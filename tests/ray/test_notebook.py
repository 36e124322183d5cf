"""The notebook of the arithmetic example runs from its first cell to its last, and ends its run."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest

from tests.whole_runs import CONFIG

pytestmark = [
    pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow, pytest.mark.long,
    pytest.mark.timeout(480),
]  # fmt: skip

_KERNEL = """
import asyncio, json, sys

async def run_cells(path):  # inside of an event loop, as in a Jupyter kernel
    names = {"__name__": "__main__"}
    for cell in json.load(open(path))["cells"]:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), cell["id"], "exec"), names)

asyncio.run(run_cells(sys.argv[1]))
"""
"""Cells one after the other in one namespace; Jupyter itself is no dependency of the tests."""


def test_the_notebook_runs_to_its_end_and_leaves_nothing_behind(tmp_path, marked):
    _, env = marked
    folder = tmp_path / "arithmetic"
    shutil.copytree(CONFIG.parent, folder, ignore=shutil.ignore_patterns("runs", "__pycache__"))
    done = subprocess.run(
        [sys.executable, "-c", _KERNEL, "notebook.ipynb"],
        cwd=folder, env=env, capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    (run,) = (folder / "runs").iterdir()
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    final = json.loads((run / "final.json").read_text())
    assert (final["status"], final["ledger_error"], len(rows)) == ("ok", 0, 3)
    assert done.stdout.count(": mean reward ") == 3
    assert f"report: {run / 'report.html'}" in done.stdout
    (model,) = run.glob("checkpoint_*/hf/model.safetensors")
    assert f"model:  {model.parent}" in done.stdout
