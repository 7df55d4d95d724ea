"""The leader process: from `CALL sluice.run()` to its end."""

from __future__ import annotations

import asyncio
import contextlib
from datetime import datetime
from typing import Any

import psycopg

from .. import __version__
from ..backend import server
from ..backend.plpy_types import Plpy
from ..connection import Name
from ..core import outcomes
from . import procedure
from .announcer import announce
from .executor import Failure, Run
from .pool import Pool
from .procedure import Home
from .scheduler import Scheduler
from .session import ControlSession, woken
from .upkeep import CONTROL, Upkeep

_LEASE_RENEWALS = 3
_LONG_RUN_SECONDS = 1.0
_TRY_TO_END_SECONDS = 60.0
"""From a try to end, which can keep others waiting for _LONG_RUN_SECONDS, to the next one."""
_END_POLL_SECONDS = 0.02
_SLOTS_SECONDS = 5.0
_STUCK_SECONDS = 5.0
"""What a terminated session may take to end before somebody is told."""
_LISTEN_AGAIN_SECONDS = 1.0
_GUESTS = 4
"""Schedulers at a time beyond max_scheduler_connections."""
_CONTROL_OPTIONS = "-c synchronous_commit=off -c DateStyle=ISO -c lock_timeout=2s"
"""No lock there is held for long. A statement that meets one that is keeps all others waiting: they
share the session. Before its next attempt the renewal of the lease has its turn. A lock that is
held for some ten seconds ends the leader."""


def lead(plpy: Plpy, seconds: float | None) -> str:
    """Leads for that many seconds (0: one pass). Gives the JSON that `_sluice.unwrap` takes."""
    return procedure.run(plpy, seconds, _lead)


async def _lead(plpy: Plpy, home: Home, seconds: float) -> None:
    opened = await home.server.connect(home.database, "pg_sluice leader", options=_CONTROL_OPTIONS)
    async with ControlSession(opened.connection) as control:
        leader = Leader(plpy, home, control)
        await leader.run(seconds)


class Leader:
    """What the tasks of the leader share."""

    def __init__(self, plpy: Plpy, home: Home, control: ControlSession) -> None:
        self._plpy = plpy
        self.home = home
        self.server = home.server
        self.control = control
        self.epoch = 0
        self.version = ""
        self.limit = 0
        self.settings: dict[str, Any] = {}
        self.cluster_settings: dict[str, Any] = {}
        self.members: dict[int, Name] = {}
        self.pool: Pool
        self.upkeep = Upkeep(self)
        self._tasks: asyncio.TaskGroup
        self._schedulers: dict[int, tuple[Scheduler, asyncio.Task[None]]] = {}
        self._news = asyncio.Event()
        self._over = asyncio.Event()
        self._connected: set[int] = set()
        self._guests = asyncio.Semaphore(_GUESTS)
        self._interrupting: set[asyncio.Task[None]] = set()
        self._stuck = 0
        """Runs that nothing can end: the leader does not wait for them when it ends itself."""

    async def run(self, seconds: float) -> None:
        """Takes the lease and leads until the term is over, or ends at once if another leads."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            self.pool = Pool(self, tasks.create_task)
            background = [tasks.create_task(procedure.interrupts(self._plpy))]
            await self._load_settings()
            if await self._acquire():
                background.append(tasks.create_task(self._keep_lease()))
                await self._look_around()
                background.append(tasks.create_task(self._control_loop()))
                background.append(tasks.create_task(self._listen()))
                background.append(tasks.create_task(self.pool.dispatch()))
                if seconds > 0:
                    background.append(tasks.create_task(self.upkeep.run()))
                await (self._term(seconds) if seconds > 0 else self._single_pass())
                await self._finish_runs()
                background.extend(task for _, task in self._schedulers.values())
                background.extend(self._interrupting)
            for task in background:
                task.cancel()
        if self.epoch:
            await self.control.row("release_lease", epoch=self.epoch)

    def settings_of(self, db_oid: int) -> dict[str, Any]:
        """The settings in force in a member, or the server's while they are not known."""
        entry = self._schedulers.get(db_oid)
        return (entry and entry[0].settings) or self.settings

    def turn_to_connect(self, db_oid: int) -> contextlib.AbstractAsyncContextManager[Any]:
        """Schedulers whose database keeps no connection connect few at a time."""
        return contextlib.nullcontext() if self.keeps_connection(db_oid) else self._guests

    def keeps_connection(self, db_oid: int) -> bool:
        """Whether a member's scheduler may stay connected between ticks."""
        return db_oid in self._connected

    def serves(self, db_oid: int) -> bool:
        """Whether runs of a database may be claimed: it is a member, and its scheduler is well."""
        entry = self._schedulers.get(db_oid)
        return db_oid in self.members and entry is not None and entry[0].well

    def run_ended(self, db_oid: int, pgt_id: int) -> None:
        """Tells the scheduler of a database, and upkeep, that a run has ended."""
        self.upkeep.run_ended()
        if entry := self._schedulers.get(db_oid):
            entry[0].run_ended(pgt_id)

    async def settle_lost(self, db_oid: int, failure: Failure) -> None:
        """Has a run recorded whose session is gone; where nobody schedules any more, forgets it."""
        entry = self._schedulers.get(db_oid)
        if entry is not None and not entry[1].done():
            entry[0].settle(failure)
        else:
            await self.finish(failure.run.run_id)

    def warn(self, message: str) -> None:
        """Tells the server's log what can be told nowhere else."""
        server.warn(self._plpy, message)

    def interrupt(self, pid: int, since: datetime, terminate: bool) -> None:
        """Has a backend cancelled or terminated whose run, begun at `since`, is overdue."""
        interrupting = self._interrupt(pid, since, terminate)
        try:
            task = self._tasks.create_task(interrupting)
        except RuntimeError:
            # The leader is coming to its end, and ends the sessions of its runs with it.
            interrupting.close()
            return
        self._interrupting.add(task)
        task.add_done_callback(self._interrupting.discard)

    async def _interrupt(self, pid: int, since: datetime, terminate: bool) -> None:
        backend_start = await self.control.value(
            "interrupt_backend", epoch=self.epoch, pid=pid, since=since, terminate=terminate
        )
        if not terminate or backend_start is None:
            return
        await asyncio.sleep(_STUCK_SECONDS)
        stuck = False
        # Again and again, since the alert of a database is closed when the first of several ends.
        while await self.control.value(
            "report_stuck_backend", epoch=self.epoch, pid=pid, backend_start=backend_start
        ):
            self._stuck += not stuck
            stuck = True
            await asyncio.sleep(_STUCK_SECONDS)
        self._stuck -= stuck

    async def finish(self, run_id: Any) -> None:
        """Takes a run out of the queue."""
        await self.control.row(
            "next_run", epoch=self.epoch, finished=run_id, db_oid=None, slot=None
        )

    async def _acquire(self) -> bool:
        """Takes the lease; where another holds it, waits for one TTL and tries once more."""
        ttl = self.settings["lease_ttl"]
        for attempt in (1, 2):
            acquired, epoch, wait = await self.control.one(
                "acquire_lease", pid=self.home.pid, backend_start=self.home.backend_start, ttl=ttl
            )
            if acquired:
                self.epoch = self.control.epoch = epoch
                return True
            if attempt == 1:
                await asyncio.sleep(min(ttl, wait) + 0.05)
        return False

    async def _keep_lease(self) -> None:
        while True:
            await asyncio.sleep(self.settings["lease_ttl"] / _LEASE_RENEWALS)
            await self.control.row("renew_lease", epoch=self.epoch, ttl=self.settings["lease_ttl"])

    async def _load_settings(self) -> None:
        (
            self.settings,
            self.cluster_settings,
            self.limit,
            self.version,
            upkeep_is_due,
        ) = await self.control.one("control_state")
        # As a member it is its scheduler that sees to it.
        if upkeep_is_due and self.home.database not in self.members.values():
            self.upkeep.want(CONTROL)
        if self.version != __version__:
            # The extension was updated: the next leader loads the package of that version.
            self._over.set()

    async def _control_loop(self) -> None:
        while True:
            await woken(self._news, self.settings["scheduler_interval"])
            await self._load_settings()
            self.pool.shrink()
            await self._look_around()
            await announce(self.control)

    async def _look_around(self) -> None:
        """Members that came and went, what former leaders left, and who has work."""
        self.members = {
            db_oid: Name(database, dbname)
            for db_oid, database, dbname in await self.control.rows("members", epoch=self.epoch)
        }
        most = int(self.settings["max_scheduler_connections"])
        self._connected = set(sorted(self.members)[:most])
        for db_oid in [db_oid for db_oid, (_, task) in self._schedulers.items() if task.done()]:
            del self._schedulers[db_oid]
        for db_oid in self._schedulers.keys() - self.members.keys():
            # It ends by itself, with the run that it may have in serial mode.
            self._schedulers[db_oid][0].wake()
            self.pool.retire(db_oid)
            self.upkeep.members_left()
        for db_oid in self.members.keys() - self._schedulers.keys():
            scheduler = Scheduler(self, db_oid)
            task = self._tasks.create_task(scheduler.run())
            self._schedulers[db_oid] = (scheduler, task)
        if not self.members:
            self._over.set()
        await self.control.row("evict_former_sessions", epoch=self.epoch)
        await self.control.row("reconcile_slots", epoch=self.epoch)
        await self._settle_orphans()
        for db_oid, runs in await self.control.rows("waiting_databases"):
            if self.limit > 0:
                self.pool.recount(db_oid, runs)
            elif db_oid in self._schedulers:
                self._schedulers[db_oid][0].wake()

    async def _settle_orphans(self) -> None:
        known = {
            failure.run.run_id
            for scheduler, _ in self._schedulers.values()
            for failure in scheduler.lost
        }
        for run_id, db_oid, pgt_id, name, due_at, attempt, started_at in await self.control.rows(
            "orphaned_runs", epoch=self.epoch
        ):
            if run_id not in known:
                run = Run(run_id, pgt_id, name, due_at, attempt, None, None)
                await self.settle_lost(db_oid, _crashed(run, started_at))

    async def _listen(self) -> None:
        """Wake-ups from the control database, over a session of their own.

        Without it the leader is slower to notice, and no worse: it is made again until it stands.
        """
        while True:
            with contextlib.suppress(psycopg.Error):
                async with await self.server.connect(
                    self.home.database, "pg_sluice listener", options=_CONTROL_OPTIONS
                ) as session:
                    await session.listen()
                    # What was told while nobody listened.
                    self._news.set()
                    wake = asyncio.Event()
                    while session.listens:
                        await session.rest(wake, 60)
                        session.take_notified()
                        # Notices a lost connection.
                        await session.connection.execute("")
                        self._news.set()
            await asyncio.sleep(_LISTEN_AGAIN_SECONDS)

    async def _term(self, seconds: float) -> None:
        """Waits until the term is over, and goes on claiming while runs take long that are left."""
        loop = asyncio.get_running_loop()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._over.wait()
        turn = loop.time()
        # A leader of another version than the extension claims nothing more in any case.
        while self._in_progress() and self.version == __version__:
            if loop.time() < turn:
                pass
            elif not self.pool.claiming:
                # What had just begun takes long too. Who waits is looked up anew.
                self.pool.claiming = True
                self._news.set()
                turn = loop.time() + _TRY_TO_END_SECONDS
            elif not self._takes_long():
                self.pool.stop_claiming()
                turn = loop.time() + _LONG_RUN_SECONDS
            await asyncio.sleep(_END_POLL_SECONDS)

    def _in_progress(self) -> bool:
        return len(self.pool.runs) > self._stuck or self.pool.claims > 0

    def _takes_long(self) -> bool:
        now = asyncio.get_running_loop().time()
        begun = self.pool.runs.values()
        return sum(now - since > _LONG_RUN_SECONDS for since in begun) > self._stuck

    async def _single_pass(self) -> None:
        await asyncio.gather(*(s.ticked.wait() for s, _ in self._schedulers.values()))
        while self.pool.runs or any(
            self.serves(db_oid) for db_oid, _ in await self.control.rows("waiting_databases")
        ):
            await asyncio.sleep(_END_POLL_SECONDS)
        await self.upkeep.one_round()

    async def _finish_runs(self) -> None:
        self.pool.stop_claiming()
        while self._in_progress():
            await asyncio.sleep(_END_POLL_SECONDS)
        # A session that is slow to go leaves its slot to the next leader's reconciliation.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_SLOTS_SECONDS):
                while not self.pool.empty:
                    await asyncio.sleep(_END_POLL_SECONDS)
        self.pool.abandon()


def _crashed(run: Run, started_at: datetime) -> Failure:
    return Failure(
        run,
        started_at,
        outcomes.WORKER_CRASHED,
        {
            "message": "the run's session ended without leaving an outcome",
        },
    )
