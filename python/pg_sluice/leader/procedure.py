"""What the procedures share that run for long: the frame around an event loop in the server."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import psycopg

from .. import connection
from ..backend import server
from ..backend.plpy_types import Plpy, check_interrupts
from ..connection import Name
from ..core import errors
from ..core.errors import SluiceError, TickFailed
from ..core.texts import to_json
from .session import Server

_INTERRUPT_SECONDS = 0.1


@dataclass(frozen=True)
class Home:
    """The session of the procedure, in the control database, and how to connect from there."""

    database: Name
    pid: int
    backend_start: str
    server: Server


Main = Callable[[Plpy, Home, float], Awaitable[None]]
"""What runs for a number of seconds."""


def run(plpy: Plpy, seconds: float | None, main: Main) -> str:
    """Runs it on a loop of its own. Gives the JSON that `_sluice.unwrap` takes."""
    # What psycopg would warn about on stderr, which is the server's log, reaches us as errors.
    logging.getLogger("psycopg").addHandler(logging.NullHandler())
    loop = asyncio.new_event_loop()
    try:
        term = _checked(seconds)
        loop.run_until_complete(main(plpy, _home(plpy), term))
    except BaseExceptionGroup as group:
        return _error_record(plpy, _first(group))
    except Exception as error:  # noqa: BLE001 - every end becomes a record with its own SQLSTATE
        return _error_record(plpy, error)
    finally:
        _cancel_tasks(loop)
        loop.close()
    return to_json({"value": None})


async def interrupts(plpy: Plpy) -> None:
    """Cancel and terminate are seen inside SPI only; the commit lets go of the snapshot."""
    while True:
        check_interrupts(plpy)
        plpy.commit()
        await asyncio.sleep(_INTERRUPT_SECONDS)


def _cancel_tasks(loop: asyncio.AbstractEventLoop) -> None:
    """What the end of `main` has left, with the connections that it holds."""
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    if tasks:
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))


def _checked(seconds: float | None) -> float:
    if seconds is None:
        raise errors.null_argument("run_for")
    # Since PostgreSQL 17 an interval can be endless.
    if not math.isfinite(seconds):
        raise errors.invalid_argument("run_for must be finite")
    if seconds < 0:
        raise errors.invalid_argument("run_for must not be negative")
    return seconds


def _home(plpy: Plpy) -> Home:
    where = server.where(plpy)
    plpy.commit()
    if where["control_database"] is None:
        raise errors.no_control_database()
    if where["control_database"] != where["database"]:
        raise errors.not_control_database(where["control_database"], where["database"])
    return Home(
        Name(where["database"], where["dbname"]),
        where["pid"],
        where["backend_start"],
        Server(where["sockets"], where["port"], where["username"], int(where["server_version"])),
    )


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error of a group that says most: where it happened, then one of the server."""
    found = [
        _first(error) if isinstance(error, BaseExceptionGroup) else error
        for error in group.exceptions
    ]
    return min(
        found,
        key=lambda error: (not isinstance(error, TickFailed), not isinstance(error, psycopg.Error)),
    )


def _error_record(plpy: Plpy, error: BaseException) -> str:
    if isinstance(error, SluiceError):
        record = error
    elif isinstance(error, psycopg.Error):
        record = (
            errors.leadership_lost()
            if error.sqlstate == "SL001"
            else connection.as_sluice_error(error)
        )
    elif isinstance(error, (plpy.SPIError, plpy.Error)):
        record = server.as_sluice_error(error)
    else:
        raise error
    return server.returned(plpy, {"error": record.record()})
