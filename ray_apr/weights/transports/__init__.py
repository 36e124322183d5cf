"""Ways for weights to travel, by name, and the choice of one.

``nccl`` broadcasts between GPUs, ``gloo`` between hosts' memories, and with ``shared`` engines read
the memory of the train worker on their own device. A user's own is a `base.WeightSender`; see
docs/transports.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ray_apr.core.exceptions import ConfigError
from ray_apr.weights.gathered import GatheredWeights
from ray_apr.weights.transports.base import WeightSender
from ray_apr.weights.transports.gloo import GlooSender
from ray_apr.weights.transports.nccl import NCCLSender
from ray_apr.weights.transports.shared import SharedSender

TRANSPORTS: Mapping[str, type[WeightSender]] = {
    "nccl": NCCLSender,
    "gloo": GlooSender,
    "shared": SharedSender,
}
_FIELD = "train.weight_transport"


def make_sender(
    transport: str | Callable[..., Any],
    weights: GatheredWeights,
    *,
    shares_device: bool,
    takes_turns: bool = False,
) -> WeightSender:
    """Make the sender of a train worker.

    Args:
        transport: "auto", a name in `TRANSPORTS`, or what makes a sender of the weights.
        weights: Those of this rank's model.
        shares_device: Whether engines are on the train workers' devices, too.
        takes_turns: Whether these sleep meanwhile, and want memory there when they wake up.

    Raises:
        ConfigError: If the transport does not fit, or is none.
    """
    device = weights.device.type
    fitting = "shared" if shares_device else "nccl" if device == "cuda" else "gloo"
    sender: WeightSender
    if callable(transport):
        sender = _checked(transport(weights))
    elif transport not in ("auto", fitting):
        where = f"of {device} that engines share" if shares_device else f"of {device} of their own"
        raise ConfigError(
            _FIELD, transport, f'must be "auto" or "{fitting}" for train workers with a device '
            f"{where}, or a transport of your own",
        )  # fmt: skip
    else:
        sender = TRANSPORTS[fitting](weights)
    sender.holds_device |= takes_turns
    return sender


def _checked(sender: Any) -> WeightSender:
    verbs = [name for name in vars(WeightSender) if name[0] != "_"]
    missing = [name for name in verbs if not hasattr(sender, name)]
    if missing:
        raise ConfigError(
            _FIELD,
            type(sender).__name__,
            f"lacks {', '.join(missing)} of ray_apr.weights.transports.base.WeightSender; derive "
            "it from that",
        )
    return sender  # type: ignore[no-any-return]
