-- Drain: in the control database, and as users see it over the control connection.
\ir setup.psql
SELECT plan(57);

INSERT INTO _sluice.member (db_oid, joined_by) VALUES (1, 'test'), (2, 'test');
SELECT epoch FROM _sluice.acquire_lease(pg_backend_pid(), now(), 3600) \gset
SELECT pid, backend_start FROM pg_stat_activity WHERE pid = pg_backend_pid() \gset
CREATE FUNCTION pg_temp.rows(_db_oid oid) RETURNS TABLE (scope text, state text, active bigint, waiting_for text) LANGUAGE sql AS $$
    SELECT r.scope, r.state, r.active, r.waiting_for
    FROM jsonb_to_recordset(_sluice.drain_rows(_db_oid)) AS r (scope text, state text, active bigint, waiting_for text)
$$;
INSERT INTO _sluice.queue (db_oid, pgt_id, name, rank, due_at) VALUES (1, 5, 'n5', now(), now()), (1, 6, 'n6', now(), now()), (2, 5, 'm5', now(), now());
SELECT run_id FROM _sluice.next_run(:epoch, NULL, 1, 1) \gset

-- Requests
SELECT is(_sluice.check_drain(1), NULL, 'no request, no answer');
SELECT is_empty('SELECT 1 FROM pg_temp.rows(1)', 'and no row');
SELECT _sluice.request_drain(1, 'somebody', :pid, :'backend_start') \g /dev/null
SELECT results_eq('SELECT db_oid::integer, requested_by, stays FROM _sluice.drain', $$VALUES (1, 'somebody', false)$$, 'a request');
SELECT _sluice.request_drain(1, 'somebody else', 2147483647, '2024-01-01'), _sluice.keep_drain(1) \g /dev/null
SELECT results_eq('SELECT requested_by, stays FROM _sluice.drain', $$VALUES ('somebody', true)$$, 'a second one joins it, and this one wants it to stay');
SELECT is((SELECT requested_by FROM _sluice.drain), 'somebody', 'and changes nothing');
SELECT ok(_sluice.is_draining(1), 'it is in force from then on');
SELECT ok(NOT _sluice.is_draining(2), 'for its database');
SELECT is(_sluice.check_drain(1), false, 'while something runs the answer is false');
SELECT results_eq('SELECT * FROM pg_temp.rows(1)', $$VALUES ('database', 'draining', 1::bigint, 'run of "n5"')$$, 'and its row says what');
SELECT results_eq('SELECT db_oid FROM _sluice.waiting_databases()', 'VALUES (2::oid)', 'a database that drains gets no worker');
SELECT throws_ok($$INSERT INTO _sluice.drain (db_oid, requested_by) VALUES (1, 'x')$$, '23505', NULL, 'there is one request for a scope');

-- Drained
SELECT * FROM _sluice.next_run(:epoch, :'run_id', 1, NULL) \g /dev/null
SELECT is(_sluice.check_drain(1), true, 'when nothing runs the answer is true, whatever is queued');
SELECT results_eq(
    'SELECT drained_at IS NOT NULL FROM _sluice.drain',
    'VALUES (true)',
    'it is on record, and outlives its requester'
);
SELECT _sluice.withdraw_drain(1, :pid, :'backend_start'), _sluice.end_abandoned_drains() \g /dev/null
SELECT drained_at FROM _sluice.drain \gset
SELECT is(_sluice.check_drain(1), true, 'no cancellation can take it back');
SELECT is((SELECT drained_at FROM _sluice.drain), :'drained_at', 'nor another look its time');
SELECT _sluice.end_drain(1), _sluice.end_drain(1) \g /dev/null
SELECT is(_sluice.check_drain(1), NULL, 'only resume() can, as often as it is called');

-- A manual refresh
SELECT pg_advisory_lock(_sluice.lock_class('node'), 9) \g /dev/null
SELECT _sluice.request_drain(d.oid, 'somebody', :pid, :'backend_start') FROM pg_database AS d WHERE d.datname = current_database() \g /dev/null
SELECT results_eq(
    'SELECT r.state, r.waiting_for FROM pg_database AS d, pg_temp.rows(d.oid) AS r WHERE d.datname = current_database()',
    format($$VALUES ('draining', 'manual refresh by process %s')$$, :pid),
    'a manual refresh is waited for'
);
SELECT _sluice.database_oid() AS here \gset
INSERT INTO _sluice.queue (db_oid, pgt_id, name, rank, due_at, state, epoch, started_at)
VALUES (:here, 9, 'n9', now(), now(), 'queued', NULL, NULL), (:here, 8, 'n8', now(), now(), 'running', :epoch, now()), (1, 9, 'm9', now(), now(), 'running', :epoch, now());
SELECT is(
    (SELECT waiting_for FROM pg_temp.rows(:here)), 'manual refresh by process ' || :pid || ', run of "n8"',
    'whatever else runs, in this database or another, and though the node is queued'
);
SELECT is((SELECT string_agg(obstacle, ', ') FROM _sluice.obstacles(1, NULL)), 'run of "m9"', 'which is none of the other''s');
UPDATE _sluice.queue SET state = 'running', epoch = :epoch, started_at = now() WHERE name = 'n9';
SELECT is((SELECT waiting_for FROM pg_temp.rows(:here)), 'run of "n8", run of "n9"', 'a run holds that lock too, and counts once');
UPDATE _sluice.queue SET epoch = :epoch - 1 WHERE name IN ('n8', 'n9');
SELECT is((SELECT waiting_for FROM pg_temp.rows(:here)), 'manual refresh by process ' || :pid, 'one whose session is gone holds it no more: somebody else does');
DELETE FROM _sluice.queue WHERE name IN ('n8', 'n9', 'm9');
SELECT pg_advisory_unlock(_sluice.lock_class('node'), 9) \g /dev/null
SELECT results_eq(
    'SELECT r.state, r.waiting_for FROM pg_database AS d, pg_temp.rows(d.oid) AS r WHERE d.datname = current_database()',
    $$VALUES ('drained', NULL::text)$$,
    'until it ends'
);
DELETE FROM _sluice.drain;

-- The whole server
SELECT _sluice.request_drain(0, 'somebody', :pid, :'backend_start') \g /dev/null
SELECT ok(_sluice.is_draining(1) AND _sluice.is_draining(2), 'a drain of the server holds for every database');
SELECT is(_sluice.check_drain(2), NULL, 'and is no drain of a database');
SELECT is((SELECT scope FROM pg_temp.rows(2)), 'cluster', 'each shows it');
SELECT _sluice.end_drain(2) \g /dev/null
SELECT ok(_sluice.is_draining(2), 'ending a database''s drain does not end it');
UPDATE _sluice.queue SET state = 'running', epoch = :epoch, started_at = now();
SELECT is(_sluice.check_drain(0), false, 'a run in any database keeps it draining');
SELECT _sluice.end_drain(0) \g /dev/null
SELECT ok(NOT _sluice.is_draining(2), 'ending it does');

-- Withdrawal
SELECT _sluice.request_drain(2, 'somebody', :pid, :'backend_start') \g /dev/null
SELECT _sluice.withdraw_drain(2, :pid, '2024-01-01'), _sluice.withdraw_drain(2, 2147483647, :'backend_start') \g /dev/null
SELECT is(_sluice.check_drain(2), false, 'another session does not withdraw a request');
SELECT _sluice.end_abandoned_drains() \g /dev/null
SELECT is(_sluice.check_drain(2), false, 'nor is it abandoned while its session is there');
SELECT _sluice.withdraw_drain(2, :pid, :'backend_start') \g /dev/null
SELECT is(_sluice.check_drain(2), NULL, 'its own can');
SELECT _sluice.request_drain(2, 'somebody', 2147483647, '2024-01-01') \g /dev/null
SELECT is(_sluice.check_drain(2), NULL, 'a request whose session vanished is not in force');
SELECT is((SELECT count(*) FROM pg_temp.rows(2)), 0::bigint, 'shows nowhere');
SELECT _sluice.end_abandoned_drains() \g /dev/null
SELECT is_empty('SELECT * FROM _sluice.drain', 'and is taken away');
SELECT _sluice.request_drain(1, 'somebody', :pid, :'backend_start'), _sluice.request_drain(2, 'somebody', :pid, '2024-01-01') \g /dev/null
SELECT is(_sluice.check_drain(2), NULL, 'also where another session has its number by now, which waits for another request');
SELECT _sluice.request_drain(2, 'next', :pid, :'backend_start') \g /dev/null
SELECT is((SELECT requested_by FROM _sluice.drain WHERE db_oid = 2), 'next', 'whoever asks next does not join it');
SELECT _sluice.keep_drain(1) \g /dev/null
SELECT is((SELECT string_agg(db_oid::text, ' ') FROM _sluice.drain WHERE stays), '1', 'a call that ends without its answer keeps its own');
DELETE FROM _sluice.drain;
SELECT _sluice.request_drain(2, 'somebody', 2147483647, '2024-01-01'), _sluice.keep_drain(2), _sluice.end_abandoned_drains() \g /dev/null
SELECT is(_sluice.check_drain(2), false, 'one that was kept at its timeout is not');
DELETE FROM _sluice.drain;
SELECT _sluice.request_drain(2, 'first', 2147483647, '2024-01-01'), _sluice.request_drain(2, 'second', :pid, :'backend_start') \g /dev/null
SELECT _sluice.end_abandoned_drains() \g /dev/null
SELECT is(_sluice.check_drain(2), false, 'a request stays while one of two waits for it');
SELECT _sluice.withdraw_drain(2, :pid, :'backend_start') \g /dev/null
SELECT is(_sluice.check_drain(2), NULL, 'and goes with the last');
DELETE FROM _sluice.drain;

-- As users see it
CREATE TABLE src (id integer);
SELECT sluice.create_stream_table('t', 'SELECT id FROM src', 'manual') \g /dev/null
SELECT is(sluice.is_drained(), NULL, 'is_drained(): no request');
SELECT is(sluice.drain(), 'drained', 'drain(): nothing runs');
SELECT is(sluice.is_drained(), true, 'is_drained(): verified');
SELECT results_eq(
    'SELECT scope, state, requested_by, requested_at <= drained_at, active, waiting_for FROM sluice.drain_status()',
    $$VALUES ('database', 'drained', 'postgres', true, 0::bigint, NULL::text)$$,
    'drain_status()'
);
SELECT is(
    pg_temp.error_of($$SELECT sluice.refresh_stream_table('t')$$),
    E'55000: cannot refresh stream table "t" while the database drains or is drained\n'
    'HINT: End the drain with sluice.resume(), or pass force => true.',
    'a manual refresh is refused'
);
SELECT isnt(pg_temp.error_of($$SELECT sluice.refresh_stream_table('t', force => NULL)$$), NULL, 'NULL is no force');
SELECT is(sluice.refresh_stream_table('t', force => true), 'no_change', 'unless it is forced');
SELECT is(sluice.drain(wait => false), 'draining', 'which a drain sees, until that transaction ends');
SELECT is(
    pg_temp.error_of('SELECT sluice.drain()'),
    E'55006: cannot wait for the run of "public.t" from within it\nHINT: Pass wait => false. A refresh by hand ends with its transaction.',
    'and can''t wait for in that transaction'
);
SELECT is(
    (SELECT h.hint FROM sluice.health_check() AS h WHERE h."check" = 'drain'),
    'See sluice.drain_status(); end it with sluice.resume().',
    'health_check() says what ends it'
);
SELECT sluice.drain(wait => false, cluster => true) \g /dev/null
SELECT is(
    pg_temp.error_of($$SELECT sluice.refresh_stream_table('t')$$),
    E'55000: cannot refresh stream table "t" while the database drains or is drained\n'
    'HINT: End the drain with sluice.resume() and sluice.resume(cluster => true), or pass force => true.',
    'with one of the server besides, both calls'
);
SELECT lives_ok('SELECT sluice.resume()', 'resume()');
SELECT is(
    (SELECT h.hint FROM sluice.health_check() AS h WHERE h."check" = 'drain'),
    'See sluice.drain_status(); end it with sluice.resume(cluster => true).',
    'does not end that of the server, and health_check() says what does'
);
SELECT sluice.resume(cluster => true) \g /dev/null
SELECT is(
    (SELECT h.detail FROM sluice.health_check() AS h WHERE h."check" = 'drain'), 'none',
    'which ends it'
);
SELECT is(sluice.is_drained(), NULL, 'ends it, whatever its state');
SELECT throws_ok($$SELECT sluice.drain('-1 s')$$, '22023', NULL, 'a negative timeout is an error');
SELECT lives_ok('SELECT sluice.resume()', 'resume() without a drain does nothing');
\ir finish.psql
