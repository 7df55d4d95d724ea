"""The recipes of docs/operations.md, run block by block as they stand, and what they promise.

They are run in the guide's order on one server with a real pg_cron, which in the end has moved to a
standby. Tests of this file build on each other, as the recipes of a maintenance night do.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psycopg
import pytest

from cluster import Cluster
from documents import ROOT, Block, is_as_promised, sections

pytestmark = pytest.mark.timeout(600)

GUIDE = "docs/operations.md"
LEADER_SECONDS = 90
"""A minute of pg_cron's, a lease, and patience."""
CRASHED = "SELECT count(*) FROM sluice.history WHERE outcome = 'worker_crashed'"

_MARK = "=== the next step"
_SQL_PLACE = re.compile(r"in (\w+)(?: on (the \w+(?: server)?))?(, until it gives this.*)?")
_SHELL_PLACE = re.compile(r"on (the \w+(?: server)?)(?:, with .*)?")


class Site:
    """The guide's servers, by what it calls them."""

    def __init__(self, clusters: ExitStack, server: Cluster) -> None:
        self._clusters = clusters
        self.servers = {"the server": server}

    def add(self, cluster: Cluster) -> Cluster:
        """One that is to be closed in the end."""
        self._clusters.callback(cluster.close)
        return cluster

    @property
    def server(self) -> Cluster:
        return self.servers["the server"]

    def run(self, block: Block, **environment: str) -> None:
        """Runs a block where it says, and compares what it gives with what it promises."""
        if block.language == "sh":
            self._run_shell(block, environment)
            return
        found = _SQL_PLACE.fullmatch(block.place)
        assert found, f"no place to run this: {block.place}"
        database, server, until = found.groups()
        cluster = self.servers[server or "the server"]
        if until:
            cluster.wait_for(
                lambda: not mismatches(block, psql(cluster, database, block)),
                timeout=LEADER_SECONDS,
                interval=1,
            )
        else:
            assert not mismatches(block, psql(cluster, database, block))

    def _run_shell(self, block: Block, environment: dict[str, str]) -> None:
        if block.place == "in the source directory of the new version, as root":
            # As whoever runs the tests, who has installed it before.
            subprocess.run(["/bin/sh", "-euc", block.text], cwd=ROOT, check=True)
            return
        found = _SHELL_PLACE.fullmatch(block.place)
        assert found, f"no place to run this: {block.place}"
        written = self.servers[found[1]].shell(block.text, **environment)
        assert not mismatches(block, [written])


def psql(cluster: Cluster, database: str, block: Block) -> list[str]:
    """What psql writes for each step of a block."""
    script = f"\n\\echo {_MARK}\n".join(code for code, _ in block.steps)
    written = cluster.shell(
        f"psql -X -q -A -t -F ' | ' -v ON_ERROR_STOP=1 -d {database}", given=script + "\n"
    )
    return written.split(f"{_MARK}\n")


def mismatches(block: Block, written: list[str]) -> list[tuple[str, list[str]]]:
    """What steps of a block gave instead of what they promise."""
    return [
        (given, promised)
        for given, (_, promised) in zip(written, block.steps, strict=True)
        if promised is not None and not is_as_promised(given, promised)
    ]


class Recipe:
    """A section of the guide, whose blocks are run one by one."""

    def __init__(self, site: Site, heading: str) -> None:
        self._site = site
        self.left = list(sections(GUIDE)[heading])

    def step(self, **environment: str) -> Block:
        """Runs the next block."""
        block = self.left.pop(0)
        self._site.run(block, **environment)
        return block


@contextmanager
def recipe(site: Site, heading: str) -> Iterator[Recipe]:
    """A section of the guide; it is an error to leave one of its blocks out."""
    section = Recipe(site, heading)
    yield section
    assert not section.left, "blocks that were not run"


@pytest.fixture(scope="module")
def night(guide_cluster: Cluster) -> Iterator[Site]:
    """The servers of a maintenance night; at first there is one, where all is well."""
    guide_cluster.wait_for(
        "SELECT bool_and(state = 'scheduled') FROM sluice.databases()", timeout=LEADER_SECONDS
    )
    with ExitStack() as clusters:
        yield Site(clusters, guide_cluster)


def runs(cluster: Cluster, database: str, name: str = "%") -> int:
    """How many runs are on record."""
    return int(
        cluster.execute(
            "SELECT count(*) FROM sluice.history WHERE name LIKE %s", [name], dbname=database
        )[0][0]
    )


def goes_on(cluster: Cluster, *databases: str, name: str = "%") -> None:
    for database in databases:
        before = runs(cluster, database, name)
        cluster.wait_for(
            f"SELECT count(*) > {before + 1} FROM sluice.history WHERE name LIKE '{name}'",
            timeout=30,
            dbname=database,
        )


def tick(cluster: Cluster, database: str) -> None:
    """Wait until the database was looked at twice."""
    for _ in range(2):
        ((now,),) = cluster.execute("SELECT clock_timestamp()")
        cluster.wait_for(
            f"SELECT last_tick_at > '{now}' FROM sluice.databases() WHERE database = '{database}'",
            timeout=30,
        )


@contextmanager
def at_rest(cluster: Cluster, *databases: str) -> Iterator[None]:
    """Nothing runs there: neither now, nor until the end, nor in the ticks in between."""
    running = "SELECT count(*) FROM sluice.queue() WHERE state = 'running' AND database = ANY (%s)"
    assert cluster.execute(running, [list(databases)]) == [(0,)]
    before = [runs(cluster, database) for database in databases]
    yield
    for database in databases:
        tick(cluster, database)
    assert [runs(cluster, database) for database in databases] == before
    assert cluster.execute(running, [list(databases)]) == [(0,)]


def run_in_progress(cluster: Cluster, name: str) -> None:
    cluster.wait_for(
        f"SELECT true FROM sluice.queue() WHERE name = '{name}' AND state = 'running'", timeout=30
    )


def test_is_it_well(night: Site) -> None:
    goes_on(night.server, "app", "crm")
    with recipe(night, "Is it well?") as well:
        well.step()
        well.step()
    # The check says so when it is not.
    night.server.execute("SELECT sluice.pause('{purge}')", dbname="app")
    block = sections(GUIDE)["Is it well?"][0]
    assert "pauses | warn" in psql(night.server, "app", block)[0]
    night.server.execute("SELECT sluice.unpause('{purge}')", dbname="app")


def test_maintenance_window_of_one_database(night: Site) -> None:
    with recipe(night, "Maintenance window of one database") as window:
        window.step()
        with at_rest(night.server, "app"):
            window.step()
            goes_on(night.server, "crm")
        window.step()
        goes_on(night.server, "app")
        # The script leaves no drain.
        window.step()
    goes_on(night.server, "app")


def test_maintenance_window_of_the_whole_server(night: Site) -> None:
    with recipe(night, "Maintenance window of the whole server") as window:
        window.step()
        with at_rest(night.server, "app", "crm"):
            night.server.execute("SELECT sluice.resume()", dbname="app")
        window.step()
    goes_on(night.server, "app", "crm")


def test_single_nodes(night: Site) -> None:
    with recipe(night, "Single nodes") as nodes:
        nodes.step()
        before = runs(night.server, "app", "%revenue_by_region")
        goes_on(night.server, "app", name="%best_region")
        goes_on(night.server, "app", name="purge")
        assert runs(night.server, "app", "%revenue_by_region") == before
        nodes.step()
    goes_on(night.server, "app", name="%revenue_by_region")


def test_drain_that_does_not_finish(night: Site) -> None:
    server = night.server
    with server.connect("app", autocommit=False) as holder:
        holder.execute("LOCK TABLE log")
        run_in_progress(server, "purge")
        assert server.execute("SELECT sluice.drain('1 ms')", dbname="app") == [("draining",)]
        server.wait_for("SELECT active = 1 FROM sluice.drain_status()", dbname="app")
        with recipe(night, "When a drain does not finish") as stuck:
            for _ in range(3):
                stuck.step()
            with at_rest(server, "app"):
                stuck.step()
                # It counts as no failure.
                assert server.execute(
                    "SELECT last_outcome, consecutive_errors FROM sluice.nodes"
                    " WHERE name = 'purge'",
                    dbname="app",
                ) == [("cancelled", 0)]
            holder.rollback()
            stuck.step()
    goes_on(server, "app", name="purge")


def test_node_that_fails(night: Site) -> None:
    server = night.server
    server.execute("ALTER TABLE log RENAME TO lost", dbname="app")
    server.wait_for(
        "SELECT status = 'suspended' FROM sluice.nodes WHERE name = 'purge'",
        timeout=30,
        dbname="app",
    )
    # Otherwise its next fire could be running when the recipe asks for a run.
    fires = "UPDATE _sluice.node SET next_fire_at = '{}' WHERE job_name = 'purge'"
    server.execute(fires.format("2100-01-01"), dbname="app")
    with recipe(night, "When a node fails") as failed:
        failed.step()
        server.execute("ALTER TABLE lost RENAME TO log", dbname="app")
        failed.step()
    server.wait_for(
        "SELECT status = 'active' AND last_outcome = 'succeeded' FROM sluice.nodes"
        " WHERE name = 'purge'",
        timeout=30,
        dbname="app",
    )
    server.execute(fires.format("now"), dbname="app")
    assert server.execute(
        "SELECT closed_at IS NOT NULL FROM sluice.alerts WHERE node = 'purge'", dbname="app"
    ) == [(True,)]


def test_when_the_clock_is_set_back(night: Site) -> None:
    goes_on(night.server, "app", name="purge")
    with recipe(night, "When the clock is set back") as clock:
        block = clock.step()
    shift = (
        "UPDATE _sluice.node SET next_fire_at = next_fire_at {0} interval '10 h',"
        " fired_at = fired_at {0} interval '10 h' WHERE job_name = 'purge'"
    )
    night.server.execute(shift.format("+"), dbname="app")
    warning = psql(night.server, "app", block)[0]
    assert 'warn | ahead of the clock: "purge" waits until ' in warning
    ((run_id,),) = night.server.execute("SELECT sluice.run_now('purge')", dbname="app")
    night.server.wait_for(
        f"SELECT outcome = 'succeeded' FROM sluice.history WHERE run_id = '{run_id}'", dbname="app"
    )
    night.server.execute(shift.format("-"), dbname="app")
    goes_on(night.server, "app", name="purge")


def test_retention_and_upkeep(night: Site) -> None:
    server = night.server
    with recipe(night, "Retention and upkeep") as upkeep:
        upkeep.step()
        assert server.execute(
            "SELECT name, value FROM sluice.settings WHERE name LIKE 'history%' ORDER BY name",
            dbname="app",
        ) == [("history_retention", "7 d"), ("history_rows", "50000")]
        upkeep.step()
    for name in ("history_retention", "history_rows"):
        server.execute("SELECT sluice.configure(%s, NULL)", [name], dbname="app")


def test_restart(night: Site) -> None:
    server = night.server
    with recipe(night, "Restart") as restart:
        restart.step()
        before = runs(server, "app"), runs(server, "crm")
        ((started,),) = server.execute("SELECT pg_postmaster_start_time()")
        restart.step()
        assert server.execute("SELECT pg_postmaster_start_time() > %s", [started]) == [(True,)]
        restart.step()
        assert (runs(server, "app"), runs(server, "crm")) == before
        restart.step()
    goes_on(server, "app", "crm")
    # Nothing was cut off.
    assert server.execute(CRASHED, dbname="app") == [(0,)]


def test_failover(night: Site) -> None:
    """One standby is promoted as when its primary is lost in the middle of a run, the other one as
    planned; both leaders come with the same minute.
    """
    primary = night.server
    lost, planned = night.add(primary.standby()), night.add(primary.standby())
    lost.start()
    night.servers |= {"the primary": primary, "the standby": lost}
    with recipe(night, "Failover") as failover:
        failover.step()
        failover.step()
        planned.start()
        a_drain_and_a_run_in_progress(primary)
        run_in_progress(lost, "report")
        lost.wait_for("SELECT count(*) = 1 FROM sluice.drain_status()", dbname="crm")
        night.run(failover.left[2])
        before = runs(lost, "app")
        assert lost.execute("SELECT scope, state FROM sluice.drain_status()", dbname="app") == [
            ("database", "drained")
        ]

        for database in ("app", "crm"):
            primary.execute("SELECT sluice.resume()", dbname=database)
        primary.execute("SELECT pg_cancel_backend(pid) FROM sluice.workers() WHERE name = 'report'")
        failover.step()
        failover.step()
        assert primary.postmaster_pid is None
        night.servers["the standby"] = planned
        failover.step()
        start = failover.step()
        leads = failover.step()

        night.servers["the standby"] = lost
        night.run(start)
        night.run(leads)
        failover.step()
        # The drains that were in force are: the one that was reached, and the other one now.
        assert lost.execute("SELECT sluice.is_drained()", dbname="app") == [(True,)]
        lost.wait_for("SELECT sluice.is_drained()", dbname="crm")
        assert runs(lost, "app") == before
        for database in ("app", "crm"):
            lost.execute("SELECT sluice.resume()", dbname=database)
        goes_on(lost, "app", "crm")
        run_in_progress(lost, "report")
        lost.close()

        night.servers["the standby"] = planned
        with at_rest(planned, "app", "crm"):
            assert planned.execute(CRASHED, dbname="crm") == [(0,)]
        failover.step()
    goes_on(planned, "app", "crm")
    night.servers["the server"] = planned


def a_drain_and_a_run_in_progress(cluster: Cluster) -> None:
    """In one database a drain is reached, in the other it is not."""
    assert cluster.execute("SELECT sluice.drain()", dbname="app") == [("drained",)]
    cluster.execute("SELECT sluice.run_now('report')", dbname="crm")
    run_in_progress(cluster, "report")
    assert cluster.execute("SELECT sluice.drain('1 ms')", dbname="crm") == [("draining",)]


def test_upgrade_of_pg_sluice(night: Site) -> None:
    """There is one version so far: the recipe finds nothing to do, and harms nothing."""
    with recipe(night, "Upgrade of pg_sluice") as upgrade:
        upgrade.step()
        with at_rest(night.server, "app", "crm"):
            upgrade.step()
            upgrade.step()
        look = upgrade.step()
    goes_on(night.server, "app", "crm")
    assert night.server.log_text().count("is already installed") == 3
    a_member_of_another_version_is_seen(night.server, look)


def a_member_of_another_version_is_seen(server: Cluster, look: Block) -> None:
    """What the guide says of a database that was left out."""
    definition = (
        "SELECT pg_get_functiondef(p.oid), _sluice.package_directory() FROM pg_proc AS p"
        " WHERE p.proname = 'package_directory'"
    )
    ((original, directory),) = server.execute(definition, dbname="crm")
    with server.connect("crm") as crm:
        # The other version's files are in place, as they are after an upgrade.
        crm.execute(
            "CREATE OR REPLACE FUNCTION _sluice.package_directory() RETURNS text"
            f" LANGUAGE sql STABLE SECURITY DEFINER AS $$SELECT '{directory}'$$"
        )
        change = "UPDATE pg_extension SET extversion = %s WHERE extname = 'pg_sluice'"
        crm.execute(change, ["0.0.1"])
        shown = re.search(
            r"^    (crm \| version_mismatch .*)$", (ROOT / GUIDE).read_text(), re.MULTILINE
        )
        assert shown
        wanted = shown[1].replace(" 0.1.0 ", " 0.0.1 ").replace("0.2.0", Path(directory).name)
        server.wait_for(lambda: is_as_promised(psql(server, "postgres", look)[0], [wanted]))
        assert server.execute(
            "SELECT count(*) FROM sluice.alerts"
            " WHERE event = 'database_version_mismatch' AND closed_at IS NULL"
        ) == [(1,)]
        health = "SELECT status FROM sluice.health_check() WHERE \"check\" = 'database'"
        assert crm.execute(health).fetchone() == ("critical",)
        with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState):
            crm.execute("SELECT sluice.start()")
        before = runs(server, "crm")
        goes_on(server, "app")
        assert runs(server, "crm") == before
        crm.execute(change, [Path(directory).name])
        crm.execute(original)
    goes_on(server, "crm")


def test_upgrade_of_postgresql(night: Site) -> None:
    """From the former primary to another server of its own version; both keep their data."""
    old = night.servers["the primary"]
    new = night.add(Cluster(fsync=False))
    new.start()
    new.stop()
    old.start()
    now, night.servers["the server"] = night.server, old
    night.servers["the new server"] = new
    with recipe(night, "Upgrade of PostgreSQL") as upgrade:
        upgrade.step()
        before = runs(old, "app"), runs(old, "crm")
        upgrade.step()
        upgrade.step(
            PGBINOLD=str(old.bindir),
            PGBINNEW=str(new.bindir),
            PGDATAOLD=str(old.data),
            PGDATANEW=str(new.data),
        )
        assert (runs(new, "app"), runs(new, "crm")) == before
        upgrade.step()
    # One pass, so as not to wait for pg_cron's minute.
    new.wait_for("SELECT expires_at IS NULL OR expires_at < now() FROM _sluice.lease", timeout=30)
    new.execute("CALL sluice.run('0')")
    assert runs(new, "app") > before[0]
    assert runs(new, "crm") > before[1]
    assert new.execute("SELECT nodename, nodeport FROM cron.job") == [
        (str(new.directory), new.port)
    ]
    new.close()
    old.close()
    night.servers["the server"] = now


def test_databases_that_come_and_go(night: Site) -> None:
    server = night.server
    server.execute("SELECT sluice.pause('{report}')", dbname="crm")
    with recipe(night, "Databases that come and go") as change:
        for _ in range(3):
            change.step()
        goes_on(server, "sales", name="each_second")
        # What is keyed by its OID is still there.
        assert server.execute("SELECT sluice.unpause('{report}')", dbname="sales") == [(1,)]

        for _ in range(3):
            change.step()
        goes_on(server, "app")
        history = runs(server, "app_copy")
        assert history > 0
        tick(server, "app")
        assert runs(server, "app_copy") == history
        change.step()
        goes_on(server, "app_copy", name="%best_region")
        assert server.execute(
            "SELECT count(*) FROM sluice.history WHERE name = 'purge'", dbname="app_copy"
        ) == [(0,)]

        change.step()
        # Also while the leader is pg_cron's, see the guide.
        change.step()
    goes_on(server, "app", "sales")
    server.wait_for("SELECT count(*) = 0 FROM _sluice.drain")


def test_dropping_the_extension(night: Site) -> None:
    """Nothing that was asked for outlives it where it is not wanted."""
    server = night.server
    for node in ("revenue_by_region", "purge"):
        server.execute("SELECT sluice.pause(ARRAY[%s])", [node], dbname="app")
    with recipe(night, "Dropping the extension") as drop:
        every = drop.step()
        psql(server, "sales", every)
        assert server.execute(
            "SELECT (SELECT count(*) FROM _sluice.drain), (SELECT count(*) FROM _sluice.pause)"
        ) == [(0, 0)]
        drop.step()
    assert server.execute("SELECT count(*) FROM revenue_by_region", dbname="app") == [(0,)]
    assert server.execute("SELECT count(*) FROM cron.job") == [(0,)]
    server.wait_for(
        "SELECT count(*) = 0 FROM pg_stat_activity WHERE application_name LIKE 'pg_sluice%'"
    )


def test_no_recipe_is_left_out() -> None:
    source = Path(__file__).read_text()
    assert [
        heading for heading in sections(GUIDE) if f'recipe(night, "{heading}")' not in source
    ] == []
