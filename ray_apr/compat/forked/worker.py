"""What Ray runs in place of Python to start a worker: it has a fork server make the process.

    python -I -S worker.py SOCKET SCRIPT [ARGUMENT ...]
    python worker.py SCRIPT [ARGUMENT ...] --language=PYTHON --serialized-runtime-env-context=JSON

The second is how Ray calls `setup_worker.py`, which imports Ray before it runs the first; for a
worker that is to be set up otherwise, this process becomes what it stands for. Where no server
answers, or the server is not to fork this one, it becomes Python and runs the script. It runs once
for each worker, so it imports no more than what it asks with.
"""

from __future__ import annotations

import json
import os
import shlex
import socket
import sys
from typing import Any, NoReturn

ANSWER_LIMIT_S = 40.0
"""Longest wait for a server, which may still import; Ray gives a worker 60 s to register."""
_CONTEXT, _LANGUAGE = "--serialized-runtime-env-context=", "--language="
"""What Ray tells `setup_worker.py`, of which the script does not hear."""
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
    arguments = sys.argv[1:]
    if any(argument.startswith(_LANGUAGE) for argument in arguments):
        context = _context(arguments)
        path = _path(context)
        if path is None:
            _become([_setup_of_ray(), *arguments])
        os.environ.update(context["env_vars"])
        script = [a for a in arguments if not a.startswith((_CONTEXT, _LANGUAGE))]
    else:
        path, *script = arguments
    try:
        is_forked = ask(path, script)
    except OSError:
        is_forked = False
    if not is_forked:
        _become(script)


def _context(arguments: list[str]) -> dict[str, Any]:
    """What Ray has made of the runtime environment of the worker; empty where it has none."""
    given = [a.removeprefix(_CONTEXT) for a in arguments if a.startswith(_CONTEXT)]
    context: dict[str, Any] = json.loads(given[0]) if given else {}
    return context


def _path(context: dict[str, Any]) -> str | None:
    """Where the server listens; None where Ray itself is to set up the worker: that is no fork, or
    needs what is not done here."""
    *command, path = shlex.split(context.get("py_executable") or "") or [""]
    is_plain = not (context.get("command_prefix") or context.get("override_worker_entrypoint"))
    refers = any("$" in value for value in context.get("env_vars", {}).values())
    return path if __file__ in command and is_plain and not refers else None


def _setup_of_ray() -> str:
    """Ray's own file, found without importing Ray."""
    import importlib.util  # rarely needed

    found = importlib.util.find_spec("ray")
    assert found is not None and found.submodule_search_locations, "Ray has begun this"
    return os.path.join(found.submodule_search_locations[0], "_private/workers/setup_worker.py")


def _become(script: list[str]) -> NoReturn:
    os.execv(sys.executable, [sys.executable, *script])


if __name__ == "__main__":
    main()
