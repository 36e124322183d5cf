"""Begin and end the servers that workers of Ray are forked from, on this machine."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ray_apr.compat.forked.environment import THREADS
from ray_apr.compat.forked.server import FIRST_VARIABLE, read_before
from ray_apr.compat.ray import workers_set_up_by

_WORKER = Path(__file__).with_name("worker.py")
_BACKLOG = 128
"""Workers that may wait while a server imports."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One server.

    Attributes:
        name: What `runtime_env` calls it.
        modules: What it imports first. None of them may import Ray, begin a thread or use a device.
        later_modules: What it imports once the next server has been forked from it.
        environment: Variables that its workers begin with beside those of this process.
        hook: ``module:function`` that each of its workers calls before anything else; None: none.
    """

    name: str
    modules: Sequence[str]
    later_modules: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    hook: str | None = None


@contextlib.contextmanager
def fork_servers(stages: Sequence[Stage]) -> Iterator[Callable[[], dict[str, str]]]:
    """Servers that live as long as this block, and no longer than this process. A cluster that it
    starts asks them at once, without a process of its own that imports Ray first.

    Args:
        stages: Each one imports what the one before it has imported, and more.

    Yields:
        What gives Ray's runtime environment for the workers that the first one forks. Where
        variables have changed meanwhile, as a user's module may do, the servers begin anew with
        them: those that began before would refuse each worker.
    """
    began = dict(os.environ)
    with contextlib.ExitStack() as stack, contextlib.ExitStack() as servers:
        folder = servers.enter_context(_begun(stages))
        stack.enter_context(workers_set_up_by(str(_WORKER)))

        def of_workers() -> dict[str, str]:
            nonlocal began, folder
            if read_before(os.environ, began):
                servers.close()
                began = dict(os.environ)
                folder = servers.enter_context(_begun(stages))
            return {"py_executable": _executable(folder, stages[0].name)}

        yield of_workers


@contextlib.contextmanager
def _begun(stages: Sequence[Stage]) -> Iterator[str]:
    """Servers that began with the variables of now; yields the folder of their sockets."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="ray-apr-"))
        listeners = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in stages]
        for listener, stage in zip(listeners, stages, strict=True):
            listener.bind(os.path.join(folder, stage.name))
            listener.listen(_BACKLOG)
        alive, end = os.pipe()
        stack.callback(os.close, end)
        sockets = [listener.fileno() for listener in listeners]
        given = [asdict(s) | {"socket": n} for s, n in zip(stages, sockets, strict=True)]
        server = subprocess.Popen(
            [sys.executable, "-m", "ray_apr.compat.forked.server", str(alive), json.dumps(given)],
            pass_fds=[alive, *sockets],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={FIRST_VARIABLE: "1"} | os.environ | {THREADS: os.environ.get(THREADS, "1")},
            start_new_session=True,  # not for Ctrl-C
        )
        os.close(alive)
        stack.callback(server.wait)
        stack.callback(server.kill)
        for listener in listeners:  # a worker that asks a dead server is to hear so
            listener.close()
        yield folder


def _executable(folder: str, stage: str) -> str:
    return shlex.join([sys.executable, "-I", "-S", str(_WORKER), os.path.join(folder, stage)])


def runtime_env(stage: str) -> dict[str, str]:
    """Ray's runtime environment for workers that a server forks; empty where this job has none.

    Args:
        stage: Name of the server.
    """
    import ray  # servers begin before this is imported

    if not ray.is_initialized():
        return {}
    given = ray.get_runtime_context().runtime_env.get("py_executable", "")
    *before, path = shlex.split(given) or [""]
    if str(_WORKER) not in before:
        return {}
    return {"py_executable": _executable(os.path.dirname(path), stage)}
