"""`python -m pg_sluice.listen` as it is installed, and what docs/alerts.md shows and says."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cluster import TEMPLATE, Cluster, Database, Leader, pg_config
from documents import ROOT, Block, blocks
from runs import configure, schedule

GUIDE = "docs/alerts.md"


class Process:
    """A program whose output is read as it comes."""

    def __init__(self, popen: subprocess.Popen[str], errors: Path) -> None:
        self.popen = popen
        self._errors = errors

    def line(self) -> str:
        """The next line; the time limit of the test bounds the wait."""
        assert self.popen.stdout is not None
        found = self.popen.stdout.readline()
        assert found, f"it ended: {self.errors()}"
        return found.rstrip("\n")

    def errors(self) -> str:
        """What it wrote to stderr so far."""
        return self._errors.read_text()

    def end(self, number: int) -> int:
        self.popen.send_signal(number)
        return self.popen.wait(10)


def environment(cluster: Cluster) -> dict[str, str]:
    return {
        "PATH": f"{cluster.bindir}:{os.environ['PATH']}",
        "PGHOST": str(cluster.directory),
        "PGPORT": str(cluster.port),
        "PGUSER": "postgres",
    }


@contextmanager
def process(cluster: Cluster, *arguments: str, **given: str) -> Iterator[Process]:
    with (
        tempfile.NamedTemporaryFile() as errors,
        subprocess.Popen(
            arguments,
            env=environment(cluster) | given,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as popen,
    ):
        try:
            yield Process(popen, Path(errors.name))
        finally:
            popen.kill()


@contextmanager
def listener(database: Database) -> Iterator[Process]:
    """The installed listener, once it listens."""
    share = subprocess.check_output([pg_config(), "--sharedir"], text=True).strip()
    ((version,),) = database.execute(
        "SELECT extversion FROM pg_extension WHERE extname = 'pg_sluice'"
    )
    with process(
        database.cluster,
        "/usr/bin/python3", "-m", "pg_sluice.listen", f"dbname={database.name}",
        PYTHONPATH=f"{share}/pg_sluice/{version}",
        PYTHONDONTWRITEBYTECODE="1",
    ) as started:  # fmt: skip
        listening(database)
        yield started


def listening(database: Database, but: int = 0, name: str = "pg_sluice.listen") -> int:
    """Wait for a session that listens; gives its process ID."""
    found: int = database.wait_for(
        "SELECT pid FROM pg_stat_activity"
        f" WHERE datname = '{database.name}' AND application_name = '{name}'"
        f" AND state = 'idle' AND query LIKE 'LISTEN%' AND pid <> {but}"
    )
    return found


def send(database: Database, payload: str) -> None:
    database.execute("SELECT pg_notify('sluice_alert', %s)", [payload])


def test_each_alert_is_a_line(database: Database) -> None:
    with listener(database) as started:
        send(database, '{"event": "é\U0001f600", "message": "a\\nb"}')
        line = started.line()
        assert line == '{"event": "é\U0001f600", "message": "a\\nb"}'
        # Whoever sends what: a line is an object.
        for payload in ("no JSON", "[1]", "[" * 5000, '{"a":\n1}'):
            send(database, payload)
        assert started.line() == '{"a": 1}'
        assert started.errors().count("no alert, from process") == 3


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_well(database: Database, number: int) -> None:
    with listener(database) as started:
        assert (started.end(number), started.errors()) == (0, "")


def test_the_end_of_its_pipe_ends_it_well(database: Database) -> None:
    with listener(database) as started:
        assert started.popen.stdout is not None
        started.popen.stdout.close()
        send(database, "{}")
        assert (started.popen.wait(10), started.errors()) == (0, "")


def test_a_lost_connection_is_made_again(database: Database, cluster: Cluster) -> None:
    with listener(database) as started:
        first = listening(database)
        cluster.execute(f"ALTER DATABASE {database.name} ALLOW_CONNECTIONS false")
        cluster.execute("SELECT pg_terminate_backend(%s)", [first])
        cluster.wait_for(lambda: "not currently accepting connections" in started.errors())
        cluster.execute(f"ALTER DATABASE {database.name} ALLOW_CONNECTIONS true")
        listening(database, but=first)
        send(database, '{"seq": 2}')
        assert started.line() == '{"seq": 2}'
        assert "alerts sent meanwhile are in the view sluice.alerts" in started.errors()


def test_a_connection_that_can_not_be_made_is_an_error(cluster: Cluster) -> None:
    arguments = (sys.executable, "-m", "pg_sluice.listen")
    with process(cluster, *arguments, "dbname=nosuch", PYTHONPATH=str(ROOT / "python")) as started:
        assert started.popen.wait(10) == 1
        assert 'database "nosuch" does not exist' in started.errors()
        assert "Traceback" not in started.errors()


# The guide


def test_the_guide_lists_the_events_that_there_are() -> None:
    text = (ROOT / GUIDE).read_text("utf-8")
    listed = set(re.findall(r"^\| `(\w+)` \| (\w+) \| (?:member|control) \|", text, re.MULTILINE))
    source = "\n".join(path.read_text("utf-8") for path in sorted((ROOT / "sql").glob("*.sql")))
    states = re.search(r"CONSTRAINT member_state_check CHECK \(\s*state IN \(([^)]*)\)", source)
    assert states
    failures = set(re.findall(r"'(\w+)'", states[1])) - {"joining", "scheduled"}
    opened = set()
    calls = re.findall(r"open_alert\(\s*'(\w+)'(?: \|\| (_state))?, '(\w+)'", source)
    for event, variable, severity in calls:
        ends = failures if variable else {""}
        opened |= {(event + end, severity) for end in ends}
    assert len(calls) == source.count("PERFORM _sluice.open_alert(")
    assert listed == opened


@pytest.fixture
def app(cluster: Cluster, shared_state: None, lead: Callable[..., Leader]) -> Iterator[Database]:
    """The guide's database, a member with a leader, where a job is about to be suspended."""
    cluster.execute(f"CREATE DATABASE app TEMPLATE {TEMPLATE}")
    database = Database(cluster, "app")
    try:
        database.execute("SELECT sluice.start()")
        configure(database, max_consecutive_errors="1")
        schedule(database, "SELECT 1 / 0")
        lead()
        yield database
    finally:
        cluster.execute("DROP DATABASE app WITH (FORCE)")


def fail(app: Database) -> None:
    """Has the job suspended."""
    app.execute("SELECT sluice.run_now('job')")
    app.wait_for("SELECT status = 'suspended' FROM sluice.nodes")


def check(line: str) -> None:
    """A line of the listener is the alert."""
    told: dict[str, Any] = json.loads(line)
    assert (told["event"], told["severity"], told["node"]) == ("suspended", "critical", "job")


def psql(app: Database, text: str) -> str:
    return app.cluster.shell("psql -X -A -t -v ON_ERROR_STOP=1 -d app", given=text)


def sql_blocks() -> list[Block]:
    return [block for block in blocks(GUIDE) if block.language == "sql"]


def shell_blocks() -> list[Block]:
    return [block for block in blocks(GUIDE) if block.language == "sh"]


def test_what_the_guide_shows_of_the_view(app: Database) -> None:
    fail(app)
    assert "|suspended|critical|job|" in psql(app, sql_blocks()[0].text)


def test_what_the_guide_shows_of_health(app: Database) -> None:
    def plugin() -> tuple[int, str]:
        with process(app.cluster, "/bin/sh", "-c", shell_blocks()[0].text) as started:
            written, _ = started.popen.communicate(timeout=20)
            return started.popen.returncode, written

    app.wait_for("SELECT status = 'ok' FROM sluice.health_check() WHERE \"check\" = 'database'")
    assert (psql(app, sql_blocks()[1].text), plugin()) == ("", (0, "ok\n"))
    app.execute("SELECT sluice.drain()")
    assert psql(app, sql_blocks()[1].text).startswith("drain|warn|a drain is in force|")
    assert plugin()[0] == 1
    app.execute("SELECT sluice.resume()")
    fail(app)
    status, written = plugin()
    assert (status, written.startswith("critical ")) == (2, True)
    assert 'critical nodes "job" is suspended See sluice.history' in written
    app.execute("ALTER FUNCTION sluice.health_check() RENAME TO gone")
    assert plugin()[0] == 3


def test_the_guide_lists_the_checks_that_there_are(app: Database) -> None:
    text = (ROOT / GUIDE).read_text("utf-8").split("## Health\n")[1].split("\n## ")[0]
    listed = re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)
    there = app.execute('SELECT "check" FROM sluice.health_check()')
    assert [name for name in listed if name != "members"] == [name for (name,) in there]
    control = app.cluster.execute('SELECT "check" FROM sluice.health_check()')
    assert listed == [name for (name,) in control]


def test_what_the_guide_shows_of_psql(app: Database) -> None:
    listen, look = sql_blocks()[2].text.split(";\n", 1)
    with process(
        app.cluster, "psql", "-X", "-A", "-t", "-d", "app", "-v", "ON_ERROR_STOP=1",
        "-c", listen, "-c", "NOTIFY sluice_alert, '{}'", "-c", look,
    ) as started:  # fmt: skip
        assert 'Asynchronous notification "sluice_alert" with payload "{}"' in "".join(
            started.line() + "\n" for _ in range(3)
        )


def test_what_the_guide_shows_of_the_listener(app: Database) -> None:
    block = shell_blocks()[1]
    script = block.text.replace("python3", "PYTHONDONTWRITEBYTECODE=1 exec /usr/bin/python3")
    with process(app.cluster, "/bin/sh", "-euc", script) as started:
        listening(app)
        fail(app)
        check(started.line())


def test_what_the_guide_shows_of_a_program(app: Database) -> None:
    (block,) = [block for block in blocks(GUIDE) if block.language == "python"]
    assert len(block.text.strip().splitlines()) <= 20
    with process(app.cluster, sys.executable, "-c", block.text) as started:
        first = app.wait_for(
            "SELECT pid FROM pg_stat_activity WHERE datname = 'app' AND state = 'idle'"
            " AND query LIKE '%sluice.alerts%' AND pid <> pg_backend_pid()"
        )
        fail(app)
        assert started.line().startswith("critical suspended job")
        app.execute("SELECT pg_terminate_backend(%s)", [first])
        assert started.line().startswith("open: ")
