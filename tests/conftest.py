"""Settings of all tests."""

from typing import Any

import pytest
from hypothesis import settings

# How long an example takes says how busy the machine is, not whether the code is right.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")


ENGINES = ("tests/vllm/", "tests/ray/")
"""Folders of the tests that start engines, or Ray."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Engines first, and then the whole runs: a Ray that starts beside other work on two cores
    gives its agents too little time, and the other process has ended by then."""
    order = {folder: number for number, folder in enumerate(ENGINES)}
    items.sort(key=lambda item: order.get(folder_of(item.nodeid), len(order)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Of two processes (`make test`) one has all of `ENGINES`, the other one the rest."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "engines" if folder_of(nodeid) in ENGINES else nodeid.partition("::")[0]

    return Scheduling(config, log)


def folder_of(nodeid: str) -> str:
    return "".join(part + "/" for part in nodeid.split("/")[:2])
