"""Fair share of the workers: a small model of the pool that is driven by hypothesis."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from pg_sluice.core.share import must_yield, next_database, share

DATABASES = st.integers(1, 5)
LIMITS = st.integers(1, 8)


class Pool:
    """Databases with work, and the workers that they hold. Each run takes one step."""

    def __init__(self, limit: int, quota: int, work: dict[int, int]) -> None:
        self.limit = limit
        self.quota = quota
        self.work = Counter(work)
        self.held: Counter[int] = Counter()
        self.done: Counter[int] = Counter()
        self.served: Counter[int] = Counter()

    def waiting(self) -> set[int]:
        return {database for database, runs in self.work.items() if runs > 0}

    def fill(self) -> None:
        """Gives free slots to those that wait, as long as there are both."""
        while self.held.total() < self.limit:
            database = next_database(
                {d for d in self.waiting() if self.work[d] > self.held[d]},
                self.held,
                self.served,
            )
            if database is None:
                return
            self.held[database] += 1
            self.served[database] = max(self.served.values(), default=0) + 1

    def step(self) -> None:
        """Every worker ends a run; then it goes on, yields or, without work, ends."""
        for database in list(self.held.elements()):
            if self.work[database] > 0:
                self.work[database] -= 1
                self.done[database] += 1
            if self.work[database] == 0 or must_yield(
                database, self.waiting(), self.held, self.limit, self.quota
            ):
                self.held[database] -= 1
            self.fill()
            assert self.held.total() <= self.limit


WORK = st.dictionaries(DATABASES, st.integers(0, 30), min_size=1)


@given(WORK, LIMITS, st.integers(0, 8))
def test_all_work_is_done(work: dict[int, int], limit: int, quota: int) -> None:
    pool = Pool(limit, quota, work)
    pool.fill()
    steps = 0
    while pool.waiting():
        pool.step()
        steps += 1
        assert steps <= sum(work.values()) + 1
    assert pool.done == Counter({d: n for d, n in work.items() if n})


@given(WORK, LIMITS, DATABASES)
def test_newcomer_gets_its_share(work: dict[int, int], limit: int, newcomer: int) -> None:
    """A database whose work comes last, when all slots are taken, soon holds what is fair."""
    long_work = {d: n + 1000 for d, n in work.items() if d != newcomer}
    pool = Pool(limit, 0, long_work)
    pool.fill()
    pool.step()
    pool.work[newcomer] = 1000
    pool.fill()
    for _ in range(limit + 1):
        pool.step()
    fewest = limit // len(pool.waiting())
    assert all(pool.held[database] >= fewest for database in pool.waiting())
    most = share(limit, 0, len(pool.waiting()))
    assert all(held <= most for held in pool.held.values())


@given(st.integers(1, 4), LIMITS)
def test_nobody_starves(databases: int, limit: int) -> None:
    """With fewer workers than databases, each gets its turn."""
    pool = Pool(min(limit, databases), 0, dict.fromkeys(range(databases), 1000))
    pool.fill()
    for _ in range(10 * databases):
        pool.step()
    assert all(pool.done[database] > 0 for database in range(databases))


@given(WORK, LIMITS, st.integers(1, 8))
def test_idle_capacity_is_lent(work: dict[int, int], limit: int, quota: int) -> None:
    """No slot is free while there is work for it, whatever the quota."""
    pool = Pool(limit, quota, work)
    pool.fill()
    assert pool.held.total() == min(limit, sum(work.values()))


@given(st.integers(0, 64), st.integers(0, 64), st.integers(0, 100))
def test_share_is_bounded(limit: int, quota: int, waiting: int) -> None:
    found = share(limit, quota, waiting)
    if quota:
        assert found == quota
    else:
        assert found * max(1, waiting) >= limit
        assert (found - 1) * max(1, waiting) < limit or found == 0


@given(st.sets(DATABASES), st.dictionaries(DATABASES, st.integers(0, 9)))
def test_next_is_one_that_waits_and_holds_fewest(waiting: set[int], held: dict[int, int]) -> None:
    found = next_database(waiting, held, {})
    if not waiting:
        assert found is None
    else:
        assert found in waiting
        assert held.get(found, 0) == min(held.get(d, 0) for d in waiting)


@settings(max_examples=50)
@given(
    DATABASES, st.sets(DATABASES), st.dictionaries(DATABASES, st.integers(0, 9)), st.integers(0, 20)
)
def test_above_the_limit_everybody_yields(
    database: int, waiting: set[int], held: dict[int, int], limit: int
) -> None:
    total = sum(held.values())
    if total > limit:
        assert must_yield(database, waiting, held, limit, 0)
    elif total < limit:
        assert not must_yield(database, waiting, held, limit, 0)


def test_quota_bounds_a_database_while_others_wait() -> None:
    held = Counter({1: 4})
    assert must_yield(1, {1, 2}, held, 4, 1)
    assert not must_yield(1, {1}, held, 4, 1)
    assert not must_yield(1, set(), held, 4, 1)
    # Nobody gives back what it has by its quota, or to one that has that too.
    assert not must_yield(1, {2}, Counter({1: 3}), 3, 3)
    assert not must_yield(1, {2}, Counter({1: 4, 2: 2}), 6, 2)


def test_it_is_who_holds_most_that_makes_room() -> None:
    held = Counter({1: 1, 3: 3})
    assert not must_yield(1, {1, 2, 3}, held, 4, 0)
    assert must_yield(3, {1, 2, 3}, held, 4, 0)
    # One more is no more than its share, rounded up.
    assert not must_yield(1, {2}, Counter({1: 2, 2: 1}), 3, 0)


def test_the_last_slot_goes_to_another_also_where_nothing_more_waits() -> None:
    assert must_yield(1, {2}, Counter({1: 1}), 1, 0)
