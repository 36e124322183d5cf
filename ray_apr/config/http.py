"""HTTP of the rollout servers."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, field

from ray_apr.core.checks import of_type, require, whole_or_none


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name, which may lead anywhere
        return host == "localhost"


@dataclass(frozen=True, kw_only=True)
class HttpConfig:
    """Where the servers' verbs are reached over HTTP, and by whom."""

    host: str = "127.0.0.1"
    """Address that the HTTP ingress listens at; any but loopback demands a control token. Refused
    without a port, as is a control token."""
    port: int | None = None
    """Port of the HTTP ingress; None opens none."""
    control_token: str | None = field(default=None, repr=False)
    """Bearer token that all of HTTP but ``/healthz`` demands; None demands none."""

    def __post_init__(self) -> None:
        s = "rollout.http"
        of_type(s, self, str, "a text", "host")
        of_type(s, self, str | None, "a text or None", "control_token")
        whole_or_none(s, self, 1, "port")
        port, token = self.port, self.control_token
        require(port is None or port < 65536, f"{s}.port", port, "must be in 1..65535 or None")
        require(
            token is None or re.fullmatch(r"[!-~]+", token) is not None,
            f"{s}.control_token",
            "…",
            "must be visible ASCII characters, at least one",
        )
        unused = (
            "has no meaning without rollout.http.port, which opens it; give that, or leave it out"
        )
        require(port is not None or self.host == HttpConfig.host, f"{s}.host", self.host, unused)
        require(port is not None or token is None, f"{s}.control_token", "…", unused)
        require(
            port is None or token is not None or _is_loopback(self.host),
            f"{s}.control_token",
            token,
            f'must be set with host = "{self.host}", which others than this machine reach; or set '
            'host to "127.0.0.1"',
        )
