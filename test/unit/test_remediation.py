"""Properties of what follows from a failure, and of the end of a remedy."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from pg_sluice.core import outcomes
from pg_sluice.core.outcomes import Outcome
from pg_sluice.core.remediation import (
    LEAST_WORK_MEM,
    Policy,
    after_success,
    backoff_seconds,
    judge,
    less_memory,
)

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


def test_waits_up_to_the_cap() -> None:
    """Few of the numbers above are small ones."""
    waits = [backoff_seconds(failures, 1, 60, 0) for failures in range(1, 9)]
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60]


@given(FAILURES, BASES, CAPS, JITTERS)
def test_jitter_takes_up_to_a_quarter(
    failures: int, base: float, cap: float, jitter: float
) -> None:
    full = backoff_seconds(failures, base, cap, 0)
    assert 0.75 * full <= backoff_seconds(failures, base, cap, jitter) <= full


def test_jitter_spreads() -> None:
    waits = {backoff_seconds(3, 1, 300, jitter / 10) for jitter in range(10)}
    assert len(waits) == 10


OUTCOMES = st.sampled_from([o for o in vars(outcomes).values() if isinstance(o, Outcome)])
SIZES = st.integers(64 * 1024, 8 * 1024**3)
POLICIES = st.builds(Policy, st.integers(1, 100), BASES, CAPS, SIZES)
REMEDIES = st.none() | SIZES


@given(OUTCOMES, st.integers(0, 200), REMEDIES, POLICIES, JITTERS)
def test_verdict(
    outcome: Outcome, errors: int, work_mem: int | None, policy: Policy, jitter: float
) -> None:
    verdict = judge(outcome, errors, work_mem, policy, jitter)
    failures = errors + outcome.counts
    assert verdict.counts == outcome.counts
    assert verdict.suspend == (outcome.counts and failures >= policy.max_consecutive_errors)
    assert (verdict.retry_seconds is not None) == (outcome.retried and not verdict.suspend)
    if verdict.retry_seconds is not None:
        assert verdict.retry_seconds == backoff_seconds(
            failures, policy.retry_backoff_base, policy.retry_backoff_cap, jitter
        )
    if outcome is outcomes.OUT_OF_MEMORY:
        assert verdict.work_mem == less_memory(work_mem, policy.refresh_work_mem)
    else:
        assert verdict.work_mem == work_mem
    assert verdict.record().keys() == {"counts", "suspend", "retry_seconds", "work_mem"}


@given(REMEDIES, SIZES)
def test_less_memory(work_mem: int | None, setting: int) -> None:
    had = setting if work_mem is None else min(work_mem, setting)
    left = less_memory(work_mem, setting)
    assert left <= had
    assert left == had // 2 or left == min(had, LEAST_WORK_MEM)
    assert left >= min(had, LEAST_WORK_MEM)


def test_memory_halves_to_a_megabyte() -> None:
    megabyte = 1024 * 1024
    had: list[int | None] = [None]
    for _ in range(5):
        had.append(less_memory(had[-1], 12 * megabyte))
    assert had[1:] == [6 * megabyte, 3 * megabyte, 3 * megabyte // 2, megabyte, megabyte]


def test_memory_doubles_back_to_the_setting() -> None:
    megabyte = 1024 * 1024
    assert after_success(2 * megabyte, 1, 12 * megabyte, 3) == (2 * megabyte, 2)
    assert after_success(2 * megabyte, 2, 12 * megabyte, 3) == (4 * megabyte, 0)
    assert after_success(5 * megabyte, 2, 12 * megabyte, 3) == (10 * megabyte, 0)
    assert after_success(6 * megabyte, 2, 12 * megabyte, 3) == (None, 0)


@given(SIZES, st.integers(1, 100), st.integers(1, 20))
def test_a_remedy_ends_step_by_step(setting: int, recovery_successes: int, failures: int) -> None:
    """As many steps up as down at the most, each after that many successes, and then it is over."""
    work_mem: int | None = None
    for _ in range(failures):
        work_mem = less_memory(work_mem, setting)
    successes, runs, sizes = 0, 0, []
    while work_mem is not None:
        before = work_mem
        work_mem, successes = after_success(work_mem, successes, setting, recovery_successes)
        runs += 1
        # One step more than down where halving rounded.
        assert runs <= (failures + 1) * recovery_successes
        if successes == 0:
            sizes.append(before)
            assert work_mem is None or work_mem == 2 * before
        else:
            assert work_mem == before
    assert runs == len(sizes) * recovery_successes
    assert all(size <= setting for size in sizes)
