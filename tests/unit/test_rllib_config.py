"""APRConfig: what of RLlib's settings is taken, and what is refused."""

from __future__ import annotations

import copy
import operator
import pickle
import subprocess
import sys
from pathlib import Path

import gymnasium
import pytest
from ray import cloudpickle, tune
from ray.rllib.callbacks.callbacks import RLlibCallback

from ray_apr.config import (
    AlgorithmConfig,
    EvaluationConfig,
    PromptsConfig,
    RolloutConfig,
    TrainConfig,
)
from ray_apr.core.exceptions import ConfigError
from ray_apr.rllib import APR, APRConfig
from ray_apr.rllib.settings import resolve
from tests.rllib_configs import Guess, config


def test_nothing_said_is_a_run_of_defaults():
    settings = resolve(APRConfig().training(model="a/b", prompts=[{"prompt": "1"}]))
    assert (settings.train, settings.rollout) == (TrainConfig(), RolloutConfig())
    assert (settings.algorithm, settings.evaluation) == (AlgorithmConfig(), None)
    assert (settings.scaling.num_workers, settings.scaling.use_gpu) == (1, False)


@pytest.mark.parametrize(
    ("set_it", "path", "value"),
    [
        (lambda c: c.training(lr=3e-5), "train.learning_rate", 3e-5),
        (lambda c: c.training(grad_clip=0.5), "train.max_grad_norm", 0.5),
        (lambda c: c.training(train_batch_size=32), "train.batch_size", 32),
        (
            lambda c: c.training(train_batch_size_per_learner=16).learners(num_learners=2),
            "train.batch_size",
            32,
        ),
        (
            lambda c: c.training(train_batch_size_per_learner=16, minibatch_size=4).learners(
                num_learners=2
            ),
            "train.mini_batches",
            4,
        ),
        (
            lambda c: c.training(train=TrainConfig(batch_size=64), minibatch_size=32),
            "train.mini_batches",
            2,
        ),
        (lambda c: c.training(num_epochs=3), "train.epochs", 3),
        (lambda c: c.training(steps=7), "train.steps", 7),
        (lambda c: c.training(steps=None, train={"passes": 2}), "train.passes", 2),
        (
            lambda c: c.training(prompts_settings={"on_too_long": "drop"}),
            "prompts.on_too_long",
            "drop",
        ),
        (
            lambda c: c.training(prompts_settings=PromptsConfig(weights={"a": 2})),
            "prompts.weights",
            {"a": 2.0},
        ),
        (lambda c: c.debugging(seed=11), "train.seed", 11),
        (lambda c: c.training(train={"warmup_steps": 5}), "train.warmup_steps", 5),
        (lambda c: c.training(train=TrainConfig(warmup_steps=5)), "train.warmup_steps", 5),
        (lambda c: c.learners(num_learners=2), "scaling.num_workers", 2),
        (lambda c: c.learners(num_gpus_per_learner=1), "scaling.use_gpu", True),
        (
            lambda c: c.learners(num_cpus_per_learner=3),
            "scaling.resources_per_worker",
            {"CPU": 3},
        ),
        (lambda c: c.env_runners(num_env_runners=4), "rollout.num_replicas", 4),
        (
            lambda c: c.env_runners(num_cpus_per_env_runner=2),
            "rollout.engine.num_cpus_per_replica",
            2,
        ),
        (
            lambda c: c.env_runners(num_gpus_per_env_runner=2),
            "rollout.engine.tensor_parallel_size",
            2,
        ),
        (lambda c: c.env_runners(num_gpus_per_env_runner=2), "rollout.engine.device", "cuda"),
        (lambda c: c.rollouts(rollout=RolloutConfig(group_size=4)), "rollout.group_size", 4),
        (
            lambda c: c.rollouts(partial_rollout={"mode": "sync"}),
            "partial_rollout.max_staleness",
            0,
        ),
        (
            lambda c: c.rollouts(partial_rollout={"max_staleness": 2}),
            "partial_rollout.max_staleness",
            2,
        ),
        (lambda c: c.rollouts(buffer={"wait_timeout_s": 9}), "buffer.wait_timeout_s", 9),
        (lambda c: c.training(algorithm={"preset": "gspo"}), "algorithm.loss", "gspo"),
    ],
)
def test_a_setting_of_rllib_is_one_of_ours(set_it, path, value):
    assert operator.attrgetter(path)(resolve(set_it(config()))) == value


def evaluated(**settings) -> EvaluationConfig | None:
    held_out = [{"prompt": "1+1="}, {"prompt": "2+2="}]
    given = config(steps_per_iteration=4)
    return resolve(given.evaluation(evaluation_prompts=held_out, **settings)).evaluation


def test_evaluations_come_every_so_many_iterations():
    assert evaluated(evaluation_interval=3) == EvaluationConfig(every=12, at_start=False)
    assert evaluated(evaluation_settings={"every": 5}) == EvaluationConfig(every=5)


def test_the_duration_of_an_evaluation_is_that_of_all_its_prompts():
    sampled = {"temperature": 1.0}
    found = evaluated(evaluation_interval=1, evaluation_duration=8, evaluation_settings=sampled)
    assert found is not None
    assert (found.samples, found.every, found.at_start) == (4, 4, True)
    own = {"temperature": 1.0, "suite_column": "prompt", "suites": {"2": {"samples": 2}}}
    with pytest.raises(ConfigError, match=r"evaluation_duration = 8: .* 2 have samples of their"):
        evaluated(evaluation_interval=1, evaluation_duration=8, evaluation_settings=own)
    with pytest.raises(ConfigError, match=r"evaluation_duration = 7: .* the 2 evaluation prompts"):
        evaluated(evaluation_interval=1, evaluation_duration=7, evaluation_settings=sampled)
    found = evaluated(evaluation_interval=1, evaluation_duration=10, evaluation_settings=sampled)
    assert found is not None and found.samples == 5, "known fault: RLlib's default was not seen"
    found = evaluated(evaluation_interval=1, evaluation_settings=sampled)
    assert found is not None and found.samples == 1


@pytest.mark.parametrize("value", [-1, 1.5, "2", True, None])
@pytest.mark.parametrize("name", ["num_learners", "num_env_runners"])
def test_odd_numbers_of_workers_are_refused_by_their_name(name, value):
    """known fault: they were told by another setting's name, and true was one learner."""
    given = config(train_batch_size_per_learner=8)
    setattr(given, name, value)
    with pytest.raises(ConfigError, match=rf"^{name} = .*must be a whole number of at least 0"):
        given.validate()


class WithEpisodes(RLlibCallback):
    def on_episode_end(self, **kwargs):
        """Would be called by an env runner."""


@pytest.mark.parametrize(
    ("set_it", "words"),
    [
        (lambda c: c.training(gamma=0.99), "gamma = 0.99: must be 1"),
        (lambda c: c.training(lambda_=0.9), "lambda_ = 0.9: has no meaning"),
        (lambda c: c.training(stepps=9), "leave it out; did you mean steps?"),
        (lambda c: c.update_from_dict({"lambda": 0.9}), "lambda_ = 0.9: has no meaning"),
        (lambda c: c.update_from_dict({"replay_buffer_config": {"capacity": 9}}), "replay_buffer"),
        (lambda c: c.training(shuffle_batch_per_epoch=True), "shuffle_batch_per_epoch = True"),
        (lambda c: c.training(grad_clip_by="value"), "grad_clip_by = 'value': must be"),
        (lambda c: c.training(grad_clip=None), "grad_clip = None: must be a number"),
        (lambda c: c.training(lr=[[0, 1e-5], [9, 1e-6]]), "train.learning_rate = "),
        (lambda c: c.training(optimizer={"eps": 1}), "optimizer = .*train="),
        (lambda c: c.training(steps_per_iteration=0), "steps_per_iteration = 0: must be"),
        (lambda c: c.training(minibatch_size=3), "minibatch_size = 3: must divide"),
        (lambda c: c.training(minibatch_size=True), "minibatch_size = True: must divide"),
        (
            lambda c: c.training(train_batch_size=None, minibatch_size=4),
            "train_batch_size = None: must be a whole number of at least 1",
        ),
        (
            lambda c: c.training(train_batch_size="128", minibatch_size=4),
            "train_batch_size = '128'",
        ),
        (
            lambda c: c.training(train_batch_size_per_learner="3").learners(num_learners=2),
            "train_batch_size_per_learner = '3': must be a whole number of at least 1",
        ),
        (lambda c: c.training(train_batch_size_per_learner=True), "per_learner = True: must be a"),
        (lambda c: c.training(grad_clip=True), "train.max_grad_norm = True"),
        (lambda c: c.env_runners(num_gpus_per_env_runner=float("nan")), "runner = nan: must be a"),
        (lambda c: c.env_runners(num_gpus_per_env_runner=float("inf")), "runner = inf: must be a"),
        (lambda c: c.env_runners(num_gpus_per_env_runner=True), "runner = True: must be a whole"),
        (lambda c: c.learners(num_gpus_per_learner=True), "num_gpus_per_learner = True: must be 0"),
        (lambda c: c.learners(custom_resources_per_learner={"a": "b"}), "custom_resources_per_l"),
        (lambda c: c.learners(custom_resources_per_learner={"a": -1}), "custom_resources_per_l"),
        (lambda c: c.update_from_dict({"custom_resources_per_learner": "a"}), "must be a mapping"),
        (lambda c: c.callbacks(on_train_result=3), "callbacks_on_train_result = 3: must be a func"),
        (lambda c: c.callbacks(on_evaluate_end=[print, 3]), "callbacks_on_evaluate_end = .*must"),
        (lambda c: c.checkpointing(storage_path=3), "storage_path = 3: must be a text"),
        (lambda c: c.environment(env_config=[1]), r"env_config = \[1\]: must be a mapping"),
        (
            lambda c: c.evaluation(
                evaluation_prompts=[{"prompt": "1"}],
                evaluation_interval=1,
                evaluation_duration=True,
            ),
            "evaluation_duration = True: must be a multiple",
        ),
        (lambda c: c.framework("tf2"), "framework_str = 'tf2'"),
        (lambda c: c.env_runners(explore=False), "explore = False: .*temperature"),
        (lambda c: c.env_runners(num_envs_per_env_runner=2), "num_envs_per_env_runner = 2"),
        (lambda c: c.env_runners(num_gpus_per_env_runner=0.5), "num_gpus_per_env_runner = 0.5"),
        (lambda c: c.learners(num_gpus_per_learner=2), "num_gpus_per_learner = 2: must be 0 or 1"),
        (lambda c: c.learners(num_cpus_per_learner=-1), "num_cpus_per_learner = -1: must be a num"),
        (lambda c: c.learners(num_cpus_per_learner="1"), "num_cpus_per_learner = '1': must be"),
        (lambda c: c.learners(learner_class=object), "learner_class = .*language model"),
        (lambda c: c.rl_module(model_config={"x": 1}), "model_config = .*language model"),
        (lambda c: c.offline_data(input_="/data"), "input_ = '/data': .*no offline data"),
        (lambda c: c.multi_agent(policies={"a", "b"}), "policies = .*one policy"),
        (lambda c: c.fault_tolerance(restart_failed_env_runners=False), "restart_failed_env"),
        (lambda c: c.reporting(min_time_s_per_iteration=9), "min_time_s_.* steps_per_iteration"),
        (lambda c: c.checkpointing(export_native_model_files=True), "export_native_model_files"),
        (lambda c: c.callbacks(on_episode_end=print), "callbacks_on_episode_end = .*never called"),
        (lambda c: c.callbacks(WithEpisodes), "callbacks_class.on_episode_end = 'WithEpisodes'"),
        (lambda c: c.evaluation(evaluation_interval=1), "evaluation_interval = 1: needs eval"),
        (lambda c: c.evaluation(evaluation_prompts=[{"prompt": "1"}]), "evaluation_prompts = "),
        (lambda c: c.evaluation(evaluation_duration=20), "evaluation_duration = 20: needs eval"),
        (lambda c: c.evaluation(evaluation_parallel_to_training=False), "must be true"),
        (lambda c: c.evaluation(evaluation_config={"explore": False}), "evaluation_config = "),
        (lambda c: c.environment(env_config={"a": 1}), "environment.env_config = .*needs a text"),
        (lambda c: c.environment(Guess), "prompts = .*first observations"),
        (
            lambda c: c.environment(action_space=gymnasium.spaces.Discrete(2)),
            r"environment.action_space = Discrete\(2\): must be a gymnasium.spaces.Text",
        ),
        (lambda c: c.training(prompts=None), "prompts = None: is missing"),
        (lambda c: c.training(train={"learning_rat": 1}), "train.learning_rat = 1: unknown"),
        (lambda c: c.experimental(_validate_config=False), "validate_config = False"),
    ],
)
def test_a_setting_without_a_meaning_is_refused_by_its_name(set_it, words):
    with pytest.raises(ConfigError, match=words):
        set_it(config()).validate()


def test_a_setting_that_is_given_twice_has_one_value():
    for train in ({"learning_rate": 1e-5}, TrainConfig(learning_rate=1e-5)):
        with pytest.raises(ConfigError, match=r"train.learning_rate = 1e-05: is also said by lr"):
            resolve(config(train=train, lr=2e-5))
        assert resolve(config(train=train, lr=1e-5)).train.learning_rate == 1e-5
    default = TrainConfig().learning_rate  # in a mapping it was given, whatever it is
    with pytest.raises(ConfigError, match=r"train.learning_rate = .*: is also said by lr"):
        resolve(config(train={"learning_rate": default}, lr=2 * default))
    assert resolve(config(train=TrainConfig(), lr=2 * default)).train.learning_rate == 2 * default


@pytest.mark.parametrize(
    ("said", "name", "train"),
    [
        ({"lr": 1e-6}, "lr", {"learning_rate": 1e-4}),
        ({"lr": 1e-6}, "lr", TrainConfig(learning_rate=1e-4)),
        ({"grad_clip": 1.0}, "grad_clip", {"max_grad_norm": 0.5}),
        ({"num_epochs": 1}, "num_epochs", {"epochs": 3}),
        ({"train_batch_size": 128}, "train_batch_size", {"batch_size": 64}),
    ],
)
def test_a_default_that_was_said_counts_as_said(said, name, train):
    """known fault: RLlib's setting was ignored where it had the value of its default."""
    given = config(train=train, **said)
    copies = [given, given.copy(copy_frozen=False), APRConfig.from_state(given.get_state())]
    copies += [APRConfig().update_from_dict(given.to_dict()), config(train=train)]
    copies[-1].update_from_dict(said)
    copies.append(config(train=train))
    for setting, value in said.items():  # known fault: what was assigned was not
        setattr(copies[-1], setting, value)
    copies.append(copies[-1].copy(copy_frozen=False))
    for copied in copies:
        with pytest.raises(ConfigError, match=f"is also said by {name}, to be"):
            resolve(copied)
    resolve(config(train=train)), resolve(APRConfig().update_from_dict(config().to_dict()))
    silent = config(train=train)
    for copied in (silent.copy(copy_frozen=False), APRConfig.from_state(silent.get_state())):
        resolve(copied)
    resolve(APRConfig().update_from_dict(silent.to_dict()))


def test_a_default_number_of_servers_that_was_said_counts_as_said():
    given = config().rollouts(rollout={"num_replicas": 3}).env_runners(num_env_runners=1)
    with pytest.raises(ConfigError, match=r"rollout.num_replicas = 3: is also said by num_env_run"):
        resolve(given)
    given.env_runners(num_env_runners=0)
    with pytest.raises(ConfigError, match=r"rollout.num_replicas = 3: is also said by num_env_run"):
        resolve(given)


def test_a_batch_is_no_number_of_turns():
    given = APRConfig().environment(Guess).training(model="a/b", train_batch_size=8)
    with pytest.raises(ConfigError, match="train_batch_size = 8: counts steps of the env"):
        given.validate()


def same(one: APRConfig, other: APRConfig) -> bool:
    return resolve(one) == resolve(other)


def test_a_config_comes_out_of_all_of_rllibs_copies_as_it_was():
    given = config(lr=1e-5, steps_per_iteration=2).environment(env_config={})
    given.evaluation(evaluation_prompts=[{"prompt": "1"}], evaluation_interval=2)
    copies = [
        APRConfig().update_from_dict(given.to_dict()),
        APRConfig.from_dict(given.to_dict()),
        APRConfig.from_state(given.get_state()),
        given.copy(copy_frozen=False),
        copy.deepcopy(given),
        pickle.loads(cloudpickle.dumps(given)),
        APRConfig().update_from_dict(APRConfig().update_from_dict(given.to_dict()).to_dict()),
    ]
    for copied in copies:
        assert same(copied, given)
        assert copied.prompts.slice(0, 8) == given.prompts.slice(0, 8)
        assert copied.model == "owner/name"
    assert given.copy().prompts is given.prompts, "rows are not copied with the settings"
    given.freeze()
    with pytest.raises(AttributeError, match="frozen"):
        given.training(lr=1.0)


def test_samplers_may_stand_for_settings_until_a_run_is_made():
    given = config(lr=tune.loguniform(1e-6, 1e-4), train={"warmup_steps": tune.choice([1, 2])})
    values = given.to_dict()
    values["lr"], values["train"] = 1e-5, {"warmup_steps": 2}
    found = resolve(APRConfig().update_from_dict(values)).train
    assert (found.learning_rate, found.warmup_steps) == (1e-5, 2)


def test_a_trial_has_a_small_place_of_its_own():
    request = APR.default_resource_request(config().to_dict())
    assert request.bundles == [{"CPU": 0.1}]
    given = config().resources(num_cpus_for_main_process=0)
    with pytest.raises(ConfigError, match="num_cpus_for_main_process = 0: must be above 0"):
        APR.default_resource_request(given.to_dict())
    given = config().resources(num_cpus_for_main_process="1")
    with pytest.raises(ConfigError, match="num_cpus_for_main_process = '1': must be above 0"):
        APR.default_resource_request(given.to_dict())
    with pytest.raises(ConfigError, match="gamma"):
        APR.default_resource_request(config(gamma=0.5).to_dict())


def test_a_storage_path_may_be_a_path(tmp_path, monkeypatch):
    """known fault: a relative one led elsewhere, in each process that took it."""
    monkeypatch.chdir(tmp_path)
    for given in ("runs", Path("runs")):
        assert config().checkpointing(storage_path=given).storage_path == str(tmp_path / "runs")


def test_apr_is_known_to_tune():
    """In a process of its own: a Ray that ended in this one would have taken the name along."""
    code = (
        "from ray_apr.rllib import APR\n"
        "from ray.tune.registry import get_trainable_cls\n"
        "assert get_trainable_cls('APR') is APR\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
