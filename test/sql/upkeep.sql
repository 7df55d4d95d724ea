-- Upkeep: each task deletes what is past its time and nothing else, within its bounds, in turn.
\ir setup.psql
SELECT plan(60);

-- History of a node, one row a second, that ended _age ago and before: attempt 1 is the newest.
CREATE FUNCTION pg_temp.fill(_pgt_id bigint, _rows integer, _age interval DEFAULT '1 d', _kind text DEFAULT 'stream_table') RETURNS void
LANGUAGE sql AS $$
    INSERT INTO _sluice.history (run_id, pgt_id, name, kind, outcome, attempt, due_at, started_at, ended_at)
    SELECT gen_random_uuid(), _pgt_id, 'node', _kind, 'succeeded', g, t, t, t
    FROM generate_series(1, _rows) AS g
    CROSS JOIN LATERAL (SELECT clock_timestamp() - _age - g * interval '1 s') AS x (t)
$$;
CREATE FUNCTION pg_temp.rows(_pgt_id bigint) RETURNS bigint LANGUAGE sql AS 'SELECT count(*) FROM _sluice.history WHERE pgt_id = _pgt_id';
CREATE FUNCTION pg_temp.far() RETURNS timestamptz LANGUAGE sql AS $$SELECT clock_timestamp() + interval '1 min'$$;
-- All tasks at their first turn but for one.
CREATE FUNCTION pg_temp.only(_task text) RETURNS void LANGUAGE sql AS $$
    UPDATE _sluice.upkeep SET place = NULL, deleted = 0, error = NULL,
        due_at = CASE WHEN task = _task THEN clock_timestamp() ELSE 'infinity' END
$$;
CREATE FUNCTION pg_temp.step() RETURNS boolean LANGUAGE sql AS 'SELECT is_due FROM _sluice.upkeep()';
CREATE FUNCTION pg_temp.finish() RETURNS integer LANGUAGE plpgsql AS $$
DECLARE
    v_steps integer := 1;
BEGIN
    WHILE pg_temp.step() LOOP
        v_steps := v_steps + 1;
        ASSERT v_steps < 1000;
    END LOOP;
    RETURN v_steps;
END $$;
CREATE FUNCTION pg_temp.deleted(_task text) RETURNS bigint LANGUAGE sql AS 'SELECT deleted FROM _sluice.upkeep WHERE task = _task';
SELECT sluice.configure('history_retention', '1 h') \g /dev/null
SELECT sluice.configure('maintenance_batch', '10') \g /dev/null

-- The tasks
SELECT is(
    (SELECT string_agg(task, ' ' ORDER BY task) FROM _sluice.upkeep),
    'alerts history_age history_rows pg_cron_runs vanished_databases', 'the tasks'
);
SELECT is_empty(
    $$SELECT task FROM _sluice.upkeep WHERE to_regprocedure(format('_sluice.purge_%s(jsonb,integer,timestamptz)', task)) IS NULL$$,
    'each has its function'
);
SELECT is_empty(
    $$SELECT p.proname FROM pg_proc AS p WHERE p.pronamespace = '_sluice'::regnamespace AND p.proname LIKE 'purge\_%'
        AND NOT EXISTS (SELECT FROM _sluice.upkeep AS u WHERE p.proname = 'purge_' || u.task)$$,
    'and each function its task'
);
SELECT ok(_sluice.upkeep_is_due(), 'at first it is due');
SELECT is(
    (SELECT array_agg(u.task ORDER BY u.last_at) FROM (SELECT pg_temp.finish() OFFSET 0) AS f, _sluice.upkeep AS u WHERE u.last_at IS NOT NULL),
    NULL, 'no task has had its turn'
);
SELECT is(
    (SELECT string_agg(task, ' ' ORDER BY task) FROM _sluice.upkeep WHERE last_at IS NOT NULL), 'alerts history_age history_rows',
    'what is for the control database is not done elsewhere'
);
SELECT ok(NOT _sluice.upkeep_is_due(), 'and there is a rest when all are done');
SELECT is(
    (SELECT (bool_and(extract(second FROM due_at) = 37), bool_and(due_at <= clock_timestamp() + interval '1 min'))::text
        FROM _sluice.upkeep WHERE last_at IS NOT NULL), '(t,t)',
    'of a minute at the most, which ends for all at once'
);
SELECT ok(NOT pg_temp.step(), 'a step then does nothing');
SAVEPOINT clock;
UPDATE _sluice.upkeep SET due_at = due_at + interval '10 h', last_at = last_at + interval '10 h' WHERE task = 'alerts';
SELECT ok(_sluice.upkeep_is_due(), 'a task whose last step lies in the future is due: the clock was set back');
SELECT pg_temp.step() \g /dev/null
SELECT is((SELECT last_at FROM _sluice.upkeep WHERE task = 'alerts') <= clock_timestamp(), true, 'and makes it');
SELECT ok(NOT _sluice.upkeep_is_due(), 'once');
UPDATE _sluice.upkeep SET due_at = due_at + interval '10 h', last_at = NULL WHERE task = 'alerts';
SELECT ok(_sluice.upkeep_is_due(), 'so is one that was to make its first there');
ROLLBACK TO clock;

-- History by age
SELECT pg_temp.fill(1, 25) \g /dev/null
SELECT pg_temp.fill(1, 5, '1 s') \g /dev/null
SELECT pg_temp.only('history_age') \g /dev/null
SELECT ok(pg_temp.step(), 'a full step, and there is more');
SELECT is(pg_temp.deleted('history_age'), 10::bigint, 'it deleted a batch');
SELECT is((SELECT deleted FROM _sluice.upkeep()), 10::bigint, 'the next one tells how much');
SELECT is((SELECT max(attempt) FROM _sluice.history), 5, 'the oldest first');
SELECT is(pg_temp.finish(), 1, 'one more step');
SELECT is(pg_temp.rows(1), 5::bigint, 'and what is younger than history_retention stays');
SELECT is(pg_temp.deleted('history_age'), 25::bigint, 'the task counts what it deletes');
SELECT ok(
    (SELECT due_at > last_at + interval '9 s' AND extract(second FROM due_at) <> 37 FROM _sluice.upkeep WHERE task = 'history_age'),
    'after several steps it looks again soon'
);

-- A deadline
SELECT pg_temp.fill(1, 500) \g /dev/null
SELECT is(
    (SELECT (deleted, is_over)::text FROM _sluice.purge_history_age(NULL, 10000, clock_timestamp())), '(100,f)', 'a step that has no time looks at a hundred rows'
);
SELECT is(
    (SELECT (deleted, is_over)::text FROM _sluice.purge_history_age(NULL, 10000, pg_temp.far())), '(400,t)', 'one that has goes through all'
);

-- A pass does not go back
SELECT pg_temp.fill(1, 30) \g /dev/null
CREATE TEMP TABLE step AS SELECT * FROM _sluice.purge_history_age(NULL, 10, pg_temp.far());
SELECT pg_temp.fill(2, 1, '2 d') \g /dev/null
SELECT is((SELECT p.deleted FROM step, _sluice.purge_history_age(step.place, 100, pg_temp.far()) AS p), 20::bigint, 'it goes on from its place');
SELECT is(pg_temp.rows(2), 1::bigint, 'and leaves what came behind it');
SELECT is((SELECT deleted FROM _sluice.purge_history_age('{"passed": "now"}', 100, pg_temp.far())), 1::bigint, 'to the next pass');
SELECT pg_temp.fill(2, 1, '2 d') \g /dev/null
SAVEPOINT vacuum_is_late;
CREATE OR REPLACE FUNCTION _sluice.dead_history_rows() RETURNS bigint LANGUAGE sql AS 'SELECT 50001::bigint';
SELECT is(
    (SELECT deleted FROM _sluice.purge_history_age(jsonb_build_object('passed', clock_timestamp() - interval '1 h'), 100, pg_temp.far())), 0::bigint,
    'which, where vacuum has much to do, begins where the last one ended'
);
ROLLBACK TO vacuum_is_late;
DELETE FROM _sluice.history;
INSERT INTO _sluice.history (run_id, pgt_id, name, kind, outcome, attempt, started_at, ended_at)
SELECT gen_random_uuid(), 9, 'node', 'job', 'succeeded', 1, '2020-01-01', '2020-01-01' FROM generate_series(1, 250);
SELECT is((SELECT deleted FROM _sluice.purge_history_age(NULL, 1000, pg_temp.far())), 250::bigint, 'rows that ended in the same instant');

-- Rows that are needed
SELECT sluice.schedule('job', '1 h', 'SELECT 1') AS job \gset
SELECT sluice.schedule('other', 'manual', 'SELECT 1') AS other \gset
SELECT pg_temp.fill(:job, 300, '1 d', 'job') \g /dev/null
SELECT pg_temp.fill(:other, 3, '1 d', 'job') \g /dev/null
SELECT is((SELECT (deleted, is_over)::text FROM _sluice.purge_history_age(NULL, 1000, pg_temp.far())), '(301,t)', 'of a node');
SELECT is((SELECT array_agg(attempt) FROM _sluice.history), '{1,1}', 'the last run stays, however old');
SELECT sluice.unschedule('other') \g /dev/null
SELECT is((SELECT (deleted, is_over)::text FROM _sluice.purge_history_age(NULL, 1000, pg_temp.far())), '(1,t)', 'of one that is gone nothing stays');
-- A fire of noon that succeeded, and two later attempts of the same fire that came to nothing.
DELETE FROM _sluice.history;
INSERT INTO _sluice.history (run_id, pgt_id, name, kind, outcome, reason, attempt, due_at, started_at, ended_at)
SELECT gen_random_uuid(), :job, 'job', 'job', o.outcome, o.reason, 1, timestamptz '2020-01-01 12:00' + o.due, t, t
FROM (VALUES
    (1, 'succeeded', NULL, interval '-1 h'), (2, 'succeeded', NULL, '0'), (3, 'worker_crashed', NULL, '0'),
    (4, 'skipped', 'duplicate', '0'), (5, 'succeeded', 'run_now', '1 min')
) AS o (n, outcome, reason, due)
CROSS JOIN LATERAL (SELECT timestamptz '2020-01-01 13:00' + o.n * interval '1 s') AS x (t);
CREATE FUNCTION pg_temp.kept(_change text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
    v_kept text;
BEGIN
    EXECUTE _change;
    PERFORM _sluice.purge_history_age(NULL, 1000, pg_temp.far());
    v_kept := (SELECT string_agg(to_char(due_at, 'HH24:MI') || ' ' || outcome, ', ' ORDER BY started_at) FROM _sluice.history);
    RAISE EXCEPTION USING MESSAGE = v_kept, ERRCODE = 'T0001';
EXCEPTION
    WHEN SQLSTATE 'T0001' THEN
        RETURN SQLERRM;
END $$;
SELECT set_config('TimeZone', 'UTC', true) \g /dev/null
SELECT is(
    pg_temp.kept(format($$UPDATE _sluice.node SET fired_at = '2020-01-01 12:00', next_fire_at = '2020-01-01 13:00' WHERE pgt_id = %s$$, :job)),
    '12:00 succeeded, 12:01 succeeded', 'the success of the fire that was queued last'
);
SELECT is(
    pg_temp.kept(format($$UPDATE _sluice.node SET fired_at = NULL, next_fire_at = '2020-01-01 12:00' WHERE pgt_id = %s$$, :job)),
    '12:00 succeeded, 12:01 succeeded', 'of one that is due still, since the node was not moved on'
);
SELECT is(
    pg_temp.kept(format(
        $$UPDATE _sluice.node SET fired_at = '2020-01-01 13:00', next_fire_at = '2020-01-01 14:00', retry_at = '2020-01-01 15:00',
          retry_of = '2020-01-01 12:00' WHERE pgt_id = %s$$, :job)),
    '12:00 succeeded, 12:01 succeeded', 'of one that is to be tried again'
);
SELECT is(
    pg_temp.kept(format($$UPDATE _sluice.node SET fired_at = '2020-01-01 13:00', next_fire_at = '2020-01-01 14:00' WHERE pgt_id = %s$$, :job)),
    '12:01 succeeded', 'and none that can''t come again'
);
SELECT is(
    pg_temp.kept($$UPDATE _sluice.history SET reason = 'manual' WHERE reason = 'run_now'$$), '12:00 skipped',
    'a refresh by hand is in no queue: what ran before it is the last run'
) ;
DELETE FROM _sluice.history;
-- More of them than a step looks at at once, in one instant.
INSERT INTO _sluice.node (kind, job_name, job_owner, command, schedule, anchor)
SELECT 'job', 'many ' || n, 'postgres', 'SELECT 1', 'manual', now() FROM generate_series(1, 250) AS n;
INSERT INTO _sluice.history (run_id, pgt_id, name, kind, outcome, attempt, started_at, ended_at)
SELECT gen_random_uuid(), n.pgt_id, n.job_name, 'job', 'succeeded', 1, '2020-01-01', '2020-01-01' FROM _sluice.node AS n WHERE n.job_name LIKE 'many %';
SELECT pg_temp.fill(9, 5) \g /dev/null
SELECT is(
    (SELECT (deleted, is_over)::text FROM _sluice.purge_history_age(NULL, 1000, clock_timestamp() + interval '5 s')), '(5,t)', 'many that stay keep a pass nowhere'
);
DELETE FROM _sluice.history;
DELETE FROM _sluice.node WHERE job_name LIKE 'many %';

-- History by rows
SELECT sluice.configure('history_rows', '20') \g /dev/null
SELECT pg_temp.fill(1, 20, '1 s') \g /dev/null
SELECT pg_temp.fill(2, 55, '1 s') \g /dev/null
SELECT pg_temp.fill(3, 21, '1 s') \g /dev/null
SELECT pg_temp.only('history_rows') \g /dev/null
SELECT ok(pg_temp.step(), 'a full step');
SELECT is(pg_temp.deleted('history_rows'), 10::bigint, 'deletes a batch');
SELECT pg_temp.finish() \g /dev/null
SELECT is(ARRAY[pg_temp.rows(1), pg_temp.rows(2), pg_temp.rows(3)], ARRAY[20, 20, 20]::bigint[], 'each node keeps so many');
SELECT is((SELECT max(attempt) FROM _sluice.history WHERE pgt_id = 2), 20, 'the newest');
SELECT pg_temp.fill(2, 4995, '35 s') \g /dev/null
CREATE TEMP TABLE walk AS SELECT * FROM _sluice.purge_history_rows(NULL, 10000, clock_timestamp());
SELECT ok((SELECT NOT is_over AND place ->> 'pgt_id' = '3' FROM walk), 'a step without time looks once, and knows where it was');
SELECT is((SELECT p.is_over FROM walk, _sluice.purge_history_rows(walk.place, 10000, pg_temp.far()) AS p), true, 'the next goes on from there');
SELECT is(
    (SELECT ARRAY[
        count(*) FILTER (WHERE ended_at > clock_timestamp() - interval '59 min 50 s'),
        count(*) FILTER (WHERE ended_at < clock_timestamp() - interval '1 h') / 100
    ] FROM _sluice.history WHERE pgt_id = 2), ARRAY[20, 14]::bigint[],
    'what is past history_retention too is left to the other task'
);
DELETE FROM _sluice.history;
SELECT sluice.configure('history_rows', '0') \g /dev/null
SELECT is((SELECT (deleted, is_over)::text FROM _sluice.purge_history_rows(NULL, 10000, pg_temp.far())), '(0,t)', '0 is no limit');

-- Alerts
INSERT INTO _sluice.alert (event, severity, pgt_id, message, opened_at, closed_at, last_emitted_at)
SELECT 'suspended', 'critical', n, 'gone', '2020-01-01', '2020-01-01', '2020-01-01' FROM generate_series(1, 15) AS n;
INSERT INTO _sluice.alert (event, severity, pgt_id, message, opened_at, closed_at, last_emitted_at) VALUES
    ('suspended', 'critical', 1, 'open', '2020-01-01', NULL, '2020-01-01'),
    ('suspended', 'critical', 2, 'just closed', '2020-01-01', clock_timestamp(), clock_timestamp()),
    ('suspended', 'critical', 3, 'not announced', '2020-01-01', '2020-01-02', '2020-01-01');
SELECT pg_temp.only('alerts') \g /dev/null
SELECT ok(pg_temp.step(), 'a full step');
SELECT is((SELECT count(*) FROM _sluice.alert), 8::bigint, 'deletes a batch of alerts');
SELECT ok(NOT pg_temp.step(), 'then the rest');
SELECT is((SELECT string_agg(message, ', ' ORDER BY seq) FROM _sluice.alert), 'open, just closed, not announced', 'of those that were closed long ago, and said to be');

-- A task that fails
SELECT pg_temp.fill(9, 15) \g /dev/null
UPDATE _sluice.upkeep SET due_at = clock_timestamp(), deleted = 0, place = NULL;
UPDATE _sluice.upkeep SET due_at = due_at - interval '1 s', place = '{"ended_at": "nonsense"}' WHERE task = 'history_age';
SELECT ok(pg_temp.step(), 'a failure passes on to the others');
SELECT matches((SELECT error FROM _sluice.upkeep WHERE task = 'history_age'), '^invalid input syntax .*\(22007\)$', 'and is on record');
SELECT pg_temp.finish() \g /dev/null
SELECT is(
    (SELECT (count(*), min(event), min(severity), min(node) = current_database(), min(detail ->> 'task'))::text FROM _sluice.alert WHERE closed_at IS NULL AND pgt_id IS NULL),
    '(1,upkeep_failed,warning,t,history_age)', 'it is told'
);
UPDATE _sluice.alert SET node = 'former_name' WHERE event = 'upkeep_failed';
UPDATE _sluice.upkeep SET due_at = clock_timestamp() WHERE task = 'history_age';
SELECT pg_temp.finish() \g /dev/null
SELECT is(
    (SELECT (error, deleted)::text FROM _sluice.upkeep WHERE task = 'history_age'), '(,15)', 'it starts anew when it is tried again'
);
SELECT is((SELECT count(*) FROM _sluice.alert WHERE event = 'upkeep_failed' AND closed_at IS NULL), 0::bigint, 'and then the alert is closed, whatever the database was called');

-- Health
CREATE FUNCTION pg_temp.health() RETURNS text LANGUAGE sql AS $$
    SELECT concat_ws(': ', h.status, h.detail) FROM sluice.health_check() AS h WHERE h."check" = 'upkeep'
$$;
UPDATE _sluice.upkeep SET place = NULL, due_at = clock_timestamp(), deleted = 4, last_at = '2024-01-02 03:04:05+00';
UPDATE _sluice.upkeep SET last_at = '2024-01-02 03:04:06+00' WHERE task = 'alerts';
SET timezone = 'UTC';
SELECT is(
    pg_temp.health(), 'ok: nothing waits; 20 rows deleted so far, the last step at 2024-01-02 03:04:06+00',
    'what is needed does not wait, and what has been done is told'
);
UPDATE _sluice.upkeep SET last_at = NULL;
SELECT pg_temp.fill(9, 3) \g /dev/null
SELECT is(pg_temp.health(), 'ok: 3 rows of history are past their retention', 'some rows that wait are as it should be');
UPDATE _sluice.upkeep SET due_at = clock_timestamp() - interval '6 min';
SELECT is(pg_temp.health(), 'warn: 3 rows of history are past their retention', 'when nobody deletes them they are not');
UPDATE _sluice.upkeep SET due_at = clock_timestamp(), place = jsonb_build_object('ended_at', clock_timestamp()) WHERE task = 'history_age';
SELECT is(pg_temp.health(), 'ok: nothing waits', 'what a pass has left behind is not counted again');
UPDATE _sluice.upkeep SET place = NULL, error = CASE WHEN task = 'alerts' THEN 'no luck (XX000)' END;
SELECT is(pg_temp.health(), 'warn: 3 rows of history are past their retention; alerts failed: no luck (XX000)', 'a task that fails');
UPDATE _sluice.upkeep SET error = NULL;
SELECT pg_temp.fill(9, 20000) \g /dev/null
ANALYZE _sluice.history;
SELECT matches(pg_temp.health(), '^warn: about (19|20)[0-9]{3} rows of history', 'a backlog is estimated');
\ir finish.psql
