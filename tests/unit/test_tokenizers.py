"""The tokenizer of a model, as processes without PyTorch get it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from ray import cloudpickle

from ray_apr.data.prompts import encode_prompt, load_tokenizer

MODEL = Path(__file__).parents[2] / "examples" / "arithmetic" / "base_model"
CHAT = [{"role": "user", "content": "1+2"}]
TEMPLATE = "{% for message in messages %}{{ message.content }}={% endfor %}"
ELSEWHERE = """
import pickle, sys
tokenizer = pickle.load(open(sys.argv[1], "rb"))
import ray_apr.data.encoding, ray_apr.rollout.evaluation, ray_apr.rollout.worker
from ray_apr.data.prompts import encode_prompt
chat = [{"role": "user", "content": "1+2"}]
print(encode_prompt(tokenizer, "12+3="), encode_prompt(tokenizer, chat), tokenizer.decode([4, 5]))
assert "torch" not in sys.modules
"""


def test_another_process_gets_it_and_needs_no_pytorch(tmp_path):
    tokenizer = load_tokenizer(str(MODEL))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer, "chat_template", TEMPLATE)
        (tmp_path / "tokenizer").write_bytes(cloudpickle.dumps(tokenizer))
        here = (encode_prompt(tokenizer, "12+3="), encode_prompt(tokenizer, CHAT))
    ended = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, str(tmp_path / "tokenizer")],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert ended.stdout.split("\n")[0] == f"{here[0]} {here[1]} {tokenizer.decode([4, 5])}"
