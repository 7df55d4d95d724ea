"""How exactly what would go on for ever ends at its deadline."""

from __future__ import annotations

from collections.abc import Iterator

from report import line, spread, type_of_line
from rig import Member, leader, members

_RUNS = 20
_DEADLINE_SECONDS = 2
_LIMIT_SECONDS = 60


def deadlines() -> Iterator[type_of_line]:
    """From a run's start to its end less its deadline: a lock that is held for ever, a refresh of
    10 minutes; on workers, and on the scheduler's own session.
    """
    for mode, workers in (("workers", 4), ("serial", 0)):
        with members() as (member,):
            member.cluster.execute(
                "SELECT sluice.configure('max_workers', %s, cluster => true)", [str(workers)]
            )
            member.execute(
                "CREATE TABLE held ();"
                "SELECT sluice.schedule('locked', 'manual', 'LOCK TABLE held',"
                f" lock_timeout => '{_DEADLINE_SECONDS} s');"
                "SELECT sluice.create_stream_table('slow',"
                " 'SELECT count(*) FROM pg_class a, pg_class b, pg_class c, pg_class d',"
                f" 'manual', initialize => false, refresh_timeout => '{_DEADLINE_SECONDS} s')"
            )
            with (
                leader(member.cluster),
                member.cluster.connect(member.name, autocommit=False) as holder,
            ):
                holder.execute("LOCK TABLE held")
                for name, outcome in (("locked", "lock_timeout"), ("slow", "deadline_exceeded")):
                    late = [_late(member, name, outcome) for _ in range(_RUNS)]
                    yield line(
                        f"deadline_{name}_{mode}",
                        max(late, key=abs),
                        "ms from the deadline, the farthest",
                        target="within 200 ms",
                        milliseconds=spread(late),
                    )


def _late(member: Member, name: str, outcome: str) -> float:
    """By how many ms a run of the node ended after its deadline."""
    ((run_id,),) = member.execute("SELECT sluice.run_now(%s)", [name])
    ended = f"FROM sluice.history WHERE run_id = '{run_id}'"
    member.cluster.wait_for(lambda: member.execute(f"SELECT true {ended}"), timeout=_LIMIT_SECONDS)
    ((found, took),) = member.execute(
        f"SELECT outcome, extract(epoch FROM ended_at - started_at)::double precision {ended}"
    )
    if found != outcome:
        raise RuntimeError(f"a run of {name} ended as {found}")
    member.execute("SELECT sluice.reset(%s)", [name])
    return 1000 * (float(took) - _DEADLINE_SECONDS)
