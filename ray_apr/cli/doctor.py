"""Checks of this machine: packages, memory, shared memory, and known traps of an installation."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from importlib.util import cache_from_source, find_spec
from pathlib import Path

from ray_apr.core.exceptions import ResourceError
from ray_apr.core.imports import installed_version
from ray_apr.rewards.sandbox import find_sandbox
from ray_apr.serve.vllm.plugin import why_not_loaded

_GIB = 2**30
_IMPORT_TIMEOUT_S = 180.0
MIN_MEMORY_GIB = 6.0
"""Two engines of about 2.3 GiB, a train worker, and Ray itself."""
MIN_SHM_GIB = 1.0
"""Room for Ray's object store, which otherwise goes to a slow disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """The outcome of one check."""

    name: str
    ok: bool
    seen: str
    """What there is: a version, a size, or the error."""
    remedy: str = ""


def run_checks() -> Iterator[Check]:
    """Run all checks, quick ones first; importing vLLM takes some ten seconds."""
    yield check_python()
    yield check_cpus()
    yield check_memory(available_memory_bytes())
    yield check_shared_memory(Path("/dev/shm"))
    yield check_cpu_build(installed_version)
    yield check_plugin()
    yield check_bytecode(find_spec)
    for package in ("ray", "torch", "vllm"):
        yield check_import(package)
    yield check_gpus()
    yield check_sandbox()


def check_python() -> Check:
    """Python 3.11 or newer, for `asyncio.TaskGroup` and `StrEnum`."""
    ok = sys.version_info >= (3, 11)
    return Check(name="python", ok=ok, seen=platform.python_version(), remedy="use Python >= 3.11")


def check_cpus() -> Check:
    """At least two CPUs that this process may use."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return Check(
        name="CPUs",
        ok=(count or 1) >= 2,
        seen=str(count),
        remedy="one CPU makes generation and training take turns; use a machine with two or more",
    )


def available_memory_bytes() -> int | None:
    """Memory that is free for new processes, within the container's limit; None if unknown."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        fields = dict(line.split(":", 1) for line in lines)
        free = int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None
    group = Path("/sys/fs/cgroup")
    try:
        limit = int((group / "memory.max").read_text())  # "max" without a limit: a ValueError
        used = int((group / "memory.current").read_text())
    except (OSError, ValueError):
        return free
    return min(free, max(0, limit - used))


def check_memory(free_bytes: int | None) -> Check:
    """Enough memory for an engine, a train worker and Ray."""
    if free_bytes is None:
        return Check(name="free memory", ok=True, seen="unknown on this system")
    free_gib = free_bytes / _GIB
    return Check(
        name="free memory",
        ok=free_gib >= MIN_MEMORY_GIB,
        seen=f"{free_gib:.1f} GiB",
        remedy=f"free at least {MIN_MEMORY_GIB:g} GiB: an engine takes about 2.3 GiB and the model",
    )


def check_shared_memory(folder: Path) -> Check:
    """Enough space in /dev/shm for Ray's object store."""
    if not folder.is_dir():
        return Check(name=str(folder), ok=True, seen="not on this system")
    free_gib = shutil.disk_usage(folder).free / _GIB
    return Check(
        name=str(folder),
        ok=free_gib >= MIN_SHM_GIB,
        seen=f"{free_gib:.1f} GiB free",
        remedy="enlarge it (docker run --shm-size=4g), or remove what fills it",
    )


def check_cpu_build(version_of: Callable[[str], str | None]) -> Check:
    """No CUDA build of torchvision and its kin beside a CPU build of torch.

    Args:
        version_of: Package name -> installed version or None.
    """
    name, torch = "torchvision and kin", version_of("torch")
    if torch is None or not torch.endswith("+cpu") or platform.machine() != "x86_64":
        return Check(name=name, ok=True, seen="no CPU build of torch, nothing to check")
    wrong = [
        f"{package} {version}"
        for package in ("torchvision", "torchaudio", "torchcodec")
        if (version := version_of(package)) is not None and not version.endswith("+cpu")
    ]
    packages = " ".join(text.split()[0] for text in wrong)
    return Check(
        name=name,
        ok=not wrong,
        seen=f"{', '.join(wrong)} beside torch {torch}" if wrong else "no CUDA build beside torch",
        remedy=f"models do not load beside them: pip uninstall -y {packages}",
    )


def check_plugin() -> Check:
    """vLLM finds the receiver of weights in its own processes through an entry point."""
    missing = why_not_loaded()
    return Check(
        name="vLLM plugin",
        ok=missing is None,
        seen="registered" if missing is None else "not registered: engines cannot receive weights",
        remedy=missing or "",
    )


def check_bytecode(find: Callable[[str], ModuleSpec | None]) -> Check:
    """Python keeps what it has compiled of the large packages: each process of a run imports them.

    Args:
        find: Finds a package, as `importlib.util.find_spec` does.
    """
    missing = []
    for package in ("torch", "transformers", "ray", "vllm"):
        spec = find(package)
        if spec is None or spec.origin is None:  # its own check says so
            continue
        compiled = Path(cache_from_source(spec.origin))
        is_written = not sys.dont_write_bytecode and os.access(
            next(folder for folder in compiled.parents if folder.exists()), os.W_OK
        )
        if not (compiled.exists() or is_written):
            missing.append(package)
    return Check(
        name="bytecode",
        ok=not missing,
        seen=f"not kept for {', '.join(missing)}" if missing else "kept",
        remedy="each process of a run compiles them anew, which doubles the time of its imports: "
        "unset PYTHONDONTWRITEBYTECODE, and where the packages' folder cannot be written set "
        "PYTHONPYCACHEPREFIX to one that can, on all nodes",
    )


def _run_python(code: str) -> tuple[bool, str]:
    """Run code in a fresh interpreter; returns whether it worked, and its last line."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            timeout=_IMPORT_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False, f"no answer within {_IMPORT_TIMEOUT_S:.0f} s"
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    return done.returncode == 0, lines[-1] if lines else f"exit code {done.returncode}"


def check_import(package: str) -> Check:
    """The package can be imported, in an interpreter of its own."""
    ok, seen = _run_python(f"import {package}; print({package}.__version__)")
    return Check(
        name=package, ok=ok, seen=seen, remedy=f"reinstall {package} as the README's install says"
    )


def check_gpus(run: Callable[[str], tuple[bool, str]] = _run_python) -> Check:
    """How many CUDA GPUs torch sees, and that weights can travel between them; none is no problem.

    Args:
        run: Runs code as `_run_python` does.
    """
    ok, seen = run("import torch; print(torch.cuda.device_count())")
    if not ok or seen == "0":
        text = "none, runs use the CPU" if ok else seen
        return Check(name="GPUs", ok=ok, seen=text, remedy="see torch above")
    module = "ray_apr.weights.transports.nccl"
    ok, said = run(f"from {module} import new_nccl_id; new_nccl_id()")
    remedy = "no weights travel between them: install the extra `gpu` of ray-apr"
    return Check(name="GPUs", ok=ok, seen=seen if ok else f"{seen}; {said}", remedy=remedy)


def check_sandbox() -> Check:
    """How the reward `code_tests` would run programs here; a run without it needs no sandbox."""
    try:
        has_namespaces = find_sandbox().has_namespaces
    except ResourceError as error:
        seen = str(error)
    else:
        less = "resource limits alone: namespaces need a container that permits `unshare`"
        seen = "namespaces" if has_namespaces else less
    return Check(name="sandbox for programs", ok=True, seen=seen)
