-- Metrics: totals that outlive history, and what the exposition is made of.
\ir setup.psql
SELECT plan(25);

CREATE TABLE src (id integer);
INSERT INTO src VALUES (1), (2);
SELECT sluice.create_stream_table('st', 'SELECT id FROM src', 'manual', initialize => false) AS st \gset
SELECT sluice.schedule('job', 'manual', 'SELECT 1') AS job \gset
SELECT sluice.schedule('idle', 'manual', 'SELECT 1') AS idle \gset
CREATE FUNCTION pg_temp.run(_n integer, _pgt_id bigint) RETURNS text LANGUAGE sql AS $$
    SELECT p.outcome FROM _sluice.perform(md5(_n::text)::uuid, _pgt_id, '2024-01-01', 1, NULL, NULL) AS p
$$;
CREATE FUNCTION pg_temp.fail(_n integer, _pgt_id bigint, _outcome text) RETURNS void LANGUAGE sql AS $$
    SELECT _sluice.record_failure(md5(_n::text)::uuid, _pgt_id, '2024-01-01', 1, clock_timestamp() - interval '10 s', NULL,
        jsonb_build_object('outcome', _outcome, 'message', 'm'), '{"counts": true, "suspend": false}')
$$;
CREATE FUNCTION pg_temp.totals(_name text) RETURNS jsonb LANGUAGE sql AS $$
    SELECT n.value -> 'runs' FROM jsonb_array_elements(_sluice.node_metrics(100) -> 'nodes') AS n WHERE n.value ->> 'name' = _name
$$;

-- Totals
SELECT is(pg_temp.totals('idle'), '{}'::jsonb, 'a node that has never run has no runs');
SELECT pg_temp.run(1, :st), pg_temp.run(2, :st), pg_temp.run(3, :st) \g /dev/null
SELECT is(pg_temp.totals('public.st'), '{"succeeded": 1, "no_change": 2}'::jsonb, 'each run is counted by its outcome');
SELECT is((SELECT rows_changed FROM _sluice.node_state WHERE pgt_id = :st), 2::bigint, 'the rows that it changed are added');
SELECT pg_temp.fail(4, :st, 'lock_timeout'), pg_temp.fail(5, :st, 'deadlock'), pg_temp.fail(6, :st, 'deadlock') \g /dev/null
SELECT is(
    pg_temp.totals('public.st'), '{"succeeded": 1, "no_change": 2, "lock_timeout": 1, "deadlock": 2}'::jsonb, 'failures too'
);
SELECT ok((SELECT run_seconds BETWEEN 30 AND 40 FROM _sluice.node_state WHERE pgt_id = :st), 'with the time that they took');
SELECT pg_temp.fail(6, :st, 'deadlock') \g /dev/null
SELECT is((pg_temp.totals('public.st') -> 'deadlock'), '2', 'an attempt that is recorded again counts once');
SELECT pg_temp.run(7, :job), pg_temp.run(8, :job) \g /dev/null
SELECT is(pg_temp.totals('job'), '{"succeeded": 1, "skipped": 1}'::jsonb, 'a fire that is skipped is counted as such');
SELECT is(
    (SELECT jsonb_object_agg(o.name, o.runs) FROM (
        SELECT c.name, jsonb_object_agg(c.outcome, c.number) AS runs
        FROM (SELECT name, outcome, count(*) AS number FROM sluice.history GROUP BY name, outcome) AS c GROUP BY c.name
    ) AS o),
    jsonb_build_object('public.st', pg_temp.totals('public.st'), 'job', pg_temp.totals('job')), 'which is what history says'
);
DELETE FROM _sluice.history;
SELECT sluice.reset('st') \g /dev/null
SELECT is(
    pg_temp.totals('public.st'), '{"succeeded": 1, "no_change": 2, "lock_timeout": 1, "deadlock": 2}'::jsonb,
    'the totals outlive history and reset()'
);
SELECT _sluice.record_top_level_run(md5('9')::uuid, :idle, '2024-01-01', 1, clock_timestamp() - interval '5 s', NULL) \g /dev/null
SELECT is(pg_temp.totals('idle'), '{"succeeded": 1}'::jsonb, 'a job at top level counts when it is recorded');

-- A database
SELECT pg_temp.fail(10, :job, 'cancelled') \g /dev/null
SELECT _sluice.open_alert('suspended', 'critical', :job, 'job', 'm') \g /dev/null
SELECT _sluice.open_alert('gone', 'critical', :st, 'st', 'm') \g /dev/null
SELECT _sluice.close_alert('gone', :st) \g /dev/null
UPDATE _sluice.node SET status = 'suspended' WHERE pgt_id = :job;
SELECT is(_sluice.node_metrics(9) -> 'alerts', '{"critical": 1}'::jsonb, 'the open alerts by severity');
SELECT results_eq(
    $$SELECT kind, status, number FROM jsonb_to_recordset(_sluice.node_metrics(1) -> 'numbers') AS n (kind text, status text, number bigint) ORDER BY 1, 2$$,
    $$VALUES ('job', 'active', 1::bigint), ('job', 'suspended', 1), ('stream_table', 'active', 1)$$, 'all nodes by kind and status'
);
CREATE TEMP TABLE series AS
SELECT * FROM jsonb_to_recordset(_sluice.node_metrics(1) -> 'nodes') AS n (
    name text, kind text, status text, consecutive_errors integer, lag float8, last_success float8, runs jsonb, run_seconds float8, rows_changed bigint
);
SELECT results_eq(
    'SELECT name, kind, status FROM series', $$VALUES ('public.st', 'stream_table', 'active'), ('other', 'other', NULL)$$,
    'beyond the limit the nodes are one'
);
SELECT is((SELECT runs FROM series WHERE kind = 'other'), '{"succeeded": 2, "skipped": 1, "cancelled": 1}'::jsonb, 'with the sums of their runs');
SELECT is((SELECT consecutive_errors FROM series WHERE kind = 'other'), 1, 'and the greatest number of errors');
SELECT is(jsonb_array_length(_sluice.node_metrics(3) -> 'nodes'), 3, 'there is none at the limit');

-- The server
SELECT is(_sluice.server_metrics() -> 'queue', '[]'::jsonb, 'nothing is queued');
INSERT INTO _sluice.queue (db_oid, pgt_id, name, rank, due_at, state, epoch, started_at, enqueued_at)
SELECT d, g, 'n', now(), now(), s, CASE s WHEN 'running' THEN 1 END, CASE s WHEN 'running' THEN now() END, now() - g * interval '1 s'
FROM (VALUES (_sluice.database_oid(), 'queued', 1), (_sluice.database_oid(), 'running', 10), (1::bigint << 31, 'queued', 20)) AS v (d, s, b), generate_series(b, b + 2) AS g;
SELECT results_eq(
    $$SELECT database, state, depth FROM jsonb_to_recordset(_sluice.server_metrics() -> 'queue') AS q (database text, state text, depth bigint) ORDER BY 1, 2$$,
    $$VALUES ('2147483648', 'queued', 3::bigint), (current_database()::text COLLATE "default", 'queued', 3), (current_database()::text COLLATE "default", 'running', 3)$$,
    'the queue by database and state, of dropped databases too'
);
SELECT is(
    (SELECT sum((q.value ->> 'depth')::bigint) FROM jsonb_array_elements(_sluice.server_metrics() -> 'queue') AS q),
    (SELECT count(*) FROM _sluice.queue)::numeric, 'is the queue'
);
INSERT INTO _sluice.member (db_oid, joined_by, state, last_tick_at, last_tick_ms)
VALUES (_sluice.database_oid(), 'me', 'scheduled', '2024-01-01 00:00:00+00', 5), (1 , 'me', 'joining', NULL, NULL);
INSERT INTO _sluice.drain (db_oid, requested_by, stays) VALUES (_sluice.database_oid(), 'me', true);
INSERT INTO _sluice.pause (db_oid, pgt_id, name, requested_by, stays) VALUES (1, 1, 'n', 'me', true), (1, 2, 'm', 'me', true);
SELECT results_eq(
    $$SELECT database, state, last_tick, tick_seconds, drain, paused FROM jsonb_to_recordset(_sluice.server_metrics() -> 'members')
        AS m (database text, state text, last_tick float8, tick_seconds float8, drain boolean, paused bigint) ORDER BY state DESC$$,
    $$VALUES (current_database()::text COLLATE "default", 'scheduled', 1704067200::float8, 0.005::float8, true, 0::bigint), ('template1', 'joining', NULL, NULL, false, 2)$$,
    'the members and how they fare'
);

-- The exposition
SELECT sluice.schedule(E'a "b" \\ c\nd', 'manual', 'SELECT 1') \g /dev/null
SELECT matches(
    sluice.metrics(), 'sluice_runs_total\{database="' || current_database() || E'",kind="stream_table",node="public.st",outcome="deadlock"\\} 2.0\n',
    'totals are in the exposition'
);
SELECT ok(strpos(sluice.metrics(), E'node="a \\"b\\" \\\\ c\\nd"') > 0, 'an odd name is escaped');
SELECT sluice.schedule(repeat('n', 201), 'manual', 'SELECT 1') AS long \gset
SELECT sluice.schedule(repeat('n', 200), 'manual', 'SELECT 1') \g /dev/null
SELECT results_eq(
    $$SELECT n.value ->> 'name' FROM jsonb_array_elements(_sluice.node_metrics(9) -> 'nodes') AS n WHERE n.value ->> 'name' LIKE 'nnn%'$$,
    format('VALUES (%L), (%L)', repeat('n', 200) || '... ' || :long, repeat('n', 200)), 'a long name is cut'
);
SELECT matches(sluice.metrics(), E'\nsluice_leader_up [01].0\n', 'so is what the control database knows');
UPDATE _sluice.home SET db_oid = 1;
INSERT INTO _sluice.home (db_oid) VALUES (1) ON CONFLICT DO NOTHING;
SELECT _sluice.rehome() \g /dev/null
SELECT is(pg_temp.totals('public.st'), '{}'::jsonb, 'a copy of a database counts anew');
\ir finish.psql
