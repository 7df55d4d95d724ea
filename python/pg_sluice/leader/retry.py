"""The one policy for trying again what failed and may just have been in the way."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import psycopg

from ..core import ticks

T = TypeVar("T")


async def retrying(
    attempt: Callable[[], Awaitable[T]],
    before: Callable[[], Awaitable[object]],
    may_retry: Callable[[], bool] = lambda: True,
) -> T:
    """What `attempt` gives; after a transient error of the server it is made again.

    Three times at the most, after growing waits. `before` is called before each of these: it raises
    when the lease is lost, which no retry may hide.
    """
    for pause in ticks.RETRIES:
        try:
            return await attempt()
        except psycopg.Error as error:
            if not (ticks.is_transient(error.sqlstate) and may_retry()):
                raise
        await asyncio.sleep(pause)
        await before()
    return await attempt()
