"""RunSettings: one YAML file, overrides, and an error that names the key for all that is wrong."""

from __future__ import annotations

import dataclasses
import json
import pickle
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import save_file

from ray_apr.cli.launch import trainer_arguments
from ray_apr.cli.plan import make_plan
from ray_apr.cli.prompt_files import read_prompts
from ray_apr.cli.settings import load_settings
from ray_apr.cli.user_files import load_environment, load_function, read_json_rows
from ray_apr.core.exceptions import ConfigError
from ray_apr.run.model import num_parameters
from tests.schedules import Driven

BASE = """\
mode: apr
model: base_model
prompts: prompts.jsonl
reward: task.py:reward
rollout: {group_size: 4, max_response_tokens: 32}
train:
  steps: 3
  batch_size: 8
  learning_rate: 1e-6
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a model, prompts and a reward."""
    (tmp_path / "base_model").mkdir()
    config = {"architectures": ["Qwen3ForCausalLM"]}
    (tmp_path / "base_model" / "config.json").write_text(json.dumps(config))
    (tmp_path / "base_model" / "tokenizer.json").write_text("{}")
    rows = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "1+2=", "answer": "3"}]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (tmp_path / "prompts.json").write_text(json.dumps(rows))
    (tmp_path / "more.jsonl").write_text('{"prompt": "2+2=", "source": "sums"}\n')
    (tmp_path / "helper.py").write_text("def half():\n    return 0.5\n")
    (tmp_path / "task.py").write_text(
        "import helper\nanswer = 3\ndef reward(sample):\n    return helper.half()\n"
    )
    (tmp_path / "tools.py").write_text(
        "class Tools:\n    def step(self, sample):\n        return sample\n"
        "class Broken:\n    def __init__(self, url):\n        pass\n"
    )
    (tmp_path / "run.yaml").write_text(BASE)
    return tmp_path


def test_an_objective_is_a_preset_with_functions_of_the_user(folder: Path) -> None:
    (folder / "run.yaml").write_text(
        BASE + "algorithm: {preset: gspo, clip_high: 0.1, advantage: 'task.py:reward'}\n"
    )
    settings = load_settings(folder / "run.yaml")
    assert (settings.algorithm.loss, settings.algorithm.clip_high) == ("gspo", 0.1)
    assert settings.objective == {"advantage": "task.py:reward"}
    plan = make_plan(settings)
    assert plan["run"]["objective"].startswith("gspo loss of task.py:reward advantages")


@pytest.mark.parametrize(
    "text",
    [
        "algorithm: {advantage: 'task.py:reward'}\nrollout: {group_size: 1}\n",
        "algorithm: {preset: gspo, loss: 'task.py:reward', proximal: forward}\n",
    ],
)
def test_what_a_function_replaces_is_not_checked(folder: Path, text: str) -> None:
    base = BASE.replace("rollout: {group_size: 4, max_response_tokens: 32}\n", "")
    (folder / "run.yaml").write_text(base + text)
    assert load_settings(folder / "run.yaml").objective


def test_a_clip_beside_a_loss_of_the_user_is_refused(folder: Path) -> None:
    text = "algorithm: {preset: cispo, loss: 'task.py:reward', proximal: forward, clip_high: 2.0}\n"
    (folder / "run.yaml").write_text(BASE + text)
    with pytest.raises(ConfigError, match=r"algorithm\.clip_high = 2\.0: has no meaning"):
        load_settings(folder / "run.yaml")


def test_scheduling_rules_of_the_user_are_named_in_the_section(folder: Path) -> None:
    (folder / "rules.py").write_text(
        "class FewestLeft:\n    def __call__(self, live):\n"
        "        return live.sample.remaining_budget\n"
        "def all_there_is_room_for(load):\n    return load.room\n"
    )
    (folder / "run.yaml").write_text(
        BASE + "partial_rollout:\n  resume_order: rules.py:FewestLeft\n"
        "  admission: rules.py:all_there_is_room_for\n  max_staleness: 2\n"
    )
    settings = load_settings(folder / "run.yaml")
    rules = {
        name: load_function(f"partial_rollout.{name}", spec, settings.base_dir)
        for name, spec in settings.scheduling.items()
    }
    config = dataclasses.replace(settings.partial_rollout, **rules)
    assert config.max_staleness == 2
    assert (config.mode, type(config.resume_order).__name__) == ("apr", "FewestLeft")
    scheduler = Driven(config, batch_size=8, group_size=4, max_inflight=8)
    scheduler.admit_some()
    (first, second, *_) = scheduler.start_all()
    scheduler.interrupt(first, tokens=1)
    scheduler.interrupt(second, tokens=5)
    assert scheduler.start_all()[:2] == [second, first]
    with pytest.raises(ConfigError, match=r"partial_rollout.admission.*it defines"):
        load_settings(folder / "run.yaml", ["partial_rollout.admission=rules.py:nothing"])


def test_reads_all_sections_and_resolves_paths(folder: Path) -> None:
    settings = load_settings(folder / "run.yaml")
    assert settings.mode == "apr"
    assert settings.model == str(folder / "base_model")
    assert settings.prompts.path == str(folder / "prompts.jsonl")
    assert settings.train.learning_rate == 1e-6  # a string in YAML 1.1
    assert settings.rollout.group_size == 4
    assert settings.scaling.resources_per_worker == {"CPU": 1.0}
    assert settings.ray.namespace == "ray_apr"


def test_sync_is_the_preset(folder: Path) -> None:
    partial = load_settings(folder / "run.yaml", ["mode=sync"]).partial_rollout
    assert (partial.mode, partial.max_staleness, partial.oversampling_factor) == ("sync", 0, 1.0)
    assert partial.interrupt == "never"


def test_overrides_replace_nested_values(folder: Path) -> None:
    overrides = [
        "train.seed=1",
        "prompts.limit=1",
        "rollout.engine.kwargs.max_num_seqs=64",
        "scaling.use_gpu=true",
        "rollout.engine.max_model_len=null",
        "train.betas=[0.8, 0.9]",
        "run.name=mine",
    ]
    settings = load_settings(folder / "run.yaml", overrides)
    assert settings.train.seed == 1
    assert settings.train.betas == (0.8, 0.9)
    assert settings.prompts.limit == 1
    assert settings.rollout.engine.kwargs == {"max_num_seqs": 64}
    assert settings.scaling.resources_per_worker == {"CPU": 1.0}, "the GPU is Ray Train's default"
    assert settings.run_dir == Path("runs").resolve() / "mine"


def test_several_files_of_prompts_have_weights(folder: Path) -> None:
    (folder / "run.yaml").write_text(
        BASE.replace("prompts: prompts.jsonl", """\
prompts:
  - {path: prompts.jsonl, weight: 2}
  - {path: prompts.json, weight: 1, limit: 1, name: other}""")
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"have one name; give each another `name`"):
        load_settings(folder / "run.yaml", ["prompts=[{path: prompts.jsonl, weight: 2}, "
                                            "{path: prompts.json, weight: 1}]"])  # fmt: skip
    settings = load_settings(folder / "run.yaml", ["prompts.on_too_long=drop"]).prompts
    assert settings.weights == {"prompts": 2.0, "other": 1.0}
    assert settings.on_too_long == "drop"
    told = {"weights": settings.weights, "on_too_long": "drop", "source_column": "source"}
    assert dataclasses.asdict(settings.config) == told
    rows = read_prompts(settings)
    assert [row["source"] for row in rows.slice(0, 9)] == ["prompts", "prompts", "other"]
    plan = make_plan(load_settings(folder / "run.yaml"))
    assert plan["run"]["prompts"].endswith("prompts.json (weight 1)")
    assert plan["run"]["first prompts only"] == "all, 1"


def test_the_plan_names_the_model_s_size_and_the_learning_rate() -> None:
    file = Path(__file__).parents[2] / "examples" / "arithmetic" / "quickstart.yaml"
    plan = make_plan(load_settings(file))["run"]
    assert (plan["parameters"], plan["learning rate"]) == ("593,408", "0.0001, constant")
    others = ["train.lora={rank: 4}", "train.lr_schedule=cosine", "train.warmup_steps=5"]
    plan = make_plan(load_settings(file, [*others, "train.steps=20"]))["run"]
    assert plan["parameters"] == "593,408; adapters of rank 4 are trained"
    assert plan["learning rate"] == "0.0001, cosine after a warm-up of 5 steps"


@pytest.mark.parametrize(
    ("device", "size", "cpus"), [("auto", 2, 7), ("cuda", 2, 7), ("cuda", 1, 3)]
)
def test_the_plan_counts_the_cpus_of_an_engine_s_workers(device, size, cpus) -> None:
    """known fault: not with device auto, though engines of several GPUs are on GPUs alone."""
    file = Path(__file__).parents[2] / "examples" / "arithmetic" / "quickstart.yaml"
    engine = [f"rollout.engine.device={device}", f"rollout.engine.tensor_parallel_size={size}"]
    others = ["rollout.num_replicas=2", "scaling={num_workers: 1, num_cpus_per_worker: 1}"]
    plan = make_plan(load_settings(file, [*engine, *others]))["resources"]
    assert plan["Ray CPUs reserved"] == cpus  # 2 x (1 + workers of several) + 1


@pytest.mark.parametrize(
    ("given", "told"),
    [
        # 3 batches of 128; 2 x 4 layers x 2 heads x 32 numbers of 2 bytes
        ({"device": "cuda"}, "384 requests of 256 tokens, 0.09 GiB"),
        ({"device": "auto", "max_model_len": 240}, "384 requests of 240 tokens, 0.09 GiB"),
        ({"device": "cuda", "dtype": "float32"}, "384 requests of 256 tokens, 0.19 GiB"),
        (
            {"device": "cuda", "kwargs": {"kv_cache_memory_bytes": 9}},
            "as rollout.engine.kwargs says",
        ),
        ({"device": "cpu"}, "as vLLM takes it on a CPU"),
        ({"device": "cpu", "factory": "json:loads"}, "as json:loads takes it"),
    ],
)
def test_the_plan_says_what_an_engine_s_cache_takes(given, told) -> None:
    file = Path(__file__).parents[2] / "examples" / "arithmetic" / "quickstart.yaml"
    engine = [f"rollout.engine.{key}={json.dumps(value)}" for key, value in given.items()]
    plan = make_plan(load_settings(file, engine))["resources"]
    assert plan["KV cache of an engine, at most"] == told


def test_the_plan_counts_evaluations_in_an_engine_s_cache(folder) -> None:
    held_out = {"every": 2, "prompts": "prompts.parquet", "max_inflight": 7}
    file = Path(__file__).parents[2] / "examples" / "arithmetic" / "quickstart.yaml"
    others = ["rollout.engine.device=cuda", f"evaluation={json.dumps(held_out)}"]
    plan = make_plan(load_settings(file, others))["resources"]
    assert plan["KV cache of an engine, at most"].startswith("391 requests")


def test_the_plan_names_what_drops_groups() -> None:
    """known fault: with partial_rollout.filter_zero_variance it said that each one is trained."""
    file = Path(__file__).parents[2] / "examples" / "arithmetic" / "quickstart.yaml"
    equal = "drops groups whose rewards are all equal"
    for own, drops, told in (
        ("null", "false", "none: every scored group is trained"),
        ("null", "true", equal),
        ("task.py:reward", "false", "task.py:reward"),
        ("task.py:reward", "true", f"task.py:reward, and {equal}"),
    ):
        given = [f"group_filter={own}", f"partial_rollout.filter_zero_variance={drops}"]
        assert make_plan(load_settings(file, given))["run"]["group filter"] == told


def test_parameters_of_weights_that_are_not_here_or_broken_are_not_known(tmp_path: Path) -> None:
    assert num_parameters("owner/name") is None
    assert num_parameters(str(tmp_path)) is None
    for broken in (b"", b"\xff" * 64, b"\2\0\0\0\0\0\0\0[]"):
        (tmp_path / "model.safetensors").write_bytes(broken)
        assert num_parameters(str(tmp_path)) is None
    for number in (1, 2):  # as a large model has them
        save_file({"a": torch.zeros(3, 4), "b": torch.zeros(5)}, tmp_path / f"{number}.safetensors")
    (tmp_path / "model.safetensors").unlink()
    assert num_parameters(str(tmp_path)) == 34


def test_several_files_without_weights_are_one_dataset(folder: Path) -> None:
    settings = load_settings(folder / "run.yaml", ["prompts=[prompts.jsonl, prompts.json]"])
    assert settings.prompts.weights is None
    rows = read_prompts(settings.prompts)
    assert len(rows) == 4 and rows.names == ["prompt", "answer"], "no column of ours"


@pytest.mark.parametrize("weight", [0, -1, "much", "true", ".nan", ".inf"])
def test_weights_of_files_are_numbers_above_0(folder: Path, weight) -> None:
    files = f"prompts=[{{path: prompts.jsonl, weight: {weight}}}]"
    with pytest.raises(ConfigError, match=r"prompts\.files.*weight = .*(above 0|must be a number)"):
        load_settings(folder / "run.yaml", [files])


def test_a_weight_is_of_all_files_or_of_none(folder: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"prompts\.files = \['.*prompts\.json'\]: have no weight"
    ):
        load_settings(
            folder / "run.yaml", ["prompts=[{path: prompts.jsonl, weight: 1}, prompts.json]"]
        )


def test_the_column_of_sources_is_none_of_the_users(folder: Path) -> None:
    override = "prompts=[{path: more.jsonl, weight: 1}]"
    settings = load_settings(folder / "run.yaml", [override]).prompts
    with pytest.raises(ConfigError, match=r"source_column = 'source': .*has such a column"):
        read_prompts(settings)
    other = load_settings(folder / "run.yaml", [override, "prompts.source_column=file"]).prompts
    assert read_prompts(other).slice(0, 1)[0]["file"] == "more"


@pytest.mark.parametrize("prompts", ["more.jsonl", "[more.jsonl, {path: more.jsonl, limit: 1}]"])
def test_a_column_of_sources_without_weights_is_refused(folder: Path, prompts) -> None:
    """known fault: no row got such a column, nor was one that is there looked at."""
    given = [f"prompts={prompts}", "prompts.source_column=file"]
    with pytest.raises(ConfigError, match=r"^prompts\.source_column = 'file': needs weights"):
        load_settings(folder / "run.yaml", given)


def test_held_out_prompts_of_several_files_are_suites(folder: Path) -> None:
    text = "evaluation={prompts: [prompts.jsonl, {path: prompts.json, name: hard, limit: 1}]}"
    settings = load_settings(folder / "run.yaml", [text])
    assert settings.evaluation is not None and settings.evaluation.suite_column == "suite"
    rows = read_prompts(settings.evaluation_prompts)
    assert rows.column("suite") == ["prompts", "prompts", "hard"]
    suites = folder / "suites"
    suites.mkdir()
    for name in ("b.jsonl", "a.jsonl", "notes.txt"):
        (suites / name).write_bytes((folder / "prompts.jsonl").read_bytes())
    text = "evaluation={prompts: suites, suite_column: task}"
    settings = load_settings(folder / "run.yaml", [text])
    tasks = read_prompts(settings.evaluation_prompts).column("task")
    assert tasks == ["a", "a", "b", "b"], "in the order of their names"
    (folder / "nothing").mkdir()
    with pytest.raises(ConfigError, match="put one for each suite there"):
        load_settings(folder / "run.yaml", ["evaluation={prompts: nothing}"])


def test_suites_may_have_other_columns_and_a_column_that_one_lacks_is_none(folder: Path) -> None:
    pq.write_table(pa.table({"prompt": ["a"], "answer": ["1"]}), folder / "a.parquet")
    pq.write_table(pa.table({"tests": ["x"], "prompt": ["b"]}), folder / "b.parquet")
    for files in ("a.parquet, b.parquet", "a.parquet, b.parquet, more.jsonl"):
        settings = load_settings(folder / "run.yaml", [f"evaluation={{prompts: [{files}]}}"])
        rows = read_prompts(settings.evaluation_prompts)
        assert rows.column("suite")[:2] == ["a", "b"]
        assert rows.column("answer")[:2] == ["1", None]
        assert rows.column("tests")[:2] == [None, "x"]
        assert "tests" in rows.slice(0, 1)[0]


def test_a_suite_has_a_reward_of_its_own(folder: Path) -> None:
    text = "evaluation={prompts: [prompts.jsonl, more.jsonl], rewards: {more: 'task.py:reward'}}"
    settings = load_settings(folder / "run.yaml", [text])
    assert make_plan(settings)["run"]["evaluation"].endswith(", more scored by task.py:reward")
    config = trainer_arguments(settings)["evaluation_config"]
    assert config.suite_column == "suite" and config.rewards["more"](None) == 0.5


def test_a_suite_has_settings_of_its_own(folder: Path) -> None:
    text = "evaluation={prompts: [prompts.jsonl, more.jsonl], top_p: 0.9}"
    more = ["evaluation.suites.more.samples=8", "evaluation.suites.more.temperature=0.7"]
    settings = load_settings(folder / "run.yaml", [text, *more])
    said = "1 samples a prompt, more with samples 8 and temperature 0.7"
    assert make_plan(settings)["run"]["evaluation"].endswith(said)
    config = trainer_arguments(settings)["evaluation_config"]
    drawn = [config.of_row({"suite": name}) for name in ("prompts", "more")]
    assert [(of.samples, of.temperature, of.top_p) for of in drawn] == [(1, 0, 0.9), (8, 0.7, 0.9)]


@pytest.mark.parametrize("second", ["b.parquet", "b.jsonl"])
def test_parquet_files_go_together_with_files_of_any_kind(folder: Path, second) -> None:
    pq.write_table(pa.table({"prompt": ["a", "b"], "answer": ["1", "2"]}), folder / "a.parquet")
    if second.endswith(".jsonl"):
        (folder / second).write_text('{"answer": "3", "prompt": "c"}\n')
    else:
        pq.write_table(pa.table({"answer": ["3"], "prompt": ["c"]}), folder / second)
    override = f"prompts=[{{path: a.parquet, weight: 1, limit: 1}}, {{path: {second}, weight: 3}}]"
    rows = read_prompts(load_settings(folder / "run.yaml", [override]).prompts)
    assert [(r["prompt"], r["answer"], r["source"]) for r in rows.slice(0, 9)] == [
        ("a", "1", "a"), ("c", "3", "b"),
    ]  # fmt: skip


def test_parquet_files_of_other_types_are_refused(folder: Path) -> None:
    pq.write_table(pa.table({"prompt": ["a"], "answer": ["1"]}), folder / "a.parquet")
    pq.write_table(pa.table({"prompt": ["b"], "answer": [2]}), folder / "b.parquet")
    settings = load_settings(folder / "run.yaml", ["prompts=[a.parquet, b.parquet]"]).prompts
    with pytest.raises(ConfigError, match=r"prompts\.files.*columns of other types"):
        read_prompts(settings)


@pytest.mark.parametrize(
    ("override", "ends", "batches", "samples"),
    [
        ("train.seed=1", "3 batches", 3, 24),
        ("train.steps=null", "100 batches", 100, 800),
        ("train.total_samples=20", "20 samples, rounded up to whole batches", 3, 24),
        ("train.passes=2", "passes over the prompts: 2, rounded down", "counted", "counted"),
    ],
)
def test_the_plan_says_where_a_run_ends(folder: Path, override, ends, batches, samples) -> None:
    without = [] if override == "train.seed=1" else ["train.steps=null"]
    plan = make_plan(load_settings(folder / "run.yaml", [*without, override]))["whole run"]
    assert plan["ends after"].startswith(ends)
    for name, expected in (("batches", batches), ("samples trained", samples)):
        assert plan[name] == expected or plan[name] == f"{expected} with the prompts"


def test_a_run_may_begin_with_a_checkpoint_of_another_one(folder: Path, monkeypatch) -> None:
    monkeypatch.chdir(folder)
    (folder / "other/checkpoint_7").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"run\.checkpoint.*has a file progress\.json") as refused:
        load_settings(folder / "run.yaml", ["run.checkpoint=other/checkpoint_7"])
    assert "of a run" not in str(refused.value)
    (folder / "other/checkpoint_manager_snapshot.json").touch()
    with pytest.raises(ConfigError, match=r"folder of a run: name one of the checkpoint_"):
        load_settings(folder / "run.yaml", ["run.checkpoint=other"])
    (folder / "other/checkpoint_7/progress.json").touch()
    settings = load_settings(folder / "run.yaml", ["run.checkpoint=other/checkpoint_7"])
    path = str(folder / "other/checkpoint_7")
    assert trainer_arguments(settings)["checkpoint"] == path
    assert make_plan(settings)["run"]["begins with"] == path
    remote = load_settings(folder / "run.yaml", ["run.checkpoint=s3://bucket/run/checkpoint_7"])
    assert trainer_arguments(remote)["checkpoint"] == "s3://bucket/run/checkpoint_7"
    anew = load_settings(folder / "run.yaml")
    assert trainer_arguments(anew)["checkpoint"] is None
    assert make_plan(anew)["run"]["begins with"] == "the model"


def test_local_is_local(folder: Path) -> None:
    settings = load_settings(folder / "run.yaml", ["ray={address: local, num_cpus: 2}"])
    assert (settings.ray.address, settings.ray.num_cpus) == ("local", 2)


def test_default_run_name_has_file_mode_and_time(folder: Path) -> None:
    settings = load_settings(folder / "run.yaml", now_s=0.0)
    assert settings.run.name.startswith("run-apr-19")
    assert settings.run_dir.name == settings.run.name


@pytest.mark.parametrize(
    ("override", "field", "remedy"),
    [
        ("modes=apr", "modes", "known: mode, model"),
        ("train.step=3", "train.step", "known: steps"),
        ("scaling.workers=2", "scaling.workers", "num_workers"),
        ("run.folder=x", "run.folder", "storage_path"),
        ("run.storage_path=s4://bucket/runs", "run.storage_path", "begins with one of file, s3"),
        ("run.storage_path=5", "run.storage_path", "must be text"),
        ("run.checkpoint=.", "run.checkpoint", "which has a file progress.json"),
        ("run.checkpoint=s4://bucket/runs", "run.checkpoint", "begins with one of file, s3"),
        ("run.checkpoint=5", "run.checkpoint", "must be text"),
        ("run.resume_from_path=x", "run.resume_from_path", "did you mean checkpoint"),
        ("prompts.file=x", "prompts.file", "limit"),
        ("train.steps=many", "train.steps", "whole number"),
        ("train.steps=true", "train.steps", "whole number"),
        ("train.steps=0", "train.steps", "at least 1"),
        ("train.passes=1", "train.steps", "so does train.passes; leave one of them out"),
        ("train.total_samples=0", "train.total_samples", "at least 1"),
        ("train.learning_rate=fast", "train.learning_rate", "a number"),
        ("train.betas=[0.9, x]", "train.betas", "a list"),
        ("train.activation_checkpointing=2", "train.activation_checkpointing", "true or false"),
        ("rollout.engine.kwargs=[1]", "rollout.engine.kwargs", "section"),
        ("train.lora=8", "train.lora", "section"),
        ("train.lora.rank=many", "train.lora.rank", "whole number"),
        ("train.lora.ranks=8", "train.lora.ranks", "known: rank"),
        ("rollout.prompt_column=5", "rollout.prompt_column", "text"),
        ("rollout.prompt_column=question", "rollout.prompt_column", "only prompt, answer"),
        (
            "rollout.engine.max_model_len=long",
            "rollout.engine.max_model_len",
            "whole number or null",
        ),
        ("rollout.engine.device=tpu", "rollout.engine.device", "auto, cpu, cuda"),
        ("rollout=3", "rollout", "section"),
        ("algorithm.clip_low=2", "algorithm.clip_low", r"\(0, 1\]"),
        ("algorithm.preset=ppo", "algorithm.preset", "grpo, dapo"),
        ("algorithm.loss=5", "algorithm.loss", "file.py:name"),
        ("algorithm.loss=task.py:los", "algorithm.loss", "it defines reward"),
        ("buffer.wait_timeout_s=-1", "buffer.wait_timeout_s", "above 0"),
        ("partial_rollout.mode=sync", "partial_rollout.mode", "top level"),
        ("partial_rollout.max_staleness=-1", "partial_rollout.max_staleness", "at least 0"),
        ("mode=asynch", "mode", "sync, one_step_off, stream"),
        ("mode=3", "mode", "one of sync, one_step_off"),
        ("model=null", "model", "is missing"),
        ("model=3", "model", "text"),
        ("model=no_model", "model", "make the model"),
        ("model=base_model/sub", "model", "no folder"),
        ("model=.", "model", "config.json"),
        ("prompts=other.jsonl", "prompts", "no file"),
        ("prompts=run.yaml", "prompts", r"\.parquet"),
        ("prompts.limit=0", "prompts.limit", "at least 1"),
        ("prompts=[]", "prompts.files", "at least one"),
        ("prompts=[prompts.jsonl, other.jsonl]", "prompts.files", "no file"),
        ("evaluation.prompts=other.jsonl", "evaluation.prompts", "no file"),
        ("prompts=[prompts.jsonl, {weight: 2}]", "prompts.files.path", "is missing"),
        ("prompts=[{path: prompts.jsonl, share: 2}]", "prompts.files.share", "known: path, limit"),
        ("prompts=[prompts.jsonl, more.jsonl]", "prompts.files", "other columns: answer, source"),
        ("prompts={path: prompts.jsonl, files: [prompts.json]}", "prompts.path", "left out beside"),
        ("prompts.weights={a: 0}", "prompts.weights", "above 0; leave a out"),
        ("prompts.weights={}", "prompts.weights", "or be left out"),
        ("prompts.weights=[1]", "prompts.weights", "section"),
        ("prompts.on_too_long=cut", "prompts.on_too_long", "one of error, drop"),
        (
            "evaluation={prompts: {path: prompts.json, on_too_long: drop}}",
            "evaluation.prompts.on_too_long",
            "known: path, limit",
        ),
        ("evaluation={prompts: [prompts.jsonl, prompts.jsonl]}", "evaluation.prompts", "`name`"),
        (
            "evaluation={prompts: [{path: prompts.json, weight: 2}]}",
            "evaluation.prompts",
            "have a weight",
        ),
        (
            "evaluation={prompts: prompts.json, rewards: {prompts: 'task.py:reward'}}",
            "evaluation.rewards",
            "need suites",
        ),
        (
            "evaluation={prompts: [prompts.json], rewards: {prompts: 'task.py:score'}}",
            "evaluation.rewards.prompts",
            "it defines reward",
        ),
        (
            "evaluation={prompts: [prompts.json], rewards: {prompts: 3}}",
            "evaluation.rewards.prompts",
            "must be text",
        ),
        (
            "evaluation={prompts: [prompts.json], rewards: 'task.py:reward'}",
            "evaluation.rewards",
            "must be a section",
        ),
        ("evaluation={prompts: prompts.json, suites: {a: {}}}", "evaluation.suites", "need suites"),
        *(
            (f"evaluation={{prompts: [prompts.json], suites: {given}}}", f"evaluation.{key}", said)
            for given, key, said in (
                ("{prompts: 8}", "suites.prompts", "mapping of settings"),
                ("{prompts: {samples: 0}}", "suites.prompts.samples", "at least 1"),
                ("{prompts: {sample: 4}}", "suites.prompts.sample", "did you mean"),
                ("{prompts: {samples: 4}}", "suites.prompts.samples", "temperature above 0"),
                ("{prompts: {temperature: hot}}", "suites.prompts.temperature", "finite number"),
                ("{prompts: {temperature: 0.001}}", "suites.prompts.temperature", "at least 0.01"),
                ("{prompts: {top_p: 2}}", "suites.prompts.top_p", r"in \(0, 1\]"),
                (
                    "{prompts: {max_response_tokens: 100000}}",
                    "suites.prompts.max_response_tokens",
                    "at most rollout.max_response_tokens",
                ),
                ("[prompts]", "suites", "must be a section"),
            )
        ),
        ("evaluation={prompts: []}", "evaluation.prompts", "at least one"),
        ("evaluation={prompts: prompts.json, suite_column: ''}", "evaluation.suite_column", "name"),
        ("reward=task", "reward", "file.py:name"),
        ("reward=other.py:reward", "reward", "no file"),
        ("reward=task.py:score", "reward", "it defines reward"),
        ("reward=no_such_package:reward", "reward", "no module"),
        ("reward=null", "reward", "is missing"),
        ("environment=tools.py:Nothing", "environment", "it defines Tools, Broken"),
        ("environment=3", "environment", "must be text"),
        ("group_filter=task.py:keep", "group_filter", "it defines reward"),
        ("train.batch_size=6", "train.batch_size", "multiple of"),
        ("scaling.num_workers=9", "train.batch_size", "1 x 9"),
        ("scaling.num_workers=0", "scaling.num_workers", "at least 1"),
        ("run.name=a/b", "run.name", "one folder"),
        ('run.name="a\\0b"', "run.name", "one folder"),
        (f"run.name={'n' * 256}", "run.name", "one folder"),
        ("ray.num_cpus=0", "ray.num_cpus", "at least 1"),
        ("ray={address: auto, num_cpus: 2}", "ray.num_cpus", "leave it out"),
        ("train.steps", "--set", "key=value"),
        ("train..steps=1", "--set", "key=value"),
        ("mode.x=1", "--set", "no section"),
        (
            "train.seed=-012",
            "--set train.seed, line 1",
            "write it in decimals, or as text in quotes",
        ),
        ("train.eps=1:30.5", "--set train.eps, line 1", "1:30.5 is a number of base 8 or 60"),
        ("train.steps=[1", "--set train.steps, line 1", "correct this line"),
    ],
)
def test_each_bad_value_is_named(folder: Path, override: str, field: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match=remedy) as caught:
        load_settings(folder / "run.yaml", [override])
    assert caught.value.field == field
    assert str(caught.value).startswith(field)


def test_a_reward_that_is_made_is_among_those_that_a_file_defines(folder: Path) -> None:
    """known fault: of a file with nothing else it was said to define no function at all."""
    text = "from ray_apr.rewards import exact_match\nLIMIT = 3\nreward = exact_match()\n"
    (folder / "made.py").write_text(text)
    with pytest.raises(ConfigError, match=r"defines no rewrad; it defines reward$"):
        load_settings(folder / "run.yaml", ["reward=made.py:rewrad"])


@pytest.mark.parametrize(
    ("text", "field", "message"),
    [
        (BASE + "mode: sync\n", "run.yaml, line 10", "duplicate key 'mode'"),
        (BASE + "  steps: 4\n", "run.yaml, line 10", "duplicate key 'steps'"),
        (BASE + "  seed: 012\n", "run.yaml, line 10", "012 is a number of base 8 or 60 to YAML; w"),
        (BASE + "buffer: {wait_timeout_s: 1:30}\n", "run.yaml, line 10", "1:30 is .* in decimals"),
        (BASE + "buffer: {wait_timeout_s: 3\n", "run.yaml, line 11", "expected"),
        (BASE + "\tx: 1\n", "run.yaml, line 10", "cannot start any token"),
        ("- 1\n", "config", "key: value"),
        ("", "config", "key: value"),
    ],
)
def test_bad_yaml_names_the_line(folder: Path, text: str, field: str, message: str) -> None:
    (folder / "run.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        load_settings(folder / "run.yaml")
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("text", "value"), [("1e-6", 1e-6), ("1E6", 1e6), ("1_000", 1000), ("0", 0), ("00.5", 0.5)]
)
def test_numbers_are_read_as_people_read_them(folder: Path, text: str, value: float) -> None:
    assert (
        load_settings(folder / "run.yaml", [f"train.weight_decay={text}"]).train.weight_decay
        == value
    )


def test_missing_file_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        load_settings(tmp_path / "none.yaml")


def test_hub_id_and_json_prompts_are_taken(folder: Path) -> None:
    settings = load_settings(folder / "run.yaml", ["model=Qwen/Qwen3-0.6B", "prompts=prompts.json"])
    assert settings.model == "Qwen/Qwen3-0.6B"


@pytest.mark.parametrize(
    ("name", "content"), [("a.json", "[]"), ("a.jsonl", ""), ("a.jsonl", "{"), ("a.parquet", "x")]
)
def test_broken_prompts_files(folder: Path, name: str, content: str) -> None:
    (folder / name).write_text(content)
    with pytest.raises(ConfigError, match="cannot be read as"):
        load_settings(folder / "run.yaml", [f"prompts={name}"])


def test_rows_keep_their_types_and_a_bad_one_is_named(folder: Path) -> None:
    for name in ("prompts.jsonl", "prompts.json"):
        assert [row["answer"] for row in read_json_rows(folder / name)[0]] == ["2", "3"]
    (folder / "bad.jsonl").write_text('{"prompt": "a"}\n\n{"prompt\n')
    with pytest.raises(ConfigError, match=r"bad\.jsonl, line 3"):
        read_json_rows(folder / "bad.jsonl")
    (folder / "bad.jsonl").write_text('{"prompt": "a"}\n3\n')
    with pytest.raises(ConfigError, match=r"bad\.jsonl, line 2"):
        read_json_rows(folder / "bad.jsonl")
    (folder / "bad.json").write_text('[{"prompt": "a"}, 3]')
    with pytest.raises(ConfigError, match=r"bad\.json, row 1"):
        read_json_rows(folder / "bad.json")


def test_a_column_of_two_kinds_is_refused_with_both_rows(folder: Path) -> None:
    """known fault: the dry run passed it, and the run ended in Ray Data: "Failed to unify schemas"
    without a row."""
    rows = [{"answer": 2, "hint": None}, {"answer": 2.5, "hint": "x"}, {}, {"answer": "8/3"}]
    (folder / "mixed.jsonl").write_text("\n".join(map(json.dumps, rows)))
    message = r"mixed\.jsonl, line 4.* has a text as answer, and line 1 a number; make them alike"
    with pytest.raises(ConfigError, match=message):
        read_json_rows(folder / "mixed.jsonl")
    (folder / "mixed.json").write_text(json.dumps(rows[:3]))
    assert len(read_json_rows(folder / "mixed.json")[0]) == 3
    (folder / "mixed.json").write_text(json.dumps([{"ok": True}, {"ok": 1}]))
    with pytest.raises(ConfigError, match=r"row 1.* has a number as ok, and row 0 true or false"):
        read_json_rows(folder / "mixed.json")


def test_reading_settings_loads_nothing_heavy(folder: Path) -> None:
    code = (
        "import sys; from ray_apr.cli.settings import load_settings; load_settings(sys.argv[1]); "
        "print([m for m in ('ray', 'torch', 'vllm', 'task', 'helper') if m in sys.modules])"
    )
    command = [sys.executable, "-c", code, str(folder / "run.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_reward_of_a_file_travels_with_its_neighbours(folder: Path) -> None:
    from ray import cloudpickle

    reward = load_function("reward", "task.py:reward", folder)
    assert reward(None) == 0.5
    (folder / "reward.pickle").write_bytes(cloudpickle.dumps(reward))
    for name in [n for n in sys.modules if n == "helper" or n.startswith("_apr_user_task")]:
        cloudpickle.unregister_pickle_by_value(sys.modules.pop(name))
    # As on a worker: neither the file nor its folder is importable here.
    assert pickle.loads((folder / "reward.pickle").read_bytes())(None) == 0.5
    assert "helper" not in sys.modules


def test_packages_beside_a_file_and_folders_that_it_adds_travel_too(tmp_path: Path) -> None:
    """known fault: the dry run called such a reward, and no worker could import what it uses: the
    run died six times of a ModuleNotFoundError that it did not tell."""
    for name, text in {
        "task/own.py": "import sys\nsys.path.append(__file__.rpartition('/task/')[0])\n"
        "from own_parts_of_it.deep.scoring import half\nimport beside_task\n\n\n"
        "def reward(sample):\n    return half() + beside_task.half()\n",
        "task/own_parts_of_it/__init__.py": "",
        "task/own_parts_of_it/deep/scoring.py": "def half():\n    return _half\n\n\n_half = 0.5\n",
        "beside_task.py": "def half():\n    return 0.5\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    code = (
        "import sys; from pathlib import Path; from ray import cloudpickle; "
        "from ray_apr.cli.user_files import load_function; "
        "reward = load_function('reward', 'own.py:reward', Path(sys.argv[1])); "
        "sys.stdout.buffer.write(cloudpickle.dumps(reward))"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "task")]
    done = subprocess.run(command, capture_output=True, check=True, timeout=60)
    assert pickle.loads(done.stdout)(None) == 1.0, "as on a worker: nothing is importable here"


@pytest.mark.parametrize(
    ("spec", "remedy"),
    [
        ("broken.py:reward", "raised ZeroDivisionError"),
        ("task.py:answer", "no function but int"),
        ("json:no_such_name", "has no no_such_name"),
    ],
)
def test_reward_that_cannot_be_imported(folder: Path, spec: str, remedy: str) -> None:
    (folder / "broken.py").write_text("def reward(sample):\n    return 1\n1 / 0\n")
    with pytest.raises(ConfigError, match=remedy):
        load_function("reward", spec, folder)


def test_an_environment_may_take_the_place_of_the_reward(folder: Path) -> None:
    overrides = ["reward=null", "environment=tools.py:Tools"]
    settings = load_settings(folder / "run.yaml", overrides)
    assert (settings.reward, settings.environment) == (None, "tools.py:Tools")
    environment = load_environment("tools.py:Tools", folder)
    assert environment.step("sample") == "sample", "one was made of the class"


@pytest.mark.parametrize(
    ("spec", "remedy"),
    [
        ("tools.py:Broken", "making one raised TypeError"),
        ("task.py:reward", "must have a method step"),
    ],
)
def test_environment_that_cannot_be_used(folder: Path, spec: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match=remedy):
        load_environment(spec, folder)
