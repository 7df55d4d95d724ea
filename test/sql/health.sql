-- health_check(), check by check: what is ok, what is not, and what to do.
\ir setup.psql
SELECT plan(61);

CREATE TABLE src (id integer);
SELECT sluice.create_stream_table('st', 'SELECT id FROM src', '1h', max_lag => '5 min') AS st \gset
SELECT sluice.create_stream_table('above', 'SELECT id FROM st', '1h') AS above \gset
SELECT sluice.schedule('job', '1h', 'SELECT 1') AS job \gset
SELECT _sluice.database_oid() AS own \gset

-- One check as "status: detail | hint", with what the control database says.
CREATE FUNCTION pg_temp.control(_check text, _health jsonb) RETURNS text LANGUAGE sql AS $$
    SELECT concat_ws(' | ', c.status || ': ' || c.detail, c.hint)
    FROM _sluice.control_checks('{
        "leader_pid": 7, "leader_alive": true, "member_state": "scheduled", "failures": 0, "tick_bound": "1 min", "queued": 0,
        "running": 0, "max_queue_depth": 10, "worker_limit": 4, "drain": false
    }'::jsonb || jsonb_build_object('last_tick_at', clock_timestamp(), 'last_tick_ms', 1.26) || _health) AS c
    WHERE c."check" = _check
$$;
CREATE FUNCTION pg_temp.member(_check text, _is_held boolean DEFAULT false, _paused bigint[] DEFAULT '{}') RETURNS text LANGUAGE sql AS $$
    SELECT concat_ws(' | ', c.status || ': ' || c.detail, c.hint) FROM _sluice.member_checks(_is_held, _paused) AS c WHERE c."check" = _check
$$;

-- The control database
SELECT is(pg_temp.control('leader', '{"leader_entry": "active"}'), 'ok: process 7 leads', 'a leader');
SELECT is(
    pg_temp.control('leader', '{"leader_entry": "missing"}'),
    'warn: process 7 leads, and none will follow it | pg_cron starts none, since its entry "pg_sluice" is missing; sluice.start() makes it what it should be.',
    'the last one'
);
SELECT is(
    pg_temp.control('leader', '{"leader_alive": false}'),
    'critical: no leader holds the lease | No database is scheduled; sluice.start() has pg_cron start one.',
    'none, where no database needs one'
);
SELECT is(
    pg_temp.control('leader', '{"leader_alive": false, "leader_entry": "active"}'),
    'critical: no leader holds the lease | pg_cron starts one within a minute; otherwise see sluice.preflight() and cron.job_run_details.',
    'none'
);
SELECT is(
    pg_temp.control('leader', '{"leader_alive": false, "leader_entry": "inactive"}'),
    'critical: no leader holds the lease | pg_cron starts none, since its entry "pg_sluice" is inactive; sluice.start() makes it what it should be.',
    'nor will there be one'
);
SELECT matches(pg_temp.control('database', '{}'), '^ok: scheduled, last tick .* in 1.3 ms$', 'a database that is scheduled, with its last tick and how long it took');
SELECT is(pg_temp.control('database', '{"member_state": null}'), 'warn: this database is not scheduled | Call sluice.start().', 'one that is no member');
SELECT matches(pg_temp.control('database', '{"member_state": "joining", "last_tick_at": null}'), '^warn: joining, last tick never \| The leader takes it up', 'one that has just joined');
SELECT matches(
    pg_temp.control('database', '{"member_state": "failed", "failures": 3, "error": "no"}'),
    '^critical: failed, last tick .* ms, 3 failures in a row: no \| It is tried again', 'one that fails, how often in a row and why'
);
SELECT matches(
    pg_temp.control('database', '{"member_state": "version_mismatch", "failures": 1, "error": "v"}'),
    'ms: v \| Run ALTER EXTENSION pg_sluice UPDATE', 'another version'
);
SELECT matches(pg_temp.control('database', '{"last_tick_at": "2024-01-01 00:00:00Z"}'), '^critical: scheduled, last tick 2024-01-01.* \| Is there a leader\?', 'one that nobody looks at');
SELECT matches(
    pg_temp.control('database', jsonb_build_object('last_tick_at', now() + interval '1 h')), '^critical: scheduled, last tick .* \| Is there a leader\?',
    'a tick that lies in the future, since the clock was set back, shows no leader'
);
SELECT matches(pg_temp.control('database', '{"spawn_error": "too many"}'), '^critical: .* ms: too many \| No worker can be started', 'no worker can be started');
SELECT is(pg_temp.control('workers', '{"worker_limit": 0}'), 'warn: serial mode: the leader runs nodes one after the other | See sluice.effective_limit() for what binds.', 'serial mode');
SELECT matches(pg_temp.control('workers', '{"stuck": "process 9"}'), '^critical: process 9 \| Only the code', 'a session that nothing can end');
SELECT is(
    pg_temp.control('queue', jsonb_build_object('queued', 9, 'running', 2, 'oldest_queued_at', clock_timestamp() - interval '1 min')) LIKE 'ok: 9 queued, 2 running, the oldest queued since %', true,
    'a queue'
);
SELECT matches(
    pg_temp.control('queue', '{"queued": 9, "oldest_queued_at": "2024-01-01 00:00:00Z"}'), '^warn: 9 queued.* \| See sluice.queue\(\) and sluice.workers\(\).$', 'one that stands'
);
SELECT matches(pg_temp.control('queue', '{"queued": 9, "oldest_queued_at": "2024-01-01 00:00:00Z", "drain": true}'), '^ok: ', 'by a drain: that is told elsewhere');
SELECT matches(pg_temp.control('queue', '{"queued": 10}'), '^warn: 10 queued, 0 running \| It is full \(max_queue_depth\)', 'a full one');
SELECT is(
    pg_temp.control('drain', '{"drain": true, "drain_end": "sluice.resume(cluster => true)"}'),
    'warn: a drain is in force | See sluice.drain_status(); end it with sluice.resume(cluster => true).', 'a drain, with the call that ends it'
);
SELECT is(pg_temp.control('members', '{}'), NULL, 'a member says nothing of others');
SELECT is(pg_temp.control('members', '{"members": 2, "unscheduled": null}'), 'ok: 2, all scheduled', 'the control database does');
SELECT is(
    pg_temp.control('members', '{"members": 2, "unscheduled": [{"database": "a", "state": "failed", "error": "no"}, {"database": "b", "state": "joining"}]}'),
    'critical: "a": failed, no; "b": joining | See sluice.databases(), and sluice.health_check() in each of them.', 'which is not scheduled, and why'
);
SELECT matches(pg_temp.control('members', '{"members": 2, "unscheduled": [{"database": "b", "state": "joining"}]}'), '^warn: ', 'to have just joined is no failure');
INSERT INTO _sluice.member (db_oid, joined_by, state, error) VALUES (1, 'test', 'failed', 'no'), (:own, 'test', 'scheduled', NULL);
SELECT results_eq(
    format('SELECT h -> ''members'', h -> ''unscheduled'' FROM _sluice.health_of(%s) AS h', :own),
    $$VALUES ('2'::jsonb, jsonb_build_array(jsonb_build_object('database', (SELECT datname FROM pg_database WHERE oid = 1), 'state', 'failed', 'error', 'no')))$$,
    'which is where these come from'
);
SELECT is((SELECT h ? 'members' FROM _sluice.health_of(1) AS h), false, 'and of a member they do not');
DELETE FROM _sluice.member;

-- Nodes
SELECT is(pg_temp.member('nodes'), 'ok: all can run', 'nodes that can run');
UPDATE _sluice.node_state SET consecutive_errors = 1, last_outcome = 'lock_timeout' WHERE pgt_id = :above;
SELECT is(
    pg_temp.member('nodes'),
    'warn: "public.above" failed once, with lock_timeout | See sluice.history for the reason, and sluice.nodes for the remedy.',
    'one that failed'
);
UPDATE _sluice.node_state SET consecutive_errors = 2 WHERE pgt_id = :above;
SELECT matches(pg_temp.member('nodes'), '^warn: "public.above" failed 2 times in a row, with', 'in a row');
UPDATE _sluice.node SET status = 'suspended' WHERE pgt_id = :above;
SELECT is(
    pg_temp.member('nodes'), 'critical: "public.above" is suspended | See sluice.history for the reason; sluice.reset() lifts it.', 'one that is suspended'
);
UPDATE _sluice.node SET status = 'quarantined' WHERE pgt_id = :above;
SELECT is(
    pg_temp.member('nodes'),
    'critical: "public.above" is quarantined | See sluice.alerts for the reason; a valid schedule or sluice.reset() ends it.',
    'one that is quarantined never ran into what is wrong, so history does not have it'
);
UPDATE _sluice.node SET status = 'suspended' WHERE pgt_id = :st;
SELECT matches(pg_temp.member('nodes'), ' \| See sluice.history for the reason; sluice.reset\(\) lifts it. See sluice.alerts', 'and both');
UPDATE _sluice.node SET status = 'active';
UPDATE _sluice.node_state SET consecutive_errors = 0, last_outcome = NULL;

-- Freshness
SELECT is(pg_temp.member('freshness'), 'ok: no node is late', 'nodes that were just made are fresh');
UPDATE _sluice.node_state SET last_success_at = clock_timestamp() - interval '4 min';
UPDATE _sluice.node SET fire_step = '1 h';
SELECT is(pg_temp.member('freshness'), 'ok: no node is late', 'so are those within their max_lag');
UPDATE _sluice.node_state SET last_success_at = clock_timestamp() - interval '5 min 1 s';
SELECT matches(
    pg_temp.member('freshness'),
    '^critical: "public.st" succeeded 00:05:.. ago \(max_lag 00:05:00\) \| See sluice.history and sluice.queue\(\) for what became of their runs; sluice.run_now\(\) starts one.$',
    'beyond it is critical, for the node that has it'
);
SELECT matches(pg_temp.member('freshness', true, ARRAY[:st::bigint]), '^critical: "public.st"', 'also where a drain or a pause holds it back: what it shows is too old');
UPDATE _sluice.node SET status = 'suspended' WHERE pgt_id = :st;
SELECT matches(pg_temp.member('freshness'), '^critical: "public.st"', 'or a suspension');
UPDATE _sluice.node SET status = 'active', max_lag = NULL;
UPDATE _sluice.node_state SET last_success_at = clock_timestamp() - interval '3 h';
SELECT is(pg_temp.member('freshness'), 'ok: no node is late', 'without one it is the schedule that counts: within three times its interval');
UPDATE _sluice.node_state SET last_success_at = clock_timestamp() - interval '3 h 61 s' WHERE pgt_id = :above;
SELECT matches(
    pg_temp.member('freshness'), '^warn: "public.above" succeeded 03:01:.. ago \(expected within 03:01:00\) \| See', 'and a minute; then it is a warning'
);
SELECT is(pg_temp.member('freshness', true), 'ok: no node is late', 'what is drained is late by somebody''s will');
SELECT is(pg_temp.member('freshness', false, ARRAY[:above::bigint]), 'ok: no node is late', 'so is what is paused');
SELECT is(pg_temp.member('freshness', false, ARRAY[:st::bigint]), 'ok: no node is late', 'and what reads it');
UPDATE _sluice.node SET fire_step = NULL WHERE pgt_id = :above;
SELECT is(pg_temp.member('freshness'), 'ok: no node is late', 'a manual node, and one that never fired, has no such bound');
UPDATE _sluice.node SET created_at = clock_timestamp() - interval '1 d' WHERE pgt_id = :job;
SELECT matches(pg_temp.member('freshness'), '^warn: "job" succeeded 1 day ago', 'a job counts from its last success too, or from when it was made');
UPDATE _sluice.node SET max_lag = '1 h' WHERE pgt_id = :job;
SELECT matches(pg_temp.member('freshness'), '^critical: "job" .*max_lag 01:00:00', 'with a max_lag of its own as well');
SELECT is((SELECT max_lag FROM sluice.nodes WHERE pgt_id = :job), interval '1 h', 'which sluice.nodes shows');
INSERT INTO _sluice.node (kind, job_name, job_owner, command, schedule, anchor, created_at, max_lag)
SELECT 'job', 'j' || g, 'postgres', 'SELECT 1', 'manual', now(), now() - interval '2 d', '1 d' FROM generate_series(1, 12) AS g;
SELECT matches(pg_temp.member('freshness'), '"j9" [^,]*, and 3 more \|', 'of many ten are named');
DELETE FROM _sluice.node WHERE kind = 'job';

-- The clock
SELECT is(pg_temp.member('clock'), 'ok: no node is ahead of the clock', 'no node is ahead of the clock');
SELECT is((SELECT count(*) FROM _sluice.late_nodes()), 0::bigint, 'nor late');
UPDATE _sluice.node SET fire_step = '1 h', fired_at = '2060-01-01', next_fire_at = '2060-01-01 01:00' WHERE pgt_id = :st;
UPDATE _sluice.node_state SET last_success_at = '2060-01-01' WHERE pgt_id = :above;
SELECT is(
    pg_temp.member('clock'),
    'warn: ahead of the clock: "public.st", "public.above" | It was set back. A job waits until its last fire is past, sluice.run_now() runs it before; other nodes go on within a minute.',
    'one that fired or ran in the future'
);
SELECT sluice.schedule('job', '1h', 'SELECT 1') AS job \gset
UPDATE _sluice.node SET fire_step = '1 h', fired_at = '2060-01-01', next_fire_at = '2060-01-01 01:00' WHERE pgt_id = :job;
SELECT is(
    pg_temp.member('clock') LIKE format('warn: ahead of the clock: "job" waits until %s, "public.st", "public.above" |%%', timestamptz '2060-01-01 01:00'), true,
    'and first of all a job, which waits'
);
SELECT sluice.schedule('j' || g, '1h', 'SELECT 1') FROM generate_series(1, 9) AS g \g /dev/null
UPDATE _sluice.node SET created_at = '2060-01-01' WHERE job_name LIKE 'j_';
SELECT matches(pg_temp.member('clock'), '"j7", and 2 more \|', 'of many ten are named');
UPDATE _sluice.node SET status = 'suspended' WHERE pgt_id = :job;
SELECT alike(pg_temp.member('clock'), 'warn: ahead of the clock: "public.st"%', 'one that is suspended waits for somebody');
SELECT is(pg_temp.member('clock', true, ARRAY[:st::bigint]), pg_temp.member('clock'), 'a drain or a pause is no matter');
DELETE FROM _sluice.node WHERE kind = 'job';

-- Alerts, notifications, transactions
SELECT _sluice.open_alert('queue_full', 'warning', NULL, 'a', 'm') \g /dev/null
SELECT is(pg_temp.member('alerts'), 'warn: 1 open: queue_full | See sluice.alerts; docs/alerts.md says what to do about each.', 'an open alert');
SELECT _sluice.open_alert('suspended', 'critical', 1, 'a', 'm'), _sluice.open_alert('suspended', 'critical', 2, 'b', 'm') \g /dev/null
SELECT matches(pg_temp.member('alerts'), '^critical: 3 open: queue_full, suspended', 'the worst of them counts');
UPDATE _sluice.alert SET closed_at = now();
SELECT is(pg_temp.member('alerts'), 'ok: none is open', 'closed ones do not');
CREATE OR REPLACE FUNCTION _sluice.can_notify() RETURNS boolean LANGUAGE sql AS 'SELECT false';
SELECT matches(
    pg_temp.member('notifications'), '^critical: the server''s queue of notifications is 0 % full, alerts are not announced \| .*pg_terminate_backend\(\)',
    'a full queue of notifications'
);
SELECT is(pg_temp.member('transactions'), 'ok: none is old', 'no transaction is older than an hour');

-- Without a control database
CREATE OR REPLACE FUNCTION _sluice.control(_function text, _arguments jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION USING ERRCODE = '08001', MESSAGE = 'could not connect', DETAIL = 'It is away.', HINT = 'Look.';
END;
$$;
SELECT results_eq(
    'SELECT "check", status, detail, hint FROM sluice.health_check() LIMIT 1', $$VALUES ('control', 'critical', 'could not connect: It is away.', 'Look.')$$,
    'health_check() does not fail when the control database does not answer: it says so'
);
SELECT is(
    (SELECT string_agg("check", ' ') FROM sluice.health_check()), 'control pauses nodes freshness clock alerts notifications transactions upkeep',
    'and tells what this database itself knows'
);
\ir finish.psql
