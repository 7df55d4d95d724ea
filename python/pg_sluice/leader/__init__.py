"""The leader: one session that schedules all member databases, an asyncio loop over psycopg.

Who is authoritative. The lease row in the control database. Its epoch goes along with every call
that changes dispatch state, and the server refuses a stale one (SQLSTATE SL001), so what this
process believes about itself never decides anything.

    candidate --acquire_lease--> leader --release_lease--> (gone)       a clean end
    candidate --lease is live--> waits for it to lapse, one TTL at most --> leader or (gone)
    leader --SL001, an error, a kill--> (gone)                          the lease lapses by itself

What runs here, as tasks of one group; the first error ends them all:

    interrupts   every 100 ms a statement and a commit through plpy, so that cancel and terminate
                 are seen and the session holds no snapshot between ticks
    lease        renews every third of the TTL
    control      once a scheduler_interval: settings, members, what former leaders left, alerts
    listener     NOTIFY sluice_wake in the control database
    dispatch     gives free slots to the databases that wait
    schedulers   one for each member: tick, enqueue, advance, alerts; a failing one restarts alone
    workers      one for each slot: claim, run, finish; a failing one costs its own run only
    upkeep       small steps of deleting, on a session that goes from one database to the next

What happens on failure. A worker that loses its connection: its run is recorded once its backend is
gone, from history if it had committed. A scheduler that fails: retried, then recorded in the
member's health and started again after a delay. The control database fails or the lease is lost:
the process ends with that error, its workers' sessions die with their client, and pg_cron starts
the next leader.

Control connections run with synchronous_commit off. A crash can lose their last commits, and none
of them matters by itself: a member commits an advance or a history row synchronously and later than
the control commit it follows, which flushes the log up to there; a run whose claim is lost was
rolled back with it and is claimed again; a lost finish leaves a row whose outcome is in history.

The endpoint of the metrics is a process of its own, see endpoint.py; both have the frame of
procedure.py.

The term. After `run_for` the leader goes on until no run is older than a second; then it stops
claiming and waits for what runs. If that is not over after a second, claiming goes on, and it tries
again a minute later: however long a run takes, it keeps no other from starting for more than a
second. The same holds when the last member has left, since others can come. Only a leader of
another version than the extension stops claiming at once, and waits for whatever runs.
"""

from ..connection import load_driver

load_driver()
