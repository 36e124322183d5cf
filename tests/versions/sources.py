"""Looks names up in the sources of a package, without importing it.

So a version can be looked at that does not run here, or only with a GPU.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

from ray_apr.compat.lookup import PrivateNames

_MEMBER = re.compile(r"(\w*)(?:\(([\w,]*)\))?")


def missing(private: PrivateNames) -> list[str]:
    """What the installed package does not have, as ``module.name.member``."""
    return [gone for name in private.names for gone in _missing(private, name)]


def _missing(private: PrivateNames, name: str) -> Iterator[str]:
    module = private.names[name]
    found = _find(module, name)
    if found is None:
        yield f"{module}.{name}"
        return
    for part in private.members.get(name, "").split():
        member, parameters = _MEMBER.fullmatch(part).groups()
        node = _member(found, member) if member else found
        if node is None:
            yield f"{module}.{name}.{member}"
        elif parameters and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            args = node.args
            known = {a.arg for a in (*args.posonlyargs, *args.args, *args.kwonlyargs)}
            for parameter in parameters.split(","):
                if parameter not in known and args.kwarg is None:
                    yield f"{module}.{name}.{member}({parameter})"


@functools.cache
def _tree(module: str) -> ast.Module | None:
    package, *rest = module.split(".")
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return None
    base = Path(spec.submodule_search_locations[0], *rest)
    for file in (base.with_suffix(".py"), base / "__init__.py"):
        if file.is_file():
            return ast.parse(file.read_text(encoding="utf-8"))
    return None


def _find(module: str, name: str) -> ast.AST | None:
    tree = _tree(module)
    return None if tree is None else _named(ast.walk(tree), name)


def _named(nodes: Iterator[ast.AST], name: str) -> ast.AST | None:
    """A definition, an assignment or an import of this name."""
    for node in nodes:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if node.name == name:
                return node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(_is(target, name) for target in targets):
                return node
    return None


def _is(target: ast.AST, name: str) -> bool:
    if isinstance(target, ast.Tuple):
        return any(_is(element, name) for element in target.elts)
    return (isinstance(target, ast.Name) and target.id == name) or (
        isinstance(target, ast.Attribute) and target.attr == name
    )


def _member(found: ast.AST, name: str) -> ast.AST | None:
    """In a class: its own methods first, then whatever it sets, also in its methods."""
    own = [node for node in getattr(found, "body", []) if getattr(node, "name", None) == name]
    return own[0] if own else _named(ast.walk(found), name)
