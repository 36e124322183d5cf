"""Rewards that run programs, and the sandbox they run in (rewards/programs, sandbox, jail).

The hostile programs are real: each one does what it says, against limits that are small.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import uuid
from pathlib import Path

import numpy as np
import pytest

from ray_apr.core.exceptions import ConfigError, ResourceError, RewardError
from ray_apr.rewards import code_tests, programs, sandbox
from ray_apr.rewards.programs import fenced_program, same_output
from ray_apr.rewards.sandbox import Command, Outcome, Sandbox, SandboxLimits, find_sandbox
from tests.jail_processes import sandbox_processes
from tests.reward_samples import round_trip, sample_of

SYSTEM_PYTHON = ("python3", "-I", "program.py")
SMALL = {"time_limit_s": 0.6, "cpu_limit_s": 1, "memory_mb": 256, "max_output_bytes": 20_000}
UNHURRIED = {"time_limit_s": 30.0}
"""For programs that end by themselves: a busy machine may take a second to start one."""


@functools.cache
def is_there(isolation: str, *, needs_python: bool) -> bool:
    """Whether programs can be run so on this machine."""
    try:
        find_sandbox(isolation, needs_python=needs_python)
    except ResourceError:
        return False
    return needs_python or Path("/usr/bin/python3").exists()


@pytest.fixture(params=["namespaces", "rlimits"])
def isolated(request):
    """Make rewards with one isolation; skips where this machine has none such.

    Where only root can read the Python that runs here, the system's one takes its place.
    """
    if is_there(request.param, needs_python=True):
        command = None
    elif is_there(request.param, needs_python=False):
        command = SYSTEM_PYTHON
    else:
        pytest.skip(f"no sandbox by {request.param} on this machine")

    def make(**options):
        return code_tests(isolation=request.param, command=command, **options)

    make.isolation = request.param
    return make


@pytest.fixture
def namespaces():
    """Skips where this machine allows no namespaces."""
    if not is_there("namespaces", needs_python=True):
        pytest.skip("no namespaces on this machine")


@pytest.fixture(autouse=True)
def nothing_is_left():
    """No test leaves a process of a sandbox, or its folder."""
    yield
    deadline = time.monotonic() + 5
    while (left := sandbox_processes()) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert left == {}
    assert list(Path("/tmp").glob("ray_apr-sandbox-*")) == []


def fenced(program: str) -> str:
    """A response that says something and ends with a program."""
    return f"Let me see.\n```python\n{textwrap.dedent(program)}\n```\nThat is it."


def pairs(*tests: tuple[str, str]) -> list[dict[str, str]]:
    """Tests of a row."""
    return [{"input": stdin, "output": expected} for stdin, expected in tests]


def result_of(reward, program: str, tests=None):
    """Result of a program, which must print "ok" if no tests are given."""
    tests = pairs(("", "ok")) if tests is None else tests
    return reward(sample_of(fenced(program), tests=tests))


# -- programs that behave -------------------------------------------------------------------------

DOUBLES = "for line in __import__('sys').stdin: print(2 * int(line))"


def test_a_program_passes_its_pairs(isolated):
    reward = round_trip(isolated())
    result = result_of(reward, DOUBLES, pairs(("1\n2\n", "2\n4\n"), ("", ""), ("-3", " -6 ")))
    assert result.reward == 1.0
    assert result.metrics == {
        "code_tests_passed": 1.0,
        "code_timeouts": 0.0,
        "code_namespaces": float(isolated.isolation == "namespaces"),
    }


def test_a_comparison_that_returns_nothing_is_no_zero(namespaces):
    with pytest.raises(TypeError, match="compare returned None"):
        result_of(code_tests(compare=lambda output, expected: None), "print('ok')")


def test_some_failures_are_a_fraction_or_nothing(namespaces):
    tests = pairs(("1", "2"), ("2", "5"), ("x", ""), ("4", "8"))
    fraction = result_of(code_tests(score="fraction"), DOUBLES, tests)
    assert (fraction.reward, fraction.metrics["code_tests_passed"]) == (0.5, 0.5)
    whole = result_of(code_tests(), DOUBLES, tests)
    assert (whole.reward, whole.metrics["code_tests_passed"]) == (0.0, 0.25)


def test_assert_statements_run_in_the_programs_namespace(namespaces):
    program = """
        from dataclasses import dataclass

        @dataclass
        class Twice:
            of: int

        def double(x):
            print("noise")
            return 2 * Twice(x).of

        if __name__ == "__main__":
            input()
    """
    tests = ["four = double(2)", "assert four == 4", "assert double(2) == 5", "double('a') + 1"]
    assert result_of(code_tests(score="fraction"), program, tests).reward == 0.5
    assert result_of(code_tests(), program, tests[:2]).reward == 1.0
    assert result_of(code_tests(), program, json.dumps(tests[:2])).reward == 1.0
    assert result_of(code_tests(), program, "assert double(1) == 2\nassert double(0) == 0").reward


def test_annotations_of_a_program_are_values(namespaces):
    program = "def double(x: int) -> int: return 2 * x"
    tests = ["assert double.__annotations__ == {'x': int, 'return': int}"]
    assert result_of(code_tests(), program, tests).reward == 1.0


@pytest.mark.parametrize(
    "program",
    [
        "import os; os._exit(0)",
        "def f(): raise SystemExit(0)",
        "def f(): __import__('os')._exit(0)",
        "def f(): return 1",
        "def f(:",
        "",
    ],
)
def test_what_ends_early_passes_no_assert_statement(namespaces, program):
    assert result_of(code_tests(), program, ["assert f() == 2"]).reward == 0.0


def test_the_packages_of_this_python_are_there(namespaces):
    program = "import numpy, json; print(json.dumps(numpy.arange(3).tolist()))"
    assert result_of(code_tests(), program, pairs(("", "[0, 1, 2]"))).reward == 1.0


@pytest.fixture
def lazy(namespaces, monkeypatch):
    """Have each program look for packages late, whatever its text says."""
    monkeypatch.setattr(sandbox, "_SEES_ITS_START", ())


def test_assert_statements_find_packages_once_one_is_imported(lazy):
    program = """
        import site, sys, threading, time

        before = list(sys.path)
        found = []

        names = ("numpy", "pyarrow", "packaging", "yaml")
        look = site.main

        def look_for_long():
            time.sleep(0.2)
            look()

        def find(name):
            found.append(__import__(name).__name__)

        site.main = look_for_long

        threads = [threading.Thread(target=find, args=(name,)) for name in names]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
    """
    tests = [
        "assert not any(path.endswith('site-packages') for path in before), before",
        "assert any(path.endswith('site-packages') for path in sys.path), sys.path",
        "assert sorted(found) == sorted(names), found",
        "import numpy; assert numpy.arange(3).sum() == 3",
        "try: import there_is_none_such\nexcept ModuleNotFoundError: pass\nelse: assert False",
        "try: import numpy.there_is_none\nexcept ModuleNotFoundError: pass\nelse: assert False",
    ]
    reward = code_tests(score="fraction", max_processes=16, **UNHURRIED)
    assert result_of(reward, program, tests).reward == 1.0


def test_no_packages_are_looked_for_on_behalf_of_the_standard_library(lazy):
    program = "import pathlib, subprocess, sys; print(any('site-' in path for path in sys.path))"
    assert result_of(code_tests(), program, pairs(("", "False"))).reward == 1.0


def test_imports_go_on_where_an_old_package_adds_a_finder_without_find_spec(lazy):
    program = """
        import sys

        class Old:
            def find_module(self, name, path=None):
                return None

        sys.meta_path.append(Old())
        try:
            import there_is_none_such
        except ImportError:
            import packaging
            print(packaging.__name__)
    """
    assert result_of(code_tests(**UNHURRIED), program, pairs(("", "packaging"))).reward == 1.0


def test_assert_statements_have_the_names_that_an_interpreter_adds(namespaces):
    program = "def f(): exit(0)"
    tests = ["assert all(map(callable, (exit, quit, help, copyright, credits, license)))", "f()"]
    assert result_of(code_tests(score="fraction"), program, tests).reward == 0.5


def test_a_program_is_the_main_module_as_it_is_by_the_interpreter(lazy):
    program = """
        '''of mine'''
        import atexit, multiprocessing, os, pickle, sys
        import __main__

        class Kept:
            value: int = 3

        def double(x):
            return 2 * x

        atexit.register(print, "last")
        print(__name__, __doc__, __package__, __spec__, sys.argv)
        print(__file__ == os.path.abspath(sys.argv[0]), Kept.__module__, __main__.Kept is Kept)
        print(pickle.loads(pickle.dumps(Kept())).value, Kept.__annotations__)
        print(__builtins__.len is len, sorted(vars()) == sorted(vars(__main__)))
        forks = multiprocessing.get_context("fork")
        ends, gets = forks.Pipe()
        print(vars().keys() & {"TYPE_CHECKING", "annotations", "code", "main", "site"})
        child = forks.Process(target=lambda: gets.send(double(4)))
        child.start()
        print(ends.recv())
        child.join()
        exit()
    """
    said = """
        __main__ of mine None None ['program.py']
        True __main__ True
        3 {'value': <class 'int'>}
        True True
        set()
        8
        last
    """
    tests = pairs(("", textwrap.dedent(said)))
    assert result_of(code_tests(**UNHURRIED), program, tests).reward == 1.0
    if is_there("namespaces", needs_python=False):
        by_interpreter = code_tests(command=SYSTEM_PYTHON, **UNHURRIED)
        assert result_of(by_interpreter, program, tests).reward == 1.0


@pytest.mark.parametrize("kind", [np.str_, type("Text", (str,), {})])
def test_texts_may_be_of_other_classes(namespaces, kind):
    reward = code_tests(extract=lambda response: kind("x = 1\nprint(x)"))
    assert result_of(reward, "", pairs(("", "1"))).reward == 1.0
    assert result_of(reward, "", [kind("assert x == 1")]).reward == 1.0


@pytest.mark.parametrize(
    "program",
    [
        "import pkgutil; print('numpy' in {module.name for module in pkgutil.iter_modules()})",
        "import sys; print(any(path.endswith('site-packages') for path in sys.path))",
        "import inspect; print(len(inspect.stack()) == 1)",
        "import builtins; builtins.exit = print; import numpy; exit(True)",
        "import sys; print(sys.getrecursionlimit() == 1000)",
        """
        import sys

        def f(n):
            return n == 0 or f(n - 1)

        n = 100
        sys.setrecursionlimit(n + 3)
        print(f(n))
        """,
        "import sys; sys.setprofile(lambda _, event, __: event == 'return' and print(True))",
        """
        import multiprocessing

        def find():
            import numpy
            exit(int(numpy.arange(3).sum()))

        if __name__ == "__main__":
            child = multiprocessing.get_context("spawn").Process(target=find)
            child.start()
            child.join()
            print(child.exitcode == 3)
        """,
        """
        import sys, threading, time
        from importlib.machinery import ModuleSpec

        class Slow:
            def find_spec(name, path=None, target=None):
                return ModuleSpec(name, Slow) if name == "sitecustomize" else None

            def create_module(spec):
                return None

            def exec_module(module):
                time.sleep(0.5)
                import colorsys

        sys.meta_path.insert(0, Slow)
        thread = threading.Thread(target=__import__, args=("sitecustomize",), daemon=True)
        thread.start()
        time.sleep(0.1)
        import numpy
        thread.join()
        print("colorsys" in sys.modules)
        """,
    ],
)
def test_a_program_that_might_tell_starts_as_the_interpreter_does(namespaces, program):
    assert result_of(code_tests(), program, pairs(("", "True"))).reward == 1.0


@pytest.mark.parametrize("limit", ["10**6", "10 ** 6", "2**31 - 1", "1 << 25", "100_000", "20000"])
def test_a_high_limit_of_recursions_lets_a_program_start_fast(limit):
    text = f"import sys\nsys.setrecursionlimit({limit})"
    assert "-S" in Command.python("program.py", text).arguments


def test_assert_statements_that_might_tell_start_as_the_interpreter_does(namespaces):
    program = "import sys as s"
    tests = ["import sys; assert any(path.endswith('site-packages') for path in sys.path)"]
    assert result_of(code_tests(), program, tests).reward == 1.0
    late = ["assert not any(path.endswith('site-packages') for path in s.path)"]
    assert result_of(code_tests(), program, late).reward == 1.0


@pytest.mark.parametrize("name", ["compile", "exec"])
def test_assert_statements_need_no_built_in_function_of_the_program(namespaces, name):
    program = f"__builtins__.update({name}=lambda *args, **kwargs: '')"
    assert result_of(code_tests(), program, ["assert False"]).reward == 0.0
    assert result_of(code_tests(), program, ["assert True"]).reward == 1.0


def test_assert_statements_count_where_a_program_writes_otherwise(namespaces):
    program = "import os; os.write = print"
    assert result_of(code_tests(), program, ["assert True"]).reward == 1.0


def test_a_program_has_the_names_of_one_by_the_interpreter(namespaces, tmp_path):
    program = "print(*globals(), dir(), *map(type, list(globals().values())))"
    (tmp_path / "program.py").write_text(program)
    command = [sys.executable, "-I", "program.py"]
    said = subprocess.run(command, check=True, cwd=tmp_path, capture_output=True, text=True).stdout
    assert "SourceFileLoader" in said
    assert result_of(code_tests(), program, pairs(("", said))).reward == 1.0


DEPTH = "def f(n): return 0 if n == 0 else 1 + f(n - 1)"


def test_a_program_calls_as_deep_as_by_the_interpreter(namespaces):
    program = f"{DEPTH}\nprint(f(998))"
    assert result_of(code_tests(**UNHURRIED), program, pairs(("", "998"))).reward == 1.0
    assert result_of(code_tests(**UNHURRIED), DEPTH, ["assert f(995) == 995"]).reward == 1.0


def test_a_program_knows_its_source_in_another_folder(namespaces):
    program = """
        import linecache, os

        def f():
            return 1

        os.mkdir("other")
        os.chdir("other")
        print(linecache.getline(f.__code__.co_filename, 4))
    """
    assert result_of(code_tests(), program, pairs(("", "def f():"))).reward == 1.0


@pytest.mark.parametrize("end", ["raise ValueError", "import sys; sys.exit(3)", "exit('no')", "f("])
def test_a_program_that_fails_has_printed_in_vain(namespaces, end):
    program = f"print(1)\n{end}"
    assert result_of(code_tests(**UNHURRIED), program, pairs(("", "1"))).reward == 0.0


def test_scratch_files_threads_and_children_work(isolated):
    program = """
        import os, subprocess, tempfile, threading
        with open("data.txt", "w") as file:
            file.write("ok")
        with tempfile.TemporaryFile() as file:
            file.write(b"x" * 100_000)
        said = []
        thread = threading.Thread(target=lambda: said.append(open("data.txt").read()))
        thread.start()
        thread.join()
        assert os.environ["HOME"] == os.getcwd()
        print(subprocess.run(["/bin/echo", *said], stdout=-1, text=True).stdout)
    """
    assert result_of(isolated(), program).reward == 1.0


def test_other_programs_can_be_the_interpreter(namespaces):
    reward = code_tests(command=["sh", "main.sh"], file_name="main.sh")
    assert result_of(reward, "read x; echo $((x * 2))", pairs(("4", "8"))).reward == 1.0
    with pytest.raises(RewardError, match="Python tests"):
        result_of(reward, "true", ["assert True"])
    with pytest.raises(ResourceError, match="no-such-program"):
        result_of(code_tests(command=["no-such-program"]), "x")


# -- programs that do not -------------------------------------------------------------------------


def test_an_endless_loop_is_ended(isolated):
    start = time.monotonic()
    result = result_of(isolated(**SMALL | {"cpu_limit_s": 9}), "while True: pass")
    assert (result.reward, result.metrics["code_timeouts"]) == (0.0, 1.0)
    assert time.monotonic() - start < 8


def test_processor_time_is_limited(namespaces):
    result = result_of(code_tests(**SMALL | {"time_limit_s": 30.0}), "while True: pass")
    assert (result.reward, result.metrics["code_timeouts"]) == (0.0, 0.0)


def test_a_fork_bomb_stays_small_and_is_ended(isolated):
    program = """
        import os, signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            try:
                if os.fork() == 0:
                    os.setsid()
            except OSError:
                time.sleep(0.01)
    """
    seen: list[int] = []
    done = threading.Event()

    def count() -> None:
        while not done.wait(0.1):
            seen.append(sum("program.py" in c for c in sandbox_processes().values()))

    counter = threading.Thread(target=count)
    counter.start()
    try:
        limits = SMALL | {"time_limit_s": 3.0, "max_processes": 6}
        assert result_of(isolated(**limits), program).reward == 0.0
    finally:
        done.set()
        counter.join()
    assert 2 <= max(seen) <= 6


def test_daemons_are_ended_with_the_program(isolated):
    program = """
        import os, sys, time
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                time.sleep(60)
            os._exit(0)
        print("ok", flush=True)
    """
    start = time.monotonic()
    assert result_of(isolated(), program).reward == 1.0
    assert time.monotonic() - start < 8


def test_ten_gigabytes_are_not_to_be_had(isolated):
    program = """
        try:
            data = bytearray(10 * 2**30)
        except MemoryError:
            print("ok")
    """
    assert result_of(isolated(**SMALL | UNHURRIED), program).reward == 1.0


def test_memory_that_no_limit_counts_is_not_to_be_had(isolated):
    program = """
        import os
        try:
            os.memfd_create("x")
        except PermissionError:
            print("ok")
    """
    assert result_of(isolated(), program).reward == 1.0


def test_nothing_outside_can_be_written(isolated, tmp_path):
    tmp_path.chmod(0o755)
    target = tmp_path / "target.txt"
    target.write_text("before")
    targets = [str(target), str(tmp_path / "new.txt"), "/new.txt", "/usr/new.txt", "/etc/passwd"]
    targets += [sys.prefix + "/new.txt", __file__]
    program = f"""
        written = 0
        for path in {targets}:
            try:
                open(path, "a").write("harm")
                written += 1
            except OSError:
                pass
        print("ok" if not written else written)
    """
    assert result_of(isolated(), program).reward == 1.0
    assert target.read_text() == "before"
    assert [path.name for path in tmp_path.iterdir()] == ["target.txt"]


def test_with_namespaces_nothing_outside_can_be_seen(namespaces, tmp_path):
    secret = tmp_path / "secret.txt"
    secret.write_text("secret")
    secret.chmod(0o644)
    tmp_path.chmod(0o755)
    program = f"""
        import os
        print(os.path.exists({str(secret)!r}), {os.getpid()} in map(int, filter(str.isdigit,
              os.listdir("/proc"))), sorted(set(os.listdir("/")) & {{"home", "var", "run", "sys"}}))
    """
    expected = pairs(("", "False False []"))
    assert result_of(code_tests(), program, expected).reward == 1.0
    for path in (str(tmp_path), f"{tmp_path}/"):
        shown = code_tests(readable_paths=[path])
        assert result_of(
            shown, f"print(open({str(secret)!r}).read())", pairs(("", "secret"))
        ).reward


def test_a_readable_path_that_is_not_there_is_no_zero(namespaces, tmp_path):
    with pytest.raises(ResourceError, match="not-here, which is not here"):
        result_of(code_tests(readable_paths=[str(tmp_path / "not-here")]), "print('ok')")


def test_the_disk_is_limited(isolated):
    program = """
        written = 0
        for i in range(4 if {all_together} else 1):
            try:
                with open(f"f{{i}}", "wb", buffering=0) as file:
                    for _ in range(100):
                        written += file.write(bytes(100_000))
            except OSError:
                pass
        print("ok" if written <= 2 * 2**20 else written)
    """.format(all_together=isolated.isolation == "namespaces")
    assert result_of(isolated(disk_mb=2), program).reward == 1.0


def test_with_namespaces_the_number_of_files_is_limited(namespaces):
    """Empty files take memory of the kernel that no other limit counts."""
    program = """
        made = 0
        try:
            while made < 10_000:
                open(f"f{made}", "w").close()
                made += 1
        except OSError:
            pass
        print("ok" if made < 5_000 else made)
    """
    assert result_of(code_tests(), program).reward == 1.0


@pytest.fixture
def listener():
    """A server on loopback; yields its port, and asserts that nobody has come."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()


def test_there_is_no_network(isolated, listener):
    program = f"""
        import socket
        reached = []
        for family, address in (
            (socket.AF_INET, ("127.0.0.1", {listener})),
            (socket.AF_INET6, ("::1", {listener})),
            (socket.AF_UNIX, "/run/some.socket"),
        ):
            try:
                socket.socket(family)
                reached.append(family)
            except PermissionError:
                pass
        print("ok" if not reached else reached)
    """
    assert result_of(isolated(), program).reward == 1.0


def test_an_output_flood_is_ended_early(isolated):
    program = "while True: print('ok' * 1000)"
    start = time.monotonic()
    result = result_of(isolated(**SMALL | {"time_limit_s": 30.0, "cpu_limit_s": 30}), program)
    assert (result.reward, result.metrics["code_timeouts"]) == (0.0, 0.0)
    assert time.monotonic() - start < 8


def test_an_output_that_just_fits_is_read_whole(namespaces):
    tests = pairs(("", "x" * 19_999))
    small = code_tests(**SMALL | UNHURRIED)
    assert result_of(small, "print('x' * 19_999)", tests).reward == 1.0
    assert result_of(small, "print('x' * 20_000)", tests).reward == 0.0


def test_secrets_of_the_environment_stay_outside(isolated, monkeypatch):
    monkeypatch.setenv("APR_TEST_SECRET", "secret-2")
    program = """
        import os
        found = "APR_TEST_SECRET" in os.environ
        for pid in [*filter(str.isdigit, os.listdir("/proc")), "self"]:
            try:
                found |= b"secret-2" in open(f"/proc/{pid}/environ", "rb").read()
            except OSError:
                pass
        print("ok" if not found else "leak")
    """
    assert result_of(isolated(), program).reward == 1.0


def test_no_privilege_is_left(isolated):
    program = """
        import os
        status = dict(line.split(":", 1) for line in open("/proc/self/status"))
        print("ok" if os.getuid() and int(status["CapEff"], 16) == 0
              and int(status["NoNewPrivs"]) else status)
        print(sorted(map(int, os.listdir("/proc/self/fd")))[:-1])
        for pid in (1, os.getppid()):
            try:
                os.kill(pid, 9)
            except OSError:
                pass
    """
    assert result_of(isolated(), program, pairs(("", "ok\n[0, 1, 2]"))).reward == 1.0


# -- the sandbox itself ---------------------------------------------------------------------------


@pytest.mark.parametrize("route", ["root_namespaces", "user_namespaces", "rlimits"])
def test_each_route_works_by_itself_or_says_why_not(route):
    if os.geteuid() != 0 and route != "user_namespaces":
        pytest.skip("needs root")
    command = Command(arguments=("/bin/sh", "-c", "cat; exit 3"), files={})
    try:
        outcome = Sandbox(route=route).run(command, SandboxLimits(), b"in and out")
    except ResourceError as error:
        pytest.skip(str(error))
    assert (outcome.ended, outcome.code, outcome.output) == ("exit", 3, b"in and out")


def test_sandboxes_run_beside_each_other(isolated):
    program = "import time; time.sleep(0.1); print('ok')"
    reward, results = isolated(), []
    threads = [
        threading.Thread(target=lambda: results.append(result_of(reward, program).reward))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [1.0] * 3


def test_a_caller_that_ignores_its_children_is_no_hindrance(isolated):
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert result_of(isolated(), "print('ok')").reward == 1.0
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_a_program_ends_with_its_caller(namespaces):
    name = f"program-{uuid.uuid4().hex}.py"
    code = f"""
        from ray_apr.rewards.sandbox import Command, SandboxLimits, find_sandbox
        files = {{{name!r}: "import time; time.sleep(60)"}}
        command = Command(arguments=("python3", "-I", {name!r}), files=files)
        find_sandbox("namespaces", needs_python=False).run(command, SandboxLimits(time_limit_s=60))
    """

    def running() -> bool:
        commands = Path("/proc").glob("[0-9]*/cmdline")
        found = False
        for path in commands:
            with contextlib.suppress(OSError):
                found |= f"-I\0{name}".encode() in path.read_bytes()
        return found

    def wait_for(state: bool) -> None:
        deadline = time.monotonic() + 20
        while running() is not state:
            assert time.monotonic() < deadline
            time.sleep(0.05)

    if not Path("/usr/bin/python3").exists():
        pytest.skip("there is no system Python")
    caller = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)])
    try:
        wait_for(True)
    finally:
        os.kill(caller.pid, signal.SIGKILL)
        caller.wait()
    wait_for(False)


def test_without_a_sandbox_nothing_runs(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    find_sandbox.cache_clear()
    with pytest.raises(ResourceError, match="allow_unsandboxed_writes=True"):
        find_sandbox("rlimits")


@pytest.mark.parametrize(
    ("num_failed", "route"), [(1, "root_namespaces"), (2, "user_namespaces"), (4, "rlimits")]
)
def test_a_probe_that_fails_once_is_tried_again(monkeypatch, num_failed, route):
    """known fault: one that took too long left its process without namespaces to its end."""
    probed = []

    def run(self, command, limits):
        probed.append(self.route)
        failed = len(probed) <= num_failed
        return Outcome(ended="timeout" if failed else "exit", code=-failed, output=b"")

    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(Sandbox, "run", run)
    assert find_sandbox.__wrapped__().route == route


def test_as_another_user_than_root(tmp_path):
    """Both routes of a user without privileges, by the system's Python."""
    python = Path("/usr/bin/python3")
    if os.geteuid() != 0 or not python.exists():
        pytest.skip("needs root and a system Python")
    root = Path(__file__).resolve().parents[2]
    code = """
        import sys, textwrap
        sys.path.insert(0, sys.argv[1])
        from ray_apr.rewards.sandbox import Command, SandboxLimits, find_sandbox
        bomb = '''
        import os, time
        while True:
            try:
                os.fork()
            except OSError:
                time.sleep(0.01)
        '''
        for isolation in ("namespaces", "rlimits"):
            sandbox = find_sandbox(isolation, allow_unsandboxed_writes=True)
            for text, limits in (
                ("print(input())", SandboxLimits()),
                (textwrap.dedent(bomb), SandboxLimits(time_limit_s=0.5)),
            ):
                outcome = sandbox.run(Command.python("program.py", text), limits, b"hello")
                print(isolation, outcome.ended, outcome.output.decode().strip())
    """
    nobody = {"user": 65534, "group": 65534, "extra_groups": []}
    run = subprocess.run(
        [str(python), "-c", textwrap.dedent(code), str(root)],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        cwd="/",
        env={},
        **nobody,
    )
    if run.returncode != 0:
        pytest.skip(run.stderr[-300:])
    assert run.stdout.splitlines() == [
        "namespaces exit hello",
        "namespaces timeout ",
        "rlimits exit hello",
        "rlimits timeout ",
    ]


# -- reading responses and rows -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("x = 1", "x = 1"),
        ("a\n```python\nx = 1\n```\nb\n```\ny = 2\n```\nc", "y = 2\n"),
        ("  ```py\nx = 1\n  ```", "x = 1\n"),
        ("```python\nx = '```'\n```", "x = '```'\n"),
        ("```python\nx = 1", "```python\nx = 1"),
        ("- so:\n  ```py\n  if x:\n      y = 2\n\n  ```", "if x:\n    y = 2\n\n"),
        ("```python\r\nx = 1\r\n```\r\n", "x = 1\r\n"),
        ("```python\nx =\n</think>\n```python\nx = 1\n```", "x = 1\n"),
    ],
)
def test_the_last_fenced_block_is_the_program(response, program):
    assert fenced_program(response) == program


def test_a_response_of_fences_alone_is_read_at_once():
    start = time.monotonic()
    fenced_program("```python\n" * 8_000)
    assert time.monotonic() - start < 2


def test_white_space_at_ends_of_lines_does_not_count():
    assert same_output("1 \n2\n\n", "1\n2")
    assert not same_output("1\n\n2", "1\n2")
    assert not same_output(" 1", "2")


@pytest.mark.parametrize(
    ("tests", "expected"),
    [
        ({"inputs": ["1", "2"], "outputs": ["2", "4"]}, [("1", "2"), ("2", "4")]),
        ('{"inputs": ["1", "2"], "outputs": ["2", "4"]}', [("1", "2"), ("2", "4")]),
        ({"inputs": ["1"], "outputs": ["2"], "fn_name": None}, [("1", "2")]),
        ({"input": "1", "output": "2"}, [("1", "2")]),
        ('[{"input": "1", "output": "2"}]', [("1", "2")]),
        ('["assert f()", "assert g()"]', ["assert f()", "assert g()"]),
        ("[x] = [f()]\nassert x", ["[x] = [f()]\nassert x"]),
    ],
)
def test_forms_of_tests(tests, expected):
    found = programs.tests_of(sample_of("x", tests=tests), "tests")
    assert [t if isinstance(t, str) else (t.stdin, t.expected) for t in found] == expected


@pytest.mark.parametrize(
    "tests",
    [
        [],
        3,
        [3],
        ["assert True", {"input": "1", "output": "2"}],
        [{"input": "1"}],
        [{"input": 1, "output": 2}],
        {"inputs": ["1"], "outputs": []},
        {"inputs": [[1]], "outputs": [2], "fn_name": "f"},
        "[]",
        '[{"input": "1\n", "output": "2"}]',  # no JSON, as a line break stands in its text
        '{"inputs": ["1"',
        ["assert f() == 1", "  assert f() == 2"],
        "assert f() = 1",
        None,
    ],
)
def test_tests_that_cannot_be_read_are_no_zero(tests):
    with pytest.raises(RewardError, match="'tests'") as caught:
        code_tests()(sample_of("x = 1", tests=tests))
    assert caught.value.kind == "invalid"


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"column": ""}, "column"),
        ({"score": "some"}, "score"),
        ({"extract": None}, "extract"),
        ({"compare": 3}, "compare"),
        ({"command": "python3"}, "command"),
        ({"command": []}, "command"),
        ({"file_name": "../x.py"}, "file_name"),
        ({"time_limit_s": 0}, "time_limit_s"),
        ({"cpu_limit_s": 1.5}, "cpu_limit_s"),
        ({"memory_mb": 8}, "memory_mb"),
        ({"max_processes": 0}, "max_processes"),
        ({"disk_mb": -1}, "disk_mb"),
        ({"max_output_bytes": "1k"}, "max_output_bytes"),
        ({"total_time_limit_s": float("inf")}, "total_time_limit_s"),
        ({"memory_mb": 2**45}, "memory_mb"),
        ({"cpu_limit_s": 10**20}, "cpu_limit_s"),
        ({"time_limit_s": 1e8}, "time_limit_s"),
        ({"readable_paths": ["relative"]}, "readable_paths"),
        ({"readable_paths": ["/dev/shm/data"]}, "readable_paths"),
        ({"readable_paths": ["/proc/"]}, "readable_paths"),
        ({"isolation": "docker"}, "isolation"),
        ({"allow_unsandboxed_writes": 1}, "allow_unsandboxed_writes"),
    ],
)
def test_arguments_are_checked_at_once(options, field):
    with pytest.raises(ConfigError) as caught:
        code_tests(**options)
    assert caught.value.field == f"code_tests.{field}"
