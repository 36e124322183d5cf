"""A program's jail as its caller sees it, and the jailer of this process (`jailer.py`).

    sandbox.py ──► jails.py ──four files──► jailer.py ──fork──► jail.py ──► program
                      ▲                                            │           │
                      └────────────── status, output ──────────────┴───────────┘

Invariants:
    * A process has one jailer at most, from its first program on. It ends with the process; one
      that has ended before is replaced for the next program.
    * When `jailed` is left, the jail has ended, and all that its program started with it.
    * No wait is without a limit.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import BinaryIO

from ray_apr.core.exceptions import ResourceError

ENVIRONMENT: Mapping[str, str] = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "LANG": "C.UTF-8",
    # Their threads would count as processes.
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}
"""Of the jailer, and of what it starts."""
RUNS = "ray_apr.program"
"""Audit event of a program that is about to be run."""
END_LIMIT_S = 10.0
"""Longest that a jail may take to end what it started."""
_SCRIPT = str(Path(__file__).with_name("jailer.py"))


class _Jailer:
    """The process that forks jails."""

    def __init__(self) -> None:
        self._socket, its_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(END_LIMIT_S)
        with its_end:
            arguments = [_SCRIPT, str(its_end.fileno()), str(os.getpid())]
            self._process = subprocess.Popen(
                [sys.executable, "-E", "-s", "-S", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(its_end.fileno(),),
                cwd="/",
                env=ENVIRONMENT,
                start_new_session=True,
            )

    @property
    def is_there(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def send(self, message: bytes, files: Sequence[int] = ()) -> None:
        """Send it a message.

        Raises:
            OSError: If it has ended, or takes none within `END_LIMIT_S`.
        """
        socket.send_fds(self._socket, [message], files)

    def end(self, limit_s: float = END_LIMIT_S) -> None:
        """Have it end, with its jails.

        Waits for: it. Unblocked by: its end, or SIGKILL after the limit.
        """
        self._socket.close()
        try:
            self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def forget(self) -> None:
        """Have nothing of it, in a fork of the process whose it is."""
        self._socket.close()
        self._process.returncode = 0  # else its end is asked for, with a lock of `subprocess`


class _Jailers:
    """Begins the jailer of this process when it is asked for."""

    def __init__(self) -> None:
        self._jailer: _Jailer | None = None
        self._lock = threading.Lock()

    def get(self) -> _Jailer:
        """One that is there.

        Waits for: another thread that begins it. Unblocked by: that.

        Raises:
            OSError: If none can be started.
        """
        with self._lock:
            if self._jailer is None or not self._jailer.is_there:
                self.end()
                self._jailer = _Jailer()
            return self._jailer

    def end(self) -> None:
        """Have it end, as this process does."""
        if self._jailer is not None:
            self._jailer.end()

    def forget(self) -> None:
        """In a fork, which has no jailer yet, and none of the threads that may hold a lock."""
        self._lock = threading.Lock()
        if self._jailer is not None:
            self._jailer.forget()
        self._jailer = None


_jailers = _Jailers()
atexit.register(_jailers.end)
os.register_at_fork(after_in_child=_jailers.forget)


class Jail:
    """A jail that has been asked for."""

    def __init__(self, jailer: _Jailer, status_fd: int, output_fd: int) -> None:
        self._jailer = jailer
        self.status_fd = status_fd
        self.output_fd = output_fd
        self.status: list[str] = []
        """Lines that it has said (see `jail.py`)."""
        self._line = b""
        self._has_ended = False
        self._due: int | None = None
        """A signal to one that has not said its process id yet."""

    def read_status(self) -> bool:
        """Read on; returns whether there may be more, which is until it has ended."""
        data = os.read(self.status_fd, 4096)
        *lines, self._line = (self._line + data).split(b"\n")
        self.status += [line.decode(errors="replace") for line in lines]
        self._has_ended = not data
        if self._due is not None and self.status:
            self.signal(self._due)
        return bool(data)

    def signal(self, number: int) -> None:
        """Send it a signal, if it has not ended; as soon as it has begun."""
        self._due = None if self.status else number
        first, _, pid = self.status[0].partition(" ") if self.status else ("", "", "")
        if first == "jail":
            with contextlib.suppress(OSError):  # its jailer has ended, and so does it
                self._jailer.send(f"{number} {pid}".encode())

    def end(self) -> None:
        """Have it end with all that it started; else the jailer ends, and all of its jails.

        Waits for: that. Unblocked by: its end, or `END_LIMIT_S` after each signal.
        """
        for number in (signal.SIGTERM, signal.SIGKILL):
            if not self._has_ended:
                self.signal(number)
            if self._ends_within(END_LIMIT_S):
                return
        self._jailer.end(0)

    def _ends_within(self, limit_s: float) -> bool:
        """Whether it has ended.

        Waits for: that. Unblocked by: the end of its status, or the limit.
        """
        deadline = time.monotonic() + limit_s
        with selectors.PollSelector() as selector:  # others need a file, and none may be free
            selector.register(self.status_fd, selectors.EVENT_READ)
            while not self._has_ended and selector.select(max(0.0, deadline - time.monotonic())):
                self.read_status()
        return self._has_ended


@contextlib.contextmanager
def jailed(spec: bytes, stdin: bytes) -> Iterator[Jail]:
    """Ask for a jail, which has ended when this context is left.

    Args:
        spec: What it does, as `marshal` writes it (see `sandbox.Sandbox`).
        stdin: Of its program.

    Raises:
        ResourceError: If no jailer can be started, or none takes it.
    """
    sys.audit(RUNS)
    with contextlib.ExitStack() as files:
        try:
            jail = _ask(spec, stdin, files)
        except OSError as error:
            raise ResourceError(f"a sandbox could not be started: {error}") from error
        try:
            yield jail
        finally:
            jail.end()


def _ask(spec: bytes, stdin: bytes, files: contextlib.ExitStack) -> Jail:
    """Ask for one, whose status and output are closed with `files`.

    Raises:
        OSError: If no jailer can be started, or none takes it; or no file can be opened.
    """
    status, its_status = files.enter_context(_pipe())
    output, its_output = files.enter_context(_pipe())
    with its_status, its_output, _memory_file(spec) as of_spec, _memory_file(stdin) as of_in:
        given = [file.fileno() for file in (of_spec, of_in, its_output, its_status)]
        jailer = _jailers.get()
        jailer.send(b"jail", given)
    return Jail(jailer, status.fileno(), output.fileno())


@contextlib.contextmanager
def _pipe() -> Iterator[tuple[FileIO, FileIO]]:
    """Its two ends."""
    first, second = os.pipe()
    with open(first, "rb", buffering=0) as reads, open(second, "wb", buffering=0) as writes:
        yield reads, writes


@contextlib.contextmanager
def _memory_file(content: bytes) -> Iterator[BinaryIO]:
    """A file without a name, open at its start, that nobody can write to any more."""
    fd = os.memfd_create("ray_apr-sandbox", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(fd, "wb") as file:
        file.write(content)
        file.flush()
        seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        os.lseek(fd, 0, os.SEEK_SET)
        yield file
