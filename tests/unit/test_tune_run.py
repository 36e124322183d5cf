"""Which machine `ray_apr tune` and `simulate` have, and that they say it."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest

from ray_apr.cli.main import main
from ray_apr.core.exceptions import ConfigError
from ray_apr.tools.report.load import RunData
from ray_apr.tools.simulator import commands
from ray_apr.tools.simulator.commands import cluster_to_tune
from ray_apr.tools.simulator.measured import RUN_NOTE
from tests.unit.test_diagnosis import GROUPS, SIZE, SLOW, run_of, simulated


def write(run: RunData, folder: Path) -> Path:
    tables = {"metrics": run.steps, "samples": run.samples, "timeline": run.timeline}
    for name, rows in tables.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, values in (("config", run.config), ("final", run.final)):
        (folder / f"{name}.json").write_text(json.dumps(values))
    return folder


def test_a_run_is_tuned_on_its_own_machine(tmp_path, capsys):
    """known fault: 16 GPUs were assumed, and not told: 15 train workers for a run on two cores."""
    run, machine = simulated(SLOW)
    folder = write(run, tmp_path)
    assert main(["tune", "--run", str(folder), "--json"]) == 0
    tuned = json.loads(capsys.readouterr().out)
    engines, workers = (
        tuned["settings"][section][key]
        for section, key in (("rollout", "num_replicas"), ("scaling", "num_workers"))
    )
    assert engines + workers == machine.gpus == 3
    told = f"its rows: 3 GPUs, 2 of them for engines .* steps of {GROUPS} prompts x {SIZE} samples"
    lines = [line for line in tuned["why"] if line.startswith("cluster: that of the run")]
    assert len(lines) == 1
    assert re.search(told, lines[0])


@pytest.mark.parametrize(("mode", "bound"), [("sync", 0), ("one_step_off", 1), ("apr", 4)])
def test_what_may_be_old_is_that_of_the_mode(monkeypatch, tmp_path, mode, bound):
    asked = []

    def tuner(*_, max_staleness, **__):
        asked.append(max_staleness)
        raise ConfigError("mode", mode, "is enough")

    monkeypatch.setattr(commands, "Tuner", tuner)
    folder = write(simulated(SLOW)[0], tmp_path)
    for more in ([], ["--max-staleness", "3"]):
        assert main(["tune", "--run", str(folder), "--mode", mode, *more]) == 2
    assert asked == [bound, 3]


def test_the_split_of_a_runs_machine_is_searched_over_few_steps(monkeypatch):
    run, _ = simulated(SLOW)
    monkeypatch.setattr(commands, "steps_to_simulate", lambda cluster: 20)
    cluster, _ = cluster_to_tune(run)
    assert (cluster.gpus, cluster.rollout_gpus, cluster.steps) == (3, None, 20)


def test_a_run_that_cannot_tell_its_machine_says_what_is_assumed():
    run, _ = simulated(SLOW)
    short = dataclasses.replace(run, steps=run.steps[:5])
    for other, why in (
        (short, r"too short to simulate"),
        (run_of(placement="colocated"), "on the same GPUs"),
    ):
        cluster, told = cluster_to_tune(other)
        assert cluster.gpus == 16
        assert told.startswith("cluster: assumed, as --cluster FILE is not given: 16 GPUs")
        assert why in told


def test_without_a_cluster_the_assumed_one_is_a_line(tmp_path, capsys):
    trace = tmp_path / "trace.jsonl"
    row = {"prompt_tokens": 8, "response_tokens": 16, "reward_s": 0.0}
    rows = [{"prompt_id": f"p{p}", "sample_index": i, **row} for p in range(64) for i in range(8)]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["simulate", str(trace)]) == 0
    assert capsys.readouterr().out.startswith("cluster: assumed, as --cluster FILE is not given")
    cluster = tmp_path / "cluster.json"
    cluster.write_text(json.dumps({"gpus": 4}))
    assert main(["simulate", str(trace), "--cluster", str(cluster)]) == 0
    assert "assumed" not in capsys.readouterr().out


def test_a_run_is_simulated_in_place_of_a_trace(tmp_path, capsys):
    folder = write(simulated(SLOW)[0], tmp_path)
    assert main(["simulate", "--run", str(folder), "--mode", "sync"]) == 0
    told = capsys.readouterr().out
    assert (
        told.startswith("cluster: that of the run") and "lengths are those of the samples" in told
    )
    assert main(["simulate", "--run", str(folder), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["mode"] == "apr"
    cluster, lengths = result["notes"]  # known fault: they were in the text alone
    assert "2 of them for engines" in cluster and "any split is tried" in cluster, "in its place"
    assert cluster.startswith("cluster: that of the run") and lengths == RUN_NOTE


def test_without_a_trace_it_is_said_where_one_is_to_be_had(capsys):
    """known fault: that a run's folder has the lengths was known to nobody who had only that."""
    for command in ("simulate", "tune"):
        assert main([command]) == 2
        said = capsys.readouterr().err
        assert "error: --trace = None: is missing; give a file" in said
        assert "a row for each sample (prompt_id, " in said
        assert "or by --run the folder of a run that has trained" in said
