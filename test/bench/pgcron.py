"""What pg_cron makes of the same work: measured beside ours, or published where it can't be."""

from __future__ import annotations

import time
from typing import Any

from cluster import Cluster
from report import rounded
from rig import Member, observe

_WARM_UP_SECONDS = 3.0
_AFTERMATH_SECONDS = 2.0

_PUBLISHED_SHARES = {
    "pg_cron 1.6.5 (published), 50 jobs at 1 s": "95 % of fires",
    "pg_cron 1.6.5 (published), 200 jobs at 1 s": "6 to 79 % of fires",
}
_PUBLISHED_THROUGHPUT = {
    "pg_cron 1.6.5 (published)": "218 runs/s at 8 to 10 ms of CPU each",
}


def every_second(member: Member, jobs: int, seconds: float) -> dict[str, Any]:
    """How many fires of as many jobs at one second run, where pg_cron knows seconds. Each only
    reads what a stream table would compare with its contents.
    """
    version = _version(member.cluster)
    if version < (1, 5):
        return _PUBLISHED_SHARES
    cluster = member.cluster
    cluster.execute(
        """
        SELECT cron.schedule_in_database('job ' || g, '1 second',
            format('SELECT kind, count(*), sum(amount) FROM source%%s GROUP BY kind', g %% 10), %s)
        FROM generate_series(1, %s) AS g
        """,
        [member.name, jobs],
    )
    time.sleep(_WARM_UP_SECONDS)
    window = observe(cluster, seconds)
    time.sleep(_AFTERMATH_SECONDS)
    ((ran,),) = cluster.execute(
        "SELECT count(*) FROM cron.job_run_details WHERE status = 'succeeded'"
        " AND start_time >= to_timestamp(%s) AND start_time < to_timestamp(%s)",
        [window.started_at, window.ended_at],
    )
    name = f"pg_cron {'.'.join(map(str, version))}, {jobs} jobs at 1 s"
    return {
        name: f"{rounded(100 * ran / (jobs * window.seconds))} % of fires",
        "its CPU per run, ms": window.cpu_ms_per_run(ran)["all"],
    }


def throughput(cluster: Cluster) -> dict[str, Any]:
    """The most runs per second, where `every_second` measures nothing."""
    return _PUBLISHED_THROUGHPUT if _version(cluster) < (1, 5) else {}


def _version(cluster: Cluster) -> tuple[int, ...]:
    """As in 1.4-1 or 1.6."""
    ((version,),) = cluster.execute("SELECT extversion FROM pg_extension WHERE extname = 'pg_cron'")
    return tuple(map(int, version.replace("-", ".").split(".")))
