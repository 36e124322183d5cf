"""Runs a Python program as the interpreter does, but looks for packages only once it needs one.

Given to ``python -I -S -c`` with the program's file as its argument, inside the sandbox: ``site``
takes longer to find all packages, and what editable ones are, than most programs run. So it imports
little itself. The program is ``__main__`` and has the names that ``site`` adds.
"""

from __future__ import annotations

import os
import site
import sys
from _frozen_importlib_external import SourceFileLoader  # importlib.machinery takes longer

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType


_OWN_DEPTH = 3 if sys.version_info < (3, 12) else 2
"""Share of this script in the depth of calls; before Python 3.12, that of `exec` counts, too."""


class _Packages:
    """A finder of the import system that has ``site`` find the packages, once a module is imported
    that is not in the standard library."""

    _are_found = False

    @classmethod
    def find_spec(
        cls, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Where the module is, by the other finders; the import system asks for one at a time.

        Python 3.11 knows finders without `find_spec`, too, as old packages have, and asks them
        itself. The standard library asks for modules of its own that other systems have.
        """
        if name in sys.stdlib_module_names:
            return None
        if not cls._are_found:
            cls._are_found = True  # it imports modules, too
            site.main()
        for finder in sys.meta_path:
            find_spec = None if finder is cls else getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = None if find_spec is None else find_spec(name, path, target)
            if spec is not None:
                return spec
        return None


def main() -> None:
    """Run the program in the place of this one."""
    del sys.argv[0]
    sys.meta_path.append(_Packages)
    for add_names in (site.setquit, site.setcopyright, site.sethelper):
        add_names()
    file_name = os.path.abspath(sys.argv[0])
    with open(file_name, "rb") as file:
        # without the __future__ import of this file: annotations of a program are values
        code = compile(file.read(), file_name, "exec", dont_inherit=True)
    program = sys.modules["__main__"] = type(sys)("__main__")
    program.__loader__ = SourceFileLoader("__main__", file_name)
    names = program.__dict__
    if "__annotations__" in globals():  # until Python 3.13
        names["__annotations__"] = {}
    names["__builtins__"] = sys.modules["builtins"]
    names["__file__"] = file_name
    if sys.version_info < (3, 15):
        names["__cached__"] = None
    sys.setrecursionlimit(sys.getrecursionlimit() + _OWN_DEPTH)
    exec(code, names)


if __name__ == "__main__":
    main()
