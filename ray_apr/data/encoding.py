"""The prompts of a dataset as token ids, and which of them fit the model.

Invariants:
    * Every prompt that is handed out leaves room for the whole response budget. What does not is an
      error before anything is generated, or is left out and counted; it is never cut.
    * Tables are in the order of the dataset: a run that goes on counts how many prompts were handed
      out.
"""

from __future__ import annotations

import functools
import logging
import math
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from ray_apr.core.checks import require
from ray_apr.core.exceptions import ConfigError
from ray_apr.data.held import held_tables
from ray_apr.data.kinds import of_one_kind, one_table, schema_of_all
from ray_apr.data.prompts import ROW, TOKEN_IDS
from ray_apr.data.rows import PromptRows, field_of
from ray_apr.data.tokenizers import encode_prompt, load_tokenizer, num_token_ids

if TYPE_CHECKING:
    import ray
    import ray.data

logger = logging.getLogger(__name__)

_BATCH_ROWS = 4096
"""Rows that are encoded together."""
_REFUSAL = "__apr_refusal"
"""Column of a table that stands for one with a prompt that was refused."""


class _RefusedError(Exception):
    """A value of a table was refused.

    Args:
        row: Of the table.
        column: Its own.
        error: Why.
    """

    def __init__(self, row: int, column: str, error: ConfigError) -> None:
        super().__init__(row, column, error)
        self.row = row
        self.column = column
        self.error = error


class LengthLimit:
    """Says which prompts leave room for the response, and counts those that do not.

    Args:
        most: Tokens of the longest prompt that does.
        column: Name of the prompt column.
        drops: Whether those that are too long are left out; without, the first one is an error.
            None: as without, and no setting would change that.
        name: What messages call the dataset.
        place: Where a row is, for messages; None: nobody knows.
    """

    def __init__(
        self,
        most: int,
        *,
        column: str,
        drops: bool | None = False,
        name: str = "prompts",
        place: Callable[[int], str | None] = lambda row: None,
    ) -> None:
        self._most = most
        self.column = column
        self._drops = drops
        self.name = name
        self._place = place
        self._example = ""
        self.num_seen = 0
        """Prompts that were looked at."""
        self.num_dropped = 0
        """Those of them that are too long."""

    @property
    def num_left(self) -> int:
        """Those of them that fit."""
        return self.num_seen - self.num_dropped

    def field(self, row: int) -> str:
        """What an error calls the prompt of a row."""
        return field_of(self._place(row), row, self.column, name=self.name)

    def fits(self, lengths: Sequence[int]) -> list[bool]:
        """Whether each of the next prompts fits.

        Args:
            lengths: Tokens of each.

        Raises:
            ConfigError: If one does not, and those are not left out; names its row.
        """
        fitting = [length <= self._most for length in lengths]
        setting = "" if self._drops is None else " (prompts.on_too_long: drop)"
        for row, (length, fit) in enumerate(zip(lengths, fitting, strict=True), self.num_seen):
            require(
                fit or bool(self._drops),
                self.field(row),
                f"{length} tokens",
                f"at most {self._most} leave room for the response budget in the model's context; "
                f"leave such prompts out{setting}, lower rollout.max_response_tokens, or raise "
                "rollout.engine.max_model_len",
            )
            if not fit and not self.num_dropped:
                self._example = f"{self._place(row) or f'row {row}'} with {length}"
            self.num_dropped += not fit
        self.num_seen += len(lengths)
        return fitting

    def end(self) -> str | None:
        """What was left out, in words, once all prompts were looked at; None: nothing.

        Raises:
            ConfigError: If no prompt is left.
        """
        if not self.num_dropped:
            return None
        require(
            self.num_dropped < self.num_seen,
            "prompts.on_too_long",
            "drop",
            f"leaves none of {self.num_seen} rows: all have more than the {self._most} tokens that "
            "leave room for the response budget; lower rollout.max_response_tokens, or raise "
            "rollout.engine.max_model_len",
        )
        return (
            f"{self.name}: {self.num_dropped} of {self.num_seen} rows are left out "
            f"(prompts.on_too_long: drop), as they have more than {self._most} tokens: "
            f"the first is {self._example}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedPrompts:
    """The prompts of a run."""

    tables: list[ray.ObjectRef]
    """Arrow tables with the column of token ids, in the order of the dataset."""
    schema: pa.Schema
    """Of all of them together: a column may be empty in one, or not there."""
    num_prompts: int
    """Rows of all of them."""
    num_dropped: int
    """Rows of the dataset that were too long, and are in none."""


def encode_dataset(
    dataset: ray.data.Dataset,
    *,
    model: str,
    column: str,
    max_prompt_tokens: int,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    drops_too_long: bool | None = False,
    name: str | None = None,
    num_prompts: int | None = None,
    replay_column: str | None = None,
    max_response_tokens: float = math.inf,
) -> EncodedPrompts:
    """Encode every prompt, as a Ray Data stage; those of a small dataset that Ray has in its memory
    here, as one batch: the stage would begin after the seconds in which a process starts for it.

    Waits for: Ray Data, which was seen to find a CPU (`preflight.wait_for_cpu`). Unblocked by: its
    last table, or its error.

    Args:
        dataset: Rows with `column` and whatever the reward reads.
        model: Folder or hub id whose tokenizer is used.
        column: Name of the prompt column.
        max_prompt_tokens: Longest prompt that leaves room for the response budget.
        chat_template_kwargs: Variables of its chat template.
        drops_too_long: Leave longer ones out, and log how many they are; None: they are held-out
            ones, of which none is.
        name: What Ray Data calls it, in its metrics and its log.
        num_prompts: How many they are in the checkpoint that the run begins with; None: any number.
        replay_column: That of a trace, if one is replayed.
        max_response_tokens: The response budget, which its lengths have to fit.

    Raises:
        ConfigError: If a prompt is too long, cannot be encoded or has no lengths to replay, naming
            the first one; or there are not so many.
    """
    import ray

    tokenizer = load_tokenizer(model, chat_template_kwargs)
    num_ids = num_token_ids(model, tokenizer)

    def encode(table: pa.Table) -> pa.Table:
        if replay_column is not None:
            check = functools.partial(_check_lengths, max_response_tokens)
            _of_each(table, replay_column, check)
        return table.append_column(TOKEN_IDS, _ids(table, tokenizer, column, num_ids))

    refs = _run(dataset, encode, name, column)
    limit = LengthLimit(max_prompt_tokens, column=column, drops=drops_too_long)
    schemas = []
    for number, ref in enumerate(refs):
        table = _checked(ray.get(ref), limit.num_seen)
        if drops_too_long:
            rows = range(limit.num_seen, limit.num_seen + table.num_rows)
            table = table.append_column(ROW, pa.array(rows, pa.int64()))
        schemas.append(table.schema)
        fitting = limit.fits(table[TOKEN_IDS].combine_chunks().value_lengths().to_pylist())
        if drops_too_long:
            refs[number] = ray.put(table.filter(pa.array(fitting, pa.bool_())))
    if said := limit.end():
        logger.warning("%s", said)
    if num_prompts not in (None, limit.num_left):
        beside = f", and {limit.num_dropped} that are too long" if limit.num_dropped else ""
        raise ConfigError(
            "prompts",
            f"{limit.num_left} rows{beside}",
            f"the checkpoint was made with {num_prompts}, and counts which of them were handed "
            "out; give the same dataset (and the same limits, if prompts.on_too_long is drop), or "
            "begin a new run with the checkpoint's model",
        )
    return EncodedPrompts(
        tables=refs,
        schema=schema_of_all(schemas),
        num_prompts=limit.num_left,
        num_dropped=limit.num_dropped,
    )


def count_fitting(
    dataset: ray.data.Dataset,
    *,
    model: str,
    column: str,
    max_prompt_tokens: int,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    name: str | None = None,
) -> int:
    """How many prompts leave room for the response; all are encoded, and nothing is kept of them.

    Waits for: Ray Data, which was seen to find a CPU (`preflight.wait_for_cpu`). Unblocked by: its
    last table, or its error.

    Args:
        dataset: Rows with `column`.
        model: Folder or hub id whose tokenizer is used.
        column: Name of the prompt column.
        max_prompt_tokens: Longest prompt that leaves room for the response budget.
        chat_template_kwargs: Variables of its chat template.
        name: What Ray Data calls it, in its metrics and its log.

    Raises:
        ConfigError: If a prompt cannot be encoded, naming the first one.
    """
    import ray

    tokenizer = load_tokenizer(model, chat_template_kwargs)
    num_ids = num_token_ids(model, tokenizer)

    def count(table: pa.Table) -> pa.Table:
        fitting = LengthLimit(max_prompt_tokens, column=column, drops=True)
        lengths = _ids(table, tokenizer, column, num_ids).value_lengths().to_pylist()
        return pa.table({"fitting": pa.array(fitting.fits(lengths), pa.bool_())})

    num_seen = num_fitting = 0
    for ref in _run(dataset, count, name, column):
        table = _checked(ray.get(ref), num_seen)
        num_seen += table.num_rows
        num_fitting += sum(table["fitting"].to_pylist())
    return num_fitting


def check_replayed(rows: PromptRows, column: str, max_response_tokens: float) -> None:
    """Check the response lengths of a trace that is replayed.

    Args:
        rows: The prompts.
        column: Their column of lengths.
        max_response_tokens: The response budget.

    Raises:
        ConfigError: Names the first row that has none, or one beyond the budget.
    """
    for row, lengths in enumerate(rows.column(column)):
        _check_lengths(max_response_tokens, lengths, field_of(rows.place(row), row, column))


def _check_lengths(most: float, lengths: Any, field: str = "") -> None:
    if isinstance(lengths, np.ndarray):
        lengths = lengths.tolist()
    is_right = isinstance(lengths, list | tuple) and bool(lengths)
    remedy = "must be a list of whole numbers of at least 1, the tokens of each response"
    require(
        is_right and all(type(length) is int and length >= 1 for length in lengths),
        field,
        lengths,
        f"{remedy}; correct it, or leave out rollout.replay_column",
    )
    remedy = f"must be at most rollout.max_response_tokens = {most}; raise that, or correct it"
    require(max(lengths) <= most, field, lengths, remedy)


def _ids(table: pa.Table, tokenizer: Any, column: str, num_ids: int) -> pa.ListArray:
    encode = functools.partial(encode_prompt, tokenizer, num_ids=num_ids)
    return pa.array(_of_each(table, column, encode), pa.list_(pa.int32()))


def _of_each(table: pa.Table, column: str, function: Callable[[Any], Any]) -> list[Any]:
    """What a function makes of the values of a column.

    Raises:
        _RefusedError: If it refuses one.
    """
    made = []
    for row, value in enumerate(table[column].to_pylist()):
        try:
            made.append(function(value))
        except ConfigError as error:
            raise _RefusedError(row, column, error) from error
    return made


def _with_lists(table: pa.Table, column: str) -> pa.Table:
    """A table whose token ids are lists: Ray Data has a type for NumPy's arrays of each length, of
    which no table has two."""
    if not isinstance(table[column].type, pa.BaseExtensionType):
        return table
    values = table[column].to_pylist()
    if not all(isinstance(value, np.ndarray) for value in values):
        return table
    lists = pa.array([value.tolist() for value in values])
    return table.set_column(table.column_names.index(column), column, lists)


def _run(
    dataset: ray.data.Dataset,
    stage: Callable[[pa.Table], pa.Table],
    name: str | None,
    column: str,
) -> list[ray.ObjectRef]:
    """Run a stage of Ray Data over all tables, in their order; see `_checked` and `encode_dataset`.
    Prompts that are arrays in a `column` are lists there.

    Waits for: Ray Data. Unblocked by: its last table, or its error.
    """
    import ray

    def encode(table: pa.Table) -> pa.Table:
        try:
            return stage(_with_lists(table, column))
        except _RefusedError as error:  # raised here it would come out as a traceback of Ray Data
            return pa.table({_REFUSAL: [pickle.dumps((error.row, error.column, error.error))]})

    with of_one_kind():
        tables = held_tables(dataset)
        held = one_table([_with_lists(table, column) for table in tables]) if tables else None
    if held is not None:
        return [ray.put(encode(held))]
    staged = dataset.map_batches(encode, batch_format="pyarrow", batch_size=_BATCH_ROWS)
    staged.set_name(name)
    options = staged.context.execution_options  # the dataset's own ones, too
    options.preserve_order, as_given = True, options.preserve_order
    try:
        with of_one_kind():
            refs: list[ray.ObjectRef] = staged.materialize().to_arrow_refs()
    finally:
        options.preserve_order = as_given
    return refs


def _checked(table: pa.Table, num_before: int) -> pa.Table:
    """A table of a stage; raises what the stage refused.

    Args:
        table: It.
        num_before: Rows of the tables before it.
    """
    refusals = table[_REFUSAL].to_pylist() if _REFUSAL in table.column_names else []
    for number, refusal in enumerate(refusals, start=num_before):
        if refusal is not None:
            row, column, error = pickle.loads(refusal)
            raise ConfigError(field_of(None, number + row, column), error.value, error.remedy)
    return table
