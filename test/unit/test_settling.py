"""Failures that can't be recorded yet, since somebody's transactions have their nodes."""

from __future__ import annotations

import asyncio
import uuid
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import psycopg

from pg_sluice.connection import Name
from pg_sluice.leader.executor import Failure, Run
from pg_sluice.leader.scheduler import Scheduler

if TYPE_CHECKING:
    from pg_sluice.leader.process import Leader
    from pg_sluice.leader.session import Session

DB_OID = 7


class Held(Scheduler):
    """A scheduler that waits for every node, and then has not got it."""

    async def _record_lost(self, _: Session, failure: Failure) -> None:
        await asyncio.sleep(0.03)
        tried.append(failure.run.pgt_id)
        raise psycopg.errors.LockNotAvailable


tried: list[int] = []


def test_few_are_tried_in_a_pass_and_each_in_its_turn() -> None:
    """A tick is not to be late for them, and none is to wait for the others."""

    async def passes() -> list[int]:
        scheduler = Held(
            cast("Leader", SimpleNamespace(members={DB_OID: Name("app", b"app")})), DB_OID
        )
        for number in range(8):
            run = Run(uuid.uuid4(), number, "job", datetime.now(UTC), 1, None, None)
            scheduler.settle(Failure(run, datetime.now(UTC), "lock_timeout", {}))
        counts = []
        while len(tried) < 8:
            before = len(tried)
            await scheduler._settle_lost(cast("Session", None))
            counts.append(len(tried) - before)
        assert len(scheduler.lost) == 8
        return counts

    assert max(asyncio.run(passes())) <= 2
    assert tried[:8] == list(range(8))
