"""Forks a jail for each program that it is asked for; started as a script by `jails.py`.

It is a process of its own, with one thread and few modules, because a process with threads (a
reward worker) can neither fork nor unshare safely, and a new interpreter for each program would
take longer than all else that a jail does. Called as ``python -E -s -S jailer.py SOCKET_FD PID``
with its caller's process id. A message with four files (spec, standard input, standard output,
status) asks for a jail; ``SIGNAL PID`` asks for a signal to one, which has said its process id.

Invariants:
    * It never reads a spec, so that no program finds another one's in its memory.
    * It ends when its caller has, and each jail ends with it (`jail.confine`).
    * It signals only jails that it has not buried yet: no other process can have their ids.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import sys
from typing import NoReturn

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ray_apr.rewards import jail
else:
    import jail  # beside this script

_LOOK_S = 1.0
"""How often it looks whether its caller lives: a fork of that may have its end of the socket."""


def main() -> None:
    """Serve until the caller ends.

    Waits for: messages, and ends of jails. Unblocked by: these, the caller's end, or `_LOOK_S`.
    """
    requests, caller = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    requests.set_inheritable(False)
    wake, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # else nothing is written there
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # may be ignored, and ends a jail from the first
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    jail.set_dumpable(False)
    jails: set[int] = set()
    selector = selectors.PollSelector()  # select.select refuses a socket whose number is over 1,023
    for file in (requests, wake):
        selector.register(file, selectors.EVENT_READ)
    while os.getppid() == caller:
        ready = [key.fileobj for key, _ in selector.select(_LOOK_S)]
        if wake in ready:
            os.read(wake, 4096)
        _bury(jails)
        if requests not in ready:
            continue
        message, files, _, _ = socket.recv_fds(requests, 64, 4)
        for file in files:
            os.set_inheritable(file, False)  # a program gets none of them but as 0 and 1
        if files:
            _fork_jail(requests, jails, files)
        elif message:
            number, pid = map(int, message.split())
            if pid in jails:
                os.kill(pid, number)
        else:
            return


def _bury(jails: set[int]) -> None:
    """Forget those that have ended."""
    with contextlib.suppress(ChildProcessError):  # there is none
        while ended := os.waitpid(-1, os.WNOHANG)[0]:
            jails.discard(ended)


def _fork_jail(requests: socket.socket, jails: set[int], files: list[int]) -> None:
    """Start one that has these files."""
    jailer = os.getpid()
    try:
        child = os.fork()
    except OSError as error:
        jail.say_error(files[-1], error)
    else:
        if child == 0:
            requests.close()
            _be_jail(files, jailer)
        jails.add(child)
    for file in files:
        os.close(file)


def _be_jail(files: list[int], jailer: int) -> NoReturn:
    """Run the program, and end."""
    spec, stdin, stdout, status = files
    try:
        signal.set_wakeup_fd(-1)
        os.setsid()
        os.dup2(stdin, 0)
        os.dup2(stdout, 1)
        jail.set_dumpable(True)  # else /proc/self is root's
        jail.confine(spec, status, jailer)
    finally:
        os._exit(1)


if __name__ == "__main__":
    main()
