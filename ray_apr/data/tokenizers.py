"""A model's tokenizer, and what it makes of a prompt."""

from __future__ import annotations

import copy
import functools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ray_apr.core.checks import require
from ray_apr.core.exceptions import ConfigError
from ray_apr.core.imports import finish_imports

_MOST_TOKEN_IDS = 2**31
"""As int32 holds them, which Arrow has them as."""
_TEMPLATE_FILES = ("chat_template.jinja", "additional_chat_templates", "tekken.json")


def load_tokenizer(
    model: str, template_kwargs: Mapping[str, Any] | None = None, *, is_here: bool = False
) -> Any:
    """Load the tokenizer of a model folder or hub id, once for each process.

    Processes without PyTorch are given it instead: what Transformers loads a tokenizer with imports
    PyTorch, and the tokenizer itself does not.

    Args:
        model: Folder or hub id.
        template_kwargs: Variables of its chat template, as `with_template_kwargs` takes them.
        is_here: Take only what is on this machine.

    Raises:
        OSError: If it cannot be had.
        ConfigError: If its chat template does not speak of a variable.
    """
    return with_template_kwargs(_load(model, is_here), template_kwargs)


@functools.lru_cache(maxsize=4)
def _load(model: str, is_here: bool) -> Any:
    finish_imports()
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model, local_files_only=is_here)


def with_template_kwargs(tokenizer: Any, kwargs: Mapping[str, Any] | None) -> Any:
    """A tokenizer whose chat template has these variables, whoever renders it.

    Args:
        tokenizer: A Hugging Face tokenizer; it stays as it is.
        kwargs: `RolloutConfig.chat_template_kwargs`.

    Raises:
        ConfigError: If its template does not speak of one.
    """
    if not kwargs:
        return tokenizer
    field, template = "rollout.chat_template_kwargs", tokenizer.chat_template
    remedy = "needs a model with a chat template, and with one alone; leave it out"
    require(isinstance(template, str), field, dict(kwargs), remedy)
    for name in kwargs:
        is_known = re.search(rf"\b{name}\b", template) is not None
        require(is_known, field, name, "is no variable of the model's chat template; leave it out")
    # the `+` keeps a line end that the template may begin with
    begin = "".join(f"{{% set {name} = {value!r} +%}}" for name, value in kwargs.items())
    given = copy.copy(tokenizer)  # others of this process may have it, too
    given.chat_template = begin + template
    return given


def end_token_ids(model: str) -> tuple[int, ...]:
    """Ids that end a response of this model by themselves, as vLLM finds them."""
    finish_imports()
    from transformers import AutoConfig, GenerationConfig

    try:
        config = GenerationConfig.from_pretrained(model)
    except OSError:  # the model has no such file
        config = GenerationConfig.from_model_config(AutoConfig.from_pretrained(model))
    ends = config.eos_token_id
    listed = ends if isinstance(ends, list) else [ends]
    found = {load_tokenizer(model).eos_token_id, *listed} - {None}
    return tuple(sorted(found))


def num_token_ids(model: str, tokenizer: Any) -> int:
    """How many token ids a prompt may have, from 0 on: as many as the model or its tokenizer has,
    whichever are more; any, where the model's config is not on this machine."""
    finish_imports()
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(model, local_files_only=True).get_text_config()
    except (OSError, ValueError):
        return _MOST_TOKEN_IDS
    of_model = getattr(config, "vocab_size", None)
    return max(of_model, len(tokenizer)) if of_model else _MOST_TOKEN_IDS


def encode_prompt(
    tokenizer: Any, prompt: Any, *, field: str = "prompts", num_ids: int = _MOST_TOKEN_IDS
) -> list[int]:
    """Turn text, chat messages or token ids into token ids.

    Args:
        tokenizer: A Hugging Face tokenizer.
        prompt: ``str``, a list of ``{"role", "content"}`` mappings, or a list of ints.
        field: What an error calls the prompt.
        num_ids: How many token ids there are (`num_token_ids`).

    Raises:
        ConfigError: For anything else, for an empty prompt, for an id that there is not, or if
            the tokenizer does not take the text, or its chat template the messages.
    """
    if isinstance(prompt, np.ndarray):
        prompt = prompt.tolist()
    if isinstance(prompt, str):
        # not verbose: of a prompt that is too long we say so ourselves
        try:
            ids = tokenizer(prompt, verbose=False)["input_ids"]
        except (TypeError, UnicodeEncodeError) as error:  # of half a character, as "\ud800" is
            remedy = f"the tokenizer does not take this text: {error}; correct it"
            raise ConfigError(field, prompt, remedy) from error
    elif is_chat(prompt):
        try:
            ids = tokenizer.apply_chat_template(
                [_as_given(message) for message in prompt],
                add_generation_prompt=True, tokenize=True, return_dict=False,
            )  # fmt: skip
        except Exception as error:  # a template may raise whatever it likes
            remedy = f"the tokenizer's chat template does not take these messages: {error}"
            raise ConfigError(field, prompt, remedy) from error
    elif isinstance(prompt, list | tuple) and all(
        isinstance(i, int) and not isinstance(i, bool) for i in prompt
    ):
        ids = list(prompt)
        wrong = [i for i in ids if not 0 <= i < num_ids]
        remedy = f"are no token ids, which are 0 to {num_ids - 1}; give those of the model"
        require(not wrong, field, wrong, remedy)
    else:
        raise ConfigError(field, prompt, "must be text, chat messages or token ids")
    if not ids:
        raise ConfigError(field, prompt, "is empty: it has no tokens to continue")
    return [int(i) for i in ids]


def _as_given(message: Any) -> Any:
    """A chat message without the keys that Arrow gives it, with None, as another one of the column
    has them: templates ask which there are. A content of None is one."""
    if not isinstance(message, Mapping):
        return message
    return {n: _without_none(v) for n, v in message.items() if v is not None or n == "content"}


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_none(v) for name, v in value.items() if v is not None}
    return [_without_none(v) for v in value] if isinstance(value, list | tuple) else value


def is_chat(prompt: Any) -> bool:
    """Whether a prompt is chat messages."""
    is_list = isinstance(prompt, list | tuple | np.ndarray)
    return is_list and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def has_chat_template(model: str) -> bool:
    """Whether a model folder has a chat template; of a hub id nobody knows before it is there."""
    folder = Path(model)
    if not folder.is_dir() or any((folder / name).exists() for name in _TEMPLATE_FILES):
        return True
    config = folder / "tokenizer_config.json"
    return config.is_file() and bool(json.loads(config.read_text()).get("chat_template"))
