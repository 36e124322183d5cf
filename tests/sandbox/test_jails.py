"""The process that forks jails (rewards/jailer), and what its caller does about it (jails)."""

from __future__ import annotations

import contextlib
import functools
import os
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ray_apr.core.exceptions import ResourceError
from ray_apr.rewards import jails
from ray_apr.rewards import sandbox as sandbox_module
from ray_apr.rewards.sandbox import Command, SandboxLimits, find_sandbox
from tests.jail_processes import jailers, sandbox_processes

ECHO = Command(arguments=("/bin/cat",), files={})
SLEEP = Command(arguments=("/bin/sh", "program.py"), files={"program.py": "sleep 60"})


def wait_for(condition) -> None:
    """Wait until something holds, for at most 20 s."""
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def echoed(text: bytes = b"ok") -> bytes:
    """What a program prints that prints this."""
    return sandbox().run(ECHO, SandboxLimits(time_limit_s=30), text).output


def is_asleep() -> bool:
    """Whether a program runs that sleeps."""
    return any("program.py" in command for command in sandbox_processes().values())


def sandbox():
    """One of this machine, or a skipped test."""
    try:
        return find_sandbox(needs_python=False)
    except ResourceError as error:
        pytest.skip(str(error))


def test_all_programs_of_a_process_have_one_jailer():
    with ThreadPoolExecutor(4) as pool:
        texts = [str(i).encode() for i in range(12)]
        assert list(pool.map(echoed, texts)) == texts
    assert len(jailers()) == 1


def test_a_jailer_that_was_killed_is_replaced_and_its_programs_end():
    echoed()
    (before,) = jailers()
    raised = []

    def sleep() -> None:
        try:
            sandbox().run(SLEEP, SandboxLimits(time_limit_s=60))
        except ResourceError as error:
            raised.append(str(error))

    thread = threading.Thread(target=sleep)
    thread.start()
    wait_for(is_asleep)
    os.kill(before, signal.SIGKILL)
    thread.join(20)
    assert raised == ["a sandbox was killed from outside before its program ended"]
    assert echoed() == b"ok"
    (after,) = jailers()
    assert after != before


def test_a_fork_of_the_caller_has_a_jailer_of_its_own():
    code = """
        import os
        from ray_apr.rewards import jails
        from ray_apr.rewards.sandbox import Command, SandboxLimits, find_sandbox
        from tests.jail_processes import jailers
        run = lambda text: find_sandbox(needs_python=False).run(
            Command(arguments=("/bin/cat",), files={}), SandboxLimits(time_limit_s=30), text
        ).output
        assert run(b"a") == b"a"
        before = jailers()
        locks = jails._jailers._lock, jails._jailers._jailer._process._waitpid_lock
        for lock in locks:  # as another thread may have
            lock.acquire()
        if (child := os.fork()) == 0:
            code = 1
            try:
                assert jailers() == [] and run(b"b") == b"b" and len(jailers()) == 1
                jails._jailers.end()  # as it does when Python ends
                assert jailers() == []
                code = 0
            finally:
                os._exit(code)
        for lock in locks:
            lock.release()
        assert os.waitpid(child, 0)[1] == 0
        assert run(b"c") == b"c" and jailers() == before
    """
    sandbox()
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=30)


def test_a_caller_may_have_more_files_open_than_select_takes():
    code = """
        import os, resource
        from ray_apr.rewards.sandbox import Command, SandboxLimits, find_sandbox
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        while os.open("/dev/null", os.O_RDONLY) < 1024:
            pass
        sandbox = find_sandbox(needs_python=False)
        cat = Command(arguments=("/bin/cat",), files={})
        assert sandbox.run(cat, SandboxLimits(time_limit_s=30), b"a").output == b"a"
    """
    sandbox()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard != resource.RLIM_INFINITY and hard < 1100:
        pytest.skip(f"at most {hard} files may be open here")
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=30)


def test_it_ends_with_its_caller_although_a_fork_of_that_lives_on():
    code = """
        import ctypes, os, signal, time
        from ray_apr.rewards.sandbox import find_sandbox
        from tests.jail_processes import jailers
        find_sandbox(needs_python=False)
        child = ctypes.PyDLL(None).fork()  # not Python's, which closes files of the jailer
        if child == 0:
            time.sleep(60)
            os._exit(0)
        print(child, *jailers(), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    sandbox()
    script = [sys.executable, "-c", textwrap.dedent(code)]
    with subprocess.Popen(script, stdout=subprocess.PIPE, text=True) as caller:
        assert caller.stdout is not None
        fork, jailer = map(int, caller.stdout.readline().split())
        try:
            wait_for(lambda: not Path(f"/proc/{jailer}").exists())
        finally:
            os.kill(fork, signal.SIGKILL)


def test_no_file_of_a_jail_is_left_open_in_its_caller():
    echoed()
    before = os.listdir("/proc/self/fd")
    for _ in range(5):
        echoed()
    assert os.listdir("/proc/self/fd") == before


def test_a_jail_that_is_left_ends_with_its_program():
    sandbox()
    with pytest.raises(RuntimeError, match="left"), _interrupted_in_sleep():
        sandbox().run(SLEEP, SandboxLimits(time_limit_s=60))
    wait_for(lambda: sandbox_processes() == {})


def test_a_jail_that_is_left_before_it_has_begun_ends_as_soon_as_it_has():
    code = """
        import os, time
        from ray_apr.rewards import sandbox as module
        from ray_apr.rewards.sandbox import Command, SandboxLimits, find_sandbox
        from tests.jail_processes import is_running
        sandbox = find_sandbox(ISOLATION, allow_unsandboxed_writes=True, needs_python=False)
        name = f"left-{os.getpid()}.sh"
        sleep = Command(arguments=("/bin/sh", name), files={name: "sleep 60"})
        def leave(self):
            raise KeyboardInterrupt
        module._Watch.follow = leave
        began = time.monotonic()
        try:
            sandbox.run(sleep, SandboxLimits(time_limit_s=60))
        except KeyboardInterrupt:
            assert time.monotonic() < began + 5
        assert not is_running(name)
    """
    sandbox()
    for isolation in ("auto", "rlimits"):
        program = textwrap.dedent(code).replace("ISOLATION", repr(isolation))
        ignore = functools.partial(signal.signal, signal.SIGTERM, signal.SIG_IGN)
        script = [sys.executable, "-c", program]
        subprocess.run(script, check=True, timeout=60, preexec_fn=ignore)


def test_where_no_file_can_be_opened_that_is_said_and_a_program_ends():
    code = """
        import os, resource, time
        from ray_apr.core.exceptions import ResourceError
        from ray_apr.rewards import sandbox as module
        from ray_apr.rewards.sandbox import Command, SandboxLimits, find_sandbox
        from tests.jail_processes import is_running
        sandbox = find_sandbox(needs_python=False)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        follow = module._Watch.follow
        def follow_without_files(self):
            time.sleep(0.5)
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
            return follow(self)
        module._Watch.follow = follow_without_files
        name = f"left-{os.getpid()}.sh"
        sleep = Command(arguments=("/bin/sh", name), files={name: "sleep 60"})
        limits = SandboxLimits(time_limit_s=1)
        assert sandbox.run(sleep, limits).ended == "timeout"
        try:
            sandbox.run(sleep, limits)
        except ResourceError as error:
            assert "could not be started: [Errno 24] Too many open files" in str(error)
        else:
            raise AssertionError
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert not is_running(name)
    """
    sandbox()
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=60)


def test_a_program_that_prints_too_much_ends_although_its_caller_looks_late(monkeypatch):
    @contextlib.contextmanager
    def late(*arguments):
        with jails.jailed(*arguments) as jail:
            time.sleep(0.5)
            yield jail

    to_run = sandbox()
    monkeypatch.setattr(sandbox_module, "jailed", late)
    yes = Command(arguments=("/usr/bin/yes",), files={})
    outcome = to_run.run(yes, SandboxLimits(time_limit_s=30, max_output_bytes=100))
    assert outcome.ended == "output"


def test_a_daemon_whose_name_is_no_text_ends_with_its_program():
    code = """
        from ray_apr.rewards.sandbox import Command, SandboxLimits, find_sandbox
        daemon = '''
        import ctypes, os, time
        if os.fork() == 0:
            set_name = 15
            ctypes.CDLL(None).prctl(set_name, bytes([255]), 0, 0, 0)
            time.sleep(60)
        '''
        sandbox = find_sandbox("rlimits", allow_unsandboxed_writes=True)
        program = Command.python("program.py", textwrap.dedent(daemon))
        print(sandbox.run(program, SandboxLimits(time_limit_s=30)).ended)
    """
    assert as_another_user(code) == "exit"


def as_another_user(code: str) -> str:
    """What a program of the system's Python prints or raises, which has no privileges."""
    root, python = Path(__file__).resolve().parents[2], "/usr/bin/python3"
    who = {"user": 64321, "group": 64321, "extra_groups": [], "cwd": "/"}
    options = {**who, "env": {"PYTHONPATH": str(root)}, "timeout": 90, "text": True}
    imports = "import textwrap; import ray_apr.rewards.sandbox"
    if os.geteuid() != 0 or not Path(python).exists():
        pytest.skip("needs root and a system Python")
    if subprocess.run([python, "-c", imports], check=False, **options).returncode:
        pytest.skip("needs a system Python that can read this folder")
    script = [python, "-c", f"{imports}\n{textwrap.dedent(code)}"]
    ran = subprocess.run(
        script, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options
    )
    return ran.stdout.strip()


@contextlib.contextmanager
def _interrupted_in_sleep():
    """Raise an error in here once the program sleeps."""

    def fail(*_) -> None:
        raise RuntimeError("left")

    def interrupt() -> None:
        wait_for(is_asleep)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, fail)  # SIGINT may be ignored in here
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        yield
    finally:
        thread.join()
        signal.signal(signal.SIGUSR1, before)


def test_a_fork_that_fails_is_said(monkeypatch):
    sandbox()
    monkeypatch.syspath_prepend(str(Path(jails.__file__).parent))
    import jailer

    def fail() -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", fail)
    status, its_status = os.pipe()
    its_files = [os.open("/dev/null", os.O_RDWR) for _ in range(3)]
    jailer._fork_jail(None, forked := set(), [*its_files, its_status])
    with open(status, "rb") as said:
        text = said.read()
    assert text.startswith(b"error BlockingIOError: [Errno 11] Resource temporarily unavailable")
    assert forked == set()
