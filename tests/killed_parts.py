"""Runs whose parts are killed one after the other, and what each death costs."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from ray_apr.run.folder import read_rows
from tests.processes import processes_of
from tests.second_node import SecondNode
from tests.whole_runs import start_run

KINDS: Mapping[str, str] = {
    "engine core": "VLLM::EngineCore",
    "replica": "ray::ServeReplica",
    "rollout worker": "ray::RolloutWorker",
    "buffer": "ray::SampleBuffer",
    "recorder": "ray::RunRecorder",
    "evaluator": "ray::Evaluator",
    "reward worker": "ray::RewardWorker",
    "Serve controller": "ray::ServeController",
    "read task": "ReadSampleBuffer",
    "train worker": "ray::RayTrainWorker",
    "train controller": "ray::TrainController",
    "fork server": "ray_apr.compat.forked.server",
    "driver": "",
    "raylet": "",
}
"""Each kind of process, and what its command line has. The driver is known by its pid, the raylet
by its node, which is the second one of a cluster."""
SMALL = (
    "train.batch_size=32", "rollout.group_size=4", "rollout.max_response_tokens=96",
    "rollout.num_replicas=2", "scaling={num_workers: 1, use_gpu: false}", "run.resume=true",
    "run.max_failures=-1", "train.checkpoint_every=8",
)  # fmt: skip
"""The arithmetic example in small steps, on two engines and one train worker."""
_POLL_S = 0.05
STEP_LIMIT_S = 240.0


@dataclass(slots=True)
class KilledRun:
    """A run of the command line, which is started again if its driver is killed.

    Args:
        folder: Of runs; the run's is ``run`` in it.
        mark: Of its processes.
        env: With the mark.
        overrides: Its settings.
        node: The second one of its cluster, where the run has not a cluster of its own; it is
            started again if its raylet is killed.
    """

    folder: Path
    mark: str
    env: dict[str, str]
    overrides: tuple[str, ...]
    node: SecondNode | None = None
    said: list[str] = field(default_factory=list)
    _process: subprocess.Popen[str] | None = None
    _reader: threading.Thread | None = None

    def start(self) -> None:
        """Start the command, from where the run stands."""
        self._process = start_run(self.folder, self.env, *self.overrides)
        self._reader = threading.Thread(target=self._read, args=(self._process,), daemon=True)
        self._reader.start()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self.said.append(line)

    @property
    def times(self) -> list[float]:
        """Seconds of the run at which each step that its folder has was trained."""
        return [row["time_s"] for row in read_rows(self.folder / "run" / "metrics.jsonl")]

    def wait_for_step(self, step: int, limit_s: float = STEP_LIMIT_S) -> None:
        """Wait until the folder has so many steps; for `limit_s` for each of them.

        Raises:
            AssertionError: If none comes for too long, or the command ends.
        """
        deadline, reached = time.monotonic() + limit_s, 0
        while (now := len(self.times)) < step:
            if now > reached:
                reached, deadline = now, time.monotonic() + limit_s
            assert self._process is not None and time.monotonic() < deadline, self.tail
            assert self._process.poll() is None, self.tail
            time.sleep(_POLL_S)

    def wait_for(self, kind: str, limit_s: float = STEP_LIMIT_S) -> None:
        """Wait until it has a process of a kind.

        Raises:
            AssertionError: If none comes.
        """
        deadline = time.monotonic() + limit_s
        while not self.pids(kind):
            assert self.is_alive and time.monotonic() < deadline, self.tail
            time.sleep(_POLL_S)

    @property
    def tail(self) -> str:
        """The last that the command said."""
        return "".join(self.said[-60:])

    def pids(self, kind: str) -> list[int]:
        """Its processes of a kind."""
        assert self._process is not None
        if kind == "driver":
            return [self._process.pid]
        if kind == "raylet":
            return [] if self.node is None else self.node.raylets()
        return [pid for pid, name in processes_of(self.mark).items() if KINDS[kind] in name]

    @property
    def is_alive(self) -> bool:
        """Whether the command runs."""
        return self._process is not None and self._process.poll() is None

    def interrupt(self) -> None:
        """Have it stop, as Ctrl-C does."""
        assert self._process is not None
        self._process.send_signal(signal.SIGINT)

    def kill(self, kind: str, number: int = 0) -> bool:
        """Kill -9 one process of a kind, in the order of their starts; whether there was one. A
        driver and a node that are dead are started anew."""
        pids = sorted(self.pids(kind), key=_start_time)
        if not pids:
            return False
        try:
            os.kill(pids[number % len(pids)], signal.SIGKILL)
        except ProcessLookupError:
            return False
        if kind == "driver":
            assert self._process is not None
            self._process.wait(60)
            self.start()
        if kind == "raylet" and self.node is not None:
            self.node.start()
        return True

    def kill_all(self, kind: str) -> int:
        """Kill -9 all processes of a kind at one moment; returns how many there were."""
        pids = self.pids(kind)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        return len(pids)

    def end(self, limit_s: float) -> int:
        """Wait for the end; returns the exit code."""
        assert self._process is not None and self._reader is not None
        code = self._process.wait(limit_s)
        self._reader.join(10)
        return code


def _start_time(pid: int) -> float:
    """Seconds since the epoch; 0 of a process that is gone."""
    try:
        return psutil.Process(pid).create_time()
    except psutil.NoSuchProcess:
        return 0.0
