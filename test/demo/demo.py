"""Demo on real data: a year of New York's flights, arriving while pg_sluice keeps up with them.

    make demo
    make demo KEEP=1    leave the cluster running at the end, to look around in it

A throwaway cluster gets two member databases. Flights arrive day by day; stream tables, a
materialized view and a job follow, started by pg_cron and by nothing else. At the end the
scheduler is drained and every table compared with its query. The exit status is 0 if all are equal
and no run failed.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime
from types import FrameType
from typing import Any

import psycopg
from psycopg import sql

from cluster import Cluster, ClusterError
from flights import DAYS, ORIGINS, Feed, Member, clock, create_nodes, load
from screen import Screen, open_screen
from verdict import compare, problems, report
from watch import Settling, Watch

FEED_SECONDS = 65
LEADER_SECONDS = 75
SETTLE_SECONDS = 30
TOTAL_SECONDS = 170
LOG_LINES = 20

NO_LEADER = "pg_cron has not started the scheduler, or it has not seen both databases"


class DemoError(Exception):
    """The demo can't go on; the message says why."""


class TimeLimitError(Exception):
    """The demo as a whole took too long."""


def main() -> int:
    screen = open_screen()
    try:
        with time_limit(TOTAL_SECONDS), Cluster() as cluster:
            found = attempt(cluster, screen)
            if os.environ.get("KEEP", "0") not in ("", "0"):
                keep(cluster)
    except (TimeLimitError, ClusterError) as error:
        found = [str(error)]
    except KeyboardInterrupt:
        found = ["interrupted; the cluster is gone"]
    for problem in found:
        print(f"FAILED: {problem}", file=sys.stderr)
    return 1 if found else 0


def attempt(cluster: Cluster, screen: Screen) -> list[str]:
    """Run the demo; what ends it early is a problem like any other, told with the log's end."""
    try:
        return run(cluster, screen)
    except (DemoError, psycopg.Error) as error:
        log = cluster.log_text().splitlines()[-LOG_LINES:]
        return ["\n".join([str(error), "", "The server's log ends with:", *log])]
    except KeyboardInterrupt:
        screen.say("Interrupted: stopping the cluster")
        raise
    finally:
        screen.close()


def run(cluster: Cluster, screen: Screen) -> list[str]:
    """The demo from beginning to end; gives what went wrong."""
    screen.say("A cluster of its own, with pg_cron and pg_sluice in database postgres")
    cluster.create_extensions()
    with ExitStack() as stack:
        control = stack.enter_context(cluster.connect())
        for name in ORIGINS:
            control.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        members = [Member(name, stack.enter_context(cluster.connect(name))) for name in ORIGINS]
        for member in members:
            # First of all, because pg_cron starts the scheduler at the next full minute.
            member.connection.execute("CREATE EXTENSION pg_sluice CASCADE")
            member.connection.execute("SELECT sluice.start()")
            screen.say(f"{member.name}: sluice.start()")
        for member in members:
            load(member)
            create_nodes(member)
            screen.say(f"{member.name}: departures from {', '.join(ORIGINS[member.name])} loaded")

        feed = Feed(members)
        watch = Watch(control, members, feed)
        await_leader(screen, watch)
        since = clock(control)
        let_flights_arrive(screen, watch, feed)
        settle(screen, watch, members)
        drained_at = drain(control)
        screen.say("sluice.drain(cluster => true): drained\n")

        comparisons = [compared for member in members for compared in compare(member)]
        for line in report(members, comparisons, feed, since):
            screen.say(line)
        found = list(problems(members, comparisons, drained_at))
        if not found:
            screen.say(f"\nAll tables equal their queries. Took {screen.elapsed:.0f} s.")
        return found


def await_leader(screen: Screen, watch: Watch) -> None:
    """Wait for pg_cron to start the scheduler, and for its first look at each database."""
    for _ in until(watch.all_scheduled, LEADER_SECONDS, lambda: NO_LEADER):
        seconds = 60 - int(time.time()) % 60
        screen.show(f"pg_cron starts the scheduler on the minute, in {seconds} s", watch.look)


def let_flights_arrive(screen: Screen, watch: Watch, feed: Feed) -> None:
    """Insert the flights of all days at an even pace."""
    started = time.monotonic()
    while feed.day < DAYS:
        feed.advance(min(DAYS, int((time.monotonic() - started) / FEED_SECONDS * DAYS)))
        screen.show("Flights arrive", watch.look)
        time.sleep(0.05)


def settle(screen: Screen, watch: Watch, members: list[Member]) -> None:
    """Wait until everything has run on the last flights that arrived."""
    settlings = [Settling(member, clock(member.connection)) for member in members]

    def unsettled() -> list[str]:
        return [name for settling in settlings for name in settling.unsettled()]

    for _ in until(lambda: not unsettled(), SETTLE_SECONDS, lambda: f"no run of {unsettled()}"):
        screen.show("All have arrived; the last runs follow", watch.look)


def drain(control: psycopg.Connection[Any]) -> datetime:
    """Drain the whole server; gives the time from which on nothing may start."""
    row = control.execute("SELECT sluice.drain(cluster => true)").fetchone()
    if row != ("drained",):
        raise DemoError(f"sluice.drain() returned {row}")
    return clock(control)


def keep(cluster: Cluster) -> None:
    """Let the cluster live on, and say how to look at it and how to end it."""
    cluster.execute("SELECT sluice.resume(cluster => true)")
    cluster.keep = True
    psql = f"psql -h {cluster.directory} -p {cluster.port} -U postgres"
    as_owner = f"runuser -u {cluster.owner} -- " if os.geteuid() == 0 else ""
    print("\nThe scheduler goes on. To look around:")
    for name in ORIGINS:
        print(f"  {psql} {name}")
    print("To stop the cluster and remove it:")
    print(f"  {as_owner}{cluster.bindir}/pg_ctl stop -m fast -D {cluster.data}")
    print(f"  rm -r {cluster.directory}")


def until(
    reached: Callable[[], object], seconds: float, otherwise: Callable[[], str]
) -> Iterator[None]:
    """Yield every now and then until it is reached; after so many seconds, that is an error."""
    deadline = time.monotonic() + seconds
    while not reached():
        if time.monotonic() > deadline:
            raise DemoError(f"after {seconds} s: {otherwise()}")
        yield
        time.sleep(0.1)


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeLimitError in whatever is going on after so many seconds."""

    def give_up(number: int, frame: FrameType | None) -> None:
        raise TimeLimitError(f"not finished after {seconds} s")

    previous = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


if __name__ == "__main__":
    sys.exit(main())
