"""Two Ray nodes on one host, of which one has another file system in the place of a folder."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.whole_runs import running_cluster


def _may_mount() -> bool:
    if shutil.which("unshare") is None:
        return False
    done = subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False, timeout=30)
    return done.returncode == 0


pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.skipif(not _may_mount(), reason="needs the right to mount file systems"),
]

_SECOND_NODE = 'mount -t tmpfs none "$1" && shift && exec "$@"'
_START_OF_A_RUN = """
import sys, time, ray, ray.train
from ray_apr.core.exceptions import ConfigError
from ray_apr.run.preflight import make_run_folder
from tests.run_specs import run_spec
ray.init(address=sys.argv[1], log_to_driver=False)
deadline = time.monotonic() + 60
while len([n for n in ray.nodes() if n["Alive"]]) < 2 and time.monotonic() < deadline:
    time.sleep(0.5)
for folder in sys.argv[2:]:
    run = ray.train.RunConfig(name="run", storage_path=folder)
    try:
        make_run_folder(run_spec(run=run))
        print("taken")
    except ConfigError as error:
        print(error)
"""


@contextlib.contextmanager
def second_node(address: str, folder: Path, env: dict[str, str]) -> Iterator[None]:
    """A node of a cluster that has an empty file system of its own at `folder`."""
    start = [sys.executable, "-m", "ray.scripts.scripts", "start", f"--address={address}"]
    process = subprocess.Popen(
        ["unshare", "-m", "sh", "-c", _SECOND_NODE, "sh", str(folder), *start, "--num-cpus=2",
         "--disable-usage-stats", "--block"],
        env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        yield
    finally:
        process.terminate()
        process.wait(30)


def test_a_run_is_refused_at_its_start_where_a_node_has_another_folder(tmp_path, marked):
    folders = [tmp_path / "shared", tmp_path / "apart"]
    for folder in folders:
        folder.mkdir()
    env = marked[1] | {"RAY_AUTH_MODE": "disabled", "PYTHONPATH": str(Path(__file__).parents[2])}
    with running_cluster(env) as (address, _), second_node(address, folders[1], env):
        asked = subprocess.run(
            [sys.executable, "-c", _START_OF_A_RUN, address, *map(str, folders)],
            env=env, capture_output=True, text=True, timeout=150, check=False, cwd=tmp_path,
        )  # fmt: skip
    assert asked.returncode == 0, asked.stderr[-3000:]
    first, second = asked.stdout.splitlines()
    assert first == "taken"
    assert second.startswith(f"run_config.storage_path = {str(folders[1])!r}: is another folder")
    assert not os.path.exists(folders[1] / "run" / "config.json")
