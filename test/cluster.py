"""A throwaway PostgreSQL cluster for the tests, the demo and the benchmarks.

    with Cluster() as cluster:
        cluster.create_extensions()
        with cluster.connect() as connection:
            ...

The cluster lives in one short directory under /tmp, listens on a Unix socket only and belongs to
the operating system's user postgres when we are root, else to the current user. It stops, and its
directory goes, when the context ends, when the program ends and on SIGTERM; it never touches
another cluster.
"""

from __future__ import annotations

import atexit
import os
import pwd
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import psycopg

ROOT = Path(__file__).resolve().parents[1]
TEMPLATE = "sluice_template"
WAIT_SECONDS = 20.0
"""How long a test waits for a condition, on a busy machine too."""

type_of_setting = str | int | float | bool

# `local all all trust` is for tests that log in as other roles. Only who may enter the directory's
# socket gets that far, and the cluster holds nothing.
HBA = """\
local all postgres peer map=sluice
local replication postgres peer map=sluice
local all all trust
"""


_ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8", "TZ": "UTC"}
if "SLUICE_PYTHONPATH" in os.environ:
    # By tools/line_coverage.py.
    _ENVIRONMENT["PYTHONPATH"] = os.environ["SLUICE_PYTHONPATH"]


class Cluster:
    """One cluster. `start` may follow `stop`; `remove` is final."""

    def __init__(
        self,
        *,
        control_db: str = "postgres",
        preload: Sequence[str] = ("pg_cron",),
        background_workers: bool = False,
        fsync: bool = True,
        locale: str = "C.UTF-8",
        encoding: str = "UTF8",
        settings: Mapping[str, type_of_setting] | None = None,
        keep: bool = False,
    ) -> None:
        """Decide how the cluster will be; `start` makes it.

        `background_workers` lets pg_cron run jobs in background workers instead of connections.
        `settings` are further lines of postgresql.conf and win over the ones here. `keep` leaves
        the server running and the directory in place at the end.
        """
        self.control_db = control_db
        self.keep = keep
        self.locale = locale
        self.encoding = encoding
        self.pg_config = pg_config()
        self.bindir = Path(_output(self.pg_config, "--bindir"))
        self.owner = "postgres" if os.geteuid() == 0 else pwd.getpwuid(os.geteuid()).pw_name
        self.directory = Path(tempfile.mkdtemp(prefix="sluice-", dir="/tmp"))
        # For the name of the socket, and for a test that turns TCP on.
        self.port = free_port()
        self._initialized = False
        self._primary: Cluster | None = None
        self._databases_made = 0
        self._settings: dict[str, type_of_setting] = {
            "listen_addresses": "",
            "port": self.port,
            "unix_socket_directories": str(self.directory),
            "shared_preload_libraries": ",".join(preload),
            "max_connections": 100,
            "max_worker_processes": 24,
            "fsync": fsync,
            "full_page_writes": fsync,
            "timezone": "UTC",
            "log_timezone": "UTC",
            "logging_collector": False,
            "log_destination": "stderr",
            "log_line_prefix": "%m [%p] %d %a ",
        }
        if "pg_cron" in preload:
            self._settings |= {
                "cron.database_name": control_db,
                "cron.host": str(self.directory),
                "cron.use_background_workers": background_workers,
                "cron.log_run": True,
            }
        self._settings |= settings or {}

    def standby(self) -> Cluster:
        """A cluster that will follow this one, until it is promoted. Close it as any other."""
        standby = Cluster(control_db=self.control_db, keep=self.keep)
        standby._primary = self
        # Those that say which cluster it is are its own.
        own = {"port", "unix_socket_directories", "cron.host"}
        standby._settings = {
            name: standby._settings[name] if name in own else value
            for name, value in self._settings.items()
        }
        return standby

    def __enter__(self) -> Cluster:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # The server

    def start(self) -> None:
        """Start the server, first making the cluster if there is none; wait until it accepts."""
        if not self._initialized:
            _stop_at_exit(self)
            self._initialize()
        if self.postmaster_pid is None:
            # Left by a crash; the number in them may be another process's by now, or a zombie's.
            for lock in (self.data / "postmaster.pid", *self.directory.glob(".s.PGSQL.*")):
                lock.unlink(missing_ok=True)
        self._pg_ctl("start", "--log", str(self.log_file), "--timeout", "60")

    def stop(self, mode: str = "fast") -> None:
        """Stop the server and keep its data. One that does not stop in 30 s is stopped at once, and
        then that is an error.
        """
        if self.postmaster_pid is None:
            return
        try:
            self._pg_ctl("stop", "--mode", mode, "--timeout", "30")
        except ClusterError:
            if mode == "immediate" or self.postmaster_pid is None:
                raise
            self._pg_ctl("stop", "--mode", "immediate", "--timeout", "30")
            raise

    def restart(self, mode: str = "fast") -> None:
        self.stop(mode)
        self.start()

    def crash(self, pid: int) -> None:
        """Kill a session's backend, which crashes the server; wait until it has recovered."""
        told = "all server processes terminated; reinitializing"
        before = self.log_text().count(told)
        os.kill(pid, signal.SIGKILL)
        self.wait_for(lambda: self.log_text().count(told) > before, timeout=30)

        def answers() -> bool:
            try:
                return bool(self.execute("SELECT true"))
            except psycopg.OperationalError:
                return False

        self.wait_for(answers, timeout=30)

    def reload(self) -> None:
        self._pg_ctl("reload")

    def configure(self, settings: Mapping[str, type_of_setting]) -> None:
        """Write further settings; they take effect with `reload` or `restart`."""
        self._settings |= settings
        lines = (f"{name} = {_conf_literal(value)}\n" for name, value in self._settings.items())
        self._write(self.data / "sluice.conf", "".join(lines))

    def remove(self) -> None:
        """Stop the server at once if it still runs, and remove the directory."""
        try:
            self.stop("immediate")
        finally:
            shutil.rmtree(self.directory, ignore_errors=True)
            _running.discard(self)

    def close(self) -> None:
        """Stop and remove the cluster, or tell where it is if it is to be kept."""
        if self.keep:
            _running.discard(self)
            print(f"kept: psql -h {self.directory} -p {self.port} -U postgres {self.control_db}")
            return
        try:
            self.stop()
        finally:
            self.remove()

    @property
    def data(self) -> Path:
        return self.directory / "data"

    @property
    def log_file(self) -> Path:
        return self.directory / "log"

    def log_text(self) -> str:
        return self.log_file.read_text(errors="replace") if self.log_file.exists() else ""

    def log_end(self) -> str:
        """The last lines of the log, for an error."""
        return "\n".join(self.log_text().splitlines()[-20:])

    @property
    def postmaster_pid(self) -> int | None:
        """The postmaster's process ID, or None when it is not running (also after a crash)."""
        try:
            pid = int((self.data / "postmaster.pid").read_text().split()[0])
        except (FileNotFoundError, IndexError):
            return None
        return pid if _runs(pid) else None

    @property
    def version_num(self) -> int:
        """The server's version as in server_version_num, for example 150020."""
        match = re.search(r"(\d+)(?:\.(\d+))?", _output(self.pg_config, "--version"))
        if match is None:
            raise ClusterError(f"{self.pg_config} tells no version")
        return int(match[1]) * 10000 + int(match[2] or 0)

    # Databases

    def connect(
        self,
        dbname: str | None = None,
        user: str = "postgres",
        autocommit: bool = True,
        **options: Any,
    ) -> psycopg.Connection[Any]:
        """Open a connection, to the control database unless another is named."""
        return psycopg.connect(
            host=str(self.directory),
            port=self.port,
            dbname=dbname or self.control_db,
            user=user,
            autocommit=autocommit,
            **options,
        )

    def execute(
        self, query: str, parameters: Sequence[Any] | None = None, *, dbname: str | None = None
    ) -> list[Any]:
        """Run one statement as postgres on a connection of its own; [] if it returns no rows."""
        with self.connect(dbname) as connection:
            cursor = connection.execute(query, parameters)
            return cursor.fetchall() if cursor.description else []

    def shell(self, script: str, given: str = "", **environment: str) -> str:
        """Run a script in a shell as the cluster's owner, where psql and pg_ctl find this cluster;
        give what it wrote to stdout. What goes to stderr, and what a server that it starts writes
        there, is in the cluster's log. ClusterError if it fails.
        """
        # Files and no pipes: a server that is started would keep them open.
        with tempfile.TemporaryFile("w+") as output, self.log_file.open("a") as log:
            result = subprocess.run(
                ["/bin/sh", "-euc", script],
                cwd=self.directory,
                env=_ENVIRONMENT
                | {
                    "PATH": f"{self.bindir}:{_ENVIRONMENT['PATH']}",
                    "PGHOST": str(self.directory),
                    "PGPORT": str(self.port),
                    "PGUSER": "postgres",
                    "PGDATA": str(self.data),
                }
                | environment,
                input=given,
                stdout=output,
                stderr=log,
                text=True,
                **self._identity(),
            )
            output.seek(0)
            written = output.read()
        if result.returncode:
            raise ClusterError(f"failed:\n{script}{given}\n{written}\n{self.log_end()}")
        return written

    def create_extensions(self) -> None:
        """Create pg_cron and pg_sluice in the control database."""
        if "pg_cron" in str(self._settings["shared_preload_libraries"]):
            self.execute("CREATE EXTENSION pg_cron")
        self.execute("CREATE EXTENSION pg_sluice CASCADE")

    def silence_cron(self) -> None:
        """Let pg_cron start nothing, so that the only leaders are those that a test makes."""
        self.execute(
            "CREATE FUNCTION public.postpone() RETURNS trigger LANGUAGE plpgsql"
            " AS 'BEGIN NEW.schedule := ''0 0 30 2 *''; RETURN NEW; END'"
        )
        self.execute(
            "CREATE TRIGGER postpone BEFORE INSERT OR UPDATE ON cron.job"
            " FOR EACH ROW EXECUTE FUNCTION public.postpone()"
        )

    def create_template(self, *statements: str, name: str = TEMPLATE) -> None:
        """Create a database with pg_sluice and whatever `statements` add, for `database` to copy.

        Nobody can connect to it afterwards, since one session there would fail every copy.
        """
        self.execute(f"CREATE DATABASE {name}")
        for statement in ("CREATE EXTENSION pg_sluice CASCADE", *statements):
            self.execute(statement, dbname=name)
        self.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false IS_TEMPLATE true")

    @contextmanager
    def database(self, template: str = TEMPLATE) -> Iterator[Database]:
        """A fresh copy of `template`; dropped at the end, with the sessions in it."""
        self._databases_made += 1
        database = Database(self, f"db{self._databases_made}")
        self.execute(f"CREATE DATABASE {database.name} TEMPLATE {template}")
        try:
            yield database
        finally:
            if self.postmaster_pid is not None:
                self.execute(f"DROP DATABASE IF EXISTS {database.name} WITH (FORCE)")

    @contextmanager
    def database_in(self, encoding: str, name: str) -> Iterator[Database]:
        """A database in that encoding with pg_sluice; dropped at the end, with its sessions."""
        self.execute(
            f"CREATE DATABASE {name} ENCODING '{encoding}' LC_COLLATE 'C' LC_CTYPE 'C'"
            " TEMPLATE template0"
        )
        try:
            database = Database(self, name)
            # Python knows no codec for some.
            with database.connect(client_encoding="UTF8") as connection:
                connection.execute("CREATE EXTENSION pg_sluice CASCADE")
            yield database
        finally:
            self.execute(f"DROP DATABASE {name} WITH (FORCE)")

    def create_role(self, name: str) -> None:
        """Create a role that can log in, unless there is one of that name."""
        self.execute(
            f"DO $$BEGIN CREATE ROLE {name} LOGIN; EXCEPTION WHEN duplicate_object THEN END$$"
        )

    def wait_for(
        self,
        what: str | Callable[[], Any],
        *,
        timeout: float = WAIT_SECONDS,
        interval: float = 0.02,
        dbname: str | None = None,
    ) -> Any:
        """Poll until `what` is true and return its value; TimeoutError after `timeout` seconds.

        `what` is a function, or a query whose first column in the first row counts. `interval` is
        for a look that costs much.
        """
        deadline = time.monotonic() + timeout
        with self._condition(what, dbname) as condition:
            while not (value := condition()):
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"not true within {timeout} s: {what}\n"
                        f"last value: {value!r}\n\nserver log:\n{self.log_end()}"
                    )
                time.sleep(interval)
        return value

    # Details

    @contextmanager
    def _condition(
        self, what: str | Callable[[], Any], dbname: str | None
    ) -> Iterator[Callable[[], Any]]:
        if not isinstance(what, str):
            yield what
            return
        with self.connect(dbname) as connection:

            def first_value() -> Any:
                row = connection.execute(what).fetchone()
                return row[0] if row else None

            yield first_value

    def _initialize(self) -> None:
        if os.geteuid() == 0:
            shutil.chown(self.directory, self.owner, self.owner)
        self.directory.chmod(0o755)
        if self._primary is not None:
            self._copy(self._primary)
        else:
            self._make()
        self._initialized = True

    def _copy(self, primary: Cluster) -> None:
        self._run(
            "pg_basebackup",
            "--host", str(primary.directory),
            "--port", str(primary.port),
            "--username", "postgres",
            "--pgdata", str(self.data),
            "--checkpoint", "fast",
            "--write-recovery-conf",
            "--no-sync",
        )  # fmt: skip
        self.configure({})

    def _make(self) -> None:
        self._run(
            "initdb",
            "--pgdata", str(self.data),
            "--username", "postgres",
            "--encoding", self.encoding,
            "--locale", self.locale,
            "--no-sync",
        )  # fmt: skip
        self._write(self.data / "pg_hba.conf", HBA)
        users = sorted({"root", "postgres", self.owner})
        self._write(
            self.data / "pg_ident.conf", "".join(f"sluice {user} postgres\n" for user in users)
        )
        with (self.data / "postgresql.conf").open("a") as conf:
            conf.write("include 'sluice.conf'\n")
        self.configure({})
        if self.control_db != "postgres":
            # Before the first start, because pg_cron connects to it there and then.
            self._run(
                "postgres", "--single",
                "-D", str(self.data),
                "-c", "shared_preload_libraries=",
                "postgres",
                given='CREATE DATABASE "{}"\n'.format(self.control_db.replace('"', '""')),
            )  # fmt: skip

    def _write(self, path: Path, text: str) -> None:
        path.write_text(text)
        if os.geteuid() == 0:
            shutil.chown(path, self.owner, self.owner)

    def _pg_ctl(self, action: str, *arguments: str) -> None:
        self._run("pg_ctl", action, "--pgdata", str(self.data), *arguments)

    def _run(self, program: str, *arguments: str, given: str = "") -> None:
        """Run one of the server's programs as the cluster's owner, without our own PG*, PYTHON* and
        other variables: a server's PL/Python must see what is installed and nothing else.
        """
        result = subprocess.run(
            [str(self.bindir / program), *arguments],
            cwd=self.directory,
            env=_ENVIRONMENT,
            input=given,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            **self._identity(),
        )
        if result.returncode:
            raise ClusterError(
                f"{program} {' '.join(arguments)} failed:\n{result.stdout}\n{self.log_end()}"
            )

    def _identity(self) -> dict[str, Any]:
        """Who runs programs: the cluster's owner."""
        if os.geteuid() != 0:
            return {}
        owner = pwd.getpwnam(self.owner)
        return {"user": owner.pw_uid, "group": owner.pw_gid, "extra_groups": []}


class Database:
    """A database of a cluster, with the cluster's methods for it."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.cluster = cluster
        self.name = name

    def connect(
        self, user: str = "postgres", autocommit: bool = True, **options: Any
    ) -> psycopg.Connection[Any]:
        return self.cluster.connect(self.name, user, autocommit, **options)

    def execute(self, query: str, parameters: Sequence[Any] | None = None) -> list[Any]:
        return self.cluster.execute(query, parameters, dbname=self.name)

    def wait_for(self, what: str | Callable[[], Any], *, timeout: float = WAIT_SECONDS) -> Any:
        return self.cluster.wait_for(what, timeout=timeout, dbname=self.name)


class Procedure:
    """A session that has called a procedure in the control database, from a thread."""

    def __init__(
        self, cluster: Cluster, name: str, run_for: str = "1 hour", *, dbname: str | None = None
    ) -> None:
        self._cluster = cluster
        self._name = name
        self._connection = cluster.connect(dbname)
        self.pid = self._connection.info.backend_pid
        self.error: psycopg.Error | None = None
        """What the call ended with; None while it runs and after a clean end."""
        self._thread = threading.Thread(target=self._run, args=[run_for], daemon=True)
        self._thread.start()

    def _run(self, run_for: str) -> None:
        try:
            with self._connection as connection:
                connection.execute(f"CALL sluice.{self._name}({_conf_literal(run_for)})")
        except psycopg.Error as error:
            self.error = error

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def join(self, timeout: float = WAIT_SECONDS) -> psycopg.Error | None:
        """Wait for the end of the call and give its error; TimeoutError if there is no end."""
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimeoutError(
                f"{self._name}() still runs after {timeout} s\n\n"
                f"server log:\n{self._cluster.log_end()}"
            )
        return self.error

    def cancel(self) -> None:
        self._cluster.execute("SELECT pg_cancel_backend(%s)", [self.pid])

    def terminate(self) -> None:
        self._cluster.execute("SELECT pg_terminate_backend(%s)", [self.pid])


class Leader(Procedure):
    """A session that has called sluice.run()."""

    def __init__(
        self, cluster: Cluster, run_for: str = "1 hour", *, dbname: str | None = None
    ) -> None:
        super().__init__(cluster, "run", run_for, dbname=dbname)

    @property
    def leads(self) -> bool:
        """Whether it holds the lease."""
        return self._cluster.execute(
            "SELECT pid = %s AND expires_at > clock_timestamp() FROM _sluice.lease", [self.pid]
        ) == [(True,)]


class ClusterError(Exception):
    """A program of the server failed; the message has its output and the end of the log."""


def pg_config() -> Path:
    found = subprocess.run([ROOT / "tools" / "pg-config"], capture_output=True, text=True)
    if found.returncode:
        raise ClusterError(found.stderr.strip())
    return Path(found.stdout.strip())


def _output(program: Path, *arguments: str) -> str:
    return subprocess.check_output([program, *arguments], text=True).strip()


def _runs(pid: int) -> bool:
    """Whether the process exists and is no zombie: not every container reaps after a crash."""
    state = subprocess.run(
        ["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True
    ).stdout
    return state.strip() != "" and not state.startswith("Z")


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _conf_literal(value: type_of_setting) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "'{}'".format(str(value).replace("\\", "\\\\").replace("'", "''"))


# Clusters to remove when the program ends, however it ends short of SIGKILL.
_running: set[Cluster] = set()


def _stop_at_exit(cluster: Cluster) -> None:
    if not _running:
        atexit.register(_remove_all)
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, _on_signal)
    _running.add(cluster)


def _remove_all() -> None:
    for cluster in list(_running):
        if not cluster.keep:
            cluster.remove()


def _on_signal(number: int, frame: FrameType | None) -> None:
    """Remove the clusters and die of the same signal: a test runner might catch an exception."""
    _remove_all()
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
