"""Every family through trainer, weight syncs, engine and export: the table of supported models.

    python benchmarks/architectures.py [--families Qwen3 Mixtral] [--check]

A tiny random model of each family (tests/families.py) is trained nowhere and moved at random: an
engine loads its checkpoint, takes two syncs of weights that have all changed, and a second engine
loads what is exported. Each time the log-probs that the engine hands out are compared with those
of the trainer, padded and packed, in float32. Results go to benchmarks/results/architectures.json
and from there into docs/architectures.md; ends with 1 if a gap is above the bound.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

from host import ROOT, describe_call, package_versions

sys.path.insert(0, str(ROOT))

from ray_apr.architectures import REFUSED, SUPPORTED
from tests.families import FAMILIES, architecture_of

BOUND = 1e-4
"""Largest gap of two log-probs, in nats."""
MOVED = 0.1
"""A sync has to move log-probs by more than that, or a missed one would not be seen."""
LIMIT_S = 300
RESULT = ROOT / "benchmarks" / "results" / "architectures.json"
DOCS = ROOT / "docs" / "architectures.md"
BEGIN, END = "<!-- made by benchmarks/architectures.py -->", "<!-- end -->"
COLUMNS = {
    "before": "loaded",
    "sync_1": "after sync 1",
    "sync_2": "after sync 2",
    "exported": "exported",
    "moved": "moved by a sync",
}


def main() -> None:
    """Try the families, write the result, and put it into the docs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--families", nargs="+", choices=list(FAMILIES), help="default: all")
    parser.add_argument("--check", action="store_true", help="try nothing, renew the docs alone")
    args = parser.parse_args()
    if not args.check:
        try_families(args.families or list(FAMILIES))
    result = json.loads(RESULT.read_text(encoding="utf-8"))
    text = DOCS.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    DOCS.write_text(before + tables(result) + rest.partition(END)[2], encoding="utf-8")
    failed = [name for name, found in result["families"].items() if not passed(found)]
    if failed:
        sys.exit(f"these families failed: {', '.join(failed)}")


def try_families(names: list[str]) -> None:
    """Try some families, each in a process of its own, and keep what is known of the others."""
    known = json.loads(RESULT.read_text(encoding="utf-8"))["families"] if RESULT.is_file() else {}
    for name in names:
        begin = time.monotonic()
        known[name] = {"architecture": architecture_of(name), **try_family(name)}
        print(f"{name}: {known[name]} ({time.monotonic() - begin:.0f} s)", flush=True)
        families = {n: known[n] for n in FAMILIES if n in known}
        result = {**describe_call(), "packages": package_versions(), "families": families}
        RESULT.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def try_family(name: str) -> dict[str, Any]:
    """The gaps of a family, why it is refused, or how it failed."""
    if architecture_of(name) in REFUSED:
        return {"refused": REFUSED[architecture_of(name)]}
    command = [sys.executable, "-m", "tests.vllm.families_run", name]
    try:
        run = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"no result within {LIMIT_S} s"}
    if run.returncode:
        errors = [line for line in run.stderr.splitlines() if "Error" in line]
        return {"failed": (errors or ["no error was written"])[-1]}
    gaps: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return gaps


def passed(found: Mapping[str, Any]) -> bool:
    """Whether a family is refused, or the engine computes what the trainer does."""
    if "refused" in found:
        return True
    gaps = [found[key] for key in COLUMNS if key in found and key != "moved"]
    return len(gaps) == len(COLUMNS) - 1 and max(gaps) <= BOUND and found["moved"] > MOVED


def tables(result: Mapping[str, Any]) -> str:
    """What the docs show: gaps of what is supported, reasons for what is refused."""
    rows = [
        f"| family tried | architecture | {' | '.join(COLUMNS.values())} |",
        f"| --- | --- | {' | '.join('---:' for _ in COLUMNS)} |",
    ]
    for name, found in result["families"].items():
        if "refused" in found:
            continue
        cells = [f"{found[key]:.1e}" if key in found else "failed" for key in COLUMNS]
        rows.append(f"| {name} | `{found['architecture']}` | {' | '.join(cells)} |")
    packages = ", ".join(f"{name} {version}" for name, version in result["packages"].items())
    refusals = ["| refused | because |", "| --- | --- |"]
    refusals += [f"| `{name}` | {reason} |" for name, reason in sorted(REFUSED.items())]
    names = ", ".join(f"{models} (`{name}`)" for name, models in SUPPORTED.items())
    return "\n".join(
        [BEGIN, f"Supported: {names}.", "", *rows, "", f"With {packages}.", "", *refusals, END]
    )


if __name__ == "__main__":
    main()
