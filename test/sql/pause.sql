-- Pause: in the control database, and as users see it over the control connection.
\ir setup.psql
SELECT plan(49);

SELECT epoch FROM _sluice.acquire_lease(pg_backend_pid(), now(), 3600) \gset
SELECT pid, backend_start FROM pg_stat_activity WHERE pid = pg_backend_pid() \gset
CREATE FUNCTION pg_temp.nodes(VARIADIC _pgt_ids bigint[]) RETURNS jsonb LANGUAGE sql AS $$
    SELECT jsonb_agg(jsonb_build_object('pgt_id', n, 'name', 'n' || n)) FROM unnest(_pgt_ids) AS n
$$;
CREATE FUNCTION pg_temp.pause(_db_oid oid, _nodes jsonb, _requested_by text) RETURNS void LANGUAGE sql AS $$
    SELECT _sluice.request_pause(_db_oid, _nodes, _requested_by, a.pid, a.backend_start) FROM pg_stat_activity AS a WHERE a.pid = pg_backend_pid()
$$;

-- All or none, up to a capacity
SELECT is(pg_temp.error_of($$SELECT pg_temp.pause(1, pg_temp.nodes(1, 2), 'somebody')$$), NULL, 'nodes are paused');
SELECT is(pg_temp.error_of($$SELECT pg_temp.pause(1, pg_temp.nodes(2, 3), 'other')$$), NULL, 'also together with one that is');
SELECT is(pg_temp.error_of($$SELECT pg_temp.pause(1, pg_temp.nodes(2, 3), 'other')$$), NULL, 'and all again');
SELECT is(pg_temp.error_of($$SELECT pg_temp.pause(2, pg_temp.nodes(2), 'other')$$), NULL, 'a node of another database is another node');
SELECT results_eq(
    'SELECT pgt_id, name, requested_by FROM _sluice.pause WHERE db_oid = 1 ORDER BY pgt_id',
    $$VALUES (1::bigint, 'n1', 'somebody'), (2, 'n2', 'somebody'), (3, 'n3', 'other')$$,
    'one entry a node, under who asked first'
);
SELECT _sluice.store_setting('cluster', 'max_pause_entries', '4') \g /dev/null
SELECT is(
    pg_temp.error_of($$SELECT pg_temp.pause(1, pg_temp.nodes(3, 4, 5), 'other')$$),
    E'53400: too many paused nodes\nDETAIL: A database can have 4 paused nodes (max_pause_entries).\n'
    'HINT: End some with sluice.unpause(), or use sluice.drain() to stop the whole database.',
    'beyond the capacity of a database it is an error'
);
SELECT is((SELECT count(*) FROM _sluice.pause WHERE db_oid = 1), 3::bigint, 'and nothing of it is stored');
SELECT is(pg_temp.error_of($$SELECT pg_temp.pause(1, pg_temp.nodes(4), 'other')$$), NULL, 'what fits is stored');
SELECT is(pg_temp.error_of($$SELECT pg_temp.pause(1, pg_temp.nodes(1, 4), 'other')$$), NULL, 'a full database can pause again what is paused');
SELECT is(pg_temp.error_of($$SELECT pg_temp.pause(2, pg_temp.nodes(1), 'other')$$), NULL, 'each database has its own capacity');

-- Waiting for just these nodes
SELECT _sluice.store_setting('cluster', 'max_pause_entries', NULL) \g /dev/null
INSERT INTO _sluice.queue (db_oid, pgt_id, name, rank, due_at) VALUES (1, 7, 'n7', now(), now()), (1, 8, 'n8', now(), now());
SELECT run_id FROM _sluice.next_run(:epoch, NULL, 1, NULL) \gset
SELECT _sluice.request_pause(1, pg_temp.nodes(7, 8), 'x', :pid, :'backend_start'), _sluice.request_pause(2, pg_temp.nodes(7), 'x', :pid, :'backend_start') \g /dev/null
SELECT is(_sluice.check_pause(1, '{1,7}'), false, 'a pause waits for a run of its nodes');
SELECT is(_sluice.check_pause(1, '{1,8}'), true, 'not for one that is queued, nor for other nodes');
SELECT is(_sluice.check_pause(2, '{7}'), true, 'nor for the node of another database that has its pgt_id');
SELECT * FROM _sluice.next_run(:epoch, :'run_id', NULL, NULL) \g /dev/null
SELECT is(_sluice.check_pause(1, '{1,7}'), true, 'only until it ends');
SELECT is(_sluice.check_pause(1, '{1,6}'), NULL, 'one that is not paused: the wait is over without it');
SELECT is(
    (SELECT run_id FROM _sluice.next_run(:epoch, NULL, 1, NULL)), NULL, 'what is queued of a paused node is not claimed'
);
SELECT _sluice.database_oid() AS here \gset
SELECT _sluice.request_pause(:here, pg_temp.nodes(7), 'x', :pid, :'backend_start') \g /dev/null
SELECT pg_advisory_lock(_sluice.lock_class('node'), 7) \g /dev/null
SELECT is(_sluice.check_pause(:here, '{7}'), false, 'a manual refresh is waited for too');
SELECT pg_advisory_unlock(_sluice.lock_class('node'), 7) \g /dev/null
SELECT is(_sluice.check_pause(:here, '{7}'), true, 'only until it ends');
SELECT _sluice.end_pause(:here, '{7}'), _sluice.end_pause(2, '{7}'), _sluice.end_pause(1, '{7,8}') \g /dev/null

-- The end
SELECT is(_sluice.end_pause(1, '{1,2,99}'), 2, 'ending gives how many were paused');
SELECT is((SELECT string_agg(db_oid || ':' || pgt_id, ' ' ORDER BY db_oid, pgt_id) FROM _sluice.pause), '1:3 1:4 2:1 2:2', 'and ends just those');

-- Withdrawal
CREATE FUNCTION pg_temp.paused() RETURNS text LANGUAGE sql AS $$
    SELECT string_agg(p.pgt_id::text, ' ' ORDER BY p.pgt_id) FROM _sluice.pause AS p
$$;
DELETE FROM _sluice.pause;
SELECT _sluice.request_pause(1, pg_temp.nodes(1, 1, 2), 'x', :pid, :'backend_start'), _sluice.request_pause(1, pg_temp.nodes(2), 'y', 2147483647, '2024-01-01'), _sluice.keep_pause(1, '{2}'),
    _sluice.request_pause(1, pg_temp.nodes(1, 3), 'x', 2147483647, '2024-01-01') \g /dev/null
SELECT is(
    (SELECT string_agg(pgt_id::text, ' ' ORDER BY pgt_id) FROM _sluice.pause_in_force), '1 2', 'a vanished session''s pause is not in force'
);
SELECT _sluice.end_abandoned_pauses() \g /dev/null
SELECT is(pg_temp.paused(), '1 2', 'and is taken away, but for what another waits for');
SELECT _sluice.withdraw_pause(1, :pid, :'backend_start') \g /dev/null
SELECT is(pg_temp.paused(), '2', 'as is what a cancelled call paused, but for what another was told to keep');
SELECT _sluice.request_pause(1, pg_temp.nodes(4), 'x', :pid, :'backend_start') \g /dev/null
SELECT _sluice.keep_pause(1, '{4}'), _sluice.withdraw_pause(1, :pid, :'backend_start') \g /dev/null
SELECT is(pg_temp.paused(), '2 4', 'what was not reached in time stays');
SELECT is((SELECT string_agg(pgt_id::text, ' ' ORDER BY pgt_id) FROM _sluice.pause_in_force), '2 4', 'in force');
SELECT _sluice.request_pause(1, pg_temp.nodes(5), 'x', :pid, :'backend_start') \g /dev/null
SELECT _sluice.check_pause(1, '{5}'), _sluice.withdraw_pause(1, :pid, :'backend_start') \g /dev/null
SELECT is(pg_temp.paused(), '2 4 5', 'and so does what had its answer');
SELECT _sluice.request_pause(1, pg_temp.nodes(6), 'x', :pid, :'backend_start'), _sluice.request_pause(1, pg_temp.nodes(6), 'y', 2147483647, '2024-01-01') \g /dev/null
SELECT _sluice.withdraw_pause(1, :pid, :'backend_start') \g /dev/null
SELECT is(pg_temp.paused(), '2 4 5', 'two that wait for one pause and are both gone leave none');
DELETE FROM _sluice.pause;
SELECT _sluice.request_pause(1, pg_temp.nodes(1), 'x', :pid, :'backend_start'), _sluice.request_pause(2, pg_temp.nodes(2), 'x', :pid, :'backend_start'),
    _sluice.request_pause(1, pg_temp.nodes(2), 'x', :pid, '2024-01-01') \g /dev/null
SELECT is(
    (SELECT string_agg(db_oid || ':' || pgt_id, ' ' ORDER BY db_oid) FROM _sluice.pause_in_force), '1:1 2:2',
    'nor does a session that has the number of a gone one by now and waits for other nodes'
);
SELECT _sluice.request_pause(1, pg_temp.nodes(2), 'next', :pid, :'backend_start') \g /dev/null
SELECT is((SELECT requested_by FROM _sluice.pause WHERE db_oid = 1 AND pgt_id = 2), 'next', 'whoever pauses next does not join that');
DELETE FROM _sluice.pause;
SELECT _sluice.request_pause(1, pg_temp.nodes(1, 2), 'x', :pid, :'backend_start'), _sluice.request_pause(2, pg_temp.nodes(1, 2), 'x', :pid, :'backend_start') \g /dev/null
SELECT _sluice.keep_pause(2, '{2}'), _sluice.check_pause(1, '{1}') \g /dev/null
SELECT is(
    (SELECT string_agg(db_oid || ':' || pgt_id, ' ' ORDER BY db_oid, pgt_id) FROM _sluice.pause WHERE stays), '1:1 2:2',
    'an answer, or a call that ends without one, is for its own nodes'
);
SELECT _sluice.withdraw_pause(1, :pid, '2024-01-01'), _sluice.withdraw_pause(1, 2147483647, :'backend_start') \g /dev/null
SELECT is((SELECT count(*) FROM _sluice.pause_in_force), 4::bigint, 'another session does not withdraw a pause');
DELETE FROM _sluice.pause;

-- As users see it
CREATE TABLE src (id integer);
SELECT sluice.create_stream_table('t', 'SELECT id FROM src', 'manual') \g /dev/null
SELECT sluice.create_stream_table('"Other"', 'SELECT id FROM src', 'manual') \g /dev/null
SELECT sluice.schedule('nightly job', 'manual', 'SELECT 1') \g /dev/null
SELECT sluice.schedule('job', 'manual', 'SELECT 1') \g /dev/null
SELECT is(sluice.pause('{t,job}'), 'paused', 'pause(): nothing runs');
SELECT is(sluice.pause(ARRAY['public."Other"', 't', 't']), 'paused', 'by any name, and twice the same');
SELECT is(pg_temp.error_of($$SELECT sluice.pause('{nightly job}')$$), NULL, 'also a job whose name is no identifier');
SELECT is(sluice.unpause(ARRAY['t', '"Other"', 'job']), 3, 'unpause(): how many were');
SELECT is(sluice.unpause('{t}'), 0, 'none when it was not');
SELECT is(
    pg_temp.error_of($$SELECT sluice.pause('{t,nowhere}')$$),
    E'42704: node "nowhere" does not exist\nHINT: The view sluice.nodes lists what is scheduled in this database.',
    'an unknown name is an error'
);
SELECT is(sluice.unpause('{t}'), 0, 'and then nothing was paused');
SELECT throws_ok('SELECT sluice.pause(NULL)', '22004', 'nodes must not be null', 'NULL for the nodes');
SELECT throws_ok('SELECT sluice.unpause(NULL)', '22004', 'nodes must not be null', 'likewise');
SELECT throws_ok($$SELECT sluice.pause('{t,NULL}')$$, '22004', 'nodes must not contain nulls', 'NULL among the nodes');
SELECT is(pg_temp.error_of($$SELECT sluice.pause('{}')$$), NULL, 'no nodes');
SELECT is(
    pg_temp.error_of('SELECT sluice.pause(array_fill(''nowhere''::text, ''{101}''))'),
    E'54000: too many nodes: 101\nDETAIL: One call takes at most 100 (max_pause_nodes).',
    'too many for a call, seen before any name is looked up'
);
SELECT throws_ok($$SELECT sluice.pause('{src}')$$, '42704', 'node "src" does not exist', 'a table that is no node');
SELECT sluice.refresh_stream_table('t') \g /dev/null
SELECT is(
    pg_temp.error_of($$SELECT sluice.pause('{t}', '0 s')$$),
    E'55006: cannot wait for the run of "public.t" from within it\nHINT: Pass wait => false. A refresh by hand ends with its transaction.',
    'a refresh in the same transaction can''t be waited for'
);
SELECT is(sluice.pause('{job}'), 'paused', 'which is no matter for other nodes');
SELECT is(sluice.pause('{t}', wait => false), 'pausing', 'nor without a wait');
SELECT is(sluice.unpause('{t}'), 1, 'and the pause stays in force');
SELECT throws_ok($$SELECT sluice.pause('{t}', '-1 s')$$, '22023', NULL, 'a negative timeout is an error');
\ir finish.psql
