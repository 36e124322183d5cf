"""``python -m ray_apr simulate`` and ``tune``: arguments in, a table or one JSON object out."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ray_apr.config import PartialRolloutConfig
from ray_apr.config.yaml import check_types, set_override
from ray_apr.core.exceptions import ConfigError
from ray_apr.tools.report.load import RunData, load_run
from ray_apr.tools.simulator.advice import tuning_text, tuning_to_dict
from ray_apr.tools.simulator.cluster import ClusterConfig
from ray_apr.tools.simulator.measured import RUN_NOTE, trace_of
from ray_apr.tools.simulator.of_run import cluster_of, steps_to_simulate
from ray_apr.tools.simulator.study import study
from ray_apr.tools.simulator.trace import COLUMNS, Trace
from ray_apr.tools.simulator.tuner import Tuner

_SECTION = "partial_rollout"


def simulate(args: argparse.Namespace) -> str:
    """Simulate one mode and return what is to be printed.

    Raises:
        ConfigError: If an argument or a file is wrong.
    """
    trace, cluster, notes = read_given(args)
    if args.placement is not None:
        cluster = dataclasses.replace(cluster, placement=args.placement)
    config = read_config(args.mode, args.overrides)
    result = study(trace, cluster, config, seed=args.seed).to_dict()
    if args.json:
        return json.dumps({**result, "notes": notes})
    return "\n".join([*notes, _table(result)])


def tune(args: argparse.Namespace) -> str:
    """Find the best settings and return what is to be printed.

    Raises:
        ConfigError: If an argument or a file is wrong.
    """
    trace, cluster, notes = read_given(args)
    bound = args.max_staleness
    if bound is None:
        bound = PartialRolloutConfig.preset(args.mode).max_staleness
    tuning = Tuner(trace, cluster, max_staleness=bound, seed=args.seed).run(args.mode)
    if args.json:
        return json.dumps(tuning_to_dict(tuning, notes))
    return tuning_text(tuning, notes)


def read_given(args: argparse.Namespace) -> tuple[Trace, ClusterConfig, tuple[str, ...]]:
    """Trace and cluster, and what is to be said of where they are from.

    Raises:
        ConfigError: If no trace is given, or two are, or a file is wrong.
    """
    cluster = read_cluster(args.cluster)
    if args.run is None:
        return read_trace(args), cluster, () if args.cluster is not None else (assumed(cluster),)
    if args.trace is not None or args.trace_file is not None:
        raise ConfigError("--run", str(args.run), "a trace is given too; give one of them")
    run = load_run(args.run)
    trace, notes = trace_of(run), (RUN_NOTE,)
    if args.cluster is not None:
        return trace, cluster, notes
    cluster, told = cluster_to_tune(run)
    return trace, cluster, (told, *notes)


def cluster_to_tune(run: RunData) -> tuple[ClusterConfig, str]:
    """The machine of a run, with any split of its GPUs, or the default one; and which it is."""
    try:
        cluster = cluster_of(run)
    except ConfigError as error:
        cluster = ClusterConfig()
        return cluster, f"{assumed(cluster)}; of the run it cannot be told: {error.remedy}"
    of_step = run.config["partial_rollout"].get("batches_per_step", 1)
    cluster = cluster.with_batches_per_step(of_step)
    told = f"cluster: that of the run, from its rows: {_machine(cluster)}; any split is "
    told += "tried; another cluster: --cluster FILE"
    steps = steps_to_simulate(cluster)
    return dataclasses.replace(cluster, rollout_gpus=None, steps=steps), told


def assumed(cluster: ClusterConfig) -> str:
    """A cluster that nobody gave, in a line."""
    return f"cluster: assumed, as --cluster FILE is not given: {_machine(cluster)}"


def _machine(cluster: ClusterConfig) -> str:
    split = "" if cluster.rollout_gpus is None else f", {cluster.rollout_gpus} of them for engines"
    trainer, batch = cluster.trainer, cluster.batch
    return (
        f"{cluster.gpus} GPUs{split} (one stands for an engine or a train worker, whatever these "
        f"run on); steps of {batch.prompts} prompts x {batch.group_size} samples; one GPU trains "
        f"{trainer.tokens_per_s_per_gpu:,.0f} tokens/s beside {trainer.step_overhead_s:.2g} s a "
        "step"
    )


def read_trace(args: argparse.Namespace) -> Trace:
    """The trace that is given as ``--trace FILE`` or by position."""
    if args.trace is not None and args.trace_file is not None:
        raise ConfigError("--trace", str(args.trace), f"{args.trace_file} is given too; give one")
    path = args.trace or args.trace_file
    if path is None:
        remedy = (
            "is missing; give a file, Parquet or JSON lines, with a row for each sample "
            f"({', '.join(COLUMNS)}), or by --run the folder of a run that has trained"
        )
        raise ConfigError("--trace", None, remedy)
    return Trace.from_file(path)


def read_cluster(path: Path | None) -> ClusterConfig:
    """The cluster of a file; without one the default, 16 GPUs."""
    return ClusterConfig() if path is None else ClusterConfig.from_file(path)


def read_config(mode: str, overrides: Sequence[str]) -> PartialRolloutConfig:
    """A mode with single settings replaced, each as ``key=value`` with a YAML value.

    Raises:
        ConfigError: For an unknown key, or a value that makes no sense.
    """
    values: dict[str, Any] = {}
    for text in overrides:
        set_override(values, text.removeprefix(f"{_SECTION}."))
    if "mode" in values:
        raise ConfigError("--set", f"mode={values['mode']}", "give it as --mode")
    known = {field.name for field in dataclasses.fields(PartialRolloutConfig)}
    check_types(PartialRolloutConfig, _SECTION, {k: v for k, v in values.items() if k in known})
    return PartialRolloutConfig.preset(mode, **values)


def _table(result: Mapping[str, Any]) -> str:
    """The figures in lines, and the deciles in columns."""
    deciles = {
        name: values for name, values in result.items() if name.endswith("_by_length_decile")
    }
    rows = [(name, value) for name, value in result.items() if name not in deciles]
    width = max(len(name) for name in result)
    lines = [f"{name:<{width}}  {_text(value)}" for name, value in rows]
    lines.append(f"{'':<{width}}  shortest {'':<{10 * 6 - 17}} longest")
    for name, values in deciles.items():
        shares = "".join("     -" if v is None else f"{v:6.2f}" for v in values)
        lines.append(f"{name:<{width}}{shares}")
    return "\n".join(lines)


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{k} {_text(v)}" for k, v in value.items() if v) or "none"
    if isinstance(value, float):
        return f"{value:,.3f}" if abs(value) < 100 else f"{value:,.1f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
