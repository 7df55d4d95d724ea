"""The scheduler of one member database."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg.types.json import Jsonb

from .. import connection
from ..core import ticks
from .executor import Executor, Failure, SessionLost, record_failure
from .session import Session

if TYPE_CHECKING:
    from .process import Leader

_TICK_ROWS = 1000
_TICK_SPACING_SECONDS = 0.025
"""Fires that are this close to each other share a tick."""
_RESTART_SECONDS = 5.0
_DISCONNECTED_INTERVALS = 10
"""A database without a connection is looked at within so many scheduler_intervals."""
_HEALTH_SECONDS = 1.0
_UPKEEP_SECONDS = 10.0


class VersionMismatch(Exception):
    """The member has another version of the extension than the control database."""


class Scheduler:
    """Ticks one member database, over one connection, until it is cancelled."""

    def __init__(self, leader: Leader, db_oid: int) -> None:
        self._leader = leader
        self._db_oid = db_oid
        self.settings: dict[str, Any] | None = None
        self.lost: deque[Failure] = deque()
        """Runs that lost their session: to be recorded over the scheduler's."""
        self.ticked = asyncio.Event()
        """Set once a tick has ended, well or not."""
        self.well = False
        """Whether the database could be scheduled the last time."""
        self._busy: set[int] = set()
        self._ended: set[int] = set()
        """Nodes whose run has ended since the last enqueue was sent."""
        self._wake = asyncio.Event()
        self._copied_settings: dict[str, Any] | None = None
        self._last_health = self._last_upkeep = float("-inf")

    def wake(self) -> None:
        """Has the next tick now."""
        self._wake.set()

    def run_ended(self, pgt_id: int) -> None:
        """A run of this database has ended: a node that was due meanwhile can be queued now."""
        self._ended.add(pgt_id)
        if pgt_id in self._busy:
            self._busy.discard(pgt_id)
            self._wake.set()

    def settle(self, failure: Failure) -> None:
        """Takes over a run that lost its session."""
        self.lost.append(failure)
        self._wake.set()

    async def run(self) -> None:
        """Schedules for as long as the database is a member; a failure is recorded, and scheduling
        starts again after a delay."""
        leader = self._leader
        loop = asyncio.get_running_loop()
        while self._db_oid in leader.members:
            try:
                async with (
                    leader.turn_to_connect(self._db_oid),
                    await self._connect() as session,
                ):
                    back = await self._schedule(session)
            except (psycopg.Error, OSError, VersionMismatch) as error:
                self.well = False
                back = loop.time() + _RESTART_SECONDS
                mismatch = isinstance(error, VersionMismatch)
                await leader.control.row(
                    "record_failed_tick",
                    epoch=leader.epoch,
                    db_oid=self._db_oid,
                    state="version_mismatch" if mismatch else "failed",
                    error=connection.reason(error),
                )
            self.ticked.set()
            await self._rest_until(back)
        while self.lost:
            # Nobody is left to record it.
            await leader.finish(self.lost.popleft().run.run_id)

    async def _connect(self) -> Session:
        leader = self._leader
        return await leader.server.connect(
            leader.members[self._db_oid],
            f"pg_sluice scheduler {leader.epoch}",
        )

    async def _schedule(self, session: Session) -> float:
        """Schedules as long as the session may stay; gives the time at which it is to be back."""
        loop = asyncio.get_running_loop()
        self._copied_settings = None
        await self._refresh_settings(session)
        await session.row("listen")
        while self._db_oid in self._leader.members:
            started = loop.time()
            await self._settle_lost(session)
            due = await self._tick_with_retries(session)
            self.ticked.set()
            if self._leader.limit == 0:
                await self._run_serially(session)
            await self._look_after(session, started)
            interval = self._leader.settings["scheduler_interval"]
            if not self._leader.keeps_connection(self._db_oid):
                return float(min(due, started + _DISCONNECTED_INTERVALS * interval))
            await asyncio.sleep(max(0.0, started + _TICK_SPACING_SECONDS - loop.time()))
            await session.rest(self._wake, max(0.0, min(due, started + interval) - loop.time()))
        return loop.time()

    async def _tick_with_retries(self, session: Session) -> float:
        for pause in (*ticks.RETRIES, None):
            try:
                return await self._tick(session)
            except psycopg.Error as error:
                if pause is None or session.lost or not ticks.is_transient(error.sqlstate):
                    raise
                await asyncio.sleep(pause)
        raise AssertionError

    async def _tick(self, session: Session) -> float:
        """One scheduling pass; gives the loop's time at which the next node is due."""
        leader = self._leader
        loop = asyncio.get_running_loop()
        due, wait = await session.one("tick", limit=_TICK_ROWS, busy=list(self._busy))
        if due:
            plan = ticks.plan(due, datetime.now(UTC))
            for pgt_id, message in plan.unreadable.items():
                await session.row("quarantine", pgt_id=pgt_id, message=message)
            if plan.runs:
                self._ended.clear()
                queued = await leader.control.value(
                    "enqueue", epoch=leader.epoch, db_oid=self._db_oid, runs=Jsonb(plan.runs)
                )
                refused = plan.moves.keys() - set(queued)
                moves = [plan.moves[pgt_id] for pgt_id in queued]
                if moves:
                    await session.row("advance", moves=Jsonb(moves))
                # The others run at the moment. They stay due until their run has ended.
                self._busy.update(refused - self._ended)
                if refused & self._ended:
                    self._wake.set()
                leader.pool.offer(self._db_oid, len(queued))
                # The nodes that moved are due again at times that the tick has not seen.
                soonest = min((m["next_fire_at"] for m in moves if m["next_fire_at"]), default=None)
                if soonest is not None:
                    until = (datetime.fromisoformat(soonest) - datetime.now(UTC)).total_seconds()
                    wait = until if wait is None else min(float(wait), until)
            if len(due) == _TICK_ROWS:
                wait = 0
        return loop.time() + (float("inf") if wait is None else float(wait))

    async def _rest_until(self, back: float) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(_TICK_SPACING_SECONDS, back - loop.time())):
                await self._wake.wait()
        self._wake.clear()

    async def _look_after(self, session: Session, started: float) -> None:
        """What is done now and then: health, settings, upkeep."""
        now = asyncio.get_running_loop().time()
        if now - self._last_health < _HEALTH_SECONDS and not session.take_notified():
            return
        self._last_health = now
        # Nodes whose run ended unseen get another look.
        self._busy.clear()
        await self._refresh_settings(session)
        await self._leader.control.row(
            "record_tick",
            epoch=self._leader.epoch,
            db_oid=self._db_oid,
            milliseconds=(now - started) * 1000,
        )
        due = now - self._last_upkeep >= _UPKEEP_SECONDS
        # While there is something to delete the next look goes on with it.
        if due and await session.value("upkeep") == 0:
            self._last_upkeep = now

    async def _refresh_settings(self, session: Session) -> None:
        if self._copied_settings != self._leader.cluster_settings:
            await session.row(
                "copy_cluster_settings", settings=Jsonb(self._leader.cluster_settings)
            )
            self._copied_settings = self._leader.cluster_settings
        state = await session.value("member_state")
        if state["version"] != self._leader.version:
            raise VersionMismatch(
                f"pg_sluice is at version {state['version']} there and at version"
                f" {self._leader.version} in the control database"
            )
        self.settings = state["settings"]
        self.well = True

    async def _settle_lost(self, session: Session) -> None:
        """Records runs that lost their session; one that had committed is in history already."""
        while self.lost:
            failure = self.lost[0]
            await record_failure(session, failure, self._leader.settings_of(self._db_oid))
            await self._leader.finish(failure.run.run_id)
            self.lost.popleft()
            self.run_ended(failure.run.pgt_id)

    async def _run_serially(self, session: Session) -> None:
        """Serial mode: the queued runs, one after the other, on the scheduler's own session."""
        leader = self._leader
        executor = Executor(
            leader.server, leader.members.get(self._db_oid, ""), session, leader.epoch
        )
        finished: Any = None
        while True:
            claims = leader.pool.claiming and leader.limit == 0 and self._db_oid in leader.members
            run = await leader.pool.claim(finished, self._db_oid if claims else None, None)
            if run is None:
                if finished is not None:
                    # The next tick must not meet what an owner's SQL left behind.
                    await executor.clean()
                    await session.row("listen")
                return
            try:
                await executor.execute(run, leader.settings_of(self._db_oid))
            except SessionLost as lost:
                self.lost.append(lost.failure)
                raise psycopg.OperationalError(str(lost)) from lost
            finally:
                del leader.pool.runs[run.run_id]
            finished = run.run_id
            self.run_ended(run.pgt_id)
