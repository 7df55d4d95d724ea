"""Workers: who gets a slot, and the life of a session that holds one."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

import psycopg

from .. import connection
from ..connection import Name
from ..core import remediation, share
from .executor import Executor, Run, Unrecorded
from .session import StartTimeout

if TYPE_CHECKING:
    from .process import Leader
    from .session import Session

_GONE_POLL_SECONDS = 0.01
_GONE_LIMIT_SECONDS = 5.0
_SPAWN_BACKOFF_SECONDS = (1.0, 15.0)
"""Wait before a database is tried again in which no worker could be started: first and longest."""


class Pool:
    """All workers of the leader.

    `backlog` counts, by database, runs that may be there to claim. It is a hint: a claim that finds
    nothing sets it to zero, and news of queued runs raises it. What runs where is in the tables.
    """

    def __init__(
        self,
        leader: Leader,
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
    ) -> None:
        self._leader = leader
        self._spawn = spawn
        self._workers: set[asyncio.Task[None]] = set()
        self.backlog: Counter[int] = Counter()
        self.held: Counter[int] = Counter()
        self._offers: Counter[int] = Counter()
        self._served: Counter[int] = Counter()
        self.runs: dict[Any, float] = {}
        """Runs in progress and the loop's time of their start."""
        self.claims = 0
        """Claims under way: what they give is about to run."""
        self.claiming = True
        self._starting: Counter[int] = Counter()
        self._idle: defaultdict[int, deque[asyncio.Future[bool]]] = defaultdict(deque)
        self._refused_until: dict[int, float] = {}
        self._changed = asyncio.Event()

    def recount(self, db_oid: int, runs: int) -> None:
        """Says how many runs of a database the queue has to claim."""
        self.backlog[db_oid] = 0
        self.offer(db_oid, runs)

    def offer(self, db_oid: int, runs: int = 1) -> None:
        """Says that a database may have that many more runs to claim."""
        self._offers[db_oid] += 1
        idle = self._idle[db_oid]
        while runs > 0 and idle:
            runs -= _wake(idle.popleft(), goes_on=True)
        if runs > 0:
            self.backlog[db_oid] += runs
            self._changed.set()

    def shrink(self) -> None:
        """Ends idle workers that a lowered limit has no room for."""
        surplus = self.held.total() - self._leader.limit
        for idle in self._idle.values():
            while surplus > 0 and idle:
                surplus -= _wake(idle.popleft(), goes_on=False)

    def stop_claiming(self) -> None:
        """No run is claimed while `claiming` is false; those in progress end."""
        self.claiming = False
        for db_oid in list(self._idle):
            self.retire(db_oid)

    def retire(self, db_oid: int) -> None:
        """Ends the idle workers of a database."""
        self.backlog[db_oid] = 0
        idle = self._idle[db_oid]
        while idle:
            _wake(idle.popleft(), goes_on=False)

    def abandon(self) -> None:
        """Leaves the slots that are still held to the next leader."""
        for worker in self._workers:
            worker.cancel()

    @property
    def empty(self) -> bool:
        """No worker holds a slot."""
        return self.held.total() == 0

    async def dispatch(self) -> None:
        """Gives slots to the databases that wait, until it is cancelled."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            while self.claiming and self._leader.limit > 0:
                wanting = {db_oid for db_oid in self.backlog if self._wants(db_oid)}
                db_oid = share.next_database(wanting, self.held, self._served)
                if db_oid is None:
                    break
                # One that has left meanwhile leaves the slot to the others.
                if not await self._start_worker(db_oid) and self._wants(db_oid):
                    self._borrow_back(db_oid)
                    break

    def _wants(self, db_oid: int) -> bool:
        return self.backlog[db_oid] > self._starting[db_oid] and self._can_be_served(db_oid)

    def _can_be_served(self, db_oid: int) -> bool:
        now = asyncio.get_running_loop().time()
        return self._leader.serves(db_oid) and self._refused_until.get(db_oid, 0) <= now

    def _waiting(self) -> set[int]:
        return {
            db_oid
            for db_oid, runs in self.backlog.items()
            if runs > 0 and self._can_be_served(db_oid)
        }

    def _borrow_back(self, db_oid: int) -> None:
        """No slot is free: an idle worker of another database ends, the richest one's first."""
        for other in sorted(self._idle, key=lambda o: self.held[o], reverse=True):
            while other != db_oid and self._idle[other]:
                if _wake(self._idle[other].popleft(), goes_on=False):
                    return

    async def _start_worker(self, db_oid: int) -> bool:
        # It may be no member any more when the slot is there: then its worker claims nothing.
        database = self._leader.members[db_oid]
        row = await self._leader.control.row(
            "reserve_slot", epoch=self._leader.epoch, db_oid=db_oid
        )
        if row is None or row[0] is None:
            return False
        slot, nonce, application_name = row
        self.held[db_oid] += 1
        self._served[db_oid] = max(self._served.values(), default=0) + 1
        self._starting[db_oid] += 1
        worker = self._spawn(self._work(db_oid, database, slot, nonce, application_name))
        self._workers.add(worker)
        worker.add_done_callback(self._workers.discard)
        return True

    async def _work(
        self, db_oid: int, database: Name, slot: int, nonce: Any, application_name: str
    ) -> None:
        """The life of a worker, from a reserved slot until the slot is free again."""
        lost: Unrecorded | None = None
        session = None
        try:
            session = await self._connect(db_oid, database, nonce, application_name)
        except StartTimeout as late:
            self._starting[db_oid] -= 1
            await self._refuse(db_oid, late)
            # The slot stays reserved for as long as there may be a backend that holds it.
            await late.gone()
        except psycopg.OperationalError as refused:
            self._starting[db_oid] -= 1
            await self._refuse(db_oid, refused)
        else:
            self._starting[db_oid] -= 1
        try:
            if session is not None:
                await self._serve(db_oid, database, slot, session)
        except Unrecorded as found:
            lost = found
        finally:
            if session is not None:
                session.close()
        await self._free(nonce)
        self.held[db_oid] -= 1
        if lost is not None:
            # Its backend is gone now, so its history is final.
            self.runs.pop(lost.failure.run.run_id, None)
            await self._leader.settle_lost(db_oid, lost.failure)
            self.offer(db_oid)
        self._changed.set()

    async def _connect(
        self, db_oid: int, database: Name, nonce: Any, application_name: str
    ) -> Session | None:
        """The session of a reserved slot, which is live then; None when the slot is gone."""
        leader = self._leader
        session = await leader.server.connect(
            database,
            application_name,
            seconds=leader.settings["worker_start_timeout"],
        )
        try:
            try:
                pid, backend_start, database_oid = await session.one("identity")
            except psycopg.Error as error:
                raise psycopg.OperationalError(str(error)) from error
            if database_oid != db_oid:
                raise psycopg.OperationalError("another database has its name")
            live = await leader.control.value(
                "activate_slot",
                epoch=leader.epoch,
                nonce=nonce,
                pid=pid,
                backend_start=backend_start,
            )
        except BaseException:
            session.close()
            raise
        if not live:
            session.close()
            return None
        return session

    async def _refuse(self, db_oid: int, error: psycopg.Error) -> None:
        """Counts a worker that did not come about and leaves its database alone for a while."""
        failures = await self._leader.control.value(
            "record_spawn_failure",
            epoch=self._leader.epoch,
            db_oid=db_oid,
            error=connection.reason(error),
        )
        first, longest = _SPAWN_BACKOFF_SECONDS
        pause = remediation.backoff_seconds(failures or 1, first, longest, 0)
        loop = asyncio.get_running_loop()
        self._refused_until[db_oid] = loop.time() + pause
        loop.call_later(pause, self._changed.set)

    async def _serve(self, db_oid: int, database: Name, slot: int, session: Session) -> None:
        leader = self._leader
        executor = Executor(leader.server, database, session, leader.epoch, leader.interrupt)
        finished: Any = None
        # Whoever is given a slot runs something with it before anybody else's turn comes.
        goes_on = self._may_claim(db_oid)
        while True:
            offers = self._offers[db_oid]
            run = await self.claim(finished, db_oid if goes_on else None, slot)
            if run is not None:
                finished = await self._execute(db_oid, executor, run)
                goes_on = (
                    not session.lost and self._may_claim(db_oid) and not self._must_yield(db_oid)
                )
            elif not goes_on:
                return
            else:
                finished = None
                # What was offered while the claim was under way, it may not have seen.
                if self._offers[db_oid] == offers and not await self._rest(db_oid, session):
                    return
                goes_on = self._may_claim(db_oid)

    async def claim(self, finished: Any, db_oid: int | None, slot: int | None) -> Run | None:
        """Finishes a run and claims the next of a database, which is in progress then."""
        self.claims += 1
        try:
            row = await self._leader.control.row(
                "next_run",
                epoch=self._leader.epoch,
                finished=finished,
                db_oid=db_oid,
                slot=slot,
            )
            if row is None:
                return None
            run = Run(*row)
            self.runs[run.run_id] = asyncio.get_running_loop().time()
            return run
        finally:
            self.claims -= 1

    async def _execute(self, db_oid: int, executor: Executor, run: Run) -> Any:
        """Runs a claimed run; gives its run_id, which is to be finished."""
        self.backlog[db_oid] = max(0, self.backlog[db_oid] - 1)
        await executor.execute(run, self._leader.settings_of(db_oid))
        del self.runs[run.run_id]
        self._leader.run_ended(db_oid, run.pgt_id)
        return run.run_id

    def _may_claim(self, db_oid: int) -> bool:
        return self.claiming and self._leader.serves(db_oid)

    def _must_yield(self, db_oid: int) -> bool:
        return share.must_yield(
            db_oid,
            self._waiting(),
            self.held,
            self._leader.limit,
            int(self._leader.settings["database_quota"]),
        )

    async def _rest(self, db_oid: int, session: Session) -> bool:
        """Waits for work; false when the worker is to end, also since its session has ended."""
        if not self._may_claim(db_oid):
            # Who ended the idle ones has not seen it.
            return False
        self.backlog[db_oid] = 0
        woken: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._idle[db_oid].append(woken)
        if self._waiting():
            # Somebody may wait for the slot of a worker that has nothing to do.
            self._changed.set()

        def give_up() -> None:
            _wake(woken, goes_on=False)

        # Whoever comes first decides: a run that was offered is not left to nobody.
        idle = asyncio.get_running_loop().call_later(
            self._leader.settings["worker_idle_timeout"], give_up
        )
        try:
            # A resting session is sent nothing but its end.
            with session.watched(give_up):
                return await woken
        finally:
            idle.cancel()

    async def _free(self, nonce: Any) -> None:
        """Gives the slot back once the backend is gone; after a while reconciliation has to."""
        loop = asyncio.get_running_loop()
        limit = loop.time() + _GONE_LIMIT_SECONDS
        while not await self._leader.control.value(
            "release_slot", epoch=self._leader.epoch, nonce=nonce
        ):
            if loop.time() > limit:
                return
            await asyncio.sleep(_GONE_POLL_SECONDS)


def _wake(woken: asyncio.Future[bool], *, goes_on: bool) -> bool:
    """Wakes a resting worker; false when its rest is over already."""
    if woken.done():
        return False
    woken.set_result(goes_on)
    return True
