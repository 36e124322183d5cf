"""Rewards by running the program in a response against tests."""

from __future__ import annotations

import functools
import json
import marshal
import os
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from ray_apr.core.checks import of_type, one_of, positive, require, whole
from ray_apr.core.exceptions import RewardError
from ray_apr.core.sample import Sample
from ray_apr.core.user import RewardFunction, RewardResult
from ray_apr.rewards.answers import Extract, column_of, extracted, response_of, shown
from ray_apr.rewards.sandbox import (
    Command,
    Isolation,
    Outcome,
    Sandbox,
    SandboxLimits,
    find_sandbox,
    text_of,
)

Score = Literal["all", "fraction"]
Compare = Callable[[str, str], bool]

_OWN_FOLDERS = (".", "..", "apr-sandbox", "dev", "old", "proc")
_FENCE = re.compile(r"( {0,3})```([^`]*)")


@dataclass(frozen=True, kw_only=True)
class Case:
    """What a program reads, and what it must write."""

    stdin: str
    expected: str


def fenced_program(response: str) -> str:
    """The last fenced code block of a response, or all of it where there is none.

    Its lines lose the indentation of its fence, as in a list. A fence with a language begins a
    block even where another one was never closed. Each line is looked at once: a response may
    repeat a fence thousands of times.
    """
    found, indent = response, 0
    block: list[str] | None = None
    for line in response.split("\n"):
        fence = _FENCE.fullmatch(line.rstrip())
        if fence is None and block is not None:
            block.append(line[min(indent, len(line) - len(line.lstrip(" "))) :] + "\n")
        elif fence is not None and block is not None and not fence[2]:
            found, block = "".join(block), None
        elif fence is not None:
            block, indent = [], len(fence[1])
    return found


def same_output(output: str, expected: str) -> bool:
    """Whether two texts are equal but for white space at ends of lines and of the text."""
    return _lines(output) == _lines(expected)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


@dataclass(frozen=True, kw_only=True)
class CodeTests:
    """What `code_tests` returns; its fields are the maker's arguments."""

    column: str
    score: Score
    extract: Extract
    compare: Compare
    command: tuple[str, ...] | None
    file_name: str
    limits: SandboxLimits
    total_time_limit_s: float
    readable_paths: tuple[str, ...]
    isolation: Isolation
    allow_unsandboxed_writes: bool

    def __post_init__(self) -> None:
        s = "code_tests"
        of_type(s, self, str, "a text", "column", "file_name")
        require(bool(self.column), f"{s}.column", self.column, "must be the name of a column")
        require(
            re.fullmatch(r"[\w-]+(\.[\w-]+)*", self.file_name) is not None,
            f"{s}.file_name",
            self.file_name,
            "must be a file's name, without a folder",
        )
        one_of(s, self, {"score": Score, "isolation": Isolation})
        of_type(s, self, bool, "True or False", "allow_unsandboxed_writes")
        for name in ("extract", "compare"):
            function = getattr(self, name)
            require(callable(function), f"{s}.{name}", function, "must be a function")
        require(self.command != (), f"{s}.command", self.command, "must name a program, or be None")
        for path in self.readable_paths:
            remedy = "must be an absolute path below /"
            require(path.startswith("/") and len(path) > 1, f"{s}.readable_paths", path, remedy)
            folder = os.path.normpath(path.lstrip("/")).split("/")[0]
            remedy = "has a name that is the sandbox's own; copy it to another folder"
            require(folder not in _OWN_FOLDERS, f"{s}.readable_paths", path, remedy)
        sizes = ("cpu_limit_s", "memory_mb", "max_processes", "disk_mb", "max_output_bytes")
        whole(s, self.limits, *sizes)
        positive(s, self.limits, "time_limit_s", *sizes)
        positive(s, self, "total_time_limit_s")
        for config, most, names in (
            (self.limits, 2**32, sizes),
            (self.limits, 10**6, ("time_limit_s",)),
            (self, 10**6, ("total_time_limit_s",)),
        ):
            for name in names:
                value = getattr(config, name)
                require(value <= most, f"{s}.{name}", value, f"must be {most:,} or less")
        require(
            self.limits.memory_mb >= 64,
            f"{s}.memory_mb",
            self.limits.memory_mb,
            "must be 64 or more: less holds no interpreter",
        )

    def __call__(self, sample: Sample) -> RewardResult:
        """The score, with `code_tests_passed`, `code_timeouts` and `code_namespaces`."""
        tests = tests_of(sample, self.column)
        # of no class of its own, as numpy's texts, which marshal does not know or takes for bytes
        program = str(extracted(response_of(sample), extract=self.extract) or "")
        sandbox = find_sandbox(
            self.isolation,
            allow_unsandboxed_writes=self.allow_unsandboxed_writes,
            needs_python=self.command is None,
            readable=self.readable_paths,
        )
        if not program.strip():
            num_passed, num_timeouts = 0, 0
        elif isinstance(tests[0], Case):
            num_passed, num_timeouts = self._run_cases(sandbox, program, tests)
        elif self.command is None:
            num_passed, num_timeouts = self._run_asserts(sandbox, program, tests)
        else:
            detail = f"column {self.column!r} of its row holds Python tests, and the command is set"
            raise RewardError(sample.sample_id, "invalid", f"{detail}; give pairs of texts")
        share = num_passed / len(tests)
        metrics = {
            "code_tests_passed": share,
            "code_timeouts": float(num_timeouts),
            "code_namespaces": float(sandbox.has_namespaces),
        }
        reward = share if self.score == "fraction" else float(num_passed == len(tests))
        return RewardResult(reward=reward, metrics=metrics)

    def _run_cases(self, sandbox: Sandbox, program: str, cases: Sequence[Case]) -> tuple[int, int]:
        """Numbers of cases passed and timed out; ends at the first failure if all must pass."""
        command = Command.python(self.file_name, program)
        if self.command is not None:
            command = Command(arguments=self.command, files={self.file_name: program})
        num_passed, num_timeouts = 0, 0
        deadline = time.monotonic() + self.total_time_limit_s
        for case in cases:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return num_passed, num_timeouts + 1
            limits = replace(self.limits, time_limit_s=min(self.limits.time_limit_s, left_s))
            outcome = sandbox.run(command, limits, case.stdin.encode(errors="replace"))
            num_timeouts += outcome.ended == "timeout"
            if self._has_passed(outcome, case):
                num_passed += 1
            elif self.score == "all":
                break
        return num_passed, num_timeouts

    def _has_passed(self, outcome: Outcome, case: Case) -> bool:
        if (outcome.ended, outcome.code) != ("exit", 0):
            return False
        is_same = self.compare(outcome.output.decode(errors="replace"), case.expected)
        if is_same not in (True, False):  # a forgotten return would be a wrong answer
            raise TypeError(f"compare returned {shown(is_same)}; must be True or False")
        return bool(is_same)

    def _run_asserts(self, sandbox: Sandbox, program: str, tests: Sequence[str]) -> tuple[int, int]:
        """Numbers of tests passed, and 1 if they ran out of time."""
        nonce = secrets.token_hex(16)
        task = {"program": program, "tests": tests, "nonce": nonce}
        time_limit_s = min(self.limits.time_limit_s, self.total_time_limit_s)
        outcome = sandbox.run(
            Command.python("harness.py", text_of("harness.py"), program, *tests),
            replace(self.limits, time_limit_s=time_limit_s),
            marshal.dumps(task),
        )
        reported = set(outcome.output.decode(errors="replace").splitlines())
        num_passed = sum(f"{nonce} {index}" in reported for index in range(len(tests)))
        return num_passed, int(outcome.ended == "timeout")


# -- tests of a row -------------------------------------------------------------------------------


def tests_of(sample: Sample, column: str) -> Any:
    """The row's tests: a list of `Case`, or of texts with assert statements; never empty.

    Raises:
        RewardError: If they are of another form.
    """
    value = column_of(sample, column)
    if isinstance(value, str):
        value = _parsed(value)
    if isinstance(value, Mapping):
        value = _transposed(value)
    if isinstance(value, list | tuple) and value:
        if all(isinstance(test, str) and test.strip() for test in value):
            for test in value:
                _check_compiles(sample, column, test)
            return [str(test) for test in value]  # as the program is
        cases = [_case(test) for test in value]
        if None not in cases:
            return cases
    detail = f"column {column!r} of its row must hold pairs of the texts input and output, or "
    shown = repr(value)[:80]
    raise RewardError(sample.sample_id, "invalid", f"{detail}assert statements; it is {shown}")


def _check_compiles(sample: Sample, column: str, test: str) -> None:
    """Check that a test is Python: else no program would ever pass it."""
    if (fault := _fault_of(test)) is not None:
        detail = f"column {column!r} of its row holds a test that is neither JSON nor Python"
        raise RewardError(sample.sample_id, "invalid", f"{detail}: {fault}: {test[:80]!r}")


@functools.lru_cache(maxsize=256)
def _fault_of(test: str) -> str | None:
    """Why a test is no Python; looked for once for the siblings of a group, as a compiler takes
    half a second for a megabyte, and warns each time of what is written oddly."""
    try:
        compile(test, "test", "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        return str(error)
    return None


def _parsed(text: str) -> Any:
    """JSON with tests, or one text of assert statements."""
    if text.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(text)
        except json.JSONDecodeError:
            return [text]
    return [text]


def _transposed(tests: Mapping[str, Any]) -> Any:
    """``{"inputs": [...], "outputs": [...]}`` as pairs, or one pair as a list."""
    if tests.get("fn_name") is not None:  # None where other rows of the dataset have one
        return None  # these call a function; they are no pairs of texts
    inputs, outputs = tests.get("inputs"), tests.get("outputs")
    if not isinstance(inputs, list | tuple) or not isinstance(outputs, list | tuple):
        return [tests]
    if len(inputs) != len(outputs):
        return None
    return [
        {"input": stdin, "output": expected}
        for stdin, expected in zip(inputs, outputs, strict=True)
    ]


def _case(test: Any) -> Case | None:
    if not isinstance(test, Mapping):
        return None
    stdin, expected = test.get("input"), test.get("output")
    if not isinstance(stdin, str) or not isinstance(expected, str):
        return None
    return Case(stdin=stdin, expected=expected)


def _texts(name: str, value: Sequence[str]) -> tuple[str, ...]:
    ok = isinstance(value, list | tuple) and all(isinstance(v, str) and v for v in value)
    require(ok, f"code_tests.{name}", value, "must be a list of texts")
    return tuple(value)


def code_tests(
    column: str = "tests",
    *,
    score: Score = "all",
    extract: Extract = fenced_program,
    compare: Compare = same_output,
    command: Sequence[str] | None = None,
    file_name: str = "program.py",
    time_limit_s: float = 10.0,
    total_time_limit_s: float = 45.0,
    cpu_limit_s: int = 10,
    memory_mb: int = 1024,
    max_processes: int = 8,
    disk_mb: int = 16,
    max_output_bytes: int = 1 << 20,
    readable_paths: Sequence[str] = (),
    isolation: Isolation = "auto",
    allow_unsandboxed_writes: bool = False,
) -> RewardFunction:
    """Make a reward that runs the response's program against the tests of the prompt's row.

    The program runs in a sandbox of its own, on Linux on x86-64 or AArch64. With namespaces it has
    no network, sees no other process, and of the files only the system's programs and libraries
    and the Python that runs here, read-only. It writes to one folder, in memory, that is gone
    afterwards. It has no privileges, none of this process's environment, and cannot make sockets.
    Without namespaces (metric ``code_namespaces`` = 0) the limits hold and it cannot make sockets,
    but it may read what its user may read; as root, each program gets a user that nobody has.

    Args:
        column: Holds the tests, as values or as JSON text: pairs ``{"input": text, "output":
            text}`` for standard input and output, ``{"inputs": [...], "outputs": [...]}``, or
            texts with assert statements, which run after the program, in its namespace, in order.
        score: ``"all"``: 1.0 if all tests pass, else 0.0; pairs end at the first that fails.
            ``"fraction"``: the share of the tests that pass.
        extract: Finds the program in the response's text. The default takes the last fenced code
            block, or the whole text where there is none. None or white space earns 0.0.
        compare: Whether an output (first) is that of the test (second). The default leaves out
            white space at the ends of lines and of the text.
        command: What runs the program, found in /usr/local/bin, /usr/bin and /bin, such as
            ``("node", "program.js")``. None is the Python that runs here, with its packages.
        file_name: The program's file, in the working directory.
        time_limit_s: Wall time of one pair, or of all assert statements, in seconds.
        total_time_limit_s: Wall time of all pairs, in seconds; those that are left then do not
            pass. Keep it below ``rollout.reward.timeout_s``.
        cpu_limit_s: CPU time of each process, in whole seconds.
        memory_mb: Address space of each process, in MiB.
        max_processes: Processes and threads of a program.
        disk_mb: Most that a program may write, in MiB; without namespaces, to one file.
        max_output_bytes: Most that a program may print; more ends it, and its test has failed.
        readable_paths: More files and folders that programs with namespaces may read, which have
            to be there; where this process is root, only as far as anybody may.
        isolation: ``"auto"`` takes namespaces where they work, or else ``"rlimits"``;
            ``"namespaces"`` and ``"rlimits"`` take nothing else.
        allow_unsandboxed_writes: Without namespaces and without being root, a program runs as this
            process's user and may change that user's files and processes. Only True accepts that.

    Returns:
        A function of a finished `Sample` that returns a `RewardResult` with the metrics
        ``code_tests_passed`` (share), ``code_timeouts`` (number) and ``code_namespaces`` (1.0 or
        0.0). It blocks until the program has ended, and raises `RewardError` if the row has no
        tests that can be read, and `ResourceError` if no sandbox works or one broke.

    Raises:
        ConfigError: For an argument that cannot be used.

    A program shares its process with assert statements, and one that means to can pretend that
    they hold. Prefer pairs where the policy might learn that.

    Example:
        >>> reward = code_tests("tests", score="fraction", time_limit_s=4, memory_mb=512)
    """
    return CodeTests(
        column=column,
        score=score,
        extract=extract,
        compare=compare,
        command=None if command is None else _texts("command", command),
        file_name=file_name,
        limits=SandboxLimits(
            time_limit_s=time_limit_s,
            cpu_limit_s=cpu_limit_s,
            memory_mb=memory_mb,
            max_processes=max_processes,
            disk_mb=disk_mb,
            max_output_bytes=max_output_bytes,
        ),
        total_time_limit_s=total_time_limit_s,
        readable_paths=_texts("readable_paths", readable_paths),
        isolation=isolation,
        allow_unsandboxed_writes=allow_unsandboxed_writes,
    )
