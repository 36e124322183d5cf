"""Every family through trainer, weight syncs, engine and export: the table of supported models.

    python benchmarks/architectures.py [--families Qwen3 Mixtral] [--check]
    python benchmarks/architectures.py --device cuda --jobs 12

A tiny random model of each family (tests/families.py) is trained nowhere and moved at random: an
engine loads its checkpoint, takes two syncs of weights that have all changed, and a second engine
loads what is exported. Each time the log-probs that the engine hands out are compared with those
of the trainer, padded and packed, in float32. On GPUs (two of them: trainer and engine) engines
have compiled code and CUDA graphs, and those with multi-head latent attention compute in bfloat16,
as vLLM has no kernel in float32. Results go to benchmarks/results/architectures.json, or
architectures-gpu.json, and from there into docs/architectures.md; ends with 1 if a gap is above
the bound.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from host import ROOT, describe_call, gpu_names, package_versions

sys.path.insert(0, str(ROOT))

from ray_apr.core.architectures import REFUSED, SUPPORTED
from tests.families import FAMILIES, architecture_of, has_latent_attention

BOUND = {"float32": 1e-4, "bfloat16": 0.5}
"""Largest gap of two log-probs, in nats, by the engine's data type."""
MOVED = 0.1
"""A sync has to move log-probs by more than that, or a missed one would not be seen."""
LIMIT_S = 300
RESULTS = {
    "cpu": ROOT / "benchmarks" / "results" / "architectures.json",
    "cuda": ROOT / "benchmarks" / "results" / "architectures-gpu.json",
}
"""By the device of trainer and engine."""
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
    parser.add_argument("--device", choices=list(RESULTS), default="cpu")
    parser.add_argument("--jobs", type=int, default=1, help="families at a time")
    parser.add_argument("--check", action="store_true", help="try nothing, renew the docs alone")
    args = parser.parse_args()
    if not args.check:
        try_families(args.families or list(FAMILIES), args.device, args.jobs)
    results = known_results()
    text = DOCS.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    DOCS.write_text(before + tables(results) + rest.partition(END)[2], encoding="utf-8")
    failed = [
        f"{name} on {device}"
        for device, result in results.items()
        for name, found in result["families"].items()
        if not passed(found)
    ]
    if failed:
        sys.exit(f"these families failed: {', '.join(failed)}")


def known_results() -> dict[str, dict[str, Any]]:
    """What was found so far, by device."""
    return {
        device: json.loads(path.read_text(encoding="utf-8"))
        for device, path in RESULTS.items()
        if path.is_file()
    }


def try_families(names: list[str], device: str, jobs: int) -> None:
    """Try some families, each in a process of its own, and keep what is known of the others."""
    path = RESULTS[device]
    known = json.loads(path.read_text(encoding="utf-8"))["families"] if path.is_file() else {}
    call = describe_call()
    if device == "cuda":
        call["machine"]["gpus"] = gpu_names()
    with ThreadPoolExecutor(jobs) as pool:
        tried = pool.map(lambda name: try_family(name, device), names)
        for name, found in zip(names, tried, strict=True):
            known[name] = {"architecture": architecture_of(name), **found}
            print(f"{name}: {known[name]}", flush=True)
            families = {n: known[n] for n in FAMILIES if n in known}
            result = {**call, "packages": package_versions(), "families": families}
            path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def try_family(name: str, device: str) -> dict[str, Any]:
    """The gaps of a family, why it is refused, or how it failed."""
    if architecture_of(name) in REFUSED:
        return {"refused": REFUSED[architecture_of(name)]}
    dtype = "bfloat16" if device == "cuda" and has_latent_attention(name) else "float32"
    command = [sys.executable, "-m", "tests.vllm.families_run", name]
    command += ["--device", device, "--dtype", dtype]
    begin = time.monotonic()
    try:
        run = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"no result within {LIMIT_S} s"}
    if run.returncode:
        print(run.stderr[-4000:], flush=True)
        errors = [line for line in run.stderr.splitlines() if "Error" in line]
        return {"failed": (errors or ["no error was written"])[-1]}
    gaps: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return {**gaps, "dtype": dtype, "seconds": round(time.monotonic() - begin)}


def passed(found: Mapping[str, Any]) -> bool:
    """Whether a family is refused, or the engine computes what the trainer does."""
    if "refused" in found:
        return True
    gaps = [found[key] for key in COLUMNS if key in found and key != "moved"]
    bound = BOUND[found.get("dtype", "float32")]
    return len(gaps) == len(COLUMNS) - 1 and max(gaps) <= bound and found["moved"] > MOVED


def tables(results: Mapping[str, Mapping[str, Any]]) -> str:
    """What the docs show: gaps of what is supported, reasons for what is refused."""
    names = ", ".join(f"{models} (`{name}`)" for name, models in SUPPORTED.items())
    lines = [BEGIN, f"Supported: {names}.", ""]
    for result in results.values():
        gpus = result["machine"].get("gpus", [])
        where = f"On {len(gpus)} {gpus[0]}" if gpus else "On CPU"
        packages = ", ".join(f"{name} {version}" for name, version in result["packages"].items())
        lines += [f"{where}, with {packages}:", "", *_table(result["families"]), ""]
    lines += ["| refused | because |", "| --- | --- |"]
    lines += [f"| `{name}` | {reason} |" for name, reason in sorted(REFUSED.items())]
    return "\n".join([*lines, END])


def _table(families: Mapping[str, Mapping[str, Any]]) -> list[str]:
    rows = [
        f"| family tried | architecture | {' | '.join(COLUMNS.values())} |",
        f"| --- | --- | {' | '.join('---:' for _ in COLUMNS)} |",
    ]
    for name, found in families.items():
        if "refused" in found:
            continue
        cells = [f"{found[key]:.1e}" if key in found else "failed" for key in COLUMNS]
        family = f"{name}, in bfloat16" if found.get("dtype") == "bfloat16" else name
        rows.append(f"| {family} | `{found['architecture']}` | {' | '.join(cells)} |")
    return rows


if __name__ == "__main__":
    main()
