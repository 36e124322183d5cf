"""Trained samples with their texts: files of the run folder, the command, the report's browser
(run/trained_samples.py, tools/samples.py, tools/report/browser.py)."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import errno
import gzip
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from ray_apr.cli.main import main
from ray_apr.core.exceptions import ConfigError, ResourceError
from ray_apr.core.group import SampleMeta
from ray_apr.core.sample import FinishReason, Prompt, Sample, Segment
from ray_apr.data.kept_samples import is_kept
from ray_apr.data.store import carry
from ray_apr.run import trained_samples
from ray_apr.run.recorder import RunRecorder
from ray_apr.run.trained_samples import (
    drop_from,
    prompt_text,
    read_step,
    saved_steps,
    table_of,
    write_step,
)
from ray_apr.scheduling.grant import Grant, sample_rows
from ray_apr.tools.report import browser
from ray_apr.tools.report.html import write_report
from ray_apr.tools.samples import Piece, as_text, pieces_of, select, tokenizer_of
from tests.tiny_model import make_tiny_model

BASE_MODEL = Path(__file__).parents[2] / "examples/arithmetic/base_model"
EVIL = "</script><script>alert(1)</script>"


def sample(name: str, reward: float, *texts: tuple[int, bool, str], group: str = "e0-0") -> Sample:
    """A sample whose tokens are the characters of its texts, each of a version."""
    segments = tuple(
        Segment(
            policy_version=version,
            token_ids=tuple(map(ord, text)),
            logprobs=(-0.5 if is_generated else 0.0,) * len(text),
            is_generated=is_generated,
        )
        for version, is_generated, text in texts
    )
    return Sample(
        sample_id=name,
        group_id=group,
        prompt=Prompt(prompt_id=group, token_ids=(1, 2), row={"prompt": f"of {name}", "answer": 4}),
        max_response_tokens=100,
        segments=segments,
        finish_reason=FinishReason.STOP,
        num_interruptions=len(texts) - 1,
        num_turns=1,
        response_text="".join(text for _, _, text in texts),
        reward=reward,
        reward_metrics={"form": 0.25},
    )


FIRST = sample("e0-0-0", 0.5, (3, True, "one "), (4, True, "two"))
SECOND = sample("e0-0-1", 1.0, (4, True, "call"), (4, False, " = 7 "), (5, True, "so seven"))


def rows_of(step: int, *samples: Sample) -> list[dict]:
    """What the buffer knows of a step."""
    grant = Grant(step=step, policy_version=5, oldest_version=4, granted_at=0.0)
    grant.groups = (type("G", (), {"samples": tuple(map(SampleMeta.of, samples))}),)
    return sample_rows(grant)


def save(folder: Path, step: int, *samples: Sample) -> None:
    write_step(folder, step, table_of(rows_of(step, *samples), samples, "prompt"))


def decode(ids) -> str:
    return "".join(map(chr, ids))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run folder with two steps."""
    save(tmp_path, 0, FIRST, SECOND)
    save(tmp_path, 12, sample("e0-9-0", -1.0, (5, True, EVIL), group="e0-9"))
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


# -- files -----------------------------------------------------------------------------------------


def test_a_step_is_a_parquet_file_that_anything_can_read(folder):
    assert saved_steps(folder) == [0, 12]
    table = pq.read_table(folder / "samples")
    assert table.num_rows == 3
    first = read_step(folder, 0)[0]
    assert first["prompt"] == "of e0-0-0" and json.loads(first["prompt_row"])["answer"] == 4
    assert (first["response_text"], first["reward"]) == ("one two", 0.5)
    assert first["reward_metrics"] == {"form": 0.25}
    assert (first["segment_versions"], first["segment_lengths"]) == ([3, 4], [4, 3])
    assert decode(first["token_ids"]) == "one two"
    assert (first["staleness"], first["num_masked_tokens"], first["num_generated"]) == (1, 4, 7)
    assert (first["num_interruptions"], first["num_prompt_tokens"], first["step"]) == (1, 2, 0)
    assert read_step(folder, 0)[1]["segment_generated"] == [True, False, True]


def test_a_sample_without_a_token_in_the_loss_has_no_staleness(tmp_path):
    save(tmp_path, 1, sample("e0-0-0", 1.0, (2, True, "old")))
    assert read_step(tmp_path, 1)[0]["staleness"] is None


def test_steps_that_are_trained_once_more_lose_their_files(folder):
    save(folder, 13, FIRST)
    drop_from(folder, 12)
    assert saved_steps(folder) == [0]


def test_a_share_of_the_groups_is_the_same_everywhere():
    names = [f"e0-{i}" for i in range(2000)]
    assert all(is_kept(name, 1.0) for name in names)
    assert not any(is_kept(name, 0.0) for name in names)
    assert 400 < sum(is_kept(name, 0.25) for name in names) < 600


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("2+2", "2+2"),
        ([{"role": "user", "content": "2+2"}], '[{"role": "user", "content": "2+2"}]'),
    ],
)
def test_prompts_are_texts_or_messages(value, text):
    assert prompt_text(Prompt(prompt_id="p", token_ids=(1,), row={"q": value}), "q") == text


def test_rows_of_a_dataset_are_made_plain(tmp_path):
    row = {"prompt": "p", "grid": np.arange(2000), "image": b"123", "when": Path("x")}
    prompt = Prompt(prompt_id="e0-0", token_ids=(1,), row=row)
    save(tmp_path, 0, dataclasses.replace(FIRST, prompt=prompt))
    found = json.loads(read_step(tmp_path, 0)[0]["prompt_row"])
    assert found["grid"] == list(range(2000))
    assert (found["image"], found["when"]) == ("<3 bytes>", "x")


async def test_two_buffers_may_have_the_same_step_written(tmp_path):
    """One that has died had asked for it just before."""
    recorder = RunRecorder(str(tmp_path), 0.0)
    rows = rows_of(3, FIRST, SECOND)
    await asyncio.gather(*(recorder.save_samples(rows, carry((FIRST, SECOND))) for _ in range(8)))
    assert len(read_step(tmp_path, 3)) == 2


async def test_the_recorder_writes_some_groups_of_a_step(tmp_path):
    recorder = RunRecorder(str(tmp_path), 0.0)
    other = sample("e0-1-0", 0.0, (4, True, "left out"), group="e0-1")
    await recorder.save_samples(rows_of(3, FIRST, SECOND, other), carry((FIRST, SECOND)))
    assert [row["sample_id"] for row in read_step(tmp_path, 3)] == ["e0-0-0", "e0-0-1"]


async def test_samples_that_find_no_room_end_the_run_and_leave_no_part(tmp_path, monkeypatch):
    def full(table, where, **options):
        Path(where).write_text("half a file")
        raise OSError(errno.ENOSPC, "No space left on device")

    recorder = RunRecorder(str(tmp_path), 0.0)
    monkeypatch.setattr(trained_samples.pq, "write_table", full)
    with pytest.raises(ResourceError, match=r"step-000003\.parquet cannot be written.*--resume"):
        await recorder.save_samples(rows_of(3, FIRST), carry((FIRST,)))
    with pytest.raises(ResourceError, match="step-000003"):
        await recorder.record("ended", {"sample_id": "a"})
    assert not any((tmp_path / "samples").iterdir())


# -- read by a person ------------------------------------------------------------------------------


def row_of(given: Sample) -> dict:
    return {**table_of(rows_of(0, given), [given], "prompt").to_pylist()[0], "reward_metrics": {}}


def test_the_pieces_of_a_response_are_those_of_its_versions():
    assert pieces_of(row_of(SECOND), decode) == [
        Piece(text="call", policy_version=4, is_generated=True),
        Piece(text=" = 7 ", policy_version=4, is_generated=False),
        Piece(text="so seven", policy_version=5, is_generated=True),
    ]
    (whole,) = pieces_of(row_of(SECOND), None)
    assert (whole.text, whole.policy_version) == ("call = 7 so seven", None)


def test_a_character_that_two_segments_share_is_of_the_second_one():
    whole = "a€b"  # three bytes in the middle, cut after the second one
    ids = list(whole.encode())
    row = row_of(FIRST) | {
        "token_ids": ids, "response_text": whole, "segment_versions": [1, 2],
        "segment_lengths": [3, 2], "segment_generated": [True, True],
    }  # fmt: skip
    pieces = pieces_of(row, lambda ids: bytes(ids).decode(errors="replace"))
    assert [piece.text for piece in pieces] == ["a", "€b"]


def test_the_worst_the_best_and_the_longest_of_a_step(folder):
    assert [row["sample_id"] for row in select(folder)] == ["e0-9-0"], "of the last step"
    ids = lambda **asked: [row["sample_id"] for row in select(folder, step=0, **asked)]  # noqa: E731
    assert ids() == ["e0-0-0", "e0-0-1"]
    assert ids(order="best", number=1) == ids(order="longest", number=1) == ["e0-0-1"]
    assert [row["sample_id"] for row in select(folder, sample_id="e0-0-1")] == ["e0-0-1"]
    with pytest.raises(ConfigError, match="--id"):
        select(folder, sample_id="e0-0-1", step=12)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"step": 5}, r"--step = 5: has no saved samples; there are 0, 12"),
        ({"sample_id": "e7-0-0"}, r"--id = 'e7-0-0': was not trained"),
        ({"number": 0}, r"--worst = 0: must be at least 1"),
    ],
)
def test_what_is_not_there_is_said(folder, asked, said):
    with pytest.raises(ConfigError, match=said):
        select(folder, **asked)


def test_a_file_that_cannot_be_read_is_named_and_hides_no_other(folder):
    """known fault: no sample was found by its id where the file of another step was damaged."""
    (folder / "samples" / "step-000003.parquet").write_bytes(b"")
    assert [row["sample_id"] for row in select(folder, sample_id="e0-9-0")] == ["e0-9-0"]
    for asked in ({"step": 3}, {"sample_id": "e7-0-0"}):
        with pytest.raises(ConfigError, match=r"--step = 3: cannot be read: .*; name another step"):
            select(folder, **asked)


def test_a_run_without_samples_says_which_setting(tmp_path):
    with pytest.raises(ConfigError, match=r"train\.save_samples = 0"):
        select(tmp_path)


def test_a_sample_in_a_terminal_has_a_colour_for_each_version():
    row = row_of(SECOND) | {"reward_metrics": {"form": 0.25}}
    plain = as_text(row, decode)
    assert "e0-0-1, step 0 (counted from 0): reward 1, form 0.25; 12 tokens, ended by stop" in plain
    assert "5 tokens\nof e0-0-1\n→ call\n←  = 7 \n→ so seven\n" in plain and "\x1b" not in plain
    assert plain.endswith("by version: v4 4 tokens, v5 8 tokens"), "without what was answered"
    colored = as_text(row, decode, has_colors=True)
    assert len(set(re.findall(r"\x1b\[(\d+(?:;2)?)m", colored)) - {"0"}) == 3


def test_a_sample_shows_the_row_that_its_reward_saw():
    """With a reward of 0 nobody could see what the answer should have been."""
    row = row_of(FIRST)
    assert as_text(row, decode).splitlines()[1:] == [
        "of e0-0-0", "→ one two", "row: answer = 4", "by version: v3 4 tokens, v4 3 tokens",
    ]  # fmt: skip
    wide = {"prompt": [{"role": "user"}], "tests": "a\nb\x1b" + "x" * 999, "tags": ["é"]}
    wide |= {f"c{i}": i for i in range(20)}
    shown = as_text(
        row | {"prompt": json.dumps(wide["prompt"]), "prompt_row": json.dumps(wide)}, decode
    )
    lines = [line for line in shown.splitlines() if line.startswith("row: ")]
    assert lines[0].startswith("row: tests = a\\nb\\x1bxx") and lines[0].endswith("x…")
    assert len(lines[0]) < 220
    assert lines[1] == 'row: tags = ["é"]'
    assert lines[-1] == "row: … and 10 more columns"
    del row["prompt_row"]
    assert "row: " not in as_text(row, decode), "a file of an older version"


def test_a_sample_that_was_dropped_says_why(folder, tmp_path_factory, capsys):
    error = "reward of sample e0-4-5 raised: ValueError: cannot score"
    rows = [
        {"group_id": "e0-4", "reason": "failed", "error": error},
        {"group_id": "e0-5", "reason": "stale"},
        {"group_id": "e0-0", "reason": "stale"},
    ]
    empty = tmp_path_factory.mktemp("empty")
    for place in (folder, empty):
        (place / "dropped.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        assert main(["samples", str(place), "--id", "e0-4-5"]) == 2
        said = capsys.readouterr().err
        assert (
            f"--id = 'e0-4-5': was not trained: its group e0-4 was dropped as failed: {error}"
            in said
        )
        with pytest.raises(ConfigError, match=r"e0-5 was dropped as stale \(dropped.jsonl\)"):
            select(place, sample_id="e0-5-0")
    assert select(folder, sample_id="e0-0-1"), "what was trained is shown"


def test_a_text_of_a_model_does_not_steer_the_terminal():
    evil = sample("e0-0-0", 0.0, (4, True, "\x1b[2J\x1b]52;c;aGk=\x07 and\ttabs"))
    shown = as_text(row_of(evil), decode)
    assert "\x1b" not in shown and "\x07" not in shown
    assert "\\x1b[2J" in shown and "and\ttabs" in shown


def test_the_command_shows_them(folder, capsys):
    model = make_tiny_model(folder / "model", characters="one tw")
    (folder / "config.json").write_text(json.dumps({"model": str(model)}))
    assert main(["samples", str(folder), "--step", "0", "--best", "1"]) == 0
    shown = capsys.readouterr().out
    assert "of e0-0-1" in shown and "of e0-0-0" not in shown
    assert main(["samples", str(folder), "--id", "e0-0-0"]) == 0
    assert "→ one two" in capsys.readouterr().out


def test_ids_are_decoded_as_the_models_tokenizer_does_and_without_torch(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model": str(BASE_MODEL)}))
    code = (
        "import sys; from pathlib import Path; from ray_apr.tools.samples import tokenizer_of; "
        "decode = tokenizer_of(Path(sys.argv[1])); print(repr([decode([i, 5, i]) for i in "
        "range(int(sys.argv[2]))])); assert not {'torch', 'transformers'} & sys.modules.keys()"
    )
    theirs = AutoTokenizer.from_pretrained(BASE_MODEL)
    command = [sys.executable, "-c", code, str(tmp_path), str(len(theirs))]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    expected = [theirs.decode([i, 5, i], skip_special_tokens=True) for i in range(len(theirs))]
    assert said == f"{expected!r}\n"


def test_a_tokenizer_that_is_not_here_is_none(tmp_path):
    assert tokenizer_of(tmp_path) is None
    for config in (json.dumps({"model": str(tmp_path / "gone")}), '{"model": "go'):
        (tmp_path / "config.json").write_text(config)
        assert tokenizer_of(tmp_path) is None


# -- in the report ---------------------------------------------------------------------------------


def unpacked(page: str) -> list[dict]:
    """The samples of a page."""
    (packed,) = re.findall(r'<script type="text/plain">([^<]*)</script>', page)
    return json.loads(gzip.decompress(base64.b64decode(packed)))


def test_the_report_has_all_samples_and_no_text_becomes_markup(folder):
    page = write_report(folder).html_path.read_text()
    rows = unpacked(page)
    assert [row["id"] for row in rows] == ["e0-9-0", "e0-0-0", "e0-0-1"], "the last step first"
    assert rows[0]["pieces"] == [[5, True, EVIL]]
    assert "alert(1)" not in page
    assert rows[1]["parts"] == {"form": 0.25}


def test_samples_beyond_one_page_have_pages_beside_the_report(folder, monkeypatch, tmp_path):
    monkeypatch.setattr(browser, "_MOST_CHARACTERS", 30)
    out = tmp_path / "elsewhere" / "mine.html"
    page = write_report(folder, out).html_path.read_text()
    links = re.findall(r'href="(mine_samples/[^"]*)"', page)
    assert [Path(link).name for link in links] == [
        "steps-000012-000012.html",
        "steps-000000-000000.html",
    ]
    assert [row["id"] for row in unpacked((out.parent / links[0]).read_text())] == ["e0-9-0"]
    assert "samples before step" not in page


def test_a_long_run_has_its_last_steps_in_the_report_and_says_how_to_read_others(
    folder, monkeypatch
):
    monkeypatch.setattr(browser, "_MOST_CHARACTERS", 1)
    monkeypatch.setattr(browser, "_MOST_PAGES", 2)
    for step in (13, 14):
        save(folder, step, FIRST)
    page = write_report(folder).html_path.read_text()
    assert re.findall(r"steps (\d+) to", page) == ["14", "13"]
    assert f"samples before step 13: python -m ray_apr samples {folder} --step K" in page


def test_a_file_that_cannot_be_read_is_left_out_of_the_report(folder):
    (folder / "samples" / "step-000003.parquet").write_bytes(b"")
    (folder / "samples" / "step-000004 (1).parquet").write_bytes(b"")
    page = write_report(folder).html_path.read_text()
    assert len(unpacked(page)) == 3
    assert "the files of steps 3 cannot be read" in page


def test_a_page_has_the_begin_of_a_large_row_of_the_dataset(tmp_path, monkeypatch):
    monkeypatch.setattr(browser, "_LONGEST_ROW", 10)
    save(tmp_path, 0, FIRST)
    (tmp_path / "config.json").write_text("{}")
    (row,) = unpacked(write_report(tmp_path).html_path.read_text())
    assert row["row"] == '{"prompt":'


def test_a_run_without_samples_has_no_browser(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert "Read the samples" not in write_report(tmp_path).html_path.read_text()
