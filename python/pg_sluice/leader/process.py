"""The leader process: from `CALL sluice.run()` to its end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from datetime import datetime
from typing import Any

import psycopg

from .. import __version__, connection
from ..backend.entry import server_error
from ..backend.plpy_types import Plpy, rows
from ..core import errors, outcomes
from ..core.errors import SluiceError
from .executor import Failure, Run
from .pool import Pool
from .scheduler import Scheduler
from .session import Server, Session

_INTERRUPT_SECONDS = 0.1
_LEASE_RENEWALS = 3
_LONG_RUN_SECONDS = 1.0
_END_POLL_SECONDS = 0.02
_SLOTS_SECONDS = 5.0
_GUESTS = 4
"""Schedulers at a time beyond max_scheduler_connections."""
_CONTROL_OPTIONS = "-c synchronous_commit=off -c DateStyle=ISO"


def lead(plpy: Plpy, seconds: float) -> str:
    """Leads for that many seconds (0: one pass). Gives the JSON that `_sluice.unwrap` takes."""
    # What psycopg would warn about on stderr, which is the server's log, reaches us as errors.
    logging.getLogger("psycopg").addHandler(logging.NullHandler())
    loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(_lead(plpy, seconds))
    except BaseExceptionGroup as group:
        return _error_record(plpy, _first(group))
    except Exception as error:  # noqa: BLE001 - every end becomes a record with its own SQLSTATE
        return _error_record(plpy, error)
    finally:
        loop.close()
    return json.dumps({"value": None})


async def _lead(plpy: Plpy, seconds: float) -> None:
    (where,) = rows(
        plpy,
        "SELECT pg_catalog.current_setting('cron.database_name', true) AS control,"
        " pg_catalog.current_database()::text AS database,"
        " pg_catalog.current_setting('unix_socket_directories') AS sockets,"
        " pg_catalog.current_setting('port') AS port,"
        " pg_catalog.current_setting('server_version_num') AS version,"
        " current_user::text AS role, a.pid,"
        " pg_catalog.to_json(a.backend_start) #>> '{}' AS backend_start"
        " FROM pg_catalog.pg_stat_activity AS a WHERE a.pid = pg_catalog.pg_backend_pid()",
    )
    plpy.commit()
    if where["control"] is None:
        raise errors.no_control_database()
    if where["control"] != where["database"]:
        raise errors.not_control_database(where["control"], where["database"])
    server = Server(where["sockets"], where["port"], where["role"], int(where["version"]))
    async with await server.connect(
        where["control"], "pg_sluice leader", options=_CONTROL_OPTIONS
    ) as control:
        leader = Leader(plpy, server, where["control"], control)
        await leader.run(seconds, where["pid"], where["backend_start"])


class Leader:
    """What the tasks of the leader share."""

    def __init__(self, plpy: Plpy, server: Server, database: str, control: Session) -> None:
        self._plpy = plpy
        self._database = database
        self.server = server
        self.control = control
        self.epoch = 0
        self.version = ""
        self.limit = 0
        self.settings: dict[str, Any] = {}
        self.cluster_settings: dict[str, Any] = {}
        self.members: dict[int, str] = {}
        self.pool: Pool
        self._tasks: asyncio.TaskGroup
        self._schedulers: dict[int, tuple[Scheduler, asyncio.Task[None]]] = {}
        self._news = asyncio.Event()
        self._over = asyncio.Event()
        self._connected: set[int] = set()
        self._guests = asyncio.Semaphore(_GUESTS)

    async def run(self, seconds: float, pid: int, backend_start: str) -> None:
        """Takes the lease and leads until the term is over, or ends at once if another leads."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            self.pool = Pool(self, tasks.create_task)
            background = [tasks.create_task(self._interrupts())]
            await self._load_settings()
            if await self._acquire(pid, backend_start):
                background.append(tasks.create_task(self._keep_lease()))
                await self._look_around()
                background.append(tasks.create_task(self._control_loop()))
                background.append(tasks.create_task(self._listen()))
                background.append(tasks.create_task(self.pool.dispatch()))
                await (self._term(seconds) if seconds > 0 else self._single_pass())
                await self._finish_runs()
                background.extend(task for _, task in self._schedulers.values())
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
        """Tells the scheduler of a database that a run has ended."""
        if entry := self._schedulers.get(db_oid):
            entry[0].run_ended(pgt_id)

    async def settle_lost(self, db_oid: int, failure: Failure) -> None:
        """Has a run recorded whose session is gone; where nobody schedules any more, forgets it."""
        entry = self._schedulers.get(db_oid)
        if entry is not None and not entry[1].done():
            entry[0].settle(failure)
        else:
            await self.finish(failure.run.run_id)

    async def finish(self, run_id: Any) -> None:
        """Takes a run out of the queue."""
        await self.control.row(
            "next_run", epoch=self.epoch, finished=run_id, db_oid=None, slot=None
        )

    async def _interrupts(self) -> None:
        """Cancel and terminate are seen inside SPI only; the commit lets go of the snapshot."""
        while True:
            self._plpy.execute("SELECT 1")
            self._plpy.commit()
            await asyncio.sleep(_INTERRUPT_SECONDS)

    async def _acquire(self, pid: int, backend_start: str) -> bool:
        """Takes the lease; where another holds it, waits for one TTL and tries once more."""
        ttl = self.settings["lease_ttl"]
        for attempt in (1, 2):
            acquired, epoch, wait = await self.control.one(
                "acquire_lease", pid=pid, backend_start=backend_start, ttl=ttl
            )
            if acquired:
                self.epoch = epoch
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
        ) = await self.control.one("control_state")
        if self.version != __version__:
            # The extension was updated: the next leader loads the package of that version.
            self._over.set()

    async def _control_loop(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.settings["scheduler_interval"]):
                    await self._news.wait()
            self._news.clear()
            await self._load_settings()
            self.pool.shrink()
            await self._look_around()

    async def _look_around(self) -> None:
        """Members that came and went, what former leaders left, and who has work."""
        self.members = dict(await self.control.rows("members", epoch=self.epoch))
        most = int(self.settings["max_scheduler_connections"])
        self._connected = set(sorted(self.members)[:most])
        for db_oid in [db_oid for db_oid, (_, task) in self._schedulers.items() if task.done()]:
            del self._schedulers[db_oid]
        for db_oid in self._schedulers.keys() - self.members.keys():
            # It ends by itself, with the run that it may have in serial mode.
            self._schedulers[db_oid][0].wake()
            self.pool.retire(db_oid)
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
        for run_id, db_oid, pgt_id, due_at, attempt, started_at in await self.control.rows(
            "orphaned_runs", epoch=self.epoch
        ):
            if run_id not in known:
                run = Run(run_id, pgt_id, "", due_at, attempt, None, None)
                await self.settle_lost(db_oid, _crashed(run, started_at))

    async def _listen(self) -> None:
        """Wake-ups from the control database, over a session of their own."""
        async with await self.server.connect(
            self._database, "pg_sluice listener", options=_CONTROL_OPTIONS
        ) as session:
            await session.row("listen")
            wake = asyncio.Event()
            while True:
                await session.rest(wake, 60)
                # Reads what came, and notices a lost connection.
                await session.connection.execute("")
                self._news.set()

    async def _term(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        start = loop.time()
        try:
            async with asyncio.timeout(seconds):
                await self._over.wait()
        except TimeoutError:
            while loop.time() < start + 2 * seconds and any(
                loop.time() - since > _LONG_RUN_SECONDS for since in self.pool.runs.values()
            ):
                await asyncio.sleep(_END_POLL_SECONDS)

    async def _single_pass(self) -> None:
        await asyncio.gather(*(s.ticked.wait() for s, _ in self._schedulers.values()))
        while self.pool.runs or any(
            self.serves(db_oid) for db_oid, _ in await self.control.rows("waiting_databases")
        ):
            await asyncio.sleep(_END_POLL_SECONDS)

    async def _finish_runs(self) -> None:
        self.pool.stop_claiming()
        while self.pool.runs or self.pool.claims:
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
            "outcome": outcomes.WORKER_CRASHED.name,
            "message": "the run's session ended without leaving an outcome",
        },
    )


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error of a group that says most: one of the server before one of ours."""
    found = [
        _first(error) if isinstance(error, BaseExceptionGroup) else error
        for error in group.exceptions
    ]
    return min(found, key=lambda error: not isinstance(error, psycopg.Error))


def _error_record(plpy: Plpy, error: BaseException) -> str:
    if isinstance(error, SluiceError):
        record = error
    elif isinstance(error, psycopg.Error):
        record = (
            errors.leadership_lost()
            if error.sqlstate == "SL001"
            else connection.as_sluice_error(error)
        )
    elif isinstance(error, plpy.SPIError):
        record = server_error(error)
    else:
        raise error
    return json.dumps({"error": record.record()})
