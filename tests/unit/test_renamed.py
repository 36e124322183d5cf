"""Old names of the rollout's settings (config/renamed.py): taken, and the new one is said."""

from __future__ import annotations

import logging
import operator
import warnings

import pytest

from ray_apr.cli.settings import load_settings
from ray_apr.config import EngineConfig, RolloutConfig, SamplingConfig
from ray_apr.config.renamed import RENAMED, renew
from ray_apr.core.exceptions import ConfigError
from tests.whole_runs import CONFIG

VALUES = {
    "device": "cpu", "dtype": "bfloat16", "tensor_parallel_size": 2, "placement": "colocated",
    "max_model_len": 4096, "num_cpus_per_replica": 2, "start_timeout_s": 9.0,
    "stall_timeout_s": 8.0, "engine_seed": 3, "engine_kwargs": {"max_num_seqs": 4},
    "temperature": 0.7, "top_p": 1.0, "top_k": 5, "stop_token_ids": (1,), "stop_strings": ("a",),
    "seed": 4, "min_response_tokens": 2, "reward_timeout_s": 7.0, "reward_retries": 0,
    "reward_concurrency": 3, "num_reward_workers": 2, "num_cpus_per_reward": 0.5,
    "http_host": "localhost", "http_port": 8001, "control_token": "secret",
}  # fmt: skip


@pytest.mark.parametrize("name", RENAMED)
def test_an_old_name_works_in_python_and_says_the_new_one(name):
    given = {name: VALUES[name]}
    if name in ("http_host", "control_token"):  # which have no meaning without a port
        given = {"http_port": VALUES["http_port"], **given}
    with pytest.warns(FutureWarning) as caught:
        config = RolloutConfig(group_size=4, **given)
    assert len(caught) == len(given)
    warning = caught[-1]
    assert f"rollout.{name} is rollout.{RENAMED[name]} now" in str(warning.message)
    assert warning.filename == __file__
    assert operator.attrgetter(RENAMED[name])(config) == VALUES[name]


def test_the_new_names_and_those_of_the_rollouts_own_say_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = RolloutConfig(num_replicas=2, group_size=4, max_response_tokens=9, max_turns=2)
        assert config.engine == EngineConfig()
        by_mapping = RolloutConfig(sampling={"temperature": 0.5})
        assert by_mapping == RolloutConfig(sampling=SamplingConfig(temperature=0.5))


@pytest.mark.parametrize("sampling", [{"temperature": 0.5}, SamplingConfig(temperature=0.5)])
def test_both_names_are_one_too_many(sampling):
    with pytest.raises(
        ConfigError, match=r"rollout\.temperature = 0\.7.*rollout\.sampling"
    ) as caught:
        renew({"temperature": 0.7, "sampling": sampling}, lambda text: None)
    assert caught.value.field == "rollout.temperature"


def test_a_section_that_is_none_is_refused_and_a_token_is_not_shown():
    with pytest.raises(ConfigError, match=r"rollout\.sampling = 5"):
        renew({"temperature": 0.7, "sampling": 5}, lambda text: None)
    with pytest.raises(ConfigError) as caught:
        renew({"control_token": "SECRET", "http": {"control_token": "x"}}, lambda text: None)
    assert "SECRET" not in str(caught.value)


def test_an_old_name_beside_others_of_its_section():
    given = {"temperature": 0.7, "top_k": 8, "sampling": {"seed": 1}}
    sampling = renew(given, lambda text: None)["sampling"]
    assert sampling == {"seed": 1, "temperature": 0.7, "top_k": 8}


def test_old_names_work_in_overrides_and_replace_what_the_file_says(caplog):
    """quickstart.yaml has rollout.engine.device and kwargs."""
    overrides = [
        "rollout.temperature=0.7",
        "rollout.device=auto",
        "rollout.engine_kwargs.max_num_batched_tokens=512",
    ]
    with caplog.at_level(logging.WARNING):
        rollout = load_settings(CONFIG, overrides).rollout
    assert (rollout.sampling.temperature, rollout.engine.device) == (0.7, "auto")
    assert rollout.engine.kwargs == {"max_num_seqs": 64, "max_num_batched_tokens": 512}
    assert [record.getMessage().partition(" now")[0] for record in caplog.records] == [
        "rollout.temperature is rollout.sampling.temperature",
        "rollout.device is rollout.engine.device",
        "rollout.engine_kwargs is rollout.engine.kwargs",
    ]


def test_old_names_work_in_a_section_that_an_override_gives_whole():
    text = "rollout={temperature: 0.7, group_size: 8, engine: {device: cpu}, sampling: }"
    rollout = load_settings(CONFIG, [text]).rollout
    assert (rollout.sampling.temperature, rollout.group_size) == (0.7, 8)


def test_old_names_work_in_a_file(tmp_path, caplog):
    text = CONFIG.read_text().replace(
        "engine: {device: cpu,", "temperature: 0.5\n  engine: {device: cpu,"
    )
    text = text.replace("model: ", f"model: {CONFIG.parent}/").replace(
        "prompts: ", f"prompts: {CONFIG.parent}/"
    )
    text = text.replace("reward: ", f"reward: {CONFIG.parent}/")
    (tmp_path / "run.yaml").write_text(text)
    with caplog.at_level(logging.WARNING):
        assert load_settings(tmp_path / "run.yaml").rollout.sampling.temperature == 0.5
    (record,) = caplog.records
    assert "rollout.sampling.temperature" in record.getMessage()
