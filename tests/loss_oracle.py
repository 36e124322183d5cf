"""Expected values of losses and advantages, computed by an independent implementation.

`data/policy_losses.json` holds random batches and what verl 0.9.1 (core_algos and
rollout_corr_helper, float64, CPU) makes of them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

CASES: list[dict[str, Any]] = json.loads(
    (Path(__file__).parent / "data" / "policy_losses.json").read_text(encoding="utf-8")
)["cases"]


def tensor(values: Any) -> torch.Tensor:
    """A float64 tensor."""
    return torch.tensor(values, dtype=torch.float64)
