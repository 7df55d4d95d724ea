"""The endpoint on real clusters: what it serves, what it costs, and how it ends."""

from __future__ import annotations

import http.client
import re
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import psycopg
import pytest
from prometheus_client.parser import text_string_to_metric_families

from calls import Call
from cluster import Cluster, Database, Leader, Procedure, free_port
from runs import configure

SLOW_CLIENTS = 20


def connected(port: int) -> socket.socket | None:
    """A connection to the port; None while nobody listens there."""
    try:
        return socket.create_connection(("127.0.0.1", port), 5)
    except ConnectionRefusedError:
        return None


class Endpoint(Procedure):
    """A session that serves the metrics on a port of its own."""

    def __init__(self, cluster: Cluster, port: int, run_for: str) -> None:
        self.port = port
        super().__init__(cluster, "serve_metrics", run_for)

    def get(self, target: str = "/metrics", timeout: float = 20) -> tuple[int, str]:
        """The status and the body."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            connection.request("GET", target)
            response = connection.getresponse()
            return response.status, response.read().decode()
        finally:
            connection.close()

    def sample(self, name: str, **labels: str) -> float | None:
        """The value of a series, of a scrape that must succeed."""
        status, text = self.get()
        assert status == 200
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == name and sample.labels == labels:
                    return float(sample.value)
        return None

    @property
    def listens(self) -> bool:
        made = connected(self.port)
        if made is not None:
            made.close()
        return made is not None


@pytest.fixture
def endpoint(
    cluster: Cluster, member: Database, make_endpoint: Callable[..., Endpoint]
) -> Endpoint:
    """An endpoint of the suite's cluster, of which `member` is the only member."""
    return make_endpoint()


@pytest.fixture
def make_endpoint(cluster: Cluster, member: Database) -> Iterator[Callable[..., Endpoint]]:
    """Make an endpoint; all of them end with the test. `wait=False` does not wait for it."""
    made: list[Endpoint] = []

    def make(run_for: str = "1 hour", *, port: int | None = None, wait: bool = True) -> Endpoint:
        if port is None:
            port = free_port()
            configure(member, metrics_listen=f"127.0.0.1:{port}")
        endpoint = Endpoint(cluster, port, run_for)
        made.append(endpoint)
        if wait:
            cluster.wait_for(lambda: endpoint.listens)
        return endpoint

    yield make
    for endpoint in made:
        endpoint.terminate()
        endpoint.join()


def health(database: Database) -> tuple[str, str]:
    ((status, detail),) = database.execute(
        "SELECT status, detail FROM sluice.health_check() WHERE \"check\" = 'metrics'"
    )
    return status, detail


# What it serves


def test_metrics_of_all_members(
    cluster: Cluster, member: Database, other: Database, endpoint: Endpoint
) -> None:
    member.execute("SELECT sluice.schedule('a', 'manual', 'SELECT 1')")
    other.execute("SELECT sluice.schedule('b', 'manual', 'SELECT 1')")
    other.execute("SELECT sluice.run_now('b')")
    status, text = endpoint.get()
    assert status == 200
    for database, node in ((member, "a"), (other, "b")):
        series = (
            f'{{database="{database.name}",kind="job",node="{node}",outcome="succeeded"}} 0.0\n'
        )
        assert f"sluice_runs_total{series}" in text
        assert f'sluice_database_up{{database="{database.name}"}} 1.0\n' in text
    depth = f'sluice_queue_depth{{database="{other.name}",state="queued"}} 1.0\n'
    assert depth in text
    # As the function has it, where that has it.
    ((called,),) = member.execute("SELECT sluice.metrics()")
    assert {line.split("{")[0].split()[0] for line in called.splitlines() if line[0] != "#"} <= {
        line.split("{")[0].split()[0] for line in text.splitlines()
    }
    assert health(member) == ("ok", f"served on 127.0.0.1:{endpoint.port}")


def test_healthz_tells_whether_somebody_leads(
    cluster: Cluster, endpoint: Endpoint, lead: Callable[..., Leader]
) -> None:
    assert endpoint.get("/healthz") == (503, "no leader holds the lease\n")
    lead()
    assert endpoint.get("/healthz") == (200, "ok\n")


@pytest.mark.parametrize("how", ["gone", "held", "other version"])
def test_a_database_that_fails_costs_only_its_own_series(
    cluster: Cluster, member: Database, other: Database, endpoint: Endpoint, how: str
) -> None:
    configure(member, metrics_timeout="2 s")
    cluster.wait_for(lambda: endpoint.sample("sluice_database_up", database=other.name) == 1)
    other.let_go()
    with cluster.connect(other.name, autocommit=False) as session:
        if how == "held":
            session.execute("LOCK TABLE _sluice.node")
        elif how == "other version":
            session.execute("ALTER FUNCTION _sluice.node_metrics RENAME TO measure_nodes")
            session.commit()
        else:
            cluster.execute(f"ALTER DATABASE {other.name} ALLOW_CONNECTIONS false")
        assert endpoint.sample("sluice_database_up", database=other.name) == 0
        assert endpoint.sample("sluice_database_up", database=member.name) == 1
        assert endpoint.sample("sluice_drain", database=other.name) == 0
    cluster.execute(f"ALTER DATABASE {other.name} ALLOW_CONNECTIONS true")


@pytest.mark.timeout(90)
def test_databases_that_fail_leave_time_for_the_others(
    cluster: Cluster, member: Database, endpoint: Endpoint
) -> None:
    """Four are asked at a time. A few that are held keep those connections for a part of the time
    only, and however many are, the scrape succeeds."""
    configure(member, metrics_timeout="4 s")
    with ExitStack() as stack:
        others = [stack.enter_context(cluster.database()) for _ in range(8)]
        for database in others:
            database.execute("SELECT sluice.start()")

        def up() -> set[str]:
            status, text = endpoint.get()
            assert status == 200, text
            return set(re.findall(r'^sluice_database_up{database="(.*)"} 1.0$', text, re.MULTILINE))

        def hold(databases: list[Database]) -> set[str]:
            for database in databases:
                session = stack.enter_context(database.connect(autocommit=False))
                session.execute("LOCK TABLE _sluice.node")
            return {database.name for database in databases}

        everybody = {member.name, *(database.name for database in others)}
        cluster.wait_for(lambda: up() == everybody)
        held = hold(others[:4])
        assert up() == everybody - held
        held |= hold(others[4:])
        assert not up() & held


def test_a_collection_that_takes_too_long_is_given_up(
    cluster: Cluster, control: Database, member: Database, endpoint: Endpoint
) -> None:
    configure(member, metrics_timeout="1 s")
    with control.connect(autocommit=False) as session:
        session.execute("LOCK TABLE _sluice.queue")
        # The new timeout is seen within a second.
        cluster.wait_for(lambda: endpoint.get() == (503, "metrics could not be collected\n"))
        # It works on, and leaves nothing behind.
        cluster.wait_for(
            "SELECT count(*) = 0 FROM pg_stat_activity WHERE application_name = 'pg_sluice metrics'"
        )
    assert endpoint.get()[0] == 200
    cluster.wait_for(lambda: "could not collect metrics: " in cluster.log_text())


# What it costs


@pytest.mark.timeout(90)
def test_without_a_scrape_nothing_is_asked(own_cluster: Callable[..., Cluster]) -> None:
    cluster = own_cluster(
        preload=("pg_cron", "pg_stat_statements"),
        fsync=False,
        settings={"pg_stat_statements.track": "all"},
    )
    cluster.silence_cron()
    cluster.execute("CREATE EXTENSION pg_stat_statements")
    cluster.execute("SELECT sluice.start()")
    port = free_port()
    cluster.execute(
        "SELECT sluice.configure('metrics_listen', %s, cluster => true)", [f"127.0.0.1:{port}"]
    )
    endpoint = Endpoint(cluster, port, "1 hour")
    cluster.wait_for(lambda: endpoint.listens)

    assert endpoint.get()[0] == 200
    assert {"server_metrics", "node_metrics", "endpoint_settings"} <= executed(cluster)
    cluster.execute("SELECT pg_stat_statements_reset()")
    # For some time, by its own measure.
    looks = (
        "SELECT calls >= 5 FROM pg_stat_statements WHERE query LIKE '%FROM _sluice.endpoint\\_s%'"
    )
    cluster.wait_for(looks, timeout=30)
    # The look at the settings, and what its functions read.
    assert executed(cluster) <= {
        "endpoint_settings", "effective_setting", "extension_version", "parse_address", "member",
        "setting", "setting_quantity",
    }  # fmt: skip
    endpoint.terminate()
    endpoint.join()


def executed(cluster: Cluster) -> set[str]:
    """The objects of _sluice that statements named."""
    rows = cluster.execute("SELECT query FROM pg_stat_statements")
    return {name for (query,) in rows for name in re.findall(r"_sluice\.(\w+)", query)}


def test_no_snapshot_is_held(cluster: Cluster, member: Database, endpoint: Endpoint) -> None:
    """Whatever the endpoint does, sooner or later it is seen without one."""
    for _ in range(3):
        endpoint.get()
        cluster.wait_for(
            f"SELECT backend_xmin IS NULL FROM pg_stat_activity WHERE pid = {endpoint.pid}"
        )


def test_slow_clients_keep_nobody_out(
    cluster: Cluster, member: Database, endpoint: Endpoint, lead: Callable[..., Leader]
) -> None:
    lead()
    member.execute("SELECT sluice.schedule('each_second', '1s', 'SELECT 1')")
    slow = []
    try:
        for _ in range(SLOW_CLIENTS):
            client = socket.create_connection(("127.0.0.1", endpoint.port), 10)
            client.sendall(b"G")
            slow.append(client)
            assert endpoint.get()[0] == 200
        count = member.execute("SELECT count(*) FROM sluice.history")[0][0]
        member.wait_for(f"SELECT count(*) > {count + 1} FROM sluice.history")
        assert endpoint.get("/healthz") == (200, "ok\n")
    finally:
        for client in slow:
            client.close()


# How it ends, and where it goes


def test_another_one_ends_at_once(
    endpoint: Endpoint, make_endpoint: Callable[..., Endpoint]
) -> None:
    second = make_endpoint(port=endpoint.port, wait=False)
    assert second.join() is None
    assert endpoint.alive
    assert endpoint.get()[0] == 200


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_two_begin_at_the_same_time(cluster: Cluster, shared_state: None, end: str) -> None:
    """1. One has looked which sessions there are. 2. Another one connects and takes the endpoint.
    3. The first one comes: it waits. 4. The other commits, and the first doesn't serve; or it
    fails, and the first does.
    """
    who = "SELECT pid, backend_start::text FROM pg_stat_activity WHERE pid = pg_backend_pid()"
    begin = "SELECT _sluice.begin_serving({}, '{}')"
    with cluster.connect(autocommit=False) as first:
        call = begin.format(*first.execute(who).fetchone() or ())
        with cluster.connect(autocommit=False) as other:
            taken = other.execute(begin.format(*other.execute(who).fetchone() or ()))
            assert taken.fetchone() == (True,)
            waiting = Call(cluster, call, first)
            cluster.wait_for(
                "SELECT true FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
                f" AND pid = {waiting.pid}"
            )
            getattr(other, end)()
            assert waiting.value() == (end == "rollback")


@pytest.mark.timeout(90)
@pytest.mark.parametrize("how", ["crash", "restart"])
def test_it_serves_again_after(
    cluster: Cluster, member: Database, make_endpoint: Callable[..., Endpoint], how: str
) -> None:
    """Who served is on record still, and serves no more."""
    former = make_endpoint()
    if how == "crash":
        cluster.crash(former.pid)
    else:
        cluster.restart()
    assert isinstance(former.join(), psycopg.OperationalError)
    assert health(member) == ("warn", f"not served on 127.0.0.1:{former.port} yet")
    assert make_endpoint(port=former.port).get()[0] == 200
    assert health(member) == ("ok", f"served on 127.0.0.1:{former.port}")


def test_without_an_address_it_ends_at_once(
    member: Database, make_endpoint: Callable[..., Endpoint]
) -> None:
    assert make_endpoint(port=1, wait=False).join() is None


def test_it_moves_to_another_address(
    cluster: Cluster, member: Database, endpoint: Endpoint
) -> None:
    former = endpoint.port
    endpoint.port = free_port()
    configure(member, metrics_listen=f"localhost:{endpoint.port}")
    cluster.wait_for(lambda: endpoint.listens)
    assert endpoint.get()[0] == 200
    endpoint.port = former
    assert not endpoint.listens


@pytest.mark.parametrize("how", ["off", "stop"])
def test_it_ends_when_it_is_turned_off(
    cluster: Cluster, member: Database, endpoint: Endpoint, how: str
) -> None:
    entry = "SELECT count(*) FROM cron.job WHERE jobname = 'pg_sluice metrics'"
    assert cluster.execute(entry) == [(1,)]
    if how == "off":
        configure(member, metrics_listen="off")
    else:
        member.execute("SELECT sluice.stop()")
    assert cluster.execute(entry) == [(0,)]
    assert endpoint.join() is None
    assert not endpoint.listens
    assert health(member) == ("ok", "not served over HTTP")


def test_it_ends_with_its_version(cluster: Cluster, endpoint: Endpoint) -> None:
    (version,) = cluster.execute("SELECT extversion FROM pg_extension WHERE extname = 'pg_sluice'")[
        0
    ]
    update = "UPDATE pg_extension SET extversion = %s WHERE extname = 'pg_sluice'"
    cluster.execute(update, ["0.0.9"])
    try:
        assert endpoint.join() is None
    finally:
        cluster.execute(update, [version])


def test_its_term_ends_and_the_next_one_listens(make_endpoint: Callable[..., Endpoint]) -> None:
    first = make_endpoint("500 ms", wait=False)
    assert first.join() is None
    second = make_endpoint(port=first.port)
    assert second.get()[0] == 200


def test_an_address_in_use(
    cluster: Cluster, member: Database, make_endpoint: Callable[..., Endpoint]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        configure(member, metrics_listen=f"127.0.0.1:{port}")
        for _ in range(2):
            error = make_endpoint(port=port, wait=False).join()
            assert isinstance(error, psycopg.errors.ObjectInUse)
            message = error.diag.message_primary
            assert message is not None
            assert message == (
                f"could not serve metrics on 127.0.0.1:{port}: Address already in use"
            )
            assert cluster.execute(
                "SELECT message FROM sluice.alerts WHERE event = 'metrics_failed'"
            ) == [(message,)]
            assert health(member) == ("warn", message)
    assert make_endpoint(port=port).get()[0] == 200
    assert cluster.execute(
        "SELECT count(*) FROM sluice.alerts WHERE event = 'metrics_failed' AND closed_at IS NULL"
    ) == [(0,)]
    assert health(member)[0] == "ok"


@pytest.mark.parametrize("held", [False, True], ids=["idle", "collecting"])
@pytest.mark.parametrize("end", ["cancel", "terminate"])
def test_it_ends_at_once_when_it_is_cancelled_or_terminated(
    cluster: Cluster,
    member: Database,
    control: Database,
    make_endpoint: Callable[..., Endpoint],
    end: str,
    held: bool,
) -> None:
    """Long before a collection would end by itself."""
    configure(member, metrics_timeout="60 s")
    endpoint = make_endpoint()
    with control.connect(autocommit=False) as session:
        scrape = socket.create_connection(("127.0.0.1", endpoint.port), 10)
        if held:
            session.execute("LOCK TABLE _sluice.queue")
            scrape.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            cluster.wait_for(
                "SELECT true FROM pg_stat_activity"
                " WHERE application_name = 'pg_sluice metrics' AND wait_event_type = 'Lock'"
            )
        getattr(endpoint, end)()
        error = endpoint.join()
        assert isinstance(
            error, psycopg.errors.QueryCanceled if end == "cancel" else psycopg.OperationalError
        )
        scrape.close()
        cluster.wait_for(
            "SELECT count(*) = 0 FROM pg_stat_activity"
            " WHERE application_name = 'pg_sluice metrics'",
        )
    assert not endpoint.listens
    cluster.wait_for("SELECT NOT (_sluice.endpoint_state() ->> 'lives')::boolean")


def test_a_session_that_goes_on_keeps_nothing_of_it(
    cluster: Cluster, control: Database, member: Database
) -> None:
    """Neither the port nor the connections of a collection in progress."""
    port = free_port()
    configure(member, metrics_listen=f"127.0.0.1:{port}", metrics_timeout="60 s")
    with (
        cluster.connect() as session,
        control.connect(autocommit=False) as holder,
        ThreadPoolExecutor(1) as threads,
    ):
        call = threads.submit(session.execute, "CALL sluice.serve_metrics()")
        holder.execute("LOCK TABLE _sluice.queue")
        scrape = cluster.wait_for(lambda: connected(port))
        scrape.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        collecting = (
            "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'pg_sluice metrics'"
        )
        cluster.wait_for(collecting)
        session.cancel()
        with pytest.raises(psycopg.errors.QueryCanceled):
            call.result(10)
        cluster.wait_for(f"SELECT ({collecting}) = 0")
        scrape.close()
        assert connected(port) is None
        assert session.execute("SELECT 1").fetchone() == (1,)


@pytest.mark.parametrize("run_for", ["NULL", "'-1 s'"])
@pytest.mark.parametrize("procedure", ["run", "serve_metrics"])
def test_what_is_no_term(cluster: Cluster, procedure: str, run_for: str) -> None:
    with pytest.raises(psycopg.Error) as caught:
        cluster.execute(f"CALL sluice.{procedure}({run_for})")
    assert (caught.value.sqlstate, caught.value.diag.message_primary) == (
        ("22004", "run_for must not be null")
        if run_for == "NULL"
        else ("22023", "run_for must not be negative")
    )


def test_a_session_that_was_cancelled_can_serve_again(cluster: Cluster, member: Database) -> None:
    """Who serves is on record for the call, not for the session."""
    port = free_port()
    configure(member, metrics_listen=f"127.0.0.1:{port}")
    call: Any = "CALL sluice.serve_metrics('200 ms')"
    with cluster.connect() as session:
        session.execute(call)
        assert cluster.execute("SELECT _sluice.endpoint_state() ->> 'lives'") == [("false",)]
        session.execute(call)
