"""Settings of all tests."""

import gc
import os
from typing import Any

import pytest
from hypothesis import settings

# How long an example takes says how busy the machine is, not whether the code is right.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")


# Ray makes its workers 15 nicer: on two cores they would stand still beside the other process.
os.environ.setdefault("RAY_worker_niceness", "0")


def pytest_collection_finish() -> None:
    """A full collection of all that was imported would stop a test for a second."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """What is frozen would count as leaked at the end of the process."""
    gc.unfreeze()


WITH_RAY = ("tests/ray/", "tests/vllm/test_rollout_servers.py")
"""Where the tests are that start Ray."""
SANDBOX = "tests/sandbox/"
"""Where those are that look at all sandboxes of the machine."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What starts Ray first: it takes one process longest."""
    items.sort(key=lambda item: not item.nodeid.startswith(WITH_RAY))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Of two processes (`make test`) one has all that starts Ray, the other one the rest.

    A Ray that starts beside another one gives up on its agents after 15 s, on two cores.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            if nodeid.startswith(SANDBOX):
                return SANDBOX
            return "ray" if nodeid.startswith(WITH_RAY) else nodeid.partition("::")[0]

    return Scheduling(config, log)
