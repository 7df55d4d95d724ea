-- Every query that the leader sends, by name. A test prepares each on a real server. What frames a run, its
-- transaction and its limits, is in executor.py.

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
-- Control. Settings, the copy of them for members, the worker limit, our version, and upkeep.
SELECT _sluice.settings_in_force(), _sluice.cluster_settings(), _sluice.worker_limit(),
    _sluice.extension_version(), _sluice.upkeep_is_due();

-- name: members
-- Control. The databases to schedule.
SELECT db_oid, database, dbname FROM _sluice.members(%(epoch)s);

-- name: waiting_databases
-- Control. Members that have runs to claim.
SELECT db_oid, runs FROM _sluice.waiting_databases();

-- name: reconcile_slots
-- Control. Free the slots of sessions that are gone.
SELECT _sluice.reconcile_slots(%(epoch)s);

-- name: end_runs
-- Control. Runs that lost their session run no more.
SELECT _sluice.end_runs(%(epoch)s, %(run_ids)s::pg_catalog.uuid[]);

-- name: orphaned_runs
-- Control. Runs that former leaders left.
SELECT run_id, db_oid, pgt_id, name, due_at, attempt, started_at FROM _sluice.orphaned_runs(%(epoch)s);

-- name: check_lease
-- Control. Whether it is still ours.
SELECT _sluice.enter_gate(%(epoch)s);

-- name: interrupt_backend
-- Control. End a run that is past its deadline.
SELECT _sluice.interrupt_backend(%(epoch)s, %(pid)s, %(since)s, %(terminate)s);

-- name: report_stuck_backend
-- Control. One that did not end.
SELECT _sluice.report_stuck_backend(%(epoch)s, %(pid)s, %(backend_start)s);

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
SELECT queued, is_full FROM _sluice.enqueue(%(epoch)s, %(db_oid)s, %(runs)s);

-- name: known_nodes
-- Control. Nodes of a member that are queued or paused.
SELECT _sluice.known_nodes(%(epoch)s, %(db_oid)s);

-- name: forget_nodes
-- Control. Take away what is queued or paused of those that are gone.
SELECT _sluice.forget_nodes(%(epoch)s, %(db_oid)s, %(pgt_ids)s);

-- name: next_run
-- Control. Finish a run and claim the next.
SELECT run_id, pgt_id, name, due_at, attempt, reason, options
FROM _sluice.next_run(%(epoch)s, %(finished)s, %(db_oid)s, %(slot)s);

-- name: record_tick
-- Control. Health of a scheduled database.
SELECT _sluice.record_tick(%(epoch)s, %(db_oid)s, %(milliseconds)s);

-- name: record_failed_tick
-- Control. Health of a database that can't be scheduled.
SELECT _sluice.record_failed_tick(%(epoch)s, %(db_oid)s, %(state)s, %(error)s, %(detail)s);

-- name: pending_alerts
-- Any. What is to be announced.
SELECT seq, version, alert FROM _sluice.pending_alerts(pg_catalog.clock_timestamp());

-- name: emit_alerts
-- Any. Announce it.
SELECT _sluice.emit_alerts(
    pg_catalog.clock_timestamp(), %(seqs)s::pg_catalog.int8[], %(versions)s::pg_catalog.text[],
    %(payloads)s::pg_catalog.bytea[]
);

-- name: may_listen
-- Any. Whether listening would begin at once: it begins with going through the server's whole queue.
SELECT pg_catalog.pg_notification_queue_usage() OPERATOR(pg_catalog.<) 0.01;

-- name: listen
-- Any. Be woken.
LISTEN sluice_wake;

-- name: identity
-- Any. Who this session is.
SELECT a.pid, pg_catalog.to_json(a.backend_start) OPERATOR(pg_catalog.#>>) '{}', a.datid::pg_catalog.int8
FROM pg_catalog.pg_stat_activity AS a
WHERE a.pid OPERATOR(pg_catalog.=) pg_catalog.pg_backend_pid();

-- name: member_state
-- Member. Its version and settings.
SELECT _sluice.member_state();

-- name: copy_cluster_settings
-- Member. Bring its copy of the server's settings up to date.
SELECT _sluice.copy_cluster_settings(%(settings)s);

-- name: tick
-- Member. What is due, and when the next node is.
SELECT due, wait_seconds, has_alerts FROM _sluice.tick(%(limit)s, %(busy)s);

-- name: advance
-- Member. Move queued nodes on.
SELECT _sluice.advance(%(moves)s);

-- name: nodes_ahead
-- Member. Nodes that a clock which was set back since has left in the future.
SELECT pg_catalog.jsonb_agg(pg_catalog.to_jsonb(a)) FROM _sluice.nodes_ahead() AS a;

-- name: turn_back
-- Member. Bring them back.
SELECT _sluice.turn_back(%(moves)s);

-- name: gone_nodes
-- Member. Which of them are gone.
SELECT _sluice.gone_nodes(%(known)s);

-- name: report_queue
-- Member. Whether all that is due could be queued.
SELECT _sluice.report_queue(%(is_full)s);

-- name: quarantine
-- Member. Set a node aside whose schedule can't be read.
SELECT _sluice.quarantine(%(pgt_id)s, %(message)s, %(next_fire_at)s);

-- name: upkeep
-- Any. One step of it.
SELECT is_due, deleted FROM _sluice.upkeep();

-- name: perform
-- Member. One run, inside a transaction.
SELECT outcome, session_owner
FROM _sluice.perform(%(run_id)s, %(pgt_id)s, %(due_at)s, %(attempt)s, %(reason)s, %(session_owner)s);

-- name: top_level_command
-- Member. What a job outside a transaction block executes.
SELECT command, search_path, owner, owner_name, is_superuser, _sluice.lock_class('node')
FROM _sluice.top_level_command(
    %(run_id)s, %(pgt_id)s, %(due_at)s, %(attempt)s
);

-- name: become
-- Member. Be that superuser. Its name can be no text for us.
SELECT pg_catalog.set_config('session_authorization', r.rolname, false) IS NOT NULL
FROM pg_catalog.pg_roles AS r
WHERE r.oid OPERATOR(pg_catalog.=) %(owner)s;

-- name: begin_top_level_run
-- Member. Take its node's lock and search_path, in its own session. Bytes: a path can have any names.
SELECT pg_catalog.pg_advisory_lock(%(lock_class)s, %(pgt_id)s),
    pg_catalog.set_config('search_path', pg_catalog.convert_from(%(search_path)s, 'UTF8'), false);

-- name: record_top_level_run
-- Member. The success of such a job.
SELECT _sluice.record_top_level_run(
    %(run_id)s, %(pgt_id)s, %(due_at)s, %(attempt)s, %(started_at)s, %(reason)s
);

-- name: bound_waits
-- Member. The longest wait for a lock in this transaction.
SELECT pg_catalog.set_config('lock_timeout', %(lock_timeout)s, true);

-- name: statement_timeout
-- Any. In milliseconds.
SELECT s.setting::pg_catalog.int8 FROM pg_catalog.pg_settings AS s
WHERE s.name OPERATOR(pg_catalog.=) 'statement_timeout';

-- name: failure_state
-- Member. What is decided about a failure from; locks it.
SELECT consecutive_errors, work_mem, policy FROM _sluice.failure_state(%(pgt_id)s);

-- name: record_failure
-- Member. A failed attempt.
SELECT _sluice.record_failure(
    %(run_id)s, %(pgt_id)s, %(due_at)s, %(attempt)s, %(started_at)s, %(reason)s, %(error)s,
    %(verdict)s
);

-- name: record_recovery
-- Member. A success under a remedy.
SELECT _sluice.record_recovery(%(pgt_id)s, %(work_mem)s, %(successes)s);

-- name: reset_statement_timeout
-- Member. Of a session that a job may have set.
RESET statement_timeout;

-- name: clean_session
-- Member. Let nothing of one owner meet the next.
DISCARD ALL;

-- name: server_metrics
-- Control. The part of the metrics that is about the server.
SELECT _sluice.server_metrics();

-- name: leader_lives
-- Control. Whether somebody leads.
SELECT _sluice.leader_lives();

-- name: node_metrics
-- Member. The part that is about a database.
SELECT _sluice.node_metrics(%(limit)s);
