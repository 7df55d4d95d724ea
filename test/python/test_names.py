"""Names of databases and roles: any bytes, since databases of all encodings share them."""

from __future__ import annotations

import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest
from psycopg import pq

from cluster import Cluster, Database, Leader, Procedure, free_port
from pg_sluice.connection import conninfo
from runs import configure

BAD = b"b\xe9d \\1'\""
"""No UTF-8."""


def connected(cluster: Cluster, database: bytes, **given: bytes) -> psycopg.Connection[Any]:
    """The driver's own way takes texts alone."""
    where = {"host": cluster.directory, "port": cluster.port, "dbname": database}
    pgconn = pq.PGconn.connect(conninfo(where | {"user": b"postgres"} | given))
    if pgconn.status != pq.ConnStatus.OK:
        raise psycopg.OperationalError(pgconn.get_error_message())
    pgconn.nonblocking = 1
    session: psycopg.Connection[Any] = psycopg.Connection(pgconn)
    session.autocommit = True
    return session


def identifier(name: bytes) -> bytes:
    return b'"' + name.replace(b'"', b'""') + b'"'


@pytest.fixture
def bytewise(cluster: Cluster) -> Iterator[psycopg.Connection[Any]]:
    """A session that sends any bytes."""
    cluster.execute(
        "CREATE DATABASE bytewise ENCODING 'SQL_ASCII' LC_COLLATE 'C' LC_CTYPE 'C'"
        " TEMPLATE template0"
    )
    try:
        with cluster.connect("bytewise", client_encoding="SQL_ASCII") as connection:
            yield connection
    finally:
        cluster.execute("DROP DATABASE bytewise WITH (FORCE)")


@pytest.fixture
def named(bytewise: psycopg.Connection[Any]) -> Iterator[Callable[..., bytes]]:
    """Make a database whose name is no UTF-8."""
    made: list[bytes] = []

    def make(options: bytes = b"TEMPLATE sluice_template") -> bytes:
        bytewise.execute(b"CREATE DATABASE " + identifier(BAD) + b" " + options)
        made.append(BAD)
        return BAD

    yield make
    for name in made:
        bytewise.execute(b"DROP DATABASE IF EXISTS " + identifier(name) + b" WITH (FORCE)")


SHOWN = "b\\351d \\\\1'\""


@pytest.mark.parametrize("encoding", ["UTF8", "LATIN1"])
def test_database_with_any_name_is_scheduled(
    cluster: Cluster,
    member: Database,
    lead: Callable[..., Leader],
    named: Callable[..., bytes],
    encoding: str,
) -> None:
    """Its name is a text in LATIN1, and none in UTF8, which the control database is in."""
    leader = lead()
    address = f"127.0.0.1:{free_port()}"
    configure(member, metrics_listen=address)
    endpoint = Procedure(cluster, "serve_metrics")
    if encoding == "UTF8":
        name = named()
    else:
        name = named(b"TEMPLATE template0 ENCODING 'LATIN1' LC_COLLATE 'C' LC_CTYPE 'C'")
    with connected(cluster, name) as session:
        session.execute("CREATE EXTENSION IF NOT EXISTS pg_sluice CASCADE")
        assert session.execute("SELECT * FROM sluice.preflight() WHERE NOT ok").fetchall() == []
        session.execute("SELECT sluice.start()")
        session.execute("SELECT sluice.schedule('good', '1s', 'SELECT 1')")
        session.execute("SELECT sluice.schedule('alone', '1s', 'SELECT 1', transactional => false)")
        ran = "SELECT count(DISTINCT name) = 2 FROM sluice.history WHERE outcome = 'succeeded'"
        cluster.wait_for(lambda: session.execute(ran).fetchone() == (True,))
        for function in ("databases", "queue", "workers", "health_check", "metrics"):
            session.execute(f"SELECT * FROM sluice.{function}()")
        assert session.execute("SELECT sluice.drain()").fetchone() == ("drained",)
        session.execute("SELECT sluice.drain_status(), sluice.resume()")
    assert (SHOWN, "scheduled") in member.execute("SELECT database, state FROM sluice.databases()")
    label = 'database="b\\\\351d \\\\\\\\1\'\\""'
    with urllib.request.urlopen(f"http://{address}/metrics") as response:
        served = response.read().decode()
    for text in (served, member.execute("SELECT sluice.metrics()")[0][0]):
        assert f"sluice_drain{{{label}}} 0.0" in text
    assert f"sluice_database_up{{{label}}} 1.0" in served
    assert f'sluice_alerts_open{{{label},severity="critical"}} 0.0' in served
    endpoint.terminate()
    endpoint.join()
    assert leader.alive


def test_alert_about_a_database_with_any_name_is_announced(
    cluster: Cluster, member: Database, lead: Callable[..., Leader], named: Callable[..., bytes]
) -> None:
    leader = lead()
    name = named()
    with connected(cluster, name) as session, cluster.connect() as listener:
        listener.execute("LISTEN sluice_alert")
        session.execute("SELECT sluice.start()")
        session.execute("ALTER FUNCTION _sluice.member_state() RENAME TO no_state")
        (heard,) = listener.notifies(timeout=20, stop_after=1)
        assert '"database_failed"' in heard.payload
        assert "b\\\\351d" in heard.payload
        session.execute("ALTER FUNCTION _sluice.no_state() RENAME TO member_state")
        (heard,) = listener.notifies(timeout=20, stop_after=1)
        assert '"info"' in heard.payload
    assert leader.alive


@contextmanager
def role(bytewise: psycopg.Connection[Any], options: bytes) -> Iterator[bytes]:
    bytewise.execute(b"CREATE ROLE " + identifier(BAD) + b" " + options)
    try:
        yield BAD
    finally:
        bytewise.execute(b"DROP ROLE " + identifier(BAD))


def test_role_with_any_name(
    cluster: Cluster,
    member: Database,
    lead: Callable[..., Leader],
    bytewise: psycopg.Connection[Any],
) -> None:
    leader = lead()
    with (
        role(bytewise, b"LOGIN SUPERUSER") as name,
        connected(cluster, member.name.encode(), user=name) as session,
    ):
        session.execute("SELECT sluice.start()")
        session.execute("SELECT sluice.schedule('whole', '1s', 'SELECT 1')")
        session.execute("SELECT sluice.schedule('alone', '1s', 'SELECT 1', transactional => false)")
        member.wait_for(
            "SELECT count(DISTINCT name) = 2 FROM sluice.history WHERE outcome = 'succeeded'"
        )
        assert session.execute("SELECT sluice.drain()").fetchone() == ("drained",)
        assert session.execute("SELECT sluice.pause('{whole}')").fetchone() == ("paused",)
        assert session.execute("SELECT requested_by FROM sluice.drain_status()").fetchone() == (
            SHOWN,
        )
        session.execute("SELECT sluice.unpause('{whole}'), sluice.resume()")
        session.execute("SELECT sluice.unschedule('whole'), sluice.unschedule('alone')")
    assert leader.alive


def test_setting_that_is_no_text_is_refused(cluster: Cluster, member: Database) -> None:
    """With a connection the server takes any bytes for a setting."""
    with (
        connected(cluster, member.name.encode(), options=b"-c search_path=b\xe9d") as session,
        pytest.raises(psycopg.errors.CharacterNotInRepertoire),
    ):
        session.execute("SELECT sluice.schedule('j', 'manual', 'SELECT 1')")


def test_metrics_have_nodes_of_any_name(
    bytewise: psycopg.Connection[Any], shared_state: None
) -> None:
    """One whose name is no UTF-8, and one that is where its name is cut for a label."""
    bytewise.execute("CREATE EXTENSION pg_sluice CASCADE")
    bytewise.execute("SELECT sluice.start()")
    bytewise.execute("CREATE MATERIALIZED VIEW mv AS SELECT 1 AS a")
    bytewise.execute("SELECT sluice.schedule_refresh('mv', 'manual')")
    bytewise.execute(b"ALTER MATERIALIZED VIEW mv RENAME TO " + identifier(b"m\xe9"))
    name = b"x" + 150 * "é".encode()
    bytewise.execute(b"SELECT sluice.schedule('" + name + b"', 'manual', 'SELECT 1')")
    ((text,),) = bytewise.execute("SELECT sluice.metrics()").fetchall()
    assert b'node="public.\\"m\\\\351\\""' in text
    assert b'node="x\\\\303\\\\251' in text
