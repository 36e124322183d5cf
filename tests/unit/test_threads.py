"""Work on a thread (core/threads.py)."""

from __future__ import annotations

import threading

import pytest

from ray_apr.core.threads import in_thread

LIMIT_S = 10.0


def test_a_thread_gives_what_its_work_returns_and_keeps_no_process():
    def work():
        thread = threading.current_thread()
        return thread.name, thread.daemon

    assert in_thread(work, "named").result(LIMIT_S) == ("named", True)


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(3)])
def test_a_thread_gives_the_error_of_its_work(error):
    def work():
        raise error

    with pytest.raises(type(error)) as caught:
        in_thread(work, "failing").result(LIMIT_S)
    assert caught.value is error
