"""Prompts: which fit, which are left out, and what a run that goes on knows of it."""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import types

import numpy as np
import pyarrow as pa
import pytest
import ray.train
from hypothesis import given
from hypothesis import strategies as st
from ray.data.extensions import ArrowTensorArray

from ray_apr.config import PromptsConfig, RolloutConfig, TrainConfig
from ray_apr.core.exceptions import ConfigError, TrainError
from ray_apr.data import encoding
from ray_apr.data.encoding import LengthLimit, encode_dataset
from ray_apr.data.prompts import PromptSource, check_dataset
from ray_apr.data.resumption import WEIGHTS as WEIGHTS_KEY
from ray_apr.data.resumption import Counters, RolloutProgress, sampled_with
from ray_apr.data.rows import PromptRows
from ray_apr.run import controller, ending, replaying
from ray_apr.run.ending import with_counted_steps
from ray_apr.run.journals import header_of
from ray_apr.run.resume import find_begin
from ray_apr.run.spec import RunSpec
from ray_apr.scheduling.order import mixed_order, shares
from ray_apr.trainer import APRTrainer
from tests.fakes import ArrowDataset
from tests.run_specs import run_spec

ROWS = [{"prompt": [1] * n, "answer": n} for n in (3, 9, 2, 8, 4)]
"""At most 5 tokens fit: rows 1 and 3 do not."""


@pytest.fixture(autouse=True)
def _here(monkeypatch):
    monkeypatch.setattr("ray.get", lambda ref: ref)
    monkeypatch.setattr("ray.put", lambda value: value)
    for module in (encoding, replaying):
        monkeypatch.setattr(module, "load_tokenizer", lambda *_: None)


def encode(rows=ROWS, **given):
    dataset = ArrowDataset([pa.Table.from_pylist(rows[:2]), pa.Table.from_pylist(rows[2:])])
    settings = {"model": "m", "column": "prompt", "max_prompt_tokens": 5, "drops_too_long": True}
    return encode_dataset(dataset, **settings | given)


def handed_out(source, number):
    return [source.next() for _ in range(number)]


@pytest.mark.parametrize("is_small", [True, False])
def test_token_ids_may_be_arrays_of_several_lengths(monkeypatch, is_small):
    """known fault: Ray Data has a type for each length, and the run was refused for the two."""
    ids = ([[1, 2]], [[3, 4, 5], [6, 7, 8]])
    tables = [pa.table({"prompt": ArrowTensorArray.from_numpy(np.array(part))}) for part in ids]
    monkeypatch.setattr(encoding, "held_tables", lambda _: tables if is_small else None)
    encoded = encode_dataset(ArrowDataset(tables), model="m", column="prompt", max_prompt_tokens=5)
    source = PromptSource(encoded.tables, seed=0)
    found = sorted((prompt.token_ids, prompt.row["prompt"]) for prompt in handed_out(source, 3))
    assert found == [((1, 2), [1, 2]), ((3, 4, 5), [3, 4, 5]), ((6, 7, 8), [6, 7, 8])]


def test_prompts_that_are_too_long_are_left_out_counted_and_logged_once(caplog):
    with caplog.at_level(logging.WARNING):
        encoded = encode()
    assert (encoded.num_prompts, encoded.num_dropped) == (3, 2)
    (record,) = caplog.records
    assert "2 of 5 rows are left out" in record.getMessage()
    assert "more than 5 tokens: the first is row 1 with 9" in record.getMessage()
    source = PromptSource(encoded.tables, seed=0)
    prompts = handed_out(source, 6)
    assert sorted(len(p.token_ids) for p in prompts[:3]) == [2, 3, 4]
    assert [p.prompt_id for p in prompts] == [f"e{e}-{i}" for e in range(2) for i in range(3)]
    assert all(set(p.row) == {"prompt", "answer"} for p in prompts), "no column of ours"


def test_a_prompt_is_named_by_its_row_of_the_dataset_whatever_was_left_out():
    """Of poison.jsonl, and of who makes a run again with other limits."""
    source = PromptSource(encode().tables, seed=0)
    for prompt in handed_out(source, 3):
        row = source.index_of(prompt.prompt_id)
        assert ROWS[row]["answer"] == prompt.row["answer"]


def test_without_the_setting_the_first_prompt_that_is_too_long_is_an_error():
    with pytest.raises(ConfigError, match=r"prompts\[1\]\.prompt = '9 tokens'.*on_too_long: drop"):
        encode(drops_too_long=False)
    assert PromptsConfig().on_too_long == "error"


def test_a_run_goes_on_with_as_many_prompts_as_it_began_with():
    assert encode(num_prompts=3).num_prompts == 3
    with pytest.raises(ConfigError, match=r"'3 rows, and 2 that are too long'.*made with 5"):
        encode(num_prompts=5)
    with pytest.raises(ConfigError, match=r"'4 rows, and 1 that are too long'.*made with 3"):
        encode(num_prompts=3, max_prompt_tokens=8)


def test_a_run_of_which_no_prompt_is_left_is_refused():
    with pytest.raises(ConfigError, match=r"on_too_long = 'drop': leaves none of 5 rows"):
        encode(max_prompt_tokens=1)


def test_rows_are_counted_on_over_tables():
    limit = LengthLimit(5, column="prompt", drops=True, name="held out")
    assert limit.fits([5, 6]) == [True, False] and limit.fits([7]) == [False]
    assert "held out: 2 of 3 rows" in limit.end() and "row 1 with 6" in limit.end()
    assert LengthLimit(5, column="prompt").end() is None


@pytest.mark.parametrize("drops", [True, False])
def test_a_replay_leaves_out_what_the_run_left_out(drops):
    settings = PromptsConfig(on_too_long="drop" if drops else "error")
    rollout = RolloutConfig(max_response_tokens=3)
    spec = run_spec(prompts=settings, rollout=rollout, max_model_len=8)
    assert list(replaying._kept(spec, PromptRows(ROWS))) == ([0, 2, 4] if drops else [*range(5)])


def test_a_replay_with_other_prompts_is_refused():
    spec = run_spec(
        prompts=PromptsConfig(on_too_long="drop"),
        rollout=RolloutConfig(max_response_tokens=3),
        max_model_len=8,
    )
    begin = types.SimpleNamespace(replayed=True, rollout=types.SimpleNamespace(num_prompts=5))
    with pytest.raises(ConfigError, match=r"'3 rows': the run had 5"):
        replaying.batches_since(begin, spec, PromptRows(ROWS), 0)


# -- where a run ends ------------------------------------------------------------------------------


def spec_of_passes(**given):
    settings = {"on_too_long": "drop", **given}
    return run_spec(
        prompts=PromptsConfig(**settings),
        rollout=RolloutConfig(group_size=2, max_response_tokens=3),
        train=TrainConfig(passes=3, batch_size=4),
        max_model_len=8,
    )


@pytest.mark.parametrize(("on_too_long", "num_prompts", "steps"), [("drop", 3, 4), ("error", 5, 7)])
def test_passes_are_counted_over_the_prompts_that_are_left(
    monkeypatch, on_too_long, num_prompts, steps
):
    limits: list[float] = []
    monkeypatch.setattr(ending, "wait_for_cpu", limits.append)
    dataset = ArrowDataset([pa.Table.from_pylist(ROWS[:1]), pa.Table.from_pylist(ROWS[1:])])
    spec, told = spec_of_passes(on_too_long=on_too_long), []
    counted = with_counted_steps(spec, dataset, told.append)
    assert (counted.train.steps, counted.train.passes) == (steps, None)
    assert told == [f"train.passes = 3: 3 x {num_prompts} prompts fill {steps} batches"]
    assert limits == [600.0], "Ray Data waits for a CPU without limit"
    assert with_counted_steps(counted, None, told.append) is counted, "once is enough"


def test_a_prompt_that_cannot_be_encoded_is_refused_while_they_are_counted(monkeypatch):
    monkeypatch.setattr(ending, "wait_for_cpu", lambda limit_s: None)
    table = pa.Table.from_pylist([{"prompt": [1]}, {"prompt": []}])
    with pytest.raises(ConfigError, match=r"is empty"):
        with_counted_steps(spec_of_passes(), ArrowDataset([table]), print)


def test_a_replay_ends_where_the_run_did(tmp_path):
    """The learning rate of a step depends on it."""
    spec = spec_of_passes()
    ran = json.loads(json.dumps(spec.with_steps(5).describe(), default=str))
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "config.json").write_text(json.dumps(ran))
    run = ray.train.RunConfig(name="app", storage_path=str(tmp_path))
    again = replaying._as_it_ran(dataclasses.replace(spec, run=run))
    assert (again.train.steps, again.train.passes) == (7, None)


def test_a_session_counts_before_its_run_begins(monkeypatch, tmp_path):
    """It says itself which step is the last one."""
    made: list[RunSpec] = []
    monkeypatch.setattr(ending, "wait_for_cpu", lambda limit_s: None)
    monkeypatch.setattr("ray_apr.trainer.HostedRun", lambda spec, *_, **__: made.append(spec))
    monkeypatch.setattr("ray.is_initialized", lambda: True)
    monkeypatch.setattr("ray.cluster_resources", lambda: {"CPU": 64.0})
    trainer = object.__new__(APRTrainer)
    fields = {"spec": spec_of_passes(on_too_long="error"), "callbacks": (), "trackers_config": None}
    for name, value in fields.items():
        object.__setattr__(trainer, name, value)
    dataset = ArrowDataset([pa.Table.from_pylist(ROWS)])
    monkeypatch.setattr(APRTrainer, "_datasets", lambda self: (dataset, None))
    trainer.start_in_host(is_gated=True)
    trainer.start_in_host()
    assert [spec.train.steps for spec in made] == [7, None], "the host of a whole run counts itself"


# -- sources with weights --------------------------------------------------------------------------


def test_shares_of_an_epoch_are_those_of_the_weights():
    assert shares(9, [2, 1]) == [6, 3]
    assert shares(10, [1, 1, 1]) == [4, 3, 3]
    assert shares(5, [1e-9, 1]) == [0, 5]


@given(
    sizes=st.lists(st.integers(1, 7), min_size=1, max_size=4),
    weights=st.lists(st.floats(0.05, 20), min_size=4, max_size=4),
    seed=st.integers(0, 3),
)
def test_each_source_has_its_share_and_goes_through_all_of_its_prompts(sizes, weights, seed):
    bounds = np.cumsum([0, *sizes])
    sources = [np.arange(a, b) for a, b in itertools.pairwise(bounds)]
    num_of = shares(sum(sizes), weights[: len(sizes)])
    epochs = [mixed_order(sources, num_of, seed=seed, epoch=epoch) for epoch in range(6)]
    for rows, number in zip(sources, num_of, strict=True):
        drawn = [row for epoch in epochs for row in epoch if row in rows]
        assert len(drawn) == 6 * number
        assert all(sum(row in rows for row in epoch) == number for epoch in epochs)
        for turn in range(len(drawn) // len(rows)):
            whole = drawn[turn * len(rows) : (turn + 1) * len(rows)]
            assert sorted(whole) == list(rows), "each once before one comes again"
    again = mixed_order(sources, num_of, seed=seed, epoch=5)
    assert list(again) == list(epochs[5]), "without those before it"


SOURCES = [{"prompt": [i], "source": "big" if i < 6 else "small"} for i in range(8)]
WEIGHTS = PromptsConfig(weights={"small": 1, "big": 1})


def mixed(rows=SOURCES, config=WEIGHTS, **given):
    encoded = encode(rows, max_prompt_tokens=5)
    return PromptSource(encoded.tables, seed=3, config=config, **given)


def test_prompts_are_handed_out_by_weight_and_go_on_where_they_stopped():
    source = mixed()
    prompts = handed_out(source, 16)
    assert [p.row["source"] for p in prompts].count("small") == 8, "4 of 8, although 2 rows are"
    assert len({p.prompt_id for p in prompts}) == 16
    again = mixed(position=9, pending=(2, 5))
    ids = [p.token_ids for p in (*handed_out(again, 2), *handed_out(again, 4))]
    assert ids == [prompts[i].token_ids for i in (2, 5, 9, 10, 11, 12)]
    assert source.of("e1-3~2").token_ids == prompts[11].token_ids
    assert source.index_of("e0-4") == prompts[4].token_ids[0]
    other = PromptSource(encode(SOURCES).tables, seed=4, config=WEIGHTS)
    assert [p.token_ids for p in handed_out(other, 16)] != [p.token_ids for p in prompts]


def test_the_order_of_weights_in_the_settings_does_not_matter():
    turned = PromptsConfig(weights={"big": 2.0, "small": 2.0})
    ids = [[p.token_ids for p in handed_out(mixed(config=c), 8)] for c in (WEIGHTS, turned)]
    assert ids[0] == ids[1]


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        ({"big": 1}, r"prompts\.source = 'small': is none of prompts\.weights, big"),
        ({"big": 1, "small": 1, "third": 1}, r"weights = {'third': 1.0}: has no prompts"),
        ({"big": 1, "small": 1e-6}, r"weights = {'small': 1e-06}: is too small beside"),
    ],
)
def test_weights_that_do_not_fit_the_prompts_are_refused(weights, said):
    with pytest.raises(ConfigError, match=said):
        mixed(config=PromptsConfig(weights=weights))


def test_a_dataset_without_the_column_of_sources_is_refused():
    with pytest.raises(ConfigError, match=r"prompts\.source_column = 'kind': .*no such column"):
        check_dataset(PromptRows(SOURCES), "m", "prompt", None, "kind")
    check_dataset(PromptRows(SOURCES), "m", "prompt", None, "source")


def test_a_run_goes_on_with_the_weights_that_it_began_with(tmp_path):
    run = ray.train.RunConfig(name="mine", storage_path=str(tmp_path / "runs"))
    (tmp_path / "step").mkdir()
    (tmp_path / "step" / "progress.json").write_text('{"step": 2, "policy_version": 2}')

    def spec(weights):
        config = PromptsConfig(weights=weights)
        checkpoint = ray.train.Checkpoint(str(tmp_path / "step"))
        return run_spec(run=run, prompts=config, checkpoint=checkpoint)

    def goes_on(before, now):
        sampled = header_of(spec(before))["sampled"]
        progress = RolloutProgress(
            seed=0, num_prompts=8, position=3, pending=(), counters=Counters(), sampled=sampled
        )
        (tmp_path / "step" / "rollout.json").write_text(progress.to_json())
        return find_begin(spec(now)).step

    weights = {"big": 2, "small": 1}
    assert goes_on(weights, weights) == goes_on(None, None) == 2
    for before, now in ((weights, None), (None, weights), (weights, {**weights, "small": 2})):
        with pytest.raises(ConfigError, match=r"prompts\.weights = .*only with that of the check"):
            goes_on(before, now)


def test_the_worker_notes_the_weights_as_the_journal_does():
    """A journal is gone on with if both say the same."""
    spec = run_spec(prompts=WEIGHTS)
    noted = sampled_with(spec.rollout, resets=None, weights=mixed().weights)
    assert noted == header_of(spec)["sampled"] and WEIGHTS_KEY in noted
    assert WEIGHTS_KEY not in header_of(run_spec())["sampled"], "as checkpoints before have it"


def test_a_replay_finds_the_prompts_of_a_mix(monkeypatch):
    class Found(Exception):
        pass

    def groups_of(table, prompt_of):
        raise Found([prompt_of(f"e1-{i}").token_ids for i in range(8)])

    monkeypatch.setattr(replaying, "groups_of", groups_of)
    spec = run_spec(
        prompts=dataclasses.replace(WEIGHTS, on_too_long="drop"), max_model_len=9,
        rollout=RolloutConfig(max_response_tokens=4), train=TrainConfig(seed=3),
    )  # fmt: skip
    begin = types.SimpleNamespace(
        replayed=types.SimpleNamespace(plan={0: ("e0-0",)}),
        rollout=types.SimpleNamespace(num_prompts=8),
        samples=pa.table({"group_id": pa.array([], pa.string())}),
    )  # fmt: skip
    rows = [*SOURCES[:3], {"prompt": [1] * 9, "source": "big"}, *SOURCES[3:]]
    with pytest.raises(Found) as found:
        replaying.batches_since(begin, spec, PromptRows(rows), 0)
    assert found.value.args[0] == [p.token_ids for p in handed_out(mixed(rows), 16)[8:]]


def test_a_run_counts_its_prompts_once_for_all_that_begin_in_it(monkeypatch, tmp_path):
    """Also for its restarts, and for what the run folder says of its length."""
    counted: list[int] = []

    def fails_once(make, spec, *_):
        counted.append(spec.train.num_steps)
        if len(counted) == 1:
            raise TrainError("a worker died")

    for name, value in {
        "_run_parts": fails_once, "check_hub_model": lambda *_: None, "last_step": lambda *_: 0,
        "check_engine": lambda *_: None, "choose_ranks": lambda spec: spec,
        "make_run_folder": lambda spec: None,
    }.items():  # fmt: skip
        monkeypatch.setattr(controller, name, value)
    monkeypatch.setattr(ending, "wait_for_cpu", lambda limit_s: None)
    monkeypatch.setattr("ray.is_initialized", lambda: True)
    monkeypatch.setattr("ray.cluster_resources", dict)
    failures = ray.train.FailureConfig(max_failures=1)
    run = ray.train.RunConfig(name="app", storage_path=str(tmp_path), failure_config=failures)
    (tmp_path / "app").mkdir()
    told: list[str] = []
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    dataset = ArrowDataset([pa.Table.from_pylist(ROWS)])
    spec = dataclasses.replace(spec_of_passes(on_too_long="error"), run=run)
    controller.run(spec, dataset, progress=told.append)
    assert counted == [7, 7]
    assert sum("3 x 5 prompts fill 7 batches" in line for line in told) == 1
    assert json.loads((tmp_path / "app" / "config.json").read_text())["train"]["steps"] == 7
