"""Running one claimed run on a session: the one path, a worker's or the scheduler's own."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import psycopg
from psycopg import sql
from psycopg.pq import TransactionStatus
from psycopg.types.json import Jsonb

from .. import connection
from ..connection import Name
from ..core import limits, outcomes, remediation
from ..core.limits import Limits
from ..core.outcomes import Outcome
from ..core.texts import shortened
from .session import Server, Session

Interrupt = Callable[[int, datetime, bool], None]
"""Cancels or, if the last argument is true, terminates the backend with that process ID, which
is at that time one of ours."""

_GRACE_SECONDS = 1.0
"""What a run may take beyond its deadline before it is cancelled from outside, and after that again
before its session is terminated."""
_ERROR_BYTES = 65_536
"""What is kept of each text of an error: what a job raises can be of any length."""
_RECORD_SECONDS = 1.0
"""Longest wait for a lock when a failure is recorded: users' open transactions can hold them."""


@dataclass(frozen=True)
class Run:
    """A run as it was claimed."""

    run_id: Any
    pgt_id: int
    name: str
    due_at: datetime
    attempt: int
    reason: str | None
    options: dict[str, Any] | None

    @property
    def key(self) -> dict[str, Any]:
        """The arguments that all functions recording a run take."""
        return {
            "run_id": self.run_id,
            "pgt_id": self.pgt_id,
            "due_at": self.due_at,
            "attempt": self.attempt,
            "reason": self.reason,
        }


class Unrecorded(Exception):
    """A run that failed, and whose session can't record that: it has ended, or waited too long.

    Whether the run of a session that has ended was committed is for history to say.
    """

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.error["message"])
        self.failure = failure


@dataclass(frozen=True)
class Failure:
    """An attempt that failed, ready to be recorded."""

    run: Run
    started_at: datetime
    outcome: Outcome
    error: dict[str, Any]

    def without_texts(self) -> Failure:
        """With a plain message in place of what the error said."""
        return replace(
            self,
            error={
                "sqlstate": self.error.get("sqlstate"),
                "message": "the run failed, and its error could not be recorded",
                "pid": self.error.get("pid"),
            },
        )


class Executor:
    """Runs claimed runs on one session of a member database."""

    def __init__(
        self,
        server: Server,
        database: Name,
        session: Session,
        epoch: int,
        interrupt: Interrupt,
    ) -> None:
        self._server = server
        self._epoch = epoch
        self._database = database
        self._interrupt = interrupt
        self.session = session
        # Statements by name could be replaced by an owner's SQL, and are gone after cleaning.
        session.connection.prepare_threshold = None
        self._owner: int | None = None
        """Whose SQL the session has run since it was clean."""
        self._to_clean = False
        """Whether it is to be clean before its next run, whoever owns that: after a job, and after
        any failure, since a rollback leaves locks and prepared statements."""

    async def execute(self, run: Run, settings: dict[str, Any]) -> None:
        """Runs it and records how it ended; raises Unrecorded when a failure can't be recorded."""
        started_at = datetime.now(UTC)
        options = run.options or {}
        try:
            bounds = limits.limits(options, settings)
        except ValueError as error:
            await self._fail(Failure(run, started_at, outcomes.PERMANENT_ERROR, _unreadable(error)))
            return
        deadline = Deadline(bounds.refresh_timeout, self._interrupt)
        try:
            if options.get("top_level"):
                await self._execute_top_level(run, started_at, bounds, deadline, settings)
            else:
                with deadline.enforced(self.session):
                    await self._execute_in_transaction(run, bounds, settings)
        except psycopg.Error as error:
            outcome = outcomes.classify(error.sqlstate, overdue=deadline.reached)
            await self._fail(Failure(run, started_at, outcome, self._error_record(error)))
        except Exception as error:  # noqa: BLE001 - a fault of ours costs this run, not the leader
            await self._fail(Failure(run, started_at, outcomes.PERMANENT_ERROR, _fault(error)))
        if self._to_clean:
            # What a job set could end the session while it rests. A session that is lost here, or
            # can't be cleaned, has its run on record, and takes no other.
            try:
                await self.clean()
            except psycopg.Error:
                self.session.close()

    async def _fail(self, failure: Failure) -> None:
        try:
            # Where there is none, the server would log a warning.
            if self.session.connection.info.transaction_status != TransactionStatus.IDLE:
                await self.session.connection.execute("ROLLBACK")
            await record_failure(self.session, failure, _RECORD_SECONDS)
        except psycopg.Error as error:
            raise Unrecorded(failure) from error

    async def _execute_in_transaction(
        self, run: Run, bounds: Limits, settings: dict[str, Any]
    ) -> None:
        session = self.session
        options = run.options or {}
        # In a message of their own: a statement_timeout does nothing for the one that sets it.
        # A refresh and what it puts on record about its sources see one snapshot. Two of one node
        # meet in the node's row, and the later one fails and is tried again.
        is_job = options.get("job", False)
        isolation = sql.SQL("READ COMMITTED" if is_job else "REPEATABLE READ")
        begin = sql.SQL("BEGIN ISOLATION LEVEL {}; {}").format(isolation, _set("LOCAL", bounds))
        await session.connection.execute(begin)
        self._to_clean = True
        outcome, owner = await self._perform(run)
        if outcome == "unclean":
            await session.connection.execute("ROLLBACK")
            await self.clean()
            await session.connection.execute(begin)
            self._to_clean = True
            outcome, owner = await self._perform(run)
        if bounds.spares_memory and outcome != "skipped":
            await record_recovery(session, run, bounds, settings)
        await session.connection.execute(
            "COMMIT"
            if owner is None
            else sql.SQL("SELECT _sluice.seal({}); COMMIT").format(sql.Literal(owner))
        )
        if owner is not None:
            # Otherwise the node is gone, and the session is whose it was.
            self._owner = owner
        self._to_clean = is_job

    async def _perform(self, run: Run) -> tuple[str, int | None]:
        outcome, owner = await self.session.one("perform", **run.key, session_owner=self._owner)
        return outcome, owner

    async def _execute_top_level(
        self,
        run: Run,
        started_at: datetime,
        bounds: Limits,
        deadline: Deadline,
        settings: dict[str, Any],
    ) -> None:
        # A fire that is skipped is put on record with this.
        async with self.session.connection.transaction():
            await bound_waits(self.session, bounds.lock_timeout)
            row = await self.session.row(
                "top_level_command",
                run_id=run.run_id,
                pgt_id=run.pgt_id,
                due_at=run.due_at,
                attempt=run.attempt,
            )
        if row is None:
            return
        command, search_path, owner, owner_name, is_superuser, lock_class = row
        # A session of its own: the command can leave anything behind.
        async with await self._server.connect(
            self._database,
            f"pg_sluice job {self._epoch}",
            role=None if is_superuser else owner_name,
        ) as session:
            if is_superuser:
                await session.row("become", owner=owner)
            await session.connection.execute(_set("SESSION", bounds))
            # The lock of the node says who runs it, so that the command can't wait for itself.
            await session.row(
                "begin_top_level_run",
                lock_class=lock_class,
                pgt_id=run.pgt_id,
                search_path=search_path.encode(),
            )
            try:
                with deadline.enforced(session):
                    await session.command(command.encode())
            except psycopg.errors.QueryCanceled:
                # The command may have set a timeout of its own.
                deadline.lower(await _statement_timeout(session))
                raise
        # Somebody's open transaction can hold the node's rows. What can't be recorded in time
        # counts as not done and is done again: such a job is at-least-once.
        async with self.session.connection.transaction():
            await bound_waits(self.session, bounds.lock_timeout)
            await self.session.row("record_top_level_run", **run.key, started_at=started_at)
            if bounds.spares_memory:
                await record_recovery(self.session, run, bounds, settings)

    async def clean(self) -> None:
        """Leaves nothing of the runs so far in the session; LISTEN goes too."""
        # First, so that a timer of the job's that runs out now ends nothing that comes after this.
        await self.session.row("reset_statement_timeout")
        await self.session.row("clean_session")
        self._owner = None
        self._to_clean = False

    def _error_record(self, error: psycopg.Error) -> dict[str, Any]:
        return {
            "sqlstate": error.sqlstate,
            "message": error.diag.message_primary or connection.reason(error),
            "detail": error.diag.message_detail,
            "context": error.diag.context,
            "pid": self.session.connection.pgconn.backend_pid if not self.session.lost else None,
        }


class Deadline:
    """The deadline of a run, kept from outside too: the server's own timer bounds one statement,
    and a function can catch what it raises.
    """

    def __init__(self, seconds: float, interrupt: Interrupt) -> None:
        self._seconds = seconds
        self._interrupt = interrupt
        self._started = time.monotonic()

    @property
    def reached(self) -> bool:
        """Whether the run has had its time."""
        return time.monotonic() - self._started >= self._seconds

    def lower(self, seconds: float | None) -> None:
        """Takes a shorter deadline that the run had set itself."""
        if seconds is not None:
            self._seconds = min(self._seconds, seconds)

    @contextlib.contextmanager
    def enforced(self, session: Session) -> Iterator[None]:
        """Meanwhile cancels what the session does a grace after the deadline, and after another
        grace terminates the session. A session that was interrupted is closed: what was sent may
        reach it late, and must not end another run."""
        pid, since = session.connection.pgconn.backend_pid, datetime.now(UTC)
        loop = asyncio.get_running_loop()
        left = self._started + self._seconds + _GRACE_SECONDS - time.monotonic()
        cancel = loop.call_later(left, self._interrupt, pid, since, False)
        terminate = loop.call_later(left + _GRACE_SECONDS, self._interrupt, pid, since, True)
        try:
            yield
        finally:
            if loop.time() >= cancel.when():
                session.close()
            cancel.cancel()
            terminate.cancel()


async def record_failure(session: Session, failure: Failure, lock_seconds: float) -> None:
    """Records a failed attempt in its member database, with what follows from it.

    Waits no longer than that for a lock, and then raises LockNotAvailable with nothing recorded.
    """
    async with session.connection.transaction():
        await bound_waits(session, lock_seconds)
        row = await session.row("failure_state", pgt_id=failure.run.pgt_id)
        if row is None:
            # The node is gone.
            return
        errors, work_mem, policy = row
        verdict = remediation.judge(
            failure.outcome,
            errors,
            work_mem,
            remediation.Policy(**policy),
            random.random(),  # noqa: S311 - jitter, no secret
        )
        await session.row(
            "record_failure",
            **failure.run.key,
            started_at=failure.started_at,
            error=Jsonb(
                {"outcome": failure.outcome.name}
                | {
                    key: shortened(given, _ERROR_BYTES) if isinstance(given, str) else given
                    for key, given in failure.error.items()
                }
            ),
            verdict=Jsonb(verdict.record()),
        )


async def bound_waits(session: Session, seconds: float) -> None:
    """The longest wait for a lock in the session's transaction."""
    await session.row("bound_waits", lock_timeout=limits.milliseconds(seconds))


async def record_recovery(
    session: Session, run: Run, bounds: Limits, settings: dict[str, Any]
) -> None:
    """Counts a success under a remedy, which ends step by step."""
    work_mem, successes = remediation.after_success(
        bounds.work_mem,
        int((run.options or {}).get("successes", 0)),
        int(settings["refresh_work_mem"]),
        int(settings["recovery_successes"]),
    )
    await session.row("record_recovery", pgt_id=run.pgt_id, work_mem=work_mem, successes=successes)


def _fault(error: Exception) -> dict[str, Any]:
    return {
        "sqlstate": "XX000",
        "message": f"unexpected {type(error).__name__}: {connection.reason(error)}",
    }


async def _statement_timeout(session: Session) -> float | None:
    """The statement_timeout that a session has now, in seconds; None for none."""
    try:
        milliseconds = await session.value("statement_timeout")
    except psycopg.Error:
        # It has ended, or its transaction has failed.
        return None
    return milliseconds / 1000 if milliseconds else None


def _unreadable(error: ValueError) -> dict[str, Any]:
    return {
        "sqlstate": "22023",
        "message": f"stored option can't be read: {error}",
    }


def _set(scope: str, bounds: Limits) -> sql.Composed:
    return sql.SQL("; ").join(
        sql.SQL("SET {} {} = {}").format(sql.SQL(scope), sql.Identifier(name), sql.Literal(value))
        for name, value in bounds.settings().items()
    )
