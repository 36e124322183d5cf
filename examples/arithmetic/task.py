"""Addition with a column scratchpad: prompts, worked answers and an exact reward.

A prompt is ``"12+94="`` and a right response is ``"2+4+0=06;1+9+0=10,106"``: one column per digit,
least significant first, each ``digit+digit+carry=two-digit sum``; then a comma and the answer.
A token is one character, so a response has 9 tokens per column, the digits of the answer and the
end-of-sequence token. Most operands have one to three digits and a few have twelve or thirteen,
hence the long tail of response lengths.

Only the standard library is imported here, so that the reward runs in any process.
"""

from __future__ import annotations

import random
from typing import Any

ALPHABET = "0123456789+=;,"
"""Every character of prompts and responses; each is one token."""

ANSWER_MARK = ","
"""Separates the scratchpad from the final answer."""

DIGITS_PROBABILITY = {1: 0.30, 2: 0.60, 3: 0.06, 12: 0.02, 13: 0.02}
"""Number of digits of both operands -> its share of the prompts (sums to 1)."""


def sample_num_digits(rng: random.Random) -> int:
    """Draw the number of digits of a prompt's operands from `DIGITS_PROBABILITY`."""
    return rng.choices(list(DIGITS_PROBABILITY), weights=list(DIGITS_PROBABILITY.values()))[0]


def sample_operands(rng: random.Random, num_digits: int) -> tuple[int, int]:
    """Draw two operands, each uniform over the numbers of exactly `num_digits` digits (from 1)."""
    low, high = 10 ** (num_digits - 1), 10**num_digits - 1
    return rng.randint(low, high), rng.randint(low, high)


def prompt_text(left: int, right: int) -> str:
    """Return the prompt of a sum, such as ``"12+94="``."""
    return f"{left}+{right}="


def parse_prompt(prompt: str) -> tuple[int, int]:
    """Return the operands of a prompt that `prompt_text` made."""
    left, right = prompt.removesuffix("=").split("+")
    return int(left), int(right)


def worked_answer(
    left: int, right: int, *, mistake_probability: float = 0.0, rng: random.Random | None = None
) -> str:
    """Write the scratchpad and the answer, as a careful or a careless student would.

    In each column, with `mistake_probability`, the student forgets the incoming carry or, where
    there is none, is one off. What follows is consistent with the mistake, so the final answer is
    then almost always wrong.

    Args:
        left: first operand, 0 or more.
        right: second operand, 0 or more.
        mistake_probability: chance of a mistake, per column, in [0, 1].
        rng: source of the mistakes; needed when `mistake_probability` is above 0.

    Returns:
        The response text, without the end-of-sequence token.

    Raises:
        ValueError: `mistake_probability` is above 0 and `rng` is missing.

    Example:
        >>> worked_answer(12, 94)
        '2+4+0=06;1+9+0=10,106'
    """
    if mistake_probability > 0 and rng is None:
        raise ValueError("mistake_probability > 0 draws mistakes: pass rng=random.Random(seed)")
    width = max(len(str(left)), len(str(right)))
    columns, answer, carry = [], "", 0
    for x, y in zip(reversed(f"{left:0{width}}"), reversed(f"{right:0{width}}"), strict=True):
        total = int(x) + int(y) + carry
        if rng is not None and rng.random() < mistake_probability:
            total = _mistaken(total, carry, rng)
        columns.append(f"{x}+{y}+{carry}={total:02d}")
        carry, answer = total // 10, f"{total % 10}{answer}"
    return ";".join(columns) + ANSWER_MARK + ("1" if carry else "") + answer


def _mistaken(total: int, carry: int, rng: random.Random) -> int:
    """Return a wrong column sum in 0..19: the carry is forgotten, or the sum is one off."""
    if carry or total == 19:
        return total - 1
    return total + 1 if total == 0 else total + rng.choice((-1, 1))


def final_answer(response: str) -> str | None:
    """Return what follows the last answer mark, or None when there is no mark."""
    _, mark, answer = response.rpartition(ANSWER_MARK)
    return answer.strip() if mark else None


def reward(sample: Any) -> float:
    """Return 1.0 when the final answer is exactly right, else 0.0.

    Args:
        sample: has `response_text` (str) and `row`, the prompt's row with the column `answer`.

    Returns:
        1.0 or 0.0; a response without an answer mark earns 0.0.
    """
    return float(final_answer(sample.response_text) == str(sample.row["answer"]))
