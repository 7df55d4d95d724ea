"""Running one claimed run on a session: the one path, a worker's or the scheduler's own."""

from __future__ import annotations

import contextlib
import random
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import psycopg
from psycopg import sql
from psycopg.types.json import Jsonb

from .. import connection
from ..core import outcomes, remediation
from ..core.outcomes import Outcome
from .session import Server, Session

Limits = dict[str, sql.Literal]
"""Server settings that bound a run."""


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


class SessionLost(Exception):
    """The session of a run can't tell its end; whether it committed is for history to say."""

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


class Executor:
    """Runs claimed runs on one session of a member database."""

    def __init__(self, server: Server, database: str, session: Session, epoch: int) -> None:
        self._server = server
        self._epoch = epoch
        self._database = database
        self.session = session
        # Statements by name could be replaced by an owner's SQL, and are gone after cleaning.
        session.connection.prepare_threshold = None
        self._owner: int | None = None
        """Whose SQL the session has run since it was clean."""
        self._job_ran = False

    async def execute(self, run: Run, settings: dict[str, Any]) -> None:
        """Runs it and records how it ended. Raises SessionLost when the session ended."""
        started, started_at = time.monotonic(), datetime.now(UTC)
        options = run.options or {}
        deadline = float(options.get("refresh_timeout", settings["refresh_timeout"]))
        limits = {
            "lock_timeout": _milliseconds(options.get("lock_timeout", settings["lock_timeout"])),
            "statement_timeout": _milliseconds(deadline),
            "work_mem": sql.Literal(f"{max(64, int(settings['refresh_work_mem']) // 1024)}kB"),
        }
        try:
            if options.get("top_level"):
                await self._execute_top_level(run, started_at, limits)
            else:
                await self._execute_in_transaction(run, limits)
        except psycopg.Error as error:
            outcome = outcomes.classify(error.sqlstate, time.monotonic() - started, deadline)
            failure = Failure(run, started_at, outcome, self._error_record(error, outcome))
            try:
                await self.session.connection.execute("ROLLBACK")
                await record_failure(self.session, failure, settings)
            except psycopg.Error:
                raise SessionLost(failure) from error
        if self._job_ran:
            # At once: what it set could end the session while it rests. A session that is lost here
            # has its run on record, and takes no other.
            with contextlib.suppress(psycopg.Error):
                await self.clean()

    async def _execute_in_transaction(self, run: Run, limits: Limits) -> None:
        session = self.session
        # In a message of their own: a statement_timeout does nothing for the one that sets it.
        # A refresh and what it puts on record about its sources see one snapshot. Two of one node
        # meet in the node's row, and the later one fails and is tried again.
        is_job = (run.options or {}).get("job", False)
        isolation = "READ COMMITTED" if is_job else "REPEATABLE READ"
        begin = sql.SQL(f"BEGIN ISOLATION LEVEL {isolation}; ") + _set("LOCAL", limits)
        await session.connection.execute(begin)
        # From here on the owner's SQL may have been there, however the run ends.
        self._job_ran = is_job
        outcome, owner = await self._perform(run)
        if outcome == "unclean":
            await session.connection.execute("ROLLBACK")
            await self.clean()
            await session.connection.execute(begin)
            self._job_ran = is_job
            outcome, owner = await self._perform(run)
        await session.connection.execute(
            "COMMIT"
            if owner is None
            else sql.SQL("SELECT _sluice.seal({}); COMMIT").format(sql.Literal(owner))
        )
        self._owner = owner

    async def _perform(self, run: Run) -> tuple[str, int | None]:
        outcome, owner = await self.session.one("perform", **run.key, session_owner=self._owner)
        return outcome, owner

    async def _execute_top_level(self, run: Run, started_at: datetime, limits: Limits) -> None:
        row = await self.session.row(
            "top_level_command",
            run_id=run.run_id,
            pgt_id=run.pgt_id,
            due_at=run.due_at,
            attempt=run.attempt,
        )
        if row is None:
            return
        command, search_path, owner, is_superuser = row
        # A session of its own: the command can leave anything behind.
        async with await self._server.connect(
            self._database,
            f"pg_sluice job {self._epoch}",
            role=None if is_superuser else owner,
        ) as session:
            if is_superuser:
                await session.connection.execute(
                    sql.SQL("SET SESSION AUTHORIZATION {}").format(sql.Identifier(owner))
                )
            await session.connection.execute(_set("SESSION", limits))
            await session.connection.execute(
                "SELECT pg_catalog.set_config('search_path', %s, false)", [search_path]
            )
            await session.connection.execute(command.encode(), prepare=False)
        await self.session.row("record_top_level_run", **run.key, started_at=started_at)

    async def clean(self) -> None:
        """Leaves nothing of the runs so far in the session; LISTEN goes too."""
        await self.session.row("clean_session")
        self._owner = None
        self._job_ran = False

    def _error_record(self, error: psycopg.Error, outcome: Outcome) -> dict[str, Any]:
        return {
            "outcome": outcome.name,
            "sqlstate": error.sqlstate,
            "message": error.diag.message_primary or connection.reason(error),
            "detail": error.diag.message_detail,
            "context": error.diag.context,
            "pid": self.session.connection.pgconn.backend_pid if not self.session.lost else None,
        }


async def record_failure(session: Session, failure: Failure, settings: dict[str, Any]) -> None:
    """Records a failed attempt in its member database, with the retry that the policy gives it."""
    failures = await session.value("failures", pgt_id=failure.run.pgt_id)
    retry = remediation.retry_seconds(
        failure.outcome,
        (failures or 0) + 1,
        int(settings["max_consecutive_errors"]),
        settings["retry_backoff_base"],
        settings["retry_backoff_cap"],
        random.random(),  # noqa: S311 - jitter, no secret
    )
    await session.row(
        "record_failure",
        **failure.run.key,
        started_at=failure.started_at,
        error=Jsonb(failure.error),
        counts=failure.outcome.counts,
        retry_seconds=retry,
    )


def _milliseconds(seconds: float) -> sql.Literal:
    return sql.Literal(f"{max(1, round(seconds * 1000))}ms")


def _set(scope: str, limits: Limits) -> sql.Composed:
    return sql.SQL("; ").join(
        sql.SQL("SET {} {} = {}").format(sql.SQL(scope), sql.Identifier(name), value)
        for name, value in limits.items()
    )
