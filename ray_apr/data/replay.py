"""What a run goes on with, of a checkpoint and of the journal since then.

Two kinds of restart read it. Where the trainer begins again with its checkpoint, the steps after it
are trained again, with the batches that they had: the journal has what was chosen. Where the
trainer lives, and rollout worker and buffer alone begin again, what it has trained is gone here;
what was written before that trainer began is read as of the first kind.

Invariants, kept by `replay`:
    * Each group is in one place: held, trained, or gone with a reason; a prompt that was handed out
      and has no samples comes again.
    * Every token that was noted is held, trained, or counted among the discards.
    * No sample has tokens of a version that the run will not reach again.

Pure: no ray, no torch.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ray_apr.data.journal import Frame
from ray_apr.data.resumption import Begin, Counters, Replayed, RolloutProgress
from ray_apr.data.saved_samples import SCHEMA
from ray_apr.scheduling.order import prompt_position

_TOKENS = ("token_ids", "logprobs")
_SEGMENTS = ("segment_versions", "segment_lengths", "segment_generated")


@dataclass(frozen=True, slots=True)
class Epoch:
    """The frames of both sides between two checkpoints."""

    worker: Sequence[Frame]
    buffer: Sequence[Frame]

    @property
    def header(self) -> Mapping[str, Any]:
        """What its samples were made with; empty if nothing was written."""
        for frame in (*self.worker[:1], *self.buffer[:1]):
            header: Mapping[str, Any] = frame.notes.get("header", {})
            return header
        return {}


def replay(
    begin: Begin, epochs: Iterable[Epoch], header: Mapping[str, Any], *, trainer_lives: bool
) -> Begin:
    """Add to a checkpoint what the journal has since then.

    Args:
        begin: Of the checkpoint, or of a run without any; or where a trainer that lives began.
        epochs: Those since it, in order. Of the last one whose header differs, and of those before
            it, nothing is used.
        header: Settings of the run; those of an epoch have ``num_prompts`` beside them.
        trainer_lives: Whether the trainer goes on where it is, and not with the checkpoint.

    Returns:
        `begin`, the same if there is nothing and the trainer begins again; but for samples of a
        checkpoint that was taken while steps were trained again, which may be newer than it.
    """
    used: list[Epoch] = []
    for epoch in epochs:
        if epoch.header:
            is_same = all(epoch.header.get(name) == value for name, value in header.items())
            used = [*used, epoch] if is_same else []
    journal = _Journal(begin)
    is_ahead = any(row.newest_version > begin.policy_version for row in journal.rows.values())
    if not used and not trainer_lives and not is_ahead:
        return begin
    for epoch in used:
        journal.read(epoch, trainer_lives=trainer_lives)
    return journal.end(used[-1].header if used else {}, trainer_lives=trainer_lives)


def ended_row(
    sample_id: str, policy_version: int, num_generated: int, finish_reason: str | None
) -> dict[str, Any]:
    """Row of ``ended.jsonl``: what is known of a sample before it is scored, trained or dropped.

    Args:
        sample_id: Its id.
        policy_version: Of its newest token.
        num_generated: Tokens that an engine made.
        finish_reason: How it ended.
    """
    return {
        "sample_id": sample_id,
        "policy_version": policy_version,
        "num_generated": num_generated,
        "finish_reason": finish_reason,
    }


@dataclass(slots=True)
class _Row:
    """A sample that was noted."""

    values: dict[str, Any]
    """Columns but for those of tokens."""
    tokens: dict[str, npt.NDArray[Any]]

    def follow(self, values: dict[str, Any], tokens: dict[str, npt.NDArray[Any]]) -> _Row:
        """The sample as a later row of the journal has it, which begins at a token of its own."""
        base = values.pop("base")
        if base > len(self.tokens["token_ids"]):  # what came before it was not written
            return self.anew()
        before = self.values
        cut = _cut(zip(*(before[name] for name in _SEGMENTS), strict=True), base)
        new = list(zip(*(values[name] for name in _SEGMENTS), strict=True))
        support = _padded(before["support"], base) if base else []
        if support or values["support"]:
            num_new = sum(length for _, length, _ in new)
            support = [*(support or [b""] * base), *(values["support"] or [b""] * num_new)]
        columns = zip(*_merged([*cut, *new]), strict=True) if cut or new else ([], [], [])
        merged = dict(zip(_SEGMENTS, map(list, columns), strict=True))
        lengths = zip(merged["segment_lengths"], merged["segment_generated"], strict=True)
        num_generated = sum(length for length, is_generated in lengths if is_generated)
        return _Row(
            {**values, **merged, "support": support, "num_generated": num_generated},
            {n: np.concatenate([self.tokens[n][:base], tokens[n]]) for n in _TOKENS},
        )

    @property
    def newest_version(self) -> int:
        """Of its tokens; -1 if it has none."""
        return max(self.values["segment_versions"], default=-1)

    def anew(self) -> _Row:
        """The sample before its first token."""
        nothing = ("finish_reason", "reward", "turn_text", "response_text", "environment_state")
        values = {**self.values, **dict.fromkeys(nothing), **{name: [] for name in _SEGMENTS}}
        values |= {"num_turns": 0, "awaits_step": False, "num_generated": 0, "support": []}
        values |= {"reward_metrics": "{}"}
        return _Row(values, {name: array[:0] for name, array in self.tokens.items()})


def _cut(segments: Iterable[tuple[int, int, bool]], num_tokens: int) -> list[tuple[int, int, bool]]:
    """Segments of the first tokens."""
    kept = []
    for version, length, is_generated in segments:
        if num_tokens > 0:
            kept.append((version, min(length, num_tokens), is_generated))
        num_tokens -= length
    return kept


def _merged(segments: Iterable[tuple[int, int, bool]]) -> list[tuple[int, int, bool]]:
    """Segments, with neighbours of one version and kind joined."""
    groups = itertools.groupby(segments, key=lambda segment: (segment[0], segment[2]))
    return [(v, sum(length for _, length, _ in parts), made) for (v, made), parts in groups]


def _padded(support: Sequence[bytes] | None, num_tokens: int) -> list[bytes]:
    return list(support[:num_tokens]) if support else []


def _rows(table: pa.Table) -> Iterable[tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]]:
    """Rows of a table of samples: their values, and their tokens as arrays."""
    tokens = {name: table[name].combine_chunks() for name in _TOKENS}
    for i, values in enumerate(table.drop_columns(list(_TOKENS)).to_pylist()):
        yield values, {name: column[i].values.to_numpy() for name, column in tokens.items()}


@dataclass(slots=True)
class _Journal:
    """What the frames add up to."""

    begin: Begin
    rows: dict[str, _Row] = field(default_factory=dict)
    """Samples, in the order in which they were first noted."""
    handed: set[str] = field(default_factory=set)
    gone: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Row of each group that was dropped."""
    admitted: dict[str, None] = field(default_factory=dict)
    """Groups of prompts that were tried again."""
    ended: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Row of each sample that ended."""
    plan: dict[int, tuple[str, ...]] = field(default_factory=dict)
    granted: tuple[int, int] | None = None
    trained: tuple[int, Mapping[str, float]] | None = None
    state: dict[str, Any] = field(default_factory=dict)
    """The worker's last figures."""
    num_stops: dict[str, int] = field(default_factory=dict)
    """Of each group and prompt that had any (`SchedulerState`)."""
    counters: Counters = field(default_factory=Counters)

    def __post_init__(self) -> None:
        if self.begin.rollout is not None:
            self.num_stops |= self.begin.rollout.num_stops
        if self.begin.samples is not None:
            for values, tokens in _rows(self.begin.samples):
                self.rows[values["sample_id"]] = _Row(values, tokens)
                if values["is_handed_over"]:
                    self.handed.add(values["group_id"])
        if self.begin.replayed is not None:
            self.plan |= self.begin.replayed.plan

    def read(self, epoch: Epoch, *, trainer_lives: bool) -> None:
        """Take the frames of an epoch."""
        for frame in epoch.worker:
            for values, tokens in _rows(frame.rows):
                self._take_row(values, tokens)
            for event in frame.notes["events"]:
                self.gone |= {row["group_id"]: row for row in event.get("gone", ())}
                self.handed.update(event.get("handed", ()))
                self.admitted |= dict.fromkeys(event.get("admitted", ()))
            self.num_stops |= frame.notes["state"].get("num_stops", {})
        for frame in epoch.buffer:
            for event in frame.notes["events"]:
                self._take_event(event)
        if epoch.worker:
            self.state = epoch.worker[-1].notes["state"]
            self.counters += Counters(**self.state["counters"])
        if epoch.buffer:
            counted = Counters(**epoch.buffer[-1].notes["state"]["counters"])
            self.counters += counted if trainer_lives else counted.without_training()

    def _take_row(self, values: dict[str, Any], tokens: dict[str, npt.NDArray[Any]]) -> None:
        name = values["sample_id"]
        before = self.rows.get(name) or _Row({**values, "support": []}, tokens).anew()
        self.rows[name] = row = before.follow(values, tokens)
        if values["reward"] is None:  # of one that was handed over before it began anew
            self.handed.discard(values["group_id"])
        if values["finish_reason"] is not None:
            num_generated, reason = row.values["num_generated"], values["finish_reason"]
            self.ended[name] = ended_row(name, max(0, row.newest_version), num_generated, reason)

    def _take_event(self, event: Mapping[str, Any]) -> None:
        self.gone |= {row["group_id"]: row for row in event.get("gone", ())}
        if "granted" in event:
            step, version = event["granted"]
            self.granted = (step, version)
        if "batch" in event:
            step, groups = event["batch"]
            if self.plan.get(step) != tuple(groups):  # another one than before a restart
                self.plan = {s: g for s, g in self.plan.items() if s < step}
            self.plan[step] = tuple(groups)
        if "trained" in event:
            step, figures = event["trained"]
            self.trained = (step, figures)

    def end(self, header: Mapping[str, Any], *, trainer_lives: bool) -> Begin:
        """What a run goes on with."""
        begin, first = self.begin, self.begin.step
        gone = {*self.gone, *self.state.get("retries", ())}  # or put off before they began
        if trainer_lives:
            if self.trained and self.granted and self.granted[0] <= self.trained[0]:
                self.granted = None
            if self.granted:
                first = self.granted[0]
            elif self.trained:
                first = self.trained[0] + 1
            gone |= {group for s, groups in self.plan.items() if s < first for group in groups}
        rows = {name: row for name, row in self.rows.items() if row.values["group_id"] not in gone}
        plan = self._reachable_plan(rows, first)
        if not trainer_lives:
            rows = self._cut(rows, begin.policy_version + len(plan))
        samples = _table(rows.values(), self.handed)
        newest = max((row.newest_version for row in rows.values()), default=0)
        version: int = begin.policy_version
        if trainer_lives:
            version = self.state.get("version", version)
        replayed = Replayed(
            plan=plan,
            policy_version=version,
            goes_on_at=max(newest, version),
            ended=tuple(self.ended.values()),
            dropped=tuple(self.gone.values()),
        )
        if trainer_lives:
            replayed = dataclasses.replace(
                replayed,
                takes_over=True,
                granted=self.granted,
                trained=self.trained,
                received=self.state.get("received", {}),
            )
        return dataclasses.replace(
            begin,
            rollout=self._progress(header, samples, gone) if header else begin.rollout,
            samples=samples,
            before=begin.before + self.counters,
            replayed=replayed,
        )

    def _cut(self, rows: Mapping[str, _Row], newest: int) -> dict[str, _Row]:
        """Rows, where samples with newer tokens begin anew."""
        late = {name for name, row in rows.items() if row.newest_version > newest}
        self.handed -= {rows[name].values["group_id"] for name in late}
        return {name: row.anew() if name in late else row for name, row in rows.items()}

    def _reachable_plan(self, rows: Mapping[str, _Row], first: int) -> dict[int, tuple[str, ...]]:
        """Batches from a step on, up to the first one of which a group is missing."""
        values = [row.values for row in rows.values()]
        unscored = {row["group_id"] for row in values if row["reward"] is None}
        whole = {row["group_id"] for row in values} - unscored
        plan: dict[int, tuple[str, ...]] = {}
        while whole.issuperset(self.plan.get(first + len(plan), ("",))):
            plan[first + len(plan)] = self.plan[first + len(plan)]
        return plan

    def _progress(
        self, header: Mapping[str, Any], samples: pa.Table, gone: set[str]
    ) -> RolloutProgress:
        known = self.begin.rollout
        num_prompts: int = header["num_prompts"]
        state = self.state
        if known is None:
            known = RolloutProgress(
                seed=header["seed"], num_prompts=num_prompts, position=0, pending=(),
                counters=Counters(), sampled=header["sampled"],
            )  # fmt: skip
        groups = samples["group_id"].unique().to_pylist()
        retries = list(state.get("retries", known.retries))
        retries += [i for i in self.admitted if i not in {*groups, *gone, *retries}]
        position: int = state.get("position", known.position)
        handed_out = {*known.pending, *range(known.position, position)}
        under_way = {*groups, *retries}
        alive = {prompt_position(i, num_prompts) for i in under_way}
        ended = {prompt_position(i, num_prompts) for i in gone}
        return dataclasses.replace(
            known,
            position=position,
            pending=tuple(sorted((handed_out - ended) | alive)),
            retries=tuple(retries),
            num_long_retries=state.get("num_long_retries", known.num_long_retries),
            num_stops={i: n for i, n in self.num_stops.items() if i in under_way},
            num_owed=state.get("num_owed", known.num_owed),
        )


def _table(rows: Iterable[_Row], handed: set[str]) -> pa.Table:
    rows = list(rows)
    columns: dict[str, Any] = {}
    for name in SCHEMA.names:
        kind = SCHEMA.field(name).type
        if name in _TOKENS:
            columns[name] = pa.array([row.tokens[name] for row in rows], kind)
        elif name == "is_handed_over":
            columns[name] = pa.array([row.values["group_id"] in handed for row in rows], kind)
        else:
            # an older checkpoint has no column of deaths
            columns[name] = pa.array([row.values.get(name, 0) for row in rows], kind)
    return pa.Table.from_pydict(columns, schema=SCHEMA)
