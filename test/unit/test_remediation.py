"""Properties of the wait before a retry."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from pg_sluice.core.outcomes import CANCELLED, LOCK_TIMEOUT, PERMANENT_ERROR
from pg_sluice.core.remediation import backoff_seconds, retry_seconds

# As the settings bound them.
BASES = st.floats(0.1, 3600)
CAPS = st.floats(0.1, 86400)
JITTERS = st.floats(0, 1, exclude_max=True)
FAILURES = st.integers(-5, 10**30)


@given(FAILURES, BASES, CAPS, JITTERS)
def test_wait_is_bounded(failures: int, base: float, cap: float, jitter: float) -> None:
    wait = backoff_seconds(failures, base, cap, jitter)
    assert math.isfinite(wait)
    assert 0.75 * min(base, cap) <= wait <= cap


@given(st.integers(1, 10**30), st.integers(0, 10**30), BASES, CAPS)
def test_wait_never_falls(failures: int, more: int, base: float, cap: float) -> None:
    """Before jitter."""
    assert backoff_seconds(failures, base, cap, 0) <= backoff_seconds(failures + more, base, cap, 0)


@given(st.integers(1, 200), BASES, CAPS)
def test_wait_doubles_up_to_the_cap(failures: int, base: float, cap: float) -> None:
    wait = backoff_seconds(failures, base, cap, 0)
    assert backoff_seconds(failures + 1, base, cap, 0) == min(2 * wait, cap)
    assert backoff_seconds(1, base, cap, 0) == min(base, cap)


@given(FAILURES, BASES, CAPS, JITTERS)
def test_jitter_takes_up_to_a_quarter(
    failures: int, base: float, cap: float, jitter: float
) -> None:
    full = backoff_seconds(failures, base, cap, 0)
    assert 0.75 * full <= backoff_seconds(failures, base, cap, jitter) <= full


def test_jitter_spreads() -> None:
    waits = {backoff_seconds(3, 1, 300, jitter / 10) for jitter in range(10)}
    assert len(waits) == 10


@given(st.integers(1, 100), st.integers(1, 100), BASES, CAPS, JITTERS)
def test_retry_ends_at_the_limit(
    failures: int, limit: int, base: float, cap: float, jitter: float
) -> None:
    wait = retry_seconds(LOCK_TIMEOUT, failures, limit, base, cap, jitter)
    assert (wait is None) == (failures >= limit)
    assert wait is None or wait == backoff_seconds(failures, base, cap, jitter)


@given(st.integers(1, 100), st.integers(1, 100), BASES, CAPS, JITTERS)
def test_what_is_not_retried(
    failures: int, limit: int, base: float, cap: float, jitter: float
) -> None:
    for outcome in (CANCELLED, PERMANENT_ERROR):
        assert retry_seconds(outcome, failures, limit, base, cap, jitter) is None
