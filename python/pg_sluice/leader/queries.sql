-- Every statement that the leader sends, by name. A test prepares each on a real server.

-- name: acquire_lease
-- Control. Take the lease, or learn how long the present one has to run.
SELECT acquired, epoch, wait_seconds FROM _sluice.acquire_lease(%(pid)s, %(backend_start)s, %(ttl)s);

-- name: renew_lease
-- Control. Extend our own lease.
SELECT _sluice.renew_lease(%(epoch)s, %(ttl)s);

-- name: release_lease
-- Control. End our own lease.
SELECT _sluice.release_lease(%(epoch)s);

-- name: control_state
-- Control. Settings, the copy of them for members, the worker limit and our version.
SELECT _sluice.settings_in_force(), _sluice.cluster_settings(), _sluice.worker_limit(),
    (SELECT e.extversion FROM pg_catalog.pg_extension AS e WHERE e.extname = 'pg_sluice');

-- name: members
-- Control. The databases to schedule.
SELECT db_oid, database FROM _sluice.members(%(epoch)s);

-- name: waiting_databases
-- Control. Members that have runs to claim.
SELECT db_oid, runs FROM _sluice.waiting_databases();

-- name: reconcile_slots
-- Control. Free the slots of sessions that are gone.
SELECT _sluice.reconcile_slots(%(epoch)s);

-- name: orphaned_runs
-- Control. Runs that former leaders left.
SELECT run_id, db_oid, pgt_id, due_at, attempt, started_at FROM _sluice.orphaned_runs(%(epoch)s);

-- name: reserve_slot
-- Control. free -> reserved.
SELECT slot, nonce, application_name FROM _sluice.reserve_slot(%(epoch)s, %(db_oid)s);

-- name: activate_slot
-- Control. reserved -> live.
SELECT _sluice.activate_slot(%(epoch)s, %(nonce)s, %(pid)s, %(backend_start)s);

-- name: release_slot
-- Control. reserved or live -> free.
SELECT _sluice.release_slot(%(epoch)s, %(nonce)s);

-- name: record_spawn_failure
-- Control. A worker that did not come about.
SELECT _sluice.record_spawn_failure(%(epoch)s, %(db_oid)s, %(error)s);

-- name: evict_former_sessions
-- Control. End what former leaders left running.
SELECT _sluice.evict_former_sessions(%(epoch)s);

-- name: enqueue
-- Control. Queue what a tick found due.
SELECT _sluice.enqueue(%(epoch)s, %(db_oid)s, %(runs)s);

-- name: next_run
-- Control. Finish a run and claim the next.
SELECT run_id, pgt_id, name, due_at, attempt, reason, options
FROM _sluice.next_run(%(epoch)s, %(finished)s, %(db_oid)s, %(slot)s);

-- name: record_tick
-- Control. Health of a scheduled database.
SELECT _sluice.record_tick(%(epoch)s, %(db_oid)s, %(milliseconds)s);

-- name: record_failed_tick
-- Control. Health of a database that can't be scheduled.
SELECT _sluice.record_failed_tick(%(epoch)s, %(db_oid)s, %(state)s, %(error)s);

-- name: listen
-- Any. Be woken.
LISTEN sluice_wake;

-- name: identity
-- Any. Who this session is.
SELECT a.pid, pg_catalog.to_json(a.backend_start) OPERATOR(pg_catalog.#>>) '{}' FROM pg_catalog.pg_stat_activity AS a
WHERE a.pid OPERATOR(pg_catalog.=) pg_catalog.pg_backend_pid();

-- name: member_state
-- Member. Its version and settings.
SELECT _sluice.member_state();

-- name: copy_cluster_settings
-- Member. Bring its copy of the server's settings up to date.
SELECT _sluice.copy_cluster_settings(%(settings)s);

-- name: tick
-- Member. What is due, and when the next node is.
SELECT due, wait_seconds FROM _sluice.tick(%(limit)s, %(busy)s);

-- name: advance
-- Member. Move queued nodes on.
SELECT _sluice.advance(%(moves)s);

-- name: quarantine
-- Member. Set a node aside whose schedule can't be read.
SELECT _sluice.quarantine(%(pgt_id)s, %(message)s);

-- name: upkeep
-- Member. One batch of cleaning up.
SELECT _sluice.upkeep();

-- name: perform
-- Member. One run, inside a transaction.
SELECT outcome, session_owner
FROM _sluice.perform(%(run_id)s, %(pgt_id)s, %(due_at)s, %(attempt)s, %(reason)s, %(session_owner)s);

-- name: top_level_command
-- Member. What a job outside a transaction block executes.
SELECT command, search_path, owner_name, is_superuser
FROM _sluice.top_level_command(
    %(run_id)s, %(pgt_id)s, %(due_at)s, %(attempt)s
);

-- name: record_top_level_run
-- Member. The success of such a job.
SELECT _sluice.record_top_level_run(
    %(run_id)s, %(pgt_id)s, %(due_at)s, %(attempt)s, %(started_at)s, %(reason)s
);

-- name: failures
-- Member. Failures of a node in a row, so far.
SELECT _sluice.failures(%(pgt_id)s);

-- name: record_failure
-- Member. A failed attempt.
SELECT _sluice.record_failure(
    %(run_id)s, %(pgt_id)s, %(due_at)s, %(attempt)s, %(started_at)s, %(reason)s, %(error)s,
    %(counts)s, %(retry_seconds)s
);

-- name: clean_session
-- Member. Let nothing of one owner meet the next.
DISCARD ALL;
