"""Choices that several sections share."""

from typing import Literal

DType = Literal["float32", "bfloat16"]
