"""What the parts of a run print is on the terminal, or in a file (cli/parts.py)."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest
import ray
from ray._private import worker

from ray_apr.cli import parts
from ray_apr.cli.quiet import ray_lines_in
from ray_apr.run.training import _speak_on_stdout
from tests.fakes import FakeClock

FILE = Path("runs/mine/ray.log")
HERE = "10.0.0.1"


def printed(*lines: str, actor: str = "RewardWorker", is_err: bool = False, ip: str = HERE):
    return {
        "lines": list(lines), "actor_name": actor, "task_name": None, "pid": 7, "ip": ip,
        "localhost": HERE, "is_err": is_err, "job": "01000000",
    }  # fmt: skip


@pytest.fixture
def told() -> list[str]:
    """Lines of the terminal."""
    return []


@pytest.fixture
def bring(told, monkeypatch):
    """Brings lines as Ray does: by what it finds as its printer when the driver connects."""
    monkeypatch.setattr(ray, "init", lambda: worker.print_to_stdstream)
    before = worker.print_to_stdstream
    with parts.hear_parts(told.append, FILE):
        bring = ray.init()
    assert worker.print_to_stdstream is before
    return lambda data: bring(data, ignore_prefix=False)


def test_what_functions_of_the_user_print_is_shown(bring, told):
    bring(printed("two", "lines"))
    bring(printed("Traceback of theirs", is_err=True))
    bring(printed("a turn", actor="RolloutWorker", ip="10.0.0.2"))
    bring(printed("a loss", actor="RayTrainWorker"))
    assert told == [
        "reward worker: two",
        "reward worker: lines",
        "reward worker: Traceback of theirs",
        "rollout worker, 10.0.0.2: a turn",
        "train worker: a loss",
    ]


@pytest.mark.parametrize(
    ("line", "of"),
    [
        ("INFO 12-01 05:28:04 [core.py:12] vLLM", {"actor": "ServeReplica:run:engine-0"}),
        ("Reporting training result 47", {"actor": "RayTrainWorker", "is_err": True}),
        ("WARNING 2026-12-01 05:34:03,270 serve 4056 -- Failed", {"actor": "Evaluator"}),
        ("INFO 2026-12-01 05:28:04,017 serve 1708 -- Started", {"actor": "RolloutWorker"}),
        ("[2026-12-01 05:27:57,810 E 1771 1837] core_worker.cc:2465", {"actor": "SampleBuffer"}),
        ("E0000 00:00:1701 12 chttp2_transport.cc] ping", {"actor": "RunRecorder"}),
        ("a state", {"actor": "TrainController"}),
    ],
)
def test_what_ray_and_engines_print_is_in_the_file_alone(bring, told, tmp_path, line, of):
    with ray_lines_in(tmp_path / "ray.log"):
        bring(printed(line, **of))
    assert told == []
    assert (tmp_path / "ray.log").read_text().endswith(f"({of['actor']} 7) {line}\n")


def test_lines_of_a_process_that_is_no_actor(bring, told, tmp_path):
    with ray_lines_in(tmp_path / "ray.log"):
        bring({**printed("a line"), "actor_name": None, "pid": "raylet", "ip": "10.0.0.2"})
        bring({**printed("a line"), "actor_name": None, "task_name": "read"})
        bring({**printed("a table"), "actor_name": None, "pid": "autoscaler"})
    assert told == []
    text = (tmp_path / "ray.log").read_text()
    assert "(process raylet, 10.0.0.2) a line" in text and "(read 7) a line" in text
    assert "a table" not in text


def test_a_part_that_prints_much_leaves_room_for_the_run(bring, told, monkeypatch, tmp_path):
    clock = FakeClock()
    monkeypatch.setattr(parts.time, "monotonic", clock)
    with ray_lines_in(tmp_path / "ray.log"):
        for _ in range(3):
            bring(printed(*map(str, range(10))))
    assert len(told) == 21
    assert told[-1] == f"reward worker: more lines of the next 10 s are in {FILE} alone"
    assert (tmp_path / "ray.log").read_text().count("(RewardWorker 7)") == 30
    bring(printed("a turn", actor="RolloutWorker"))
    assert told[-1] == "rollout worker: a turn", "another part's are counted by themselves"
    clock.now += 11
    bring(printed("again"))
    assert told[-1] == "reward worker: again"


def test_with_everything_on_the_terminal_rays_logger_has_the_lines(caplog, monkeypatch):
    monkeypatch.setattr(ray, "init", lambda: worker.print_to_stdstream)
    monkeypatch.setattr(logging.getLogger("ray"), "propagate", True)
    with parts.hear_parts(None, None):
        bring = ray.init()
    with caplog.at_level(logging.INFO, "ray"):
        bring(printed("a line"), ignore_prefix=False)
    assert "(RewardWorker 7) a line" in caplog.text


def test_a_full_disk_costs_one_warning(tmp_path, bring, caplog, capfd, monkeypatch):
    with ray_lines_in(tmp_path / "ray.log"):
        bring(printed("a line"))
        (kept,) = [h for h in logging.getLogger("ray").handlers if hasattr(h, "backupCount")]

        def write(_):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(kept.stream, "write", write, raising=False)
        for _ in range(3):
            bring(printed("a line"))
    assert caplog.text.count("lines of Ray are lost: ") == 1 and "No space left" in caplog.text
    assert "Traceback" not in capfd.readouterr().err


def test_the_file_is_cut(tmp_path, bring, monkeypatch):
    monkeypatch.setattr("ray_apr.cli.quiet._MOST", 1000)
    with ray_lines_in(tmp_path / "ray.log"):
        for _ in range(100):
            bring(printed("x" * 100))
    sizes = {file.name: file.stat().st_size for file in tmp_path.iterdir()}
    assert set(sizes) == {"ray.log", "ray.log.1"} and max(sizes.values()) <= 1000


def test_a_train_worker_speaks_on_stdout_and_ray_train_on_stderr(capsys, monkeypatch):
    """Ray Train has prints as records of the root logger, and shows these on stderr."""
    root = logging.getLogger()
    console = logging.StreamHandler(sys.stderr)
    monkeypatch.setattr(root, "handlers", [console])
    monkeypatch.setattr(root, "level", logging.DEBUG)
    _speak_on_stdout()
    root.info("printed by a loss")
    logging.getLogger("ray_apr.train.recomputation").warning("lower micro_batch_tokens")
    logging.getLogger("ray_apr.train.saving").info("the checkpoint is written")
    logging.getLogger("somebody").warning("of another one")
    out, err = capsys.readouterr()
    assert out == "printed by a loss\nlower micro_batch_tokens\n"
    assert err == "the checkpoint is written\nof another one\n"
