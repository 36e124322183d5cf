"""Runs one program apart from everything else, with limits, in a jail (`jails.py`).

Invariants:
    * When `Sandbox.run` returns or raises, no process of the program's is left (see `jail.py`).
    * What the program did is an `Outcome`; what the sandbox could not do is a `ResourceError`.
    * No wait is without a limit: start, run and end have one each.
"""

from __future__ import annotations

import functools
import logging
import marshal
import os
import re
import resource
import selectors
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from ray_apr.core.exceptions import ResourceError
from ray_apr.rewards.jails import END_LIMIT_S, ENVIRONMENT, Jail, jailed
from ray_apr.rewards.readable import readable_files
from ray_apr.rewards.system_calls import DENIED, MACHINES, filter_of

logger = logging.getLogger(__name__)

Isolation = Literal["auto", "namespaces", "rlimits"]
Route = Literal["root_namespaces", "user_namespaces", "rlimits"]
Ended = Literal["exit", "signal", "timeout", "output"]
_PROBES = 2
"""What works is found once in a process, and a machine under load may fail a probe."""

_SEES_ITS_START = (
    # packages
    *("importlib", "pkgutil", "pkg_resources", "runpy", "import site", "sysconfig", "distutils"),
    *("sys.path", "meta_path", "path_hooks", "sys.prefix", "base_prefix", "exec_prefix"),
    # frames, and built-in functions
    *("inspect", "traceback", "_getframe", "f_back", "excepthook", "stack_info", "stacklevel"),
    *("setprofile", "monitoring", "builtins"),
    # imports by several threads at once, and children that start as their parent did
    *("thread", "concurrent", "executor", "multiprocessing"),
)
"""Where one of these is in its text, a program might not do the same by `lazy_site.py`."""
_SEES_ITS_DEPTH = re.compile(r"recursionlimit(?!\((10 ?\*\*|2 ?\*\*|1 ?<<|int\(1e|\d[\d_]{4}))")
"""A limit of recursions that is read, or may be set so low that each call counts."""

_START_LIMIT_S = 30.0
_MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class SandboxLimits:
    """What a program may use."""

    time_limit_s: float = 10.0
    """Wall time from its first instruction on."""
    cpu_limit_s: int = 10
    """CPU time of each process."""
    memory_mb: int = 1024
    """Address space of each process, in MiB."""
    max_processes: int = 8
    """Processes and threads, its first one included."""
    disk_mb: int = 16
    """Size of a file; with namespaces, of all files together. In MiB."""
    max_output_bytes: int = 1 << 20
    """Standard output; more ends it."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a program ended."""

    ended: Ended
    """By itself, by a signal (its own fault, or a limit's), or out of time or room for output."""
    code: int
    """Exit code, or number of the signal; -1 where the sandbox ended it."""
    output: bytes
    """Standard output, up to its limit."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """A program to run; its files are in its working directory."""

    arguments: tuple[str, ...]
    files: Mapping[str, str]
    """Name -> text."""
    executable: str | None = None
    """None finds the first argument among the system's programs."""

    @classmethod
    def python(cls, name: str, text: str, *more: str) -> Command:
        """A program for the Python that runs here, with its packages.

        It starts by `lazy_site.py`, unless it might not do the same by that: as its text, or one
        of those that it executes (`more`), says.
        """
        sees = any(
            any(word in code for word in _SEES_ITS_START) or _SEES_ITS_DEPTH.search(code)
            for code in (text, *more)
        )
        lazy = () if sees else ("-S", "-c", text_of("lazy_site.py"))
        return cls(
            arguments=(sys.executable, "-I", *lazy, name),
            files={name: text},
            executable=os.path.realpath(sys.executable),
        )


@functools.cache
def text_of(script: str) -> str:
    """Text of a script that is beside this file, and runs inside of the sandbox."""
    return Path(__file__).with_name(script).read_text(encoding="utf-8")


@dataclass(frozen=True, kw_only=True)
class Sandbox:
    """A way to run programs that has been found to work on this machine."""

    route: Route
    readable: tuple[str, ...] = ()
    """Files and folders that a program with namespaces sees beside the system's."""

    @property
    def has_namespaces(self) -> bool:
        """Whether programs see neither this machine's files, nor its processes or network."""
        return self.route != "rlimits"

    def run(self, command: Command, limits: SandboxLimits, stdin: bytes = b"") -> Outcome:
        """Run a program to its end.

        Raises:
            ResourceError: If it could not be started, or not be ended.
        """
        machine = MACHINES.get(os.uname().machine)
        if machine is None:
            known = ", ".join(MACHINES)
            raise ResourceError(f"there is no sandbox for {os.uname().machine}; only for {known}")
        missing = [path for path in self.readable if not os.path.exists(path)]
        if missing:
            remedy = "put it there, or take it out of readable_paths"
            raise ResourceError(f"a program may read {missing[0]}, which is not here; {remedy}")
        readable = readable_files(self.readable)
        spec = {
            "route": self.route,
            "command": command.arguments,
            "executable": command.executable,
            "files": dict(command.files),
            "environment": ENVIRONMENT,
            "filter": filter_of(machine).hex(),
            "pivot_root": DENIED["pivot_root"][machine.index],
            "links": readable.links,
            "binds": readable.binds,
            "processes": limits.max_processes,
            "disk_bytes": limits.disk_mb * _MIB,
            "rlimits": {
                resource.RLIMIT_CPU: limits.cpu_limit_s,
                resource.RLIMIT_FSIZE: limits.disk_mb * _MIB,
                resource.RLIMIT_NOFILE: 256,
                resource.RLIMIT_CORE: 0,
                resource.RLIMIT_AS: limits.memory_mb * _MIB,
            },
        }
        with jailed(marshal.dumps(spec), stdin) as jail:
            return _Watch(jail, limits).follow()


class _Watch:
    """Reads output and status of one jail until it has ended, or has to.

    The status is at its end when the jail and all that it started have ended.
    """

    def __init__(self, jail: Jail, limits: SandboxLimits) -> None:
        self._jail = jail
        self._limits = limits
        self._output = bytearray()
        self._stopped: Ended | None = None
        self._deadline = time.monotonic() + _START_LIMIT_S

    def follow(self) -> Outcome:
        """Return how the program came to its end.

        Waits for: the jail's output and status. Unblocked by: these, or `time_limit_s`.
        """
        status, output = self._jail.status_fd, self._jail.output_fd
        os.set_blocking(output, False)
        with selectors.PollSelector() as selector:
            selector.register(status, selectors.EVENT_READ)
            selector.register(output, selectors.EVENT_READ)
            while selector.get_map():
                left_s = self._deadline - time.monotonic()
                ready = {key.fd for key, _ in selector.select(max(0.0, left_s))}
                if left_s <= 0:
                    self._out_of_time()
                if output in ready and not self._read_output():
                    selector.unregister(output)
                if status in ready and not self._read_status():
                    break
        while self._read_output():
            continue
        return self._outcome()

    def _read_output(self) -> bool:
        """Whether there may be more; nothing is read beyond the limit."""
        if self._stopped == "output":
            return False
        try:
            data = os.read(self._jail.output_fd, 1 << 16)
        except BlockingIOError:
            return False
        self._output += data
        if len(self._output) > self._limits.max_output_bytes:
            del self._output[self._limits.max_output_bytes :]
            self._stop("output")
            return False
        return bool(data)

    def _read_status(self) -> bool:
        """Whether there may be more; the clock starts with the program."""
        had_started = self._has_started
        has_more = self._jail.read_status()
        if self._has_started and not had_started:
            self._deadline = time.monotonic() + self._limits.time_limit_s
        return has_more

    @property
    def _has_started(self) -> bool:
        return "ready" in self._jail.status

    def _out_of_time(self) -> None:
        if self._stopped is not None:
            raise ResourceError(f"a sandbox did not end within {END_LIMIT_S:g} s")
        if not self._has_started:
            raise ResourceError(f"a sandbox did not start within {_START_LIMIT_S:g} s")
        self._stop("timeout")

    def _stop(self, reason: Ended) -> None:
        self._stopped = reason
        self._deadline = time.monotonic() + END_LIMIT_S
        self._jail.signal(signal.SIGTERM)

    def _outcome(self) -> Outcome:
        lines = self._jail.status
        for line in lines:
            if line.startswith("error "):
                detail = line.removeprefix("error ")
                raise ResourceError(f"a sandbox could not start its program: {detail}")
        kind, _, rest = (lines[-1] if lines else "").partition(" ")
        output = bytes(self._output)
        if self._stopped == "output":
            return Outcome(ended="output", code=-1, output=output)
        if kind == "exit":
            return Outcome(ended="exit", code=int(rest), output=output)
        if kind == "signal":
            return Outcome(ended="signal", code=int(rest), output=output)
        if self._stopped is not None:
            return Outcome(ended=self._stopped, code=-1, output=output)
        raise ResourceError("a sandbox was killed from outside before its program ended")


@functools.cache
def find_sandbox(
    isolation: Isolation = "auto",
    *,
    allow_unsandboxed_writes: bool = False,
    needs_python: bool = True,
    readable: tuple[str, ...] = (),
) -> Sandbox:
    """Return the best sandbox that works on this machine; what works is found once in a process.

    Args:
        isolation: ``"auto"`` takes namespaces, or else resource limits alone; the others insist.
        allow_unsandboxed_writes: Take resource limits even where the program runs as this
            process's user.
        needs_python: The Python that runs here must be able to run inside.
        readable: More files and folders that programs may read.

    Raises:
        ResourceError: If none works; says why, and what helps.
    """
    routes = {
        "auto": get_args(Route),
        "namespaces": get_args(Route)[:2],
        "rlimits": get_args(Route)[2:],
    }[isolation]
    reasons: list[str] = []
    for route in routes:
        reason = _reason_against(route, allow_unsandboxed_writes, needs_python)
        if reason is None:
            if reasons and route == "rlimits":
                logger.warning("programs run without namespaces: %s", "; ".join(reasons))
            return Sandbox(route=route, readable=readable)
        reasons.append(f"{route}: {reason}")
    raise ResourceError(
        f"no sandbox for programs works on this machine ({'; '.join(reasons)}). Allow user "
        "namespaces (in a container: a security profile that permits unshare), or run as root; or "
        "set allow_unsandboxed_writes=True, which lets a program change what this user may change"
    )


def _reason_against(route: Route, allow_unsandboxed_writes: bool, needs_python: bool) -> str | None:
    """Why a route cannot be taken here; None if it works."""
    is_root = os.geteuid() == 0
    if route == "root_namespaces" and not is_root:
        return "not root"
    if route == "rlimits" and not is_root and not allow_unsandboxed_writes:
        return "a program would run as this user, who may write outside of the sandbox"
    command = Command(arguments=("/bin/sh", "-c", "exit 0"), files={})
    if needs_python:
        command = Command.python("probe.py", "")
    reason = ""
    for _ in range(_PROBES):
        try:
            outcome = Sandbox(route=route).run(command, SandboxLimits())
        except ResourceError as error:
            reason = str(error)
            continue
        if (outcome.ended, outcome.code) == ("exit", 0):
            return None
        reason = f"a probe ended by {outcome}"
    return reason
