"""Waiting for one of several tasks, and finding the first error of several."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any


async def first_of(watched: Awaitable[Any], other: Awaitable[Any]) -> bool:
    """Wait for either; whether `watched` is done. What is not done is cancelled.

    Waits for: either. Unblocked by: what its caller says of both.
    """
    tasks = [asyncio.ensure_future(watched), asyncio.ensure_future(other)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return tasks[0].done()
    finally:
        for task in tasks:
            if not task.done():
                task.cancel()


def first_leaf(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first error inside of nested groups."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
