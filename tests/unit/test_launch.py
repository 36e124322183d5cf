"""Which cluster a run starts or joins (launch.py), without one; a dry run's look at prompts."""

from __future__ import annotations

import dataclasses
import errno
import os
import signal
import socket
import threading
import time
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest
import ray
from ray._private import services

from ray_apr.cli import launch
from ray_apr.cli.sections import RaySettings
from ray_apr.config import PromptsConfig, RolloutConfig, TrainConfig
from ray_apr.core.exceptions import ConfigError, ResourceError, Stopped
from ray_apr.data.encoding import LengthLimit
from ray_apr.data.preview import lost_characters, preview
from ray_apr.data.rows import PromptRows
from ray_apr.data.tokenizers import encode_prompt, has_chat_template
from ray_apr.run.model import check_hub_model
from tests.run_specs import run_spec


@pytest.fixture
def inits(monkeypatch):
    """Arguments of each `ray.init`."""
    seen: list[dict] = []

    def init(**kwargs):
        seen.append(kwargs)
        return SimpleNamespace(dashboard_url="127.0.0.1:8265")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return seen


@pytest.mark.parametrize("address", [None, "local"])
def test_a_run_starts_its_own_cluster_although_one_runs_here(inits, address):
    dashboard = launch._init_ray(RaySettings(address=address, num_cpus=5))
    assert dashboard.result(timeout=0) == "127.0.0.1:8265"
    assert (inits[0]["address"], inits[0]["num_cpus"]) == ("local", 5)


def test_inside_of_a_ray_job_a_run_joins_the_cluster_of_the_job(inits, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    launch._init_ray(RaySettings(num_cpus=5))
    assert inits[0]["address"] == "auto"
    assert "num_cpus" not in inits[0]
    launch._init_ray(RaySettings(address="local"))
    assert inits[1]["address"] == "local"


@pytest.mark.parametrize("num_failures", [2, 3])
def test_a_start_of_ray_that_times_out_is_tried_again(monkeypatch, num_failures):
    """It was an error of Ray's own with no remedy, on a machine that was busy for a moment."""
    left = [num_failures]

    def init(**_):
        left[0] -= 1
        if left[0] >= 0:
            raise Exception("The current node timed out during startup. This could happen")
        return SimpleNamespace(dashboard_url="")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if num_failures < 3:
        assert launch._init_ray(RaySettings()).result(timeout=0) is None
        return
    with pytest.raises(ResourceError, match=r"not start .* 3 tries.*too busy \(load .*try again"):
        launch._init_ray(RaySettings())


def test_a_home_that_cannot_be_written_to_is_told(monkeypatch):
    """known fault: `ray.address = None: no Ray cluster can be joined there`."""

    def init_once(*_):
        raise OSError(errno.EROFS, "Read-only file system", "/home/me/.ray")

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(launch, "_init_once", init_once)
    said = r"cannot start on this machine: .*'/home/me/\.ray'; .*set HOME to a folder"
    with pytest.raises(ResourceError, match=said):
        launch._init_ray(RaySettings())


def test_the_table_of_jobs_has_the_name_of_the_run(inits):
    launch._init_ray(RaySettings(), "a-run")
    assert inits[0]["job_config"].metadata == {"ray_apr_run": "a-run"}


def test_an_address_is_joined(inits, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(services, "find_bootstrap_address", lambda temp_dir: None)
    monkeypatch.setattr(services, "find_gcs_addresses", set)
    with socket.socket() as cluster:
        cluster.bind(("127.0.0.1", 0))
        cluster.listen()
        address = f"127.0.0.1:{cluster.getsockname()[1]}"
        launch._init_ray(RaySettings(address=address))
    assert inits[0]["address"] == address
    with pytest.raises(ConfigError, match=r"ray\.address = .*no Ray cluster can be joined there"):
        launch._init_ray(RaySettings(address=address))
    launch._init_ray(RaySettings(address="auto"))
    assert [init["address"] for init in inits] == [address, "auto"]
    monkeypatch.setattr(services, "find_bootstrap_address", lambda temp_dir: address)
    said = rf"ray\.address = 'auto': no Ray cluster can be joined there: {address} .*`ray stop`"
    with pytest.raises(ConfigError, match=said):  # known fault: it named neither
        launch._init_ray(RaySettings(address="auto"))


@pytest.mark.parametrize("is_of_job", [True, False])
def test_auto_joins_a_cluster_that_lives_beside_one_that_has_died(inits, monkeypatch, is_of_job):
    """known fault: the one that `ray start` had begun last was knocked at, which is not the one
    that Ray joins: that of RAY_ADDRESS, or the only one that lives."""
    with socket.socket() as cluster, socket.socket() as closed:
        for each in (cluster, closed):
            each.bind(("127.0.0.1", 0))
        cluster.listen()
        lives, died = (f"127.0.0.1:{each.getsockname()[1]}" for each in (cluster, closed))
        monkeypatch.setattr(services, "find_bootstrap_address", lambda temp_dir: died)
        monkeypatch.setattr(services, "find_gcs_addresses", lambda: set() if is_of_job else {lives})
        monkeypatch.setenv("RAY_ADDRESS", lives if is_of_job else "")
        launch._init_ray(RaySettings(address="auto"))
    assert [init["address"] for init in inits] == ["auto"]


def test_auto_without_a_cluster_is_refused(inits, monkeypatch):
    def init(**kwargs):
        raise ConnectionError("Could not find any running Ray instance")

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(ConfigError, match=r"ray\.address = 'auto'.*any running Ray instance"):
        launch._init_ray(RaySettings(address="auto"))


@pytest.mark.parametrize(
    ("text", "most"), [("150000 100000", 1), ("10000 100000", 1), ("max 100000", 1 << 20)]
)
def test_the_cpus_of_a_container_are_those_of_its_quota(tmp_path, text, most):
    (tmp_path / "cpu.max").write_text(text)
    assert 1 <= launch.cpus_of_this_machine(tmp_path / "cpu.max") <= most
    assert launch.cpus_of_this_machine(tmp_path / "none") >= 1


class Letters:
    """A tokenizer of lower-case letters; what else there is becomes token 0."""

    chat_template = None

    def __call__(self, text, verbose):
        return {"input_ids": [max(0, ord(c) - 96) if c < "{" else 0 for c in text.lower()]}

    def decode(self, ids):
        return "".join(chr(i + 96) if i else "?" for i in ids)

    def apply_chat_template(self, *_, **__):
        raise ValueError("roles must alternate")


def look(rows, *, drops=False, limit_s=10.0):
    limit = LengthLimit(5, column="prompt", drops=drops)
    return preview(PromptRows(rows), Letters(), limit, limit_s=limit_s, num_ids=2**31)


def prompts_of(*prompts):
    return [{"prompt": prompt} for prompt in prompts]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("abcdef", r"prompts\[2\]\.prompt = '6 tokens': at most 5 leave room"),
        ("", r"prompts\[2\]\.prompt = '': is empty"),
        (None, r"prompts\[2\]\.prompt = None: must be text"),
        ([{"role": "user", "content": "a"}], "does not take these messages: roles must alternate"),
    ],
)
def test_a_dry_run_names_the_row_that_the_run_would_refuse(bad, message):
    with pytest.raises(ConfigError, match=message):
        look(prompts_of("a", "bc", bad, "d"))


def test_a_dry_run_says_what_is_left_out():
    (said,) = look(prompts_of("a", "abcdef", "abcdefg"), drops=True)
    assert said.startswith("prompts: 2 of 3 rows are left out (prompts.on_too_long: drop)")
    assert said.endswith("more than 5 tokens: the first is row 1 with 6")
    with pytest.raises(ConfigError, match="leaves none of 1 rows"):
        look(prompts_of("abcdef"), drops=True)


@pytest.mark.parametrize("name", ["prompts", "evaluation.prompts"])
def test_held_out_prompts_are_never_left_out(of_the_hub, name):
    of_the_hub({"architectures": ["Qwen3ForCausalLM"]})
    spec = run_spec(
        model="a/b", max_model_len=5, rollout=RolloutConfig(max_response_tokens=2),
        prompts=PromptsConfig(on_too_long="drop"),
    )  # fmt: skip
    rows = {name: PromptRows(prompts_of("a", "abcdef"))}
    if name == "prompts":
        assert "1 of 2 rows are left out" in launch._preview(rows, spec, print)[0]
    else:
        with pytest.raises(
            ConfigError, match=r"evaluation\.prompts\[1\]\.prompt = '6 tokens'.*prompts out, low"
        ):
            launch._preview(rows, spec, print)


@pytest.mark.parametrize(("drops", "said"), [(False, "2 x 5 prompts"), (True, "2 x 3 prompts")])
def test_a_dry_run_counts_the_batches_of_passes(of_the_hub, drops, said):
    of_the_hub({"architectures": ["Qwen3ForCausalLM"]})
    spec = run_spec(
        model="a/b", max_model_len=7 if drops else 99,
        rollout=RolloutConfig(group_size=2, max_response_tokens=2),
        prompts=PromptsConfig(on_too_long="drop"), train=TrainConfig(passes=2, batch_size=4),
    )  # fmt: skip
    told: list[str] = []
    rows = {"prompts": PromptRows(prompts_of("a", "abcdef", "b", "abcdefg", "c"))}
    launch._preview(rows, spec, told.append)
    assert told == [f"train.passes = 2: {said} fill {3 if drops else 5} batches"]
    with pytest.raises(
        ConfigError, match=r"train\.passes = 2: over . prompts fills no batch of 64"
    ):
        launch._preview(rows, dataclasses.replace(spec, train=TrainConfig(passes=2)), told.append)


@pytest.fixture
def of_the_hub(monkeypatch):
    """Sets what is known of the model ``a/b``, whose tokenizer is on this machine."""
    asked: list[bool] = []

    def know(config):
        def get(model, *, local_files_only, **_):
            asked.append(local_files_only)
            if isinstance(config, OSError):
                raise config
            return config, {}

        monkeypatch.setattr("transformers.PretrainedConfig.get_config_dict", get)
        return asked

    monkeypatch.setattr(
        "ray_apr.data.tokenizers.load_tokenizer", lambda model, *, is_here: Letters()
    )
    return know


def test_a_dry_run_refuses_a_model_of_the_hub_as_the_run_does(of_the_hub):
    asked = of_the_hub({"architectures": ["Gemma2ForCausalLM"]})
    rows = {"prompts": PromptRows(prompts_of("a"))}
    with pytest.raises(ConfigError, match=r"model = 'a/b'.*tanh"):
        launch._preview(rows, run_spec(model="a/b", max_model_len=4096), print)
    assert asked == [True], "a dry run asks nobody"


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"device": "cpu"}, r"model = 'a/b'.*heads"),
        ({"device": "cuda", "tensor_parallel_size": 4}, r"tensor_parallel_size = 4: does not div"),
    ],
)
def test_a_dry_run_refuses_what_engines_do_not_compute_of_the_hub(of_the_hub, engine, message):
    """known fault: it looked at the heads of models in folders alone."""
    of_the_hub({
        "architectures": ["Qwen2ForCausalLM"], "num_attention_heads": 14, "hidden_size": 420,
    })  # fmt: skip
    rows = {"prompts": PromptRows(prompts_of("a"))}
    spec = run_spec(model="a/b", max_model_len=4096, rollout=RolloutConfig(engine=engine))
    with pytest.raises(ConfigError, match=message):
        launch._preview(rows, spec, print)


def test_a_model_that_the_hub_does_not_give_is_refused_as_a_setting(of_the_hub):
    asked = of_the_hub(OSError("a/b is not a local folder\nand is not a valid identifier"))
    with pytest.raises(ConfigError, match=r"model = 'a/b'.*hub.*folder and is not a valid"):
        check_hub_model("a/b")
    assert asked == [False]


def test_characters_that_the_tokenizer_does_not_know_are_a_warning():
    (warning,) = look(pa.table({"prompt": ["ab", "A b", "a7", "7%"]}))
    assert "does not know '7' '%', in up to 2 rows" in warning
    assert look(prompts_of("ab", [1, 2])) == []
    assert lost_characters(Letters(), "É", encode_prompt(Letters(), "E")) == {"É"}


def test_a_dry_run_that_saw_none_that_fits_does_not_speak_for_the_rest(monkeypatch):
    """known fault: it refused a run, whose later prompts fit."""
    rows = prompts_of(*["abcdef"] * 256, "a")
    times = iter([0.0, 1.0, 11.0])
    monkeypatch.setattr("ray_apr.data.preview.time.monotonic", lambda: next(times))
    assert look(rows, drops=True) == ["prompts: the first 256 of 257 rows were looked at, in 10 s"]
    monkeypatch.undo()
    assert "256 of 257 rows are left out" in look(rows, drops=True)[0]


def test_a_dry_run_says_how_far_it_looked():
    assert look(prompts_of("a"), limit_s=-1.0) == [
        "prompts: the first 0 of 1 rows were looked at, in -1 s"
    ]


def test_a_chat_template_is_found_wherever_it_may_be(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert not has_chat_template(str(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    assert has_chat_template(str(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    assert has_chat_template(str(tmp_path))
    assert has_chat_template("owner/name"), "nobody knows"


@pytest.mark.parametrize(("users", "expected"), [(None, "1"), ("0", "0")])
def test_a_run_that_we_start_is_in_the_dashboards_table_of_ray_train(monkeypatch, users, expected):
    name = "RAY_TRAIN_ENABLE_STATE_TRACKING"
    monkeypatch.setenv(name, users or "")
    if users is None:
        monkeypatch.delenv(name)
    seen = []

    class Trainer:
        def fit(self, progress):
            seen.append(os.environ[name])

    none = Future()
    none.set_result(None)
    begin(monkeypatch, Trainer(), none)
    assert seen == [expected]


def test_a_run_goes_on_while_its_dashboard_starts(monkeypatch):
    dashboard, said = Future(), []

    class Trainer:
        def fit(self, progress):
            progress("trained")
            threading.Timer(0.1, dashboard.set_result, ["127.0.0.1:8265"]).start()

    begin(monkeypatch, Trainer(), dashboard, said.append)
    assert said == ["trained", "dashboard: http://127.0.0.1:8265", "Ray has ended"]


def test_a_run_without_a_dashboard_says_so(monkeypatch, caplog):
    """It was an error, by which Ray's busy machine ended a run that needs no dashboard."""
    dashboard, said = Future(), []
    dashboard.set_exception(Exception("Failed to start the dashboard\nits log"))

    class Trainer:
        def fit(self, progress):
            progress("trained")

    begin(monkeypatch, Trainer(), dashboard, said.append)
    assert said == ["trained", "Ray has ended"]
    assert "no Ray dashboard: Failed to start the dashboard" in caplog.text


def test_a_signal_ends_a_run_that_is_still_checked(monkeypatch):
    """It killed the process: servers that workers are forked from outlived it for seconds."""
    ended = []

    @contextmanager
    def servers(_):
        try:
            yield dict
        finally:
            ended.append("servers")

    def check(*_):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)

    monkeypatch.setattr(launch, "_fork_servers", servers)
    monkeypatch.setattr(launch, "read_prompts", lambda *_: None)
    monkeypatch.setattr(launch, "make_trainer", check)
    with pytest.raises(Stopped):
        launch.run_training(SimpleNamespace(evaluation_prompts=None, prompts=None))
    assert ended == ["servers"]


def begin(monkeypatch, trainer, dashboard, say=lambda _: None):
    """A run of which nothing is real."""
    monkeypatch.setattr(launch, "_init_ray", lambda *_, log_to_driver: dashboard)
    monkeypatch.setattr(launch, "read_prompts", lambda *_: None)
    monkeypatch.setattr(launch, "make_trainer", lambda *_: trainer)
    monkeypatch.setattr(launch, "_fork_servers", lambda *_: nullcontext(dict))
    monkeypatch.setattr(ray, "shutdown", lambda: say("Ray has ended"))
    monkeypatch.setattr("ray_apr.core.imports._TOKENIZERS", "json")
    settings = SimpleNamespace(
        evaluation_prompts=None, prompts=None, ray=None, run_dir=Path("runs/a-run")
    )
    launch.run_training(settings, progress=say)
