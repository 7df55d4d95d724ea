"""What becomes of a failed attempt: outcome, count, retry, suspension, alert."""

import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

from cluster import Cluster, Database, Leader
from runs import configure, ended, idle, node, run_now, schedule


@pytest.fixture
def failing(
    request: pytest.FixtureRequest, member: Database, lead: Callable[..., Leader]
) -> Database:
    """A led member with the settings of the parameter; by default retries come too late to see."""
    defaults = {
        "retry_backoff_base": "1 h",
        "retry_backoff_cap": "1 h",
        "max_consecutive_errors": "5",
        "lease_ttl": "1 s",
    }
    configure(member, **(defaults | getattr(request, "param", {})))
    lead()
    return member


def settings(**given: str) -> pytest.MarkDecorator:
    """Run a test with these settings."""
    return pytest.mark.parametrize("failing", [given], indirect=True, ids=["settings"])


def retry(database: Database) -> Any:
    """Seconds from the last failure to its retry, or None."""
    return database.execute(
        "SELECT extract(epoch FROM n.retry_at - h.ended_at)::float FROM _sluice.node AS n"
        " JOIN _sluice.history AS h USING (pgt_id) ORDER BY h.started_at DESC LIMIT 1"
    )[0][0]


# What an attempt failed of


def test_lock_timeout(failing: Database) -> None:
    failing.execute("CREATE TABLE t (x int)")
    schedule(failing, "INSERT INTO t VALUES (1)", lock_timeout="200 ms")
    with failing.connect(autocommit=False) as holder:
        holder.execute("LOCK TABLE t")
        row = ended(failing, run_now(failing))
    assert (row["outcome"], row["sqlstate"], row["attempt"]) == ("lock_timeout", "55P03", 1)
    assert node(failing)["consecutive_errors"] == 1
    assert node(failing)["remedy"].startswith("backoff")


def test_deadline(failing: Database) -> None:
    schedule(failing, "SELECT pg_sleep(60)", refresh_timeout="500 ms")
    row = ended(failing, run_now(failing))
    assert (row["outcome"], row["sqlstate"]) == ("deadline_exceeded", "57014")
    assert node(failing)["consecutive_errors"] == 1
    assert retry(failing) is not None


def test_deadline_of_a_job_at_top_level(failing: Database) -> None:
    schedule(failing, "SELECT pg_sleep(60)", refresh_timeout="500 ms", transactional=False)
    row = ended(failing, run_now(failing))
    assert (row["outcome"], row["sqlstate"]) == ("deadline_exceeded", "57014")


def test_deadline_that_a_job_at_top_level_sets_itself(failing: Database) -> None:
    """A statement_timeout holds for the statements after the transaction that sets it."""
    schedule(
        failing,
        "SET statement_timeout = '300ms'; COMMIT; SELECT pg_sleep(60)",
        transactional=False,
    )
    row = ended(failing, run_now(failing))
    assert (row["outcome"], row["sqlstate"]) == ("deadline_exceeded", "57014")
    assert node(failing)["consecutive_errors"] == 1
    assert retry(failing) is not None


@pytest.mark.parametrize(
    ("transactional", "before"),
    [(True, ""), (False, ""), (False, "SET statement_timeout = '60s'; COMMIT; ")],
    ids=["transactional", "top level", "with its own deadline"],
)
def test_cancel_by_a_person_does_not_count(
    failing: Database, transactional: bool, before: str
) -> None:
    schedule(failing, f"{before}SELECT pg_sleep(60)", transactional=transactional)
    run_id = run_now(failing)
    failing.wait_for(
        "SELECT count(pg_cancel_backend(pid)) = 1 FROM pg_stat_activity"
        " WHERE wait_event = 'PgSleep' AND pid <> pg_backend_pid()"
    )
    row = ended(failing, run_id)
    assert (row["outcome"], row["sqlstate"]) == ("cancelled", "57014")
    assert node(failing)["consecutive_errors"] == 0
    assert retry(failing) is None
    assert node(failing)["status"] == "active"


ERRORS = {
    "40001": ("serialization_failure", True),
    "40P01": ("deadlock", True),
    "53200": ("out_of_memory", True),
    "53100": ("resource_exhausted", True),
    "08006": ("connection_lost", True),
    "22012": ("permanent_error", False),
    "P0001": ("permanent_error", False),
    "XX000": ("permanent_error", False),
}


def test_errors_of_jobs(failing: Database) -> None:
    for sqlstate, (outcome, retried) in ERRORS.items():
        schedule(
            failing,
            "DO $do$BEGIN RAISE 'it is %', 'broken'"
            f" USING ERRCODE = '{sqlstate}', DETAIL = 'So.'; END$do$",
            sqlstate,
        )
        row = ended(failing, run_now(failing, sqlstate))
        assert (row["outcome"], row["sqlstate"]) == (outcome, sqlstate)
        assert (row["message"], row["detail"]) == ("it is broken", "So.")
        assert "inline_code_block" in row["context"]
        assert (retry(failing) is not None) == retried, sqlstate
        assert node(failing, sqlstate)["consecutive_errors"] == 1


@pytest.mark.parametrize("kind", ["stream_table", "matview"])
def test_error_in_a_refresh(failing: Database, kind: str) -> None:
    failing.execute("CREATE TABLE t AS SELECT 1 AS x")
    if kind == "stream_table":
        failing.execute(
            "SELECT sluice.create_stream_table('r', 'SELECT 1 / x AS y FROM t', 'manual')"
        )
    else:
        failing.execute("CREATE MATERIALIZED VIEW r AS SELECT 1 / x AS y FROM t")
        failing.execute("SELECT sluice.schedule_refresh('r', 'manual')")
    failing.execute("UPDATE t SET x = 0")
    row = ended(failing, run_now(failing, "r"))
    assert (row["kind"], row["outcome"], row["sqlstate"]) == (kind, "permanent_error", "22012")
    assert failing.execute("SELECT y FROM r") == [(1,)]
    failing.execute("UPDATE t SET x = 1")
    assert ended(failing, run_now(failing, "r"))["outcome"] in ("succeeded", "no_change")
    assert node(failing, "r")["consecutive_errors"] == 0


# Retry


@settings(retry_backoff_base="100 ms")
def test_retry_is_of_the_same_fire(failing: Database, cluster: Cluster) -> None:
    failing.execute("CREATE SEQUENCE tries")
    schedule(
        failing,
        "DO $do$BEGIN IF nextval('tries') < 3 THEN"
        " RAISE 'no' USING ERRCODE = '40001'; END IF; END$do$",
    )
    failing.execute("SELECT sluice.run_now('job')")
    failing.wait_for("SELECT count(*) = 3 FROM sluice.history")
    rows = failing.execute(
        "SELECT attempt, outcome, due_at FROM sluice.history ORDER BY started_at"
    )
    assert [row[:2] for row in rows] == [
        (1, "serialization_failure"),
        (2, "serialization_failure"),
        (3, "succeeded"),
    ]
    assert len({row[2] for row in rows}) == 1
    assert node(failing)["consecutive_errors"] == 0
    assert node(failing)["remedy"] is None
    idle(cluster)


@settings(retry_backoff_base="100 s", retry_backoff_cap="300 s")
def test_backoff_doubles_up_to_its_cap(failing: Database) -> None:
    schedule(failing, "DO $do$BEGIN RAISE 'no' USING ERRCODE = '40001'; END$do$")
    for wait in (100, 200, 300, 300):
        ended(failing, run_now(failing))
        assert 0.75 * wait - 1 <= retry(failing) <= wait + 1


@settings(retry_backoff_base="3 s")
def test_pending_retry_survives_the_leader(
    failing: Database, cluster: Cluster, lead: Callable[..., Leader]
) -> None:
    failing.execute("CREATE SEQUENCE tries")
    schedule(
        failing,
        "DO $do$BEGIN IF nextval('tries') < 2 THEN"
        " RAISE 'no' USING ERRCODE = '40001'; END IF; END$do$",
    )
    row = ended(failing, run_now(failing))
    cluster.execute("SELECT pg_terminate_backend(pid) FROM _sluice.lease")
    lead()
    failing.wait_for("SELECT count(*) = 2 FROM sluice.history")
    again = failing.execute("SELECT attempt, outcome, due_at FROM sluice.history ORDER BY 1 DESC")[
        0
    ]
    assert again[:2] == (2, "succeeded")
    assert failing.execute("SELECT %s::timestamptz = %s", [again[2], row["due_at"]]) == [(True,)]


@settings(max_consecutive_errors="3")
def test_grid_goes_on_after_failures(failing: Database) -> None:
    """A permanent error is not retried: the next fire of the grid is the next attempt."""
    failing.execute("SELECT sluice.schedule('job', '1s', 'SELECT 1 / 0')")
    failing.wait_for("SELECT count(*) = 3 FROM sluice.history")
    rows = failing.execute("SELECT attempt, due_at FROM sluice.history ORDER BY started_at")
    assert [attempt for attempt, _ in rows] == [1, 1, 1]
    assert [(b[1] - a[1]).total_seconds() for a, b in itertools.pairwise(rows)] == [1, 1]
    assert node(failing)["status"] == "suspended"


# Suspension


@pytest.fixture
def alerts(failing: Database) -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """What was announced on sluice_alert so far."""
    received: list[dict[str, Any]] = []
    with failing.connect() as connection:
        connection.add_notify_handler(lambda n: received.append(json.loads(n.payload)))
        connection.execute("LISTEN sluice_alert")

        def so_far() -> list[dict[str, Any]]:
            connection.execute("SELECT 1")
            return received

        yield so_far


@settings(max_consecutive_errors="2")
def test_suspension_and_reset(
    failing: Database, cluster: Cluster, alerts: Callable[[], list[dict[str, Any]]]
) -> None:
    failing.execute("CREATE TABLE t AS SELECT 0 AS x")
    schedule(failing, "UPDATE t SET x = x; SELECT 1 / x FROM t")
    ended(failing, run_now(failing))
    assert (node(failing)["status"], alerts()) == ("active", [])
    ended(failing, run_now(failing))
    assert (node(failing)["status"], node(failing)["consecutive_errors"]) == ("suspended", 2)

    (alert,) = failing.execute("SELECT to_jsonb(a) FROM sluice.alerts AS a")[0]
    assert (alert["event"], alert["severity"], alert["node"]) == ("suspended", "critical", "job")
    assert "division by zero" in alert["message"]
    assert alert["closed_at"] is None
    failing.wait_for(lambda: len(alerts()) == 1)
    told = alerts()[0]
    assert {
        key: told[key] for key in ("event", "severity", "database", "node", "pgt_id", "seq")
    } == {
        "event": "suspended",
        "severity": "critical",
        "database": failing.name,
        "node": "job",
        "pgt_id": node(failing)["pgt_id"],
        "seq": alert["seq"],
    }
    assert "division by zero" in told["message"]
    assert told["truncated"] is False
    assert failing.execute(
        "SELECT status, detail FROM sluice.health_check() WHERE \"check\" = 'nodes'"
    ) == [("critical", '"job" is suspended')]

    # A suspended node does not run, by its schedule or by hand, until it is reset.
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState):
        run_now(failing)
    failing.execute("UPDATE t SET x = 1")
    failing.execute("SELECT sluice.reset('job')")
    assert (node(failing)["status"], node(failing)["consecutive_errors"]) == ("active", 0)
    failing.wait_for(lambda: len(alerts()) == 2)
    assert (alerts()[1]["event"], alerts()[1]["severity"]) == ("suspended", "info")
    assert failing.execute("SELECT count(*) FROM sluice.alerts WHERE closed_at IS NULL") == [(0,)]
    assert ended(failing, run_now(failing))["outcome"] == "succeeded"
    idle(cluster)


@settings(max_consecutive_errors="1")
def test_suspended_node_is_left_alone_by_the_grid(failing: Database) -> None:
    failing.execute("SELECT sluice.schedule('job', '1s', 'SELECT 1 / 0')")
    failing.execute("SELECT sluice.schedule('good', '1s', 'SELECT 1')")
    failing.wait_for("SELECT count(*) = 4 FROM sluice.history WHERE name = 'good'")
    assert failing.execute("SELECT count(*) FROM sluice.history WHERE name = 'job'") == [(1,)]
    # After a reset it is on its grid again, without making up for the time between.
    failing.execute("SELECT sluice.schedule('job', '1s', 'SELECT 1')")
    failing.execute("SELECT sluice.reset('job')")
    failing.wait_for("SELECT count(*) = 3 FROM sluice.history WHERE name = 'job'")
    lateness = failing.execute(
        "SELECT max(started_at - due_at) < interval '1 s' FROM sluice.history"
        " WHERE name = 'job' AND outcome = 'succeeded'"
    )
    assert lateness == [(True,)]


@settings(max_consecutive_errors="2")
def test_success_resets_the_count(failing: Database) -> None:
    failing.execute("CREATE TABLE t AS SELECT 0 AS x")
    schedule(failing, "UPDATE t SET x = x; SELECT 1 / x FROM t")
    for x, errors in ((0, 1), (1, 0), (0, 1)):
        failing.execute("UPDATE t SET x = %s", [x])
        ended(failing, run_now(failing))
        assert node(failing)["consecutive_errors"] == errors
    assert node(failing)["status"] == "active"


@settings(max_consecutive_errors="3", retry_backoff_base="100 ms")
def test_retried_failures_suspend_too(failing: Database) -> None:
    schedule(failing, "DO $do$BEGIN RAISE 'no' USING ERRCODE = '40001'; END$do$")
    failing.execute("SELECT sluice.run_now('job')")
    failing.wait_for("SELECT status = 'suspended' FROM sluice.nodes")
    assert failing.execute("SELECT attempt FROM sluice.history ORDER BY started_at") == [
        (1,),
        (2,),
        (3,),
    ]
    assert node(failing)["remedy"] is None


@settings(max_consecutive_errors="1")
@pytest.mark.parametrize(
    "message",
    ["x" * 20_000, "\u00e9\u4e2d\U0001f600" * 5_000, '\t"\\\x01' * 3_000],
    ids=["long", "wide", "escaped"],
)
def test_alert_of_any_message_fits_a_notification(
    failing: Database, alerts: Callable[[], list[dict[str, Any]]], message: str
) -> None:
    failing.execute("SELECT sluice.configure('max_query_bytes', '1 MB')")
    literal = message.replace("'", "''")
    schedule(failing, f"DO $do$BEGIN RAISE USING MESSAGE = '{literal}'; END$do$")
    assert ended(failing, run_now(failing))["message"] == message
    failing.wait_for(lambda: len(alerts()) == 1)
    assert alerts()[0]["truncated"] is True
    assert message in failing.execute("SELECT message FROM sluice.alerts")[0][0]


@settings(max_consecutive_errors="1")
def test_alert_of_a_long_name_fits_a_notification(
    failing: Database, cluster: Cluster, alerts: Callable[[], list[dict[str, Any]]]
) -> None:
    name = "\u00e9" * 9_000
    schedule(failing, "SELECT 1 / 0", name)
    assert ended(failing, run_now(failing, name))["outcome"] == "permanent_error"
    failing.wait_for(lambda: len(alerts()) == 1)
    assert alerts()[0]["pgt_id"] == node(failing, name)["pgt_id"]
    idle(cluster)


# The scheduler itself


def test_unreadable_schedule_is_quarantined_and_others_fire(
    failing: Database, cluster: Cluster, alerts: Callable[[], list[dict[str, Any]]]
) -> None:
    failing.execute("SELECT sluice.schedule('odd', '1s', 'SELECT 1')")
    failing.execute("SELECT sluice.schedule('good', '1s', 'SELECT 1')")
    failing.wait_for("SELECT count(*) > 0 FROM sluice.history WHERE name = 'odd'")
    failing.execute("UPDATE _sluice.node SET schedule = 'every blue moon' WHERE job_name = 'odd'")
    failing.wait_for("SELECT status = 'quarantined' FROM sluice.nodes WHERE name = 'odd'")
    count = failing.execute("SELECT count(*) FROM sluice.history WHERE name = 'good'")[0][0]
    failing.wait_for(f"SELECT count(*) > {count + 1} FROM sluice.history WHERE name = 'good'")
    assert failing.execute("SELECT event, node FROM sluice.alerts") == [("quarantined", "odd")]
    assert len(alerts()) == 1
    assert '"odd" is quarantined' in cluster.log_text()
    failing.execute("SELECT sluice.schedule('odd', '1s', 'SELECT 1')")
    assert node(failing, "odd")["status"] == "active"
    count = failing.execute("SELECT count(*) FROM sluice.history WHERE name = 'odd'")[0][0]
    failing.wait_for(f"SELECT count(*) > {count} FROM sluice.history WHERE name = 'odd'")


def test_failing_tick_is_retried_and_then_told(failing: Database) -> None:
    """A tick that fails for good costs its database a pause, and no other node's error count."""
    failing.execute("SELECT sluice.schedule('job', '1s', 'SELECT 1')")
    failing.wait_for("SELECT count(*) > 0 FROM sluice.history")
    source = failing.execute("SELECT pg_get_functiondef('_sluice.tick'::regproc)")[0][0]
    failing.execute(
        "CREATE OR REPLACE FUNCTION _sluice.tick(_limit integer, _busy bigint[])"
        " RETURNS TABLE (due jsonb, wait_seconds double precision, has_alerts boolean)"
        " LANGUAGE plpgsql AS"
        " $$BEGIN RAISE 'tick is broken' USING ERRCODE = '40001'; END$$"
    )
    failing.wait_for(
        "SELECT state = 'failed' AND error LIKE '%tick is broken%' FROM sluice.databases()"
    )
    failing.execute(source)
    at = failing.execute("SELECT clock_timestamp()")[0][0]
    failing.wait_for(f"SELECT count(*) > 1 FROM sluice.history WHERE started_at > '{at}'")
    assert failing.execute("SELECT DISTINCT outcome FROM sluice.history") == [("succeeded",)]
    failing.wait_for("SELECT state = 'scheduled' FROM sluice.databases()")
