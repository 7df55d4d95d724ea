-- How nodes hang together: upstream, depth, and the schedule of calculated ones.
\ir setup.psql
SELECT plan(18);

CREATE FUNCTION pg_temp.place(_name text) RETURNS text LANGUAGE sql AS $$
    SELECT format('%s: %s <- %s', g.depth, _name, (
        SELECT string_agg(u.relid::text, ', ' ORDER BY u.relid::text) FROM _sluice.node AS u WHERE u.pgt_id = ANY (g.upstream)
    ))
    FROM _sluice.node AS n JOIN _sluice.graph AS g USING (pgt_id) WHERE n.relid = to_regclass(_name)
$$;
CREATE FUNCTION pg_temp.effective(_name text) RETURNS text LANGUAGE sql AS $$
    SELECT g.effective_schedule FROM _sluice.node AS n JOIN _sluice.graph AS g USING (pgt_id) WHERE n.relid = to_regclass(_name)
$$;
CREATE TABLE src (id integer);
SELECT sluice.create_stream_table('a', 'SELECT id FROM src', 'calculated') \g /dev/null
CREATE VIEW over_a AS SELECT id FROM a;
CREATE VIEW over_over_a AS SELECT id FROM over_a;
SELECT sluice.create_stream_table('b', 'SELECT id FROM over_over_a', 'calculated') \g /dev/null

-- Places
SELECT is(pg_temp.place('a'), '0: a <- ', 'a node that reads no other');
SELECT is(pg_temp.place('b'), '1: b <- a', 'one that reads another through two views');
CREATE MATERIALIZED VIEW mv AS SELECT id FROM b;
SELECT sluice.create_stream_table('c', 'SELECT mv.id FROM mv JOIN a USING (id)', '1h') \g /dev/null
SELECT is(pg_temp.place('c'), '1: c <- a', 'a materialized view that is no node is no upstream');
SELECT sluice.schedule_refresh('mv', '10m') \g /dev/null
SELECT is(pg_temp.place('mv'), '2: mv <- b', 'once it is scheduled it has its place');
SELECT is(pg_temp.place('c'), '3: c <- a, mv', 'and is upstream of what was there before');
SELECT results_eq(
    $$SELECT (SELECT array_agg(u.pgt_id ORDER BY u.pgt_id) FROM sluice.nodes AS u WHERE u.name::regclass IN ('a'::regclass, 'mv'::regclass)), kind
      FROM sluice.nodes WHERE upstream IS NOT NULL AND name::regclass = 'c'::regclass$$,
    $$SELECT upstream, 'stream_table' FROM sluice.nodes WHERE name::regclass = 'c'::regclass$$,
    'sluice.nodes shows it'
);
SELECT sluice.schedule('job', '1h', 'SELECT 1') AS job \gset
SELECT results_eq(
    format('SELECT depth, upstream FROM _sluice.graph WHERE pgt_id = %s', :job), $$VALUES (0, '{}'::bigint[])$$, 'a job stands alone'
);

-- Calculated schedules
SELECT is(pg_temp.effective('b'), '@every 10m', 'a calculated node has the tightest schedule of its readers');
SELECT is(pg_temp.effective('a'), '@every 10m', 'through calculated ones');
SELECT is(pg_temp.effective('c'), NULL, 'a node with a schedule has no other');
SELECT sluice.alter_stream_table('c', schedule => '30s') \g /dev/null
SELECT is(pg_temp.effective('a'), '@every 30s', 'it follows when a reader''s schedule changes');
SELECT is(pg_temp.effective('b'), '@every 10m', 'where it reads that one');
SELECT ok(
    (SELECT next_fire_at > clock_timestamp() AND next_fire_at <= clock_timestamp() + interval '30 s' FROM _sluice.node WHERE relid = 'a'::regclass),
    'and so does its grid'
);
SELECT sluice.drop_stream_table('c') \g /dev/null
SELECT is(pg_temp.effective('a'), '@every 10m', 'it follows when a reader is dropped');
SELECT sluice.unschedule('mv') \g /dev/null
SELECT results_eq(
    'SELECT pg_temp.effective(''a''), next_fire_at FROM _sluice.node WHERE relid = ''a''::regclass',
    'VALUES (NULL::text, NULL::timestamptz)',
    'without a reader that has one it has none, and never fires'
);
SELECT sluice.create_stream_table('d', 'SELECT id FROM b', '5m') \g /dev/null
DROP TABLE d;
SELECT is(pg_temp.effective('b'), NULL, 'it follows when a reader''s table is dropped');

-- Cycles
SELECT sluice.schedule_refresh('mv', 'manual') \g /dev/null
SELECT is(
    pg_temp.error_of($$SELECT sluice.alter_stream_table('a', query => 'SELECT id FROM mv')$$),
    E'42P17: "public.a" would read itself\nDETAIL: The path is public.a -> public.mv -> public.b -> public.a, where each reads the next.',
    'a cycle through views and a materialized view'
);
SELECT is(pg_temp.place('mv'), '2: mv <- b', 'leaves the graph as it was');
\ir finish.psql
