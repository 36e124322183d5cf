"""Whether SymPy may work out an expression: 9^(9^9) would take hours and gigabytes."""

from __future__ import annotations

import math
from typing import Any

_MOST_DIGITS = 20_000
"""Of a number that is written out: 2024^2024 has 6,692."""
_MOST_TERMS = 100_000
"""Of a sum or a product with numbers as limits."""


def is_small(expression: Any) -> bool:
    """Whether no number inside an expression has too many digits, and no sum too many terms.

    Args:
        expression: Of SymPy, not evaluated; a matrix, too.
    """
    parts = expression.flat() if hasattr(expression, "flat") else [expression]
    return max(map(_digits, parts), default=0.0) <= _MOST_DIGITS


def _digits(part: Any) -> float:
    """Decimal logarithm of a part, or of a number inside of it: not less than the greatest one;
    infinite if that has too many digits. A symbol counts as 10."""
    import sympy
    from sympy.functions.elementary.hyperbolic import HyperbolicFunction

    if isinstance(part, sympy.Rational):
        return math.log10(max(abs(part.p), part.q))
    if not isinstance(part, sympy.Basic) or not part.args:
        return 1.0
    digits = [_digits(argument) for argument in part.args]
    most = max(digits)
    if most > _MOST_DIGITS:
        return math.inf
    if isinstance(part, sympy.Pow) and not isinstance(part.base, sympy.Float):
        return max(most, digits[0] * _size(digits[1]))
    if isinstance(part, sympy.binomial):
        return max(most, digits[0] * min(_size(digits[0]), _size(digits[1])))
    if isinstance(part, sympy.factorial | sympy.factorial2 | sympy.gamma | HyperbolicFunction):
        return max(most, digits[0] * _size(digits[0]))
    if isinstance(part, sympy.Mul):
        return sum(digits)
    if isinstance(part, sympy.Add):
        return most + math.log10(len(digits))
    if isinstance(part, sympy.Sum | sympy.Product):
        return math.inf if _size(max(digits[1:])) > _MOST_TERMS else most
    return most


def _size(digits: float) -> float:
    """The number with this logarithm."""
    return 10.0**digits if digits < 300 else math.inf
