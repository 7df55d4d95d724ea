"""`python -m pg_sluice.listen [CONNINFO]`: the alerts of a database, as lines of JSON.

Writes each announcement on the channel sluice_alert to standard output, one object a line, at once:
for pipes. A lost connection is made again; standard error says what was missed where. It ends with
the pipe, SIGINT and SIGTERM.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from .connection import reason
from .core.texts import to_json

_DEFAULTS = {
    "application_name": "pg_sluice.listen",
    "connect_timeout": "10",
    # A connection that sends nothing is found dead after a minute.
    "keepalives_idle": "30",
    "keepalives_interval": "10",
    "keepalives_count": "3",
}
_BACKOFF_SECONDS = (0.5, 30.0)
"""Wait before a lost connection is made again: first and longest."""


def announcements(connection: psycopg.Connection[Any]) -> Iterator[dict[str, Any]]:
    """What is announced, until the connection is lost. Anybody may send on a channel: what is no
    JSON object is left out."""
    connection.execute("LISTEN sluice_alert")
    for notice in connection.notifies():
        try:
            announced = json.loads(notice.payload)
        except (ValueError, RecursionError):
            announced = None
        if isinstance(announced, dict):
            yield announced
        else:
            _note(f"no alert, from process {notice.pid}: {notice.payload[:80]!r}")


def follow(conninfo: str) -> None:
    """Writes alerts until the process is ended. Raises psycopg.Error when the first connection
    can't be made: what was given is wrong, rather than the server away."""
    settings = _DEFAULTS | conninfo_to_dict(conninfo) | {"client_encoding": "UTF8"}
    given = make_conninfo("", **settings)
    connection = psycopg.connect(given, autocommit=True)
    while True:
        try:
            with connection:
                for announced in announcements(connection):
                    print(to_json(announced), flush=True)
        except psycopg.Error as error:
            _note(f"connection lost: {reason(error)}")
        connection = _connect_again(given)
        _note("connected again; alerts sent meanwhile are in the view sluice.alerts")


def _connect_again(given: str) -> psycopg.Connection[Any]:
    pause, longest = _BACKOFF_SECONDS
    while True:
        time.sleep(pause)
        try:
            return psycopg.connect(given, autocommit=True)
        except psycopg.Error as error:
            _note(reason(error))
        pause = min(2 * pause, longest)


def _note(text: str) -> None:
    print(f"pg_sluice.listen: {text}", file=sys.stderr, flush=True)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m pg_sluice.listen",
        description="Write the alerts of a database to standard output, one JSON object a line.",
    )
    parser.add_argument(
        "conninfo",
        nargs="?",
        default="",
        help="connection string or URI of libpq, as 'dbname=app'; without it PGDATABASE and so on",
    )
    conninfo = parser.parse_args().conninfo
    # To end it is how it ends: no error.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: sys.exit(0))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8")
    try:
        follow(conninfo)
    except BrokenPipeError:
        # What is left to write at exit has nowhere to go either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except psycopg.Error as error:
        _note(reason(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
