"""What is done about a node that fails, and when that ends."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from .outcomes import OUT_OF_MEMORY, Outcome

LEAST_WORK_MEM = 1024 * 1024
"""Below this a smaller work_mem saves nothing."""

_JITTER_SHARE = 0.25


@dataclass(frozen=True)
class Policy:
    """The settings that decide; times in seconds, sizes in bytes."""

    max_consecutive_errors: int
    retry_backoff_base: float
    retry_backoff_cap: float
    refresh_work_mem: int


@dataclass(frozen=True)
class Verdict:
    """What follows from a failed attempt."""

    counts: bool
    suspend: bool
    retry_seconds: float | None
    work_mem: int | None
    """What the node's runs have from now on; None for what the settings give."""

    def record(self) -> dict[str, Any]:
        """As `_sluice.record_failure` takes it."""
        return asdict(self)


def judge(
    outcome: Outcome, errors: int, work_mem: int | None, policy: Policy, jitter: float
) -> Verdict:
    """Decides about a failed attempt of a node.

    `errors` is the number of counted failures in a row before it, `work_mem` the remedy in force,
    and `jitter` is in [0, 1).
    """
    failures = errors + outcome.counts
    suspend = outcome.counts and failures >= policy.max_consecutive_errors
    retry = None
    if outcome.retried and not suspend:
        retry = backoff_seconds(
            failures, policy.retry_backoff_base, policy.retry_backoff_cap, jitter
        )
    if outcome is OUT_OF_MEMORY:
        work_mem = less_memory(work_mem, policy.refresh_work_mem)
    return Verdict(outcome.counts, suspend, retry, work_mem)


def backoff_seconds(failures: int, base: float, cap: float, jitter: float) -> float:
    """Wait before the next attempt after that many failures in a row (at least 1).

    Doubles from `base` to `cap` seconds; `jitter` in [0, 1) takes up to a quarter off, so that
    nodes that failed together don't come back together.
    """
    doublings = min(max(failures, 1) - 1, 62)
    return min(base * 2.0**doublings, cap) * (1 - _JITTER_SHARE * jitter)


def less_memory(work_mem: int | None, setting: int) -> int:
    """Half of what a run had that ran out of memory."""
    had = setting if work_mem is None else min(work_mem, setting)
    return max(had // 2, min(had, LEAST_WORK_MEM))


def after_success(
    work_mem: int, successes: int, setting: int, recovery_successes: int
) -> tuple[int | None, int]:
    """The remedy and the successes in a row under it, after one more success.

    After `recovery_successes` of them a run has twice the memory; at the setting the remedy ends.
    """
    if successes + 1 < recovery_successes:
        return work_mem, successes + 1
    return (work_mem * 2, 0) if work_mem * 2 < setting else (None, 0)
