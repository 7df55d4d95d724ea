"""What a leader costs that has nothing to do, and whether it holds back vacuum."""

from __future__ import annotations

import time
from collections.abc import Iterator

from cluster import Cluster
from report import line, rounded, type_of_line
from rig import create_sources, create_stream_tables, insert_jobs, leader, members, observe

_NODES = 1_000
_MEMBERS = 3
_WARM_UP_SECONDS = 3.0
_SECONDS = 20.0
_SAMPLES = 400
_SAMPLE_SECONDS = 0.0117
"""No multiple of anything that the leader does at intervals."""

_TRANSACTIONS = "SELECT sum(xact_commit)::bigint FROM pg_stat_database"


def idle_leader() -> Iterator[type_of_line]:
    """CPU of the leader with a thousand nodes in three databases, none of them due."""
    with members(_MEMBERS) as databases:
        for number, member in enumerate(databases):
            insert_jobs(member, (_NODES + number) // _MEMBERS, "@every 1h")
        cluster = databases[0].cluster
        with leader(cluster):
            time.sleep(_WARM_UP_SECONDS)
            ((before,),) = cluster.execute(_TRANSACTIONS)
            window = observe(cluster, _SECONDS)
            ((after,),) = cluster.execute(_TRANSACTIONS)
    percent = window.cpu_percent()
    yield line(
        "idle_leader",
        percent["all"] - percent["server"],
        "% of a core",
        target="<= 2",
        cpu_percent=percent,
        transactions_per_second=rounded((after - before) / window.seconds),
        nodes=_NODES,
        members=_MEMBERS,
    )


def snapshot() -> Iterator[type_of_line]:
    """How often the leader's session holds a snapshot, idle and with a hundred nodes at '1s'."""
    with members() as (member,), leader(member.cluster) as pid:
        idle_free, idle_age = _sample(member.cluster, pid)
        create_sources(member)
        create_stream_tables(member, 100, "1s")
        time.sleep(_WARM_UP_SECONDS)
        busy_free, busy_age = _sample(member.cluster, pid)
    yield line(
        "snapshot",
        busy_free,
        "% of samples without backend_xmin",
        compared_to={"idle": rounded(idle_free)},
        oldest_xmin_age={"idle": idle_age, "busy": busy_age},
    )


def _sample(cluster: Cluster, pid: int) -> tuple[float, int]:
    """The share of samples without a snapshot, in percent, and the age of the oldest one."""
    ages = []
    with cluster.connect() as connection:
        for _ in range(_SAMPLES):
            row = connection.execute(
                "SELECT age(backend_xmin) FROM pg_stat_activity WHERE pid = %s", [pid]
            ).fetchone()
            assert row is not None
            ages.append(row[0])
            time.sleep(_SAMPLE_SECONDS)
    held = [age for age in ages if age is not None]
    return 100 * (1 - len(held) / len(ages)), max(held, default=0)
