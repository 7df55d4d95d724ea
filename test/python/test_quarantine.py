"""Nodes with a stored value that can't be read: they are set aside, and nobody else notices."""

from collections.abc import Callable

from cluster import Cluster, Database, Leader
from faults import Fault
from runs import configure, ended, node, run_now, schedule

# Nodes by the name of what is wrong with them: edited by hand, or written by another version.
ODD = {
    "schedule": "schedule = 'every blue moon'",
    "public.st": "schedule = '* * * *'",
    "anchor": "anchor = 'infinity'",
    "retry": "retry_at = now(), retry_of = '-infinity'",
    "lock_timeout": "lock_timeout = '-1 s'",
    "refresh_timeout": "refresh_timeout = '-1 s'",
    "kind": "kind = 'view'",
}
SINCE_17 = {
    "long lock_timeout": "lock_timeout = 'infinity'",
    "long refresh_timeout": "refresh_timeout = 'infinity'",
}
OTHERS = 50
WARNING = 'WARNING:  "{}" is quarantined: '


def odd_nodes(cluster: Cluster) -> dict[str, str]:
    return ODD | (SINCE_17 if cluster.version_num >= 170000 else {})


def test_unreadable_nodes_are_quarantined_while_all_others_fire(
    cluster: Cluster,
    member: Database,
    lead: Callable[..., Leader],
    control: Database,
    fault: Callable[[Database, str], Fault],
) -> None:
    odd = odd_nodes(cluster)
    member.execute(
        "SELECT sluice.schedule('good ' || n, '1 h', 'SELECT 1') FROM generate_series(1, %s) AS n",
        [OTHERS],
    )
    member.execute("SELECT sluice.create_stream_table('st', 'SELECT 1 AS x', '1 h')")
    for name in odd.keys() - {"public.st"}:
        member.execute("SELECT sluice.schedule(%s, '1 h', 'SELECT 1')", [name])
    # All have fired once; the same fires are due again below.
    member.execute("UPDATE _sluice.node SET next_fire_at = next_fire_at - interval '1 h'")
    assert lead("0", wait=False).join() is None
    assert len(member.execute("DELETE FROM _sluice.history RETURNING 1")) == OTHERS + len(odd)

    # 1. They become unreadable, and everything is due, all at once.
    member.execute(
        "ALTER TABLE _sluice.node"
        " DROP CONSTRAINT node_kind_check, DROP CONSTRAINT node_kind_columns_check"
    )
    grid = dict(member.execute("SELECT name, next_fire_at FROM sluice.nodes"))
    with member.connect(autocommit=False) as connection:
        for name, change in odd.items():
            connection.execute(
                f"UPDATE _sluice.node AS n SET {change} WHERE _sluice.node_name(n) = %s", [name]
            )
        connection.execute("UPDATE _sluice.node SET next_fire_at = next_fire_at - interval '3 h'")

    # 2. The one tick that finds anything, while nothing may run.
    tick, enqueue = fault(member, "tick"), fault(control, "enqueue")
    member.execute("SELECT sluice.drain(wait => false)")
    assert lead("0", wait=False).join() is None
    assert enqueue.calls == 1
    assert member.execute("SELECT error FROM sluice.databases()") == [(None,)]
    assert cluster.execute(
        "SELECT count(*), count(DISTINCT xmin::text) FROM _sluice.queue WHERE name LIKE 'good %'"
    ) == [(OTHERS, 1)]
    assert cluster.execute("SELECT count(*) FROM _sluice.queue") == [(OTHERS,)]
    quarantined = "SELECT name FROM sluice.nodes WHERE status = 'quarantined'"
    assert {name for (name,) in member.execute(quarantined)} == set(odd)
    # On its own grid, past now.
    assert dict(member.execute("SELECT name, next_fire_at FROM sluice.nodes")) == grid

    # 3. The others run, and nothing more is told however many ticks there are.
    member.execute("SELECT sluice.resume()")
    leader = lead()
    member.wait_for(f"SELECT count(*) >= {OTHERS} FROM sluice.history")
    tick.arm(0)
    cluster.wait_for(lambda: tick.calls > 1)
    rows = member.execute("SELECT name, outcome FROM sluice.history")
    assert len(rows) == OTHERS
    assert dict(rows) == dict.fromkeys(grid.keys() - odd.keys(), "succeeded")
    alerts = "SELECT node, event, severity FROM sluice.alerts ORDER BY node"
    assert member.execute(alerts) == [(name, "quarantined", "critical") for name in sorted(odd)]
    log = cluster.log_text()
    assert {name: log.count(WARNING.format(name)) for name in odd} == dict.fromkeys(odd, 1)
    assert cluster.execute("SELECT count(*) FROM sluice.alerts") == [(0,)]
    assert leader.alive

    # 4. A valid definition lifts it, and so does reset() once the value is in order.
    member.execute("SELECT sluice.alter_stream_table('st', schedule => '1 h')")
    for name in ("schedule", "anchor", "lock_timeout", "refresh_timeout"):
        member.execute("SELECT sluice.schedule(%s, '1 h', 'SELECT 1')", [name])
    for name in odd.keys() - {"public.st", "schedule", "anchor", "lock_timeout", "refresh_timeout"}:
        member.execute(
            "UPDATE _sluice.node SET lock_timeout = NULL, refresh_timeout = NULL, kind = 'job'"
            " WHERE job_name = %s",
            [name],
        )
        member.execute("SELECT sluice.reset(%s)", [name])
    assert member.execute(quarantined) == []
    assert member.execute("SELECT count(*) FROM sluice.alerts WHERE closed_at IS NULL") == [(0,)]
    assert member.execute("SELECT bool_and(next_fire_at > now()) FROM sluice.nodes") == [(True,)]
    for name in odd:
        assert ended(member, run_now(member, name))["outcome"] in ("succeeded", "no_change")


def test_unreadable_node_that_is_run_by_hand(
    cluster: Cluster, member: Database, lead: Callable[..., Leader], workers: str
) -> None:
    """No tick looks at it then: its run fails, and only that."""
    configure(member, max_workers=workers)
    leader = lead()
    for option, change in odd_nodes(cluster).items():
        if not option.endswith("timeout"):
            continue
        schedule(member, "SELECT 1", option)
        member.execute(f"UPDATE _sluice.node SET {change} WHERE job_name = %s", [option])
        row = ended(member, run_now(member, option))
        assert (row["outcome"], row["sqlstate"]) == ("permanent_error", "22023")
        assert row["message"].startswith(
            f"stored option can't be read: {option.removeprefix('long ')} is "
        )
        assert node(member, option)["consecutive_errors"] == 1
    schedule(member, "SELECT 1")
    assert ended(member, run_now(member))["outcome"] == "succeeded"
    assert leader.alive
