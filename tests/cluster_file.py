"""The keys of a cluster file, read in the code: ``python -m tests.cluster_file`` prints the part of
``docs/simulator.md`` that tells them."""

from __future__ import annotations

import sys

from ray_apr.tools.simulator.cluster import ClusterConfig
from tests.settings import section_of, with_inner

HEAD = """\
## The cluster file

A JSON object; what it leaves out has its default. `python -m tests.cluster_file` prints this part
of the page, and a test refuses another one.

"""
_OF_ANY_FILE = "- `cluster`: must be a JSON object\n"


def keys() -> str:
    """The sections of a cluster file, as a part of a page."""
    told = "".join(section_of(cls, name) for cls, name in with_inner(ClusterConfig, "cluster"))
    told = told.replace(_OF_ANY_FILE, "").replace("| `` |", "|  |").replace("## ", "### ")
    return HEAD + told.rstrip("\n") + "\n"


if __name__ == "__main__":
    sys.stdout.write(keys())
