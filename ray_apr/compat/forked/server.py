"""The processes that workers of Ray are forked from.

    python -m ray_apr.compat.forked.server ALIVE STAGES

The first server forks the next one from itself once it has imported its modules, and so on; each
one then makes workers. None of them imports Ray, which reads once, as it is loaded, whose worker a
process is, and seeds its ids: all forks would draw the same.

Invariants:
    * A server has no thread of Python and uses no device, so that a fork of it is whole; the
      threads of OpenBLAS and of jemalloc follow a fork by themselves.
    * A fork is what Python itself would have been: same arguments, folder, files and variables. Who
      asks for a variable that was read before, at an import, is refused.
    * Servers end with the process that has begun the first one; their forks do not.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import pkgutil
import runpy
import select
import signal
import socket
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from ray_apr.compat.forked.environment import THREADS, have_environment
from ray_apr.compat.forked.worker import FORKED

_M_ARENA_MAX = -8
"""glibc's name of `_ARENAS`, which it reads as a process begins."""
_ARENAS = "MALLOC_ARENA_MAX"
_SET_LATER = {"PWD", "OLDPWD", "SHLVL", "_", "SPT_NOENV", _ARENAS}
"""Variables that nothing has read which is imported here, beside Ray's, or that a fork can obey."""
FIRST_VARIABLE = "RAY_APR_IS_FORKED"
"""Of servers and forks; a process finds the memory for its title by the first one, which stays."""
_LOOKS_FOR_GPUS_BY_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""PyTorch's own variable: to ask whether there is a GPU, as Transformers does at its import where
flash-attn-4 is installed, does not begin CUDA then."""
_PR_SET_PDEATHSIG = 1
"""Of prctl(2)."""
_REQUEST_LIMIT_S = 5.0


def main() -> None:
    """Import and serve, and in each fork run what was asked for."""
    alive, stages = int(sys.argv[1]), json.loads(sys.argv[2])
    gc.disable()  # what is imported stays, and collections are a fifth of the time
    del sys.path[0]  # the folder that this process was started in
    began = dict(os.environ)
    os.environ.setdefault(_LOOKS_FOR_GPUS_BY_NVML, "1")
    script = _run_stages(alive, stages, began)
    sys.argv = script
    sys.path.insert(0, os.path.dirname(script[0]))
    runpy.run_path(script[0], run_name="__main__")


def _run_stages(alive: int, stages: list[dict[str, Any]], began: dict[str, str]) -> list[str]:
    """Be the first server, and fork the one that is the others; returns in a worker.

    Waits for: the end of what began it, where it cannot serve. Unblocked by: that.

    Args:
        alive: Of a pipe whose other end nobody has but the process that has begun this.
        stages: See `servers.Stage`, with its socket.
        began: The variables that this process was begun with.
    """
    stage, *later = stages
    began |= stage["environment"]
    os.environ.update(stage["environment"])
    _import(stage["modules"])
    if later and os.fork() == 0:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        os.close(stage["socket"])
        return _run_stages(alive, later, began)
    for other in later:
        os.close(other["socket"])
    _import(stage["later_modules"])
    with socket.socket(fileno=stage["socket"]) as listener:
        request = None if _has_begun_cuda() else _serve(alive, listener, began)
    if request is None:  # who asks finds nobody, and starts Python; later servers live on
        select.select([alive], [], [])
        sys.exit()
    os.close(alive)
    _become(request, began)
    if stage["hook"] is not None:
        pkgutil.resolve_name(stage["hook"])()
    script: list[str] = request["script"]
    return script


def _import(modules: Iterable[str]) -> None:
    for module in modules:
        # also where a library of C is missing: a worker that needs the module says so itself
        with contextlib.suppress(Exception):
            importlib.import_module(module)


def _has_begun_cuda() -> bool:
    """Whether an import has asked for a GPU, so that CUDA refuses to run in forks, as PyTorch
    answers in one. Packages for GPUs do so, of which imports take any that is installed.

    Waits for: a fork. Unblocked by: its end, which is at once.
    """
    if "torch" not in sys.modules:
        return False
    from ray_apr.compat.torch import TORCH  # of servers with PyTorch alone

    is_in_bad_fork = TORCH.get("_is_in_bad_fork")
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # who began this may ignore the ends
    if (fork := os.fork()) == 0:
        os._exit(is_in_bad_fork())
    return os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]) != 0


def _serve(alive: int, listener: socket.socket, began: Mapping[str, str]) -> dict[str, Any]:
    """Fork whenever somebody asks; returns in each fork, with what it is to be.

    Waits for: requests. Unblocked by: them, or the end of who has begun this, which ends it.
    """
    gc.collect()
    gc.freeze()  # so that a collection in a fork does not copy the memory that forks share
    gc.enable()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how a fork has ended
    while True:
        readable, _, _ = select.select([alive, listener.fileno()], [], [])
        if alive in readable:
            sys.exit()
        line, _ = listener.accept()
        with line:
            line.settimeout(_REQUEST_LIMIT_S)
            files: list[int] = []
            if request := _fork(line, files, began):
                return request | {"files": files}
            for file in files:
                os.close(file)


def _fork(line: socket.socket, files: list[int], began: Mapping[str, str]) -> dict[str, Any] | None:
    """In the fork what it is to be; None in the server.

    Waits for: the request. Unblocked by: it, or `_REQUEST_LIMIT_S`.

    Args:
        line: To who asks.
        files: Gets the standard files of who asks.
        began: The variables that this process was begun with.
    """
    with contextlib.suppress(OSError, ValueError, KeyError):  # of who has gone since
        files += socket.recv_fds(line, 1, 3)[1]
        with line.makefile("rb") as lines:
            request: dict[str, Any] = json.loads(lines.readline())
        if not read_before(request["environment"], began):
            if os.fork() == 0:
                return request
            line.sendall(FORKED)
    return None


def read_before(wanted: Mapping[str, str], began: Mapping[str, str]) -> set[str]:
    """The variables that imports here may have read with another value than a worker wants."""
    differ = {n for n in wanted.keys() | began.keys() if wanted.get(n) != began.get(n)}
    if THREADS not in wanted:  # then Ray sets it in the worker
        differ.discard(THREADS)
    return {name for name in differ - _SET_LATER if not name.startswith("RAY_")}


def _become(request: Mapping[str, Any], began: Mapping[str, str]) -> None:
    """Have what a process has that Ray starts, and what imports set for it."""
    os.setpgid(0, 0)  # Ray ends the group of a worker that has ended
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number, file in enumerate(request["files"]):
        os.dup2(file, number)
        os.close(file)
    os.chdir(request["folder"])
    wanted: dict[str, str] = request["environment"]
    of_imports = {name: v for name, v in os.environ.items() if began.get(name) != v}
    first = {FIRST_VARIABLE: os.environ[FIRST_VARIABLE]}
    have_environment(wanted | of_imports | first)
    if arenas := wanted.get(_ARENAS):
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, int(arenas))
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()  # else all forks draw the same numbers


if __name__ == "__main__":
    main()
