"""Bad input is refused before anything starts; rewards with real Ray workers."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import time
from pathlib import Path

import pytest
import ray
import ray.data
import ray.train
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)
from ray.util.state import list_actors

from ray_apr import APRTrainer, ConfigError, RolloutConfig, TrainConfig
from ray_apr.core.exceptions import RewardError
from ray_apr.core.sample import Prompt, Sample
from ray_apr.data import held
from ray_apr.data.encoding import encode_dataset
from ray_apr.data.held import first_row
from ray_apr.rollout.scoring import Scorer
from ray_apr.run.host import is_captured
from ray_apr.run.preflight import found_no_place, nodes_without, not_placed, settings_of_ray_train
from tests.run_specs import run_spec
from tests.tiny_model import make_tiny_model

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module", autouse=True)
def cluster():
    ray.init(
        address="local", num_cpus=4, namespace="ray_apr_inputs", log_to_driver=False,
        configure_logging=False,
    )  # fmt: skip
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(make_tiny_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def prompts():
    return ray.data.from_items([{"prompt": [1, 2, 3], "answer": "6"}])


def make(model, prompts, *, rollout=None, train=None, scaling=None, run=None, reward=lambda s: 0.0):
    return APRTrainer(
        model=model,
        prompts=prompts,
        reward=reward,
        rollout_config=RolloutConfig(
            **{
                "group_size": 2,
                "max_response_tokens": 16,
                "engine": {"device": "cpu"},
                **(rollout or {}),
            }
        ),
        train_config=TrainConfig(**{"batch_size": 4, "steps": 1, **(train or {})}),
        scaling_config=ray.train.ScalingConfig(**(scaling or {"num_workers": 1})),
        run_config=run,
    )


def test_good_input_is_taken_and_starts_nothing(model, prompts):
    make(model, prompts)
    here = ray.get_runtime_context().gcs_address  # "auto" may find another cluster of this machine
    alive = list_actors(address=here, filters=[("state", "=", "ALIVE")])
    names = {actor.class_name for actor in alive}
    assert not names & {"RolloutWorker", "SampleBuffer", "RunRecorder", "ServeController"}


def test_a_folder_without_a_run_and_restarts_are_refused(model, prompts, tmp_path):
    run = ray.train.RunConfig(name="mine", storage_path=str(tmp_path))
    make(model, prompts, run=run)
    with pytest.raises(ConfigError, match=r"path = .*mine'.*holds no run to go on with"):
        APRTrainer.restore(tmp_path / "mine", model=model, prompts=prompts, reward=len)
    again = ray.train.RunConfig(failure_config=ray.train.FailureConfig(max_failures=3))
    with pytest.raises(ConfigError, match=r"failure_config\.max_failures = 3: needs checkpoints"):
        make(model, prompts, run=again)


@pytest.mark.long
def test_train_workers_that_cannot_be_placed_end_the_run(tmp_path):
    """known fault: Ray tried again and again, without a limit."""
    from ray.train.torch import TorchTrainer

    plan = run_spec(run=ray.train.RunConfig(name="app", storage_path=str(tmp_path)))
    scaling = ray.train.ScalingConfig(num_workers=2, resources_per_worker={"CPU": 3})
    trainer = TorchTrainer(lambda: None, scaling_config=scaling, run_config=plan.run_config)
    with settings_of_ray_train(2.0), pytest.raises(Exception, match="startup timed out") as raised:
        trainer.fit()
    assert found_no_place(raised.value)
    assert "6 CPU" in str(not_placed(scaling, 2.0))


def test_a_node_says_whether_it_sees_a_path(tmp_path):
    here = ray.get_runtime_context().get_node_id()
    assert nodes_without(str(tmp_path), [here]) == set()
    assert nodes_without(str(tmp_path / "elsewhere"), [here]) == {here}


def test_prompts_without_the_prompt_column(model):
    with pytest.raises(ConfigError, match=r"rollout\.prompt_column = 'prompt'.*question"):
        make(model, ray.data.from_items([{"question": "1+1"}]))


def test_an_empty_dataset(model, prompts):
    with pytest.raises(ConfigError, match="dataset is empty"):
        make(model, prompts.filter(lambda row: False))


def test_something_that_is_no_dataset(model):
    with pytest.raises(ConfigError, match=r"prompts = 'list'.*ray\.data\.Dataset"):
        make(model, [{"prompt": "1+1"}])


def test_a_prompt_longer_than_the_model_s_context_names_its_row(model):
    rows = [{"prompt": [1] * n} for n in (3, 40, 200)]
    with pytest.raises(ConfigError, match=r"prompts\[1\]\.prompt = '40 tokens': at most 32"):
        encode_dataset(
            ray.data.from_items(rows, override_num_blocks=1),
            model=model,
            column="prompt",
            max_prompt_tokens=32,
        )


def test_prompts_that_are_too_long_are_left_out_where_that_is_asked_for(model):
    rows = [{"prompt": [1] * n, "id": n} for n in (3, 40, 200, 32)]
    encoded = encode_dataset(
        ray.data.from_items(rows, override_num_blocks=2),
        model=model,
        column="prompt",
        max_prompt_tokens=32,
        drops_too_long=True,
    )
    assert (encoded.num_prompts, encoded.num_dropped) == (2, 2)
    assert [n for ref in encoded.tables for n in ray.get(ref)["id"].to_pylist()] == [3, 32]


def test_chat_messages_without_a_chat_template(model):
    chat = ray.data.from_items([{"prompt": [{"role": "user", "content": "1+1"}]}])
    with pytest.raises(ConfigError, match=r"prompts\[0\]\.prompt = 'chat messages'.*no chat templ"):
        make(model, chat)


def test_a_prompt_that_cannot_be_encoded_is_no_traceback_of_ray_data(model):
    rows = ray.data.from_items([{"prompt": "1+1"}, {"prompt": ""}], override_num_blocks=1)
    with pytest.raises(ConfigError, match=r"^prompts\[1\]\.prompt = '': is empty"):
        encode_dataset(rows, model=model, column="prompt", max_prompt_tokens=32)


def test_few_prompts_of_two_kinds_are_no_traceback_of_arrow(model):
    rows = ray.data.from_items([{"prompt": "1", "id": 1}, {"prompt": "1", "id": "x"}])
    with pytest.raises(ConfigError, match=r"prompts\[\*\]\.id"):
        encode_dataset(rows, model=model, column="prompt", max_prompt_tokens=32)


def test_few_prompts_that_ray_has_start_no_process(model, monkeypatch):
    def encoded(rows):
        found = encode_dataset(rows, model=model, column="prompt", max_prompt_tokens=32)
        return [row for ref in found.tables for row in ray.get(ref).to_pylist()]

    few = ray.data.from_items([{"prompt": f"{i}+1", "id": i} for i in range(500)])
    by_ray_data = encoded(few.map_batches(lambda rows: rows))
    many = ray.data.from_items([{"prompt": [1]}] * 4097)
    monkeypatch.setattr(ray.data.Dataset, "map_batches", None)
    monkeypatch.setattr(ray.data.Dataset, "take", None)
    assert first_row(few) == {"prompt": "0+1", "id": 0}
    assert encoded(few) == by_ray_data
    with pytest.raises(TypeError, match="not callable"):
        encoded(many)
    monkeypatch.setattr(held, "_BYTES", 1000)
    with pytest.raises(TypeError, match="not callable"):
        encoded(few)


def test_prompts_keep_their_order_whichever_block_is_read_first(model, tmp_path):
    def read(rows: dict) -> dict:
        is_first, deadline = rows["id"][0] == 0, time.monotonic() + 60
        while is_first and not list(tmp_path.iterdir()):  # the other block comes before it
            assert time.monotonic() < deadline
            time.sleep(0.05)
        (tmp_path / f"{is_first}").touch()
        return {"id": rows["id"], "prompt": [[1, 2, 3]] * len(rows["id"])}

    rows = ray.data.range(10_000, override_num_blocks=2).map_batches(read, batch_size=None)
    tables = encode_dataset(rows, model=model, column="prompt", max_prompt_tokens=32).tables
    ids = [number for ref in tables for number in ray.get(ref)["id"].to_pylist()]
    assert ids == list(range(10_000))
    assert not rows.context.execution_options.preserve_order  # as the user has it


def test_a_trial_of_ray_tune_is_known_and_its_host_is_outside(model, prompts):
    def trial():
        make(model, prompts)  # refuses nothing
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        host = ray.remote(num_cpus=0, scheduling_strategy=here)(is_captured)
        return is_captured(), ray.get(host.remote())

    group = placement_group([{"CPU": 1}])  # as Tune makes one for each trial
    strategy = PlacementGroupSchedulingStrategy(group, placement_group_capture_child_tasks=True)
    task = ray.remote(num_cpus=1, scheduling_strategy=strategy)(trial)
    try:
        assert ray.get(task.remote(), timeout=100) == (True, False)
    finally:
        remove_placement_group(group)
    assert not is_captured()


def test_a_response_budget_that_fills_the_context(model, prompts):
    config = json.loads((Path(model) / "config.json").read_text())
    context = config["max_position_embeddings"]
    with pytest.raises(ConfigError, match=r"max_response_tokens.*no room for a prompt"):
        make(model, prompts, rollout={"max_response_tokens": context})
    with pytest.raises(
        ConfigError, match=r"rollout\.engine\.max_model_len.*exceeds the model's context"
    ):
        make(model, prompts, rollout={"engine": {"device": "cpu", "max_model_len": context + 1}})


def test_a_model_folder_without_tokenizer_or_config(model, prompts, tmp_path):
    with pytest.raises(ConfigError, match=r"model = .*no config\.json"):
        make(str(tmp_path), prompts)
    shutil.copy(Path(model) / "config.json", tmp_path)
    with pytest.raises(ConfigError, match=r"no tokenizer; save one"):
        make(str(tmp_path), prompts)
    with pytest.raises(ConfigError, match="there is no folder"):
        make(str(tmp_path / "nowhere"), prompts)
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Gemma2ForCausalLM"]}))
    with pytest.raises(ConfigError, match="Gemma2ForCausalLM cannot be trained"):
        make(str(tmp_path), prompts)


def test_a_port_in_use(model, prompts):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"rollout\.http\.port = {port}.*choose another"):
            make(model, prompts, rollout={"http": {"port": port}})


def test_gpus_where_there_are_none(model, prompts):
    with pytest.raises(ConfigError, match=r"rollout\.engine\.device = 'cuda'.*no GPU"):
        make(model, prompts, rollout={"engine": {"device": "cuda"}})
    with pytest.raises(ConfigError, match=r"scaling\.use_gpu = True.*no GPU"):
        make(
            model,
            prompts,
            rollout={"engine": {"device": "auto"}},
            scaling={"num_workers": 1, "use_gpu": True},
        )


def test_more_cpus_than_the_cluster_has(model, prompts):
    with pytest.raises(ConfigError, match=r"want 9 CPUs together, the cluster has 4"):
        make(model, prompts, rollout={"num_replicas": 8})


def test_all_cpus_taken_leave_none_for_ray_data(model, prompts):
    with pytest.raises(ConfigError, match=r"want 4 CPUs together, the cluster has 4.*Ray Data"):
        make(model, prompts, rollout={"num_replicas": 3})


def test_a_batch_that_workers_cannot_share(model, prompts):
    with pytest.raises(ConfigError, match=r"train\.batch_size = 4.*1 x 3"):
        make(model, prompts, scaling={"num_workers": 3})


def test_a_reward_that_is_no_function(model, prompts):
    with pytest.raises(ConfigError, match=r"reward = 1\.0"):
        make(model, prompts, reward=1.0)


# -- rewards in real worker processes --------------------------------------------------------------


def sample(number: int) -> Sample:
    return Sample(
        sample_id=f"s{number}",
        group_id="g",
        prompt=Prompt(prompt_id="g", token_ids=(1,), row={"number": number}),
        max_response_tokens=4,
    )


async def score_all(reward, count, **config):
    scorer = Scorer(reward, RolloutConfig(reward=config))
    try:
        async with asyncio.timeout(200):
            return await asyncio.gather(
                *(scorer.score(sample(i)) for i in range(count)), return_exceptions=True
            )
    finally:
        scorer.close()


def test_one_call_that_never_returns_costs_neither_the_others_nor_the_run():
    def reward(sample):
        while sample.row["number"] == 0:
            time.sleep(0.1)
        return float(sample.row["number"])

    results = asyncio.run(score_all(reward, 6, timeout_s=3.0, retries=0))
    assert isinstance(results[0], RewardError)
    assert results[0].kind == "timeout"
    assert [r.reward for r in results[1:]] == [1.0, 2.0, 3.0, 4.0, 5.0]


def test_as_many_plain_functions_run_at_once_as_the_setting_says(tmp_path):
    """known fault: a worker had at most 32 threads more than cores, whatever the setting."""
    at_once = 40 + (os.cpu_count() or 1)

    def reward(sample):
        (tmp_path / str(sample.row["number"])).touch()
        until = time.monotonic() + 20
        while len(os.listdir(tmp_path)) < at_once and time.monotonic() < until:
            time.sleep(0.05)
        return float(len(os.listdir(tmp_path)))

    results = asyncio.run(score_all(reward, at_once, concurrency=at_once))
    assert [r.reward for r in results] == [at_once] * at_once


def test_a_worker_that_dies_is_replaced_and_its_calls_are_made_again(tmp_path):
    died = tmp_path / "died"

    def reward(sample):
        if not died.exists():
            died.touch()
            os._exit(1)
        return 1.0

    results = asyncio.run(score_all(reward, 4))
    assert [r.reward for r in results] == [1.0] * 4


def test_failures_keep_their_kind_across_processes():
    def reward(sample):
        if sample.row["number"] == 0:
            raise KeyError("answer")
        return float("nan")

    raised, invalid = asyncio.run(score_all(reward, 2, retries=0))
    assert (raised.kind, invalid.kind) == ("raised", "invalid")
    assert "KeyError" in str(raised)
