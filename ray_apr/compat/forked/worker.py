"""What Ray runs in place of Python to start a worker: it has a fork server make the process.

    python -I -S worker.py SOCKET SCRIPT [ARGUMENT ...]

Where no server answers, or the server is not to fork this one, this process becomes Python and runs
the script. It runs once for each worker, so it imports no more than what it asks with.
"""

from __future__ import annotations

import json
import os
import socket
import sys

ANSWER_LIMIT_S = 40.0
"""Longest wait for a server, which may still import; Ray gives a worker 60 s to register."""
FORKED = b"forked"
"""What a server answers when it has made the worker."""


def ask(path: str, script: list[str]) -> bool:
    """Whether a server has forked a process that runs this script as this process would.

    Waits for: the server. Unblocked by: its answer, its end, or `ANSWER_LIMIT_S`.

    Args:
        path: Where the server listens.
        script: File and arguments.

    Raises:
        OSError: If no server answers.
    """
    request = {"script": script, "folder": os.getcwd(), "environment": dict(os.environ)}
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
        line.settimeout(ANSWER_LIMIT_S)
        line.connect(path)
        socket.send_fds(line, [b"\n"], [0, 1, 2])
        line.sendall(json.dumps(request).encode() + b"\n")
        return line.recv(len(FORKED)) == FORKED


def main() -> None:
    """Ask, or run the script here."""
    path, *script = sys.argv[1:]
    try:
        is_forked = ask(path, script)
    except OSError:
        is_forked = False
    if not is_forked:
        os.execv(sys.executable, [sys.executable, *script])


if __name__ == "__main__":
    main()
