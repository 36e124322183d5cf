"""Processes that are forked from a server in place of being started."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from ray._private import ray_constants

from ray_apr.compat.forked import server, worker
from ray_apr.compat.forked.environment import have_threads
from ray_apr.compat.forked.servers import Stage
from ray_apr.compat.forked.servers import fork_servers as begin_servers
from ray_apr.compat.ray import workers_set_up_by
from ray_apr.run import forking

_LIMIT_S = 30.0
_TELL = """
import json, os, signal, sys, tracemalloc
import numpy
told = {
    "arguments": sys.argv,
    "folder": os.getcwd(),
    "path": sys.path[0],
    "variables": dict(os.environ),
    "modules": sorted(sys.modules),
    "group": os.getpgid(0) == os.getpid(),
    "files": sorted(map(int, os.listdir("/proc/self/fd"))),
    "child_signal": signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL,
    "draw": numpy.random.random(),
    "parent": os.getppid(),
    "hook_ran": tracemalloc.is_tracing(),
}
print(json.dumps(told), flush=True)
"""


@contextlib.contextmanager
def fork_servers(stages: list[Stage]) -> Iterator[dict[str, str]]:
    """Servers without the variable that pytest sets anew for each test."""
    with contextlib.ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            patch.delenv("PYTEST_CURRENT_TEST", raising=False)
            servers = stack.enter_context(begin_servers(stages))()
        yield servers


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "tell.py"
    path.write_text(_TELL)
    return path


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, str]]:
    stages = [
        Stage(name="first", modules=["numpy.random", "no_such_module"]),
        Stage(
            name="second",
            modules=["colorsys"],
            environment={"OF_SECOND": "1"},
            hook="tracemalloc:start",
        ),
    ]
    with fork_servers(stages) as runtime_env:
        yield runtime_env


def _environment() -> dict[str, str]:
    return {name: v for name, v in os.environ.items() if name != "PYTEST_CURRENT_TEST"}


def _run(
    servers: dict[str, str], script: Path, *arguments: str, stage: str = "first", **variables: str
) -> dict[str, Any]:
    """What the script tells of its process."""
    command = servers["py_executable"].removesuffix("first") + stage
    asked = subprocess.run(
        f"exec {command} {script} {' '.join(arguments)}",
        shell=True,
        cwd=script.parent,
        env=_environment() | variables,
        stdout=subprocess.PIPE,  # its end comes when the fork has ended, too
        text=True,
        timeout=_LIMIT_S,
        check=False,
    )
    assert asked.returncode == 0
    told: dict[str, Any] = json.loads(asked.stdout)
    return told


def _is_forked(told: dict[str, Any]) -> bool:
    return server.FIRST_VARIABLE in told["variables"]


def test_a_fork_is_what_python_would_have_been(servers: dict[str, str], script: Path) -> None:
    told = _run(servers, script, "--one", "two", RAY_JOB_ID="7")
    assert _is_forked(told)
    assert told["arguments"] == [str(script), "--one", "two"]
    assert told["folder"] == told["path"] == str(script.parent)
    assert told["variables"]["RAY_JOB_ID"] == "7"
    assert "numpy" in told["modules"] and "colorsys" not in told["modules"]
    assert not any(name.startswith("ray.") for name in told["modules"])
    assert told["group"]
    assert told["child_signal"]
    assert [file for file in told["files"] if file <= 2] == [0, 1, 2]
    assert len(told["files"]) == 4, "the fourth is the folder that was listed"


@pytest.mark.parametrize("given", [None, "0"])
def test_imports_of_servers_look_for_gpus_without_cuda(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str | None
) -> None:
    """But where somebody wants that. CUDA that has begun refuses to run in a fork."""
    name = "PYTORCH_NVML_BASED_CUDA_CHECK"
    monkeypatch.delenv(name, raising=False)
    if given is not None:
        monkeypatch.setenv(name, given)
    (tmp_path / "looks.py").write_text(f"import os\nos.environ['SEEN'] = os.environ['{name}']\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    with fork_servers([Stage(name="first", modules=["looks"])]) as runtime_env:
        told = _run(runtime_env, script)
    assert _is_forked(told)
    assert told["variables"]["SEEN"] == (given or "1")


def test_forks_draw_different_numbers(servers: dict[str, str], script: Path) -> None:
    assert _run(servers, script)["draw"] != _run(servers, script)["draw"]


def test_the_next_server_has_imported_more_and_has_its_variables(
    servers: dict[str, str], script: Path
) -> None:
    told = _run(servers, script, stage="second", OF_SECOND="1")
    assert _is_forked(told)
    assert {"numpy", "colorsys"} <= set(told["modules"])
    assert told["variables"]["OF_SECOND"] == "1"
    assert told["hook_ran"]


@pytest.mark.parametrize(
    ("stage", "variables"),
    [
        pytest.param("first", {"PYTHONPATH": "/elsewhere"}, id="path"),
        pytest.param("first", {"OMP_NUM_THREADS": "3"}, id="threads"),
        pytest.param("first", {"OF_SECOND": "1"}, id="another"),
        pytest.param("second", {}, id="missing"),
    ],
)
def test_a_variable_that_an_import_may_have_read_is_refused(
    servers: dict[str, str], script: Path, stage: str, variables: dict[str, str]
) -> None:
    told = _run(servers, script, stage=stage, **variables)
    assert not _is_forked(told)
    assert told["variables"].items() >= variables.items()


def _set_up(
    servers: dict[str, str], script: Path, context: dict[str, Any] | None
) -> dict[str, Any]:
    """What the script tells of a process that Ray sets up by `worker.py`."""
    command = [sys.executable, worker.__file__, str(script), "--one", "--language=PYTHON", "--two"]
    if context is not None:
        plain: dict[str, Any] = {
            "command_prefix": [],
            "override_worker_entrypoint": None,
            "java_jars": [],
        }
        context = plain | {"env_vars": {}} | servers | context
        command.append(f"--serialized-runtime-env-context={json.dumps(context)}")
    asked = subprocess.run(
        command,
        cwd=script.parent,
        env=_environment() | {"OUTSIDE": "1"},
        stdout=subprocess.PIPE,
        text=True,
        timeout=_LIMIT_S,
        check=False,
    )
    assert asked.returncode == 0
    told: dict[str, Any] = json.loads(asked.stdout)
    assert told["arguments"] == [str(script), "--one", "--two"]
    return told


@pytest.fixture(scope="module")
def beside_outside() -> Iterator[dict[str, str]]:
    """A server whose workers have the variable that `_set_up` sets."""
    with fork_servers([Stage(name="first", modules=[], environment={"OUTSIDE": "1"})]) as servers:
        yield servers


def test_ray_sets_a_worker_up_by_a_fork(beside_outside: dict[str, str], script: Path) -> None:
    told = _set_up(beside_outside, script, {"env_vars": {"RAY_OF_CONTEXT": "2"}})
    assert _is_forked(told)
    assert told["variables"]["RAY_OF_CONTEXT"] == "2"
    assert "SHLVL" not in told["variables"] or "SHLVL" in os.environ, "no shell was between"


@pytest.mark.parametrize(
    ("context", "is_forked"),
    [
        pytest.param(None, False, id="no runtime environment"),
        pytest.param({"py_executable": sys.executable}, False, id="another Python"),
        pytest.param({"py_executable": ""}, False, id="no Python"),
        pytest.param({"env_vars": {"RAY_OF_CONTEXT": "${OUTSIDE}"}}, True, id="a reference"),
        pytest.param({"command_prefix": ["RAY_OF_CONTEXT=1"]}, True, id="words before it"),
        pytest.param({"env_vars": {"PYTHONPATH": "/elsewhere"}}, False, id="refused"),
    ],
)
def test_what_else_a_worker_is_to_be_ray_sees_to(
    beside_outside: dict[str, str], script: Path, context: dict[str, Any] | None, is_forked: bool
) -> None:
    told = _set_up(beside_outside, script, context)
    assert _is_forked(told) == is_forked
    if "RAY_OF_CONTEXT" in json.dumps(context):
        assert told["variables"]["RAY_OF_CONTEXT"] == "1"


def test_ray_sets_workers_up_as_ever_after_the_block() -> None:
    before = ray_constants.SETUP_WORKER_FILENAME
    with workers_set_up_by("/elsewhere/worker.py"):
        assert (
            os.path.join("/of/ray", ray_constants.SETUP_WORKER_FILENAME) == "/elsewhere/worker.py"
        )
    assert before == ray_constants.SETUP_WORKER_FILENAME


@pytest.mark.parametrize(
    ("given", "before", "after"),
    [("3", 1, 3), ("3", 2, 2), (None, 1, 1), ("many", 1, 1)],
)
def test_torch_of_a_server_has_the_threads_of_its_worker(
    monkeypatch: pytest.MonkeyPatch, given: str | None, before: int, after: int
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    own = torch.get_num_threads()
    try:
        torch.set_num_threads(before)
        have_threads()
        assert torch.get_num_threads() == after
    finally:
        torch.set_num_threads(own)


_IMPORT_COMPILER = """
import importlib, sys
import torch.cuda
answers, real = {}, importlib.import_module
torch.cuda.is_available = before = lambda: None

def import_module(name, package=None):
    answers[name] = torch.cuda.is_available()
    return real(name, package)

importlib.import_module = import_module
import ray_apr.compat.forked.compiler
assert answers["torch._inductor.compile_fx"] is True and torch.cuda.is_available is before
assert "torch._inductor.compile_fx" in sys.modules and "ray" not in sys.modules
"""


def test_the_compiler_is_imported_without_a_question_to_the_device() -> None:
    done = subprocess.run([sys.executable, "-c", _IMPORT_COMPILER], timeout=120, check=False)
    assert done.returncode == 0


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_servers_import_is_there(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stages: list[Stage] = []
    monkeypatch.setattr(forking, "fork_servers", stages.extend)
    forking.run_fork_servers(device)
    names = {name for stage in stages for name in (*stage.modules, *stage.later_modules)}
    missing = {name for name in names if importlib.util.find_spec(name) is None}
    assert not missing
    assert ("ray_apr.compat.forked.compiler" in names) == (device == "cuda")


@pytest.mark.parametrize(
    ("wanted", "read"),
    [
        ({"A": "1"}, set()),
        ({"A": "1", "OMP_NUM_THREADS": "1"}, set()),
        ({"A": "1", "OMP_NUM_THREADS": "2"}, {"OMP_NUM_THREADS"}),
        ({"A": "2"}, {"A"}),
        ({}, {"A"}),
        ({"A": "1", "VLLM_USE_V1": "1"}, {"VLLM_USE_V1"}),
        ({"A": "1", "RAY_JOB_ID": "01", "PWD": "/", "MALLOC_ARENA_MAX": "1"}, set()),
    ],
)
def test_which_variables_are_refused(wanted: dict[str, str], read: set[str]) -> None:
    assert server.read_before(wanted, {"A": "1", "OMP_NUM_THREADS": "1"}) == read


def test_servers_begin_anew_with_variables_that_are_set_meanwhile(script: Path) -> None:
    """As a user's module sets some, which is imported after the servers have begun."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PYTEST_CURRENT_TEST")
        with begin_servers([Stage(name="first", modules=[])]) as runtime_env:
            before = runtime_env()
            assert runtime_env() == before
            patch.setenv("TOKENIZERS_PARALLELISM", "no")
            assert not _is_forked(_run(before, script))
            after = runtime_env()
            told = _run(after, script)
            assert runtime_env() == after
    assert _is_forked(told)
    assert told["variables"]["TOKENIZERS_PARALLELISM"] == "no"
    assert not _folder_of(before).exists()
    assert not _folder_of(after).exists()


def _folder_of(servers: dict[str, str]) -> Path:
    return Path(servers["py_executable"].split()[-1]).parent


def test_without_a_server_python_runs_the_script(script: Path, tmp_path: Path) -> None:
    command = {"py_executable": f"{sys.executable} -I -S {worker.__file__} {tmp_path}/first"}
    told = _run(command, script, "--one")
    assert not _is_forked(told)
    assert told["arguments"] == [str(script), "--one"]


def test_a_server_that_was_killed_is_done_without(script: Path) -> None:
    with fork_servers([Stage(name="first", modules=["numpy"])]) as runtime_env:
        assert _is_forked(_run(runtime_env, script))
        for process in psutil.Process().children():
            if "ray_apr.compat.forked.server" in process.cmdline():
                process.kill()
                process.wait(_LIMIT_S)
        assert not _is_forked(_run(runtime_env, script))


def test_servers_end_with_the_block(script: Path) -> None:
    with fork_servers([Stage(name=n, modules=[]) for n in ("first", "second")]) as runtime_env:
        parent = psutil.Process(_run(runtime_env, script)["parent"])
        all_servers = [parent, *parent.children()]
        assert len(all_servers) >= 2
    _, alive = psutil.wait_procs(all_servers, timeout=_LIMIT_S)
    assert not alive
    assert not _folder_of(runtime_env).exists()


def test_a_server_that_still_imports_ends_with_the_block(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slow_module.py").write_text("import time\ntime.sleep(60)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    stages = [Stage(name="first", modules=[]), Stage(name="second", modules=["slow_module"])]
    with fork_servers(stages) as runtime_env:
        parent = psutil.Process(_run(runtime_env, script)["parent"])
        all_servers = [parent, *parent.children()]
        assert len(all_servers) >= 2
    _, alive = psutil.wait_procs(all_servers, timeout=15)
    assert not alive


def test_a_module_that_fails_costs_none_of_the_others(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one does whose libraries of C are not there. The server died, and each worker imported."""
    (tmp_path / "broken_module.py").write_text("raise OSError('libcudart.so: no such file')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    with fork_servers([Stage(name="first", modules=["broken_module", "colorsys"])]) as runtime_env:
        told = _run(runtime_env, script)
    assert _is_forked(told)
    assert "colorsys" in told["modules"] and "broken_module" not in told["modules"]


def test_a_server_whose_import_has_begun_cuda_forks_nothing(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA would refuse to run in its forks, as it did beside flash-attn-4. The others fork on."""
    (tmp_path / "asks.py").write_text("import torch\ntorch.cuda._is_in_bad_fork = lambda: True\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    stages = [
        Stage(name="first", modules=["colorsys"], later_modules=["torch"]),
        Stage(name="second", modules=[], later_modules=["asks"]),
        Stage(name="third", modules=[]),
    ]
    with fork_servers(stages) as runtime_env:
        forked = {s.name: _is_forked(_run(runtime_env, script, stage=s.name)) for s in stages}
    assert forked == {"first": True, "second": False, "third": True}


def test_servers_begin_where_ends_of_processes_are_ignored(script: Path) -> None:
    """known fault: they ended, and each worker imported for itself, without a word."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        servers = fork_servers([Stage(name="first", modules=["torch"])])
        with servers as runtime_env:
            signal.signal(signal.SIGCHLD, before)
            assert _is_forked(_run(runtime_env, script))
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_servers_end_with_a_process_that_is_killed(script: Path) -> None:
    code = (
        "import sys, time\n"
        "from ray_apr.compat.forked.servers import Stage, fork_servers\n"
        "stages = [Stage(name=name, modules=[]) for name in ('first', 'second')]\n"
        "with fork_servers(stages) as runtime_env:\n"
        "    print(runtime_env()['py_executable'], flush=True)\n"
        "    time.sleep(600)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], env=_environment(), stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    command = process.stdout.readline().strip()
    told = _run({"py_executable": command}, script)
    assert _is_forked(told)
    parent = psutil.Process(told["parent"])
    all_servers = [parent, *parent.children()]
    process.send_signal(signal.SIGKILL)
    process.wait(_LIMIT_S)
    process.stdout.close()
    _, alive = psutil.wait_procs(all_servers, timeout=_LIMIT_S)
    assert not alive


def test_forks_outlive_their_server(tmp_path: Path) -> None:
    script = tmp_path / "stay.py"
    script.write_text("import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(600)\n")
    with fork_servers([Stage(name="first", modules=[])]) as runtime_env:
        asked = subprocess.Popen(
            f"exec {runtime_env['py_executable']} {script}",
            shell=True,
            env=_environment(),
            stdout=subprocess.PIPE,
            text=True,
        )
        assert asked.stdout is not None
        fork = psutil.Process(int(asked.stdout.readline()))
        assert asked.wait(_LIMIT_S) == 0
    time.sleep(0.2)
    assert fork.is_running()
    fork.kill()
    asked.stdout.close()
