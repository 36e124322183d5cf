"""A long run with churn, kills and slow rewards: whether memory, handles or folders grow.

    python benchmarks/soak.py --minutes 120 --out benchmarks/results/soak.json

The arithmetic example trains in short steps on two engines, to which a third one comes and from
which it goes; one of twenty rewards takes seconds; parts are killed, in an order that the seed
draws. What takes the whole run along when it dies, the rollout worker and the buffer are killed in
the first half alone, so that their processes live through the second one; of the engines the
youngest is killed then. At the end the run is stopped and proved by `verify`, and of the second
half a slope is fitted for each kind of process, without the first six minutes of each one (of an
engine: half an hour), in which it fills caches and the C library's lists of free memory.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from ray_apr.run.folder import read_rows
from ray_apr.run.scale_requests import ask
from ray_apr.tools.verify import verify
from tests.growth import Growth, growth
from tests.killed_parts import KINDS, SMALL, KilledRun
from tests.processes import kill_all, marked_environment, wait_until_none
from tests.watched_processes import Watch

LIVES_LONG = (
    "read task", "train worker", "train controller", "driver", "rollout worker", "buffer",
)  # fmt: skip
"""Not killed in the second half: with the first four the whole run begins again."""
ENGINE = ("engine core", "replica")
ROOT = Path(__file__).parents[1]
SLOW_REWARD = ROOT / "tests/slow_reward.py"
SETTINGS = (
    *SMALL, "train.steps=1000000", "train.learning_rate=1.0e-6", "train.checkpoint_every=32",
    f"reward={SLOW_REWARD}:reward", "ray.num_cpus=8",
    "evaluation={prompts: held_out.parquet, every: 50, at_start: false, max_inflight: 4}",
)  # fmt: skip
ENGINES = (3, 2)
"""How many there are after each change, in turn."""
WARM_UP_S = 360.0
WARM_UP_OF_ENGINES_S = 1800.0
LIMIT_S = 600.0
"""Of the start and of the end."""
GROWS_BY_DESIGN = (("run", "rows"), ("run", "Ray's logs"))
"""A row for each step and sample, and a line for each event: told by the step, not judged."""
_OF_PROCESSES = ("uss", "rss", "files", "threads")


class Soak:
    """One run, and what is done to it.

    Args:
        folder: Of runs.
        options: Of the command.
    """

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self._options = options
        self.mark, self._env = marked_environment()
        self.run = KilledRun(folder, self.mark, self._env, SETTINGS)
        self.folder = folder / "run"
        self.watch = Watch(self.mark)
        self.kills: list[dict[str, Any]] = []
        self._draw = random.Random(options.seed)
        self._parts: list[str] = []
        self._num_changes = 0

    def do(self) -> None:
        """Run for as long as is asked for, then stop it.

        Raises:
            AssertionError: If it does not start, or ends too early.
        """
        length_s = 60 * self._options.minutes
        self.run.start()
        self.run.wait_for_step(2)
        begin = time.monotonic()
        next_look, next_kill, next_change = 0.0, self._options.kill_every, 60.0
        while (now := time.monotonic() - begin) < length_s:
            assert self.run.is_alive, self.run.tail
            if now >= next_look:
                self.watch.look(now, self.folder)
                next_look = now + self._options.look_every
            if now >= next_kill:
                self._kill(now, is_second_half=now > length_s / 2)
                next_kill += self._options.kill_every
            if now >= next_change:
                ask(self.folder, ENGINES[self._num_changes % len(ENGINES)])
                self._num_changes += 1
                next_change += self._options.scale_every
            time.sleep(1.0)
        self.run.interrupt()
        self.run.end(LIMIT_S)

    def _kill(self, now: float, *, is_second_half: bool) -> None:
        kinds = [k for k in KINDS if not (is_second_half and k in LIVES_LONG)]
        self._parts = [part for part in self._parts if part in kinds] or self._draw.sample(
            kinds, len(kinds)
        )
        part = self._parts.pop()
        number = -1 if is_second_half and part in ENGINE else self._draw.randint(0, 99)
        killed = self.run.kill(part, number)
        self.kills.append({"s": round(now, 1), "part": part, "killed": killed})
        print(f"{now:6.0f} s: kill of the {part}, {len(self.run.times)} steps", flush=True)


def of_second_half(rows: list[dict[str, Any]], begin_s: float, what: str) -> tuple[Any, Any]:
    """Seconds and values of a series from a moment on."""
    kept = [(row["s"], row[what]) for row in rows if row["s"] >= begin_s and what in row]
    return [s for s, _ in kept], [value for _, value in kept]


def slopes(watch: Watch, half_s: float) -> dict[str, dict[str, Growth]]:
    """Growth by kind of process, and of folders, from a moment on."""
    kinds: dict[str, list[list[dict[str, Any]]]] = {}
    for name, rows in watch.processes.items():
        kinds.setdefault(name.rpartition("/")[0], []).append(rows)
    found: dict[str, dict[str, Growth]] = {}
    for kind, processes in sorted(kinds.items()):
        warm_up_s = WARM_UP_OF_ENGINES_S if kind in ENGINE else WARM_UP_S
        for what in _OF_PROCESSES:
            series = [
                of_second_half(rows, max(half_s, rows[0]["s"] + warm_up_s), what)
                for rows in processes
            ]
            if (fit := growth(series)) is not None:
                found.setdefault(kind, {})[what] = fit
    names = sorted({name for row in watch.cluster for name in row} - {"s"})
    for name in names:
        if (fit := growth([of_second_half(watch.cluster, half_s, name)])) is not None:
            found.setdefault("run", {})[name] = fit
    return found


def what_grows(watch: Watch, half_s: float) -> dict[str, Any]:
    """The slopes, and those of them that are no noise."""
    fits = slopes(watch, half_s)
    grows = [
        f"{kind}: {what}"
        for kind, of in fits.items()
        for what, fit in of.items()
        if not fit.is_noise and (kind, what) not in GROWS_BY_DESIGN
    ]
    return {
        "grows": grows,
        "slopes": {k: {w: _rounded(f) for w, f in of.items()} for k, of in fits.items()},
    }


def judge(folder: Path) -> dict[str, Any]:
    """What became of a run."""
    checks = verify(folder)
    final = json.loads((folder / "final.json").read_text())
    return {
        "steps": final["steps"],
        "status": final["status"],
        "ledger_error": final["ledger_error"],
        "tokens_generated": final["tokens_generated"],
        "verified": {check.name: check.ok for check in checks},
        "checks": {check.name: check.seen for check in checks},
        "changes_of_engines": [
            {name: row[name] for name in ("time_s", "outcome", "before", "after", "reason")}
            for row in read_rows(folder / "engines.jsonl")
        ],
    }


def _rounded(fit: Growth) -> dict[str, float]:
    return {name: float(f"{value:.5g}") for name, value in asdict(fit).items()}


def main() -> int:
    """Do one run; 0 if nothing grew and it kept what it promises."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument("--look-every", type=float, default=10.0, help="seconds")
    parser.add_argument("--kill-every", type=float, default=180.0, help="seconds")
    parser.add_argument("--scale-every", type=float, default=300.0, help="seconds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/soak.json"))
    options = parser.parse_args()
    settings = [text.replace(f"{ROOT}/", "") for text in SETTINGS]  # of no machine
    report: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "settings": settings}
    report["options"] = {name: v for name, v in vars(options).items() if name != "out"}
    with tempfile.TemporaryDirectory(prefix="soak-", ignore_cleanup_errors=True) as name:
        soak = Soak(Path(name), options)
        try:
            soak.do()
            report |= judge(soak.folder)
        except (AssertionError, OSError, subprocess.TimeoutExpired) as error:
            report |= {"error": str(error)[-4000:], "log": soak.run.tail[-8000:]}
        finally:
            left = wait_until_none(soak.mark, 30)
            kill_all(soak.mark)
    report |= what_grows(soak.watch, 30 * options.minutes)
    report |= {"kills": soak.kills, "left_behind": list(left.values())}
    report |= {"cluster": soak.watch.cluster, "processes": soak.watch.processes}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report) + "\n")
    shown = {k: v for k, v in report.items() if k not in ("cluster", "processes")}
    print(json.dumps(shown, indent=1))
    is_ok = report.get("ledger_error") == 0 and all(report.get("verified", {"": False}).values())
    return int(not is_ok or bool(report["grows"]) or bool(left))


if __name__ == "__main__":
    sys.exit(main())
