"""Which databases are scheduled, and how they come and go."""

from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from calls import a_run_in_progress
from cluster import Cluster, Database, Leader
from runs import ran


def oid(cluster: Cluster, database: str) -> int:
    return cluster.execute("SELECT oid::bigint FROM pg_database WHERE datname = %s", [database])[0][
        0
    ]


def sessions(database: Database) -> int:
    return database.cluster.execute(
        "SELECT count(*) FROM pg_stat_activity"
        " WHERE datname = %s AND application_name LIKE 'pg_sluice%%'",
        [database.name],
    )[0][0]


def test_databases_with_equal_ids_share_nothing(
    member: Any, other: Any, lead: Callable[..., Leader]
) -> None:
    for database in (member, other):
        database.execute("CREATE TABLE log (at timestamptz DEFAULT clock_timestamp())")
    ids = {
        database.execute(
            "SELECT sluice.schedule('job', '1s', %s)",
            [f"INSERT INTO log DEFAULT VALUES; SELECT '{database.name}'"],
        )[0][0]
        for database in (member, other)
    }
    assert len(ids) == 1
    lead()
    for database in (member, other):
        ran(database, 2)
    assert member.execute("SELECT sluice.pause(ARRAY['job'])") == [("paused",)]
    before = member.execute("SELECT count(*) FROM log")[0][0]
    rows = other.execute("SELECT count(*) FROM log")[0][0]
    other.wait_for(f"SELECT count(*) > {rows + 1} FROM log")
    assert member.execute("SELECT count(*) FROM log") == [(before,)]
    # Both paused nodes have the same pgt_id: ending one pause leaves the other.
    assert other.execute("SELECT sluice.unpause(ARRAY['job'])") == [(0,)]
    assert member.execute("SELECT sluice.unpause(ARRAY['job'])") == [(1,)]
    member.wait_for(f"SELECT count(*) > {before} FROM log")
    # A run of the one does not stand in the way of the other's.
    lock = "SELECT pg_advisory_xact_lock_shared(_sluice.lock_class('node'), 1)"
    with member.connect(autocommit=False) as connection:
        connection.execute(lock.replace("_shared", ""))
        rows = other.execute("SELECT count(*) FROM log")[0][0]
        other.wait_for(f"SELECT count(*) > {rows} FROM log")


def test_run_in_progress_concerns_stops_of_its_own_database_only(
    cluster: Cluster, member: Any, other: Any, leader: Leader
) -> None:
    """While a node runs, another database's with the same pgt_id is paused and drained at once."""
    here = "WHERE database = current_database() AND name = 'job'"

    def run(database: Database, name: str) -> None:
        run_id = database.execute("SELECT sluice.run_now(%s)", [name])[0][0]
        database.wait_for(f"SELECT count(*) = 0 FROM sluice.queue() WHERE run_id = '{run_id}'")

    member.execute("SELECT sluice.schedule('job', 'manual', 'SELECT 1')")

    with a_run_in_progress(other, "job") as theirs:
        ids = [d.execute("SELECT pgt_id FROM sluice.nodes")[0][0] for d in (member, other)]
        assert ids[0] == ids[1]
        assert member.execute("SELECT sluice.pause('{job}', '2 s')") == [("paused",)]
        assert member.execute("SELECT sluice.drain('2 s')") == [("drained",)]
        member.execute("SELECT sluice.resume()")
        theirs.open()
        other.wait_for(f"SELECT count(*) = 0 FROM sluice.queue() {here}")
        # The pause here holds nothing back there.
        theirs.enter()
        assert member.execute("SELECT sluice.unpause('{job}')") == [(1,)]
        assert other.execute("SELECT sluice.pause('{job}', wait => false)") == [("pausing",)]
        assert cluster.execute("SELECT db_oid::bigint, pgt_id FROM _sluice.pause") == [
            (oid(cluster, other.name), ids[1])
        ]
        run(member, "job")
        assert other.execute(f"SELECT state FROM sluice.queue() {here}") == [("running",)]
        theirs.open()
        other.wait_for(f"SELECT count(*) = 0 FROM sluice.queue() {here}")
    # Nor does the pause there hold back anything but its node.
    other.execute("SELECT sluice.run_now('job')")
    other.execute("SELECT sluice.schedule('beside', 'manual', 'SELECT 1')")
    run(member, "job")
    run(other, "beside")
    assert other.execute(f"SELECT state FROM sluice.queue() {here}") == [("queued",)]
    assert other.execute("SELECT sluice.unpause('{job}')") == [(1,)]
    ran(other, 4)
    for database, runs in ((member, 2), (other, 4)):
        assert database.execute(
            "SELECT outcome, count(*) FROM sluice.history GROUP BY outcome"
        ) == [("succeeded", runs)]


def test_errors_and_health_of_a_database_are_its_own(
    member: Any, other: Any, lead: Callable[..., Leader]
) -> None:
    """The same pgt_id fails and is suspended in the one, and runs in the other."""
    member.execute("SELECT sluice.schedule('job', '1s', 'SELECT 1 / 0')")
    other.execute("SELECT sluice.schedule('job', '1s', 'SELECT 1')")
    lead()
    member.wait_for("SELECT status = 'suspended' FROM sluice.nodes")
    ran(other, 2)
    state = (
        "SELECT pgt_id, consecutive_errors, last_outcome,"
        " (SELECT h.status FROM sluice.health_check() AS h WHERE h.\"check\" = 'nodes'),"
        " (SELECT count(*) FROM sluice.alerts)"
        " FROM sluice.nodes"
    )
    assert member.execute(state) == [(1, 3, "permanent_error", "critical", 1)]
    assert other.execute(state) == [(1, 0, "succeeded", "ok", 0)]


def test_start_and_stop_are_idempotent(cluster: Cluster, database: Database) -> None:
    for _ in range(2):
        database.execute("SELECT sluice.start()")
        assert cluster.execute("SELECT database, state FROM sluice.databases()") == [
            (database.name, "joining")
        ]
        assert cluster.execute(
            "SELECT count(*) FROM cron.job WHERE command = 'CALL sluice.run()'"
        ) == [(1,)]
    for _ in range(2):
        database.execute("SELECT sluice.stop()")
        assert cluster.execute("SELECT count(*) FROM sluice.databases()") == [(0,)]
        assert cluster.execute("SELECT count(*) FROM cron.job") == [(0,)]


def test_start_brings_the_pg_cron_entry_up_to_date(cluster: Cluster, member: Any) -> None:
    """It keeps the host, port and database that it was made with; a standby can have others."""
    cluster.execute("UPDATE cron.job SET nodename = 'elsewhere', nodeport = 1, database = 'former'")
    member.execute("SELECT sluice.start()")
    assert cluster.execute("SELECT nodename, nodeport, database FROM cron.job") == [
        (str(cluster.directory), cluster.port, cluster.control_db)
    ]


def test_start_while_the_leader_runs(cluster: Cluster, member: Any, leader: Leader) -> None:
    with cluster.database() as late:
        late.execute("SELECT sluice.schedule('job', '1s', 'SELECT 1')")
        late.execute("SELECT sluice.start()")
        ran(late)
        # Its first tick is recorded when what it found due is queued.
        late.wait_for(
            "SELECT state = 'scheduled' FROM sluice.databases() WHERE database = current_database()"
        )


def test_database_can_be_dropped_after_stop(
    cluster: Cluster, member: Any, lead: Callable[..., Leader]
) -> None:
    """The leader lets go of it within a tick, idle workers too."""
    with cluster.database() as doomed:
        doomed.execute("SELECT sluice.start()")
        doomed.execute("SELECT sluice.schedule('job', '1s', 'SELECT 1')")
        leader = lead()
        ran(doomed)
        assert sessions(doomed) >= 2
        doomed.execute("SELECT sluice.stop()")

        def dropped() -> bool:
            try:
                cluster.execute(f"DROP DATABASE {doomed.name}")
            except psycopg.errors.ObjectInUse:
                return False
            return True

        # DROP DATABASE itself waits five seconds for sessions to go.
        cluster.wait_for(lambda: sessions(doomed) == 0)
        cluster.wait_for(dropped)
    assert leader.alive
    assert cluster.execute("SELECT database FROM sluice.databases()") == [(member.name,)]


def test_run_in_progress_ends_as_usual_after_stop(
    cluster: Cluster,
    member: Any,
    other: Any,
    lead: Callable[..., Leader],
    workers: str,
) -> None:
    cluster.execute("SELECT sluice.configure('max_workers', %s, cluster => true)", [workers])
    lead()
    member.execute("SELECT sluice.schedule('job', 'manual', 'SELECT pg_sleep(1.5)')")
    member.execute("SELECT sluice.schedule('never', 'manual', 'SELECT 1', priority => -100)")
    member.execute("SELECT sluice.run_now('job')")
    cluster.wait_for("SELECT count(*) = 1 FROM _sluice.queue WHERE state = 'running'", timeout=15)
    member.execute("SELECT sluice.stop()")
    ran(member)
    assert member.execute("SELECT name, outcome FROM sluice.history") == [("job", "succeeded")]
    cluster.wait_for("SELECT count(*) = 0 FROM _sluice.queue")
    cluster.wait_for(lambda: sessions(member) == 0)
    # The node runs again after the next start.
    member.execute("SELECT sluice.start()")
    member.execute("SELECT sluice.run_now('job')")
    ran(member, 2)


def test_database_that_leaves_while_it_waits_for_a_worker(
    cluster: Cluster, member: Any, other: Any, lead: Callable[..., Leader]
) -> None:
    """1. The leader waits for a slot for it. 2. It leaves. 3. The leader notices, before it has the
    slot: what a lock kept from being reserved is tried again. 4. No slot, no harm."""
    cluster.execute("SELECT sluice.configure('scheduler_interval', '100 ms', cluster => true)")
    lead()
    left = oid(cluster, other.name)
    for database in (member, other):
        database.execute("SELECT sluice.schedule('job', 'manual', 'SELECT 1')")
    cluster.wait_for("SELECT count(*) = 2 FROM _sluice.member WHERE state = 'scheduled'")
    with cluster.connect(autocommit=False) as holder:
        holder.execute("SELECT FROM _sluice.lease FOR NO KEY UPDATE")
        other.execute("SELECT sluice.run_now('job')")
        cluster.wait_for(
            "SELECT true FROM pg_stat_activity AS a WHERE a.wait_event_type = 'Lock'"
            " AND a.application_name = 'pg_sluice leader' AND a.query ~ 'reserve_slot'"
        )
        other.execute("SELECT sluice.stop()")
        cluster.wait_for(lambda: sessions(other) == 0)
    member.execute("SELECT sluice.run_now('job')")
    ran(member)
    assert cluster.execute("SELECT count(*) FROM _sluice.slot WHERE db_oid = %s", [left]) == [(0,)]


def test_copy_of_a_member_is_no_member(
    cluster: Cluster, member: Any, lead: Callable[..., Leader]
) -> None:
    """A database made from a template of a member has its nodes, and nobody asked to run them."""
    member.execute("SELECT sluice.schedule('job', '1s', 'SELECT 1')")
    member.let_go()
    with cluster.database(member.name) as copy:
        assert copy.execute("SELECT count(*) FROM sluice.nodes") == [(1,)]
        lead()
        ran(member, 3)
        assert copy.execute("SELECT count(*) FROM sluice.history") == [(0,)]
        assert sessions(copy) == 0
        assert cluster.execute("SELECT database FROM sluice.databases()") == [(member.name,)]


@pytest.mark.parametrize("force", [False, True], ids=["idle", "with a run in progress"])
def test_dropped_database_is_forgotten(
    cluster: Cluster, member: Any, leader: Leader, force: bool
) -> None:
    with cluster.database() as doomed:
        doomed.execute("SELECT sluice.start()")
        doomed.execute("SELECT sluice.schedule('job', 'manual', 'SELECT pg_sleep(60)')")
        doomed.execute("SELECT sluice.schedule('queued', 'manual', 'SELECT 1')")
        doomed.execute("SELECT sluice.pause(ARRAY['queued'])")
        doomed.execute("SELECT sluice.run_now('queued')")
        if force:
            doomed.execute("SELECT sluice.run_now('job')")
            cluster.wait_for("SELECT count(*) = 1 FROM _sluice.queue WHERE state = 'running'")
        doomed.execute("SELECT sluice.drain(wait => false)")
        number = oid(cluster, doomed.name)
        cluster.execute(f"DROP DATABASE {doomed.name} WITH (FORCE)")
    for table in ("member", "queue", "slot", "drain", "pause"):
        cluster.wait_for(
            f"SELECT count(*) = 0 FROM _sluice.{table} WHERE db_oid = {number}", timeout=8
        )
    assert leader.alive
    assert cluster.execute("SELECT database FROM sluice.databases()") == [(member.name,)]
    # Nothing of it stands in the way of a drain of the server.
    assert cluster.execute("SELECT sluice.drain('1 s', cluster => true)") == [("drained",)]


def test_renamed_database_stays_a_member(
    cluster: Cluster, member: Any, other: Any, lead: Callable[..., Leader]
) -> None:
    other.execute("SELECT sluice.schedule('job', '1s', 'SELECT 1')")
    lead()
    ran(other)
    other.let_go()
    cluster.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", [other.name]
    )

    def renamed() -> bool:
        try:
            cluster.execute(f"ALTER DATABASE {other.name} RENAME TO renamed")
        except psycopg.errors.ObjectInUse:
            return False
        return True

    cluster.wait_for(renamed)
    try:
        cluster.wait_for(
            "SELECT state = 'scheduled' FROM sluice.databases() WHERE database = 'renamed'",
            timeout=15,
        )
    finally:
        cluster.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = 'renamed'"
        )
        cluster.execute("DELETE FROM _sluice.member")
        cluster.wait_for("SELECT count(*) = 0 FROM pg_stat_activity WHERE datname = 'renamed'")
        cluster.execute(f"ALTER DATABASE renamed RENAME TO {other.name}")


def mismatch(database: Database) -> None:
    database.execute("UPDATE pg_extension SET extversion = '0.0.1' WHERE extname = 'pg_sluice'")


def repair(cluster: Cluster, database: Database) -> None:
    version = cluster.execute("SELECT extversion FROM pg_extension WHERE extname = 'pg_sluice'")[0][
        0
    ]
    database.execute(
        "UPDATE pg_extension SET extversion = %s WHERE extname = 'pg_sluice'", [version]
    )


def test_member_of_another_version_is_not_scheduled(
    cluster: Cluster, member: Any, other: Any, lead: Callable[..., Leader]
) -> None:
    for database in (member, other):
        database.execute("SELECT sluice.schedule('job', '1s', 'SELECT 1')")
    mismatch(other)
    lead()
    ran(member, 2)
    cluster.wait_for(
        f"SELECT state = 'version_mismatch' FROM sluice.databases() WHERE database = '{other.name}'"
    )
    error = cluster.execute(
        "SELECT error FROM sluice.databases() WHERE database = %s", [other.name]
    )
    assert "0.0.1" in error[0][0]
    assert other.execute("SELECT count(*) FROM sluice.history") == [(0,)]
    repair(cluster, other)
    # health_check() is a function of the member; it is back at our version here, the state is not.
    assert other.execute(
        "SELECT status FROM sluice.health_check() WHERE \"check\" = 'database'"
    ) == [("critical",)]
    ran(other)
    other.wait_for("SELECT status = 'ok' FROM sluice.health_check() WHERE \"check\" = 'database'")


def test_version_changes_while_scheduled(
    cluster: Cluster, member: Any, other: Any, lead: Callable[..., Leader]
) -> None:
    """Neither the grid nor a run that is queued already is executed any more."""
    other.execute("SELECT sluice.schedule('job', '1s', 'SELECT 1')")
    other.execute("SELECT sluice.schedule('by_hand', 'manual', 'SELECT 1')")
    lead()
    ran(other)
    other.execute("SELECT sluice.pause(ARRAY['by_hand'])")
    other.execute("SELECT sluice.run_now('by_hand')")
    mismatch(other)
    cluster.wait_for(
        f"SELECT state = 'version_mismatch' FROM sluice.databases() WHERE database = '{other.name}'"
    )
    before = other.execute("SELECT count(*) FROM sluice.history")
    cluster.execute("DELETE FROM _sluice.pause")
    cluster.execute("NOTIFY sluice_wake")
    member.execute("SELECT sluice.schedule('job', '1s', 'SELECT 1')")
    ran(member, 3)
    assert other.execute("SELECT count(*) FROM sluice.history") == before
    repair(cluster, other)


def test_unreachable_database_fails_alone(
    cluster: Cluster, member: Any, other: Any, lead: Callable[..., Leader]
) -> None:
    member.execute("SELECT sluice.schedule('job', '1s', 'SELECT 1')")
    cluster.execute(f"ALTER DATABASE {other.name} ALLOW_CONNECTIONS false")
    lead()
    ran(member, 2)
    cluster.wait_for(
        f"SELECT state = 'failed' FROM sluice.databases() WHERE database = '{other.name}'"
    )
    error = cluster.execute(
        "SELECT error FROM sluice.databases() WHERE database = %s", [other.name]
    )
    assert "not currently accepting connections" in error[0][0]
    cluster.execute(f"ALTER DATABASE {other.name} ALLOW_CONNECTIONS true")
    cluster.wait_for(
        f"SELECT state = 'scheduled' FROM sluice.databases() WHERE database = '{other.name}'",
    )


def test_one_pass_ends_though_a_database_is_unreachable(
    cluster: Cluster,
    member: Any,
    other: Any,
    lead: Callable[..., Leader],
    workers: str,
) -> None:
    """Its queued run waits for another pass; the other database's is run."""
    cluster.execute("SELECT sluice.configure('max_workers', %s, cluster => true)", [workers])
    for database in (member, other):
        database.execute("SELECT sluice.schedule('job', 'manual', 'SELECT 1')")
        database.execute("SELECT sluice.run_now('job')")
    cluster.execute(f"ALTER DATABASE {other.name} ALLOW_CONNECTIONS false")
    try:
        leader = lead("0", wait=False)
        assert leader.join() is None
    finally:
        cluster.execute(f"ALTER DATABASE {other.name} ALLOW_CONNECTIONS true")
    assert member.execute("SELECT outcome FROM sluice.history") == [("succeeded",)]
    assert cluster.execute("SELECT database, queued FROM sluice.databases() ORDER BY database") == [
        (member.name, 0),
        (other.name, 1),
    ]


def test_second_failing_database_is_alerted_too(
    cluster: Cluster, member: Any, other: Any, lead: Callable[..., Leader]
) -> None:
    for database in (member, other):
        cluster.execute(f"ALTER DATABASE {database.name} ALLOW_CONNECTIONS false")
    lead()
    cluster.wait_for(
        "SELECT count(*) = 2 FROM sluice.alerts"
        " WHERE event = 'database_failed' AND closed_at IS NULL"
    )
    for database in (member, other):
        cluster.execute(f"ALTER DATABASE {database.name} ALLOW_CONNECTIONS true")
    cluster.wait_for(
        "SELECT count(*) = 2 FROM sluice.alerts"
        " WHERE event = 'database_failed' AND closed_at IS NOT NULL",
    )


def test_timeouts_of_a_database_do_not_end_the_scheduler(
    cluster: Cluster, member: Any, other: Any, lead: Callable[..., Leader]
) -> None:
    """Sessions of ours have no deadline from outside; refresh_timeout is what bounds a run."""
    for name in (
        "idle_session_timeout",
        "statement_timeout",
        "idle_in_transaction_session_timeout",
    ):
        cluster.execute(f"ALTER DATABASE {other.name} SET {name} = '300ms'")
    other.execute("SELECT sluice.schedule('job', '1s', 'SELECT pg_sleep(0.5)')")
    lead()
    other.wait_for("SELECT count(*) = 3 FROM sluice.history")
    assert other.execute("SELECT DISTINCT outcome FROM sluice.history") == [("succeeded",)]
    assert cluster.execute(
        "SELECT count(*) FROM sluice.alerts WHERE event = 'database_failed'"
    ) == [(0,)]


def test_defaults_of_a_database_do_not_break_its_scheduling(
    cluster: Cluster, member: Any, other: Any, lead: Callable[..., Leader]
) -> None:
    for name, value in (
        ("default_transaction_read_only", "on"),
        ("default_transaction_isolation", "'serializable'"),
        ("search_path", "nowhere"),
        ("IntervalStyle", "'iso_8601'"),
        ("TimeZone", "'Asia/Kathmandu'"),
        ("standard_conforming_strings", "off"),
        ("bytea_output", "'escape'"),
    ):
        cluster.execute(f"ALTER DATABASE {other.name} SET {name} = {value}")
    with other.connect() as connection:
        connection.execute("SET default_transaction_read_only = off")
        connection.execute(
            "SELECT sluice.schedule('job', '1s', 'SELECT 1', refresh_timeout => '90 s')"
        )
    lead()
    ran(other, 2)
    assert other.execute("SELECT DISTINCT outcome FROM sluice.history") == [("succeeded",)]


@pytest.mark.parametrize("max_workers", ["4", "0"])
def test_role_that_a_database_sets_is_not_the_schedulers(
    cluster: Cluster, member: Any, other: Any, lead: Callable[..., Leader], max_workers: str
) -> None:
    """So that all objects get one owner, say, whoever makes them."""
    cluster.execute("SELECT sluice.configure('max_workers', %s, cluster => true)", [max_workers])
    other.execute("CREATE TABLE seen AS SELECT current_user WHERE false")
    other.execute("SELECT sluice.schedule('job', '1s', 'INSERT INTO seen SELECT current_user')")
    other.execute(
        "SELECT sluice.schedule('top', '1s', 'INSERT INTO seen SELECT current_user',"
        " transactional => false)"
    )
    cluster.execute("CREATE ROLE app_owner")
    try:
        cluster.execute(f"ALTER DATABASE {other.name} SET role = app_owner")
        lead()
        other.wait_for("SELECT count(DISTINCT name) = 2 FROM sluice.history")
        assert other.execute("SELECT DISTINCT outcome FROM sluice.history") == [("succeeded",)]
        assert other.execute("SELECT DISTINCT current_user FROM seen") == [("postgres",)]
    finally:
        cluster.execute("DROP ROLE app_owner")


def test_date_style_of_a_database_does_not_end_the_leader(
    cluster: Cluster, member: Any, other: Any, lead: Callable[..., Leader]
) -> None:
    """Its owner, who may be anybody, can set that."""
    other.execute("SELECT sluice.schedule('job', '1s', 'SELECT 1')")
    other.let_go()
    cluster.execute(f"ALTER DATABASE {other.name} SET DateStyle = 'SQL, DMY'")
    leader = lead()
    other.wait_for(
        lambda: not leader.alive or other.execute("SELECT count(*) > 1 FROM sluice.history")[0][0]
    )
    assert leader.error is None
    assert other.execute("SELECT DISTINCT outcome FROM sluice.history") == [("succeeded",)]


def test_member_with_an_awkward_name(
    cluster: Cluster, member: Any, lead: Callable[..., Leader]
) -> None:
    name = 'Weird "name" with spaces\' = x'
    quoted = '"{}"'.format(name.replace('"', '""'))
    cluster.execute(f"CREATE DATABASE {quoted} TEMPLATE sluice_template")
    try:
        database = Database(cluster, name)
        database.execute("SELECT sluice.start()")
        database.execute("SELECT sluice.schedule('job', '1s', 'SELECT 1')")
        lead()
        ran(database)
        assert database.execute("SELECT sluice.drain()") == [("drained",)]
    finally:
        cluster.execute(f"DROP DATABASE {quoted} WITH (FORCE)")


def test_extension_dropped_in_a_member(
    cluster: Cluster, member: Any, other: Any, lead: Callable[..., Leader]
) -> None:
    """DROP EXTENSION in a database that is still scheduled harms nobody else."""
    for database in (member, other):
        database.execute("SELECT sluice.schedule('job', '1s', 'SELECT 1')")
    leader = lead()
    ran(other)
    with other.connect() as connection:
        connection.execute("SET lock_timeout = '10 s'")
        connection.execute("DROP EXTENSION pg_sluice CASCADE")
    cluster.wait_for(
        f"SELECT state = 'failed' FROM sluice.databases() WHERE database = '{other.name}'"
    )
    count = member.execute("SELECT count(*) FROM sluice.history")[0][0]
    ran(member, count + 2)
    assert leader.alive
    # What was queued for it is no reason to spin, and its slots are given back.
    cluster.wait_for(
        f"SELECT count(*) = 0 FROM _sluice.queue WHERE db_oid = {oid(cluster, other.name)}"
        " AND state = 'running'"
    )


@pytest.mark.parametrize("encoding", ["SQL_ASCII", "LATIN1"])
def test_member_in_another_encoding(
    cluster: Cluster, member: Any, lead: Callable[..., Leader], encoding: str, workers: str
) -> None:
    """The driver would make bytes of what a database in SQL_ASCII has to say."""
    cluster.execute("SELECT sluice.configure('max_workers', %s, cluster => true)", [workers])
    name = f"in_{encoding.lower()}"
    cluster.execute(
        f"CREATE DATABASE {name} ENCODING '{encoding}' LC_COLLATE 'C' LC_CTYPE 'C'"
        " TEMPLATE template0"
    )
    try:
        other = Database(cluster, name)
        other.execute("CREATE EXTENSION pg_sluice CASCADE")
        for job, command in (("good", "SELECT 1"), ("bad", "SELECT 1/0")):
            for database in (member, other):
                database.execute("SELECT sluice.schedule(%s, '1s', %s)", [job, command])
        with other.connect(client_encoding="UTF8") as connection:
            connection.execute(
                "SELECT sluice.schedule('naïve', '1s', 'DO $$ BEGIN RAISE ''é''; END $$')"
            )
        other.execute("SELECT sluice.start()")
        leader = lead()
        for database in (member, other):
            database.wait_for(
                "SELECT count(DISTINCT (name, outcome)) = 2 FROM sluice.history"
                " WHERE (name, outcome) IN (('good', 'succeeded'), ('bad', 'permanent_error'))"
            )
        with other.connect(client_encoding="UTF8") as connection:
            failed = "SELECT message FROM sluice.history WHERE name = 'naïve' LIMIT 1"
            cluster.wait_for(lambda: connection.execute(failed).fetchone() == ("é",))
        assert leader.alive
    finally:
        cluster.execute(f"DROP DATABASE {name} WITH (FORCE)")
