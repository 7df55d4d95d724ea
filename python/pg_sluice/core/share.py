"""Which database gets a worker: everyone its share, and what others leave idle is lent."""

from __future__ import annotations

import math
from collections.abc import Mapping, Set


def share(limit: int, quota: int, waiting: int) -> int:
    """Workers that one database may hold while others wait; `waiting` counts databases with queued
    work, itself included. A quota of 0 shares the limit evenly, rounded up."""
    return quota if quota > 0 else math.ceil(limit / max(1, waiting))


def next_database(
    waiting: Set[int], held: Mapping[int, int], served: Mapping[int, int]
) -> int | None:
    """The waiting database that holds the fewest workers, of equals the one that was served longest
    ago; `served` has a number for each that grows with every slot that it is given."""
    return min(
        waiting,
        key=lambda database: (held.get(database, 0), served.get(database, 0), database),
        default=None,
    )


def must_yield(
    database: int, waiting: Set[int], held: Mapping[int, int], limit: int, quota: int
) -> bool:
    """Whether a worker of a database gives its slot back between two runs.

    So it is above the limit, or where no slot is free and another database waits that has less than
    it could have: less than its quota while this one is above its own, or, shared evenly, at least
    two workers less. With fewer slots than databases they take turns.
    """
    total = sum(held.values())
    if total != limit:
        return total > limit
    mine = held.get(database, 0)
    fewest = min(held.get(one, 0) for one in waiting | {database})
    contenders = waiting | {other for other, workers in held.items() if workers > 0}
    if len(contenders) > limit:
        return True
    if quota > 0:
        return mine > quota > fewest
    return mine > fewest + 1
