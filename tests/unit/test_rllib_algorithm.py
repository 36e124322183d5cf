"""APR without a cluster: results, checkpoints, callbacks, over a session that trains nothing."""

from __future__ import annotations

import logging
import math
import shutil

import pyarrow.fs
import pytest
from ray.rllib.callbacks.callbacks import RLlibCallback
from ray.rllib.utils.test_utils import check_train_results_new_api_stack

from ray_apr.core.exceptions import ConfigError, TrainError
from ray_apr.rllib import APR
from ray_apr.rllib.results import Lifetime, evaluation_results, iteration_results
from tests.fakes import FakeSession, evaluation_row, step_row
from tests.rllib_configs import Guess, config
from tests.tiny_model import make_tiny_model

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def session(monkeypatch, tmp_path):
    """Sessions are fakes, and none outlives its test; nor does a level of logging."""
    levels = {name: logging.getLogger(name).level for name in ("ray.rllib", "ray_apr")}
    monkeypatch.setattr("ray.tune.trainable.trainable.DEFAULT_STORAGE_PATH", str(tmp_path))
    monkeypatch.setattr(APR, "_open_session", staticmethod(FakeSession))
    yield
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)
    assert FakeSession.living == []


def build(model, tmp_path, **training):
    given = config(model, train_batch_size=4, **training)
    return given.checkpointing(storage_path=str(tmp_path / "runs"))


def test_rows_of_a_run_have_rllibs_names():
    lifetime = Lifetime(episodes=100, env_steps=200, steps=7)
    rows = [
        step_row(7, reward_mean=0.25, num_samples=4, num_turns=8, engines_tokens=100, reward_s=9.0),
        step_row(
            8,
            reward_mean=0.75,
            reward_max=2.0,
            num_samples=12,
            num_turns=16,
            loss=0.004,
            engines_tokens=300,
            reward_s=1.0,
        ),
    ]
    lifetime.add(rows)
    results = iteration_results(rows, lifetime, seconds=6.0)
    episodes = results["env_runners"]
    assert episodes["episode_return_mean"] == pytest.approx(0.625)
    assert (episodes["episode_return_min"], episodes["episode_return_max"]) == (0.0, 2.0)
    assert episodes["episode_len_mean"] == pytest.approx(24 / 16)
    assert (episodes["num_episodes"], episodes["num_episodes_lifetime"]) == (16, 116)
    assert episodes["num_env_steps_sampled"] == 24
    assert episodes["num_env_steps_sampled_lifetime"] == 224
    assert episodes["num_module_steps_sampled"] == {"default_policy": 24}
    assert episodes["num_agent_steps_sampled_lifetime"] == {"default_agent": 224}
    assert (episodes["num_tokens"], episodes["response_tokens_max"]) == (200, 32)
    assert episodes["reward_form_mean"] == 0.25
    learner = results["learners"]["default_policy"]
    assert learner["total_loss"] == pytest.approx(0.003)
    assert learner["entropy"] == pytest.approx(0.1)
    assert learner["kl_k3"] == pytest.approx(0.002)
    assert learner["gradients_default_optimizer_global_norm"] == pytest.approx(0.4)
    assert learner["default_optimizer_learning_rate"] == 1e-4
    assert learner["engines_tokens"] == 300, "of a running total the last value"
    assert (learner["weights_seq_no"], learner["staleness_max"]) == (9, 1)
    assert learner["num_module_steps_trained_lifetime"] == 224
    assert results["learners"]["__all_modules__"]["num_env_steps_trained"] == 24
    timers = results["timers"]
    assert (timers["training_iteration"], timers["training_step"]) == (6.0, 3.0)
    assert (timers["sample"], timers["learner_update_timer"]) == (0.5, 1.5)
    assert timers["reward"] == 1.0, "known fault: a mean of all calls so far was averaged again"
    assert (timers["synch_weights"], timers["weight_wait"]) == (0.25, 0.0)
    assert results["num_training_step_calls_per_iteration"] == 2
    assert results["num_env_steps_sampled_lifetime"] == 224
    assert all(math.isfinite(v) for v in learner.values())


def test_an_evaluation_has_rllibs_names():
    results = evaluation_results(evaluation_row(6))
    episodes = results["env_runners"]
    assert (episodes["episode_return_mean"], episodes["episode_len_mean"]) == (0.75, 2.0)
    assert (episodes["num_episodes"], episodes["num_failed_episodes"]) == (8, 1)
    assert (episodes["pass_at_1"], results["weights_seq_no"]) == (0.5, 6)
    none = evaluation_row(6, num_samples=0, num_turns=0, reward_mean=None, reward_min=None)
    assert "episode_return_mean" not in evaluation_results(none)["env_runners"]


def test_train_goes_on_in_one_run_and_rllib_accepts_its_results(model, tmp_path):
    algo = build(model, tmp_path, steps_per_iteration=4, lr=3e-5).build_algo()
    assert FakeSession.living == [], "nothing starts before the first train"
    results = [algo.train() for _ in range(3)]
    assert len(FakeSession.living) == 1
    for number, result in enumerate(results, 1):
        check_train_results_new_api_stack(result)
        assert result["training_iteration"] == number
    assert [r["num_training_step_calls_per_iteration"] for r in results] == [4, 4, 2]
    assert [r["done"] for r in results] == [False, False, True]
    assert results[2]["num_env_steps_sampled_lifetime"] == 40
    learner = results[0]["learners"]["default_policy"]
    assert learner["default_optimizer_learning_rate"] == 3e-5
    assert "1+1=" not in str(results[0]["config"])
    with pytest.raises(TrainError, match="has trained all of its 10 steps"):
        algo.train()
    algo.stop()
    assert FakeSession.living == []
    algo.stop()


def test_a_run_that_fails_is_stopped_at_once(model, tmp_path):
    algo = build(model, tmp_path).build_algo()
    algo.train()
    FakeSession.living[0].fail = TrainError("loss is nan")
    with pytest.raises(TrainError, match="loss is nan"):
        algo.train()
    assert FakeSession.living == []
    algo.stop()


def test_a_checkpoint_is_gone_on_with(model, tmp_path):
    algo = build(model, tmp_path).build_algo()
    for _ in range(3):
        algo.train()
    path = algo.save_to_path(tmp_path / "saved")
    first = algo.train()
    name = FakeSession.living[0].spec.name
    algo.stop()
    restored = APR.from_checkpoint(path)
    assert (restored.iteration, FakeSession.living) == (3, [])
    second = restored.train()
    assert FakeSession.living[0].spec.name != name
    kept = ("env_runners", "learners", "num_env_steps_sampled_lifetime", "training_iteration")
    assert {k: first[k] for k in kept} == {k: second[k] for k in kept}
    runs = [folder.name for folder in (tmp_path / "runs").glob("restored-*")]
    assert runs == [], "the copy goes once the run has begun"
    restored.stop()


def test_a_checkpoint_of_another_trial_is_taken_into_a_living_run(model, tmp_path):
    """What PBT does: the weights of one trial, the settings of the other."""
    good, bad = (build(model, tmp_path, lr=lr).build_algo() for lr in (1e-4, 1e-5))
    for _ in range(2):
        good.train()
    bad.train()
    saved = good.save(str(tmp_path / "saved"))
    bad.restore(saved)
    assert len(FakeSession.living) == 1, "its own run has ended"
    result = bad.train()
    assert result["training_iteration"] == 3
    assert result["learners"]["default_policy"]["default_optimizer_learning_rate"] == 1e-5
    good.stop()
    bad.stop()


def test_a_checkpoint_may_go_before_its_run_begins(model, tmp_path):
    algo = build(model, tmp_path).build_algo()
    algo.train()
    path = algo.save_to_path(tmp_path / "saved")
    algo.stop()
    algo = build(model, tmp_path).build_algo()
    algo.restore_from_path(path)
    shutil.rmtree(path)
    again = algo.save_to_path(tmp_path / "again")
    assert algo.train()["training_iteration"] == 2
    algo.restore_from_path(again)
    assert algo.train()["training_iteration"] == 2
    algo.stop()
    with pytest.raises(ConfigError, match="component = 'learner_group'"):
        algo.restore_from_path(again, component="learner_group")


def test_a_checkpoint_may_be_in_another_file_system(model, tmp_path):
    (tmp_path / "bucket").mkdir()
    local = pyarrow.fs.LocalFileSystem()
    bucket = pyarrow.fs.SubTreeFileSystem(str(tmp_path / "bucket"), local)
    algo = build(model, tmp_path).build_algo()
    algo.train()
    assert algo.save_to_path("saved", filesystem=bucket) == "saved"
    algo.restore_from_path("saved", filesystem=bucket)
    assert algo.train()["num_training_steps_lifetime"] == 2
    assert FakeSession.living[0].step == 2
    algo.stop()


def test_an_algorithm_that_has_not_trained_can_be_saved(model, tmp_path):
    algo = build(model, tmp_path).build_algo()
    path = algo.save_to_path(tmp_path / "saved")
    algo.stop()
    restored = APR.from_checkpoint(path)
    assert restored.train()["training_iteration"] == 1
    restored.stop()


def test_an_actor_becomes_another_trial(model, tmp_path):
    algo = build(model, tmp_path, lr=1e-4).build_algo()
    algo.train()
    assert algo.reset(build(model, tmp_path, lr=1e-5).to_dict())
    assert FakeSession.living == []
    result = algo.train()
    assert result["training_iteration"] == 1
    assert result["num_env_steps_sampled_lifetime"] == 4
    assert result["learners"]["default_policy"]["default_optimizer_learning_rate"] == 1e-5
    algo.stop()


def test_evaluations_are_in_the_iteration_in_which_they_end(model, tmp_path):
    given = build(model, tmp_path, steps_per_iteration=2)
    given.evaluation(evaluation_prompts=[{"prompt": "1+1="}], evaluation_interval=2)
    algo = given.build_algo()
    with pytest.raises(TrainError, match="no evaluation has ended yet"):
        algo.evaluate()
    assert "evaluation" not in algo.train()
    second = algo.train()
    assert second["evaluation"]["env_runners"]["episode_return_mean"] == 0.75
    assert second["evaluation"]["weights_seq_no"] == 4
    algo.train()
    assert algo.evaluate() == second["evaluation"]
    algo.stop()
    algo = build(model, tmp_path).build_algo()
    with pytest.raises(ConfigError, match="evaluation_interval = None"):
        algo.evaluate()
    algo.stop()


class Watch(RLlibCallback):
    seen: list[str] = []  # noqa: RUF012

    def on_algorithm_init(self, *, algorithm, **kwargs):
        self.seen.append("init")

    def on_train_result(self, *, algorithm, result, metrics_logger, **kwargs):
        self.seen.append(f"train {algorithm.iteration}")
        result["mine"] = 1
        metrics_logger.log_value("logged", algorithm.iteration, window=1)

    def on_evaluate_start(self, **kwargs):
        self.seen.append("start")

    def on_evaluate_end(self, *, evaluation_metrics, **kwargs):
        version = evaluation_metrics["weights_seq_no"]
        self.seen.append(f"end {version}")

    def on_checkpoint_loaded(self, **kwargs):
        self.seen.append("loaded")


def test_callbacks_are_called(model, tmp_path):
    Watch.seen.clear()
    given = build(model, tmp_path).callbacks(Watch, on_train_result=lambda **kw: None)
    given.evaluation(evaluation_prompts=[{"prompt": "1+1="}], evaluation_interval=2)
    algo = given.build_algo()
    results = [algo.train() for _ in range(2)]
    saved = algo.save(str(tmp_path / "saved"))
    algo.restore(saved)
    algo.stop()
    assert Watch.seen == ["init", "train 1", "start", "end 2", "train 2", "loaded"]
    assert results[0]["mine"] == 1
    assert results[1]["logged"] == 1, "what a callback logs is in the next result"


def test_a_text_environment_gives_prompts_and_rewards(model, tmp_path):
    given = config(model, prompts=None, reward=None, train={"batch_size": 4})
    given.checkpointing(storage_path=str(tmp_path / "runs")).environment(Guess, num_env_seeds=6)
    given.evaluation(evaluation_interval=1, evaluation_duration=3)
    algo = given.build_algo()
    algo.train()
    spec = FakeSession.living[0].spec
    assert spec.reward is None
    assert spec.environment.prompt(3) == "below 10?"
    assert len(algo._trainer.prompts) == 6
    held_out = algo._trainer.evaluation_prompts.slice(0, 9)
    assert [row["env_seed"] for row in held_out] == [6, 7, 8]
    algo.stop()


def test_what_a_run_refuses_is_said_when_it_is_built(model, tmp_path):
    with pytest.raises(ConfigError, match=r"train\.batch_size = 3: must be a multiple"):
        config(model, train={"batch_size": 3}).build_algo()
    with pytest.raises(ConfigError, match="model = '/none': there is no folder /none"):
        build("/none", tmp_path).build_algo()
