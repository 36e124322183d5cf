"""What Ray says of a run is in a file, and warnings are in both places."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest
import ray.data
import ray.serve

from ray_apr.cli.quiet import ray_lines_in


def handlers():
    names = ("ray", "ray.data", "ray.serve")
    return [(h, h.level) for name in names for h in logging.getLogger(name).handlers]


def test_rays_lines_go_to_a_file_and_warnings_to_the_terminal_too(tmp_path, capfd):
    file, before = tmp_path / "run" / "ray.log", handlers()
    context = ray.data.DataContext.get_current()
    had_bars = context.enable_progress_bars
    with ray_lines_in(file):
        assert not context.enable_progress_bars
        assert not file.exists(), "no line, no folder"
        for name in ("ray.data.x", "ray.serve", "ray._private.worker"):
            logging.getLogger(name).info("a word of %s", name)
            logging.getLogger(name).warning("a warning of %s", name)
        logging.getLogger("ray.data.x").debug("a detail")
        logging.getLogger("ray.data.x").warning("Progress bars disabled. To enable, set ...")
    for name in ("ray.data.x", "ray.serve", "ray._private.worker"):
        logging.getLogger(name).info("later, of %s", name)
    err = capfd.readouterr().err
    text = file.read_text()
    for name in ("ray.data.x", "ray.serve", "ray._private.worker"):
        assert text.count(f"a word of {name}\n") == 1 and f"a word of {name}" not in err
        assert f"a warning of {name}" in text and f"later, of {name}" not in text
    assert "a detail" not in text and "Progress bars" in text and "Progress bars" not in err
    assert handlers() == before and context.enable_progress_bars == had_bars


@pytest.mark.parametrize(
    ("line", "is_shown"),
    [
        ("WARNING: 8 PYTHON worker processes have been started on node: ab with address: 1", False),
        ("Task ServeController.graceful_shutdown failed. There are infinite retries remaining, so",
         False),
        ("Task RunRecorder.hold failed. There are infinite retries remaining, so", False),
        ("Task RunRecorder.follow failed. There are infinite retries remaining, so", True),
        ("Task RolloutWorker.start failed. There are infinite retries remaining, so", True),
        ("a worker died", True),
    ],
)  # fmt: skip
def test_lines_of_rays_daemons_that_mean_nothing_are_not_printed(line, is_shown):
    code = (
        "from ray_apr.cli.main import main; import sys; main(['init', '/dev/null']); "
        "assert 'ray' not in sys.modules; from ray._private.worker import print_to_stdstream as p; "
        f"p({{'lines': [{line!r}], 'pid': 'raylet', 'is_err': False}}, ignore_prefix=False)"
    )
    said = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert (line in said.stdout) == is_shown, said


def test_ray_datas_own_file_of_the_session_keeps_its_details(tmp_path):
    """known fault: it got warnings alone, while Ray Data's messages name it for all that it did."""
    (own,) = [
        handler for handler, _ in handlers() if type(handler).__name__ == "SessionFileHandler"
    ]
    before = (own.level, list(own.filters))
    with ray_lines_in(tmp_path / "ray.log"):
        assert (own.level, list(own.filters)) == before


def test_a_folder_that_cannot_be_made_is_no_error_of_ray(tmp_path, caplog):
    """known fault: `ray.init` raised it, which was told as a cluster that cannot be joined."""
    (tmp_path / "file").touch()
    with ray_lines_in(tmp_path / "file" / "run" / "ray.log"):
        for _ in range(2):
            logging.getLogger("ray").info("Started a local Ray instance.")
    assert caplog.text.count("Ray's lines are not kept: ") == 1
