"""Sessions, and runs inside of trials of Ray Tune, on one cluster."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import ray.train
from ray import tune
from ray.tune.integration.ray_train import TuneReportCallback
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from ray.util.state import list_actors, list_placement_groups

from ray_apr import APRTrainer, RolloutConfig, TrainConfig, TrainingSession
from ray_apr.core.exceptions import APRError, RolloutError
from ray_apr.data.resumption import PROGRESS_FILE
from ray_apr.data.rows import PromptRows
from ray_apr.tools.verify import verify
from tests.marked_ray import marked_ray
from tests.processes import processes_of
from tests.tiny_model import make_tiny_model
from tests.whole_runs import RAYS_OWN

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(420)]


@pytest.fixture(scope="module")
def mark() -> Iterator[str]:
    """Of all processes that this module starts; fails if one is left."""
    with marked_ray(num_cpus=6, namespace="tuned") as mark:
        yield mark


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("model")))


def make(
    model: str, folder: Path, name: str, *, steps: int, callbacks: Any = None, **given: Any
) -> APRTrainer:
    """A run of four short responses a step, on one engine and one train worker."""
    return APRTrainer(
        model=model,
        prompts=PromptRows([{"prompt": f"{i}+1="} for i in range(16)]),
        reward=given.pop("reward", lambda sample: float(len(sample.response_text))),
        rollout_config=RolloutConfig(group_size=2, max_response_tokens=8, num_replicas=1,
            max_consecutive_failures=4,
            engine={"device": "cpu", "kwargs": {"max_num_seqs": 8}},
        ),
        train_config=TrainConfig(
            steps=steps, batch_size=4, micro_batch_tokens=1024, num_threads=1, report_every=1
        ),
        scaling_config=ray.train.ScalingConfig(num_workers=1, use_gpu=False),
        run_config=ray.train.RunConfig(name=name, storage_path=str(folder), callbacks=callbacks),
        **given,
    )  # fmt: skip


def left_over(mark: str) -> list[str]:
    """What lives on the cluster, once what was killed has ended."""
    address = ray.get_runtime_context().gcs_address
    deadline = time.monotonic() + 60
    while True:
        actors = list_actors(address=address, filters=[("state", "!=", "DEAD")], limit=1000)
        groups = list_placement_groups(address=address, filters=[("state", "!=", "REMOVED")])
        left = [actor.class_name for actor in actors if actor.class_name not in RAYS_OWN]
        left += [group.placement_group_id for group in groups]
        left += [name for name in processes_of(mark).values() if "EngineCore" in name]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.5)


def test_a_session_trains_some_steps_saves_and_goes_on(model, mark, tmp_path):
    session = TrainingSession(make(model, tmp_path, "session", steps=100))
    try:
        assert session.step == 0
        first = session.train(2)
        assert [row["step"] for row in first.steps] == [0, 1]
        session.save(tmp_path / "saved")
        progress = json.loads((tmp_path / "saved" / PROGRESS_FILE).read_text())
        assert progress == {"step": 2, "policy_version": 2, "lora_rank": 0}
        assert len((session.folder / "metrics.jsonl").read_text().splitlines()) == 2
        second = session.train(1)
        assert [row["policy_version"] for row in second.steps] == [3]
        assert session.step == 3
    finally:
        final = session.stop()
    assert (final["status"], final["steps"], final["ledger_error"]) == ("stopped", 3, 0)
    assert session.stop() == final
    with pytest.raises(APRError, match="was stopped"):
        session.train(1)
    assert left_over(mark) == []


@pytest.mark.long
def test_another_run_begins_where_a_session_was_saved_and_ends_by_itself(model, mark, tmp_path):
    with TrainingSession(make(model, tmp_path, "first", steps=100)) as session:
        session.train(2)
        session.save(tmp_path / "saved")
    rest = make(model, tmp_path, "rest", steps=3, checkpoint=tmp_path / "saved")
    with TrainingSession(rest) as session:
        assert session.step == 2
        assert [row["step"] for row in session.train(5).steps] == [2]
        assert not session.train(1).steps
        session.save(tmp_path / "end")
        assert session.stop()["status"] == "ok"
    assert [check.name for check in verify(session.folder) if not check.ok] == []
    assert (tmp_path / "end" / "hf" / "model.safetensors").is_file()


@pytest.mark.long
def test_trials_of_tune_report_each_step_and_one_that_fails_leaves_nothing(model, mark, tmp_path):
    def trial(config: dict[str, Any]) -> None:
        def reward(sample: Any) -> float:
            if config["fails"]:
                raise KeyError("no such answer")
            return 1.0

        lines: list[str] = []
        callbacks = [TuneReportCallback()]
        name = f"fails-{config['fails']}"
        trainer = make(model, tmp_path, name, steps=2, reward=reward, callbacks=callbacks)
        try:
            trainer.fit(progress=lines.append)
        except RolloutError as error:
            (tmp_path / "error").write_text("\n".join([str(error), *error.__notes__]))
            raise
        (tmp_path / "lines").write_text("\n".join(lines))

    results = tune.Tuner(
        trial,
        param_space={"fails": tune.grid_search([True, False])},
        tune_config=tune.TuneConfig(max_concurrent_trials=1),
        run_config=tune.RunConfig(name="tuned", storage_path=str(tmp_path / "tune"), verbose=0),
    ).fit()
    by_kind = {result.config["fails"]: result for result in results}
    assert by_kind[False].error is None
    assert by_kind[False].metrics["reward_mean"] == 1.0
    assert list(by_kind[False].metrics_dataframe["policy_version"]) == [1, 2]
    assert by_kind[False].metrics["checkpoint_path"]
    lines = (tmp_path / "lines").read_text().splitlines()
    steps = [line.split(" │")[0] for line in lines if line.startswith("step")]
    assert steps == ["step    1/2", "step    2/2"]
    assert by_kind[True].error is not None
    failed = (tmp_path / "error").read_text()
    assert "rewards failed in a row" in failed and "no such answer" in failed
    assert f"traceback: {tmp_path / 'fails-True' / 'error.log'}" in failed
    assert left_over(mark) == []


@pytest.mark.long
def test_a_trial_that_is_killed_takes_its_run_along(model, mark, tmp_path):
    class Trial:
        def fit(self) -> None:
            make(model, tmp_path, "killed", steps=1000).fit()

    group = placement_group([{"CPU": 1}])
    strategy = PlacementGroupSchedulingStrategy(group, placement_group_capture_child_tasks=True)
    trial = ray.remote(num_cpus=1, scheduling_strategy=strategy)(Trial).remote()
    trial.fit.remote()
    rows, deadline = tmp_path / "killed" / "metrics.jsonl", time.monotonic() + 200
    while not rows.exists() or not rows.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.5)
    ray.kill(trial)
    remove_placement_group(group)
    assert left_over(mark) == []
