-- SQL jobs: schedule(), unschedule(), run_now(), reset().
\ir setup.psql
SELECT plan(40);

CREATE FUNCTION pg_temp.schedule_error(_arguments text) RETURNS text LANGUAGE sql AS $$
    SELECT pg_temp.error_of('SELECT sluice.schedule(' || _arguments || ')')
$$;
CREATE ROLE sluice_test_owner;
GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA sluice TO sluice_test_owner;

-- Scheduling, with the three arguments of cron.schedule()
SET LOCAL search_path = '$user', public, pg_catalog;
SELECT sluice.schedule('nightly', '0 3 * * *', 'SELECT 1') AS nightly \gset
SET LOCAL search_path = "$user", public;
SELECT results_eq(
    'SELECT pgt_id, name, kind, schedule, refresh_mode, status, owner::text COLLATE "default", priority, lag FROM sluice.nodes',
    format($$VALUES (%s::bigint, 'nightly', 'job', '0 3 * * *', NULL, 'active', 'postgres', 0, NULL::interval)$$, :nightly),
    'a job is a node'
);
SELECT results_eq(
    'SELECT command, job_search_path, transactional, catch_up FROM _sluice.node',
    $$VALUES ('SELECT 1', '"$user", public, pg_catalog', true, 1)$$,
    'with the search_path of the call, transactional'
);
SELECT is(
    sluice.schedule('nightly', '@every 1h', 'SELECT 2', catch_up => 5, priority => -3, lock_timeout => '1 s', refresh_timeout => '2 s', max_lag => '1 d'),
    :nightly::bigint, 'called again it is the same job'
);
SELECT results_eq(
    'SELECT command, schedule, catch_up, priority, lock_timeout, refresh_timeout, max_lag, next_fire_at BETWEEN clock_timestamp() AND clock_timestamp() + interval ''1 h''
        FROM _sluice.node',
    $$VALUES ('SELECT 2', '@every 1h', 5, -3, interval '1 s', interval '2 s', interval '1 d', true)$$,
    'with everything that is given'
);
SELECT is(
    (SELECT string_agg(x.spec, ' ' ORDER BY x.spec) FROM unnest(ARRAY['30s', '@every 90s', '10 seconds', '5m', '1 day', '@hourly', '@daily',
        '@weekly', '@monthly', '@yearly', '*/5 * * * *', 'TZ=Europe/Oslo 0 3 * * *', '0 0 $ * *', 'manual']) AS x (spec)
        WHERE pg_temp.schedule_error(format('%L, %L, ''SELECT 1''', 'spec ' || x.spec, x.spec)) IS NOT NULL),
    NULL, 'every kind of schedule'
);
DELETE FROM _sluice.node WHERE job_name LIKE 'spec %';
SELECT sluice.schedule('Über "alles" 100%', 'manual', 'SELECT 1') AS odd \gset
SELECT is((SELECT name FROM sluice.nodes WHERE pgt_id = :odd), 'Über "alles" 100%', 'a job''s name is any text');

-- Refused
SELECT is(pg_temp.schedule_error($$NULL, '5m', 'SELECT 1'$$), '22004: name must not be null', 'NULL for the name');
SELECT is(pg_temp.schedule_error($$'j', NULL, 'SELECT 1'$$), '22004: schedule must not be null', 'NULL for the schedule');
SELECT is(pg_temp.schedule_error($$'j', '5m', NULL$$), '22004: command must not be null', 'NULL for the command');
SELECT is(pg_temp.schedule_error($$'j', '5m', 'SELECT 1', transactional => NULL$$), '22004: transactional must not be null', 'NULL for transactional');
SELECT is(pg_temp.schedule_error($$' ', '5m', 'SELECT 1'$$), '22023: job name must not be empty', 'an empty name');
SELECT is(pg_temp.schedule_error($$'j', '5m', E' \n'$$), '22023: command must not be empty', 'an empty command');
SELECT is(split_part(pg_temp.schedule_error($$'j', '61 * * * *', 'SELECT 1'$$), E'\n', 1), '22023: invalid schedule "61 * * * *"', 'a schedule that is none');
SELECT is(
    pg_temp.schedule_error($$'j', 'calculated', 'SELECT 1'$$),
    E'22023: a job cannot have the schedule "calculated"\nDETAIL: It follows the nodes that read a relation, and a job is none.', 'calculated'
);
SELECT is(pg_temp.schedule_error($$'j', '5m', 'SELECT 1', catch_up => 0$$), '22023: catch_up must be between 1 and 1000', 'catch_up out of bounds');
SELECT is(pg_temp.schedule_error($$'j', '5m', 'SELECT 1', priority => 101$$), '22023: priority must be between -100 and 100', 'priority out of bounds');
SELECT is(
    pg_temp.schedule_error($$'j', '5m', 'SELECT 1', refresh_timeout => '0'$$),
    '22023: 00:00:00 is outside the valid range for setting "refresh_timeout" (1 ms .. 24 h)', 'a timeout out of bounds'
);
SELECT sluice.configure('max_query_bytes', '1 kB') \g /dev/null
SELECT is(
    pg_temp.schedule_error($$'j', '5m', repeat('x', 1025)$$),
    E'54000: command is too long\nDETAIL: It has 1025, and max_query_bytes is 1024.\n'
    'HINT: The setting can be raised with sluice.configure(''max_query_bytes'', …).', 'too long a command'
);
SELECT is(split_part(pg_temp.schedule_error($$repeat('x', 1025), '5m', 'SELECT 1'$$), E'\n', 1), '54000: job name is too long', 'or name');
SELECT sluice.configure('max_query_bytes', NULL) \g /dev/null
SET LOCAL ROLE sluice_test_owner;
SELECT matches(
    pg_temp.schedule_error($$'j', '5m', 'VACUUM', transactional => false$$),
    '^55000: the scheduler could not connect as role "sluice_test_owner"\nDETAIL: A job with transactional => false runs in a session of its owner: .*\n'
    'HINT: Let the server''s operating-system user connect as that role',
    'a job at top level whose owner the scheduler can''t connect as'
);
RESET ROLE;
SELECT lives_ok($$SELECT sluice.schedule('vacuum', 'manual', 'VACUUM', transactional => false)$$, 'a superuser needs no such connection');
SELECT is((SELECT string_agg(name, ',' ORDER BY name) FROM sluice.nodes WHERE name IN ('j', 'nightly', 'vacuum')), 'nightly,vacuum', 'nothing else was stored');

-- By name
SELECT is(pg_temp.error_of($$SELECT sluice.reset('Über "alles" 100%')$$), NULL, 'reset() finds a job whose name is no identifier');
SELECT is(pg_temp.error_of($$SELECT sluice.unschedule('Über "alles" 100%')$$), NULL, 'so does unschedule()');
SELECT is(pg_temp.error_of($$SELECT sluice.unschedule('a.b.c.d')$$), NULL, 'a name with dots is a name');
CREATE TABLE src (id integer);
CREATE MATERIALIZED VIEW twin AS SELECT id FROM src;
SELECT sluice.schedule_refresh('twin', 'manual'), sluice.schedule('twin', 'manual', 'SELECT 1') \g /dev/null
SELECT matches(
    pg_temp.error_of($$SELECT sluice.unschedule('twin')$$), 'name "twin" is ambiguous\nDETAIL: It is the name of a job and of a relation.\nHINT: Qualify the relation',
    'a name of a job and of a relation is ambiguous'
);
SELECT ok(sluice.unschedule('public.twin'), 'a qualified name means the relation');
SELECT ok(sluice.unschedule('twin'), 'and then the name is the job''s');
SELECT ok(NOT sluice.unschedule('twin'), 'unschedule() without a job is false');
SELECT sluice.create_stream_table('stream', 'SELECT id FROM src', 'manual') \g /dev/null
SELECT ok(NOT sluice.unschedule('stream'), 'and it drops no stream table');
SELECT throws_ok($$SELECT sluice.unschedule(NULL)$$, '22004', 'name must not be null', 'NULL is an error');

-- Now
SELECT is(
    pg_temp.error_of($$SELECT sluice.run_now('nightly')$$),
    E'55000: "nightly" was made after this transaction began\nDETAIL: A run knows only what was committed before it begins.\nHINT: Commit, then call sluice.run_now().',
    'nobody else would find it'
);
UPDATE _sluice.node SET created_at = now() - interval '1 s' WHERE pgt_id = :nightly;
SELECT is(
    pg_temp.error_of($$SELECT sluice.run_now('nightly')$$),
    E'55000: this database is not scheduled\nHINT: Call sluice.start() first.', 'nothing would run it'
);
SELECT sluice.start() \g /dev/null
SELECT sluice.run_now('nightly') AS run_id \gset
SELECT results_eq(
    'SELECT run_id, pgt_id, name, state, priority FROM sluice.queue() WHERE database = current_database()',
    format($$VALUES (%L::uuid, %s::bigint, 'nightly', 'queued', 100)$$, :'run_id', :nightly),
    'run_now() queues a run at once'
);
SELECT is(sluice.run_now('nightly'), :'run_id'::uuid, 'asked again it gives that one');
SELECT sluice.stop() \g /dev/null
SELECT throws_ok($$SELECT sluice.run_now('nowhere')$$, '42704', 'node "nowhere" does not exist', 'an unknown node');
UPDATE _sluice.node SET status = 'suspended' WHERE pgt_id = :nightly;
INSERT INTO _sluice.node_state (pgt_id, consecutive_errors) VALUES (:nightly, 3);
SELECT is(
    pg_temp.error_of($$SELECT sluice.run_now('nightly')$$), E'55000: "nightly" is suspended\nHINT: Clear that with sluice.reset().', 'a suspended node'
);
UPDATE _sluice.node SET retry_at = now(), retry_of = now() WHERE pgt_id = :nightly;
SELECT sluice.reset('nightly') \g /dev/null
SELECT results_eq(
    format('SELECT n.status, s.consecutive_errors, n.retry_at, n.retry_of FROM _sluice.node AS n JOIN _sluice.node_state AS s USING (pgt_id) WHERE pgt_id = %s', :nightly),
    $$VALUES ('active', 0, NULL::timestamptz, NULL::timestamptz)$$,
    'reset() clears suspension, errors and retry'
);

-- An owner that was dropped
SET LOCAL ROLE sluice_test_owner;
SELECT sluice.schedule('orphan', 'manual', 'SELECT 1') AS orphan \gset
RESET ROLE;
DROP OWNED BY sluice_test_owner;
DROP ROLE sluice_test_owner;
SELECT throws_ok(
    format($$SELECT _sluice.perform(md5('1')::uuid, %s, '2024-01-01', 1, NULL, NULL)$$, :orphan),
    '42704', NULL, 'a job whose owner was dropped says that the role does not exist'
);
SELECT lives_ok($$SELECT sluice.unschedule('orphan')$$, 'and a superuser can clear it away');
\ir finish.psql
