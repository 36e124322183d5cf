"""Prompts: from any Ray Dataset to token ids, in an order that is known and can be restored.

Invariants:
    * The order of an epoch is a permutation drawn from (seed, epoch): `position` alone says which
      prompts were handed out, so that a run can go on where it stopped.
    * Every prompt fits the model beside the whole response budget; what does not is an error
      before anything is generated, never a truncated prompt.
"""

from __future__ import annotations

import functools
import json
import pickle
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ray_apr.core.exceptions import ConfigError
from ray_apr.core.sample import Prompt
from ray_apr.data.rows import PromptRows
from ray_apr.scheduling.order import (
    num_retries,
    prompt_id,
    prompt_order,
    prompt_position,
    retried,
)

if TYPE_CHECKING:
    import ray
    import ray.data

TOKEN_IDS = "__apr_prompt_token_ids"
_REFUSAL = "__apr_refusal"
"""Column of a table that stands for one with a prompt that was refused."""
_TEMPLATE_FILES = ("chat_template.jinja", "additional_chat_templates", "tekken.json")


@functools.lru_cache(maxsize=4)
def load_tokenizer(model: str, *, is_here: bool = False) -> Any:
    """Load the tokenizer of a model folder or hub id, once for each process.

    Args:
        model: Folder or hub id.
        is_here: Take only what is on this machine.

    Raises:
        OSError: If it cannot be had.
    """
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model, local_files_only=is_here)


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


def encode_prompt(tokenizer: Any, prompt: Any, *, field: str = "prompts") -> list[int]:
    """Turn text, chat messages or token ids into token ids.

    Args:
        tokenizer: A Hugging Face tokenizer.
        prompt: ``str``, a list of ``{"role", "content"}`` mappings, or a list of ints.
        field: What an error calls the prompt.

    Raises:
        ConfigError: For anything else, for an empty prompt, or if the chat template does not take
            the messages.
    """
    if isinstance(prompt, np.ndarray):
        prompt = prompt.tolist()
    if isinstance(prompt, str):
        # not verbose: of a prompt that is too long we say so ourselves
        ids = tokenizer(prompt, verbose=False)["input_ids"]
    elif _is_chat(prompt):
        try:
            ids = tokenizer.apply_chat_template(
                list(prompt), add_generation_prompt=True, tokenize=True, return_dict=False
            )
        except Exception as error:  # a template may raise whatever it likes
            remedy = f"the tokenizer's chat template does not take these messages: {error}"
            raise ConfigError(field, prompt, remedy) from error
    elif isinstance(prompt, list | tuple) and all(isinstance(i, int) for i in prompt):
        ids = list(prompt)
    else:
        raise ConfigError(field, prompt, "must be text, chat messages or token ids")
    if not ids:
        raise ConfigError(field, prompt, "is empty: it has no tokens to continue")
    return [int(i) for i in ids]


def _is_chat(prompt: Any) -> bool:
    is_list = isinstance(prompt, list | tuple | np.ndarray)
    return is_list and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def has_chat_template(model: str) -> bool:
    """Whether a model folder has a chat template; of a hub id nobody knows before it is there."""
    folder = Path(model)
    if not folder.is_dir() or any((folder / name).exists() for name in _TEMPLATE_FILES):
        return True
    config = folder / "tokenizer_config.json"
    return config.is_file() and bool(json.loads(config.read_text()).get("chat_template"))


def check_dataset(
    dataset: ray.data.Dataset | PromptRows,
    model: str,
    column: str,
    replay_column: str | None = None,
) -> None:
    """Check the columns and the first prompt, which shows what kind all of them are.

    Waits for: Ray Data, where it has the prompts. Unblocked by: the first row, or its error; it
    says itself that it waits for a CPU.

    Args:
        dataset: The prompts.
        model: Folder or hub id whose tokenizer encodes them.
        column: Name of the prompt column.
        replay_column: That of a trace, if one is replayed.

    Raises:
        ConfigError: If a column is missing, there are no rows, or chat messages have no template.
    """
    if isinstance(dataset, PromptRows):
        names, first = dataset.names, dataset.slice(0, 1)
    elif hasattr(dataset, "map_batches"):
        names, first = list(getattr(dataset.schema(), "names", None) or []), dataset.take(1)
    else:
        raise ConfigError("prompts", type(dataset).__name__, "must be a ray.data.Dataset")
    if not names or not first:
        raise ConfigError("prompts", "0 rows", "the dataset is empty; give it at least one prompt")
    for field, name in (("prompt", column), ("replay", replay_column)):
        if name is not None and name not in names:
            raise ConfigError(
                f"rollout.{field}_column",
                name,
                f"the dataset has no such column, only {', '.join(names)}; name the right one",
            )
    if _is_chat(first[0].get(column)) and not has_chat_template(model):
        raise ConfigError(
            f"prompts[0].{column}",
            "chat messages",
            f"the tokenizer of {model} has no chat template; save one beside the weights as "
            "chat_template.jinja, or give the prompts as text",
        )


def encode_dataset(
    dataset: ray.data.Dataset,
    *,
    model: str,
    column: str,
    max_prompt_tokens: int,
    name: str | None = None,
    num_prompts: int | None = None,
) -> list[ray.ObjectRef]:
    """Encode every prompt as a Ray Data stage and return the Arrow tables by reference, in the
    order of the dataset: a run that goes on counts how many of them were handed out.

    Waits for: Ray Data, which was seen to find a CPU (`preflight.wait_for_cpu`). Unblocked by: its
    last table, or its error.

    Args:
        dataset: Rows with `column` and whatever the reward reads.
        model: Folder or hub id whose tokenizer is used.
        column: Name of the prompt column.
        max_prompt_tokens: Longest prompt that leaves room for the response budget.
        name: What Ray Data calls it, in its metrics and its log.
        num_prompts: How many they are in the checkpoint that the run begins with; None: any number.

    Raises:
        ConfigError: If a prompt is too long, naming the first one; or there are not so many.
    """

    def encode(table: pa.Table) -> pa.Table:
        tokenizer = load_tokenizer(model)
        try:
            ids = [encode_prompt(tokenizer, prompt) for prompt in table[column].to_pylist()]
        except ConfigError as error:  # raised here it would come out as a traceback of Ray Data
            return pa.table({_REFUSAL: [pickle.dumps(error)]})
        return table.append_column(TOKEN_IDS, pa.array(ids, pa.list_(pa.int64())))

    import ray

    encoded = dataset.map_batches(encode, batch_format="pyarrow", batch_size=4096)
    encoded.set_name(name)
    options = encoded.context.execution_options  # the dataset's own ones, too
    options.preserve_order, as_given = True, options.preserve_order
    try:
        refs: list[ray.ObjectRef] = encoded.materialize().to_arrow_refs()
    finally:
        options.preserve_order = as_given
    first = 0
    for ref in refs:
        table: pa.Table = ray.get(ref)
        if _REFUSAL in table.column_names:
            raise pickle.loads(next(filter(None, table[_REFUSAL].to_pylist())))
        lengths = table[TOKEN_IDS].combine_chunks().value_lengths().to_pylist()
        check_lengths(lengths, max_prompt_tokens, column=column, first=first)
        first += table.num_rows
    if num_prompts not in (None, first):
        raise ConfigError(
            "prompts",
            f"{first} rows",
            f"the checkpoint was made with {num_prompts}, and counts which of them were handed "
            "out; give the same dataset, or begin a new run with the checkpoint's model",
        )
    return refs


def check_lengths(
    lengths: Sequence[int], most: int, *, column: str, first: int = 0, name: str = "prompts"
) -> None:
    """Raise for the first prompt that leaves no room for the response.

    Args:
        lengths: Tokens of each prompt.
        most: Longest prompt that leaves room.
        column: Name of the prompt column.
        first: Row of the first of them.
        name: What an error calls the dataset.

    Raises:
        ConfigError: Names the row.
    """
    for row, length in enumerate(lengths, start=first):
        if length > most:
            raise ConfigError(
                f"{name}[{row}].{column}",
                f"{length} tokens",
                f"at most {most} leave room for the response budget in the model's context; drop "
                "such prompts, lower rollout.max_response_tokens, or raise "
                "rollout.engine.max_model_len",
            )


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


class RowNumbers:
    """The order of the prompts: which row of the dataset each group's prompt is.

    Args:
        num_prompts: Rows of the dataset.
        seed: Together with the epoch it fixes the order, a permutation for each epoch.
    """

    def __init__(self, num_prompts: int, *, seed: int) -> None:
        self._num_prompts = num_prompts
        self._seed = seed
        # those of a few epochs: groups of several are under way together
        self._order = functools.lru_cache(maxsize=4)(self._order_of)

    def at(self, position: int) -> int:
        """Row of the prompt at a position."""
        epoch, offset = divmod(position, self._num_prompts)
        return int(self._order(epoch)[offset])

    def of(self, group_id: str) -> int:
        """Row of the prompt of a group."""
        return self.at(prompt_position(group_id, self._num_prompts))

    def _order_of(self, epoch: int) -> npt.NDArray[np.int64]:
        return prompt_order(self._num_prompts, seed=self._seed, epoch=epoch)


class PromptSource:
    """Endless prompts in a seeded order: epoch after epoch, each a permutation of its own.

    Args:
        tables: Arrow tables with the column of token ids.
        seed: Together with the epoch it fixes the order.
        position: How many prompts were handed out before.
        pending: Positions of those of them that are handed out once more, first.
    """

    def __init__(
        self,
        tables: Sequence[pa.Table],
        *,
        seed: int,
        position: int = 0,
        pending: Sequence[int] = (),
    ) -> None:
        self._table = pa.concat_tables(tables, promote_options="default")
        self._rows = RowNumbers(len(self), seed=seed)
        self._pending = deque(pending)
        self.position = position

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def next(self) -> Prompt:
        """Hand out the next prompt; `position` moves on by one, but for those that were pending."""
        if self._pending:
            return self._at(self._pending.popleft())
        self.position += 1
        return self._at(self.position - 1)

    def _at(self, position: int) -> Prompt:
        epoch, offset = divmod(position, len(self))
        row: dict[str, Any] = self._table.slice(self._rows.at(position), 1).to_pylist()[0]
        ids = row.pop(TOKEN_IDS)
        return Prompt(prompt_id=prompt_id(epoch, offset), token_ids=tuple(ids), row=row)

    def index_of(self, group_id: str) -> int:
        """Row of the dataset that the prompt of a group is."""
        return self._rows.of(group_id)

    def of(self, group_id: str) -> Prompt:
        """The prompt of a group, as often tried again as the group's id says."""
        prompt = self._at(prompt_position(group_id, len(self)))
        return retried(prompt, num_retries(group_id))

    @property
    def pending(self) -> tuple[int, ...]:
        """Positions of those that are still to be handed out once more."""
        return tuple(self._pending)
