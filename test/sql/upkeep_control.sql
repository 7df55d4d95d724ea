-- Upkeep of the control database. pg_cron's part is played by two tables of the same names.
\ir setup.psql
SELECT plan(21);

CREATE SCHEMA cron;
CREATE TABLE cron.job (jobid bigint PRIMARY KEY, jobname text, command text);
CREATE TABLE cron.job_run_details (runid bigint PRIMARY KEY, jobid bigint, command text, status text);
INSERT INTO cron.job VALUES (1, 'theirs', 'SELECT 1'), (2, 'pg_sluice', 'CALL sluice.run()'), (3, 'a copy', 'CALL sluice.run()');
-- Runs of four entries in turn. The entry 9 is one of ours that is gone, with what its runs left.
CREATE FUNCTION pg_temp.run(_from integer, _to integer) RETURNS void LANGUAGE sql AS $$
    INSERT INTO cron.job_run_details
    SELECT n, j.jobid, CASE WHEN j.jobid = 1 THEN 'SELECT 1' ELSE 'CALL sluice.run()' END, CASE WHEN n % 3 = 0 THEN 'failed' ELSE 'succeeded' END
    FROM generate_series(_from, _to) AS n
    CROSS JOIN LATERAL (SELECT (ARRAY[1, 2, 3, 9])[1 + n % 4]) AS j (jobid)
$$;
CREATE FUNCTION pg_temp.counts() RETURNS text LANGUAGE sql AS $$
    SELECT string_agg(format('%s: %s', c.jobid, c.runs), ', ' ORDER BY c.jobid)
    FROM (SELECT d.jobid, count(*) AS runs FROM cron.job_run_details AS d GROUP BY d.jobid) AS c
$$;
CREATE FUNCTION pg_temp.far() RETURNS timestamptz LANGUAGE sql AS $$SELECT clock_timestamp() + interval '1 min'$$;
-- Steps of so many rows until the pass is over; the place is kept between passes.
CREATE TEMP TABLE pass (place jsonb, steps integer, deleted bigint);
INSERT INTO pass VALUES (NULL, 0, 0);
CREATE FUNCTION pg_temp.pass(_rows integer, _until timestamptz DEFAULT NULL) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
    v_step record;
BEGIN
    UPDATE pass SET steps = 0, deleted = 0;
    LOOP
        SELECT p.* INTO v_step FROM pass, _sluice.purge_pg_cron_runs(pass.place, _rows, COALESCE(_until, pg_temp.far())) AS p;
        ASSERT v_step.deleted <= _rows;
        UPDATE pass SET place = v_step.place, steps = steps + 1, deleted = pass.deleted + v_step.deleted;
        EXIT WHEN v_step.is_over;
        ASSERT (SELECT steps < 1000 FROM pass);
    END LOOP;
    RETURN (SELECT format('%s in %s', deleted, steps) FROM pass);
END $$;

-- pg_cron's record of our entry's runs
SELECT is(pg_temp.pass(10), '0 in 1', 'nothing to delete');
SELECT pg_temp.run(1, 160) \g /dev/null
SELECT is(pg_temp.pass(1000), '0 in 1', 'eighty are not too many');
SELECT pg_temp.run(161, 400) \g /dev/null
UPDATE cron.job_run_details SET status = 'running' WHERE runid IN (1, 41);
SELECT is(pg_temp.pass(1000), '98 in 1', 'of two hundred all but a hundred go, and those that have not ended');
SELECT is(pg_temp.counts(), '1: 100, 2: 52, 3: 100, 9: 50', 'none of other entries, whatever their command');
SELECT is(
    (SELECT array_agg(runid ORDER BY runid) FROM cron.job_run_details WHERE jobid = 2 AND runid < 200), '{1,41}', 'of ours the oldest that have ended'
);
SELECT pg_temp.run(401, 440) \g /dev/null
UPDATE cron.job_run_details SET status = 'failed' WHERE status = 'running';
SELECT is(pg_temp.pass(7), '22 in 4', 'a batch at a time');
SELECT is(pg_temp.counts(), '1: 110, 2: 50, 3: 110, 9: 50', 'a hundred again');
SELECT pg_temp.run(441, 480) \g /dev/null
SELECT is(pg_temp.pass(1000, clock_timestamp()), '20 in 3', 'without time, a hundred rows at a time');
DELETE FROM cron.job_run_details WHERE jobid IN (2, 9);
SELECT is(pg_temp.pass(1000), '0 in 1', 'when somebody else has deleted ours');
SELECT pg_temp.run(1001, 1400) \g /dev/null
SELECT is(pg_temp.pass(1000), '100 in 1', 'it keeps a hundred of what follows');

-- What it doesn't look at again
CREATE TEMP TABLE looked AS SELECT place ->> 'floor' AS floor FROM pass;
SELECT is((SELECT floor FROM looked), (SELECT min(runid)::text FROM cron.job_run_details WHERE jobid IN (2, 9)), 'the next one ends where this one had deleted all');

-- State of databases that are gone
SELECT oid AS own FROM pg_database WHERE datname = current_database() \gset
INSERT INTO _sluice.member (db_oid, joined_by) VALUES (:own, 'x');
INSERT INTO _sluice.queue (db_oid, pgt_id, name, rank, due_at) SELECT d, n, 'n', now(), now() FROM unnest(ARRAY[1000, 1001, :own]) AS d, generate_series(1, 20) AS n;
INSERT INTO _sluice.pause (db_oid, pgt_id, name, requested_by, stays) SELECT d, n, 'n', 'x', true FROM unnest(ARRAY[1000, 1002, :own]) AS d, generate_series(1, 20) AS n;
INSERT INTO _sluice.queue (db_oid, pgt_id, name, rank, due_at, state, epoch, started_at) VALUES (1000, 99, 'runs', now(), now(), 'running', 1, now());
CREATE TEMP TABLE walk (place jsonb);
INSERT INTO walk VALUES (NULL);
CREATE FUNCTION pg_temp.step(_rows integer) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
    v_step record;
BEGIN
    SELECT p.* INTO v_step FROM walk, _sluice.purge_vanished_databases(walk.place, _rows, pg_temp.far()) AS p;
    UPDATE walk SET place = v_step.place;
    RETURN format('%s, %s', v_step.deleted, CASE WHEN v_step.is_over THEN 'over' ELSE 'more' END);
END $$;
SELECT is(pg_temp.step(15), '15, more', 'a batch of what they left');
SELECT is(pg_temp.step(15), '15, more', 'and another');
SELECT is(pg_temp.step(40), '40, more', 'runs and pauses alike');
SELECT is(pg_temp.step(40), '10, over', 'the rest');
SELECT is(
    (SELECT string_agg(format('%s %s', c.name, c.n), ', ' ORDER BY c.name) FROM (SELECT name, count(*) AS n FROM _sluice.queue GROUP BY name) AS c),
    'n 20, runs 1', 'what is queued for members stays, and what runs is settled by the leader'
);
SELECT is((SELECT array_agg(DISTINCT db_oid) FROM _sluice.pause), ARRAY[:own]::oid[], 'and the pauses of databases that are there');
DELETE FROM _sluice.member;
SELECT is(pg_temp.step(100), '20, over', 'runs go with the membership');
SELECT is((SELECT count(*) FROM _sluice.pause), 20::bigint, 'pauses do not');

-- Which tasks are done here
CREATE OR REPLACE FUNCTION _sluice.control_database() RETURNS text LANGUAGE sql AS 'SELECT current_database()::text';
DO $$BEGIN WHILE (SELECT is_due FROM _sluice.upkeep()) LOOP END LOOP; END$$;
SELECT is((SELECT count(*) FROM _sluice.upkeep WHERE last_at IS NOT NULL), 5::bigint, 'in the control database all tasks have their turn');
SELECT is((SELECT count(*) FROM _sluice.upkeep WHERE error IS NOT NULL), 0::bigint, 'and none fails');
\ir finish.psql
