"""The scheduler of one member database."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg.types.json import Jsonb

from .. import connection
from ..core import ticks
from ..core.errors import TickFailed
from .announcer import announce
from .executor import Executor, Failure, Unrecorded, record_failure
from .retry import retrying
from .session import Session, woken

if TYPE_CHECKING:
    from .process import Leader

_TICK_ROWS = 1000
_TICK_SPACING_SECONDS = 0.025
"""Fires that are this close to each other share a tick."""
_RESTART_SECONDS = 5.0
_DISCONNECTED_INTERVALS = 10
"""A database without a connection is looked at within so many scheduler_intervals."""
_HEALTH_SECONDS = 1.0
_RECONCILE_SECONDS = (1.0, 60.0)
"""After news from the database, and otherwise."""
_OPTIONS = "-c lock_timeout=5s"
"""What waits longer is told as a failure of the database, instead of a tick that never ends."""
_SETTLE_SECONDS = 0.05
"""Longest wait for a lock when a tick records a failure, and then it tries no other: the tick is
not to be late for them."""


def _is_refused(error: psycopg.Error) -> bool:
    """Whether it is about what was to be recorded: not, say, a disk that is full, or functions that
    are of another version or gone."""
    return not (error.sqlstate or "").startswith(("3F", "42", "53", "58"))


class VersionMismatch(Exception):
    """The member has another version of the extension than the control database."""


@dataclass(frozen=True)
class Step:
    """What a pass is doing: for the error, should it fail there."""

    name: str
    in_control: bool = False
    """Whether it speaks to the control database."""
    node: str | None = None


class Scheduler:
    """Ticks one member database, over one connection, until it is cancelled."""

    def __init__(self, leader: Leader, db_oid: int) -> None:
        self._leader = leader
        self._db_oid = db_oid
        self._database = leader.members[db_oid]
        """Its name at the last look, which stays when it is no member any more."""
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
        self._session: Session | None = None
        self._step = Step("connect")
        self._copied_settings: dict[str, Any] | None = None
        self._is_full = False
        """Whether something that is due did not fit into the queue since the last look."""
        self._reported_full: bool | None = None
        self._may_be_gone = False
        """Whether there was news since the last reconciliation."""
        self._last_reconciled = float("-inf")
        self._has_alerts = False
        """Whether the tick saw alerts that are not announced yet."""
        self._last_health = float("-inf")

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
        starts again after a delay. Raises what ends the leader: the control database has failed, or
        the lease is lost.
        """
        leader = self._leader
        loop = asyncio.get_running_loop()
        while self._db_oid in leader.members:
            try:
                async with leader.turn_to_connect(self._db_oid):
                    back = await self._schedule()
            except Exception as error:
                if self._ends_the_leader(error):
                    raise
                # Anything else is this database's trouble, a fault of ours too.
                self.well = False
                back = loop.time() + _RESTART_SECONDS
                await self._record_failure(error)
                if isinstance(error.__cause__, psycopg.errors.InvalidSchemaName):
                    # The extension was dropped there, and with it the history.
                    await self._forget_lost()
            finally:
                self._disconnect()
            self.ticked.set()
            await self._rest_until(back)
        await self._forget_lost()

    async def _forget_lost(self) -> None:
        """Takes runs that lost their session out of the queue: there is nowhere to record them."""
        while self.lost:
            await self._leader.finish(self.lost.popleft().run.run_id)

    def _ends_the_leader(self, error: Exception) -> bool:
        cause = error.__cause__ if isinstance(error, TickFailed) else error
        if not isinstance(cause, psycopg.Error):
            return False
        return cause.sqlstate == "SL001" or (
            self._step.in_control
            and (self._leader.control.lost or ticks.is_transient(cause.sqlstate))
        )

    async def _record_failure(self, error: Exception) -> None:
        leader = self._leader
        facts = error.facts if isinstance(error, TickFailed) else None
        told = (
            (error.detail if isinstance(error, TickFailed) else None)
            or connection.reason(error)
            or type(error).__name__
        )
        self._step = Step("record failure", in_control=True)
        try:
            await leader.control.row(
                "record_failed_tick",
                epoch=leader.epoch,
                db_oid=self._db_oid,
                state="version_mismatch" if isinstance(error, VersionMismatch) else "failed",
                error=told,
                detail=facts and Jsonb(facts),
            )
        except psycopg.Error as refused:
            if self._ends_the_leader(refused):
                raise
            # It costs no other database a tick. The next failure is recorded, or told again.
            leader.warn(
                f'database "{self._database.shown}" is not scheduled: {told}; that could not be'
                f" recorded: {connection.reason(refused)}"
            )

    async def _schedule(self) -> float:
        """Schedules as long as the session may stay; gives the time at which it is to be back."""
        loop = asyncio.get_running_loop()
        while self._db_oid in self._leader.members:
            self._database = self._leader.members[self._db_oid]
            started = loop.time()
            due = await self._pass_with_retries(started)
            interval = self._leader.settings["scheduler_interval"]
            if not self._leader.keeps_connection(self._db_oid):
                return float(min(due, started + _DISCONNECTED_INTERVALS * interval))
            await asyncio.sleep(max(0.0, started + _TICK_SPACING_SECONDS - loop.time()))
            if self._session is not None and not self._session.lost:
                # Otherwise a run took it along, and the next pass makes a new one.
                self._step = Step("rest")
                wait = min(due, started + interval) - loop.time()
                await self._session.rest(self._wake, max(0.0, wait))
        return loop.time()

    async def _pass_with_retries(self, started: float) -> float:
        leader = self._leader
        attempts = 0

        async def attempt() -> float:
            nonlocal attempts
            attempts += 1
            return await self._pass(started)

        async def check_lease() -> None:
            self._step = Step("check lease", in_control=True)
            await leader.control.row("check_lease", epoch=leader.epoch)

        try:
            return await retrying(
                attempt,
                check_lease,
                # The control session has tried its statements again itself.
                may_retry=lambda: not self._step.in_control,
            )
        except psycopg.Error as error:
            if error.sqlstate == "SL001" or (self._step.in_control and leader.control.lost):
                # The end of the leader, of which this database is not the cause.
                raise
            if self._step.in_control:
                attempts = len(ticks.RETRIES) + 1 if ticks.is_transient(error.sqlstate) else 1
            raise TickFailed(
                self._database.shown,
                self._step.name,
                self._step.node,
                attempts,
                reason=connection.reason(error),
                sqlstate=error.sqlstate,
                context=error.diag.context,
            ) from error

    async def _pass(self, started: float) -> float:
        """One pass over the database; gives the loop's time at which the next node is due."""
        if self.lost:
            # Whatever keeps them from being recorded, also a database that can't be connected to.
            self._step = Step("end runs", in_control=True)
            await self._leader.control.row(
                "end_runs",
                epoch=self._leader.epoch,
                run_ids=[failure.run.run_id for failure in self.lost],
            )
        session = await self._connected()
        # What comes from now on this pass may not see: it is left for the next.
        notified = session.take_notified()
        looks = notified or started - self._last_health >= _HEALTH_SECONDS
        if looks:
            # Before anything fires under them.
            self._step = Step("read settings")
            if not session.listens:
                # First, so that no change is missed that comes after the settings were read.
                await session.listen()
            await self._refresh_settings(session)
        await self._settle_lost(session)
        due = await self._tick(session)
        self.ticked.set()
        if self._leader.limit == 0:
            await self._run_serially(session)
        if self._session is session:
            if looks or self._has_alerts:
                self._step = Step("announce alerts")
                await announce(session)
            if looks:
                await self._look_after(session, started, notified)
        return due

    async def _connected(self) -> Session:
        if self._session is None or self._session.lost:
            leader = self._leader
            self._step = Step("connect")
            self._disconnect()
            self._session = await leader.server.connect(
                self._database,
                f"pg_sluice scheduler {leader.epoch}",
                options=_OPTIONS,
            )
            # So that this pass reads the settings.
            self._copied_settings = None
            self._last_health = float("-inf")
        return self._session

    def _disconnect(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None

    async def _tick(self, session: Session) -> float:
        """Queues what is due; gives the loop's time at which the next node is due."""
        loop = asyncio.get_running_loop()
        self._step = Step("read due nodes")
        due, wait, self._has_alerts = await session.one(
            "tick", limit=_TICK_ROWS, busy=list(self._busy)
        )
        if due:
            plan = ticks.plan(due, datetime.now(UTC), self._leader.settings_of(self._db_oid))
            names = {node["pgt_id"]: node["name"] for node in due}
            for pgt_id, unreadable in plan.unreadable.items():
                self._step = Step("quarantine", node=names[pgt_id])
                await session.row(
                    "quarantine",
                    pgt_id=pgt_id,
                    message=unreadable.message,
                    next_fire_at=unreadable.next_fire_at,
                )
            if plan.runs:
                soonest = await self._queue(session, plan)
                if soonest is not None:
                    wait = soonest if wait is None else min(float(wait), soonest)
            if len(due) == _TICK_ROWS and not self._is_full:
                wait = 0
        return loop.time() + (float("inf") if wait is None else float(wait))

    async def _queue(self, session: Session, plan: ticks.Plan) -> float | None:
        """Queues runs and moves their nodes on; gives the seconds until the first is due again."""
        leader = self._leader
        self._ended.clear()
        self._step = Step("enqueue", in_control=True)
        queued, is_full = await leader.control.one(
            "enqueue", epoch=leader.epoch, db_oid=self._db_oid, runs=Jsonb(plan.runs)
        )
        self._is_full |= is_full
        self._step = Step("advance")
        moves = [plan.moves[pgt_id] for pgt_id in queued]
        if moves:
            await session.row("advance", moves=Jsonb(moves))
        # The others run at the moment, or did not fit. They stay due until their run has ended, or
        # until the next look.
        refused = plan.moves.keys() - set(queued)
        self._busy.update(refused - self._ended)
        if refused & self._ended:
            self._wake.set()
        leader.pool.offer(self._db_oid, len(queued))
        # The nodes that moved are due again at times that the tick has not seen.
        soonest = min((m["next_fire_at"] for m in moves if m["next_fire_at"]), default=None)
        if soonest is None:
            return None
        return (datetime.fromisoformat(soonest) - datetime.now(UTC)).total_seconds()

    async def _rest_until(self, back: float) -> None:
        loop = asyncio.get_running_loop()
        await woken(self._wake, max(_TICK_SPACING_SECONDS, back - loop.time()))

    async def _look_after(self, session: Session, started: float, notified: bool) -> None:
        """What is done now and then, and when there is news: health."""
        now = self._last_health = asyncio.get_running_loop().time()
        await self._report_queue(session)
        # Nodes whose run ended unseen, or that did not fit, get another look.
        self._busy.clear()
        self._step = Step("report", in_control=True)
        await self._leader.control.row(
            "record_tick",
            epoch=self._leader.epoch,
            db_oid=self._db_oid,
            milliseconds=round((now - started) * 1000, 3),
        )
        await self._reconcile(session, now, notified)

    async def _report_queue(self, session: Session) -> None:
        """Has it told when a queue is full, and when everything fitted since the last look."""
        if self._is_full != self._reported_full:
            self._step = Step("report queue")
            await session.row("report_queue", is_full=self._is_full)
            self._reported_full = self._is_full
        self._is_full = False

    async def _reconcile(self, session: Session, now: float, notified: bool) -> None:
        """Brings nodes back that are ahead of the clock, and takes away what the control database
        has of nodes that are gone: they can have been dropped, or made in a transaction that was
        rolled back."""
        self._may_be_gone |= notified
        pause = _RECONCILE_SECONDS[0 if self._may_be_gone else 1]
        if now - self._last_reconciled < pause:
            return
        self._last_reconciled, self._may_be_gone = now, False
        await self._turn_back(session)
        where = {"epoch": self._leader.epoch, "db_oid": self._db_oid}
        self._step = Step("read known nodes", in_control=True)
        known = await self._leader.control.value("known_nodes", **where)
        if known:
            self._step = Step("find nodes that are gone")
            gone = await session.value("gone_nodes", known=Jsonb(known))
            if gone:
                self._step = Step("forget nodes", in_control=True)
                await self._leader.control.row("forget_nodes", **where, pgt_ids=gone)

    async def _turn_back(self, session: Session) -> None:
        """Has nodes go on that wait for a time which a clock that was set back has seen already."""
        self._step = Step("find nodes ahead of the clock")
        ahead = await session.value("nodes_ahead") or []
        # In between others have their turn.
        for first in range(0, len(ahead), _TICK_ROWS):
            moves = ticks.turned_back(ahead[first : first + _TICK_ROWS], datetime.now(UTC))
            self._step = Step("turn nodes back")
            await session.row("turn_back", moves=Jsonb(moves))
            self._wake.set()

    async def _refresh_settings(self, session: Session) -> None:
        if self._copied_settings != self._leader.cluster_settings:
            await session.row(
                "copy_cluster_settings", settings=Jsonb(self._leader.cluster_settings)
            )
            self._copied_settings = self._leader.cluster_settings
        state = await session.value("member_state")
        if state["db_oid"] != self._db_oid:
            raise psycopg.OperationalError("another database has its name")
        if state["version"] != self._leader.version:
            raise VersionMismatch(
                f"pg_sluice is at version {state['version']} there and at version"
                f" {self._leader.version} in the control database"
            )
        self.settings = state["settings"]
        self.well = True
        if state["upkeep_is_due"]:
            self._leader.upkeep.want(self._db_oid)

    async def _settle_lost(self, session: Session) -> None:
        """Records runs that lost their session; one that had committed is in history already.

        One whose node somebody has locked waits for the next pass, behind the others.
        """
        loop = asyncio.get_running_loop()
        give_up = loop.time() + _SETTLE_SECONDS
        for _ in range(len(self.lost)):
            failure = self.lost[0]
            self._step = Step("record failure", node=failure.run.name)
            try:
                await self._record_lost(session, failure)
            except psycopg.errors.LockNotAvailable:
                self.lost.rotate(-1)
                if loop.time() > give_up:
                    return
                continue
            self._step = Step("finish run", in_control=True, node=failure.run.name)
            await self._leader.finish(failure.run.run_id)
            self.lost.popleft()
            self.run_ended(failure.run.pgt_id)

    async def _record_lost(self, session: Session, failure: Failure) -> None:
        """Records one, without what was told of it where that is refused. A run that can't be
        recorded at all is over as well: it is not to keep its database from being scheduled.

        Raises what may be better another time, and what says that the database has a fault.
        """
        for attempt in (failure, failure.without_texts()):
            try:
                await record_failure(session, attempt, _SETTLE_SECONDS)
            except psycopg.Error as error:
                if session.lost or ticks.is_transient(error.sqlstate) or not _is_refused(error):
                    raise
                refused = error
            else:
                return
        self._leader.warn(
            f'run of "{failure.run.name}" is not recorded: {connection.reason(refused)}'
        )

    async def _run_serially(self, session: Session) -> None:
        """Serial mode: the queued runs, one after the other, on the scheduler's own session."""
        leader = self._leader
        executor = Executor(leader.server, self._database, session, leader.epoch, leader.interrupt)
        finished: Any = None
        while True:
            claims = (
                leader.pool.claiming
                and leader.limit == 0
                and self._db_oid in leader.members
                and not session.lost
            )
            self._step = Step("claim", in_control=True)
            run = await leader.pool.claim(finished, self._db_oid if claims else None, None)
            self._step = Step("run", node=None if run is None else run.name)
            if run is None:
                if session.lost:
                    self._disconnect()
                elif finished is not None:
                    # The next tick must not meet what an owner's SQL left behind.
                    await executor.clean()
                    await session.listen()
                    # What was told while nobody listened.
                    self._wake.set()
                return
            try:
                await executor.execute(run, leader.settings_of(self._db_oid))
            except Unrecorded as unrecorded:
                self.lost.append(unrecorded.failure)
                self._wake.set()
                # What the run left behind goes with the session.
                self._disconnect()
                return
            finally:
                del leader.pool.runs[run.run_id]
            finished = run.run_id
            self.run_ended(run.pgt_id)
