"""Connections from a user's backend, whose every wait heeds that backend's interrupts.

A cancel, terminate or statement_timeout of the user's session is seen in statements of that session
only. So whatever is waited for here, the start of a connection, a lock, the commit that waits for a
standby, a look at the session goes on in between.

Imports the driver: import it after connection.load_driver().
"""

from __future__ import annotations

import contextlib
import select
import signal
import time
from typing import TYPE_CHECKING, Any, TypeVar

import psycopg
from psycopg import pq
from psycopg.waiting import Ready, Wait

from .. import connection
from .plpy_types import Plpy, check_interrupts

if TYPE_CHECKING:
    from psycopg.abc import PQGen

type_of_result = TypeVar("type_of_result")

_LOOK_SECONDS = 0.05
_END_SECONDS = 0.1


def connect(
    plpy: Plpy, given: dict[str, Any], *, seconds: float = connection.CONNECT_SECONDS
) -> Session:
    """As psycopg.connect(), within that many seconds. Raises psycopg.OperationalError."""
    pgconn = pq.PGconn.connect_start(connection.conninfo(given))
    give_up = time.monotonic() + seconds
    try:
        while (status := pgconn.connect_poll()) != pq.PollingStatus.OK:
            if status == pq.PollingStatus.FAILED:
                raise psycopg.OperationalError(pgconn.get_error_message())
            if time.monotonic() > give_up:
                raise psycopg.errors.ConnectionTimeout("connection timeout expired")
            wanted = Wait.R if status == pq.PollingStatus.READING else Wait.W
            if not _ready(pgconn.socket, wanted, _LOOK_SECONDS):
                check_interrupts(plpy)
    except BaseException:
        pgconn.finish()
        raise
    return Session(plpy, pgconn)


class Session(psycopg.Connection[Any]):
    """A connection that is made."""

    def __init__(self, plpy: Plpy, pgconn: pq.abc.PGconn) -> None:
        pgconn.nonblocking = 1
        super().__init__(pgconn)
        self._plpy = plpy
        self._give_up: float | None = None
        self.autocommit = True
        connection.send_acceptable(self)

    def hurry(self) -> None:
        """All that is left must be done in a moment, whatever interrupts; else the connection is
        closed.
        """
        if self._give_up is None:
            self._give_up = time.monotonic() + _END_SECONDS

    def wait(self, gen: PQGen[type_of_result], *_: Any, **__: Any) -> type_of_result:
        """As the driver has it. An interrupt ends the statement first: none outlives its call, and
        the connection stays usable for what is left to do.
        """
        # A terminated backend is gone with the next look: what it waits for has to be told before.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        try:
            # One that has come before is not among the pending: it ends the backend here, while
            # nothing is sent yet.
            if self._give_up is None:
                check_interrupts(self._plpy)
            return self._run_or_end(gen)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _run_or_end(self, gen: PQGen[type_of_result]) -> type_of_result:
        try:
            return self._run(gen)
        except psycopg.Error:
            raise
        except BaseException:
            self.hurry()
            self._end_statement()
            with contextlib.suppress(psycopg.Error):
                self._run(gen)
            raise

    def _run(self, gen: PQGen[type_of_result]) -> type_of_result:
        try:
            wanted = next(gen)
            while True:
                ready = _ready(self.pgconn.socket, wanted, self._patience())
                if ready:
                    wanted = gen.send(ready)
                else:
                    self._look()
        except StopIteration as end:
            result: type_of_result = end.value
            return result

    def _patience(self) -> float:
        if self._give_up is None:
            return _LOOK_SECONDS
        return max(0.0, min(_LOOK_SECONDS, self._give_up - time.monotonic()))

    def _look(self) -> None:
        if self._give_up is not None:
            if time.monotonic() >= self._give_up:
                self._end_statement()
                self.close()
                raise psycopg.OperationalError("no answer in time")
            return
        if signal.SIGTERM in signal.sigpending():
            self._end_statement()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        check_interrupts(self._plpy)

    def _end_statement(self) -> None:
        """Also of one that would not notice that the connection is closed, as it waits for a lock
        or a standby.
        """
        with contextlib.suppress(psycopg.Error):
            self.cancel_safe(timeout=_END_SECONDS)


def _ready(descriptor: int, wanted: Wait, seconds: float) -> int:
    """What there is of what is wanted, after that time at the latest."""
    poll = select.poll()
    reading = select.POLLIN if wanted & Wait.R else 0
    writing = select.POLLOUT if wanted & Wait.W else 0
    poll.register(descriptor, reading | writing)
    events = next((events for _, events in poll.poll(1000 * seconds)), 0)
    # An error is there to be read.
    return (Ready.R if events & ~select.POLLOUT else 0) | (Ready.W if events & writing else 0)
