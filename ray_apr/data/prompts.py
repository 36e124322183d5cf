"""Prompts: from any Ray Dataset to token ids, in an order that is known and can be restored.

Invariants:
    * The order of an epoch is a permutation drawn from (seed, epoch): `position` alone says which
      prompts were handed out, so that a run can go on where it stopped.
    * Every prompt fits the model beside the whole response budget; what does not is an error
      before anything is generated, never a truncated prompt.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from ray_apr.data.order import prompt_order
from ray_apr.exceptions import ConfigError
from ray_apr.types import Prompt

if TYPE_CHECKING:
    import ray
    import ray.data

TOKEN_IDS = "__apr_prompt_token_ids"


@functools.lru_cache(maxsize=4)
def load_tokenizer(model: str) -> Any:
    """Load the tokenizer of a model folder or hub id, once for each process."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)


def end_token_ids(model: str) -> tuple[int, ...]:
    """Ids that end a response of this model by themselves, as vLLM finds them."""
    from transformers import AutoConfig, GenerationConfig

    try:
        config = GenerationConfig.from_pretrained(model)
    except OSError:  # the model has no such file
        config = GenerationConfig.from_model_config(AutoConfig.from_pretrained(model))
    ends = config.eos_token_id
    listed = ends if isinstance(ends, list) else [ends]
    found = {load_tokenizer(model).eos_token_id, *listed} - {None}
    return tuple(sorted(found))


def encode_prompt(tokenizer: Any, prompt: Any) -> list[int]:
    """Turn text, chat messages or token ids into token ids.

    Args:
        tokenizer: A Hugging Face tokenizer.
        prompt: ``str``, a list of ``{"role", "content"}`` mappings, or a list of ints.

    Raises:
        ConfigError: For anything else, or for an empty prompt.
    """
    if isinstance(prompt, np.ndarray):
        prompt = prompt.tolist()
    if isinstance(prompt, str):
        ids = tokenizer(prompt)["input_ids"]
    elif isinstance(prompt, list | tuple) and prompt and isinstance(prompt[0], Mapping):
        ids = tokenizer.apply_chat_template(
            list(prompt), add_generation_prompt=True, tokenize=True, return_dict=False
        )
    elif isinstance(prompt, list | tuple) and all(isinstance(i, int) for i in prompt):
        ids = list(prompt)
    else:
        raise ConfigError("prompts", prompt, "must be text, chat messages or token ids")
    if not ids:
        raise ConfigError("prompts", prompt, "is empty: it has no tokens to continue")
    return [int(i) for i in ids]


def check_dataset(dataset: ray.data.Dataset, column: str, replay_column: str | None = None) -> None:
    """Check that the dataset has rows, the prompt column, and that of a trace if one is replayed.

    Raises:
        ConfigError: If it has not.
    """
    if not hasattr(dataset, "map_batches"):
        raise ConfigError("prompts", type(dataset).__name__, "must be a ray.data.Dataset")
    names = list(getattr(dataset.schema(), "names", None) or [])
    if not names or not dataset.take(1):
        raise ConfigError("prompts", "0 rows", "the dataset is empty; give it at least one prompt")
    if column not in names:
        raise ConfigError(
            "rollout.prompt_column",
            column,
            f"the dataset has no such column, only {', '.join(names)}; name the one of the prompts",
        )
    if replay_column is not None and replay_column not in names:
        raise ConfigError(
            "rollout.replay_column",
            replay_column,
            f"the dataset has no such column, only {', '.join(names)}; name that of the lengths",
        )


def encode_dataset(
    dataset: ray.data.Dataset, *, model: str, column: str, max_prompt_tokens: int
) -> list[ray.ObjectRef]:
    """Encode every prompt as a Ray Data stage and return the Arrow tables by reference.

    Args:
        dataset: Rows with `column` and whatever the reward reads.
        model: Folder or hub id whose tokenizer is used.
        column: Name of the prompt column.
        max_prompt_tokens: Longest prompt that leaves room for the response budget.

    Raises:
        ConfigError: If a prompt is too long, naming the first one.
    """

    def encode(table: pa.Table) -> pa.Table:
        tokenizer = load_tokenizer(model)
        ids = [encode_prompt(tokenizer, prompt) for prompt in table[column].to_pylist()]
        return table.append_column(TOKEN_IDS, pa.array(ids, pa.list_(pa.int64())))

    encoded = dataset.map_batches(encode, batch_format="pyarrow", batch_size=4096)
    refs = encoded.materialize().to_arrow_refs()
    _check_lengths(refs, column, max_prompt_tokens)
    return refs


def _check_lengths(refs: Sequence[ray.ObjectRef], column: str, max_prompt_tokens: int) -> None:
    """Raise for the first prompt that leaves no room for the response."""
    import ray

    first = 0
    for ref in refs:
        table: pa.Table = ray.get(ref)
        lengths = table[TOKEN_IDS].combine_chunks().value_lengths().to_numpy(zero_copy_only=False)
        too_long = np.flatnonzero(lengths > max_prompt_tokens)
        if len(too_long):
            row = int(too_long[0])
            raise ConfigError(
                f"prompts[{first + row}].{column}",
                f"{int(lengths[row])} tokens",
                f"at most {max_prompt_tokens} leave room for the response budget in the model's "
                "context; drop such prompts, lower rollout.max_response_tokens, or raise "
                "rollout.max_model_len",
            )
        first += table.num_rows


def held_out_prompts(tables: Sequence[pa.Table]) -> list[Prompt]:
    """All prompts once, in the order of the dataset.

    Args:
        tables: Arrow tables with the column of token ids.
    """
    rows = pa.concat_tables(tables, promote_options="default").to_pylist()
    return [
        Prompt(prompt_id=str(i), token_ids=tuple(row.pop(TOKEN_IDS)), row=row)
        for i, row in enumerate(rows)
    ]


class PromptSource:
    """Endless prompts in a seeded order: epoch after epoch, each a permutation of its own.

    Args:
        tables: Arrow tables with the column of token ids.
        seed: Together with the epoch it fixes the order.
        position: How many prompts were handed out before.
    """

    def __init__(self, tables: Sequence[pa.Table], *, seed: int, position: int = 0) -> None:
        self._table = pa.concat_tables(tables, promote_options="default")
        self._seed = seed
        self._epoch = -1
        self._order = np.empty(0, dtype=np.int64)
        self.position = position

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def next(self) -> Prompt:
        """Hand out the next prompt; `position` moves on by one."""
        epoch, offset = divmod(self.position, len(self))
        if epoch != self._epoch:
            self._order = prompt_order(len(self), seed=self._seed, epoch=epoch)
            self._epoch = epoch
        row: dict[str, Any] = self._table.slice(int(self._order[offset]), 1).to_pylist()[0]
        self.position += 1
        ids = row.pop(TOKEN_IDS)
        return Prompt(prompt_id=f"e{epoch}-{offset}", token_ids=tuple(ids), row=row)
