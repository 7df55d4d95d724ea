"""Which database gets a worker: everyone its share, and what others leave idle is lent."""

from __future__ import annotations

import math
from collections.abc import Mapping, Set


def share(limit: int, quota: int, waiting: int) -> int:
    """Workers that one database may hold while others wait; `waiting` counts databases with queued
    work, itself included. A quota of 0 shares the limit evenly, rounded up."""
    return quota if quota > 0 else math.ceil(limit / max(1, waiting))


def next_database(waiting: Set[int], held: Mapping[int, int]) -> int | None:
    """The waiting database that holds the fewest workers; equals by the smallest OID."""
    return min(waiting, key=lambda database: (held.get(database, 0), database), default=None)


def must_yield(
    database: int, waiting: Set[int], held: Mapping[int, int], limit: int, quota: int
) -> bool:
    """Whether a worker of a database gives its slot back between two runs.

    So it is above the limit, or where no slot is free, the database holds more than its share, and
    another that waits holds less than its own.
    """
    total = sum(held.values())
    if total > limit:
        return True
    if total < limit:
        return False
    fair = share(limit, quota, len(waiting | {database}))
    return held.get(database, 0) > fair and any(
        held.get(other, 0) < fair for other in waiting - {database}
    )
