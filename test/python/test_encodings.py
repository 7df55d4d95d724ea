"""Texts with characters that a database lacks: shown with escapes, and no harm."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from cluster import Cluster, Database, Leader
from faults import Fault
from pg_sluice.core.texts import acceptable
from runs import configure, ended, run_now

JOB = "отчёт"
SHOWN_JOB = r"\u043e\u0442\u0447\u0451\u0442"
ROLE = "Ωmega"
SHOWN_ROLE = r"\u03a9mega"

NARROW = (
    *(f"LATIN{number}" for number in range(1, 11)),
    *(f"ISO_8859_{part}" for part in range(5, 9)),
    *(f"WIN{page}" for page in (866, 874, *range(1250, 1259))),
    *("KOI8R", "KOI8U", "EUC_CN", "EUC_JIS_2004", "EUC_JP", "EUC_KR", "EUC_TW"),
)


def some(connection: psycopg.Connection[Any], query: str, *given: Any) -> Any:
    row = connection.execute(query, given).fetchone()
    return row and row[0]


@pytest.mark.parametrize("encoding", NARROW)
def test_what_is_acceptable_is_accepted(database: Database, encoding: str) -> None:
    """All characters of Unicode, in each encoding that a database can have."""
    characters = [
        chr(number)
        for number in range(128, 0x110000)
        if unicodedata.category(chr(number)) not in ("Cs", "Cn")
    ]
    kept = "".join(one for one in characters if acceptable(one, encoding) == one)
    with database.connect(client_encoding="UTF8") as connection:
        raw = some(connection, "SELECT convert_to(%s, %s)", kept, encoding)
    if not encoding.startswith("EUC"):
        # Of those of a single byte it has all.
        assert len(raw) == len(kept)
        with database.connect(client_encoding="UTF8") as connection:
            for byte in range(128, 256):
                try:
                    one = some(connection, "SELECT convert_from(%s, %s)", bytes([byte]), encoding)
                except psycopg.errors.UntranslatableCharacter:
                    continue
                assert one in kept


@pytest.fixture
def narrow(own_cluster: Callable[..., Cluster]) -> Cluster:
    """A cluster whose control database is in LATIN1."""
    cluster = own_cluster(extensions=False, fsync=False, locale="C", encoding="LATIN1")
    cluster.create_extensions()
    cluster.silence_cron()
    return cluster


def utf8(database: Database, user: str = "postgres") -> psycopg.Connection[Any]:
    return database.connect(user, client_encoding="UTF8")


def test_control_database_that_lacks_characters(narrow: Cluster) -> None:
    """Names of nodes, databases and roles, and errors, are shown there with escapes."""
    with narrow.database_in("UTF8", "wide") as wide:
        with utf8(wide) as session:
            session.execute(f'CREATE ROLE "{ROLE}" LOGIN')
            session.execute("GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA sluice TO public")
            session.execute("SELECT sluice.start()")
            session.execute("SELECT sluice.schedule(%s, '1s', 'SELECT 1')", [JOB])
            session.execute("SELECT sluice.schedule('plain', '1s', 'SELECT 1')")
        leader = Leader(narrow)
        both = "SELECT count(DISTINCT name) = 2 FROM sluice.history WHERE outcome = 'succeeded'"
        wide.wait_for(both)
        with utf8(wide) as session, utf8(wide, ROLE) as user:
            assert some(session, "SELECT sluice.pause(ARRAY[%s])", JOB) == "paused"
            assert some(session, "SELECT sluice.run_now(%s)", JOB) is not None
            queued = "SELECT name FROM sluice.queue() WHERE state = 'queued'"
            assert some(session, queued) == SHOWN_JOB
            # What it is looked up by is exact.
            assert some(session, "SELECT sluice.unpause(ARRAY[%s])", JOB) == 1
            assert some(user, "SELECT sluice.drain('20 s')") == "drained"
            assert some(user, "SELECT requested_by FROM sluice.drain_status()") == SHOWN_ROLE
            user.execute("SELECT sluice.resume()")
            with pytest.raises(psycopg.errors.UndefinedObject, match="нет"):
                session.execute("SELECT sluice.run_now('нет')")
        assert leader.alive
        leader.terminate()
        leader.join()


def test_failed_database_with_a_name_that_the_control_database_lacks(narrow: Cluster) -> None:
    """The server's message has the name, as bytes of another encoding."""
    name = "отчёты"
    with narrow.database_in("UTF8", "good") as good:
        good.execute("SELECT sluice.start()")
        good.execute("SELECT sluice.schedule('plain', '1s', 'SELECT 1')")
        with utf8(good) as session:
            session.execute(
                f"CREATE DATABASE \"{name}\" ENCODING 'UTF8' LC_COLLATE 'C' LC_CTYPE 'C'"
                " TEMPLATE template0"
            )
            with narrow.connect(name, client_encoding="UTF8") as other:
                other.execute("CREATE EXTENSION pg_sluice CASCADE")
                other.execute("SELECT sluice.start()")
            session.execute(f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS false')
        leader = Leader(narrow)
        narrow.wait_for("SELECT count(*) = 1 FROM _sluice.member WHERE state = 'failed'")
        ran = "SELECT count(*) FROM sluice.history"
        ((before,),) = good.execute(ran)
        good.wait_for(f"SELECT count(*) > {before} FROM sluice.history")
        ((error,),) = narrow.execute("SELECT error FROM _sluice.member WHERE error IS NOT NULL")
        assert r"\u043e\u0442\u0447\u0451\u0442\u044b" in error
        assert leader.alive
        leader.terminate()
        leader.join()


@pytest.mark.parametrize("sqlstate", ["22P05", "XX000"])
def test_failed_tick_that_cannot_be_recorded(
    cluster: Cluster,
    member: Database,
    other: Database,
    lead: Callable[..., Leader],
    sqlstate: str,
) -> None:
    """It costs the other databases nothing, and the server's log tells."""
    leader = lead()
    other.execute("SELECT sluice.schedule('plain', '1s', 'SELECT 1')")
    control = Database(cluster, "postgres")
    fault = Fault(control, "record_failed_tick")
    tick = Fault(member, "tick")
    try:
        fault.arm(1000, sqlstate)
        tick.arm(1000)
        cluster.wait_for(lambda: fault.consumed > 1)
        ((before,),) = other.execute("SELECT count(*) FROM sluice.history")
        other.wait_for(f"SELECT count(*) > {before} FROM sluice.history")
        assert leader.alive
        assert re.search(
            rf'WARNING:  database "{member.name}" is not scheduled: .*{tick.message}.*;'
            f" that could not be recorded: {fault.message}",
            cluster.log_text(),
        )
        fault.arm(0)
        control.wait_for("SELECT count(*) = 1 FROM _sluice.member WHERE state = 'failed'")
    finally:
        tick.lift()
        fault.lift()


def test_failure_that_the_member_lacks_characters_for(
    cluster: Cluster, shared_state: None, lead: Callable[..., Leader], workers: str
) -> None:
    """The name of a role comes in the server's message as bytes of another encoding."""
    configure(cluster, max_workers=workers)
    with cluster.database_in("LATIN1", "other") as member:
        cluster.execute(f'CREATE ROLE "{ROLE}" LOGIN')
        try:
            member.execute("GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA sluice TO public")
            member.execute("SELECT sluice.start()")
            with utf8(member, ROLE) as user:
                user.execute(
                    "SELECT sluice.schedule('top', 'manual', 'SELECT 1', transactional => false)"
                )
            cluster.execute(f'ALTER ROLE "{ROLE}" NOLOGIN')
            leader = lead()
            row = ended(member, run_now(member, "top"))
            assert SHOWN_ROLE in row["message"]
            assert member.execute("SELECT sluice.drain('10 s')") == [("drained",)]
            assert leader.alive
        finally:
            cluster.execute(f'ALTER ROLE "{ROLE}" RENAME TO omega')
            member.execute("SELECT sluice.unschedule(name) FROM sluice.nodes")
            member.execute("DROP OWNED BY omega")
            cluster.execute("DROP ROLE omega")


@pytest.mark.parametrize("encoding", ["LATIN2", "EUC_JP", "SQL_ASCII"])
def test_reading_in_a_database_that_lacks_characters(
    cluster: Cluster,
    member: Database,
    lead: Callable[..., Leader],
    encoding: str,
) -> None:
    """What the control database has of others, in a member that has no such characters."""
    name = "ñ Ω 表"
    shown = {
        "LATIN2": r"\u00f1 \u03a9 \u8868",
        "EUC_JP": "ñ Ω 表",
        "SQL_ASCII": name,
    }[encoding]
    lead()
    member.execute("SELECT sluice.schedule(%s, 'manual', 'SELECT 1')", [name])
    member.execute("SELECT sluice.pause(ARRAY[%s])", [name])
    run_now(member, name)
    cluster.execute("UPDATE _sluice.drain SET requested_by = %s", [name])
    cluster.execute(f'CREATE ROLE "{name}" LOGIN SUPERUSER')
    try:
        with cluster.database_in(encoding, "other") as other:
            other.execute("SELECT sluice.start()")
            with utf8(member, name) as user:
                user.execute("SELECT sluice.drain(wait => false, cluster => true)")
            cluster.execute("UPDATE _sluice.member SET spawn_error = %s", [name])
            with utf8(other) as session:
                assert some(session, "SELECT name FROM sluice.queue()") == shown
                assert some(session, "SELECT requested_by FROM sluice.drain_status()") == shown
                assert some(session, "SELECT error FROM sluice.databases() LIMIT 1") == shown
                for function in ("health_check", "workers", "metrics"):
                    session.execute(f"SELECT * FROM sluice.{function}()")
            assert cluster.execute("SELECT requested_by FROM _sluice.drain") == [(name,)]
            member.execute("SELECT sluice.resume(cluster => true)")
    finally:
        cluster.execute(f'DROP ROLE "{name}"')


@pytest.mark.parametrize("max_workers", ["4", "0"])
@pytest.mark.parametrize(
    ("encoding", "name", "shown"),
    [("WIN1252", "chr(129)", r"\201"), ("EUC_TW", "'丄'", r"\216\256\241\246")],
)
def test_name_that_has_no_equivalent_in_utf8(
    cluster: Cluster,
    shared_state: None,
    lead: Callable[..., Leader],
    encoding: str,
    name: str,
    shown: str,
    max_workers: str,
) -> None:
    """1. An owner gives it to a stream table. 2. That one runs, and so do all others; what tells of
    it can be read."""
    with cluster.database_in(encoding, "other") as other, utf8(other) as session:
        session.execute("SELECT sluice.start()")
        configure(cluster, max_workers=max_workers, max_consecutive_errors="1")
        session.execute("CREATE TABLE base AS SELECT 1 AS x")
        session.execute(
            "SELECT sluice.create_stream_table('st', 'SELECT 1 / x AS y FROM base', '1s')"
        )
        session.execute(
            "DO $$ BEGIN EXECUTE format('ALTER TABLE st RENAME TO %I', " + name + "); END $$"
        )
        lead()
        session.execute("SELECT sluice.schedule('good', '1s', 'SELECT 1')")
        session.execute("SELECT sluice.create_stream_table('another', 'SELECT x FROM base', '1s')")
        ran = "SELECT count(DISTINCT name) FROM _sluice.history WHERE outcome <> 'skipped'"
        cluster.wait_for(lambda: some(session, ran) == 3)
        names = "SELECT array_agg(DISTINCT replace(name, '\"', '')) FROM sluice.history"
        assert f"public.{shown}" in some(session, names)
        with utf8(other) as listener:
            listener.execute("LISTEN sluice_alert")
            session.execute("UPDATE base SET x = 0")
            (told,) = listener.notifies(timeout=20, stop_after=1)
        assert shown in json.loads(told.payload)["node"]
        assert shown.replace("\\", "\\\\") in some(session, "SELECT sluice.metrics()")
        assert cluster.execute("SELECT state, failures FROM sluice.databases()") == [
            ("scheduled", 0)
        ]


@pytest.mark.parametrize("times", [1, 2])
def test_lost_run_that_cannot_be_recorded(
    cluster: Cluster,
    member: Database,
    lead: Callable[..., Leader],
    times: int,
) -> None:
    """1. A failure is refused. 2. Over the scheduler's session it is refused, with its texts or
    altogether. 3. The other nodes of the database run, and a drain ends."""
    leader = lead()
    member.execute("SELECT sluice.schedule('bad', 'manual', 'SELECT 1/0')")
    member.execute("SELECT sluice.schedule('good', '1s', 'SELECT 1')")
    fault = Fault(member, "record_failure")
    try:
        fault.arm(1 + times, "22P05")
        run_id = run_now(member, "bad")
        member.wait_for(lambda: fault.consumed == 1 + times)
        cluster.wait_for(f"SELECT count(*) = 0 FROM _sluice.queue WHERE run_id = '{run_id}'")
        recorded = member.execute(
            "SELECT outcome, sqlstate, message FROM sluice.history WHERE run_id = %s", [run_id]
        )
        if times == 1:
            message = "the run failed, and its error could not be recorded"
            assert recorded == [("permanent_error", "22012", message)]
        else:
            assert recorded == []
            assert 'WARNING:  run of "bad" is not recorded: ' + fault.message in cluster.log_text()
        ((before,),) = member.execute("SELECT count(*) FROM sluice.history WHERE name = 'good'")
        member.wait_for(f"SELECT count(*) > {before} FROM sluice.history WHERE name = 'good'")
        assert member.execute("SELECT failures FROM sluice.databases()") == [(0,)]
        assert member.execute("SELECT sluice.drain('10 s')") == [("drained",)]
        assert leader.alive
    finally:
        fault.lift()
