"""A fork server imports this for workers on CUDA: what `torch.compile` imports at its first use.

Inductor asks PyTorch whether there is a GPU, as it is imported; by that CUDA begins, which then
refuses to run in a fork. Here the answer is known.
"""

from __future__ import annotations

import importlib

from triton.runtime.cache import triton_key

from ray_apr.compat.lookup import replaced

with replaced("torch.cuda", "is_available", lambda: True):
    importlib.import_module("torch._inductor.compile_fx")

triton_key()  # a hash of Triton's files, which it keeps
