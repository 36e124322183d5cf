"""W&B, MLflow and TensorBoard have what the run folder has (trackers/)."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import time
import types
from pathlib import Path

import mlflow.entities
import mlflow.tracking
import pytest

from ray_apr.config.trackers import MLflowConfig, TrackersConfig
from ray_apr.core.exceptions import ConfigError
from ray_apr.core.user import RunCallback, RunInfo
from ray_apr.run.folder import add_row
from ray_apr.trackers import trackers_of
from ray_apr.trackers.mlflow import MLflowTracker, metric_name
from ray_apr.trackers.rows import SampleTables, numbers, texts
from tests.tracked import Together, read_mlflow, read_tensorboard, read_wandb, wandb_history
from tests.unit.test_trained_samples import FIRST, SECOND, save

ROWS = [
    {
        "step": k, "policy_version": k + 1, "time_s": 0.1 + k, "reward_mean": 1 / (k + 3),
        "reward/form (a)_mean": 0.25 * k, "is_late": k == 2, "engines": 2,
        "waiting_for": "rewards" if k else "", "phases": {"gather": 0.5, "what": "all"},
        "quantiles": [0.1, 0.9], "nothing": None,
    }
    for k in range(4)
]  # fmt: skip
EVALUATION = {"policy_version": 2, "reward_mean": 0.5, "pass_at_k": {"1": 0.4, "2": 0.7}}
CONFIG = {"model": "a/b", "train": {"steps": 4, "learning_rate": 1e-6}}


def make_folder(where: Path) -> Path:
    """A run folder with samples of two steps."""
    run = where / "run"
    run.mkdir()
    for step in (0, 1, 3):
        save(run, step, FIRST, SECOND)
    return run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_folder(tmp_path)


@pytest.fixture(scope="module")
def tracked(tmp_path_factory) -> Path:
    """The folder of a run that all three trackers followed."""
    folder = make_folder(tmp_path_factory.mktemp("tracked"))
    track(folder, ROWS)
    return folder


def config(folder: Path, *kinds: str) -> TrackersConfig:
    given = {
        "wandb": {"mode": "offline", "project": "p"},
        "mlflow": {"tracking_uri": f"sqlite:///{folder.parent}/m.db", "experiment": "e"},
        "tensorboard": {},
    }
    kinds = kinds or tuple(given)
    return TrackersConfig(**{name: given[name] for name in kinds}, samples_every=1, samples_each=1)


def track(folder: Path, rows, *kinds: str, status: str | None = "ok") -> None:
    """Follow a run to the end of these rows; without a status its process dies there."""
    with contextlib.chdir(folder.parent):  # MLflow keeps artifacts where it is called
        _track(folder, rows, *kinds, status=status)


def _track(folder: Path, rows, *kinds: str, status: str | None) -> None:
    followed = Together(folder, trackers_of(config(folder, *kinds)), lambda: ())
    followed.start("run", CONFIG)
    for row in rows:
        add_row(folder / "metrics.jsonl", row)
    add_row(folder / "evaluations.jsonl", EVALUATION)
    followed.look()
    assert not followed.failed
    if status is None:
        for tracker in followed.callbacks:
            if tracker.name == "wandb":
                tracker._run.finish()  # what it has sent stays, as with a process that dies
        return
    (folder / "final.json").write_text(json.dumps({"status": status, "steps": len(rows)}))
    followed.look(is_end=True)
    followed.end()
    assert not followed.failed


def board_name(name: str) -> str:
    """A name as TensorBoard's writer takes it."""
    return re.sub(r"[^-/\w.]", "_", name)


def test_all_three_have_every_key_of_every_step(tracked):
    wandb, mlflow, board = read_wandb(tracked), read_mlflow(tracked), read_tensorboard(tracked)
    for row in ROWS:
        for name, value in numbers(row):
            series = (name, row["step"])
            assert wandb[series] == value, series
            assert mlflow[metric_name(name), row["step"]] == value, series
            assert board[board_name(name), row["step"]] == pytest.approx(value, rel=1e-6), series
        for name, text in texts(row):
            assert wandb[name, row["step"]] == text
            assert board[name, row["step"]] == text
    for name, value in numbers(EVALUATION, "evaluation/"):
        assert wandb[name, 2] == mlflow[name, 2] == value
        assert board[name, 2] == pytest.approx(value)
    assert mlflow["tag", "waiting_for"] == "rewards", "the last one"
    assert mlflow["param", "train.learning_rate"] == "1e-06"
    assert (mlflow["status"], mlflow["name"]) == ("FINISHED", "run")


def test_they_have_tables_of_samples(tracked):
    assert [sample["sample_id"] for sample in read_mlflow(tracked)["samples", 1]] == ["e0-0-0"]
    assert "one two" in read_tensorboard(tracked)["samples", 1]
    assert ("samples", 3) in read_mlflow(tracked) and ("samples", 3) in read_tensorboard(tracked)
    tables = list((tracked / "wandb").glob("offline-*/files/media/table/samples*.json"))
    assert len(tables) == 3
    assert "e0-0-0" in tables[0].read_text()


def test_tensorboard_has_a_step_once_it_is_told(folder):
    """known fault: its writer's flush did not wait for the thread that writes, so that a kill cost
    the step before it."""
    followed = Together(folder, trackers_of(config(folder, "tensorboard")), lambda: ())
    followed.start("run", CONFIG)
    for step in range(20):
        add_row(folder / "metrics.jsonl", {**ROWS[0], "step": step})
        followed.look()
        assert ("reward_mean", step) in read_tensorboard(folder)


def test_a_run_that_is_gone_on_with_is_the_same_run_there(folder):
    track(folder, ROWS[:2], status=None)
    time.sleep(1.1)  # W&B names its folders by the second
    track(folder, ROWS[2:])
    wandb, mlflow, board = read_wandb(folder), read_mlflow(folder), read_tensorboard(folder)
    assert mlflow["num_runs"] == 1 and wandb["num_ids"] == 1
    for row in ROWS:
        series = ("reward_mean", row["step"])
        assert wandb[series] == mlflow[series] == row["reward_mean"]
        assert board[series] == pytest.approx(row["reward_mean"])
    assert mlflow["count", "reward_mean"] == 4, "none twice"


def test_mlflow_begins_once_its_server_is_there(folder, monkeypatch):
    """known fault: nothing of the run was there, or no setting of it where the server went away
    in the midst of the begin."""
    monkeypatch.chdir(folder.parent)  # MLflow keeps artifacts where it is called
    monkeypatch.setattr("ray_apr.run.callbacks._AGAIN_S", 0.0)
    fails = {"get_experiment_by_name": 1, "log_batch": 1}

    def flaky(name):
        real = getattr(mlflow.tracking.MlflowClient, name)

        def call(*args, **kwargs):
            fails[name] -= 1
            if fails[name] == 0:
                raise ConnectionError("no server")
            return real(*args, **kwargs)

        return call

    for name in fails:
        monkeypatch.setattr(mlflow.tracking.MlflowClient, name, flaky(name))
    (tracker,) = trackers_of(config(folder, "mlflow"))
    followed = Together(folder, [tracker], lambda: ())
    followed.start("run", CONFIG)
    for row in ROWS:
        add_row(folder / "metrics.jsonl", row)
        followed.look()
    found = read_mlflow(folder)
    assert (found["num_runs"], found["param", "model"]) == (1, "a/b")
    assert [found["reward_mean", row["step"]] for row in ROWS] == [r["reward_mean"] for r in ROWS]


def test_settings_that_json_has_no_word_for_are_texts(folder, monkeypatch):
    """known fault: TensorBoard had nothing of a run whose engine was given a path."""
    given = {**CONFIG, "rollout": {"engine": {"kwargs": {"folder": Path("/x"), "ids": {1}}}}}
    monkeypatch.setattr(sys.modules[__name__], "CONFIG", given)
    track(folder, ROWS, "mlflow", "tensorboard")
    assert '"folder": "/x"' in read_tensorboard(folder)["config", 0]
    assert read_mlflow(folder)["param", "rollout.engine.kwargs.folder"] == "/x"


def test_a_run_that_fails_is_one_that_failed_there(folder):
    track(folder, ROWS[:1], "mlflow", status="failed")
    assert read_mlflow(folder)["status"] == "FAILED"


def test_a_run_of_wandb_that_this_process_has_already_is_left_alone(folder, tmp_path):
    """known fault: the tracker wrote into the user's run, and ended it; of two runs in one process
    both were in the first one's."""
    import wandb

    (tmp_path / "own").mkdir()
    own = wandb.init(mode="offline", dir=str(tmp_path / "own"), settings={"silent": True})
    track(folder, ROWS, "wandb")
    own.log({"mine": 1.0})
    own.finish()
    assert read_wandb(folder)["reward_mean", 3] == ROWS[3]["reward_mean"]
    (row,) = wandb_history(tmp_path / "own")
    assert row["mine"] == 1.0 and "reward_mean" not in row


def test_what_a_callback_logs_to_wandb_is_in_the_run_of_the_tracker(folder):
    """known fault: `wandb.log` raised, as the module had no run."""
    import wandb

    class Logs(RunCallback):
        def on_step(self, row):
            wandb.log({"mine": 2.0, "step": row["step"]})

    followed = Together(folder, [*trackers_of(config(folder, "wandb")), Logs()], lambda: ())
    followed.start("run", CONFIG)
    add_row(folder / "metrics.jsonl", ROWS[0])
    followed.look()
    followed.end()
    assert not followed.failed
    assert read_wandb(folder)["mine", ROWS[0]["step"]] == 2.0


def tables_of(folder: Path, every: int, notes: dict | None = None) -> SampleTables:
    notes = {} if notes is None else notes
    run = RunInfo(name="run", folder=folder, config={}, notes=notes, is_resumed=False)
    return SampleTables(run, TrackersConfig(samples_every=every, samples_each=2))


def test_the_table_of_a_step_comes_when_its_samples_are_there(tmp_path):
    save(tmp_path, 10, FIRST, SECOND)
    tables = tables_of(tmp_path, every=10)
    assert not list(tables.due(10)), "saved a step later"
    ((step, rows),) = tables.due(11)
    assert (step, [row["reward"] for row in rows]) == (10, [0.5, 1.0])
    assert not list(tables_of(tmp_path, every=0).due(11))


def test_a_table_that_was_sent_at_the_end_is_not_sent_once_more(tmp_path):
    save(tmp_path, 1, FIRST)
    save(tmp_path, 2, FIRST)
    notes: dict = {}
    assert [step for step, _ in tables_of(tmp_path, 1, notes).due(2)] == [1]
    kept = json.loads(json.dumps(notes))
    resumed = tables_of(tmp_path, 1, kept)
    assert [list(resumed.due(2)), len(list(resumed.due(3)))] == [[], 1]


def test_samples_that_cannot_be_read_cost_their_table_alone(tmp_path, caplog):
    save(tmp_path, 1, FIRST)
    (tmp_path / "samples/step-000001.parquet").write_bytes(b"torn")
    assert not list(tables_of(tmp_path, every=1).due(2))
    assert "no table of the samples of step 1: " in caplog.text


def test_tables_of_a_stopped_run_are_there_once_when_it_has_gone_on(folder):
    track(folder, ROWS[:2], "wandb", "tensorboard", status="stopped")
    time.sleep(1.1)  # W&B names its folders by the second
    (folder / "final.json").unlink()
    track(folder, ROWS[2:], "wandb", "tensorboard")
    tables = [row["step"] for row in wandb_history(folder) if "samples/_type" in row]
    assert tables == [0, 1, 3]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"wandb": {"mode": "maybe"}}, r"trackers\.wandb\.mode = 'maybe': must be one of online"),
        ({"wandb": {"project_name": "x"}}, r"trackers\.wandb\.project_name"),
        ({"wandb": {"tags": "smoke"}}, r"trackers\.wandb\.tags = 'smoke': must be a list of texts"),
        ({"wandb": {"tags": [5]}}, r"trackers\.wandb\.tags"),
        ({"wandb": {"project": None}}, r"trackers\.wandb\.project = None: must be a text"),
        ({"wandb": {"tags": ["a" * 65]}}, r"trackers\.wandb\.tags = .*1 to 64 characters"),
        ({"wandb": {"project": "team/rl"}}, r"trackers\.wandb\.project = 'team/rl': .* of /"),
        ({"wandb": {"project": ""}}, r"trackers\.wandb\.project = '': must have 1 to 128"),
        ({"mlflow": {"tracking_uri": 5}}, r"trackers\.mlflow\.tracking_uri = 5"),
        ({"mlflow": {"tracking_uri": "./mlruns"}}, r"'\./mlruns': is a folder.*ALLOW_FILE_STORE"),
        ({"mlflow": {"tracking_uri": "file:///a"}}, r"'file:///a': is a folder.*sqlite:///FILE"),
        ({"mlflow": {"experiment": " "}}, r"trackers\.mlflow\.experiment = ' '"),
        ({"tensorboard": {"folder": [1]}}, r"trackers\.tensorboard\.folder"),
        ({"mlflow": "here"}, r"trackers\.mlflow = 'here': must be a mapping"),
        ({"samples_every": -1}, r"trackers\.samples_every"),
        ({"samples_each": 0}, r"trackers\.samples_each"),
    ],
)
def test_settings_are_obeyed_or_refused(given, said):
    with pytest.raises(ConfigError, match=said):
        TrackersConfig(**given)


def test_what_trackers_take_is_taken(monkeypatch):
    """known fault: folders were documented, which MLflow takes with a variable of its own alone."""
    for uri in (None, "http://a:5000", "sqlite:///m.db", "databricks", "databricks-uc"):
        MLflowConfig(tracking_uri=uri)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "mlruns")
    with pytest.raises(ConfigError, match="'mlruns': is a folder"):
        MLflowConfig()
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    MLflowConfig(tracking_uri="file:///tmp/mlruns")


def test_an_empty_variable_of_mlflow_is_none(monkeypatch):
    """known fault: it was refused as a folder; MLflow takes its default."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "")
    MLflowConfig()


def test_an_mlflow_that_takes_folders_by_itself_may_have_one(monkeypatch, tmp_path):
    """known fault: it was refused with MLflow before 3.13, too, which has no such variable."""
    (tmp_path / "environment_variables.py").write_text("MLFLOW_TRACKING_URI = None\n")
    spec = types.SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: spec)
    MLflowConfig(tracking_uri="./mlruns")


def test_a_tracker_that_is_not_installed_says_how(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs wandb.*pip install 'ray-apr\[trackers\]'"):
        TrackersConfig(wandb={"mode": "offline"})


def test_packages_of_trackers_are_imported_once_a_run_begins():
    """They take seconds, beside the start of the engines."""
    code = (
        "import sys; from ray_apr.config.trackers import MLflowConfig, TrackersConfig;"
        "from ray_apr.trackers import trackers_of;"
        "trackers_of(TrackersConfig(wandb={}, mlflow={}, tensorboard={}));"
        "print([m for m in ('wandb', 'mlflow', 'tensorboardX') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"


def test_a_text_that_did_not_change_is_sent_to_mlflow_once(tmp_path):
    tracker = MLflowTracker(MLflowConfig(), TrackersConfig())
    sent = []
    tracker._id, tracker._tables, tracker._entities = "a", tables_of(tmp_path, 0), mlflow.entities
    tracker._client = types.SimpleNamespace(
        log_batch=lambda _, metrics, tags: sent.append([tag.value for tag in tags])
    )
    for step, text in enumerate(("rewards", "rewards", "", "rewards")):
        tracker.on_step({"step": step, "waiting_for": text})
    assert sent == [["rewards"], [], [""], ["rewards"]]

    def refuse(_, metrics, tags):
        raise OSError("no server")

    taken, tracker._client.log_batch = tracker._client.log_batch, refuse
    with pytest.raises(OSError, match="no server"):
        tracker.on_step({"step": 4, "waiting_for": "engines"})
    tracker._client.log_batch = taken
    tracker.on_step({"step": 5, "waiting_for": "engines"})
    assert sent[-1] == ["engines"], "known fault: MLflow had the text of before for good"


def test_no_name_of_a_figure_costs_mlflow_the_others(folder):
    """known fault: a metric of a reward with a name that is no path cost all figures."""
    names = ["reward//strict_mean", "/a", "a/", ".", "a/../b", "a/./b", "", "ab/" * 200]
    rows = [{"step": i, "reward_mean": 0.5, name: 0.25} for i, name in enumerate(names)]
    track(folder, rows, "mlflow")
    found = read_mlflow(folder)
    for step, name in enumerate(names):
        assert (found["reward_mean", step], found[metric_name(name), step]) == (0.5, 0.25), name
