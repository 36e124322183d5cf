"""What trackers have of a run, read back from their own files: (name, step) -> value."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from ray_apr.core.user import RunCallback
from ray_apr.run.callbacks import Checkpoints, Followed, Kept


class Together:
    """Callbacks that follow a run folder one after the other, in the thread of the test."""

    def __init__(
        self, folder: Path, callbacks: Sequence[RunCallback], checkpoints: Checkpoints
    ) -> None:
        kept = Kept(folder)
        self.callbacks = callbacks
        self._each = [Followed(folder, one, kept, checkpoints) for one in callbacks]

    def start(self, name: str, config: dict[str, Any]) -> None:
        for followed in self._each:
            followed.start(name, config)

    def look(self, *, is_end: bool = False) -> None:
        for followed in self._each:
            followed.look(is_end=is_end)

    def end(self) -> None:
        for followed in self._each:
            followed.end()

    @property
    def failed(self) -> set[str]:
        """Methods that have raised."""
        return {verb for followed in self._each for verb in followed._failed}


def read_wandb(folder: Path) -> dict[Any, Any]:
    """Of the offline runs of a run folder, by each series' own axis."""
    found: dict[Any, Any] = {}
    ids = set()
    for record in _wandb_records(folder):
        if record.WhichOneof("record_type") == "run":
            ids.add(record.run.run_id)
        if record.WhichOneof("record_type") != "history":
            continue
        row = _history(record)
        step, prefix = row.get("step"), ""
        if "evaluation/policy_version" in row:
            step, prefix = row["evaluation/policy_version"], "evaluation/"
        found.update({(n, step): v for n, v in row.items() if n.startswith(prefix)})
    return {**found, "num_ids": len(ids)}


def wandb_history(folder: Path) -> list[dict[str, Any]]:
    """What the offline runs of a folder have logged, in order."""
    kinds = ((record, record.WhichOneof("record_type")) for record in _wandb_records(folder))
    return [_history(record) for record, kind in kinds if kind == "history"]


def _wandb_records(folder: Path) -> Iterator[Any]:
    """Of runs that were told to finish, which W&B's own process may still be writing then."""
    from wandb.proto.wandb_internal_pb2 import Record

    deadline = time.monotonic() + 20
    while True:
        logs = [
            [Record.FromString(data) for data in _log_records(file.read_bytes())]
            for file in sorted((folder / "wandb").glob("offline-run-*/run-*.wandb"))
        ]
        if logs and all(log and log[-1].WhichOneof("record_type") == "exit" for log in logs):
            return chain.from_iterable(logs)
        assert time.monotonic() < deadline, f"W&B has not written all of its runs in {folder}"
        time.sleep(0.05)


def _history(record: Any) -> dict[str, Any]:
    return {
        "/".join(item.nested_key) or item.key: json.loads(item.value_json)
        for item in record.history.item
    }


def _log_records(log: bytes) -> Iterator[bytes]:
    """Whole records of a log in LevelDB's format: blocks of 32 KiB, in which a part of a record
    has its checksum (4 bytes), its length (2) and its kind (1) before it; W&B has 7 bytes of its
    own at the begin."""
    block, head, whole, first = 32768, 7, 1, 2
    at, parts = head, b""
    while at + head <= len(log):
        if block - at % block < head:
            at += block - at % block
            continue
        size, kind = int.from_bytes(log[at + 4 : at + 6], "little"), log[at + 6]
        data = log[at + head : at + head + size]
        if len(data) < size:
            return  # it is still being written
        parts = data if kind in (whole, first) else parts + data
        at += head + size
        if kind not in (first, 3):
            yield parts


def read_mlflow(folder: Path) -> dict[Any, Any]:
    """Of the only run of a store beside the run folder."""
    from mlflow.artifacts import load_text
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{folder.parent}/m.db")
    experiment = client.get_experiment_by_name("e")
    runs = client.search_runs([experiment.experiment_id])
    run = runs[0]
    found: dict[Any, Any] = {
        "num_runs": len(runs), "status": run.info.status, "name": run.info.run_name,
    }  # fmt: skip
    for name in run.data.metrics:
        history = client.get_metric_history(run.info.run_id, name)
        found["count", name] = len(history)
        found.update({(name, metric.step): metric.value for metric in history})
    found.update({("tag", name): text for name, text in run.data.tags.items()})
    found.update({("param", name): text for name, text in run.data.params.items()})
    for file in client.list_artifacts(run.info.run_id, "samples"):
        step = int(Path(file.path).stem.removeprefix("step-"))
        text = load_text(f"{run.info.artifact_uri}/{file.path}")
        found["samples", step] = json.loads(text)
    return found


def read_tensorboard(folder: Path, name: str = "tensorboard") -> dict[Any, Any]:
    """Of all event files of a folder of a run folder."""
    from tensorboardX.proto.event_pb2 import Event

    found: dict[Any, Any] = {}
    for file in sorted((folder / name).glob("events.*")):
        data, at = file.read_bytes(), 0
        while at < len(data):  # a record: length, its checksum (4), the event, its checksum (4)
            size = int.from_bytes(data[at : at + 8], "little")
            event = Event.FromString(data[at + 12 : at + 12 + size])
            at += 16 + size
            for value in event.summary.value:
                if value.HasField("simple_value"):
                    found[value.tag, event.step] = value.simple_value
                else:
                    name = value.tag.removesuffix("/text_summary")
                    found[name, event.step] = value.tensor.string_val[0].decode()
    return found
