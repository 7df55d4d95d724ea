"""Sessions at rest, and what ends their rest."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any, cast

import psycopg
import pytest

from pg_sluice.connection import Name
from pg_sluice.leader.pool import Pool
from pg_sluice.leader.process import Leader
from pg_sluice.leader.scheduler import Scheduler, Step
from pg_sluice.leader.session import Session

DB_OID = 7


class LostConnection:
    """libpq notices that the server has gone when it next reads."""

    closed = False

    def __init__(self) -> None:
        self.pgconn = self

    def add_notify_handler(self, _: object) -> None:
        pass

    def consume_input(self) -> None:
        self.closed = True
        raise psycopg.OperationalError("server closed the connection unexpectedly")

    def fileno(self) -> int:
        raise psycopg.OperationalError("the connection is lost")


def test_rest_of_a_lost_session_is_over() -> None:
    """The next statement, or the next pass, notices; nobody is ended by a rest."""

    async def rest() -> None:
        wake = asyncio.Event()
        await Session(cast("psycopg.AsyncConnection[Any]", LostConnection())).rest(wake, 60)
        assert not wake.is_set()

    asyncio.run(asyncio.wait_for(rest(), 5))


def test_scheduler_at_rest_speaks_to_nobody() -> None:
    """What a rest fails with is no failure of the control database, whoever was spoken to last."""
    leader = SimpleNamespace(
        members={DB_OID: Name("app", b"app")},
        settings={"scheduler_interval": 1.0},
        keeps_connection=lambda _: True,
    )
    scheduler = Scheduler(cast("Leader", leader), DB_OID)

    class Lost(Exception):
        pass

    class BrokenSession:
        lost = False

        async def rest(self, *_: object) -> None:
            raise Lost

    async def one_pass(started: float) -> float:
        scheduler._step = Step("report", in_control=True)
        scheduler._session = cast("Session", BrokenSession())
        return started

    scheduler._pass_with_retries = one_pass  # type: ignore[method-assign]
    with pytest.raises(Lost):
        asyncio.run(scheduler._schedule())
    assert not scheduler._step.in_control


class IdleSession:
    """Is sent nothing."""

    def watched(self, _: Callable[[], object]) -> AbstractContextManager[None]:
        return nullcontext()


def test_run_that_is_offered_as_a_worker_gives_up_is_taken() -> None:
    """By the worker, or it stays in the backlog for another one."""

    async def offer() -> None:
        leader = SimpleNamespace(settings={"worker_idle_timeout": 0}, serves=lambda _: True)
        pool = Pool(cast("Leader", leader), asyncio.create_task)
        resting = asyncio.create_task(pool._rest(DB_OID, cast("Session", IdleSession())))
        # Its time is up in the same turn of the loop.
        await asyncio.sleep(0)
        pool.offer(DB_OID)
        assert await resting or pool.backlog[DB_OID]

    asyncio.run(offer())


def test_worker_that_may_claim_nothing_does_not_rest() -> None:
    """Claiming has stopped while it claimed: those at rest were sent away before."""

    async def rest() -> None:
        leader = SimpleNamespace(settings={"worker_idle_timeout": 3600}, serves=lambda _: False)
        pool = Pool(cast("Leader", leader), asyncio.create_task)
        assert not await pool._rest(DB_OID, cast("Session", IdleSession()))

    asyncio.run(asyncio.wait_for(rest(), 5))


@pytest.mark.filterwarnings("error")
def test_overdue_run_at_the_end_of_the_leader_is_left_to_it() -> None:
    """A deadline that passes while the tasks end asks for nothing more, and fails nobody."""

    async def end() -> None:
        leader = Leader(
            cast("Any", None), cast("Any", SimpleNamespace(server=None)), cast("Any", None)
        )

        async def run() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                leader.interrupt(1, cast("Any", None), True)

        async with asyncio.TaskGroup() as tasks:
            leader._tasks = tasks
            tasks.create_task(run())
            # Until it has begun.
            await asyncio.sleep(0)
            raise KeyError("the end")

    with pytest.raises(BaseExceptionGroup) as caught:
        asyncio.run(end())
    assert [type(error) for error in caught.value.exceptions] == [KeyError]
