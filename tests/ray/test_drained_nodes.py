"""Runs on two nodes, of which one is drained, as by a spot notice."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ray_apr.run.folder import read_rows
from tests.killed_parts import SMALL, KilledRun
from tests.second_node import SecondNode
from tests.whole_runs import running_cluster

pytestmark = [
    pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow, pytest.mark.long,
    pytest.mark.timeout(540),
]  # fmt: skip

ENGINE = "rollout.engine.num_cpus_per_replica=3"
"""Each node has room for one of them at most."""
NOTICE_S = 40
_GIVES_BACK_S = 12.0
"""Within this time nothing is generated any more on a node that is drained."""


@contextlib.contextmanager
def two_nodes(
    tmp_path: Path, marked, *settings: str, num_cpus: tuple[int, int], holds: bool = False
) -> Iterator[tuple[KilledRun, Callable[..., SecondNode]]]:
    """A run on a cluster of two nodes, and what makes further ones.

    Args:
        tmp_path: Of the run.
        marked: Mark and environment.
        settings: Of the run.
        num_cpus: Of the first node, which has the driver, and of each other one.
        holds: Whether all train workers are on the first node.
    """
    mark, env = marked
    with running_cluster(env, num_cpus=num_cpus[0]) as (address, _):
        env = {**env, "RAY_AUTH_MODE": "disabled"}

        def add(number: int) -> SecondNode:
            own_address = f"127.0.0.{number}"
            node = SecondNode(address, env, num_cpus=num_cpus[1], own_address=own_address)
            node.start()
            node.wait_until_started()
            return node

        node = add(2)
        held = node.held() if holds else contextlib.nullcontext()
        run = KilledRun(
            tmp_path, mark, {**env, "RAY_ADDRESS": address},
            (*SMALL, "train.steps=1000", "run.max_failures=0", *settings), node,
        )  # fmt: skip
        try:
            with held:
                run.start()
                run.wait_for("train worker")
            run.wait_for_step(5)
            yield run, add
        finally:
            if run.is_alive:
                run.interrupt()
                run.end(120)


def notice_of(folder: Path) -> dict:
    deadline = time.monotonic() + 20
    while not (rows := read_rows(folder / "notices.jsonl")):
        assert time.monotonic() < deadline, "nobody has noticed"
        time.sleep(0.2)
    (row,) = rows
    assert 0 < row["left_s"] <= NOTICE_S
    return row


def check(run: KilledRun) -> dict:
    """That a run which is stopped has lost nothing."""
    run.interrupt()
    assert run.end(120) == 130, run.tail
    final = json.loads((run.folder / "run" / "final.json").read_text())
    assert (final["ledger_error"], final["tokens_discarded"].get("lost", 0)) == (0, 0)
    assert not read_rows(run.folder / "run" / "restarts.jsonl")
    return final


def spans(folder: Path, what: str) -> dict[str, list[dict]]:
    """Of each engine."""
    found: dict[str, list[dict]] = {}
    for row in read_rows(folder / "timeline.jsonl"):
        if row["actor"].startswith("engine-") and row["what"] == what:
            found.setdefault(row["actor"], []).append(row)
    return found


def test_the_tokens_of_a_drained_engine_leave_in_time_and_the_other_one_goes_on(tmp_path, marked):
    folder = tmp_path / "run"
    with two_nodes(tmp_path, marked, ENGINE, num_cpus=(5, 3), holds=True) as (run, _):
        assert run.node is not None
        run.node.drain(NOTICE_S)
        notice = notice_of(folder)
        assert len(notice["engines"]) == 1 and notice["num_train_workers"] == 0
        time.sleep(NOTICE_S)
        run.wait_for_step(len(run.times) + 5)
        check(run)
    generated = spans(folder, "generate")
    last = {engine: max(span["end_s"] for span in all_) for engine, all_ in generated.items()}
    gone, stays = sorted(last, key=lambda engine: last[engine])
    assert last[gone] < notice["time_s"] + _GIVES_BACK_S, last
    assert last[stays] > notice["time_s"] + NOTICE_S, last
    paused = [span["end_s"] - span["start_s"] for span in spans(folder, "paused")[stays]]
    assert max(paused) < 5.0, "no longer than a sync"


def test_the_tokens_of_the_only_engine_wait_for_the_next_one(tmp_path, marked):
    settings = (ENGINE, "rollout.num_replicas=1")
    folder = tmp_path / "run"
    with two_nodes(tmp_path, marked, *settings, num_cpus=(2, 3), holds=True) as (run, add):
        assert run.node is not None
        run.node.drain(NOTICE_S)
        notice = notice_of(folder)
        assert notice["engines"] == ["engine-0"]
        time.sleep(_GIVES_BACK_S + 3)
        add(3)
        run.wait_for_step(len(run.times) + 5)
        final = check(run)
    assert len(final["engines"]) == 2
    first, second = spans(folder, "generate").values()
    assert max(span["end_s"] for span in first) < notice["time_s"] + _GIVES_BACK_S
    assert min(span["start_s"] for span in second) > notice["time_s"] + _GIVES_BACK_S


def test_train_workers_leave_a_drained_node_with_a_checkpoint(tmp_path, marked):
    scaling = "scaling={num_workers: [1, 2], use_gpu: false, num_cpus_per_worker: 2}"
    settings = (scaling, "rollout.num_replicas=1", "train.checkpoint_every=50")
    folder = tmp_path / "run"
    with two_nodes(tmp_path, marked, *settings, num_cpus=(3, 3)) as (run, _):
        assert run.node is not None
        run.node.drain(2 * NOTICE_S)
        deadline = time.monotonic() + 2 * NOTICE_S
        while len(ranks := read_rows(folder / "ranks.jsonl")) < 2:
            assert time.monotonic() < deadline, run.tail
            time.sleep(0.5)
        (notice,) = read_rows(folder / "notices.jsonl")
        assert notice["num_train_workers"] == 1
        for pid in run.node.raylets():
            os.kill(pid, signal.SIGKILL)
        run.wait_for_step(len(run.times) + 5)
        run.interrupt()
        assert run.end(120) == 130, run.tail
    assert [row["num_train_workers"] for row in ranks] == [2, 1]
    (resumed,) = read_rows(folder / "resumes.jsonl")
    assert resumed["steps_repeated"] <= 12 and resumed["tokens_lost"] == 0
    final = json.loads((folder / "final.json").read_text())
    assert final["ledger_error"] == 0
