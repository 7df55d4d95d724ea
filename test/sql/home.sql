-- Whose nodes they are: a member database, and what becomes of a copy that was made from it as a template.
\ir setup.psql
SELECT plan(20);

CREATE TABLE src (id integer);
INSERT INTO src VALUES (1);
SELECT sluice.create_stream_table('t', 'SELECT id FROM src', '1h') AS t \gset
SELECT sluice.create_stream_table('fresh', 'SELECT id FROM src', '1h', initialize => false) AS fresh \gset
SELECT sluice.schedule('job', '1h', 'SELECT 1') AS job \gset
SELECT sluice.schedule('by hand', 'manual', 'SELECT 1') AS manual \gset
SELECT sluice.schedule('odd', '1h', 'SELECT 1') AS odd \gset
SELECT sluice.advance_watermark('src', '2024-01-01') \g /dev/null
SELECT outcome FROM _sluice.perform(md5('1')::uuid, :t, '2024-01-01', 1, NULL, NULL) \g /dev/null
SELECT _sluice.record_failure(md5('2')::uuid, :job, '2024-01-01', 1, '2024-01-01', NULL, '{"outcome": "lock_timeout", "message": "m"}',
    '{"counts": true, "suspend": false, "retry_seconds": 1, "work_mem": 2097152}') \g /dev/null
SELECT _sluice.open_alert('suspended', 'critical', :t, 'public.t', 'm') \g /dev/null
UPDATE _sluice.node SET status = 'suspended' WHERE pgt_id = :t;
UPDATE _sluice.node_state SET consecutive_errors = 3, gated_since = '2024-01-01' WHERE pgt_id = :t;
UPDATE _sluice.node SET status = 'quarantined', schedule = 'no schedule', next_fire_at = '2024-01-01', retry_at = '2024-01-02', retry_of = '2024-01-01'
WHERE pgt_id = :odd;
UPDATE _sluice.node SET anchor = '2024-01-01', next_fire_at = '2024-01-01 01:00' WHERE pgt_id IN (:t, :job, :fresh);
CREATE TEMP TABLE before AS SELECT * FROM _sluice.node;
CREATE TEMP TABLE state_before AS SELECT * FROM _sluice.node_state;
CREATE FUNCTION pg_temp.home() RETURNS oid LANGUAGE sql AS 'SELECT db_oid FROM _sluice.home';
SELECT _sluice.database_oid() AS own \gset

-- The first start
SELECT is(pg_temp.home(), NULL, 'before the first start there is none');
SELECT _sluice.rehome() \g /dev/null
SELECT is(pg_temp.home(), :own::oid, 'which puts it on record');
SELECT results_eq('SELECT * FROM _sluice.node ORDER BY pgt_id', 'SELECT * FROM before ORDER BY pgt_id', 'and changes no node');
SELECT results_eq('SELECT * FROM _sluice.node_state ORDER BY pgt_id', 'SELECT * FROM state_before ORDER BY pgt_id', 'nor what its runs left behind');
SELECT results_eq(
    'SELECT (SELECT count(*) FROM sluice.history), (SELECT count(*) FROM sluice.alerts), (SELECT count(*) FROM _sluice.baseline)',
    'VALUES (2::bigint, 1::bigint, 1::bigint)', 'history, alerts and baselines stay'
);
SELECT _sluice.rehome() \g /dev/null
SELECT results_eq('SELECT * FROM _sluice.node ORDER BY pgt_id', 'SELECT * FROM before ORDER BY pgt_id', 'another start at home changes nothing');
SELECT results_eq('SELECT * FROM _sluice.node_state ORDER BY pgt_id', 'SELECT * FROM state_before ORDER BY pgt_id', 'nothing at all');

-- A copy
UPDATE _sluice.upkeep SET place = '{}', due_at = 'infinity', deleted = 1, last_at = '2024-01-01', error = 'x';
UPDATE _sluice.home SET db_oid = 1;
SELECT _sluice.rehome() \g /dev/null
SELECT is(pg_temp.home(), :own::oid, 'a copy is at home where it is');
SELECT results_eq(
    'SELECT (SELECT count(*) FROM sluice.history), (SELECT count(*) FROM sluice.alerts), (SELECT count(*) FROM _sluice.baseline)',
    'VALUES (0::bigint, 0::bigint, 0::bigint)', 'without the history, alerts and baselines of its original'
);
SELECT is_empty(
    $$SELECT name FROM sluice.nodes WHERE consecutive_errors > 0 OR remedy IS NOT NULL OR last_run_at IS NOT NULL OR last_outcome IS NOT NULL$$,
    'its nodes have no errors, retries and outcomes'
);
SELECT is_empty(
    $$SELECT task FROM _sluice.upkeep WHERE place IS NOT NULL OR deleted > 0 OR last_at IS NOT NULL OR error IS NOT NULL OR due_at > clock_timestamp()$$,
    'upkeep begins anew'
);
SELECT is_empty('SELECT pgt_id FROM _sluice.node_state WHERE gated_since IS NOT NULL', 'nor a gate to wait for');
SELECT is(
    (SELECT string_agg(status, ' ' ORDER BY pgt_id) FROM sluice.nodes), 'active needs_init active active active',
    'what was suspended or quarantined is active, what was not filled is still not'
);
SELECT is(
    (SELECT count(*) FROM _sluice.node WHERE pgt_id IN (:t, :fresh, :job) AND anchor > '2024-01-02' AND next_fire_at > clock_timestamp()
        AND next_fire_at <= clock_timestamp() + interval '1 h'), 3::bigint, 'their grids begin anew'
);
SELECT is((SELECT next_fire_at FROM _sluice.node WHERE pgt_id = :manual), NULL, 'where they have one');
SELECT is((SELECT next_fire_at FROM _sluice.node WHERE pgt_id = :odd), timestamptz '2024-01-01', 'a schedule that can''t be read is left for the tick');
SELECT results_eq(
    'SELECT (SELECT count(*) FROM _sluice.node), (SELECT count(*) FROM _sluice.dependency), (SELECT watermark FROM sluice.watermarks)',
    $$VALUES (5::bigint, 2::bigint, timestamptz '2024-01-01')$$, 'definitions and watermarks, which speak of the data, stay'
);
SELECT results_eq(
    format('SELECT lag IS NOT NULL, (SELECT count(*) FROM t) FROM sluice.nodes WHERE pgt_id = %s', :t), 'VALUES (true, 1::bigint)',
    'and so do the rows and their age'
);
DROP TABLE before;
CREATE TEMP TABLE before AS SELECT * FROM _sluice.node;
SELECT _sluice.rehome() \g /dev/null
SELECT results_eq('SELECT * FROM _sluice.node ORDER BY pgt_id', 'SELECT * FROM before ORDER BY pgt_id', 'once');
SELECT throws_ok('INSERT INTO _sluice.home (singleton, db_oid) VALUES (false, 1)', '23514', NULL, 'there is one home');
\ir finish.psql
