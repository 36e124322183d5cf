"""A Ray of the test's own process, whose workers are forked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import ray

from ray_apr.run.forking import run_fork_servers
from tests.processes import MARK, marked_processes


@contextmanager
def marked_ray(**options: Any) -> Iterator[str]:
    """Start Ray, with options of `ray.init`; yields the mark of all its processes.

    Raises:
        AssertionError: If one is left behind after the block.
    """
    with marked_processes() as (mark, env), pytest.MonkeyPatch.context() as patch:
        for name in (MARK, "PYTHONUNBUFFERED"):
            patch.setenv(name, env[name])
        with run_fork_servers("cpu") as runtime_env:
            options |= {"address": "local", "runtime_env": runtime_env()}
            ray.init(log_to_driver=False, **options)
            try:
                yield mark
            finally:
                ray.shutdown()
