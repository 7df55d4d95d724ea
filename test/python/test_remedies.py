"""What a node that fails is given, until it succeeds again: less memory, and time."""

from collections.abc import Callable
from typing import Any

from cluster import Database, Leader
from faults import Fault
from runs import configure, ended, node, run_now

QUERY = """
    SELECT current_setting('work_mem') AS work_mem,
        current_setting('max_parallel_workers_per_gather') AS parallel,
        current_setting('hash_mem_multiplier') AS multiplier
"""


def history(database: Database, count: int) -> list[tuple[Any, ...]]:
    """All attempts since it was emptied, once there are so many."""
    database.wait_for(f"SELECT count(*) >= {count} FROM sluice.history")
    return database.execute(
        "SELECT outcome, attempt, remedy FROM sluice.history ORDER BY started_at"
    )


def remedy(database: Database) -> str | None:
    found: str | None = node(database, "st")["remedy"]
    return found


def test_remedies_come_and_go(
    member: Database,
    lead: Callable[..., Leader],
    fault: Callable[[Database, str], Fault],
    workers: str,
) -> None:
    configure(
        member,
        max_workers=workers,
        refresh_work_mem="4 MB",
        recovery_successes="2",
        retry_backoff_base="100 ms",
        max_consecutive_errors="4",
    )
    made = fault(member, "refresh_stream_table")
    member.execute("SELECT sluice.create_stream_table('st', %s, 'manual')", [QUERY])
    lead()
    settings = "SELECT work_mem, parallel, multiplier FROM st"

    def succeeds_with(work_mem: str, parallel: str, multiplier: str) -> None:
        assert ended(member, run_now(member, "st"))["outcome"] in ("succeeded", "no_change")
        assert member.execute(settings) == [(work_mem, parallel, multiplier)]

    usual = ("2", "2")
    spared = ("0", "1")
    succeeds_with("4MB", *usual)
    assert remedy(member) is None

    # Memory halves with each attempt that was out of it, down to 1 MB.
    member.execute("DELETE FROM _sluice.history")
    made.arm(3, "53200")
    run_now(member, "st")
    assert history(member, 4) == [
        ("out_of_memory", 1, None),
        ("out_of_memory", 2, "work_mem 2048 kB, no parallel query"),
        ("out_of_memory", 3, "work_mem 1024 kB, no parallel query"),
        ("succeeded", 4, "work_mem 1024 kB, no parallel query"),
    ]
    assert made.consumed == 3
    assert member.execute(settings) == [("1MB", *spared)]
    assert node(member, "st")["consecutive_errors"] == 0

    # Two successes ease it by one step, and above the last one it ends.
    told = "work_mem {} kB and no parallel query for {} more successes".format
    assert remedy(member) == told(1024, 1)
    succeeds_with("1MB", *spared)
    assert remedy(member) == told(2048, 2)
    succeeds_with("2MB", *spared)
    assert remedy(member) == told(2048, 1)
    succeeds_with("2MB", *spared)
    assert remedy(member) is None
    succeeds_with("4MB", *usual)

    # Time is what a run gets that waited for a lock in vain.
    configure(member, retry_backoff_base="2 s")
    member.wait_for("SELECT _sluice.setting('retry_backoff_base') = 2")
    member.execute("DELETE FROM _sluice.history")
    made.arm(1, "55P03")
    run_now(member, "st")
    member.wait_for("SELECT remedy LIKE 'backoff until %' FROM sluice.nodes")
    assert history(member, 2) == [("lock_timeout", 1, None), ("no_change", 2, None)]
    assert made.consumed == 1
    assert remedy(member) is None
    assert member.execute(settings) == [("4MB", *usual)]

    # Whatever else, it is suspended in the end, and reset() clears all of it.
    configure(member, retry_backoff_base="100 ms")
    member.wait_for("SELECT _sluice.setting('retry_backoff_base') = 0.1")
    for sqlstate, outcome in (("53200", "out_of_memory"), ("55P03", "lock_timeout")):
        member.execute("DELETE FROM _sluice.history")
        made.arm(10, sqlstate)
        run_now(member, "st")
        member.wait_for("SELECT status = 'suspended' FROM sluice.nodes")
        assert [row[:2] for row in history(member, 4)] == [(outcome, n) for n in (1, 2, 3, 4)]
        assert made.consumed == 4
        assert node(member, "st")["consecutive_errors"] == 4
        alerts = "SELECT event, node FROM sluice.alerts WHERE closed_at IS NULL"
        assert member.execute(alerts) == [("suspended", "public.st")]
        expected = told(1024, 2) if outcome == "out_of_memory" else None
        assert remedy(member) == expected
        made.arm(0)
        member.execute("SELECT sluice.reset('st')")
        assert member.execute(alerts) == []
        assert node(member, "st")["consecutive_errors"] == 0
        assert (node(member, "st")["status"], remedy(member)) == ("active", None)
        succeeds_with("4MB", *usual)
