"""What is done about a node that fails."""

from __future__ import annotations

from .outcomes import Outcome

_JITTER_SHARE = 0.25


def backoff_seconds(failures: int, base: float, cap: float, jitter: float) -> float:
    """Wait before the next attempt after that many failures in a row (at least 1).

    Doubles from `base` to `cap` seconds; `jitter` in [0, 1) takes up to a quarter off, so that
    nodes that failed together don't come back together.
    """
    doublings = min(max(failures, 1) - 1, 62)
    return min(base * 2.0**doublings, cap) * (1 - _JITTER_SHARE * jitter)


def retry_seconds(
    outcome: Outcome, failures: int, limit: int, base: float, cap: float, jitter: float
) -> float | None:
    """Seconds until the retry of a failed attempt; None when there is none.

    `failures` counts this attempt too. At `limit` the node is suspended and nothing is retried.
    """
    if not outcome.retried or failures >= limit:
        return None
    return backoff_seconds(failures, base, cap, jitter)
