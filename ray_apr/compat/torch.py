"""What is used of PyTorch that it does not promise to keep (see `lookup`).

``found_inf`` and ``grad_scale`` are attributes that a fused optimizer reads, as PyTorch's own
gradient scaler sets them; a test steps one.
"""

from __future__ import annotations

from typing import Any

from ray_apr.compat.lookup import PrivateNames

TORCH = PrivateNames(
    distributions=("torch",),
    tested="2.11 to 2.13",
    names={
        "_foreach_copy_": "torch",
        "_foreach_norm": "torch",
        "_is_in_bad_fork": "torch.cuda",
        "TorchDispatchMode": "torch.utils._python_dispatch",
        "tree_leaves": "torch.utils._pytree",
        "ProcessGroupGloo": "torch.distributed",
        "list_options": "torch._inductor",
    },
    members={
        "TorchDispatchMode": "__torch_dispatch__",
        "ProcessGroupGloo": "_Options create_device",
    },
)


def __getattr__(name: str) -> Any:
    return TORCH.get(name)


def gloo_options(timeout: Any, devices: list[Any]) -> Any:
    """Options of a Gloo group beside the default one: a limit, and interfaces of its own."""
    options = TORCH.get("ProcessGroupGloo")._Options()
    options._timeout = timeout
    options._devices = devices
    return options
