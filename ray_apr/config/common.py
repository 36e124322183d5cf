"""Choices that several sections share."""

from typing import Literal

DType = Literal["float32", "bfloat16"]
AutoDType = Literal["auto", "float32", "bfloat16"]
Placement = Literal["disaggregated", "colocated"]

LEAST_TEMPERATURE, MOST_TEMPERATURE = 0.01, 2.0
"""Of a draw: vLLM takes the first one in the place of a smaller one, and refuses requests with more
than the other."""

ENGINE_GPU_SHARE, TRAINER_GPU_SHARE = 0.6, 0.4
"""What colocated engine workers and train workers reserve of a GPU. Neither two engine workers fit
on one, nor two train workers beside an engine: where all GPUs are the run's, Ray pairs them."""


def dtype_on(device: str, dtype: AutoDType) -> DType:
    """Data type on a device, ``"cpu"`` or ``"cuda"``: auto is bfloat16 on CUDA, float32 on CPU.

    Example:
        >>> dtype_on("cuda", "auto"), dtype_on("cpu", "auto"), dtype_on("cuda", "float32")
        ('bfloat16', 'float32', 'float32')
    """
    if dtype != "auto":
        return dtype
    return "bfloat16" if device == "cuda" else "float32"
