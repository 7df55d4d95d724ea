"""What became of an attempt, told from its SQLSTATE: a message may be in any language."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended and what follows from that."""

    name: str
    retried: bool
    counts: bool
    """Whether it counts towards suspension."""


LOCK_TIMEOUT = Outcome("lock_timeout", retried=True, counts=True)
DEADLINE_EXCEEDED = Outcome("deadline_exceeded", retried=True, counts=True)
OUT_OF_MEMORY = Outcome("out_of_memory", retried=True, counts=True)
SERIALIZATION_FAILURE = Outcome("serialization_failure", retried=True, counts=True)
DEADLOCK = Outcome("deadlock", retried=True, counts=True)
RESOURCE_EXHAUSTED = Outcome("resource_exhausted", retried=True, counts=True)
CONNECTION_LOST = Outcome("connection_lost", retried=True, counts=True)
WORKER_CRASHED = Outcome("worker_crashed", retried=True, counts=True)
CANCELLED = Outcome("cancelled", retried=False, counts=False)
PERMANENT_ERROR = Outcome("permanent_error", retried=False, counts=True)

_BY_SQLSTATE = {
    "55P03": LOCK_TIMEOUT,
    "53200": OUT_OF_MEMORY,
    "40001": SERIALIZATION_FAILURE,
    "40P01": DEADLOCK,
}
_QUERY_CANCELED = "57014"


def classify(sqlstate: str | None, *, overdue: bool) -> Outcome:
    """The outcome of a failed attempt.

    `sqlstate` is None when the connection ended without an error from the server. `overdue` says
    that the attempt had reached a deadline of its own: a cancellation, or the end of its session,
    is then the deadline's, otherwise somebody else's. The server reports both alike.
    """
    if sqlstate == _QUERY_CANCELED:
        return DEADLINE_EXCEEDED if overdue else CANCELLED
    if sqlstate is None or sqlstate.startswith("08"):
        return DEADLINE_EXCEEDED if overdue else CONNECTION_LOST
    if sqlstate.startswith("57P"):
        return DEADLINE_EXCEEDED if overdue else WORKER_CRASHED
    if sqlstate in _BY_SQLSTATE:
        return _BY_SQLSTATE[sqlstate]
    if sqlstate.startswith("53"):
        return RESOURCE_EXHAUSTED
    return PERMANENT_ERROR
