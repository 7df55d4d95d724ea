"""Alerts on their way out: outside runs, valid for any content, never in anybody's way."""

from __future__ import annotations

import asyncio
import json
import selectors
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from psycopg.types.json import Jsonb

import alerts
from cluster import Cluster, Database, Leader
from pg_sluice.leader.announcer import announce
from pg_sluice.leader.session import Session
from runs import configure, ended, idle, node, run_now, schedule

EXAMPLES = 200


class Heard:
    """What came on the channel sluice_alert of a database."""

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self._connection = connection
        self._payloads: list[str] = []
        connection.add_notify_handler(lambda notice: self._payloads.append(notice.payload))
        connection.execute("LISTEN sluice_alert")

    def texts(self) -> list[str]:
        """All payloads so far."""
        self._connection.execute("SELECT 1")
        return self._payloads

    def said(self) -> list[tuple[str, str, str]]:
        """Event, severity and node of each so far."""
        told = [json.loads(text) for text in self.texts()]
        return [(one["event"], one["severity"], one["node"]) for one in told]


@contextmanager
def listening(database: Database) -> Iterator[Heard]:
    with database.connect(client_encoding="UTF8") as connection:
        yield Heard(connection)


@pytest.fixture(params=["UTF8", "LATIN1", "SQL_ASCII"])
def encoded(request: pytest.FixtureRequest, cluster: Cluster) -> Iterator[Database]:
    """A database in some encoding, with the extension, that is no member."""
    with cluster.database_in(request.param, f"alerts_{request.param.lower()}") as database:
        yield database


@pytest.fixture
def announcing(encoded: Database) -> Iterator[Callable[[], None]]:
    """The leader's own announcing, in a session of a test."""
    with asyncio.Runner(loop_factory=_loop) as runner:

        async def connect() -> Session:
            host, port = str(encoded.cluster.directory), encoded.cluster.port
            return Session(
                await psycopg.AsyncConnection.connect(
                    host=host, port=port, user="postgres", dbname=encoded.name,
                    client_encoding="UTF8", autocommit=True,
                )
            )  # fmt: skip

        session = runner.run(connect())
        yield lambda: runner.run(announce(session))
        session.close()


def _loop() -> asyncio.AbstractEventLoop:
    return asyncio.SelectorEventLoop(selectors.DefaultSelector())


def characters(encoding: str) -> st.SearchStrategy[str]:
    """The characters that a text of the database can have."""
    return st.characters(
        exclude_categories=("Cs",),
        exclude_characters="\x00",
        max_codepoint=255 if encoding == "LATIN1" else None,
    )


@pytest.mark.timeout(180)
def test_any_alert_is_announced_and_fits(encoded: Database, announcing: Callable[[], None]) -> None:
    """Any text, any nesting, any size, in any encoding: the server takes it, a reader parses it."""
    ((encoding,),) = encoded.execute("SELECT getdatabaseencoding()")
    seen = 0
    with encoded.connect(client_encoding="UTF8") as writer, listening(encoded) as heard:

        @settings(database=None, max_examples=EXAMPLES)
        @given(
            node=alerts.texts(characters(encoding), 2000),
            message=alerts.texts(characters(encoding), 20_000),
            detail=alerts.details(characters(encoding)),
        )
        def holds(node: str, message: str, detail: Any) -> None:
            nonlocal seen
            seen += 1
            written = Jsonb(detail, dumps=lambda value: json.dumps(value, ensure_ascii=False))
            writer.execute("DELETE FROM _sluice.alert")
            ((seq, pgt_id, at, stored),) = writer.execute(
                "INSERT INTO _sluice.alert (event, severity, pgt_id, node, message, detail)"
                " VALUES ('suspended', 'critical', 7, %s, %s, %s)"
                " RETURNING seq, pgt_id, to_json(opened_at) #>> '{}', detail",
                [node, message, written],
            ).fetchall()
            announcing()
            text = heard.texts().pop()
            assert heard.texts() == []
            alerts.check(
                text,
                {
                    "event": "suspended",
                    "severity": "critical",
                    "database": encoded.name,
                    "node": node,
                    "pgt_id": pgt_id,
                    "at": at,
                    "seq": seq,
                    "message": message,
                    "detail": stored,
                },
            )

        holds()
    assert seen >= EXAMPLES


@pytest.mark.parametrize("encoded", ["SQL_ASCII"], indirect=True)
def test_bytes_that_are_no_characters_are_announced(
    encoded: Database, announcing: Callable[[], None]
) -> None:
    """A database in SQL_ASCII can have any bytes in a text, and cuts texts inside characters."""
    seen = 0
    with encoded.connect(client_encoding="SQL_ASCII") as writer, listening(encoded) as heard:

        @settings(database=None, max_examples=EXAMPLES)
        @given(st.binary(max_size=9000).map(lambda found: found.replace(b"\x00", b"")))
        def holds(message: bytes) -> None:
            nonlocal seen
            seen += 1
            writer.execute("DELETE FROM _sluice.alert")
            writer.execute(
                "INSERT INTO _sluice.alert (event, severity, node, message)"
                " VALUES ('test', 'info',"
                " convert_from(%s, 'SQL_ASCII'), convert_from(%s, 'SQL_ASCII'))",
                [message[:100], message],
            )
            announcing()
            text = heard.texts().pop()
            told = json.loads(text)
            assert len(text.encode()) <= 7999
            assert message.decode("utf-8", "replace").startswith(told["message"])
            assert told["node"] == message[:100].decode("utf-8", "replace")

        holds()
    assert seen >= EXAMPLES


@pytest.mark.parametrize("encoded", ["SQL_ASCII"], indirect=True)
def test_no_bytes_stop_the_scheduling_or_hide_an_error(
    encoded: Database, shared_state: None, lead: Callable[..., Leader]
) -> None:
    """A long message is cut at a character; a name that is no UTF-8 is told in octal."""
    configure(encoded, max_consecutive_errors="1", max_query_bytes="1 MB")
    # 65,536 is in the middle of a character.
    body = "DO $$BEGIN RAISE '%', 'x' || repeat('\u00e9', 40000); END$$"
    with encoded.connect(client_encoding="UTF8") as connection:
        connection.execute("SELECT sluice.schedule('long', 'manual', %s)", [body])
        connection.execute("CREATE MATERIALIZED VIEW mv AS SELECT 1 AS a")
        connection.execute("SELECT sluice.schedule_refresh('mv', 'manual')")
        connection.execute("SELECT sluice.start()")
    with encoded.connect(client_encoding="SQL_ASCII") as connection:
        connection.execute(b'ALTER MATERIALIZED VIEW mv RENAME TO "m\xff"')
    lead()
    with encoded.connect(client_encoding="UTF8") as connection, listening(encoded) as heard:
        ((run_id,),) = connection.execute("SELECT sluice.run_now('long')").fetchall()
        encoded.wait_for(lambda: heard.said() == [("suspended", "critical", "long")])
        told = connection.execute(
            "SELECT message FROM sluice.history WHERE run_id = %s", [run_id]
        ).fetchone()
        assert told == ("x" + "\u00e9" * 32767,)
        connection.execute("UPDATE _sluice.node SET next_fire_at = now() WHERE kind = 'matview'")
        encoded.wait_for(
            "SELECT outcome = 'succeeded' AND name = 'public.\"m\\377\"' FROM sluice.history"
            " WHERE kind = 'matview'"
        )


@pytest.mark.parametrize("encoded", ["UTF8"], indirect=True)
def test_an_alert_that_changes_meanwhile_loses_no_announcement(
    encoded: Database, announcing: Callable[[], None]
) -> None:
    """1. It is read as open. 2. Another session closes it. 3. It is announced: both, in order."""
    encoded.execute("SELECT _sluice.open_alert('test', 'critical', 1, 'n', 'm')")
    with listening(encoded) as heard, encoded.connect() as slow:
        seq, version = slow.execute(
            "SELECT seq, version FROM _sluice.pending_alerts(clock_timestamp())"
        ).fetchone()
        encoded.execute("SELECT _sluice.close_alert('test', 1)")
        emit = "SELECT _sluice.emit_alerts(clock_timestamp(), %s, %s, %s)"
        slow.execute(emit, [[seq], [version], [b"stale"]])
        assert heard.texts() == []
        announcing()
        assert heard.said() == [("test", "critical", "n"), ("test", "info", "n")]
        # Whoever comes late finds it announced.
        slow.execute(emit, [[seq], [version], [b"stale"]])
        announcing()
        assert len(heard.texts()) == 2


@pytest.mark.parametrize(
    ("encoded", "character"), [("EUC_JP", "é"), ("EUC_TW", "万")], indirect=["encoded"]
)
def test_characters_that_are_longer_than_in_utf8_fit(
    encoded: Database, announcing: Callable[[], None], character: str
) -> None:
    """A notification has room for so many bytes of the database's encoding."""
    with encoded.connect(client_encoding="UTF8") as connection:
        connection.execute(
            "SELECT _sluice.open_alert('test', 'critical', 1, 'n', repeat(%s, 20000))", [character]
        )
    with listening(encoded) as heard:
        announcing()
        (told,) = map(json.loads, heard.texts())
    assert set(told["message"]) == {character}


@pytest.mark.parametrize("encoded", ["UTF8"], indirect=True)
def test_many_alerts_are_announced_step_by_step(
    encoded: Database, announcing: Callable[[], None]
) -> None:
    encoded.execute(
        "SELECT _sluice.open_alert('test', 'critical', g, 'n' || g, 'm')"
        " FROM generate_series(1, 450) AS g"
    )
    with listening(encoded) as heard:
        for count in (200, 400, 450, 450):
            announcing()
            assert len(heard.texts()) == count
        assert [node for _, _, node in heard.said()] == [f"n{n}" for n in range(1, 451)]


# With a leader


@pytest.fixture
def led(member: Database, lead: Callable[..., Leader]) -> Database:
    configure(member, max_consecutive_errors="1", lease_ttl="1 s")
    lead()
    return member


def test_an_open_alert_is_reminded_of_until_it_closes(led: Database) -> None:
    configure(led, alert_reminder_interval="1 s")
    with listening(led) as heard:
        schedule(led, "SELECT 1 / 0")
        ended(led, run_now(led))
        led.wait_for(lambda: len(heard.texts()) >= 3)
        led.execute("SELECT sluice.reset('job')")
        led.wait_for(lambda: heard.said()[-1][1] == "info")
        *open_ones, _ = map(json.loads, heard.texts())
        assert {(one["event"], one["severity"], one["seq"]) for one in open_ones} == {
            ("suspended", "critical", open_ones[0]["seq"])
        }
        ((seconds,),) = led.execute(
            "SELECT extract(epoch FROM closed_at - opened_at)::float FROM sluice.alerts"
        )
        assert len(open_ones) - 1 <= int(seconds)


def test_a_transaction_that_closes_an_alert_holds_nobody_up(
    cluster: Cluster, control: Database, member: Database, lead: Callable[..., Leader]
) -> None:
    """1. Alerts are open, in the control database too, and to be reminded of. 2. Transactions of
    users close them and stay open. 3. All others go on. 4. The closing is told."""
    configure(member, max_consecutive_errors="1", alert_reminder_interval="1 s")
    control.execute("SELECT sluice.start()")
    leader = lead()
    databases = (control, member)
    try:
        for database in databases:
            schedule(database, "SELECT 1 / 0")
            ended(database, run_now(database))
            database.execute("SELECT sluice.schedule('other', '1s', 'SELECT 1')")
        with (
            control.connect(autocommit=False) as one,
            member.connect(autocommit=False) as another,
            listening(control) as in_control,
            listening(member) as in_member,
        ):
            for user in (one, another):
                user.execute("SELECT sluice.reset('job')")
            for database in databases:
                ((count,),) = database.execute("SELECT count(*) FROM sluice.history")
                # Many reminders later.
                database.wait_for(f"SELECT count(*) > {count + 5} FROM sluice.history", timeout=15)
            assert cluster.execute("SELECT DISTINCT state, failures FROM sluice.databases()") == [
                ("scheduled", 0)
            ]
            assert leader.alive
            for user, heard in ((one, in_control), (another, in_member)):
                user.commit()
                cluster.wait_for(
                    lambda heard=heard: ("suspended", "info", "job") in heard.said()  # type: ignore[misc]
                )
    finally:
        for name in ("job", "other"):
            control.execute("SELECT sluice.unschedule(%s)", [name])


def test_alerts_about_databases_are_announced_in_the_control_database(
    control: Database, led: Database
) -> None:
    with listening(control) as heard, listening(led) as elsewhere:
        ((version,),) = led.execute(
            "SELECT extversion FROM pg_extension WHERE extname = 'pg_sluice'"
        )
        change = "UPDATE pg_extension SET extversion = %s WHERE extname = 'pg_sluice'"
        led.execute(change, ["0"])
        control.wait_for(lambda: len(heard.texts()) == 1)
        assert heard.said() == [("database_version_mismatch", "critical", led.name)]
        led.execute(change, [version])
        control.wait_for(lambda: len(heard.texts()) == 2)
        assert heard.said()[1] == ("database_version_mismatch", "info", led.name)
        assert elsewhere.texts() == []


def test_nothing_is_announced_by_the_transaction_of_a_run(led: Database, cluster: Cluster) -> None:
    """A full queue of notifications fails a commit that has one; no run has one, nor needs one."""
    full = (
        "CREATE OR REPLACE FUNCTION _sluice.can_notify() RETURNS boolean"
        " LANGUAGE sql AS 'SELECT false'"
    )
    room = full.replace("false", "true")
    with listening(led) as heard, led.connect() as waker:
        waker.add_notify_handler(lambda notice: pytest.fail(f"{notice.channel} was notified"))
        waker.execute("LISTEN sluice_wake")
        led.execute(full)
        # All of it works: definitions, runs by hand and by schedule, failures, reset, drain, pause.
        led.execute("SELECT sluice.schedule('good', '1s', 'SELECT 1')")
        schedule(led, "SELECT 1 / 0")
        assert ended(led, run_now(led))["outcome"] == "permanent_error"
        assert node(led)["status"] == "suspended"
        led.execute("SELECT sluice.pause('{good}')")
        led.execute("SELECT sluice.unpause('{good}')")
        led.execute("SELECT sluice.drain()")
        led.execute("SELECT sluice.resume()")
        led.execute("SELECT sluice.configure('lock_timeout', '4 s')")
        led.wait_for("SELECT count(*) > 0 FROM sluice.history WHERE name = 'good'")
        led.execute("SELECT sluice.reset('job')")
        ended(led, run_now(led))
        waker.execute("SELECT 1")
        assert heard.texts() == []
        waker.execute("UNLISTEN *")
        led.execute(room)
        # What could not be announced is announced as soon as there is room.
        led.wait_for(lambda: len(heard.texts()) == 3)
        assert heard.said() == [
            ("suspended", "critical", "job"),
            ("suspended", "info", "job"),
            ("suspended", "critical", "job"),
        ]
    led.execute("SELECT sluice.unschedule('good')")
    idle(cluster)


@contextmanager
def backlog(cluster: Cluster) -> Iterator[None]:
    """Meanwhile the server's queue of notifications has a hundred megabytes or so."""
    with cluster.connect(autocommit=False) as holding, cluster.connect() as writer:
        holding.execute("LISTEN backlog")
        holding.commit()
        holding.execute("SELECT 1")
        writer.execute(
            "DO $$ BEGIN LOOP"
            " PERFORM pg_notify('backlog', n || repeat('x', 7900))"
            " FROM generate_series(1, 1000) AS n;"
            " COMMIT; EXIT WHEN pg_notification_queue_usage() > 0.011; END LOOP; END $$"
        )
        yield
        holding.execute("UNLISTEN *")
        holding.commit()


def test_nobody_listens_while_that_would_take_long(
    cluster: Cluster, member: Database, lead: Callable[..., Leader]
) -> None:
    """Who begins to listen goes through the whole queue first, for seconds if it is full."""
    channels = "SELECT count(*) FROM pg_listening_channels()"
    with asyncio.Runner(loop_factory=_loop) as runner:

        async def listen(session: Session) -> tuple[bool, int]:
            await session.listen()
            cursor = await session.connection.execute(channels)
            ((number,),) = await cursor.fetchall()
            return session.listens, number

        async def connect() -> Session:
            return Session(
                await psycopg.AsyncConnection.connect(
                    host=str(cluster.directory), port=cluster.port, user="postgres",
                    dbname=member.name, autocommit=True,
                )
            )  # fmt: skip

        session = runner.run(connect())
        with backlog(cluster):
            assert runner.run(listen(session)) == (False, 0)
            leader = lead()
            schedule(member, "SELECT 1")
            assert ended(member, run_now(member))["outcome"] == "succeeded"
        cluster.wait_for("SELECT pg_notification_queue_usage() < 0.01")
        assert runner.run(listen(session)) == (True, 1)
        session.close()
        assert leader.alive


def test_a_serial_leader_announces_too(cluster: Cluster, led: Database) -> None:
    configure(led, max_workers="0")
    cluster.wait_for("SELECT _sluice.worker_limit() = 0")
    with listening(led) as heard:
        schedule(led, "SELECT 1 / 0")
        ended(led, run_now(led))
        led.wait_for(lambda: heard.said() == [("suspended", "critical", "job")])
