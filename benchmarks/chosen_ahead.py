"""What it costs the freshness of a batch that it is chosen before its step begins.

    python benchmarks/chosen_ahead.py --cluster results/modes-awake-2xh200.json --scale 0.25 \
        --out results/chosen-ahead.json traces/gsm8k-16k.jsonl.gz traces/dapo-17k.jsonl.gz

The batch of the next step is chosen while a step trains, up to `LEAD_S` before its end, so that the
trainer need not wait for it. Groups that come in between might have been in it, as the oldest token
leaves first. Simulated with the scheduler and the buffer's stock of a real run, with mode `apr`, on
a machine that was calibrated, and on one whose trainer is slower, so that it waits for nothing:
as runs choose, later, and with each batch chosen as its step begins.

"replaced" is the share of samples of the batches chosen ahead that a choice at the begin of their
steps would have replaced by older ones.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from pathlib import Path
from typing import Any
from unittest import mock

import modes
from host import describe_call

from ray_apr.config import PartialRolloutConfig
from ray_apr.scheduling import stock
from ray_apr.tools.simulator import run
from ray_apr.tools.simulator.cluster import ClusterConfig
from ray_apr.tools.simulator.trace import Trace

LEADS_S = {"ahead": stock.LEAD_S, "0.5 s ahead": 0.5, "at the step": -math.inf}


class CountingStock(stock.Stock):
    """Counts what a later choice would have replaced."""

    num_chosen = num_ahead = num_replaced = 0
    """Samples of all batches, of those chosen ahead, and of these the ones to be replaced."""

    def grant(self, step: int, policy_version: int, now: float) -> None:
        """As of `Stock`; counts where the batch is there already."""
        super().grant(step, policy_version, now)
        granted = self.granted
        assert granted is not None
        CountingStock.num_chosen += self._batch_size
        if not granted.groups:
            return
        here = sorted(
            (group for group, _ in self.held()), key=lambda g: (g.oldest_version, g.sequence)
        )
        ahead = {group.group_id for group in granted.groups}
        later = {group.group_id for group in here[: len(ahead)]}
        size = granted.num_samples // len(ahead)
        CountingStock.num_ahead += granted.num_samples
        CountingStock.num_replaced += size * len(later - ahead)


def main() -> None:
    """Simulate all cases, print and write them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--cluster", required=True, type=Path, help="file of modes.py --calibrate")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on response lengths")
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--slower", type=float, default=0.4, help="rate of the slower trainer")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    measured = json.loads(args.cluster.read_text())["predicted"]["cluster"]
    cluster = dataclasses.replace(ClusterConfig.from_dict(measured), steps=args.steps)
    args.group_size, args.reward_seconds = cluster.batch.group_size, None  # for modes.scaled
    rate = cluster.trainer.tokens_per_s_per_gpu * args.slower
    slower = dataclasses.replace(cluster.trainer, tokens_per_s_per_gpu=rate)
    clusters = {"measured": cluster, "slower": dataclasses.replace(cluster, trainer=slower)}
    rows = [
        one_case(path, modes.scaled(Trace.from_file(path), args), trainer, machine, lead, seed)
        for path in args.traces
        for trainer, machine in clusters.items()
        for seed in args.seeds
        for lead in LEADS_S
    ]
    args.out.write_text(json.dumps({**describe_call(), "rows": rows}, indent=1) + "\n")


def one_case(
    path: Path, trace: Trace, trainer: str, cluster: ClusterConfig, lead: str, seed: int
) -> dict[str, Any]:
    """Simulate a run."""
    CountingStock.num_chosen = CountingStock.num_ahead = CountingStock.num_replaced = 0
    config = PartialRolloutConfig.preset("apr")
    with (
        mock.patch.object(stock, "LEAD_S", LEADS_S[lead]),
        mock.patch.object(run, "Stock", CountingStock),
    ):
        out = run.Simulation(trace, cluster, config, seed=seed).run()
    row = {
        "trace": path.name.partition(".")[0],
        "trainer": trainer,
        "chosen": lead,
        "seed": seed,
        "chosen_ahead": CountingStock.num_ahead / CountingStock.num_chosen,
        "replaced": CountingStock.num_replaced / max(1, CountingStock.num_ahead),
        "staleness_mean": out.staleness_mean,
        "staleness_max": out.staleness_max,
        "masked": out.ledger.discarded.get("masked", 0) / out.ledger.generated,
        "step_s": out.wall_s / cluster.steps,
        "trainer_idle_ratio": out.trainer_idle_ratio,
    }
    print(json.dumps(row), flush=True)
    return row


if __name__ == "__main__":
    main()
