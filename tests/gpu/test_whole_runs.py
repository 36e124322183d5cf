"""Runs on GPUs, killed and in turns: no process and no GPU memory stays behind.

A cluster that lives on, as a user's does, shows what a run leaves; its own end would hide it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time

import pytest
import torch

from ray_apr.cli.main import main
from ray_apr.run.folder import read_rows
from tests.engine_kills import kill_a_core, sync_of
from tests.processes import kill_all, marked_environment, processes_of
from tests.tiny_model import make_tiny_model
from tests.whole_runs import command, fail_by_killing, running_cluster, start_run

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]

ON_GPUS = (
    "rollout.engine.device=cuda", "rollout.num_replicas=1",
    "rollout.engine.dtype=float32", "train.param_dtype=float32",
    "scaling={num_workers: 1, use_gpu: true}",
    "train.steps=1000", "train.compile=false", "train.weight_sync_timeout_s=30",
    "rollout.engine.kwargs={max_num_seqs: 64, enforce_eager: true, gpu_memory_utilization: 0.2,"
    " kv_cache_memory_bytes: 2000000000}",
)  # fmt: skip


def used_memory() -> int:
    """MiB in use on all GPUs that are visible here, whoever uses it."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        query.append(f"--id={visible}")
    found = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
    return sum(int(line) for line in found.stdout.split())


def check_memory_is_free(before: int, *marks: str) -> None:
    deadline = time.monotonic() + 30
    while used_memory() > before + 50 and time.monotonic() < deadline:
        time.sleep(1)
    assert used_memory() <= before + 50, [processes_of(mark) for mark in marks]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_killed_train_worker_ends_its_run_and_frees_the_gpus(tmp_path):
    mark, env = marked_environment()
    before, seen = used_memory(), []
    try:
        with running_cluster(env) as (address, _):
            fail_by_killing(
                "RayTrainWorker", tmp_path, address, env, *ON_GPUS,
                before=lambda: seen.append(used_memory()),
            )  # fmt: skip
            assert min(seen) > before + 1000, "engine and trainer were there"
            check_memory_is_free(before, mark)
    finally:
        kill_all(mark)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_an_engine_killed_inside_of_a_broadcast_does_not_hang_the_trainer(tmp_path):
    """NCCL itself waits for ever for a rank that has died."""
    model = make_tiny_model(tmp_path / "model", hidden_size=1024, num_layers=100)
    mark, env = marked_environment()
    before = used_memory()
    try:
        with running_cluster(env) as (address, _):
            env |= {"RAY_AUTH_MODE": "disabled", "RAY_ADDRESS": address}
            many = ("train.weight_bucket_mb=0.1", f"model={model}")  # a thousand broadcasts a sync
            run = start_run(tmp_path, env, *ON_GPUS, *many, log=tmp_path / "log.txt")
            kill = kill_a_core(mark, tmp_path / "run", after_step=3, delay_s=0.05, num_engines=1)
            deadline, metrics = time.monotonic() + 240, tmp_path / "run" / "metrics.jsonl"
            reached = len(read_rows(metrics))
            while len(read_rows(metrics)) < reached + 5 and time.monotonic() < deadline:
                time.sleep(0.5)
            run.send_signal(signal.SIGTERM)
            run.wait(90)
        final = json.loads((tmp_path / "run" / "final.json").read_text())
        assert (run.returncode, final["status"], final["ledger_error"]) == (143, "stopped", 0)
        assert len(read_rows(metrics)) >= reached + 5, "it goes on with the engine that follows"
        assert sync_of(kill, tmp_path / "run") is not None, f"it missed the sync: {kill}"
        check_memory_is_free(before, mark)
    finally:
        kill_all(mark)


@pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a CUDA device")
@pytest.mark.parametrize("sleep", ["true", "false"])
def test_engines_and_train_workers_are_on_the_same_gpus(tmp_path, sleep):
    mark, env = marked_environment()
    before, gpus = used_memory(), torch.cuda.device_count()
    shared = (
        *ON_GPUS, "mode=sync", "rollout.engine.placement=colocated", f"rollout.num_replicas={gpus}",
        f"rollout.engine.sleep={sleep}",
        f"scaling={{num_workers: {gpus}, use_gpu: true}}", "train.steps=4",
        "train.checkpoint_every=2", "ray.num_cpus=16",
    )  # fmt: skip
    try:
        run = subprocess.run(
            command(tmp_path, *shared), env=env, capture_output=True, text=True, cwd=tmp_path,
            timeout=350, check=False,
        )  # fmt: skip
        assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]
        final = json.loads((tmp_path / "run" / "final.json").read_text())
        assert (final["status"], final["ledger_error"]) == ("ok", 0)
        assert [engine["policy_version"] for engine in final["engines"]] == [3] * gpus
        steps = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
        gaps = [json.loads(row)["kl_k3"] for row in steps]
        assert len(gaps) == 4 and max(gaps) < 1e-4, "engines generate with the trainer's weights"
        check_memory_is_free(before, mark)
    finally:
        kill_all(mark)


@pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a CUDA device")
def test_a_killed_process_of_checkpoints_costs_no_checkpoint(tmp_path):
    mark, env = marked_environment()
    gpus = torch.cuda.device_count()
    settings = (
        *ON_GPUS, "rollout.engine.placement=colocated", "rollout.engine.sleep=false",
        f"rollout.num_replicas={gpus}", f"scaling={{num_workers: {gpus}, use_gpu: true}}",
        "train.steps=40", "train.checkpoint_every=4", "ray.num_cpus=16",
    )  # fmt: skip
    try:
        run = start_run(tmp_path, env, *settings, log=tmp_path / "log.txt")
        deadline, writers = time.monotonic() + 240, list[int]()
        while len(writers) < gpus and time.monotonic() < deadline:
            time.sleep(0.2)
            writers = [pid for pid, said in processes_of(mark).items() if "state_files" in said]
        for pid in writers:
            os.kill(pid, signal.SIGKILL)
        reached = len(read_rows(tmp_path / "run" / "metrics.jsonl"))
        code, said = run.wait(240), (tmp_path / "log.txt").read_text()
        assert code == 0, said[-4000:]
        assert len(writers) == gpus and reached < 36, "checkpoints followed"
        assert main(["verify", str(tmp_path / "run")]) == 0
    finally:
        kill_all(mark)
