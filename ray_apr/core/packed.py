"""Numbers of a response as bytes, as they travel and are stored: 4 for a token id and 8 for a
log-prob, where objects of Python take 36 and 32."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar, Generic, Self, SupportsIndex, TypeVar, overload

Number = TypeVar("Number", int, float)


class Packed(Sequence[Number], Generic[Number]):
    """Numbers that stay as they are; equal to a tuple of them.

    Attributes:
        data: Their bytes, in the machine's order.
    """

    __slots__ = ("data",)
    CODE: ClassVar[str]
    """Of a number in `struct` and `array`."""
    WIDTH: ClassVar[int]
    """Its bytes."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    @classmethod
    def of(cls, numbers: Iterable[Number]) -> Self:
        """The numbers.

        Raises:
            OverflowError: Of one that has no room.
            TypeError: Of what is no such number.
        """
        return cls(array(cls.CODE, numbers).tobytes())

    def __len__(self) -> int:
        return len(self.data) // self.WIDTH

    def __iter__(self) -> Iterator[Number]:
        return iter(struct.unpack(f"{len(self)}{self.CODE}", self.data))

    @overload
    def __getitem__(self, index: SupportsIndex) -> Number: ...
    @overload
    def __getitem__(self, index: slice) -> Self: ...
    def __getitem__(self, index: SupportsIndex | slice) -> Number | Self:
        numbers = memoryview(self.data).cast(self.CODE)  # type: ignore[call-overload]
        if isinstance(index, slice):
            return type(self)(numbers[index].tobytes())
        found: Number = numbers[index]
        return found

    def __add__(self, other: Self) -> Self:
        if not isinstance(other, type(self)):
            return NotImplemented
        return type(self)(self.data + other.data)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Packed):
            return self.data == other.data or tuple(self) == tuple(other)
        return tuple(self) == other

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __reduce__(self) -> tuple[type[Self], tuple[bytes]]:
        return type(self), (self.data,)

    def __repr__(self) -> str:
        return repr(tuple(self))


class TokenIds(Packed[int]):
    """Token ids, of 32 bits."""

    __slots__ = ()
    CODE = "i"
    WIDTH = struct.calcsize(CODE)


class LogProbs(Packed[float]):
    """Log-probs, as exact as Python's."""

    __slots__ = ()
    CODE = "d"
    WIDTH = struct.calcsize(CODE)


def packed(numbers: Any, kind: type[Packed[Any]]) -> Any:
    """Numbers as a kind of these; as it is what has none, but a length alone."""
    is_other = not isinstance(numbers, kind) and isinstance(numbers, Iterable)
    return kind.of(numbers) if is_other else numbers
