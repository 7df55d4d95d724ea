-- Where runs wait for a worker, and how many: what the dispatcher of the control database goes by.
\ir setup.psql
SELECT plan(9);

INSERT INTO _sluice.member (db_oid, joined_by) VALUES (1, 'test'), (2, 'test');
SELECT epoch FROM _sluice.acquire_lease(pg_backend_pid(), now(), 3600) \gset
CREATE FUNCTION pg_temp.waiting() RETURNS text LANGUAGE sql AS $$
    SELECT string_agg(format('%s: %s', w.db_oid, w.runs), ', ' ORDER BY w.db_oid) FROM _sluice.waiting_databases() AS w
$$;
SELECT is(pg_temp.waiting(), NULL, 'an empty queue');
INSERT INTO _sluice.queue (db_oid, pgt_id, name, rank, due_at)
SELECT d, n, format('n%s', n), now(), now() FROM generate_series(1, 3) AS d, generate_series(1, d + 1) AS n;
SELECT is(pg_temp.waiting(), '1: 2, 2: 3', 'members with queued runs, and how many');
SELECT pgt_id FROM _sluice.next_run(:epoch, NULL, 2, NULL) \g /dev/null
SELECT is(pg_temp.waiting(), '1: 2, 2: 2', 'what runs does not wait');
INSERT INTO _sluice.pause (db_oid, pgt_id, name, requested_by) VALUES (2, 2, 'n2', 'test');
SELECT is(pg_temp.waiting(), '1: 2, 2: 1', 'nor what is paused');
INSERT INTO _sluice.pause (db_oid, pgt_id, name, requested_by) VALUES (2, 3, 'n3', 'test');
SELECT is(pg_temp.waiting(), '1: 2', 'a database with nothing else does not wait');
DELETE FROM _sluice.pause;
INSERT INTO _sluice.drain (db_oid, requested_by) VALUES (1, 'test');
SELECT is(pg_temp.waiting(), '2: 2', 'nor one that drains');
UPDATE _sluice.drain SET db_oid = 0;
SELECT is(pg_temp.waiting(), NULL, 'while the server drains none does');
DELETE FROM _sluice.drain;
INSERT INTO _sluice.slot (slot, state, db_oid, epoch, deadline) VALUES (1, 'reserved', 1, :epoch, now()), (2, 'reserved', 1, :epoch, now());
SELECT results_eq(
    'SELECT db_oid, queued, running, held FROM _sluice.queued_by_database() ORDER BY db_oid',
    'VALUES (1::oid, 2::bigint, 0::bigint, 2::bigint), (2, 2, 1, 0)',
    'the counts by database, with the slots that it holds'
);
DELETE FROM _sluice.member WHERE db_oid = 2;
SELECT results_eq(
    'SELECT db_oid FROM _sluice.queued_by_database()', 'VALUES (1::oid)', 'just of members'
);
\ir finish.psql
