"""A slow, lossy line between this machine's network and a network namespace of its own.

The line is a TUN device on each side, and a thread that hands each packet over late, or not at all:
what `tc netem` does, which many kernels lack.
"""

from __future__ import annotations

import fcntl
import heapq
import os
import random
import select
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

HERE, THERE = "10.213.7.1", "10.213.7.2"
"""Addresses of the two ends."""
DEVICE = "apr-line"
"""Name of the device, the same on both sides, so that one variable tells Gloo of it."""
_BITS = 24
_MTU = 1500
_TUNSETIFF, _TUN_WITHOUT_HEADER = 0x400454CA, 0x0001 | 0x1000
_QUEUE_S = 0.5
"""What waits longer than this for its turn is lost, as in a router."""
_POLL_S = 0.2


class NoLineError(Exception):
    """This machine cannot have such a line; the reason."""


@dataclass(slots=True)
class Line:
    """A line that is up.

    Args:
        namespace: Of the far end, as `ip netns` knows it.
        delay_s: Of a packet, in each direction.
        loss: Share of packets that are lost, in each direction.
        bytes_per_s: In each direction; infinite: no limit.
    """

    namespace: str
    delay_s: float = 0.0
    loss: float = 0.0
    bytes_per_s: float = float("inf")
    num_packets: int = 0
    num_bytes: int = 0
    num_lost: int = 0
    _waiting: list[tuple[float, int, int, bytes]] = field(default_factory=list)
    _free_at: dict[int, float] = field(default_factory=dict)

    def carry(self, ends: tuple[int, int], is_over: threading.Event) -> None:
        """Hand packets over until the line is taken down."""
        other = {ends[0]: ends[1], ends[1]: ends[0]}
        draw = random.Random(0)
        while not is_over.is_set():
            wait_s = min(_POLL_S, self._waiting[0][0] - time.monotonic() if self._waiting else 1.0)
            readable, _, _ = select.select(ends, (), (), max(0.0, wait_s))
            now = time.monotonic()
            for end in readable:
                self._take(os.read(end, _MTU + 100), other[end], now, draw.random())
            while self._waiting and self._waiting[0][0] <= now:
                _, _, end, packet = heapq.heappop(self._waiting)
                os.write(end, packet)

    def _take(self, packet: bytes, to: int, now: float, chance: float) -> None:
        free_at = max(now, self._free_at.get(to, now)) + len(packet) / self.bytes_per_s
        self.num_packets += 1
        self.num_bytes += len(packet)
        if chance < self.loss or free_at - now > _QUEUE_S:
            self.num_lost += 1
            return
        self._free_at[to] = free_at
        heapq.heappush(self._waiting, (free_at + self.delay_s, self.num_packets, to, packet))


@contextmanager
def line_to_namespace(
    delay_s: float = 0.0, loss: float = 0.0, bytes_per_s: float = float("inf")
) -> Iterator[Line]:
    """Make a network namespace, and a line to it; both go at the end.

    Raises:
        NoLineError: If that cannot be done here.
    """
    line = Line(f"apr-{os.getpid()}", delay_s=delay_s, loss=loss, bytes_per_s=bytes_per_s)
    if os.geteuid() != 0:
        raise NoLineError("only root makes network namespaces")
    _ip("netns", "add", line.namespace)
    is_over = threading.Event()
    ends: list[int] = []
    try:
        ends.append(_tun())
        _ip("link", "set", DEVICE, "netns", line.namespace)
        ends.append(_tun())
        _up(THERE, "-n", line.namespace)
        _ip("-n", line.namespace, "link", "set", "lo", "up")
        _up(HERE)
        there, here = ends
        carrier = threading.Thread(target=line.carry, args=((here, there), is_over), daemon=True)
        carrier.start()
        try:
            yield line
        finally:
            is_over.set()
            carrier.join()
    finally:
        for end in ends:
            os.close(end)
        subprocess.run(["ip", "netns", "del", line.namespace], check=True)


def _tun() -> int:
    try:
        end = os.open("/dev/net/tun", os.O_RDWR)
        flags = struct.pack("16sH", DEVICE.encode(), _TUN_WITHOUT_HEADER)
        fcntl.ioctl(end, _TUNSETIFF, flags)
    except OSError as error:
        raise NoLineError(f"no TUN device can be had: {error}") from error
    return end


def _up(address: str, *where: str) -> None:
    _ip(*where, "address", "add", f"{address}/{_BITS}", "dev", DEVICE)
    _ip(*where, "link", "set", DEVICE, "mtu", str(_MTU), "up")


def _ip(*words: str) -> None:
    try:
        done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise NoLineError("there is no `ip` (iproute2)") from error
    if done.returncode:
        raise NoLineError(f"ip {' '.join(words)}: {done.stderr.strip()}")
