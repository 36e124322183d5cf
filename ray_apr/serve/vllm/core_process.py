"""The process of vLLM's engine core, forked from one that imports vLLM while its server does.

Inside of a Ray actor vLLM spawns its core, which only then begins to import what the server has
imported before: on a GPU host 20 s after 15. A fork server (`multiprocessing.forkserver`) begins at
once, imports the same beside the server, and forks the core when it is asked for. It has no thread
and no device, so that a fork of it is whole, and it ends with the server.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import sys
from collections.abc import Callable, Sequence
from multiprocessing import connection, context, forkserver, resource_tracker
from typing import Any

from ray_apr.compat.forked.environment import have_environment
from ray_apr.compat.lookup import replaced

logger = logging.getLogger(__name__)

_PRELOADED = (
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "ray_apr.serve.vllm.scheduler",
)
"""What every core imports, whatever its device and its model."""
WITHOUT_RAY = (
    "vllm.config",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.engine.output_processor",
    "vllm.v1.metrics.loggers",
    "vllm.v1.structured_output",
)
"""Most of what a server and its core import of vLLM; none of it imports Ray."""
_ANSWER_S = 60.0


class _Process(context.ForkServerProcess):
    """Has the environment of the server at its own start, not that of the fork server's."""

    _environment: dict[str, str]

    def start(self) -> None:
        self._environment = dict(os.environ)
        super().start()

    def run(self) -> None:
        have_environment(self._environment)
        super().run()


class _Context(context.ForkServerContext):
    Process = _Process  # type: ignore[assignment]


_CONTEXT = _Context()


def begin_imports() -> None:
    """Start the fork server; it imports while this process goes on. Harmless when repeated."""
    _CONTEXT.set_forkserver_preload(list(_PRELOADED))
    forkserver.ensure_running()


def fork_imports() -> None:
    """The same, forked from this process, which has imported most of it and has no thread."""
    resource_tracker.ensure_running()
    inherited = _open_files()

    def fork(_: str, args: Sequence[str], files: Sequence[int]) -> int:
        """Fork what multiprocessing would spawn, ``python ... -c CODE`` with these files, and with
        those of libraries, as the driver's."""
        if pid := os.fork():
            return pid
        for file in _open_files() - inherited - set(files):
            with contextlib.suppress(OSError):  # the one by which they were listed
                os.close(file)
        try:
            exec(args[-1], {})  # as Python does
        except Exception:
            logger.exception("no core can be forked")
        finally:
            os._exit(0)

    with replaced("multiprocessing.util", "spawnv_passfds", fork):
        begin_imports()


def _open_files() -> set[int]:
    return {int(name) for name in os.listdir("/proc/self/fd")}


def use_fork_server() -> None:
    """Have vLLM take its core from the fork server, and the process that looks at a model's class.

    Where vLLM has other names for these it spawns them, which takes longer.
    """
    from ray_apr.serve.vllm.private import CoreEngineProcManager, ModelRegistry

    of_manager: Any = sys.modules[CoreEngineProcManager.__module__]
    of_models: Any = sys.modules[ModelRegistry.__module__]
    if hasattr(of_manager, "get_mp_context"):
        of_manager.get_mp_context = lambda: _CONTEXT
    if hasattr(of_models, "_run_in_subprocess"):
        of_models._run_in_subprocess = _call_in_fork


def _call_in_fork(fn: Callable[[], Any]) -> Any:
    """What `fn` gives, called in a process of its own, forked from the fork server.

    In place of vLLM's `_run_in_subprocess`, whose process imports vLLM first. By it vLLM looks at a
    model's class that its cache does not know.

    Args:
        fn: What cloudpickle takes; its result has to be one that pickle takes.

    Waits for: the process. Unblocked by: its answer, its end, or `_ANSWER_S`.

    Raises:
        TimeoutError: If it does not answer.
        EOFError: If it has ended without an answer.
        Exception: What `fn` raises.
    """
    import cloudpickle  # vLLM needs it

    mine, theirs = _CONTEXT.Pipe(duplex=False)
    process = _CONTEXT.Process(target=_answer, args=(theirs, cloudpickle.dumps(fn)), daemon=True)
    process.start()
    theirs.close()
    try:
        if not mine.poll(_ANSWER_S):
            raise TimeoutError(f"a forked process has not answered within {_ANSWER_S:g} s")
        result, error = mine.recv()
    except EOFError:
        raise EOFError("a forked process has ended without an answer") from None
    finally:
        process.kill()
        mine.close()
    if error is not None:
        raise error
    return result


def _answer(asker: connection.Connection, pickled: bytes) -> None:
    from ray_apr.serve.vllm.private import load_general_plugins

    answer: tuple[Any, Exception | None]
    try:
        load_general_plugins()  # which may register models
        answer = (pickle.loads(pickled)(), None)
    except Exception as error:  # noqa: BLE001  (it is raised by who asks)
        answer = (None, error)
    asker.send(answer)
