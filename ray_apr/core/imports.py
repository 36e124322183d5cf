"""Modules that a driver imports beside what it waits for, as they take seconds; and what is there
to import."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import threading
from collections.abc import Iterator

_TOKENIZERS = "transformers.models.auto.tokenization_auto"
_IMPORTS_S = 60.0
_THREADS: dict[str, threading.Thread] = {}


def installed_version(*distributions: str) -> str | None:
    """Version of the first of these distributions that is installed; None without any."""
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


@contextlib.contextmanager
def imported_meanwhile() -> Iterator[None]:
    """Import torch and what loads a tokenizer beside this block. Whoever imports from transformers
    calls `finish_imports` before: its modules are not for two threads at once.

    Waits for: the imports, at its end. Unblocked by: their end, or `_IMPORTS_S`.
    """
    begin_imports(_TOKENIZERS)
    try:
        yield
    finally:
        finish_imports()  # a process that ends in the midst crashes


def finish_imports() -> None:
    """Have imported what `imported_meanwhile` imports, if it has begun here.

    Waits for: the imports. Unblocked by: their end, or `_IMPORTS_S`.
    """
    if thread := _THREADS.get(_TOKENIZERS):
        thread.join(timeout=_IMPORTS_S)


def begin_imports(module: str) -> threading.Thread:
    """Import a module in the thread that is returned, once. An error is raised where the module is
    used."""

    def run() -> None:
        """Waits for: nothing. Unblocked by: its end. Produces: modules."""
        with contextlib.suppress(ImportError):
            importlib.import_module(module)

    if module not in _THREADS:
        _THREADS[module] = threading.Thread(target=run, name="import-torch", daemon=True)
        _THREADS[module].start()
    return _THREADS[module]
