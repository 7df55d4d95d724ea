"""What taking a slot and giving it back costs."""

from __future__ import annotations

import time
from collections.abc import Iterator

from report import line, spread, type_of_line
from rig import members

_ROUNDS = 300


def slot_cost() -> Iterator[type_of_line]:
    """reserve_slot, activate_slot and release_slot, called as the leader calls them."""
    with members() as (member,), member.cluster.connect("postgres") as control:
        control.execute("SET synchronous_commit = off")
        row = control.execute("SELECT epoch FROM _sluice.acquire_lease(1, now(), 300)").fetchone()
        epoch = row and row[0]
        took: dict[str, list[float]] = {"reserve": [], "activate": [], "release": []}
        for _ in range(_ROUNDS):
            started = time.perf_counter()
            reserved = control.execute(
                "SELECT nonce FROM _sluice.reserve_slot(%s, %s)", [epoch, member.oid]
            ).fetchone()
            nonce = reserved and reserved[0]
            took["reserve"].append(1000 * (time.perf_counter() - started))
            started = time.perf_counter()
            # No session has this identity, so that the slot can be given back at once.
            control.execute("SELECT _sluice.activate_slot(%s, %s, 1, now())", [epoch, nonce])
            took["activate"].append(1000 * (time.perf_counter() - started))
            started = time.perf_counter()
            control.execute("SELECT _sluice.release_slot(%s, %s)", [epoch, nonce])
            took["release"].append(1000 * (time.perf_counter() - started))
    for step, times in took.items():
        yield line(
            f"slot_cost_{step}",
            spread(times)["p50"],
            "ms, median",
            target="<= 1 ms",
            milliseconds=spread(times),
        )
