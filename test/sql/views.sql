-- What users read: explain_stream_table(), health_check(), preflight(), and the views' own logic.
\ir setup.psql
SELECT plan(24);

CREATE TABLE src (id integer);
CREATE VIEW through AS SELECT id FROM src;
SELECT sluice.create_stream_table('t', 'SELECT id FROM through', '1h') AS t \gset
SELECT sluice.schedule('job', 'manual', 'SELECT 1') AS job \gset
CREATE FUNCTION pg_temp.explained(_property text) RETURNS text LANGUAGE sql AS $$
    SELECT value FROM sluice.explain_stream_table('t') WHERE property = _property
$$;

-- explain_stream_table()
SELECT is(
    (SELECT string_agg(property, ', ') FROM sluice.explain_stream_table('t')),
    'mode, reason, query, delta SQL, sources, schedule, lag, next fire', 'its properties'
);
SELECT is(pg_temp.explained('mode'), 'full', 'the mode');
SELECT isnt(pg_temp.explained('reason'), NULL, 'with a reason');
SELECT is(pg_temp.explained('sources'), 'public.src, public.through', 'the sources, also those under a view');
SELECT is(pg_temp.explained('schedule'), '1h', 'the schedule');
SELECT is(pg_temp.explained('next fire')::timestamptz, (SELECT next_fire_at FROM sluice.nodes WHERE pgt_id = :t), 'the next fire');
SELECT ok(pg_temp.explained('lag')::interval BETWEEN interval '0' AND interval '1 h', 'the age of what it shows');
SELECT lives_ok('EXPLAIN ' || pg_temp.explained('delta SQL'), 'SQL that the server understands');
SELECT sluice.alter_stream_table('t', refresh_mode => 'full') \g /dev/null
SELECT is(pg_temp.explained('reason'), 'refresh_mode is full', 'the reason is the user''s where it is');
SELECT throws_ok(
    $$SELECT * FROM sluice.explain_stream_table('src')$$, '42704', 'stream table "src" does not exist', 'an ordinary table'
);
SELECT throws_ok($$SELECT * FROM sluice.explain_stream_table('job')$$, '42704', 'stream table "job" does not exist', 'a job');

-- sluice.nodes
SELECT results_eq(
    format('SELECT lag BETWEEN interval ''0'' AND interval ''1 h'', remedy FROM sluice.nodes WHERE pgt_id = %s', :t),
    'VALUES (true, NULL::text)', 'a healthy node has a lag and no remedy'
);
UPDATE _sluice.node SET retry_at = '2024-01-01 00:00:00+00', retry_of = '2024-01-01' WHERE pgt_id = :t;
SELECT matches(
    (SELECT remedy FROM sluice.nodes WHERE pgt_id = :t), '^backoff until 2024-01-01 00:00:00', 'one that waits for its retry says so'
);
SELECT is((SELECT lag FROM sluice.nodes WHERE pgt_id = :job), NULL, 'a job shows nothing that could be late');
CREATE ROLE sluice_test_reader;
GRANT SELECT ON ALL TABLES IN SCHEMA sluice TO sluice_test_reader;
SET LOCAL ROLE sluice_test_reader;
SELECT lives_ok('SELECT * FROM sluice.nodes, sluice.history, sluice.alerts, sluice.watermarks', 'a role that may read the views needs nothing else');
SELECT lives_ok('SELECT * FROM sluice.settings', 'for the settings too');
RESET ROLE;

-- health_check(): this database is not started, and nobody leads
SELECT results_eq(
    'SELECT "check", status, detail FROM sluice.health_check()',
    format($$VALUES ('control', 'ok', 'the control database "%s" answers'),
        ('leader', 'critical', 'no leader holds the lease'), ('database', 'warn', 'this database is not scheduled'),
        ('workers', 'ok', 'up to 4'), ('queue', 'ok', '0 queued, 0 running'), ('drain', 'ok', 'none'),
        ('metrics', 'ok', 'not served over HTTP'), ('pauses', 'ok', 'none'), ('nodes', 'ok', 'all can run'), ('freshness', 'ok', 'no node is late'),
        ('clock', 'ok', 'no node is ahead of the clock'),
        ('alerts', 'ok', 'none is open'), ('notifications', 'ok', 'the server''s queue of notifications is 0 %% full'),
        ('transactions', 'ok', 'none is old'), ('upkeep', 'ok', 'nothing waits')$$, current_setting('cron.database_name')),
    'health_check(): one row a check'
);
SELECT ok((SELECT bool_and((hint IS NOT NULL) = (status <> 'ok')) FROM sluice.health_check()), 'what is not ok has a hint');
UPDATE _sluice.node SET status = 'suspended' WHERE pgt_id = :job;
UPDATE _sluice.node SET status = 'quarantined' WHERE pgt_id = :t;
SELECT results_eq(
    $$SELECT status, detail FROM sluice.health_check() WHERE "check" = 'nodes'$$,
    $$VALUES ('critical', '"public.t" is quarantined, "job" is suspended')$$,
    'nodes that can''t run are critical'
);
SELECT sluice.drain() \g /dev/null
SELECT is((SELECT status FROM sluice.health_check() WHERE "check" = 'drain'), 'warn', 'a drain is a warning');
SELECT sluice.resume() \g /dev/null
SELECT sluice.create_stream_table('above', 'SELECT * FROM t', 'manual'), sluice.create_stream_table('top', 'SELECT * FROM above', 'manual'),
    sluice.pause('{t,job}') \g /dev/null
SELECT results_eq(
    $$SELECT status, detail, hint FROM sluice.health_check() WHERE "check" = 'pauses'$$,
    $$VALUES ('warn', 'paused: "public.t", "job"; stale for that: "public.above", "public.top"', 'sluice.unpause() lets them run.')$$,
    'paused nodes are a warning, with those that read them, which are stale'
);
SELECT sluice.unpause('{t}') \g /dev/null
SELECT is((SELECT detail FROM sluice.health_check() WHERE "check" = 'pauses'), 'paused: "job"', 'a job has none');
SELECT sluice.unpause('{job}') \g /dev/null

-- preflight()
SELECT results_eq(
    'SELECT "check", ok, hint FROM sluice.preflight()',
    $$VALUES ('pg_cron is loaded', true, NULL::text), ('control connection', true, NULL), ('pg_cron is installed', true, NULL),
        ('pg_sluice in the control database', true, NULL), ('pg_cron runs jobs side by side', true, NULL), ('entry in pg_cron', true, NULL),
        ('connection of pg_cron', true, NULL), ('sessions may be long', true, NULL), ('connection of the scheduler', true, NULL)$$,
    'preflight(): every check, all well here'
);
SELECT is_empty('SELECT * FROM sluice.databases() WHERE database = current_database()', 'and it starts nothing');
\ir finish.psql
