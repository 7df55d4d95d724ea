-- Drain and pause: what they refuse, and what no leader runs any more.
\ir setup.psql
SELECT plan(34);

SELECT epoch FROM _sluice.acquire_lease(pg_backend_pid(), now(), 3600) \gset
SELECT _sluice.database_oid() AS here \gset

-- A run whose leader leads no more is in progress for as long as its session is there
INSERT INTO _sluice.queue (db_oid, pgt_id, name, rank, due_at, state, slot, epoch, started_at)
VALUES (:here, 7, 'n7', now(), now(), 'running', 3, :epoch, now());
SELECT _sluice.request_drain(:here, 'x', a.pid, a.backend_start), _sluice.request_pause(:here, '[{"pgt_id": 7, "name": "n7"}]', 'x', a.pid, a.backend_start)
FROM pg_stat_activity AS a WHERE a.pid = pg_backend_pid() \g /dev/null
CREATE FUNCTION pg_temp.reached() RETURNS text LANGUAGE sql AS $$
    SELECT format('drained: %s, paused: %s', _sluice.check_drain(_sluice.database_oid()::oid), _sluice.check_pause(_sluice.database_oid()::oid, '{7}'))
    FROM pg_stat_clear_snapshot()
$$;
SELECT is(pg_temp.reached(), 'drained: f, paused: f', 'a run of the present leader is waited for');
UPDATE _sluice.lease SET expires_at = now() - interval '1 s';
INSERT INTO _sluice.slot (slot, state, db_oid, epoch, deadline, pid, backend_start)
SELECT 3, 'live', :here, :epoch, now(), a.pid, a.backend_start FROM pg_stat_activity AS a WHERE a.pid = pg_backend_pid();
SELECT is(pg_temp.reached(), 'drained: f, paused: f', 'one of a leader whose lease has lapsed, while its worker is there');
UPDATE _sluice.slot SET pid = 2147483647;
SELECT set_config('application_name', 'pg_sluice job ' || :epoch, true) \g /dev/null
SELECT is(pg_temp.reached(), 'drained: f, paused: f', 'or its session of a job at top level');
SELECT set_config('application_name', 'pg_sluice scheduler ' || :epoch, true) \g /dev/null
SELECT is(pg_temp.reached(), 'drained: f, paused: f', 'or its scheduler, which runs jobs in serial mode');
SELECT set_config('application_name', 'pg_sluice scheduler ' || :epoch + 1, true) \g /dev/null
SELECT is(pg_temp.reached(), 'drained: t, paused: t', 'and no longer');
UPDATE _sluice.lease SET epoch = epoch + 1, expires_at = now() + interval '1 h';
SELECT is(pg_temp.reached(), 'drained: t, paused: t', 'also when another leads');
UPDATE _sluice.slot SET pid = pg_backend_pid(), epoch = :epoch + 1;
SELECT is(pg_temp.reached(), 'drained: t, paused: t', 'whose worker has taken the slot');
SELECT set_config('application_name', 'pgTAP', true) \g /dev/null
DELETE FROM _sluice.slot;
DELETE FROM _sluice.queue;

-- A forced refresh in a drained database
SELECT pg_advisory_lock(_sluice.lock_class('node'), 9) \g /dev/null
SELECT is(_sluice.check_drain(:here), false, 'while a forced refresh goes on it is not drained');
SELECT results_eq(
    format($$SELECT r.state, r.drained_at IS NOT NULL FROM jsonb_to_recordset(_sluice.drain_rows(%s)) AS r (state text, drained_at timestamptz)$$, :here),
    $$VALUES ('draining', true)$$,
    'though it had been'
);
SELECT pg_advisory_unlock(_sluice.lock_class('node'), 9) \g /dev/null
SELECT is(_sluice.check_drain(:here), true, 'and afterwards it is again');

-- The end of a request
SELECT results_eq(
    'SELECT (SELECT count(*) FROM _sluice.drain_waiter), (SELECT count(*) FROM _sluice.pause_waiter)', 'VALUES (1::bigint, 1::bigint)',
    'calls that wait are on record'
);
SELECT _sluice.end_drain(:here), _sluice.end_pause(:here, '{7}') \g /dev/null
SELECT results_eq(
    'SELECT (SELECT count(*) FROM _sluice.drain_waiter), (SELECT count(*) FROM _sluice.pause_waiter)', 'VALUES (0::bigint, 0::bigint)',
    'until the request ends'
);
SELECT _sluice.keep_drain(:here), _sluice.keep_pause(:here, '{7}') \g /dev/null
SELECT is(pg_temp.reached(), 'drained: , paused: ', 'what was ended can''t be kept');
SELECT throws_ok(
    format($$INSERT INTO _sluice.drain_waiter (db_oid, pid, backend_start) VALUES (%s, 1, now())$$, :here), '23503', NULL, 'nobody waits for a drain that there is not'
);
SELECT throws_ok(
    format($$INSERT INTO _sluice.pause_waiter (db_oid, pgt_id, pid, backend_start) VALUES (%s, 7, 1, now())$$, :here), '23503', NULL, 'nor for a pause'
);

-- Timeouts, before anything is requested
CREATE TABLE src (id integer);
SELECT sluice.create_stream_table('t', 'SELECT id FROM src', 'manual') \g /dev/null
SELECT sluice.schedule('job', 'manual', 'SELECT 1'), sluice.schedule('t', 'manual', 'SELECT 1') \g /dev/null
SELECT is(
    pg_temp.error_of($$SELECT sluice.drain('2 h')$$),
    '22023: 02:00:00 is outside the valid range for setting "drain_timeout" (0 s .. 1 h)', 'drain(): too long a timeout'
);
SELECT is(
    pg_temp.error_of($$SELECT sluice.drain('-1 s', wait => false)$$),
    '22023: -00:00:01 is outside the valid range for setting "drain_timeout" (0 s .. 1 h)', 'a negative one, also without a wait'
);
SELECT is(sluice.is_drained(), NULL, 'nothing was requested');
SELECT is(
    pg_temp.error_of($$SELECT sluice.pause('{job}', '2 h')$$),
    '22023: 02:00:00 is outside the valid range for setting "pause_timeout" (0 s .. 1 h)', 'pause(): too long a timeout'
);
SELECT is(
    pg_temp.error_of($$SELECT sluice.pause('{job}', '-1 s', wait => false)$$),
    '22023: -00:00:01 is outside the valid range for setting "pause_timeout" (0 s .. 1 h)', 'a negative one, also without a wait'
);
SELECT is(sluice.unpause('{job}'), 0, 'nothing was paused');
SELECT is(sluice.drain('1 h'), 'drained', 'the longest timeout, which nothing has to wait for');
SELECT is(sluice.drain('0 s'), 'drained', 'none at all is enough');
SELECT sluice.resume() \g /dev/null

-- Names
SELECT is(
    pg_temp.error_of($$SELECT sluice.pause('{job,t}')$$),
    E'42P08: name "t" is ambiguous\nDETAIL: It is the name of a job and of a relation.\nHINT: Qualify the relation with its schema.',
    'an ambiguous name'
);
SELECT is(sluice.unpause('{job}'), 0, 'pauses none of the others');
SELECT is(sluice.pause('{job,public.t}'), 'paused', 'a qualified one is none');
SELECT is(
    pg_temp.error_of($$SELECT sluice.unpause('{job,nowhere}')$$),
    E'42704: node "nowhere" does not exist\nHINT: The view sluice.nodes lists what is scheduled in this database.',
    'unpause(): an unknown name is an error'
);
SELECT throws_ok($$SELECT sluice.unpause('{job,NULL}')$$, '22004', 'nodes must not contain nulls', 'and NULL');
SELECT is(
    pg_temp.error_of('SELECT sluice.unpause(array_fill(''job''::text, ''{101}''))'),
    E'54000: too many nodes: 101\nDETAIL: One call takes at most 100 (max_pause_nodes).', 'and too many'
);
SELECT is(sluice.unpause('{job,public.t}'), 2, 'which ended no pause');

-- Waiting for oneself
SELECT sluice.refresh_stream_table('public.t') \g /dev/null
SELECT is(
    pg_temp.error_of('SELECT sluice.drain(''0 s'', cluster => true)'),
    E'55006: cannot wait for the run of "public.t" from within it\nHINT: Pass wait => false. A refresh by hand ends with its transaction.',
    'a drain of the server would wait for this transaction too'
);
SELECT is(sluice.is_drained(cluster => true), NULL, 'and is not requested');
SELECT throws_ok($$SELECT sluice.pause('{public.t}')$$, '55006', NULL, 'nor is a pause');
SELECT is(sluice.unpause('{public.t}'), 0, 'of the node');
\ir finish.psql
