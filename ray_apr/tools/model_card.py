"""The card of a trained model: ``README.md`` beside its weights, with what its run recorded.

It holds no path of the machine: a base model in a folder, and files with code, are told by name.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ray_apr import __version__
from ray_apr.run.evaluations import evaluated
from ray_apr.run.failed_groups import failed_groups, num_groups, share_of_tokens
from ray_apr.run.model import HUB_ID
from ray_apr.tools.report.load import RunData
from ray_apr.tools.report.summary import summarize

CARD_FILE = "README.md"
_SETTINGS = {
    "algorithm": ("advantage", "loss", "proximal", "importance", "correction", "kl_coef"),
    "rollout": ("group_size", "max_response_tokens"),
    "train": ("learning_rate", "batch_size", "mini_batches", "epochs", "lora", "seed"),
    "partial_rollout": ("max_staleness", "interrupt", "on_stale"),
}
"""Settings that a card tells, by section."""


def model_card(run: RunData) -> str:
    """Text of the card: YAML that the Hugging Face Hub reads, figures of the run, settings.

    Args:
        run: What it recorded; figures that it lacks are left out.
    """
    base = str(run.config.get("model") or "A model")
    front = ["library_name: transformers", "pipeline_tag: text-generation"]
    front += ["tags:", "- reinforcement-learning", "- ray_apr"]
    if HUB_ID.fullmatch(base):
        front.insert(0, f"base_model: {base}")
    return "\n".join(
        [
            "---", *front, "---", "",
            f"# {run.name}", "",
            f"{_named(base)}, trained by reinforcement learning with ray_apr {__version__}.", "",
            *_table("the run", _figures(run)), "",
            *_table("setting", _settings(run.config)), "",
        ]
    )  # fmt: skip


def _figures(run: RunData) -> Iterator[tuple[str, str]]:
    summary = summarize(run)
    yield "mode", str(summary["mode"])
    yield "steps", f"{summary['steps']:,}"
    yield "samples trained", f"{summary['samples_trained']:,}"
    for name, of in (
        ("mean reward, first and last steps", (summary["reward_first"], summary["reward_last"])),
        *((f"`{n}`, first and last steps", p.values()) for n, p in summary["reward_parts"].items()),
    ):
        if None not in of:
            yield name, " → ".join(f"{value:.3f}" for value in of)
    if run.evaluations and run.evaluations[-1].get("reward_mean") is not None:
        last = run.evaluations[-1]
        yield (
            f"mean reward of {last['num_samples']:,} held-out samples",
            f"{evaluated(last)} (policy version {last['policy_version']})",
        )
        for suite, of_suite in (last.get("suites") or {}).items():
            yield f"{of_suite['num_samples']:,} of them: {suite}", evaluated(of_suite)
    if summary["staleness_max"] is not None:
        yield "age of trained tokens, in steps", f"at most {summary['staleness_max']}"
    if summary["tokens_trained"] is not None:
        yield "tokens trained", f"{summary['tokens_trained']:,}"
    failed = failed_groups(run.dropped)
    if failed:  # their errors may hold paths
        share = share_of_tokens(failed, summary["tokens_generated"])
        yield "dropped as a generation, step or reward failed", f"{num_groups(failed)}{share}"
    if summary["wall_s"] is not None:
        yield "time", f"{summary['wall_s'] / 60:.1f} minutes"


def _settings(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for section, names in _SETTINGS.items():
        given = config.get(section) or {}
        replaced = "correction" if given.get("correction") is None else "importance"
        for name in names:
            if name in given and name != replaced:
                value = given[name]
                shown = _named(value) if isinstance(value, str) else json.dumps(value)
                yield f"`{section}.{name}`", shown


def _named(path: str) -> str:
    """A hub id or the name of a function as it is; of a file or folder the last part."""
    return path if HUB_ID.fullmatch(path) else Path(path).name


def _table(head: str, rows: Iterator[tuple[str, str]]) -> list[str]:
    lines = (" | ".join(map(_in_a_cell, row)) for row in rows)
    return [f"| {head} | |", "| --- | --- |", *(f"| {line} |" for line in lines)]


def _in_a_cell(text: str) -> str:
    """In one line, in which no bar ends the cell."""
    return " ".join(text.split()).replace("|", r"\|")
