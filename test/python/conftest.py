"""Clusters and databases for the behaviour tests, and the limit on a test that hangs."""

import select
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import psycopg
import pytest

from cluster import WAIT_SECONDS, Cluster, Database, Leader
from faults import Fault

type_of_make_leader = Callable[..., Leader]


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """The suite's cluster: pg_cron and pg_sluice in its control database, and the template."""
    with Cluster(fsync=False) as cluster:
        cluster.create_extensions()
        cluster.silence_cron()
        cluster.create_template()
        yield cluster


class KeptDatabase(Database):
    """A database whose statements share one session, since a new one imports the package anew.

    `let_go` closes it, for what needs the database without sessions.
    """

    _session: psycopg.Connection[Any] | None = None

    def execute(self, query: str, parameters: Sequence[Any] | None = None) -> list[Any]:
        cursor = self._kept().execute(query, parameters)
        return cursor.fetchall() if cursor.description else []

    def wait_for(self, what: str | Callable[[], Any], *, timeout: float = WAIT_SECONDS) -> Any:
        if isinstance(what, str):
            query = what

            def first_value() -> Any:
                rows = self.execute(query)
                return rows[0][0] if rows else None

            return self.cluster.wait_for(first_value, timeout=timeout)
        return self.cluster.wait_for(what, timeout=timeout)

    def let_go(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None

    def _kept(self) -> psycopg.Connection[Any]:
        # A session that was ended from outside has something to read: its end.
        if self._session is not None and select.select([self._session], [], [], 0)[0]:
            self.let_go()
        if self._session is None:
            self._session = self.connect()
        return self._session


@pytest.fixture
def database(cluster: Cluster) -> Iterator[Database]:
    """A fresh database with pg_sluice on the suite's cluster."""
    with cluster.database() as fresh:
        database = KeptDatabase(cluster, fresh.name)
        yield database
        database.let_go()


@pytest.fixture
def other(cluster: Cluster, member: Database) -> Iterator[Database]:
    """A second member."""
    with cluster.database() as fresh:
        database = KeptDatabase(cluster, fresh.name)
        database.execute("SELECT sluice.start()")
        yield database
        database.let_go()


@pytest.fixture
def own_cluster() -> Iterator[Callable[..., Cluster]]:
    """Make a running cluster for this test alone, with the arguments of `Cluster`.

    It has what `cluster` has, unless `extensions=False`.
    """
    with ExitStack() as stack:

        def make(*, extensions: bool = True, **arguments: Any) -> Cluster:
            cluster = stack.enter_context(Cluster(**arguments))
            if extensions:
                cluster.create_extensions()
                cluster.create_template()
            return cluster

        yield make


@pytest.fixture
def shared_state(cluster: Cluster) -> Iterator[None]:
    """The test may change what is in the control database; it is as new afterwards."""
    yield
    if cluster.postmaster_pid is None:
        cluster.start()
    clear(cluster)


@pytest.fixture
def member(shared_state: None, database: Database) -> Database:
    """A fresh database that has called sluice.start()."""
    database.execute("SELECT sluice.start()")
    return database


@pytest.fixture
def shared(cluster: Cluster, member: Database) -> Database:
    """A member where alice and bob may have nodes, each with a schema."""
    for role in ("alice", "bob"):
        cluster.create_role(role)
        member.execute(f"CREATE SCHEMA {role} AUTHORIZATION {role}")
        member.execute(f"GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA sluice TO {role}")
    return member


@pytest.fixture
def short_lease(cluster: Cluster, shared_state: None) -> None:
    """A leader that is gone is replaced after a second."""
    cluster.execute("SELECT sluice.configure('lease_ttl', '1 s', cluster => true)")


@pytest.fixture(params=["4", "0"], ids=["parallel", "serial"])
def workers(request: pytest.FixtureRequest) -> str:
    """The value of max_workers in each mode."""
    return str(request.param)


@pytest.fixture
def lead(cluster: Cluster, shared_state: None) -> Iterator[type_of_make_leader]:
    """Make a leader of the suite's cluster: `lead(run_for="1 hour")` returns once it leads.

    `wait=False` returns at once. All of them end with the test.
    """
    leaders: list[Leader] = []

    def make(run_for: str = "1 hour", *, wait: bool = True, dbname: str | None = None) -> Leader:
        leader = Leader(cluster, run_for, dbname=dbname)
        leaders.append(leader)
        if wait:
            cluster.wait_for(lambda: leader.leads)
        return leader

    yield make
    for leader in leaders:
        if leader.alive and cluster.postmaster_pid is not None:
            leader.terminate()
        leader.join()


@pytest.fixture
def leader(lead: type_of_make_leader, member: Database) -> Leader:
    """A leader of the suite's cluster, where `member` is scheduled."""
    return lead()


@pytest.fixture
def control(cluster: Cluster, shared_state: None) -> Iterator[Database]:
    """The control database of the suite's cluster."""
    database = KeptDatabase(cluster, cluster.control_db)
    yield database
    database.let_go()


@pytest.fixture
def fault(control: Database, member: Database) -> Iterator[Callable[[Database, str], Fault]]:
    """Make faults: `fault(member, "tick")`, or `fault(control, "enqueue")`.

    Those in the control database are lifted with the test; a member's go with their database.
    """
    faults: list[Fault] = []

    def make(database: Database, function: str) -> Fault:
        made = Fault(database, function)
        if database is control:
            faults.append(made)
        return made

    yield make
    for made in faults:
        made.lift()


@pytest.fixture(scope="session")
def cron_cluster() -> Iterator[Cluster]:
    """A cluster whose pg_cron starts the leader, with "app" as its member."""
    with Cluster(fsync=False) as cluster:
        cluster.create_extensions()
        cluster.execute("SELECT cron.schedule('beside', '* * * * *', 'SELECT 1')")
        cluster.execute("SELECT sluice.configure('lease_ttl', '2 s', cluster => true)")
        cluster.execute("CREATE DATABASE app")
        cluster.execute("CREATE EXTENSION pg_sluice CASCADE", dbname="app")
        cluster.execute("SELECT sluice.schedule('job', '1s', 'SELECT 1')", dbname="app")
        cluster.execute("SELECT sluice.start()", dbname="app")
        yield cluster


@pytest.fixture(scope="session")
def guide_cluster() -> Iterator[Cluster]:
    """The server of docs/operations.md with its members, and pg_cron at work."""
    with Cluster(fsync=False) as cluster:
        cluster.create_extensions()
        cluster.execute("SELECT sluice.configure('lease_ttl', '2 s', cluster => true)")
        statements = {
            "app": (
                "CREATE TABLE orders (region text, amount numeric)",
                "CREATE TABLE log (at timestamptz)",
                "SELECT sluice.create_stream_table('revenue_by_region',"
                " 'SELECT region, sum(amount) AS revenue FROM orders GROUP BY region', '1s')",
                "SELECT sluice.create_stream_table('best_region',"
                " 'SELECT region FROM revenue_by_region ORDER BY revenue DESC LIMIT 1', '1s')",
                "SELECT sluice.schedule('purge', '1s', 'DELETE FROM log', lock_timeout => '5 min')",
            ),
            "crm": (
                "SELECT sluice.schedule('each_second', '1s', 'SELECT 1')",
                "SELECT sluice.schedule('report', 'manual', 'SELECT pg_sleep(3600)',"
                " refresh_timeout => '2 h')",
            ),
        }
        for name, definitions in statements.items():
            cluster.execute(f"CREATE DATABASE {name}")
            with cluster.connect(name) as connection:
                connection.execute("CREATE EXTENSION pg_sluice CASCADE")
                for definition in definitions:
                    connection.execute(definition)
                connection.execute("SELECT sluice.start()")
        yield cluster


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files whose tests may take long come first, so that none of them is left for the end."""
    longest: dict[Path, float] = {}
    for item in items:
        longest[item.path] = max(longest.get(item.path, 0), seconds_of(item))
    items.sort(key=lambda item: -longest[item.path])


def clear(cluster: Cluster) -> None:
    """End all of pg_sluice's sessions and forget all shared state."""
    cluster.wait_for(
        "SELECT count(pg_terminate_backend(a.pid)) = 0 FROM pg_stat_activity AS a"
        " WHERE a.application_name LIKE 'pg_sluice%' AND a.pid <> pg_backend_pid()"
    )
    for table in ("slot", "queue", "drain", "pause", "member", "setting", "alert"):
        cluster.execute(f"DELETE FROM _sluice.{table}")
    cluster.execute("UPDATE _sluice.lease SET pid = NULL, backend_start = NULL, expires_at = NULL")


def seconds_of(item: pytest.Item) -> float:
    """How long each phase of a test may take."""
    marker = item.get_closest_marker("timeout")
    return float(marker.args[0]) if marker else 60.0


@contextmanager
def time_limit(item: pytest.Item, phase: str) -> Iterator[None]:
    """Fail a phase that takes too long, from a signal, so that fixtures still clean up."""
    seconds = seconds_of(item)

    def give_up(number: int, frame: FrameType | None) -> None:
        pytest.fail(f"{phase} took longer than {seconds} s")

    previous = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    with time_limit(item, "setup"):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    with time_limit(item, "test"):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    with time_limit(item, "teardown"):
        return (yield)
