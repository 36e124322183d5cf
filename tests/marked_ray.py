"""A Ray of the test's own process, whose workers are forked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import ray

from ray_apr.run.forking import run_fork_servers
from tests.processes import MARK, kill_all, marked_environment, wait_until_none


@contextmanager
def marked_ray(**options: Any) -> Iterator[str]:
    """Start Ray, with options of `ray.init`; yields the mark of all its processes.

    Raises:
        AssertionError: If one is left behind after the block.
    """
    mark, env = marked_environment()
    with pytest.MonkeyPatch.context() as patch:
        for name in (MARK, "PYTHONUNBUFFERED"):
            patch.setenv(name, env[name])
        try:
            with run_fork_servers("cpu") as runtime_env:
                options |= {"address": "local", "runtime_env": runtime_env()}
                ray.init(log_to_driver=False, **options)
                yield mark
                ray.shutdown()
            left = wait_until_none(mark, 30)
            assert not left, f"processes left behind: {left}"
        finally:
            ray.shutdown()
            kill_all(mark)
