"""The tokenizer of a model, as processes without PyTorch get it."""

from __future__ import annotations

import copy
import subprocess
import sys
from datetime import date
from pathlib import Path

import pyarrow as pa
import pytest
from ray import cloudpickle

from ray_apr.config import RolloutConfig
from ray_apr.core.exceptions import ConfigError
from ray_apr.data.tokenizers import encode_prompt, load_tokenizer, with_template_kwargs

MODEL = Path(__file__).parents[2] / "examples" / "arithmetic" / "base_model"
CHAT = [{"role": "user", "content": "1+2"}]
TEMPLATE = "{% for message in messages %}{{ message.content }}={% endfor %}"
ELSEWHERE = """
import pickle, sys
tokenizer = pickle.load(open(sys.argv[1], "rb"))
import ray_apr.data.encoding, ray_apr.rollout.evaluation, ray_apr.rollout.worker
from ray_apr.data.tokenizers import encode_prompt
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


ASKED = {"role": "user", "content": "1+2"}
CALLS = [{"name": "add", "arguments": {"a": 1}}, {"name": "half", "arguments": {"of": 2}}]
CALLED = {"role": "assistant", "content": None, "tool_calls": CALLS}
KEYS = """{% for message in messages %}{% if 'tool_calls' in message -%}
{% for call in message.tool_calls %}{{ call.arguments | length }}={% endfor %}
{%- else %}{{ message.content }};{% endif %}{% if message.content is none %}0{% endif %}
{%- endfor %}"""


def test_a_chat_has_no_keys_that_other_rows_of_its_column_have(tokenizer):
    """Arrow, and so a run, has them with None; a dry run, and a replay, of a JSON file has not."""
    tokenizer.chat_template = KEYS
    chats = [[ASKED], [ASKED, CALLED], [ASKED]]
    column = pa.table({"prompt": chats})["prompt"].to_pylist()
    assert column[0][0] == {**ASKED, "tool_calls": None}
    assert column[1][1]["tool_calls"][0]["arguments"] == {"a": 1, "of": None}
    for given, kept in zip(chats, column, strict=True):
        assert encode_prompt(tokenizer, kept) == encode_prompt(tokenizer, given)
    texts = [tokenizer.decode(encode_prompt(tokenizer, chat)) for chat in column]
    assert texts == ["1+2;", "1+2;1=1=0", "1+2;"]


VARIABLES = {
    "thinks": False, "nothing": None, "text": "it's %} \"x\" é\n", "number": 1e-6,
    "tools": [{"name": "f", "args": {"a": [1, -2.5]}}],
}  # fmt: skip


@pytest.fixture
def tokenizer():
    return copy.copy(load_tokenizer(str(MODEL)))


@pytest.mark.parametrize("name", VARIABLES)
@pytest.mark.parametrize("begin", ["", "\n"])
def test_a_template_has_variables_wherever_it_is_rendered(tokenizer, name, begin):
    template = begin + "{% if NAME is defined %}{{ NAME | tojson }}{% endif %}" + TEMPLATE
    tokenizer.chat_template = template.replace("NAME", name)
    kwargs = {name: VARIABLES[name]}
    given = cloudpickle.loads(cloudpickle.dumps(with_template_kwargs(tokenizer, kwargs)))

    def said(tokenizer, **kwargs):
        return tokenizer.apply_chat_template(CHAT, tokenize=False, **kwargs)

    assert said(given) == said(tokenizer, **kwargs)
    assert said(given) != said(tokenizer), "it stays as it is"
    with pytest.raises(ConfigError, match=r"chat_template_kwargs = 'other': is no variable of the"):
        with_template_kwargs(given, {"other": 1})


def test_a_model_without_a_template_has_no_variables(tokenizer):
    tokenizer.chat_template = None
    assert with_template_kwargs(tokenizer, {}) is tokenizer
    with pytest.raises(ConfigError, match="needs a model with a chat template"):
        with_template_kwargs(tokenizer, {"enable_thinking": False})


@pytest.mark.parametrize(
    ("kwargs", "said"),
    [
        ("thinks", "must be a mapping of variables"),
        ({"messages": []}, "is what ray_apr says itself"),
        ({"a b": 1}, "must have names of variables"),
        ({"day": date(2026, 1, 1)}, r"\.day = .*: must be a text, number, true"),
        ({"rate": float("nan")}, r"\.rate = nan: must be a text, number, true"),
    ],
)
def test_variables_that_no_template_can_have_are_refused(kwargs, said):
    with pytest.raises(ConfigError, match=rf"rollout\.chat_template_kwargs.*{said}"):
        RolloutConfig(chat_template_kwargs=kwargs)
