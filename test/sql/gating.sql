-- What watermarks do to runs: a node whose sources are out of step is skipped, says so, and runs once they are in step.
\ir setup.psql
SELECT plan(38);

CREATE TABLE a (id integer);
CREATE TABLE b (id integer);
CREATE TABLE c (id integer);
CREATE VIEW through AS SELECT b.id FROM b;
SELECT sluice.create_stream_table('joined', 'SELECT a.id FROM a JOIN through USING (id)', '1h') AS joined \gset
SELECT sluice.create_stream_table('single', 'SELECT id FROM a', '1h') AS single \gset
SELECT sluice.create_stream_table('other', 'SELECT id FROM b', '1h') AS other \gset
SELECT sluice.create_stream_table('top', 'SELECT id FROM single JOIN other USING (id)', '1h') AS top \gset
CREATE MATERIALIZED VIEW mv AS SELECT a.id FROM a JOIN b USING (id);
SELECT sluice.schedule_refresh('mv', '1h') AS mv \gset
SELECT sluice.create_watermark_group('g', '{a,b}', '1 h') \g /dev/null
SELECT sluice.schedule('job', '1h', 'SELECT 1', watermark_group => 'g') AS job \gset
SELECT sluice.schedule('free', '1h', 'SELECT 1') AS free \gset
SELECT sluice.schedule('vacuum', '1h', 'VACUUM', transactional => false, watermark_group => 'g') AS vacuum \gset
CREATE SEQUENCE run;
CREATE FUNCTION pg_temp.run(_pgt_id bigint, _due_at timestamptz DEFAULT '2024-01-01', _reason text DEFAULT NULL) RETURNS text LANGUAGE sql AS $$
    SELECT p.outcome FROM _sluice.perform(md5(nextval('run')::text)::uuid, _pgt_id, _due_at, 1, _reason, NULL) AS p
$$;
-- What becomes of a fire of each node.
CREATE FUNCTION pg_temp.outcomes(_due_at timestamptz) RETURNS text LANGUAGE sql AS $$
    SELECT string_agg(format('%s %s', _sluice.node_name(n), replace(pg_temp.run(n.pgt_id, _due_at), 'no_change', 'succeeded')), ', ' ORDER BY n.pgt_id)
    FROM _sluice.node AS n WHERE n.transactional
$$;
CREATE FUNCTION pg_temp.set(_a timestamptz, _b timestamptz) RETURNS void LANGUAGE sql AS $$
    DELETE FROM _sluice.watermark;
    SELECT sluice.advance_watermark('a', _a);
    SELECT sluice.advance_watermark('b', _b);
$$;
CREATE FUNCTION pg_temp.gate(_pgt_id bigint) RETURNS timestamptz LANGUAGE sql AS 'SELECT gated_since FROM _sluice.node_state WHERE pgt_id = _pgt_id';

-- Who is gated
SELECT is(
    pg_temp.outcomes('2024-01-01'),
    'public.joined skipped, public.single succeeded, public.other succeeded, public.top skipped, public.mv skipped, job skipped, free succeeded',
    'sources without watermarks are out of step: a node is skipped that reads several of a group, through a view or other nodes too, and a job that names it'
);
SELECT sluice.advance_watermark('a', '2024-01-01 10:00') \g /dev/null
SELECT is(pg_temp.run(:joined), 'skipped', 'one that is missing is enough');
SELECT pg_temp.set('2024-01-01 10:00', '2024-01-01 11:00') \g /dev/null
SELECT is(
    pg_temp.outcomes('2024-01-02'),
    'public.joined succeeded, public.single succeeded, public.other succeeded, public.top succeeded, public.mv succeeded, job succeeded, free succeeded',
    'apart by just the tolerance they are in step'
);
SELECT pg_temp.set('2024-01-01 10:00', '2024-01-01 11:00:00.000001') \g /dev/null
SELECT is(
    pg_temp.outcomes('2024-01-03'),
    'public.joined skipped, public.single succeeded, public.other succeeded, public.top skipped, public.mv skipped, job skipped, free succeeded',
    'and not by more'
);
SELECT pg_temp.set('2024-01-01 11:00:00.000001', '2024-01-01 10:00') \g /dev/null
SELECT is(pg_temp.run(:joined), 'skipped', 'whichever is ahead');
SELECT pg_temp.set('4713-01-01 BC', '294276-12-31') \g /dev/null
SELECT is(pg_temp.run(:joined), 'skipped', 'however far');
SELECT is_empty(format($$SELECT 1 FROM _sluice.top_level_command(md5('top')::uuid, %s, '2024-01-03', 2)$$, :vacuum), 'a job at top level has nothing to execute');
SELECT results_eq(
    $$SELECT name, kind, mode, outcome, attempt, due_at, reason, rows_changed, sqlstate FROM sluice.history WHERE run_id = md5('top')::uuid$$,
    $$VALUES ('vacuum', 'job', NULL::text, 'skipped', 2, timestamptz '2024-01-03', 'gated', NULL::bigint, NULL::text)$$,
    'history says so and why'
);
SELECT results_eq(
    $$SELECT DISTINCT name, outcome, reason FROM sluice.history WHERE outcome = 'skipped' ORDER BY name$$,
    $$VALUES ('job', 'skipped', 'gated'), ('public.joined', 'skipped', 'gated'), ('public.mv', 'skipped', 'gated'), ('public.top', 'skipped', 'gated'),
        ('vacuum', 'skipped', 'gated')$$, 'of every kind of node'
);
SELECT results_eq(
    format('SELECT status, consecutive_errors, last_outcome FROM sluice.nodes WHERE pgt_id = %s', :joined), $$VALUES ('active', 0, 'no_change')$$,
    'a skipped fire is no error and no success'
);
SELECT is(_sluice.group_out_of_step(:joined), 'g', 'the group that holds it up');
SELECT is(_sluice.group_out_of_step(:single), NULL, 'none where it may run');

-- More groups
SELECT pg_temp.set('2024-01-01', '2024-01-01') \g /dev/null
SELECT sluice.create_watermark_group('strict', '{a,b,c}') \g /dev/null
SELECT is(pg_temp.run(:joined, '2024-01-04'), 'no_change', 'of a group just the sources count that the node reads');
SELECT pg_temp.set('2024-01-01', '2024-01-01 00:30') \g /dev/null
SELECT is(_sluice.group_out_of_step(:joined), 'strict', 'each group counts that has several of them');
SELECT is(pg_temp.run(:job, '2024-01-04'), 'succeeded', 'a job just has the group that it names');
SELECT sluice.drop_watermark_group('strict') \g /dev/null
SELECT is(_sluice.group_out_of_step(:joined), NULL, 'a dropped group counts no more');
SELECT throws_ok(
    $$SELECT sluice.schedule('job', '1h', 'SELECT 1', watermark_group => 'nowhere')$$, '42704', 'watermark group "nowhere" does not exist', 'a job can name no other'
);

-- Remembered, and made good
UPDATE _sluice.node_state SET gated_since = NULL;
UPDATE _sluice.node SET next_fire_at = '2100-01-01';
SELECT pg_temp.set('2024-01-01', '2024-02-01') \g /dev/null
SELECT pg_temp.run(:joined, '2024-01-05'), pg_temp.run(:joined, '2024-01-06') \g /dev/null
SELECT is(pg_temp.gate(:joined), timestamptz '2024-01-05', 'the first fire that was skipped is remembered');
SELECT is((SELECT due FROM _sluice.tick(10, '{}')), NULL, 'as long as the sources are out of step it is not due');
SELECT is(pg_temp.gate(:joined), timestamptz '2024-01-05', 'and stays gated');
SELECT sluice.advance_watermark('a', '2024-02-01') \g /dev/null
SELECT results_eq(
    $$SELECT d.name, d.retry_of, d.attempt, d.due_at <= clock_timestamp() FROM _sluice.tick(10, '{}') AS t,
        jsonb_to_recordset(t.due) AS d (name text, retry_of timestamptz, attempt integer, due_at timestamptz)$$,
    $$VALUES ('public.joined', timestamptz '2024-01-05', 1, true)$$,
    'the tick that finds them in step has it due at once, for that fire'
);
SELECT is(pg_temp.gate(:joined), NULL, 'and no longer gated');
SELECT results_eq(
    $$SELECT d.name FROM _sluice.tick(10, '{}') AS t, jsonb_to_recordset(t.due) AS d (name text)$$, $$VALUES ('public.joined')$$, 'as often as it is asked, until it is queued'
);
SELECT _sluice.advance(jsonb_build_array(jsonb_build_object('pgt_id', n.pgt_id, 'due_at', n.due_at, 'next_fire_at', n.next_fire_at)))
FROM _sluice.node AS n WHERE n.pgt_id = :joined \g /dev/null
SELECT is((SELECT due FROM _sluice.tick(10, '{}')), NULL, 'and then not again');
SELECT is(pg_temp.run(:joined, '2024-01-05', 'retry'), 'no_change', 'that run is not gated');
SELECT sluice.create_watermark_group('late', '{a,b}') \g /dev/null
SELECT sluice.advance_watermark('b', '2024-02-01 00:01') \g /dev/null
SELECT pg_temp.run(:joined, '2024-01-07', 'retry') \g /dev/null
SELECT is(pg_temp.gate(:joined), timestamptz '2024-01-07', 'a retry can be gated too');
SELECT sluice.drop_watermark_group('late') \g /dev/null
SELECT is((SELECT jsonb_array_length(due) FROM _sluice.tick(10, '{}')), 1, 'dropping the group makes it due too');

-- A refresh by hand
SELECT pg_temp.set('2024-01-01', '2024-03-01') \g /dev/null
INSERT INTO a VALUES (1);
INSERT INTO b VALUES (1);
SELECT is(sluice.refresh_stream_table('joined'), 'succeeded', 'a refresh by hand is not gated');
SELECT is(pg_temp.run(:joined, '2024-01-08', 'run_now'), 'skipped', 'a run that run_now() queued is');

-- Baselines
DELETE FROM _sluice.baseline;
SELECT pg_temp.run(:joined, '2024-01-09') \g /dev/null
SELECT is_empty('SELECT relid FROM _sluice.baseline', 'a skipped fire sets no baseline');
SELECT pg_temp.set('2024-03-01', '2024-03-01 00:10') \g /dev/null
SELECT sluice.advance_watermark('c', '2024-03-01') \g /dev/null
SELECT pg_temp.run(:joined, '2024-01-10'), pg_temp.run(:single, '2024-01-10') \g /dev/null
SELECT results_eq(
    'SELECT db_oid, pgt_id, relid::regclass, watermark FROM _sluice.baseline ORDER BY pgt_id, relid',
    format($$VALUES (_sluice.database_oid()::oid, %s::bigint, 'a'::regclass, timestamptz '2024-03-01'), (_sluice.database_oid()::oid, %1$s, 'b', '2024-03-01 00:10'),
        (_sluice.database_oid()::oid, %s, 'a', '2024-03-01')$$, :joined, :single),
    'a success puts down how far each source was, under this database'
);
SELECT sluice.advance_watermark('a', '2024-03-01 00:05') \g /dev/null
SELECT results_eq(
    format('SELECT watermark FROM _sluice.baseline WHERE pgt_id = %s', :single), $$VALUES (timestamptz '2024-03-01')$$, 'which stays as the sources go on'
);
SELECT pg_temp.run(:single, '2024-01-11') \g /dev/null
SELECT results_eq(
    format('SELECT watermark FROM _sluice.baseline WHERE pgt_id = %s', :single), $$VALUES (timestamptz '2024-03-01 00:05')$$, 'until the next success'
);
SELECT _sluice.record_failure(md5('f')::uuid, :single, '2024-01-12', 1, now(), NULL, '{"outcome": "lock_timeout"}',
    '{"counts": true, "suspend": false, "retry_seconds": 1, "work_mem": null}') \g /dev/null
SELECT sluice.advance_watermark('a', '2024-03-01 00:06') \g /dev/null
SELECT results_eq(
    format('SELECT watermark FROM _sluice.baseline WHERE pgt_id = %s', :single), $$VALUES (timestamptz '2024-03-01 00:05')$$, 'a failure sets none'
);
SELECT pg_temp.run(:free, '2024-01-10'), pg_temp.run(:job, '2024-01-10') \g /dev/null
SELECT results_eq(
    format($$SELECT (SELECT count(*) FROM _sluice.baseline WHERE pgt_id = %s), (SELECT count(*) FROM _sluice.baseline WHERE pgt_id = %s)$$, :free, :job),
    'VALUES (0::bigint, 2::bigint)', 'a job''s sources are those of its group'
);
SELECT sluice.drop_stream_table('joined') \g /dev/null
SELECT is_empty(format('SELECT 1 FROM _sluice.baseline WHERE pgt_id = %s', :joined), 'a dropped node takes its own along');

-- Nothing that a loader says stops the others
UPDATE _sluice.node_state SET gated_since = '2024-01-01' WHERE pgt_id = :top;
SELECT pg_temp.error_of($$SELECT sluice.advance_watermark('a', 'infinity')$$) \g /dev/null
SELECT is(pg_temp.error_of($$SELECT * FROM _sluice.tick(10, '{}')$$), NULL, 'an endless watermark does not stop the tick');
SELECT is(pg_temp.error_of(format('SELECT pg_temp.run(%s, %L)', :top, '2024-01-13')), NULL, 'nor fails a run');
\ir finish.psql
