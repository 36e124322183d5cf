"""Runs one program with as little of the machine as possible, in a fork of `jailer.py`.

It has the standard library alone, as the jailer has. The spec is a mapping as `marshal` writes it
(see `sandbox.Sandbox`). The status is lines: ``jail PID``, then ``ready``, then ``exit CODE`` or
``signal NUMBER``; or ``error TEXT``. The program has the standard input, output and error.

Processes::

    jailer --fork, SIGTERM--> supervisor --fork--> init --fork--> program   (namespaces)
                              supervisor --fork--> program                  (resource limits alone)

Invariants:
    * When the supervisor has ended, no process of the program's is left. With namespaces the end of
      init, process 1 of its own process namespace, ends them all. Without, the supervisor ends
      those of the program's user or, where the user is its own, all of its descendants.
    * The supervisor ends with its jailer, and init with the supervisor. Waits for: the processes
      below. Unblocked by: their ends; the caller ends the supervisor at its limit.
    * The program has no privilege and cannot gain one; it can make neither sockets (but pairs,
      which only its own processes hold), nor namespaces, nor memory that its limits do not count
      (`system_calls.py`).
    * Nobody but the jail writes to the status: the program does not inherit it, and may not look
      into the processes that hold it, unless it runs as their user without namespaces.
"""

from __future__ import annotations

import contextlib
import ctypes
import marshal
import os
import resource
import signal
import socket
import struct
import tempfile
from collections.abc import Mapping
from typing import Any, NoReturn

SCRATCH = "/apr-sandbox"
"""The program's folder, and all that it can write to, where it has namespaces of its own."""
_UIDS = range(50_000, 59_000)
"""Users that nobody has; each sandbox claims one of them."""
_INNER_ID = 1000
"""Who the program is in a user namespace; not 0, so that exec drops all capabilities."""

# include/uapi/linux/sched.h, mount.h, prctl.h
_NEWUSER = 0x1000_0000
_NAMESPACES = 0x6C02_0000  # CLONE_NEWNS, UTS, IPC, PID and NET
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
_MNT_DETACH, _MOUNT_ATTR_RDONLY, _MOUNT_ATTR_NOSUID = 2, 1, 2
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_CHILD_SUBREAPER = 1, 4, 22, 36
_PR_SET_NO_NEW_PRIVS = 38
_SYS_MOUNT_SETATTR = 442

_BASE = "/tmp"
"""Where the new root is made; it hides what is there, in its own namespace alone."""
_DEVICES = ("null", "zero", "full", "random", "urandom")

_libc = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *arguments: Any) -> int:
    """Call a function of libc.

    Raises:
        OSError: If it returns -1.
    """
    result: int = getattr(_libc, name)(*arguments)
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


def _prctl(option: int, *values: int) -> None:
    padded = (*values, 0, 0, 0, 0)[:4]
    _call("prctl", option, *map(ctypes.c_ulong, padded))


def set_dumpable(is_dumpable: bool) -> None:
    """Whether processes of the same user may look into this one."""
    _prctl(_PR_SET_DUMPABLE, is_dumpable)


def _mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    texts = [text.encode() or None for text in (source, target, kind)]
    _call("mount", *texts, ctypes.c_ulong(flags), data.encode() or None)


# -- identity -------------------------------------------------------------------------------------


def _claim_user(*, ends_user: bool) -> tuple[int, socket.socket]:
    """Find a user that no other sandbox has now; the socket keeps the claim while it is open."""
    first = int.from_bytes(os.urandom(2), "big")  # other containers' claims cannot be seen
    for i in range(len(_UIDS)):
        uid, claim = _UIDS[(first + i) % len(_UIDS)], socket.socket(socket.AF_UNIX)
        with contextlib.suppress(OSError):
            claim.bind(f"\0ray_apr-sandbox-{uid}")
            if not ends_user or not _num_threads_of(uid):  # else somebody's would be ended
                return uid, claim
        claim.close()
    raise OSError(f"users {_UIDS.start} to {_UIDS.stop - 1} all run a sandbox")


def _become(uid: int) -> None:
    """Give up being root, for good."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def _enter_user_namespace() -> None:
    uid, gid = os.getuid(), os.getgid()
    _call("unshare", _NEWUSER | _NAMESPACES)
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{_INNER_ID} {uid} 1"),
        ("gid_map", f"{_INNER_ID} {gid} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


# -- the file system ------------------------------------------------------------------------------


def _build_root(spec: Mapping[str, Any], owner: int | None) -> None:
    """Make a root that holds what is readable, read-only, and an empty `SCRATCH`; go there."""
    _mount("", "/", "", _MS_REC | _MS_PRIVATE)
    _mount("tmpfs", _BASE, "tmpfs", _MS_NOSUID | _MS_NODEV, "size=1m,mode=755")
    old = f"{_BASE}/old"
    os.mkdir(old)
    _call("syscall", ctypes.c_long(spec["pivot_root"]), _BASE.encode(), old.encode())
    os.chdir("/")
    for path, target in spec["links"].items():
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.symlink(target, path)
    for path, real in spec["binds"].items():
        if not os.path.lexists(path):
            _bind(f"/old{real}", path)
    for name in _DEVICES:
        _bind(f"/old/dev/{name}", f"/dev/{name}")
    links = {name: f"/proc/self/fd/{i}" for i, name in enumerate(("stdin", "stdout", "stderr"))}
    for name, target in {**links, "shm": SCRATCH, "fd": "/proc/self/fd"}.items():
        os.symlink(target, f"/dev/{name}")
    for name in ("/proc", SCRATCH):
        os.mkdir(name)
    if not os.path.lexists("/tmp"):
        os.symlink(SCRATCH, "/tmp")
    with contextlib.suppress(OSError):  # a container may forbid it; most programs do without
        _mount("proc", "/proc", "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
    _call("umount2", b"/old", _MNT_DETACH)
    os.rmdir("/old")
    read_only = struct.pack("4Q", _MOUNT_ATTR_RDONLY | _MOUNT_ATTR_NOSUID, 0, 0, 0)
    number, size = ctypes.c_long(_SYS_MOUNT_SETATTR), ctypes.c_size_t(len(read_only))
    _call("syscall", number, _AT_FDCWD, b"/", _AT_RECURSIVE, read_only, size)
    owned = "" if owner is None else f",uid={owner},gid={owner}"
    options = f"size={spec['disk_bytes']},nr_inodes=4096,mode=700{owned}"
    _mount("tmpfs", SCRATCH, "tmpfs", _MS_NOSUID | _MS_NODEV, options)


def _bind(source: str, target: str) -> None:
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.isdir(source):
        os.mkdir(target)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    _mount(source, target, "", _MS_BIND | _MS_REC)


# -- the program ----------------------------------------------------------------------------------


def _limit(limits: Mapping[int, int], num_processes: int) -> None:
    for kind, value in {resource.RLIMIT_NPROC: num_processes, **limits}.items():
        lowest = min(value, resource.getrlimit(kind)[1] % 2**64)  # of no limit Python says -1
        resource.setrlimit(kind, (lowest, lowest))


def _deny_system_calls(filters: str) -> None:
    """Let the calls fail that a seccomp filter names (see `system_calls.py`)."""
    code = bytes.fromhex(filters)
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HP", len(code) // 8, ctypes.addressof(buffer))
    address = ctypes.create_string_buffer(program, len(program))
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    _prctl(_PR_SET_SECCOMP, 2, ctypes.addressof(address))


def _run_program(spec: Mapping[str, Any], uid: int | None, num_processes: int, status: int) -> None:
    """Become the program; returns only with an exception."""
    os.setsid()
    scratch = os.getcwd()
    _limit(spec["rlimits"], num_processes)
    if uid is not None:
        _become(uid)
    for name, text in spec["files"].items():
        with open(name, "w", encoding="utf-8", errors="surrogatepass") as file:
            file.write(text)
    _deny_system_calls(spec["filter"])
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and exec keeps that
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    environment = {**spec["environment"], "HOME": scratch, "TMPDIR": scratch}
    command = spec["command"]
    os.write(status, b"ready\n")
    try:
        os.execvpe(spec["executable"] or command[0], command, environment)
    except OSError as error:
        raise OSError(error.errno, f"{command[0]!r} in {environment['PATH']}") from error


def _fork(spec: Mapping[str, Any], uid: int | None, num_processes: int, status: int) -> int:
    """Start the program in the working directory; returns its process id."""
    if child := os.fork():
        return child
    try:
        _run_program(spec, uid, num_processes, status)
    except (OSError, ValueError, MemoryError) as error:
        say_error(status, error)
    finally:
        os._exit(1)


def say_error(status: int, error: Exception) -> None:
    """Say why there is no program."""
    text = f"error {type(error).__name__}: {error}".replace("\n", " ")[:400]
    os.write(status, text.encode(errors="replace") + b"\n")


def _report(status: int, wait_status: int) -> None:
    code = os.waitstatus_to_exitcode(wait_status)
    os.write(status, f"exit {code}\n".encode() if code >= 0 else f"signal {-code}\n".encode())


def _be_init(spec: Mapping[str, Any], uid: int | None, status: int) -> NoReturn:
    """Process 1: make the root, start the program, bury orphans until it has ended."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    _build_root(spec, uid)
    os.chdir(SCRATCH)
    # A user namespace counts its processes, and two of them are the jail's.
    num_processes = spec["processes"] + (2 if uid is None else 0)
    program = _fork(spec, uid, num_processes, status)
    set_dumpable(False)
    while True:
        ended, wait_status = os.wait()
        if ended == program:
            _report(status, wait_status)
            os._exit(0)


# -- the supervisor -------------------------------------------------------------------------------


def _num_threads_of(uid: int) -> int:
    """Threads that a user has now; the limit on processes counts them."""
    found = 0
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if os.stat(f"/proc/{name}").st_uid == uid:
                found += len(os.listdir(f"/proc/{name}/task"))
    return found


def _descendants(root: int) -> list[int]:
    """Living processes below a process, whatever bytes their names are; orphans of its are its
    children (subreaper)."""
    parents: dict[int, int] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
            parents[int(name)] = int(file.read().rpartition(b")")[2].split()[1])
    found = [root]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found[1:]


def _end_user(uid: int) -> None:
    """Kill all processes of the sandbox's own user: only they may be signalled by it."""
    if (child := os.fork()) == 0:
        try:
            _become(uid)
            os.kill(-1, signal.SIGKILL)
        finally:
            os._exit(0)
    os.waitpid(child, 0)


def _end_descendants() -> None:
    """Kill all descendants, stopped first: else one that forks could always be ahead."""
    stopped: set[int] = set()
    while new := set(_descendants(os.getpid())) - stopped:
        for pid in new:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        stopped |= new
    for pid in stopped:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _bury(uid: int | None) -> None:
    """End and await whatever the program left, until nothing is."""
    while True:
        if uid is not None:
            _end_user(uid)
        else:
            _end_descendants()
        try:
            os.wait()
        except ChildProcessError:
            return


def _supervise(spec: Mapping[str, Any], status: int, jailer: int) -> None:
    """Start the program by the spec's route, and see to it that it ends."""
    route, uid, claim = spec["route"], None, None
    if os.geteuid() == 0:
        uid, claim = _claim_user(ends_user=route == "rlimits")
        os.fchown(1, uid, uid)  # so that it can open /dev/stdout
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # where memory runs out, the program goes, and not the caller
    awaited = (signal.SIGTERM, signal.SIGCHLD)
    for number in (*awaited, signal.SIGINT):  # may be ignored; Python's SIGINT would end init
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    with contextlib.ExitStack() as cleanup:
        if claim is not None:
            cleanup.enter_context(claim)
        if route == "root_namespaces":
            _call("unshare", _NAMESPACES)
        elif route == "user_namespaces":
            if uid is not None:
                _become(uid)
                set_dumpable(True)  # else /proc/self stays root's
                uid = None
            _enter_user_namespace()
        else:
            _prctl(_PR_SET_CHILD_SUBREAPER, 1)
            set_dumpable(False)
            scratch = tempfile.mkdtemp(prefix="ray_apr-sandbox-")
            # not shutil's rmtree, which gives up where folders are deep
            cleanup.callback(os.spawnlp, os.P_WAIT, "rm", "rm", "-rf", scratch)
            os.chdir(scratch)
            if uid is not None:
                os.chown(scratch, uid, uid)
        _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != jailer:
            return  # it ended before the line above
        _await_end(spec, route, uid, status)
        os.chdir("/")


def _await_end(spec: Mapping[str, Any], route: str, uid: int | None, status: int) -> None:
    """Start the child and wait until it ends, or until the caller says that it must."""
    namespaces = route.endswith("namespaces")
    if not namespaces:
        others = 0 if uid is not None else _num_threads_of(os.getuid())
        child = _fork(spec, uid, spec["processes"] + others, status)
    elif (child := os.fork()) == 0:
        try:
            _be_init(spec, uid, status)
        except (OSError, ValueError, MemoryError) as error:
            say_error(status, error)
        finally:
            os._exit(1)
    while signal.sigwait((signal.SIGTERM, signal.SIGCHLD)) == signal.SIGCHLD:
        ended, wait_status = os.waitpid(child, os.WNOHANG)
        if ended:
            if not namespaces:
                _report(status, wait_status)
                _bury(uid)
            return
    os.kill(child, signal.SIGKILL)
    if namespaces:
        os.waitpid(child, 0)
    else:
        _bury(uid)


def confine(spec_fd: int, status: int, jailer: int) -> None:
    """Run a program to its end, in a process of its own; its caller then ends that at once.

    Args:
        spec_fd: File of the spec, open at its start.
        status: What to write to.
        jailer: Id of the process that this one is a fork of.
    """
    os.write(status, f"jail {os.getpid()}\n".encode())
    with open(spec_fd, "rb") as file:
        spec = marshal.load(file)
    os.umask(0o022)
    try:
        _supervise(spec, status, jailer)
    except (OSError, ValueError) as error:
        say_error(status, error)
