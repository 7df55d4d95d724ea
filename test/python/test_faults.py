"""Steps of the scheduler that fail: what is tried again, what is told, and who never notices."""

import re
from collections.abc import Callable
from contextlib import ExitStack, suppress
from datetime import timedelta
from typing import Any

import psycopg
import pytest

from cluster import Cluster, Database, Leader
from faults import Fault
from runs import configure, run_now, schedule

type_of_make_fault = Callable[[Database, str], Fault]
type_of_make_leader = Callable[..., Leader]

CATALOG = """
    SELECT md5((SELECT string_agg(p::text, '' ORDER BY p.oid) FROM pg_proc AS p)),
        md5((SELECT string_agg(d::text, '' ORDER BY d::text) FROM pg_depend AS d)),
        (SELECT array_agg(n.nspname ORDER BY 1) FROM pg_namespace AS n)
"""


# The faults themselves


def test_faults_strike_as_often_as_they_are_armed(database: Database) -> None:
    """Also where a rollback undoes all else, and for functions of any shape."""
    calls = {
        "setting": "_sluice.setting('max_workers')",
        "close_gate": "_sluice.close_gate()",
        "limit_ingredients": "array_agg(i) FROM _sluice.limit_ingredients() AS i",
        "failure_state": "count(*) FROM _sluice.failure_state(1)",
        "tick": "due, wait_seconds FROM _sluice.tick(_busy => '{}', _limit => 9)",
        "perform": "outcome FROM _sluice.perform(gen_random_uuid(), 1, now(), 1, NULL, NULL)",
    }
    for function, call in calls.items():
        value = database.execute(f"SELECT {call}")
        fault = Fault(database, function)
        assert database.execute(f"SELECT {call}") == value
        assert (fault.calls, fault.consumed) == (1, 0)
        fault.arm(2, "40001")
        for consumed in (1, 2):
            with pytest.raises(psycopg.errors.SerializationFailure, match=fault.message):
                database.execute(f"SELECT {call}")
            assert fault.consumed == consumed
        assert len(fault.times) == 2
        assert database.execute(f"SELECT {call}") == value
        assert (fault.calls, fault.consumed) == (3, 2)


def test_lifted_faults_leave_nothing(database: Database) -> None:
    """No function is another than before, and all of them are the extension's."""
    before = database.execute(CATALOG)
    functions = database.execute(
        "SELECT proname FROM pg_proc WHERE pronamespace = '_sluice'::regnamespace"
        " AND prokind = 'f' AND prorettype NOT IN ('trigger'::regtype, 'event_trigger'::regtype)"
    )
    faults = [Fault(database, function) for (function,) in functions]
    assert len(faults) > 100
    assert database.execute(CATALOG) != before
    for fault in faults:
        fault.lift()
    assert database.execute(CATALOG) == before


# A step that fails and is tried again


def due_now(database: Database) -> None:
    """A job that is due once, now."""
    database.execute("SELECT sluice.schedule('job', '1 h', 'SELECT 1')")
    database.execute("UPDATE _sluice.node SET next_fire_at = clock_timestamp()")


def is_done(database: Database) -> bool:
    """Whether that job has run, and its node has moved on."""
    return database.execute(
        "SELECT n.next_fire_at > clock_timestamp() AND EXISTS (SELECT FROM sluice.history AS h"
        " WHERE h.pgt_id = n.pgt_id AND h.outcome = 'succeeded') FROM sluice.nodes AS n"
    ) == [(True,)]


def lease(cluster: Cluster) -> dict[str, Any]:
    return cluster.execute("SELECT to_jsonb(l) FROM _sluice.lease AS l")[0][0]


def failures(cluster: Cluster) -> list[Any]:
    """All alerts of databases that could not be scheduled, closed ones too."""
    return cluster.execute("SELECT node FROM sluice.alerts WHERE event = 'database_failed'")


def sessions(cluster: Cluster, kind: str) -> list[int]:
    rows = cluster.execute(
        "SELECT pid FROM pg_stat_activity WHERE application_name LIKE %s",
        [f"pg_sluice {kind}%"],
    )
    return [pid for (pid,) in rows]


@pytest.mark.parametrize(
    ("function", "sqlstate"),
    [("tick", "40001"), ("enqueue", "55P03"), ("advance", "40P01")],
)
def test_step_that_failed_once_is_tried_again(
    cluster: Cluster,
    member: Database,
    control: Database,
    lead: type_of_make_leader,
    fault: type_of_make_fault,
    function: str,
    sqlstate: str,
) -> None:
    due_now(member)
    made = fault(control if function == "enqueue" else member, function)
    made.arm(1, sqlstate)
    leader = lead("0" if function == "tick" else "1 hour", wait=False)
    member.wait_for(lambda: is_done(member))
    assert made.consumed == 1
    (failed_at,) = made.times
    rows = member.execute("SELECT started_at FROM sluice.history WHERE outcome = 'succeeded'")
    ((started_at,),) = rows
    if function != "advance":
        assert started_at - failed_at >= timedelta(milliseconds=250)
    assert failures(cluster) == []
    assert member.execute("SELECT error FROM sluice.databases()") == [(None,)]

    # And the leader ends as it always does.
    if function == "enqueue":
        leader.cancel()
        assert isinstance(leader.join(), psycopg.errors.QueryCanceled)
        assert lease(cluster)["pid"] == leader.pid
    else:
        if function == "advance":
            member.execute("SELECT sluice.stop()")
        assert leader.join() is None
        assert lease(cluster)["pid"] is None


def test_lost_scheduler_session_is_made_anew(
    cluster: Cluster, member: Database, lead: type_of_make_leader
) -> None:
    """At once, and it hears of new definitions again."""
    configure(member, scheduler_interval="60 s")
    leader = lead()
    member.wait_for("SELECT state = 'scheduled' FROM sluice.databases()")
    lost = sessions(cluster, "scheduler")
    cluster.execute("SELECT pg_terminate_backend(%s)", lost)
    cluster.wait_for(lambda: sessions(cluster, "scheduler") not in ([], lost))
    member.execute("SELECT sluice.schedule('job', '1s', 'SELECT 1')")
    member.wait_for("SELECT count(*) > 0 FROM sluice.history")
    assert failures(cluster) == []
    assert leader.alive


def test_lost_listener_is_made_anew(
    cluster: Cluster, member: Database, lead: type_of_make_leader
) -> None:
    """Without it no wake-up from the control database reaches the leader."""
    configure(member, scheduler_interval="60 s")
    member.execute("SELECT sluice.schedule('job', 'manual', 'SELECT 1')")
    leader = lead()
    cluster.wait_for(lambda: sessions(cluster, "listener"))
    lost = sessions(cluster, "listener")
    cluster.execute("SELECT pg_terminate_backend(%s)", lost)
    cluster.wait_for(lambda: sessions(cluster, "listener") == [])
    # Nobody hears this one, and the next listener makes up for it.
    run_now(member)
    member.wait_for("SELECT count(*) = 1 FROM sluice.history")
    assert sessions(cluster, "listener") not in ([], lost)
    run_now(member)
    member.wait_for("SELECT count(*) = 2 FROM sluice.history")
    assert failures(cluster) == []
    assert leader.alive


@pytest.mark.timeout(90)
def test_refused_connection_is_tried_again(own_cluster: Callable[..., Cluster]) -> None:
    """The scheduler connects for each tick here, and for a while the server takes no session."""
    cluster = own_cluster(fsync=False, settings={"max_connections": 15})
    with cluster.database() as member, cluster.connect() as kept:
        with member.connect() as connection:
            connection.execute(
                "SELECT sluice.configure(s, '0', cluster => true)"
                " FROM unnest('{max_scheduler_connections,max_workers}'::text[]) AS s"
            )
            connection.execute("SELECT sluice.schedule('job', '1s', 'SELECT 1')")
            connection.execute("SELECT sluice.start()")
        Leader(cluster)
        member.wait_for("SELECT count(*) > 0 FROM sluice.history")
        refused = re.compile(rf"\] {member.name} .*FATAL:  sorry, too many clients already")
        with ExitStack() as taken:

            def is_refused() -> bool:
                with suppress(psycopg.OperationalError):
                    while True:
                        taken.enter_context(cluster.connect())
                return bool(refused.search(cluster.log_text()))

            cluster.wait_for(is_refused)
        ((now,),) = kept.execute("SELECT clock_timestamp()")
        member.wait_for(f"SELECT count(*) > 0 FROM sluice.history WHERE due_at > '{now}'")
        assert failures(cluster) == []


def test_connection_after_a_lost_run_is_tried_again(
    cluster: Cluster, member: Database, lead: type_of_make_leader
) -> None:
    """In serial mode a run can take the scheduler's session along."""
    configure(member, max_workers="0")
    schedule(member, "SELECT pg_terminate_backend(pg_backend_pid())")
    lead()
    cluster.wait_for(lambda: sessions(cluster, "scheduler"))
    cluster.execute(f"ALTER DATABASE {member.name} ALLOW_CONNECTIONS false")
    run_now(member)
    cluster.wait_for(lambda: failures(cluster))
    ((facts,),) = cluster.execute("SELECT detail FROM sluice.alerts")
    assert (facts["step"], facts["attempts"]) == ("connect", 4)


@pytest.mark.parametrize("function", ["tick", "enqueue"])
def test_lost_lease_is_not_hidden_by_a_retry(
    cluster: Cluster,
    member: Database,
    control: Database,
    lead: type_of_make_leader,
    fault: type_of_make_fault,
    function: str,
) -> None:
    """Nothing else looks at the lease meanwhile: the next renewal is seconds away."""
    configure(member, scheduler_interval="60 s")
    due_now(member)
    made = fault(control if function == "enqueue" else member, function)
    made.arm(10, "40001")
    leader = lead(wait=False)
    # The last wait is the longest.
    cluster.wait_for(lambda: made.consumed >= 3)
    control.execute("UPDATE _sluice.lease SET expires_at = clock_timestamp()")
    error = leader.join()
    assert error is not None
    assert (error.sqlstate, error.diag.message_primary) == ("SL001", "leadership lost")
    assert made.consumed == 3
    assert failures(cluster) == []


# A step that fails for good


def test_control_database_that_fails_ends_the_leader(
    cluster: Cluster,
    member: Database,
    control: Database,
    lead: type_of_make_leader,
    fault: type_of_make_fault,
) -> None:
    """With the original error at the bottom; its lease is left to lapse, and the next one works."""
    configure(member, lease_ttl="2 s")
    due_now(member)
    made = fault(control, "enqueue")
    made.arm(4, "55P03")
    leader = lead(wait=False)
    error = leader.join()
    assert error is not None
    assert error.sqlstate == "SL002"
    assert error.diag.message_primary == f'scheduling of database "{member.name}" failed'
    detail = error.diag.message_detail
    assert detail.startswith(f'Step "enqueue" failed, after 4 attempts: {made.message}')
    assert detail.endswith("(SQLSTATE 55P03)")
    assert made.consumed == 4
    assert made.times[3] - made.times[0] >= timedelta(seconds=1.75)

    left = lease(cluster)
    assert left["pid"] == leader.pid
    cluster.wait_for("SELECT expires_at < clock_timestamp() FROM _sluice.lease")
    assert lease(cluster) == left
    lead()
    member.wait_for(lambda: is_done(member))
    assert lease(cluster)["epoch"] == left["epoch"] + 1
    assert made.consumed == 4


def test_member_that_fails_is_told_and_harms_no_other(
    cluster: Cluster,
    member: Database,
    other: Database,
    lead: type_of_make_leader,
    fault: type_of_make_fault,
) -> None:
    for database in (member, other):
        database.execute("SELECT sluice.schedule('job', '1s', 'SELECT 1', catch_up => 1000)")
    leader = lead()
    for database in (member, other):
        database.wait_for("SELECT count(*) > 0 FROM sluice.history")
    made = fault(member, "tick")
    made.arm(4, "40001")
    state = (
        "SELECT to_jsonb(d) FROM sluice.databases() AS d"
        f" WHERE database = '{member.name}' AND state = "
    )
    failed = cluster.wait_for(f"{state} 'failed'")
    ((check,),) = member.execute(
        "SELECT to_jsonb(h) FROM sluice.health_check() AS h WHERE \"check\" = 'database'"
    )
    ((alert,),) = cluster.execute(
        "SELECT to_jsonb(a) FROM sluice.alerts AS a WHERE event = 'database_failed'"
    )
    assert made.consumed == 4
    assert made.times[3] - made.times[0] >= timedelta(seconds=1.75)
    told = f'Step "read due nodes" failed, after 4 attempts: {made.message}'
    assert failed["error"].startswith(told)
    # Where it was, which can be pages of SQL, is in the alert's detail.
    assert failed["error"] == f"{told} (SQLSTATE 40001)"
    assert check["status"] == "critical"
    assert failed["error"] in check["detail"]
    assert failed["error"] in alert["message"]
    assert (alert["node"], alert["closed_at"]) == (member.name, None)
    facts = alert["detail"]
    assert "PL/pgSQL function" in facts.pop("context")
    assert facts == {
        "database": member.name,
        "step": "read due nodes",
        "node": None,
        "attempts": 4,
        "sqlstate": "40001",
        "message": made.message,
    }

    # The leader lives, and after a delay the database is scheduled again.
    assert cluster.wait_for(f"{state} 'scheduled'")["error"] is None
    assert cluster.execute(
        "SELECT closed_at IS NOT NULL FROM sluice.alerts WHERE event = 'database_failed'"
    ) == [(True,)]
    member.wait_for(
        lambda: member.execute(
            "SELECT count(*) > 0 FROM sluice.history WHERE started_at > %s", [made.times[3]]
        )[0][0]
    )
    assert leader.alive
    assert made.consumed == 4
    ((again,),) = member.execute(
        "SELECT min(started_at) FROM sluice.history WHERE started_at > %s", [made.times[3]]
    )
    assert again - made.times[3] >= timedelta(seconds=5)
    # The other one has missed nothing.
    fires = other.execute("SELECT due_at, outcome FROM sluice.history ORDER BY due_at")
    assert {outcome for _, outcome in fires} == {"succeeded"}
    first = fires[0][0]
    assert [at for at, _ in fires] == [first + timedelta(seconds=n) for n in range(len(fires))]
    assert len([at for at, _ in fires if made.times[0] < at < again]) >= 5


def test_permanent_error_is_not_retried(
    cluster: Cluster, member: Database, leader: Leader, fault: type_of_make_fault
) -> None:
    """The node that the step was for is in what is told."""
    member.execute("SELECT sluice.schedule('odd', '1s', 'SELECT 1')")
    made = fault(member, "quarantine")
    made.arm(10, "22012")
    member.execute("UPDATE _sluice.node SET schedule = 'every blue moon'")
    cluster.wait_for("SELECT count(*) = 1 FROM sluice.alerts WHERE event = 'database_failed'")
    assert made.consumed == 1
    ((error, facts),) = cluster.execute(
        "SELECT d.error, a.detail FROM sluice.databases() AS d, sluice.alerts AS a"
    )
    assert error.startswith(f'Step "quarantine" for node "odd" failed: {made.message}')
    assert (facts["step"], facts["node"], facts["attempts"]) == ("quarantine", "odd", 1)
    assert facts["sqlstate"] == "22012"
    assert leader.alive
