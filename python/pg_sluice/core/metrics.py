"""What was counted, in Prometheus' text format.

Labels are bounded: at most NODES_OF_DATABASE nodes of a database, NODES of the server and DATABASES
databases have series of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4

NODES_OF_DATABASE = 1_000
NODES = 10_000
DATABASES = 1_000
OTHER = "other"
"""The node that stands for those beyond the bound, and the database whose queue does."""

Row = Mapping[str, Any]

_NODE = ("database", "node", "kind")


@dataclass(frozen=True)
class Metric:
    """A metric: its help text and labels."""

    help: str
    labels: tuple[str, ...] = ()


METRICS = {
    "sluice_build_info": Metric("The version of pg_sluice in the control database.", ("version",)),
    "sluice_collection_seconds": Metric("How long it took to collect these metrics."),
    "sluice_leader_up": Metric("Whether a leader holds the lease: 1 or 0."),
    "sluice_lease_epoch": Metric("The epoch of the lease: one more with each new leader."),
    "sluice_worker_limit": Metric("Workers that the server may have; 0 is serial mode."),
    "sluice_slots": Metric("Worker slots that are free, reserved or live.", ("state",)),
    "sluice_databases_omitted": Metric("Member databases that are left out, beyond the bound."),
    "sluice_database_up": Metric(
        "Whether the nodes of the database could be read in time: 1 or 0.", ("database",)
    ),
    "sluice_database_state": Metric(
        "1 for the state of the database: joining, scheduled, failed or version_mismatch.",
        ("database", "state"),
    ),
    "sluice_database_failures": Metric("Ticks in a row that failed.", ("database",)),
    "sluice_last_tick_timestamp_seconds": Metric(
        "When the database was last ticked with success, as recorded once a second.",
        ("database",),
    ),
    "sluice_tick_seconds": Metric("How long that tick took.", ("database",)),
    "sluice_queue_depth": Metric(
        "Runs that are queued, running or ended and not on record yet.", ("database", "state")
    ),
    "sluice_queue_oldest_seconds": Metric("Age of the oldest queued run, or 0.", ("database",)),
    "sluice_drain": Metric(
        "Whether a drain of the database or of the server is in force: 1 or 0.", ("database",)
    ),
    "sluice_paused_nodes": Metric("Nodes that are paused.", ("database",)),
    "sluice_alerts_open": Metric("Open alerts of the database.", ("database", "severity")),
    "sluice_nodes": Metric("Nodes by kind and status.", ("database", "kind", "status")),
    "sluice_node_status": Metric(
        "1 for the status of the node: active, needs_init, suspended or quarantined.",
        (*_NODE, "status"),
    ),
    "sluice_node_consecutive_errors": Metric("Counted failures in a row.", _NODE),
    "sluice_node_lag_seconds": Metric(
        "Age of what a stream table or materialized view shows.", _NODE
    ),
    "sluice_node_last_success_timestamp_seconds": Metric(
        "When the last run began that succeeded.", _NODE
    ),
    "sluice_runs_total": Metric("Runs that ended, by outcome.", (*_NODE, "outcome")),
    "sluice_run_seconds_total": Metric("Time that runs took.", _NODE),
    "sluice_rows_changed_total": Metric(
        "Rows that runs of stream tables and jobs have changed.", _NODE
    ),
}
"""All metrics, in the order of the exposition. Those that end in _total are counters."""

_SEVERITIES = ("info", "warning", "critical")
_QUEUE_STATES = ("queued", "running", "ended")
_TAKEN = ("reserved", "live")


def node_limit(databases: int) -> int:
    """How many nodes have series of their own in each of so many databases.

    >>> node_limit(1), node_limit(20), node_limit(100_000)
    (1000, 500, 10)
    """
    return min(NODES_OF_DATABASE, NODES // max(1, min(databases, DATABASES)))


def reported(server: Row) -> Sequence[Row]:
    """The members that have series of their own, of `_sluice.server_metrics()`."""
    members: Sequence[Row] = server["members"]
    return members[:DATABASES]


def exposition(server: Row, databases: Mapping[str, Row | None], seconds: float) -> str:
    """The exposition.

    `server` is what `_sluice.server_metrics()` gives, `databases` what `_sluice.node_metrics()`
    gives in each database, by its name in `server`, or None where it could not be asked; `seconds`
    is what that took.
    """
    made = _Exposition()
    made.add("sluice_build_info", 1, server["version"])
    made.add("sluice_collection_seconds", seconds)
    _add_server(made, server)
    # Those of the control database are there whether or not it is a member.
    _add_alerts(made, server["database"], server)
    for name, found in databases.items():
        made.add("sluice_database_up", found is not None, name)
        if found is not None:
            if name != server["database"]:
                _add_alerts(made, name, found)
            _add_nodes(made, name, found)
    return made.text()


class _Exposition:
    """The samples so far; those with equal labels are one, their sum."""

    def __init__(self) -> None:
        self._samples: dict[str, dict[tuple[str, ...], float]] = {name: {} for name in METRICS}

    def add(self, name: str, value: float, *labels: str) -> None:
        samples = self._samples[name]
        samples[labels] = samples.get(labels, 0) + value

    def collect(self) -> Iterable[CounterMetricFamily | GaugeMetricFamily]:
        for name, metric in METRICS.items():
            kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            family = kind(name, metric.help, labels=metric.labels)
            for labels, value in self._samples[name].items():
                family.add_metric(labels, value)
            yield family

    def text(self) -> str:
        encoded: bytes = generate_latest(self)
        return encoded.decode()


def _add_server(made: _Exposition, server: Row) -> None:
    slots = server["slots"]
    taken = {state: slots.get(state, 0) for state in _TAKEN}
    made.add("sluice_leader_up", server["leader"])
    made.add("sluice_lease_epoch", server["epoch"])
    made.add("sluice_worker_limit", server["worker_limit"])
    made.add("sluice_slots", max(0, server["worker_limit"] - sum(taken.values())), "free")
    for state, number in taken.items():
        made.add("sluice_slots", number, state)
    made.add("sluice_databases_omitted", len(server["members"]) - len(reported(server)))
    for member in reported(server):
        _add_member(made, member)
    beyond = {member["database"] for member in server["members"][DATABASES:]}
    for row in server["queue"]:
        name = row["database"]
        if name in beyond:
            made.add("sluice_queue_depth", row["depth"], OTHER, row["state"])
            continue
        made.add("sluice_queue_depth", row["depth"], name, row["state"])
        if row["state"] == "queued":
            made.add("sluice_queue_oldest_seconds", row["oldest"], name)


def _add_member(made: _Exposition, member: Row) -> None:
    name = member["database"]
    made.add("sluice_database_state", 1, name, member["state"])
    made.add("sluice_database_failures", member["failures"], name)
    if member["last_tick"] is not None:
        made.add("sluice_last_tick_timestamp_seconds", member["last_tick"], name)
        made.add("sluice_tick_seconds", member["tick_seconds"], name)
    for state in _QUEUE_STATES:
        made.add("sluice_queue_depth", 0, name, state)
    made.add("sluice_queue_oldest_seconds", 0, name)
    made.add("sluice_drain", member["drain"], name)
    made.add("sluice_paused_nodes", member["paused"], name)


def _add_alerts(made: _Exposition, name: str, database: Row) -> None:
    for severity in _SEVERITIES:
        number = database["alerts"].get(severity, 0)
        made.add("sluice_alerts_open", number, name, severity)


def _add_nodes(made: _Exposition, name: str, found: Row) -> None:
    for row in found["numbers"]:
        made.add("sluice_nodes", row["number"], name, row["kind"], row["status"])
    for node in found["nodes"]:
        labels = (name, node["name"], node["kind"])
        if node["status"] is not None:
            made.add("sluice_node_status", 1, *labels, node["status"])
        made.add("sluice_node_consecutive_errors", node["consecutive_errors"], *labels)
        if node["lag"] is not None:
            made.add("sluice_node_lag_seconds", node["lag"], *labels)
        if node["last_success"] is not None:
            made.add("sluice_node_last_success_timestamp_seconds", node["last_success"], *labels)
        # The first one must be seen as an increase.
        for outcome, number in ({"succeeded": 0} | node["runs"]).items():
            made.add("sluice_runs_total", number, *labels, outcome)
        made.add("sluice_run_seconds_total", node["run_seconds"], *labels)
        made.add("sluice_rows_changed_total", node["rows_changed"], *labels)
