-- The worker slots of the control database: never more than the limit, freed only when the session is gone.
\ir setup.psql
SELECT plan(44);

SELECT epoch FROM _sluice.acquire_lease(pg_backend_pid(), now(), 3600) \gset
SELECT _sluice.store_setting('cluster', 'max_workers', '2') \g /dev/null
INSERT INTO _sluice.member (db_oid, joined_by) VALUES (1, 'somebody');
CREATE FUNCTION pg_temp.reserve() RETURNS integer LANGUAGE sql AS $$
    SELECT slot FROM _sluice.reserve_slot((SELECT epoch FROM _sluice.lease), 1)
$$;
CREATE FUNCTION pg_temp.nonce(_slot integer) RETURNS uuid LANGUAGE sql AS 'SELECT nonce FROM _sluice.slot WHERE slot = _slot';
-- What pg_stat_activity shows is kept for a transaction.
CREATE FUNCTION pg_temp.look_again() RETURNS void LANGUAGE sql AS 'SELECT pg_stat_clear_snapshot()';

-- The limit
SELECT results_eq(
    'SELECT ingredient, value FROM _sluice.limit_ingredients()',
    format($$VALUES ('max_workers', 2), ('max_parallel_workers', %s), ('hard_maximum', 64), ('connections', %s)$$,
        current_setting('max_parallel_workers'),
        current_setting('max_connections')::integer - current_setting('superuser_reserved_connections')::integer
            - COALESCE(current_setting('reserved_connections', true)::integer, 0) - 5),
    'what bounds the number of workers'
);
SELECT is(_sluice.worker_limit(), 2, 'the least of it is the limit');
SET LOCAL max_parallel_workers = 1;
SELECT is(_sluice.worker_limit(), 1, 'whichever that is');
SET LOCAL max_parallel_workers = 8;
SELECT _sluice.store_setting('cluster', 'connection_reserve', '1000') \g /dev/null
SELECT is(_sluice.worker_limit(), 0, 'a reserve that takes all connections leaves none, not less');
SELECT _sluice.store_setting('cluster', 'connection_reserve', NULL) \g /dev/null

-- free -> reserved
SELECT results_eq(
    format('SELECT slot, nonce IS NOT NULL, application_name = ''pg_sluice worker '' || nonce FROM _sluice.reserve_slot(%s, 1)', :epoch),
    'VALUES (1, true, true)',
    'a reservation, with the name that its session will carry'
);
SELECT results_eq(
    $$SELECT state, db_oid, epoch, pid, backend_start, deadline - since BETWEEN interval '9 s' AND interval '11 s' FROM _sluice.slot$$,
    format($$VALUES ('reserved', 1::oid, %s::bigint, NULL::integer, NULL::timestamptz, true)$$, :epoch),
    'it is its leader''s, has no session yet, and worker_start_timeout to get one'
);
SELECT is(pg_temp.reserve(), 2, 'a second');
SELECT is(pg_temp.reserve(), NULL, 'beyond the limit there is none');
SELECT is((SELECT count(*) FROM _sluice.slot), 2::bigint, 'reserved slots count');
SELECT throws_ok(
    format('SELECT * FROM _sluice.reserve_slot(%s, 1)', :epoch - 1), 'SL001', 'leadership lost', 'a former leader gets none'
);
SELECT _sluice.store_setting('cluster', 'max_workers', '3') \g /dev/null
SELECT is((SELECT slot FROM _sluice.reserve_slot(:epoch, 5)), NULL, 'nor does a database that is no member');
SELECT is((SELECT count(*) FROM _sluice.slot), 2::bigint, 'though there is a free one');
SELECT _sluice.store_setting('cluster', 'max_workers', '2') \g /dev/null

-- reserved -> live: this session stands for the worker of slot 1, nobody for that of slot 2
SELECT pid, backend_start FROM pg_stat_activity WHERE pid = pg_backend_pid() \gset
SELECT ok(_sluice.activate_slot(:epoch, pg_temp.nonce(1), :pid, :'backend_start'), 'a worker that has connected goes live');
SELECT results_eq(
    'SELECT state, pid FROM _sluice.slot WHERE slot = 1', format($$VALUES ('live', %s)$$, :pid), 'under its process'
);
SELECT ok(NOT _sluice.activate_slot(:epoch, pg_temp.nonce(1), :pid, :'backend_start'), 'once');
SELECT ok(NOT _sluice.activate_slot(:epoch, gen_random_uuid(), :pid, :'backend_start'), 'and only with a reservation');
SELECT throws_ok(
    format('SELECT _sluice.activate_slot(%s, pg_temp.nonce(2), 1, now())', :epoch - 1), 'SL001', 'leadership lost', 'not under a former leader'
);
SELECT is(pg_temp.reserve(), NULL, 'live slots count');
SELECT results_eq(
    $$SELECT r.slot, r.state, r.pid FROM jsonb_to_recordset(_sluice.worker_rows()) AS r (slot integer, state text, pid integer)$$,
    format($$VALUES (1, 'live', %s), (2, 'reserved', NULL)$$, :pid),
    'the rows of workers()'
);
INSERT INTO _sluice.queue (db_oid, pgt_id, name, state, rank, due_at, slot, epoch, started_at)
SELECT 5, n, 'run ' || n, 'running', now(), now(), 1, :epoch - 2 + n, now() FROM generate_series(1, 2) AS n;
SELECT results_eq(
    $$SELECT r.slot, r.name FROM jsonb_to_recordset(_sluice.worker_rows()) AS r (slot integer, name text)$$,
    $$VALUES (1, 'run 2'), (2, NULL)$$,
    'none of which is twice there, or has the run of a former leader'
);
DELETE FROM _sluice.queue;

-- live or reserved -> free
SELECT ok(NOT _sluice.release_slot(:epoch, pg_temp.nonce(1)), 'a slot whose session is there is not freed');
SELECT is((SELECT count(*) FROM _sluice.slot WHERE slot = 1), 1::bigint, 'it stays');
SELECT pg_temp.nonce(2) AS nonce \gset
SELECT throws_ok(
    format('SELECT _sluice.release_slot(%s, %L)', :epoch - 1, :'nonce'), 'SL001', 'leadership lost', 'a former leader frees none'
);
SELECT set_config('application_name', 'pg_sluice worker ' || :'nonce', true), pg_temp.look_again() \g /dev/null
SELECT ok(NOT _sluice.release_slot(:epoch, :'nonce'), 'nor a reservation that a session carries');
SELECT set_config('application_name', 'pgTAP', true), pg_temp.look_again() \g /dev/null
SELECT ok(_sluice.release_slot(:epoch, :'nonce'), 'one that no session carries is');
SELECT ok(_sluice.release_slot(:epoch, :'nonce'), 'and one that is free already');
SELECT is(pg_temp.reserve(), 2, 'its number is used again');
UPDATE _sluice.slot SET backend_start = backend_start - interval '1 s' WHERE slot = 1;
SELECT ok(_sluice.release_slot(:epoch, pg_temp.nonce(1)), 'another process under the same number is not the worker');

-- Reconciling
SELECT is(pg_temp.reserve(), 1, 'a reservation of the present leader');
UPDATE _sluice.slot SET deadline = '2024-01-01';
SELECT is(_sluice.reconcile_slots(:epoch), 0, 'stays though it is overdue and no session carries it: that leader frees it itself');
UPDATE _sluice.slot SET epoch = :epoch - 1, deadline = 'infinity';
SELECT is(_sluice.reconcile_slots(:epoch), 0, 'one of a former leader stays until it is overdue');
UPDATE _sluice.slot SET deadline = '2024-01-01';
SELECT set_config('application_name', 'pg_sluice worker ' || pg_temp.nonce(2), true), pg_temp.look_again() \g /dev/null
SELECT is(_sluice.reconcile_slots(:epoch), 1, 'then it is freed');
SELECT is((SELECT string_agg(slot::text, ',') FROM _sluice.slot), '2', 'unless a session carries its nonce');
SELECT set_config('application_name', 'pgTAP', true), pg_temp.look_again() \g /dev/null
SELECT is(_sluice.reconcile_slots(:epoch), 1, 'when that is gone it is freed');
-- The clock was set back
SELECT pg_temp.reserve() \g /dev/null
UPDATE _sluice.slot SET epoch = :epoch - 1, since = '2060-01-01', deadline = timestamptz '2060-01-01' + interval '10 s';
SELECT is(_sluice.reconcile_slots(:epoch), 0, 'a reservation that was made in the future stays too');
SELECT results_eq(
    $$SELECT since BETWEEN now() AND clock_timestamp(), deadline - since FROM _sluice.slot$$, $$VALUES (true, interval '10 s')$$,
    'and has its time from now on'
);
DELETE FROM _sluice.slot;
SELECT pg_temp.reserve(), pg_temp.reserve() \g /dev/null
SELECT _sluice.activate_slot(:epoch, pg_temp.nonce(1), 2147483647, '2024-01-01'), _sluice.activate_slot(:epoch, pg_temp.nonce(2), :pid, :'backend_start') \g /dev/null
SELECT is(_sluice.reconcile_slots(:epoch), 1, 'a live slot whose session is gone is freed at once, also the present leader''s');
SELECT is((SELECT string_agg(slot::text, ',') FROM _sluice.slot), '2', 'one whose session is there stays');
DELETE FROM _sluice.slot;
SELECT throws_ok(format('SELECT _sluice.reconcile_slots(%s)', :epoch - 1), 'SL001', 'leadership lost', 'not by a former leader');

-- A lower limit
SELECT pg_temp.reserve(), pg_temp.reserve() \g /dev/null
SELECT _sluice.store_setting('cluster', 'max_workers', '1') \g /dev/null
SELECT is((SELECT count(*) FROM _sluice.slot), 2::bigint, 'lowering the limit takes no slot away');
SELECT _sluice.release_slot(:epoch, pg_temp.nonce(1)) \g /dev/null
SELECT is(pg_temp.reserve(), NULL, 'but gives none until they are below it');

-- What a row can't be
SELECT throws_ok(
    $$INSERT INTO _sluice.slot (slot, state, db_oid, epoch, deadline) VALUES (65, 'reserved', 1, 1, now())$$, '23514', NULL, 'there are 64 at the most'
);
SELECT throws_ok(
    $$INSERT INTO _sluice.slot (slot, state, db_oid, epoch, deadline) VALUES (9, 'live', 1, 1, now())$$, '23514', NULL, 'a live slot has a session'
);
SELECT throws_ok(
    $$INSERT INTO _sluice.slot (slot, state, db_oid, epoch, deadline, pid, backend_start) VALUES (9, 'reserved', 1, 1, now(), 1, now())$$,
    '23514', NULL, 'a reserved one has none'
);
\ir finish.psql
