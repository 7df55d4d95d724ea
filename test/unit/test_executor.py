"""A session that a job has made unusable: nobody uses it any more."""

from __future__ import annotations

import asyncio
import uuid
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any, cast

import psycopg

from pg_sluice.leader.executor import Executor, Run
from pg_sluice.leader.session import Server, Session

SETTINGS = {"lock_timeout": 5, "refresh_timeout": 300, "refresh_work_mem": 64 * 1024**2}


class StubSession:
    """Performs any run, and can't be cleaned: somebody cancels whatever it does, say."""

    def __init__(self) -> None:
        pgconn = SimpleNamespace(backend_pid=1)
        self.connection = SimpleNamespace(execute=self._execute, prepare_threshold=5, pgconn=pgconn)
        self.statements: list[str] = []
        self.lost = False

    async def _execute(self, *_: object) -> None:
        pass

    async def one(self, name: str, **_: object) -> tuple[Any, ...]:
        self.statements.append(name)
        return "succeeded", 10

    async def row(self, name: str, **_: object) -> None:
        self.statements.append(name)
        if name == "clean_session":
            raise psycopg.errors.QueryCanceled

    def close(self) -> None:
        self.lost = True


def test_session_that_can_not_be_cleaned_is_closed() -> None:
    """Otherwise the next owner's run would fail for what the last one's left."""
    session = StubSession()

    async def execute() -> None:
        executor = Executor(
            cast("Server", None), "app", cast("Session", session), 1, lambda *_: None
        )
        run = Run(uuid.uuid4(), 1, "job", datetime.now(UTC), 1, None, {"job": True})
        await executor.execute(run, SETTINGS)

    asyncio.run(execute())
    assert session.statements == ["perform", "reset_statement_timeout", "clean_session"]
    assert session.lost
