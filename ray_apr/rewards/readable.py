"""What a program with namespaces sees of this machine's files, all of it read-only."""

from __future__ import annotations

import functools
import os
import sys
from typing import NamedTuple

SYSTEM_PATHS = (
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib32",
    "/lib64",
    "/libx32",
    "/nix/store",
    "/etc/alternatives",
    "/etc/ld.so.cache",
    "/etc/localtime",
)
"""The system's programs and libraries."""


class Readable(NamedTuple):
    """The new root's content; no path is inside another one."""

    links: dict[str, str]
    """Path -> what it points to, as on this machine."""
    binds: dict[str, str]
    """Path -> the file or folder, without links, that is mounted there."""


@functools.cache
def readable_files(more: tuple[str, ...]) -> Readable:
    """The system's paths, those of the Python that runs here, and `more`, as far as they exist."""
    executable = os.path.realpath(sys.executable)
    python = (sys.prefix, sys.base_prefix, os.path.realpath(sys.base_prefix))
    given = (os.path.normpath(f"/{path.lstrip('/')}") for path in more)  # without "/" at the end
    wanted = {*SYSTEM_PATHS, *python, os.path.dirname(executable), *given}
    chosen: list[str] = []
    for path in sorted(wanted, key=lambda path: path.count("/")):
        if os.path.exists(path) and not any(path.startswith(f"{c}/") for c in chosen):
            chosen.append(path)
    links = {path: os.readlink(path) for path in SYSTEM_PATHS if os.path.islink(path)}
    return Readable(
        links={path: links[path] for path in chosen if path in links},
        binds={path: os.path.realpath(path) for path in chosen if path not in links},
    )
