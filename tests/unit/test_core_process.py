"""The process that vLLM's core is forked from (serve/vllm/core_process.py), without vLLM."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ray_apr.serve.vllm import core_process

_ROOT = Path(__file__).parents[2]


def tell(folder: str) -> None:
    """What a forked process knows."""
    names = ("STAYS", "GOES", "COMES", "CHANGES")
    told = [os.environ.get(name) for name in names]
    Path(folder, "told").write_text(f"{told} {os.getppid() == int(os.environ['SERVER'])}")


def models() -> str:
    """What plugins have registered."""
    import vllm.plugins

    return vllm.plugins.MODELS


def ask() -> None:
    """A server that asks forked processes: for an answer, an error and a death."""
    core_process._PRELOADED = ()
    core_process.begin_imports()
    assert core_process._call_in_fork(models) == "theirs, too"
    with pytest.raises(ValueError, match="no model"):
        core_process._call_in_fork(fail)
    with pytest.raises(EOFError, match="without an answer"):
        core_process._call_in_fork(functools.partial(os._exit, 3))
    core_process._ANSWER_S = 0.1
    with pytest.raises(TimeoutError, match=r"0\.1 s"):
        core_process._call_in_fork(functools.partial(time.sleep, 60))


def fail() -> None:
    raise ValueError("no model")


def main(folder: str) -> None:
    """A server, whose environment changes once its fork server runs."""
    os.environ |= {"STAYS": "1", "GOES": "2", "CHANGES": "3", "SERVER": str(os.getpid())}
    core_process._PRELOADED = ()
    core_process.begin_imports()
    core_process.begin_imports()
    first = core_process._CONTEXT.Process(target=int)
    first.start()
    first.join(30)
    del os.environ["GOES"]
    os.environ |= {"COMES": "4", "CHANGES": "5"}
    core = core_process._CONTEXT.Process(target=tell, args=(folder,))
    core.start()
    core.join(30)
    assert core.exitcode == 0
    assert os.environ["STAYS"] == "1"


def test_a_core_has_the_environment_that_its_server_has_by_then(tmp_path):
    run = subprocess.run(
        [sys.executable, "-m", "tests.unit.test_core_process", str(tmp_path)],
        cwd=_ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    told = (tmp_path / "told").read_text()
    assert told == "['1', None, '4', '5'] False", "it was forked by the fork server"


def test_a_fork_answers_once_plugins_have_registered_their_models(tmp_path):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").touch()
    (tmp_path / "vllm" / "plugins.py").write_text(
        "MODELS = ''\ndef load_general_plugins():\n    global MODELS\n    MODELS = 'theirs, too'\n"
    )
    run = subprocess.run(
        [sys.executable, "-m", "tests.unit.test_core_process"],
        cwd=_ROOT, capture_output=True, text=True, timeout=60, check=False,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr


if __name__ == "__main__":
    main(sys.argv[1]) if sys.argv[1:] else ask()
