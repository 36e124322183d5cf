"""All waits of the package, read in its code: ``python -m tests.waits > docs/waits.md``.

A wait is a call that returns once something else has happened: an answer, an event, another rank.
It has a limit (an argument, or the ``asyncio.timeout`` around it) and is in no ``while`` loop, or
the docstring of its function, or of what that is in, says "Waits for: ... Unblocked by: ...".
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray_apr

PACKAGE = Path(ray_apr.__file__).parent
BY_NAME = 99
FUNCTIONS = {
    "ray.get": BY_NAME, "ray.wait": BY_NAME, "asyncio.wait": BY_NAME, "subprocess.run": BY_NAME,
    "os.wait": BY_NAME, "os.waitpid": BY_NAME, "signal.sigwait": BY_NAME, "asyncio.wait_for": 1,
    "serve.run_many": BY_NAME, "serve.delete": BY_NAME, "concurrent.futures.wait": 1,
    "multiprocessing.connection.wait": 1, "selector.select": 0, "socket.create_connection": 1,
    "select.select": 3, "dataset.take": BY_NAME,
}  # fmt: skip
"""Functions that wait, with the position of their limit; `BY_NAME`: it is a keyword argument."""
METHODS = {
    "wait": 0, "wait_for": BY_NAME, "join": 0, "communicate": 1, "acquire": 1, "result": 0,
    "results_async": BY_NAME, "fit": BY_NAME, "materialize": BY_NAME, "iter_batches": BY_NAME,
    "collective_rpc": BY_NAME,
}  # fmt: skip
"""The same of methods, whatever they are of."""
KEYWORDS = ("timeout", "timeout_s")
COLLECTIVE = re.compile(r"(dist|collective)\.(barrier|gather|all_gather|all_reduce|broadcast)")
OF_COLLECTIVES = "that of collectives"
SLEEPS = ("time.sleep", "asyncio.sleep")  # in a loop, waits for what ends it
OF_OURS = ("asyncio.gather", "asyncio.shield")
"""What waits for coroutines of the package, whose own waits are listed."""
TIMEOUTS = {"asyncio.timeout": 0, "ours": 1}  # contexts, with the position of their limit
LOCK = re.compile(r"(asyncio|threading)\.(Lock|RLock|Semaphore|BoundedSemaphore)")
"""Not a condition: whoever holds one of those waits by `wait_for`, which lets it go."""
TOLD = re.compile(r"Waits for: (.+?)\.\s+Unblocked\s+by: (.+?)\.(?:\s|$)", re.DOTALL)
OF_A_LIMIT = re.compile(r"within|in time|not ready after|no progress|exceed|did not|not answer")
"""Of what is said of a limit."""
FILLED_IN = re.compile(r"\{[^{}]*(\{[^}]*\})?[^{}]*\}|%[.\d]*[a-z]")
PAGE = """\
# All waits

Each function of the package that waits for something else: an answer, an event, a lock, another
process or rank. `python -m tests.waits > docs/waits.md` reads the table in the code, and
`tests/unit/test_waits.py` refuses another one. It also refuses a wait without a limit, or in a
loop, where the docstring does not tell what ends it. A limit that is no number is what the code
has in its place; [limits.md](limits.md) has the settings, and what follows.

What Ray, vLLM and PyTorch wait for inside of a call is that call's wait. The last column has what
the function itself raises or logs at a limit; without that the error goes to its caller.

| where | waits for | unblocked by | limit | read at the limit |
| --- | --- | --- | --- | --- |
"""


@dataclass(frozen=True)
class Call:
    """One wait."""

    code: str
    limit: str | None
    in_loop: bool
    """Whether it has its limit each time that a ``while`` loop comes to it."""


@dataclass(frozen=True)
class Function:
    """A function that waits."""

    module: str
    name: str
    docs: tuple[str, ...]
    """Docstrings of the function and of what it is in, innermost first."""
    node: Any
    calls: list[Call]
    constants: Mapping[str, float]
    """Numbers that its module has names for."""

    @property
    def told(self) -> tuple[str, str] | None:
        """What its docstring says: what it waits for, and what unblocks it. What its class says is
        of waits without a limit."""
        for doc in self.docs if self.unlimited else self.docs[:1]:
            if found := TOLD.search(doc):
                return " ".join(found[1].split()), " ".join(found[2].split())
        return None

    @property
    def unlimited(self) -> list[str]:
        """Waits whose end the docstring has to tell."""
        return [call.code for call in self.calls if call.limit is None or call.in_loop]


class _Reader(ast.NodeVisitor):
    def __init__(self, module: str, tree: ast.Module, ours: Set[str]) -> None:
        self.module, self.ours, self.found = module, ours, list[Function]()
        assigned = [node for node in ast.walk(tree) if isinstance(node, ast.Assign)]
        locks = [node for node in assigned if LOCK.match(ast.unparse(node.value))]
        self.constants = {
            ast.unparse(node.targets[0]): node.value.value
            for node in assigned
            if isinstance(node.value, ast.Constant) and isinstance(node.value.value, int | float)
        }
        self.locks = {ast.unparse(target) for node in locks for target in node.targets}
        self.within: list[tuple[str, str]] = [("", ast.get_docstring(tree) or "")]
        self.node: ast.AST = tree
        self.calls, self.limits, self.num_loops = list[Call](), list[tuple[str, bool]](), 0

    def visit_ClassDef(self, node: Any) -> None:
        self.within.append((node.name, ast.get_docstring(node) or ""))
        self.generic_visit(node)
        self.within.pop()

    def visit_FunctionDef(self, node: Any) -> None:
        outer = self.node, self.calls, self.limits, self.num_loops
        self.node, self.calls, self.limits, self.num_loops = node, [], [], 0
        self.visit_ClassDef(node)
        names, docs = zip(*self.within, (node.name, ast.get_docstring(node) or ""), strict=True)
        if self.calls:
            where = (self.module, ".".join(names[1:]), docs[::-1])
            self.found.append(Function(*where, node, self.calls, self.constants))
        self.node, self.calls, self.limits, self.num_loops = outer

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_While(self, node: ast.While) -> None:
        self.num_loops += 1
        self.generic_visit(node)
        self.num_loops -= 1

    def visit_With(self, node: ast.With | ast.AsyncWith) -> None:
        num_outer = len(self.limits)
        for context in (item.context_expr for item in node.items):
            if ast.unparse(context) in self.locks:
                self._add(f"with {ast.unparse(context)}", None)
            name = ast.unparse(context.func) if isinstance(context, ast.Call) else ""
            if name in TIMEOUTS and (limit := _limit(context, TIMEOUTS[name])):
                self.limits.append((limit, self.num_loops > 0))
        self.generic_visit(node)
        del self.limits[num_outer:]

    visit_AsyncWith = visit_With

    def visit_AsyncFor(self, node: ast.AsyncFor) -> None:
        self._add(f"async for {ast.unparse(node.target)} in {ast.unparse(node.iter)}", None)
        self.generic_visit(node)

    def visit_Await(self, node: ast.Await) -> None:
        """Of a future, or of a coroutine of another package's."""
        name = ast.unparse(node.value.func) if isinstance(node.value, ast.Call) else ""
        known = self.ours | METHODS.keys() | FUNCTIONS.keys() | {*SLEEPS, *OF_OURS}
        if not {name, name.rpartition(".")[2]} & known:
            self._add(ast.unparse(node), None)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name, method = ast.unparse(node.func), getattr(node.func, "attr", "")
        if COLLECTIVE.fullmatch(name):
            self._add(ast.unparse(node), OF_COLLECTIVES)
        elif name in SLEEPS and self.num_loops:
            self._add(ast.unparse(node), None)
        elif name in FUNCTIONS:
            self._add(ast.unparse(node), _limit(node, FUNCTIONS[name]))
        elif method == "join" and node.args:
            pass  # texts
        elif method == "result" and isinstance(self.node, ast.AsyncFunctionDef):
            pass  # of a task, which has ended
        elif method in METHODS:
            self._add(ast.unparse(node), _limit(node, METHODS[method]))
        self.generic_visit(node)

    def _add(self, code: str, limit: str | None) -> None:
        given = (limit, self.num_loops > 0)
        limit, in_loop = self.limits[-1] if limit is None and self.limits else given
        if limit != "0" and "WNOHANG" not in code:
            self.calls.append(Call(code, limit, in_loop))


def _limit(call: Any, position: int) -> str | None:
    given = [keyword.value for keyword in call.keywords if keyword.arg in KEYWORDS]
    texts = [ast.unparse(value) for value in (*given, *call.args[position : position + 1])]
    return texts[0] if texts and texts[0] != "None" else None


def waits(package: Path = PACKAGE) -> Iterator[Function]:
    """All functions that wait, by module and name."""
    trees = {path: ast.parse(path.read_text("utf-8")) for path in sorted(package.rglob("*.py"))}
    nodes = (node for tree in trees.values() for node in ast.walk(tree))
    ours = {node.name for node in nodes if isinstance(node, ast.AsyncFunctionDef)}
    for path, tree in trees.items():
        reader = _Reader(path.relative_to(package).as_posix(), tree, ours)
        reader.visit(tree)
        yield from sorted(reader.found, key=lambda function: function.name)


def _in_words(limit: str, function: Function) -> str:
    """A limit as a number of seconds where it is one, else as its expression."""
    if limit == OF_COLLECTIVES:
        return limit
    for node in ast.walk(function.node):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == limit:
            limit = ast.unparse(node.value)
    names = {node.id for node in ast.walk(ast.parse(limit)) if isinstance(node, ast.Name)}
    if names <= function.constants.keys():
        return f"{eval(limit, {}, dict(function.constants)):g} s"
    return f"`{limit.replace('self.', '').replace('spec.', '')}`"


def _read_at_the_limit(function: Function) -> str:
    """What is raised or logged there, with … for what is filled in."""
    said = []
    for node in ast.walk(function.node):
        call = node.exc if isinstance(node, ast.Raise) else node
        if isinstance(call, ast.Call) and call.args:
            name, text = ast.unparse(call.func), ast.unparse(call.args[0]).lstrip("f").strip("'\"")
            is_said = isinstance(node, ast.Raise) or name.startswith("logger.")
            if is_said and OF_A_LIMIT.search(text):
                said.append(f"{name}: {FILLED_IN.sub('…', text)}")
    return "; ".join(sorted(set(said)))


def page() -> str:
    """``docs/waits.md``."""
    rows = []
    for function in waits():
        calls = [call for call in function.calls if call.limit is not None and not call.in_loop]
        limits, told = dict.fromkeys(call.limit or "" for call in calls), function.told
        if told is None and [*limits] == [OF_COLLECTIVES]:
            told = ("the other ranks", "their part; one that dies ends the others")
        codes = "; ".join(dict.fromkeys(f"`{call.code}`" for call in function.calls))
        waits_for, unblocked_by = told or (codes, "that")
        where = f"`{function.module}` `{function.name}`"
        limit = ", ".join(dict.fromkeys(_in_words(one, function) for one in limits))
        cells = (where, waits_for, unblocked_by, limit, _read_at_the_limit(function))
        rows.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |\n")
    return PAGE + "".join(rows)


if __name__ == "__main__":
    sys.stdout.write(page())
