-- _sluice.perform() and what records runs: outcomes, history, the node's memory, once per fire.
\ir setup.psql
SELECT plan(55);

CREATE ROLE sluice_test_alice;
CREATE ROLE sluice_test_bob;
GRANT CREATE ON SCHEMA public TO sluice_test_alice, sluice_test_bob;
GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA sluice TO sluice_test_alice, sluice_test_bob;
CREATE TABLE src (id integer);
INSERT INTO src VALUES (1), (2);
CREATE TABLE ran (who name, what text);
GRANT ALL ON src, ran TO PUBLIC;
SET LOCAL ROLE sluice_test_alice;
SELECT sluice.create_stream_table('stream', 'SELECT id FROM src', 'manual', initialize => false) AS stream \gset
CREATE MATERIALIZED VIEW mv AS SELECT id FROM src WITH NO DATA;
SELECT sluice.schedule_refresh('mv', 'manual') AS mv \gset
SELECT sluice.schedule('job', 'manual', 'INSERT INTO ran VALUES (current_user, ''job'')', catch_up => 3) AS job \gset
SET LOCAL ROLE sluice_test_bob;
SELECT sluice.schedule('other', 'manual', 'INSERT INTO ran VALUES (current_user, ''other'')') AS other \gset
RESET ROLE;

CREATE FUNCTION pg_temp.run(_n integer, _pgt_id bigint, _due_at timestamptz DEFAULT '2024-01-01', _session_owner oid DEFAULT NULL)
RETURNS text LANGUAGE sql AS $$
    SELECT p.outcome FROM _sluice.perform(md5(_n::text)::uuid, _pgt_id, _due_at, 1, 'test', _session_owner) AS p
$$;
CREATE FUNCTION pg_temp.fail(
    _n integer, _pgt_id bigint, _counts boolean, _retry double precision, _suspend boolean DEFAULT false, _work_mem bigint DEFAULT NULL
)
RETURNS void LANGUAGE sql AS $$
    SELECT _sluice.record_failure(md5(_n::text)::uuid, _pgt_id, '2024-01-01', 2, '2024-01-01 00:00:01', 'retry', jsonb_build_object(
        'outcome', 'lock_timeout', 'sqlstate', '55P03', 'message', 'canceling statement due to lock timeout',
        'detail', 'd', 'context', 'c', 'pid', 7
    ), jsonb_build_object('counts', _counts, 'retry_seconds', _retry, 'suspend', _suspend, 'work_mem', _work_mem))
$$;

-- Stream tables
SELECT results_eq(
    format($$SELECT outcome, rows_changed, session_owner FROM _sluice.perform(md5('0')::uuid, %s, '2024-01-01', 3, 'why', NULL)$$, :stream),
    $$VALUES ('succeeded', 2::bigint, 'sluice_test_alice'::regrole::oid)$$,
    'a stream table: what changed, and whose SQL the session has run'
);
SELECT results_eq(
    $$SELECT pgt_id, name, kind, mode, outcome, sqlstate, message, attempt, due_at, rows_changed, reason, pid, started_at <= ended_at
      FROM sluice.history WHERE run_id = md5('0')::uuid$$,
    format($$VALUES (%s::bigint, 'public.stream', 'stream_table', 'full', 'succeeded', NULL, NULL, 3, timestamptz '2024-01-01', 2::bigint,
        'why', pg_backend_pid(), true)$$, :stream),
    'its history row'
);
SELECT results_eq(
    format('SELECT n.status, n.last_outcome, n.consecutive_errors, n.last_run_at = s.last_success_at
        FROM sluice.nodes AS n JOIN _sluice.node_state AS s USING (pgt_id) WHERE pgt_id = %s', :stream),
    $$VALUES ('active', 'succeeded', 0, true)$$,
    'the first run initializes the node'
);
SELECT is(pg_temp.run(1, :stream), 'no_change', 'nothing to change is an outcome of its own');
SELECT is((SELECT rows_changed FROM sluice.history WHERE run_id = md5('1')::uuid), 0::bigint, 'with no rows on record');

-- Materialized views
CREATE UNIQUE INDEX mv_id ON mv (id);
SELECT is(pg_temp.run(2, :mv), 'succeeded', 'a materialized view');
SELECT is((SELECT mode FROM sluice.history WHERE run_id = md5('2')::uuid), 'full', 'without contents it is refreshed plainly');
DROP INDEX mv_id;
CREATE UNIQUE INDEX ON mv ((id + 1));
CREATE UNIQUE INDEX ON mv (id) WHERE id > 0;
SELECT is(pg_temp.run(3, :mv), 'succeeded', 'indexes that do not serve');
SELECT is((SELECT mode FROM sluice.history WHERE run_id = md5('3')::uuid), 'full', 'make it no other');
CREATE UNIQUE INDEX ON mv (id);
INSERT INTO src VALUES (3);
SELECT is(pg_temp.run(4, :mv), 'succeeded', 'a unique index over plain columns');
SELECT results_eq(
    $$SELECT mode, (SELECT count(*) FROM mv) FROM sluice.history WHERE run_id = md5('4')::uuid$$,
    $$VALUES ('concurrently', 3::bigint)$$,
    'lets it be refreshed concurrently'
);
INSERT INTO src VALUES (4);
SET quote_all_identifiers = on;
SELECT is(pg_temp.run(104, :mv), 'succeeded', 'also where a database or role has all identifiers quoted, with which the server''s own statements fail');
RESET quote_all_identifiers;

-- Jobs
SELECT is(pg_temp.run(5, :job), 'succeeded', 'a job');
SELECT results_eq(
    $$SELECT mode, rows_changed FROM sluice.history WHERE run_id = md5('5')::uuid$$, $$VALUES ('transactional', 1::bigint)$$, 'its history row'
);
SELECT is(pg_temp.run(6, :job), 'skipped', 'the same fire again');
SELECT is((SELECT reason FROM sluice.history WHERE run_id = md5('6')::uuid), 'duplicate', 'is skipped, and history says why');
SELECT is(pg_temp.run(7, :job, '2024-01-02'), 'succeeded', 'the next fire runs');
SELECT is((SELECT string_agg(who || ' ' || what, ', ') FROM ran), 'sluice_test_alice job, sluice_test_alice job', 'so the command ran once for each');
SELECT throws_ok(
    format($$INSERT INTO _sluice.history (run_id, pgt_id, name, kind, outcome, attempt, due_at, started_at, ended_at)
        VALUES (gen_random_uuid(), %s, 'job', 'job', 'succeeded', 1, '2024-01-02', now(), now())$$, :job),
    '23505', NULL, 'and a second success for one fire can''t be on record'
);
SELECT pg_temp.fail(8, :job, true, NULL) \g /dev/null
UPDATE _sluice.history SET due_at = '2024-01-03' WHERE run_id = md5('8')::uuid;
SELECT is(pg_temp.run(9, :job, '2024-01-03'), 'succeeded', 'a fire that failed runs again');
UPDATE _sluice.node SET transactional = false WHERE pgt_id = :job;
SELECT results_eq(
    format($$SELECT command, search_path, owner, encode(owner_name, 'escape') = 'sluice_test_alice', is_superuser FROM _sluice.top_level_command(md5('10')::uuid, %s, '2024-01-04', 1)$$, :job),
    $$VALUES ('INSERT INTO ran VALUES (current_user, ''job'')', '"$user", public', 'sluice_test_alice'::regrole::oid, true, false)$$,
    'a job at top level: what to execute and as whom'
);
SELECT is_empty($$SELECT 1 FROM sluice.history WHERE run_id = md5('10')::uuid$$, 'which is not on record before it has run');
SELECT _sluice.record_top_level_run(md5('10')::uuid, :job, '2024-01-04', 1, now(), NULL) \g /dev/null
SELECT results_eq(
    $$SELECT mode, outcome FROM sluice.history WHERE run_id = md5('10')::uuid$$, $$VALUES ('top_level', 'succeeded')$$, 'its success'
);
SELECT is_empty(
    format($$SELECT 1 FROM _sluice.top_level_command(md5('15')::uuid, %s, '2024-01-04', 3)$$, :job), 'after which there is nothing to execute'
);
SELECT results_eq(
    $$SELECT mode, outcome, attempt, due_at, reason FROM sluice.history WHERE run_id = md5('15')::uuid$$,
    $$VALUES (NULL::text, 'skipped', 3, timestamptz '2024-01-04', 'duplicate')$$,
    'which is on record'
);
SELECT is_empty($$SELECT 1 FROM _sluice.top_level_command(md5('16')::uuid, 999, '2024-01-04', 1)$$, 'nor is there for a job that is gone');

-- Not run at all
SELECT is(pg_temp.run(11, 999), 'skipped', 'a node that is gone is skipped');
SELECT is(pg_temp.run(12, :other, '2024-01-01', 'sluice_test_alice'::regrole), 'unclean', 'a session that ran another owner''s SQL must be cleaned');
SELECT is(
    pg_temp.run(13, :mv, '2024-01-01', 'sluice_test_bob'::regrole), 'unclean',
    'also for a materialized view, which would see that owner''s settings'
);
SELECT is_empty(
    $$SELECT run_id FROM sluice.history WHERE run_id IN (md5('11')::uuid, md5('12')::uuid, md5('13')::uuid)$$, 'none of them is on record'
);
SELECT is((SELECT count(*) FROM ran WHERE what = 'other'), 0::bigint, 'and nothing was done');
SELECT is(pg_temp.run(14, :other, '2024-01-01', 'sluice_test_bob'::regrole), 'succeeded', 'a session of the same owner serves');

-- Failures
SELECT pg_temp.fail(20, :stream, true, 10) \g /dev/null
SELECT results_eq(
    $$SELECT outcome, sqlstate, message, detail, context, attempt, reason, pid FROM sluice.history WHERE run_id = md5('20')::uuid$$,
    $$VALUES ('lock_timeout', '55P03', 'canceling statement due to lock timeout', 'd', 'c', 2, 'retry', 7)$$,
    'a failed attempt is one history row'
);
SELECT results_eq(
    format($$SELECT n.status, s.last_outcome, s.consecutive_errors, n.due_at = n.retry_at, n.retry_at > clock_timestamp() + interval '5 s', n.retry_of
        FROM _sluice.node AS n JOIN _sluice.node_state AS s USING (pgt_id) WHERE pgt_id = %s$$, :stream),
    $$VALUES ('active', 'lock_timeout', 1, true, true, timestamptz '2024-01-01')$$,
    'one count, and its retry is what is due next'
);
SELECT pg_temp.fail(20, :stream, true, 10) \g /dev/null
SELECT is(_sluice.failures(:stream), 1, 'recording an attempt again does nothing');
SELECT pg_temp.fail(1, :stream, true, 10) \g /dev/null
SELECT is(_sluice.failures(:stream), 1, 'nor does recording a failure of a run that committed');
SELECT pg_temp.fail(21, :stream, false, NULL) \g /dev/null
SELECT results_eq(
    format('SELECT s.consecutive_errors, n.retry_at, n.retry_of FROM _sluice.node AS n JOIN _sluice.node_state AS s USING (pgt_id) WHERE pgt_id = %s', :stream),
    'VALUES (1, NULL::timestamptz, NULL::timestamptz)',
    'an outcome that does not count counts for nothing and has no retry'
);
SELECT is(pg_temp.run(22, :stream), 'succeeded', 'a success');
SELECT is(_sluice.failures(:stream), 0, 'ends the count');
SELECT pg_temp.fail(n, :stream, true, 1) FROM generate_series(23, 24) AS n \g /dev/null
SELECT pg_temp.fail(25, :stream, true, NULL, true) \g /dev/null
SELECT results_eq(
    format('SELECT n.status, s.consecutive_errors, n.due_at FROM _sluice.node AS n JOIN _sluice.node_state AS s USING (pgt_id) WHERE pgt_id = %s', :stream),
    $$VALUES ('suspended', 3, NULL::timestamptz)$$,
    'a node that is to be suspended is never due'
);
SELECT results_eq(
    $$SELECT event, severity, node, message, detail ->> 'sqlstate' FROM sluice.alerts WHERE closed_at IS NULL$$,
    $$VALUES ('suspended', 'critical', 'public.stream',
        '"public.stream" is suspended after 3 failures in a row: canceling statement due to lock timeout', '55P03')$$,
    'with one alert'
);
SELECT sluice.reset('stream') \g /dev/null
SELECT results_eq(
    format('SELECT status, consecutive_errors, (SELECT count(*) FROM sluice.alerts WHERE closed_at IS NULL) FROM sluice.nodes WHERE pgt_id = %s', :stream),
    $$VALUES ('active', 0, 0::bigint)$$,
    'reset() lifts it and closes the alert'
);

-- Remedies
SELECT results_eq(
    format('SELECT * FROM _sluice.failure_state(%s)', :stream),
    $$VALUES (0, NULL::bigint, '{"max_consecutive_errors": 3, "retry_backoff_base": 1, "retry_backoff_cap": 300, "refresh_work_mem": 67108864}'::jsonb)$$,
    'what a failure is judged from'
);
SELECT is_empty('SELECT * FROM _sluice.failure_state(999)', 'nothing for a node that is gone');
SELECT pg_temp.fail(30, :stream, true, NULL, false, 33554432), pg_temp.fail(31, :stream, true, NULL, false, 16777216) \g /dev/null
SELECT results_eq(
    $$SELECT remedy FROM sluice.history WHERE run_id IN (md5('30')::uuid, md5('31')::uuid) ORDER BY ended_at$$,
    $$VALUES (NULL), ('work_mem 32 MB, no parallel query')$$,
    'history has the remedy that an attempt was under'
);
SELECT is(
    (SELECT remedy FROM sluice.nodes WHERE pgt_id = :stream), 'work_mem 16 MB and no parallel query for 3 more successes',
    'the node shows the one in force, and until when'
);
SELECT is(
    (SELECT _sluice.run_options(n) FROM _sluice.node AS n WHERE pgt_id = :stream), '{"work_mem": 16777216, "successes": 0}'::jsonb,
    'its runs are told'
);
SELECT is(pg_temp.run(32, :stream), 'no_change', 'a success under it');
SELECT _sluice.record_recovery(:stream, 16777216, 1) \g /dev/null
SELECT results_eq(
    format($$SELECT h.remedy, n.remedy, n.consecutive_errors FROM sluice.history AS h JOIN sluice.nodes AS n USING (pgt_id)
        WHERE h.run_id = md5('32')::uuid AND pgt_id = %s$$, :stream),
    $$VALUES ('work_mem 16 MB, no parallel query', 'work_mem 16 MB and no parallel query for 2 more successes', 0)$$,
    'is on record as such'
);
SELECT sluice.refresh_stream_table('stream') \g /dev/null
SELECT is(
    (SELECT remedy FROM sluice.history WHERE reason = 'manual'), NULL, 'a refresh by hand is under none: it has the caller''s memory'
);
SELECT sluice.reset('stream') \g /dev/null
SELECT is((SELECT remedy FROM sluice.nodes WHERE pgt_id = :stream), NULL, 'reset() ends it');
SELECT pg_temp.fail(26, 999, true, 1) \g /dev/null
SELECT is_empty($$SELECT run_id FROM sluice.history WHERE run_id = md5('26')::uuid$$, 'a failure of a node that is gone is not recorded');

-- What a node needs is gone, by a way that no event trigger sees
UPDATE _sluice.node SET relid = 4294967295::oid WHERE pgt_id = :mv;
UPDATE _sluice.node SET job_owner = 4294967295::oid WHERE pgt_id = :other;
SELECT is(
    pg_temp.error_of(format('SELECT pg_temp.run(27, %s)', :mv)),
    E'42P01: relation with OID 4294967295 does not exist\nHINT: Drop the node with sluice.drop_stream_table() or sluice.unschedule().',
    'a relation'
);
SELECT is(
    pg_temp.error_of(format('SELECT pg_temp.run(28, %s, ''2024-09-01'')', :other)), '42704: role with OID 4294967295 does not exist', 'an owner'
);
SELECT is(
    pg_temp.error_of(format('SELECT * FROM _sluice.top_level_command(md5(''29'')::uuid, %s, ''2024-09-01'', 1)', :other)),
    '42704: role with OID 4294967295 does not exist', 'also of a job at top level'
);
\ir finish.psql
