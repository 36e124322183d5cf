"""What vLLM calls in each of its processes (entry point ``vllm.general_plugins``)."""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)

BACKEND = "ray_apr"


def register() -> None:
    """Make ray_apr's way to receive weights known to vLLM; harmless when repeated."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    try:
        WeightTransferEngineFactory.register_engine(
            BACKEND, "ray_apr.serve.receiver", "WeightReceiver"
        )
    except ValueError:
        logger.debug("weight transfer backend %s is registered already", BACKEND)
