"""Nodes and their runs, as the behaviour tests make and read them."""

from typing import Any

from cluster import WAIT_SECONDS, Cluster, Database


def configure(database: Cluster | Database, **settings: str) -> None:
    """Set settings for the whole server."""
    for name, value in settings.items():
        database.execute("SELECT sluice.configure(%s, %s, cluster => true)", [name, value])


def configure_database(database: Database, **settings: str) -> None:
    """Set settings for this database alone, where they are in force at once."""
    for name, value in settings.items():
        database.execute("SELECT sluice.configure(%s, %s)", [name, value])


def schedule(database: Database, command: str, name: str = "job", **options: Any) -> None:
    """Schedule a job that runs by hand only."""
    given = "".join(f", {option} => %s" for option in options)
    database.execute(
        f"SELECT sluice.schedule(%s, 'manual', %s{given})", [name, command, *options.values()]
    )


def run_now(database: Database, name: str = "job") -> Any:
    """Queue a run; gives its run_id."""
    return database.execute("SELECT sluice.run_now(%s)", [name])[0][0]


def ended(database: Database, run_id: Any, *, timeout: float = WAIT_SECONDS) -> dict[str, Any]:
    """The history row of a run, once there is one."""
    row: dict[str, Any] = database.wait_for(
        f"SELECT to_jsonb(h) FROM sluice.history AS h WHERE run_id = '{run_id}'", timeout=timeout
    )
    return row


def ran(database: Database, count: int = 1) -> None:
    """Wait until so many runs are on record."""
    database.wait_for(f"SELECT count(*) >= {count} FROM sluice.history")


def node(database: Database, name: str = "job") -> dict[str, Any]:
    """A node's row in sluice.nodes."""
    row: dict[str, Any] = database.execute(
        "SELECT to_jsonb(n) FROM sluice.nodes AS n WHERE name IN (%s, 'public.' || %s)",
        [name, name],
    )[0][0]
    return row


def idle(cluster: Cluster) -> None:
    """Wait until no run is live."""
    cluster.wait_for("SELECT count(*) = 0 FROM _sluice.queue")
