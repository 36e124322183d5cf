"""Proof, from a run folder alone, that a run kept what it promises: ``ray-apr verify RUN_DIR``.

Each check reads what the run recorded, and says what it saw. A run that was gone on with is one
run: its rows are those of all of its parts. One that began with another run's checkpoint is looked
at from there on, as `begun.json` says it.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ray_apr.core.exceptions import ConfigError
from ray_apr.run.begun import BEGUN_FILE
from ray_apr.run.failed_groups import DROPPED_FILE, failed_groups
from ray_apr.run.final import FINAL_FILE
from ray_apr.run.folder import came_to_nothing, read_object, read_rows
from ray_apr.scheduling.order import prompt_position
from ray_apr.tools.report.load import set_at
from ray_apr.tools.report.summary import counted_error

_LEAST_P = 0.05
"""Below it the lengths that were trained are not those that were generated."""
_OF_CONTENT = ("filtered", "failed", "poison")
"""Reasons that drop groups for what they say, which may well depend on their lengths."""
_NEEDED: dict[str, dict[str, Any]] = {
    "metrics.jsonl": {"step": int, "policy_version": int, "time_s": int | float},
    "samples.jsonl": {
        "step": int, "sample_id": str, "group_id": str, "staleness": int | None,
        "num_generated": int, "num_masked_tokens": int, "version_tokens": list,
    },
    "ended.jsonl": {"sample_id": str, "num_generated": int},
    DROPPED_FILE: {"group_id": str, "reason": str},
    "ranks.jsonl": {"step": int},
    FINAL_FILE: {"batch_size": int, "max_staleness": int},
}  # fmt: skip
"""What each row, or the file, must have, and of which kind."""
_SHOWN = 5
_ANEW = {"step": 0, "policy_version": 0, "prompts_position": 0, "prompts_pending": []}
"""Where a run begins that has no other one's checkpoint."""


class Check(NamedTuple):
    """What one check saw."""

    name: str
    ok: bool
    seen: str


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """What a run recorded that ended."""

    final: dict[str, Any]
    steps: list[dict[str, Any]]
    samples: list[dict[str, Any]]
    """Of the trained batches."""
    ended: dict[str, dict[str, Any]]
    """By sample; of one that ended twice, before and after a restart, the last time."""
    dropped: list[dict[str, Any]]
    """Groups."""
    ranks: list[dict[str, Any]]
    """Each start of train workers, with the settings from there on."""
    begun: dict[str, Any]
    """Where it began (`run.begun`)."""

    @classmethod
    def of(cls, folder: Path) -> Recorded:
        """Read a run folder.

        Raises:
            ConfigError: If no run has ended in it, or one that came to nothing; or names a row that
                lacks something, or has what is none.
        """
        final, begun = folder / FINAL_FILE, folder / BEGUN_FILE
        if not final.is_file():
            raise ConfigError(
                "RUN_DIR",
                str(folder),
                "holds no final.json: it is no run folder, or the run has not ended; go on with it "
                "first (--resume)",
            )
        values = read_object(final)
        if came_to_nothing(folder):
            why = values.get("error") or "no error was recorded"
            raise ConfigError(
                "RUN_DIR",
                str(folder),
                f"nothing was trained, so that there is nothing to prove: {why}. A run of the same "
                "name takes the place of it",
            )
        _require_keys(values, final, str(final))
        return cls(
            final=values,
            steps=_rows(folder / "metrics.jsonl"),
            samples=_rows(folder / "samples.jsonl"),
            ended={row["sample_id"]: row for row in _rows(folder / "ended.jsonl")},
            dropped=_rows(folder / DROPPED_FILE),
            ranks=_rows(folder / "ranks.jsonl"),
            begun=_ANEW | (read_object(begun) if begun.is_file() else {}),
        )

    def set_at(self, name: str) -> dict[int, int]:
        """Value of a setting by which each step was trained."""
        steps = sorted({row["step"] for row in (*self.steps, *self.samples)})
        return {step: set_at(self.ranks, step, name, self.final[name]) for step in steps}


def _rows(file: Path) -> list[dict[str, Any]]:
    """Rows of a file, each with what is needed of it."""
    rows = read_rows(file)
    for number, row in enumerate(rows, start=1):
        _require_keys(row, file, f"{file}, line {number}")
    return rows


def _require_keys(row: dict[str, Any], file: Path, place: str) -> None:
    needed = _NEEDED[file.name]
    missing = [key for key in needed if key not in row]
    if missing:
        remedy = f"lacks {', '.join(missing)}, which each run writes; put it back as it was"
        raise ConfigError("RUN_DIR", place, remedy)
    for key, kind in needed.items():
        value = row[key]
        pairs = value if kind is list and isinstance(value, list) else ()
        if not isinstance(value, kind) or not all(map(_is_pair, pairs)):
            remedy = f"has {key} = {value!r}, which no run writes; put it back as it was"
            raise ConfigError("RUN_DIR", place, remedy)


def _is_pair(value: Any) -> bool:
    """Whether it is of two numbers."""
    return isinstance(value, list) and list(map(type, value)) == [int, int]


def verify(folder: str | Path) -> list[Check]:
    """All checks of a run folder.

    Raises:
        ConfigError: If no run has ended in it, or one that came to nothing.
    """
    run = Recorded.of(Path(folder))
    checks = (_steps, _batches, _staleness, _versions, _ledger, _prompts, _lengths)
    return [check(run) for check in checks]


def _steps(run: Recorded) -> Check:
    """Each step once, in order of time; each raises the version by one, and none has samples
    alone, but for the last one of a run that was ended in the weight sync before its row."""
    numbers = [row["step"] for row in run.steps]
    without_row = sorted({row["step"] for row in run.samples} - set(numbers))
    versions = [row["policy_version"] for row in run.steps]
    times = [row["time_s"] for row in run.steps]
    first, version = run.begun["step"], run.begun["policy_version"]
    was_ended = run.final.get("status") in ("stopped", "failed")
    ok = (
        numbers == list(range(first, first + len(numbers)))
        and versions == list(range(version + 1, version + 1 + len(versions)))
        and times == sorted(times)
        and run.final.get("steps") == len(numbers)
        and (not without_row or (was_ended and without_row == [first + len(numbers)]))
    )
    seen = f"{len(numbers)} rows, {run.final.get('steps')} steps in final.json"
    seen += f"; begun with step {first} of another run" if first else ""
    seen += _named("; samples without a row of their steps", without_row)
    return Check("steps", ok, seen)


def _batches(run: Recorded) -> Check:
    """Each step trained whole batches of whole groups, and no sample was trained twice."""
    wanted, sizes = run.set_at("batch_size"), Counter(row["step"] for row in run.samples)
    wrong = [step for step, size in wanted.items() if sizes[step] != size]
    twice = [i for i, n in Counter(row["sample_id"] for row in run.samples).items() if n > 1]
    in_parts = [] if twice else _in_parts(run.samples)
    seen = f"{len(run.samples)} samples in batches of {_values(wanted)}"
    seen += _named("; other sizes in steps", wrong) + _named("; trained twice", twice)
    seen += _named("; not whole", in_parts)
    return Check("batches", not (wrong or twice or in_parts), seen)


def _in_parts(samples: Sequence[Mapping[str, Any]]) -> list[str]:
    """Groups that are not whole: divided between steps, or of another size than that which most
    samples of their step are in groups of."""
    sizes = Counter((row["step"], row["group_id"]) for row in samples)
    steps = Counter(group for _, group in sizes)
    of_step: dict[int, Counter[int]] = {}
    for (step, _), size in sizes.items():
        of_step.setdefault(step, Counter())[size] += size
    usual = {step: max((n, size) for size, n in of.items())[1] for step, of in of_step.items()}
    return sorted({g for (step, g), size in sizes.items() if size != usual[step] or steps[g] > 1})


def _staleness(run: Recorded) -> Check:
    """No token in a loss was older than the bound, and each sample is as old as its tokens say."""
    bounds, ages, others = run.set_at("max_staleness"), [], []
    for row in run.samples:
        told, seen_age = row["staleness"], _age(row)
        ages += [(row["step"], age) for age in (told, seen_age) if age is not None]
        if told != seen_age:
            others.append(row["sample_id"])
    oldest = max((age for _, age in ages), default=0)
    too_old = sorted({step for step, age in ages if age > bounds[step]})
    seen = f"at most {oldest}, the bound is {_values(bounds)}"
    seen += _named("; above it in steps", too_old)
    seen += _named("; other than version_tokens says in", others)
    return Check("staleness", not too_old and not others, seen)


def _age(row: Mapping[str, Any]) -> int | None:
    """Age of the oldest token in the loss, of those by version: the oldest ones are masked. None if
    there is none."""
    num_masked = row["num_masked_tokens"]
    for version, num_tokens in row["version_tokens"]:
        if num_tokens > num_masked:
            age: int = row["step"] - version
            return age
        num_masked -= num_tokens
    return None


def _values(of_steps: Mapping[int, int]) -> str:
    """Values of a setting in the order of the steps: one, unless it was changed."""
    values = [str(value) for value, _ in itertools.groupby(of_steps.values())]
    return ", then ".join(values) or "no step"


def _versions(run: Recorded) -> Check:
    """Versions of a sample's tokens never go back, none is newer than its step's, and each token
    has one."""
    wrong = []
    for row in run.samples:
        versions = [version for version, _ in row["version_tokens"]]
        is_in_order = versions == sorted(set(versions)) and max(versions, default=0) <= row["step"]
        if not is_in_order or row["num_generated"] != sum(n for _, n in row["version_tokens"]):
            wrong.append(row["sample_id"])
    return Check("versions", not wrong, "rise within each sample" + _named("; not in", wrong))


def _ledger(run: Recorded) -> Check:
    """Every token is in one place; those that are trained, or masked, are those of the rows."""
    error, trained = run.final.get("ledger_error"), run.final.get("tokens_trained")
    counted = counted_error(run.final)
    in_loss = sum(row["num_generated"] - row["num_masked_tokens"] for row in run.samples)
    masked = (run.final.get("tokens_discarded") or {}).get("masked", 0)
    in_rows = sum(row["num_masked_tokens"] for row in run.samples)
    seen = f"error {error}; {trained} tokens trained, {in_loss} in the rows of the samples"
    seen += "" if masked == in_rows else f"; {masked} masked, {in_rows} in these rows"
    seen += "" if counted == error else f"; the counters beside it give an error of {counted}"
    ok = error == 0 == counted and trained == in_loss and masked == in_rows
    return Check("ledger", ok, seen)


def _prompts(run: Recorded) -> Check:
    """Each prompt handed out was trained once, was dropped with a reason, or is pending; one whose
    group was dropped and that was to be tried again has come to such an end, too."""
    num_prompts, position = run.final.get("num_prompts"), run.final.get("prompts_position")
    if num_prompts is None or position is None or "prompts_pending" not in run.final:
        return Check("prompts", False, "not in final.json: an actor did not answer at the end")
    groups = {row["group_id"] for row in run.samples}
    trained = Counter(prompt_position(group, num_prompts) for group in groups)
    for_good = (row for row in run.dropped if not row.get("retried"))
    dropped = {prompt_position(row["group_id"], num_prompts) for row in for_good}
    pending = set(run.final["prompts_pending"])
    of_before = set(range(run.begun["prompts_position"])) - set(run.begun["prompts_pending"])
    handed_out = set(range(position)) - of_before
    twice = sorted(p for p, n in trained.items() if n > 1 or p in pending | of_before)
    lost = sorted(handed_out - set(trained) - pending - dropped)
    unknown = sorted({*trained, *pending} - set(range(position)))
    seen = (
        f"{len(handed_out)} handed out: {len(trained)} trained, {len(pending)} pending, "
        f"{len(dropped - set(trained) - pending)} dropped"
    )
    num_failed = len(failed_groups(run.dropped))
    seen += f" (failed: {num_failed})" if num_failed else ""
    seen += _named("; twice", twice) + _named("; lost", lost)
    seen += _named("; never handed out", unknown)
    return Check("prompts", not (twice or lost or unknown), seen)


def _lengths(run: Recorded) -> Check:
    """What was trained is as long as what was generated, but for groups dropped for their content;
    and of each trained sample it was recorded that it ended, as long as it was trained.

    Two-sample Kolmogorov-Smirnov test over the prompts before the first one that is still pending:
    of those after it the short responses have ended, and the long ones have not. Of prompts that
    another run had begun, some responses had ended there.
    """
    num_prompts, position = run.final.get("num_prompts"), run.final.get("prompts_position")
    decided, of = math.inf, ""
    if num_prompts is not None and position is not None:
        decided = min(run.final.get("prompts_pending") or [], default=position)
        of = f" of the first {decided} of {position} prompts"
    by_content = {row["group_id"] for row in run.dropped if row["reason"] in _OF_CONTENT}

    def is_compared(group_id: str) -> bool:
        at = prompt_position(group_id, num_prompts or 0)
        return run.begun["prompts_position"] <= at < decided and group_id not in by_content

    trained = [row["num_generated"] for row in run.samples if is_compared(row["group_id"])]
    generated = [
        row["num_generated"]
        for sample_id, row in run.ended.items()
        if is_compared(sample_id.rpartition("-")[0])
    ]
    without_end = [
        row["sample_id"]
        for row in run.samples
        if row["sample_id"] not in run.ended
        and prompt_position(row["group_id"], num_prompts or 0) >= run.begun["prompts_position"]
    ]
    others = [
        row["sample_id"]
        for row in run.samples
        if row["sample_id"] in run.ended
        and row["num_generated"] != run.ended[row["sample_id"]]["num_generated"]
    ]
    lacks = _named("; trained without a row of their end", without_end)
    lacks += _named("; trained with other lengths than they ended with", others)
    is_known = not without_end and not others
    if not trained or not generated:
        return Check("lengths", not trained and is_known, f"nothing to compare{of}{lacks}")
    distance, p = ks_test(trained, generated)
    seen = (
        f"{np.mean(trained):.1f} tokens trained, {np.mean(generated):.1f} generated on the mean"
        f"{of}; distance {distance:.3f}, p = {p:.3g}"
    )
    return Check("lengths", p > _LEAST_P and is_known, seen + lacks)


def ks_test(first: Sequence[float], second: Sequence[float]) -> tuple[float, float]:
    """Two-sample Kolmogorov-Smirnov test: largest distance of the two distributions, and its p.

    The p-value is the asymptotic one, with the correction of Stephens (1970, "Use of the
    Kolmogorov-Smirnov, Cramér-von Mises and related statistics without extensive tables", J. R.
    Stat. Soc. B 32): λ = (√n + 0.12 + 0.11 / √n) D with n = n₁ n₂ / (n₁ + n₂).

    Args:
        first: Numbers; not empty.
        second: Numbers; not empty.
    """
    one, other = np.sort(np.asarray(first, float)), np.sort(np.asarray(second, float))
    at = np.concatenate([one, other])
    distance = float(np.abs(_share_up_to(one, at) - _share_up_to(other, at)).max())
    root = np.sqrt(len(one) * len(other) / (len(one) + len(other)))
    scaled = (root + 0.12 + 0.11 / root) * distance
    if scaled < 0.2:  # the series does not converge there, and p is 1 to ten digits
        return distance, 1.0
    j = np.arange(1, 101)
    p = 2 * float(np.sum((-1.0) ** (j - 1) * np.exp(-2 * (j * scaled) ** 2)))
    return distance, min(1.0, max(0.0, p))


def _share_up_to(
    values: npt.NDArray[np.float64], at: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Share of sorted values that are at most each number."""
    return np.searchsorted(values, at, side="right") / len(values)


def _named(what: str, names: Sequence[Any]) -> str:
    """Some of what is wrong; nothing if nothing is."""
    if not names:
        return ""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{what} {', '.join(map(str, names[:_SHOWN]))}{more}"
