"""What is used of Transformers that it does not promise to keep (see `lookup`)."""

from __future__ import annotations

from typing import Any

from ray_apr.compat.lookup import PrivateNames

TRANSFORMERS = PrivateNames(
    distributions=("transformers",),
    tested="5.19",
    names={"revert_weight_conversion": "transformers.core_model_loading"},
    members={"revert_weight_conversion": "(model,state_dict)"},
)


def __getattr__(name: str) -> Any:
    return TRANSFORMERS.get(name)
