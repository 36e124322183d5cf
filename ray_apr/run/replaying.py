"""A step of a run once more, from its folder: the batch that it had, and what training it gives.

    checkpoint before it ─► samples ─┐
    journal since then ─► batches ───┴► the run's own stock ─► the run's own train step ─► figures

Invariants, kept by `replay_step`:
    * Nothing is written into the run folder.
    * Batches are laid out, and trained, by the code of the run itself (`scheduling.stock`,
      `train.learner`); settings that the run did not have are refused.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import torch

from ray_apr.core.exceptions import ConfigError
from ray_apr.core.group import SampleMeta
from ray_apr.core.sample import Prompt, Sample
from ray_apr.core.staleness import next_version
from ray_apr.data.encoding import LengthLimit
from ray_apr.data.prompts import Mix, RowNumbers
from ray_apr.data.resumption import Begin
from ray_apr.data.saved_samples import groups_of
from ray_apr.data.tokenizers import encode_prompt, load_tokenizer
from ray_apr.run.changes import Changed, changed_after
from ray_apr.run.folder import CONFIG_FILE, read_rows
from ray_apr.run.journals import journal_of, with_journal
from ray_apr.run.ranks import RANKS_FILE
from ray_apr.run.resume import begin_with, kept_checkpoints
from ray_apr.run.training import what_is_trained
from ray_apr.scheduling.grant import sample_rows, told_figures
from ray_apr.scheduling.stock import Stock
from ray_apr.train.replay import Steps, train_again
from ray_apr.train.spec import LearnerSpec

if TYPE_CHECKING:
    from ray_apr.data.rows import PromptRows
    from ray_apr.run.spec import RunSpec

_OF_A_STEP = ("model", "algorithm", "train", "scaling", "digests", "partial_rollout")
"""Parts of ``config.json`` that say how a step is trained; the journal says how samples were."""
_SETTINGS = ("algorithm", "train", "partial_rollout")
"""Those that a later version may have more settings in, which by default change nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepAgain:
    """One step that was trained again."""

    step: int
    recorded: Mapping[str, Any]
    """Figures of the run's row, of the names that the replay has."""
    figures: Mapping[str, Any]

    @property
    def different(self) -> tuple[str, ...]:
        """Names of the figures that are not the same, bit by bit."""
        pairs = ((n, self.figures[n], self.recorded.get(n)) for n in self.figures)
        # as text, in which a NaN equals another one
        return tuple(n for n, one, other in pairs if json.dumps(one) != json.dumps(other))


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleAgain:
    """A sample of the step's batch."""

    sample_id: str
    prompt: str
    """Text of its tokens."""
    response: str
    """The same."""
    reward: float
    advantage: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """A step, with those before it since the checkpoint, in order."""

    begins_at: int
    """Steps that the checkpoint has trained; 0 is the begin of the run."""
    num_ranks: int
    steps: tuple[StepAgain, ...]
    samples: tuple[SampleAgain, ...]
    """The batch of the last step, in its order."""
    changed: Changed
    """Settings that the run changed after the first of these steps."""

    @property
    def is_same(self) -> bool:
        """Whether all figures of all steps are those of the run."""
        return not any(step.different for step in self.steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The batch of a step."""

    rows: tuple[dict[str, Any], ...]
    """Of each rank."""
    samples: tuple[Sample, ...]
    told: Mapping[str, float]
    """What the trainer was told at the end of the step."""


def replay_step(spec: RunSpec, prompts: PromptRows, step: int) -> Replay:
    """Train a step of a run again, and those before it since a checkpoint.

    Args:
        spec: The run, on its devices.
        prompts: Those of the run.
        step: Its number in ``metrics.jsonl``, from 0.

    Raises:
        ConfigError: If it cannot be replayed; says what is missing, and what to do.
        TrainError: If the training fails.
    """
    recorded = _recorded(spec.folder, step)
    spec = _as_it_ran(spec)
    begin = _begin(spec, step)
    spec = _with_ranks(spec, begin.step, step)
    batches = batches_since(begin, spec, prompts, step)
    trained = train_again(
        Steps(
            learner=LearnerSpec(**what_is_trained(spec)),
            checkpoint=begin.checkpoint,
            max_staleness=spec.partial_rollout.max_staleness,
            rows=[batch.rows for batch in batches],
            backend=spec.torch_backend or ("nccl" if spec.scaling.use_gpu else "gloo"),
            uses_gpus=bool(spec.scaling.use_gpu),
        )
    )
    steps = []
    for number, batch, figures in zip(
        range(begin.step, step + 1), batches, trained.figures, strict=True
    ):
        found = json.loads(json.dumps({**figures, **batch.told}))  # as the row went
        row = {name: recorded[number][name] for name in found if name in recorded[number]}
        steps.append(StepAgain(step=number, recorded=row, figures=found))
    return Replay(
        begins_at=begin.step,
        num_ranks=spec.scaling.num_workers,
        steps=tuple(steps),
        samples=_shown(spec.model, batches[-1].samples, trained.advantages),
        changed=changed_after(read_rows(spec.folder / RANKS_FILE), begin.step),
    )


def _recorded(folder: Path, step: int) -> dict[int, dict[str, Any]]:
    """Rows of the run's steps, by their number."""
    rows = {row["step"]: row for row in read_rows(folder / "metrics.jsonl")}
    if step not in rows:
        have = f"has steps {min(rows)} to {max(rows)}" if rows else "has no step"
        raise ConfigError("--step", step, f"metrics.jsonl {have}; name one that was trained")
    return rows


def _as_it_ran(spec: RunSpec) -> RunSpec:
    """The spec with the engines that the run had, among which a node divides its cores.

    Raises:
        ConfigError: If settings or code that a step depends on are others than then.
    """
    file = spec.folder / CONFIG_FILE
    try:
        ran = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError("RUN_DIR", str(file), f"cannot be read: {error}") from error
    if spec.train.passes is not None:  # the run has counted the prompts
        steps = ran.get("train", {}).get("steps")
        train = dataclasses.replace(spec.train, passes=None, steps=steps)
        spec = dataclasses.replace(spec, train=train)
    now = json.loads(json.dumps(spec.describe(), default=str))
    for described in (ran, now):  # rewards are in the journal
        files = described.get("digests", {}).items()
        described["digests"] = {name: of for name, of in files if name.startswith("algorithm.")}
    for part in _SETTINGS:
        now[part] = {name: value for name, value in now[part].items() if name in ran.get(part, {})}
    others = [
        name for part in _OF_A_STEP for name in _different(part, ran.get(part), now.get(part))
    ]
    if others:
        raise ConfigError(
            "RUN_DIR",
            str(spec.folder),
            f"the run was begun with other settings or code than there are now: "
            f"{', '.join(others)}; put them back as config.json has them (digests are SHA-256 of "
            "files of code)",
        )
    return spec.with_replicas(ran["rollout"]["num_replicas"])


def _different(name: str, one: Any, other: Any) -> list[str]:
    """Keys of nested settings that are not the same."""
    if isinstance(one, dict) and isinstance(other, dict):
        keys = sorted({*one, *other})
        return [
            k for key in keys for k in _different(f"{name}.{key}", one.get(key), other.get(key))
        ]
    return [] if one == other else [name]


def _begin(spec: RunSpec, step: int) -> Begin:
    """The newest checkpoint that has not trained a step yet, with what the journal has since then.

    Raises:
        ConfigError: If either is gone.
    """
    folder = journal_of(spec)
    if folder is None:
        raise ConfigError(
            "rollout.journal.enabled", False, "such a run keeps no batches, so that none can be "
            "replayed; leave it at true in the next one"
        )  # fmt: skip
    kept = {begun: checkpoint for begun, checkpoint in kept_checkpoints(spec) if begun <= step}
    epochs = folder.epochs()
    begin = begin_with(spec, kept[max(kept)]) if kept else Begin()
    if not epochs or epochs[0] > begin.epoch:
        missing = f"the journal in {folder.path} no longer reaches back to the step"
        if not kept:
            missing = f"no checkpoint is kept that was taken before step {step}"
        raise ConfigError(
            "--step",
            step,
            f"{missing}; name a later one, and in the next run keep more checkpoints "
            "(train.num_checkpoints_to_keep, train.hours_to_keep_checkpoints), with which their "
            "journal stays",
        )
    begin = with_journal(spec, begin, first=begin.epoch)
    if begin.replayed is None or step not in begin.replayed.plan:
        raise ConfigError(
            "--step",
            step,
            f"the journal in {folder.path} has no whole batch of it: it stopped (the log says "
            "why), or the run went on with other settings of its samples since; name another one",
        )
    return begin


def _with_ranks(spec: RunSpec, first: int, last: int) -> RunSpec:
    """The spec with the train workers that trained some steps.

    Args:
        spec: Of the run.
        first: Number of the first step; a checkpoint was taken before it.
        last: Number of the last step.

    Raises:
        ConfigError: If the folder does not tell it, not all of them had as many, or this machine
            has fewer GPUs.
    """
    begun = read_rows(spec.folder / RANKS_FILE)
    if not any(row["step"] <= first for row in begun):
        remedy = f"does not say how many train workers trained step {first}; put it back"
        raise ConfigError("RUN_DIR", str(spec.folder / RANKS_FILE), remedy)
    # a step that was trained several times counts as its last time, as in `metrics.jsonl`
    numbers = {
        [row["num_train_workers"] for row in begun if row["step"] <= step][-1]
        for step in range(first, last + 1)
    }
    if len(numbers) > 1:
        raise ConfigError(
            "--step",
            last,
            f"steps {first} to {last} had {' and '.join(map(str, sorted(numbers)))} train workers, "
            "and no checkpoint is kept that was taken in between; name another one",
        )
    (number,) = numbers
    if spec.scaling.use_gpu and torch.cuda.device_count() < number:
        raise ConfigError(
            "scaling.num_workers",
            number,
            f"this machine has {torch.cuda.device_count()} GPUs; replay on one with as many as "
            "the step had train workers",
        )
    return dataclasses.replace(spec, scaling=dataclasses.replace(spec.scaling, num_workers=number))


def batches_since(begin: Begin, spec: RunSpec, prompts: PromptRows, step: int) -> list[Batch]:
    """The batches of the steps since a checkpoint, up to a step.

    Args:
        begin: The checkpoint, with what the journal has since then.
        spec: Of the run, with the number of train workers that they are laid out for.
        prompts: Those of the run.
        step: Number of the last step.

    Raises:
        ConfigError: If prompts are others than those of the run.
    """
    assert begin.replayed is not None and begin.rollout is not None, "the journal has the step"
    kept = _kept(spec, prompts)
    if begin.rollout.num_prompts != len(kept):
        raise ConfigError(
            "prompts",
            f"{len(kept)} rows",
            f"the run had {begin.rollout.num_prompts}; give the same ones",
        )
    plan = {n: groups for n, groups in begin.replayed.plan.items() if n <= step}
    wanted = [group for groups in plan.values() for group in groups]
    table = begin.samples.filter(pc.is_in(begin.samples["group_id"], pa.array(wanted)))
    names = prompts.column(spec.prompts.source_column) if spec.prompts.weights else ()
    mix = Mix.of([names[row] for row in kept], spec.prompts) if names else None
    of_prompts = RowNumbers(len(kept), seed=spec.train.seed, mix=mix)
    tokenizer, column = _tokenizer(spec), spec.rollout.prompt_column

    def prompt_of(group_id: str) -> Prompt:
        index = kept[of_prompts.of(group_id)]
        (row,) = prompts.slice(index, index + 1)
        ids = tuple(encode_prompt(tokenizer, row[column], field=f"prompts[{index}].{column}"))
        return Prompt(prompt_id=group_id, token_ids=ids, row=row)

    live, handed_over = groups_of(table, prompt_of)
    stock = Stock(**spec.batches)
    stock.go_on(plan)
    for group in (*live, *handed_over):
        stock.put([SampleMeta.of(sample) for sample in group], group)
    version, batches = begin.policy_version, []
    for number in sorted(plan):
        stock.grant(number, version, 0.0)
        stock.choose(0.0)
        ticket = stock.hand_out()
        assert ticket.plan is not None, "all groups of the plan are there"
        payload = dict(enumerate(ticket.refs))
        ranks = range(spec.scaling.num_workers)
        by_id = {sample.sample_id: sample for group in ticket.refs for sample in group}
        batches.append(
            Batch(
                rows=tuple(ticket.plan.rank_batch(rank, payload).to_row() for rank in ranks),
                samples=tuple(by_id[meta.sample_id] for meta in ticket.plan.samples),
                told=told_figures(sample_rows(stock.end_step(number, 0.0))),
            )
        )
        version = next_version(version)
    return batches


def _tokenizer(spec: RunSpec) -> Any:
    return load_tokenizer(spec.model, spec.rollout.chat_template_kwargs)


def _kept(spec: RunSpec, prompts: PromptRows) -> Sequence[int]:
    """Rows of the prompts that the run had: without those that are too long, if it left them
    out."""
    rows = range(len(prompts))
    if spec.prompts.on_too_long == "error":
        return rows
    tokenizer, column = _tokenizer(spec), spec.rollout.prompt_column
    lengths = [len(encode_prompt(tokenizer, prompt)) for prompt in prompts.column(column)]
    limit = LengthLimit(spec.max_prompt_tokens(), column=column, drops=True)
    return list(itertools.compress(rows, limit.fits(lengths)))


def _shown(
    model: str, samples: Sequence[Sample], advantages: Sequence[float]
) -> tuple[SampleAgain, ...]:
    tokenizer = load_tokenizer(model)
    shown = []
    for sample, advantage in zip(samples, advantages, strict=True):
        assert sample.reward is not None, "a batch is of scored samples"
        shown.append(
            SampleAgain(
                sample_id=sample.sample_id,
                prompt=tokenizer.decode(sample.prompt.token_ids),
                response=tokenizer.decode(sample.response_ids),
                reward=sample.reward,
                advantage=advantage,
            )
        )
    return tuple(shown)
