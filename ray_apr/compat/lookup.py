"""Names of other packages that these do not promise to keep.

Each package has one table of them: `compat.ray`, `compat.rllib`, `compat.torch`,
`compat.transformers`, `serve.vllm.private`. They are imported from there, at first use, so that
one that has gone says so, and which versions had it. ``tests/versions`` checks the tables against
what is installed; ``make check-versions`` against other versions.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ray_apr.core.exceptions import PrivateNameError
from ray_apr.core.imports import installed_version


@contextlib.contextmanager
def replaced(module: str, name: str, value: object) -> Iterator[None]:
    """Have a name of a module mean this in the block."""
    names = vars(importlib.import_module(module))
    before = names[name]
    names[name] = value
    try:
        yield
    finally:
        names[name] = before


@dataclass(frozen=True, kw_only=True)
class PrivateNames:
    """What is taken of one package."""

    distributions: tuple[str, ...]
    """What it may be installed as; the first one names it."""
    tested: str
    """Versions that have all of it."""
    names: Mapping[str, str]
    """Name and the module that has it, also where its use is elsewhere."""
    members: Mapping[str, str]
    """By name, the methods and attributes that are called, overridden or read, separated by blanks;
    ``method(a,b)`` has parameters of these names."""

    def get(self, name: str) -> Any:
        """Import a name.

        Raises:
            AttributeError: If it is in no table.
            PrivateNameError: If the package does not have it.
            ImportError: If its module needs another package.
        """
        if name not in self.names:
            raise AttributeError(name)
        module = self.names[name]
        try:
            return getattr(importlib.import_module(module), name)
        except (ModuleNotFoundError, AttributeError) as error:
            is_module = isinstance(error, ModuleNotFoundError)
            if is_module and str(error.name).partition(".")[0] != module.partition(".")[0]:
                raise  # another package, which that module imports
            raise PrivateNameError(
                f"{module} of {self.distributions[0]} {self.installed} has no {name} ({error}); "
                f"ray_apr needs it, and is tested with {self.distributions[0]} {self.tested}"
            ) from error

    @property
    def installed(self) -> str:
        """Version of the package that is installed."""
        return installed_version(*self.distributions) or "(not installed)"
