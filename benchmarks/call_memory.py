"""Memory of an actor by kind of call: what Ray keeps of each, in the process that makes it.

    python benchmarks/call_memory.py --out benchmarks/results/call-memory-2cpu.json

An actor makes calls as the rollout worker does, in windows of some thousand, one kind after the
other. What the C library has handed out (`mallinfo2`) and Python's blocks are what is kept; what
the C library holds free, and with it the memory of the process, grows for a while by itself.
Figures are bytes a call of the second half of the windows, as the first ones fill caches.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import ctypes
import json
import os
import statistics
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import psutil
import ray
from host import describe_call, package_versions, ray_environment
from ray import serve

KINDS = {
    "reward": ("a call of another actor, with 600 bytes", 2000),
    "put": ("2,400 bytes in the object store, dropped at once", 2000),
    "lent": ("the same, given to an actor that drops it before it answers", 1000),
    "kept": ("the same, which the actor keeps for 100 calls, as the buffer does groups", 1000),
    "kept_large": ("the same with 200,000 bytes", 500),
    "argument": ("2,400 bytes in the call itself, which the actor keeps for 100 calls", 1000),
    "argument_large": ("the same with 200,000 bytes", 500),
    "status": ("a call of an engine by `EngineHandle.call`", 2000),
    "stream": ("a stream of two items, by `EngineHandle.stream`", 1000),
    "long": ("the same of 500 items", 20),
    "metrics": ("four metrics, as of a sample", 10000),
    "idle": ("nothing for a second", 60),
}
"""What a kind is, and how many calls are in a window."""
_WINDOWS = 6
_AT_ONCE = 16
_SETTLE_S = 1.0
_LIMIT_S = 120.0


def memory() -> dict[str, int]:
    """Of this process: bytes, but for `blocks`."""
    names = ["arena", "ordblks", "smblks", "hblks", "hblkhd"]
    names += ["usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"]
    fields = [(name, ctypes.c_size_t) for name in names]
    info: Any = type("Mallinfo2", (ctypes.Structure,), {"_fields_": fields})
    libc = ctypes.CDLL("libc.so.6")
    libc.mallinfo2.restype = info
    found = libc.mallinfo2()
    return {
        "uss": psutil.Process().memory_full_info().uss,
        "in_use": found.uordblks + found.hblkhd,
        "free": found.fordblks,
        "blocks": sys.getallocatedblocks(),
    }


class Other:
    """The actor that is called."""

    def __init__(self) -> None:
        self._kept: collections.deque[list[Any]] = collections.deque()

    async def call(self, value: bytes) -> float:
        """As a reward."""
        return float(len(value))

    async def keep(self, refs: list[Any], number: int) -> None:
        """Keep what is lent for so many calls, and read it."""
        self._kept.append(refs)
        while len(self._kept) > number:
            (ref,) = self._kept.popleft()
            if not isinstance(ref, bytes):
                await ref

    async def memory(self) -> dict[str, int]:
        """Of this process."""
        return memory()


class Engine:
    """The deployment that is called."""

    async def status(self) -> float:
        """As a status."""
        return 1.0

    async def items(self, number: int) -> AsyncIterator[list[Any]]:
        """As a stream of outcomes."""
        for _ in range(number):
            yield ["", [1] * 30]


class Caller:
    """The actor that calls, and is measured."""

    def __init__(self, other: Any) -> None:
        from ray_apr.core.metrics import Metrics
        from ray_apr.rollout.line import Line
        from ray_apr.serve.handle import EngineHandle

        self._other, self._line = other, Line(other)
        self._engine, self._metrics = EngineHandle("app", "engine-0"), Metrics("run")
        self._value = os.urandom(600)

    async def run(self, kind: str, number: int) -> dict[str, int]:
        """Make so many calls of a kind; returns the memory after them."""
        left, began = iter(range(number)), time.perf_counter()

        async def some() -> None:
            for _ in left:
                await self._call(kind)

        await asyncio.gather(*(some() for _ in range(_AT_ONCE)))
        took_us = round((time.perf_counter() - began) / number * 1e6)
        await asyncio.sleep(_SETTLE_S)
        return memory() | {"us_a_call": took_us}

    async def _call(self, kind: str) -> None:
        group = self._value * 4
        if kind == "reward":
            async with asyncio.timeout(_LIMIT_S):
                await self._other.call.remote(self._value)
        elif kind == "put":
            ray.put(group)
        elif kind.startswith(("lent", "kept", "argument")):
            value = group * 83 if kind.endswith("large") else group
            if not kind.startswith("argument"):
                value = ray.put(value)
            await self._line.keep.remote([value], 0 if kind == "lent" else 100)
        elif kind == "status":
            await self._engine.call("status", timeout_s=_LIMIT_S)
        elif kind in ("stream", "long"):
            async for _ in self._engine.stream("items", 500 if kind == "long" else 2):
                pass
        elif kind == "idle":
            await asyncio.sleep(_AT_ONCE)
        else:
            self._metrics.add("apr_rollout_generated_tokens", 22.0)
            self._metrics.observe("apr_rollout_response_tokens", 22)
            self._metrics.observe("apr_reward_duration_seconds", 0.01)
            self._metrics.set("apr_rollout_inflight_samples", 5)


def of_kind(kind: str) -> dict[str, Any]:
    """Measure a kind of call between two actors of its own."""
    what, number = KINDS[kind]
    other: Any = ray.remote(num_cpus=0, max_concurrency=1000)(Other).remote()
    caller: Any = ray.remote(num_cpus=0, max_concurrency=1000)(Caller).remote(other)
    rows, of_other = [], []
    for _ in range(_WINDOWS):
        rows.append(ray.get(caller.run.remote(kind, number), timeout=_LIMIT_S))
        of_other.append(ray.get(other.memory.remote(), timeout=_LIMIT_S))
    ray.kill(caller)
    ray.kill(other)
    half = _WINDOWS // 2 - 1
    calls = number * (_WINDOWS - 1 - half)

    def grown(of: list[dict[str, int]]) -> dict[str, float]:
        return {name: round((of[-1][name] - of[half][name]) / calls, 1) for name in of_other[0]}

    return {
        "what": what,
        "calls_a_window": number,
        "us_a_call": statistics.median(row.pop("us_a_call") for row in rows),
        "a_call": grown(rows),
        "a_call_in_the_other": grown(of_other),
        "windows": rows,
    }


def main() -> int:
    """Measure some kinds of calls."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("kinds", nargs="*", choices=[[], *KINDS], metavar="KIND")
    parser.add_argument(
        "--out", type=Path, default=Path("benchmarks/results/call-memory-2cpu.json")
    )
    options = parser.parse_args()
    report: dict[str, Any] = describe_call() | {"packages": package_versions()}
    ray.init(
        num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env=ray_environment()
    )
    try:
        serve.start(proxy_location="Disabled")
        engine = serve.deployment(Engine).options(
            name="engine-0", max_ongoing_requests=1000, ray_actor_options={"num_cpus": 0}
        )
        serve.run(engine.bind(), name="app", route_prefix=None)
        for kind in options.kinds or KINDS:
            report[kind] = of_kind(kind)
            print(kind, json.dumps(report[kind] | {"windows": None}), flush=True)
            options.out.write_text(json.dumps(report, indent=1) + "\n")
    finally:
        ray.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
