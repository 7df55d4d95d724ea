-- The queue of the control database: every transition, and every one that is refused.
\ir setup.psql
SELECT plan(80);

-- Databases of this test have OIDs that no database has.
INSERT INTO _sluice.member (db_oid, joined_by) VALUES (1, 'test'), (2, 'test');
SELECT epoch FROM _sluice.acquire_lease(pg_backend_pid(), now(), 3600) \gset
CREATE FUNCTION pg_temp.run(
    _pgt_id bigint, _priority integer DEFAULT 0, _upstream bigint[] DEFAULT '{}', _due_at timestamptz DEFAULT '2024-01-01'
)
RETURNS jsonb LANGUAGE sql AS $$
    SELECT jsonb_build_object('pgt_id', _pgt_id, 'name', 'n' || _pgt_id, 'priority', _priority, 'upstream', _upstream,
        'due_at', _due_at, 'attempt', 2, 'reason', 'why', 'options', '{"lock_timeout": 1}'::jsonb)
$$;
CREATE FUNCTION pg_temp.enqueue(VARIADIC _runs jsonb[]) RETURNS bigint[] LANGUAGE sql AS $$
    SELECT queued FROM _sluice.enqueue((SELECT epoch FROM _sluice.lease), 1, to_jsonb(_runs))
$$;
CREATE FUNCTION pg_temp.id(_pgt_id bigint) RETURNS uuid LANGUAGE sql AS $$
    SELECT run_id FROM _sluice.queue WHERE db_oid = 1 AND pgt_id = _pgt_id
$$;
-- The node that is claimed next, as often as there is one; it keeps running.
CREATE FUNCTION pg_temp.claim(_finished bigint DEFAULT NULL) RETURNS bigint LANGUAGE sql AS $$
    SELECT pgt_id FROM _sluice.next_run((SELECT epoch FROM _sluice.lease), pg_temp.id(_finished), 1, NULL)
$$;
CREATE FUNCTION pg_temp.clear() RETURNS void LANGUAGE sql AS 'DELETE FROM _sluice.queue; DELETE FROM _sluice.pause; DELETE FROM _sluice.drain';

-- (none) -> queued
SELECT is(pg_temp.enqueue(pg_temp.run(10), pg_temp.run(11)), ARRAY[10, 11]::bigint[], 'enqueue gives the nodes whose run was added');
SELECT results_eq(
    $$SELECT state, name, priority, due_at, attempt, reason, options, slot, epoch, started_at FROM _sluice.queue WHERE pgt_id = 10$$,
    $$VALUES ('queued', 'n10', 0, timestamptz '2024-01-01', 2, 'why', '{"lock_timeout": 1}'::jsonb, NULL::integer, NULL::bigint, NULL::timestamptz)$$,
    'a queued run'
);
SELECT is(pg_temp.enqueue(pg_temp.run(10), pg_temp.run(12)), ARRAY[12]::bigint[], 'a node that is queued already is not added again');
SELECT is((SELECT queued FROM _sluice.enqueue(:epoch, 2, jsonb_build_array(pg_temp.run(10)))), ARRAY[10]::bigint[], 'the same number in another database is another node');
SELECT is((SELECT queued FROM _sluice.enqueue(:epoch, 1, '[]')), '{}'::bigint[], 'nothing to add');
SELECT is(
    pg_temp.error_of(format('SELECT _sluice.enqueue(%s, 1, jsonb_build_array(pg_temp.run(13)))', :epoch - 1)),
    format(E'SL001: leadership lost\nDETAIL: The lease of epoch %s has ended or another leader holds it.', :epoch - 1),
    'a former leader can''t enqueue'
);

-- queued -> running
SELECT results_eq(
    format('SELECT pgt_id, name, due_at, attempt, reason, options FROM _sluice.next_run(%s, NULL, 1, 7)', :epoch),
    $$VALUES (10::bigint, 'n10', timestamptz '2024-01-01', 2, 'why', '{"lock_timeout": 1}'::jsonb)$$,
    'a claim gives the run'
);
SELECT results_eq(
    'SELECT state, slot, epoch, started_at IS NOT NULL FROM _sluice.queue WHERE db_oid = 1 AND pgt_id = 10',
    format($$VALUES ('running', 7, %s::bigint, true)$$, :epoch),
    'and puts down who runs it'
);
SELECT is(pg_temp.enqueue(pg_temp.run(10)), '{}'::bigint[], 'a node that runs is not queued');
SELECT throws_ok(
    format('SELECT * FROM _sluice.next_run(%s, NULL, 1, NULL)', :epoch - 1), 'SL001', 'leadership lost', 'a former leader can''t claim'
);
SELECT is(pg_temp.claim(), 11::bigint, 'the next in line');
SELECT is(pg_temp.claim(), 12::bigint, 'and the next');
SELECT is(pg_temp.claim(), NULL, 'an empty queue gives no row');

-- running -> (none)
SELECT pg_temp.enqueue(pg_temp.run(14)) \g /dev/null
SELECT throws_ok(
    format('SELECT * FROM _sluice.next_run(%s, pg_temp.id(10), 1, NULL)', :epoch - 1), 'SL001', 'leadership lost', 'a former leader can''t finish'
);
SELECT isnt(pg_temp.id(10), NULL, 'so that run stays');
SELECT is(pg_temp.claim(10), 14::bigint, 'one call finishes a run and claims the next');
SELECT is(pg_temp.id(10), NULL, 'the finished one is gone');
SELECT is_empty(format('SELECT 1 FROM _sluice.next_run(%s, pg_temp.id(14), NULL, NULL)', :epoch), 'without a database it only finishes');
SELECT is(pg_temp.id(14), NULL, 'it did');
SELECT is(pg_temp.enqueue(pg_temp.run(10)), ARRAY[10]::bigint[], 'a finished node can be queued again');

-- Who comes first
SELECT pg_temp.clear() \g /dev/null
SELECT pg_temp.enqueue(pg_temp.run(1), pg_temp.run(2, 5), pg_temp.run(3, 5), pg_temp.run(4, -5)) \g /dev/null
SELECT is(
    ARRAY[pg_temp.claim(), pg_temp.claim(), pg_temp.claim(), pg_temp.claim()], ARRAY[2, 3, 1, 4]::bigint[], 'priority, and then who came first'
);
SELECT pg_temp.clear() \g /dev/null
SELECT pg_temp.enqueue(pg_temp.run(1, 0), pg_temp.run(2, 3), pg_temp.run(3, 2)) \g /dev/null
UPDATE _sluice.queue SET rank = rank - interval '25 s' WHERE pgt_id = 1;
SELECT is(
    ARRAY[pg_temp.claim(), pg_temp.claim(), pg_temp.claim()], ARRAY[2, 1, 3]::bigint[],
    'a run that waits ages: ten seconds are worth a step of priority'
);
SELECT pg_temp.clear() \g /dev/null
SELECT pg_temp.enqueue(pg_temp.run(1), pg_temp.run(2)) \g /dev/null
UPDATE _sluice.queue SET not_before = 'infinity' WHERE pgt_id = 1;
SELECT is(ARRAY[pg_temp.claim(), pg_temp.claim()], ARRAY[2, NULL]::bigint[], 'not before its time');
UPDATE _sluice.queue SET not_before = now() WHERE pgt_id = 1;
SELECT is(pg_temp.claim(), 1::bigint, 'from then on');

SELECT pg_temp.clear() \g /dev/null
SELECT pg_temp.enqueue(pg_temp.run(3, _due_at => '2024-01-03'), pg_temp.run(1, _due_at => '2024-01-01'), pg_temp.run(2, _due_at => '2024-01-02')) \g /dev/null
SELECT is(
    ARRAY[pg_temp.claim(), pg_temp.claim(), pg_temp.claim()], ARRAY[3, 1, 2]::bigint[],
    'runs that were queued together keep their order, which is the tick''s'
);

-- Upstream first
SELECT pg_temp.clear() \g /dev/null
SELECT pg_temp.enqueue(pg_temp.run(1, -100), pg_temp.run(2, 100, '{1}')) \g /dev/null
SELECT is(ARRAY[pg_temp.claim(), pg_temp.claim()], ARRAY[1, NULL]::bigint[], 'a node waits for its upstream, while that is queued and while it runs');
SELECT is(pg_temp.claim(1), 2::bigint, 'and no longer');
SELECT pg_temp.clear() \g /dev/null
SELECT pg_temp.enqueue(pg_temp.run(1, _due_at => '2024-01-02'), pg_temp.run(2, _upstream => '{1}')) \g /dev/null
SELECT is(pg_temp.claim(), 1::bigint, 'also when the upstream is due later than its reader');
SELECT pg_temp.clear() \g /dev/null
SELECT pg_temp.enqueue(pg_temp.run(1), pg_temp.run(2, _upstream => '{1}')) \g /dev/null
INSERT INTO _sluice.pause (db_oid, pgt_id, name, requested_by) VALUES (1, 1, 'n1', 'test');
SELECT is(ARRAY[pg_temp.claim(), pg_temp.claim()], ARRAY[2, NULL]::bigint[], 'a paused upstream is not waited for, nor claimed');
SELECT pg_temp.clear() \g /dev/null
SELECT pg_temp.enqueue(pg_temp.run(2, _upstream => '{1}')), pg_temp.enqueue(pg_temp.run(1, _upstream => '{2}')) \g /dev/null
SELECT is(pg_temp.claim(), 2::bigint, 'two nodes never wait for each other');
SELECT pg_temp.clear() \g /dev/null
SELECT pg_temp.enqueue(pg_temp.run(2, 0, '{1}'), pg_temp.run(1, 5)) \g /dev/null
SELECT is(ARRAY[pg_temp.claim(), pg_temp.claim()], ARRAY[1, NULL]::bigint[], 'but an upstream that runs is waited for, whoever came first');

-- Drained and paused
SELECT pg_temp.clear() \g /dev/null
SELECT pg_temp.enqueue(pg_temp.run(1), pg_temp.run(2), pg_temp.run(3)) \g /dev/null
SELECT pg_temp.claim() \g /dev/null
INSERT INTO _sluice.drain (db_oid, requested_by) VALUES (1, 'test');
SELECT is(pg_temp.claim(1), NULL, 'while the database drains none can be claimed');
SELECT is(pg_temp.id(1), NULL, 'but a run can finish');
UPDATE _sluice.drain SET db_oid = 0;
SELECT is(pg_temp.claim(), NULL, 'nor while the server drains');
UPDATE _sluice.drain SET db_oid = 2;
SELECT is(pg_temp.claim(), 2::bigint, 'another database''s drain is its own');
SELECT pg_temp.clear() \g /dev/null
SELECT pg_temp.enqueue(pg_temp.run(1, -100), pg_temp.run(2, 100, '{1}')) \g /dev/null
INSERT INTO _sluice.pause (db_oid, pgt_id, name, requested_by) VALUES (1, 3, 'n3', 'test'), (2, 1, 'n1', 'test'), (2, 2, 'n2', 'test');
SELECT is(ARRAY[pg_temp.claim(), pg_temp.claim()], ARRAY[1, NULL]::bigint[], 'so is a pause there, and each node''s is its own, also that of an upstream');
SELECT pg_temp.clear(), _sluice.enqueue(:epoch, 2, jsonb_build_array(pg_temp.run(1))), pg_temp.enqueue(pg_temp.run(2, _upstream => '{1}')) \g /dev/null
SELECT is(pg_temp.claim(), 2::bigint, 'nor is a node there the upstream that has its number');

-- max_queue_depth
SELECT pg_temp.clear() \g /dev/null
SELECT _sluice.store_setting('cluster', 'max_queue_depth', '2') \g /dev/null
-- Those of another database take no place.
SELECT _sluice.enqueue(:epoch, 2, jsonb_build_array(pg_temp.run(1), pg_temp.run(2))) \g /dev/null
SELECT is(
    pg_temp.enqueue(pg_temp.run(1, _due_at => '2024-01-03'), pg_temp.run(2, _due_at => '2024-01-01'), pg_temp.run(3, _due_at => '2024-01-02')),
    ARRAY[1, 2]::bigint[], 'a full queue takes the first ones of the tick''s order, whenever they were due'
);
SELECT pg_temp.clear() \g /dev/null
SELECT pg_temp.enqueue(pg_temp.run(1)) \g /dev/null
SELECT is(pg_temp.enqueue(pg_temp.run(1), pg_temp.run(2)), ARRAY[2]::bigint[], 'a run that is queued already takes no place of another');
SELECT pg_temp.clear() \g /dev/null
SELECT pg_temp.enqueue(pg_temp.run(1)) \g /dev/null
SELECT pg_temp.claim() \g /dev/null
SELECT is(
    pg_temp.enqueue(pg_temp.run(1), pg_temp.run(2), pg_temp.run(3), pg_temp.run(4)), ARRAY[2, 3]::bigint[], 'nor does one that runs'
);
SELECT is((SELECT string_agg(pgt_id::text, ',' ORDER BY pgt_id) FROM _sluice.queue), '1,2,3', 'and what did not fit is not there');
SELECT results_eq(
    format('SELECT queued, is_full FROM _sluice.enqueue(%s, 1, jsonb_build_array(pg_temp.run(4)))', :epoch),
    $$VALUES ('{}'::bigint[], true)$$, 'which is told'
);
SELECT results_eq(
    format('SELECT queued, is_full FROM _sluice.enqueue(%s, 1, jsonb_build_array(pg_temp.run(1), pg_temp.run(2)))', :epoch),
    $$VALUES ('{}'::bigint[], false)$$, 'unlike what has a run already'
);
SELECT pg_temp.clear() \g /dev/null
SELECT results_eq(
    format('SELECT queued, is_full FROM _sluice.enqueue(%s, 1, jsonb_build_array(pg_temp.run(1), pg_temp.run(2)))', :epoch),
    $$VALUES ('{1,2}'::bigint[], false)$$, 'what just fits is no reason to tell'
);
SELECT _sluice.store_setting('cluster', 'max_queue_depth', '1') \g /dev/null
SELECT results_eq(
    format('SELECT queued, is_full FROM _sluice.enqueue(%s, 1, jsonb_build_array(pg_temp.run(3)))', :epoch),
    $$VALUES ('{}'::bigint[], true)$$, 'a bound that is lowered below what is queued takes nothing more'
);
SELECT _sluice.store_setting('cluster', 'max_queue_depth', '2') \g /dev/null

-- run_now()
SELECT pg_temp.clear() \g /dev/null
SELECT _sluice.enqueue_now(1, pg_temp.run(1)) AS first \gset
SELECT is(_sluice.enqueue_now(1, pg_temp.run(1)), :'first'::uuid, 'a user who asks twice gets the run that is queued');
SELECT is(pg_temp.claim(), 1::bigint, 'which can be claimed');
SELECT is(_sluice.enqueue_now(1, pg_temp.run(1)), NULL, 'and while it runs there is no other');
SELECT _sluice.enqueue(:epoch, 2, jsonb_build_array(pg_temp.run(2))), pg_temp.enqueue(pg_temp.run(2), pg_temp.run(3)) \g /dev/null
SELECT is(
    pg_temp.error_of('SELECT _sluice.enqueue_now(1, pg_temp.run(4))'),
    concat_ws(E'\n',
        format('53400: queue of database "%s" is full', (SELECT datname FROM pg_database WHERE oid = 1)),
        'DETAIL: A database can have 2 queued runs (max_queue_depth).',
        'HINT: Call again when runs have ended; sluice.queue() shows them, sluice.health_check() what holds them up.'
    ),
    'a full queue takes no run of a user either, and says so'
);
SELECT is(
    _sluice.enqueue_now(1, pg_temp.run(2)), pg_temp.id(2), 'but whose run is queued already gets that'
);
SELECT is(_sluice.enqueue_now(1, pg_temp.run(1)), NULL, 'and whose node runs is told that');
SELECT throws_ok(
    'SELECT _sluice.enqueue_now(3, pg_temp.run(1))', '55000', 'this database is not scheduled', 'a database that is no member has no queue'
);
SELECT results_eq(
    format('SELECT queued, is_full FROM _sluice.enqueue(%s, 3, jsonb_build_array(pg_temp.run(1)))', :epoch),
    $$VALUES ('{}'::bigint[], false)$$, 'nor for a tick that was under way when it left'
);

-- Nodes that are gone
SELECT pg_temp.clear() \g /dev/null
SELECT is(_sluice.known_nodes(:epoch, 1), NULL, 'nothing is known of a database with nothing queued or paused');
SELECT _sluice.store_setting('cluster', 'max_queue_depth', NULL) \g /dev/null
SELECT pg_temp.enqueue(pg_temp.run(1)), pg_temp.claim(), pg_temp.enqueue(pg_temp.run(2), pg_temp.run(3)) \g /dev/null
SELECT _sluice.enqueue(:epoch, 2, jsonb_build_array(pg_temp.run(2), pg_temp.run(6))) \g /dev/null
INSERT INTO _sluice.pause (db_oid, pgt_id, name, requested_by) VALUES (1, 3, 'n3', 'test'), (1, 4, 'n4', 'test'), (2, 4, 'n4', 'test'), (2, 5, 'n5', 'test');
SELECT results_eq(
    format('SELECT DISTINCT pgt_id FROM jsonb_to_recordset(_sluice.known_nodes(%s, 1)) AS k (pgt_id bigint, since timestamptz) WHERE since IS NOT NULL ORDER BY 1', :epoch),
    'VALUES (2::bigint), (3), (4)', 'known is what is queued or paused, in that database'
);
SELECT throws_ok(format('SELECT _sluice.known_nodes(%s, 1)', :epoch - 1), 'SL001', 'leadership lost', 'not to a former leader');
SELECT throws_ok(format('SELECT _sluice.forget_nodes(%s, 1, ''{2}'')', :epoch - 1), 'SL001', 'leadership lost', 'who takes nothing away either');
SELECT _sluice.forget_nodes(:epoch, 1, '{1, 2, 4}') \g /dev/null
SELECT results_eq(
    'SELECT db_oid, pgt_id, state FROM _sluice.queue ORDER BY 1, 2',
    $$VALUES (1::oid, 1::bigint, 'running'), (1, 3, 'queued'), (2, 2, 'queued'), (2, 6, 'queued')$$,
    'what is queued of nodes that are gone is forgotten, in their database; what runs ends by itself'
);
SELECT results_eq('SELECT db_oid, pgt_id FROM _sluice.pause ORDER BY 1, 2', 'VALUES (1::oid, 3::bigint), (2, 4), (2, 5)', 'and so are their pauses');
SELECT pg_temp.clear(), pg_temp.enqueue(pg_temp.run(1)), pg_temp.claim(), pg_temp.enqueue(pg_temp.run(2), pg_temp.run(3)) \g /dev/null

-- running -> ended
SELECT pg_temp.clear(), pg_temp.enqueue(pg_temp.run(1), pg_temp.run(2)), pg_temp.claim() \g /dev/null
SELECT _sluice.end_runs(:epoch, ARRAY[pg_temp.id(1), pg_temp.id(2)]) \g /dev/null
SELECT results_eq(
    'SELECT pgt_id, state, epoch IS NOT NULL FROM _sluice.queue ORDER BY 1', $$VALUES (1::bigint, 'ended', true), (2, 'queued', false)$$,
    'a run that has lost its session has ended; one that waits goes on waiting'
);
SELECT is(pg_temp.enqueue(pg_temp.run(1)), '{}'::bigint[], 'until it is recorded its node has no other');
SELECT is(_sluice.enqueue_now(1, pg_temp.run(1)), NULL, 'by hand neither');
SELECT is_empty('SELECT 1 FROM _sluice.obstacles(1, NULL)', 'it is no obstacle');
SELECT pg_temp.enqueue(pg_temp.run(3, 1, '{1}')) \g /dev/null
SELECT is(pg_temp.claim(), 3::bigint, 'and no downstream waits for it');
SELECT is_empty(format('SELECT 1 FROM _sluice.orphaned_runs(%s)', :epoch), 'the leader knows it');
UPDATE _sluice.queue SET epoch = :epoch - 1 WHERE pgt_id = 1;
SELECT is((SELECT array_agg(pgt_id) FROM _sluice.orphaned_runs(:epoch)), ARRAY[1]::bigint[], 'and the next one finds it');
SELECT throws_ok(format('SELECT _sluice.end_runs(%s, NULL)', :epoch - 1), 'SL001', 'leadership lost', 'a former leader can''t end runs');
UPDATE _sluice.queue SET slot = 5 WHERE pgt_id = 3;
INSERT INTO _sluice.slot (slot, state, db_oid, epoch, deadline, pid, backend_start)
VALUES (5, 'live', 1, :epoch, now(), 1, now() - interval '1 h');
SELECT _sluice.end_runs(:epoch, ARRAY[pg_temp.id(3)]) \g /dev/null
SELECT is((SELECT state FROM _sluice.queue WHERE pgt_id = 3), 'running', 'not while its worker is there');
UPDATE _sluice.slot SET backend_start = '2060-01-01';
SELECT _sluice.end_runs(:epoch, ARRAY[pg_temp.id(3)]) \g /dev/null
SELECT is((SELECT state FROM _sluice.queue WHERE pgt_id = 3), 'running', 'which began in the future, where the clock was set back since');
UPDATE _sluice.slot SET backend_start = clock_timestamp();
SELECT _sluice.end_runs(:epoch, ARRAY[pg_temp.id(3)]) \g /dev/null
SELECT is((SELECT state FROM _sluice.queue WHERE pgt_id = 3), 'ended', 'one that came later is another');
DELETE FROM _sluice.slot;

-- The clock was set back
SELECT pg_temp.clear(), pg_temp.enqueue(pg_temp.run(1), pg_temp.run(2, 50), pg_temp.run(3)), pg_temp.enqueue(pg_temp.run(4)) \g /dev/null
SELECT _sluice.enqueue(:epoch, 2, jsonb_build_array(pg_temp.run(1))) \g /dev/null
UPDATE _sluice.queue SET enqueued_at = enqueued_at + interval '10 h', rank = rank + interval '10 h' WHERE pgt_id <> 4;
UPDATE _sluice.queue SET enqueued_at = enqueued_at + interval '10 h' WHERE db_oid = 2;
SELECT rank AS present FROM _sluice.queue WHERE pgt_id = 4 \gset
SELECT _sluice.known_nodes(:epoch, 1) \g /dev/null
SELECT results_eq(
    format($$SELECT pgt_id, enqueued_at <= clock_timestamp(), rank - %L > interval '1 h' FROM _sluice.queue ORDER BY db_oid, pgt_id$$, :'present'),
    'VALUES (1::bigint, true, false), (2, true, false), (3, true, false), (4, true, false), (1, false, true)',
    'runs that were queued in the future have been so since now, in that database'
);
SELECT is(
    (SELECT rank FROM _sluice.queue WHERE pgt_id = 4), :'present', 'the others stay where they are'
);
SELECT is(ARRAY[pg_temp.claim(), pg_temp.claim(), pg_temp.claim(), pg_temp.claim()], ARRAY[2, 4, 1, 3]::bigint[], 'and all are claimed in their order');
SELECT pg_temp.clear(), pg_temp.enqueue(pg_temp.run(1)), pg_temp.claim(), pg_temp.enqueue(pg_temp.run(2), pg_temp.run(3)) \g /dev/null

-- What a row can't be
SELECT throws_ok(
    $$INSERT INTO _sluice.queue (db_oid, pgt_id, name, rank, due_at) VALUES (1, 1, 'n1', now(), now())$$, '23505', NULL, 'a node has one live run'
);
SELECT throws_ok($$UPDATE _sluice.queue SET epoch = NULL WHERE state = 'running'$$, '23514', NULL, 'what runs has a leader');
SELECT throws_ok($$UPDATE _sluice.queue SET state = 'ended' WHERE state = 'queued'$$, '23514', NULL, 'and so has what ran');

SAVEPOINT short;
-- Plans are kept, and the queue was short when they were made, and known to be.
UPDATE pg_class SET relpages = 1, reltuples = 2 WHERE oid IN ('_sluice.queue'::regclass);
CREATE FUNCTION pg_temp.whole_reads() RETURNS bigint LANGUAGE sql AS $$
    SELECT t.seq_scan FROM pg_stat_xact_user_tables AS t WHERE t.relid = '_sluice.queue'::regclass
$$;
SELECT run_id AS running FROM _sluice.queue WHERE state = 'running' AND db_oid = 1 LIMIT 1 \gset
SELECT pg_temp.whole_reads() AS reads \gset
SELECT _sluice.add_runs(1, jsonb_build_array(pg_temp.run(90, 0, '{91}'), pg_temp.run(91))), _sluice.next_run(:epoch, :'running', 1, NULL) \g /dev/null
SELECT is(pg_temp.whole_reads(), :reads::bigint, 'enqueue and claim do not read the queue from end to end, however short');
ROLLBACK TO SAVEPOINT short;

-- Counts
SELECT results_eq(
    'SELECT db_oid, queued, running FROM _sluice.queued_by_database() ORDER BY db_oid',
    'VALUES (1::oid, 2::bigint, 1::bigint), (2, 0, 0)',
    'the counts are those of the table'
);

-- A full queue, as the member tells it
SELECT _sluice.report_queue(true), _sluice.report_queue(true) \g /dev/null
SELECT results_eq(
    'SELECT event, severity, node, detail FROM sluice.alerts WHERE closed_at IS NULL',
    $$VALUES ('queue_full', 'warning', current_database()::text COLLATE "default", jsonb_build_object('max_queue_depth', _sluice.setting('max_queue_depth')))$$,
    'is one alert'
);
UPDATE _sluice.alert SET node = 'former_name';
SELECT _sluice.report_queue(false) \g /dev/null
SELECT is_empty('SELECT event FROM sluice.alerts WHERE closed_at IS NULL', 'which ends with it, whatever the database was called');
\ir finish.psql
