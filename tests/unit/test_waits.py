"""Every wait has a limit or says what ends it, and docs/waits.md lists them (tests/waits.py)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.waits import page, waits

PAGE = Path(__file__).parents[2] / "docs" / "waits.md"
TOLD = '"""Waits for: it. Unblocked by: that."""'


def test_every_wait_has_a_limit_or_says_what_ends_it() -> None:
    silent = [
        f"{function.module}: {function.name}: {code}"
        for function in waits()
        if function.told is None
        for code in function.unlimited
    ]
    assert not silent, "give it a limit, or tell in its docstring: Waits for: ... Unblocked by: ..."


def test_the_page_is_what_the_code_says() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "python -m tests.waits > docs/waits.md"


def unlimited(folder: Path, source: str) -> list[str]:
    (folder / "module.py").write_text(source)
    return [code for f in waits(folder) if f.told is None for code in f.unlimited]


@pytest.mark.parametrize(
    "wait",
    [
        "ray.get(ref)",
        "ray.get(ref, timeout=None)",
        "event.wait()",
        "thread.join()",
        "await actor.call.remote(1)",
        "await task",
        "await library.call()",
        "asyncio.wait({task})",
        "future.result()",
        "os.waitpid(child, 0)",
    ],
)
@pytest.mark.parametrize(
    ("around", "is_found"),
    [
        ("def f():\n    {}", True),
        (f"def f():\n    {TOLD}\n    {{}}", False),
        (f"class C:\n    {TOLD}\n    def f(self):\n        {{}}", False),
        (f"def f():\n    {TOLD}\n    def g():\n        {{}}", False),
        ('def f():\n    """Waits for: it, without end."""\n    {}', True),
        ("async def f():\n    async with asyncio.timeout(3):\n        {}", False),
        ("async def f():\n    async with asyncio.timeout(None):\n        {}", True),
    ],
)
def test_a_wait_without_a_limit_is_found(
    tmp_path: Path, wait: str, around: str, is_found: bool
) -> None:
    is_of_a_task = "result" in wait and around.startswith("async")
    found = unlimited(tmp_path, around.format(wait) + "\n")
    assert (found == [wait]) == (is_found and not is_of_a_task)


@pytest.mark.parametrize(
    "code",
    [
        "ray.get(ref, timeout=3)",
        "event.wait(3)",
        "', '.join(names)",
        "await self.own()",
        "await asyncio.wait_for(event.set(), 3)",
        "time.sleep(3)",
        "os.waitpid(child, os.WNOHANG)",
    ],
)
def test_what_ends_by_itself_is_no_such_wait(tmp_path: Path, code: str) -> None:
    assert unlimited(tmp_path, f"async def own():\n    pass\ndef f(self):\n    {code}\n") == []


@pytest.mark.parametrize("code", ["ray.wait([ref], timeout=3)", "time.sleep(3)"])
def test_a_limit_that_a_loop_begins_anew_is_none(tmp_path: Path, code: str) -> None:
    assert unlimited(tmp_path, f"def f():\n    while not ready():\n        {code}\n") == [code]


def test_a_lock_is_a_wait_for_who_holds_it(tmp_path: Path) -> None:
    source = (
        "class C:\n"
        "    def __init__(self):\n"
        "        self.lock = asyncio.Lock()\n"
        "        self.changed = asyncio.Condition()\n"
        "    async def f(self):\n"
        "        async with self.lock, self.changed:\n"
        "            pass\n"
    )
    assert unlimited(tmp_path, source) == ["with self.lock"]
