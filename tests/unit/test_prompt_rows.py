"""What rows of prompts may hold; the rest is refused with its place."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ray_apr.cli.prompt_files import PromptFile, prompts_of, read_prompts, suites_of
from ray_apr.cli.user_files import check_prompts
from ray_apr.config import RolloutConfig
from ray_apr.core.exceptions import ConfigError
from ray_apr.data import encoding
from ray_apr.data.encoding import LengthLimit, check_replayed, count_fitting, encode_dataset
from ray_apr.data.preview import gaps_of, preview, untyped_of
from ray_apr.data.resumption import Begin
from ray_apr.data.rows import Origin, PromptRows
from ray_apr.data.tokenizers import encode_prompt, num_token_ids
from ray_apr.run import actors
from ray_apr.trainer import APRTrainer
from tests.fakes import ArrowDataset
from tests.run_specs import run_spec


def read(path: Path):
    check_prompts(path.name, path.parent, "prompt")
    return read_prompts(PromptFile(path=str(path)))


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_a_byte_order_mark_is_no_part_of_the_first_row(tmp_path, name):
    rows = [{"prompt": "ä"}] * (1 if name == "a.jsonl" else 2)
    text = json.dumps(rows[0] if name == "a.jsonl" else rows, ensure_ascii=False)
    (tmp_path / name).write_text(text, encoding="utf-8-sig")
    assert read(tmp_path / name).slice(0, 2) == rows


@pytest.mark.parametrize("number", [1, 3, 100_001])
def test_text_that_is_no_utf8_is_refused_with_its_line(tmp_path, number):
    """known fault: beyond the first block it was a bare UnicodeDecodeError."""
    lines = ['{"prompt": "ä"}'.encode()] * number + [b""]
    lines[number - 1] = b'{"prompt": "' + b"a" * 10_000 + b'\xff"}'
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    with pytest.raises(ConfigError, match=rf"'a\.jsonl, line {number}': is no UTF-8: .*; save"):
        read(tmp_path / "a.jsonl")


@pytest.mark.parametrize(
    "row", ['{"prompt": "1", "a": 2, "a": 3}', '{"prompt": [{"a": 1, "a": 1}]}']
)
def test_a_name_that_a_row_has_twice_is_refused(tmp_path, row):
    """known fault: the last of both values was taken without a word."""
    twice = "an object has 'a' twice; rename or remove one"
    (tmp_path / "a.jsonl").write_text(f'{{"prompt": "1"}}\n\n{row}\n')
    with pytest.raises(ConfigError, match=rf"'a\.jsonl, line 3': cannot be read: {twice}"):
        read(tmp_path / "a.jsonl")
    (tmp_path / "first.jsonl").write_text(row)
    (tmp_path / "a.json").write_text(f"[{row}]")
    for name in ("first.jsonl", "a.json"):
        with pytest.raises(ConfigError, match=rf"'{name}': cannot be read as json.*: {twice}"):
            read(tmp_path / name)


def test_half_a_character_is_refused_with_its_row(tmp_path):
    """known fault: the tokenizer ended with a TypeError."""
    whole, half = json.dumps({"prompt": "\U0001f600"}), '{"prompt": "1", "of": [{"a": "\\ud83d!"}]}'
    (tmp_path / "a.jsonl").write_text(f"{whole}\n{half}\n")
    with pytest.raises(ConfigError, match=r"'a\.jsonl, line 2': has '\\ud83d' in 'of', half of"):
        read(tmp_path / "a.jsonl")
    (tmp_path / "a.json").write_text(f"[{whole}, {half}]")
    with pytest.raises(ConfigError, match=r"'a\.json, row 1': has"):
        read(tmp_path / "a.json")
    (tmp_path / "a.jsonl").write_text(f"{whole}\n")
    assert read(tmp_path / "a.jsonl").column("prompt") == ["\U0001f600"]


def test_a_text_that_the_tokenizer_does_not_take_is_refused_with_its_place():
    def tokenizer(text, verbose):
        return {"input_ids": list(text.encode())}

    with pytest.raises(ConfigError, match=r"row 3 = '\\ud800': the tokenizer does not take"):
        encode_prompt(tokenizer, "\ud800", field="row 3")


# -- token ids -------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", [[-1, 2], [2, 10], [2, 10_000_000]])
def test_ids_that_the_model_does_not_have_are_refused(prompt):
    """known fault: the dry run passed them, and the engine died minutes later."""
    with pytest.raises(ConfigError, match=r"^row 3 = \[-?\d+\]: are no token ids, .* 0 to 9; "):
        encode_prompt(None, prompt, field="row 3", num_ids=10)
    assert encode_prompt(None, [0, 9], num_ids=10) == [0, 9]


def test_true_is_no_token_id():
    with pytest.raises(ConfigError, match=r"\[True, 2\]: must be text, chat messages or token ids"):
        encode_prompt(None, [True, 2])


def test_there_are_as_many_ids_as_the_model_or_its_tokenizer_has(tmp_path):
    assert num_token_ids(str(tmp_path), "abc") == 2**31, "it has no config.json"
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "qwen3", "vocab_size": 5}')
    assert num_token_ids(str(tmp_path), "abc") == 5
    assert num_token_ids(str(tmp_path), "abcdefg") == 7
    config.write_text('{"model_type": "gemma3", "text_config": {"vocab_size": 6}}')
    assert num_token_ids(str(tmp_path), "abc") == 6


def test_a_dry_run_refuses_ids_with_their_line():
    rows = PromptRows(
        [{"prompt": [1]}, {"prompt": [9]}], [Origin(name="a", num_rows=2, lines=[1, 3])]
    )
    limit = LengthLimit(5, column="prompt", place=rows.place)
    with pytest.raises(ConfigError, match=r"^a, line 3, prompt = \[9\]: are no token ids"):
        preview(rows, None, limit, limit_s=9.0, num_ids=9)


@pytest.mark.parametrize("stage", [encode_dataset, count_fitting])
def test_a_run_refuses_ids_with_their_row_of_the_dataset(monkeypatch, stage):
    monkeypatch.setattr("ray.get", lambda ref: ref)
    monkeypatch.setattr(encoding, "load_tokenizer", lambda *_: "abc")
    monkeypatch.setattr(encoding, "num_token_ids", lambda model, tokenizer: 9)
    tables = [pa.table({"prompt": [[1], [1, 2, 3]]}), pa.table({"prompt": [[8], [9, 1, 12]]})]
    with pytest.raises(ConfigError, match=r"^prompts\[3\]\.prompt = \[9, 12\]: are no token ids"):
        stage(ArrowDataset(tables), model="m", column="prompt", max_prompt_tokens=5)


# -- columns that some rows lack -------------------------------------------------------------------

GAPS = [{"prompt": "a", "answer": 1}, {"prompt": "b"}, {"prompt": "c", "answer": 0, "hint": "?"}]


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_a_row_without_an_answer_that_others_have_is_told(tmp_path, name):
    """known fault: a dry run said nothing of it."""

    def said(rows):
        lines = "".join(f"\n{json.dumps(row)}\n" for row in rows)
        (tmp_path / "a.jsonl").write_text(lines)
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
        return gaps_of(read(tmp_path / name), "prompts")

    which = {"a.jsonl": "line {}", "a.parquet": "row {}"}[name]
    places = [which.format(2 * i + 2 if name == "a.jsonl" else i) for i in range(6)]
    start = f"prompts: {name}, "
    assert said(GAPS) == [
        f"{start}{places[1]} has no 'answer', beside 2 that have one: the reward gets None there"
    ]
    (two,) = said(GAPS * 2)
    assert two.startswith(f"{start}{places[1]} and 1 more have no 'answer', beside 4 that")
    assert said(GAPS[:1] * 2) == said([GAPS[0], {"prompt": "b"}, {"prompt": "c"}]) == []


@pytest.mark.parametrize(
    "values",
    [
        [2**70, 1],
        [2**53 + 1, 1.5],
        [{"a": 1}, {"a": "x"}],
        [[1], ["x"]],
    ],
)
def test_a_column_that_arrow_has_no_type_for_is_told(values):
    """known fault: the run alone said it, in words of Ray Data's."""
    rows = PromptRows([{"prompt": "a", "meta": value} for value in values])
    (said,) = untyped_of(rows, "prompts")
    assert said.startswith("prompts: no type of Arrow's holds all values of 'meta' (")


def test_columns_that_arrow_has_types_for_are_not_told():
    rows = [{"prompt": "a", "meta": {}, "n": 1}, {"prompt": "b", "meta": {"a": [1, 2.5]}}]
    assert untyped_of(PromptRows(rows), "prompts") == []
    assert untyped_of(PromptRows(pa.table({"prompt": ["a"]})), "prompts") == []


def test_a_suite_may_lack_a_column_that_another_has():
    origins = [Origin(name="a", num_rows=2), Origin(name="b", num_rows=1)]
    rows = [{"prompt": "a", "answer": 1}, {"prompt": "b", "answer": 2}, {"prompt": "c"}]
    assert gaps_of(PromptRows(rows, origins), "evaluation.prompts") == []


# -- lengths that are replayed ---------------------------------------------------------------------

NO_LENGTHS = ["78", [], None, 5, [3, 0], [-5], [3.0], ["a"], [None], [True]]
SAID = ".*: must be a list of whole numbers of at least 1, .*leave out rollout.replay_column"


@pytest.mark.parametrize("lengths", NO_LENGTHS)
def test_lengths_to_replay_that_are_none_are_refused_with_their_line(lengths):
    """known fault: a text became the budgets of its characters."""
    given = [{"prompt": "a", "n": [3]}, {"prompt": "a", "n": lengths}]
    rows = PromptRows(given, [Origin(name="a.jsonl", num_rows=2, lines=[1, 3])])
    with pytest.raises(ConfigError, match=rf"^a\.jsonl, line 3, n = {SAID}"):
        check_replayed(rows, "n", 64)
    check_replayed(PromptRows([{"n": [1, 30]}, {"n": np.array([2])}]), "n", 64)


def test_lengths_to_replay_beyond_the_budget_are_refused(monkeypatch):
    """known fault: each response gets exactly so long, and these were cut without a word."""
    said = r"n = \[4, 9\]: must be at most rollout\.max_response_tokens = 8; raise that"
    rows = [{"prompt": "a", "n": [8]}, {"prompt": "a", "n": [4, 9]}]
    with pytest.raises(ConfigError, match=rf"^prompts\[1\]\.{said}"):
        check_replayed(PromptRows(rows), "n", 8)
    check_replayed(PromptRows(rows), "n", 9)
    monkeypatch.setattr("ray.get", lambda ref: ref)
    monkeypatch.setattr(encoding, "load_tokenizer", lambda *_: "abc")
    table = pa.table({"prompt": [[1], [1]], "n": [[8], [4, 9]]})
    settings = {"model": "m", "column": "prompt", "max_prompt_tokens": 5, "replay_column": "n"}
    with pytest.raises(ConfigError, match=rf"^prompts\[1\]\.{said}"):
        encode_dataset(ArrowDataset([table]), **settings, max_response_tokens=8)
    encode_dataset(ArrowDataset([table]), **settings, max_response_tokens=9)


def test_a_trainer_checks_the_lengths_to_replay(monkeypatch):
    for name in ("check_spec", "check_port", "check_dataset", "find_begin"):
        monkeypatch.setattr(f"ray_apr.trainer.{name}", lambda *_: None)
    rows = PromptRows([{"prompt": "a", "n": [3]}, {"prompt": "a", "n": [0]}])
    with pytest.raises(ConfigError, match=rf"^prompts\[1\]\.n = {SAID}"):
        APRTrainer(
            model="owner/name",
            prompts=rows,
            reward=lambda sample: 0.0,
            rollout_config=RolloutConfig(replay_column="n"),
        )


def test_a_run_refuses_lengths_to_replay_with_their_row_of_the_dataset(monkeypatch):
    monkeypatch.setattr("ray.get", lambda ref: ref)
    monkeypatch.setattr(encoding, "load_tokenizer", lambda *_: "abc")
    tables = [pa.table({"prompt": [[1], [1]], "n": [[1], n]}) for n in ([2], [2, 0])]
    settings = {"model": "m", "column": "prompt", "max_prompt_tokens": 5}
    with pytest.raises(ConfigError, match=rf"^prompts\[3\]\.n = {SAID}"):
        encode_dataset(ArrowDataset(tables), **settings, replay_column="n")
    encode_dataset(ArrowDataset(tables[:1]), **settings, replay_column="n")


def test_a_run_tells_the_column_of_the_lengths_to_replay(monkeypatch):
    def encode(prompts, *, replay_column, max_response_tokens, **_):
        raise LookupError(f"{replay_column} {max_response_tokens}")

    monkeypatch.setattr(actors, "wait_for_cpu", lambda limit_s: None)
    monkeypatch.setattr(actors, "encode_dataset", encode)
    rollout = RolloutConfig(replay_column="lengths", max_response_tokens=8)
    parts = actors.Actors(run_spec(rollout=rollout, max_model_len=16))
    with pytest.raises(LookupError, match=r"^lengths 8$"):
        parts.make_pipeline(None, Begin(), None)


# -- several files ---------------------------------------------------------------------------------


@pytest.mark.parametrize("read_of", [prompts_of, functools.partial(suites_of, column="suite")])
def test_files_with_other_kinds_of_values_are_refused_with_both(tmp_path, read_of):
    """The dry run passed them, and the run ended with a traceback of Ray Data."""
    for name, answer in (("a", 7), ("b", None), ("c", "x")):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"prompt": "1+1=", "answer": answer}))
    pq.write_table(pa.table({"prompt": ["1+1="], "answer": [7.5]}), tmp_path / "d.parquet")

    def read_all(*names):
        given = [str(tmp_path / name) for name in names]
        return read_prompts(read_of(given, tmp_path, "prompt")).column("answer")

    assert read_all("a.jsonl", "b.jsonl", "d.parquet") == [7, None, 7.5]
    with pytest.raises(ConfigError, match=r"c\.jsonl': has a text as answer, and .*a\.jsonl a num"):
        read_all("a.jsonl", "b.jsonl", "c.jsonl")


def test_a_first_row_may_lack_what_other_rows_of_its_file_have(tmp_path):
    """known fault: the other file was refused for a column that both have."""
    rows = [{"prompt": "1+1="}, {"prompt": "1+2=", "answer": "3"}]
    for name, given in (("a", rows), ("b", rows[1:]), ("c", rows[:1]), ("e", rows[::-1])):
        text = "".join(json.dumps(row) + "\n" for row in given)
        (tmp_path / f"{name}.jsonl").write_text(text)
    pq.write_table(pa.Table.from_pylist(rows[1:]), tmp_path / "d.parquet")

    def read_all(*names):
        return read_prompts(prompts_of([str(tmp_path / n) for n in names], tmp_path, "prompt"))

    for names in (("a.jsonl", "b.jsonl"), ("d.parquet", "a.jsonl"), ("a.jsonl", "d.parquet")):
        assert sorted(map(str, read_all(*names).column("answer"))) == ["3", "3", "None"]
    assert read_all("a.jsonl", "c.jsonl").column("answer") == [None, "3", None]
    for names in (("e.jsonl", "c.jsonl"), ("c.jsonl", "d.parquet")):
        with pytest.raises(ConfigError, match="have other columns: answer; make them alike"):
            read_all(*names)
