"""What rows of prompts may hold; the rest is refused with its place."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ray_apr.cli.prompt_files import PromptFile, read_prompts
from ray_apr.cli.user_files import check_prompts
from ray_apr.core.exceptions import ConfigError
from ray_apr.data.prompts import encode_prompt


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
