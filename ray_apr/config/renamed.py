"""Settings of `RolloutConfig` that have moved into a section of it: their old names still work."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

from ray_apr.core.checks import require

RENAMED: Mapping[str, str] = {
    **{
        name: f"engine.{name}"
        for name in (
            *("device", "dtype", "tensor_parallel_size", "placement", "max_model_len"),
            *("num_cpus_per_replica", "start_timeout_s", "stall_timeout_s"),
        )
    },
    "engine_seed": "engine.seed",
    "engine_kwargs": "engine.kwargs",
    **{
        name: f"sampling.{name}"
        for name in ("temperature", "top_p", "top_k", "stop_token_ids", "stop_strings", "seed")
    },
    "min_response_tokens": "sampling.min_tokens",
    "reward_timeout_s": "reward.timeout_s",
    "reward_retries": "reward.retries",
    "reward_concurrency": "reward.concurrency",
    "num_reward_workers": "reward.num_workers",
    "num_cpus_per_reward": "reward.num_cpus_per_worker",
    "http_host": "http.host",
    "http_port": "http.port",
    "control_token": "http.control_token",
}
"""Old name -> section and name."""


def renew(given: Mapping[str, Any], warn: Callable[[str], None]) -> dict[str, Any]:
    """Return settings of a rollout with the old names among them in their sections.

    Args:
        given: Name -> value, sections as mappings or as configs.
        warn: Gets a sentence for each old name.

    Raises:
        ConfigError: If a setting is given by both of its names, or a section is none.
    """
    values = {name: value for name, value in given.items() if name not in RENAMED}
    moved = {name: (RENAMED[name], given[name]) for name in given if name in RENAMED}
    for old, (new, value) in moved.items():
        warn(f"rollout.{old} is rollout.{new} now; please rename it")
        section, _, name = new.partition(".")
        held = values.get(section) or {}
        is_mapping, is_config = isinstance(held, Mapping), is_dataclass(type(held))
        key = f"rollout.{section}"
        require(is_mapping or is_config, key, held, "must be a mapping of settings")
        is_given = name in held if is_mapping else _differs(held, name)
        shown = "..." if name == "control_token" else value
        remedy = f"is rollout.{new}, which is given, too; leave this one out"
        require(not is_given, f"rollout.{old}", shown, remedy)
        make: Any = dict if is_mapping else replace
        values[section] = make(held, **{name: value})
    return values


def _differs(config: Any, name: str) -> bool:
    """Whether a config has another value than the default."""
    known = {field.name for field in fields(config)}
    return name in known and bool(getattr(config, name) != getattr(type(config)(), name))


def renew_key(key: str, warn: Callable[[str], None]) -> str:
    """Return the new name of a dotted key, as of ``--set``; most are as they were.

    Args:
        key: E.g. ``rollout.temperature`` or ``rollout.engine_kwargs.max_num_seqs``.
        warn: Gets a sentence for an old name.
    """
    parts = key.split(".")
    if parts[0] != "rollout" or len(parts) < 2:
        return key
    new = RENAMED.get(parts[1])
    if new is None:
        return key
    warn(f"rollout.{parts[1]} is rollout.{new} now; please rename it")
    return ".".join(["rollout", new, *parts[2:]])
