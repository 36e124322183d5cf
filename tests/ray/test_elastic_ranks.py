"""A run whose train workers become 1 and 2 again trains what a fixed number of them trains."""

from __future__ import annotations

import dataclasses
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ray_apr.cli.launch import read_prompts, trainer_arguments
from ray_apr.cli.replay import replay_run
from ray_apr.cli.resume import settings_of_run
from ray_apr.data.resumption import Begin
from ray_apr.run.folder import read_rows
from ray_apr.run.journals import with_journal
from ray_apr.run.options import RunOptions
from ray_apr.run.replaying import batches_since
from ray_apr.run.training import what_is_trained
from ray_apr.train.spec import LearnerSpec
from tests.rank_steps import Trained, train_on
from tests.resumed_runs import check_run, run_once

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.long, pytest.mark.timeout(600)]

STEPS = 12
SETTINGS = (
    "mode=apr", f"train.steps={STEPS}", "train.checkpoint_every=2",
    "train.num_checkpoints_to_keep=6", "scaling={num_workers: [1, 2], use_gpu: false}",
)  # fmt: skip


def test_two_one_and_two_train_workers_train_what_one_or_two_do(tmp_path, marked, monkeypatch):
    _, env = marked
    folder = tmp_path / "run"
    for num_cpus, stop_at in ((5, 4), (3, 8), (5, None)):
        run_once(
            tmp_path, env, *SETTINGS, f"ray.num_cpus={num_cpus}", stop_at=stop_at,
            kill=signal.SIGKILL,
        )  # fmt: skip
    check_run(folder, steps=STEPS, resumes=2)
    ranks = read_rows(folder / "ranks.jsonl")
    assert [row["num_train_workers"] for row in ranks] == [2, 1, 2]
    monkeypatch.chdir(tmp_path)  # it goes to where the command was given
    rows = read_rows(folder / "metrics.jsonl")
    exported = load_file(next(folder.glob("checkpoint_*/hf/model.safetensors")))
    for number in (1, 2):
        fixed = trained_by(number, folder, tmp_path / f"fixed-{number}")
        for row, figures in zip(rows, fixed.figures, strict=True):
            for name in ("loss", "grad_norm", "entropy", "kl_k3"):
                assert row[name] == pytest.approx(figures[name], abs=1e-5), (number, row["step"])
        for name, weight in fixed.weights.items():
            assert torch.allclose(exported[name], weight, rtol=0, atol=1e-5), (number, name)
    for again in (ranks[1]["step"] - 1, ranks[2]["step"] - 1, STEPS - 1):
        assert replay_run(folder, again).is_same, again


def trained_by(number: int, folder: Path, out: Path) -> Trained:
    """All steps of a run once more, with a fixed number of train workers."""
    settings = settings_of_run(folder)
    prompts = read_prompts(settings.prompts)
    spec = RunOptions(prompts=prompts, **trainer_arguments(settings)).spec
    spec = spec.on_devices(has_gpus=False)
    begin = with_journal(spec, Begin(), first=0)
    scaling = dataclasses.replace(spec.scaling, num_workers=number)
    spec = dataclasses.replace(spec, scaling=scaling)
    batches = batches_since(begin, spec, prompts, STEPS - 1)
    assert len(batches) == STEPS
    learner = LearnerSpec(**what_is_trained(spec))
    return train_on(number, out, learner, [batch.rows for batch in batches])
