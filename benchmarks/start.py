"""Seconds from the command of a run to its first tokens, its first step and its end.

    python benchmarks/start.py --runs 3 --out benchmarks/results/start-2cpu.json
    python benchmarks/start.py --beside OTHER_CHECKOUT --set rollout.engine.device=cuda ...
    python benchmarks/start.py --in-python --out benchmarks/results/start-python-2cpu.json

The arithmetic example trains for two steps, again and again; with `--beside` in turns with the code
of another checkout, and with `--in-python` as a script, in turns with `ray_apr.init` and with
`ray.init`. The first run of each finds no compiled code where `VLLM_CACHE_ROOT` is new.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from ray_apr.run.folder import read_rows
from tests.killed_parts import KilledRun
from tests.processes import kill_all, marked_environment

ROOT = Path(__file__).parents[1]
LIMIT_S = 600.0
"""Of the start, and of the rest."""
CALLS = {
    "ray_apr.init": "ray_apr.init(",
    "ray.init": 'ray.init(namespace="ray_apr", log_to_driver=False, ',
}


def measure(checkout: Path, *settings: str) -> dict[str, float]:
    """One run of a checkout's code; see `figures`."""
    mark, env = environment_of(checkout)
    with tempfile.TemporaryDirectory(prefix="start-", ignore_cleanup_errors=True) as name:
        run = KilledRun(Path(name), mark, env, ("train.steps=2", *settings))
        began = time.monotonic()
        try:
            run.start()
            run.wait_for_step(1, LIMIT_S)
            first_step = time.monotonic() - began
            assert run.end(LIMIT_S) == 0, run.tail
            return figures(run.folder / "run", first_step, time.monotonic() - began)
        finally:
            kill_all(mark)


def measure_script(init: str, on_gpu: bool) -> dict[str, float]:
    """One run of `examples/single_file.py` with another call in place of `ray_apr.init`; on a GPU
    engine and train worker share it."""
    mark, env = environment_of(ROOT)
    example = ROOT / "examples" / "single_file.py"
    with tempfile.TemporaryDirectory(prefix="start-", ignore_cleanup_errors=True) as name:
        script = Path(name, "script.py")
        code = example.read_text().replace("ray_apr.init(", init).replace("tensorboard={}", "")
        if on_gpu:
            code = code.replace(
                "engine=engine", 'engine={"placement": "colocated", "sleep": False}'
            )
        script.write_text(code)
        command = [sys.executable, str(script), "--steps=2", "--name=run", f"--storage={name}"]
        command += ["--model", str(example.parent / "arithmetic" / "base_model")]
        command += ["--gpu"] if on_gpu else []
        began = time.monotonic()
        try:
            with subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL) as process:
                while not read_rows(Path(name, "run", "metrics.jsonl")):
                    assert process.poll() is None, "the script ended before its first step"
                    assert time.monotonic() - began < LIMIT_S, "no step has ended"
                    time.sleep(0.05)
                first_step = time.monotonic() - began
                assert process.wait(LIMIT_S) == 0
            return figures(Path(name, "run"), first_step, time.monotonic() - began)
        finally:
            kill_all(mark)


def environment_of(checkout: Path) -> tuple[str, dict[str, str]]:
    """Mark of a run's processes, and their variables, by which they find a checkout's code."""
    mark, env = marked_environment()
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(checkout), env.get("PYTHONPATH"))))
    return mark, env


def figures(folder: Path, first_step: float, end: float) -> dict[str, float]:
    """Of one run, from its folder.

    Args:
        folder: Of the run.
        first_step: Seconds from the command to the end of the first step.
        end: And to that of the command.

    Returns:
        Seconds since the command: until Ray runs and the run begins, the engines are ready, the
        first request is under way, the first step has ended, the last one has, and the command has.
    """
    spans = read_rows(folder / "timeline.jsonl")
    steps = read_rows(folder / "metrics.jsonl")
    begin = first_step - steps[0]["time_s"]
    return {
        "begin_s": begin,
        "engines_ready_s": begin + max(s["end_s"] for s in spans if s["what"] == "start"),
        "first_tokens_s": begin + min(s["start_s"] for s in spans if s["what"] == "generate"),
        "first_step_s": first_step,
        "last_step_s": begin + steps[-1]["time_s"],
        "end_s": end,
    }


def main() -> int:
    """Do the runs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=3, help="of each checkout")
    parser.add_argument("--beside", type=Path, help="another checkout")
    parser.add_argument("--in-python", action="store_true", help="as a script")
    parser.add_argument("--gpu", action="store_true", help="that the script uses")
    parser.add_argument("--set", action="append", default=[], dest="settings")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/start-2cpu.json"))
    options = parser.parse_args()
    if options.in_python and (options.beside or options.settings):
        parser.error("--beside and --set are not for --in-python")
    if options.gpu and not options.in_python:
        parser.error("--gpu is for --in-python; say it with --set otherwise")
    starts: dict[str, Callable[[], dict[str, float]]]
    if options.in_python:
        starts = {
            name: functools.partial(measure_script, call, options.gpu)
            for name, call in CALLS.items()
        }
    else:
        starts = {"this": functools.partial(measure, ROOT, *options.settings)}
        if options.beside:
            beside = options.beside.resolve()
            starts["beside"] = functools.partial(measure, beside, *options.settings)
    report: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "settings": options.settings}
    report["runs"] = {name: [] for name in starts}
    for _ in range(options.runs):
        for name, start in starts.items():
            found = start()
            report["runs"][name].append({key: round(value, 2) for key, value in found.items()})
            print(name, report["runs"][name][-1], flush=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
