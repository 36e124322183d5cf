"""Prompts: from any Ray Dataset to token ids, in an order that is known and can be restored.

Invariants:
    * The order of an epoch follows from seed, epoch and weights of the sources: `position` alone
      says which prompts were handed out, so that a run can go on where it stopped.
    * Prompts are those that `data.encoding` has let through: each fits the model beside the whole
      response budget.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ray_apr.config import PromptsConfig
from ray_apr.core.checks import require
from ray_apr.core.exceptions import ConfigError
from ray_apr.core.sample import Prompt
from ray_apr.data.held import first_row
from ray_apr.data.kinds import of_one_kind, one_table
from ray_apr.data.rows import PromptRows
from ray_apr.data.tokenizers import has_chat_template, is_chat
from ray_apr.scheduling.order import (
    mixed_order,
    num_retries,
    prompt_id,
    prompt_order,
    prompt_position,
    retried,
    shares,
)

if TYPE_CHECKING:
    import ray
    import ray.data

TOKEN_IDS = "__apr_prompt_token_ids"
ROW = "__apr_row"
"""Column with the row of the dataset, of tables from which rows were left out."""


def check_dataset(
    dataset: ray.data.Dataset | PromptRows,
    model: str,
    column: str,
    replay_column: str | None = None,
    source_column: str | None = None,
    suite_column: str | None = None,
    *,
    name: str = "prompts",
) -> bool:
    """Check the columns and the first prompt, which shows what kind all of them are; returns
    whether they are chat messages.

    Waits for: Ray Data, where it has the prompts. Unblocked by: the first row, or its error; it
    says itself that it waits for a CPU.

    Args:
        dataset: The prompts.
        model: Folder or hub id whose tokenizer encodes them.
        column: Name of the prompt column.
        replay_column: That of a trace, if one is replayed.
        source_column: That of the prompts' sources, if these have weights.
        suite_column: That of the suites of held-out prompts, if there are any.
        name: Of the argument that has them.

    Raises:
        ConfigError: If it is none, a column is missing, there are no rows, or chat messages have no
            template.
    """
    if isinstance(dataset, PromptRows):
        columns, first = dataset.names, next(iter(dataset.slice(0, 1)), None)
    elif hasattr(dataset, "map_batches"):
        with of_one_kind():
            columns = list(getattr(dataset.schema(), "names", None) or [])
            first = first_row(dataset)
    else:
        remedy = "must be a ray.data.Dataset, as ray.data.from_items makes of a list of rows"
        raise ConfigError(name, type(dataset).__name__, remedy)
    if not columns or first is None:
        raise ConfigError(name, "0 rows", "the dataset is empty; give it at least one prompt")
    needed = {
        "rollout.prompt_column": column,
        "rollout.replay_column": replay_column,
        "prompts.source_column": source_column,
        "evaluation.suite_column": suite_column,
    }
    for field, given in needed.items():
        if given is not None and given not in columns:
            remedy = f"{name} has no such column, only {', '.join(columns)}; name the right one"
            raise ConfigError(field, given, remedy)
    are_messages = is_chat(first.get(column))
    if are_messages and not has_chat_template(model):
        raise ConfigError(
            f"{name}[0].{column}",
            "chat messages",
            f"the tokenizer of {model} has no chat template; save one beside the weights as "
            "chat_template.jinja, or give the prompts as text",
        )
    return are_messages


def held_out_prompts(tables: Sequence[pa.Table]) -> list[Prompt]:
    """All prompts once, in the order of the dataset.

    Args:
        tables: Arrow tables with the column of token ids.
    """
    rows = one_table(tables).to_pylist()
    return [
        Prompt(prompt_id=str(i), token_ids=tuple(row.pop(TOKEN_IDS)), row=row)
        for i, row in enumerate(rows)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """Sources that prompts are handed out of by weight."""

    weights: Mapping[str, float]
    """Of each."""
    rows: tuple[npt.NDArray[np.int64], ...]
    """Numbers of each one's prompts."""
    num_of: tuple[int, ...]
    """How many of an epoch's prompts are of each."""

    @classmethod
    def of(cls, names: Sequence[Any], config: PromptsConfig) -> Mix | None:
        """The sources of some prompts; None: they have no weights.

        Args:
            names: Source of each prompt.
            config: Weights of the sources.

        Raises:
            ConfigError: If a prompt is of no source, a source has no prompts, or none comes of it.
        """
        if config.weights is None:
            return None
        weights = dict(sorted(config.weights.items()))
        rows: dict[str, list[int]] = {name: [] for name in weights}
        for row, name in enumerate(names):
            if not isinstance(name, str) or name not in rows:
                remedy = f"is none of prompts.weights, {', '.join(weights)}; give it a weight there"
                raise ConfigError(f"prompts.{config.source_column}", name, remedy)
            rows[name].append(row)
        num_of = shares(len(names), list(weights.values()))
        for (name, of_source), number in zip(rows.items(), num_of, strict=True):
            given = {name: weights[name]}
            has = "has no prompts that fit the model; leave it out, or see to its rows"
            require(bool(of_source), "prompts.weights", given, has)
            has = f"is too small beside the others: none of {len(names)} prompts would be of it"
            require(number > 0, "prompts.weights", given, has)
        arrays = tuple(np.array(of_source, dtype=np.int64) for of_source in rows.values())
        return cls(weights=weights, rows=arrays, num_of=tuple(num_of))


class RowNumbers:
    """The order of the prompts: which of them each group's prompt is, by its place among them.

    Args:
        num_prompts: How many there are.
        seed: Together with the epoch it fixes the order.
        mix: Sources of which each has its share of an epoch; None: an epoch is a permutation of all
            prompts.
    """

    def __init__(self, num_prompts: int, *, seed: int, mix: Mix | None = None) -> None:
        self._num_prompts = num_prompts
        self._seed = seed
        self._mix = mix
        # those of a few epochs: groups of several are under way together
        self._order = functools.lru_cache(maxsize=4)(self._order_of)

    def at(self, position: int) -> int:
        """The prompt at a position."""
        epoch, offset = divmod(position, self._num_prompts)
        return int(self._order(epoch)[offset])

    def of(self, group_id: str) -> int:
        """The prompt of a group."""
        return self.at(prompt_position(group_id, self._num_prompts))

    def _order_of(self, epoch: int) -> npt.NDArray[np.int64]:
        mix = self._mix
        if mix is None:
            return prompt_order(self._num_prompts, seed=self._seed, epoch=epoch)
        return mixed_order(mix.rows, mix.num_of, seed=self._seed, epoch=epoch)


class PromptSource:
    """Endless prompts in a seeded order: epoch after epoch, each in an order of its own.

    Args:
        tables: Arrow tables with the column of token ids.
        seed: Together with the epoch it fixes the order.
        position: How many prompts were handed out before.
        pending: Positions of those of them that are handed out once more, first.
        config: Weights of the sources that they are of.

    Raises:
        ConfigError: If the weights do not fit the prompts.
    """

    def __init__(
        self,
        tables: Sequence[pa.Table],
        *,
        seed: int,
        position: int = 0,
        pending: Sequence[int] = (),
        config: PromptsConfig | None = None,
    ) -> None:
        self._table = one_table(tables)
        config = config or PromptsConfig()
        names = self._table[config.source_column].to_pylist() if config.weights else ()
        self.weights = config.weights
        """Of the sources; None: they have none."""
        self._rows = RowNumbers(len(self), seed=seed, mix=Mix.of(names, config))
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
        row.pop(ROW, None)
        ids = row.pop(TOKEN_IDS)
        return Prompt(prompt_id=prompt_id(epoch, offset), token_ids=tuple(ids), row=row)

    def index_of(self, group_id: str) -> int:
        """Row of the dataset that the prompt of a group is."""
        index = self._rows.of(group_id)
        if ROW not in self._table.column_names:
            return index
        return int(self._table[ROW][index].as_py())

    def of(self, group_id: str) -> Prompt:
        """The prompt of a group, as often tried again as the group's id says (`with_stops`)."""
        prompt = self._at(prompt_position(group_id, len(self)))
        return retried(prompt, num_filtered=num_retries(group_id))

    @property
    def pending(self) -> tuple[int, ...]:
        """Positions of those that are still to be handed out once more."""
        return tuple(self._pending)
