-- Slots and the sessions that hold them: real sessions, opened from this one. An evicted or starting session
-- is what a former leader leaves behind.
\ir setup.psql
SELECT plan(27);

CREATE TEMP TABLE session (name text PRIMARY KEY, pid integer);
-- Opens a session under a name; gives its process.
CREATE FUNCTION pg_temp.connect(_name text) RETURNS integer LANGUAGE plpython3u AS $$
plpy.execute("SELECT _sluice.load_package()")
import psycopg

where = plpy.execute(
    "SELECT current_setting('unix_socket_directories') AS host, current_setting('port') AS port, current_database()::text AS dbname"
)[0]
session = psycopg.connect(**where, user="postgres", application_name=_name, autocommit=True)
GD.setdefault("sessions", []).append(session)
return session.info.backend_pid
$$;
-- Begins to open a session that the server keeps starting: it has no row in pg_stat_activity yet.
CREATE FUNCTION pg_temp.begin_to_connect(_name text) RETURNS void LANGUAGE plpython3u AS $$
plpy.execute("SELECT _sluice.load_package()")
import select
from psycopg import pq

where = plpy.execute(
    "SELECT current_setting('unix_socket_directories') AS host, current_setting('port') AS port, current_database()::text AS dbname"
)[0]
session = pq.PGconn.connect_start(
    f"host={where['host']} port={where['port']} dbname={where['dbname']} user=postgres"
    f" application_name='{_name}' options='-c post_auth_delay=30'".encode()
)
while session.connect_poll() == pq.PollingStatus.WRITING:
    select.select([], [session.socket], [], 5)
GD.setdefault("sessions", []).append(session)
$$;
CREATE FUNCTION pg_temp.starting() RETURNS SETOF integer LANGUAGE sql AS $$
    SELECT pg_stat_clear_snapshot();
    SELECT DISTINCT l.pid FROM pg_locks AS l
    WHERE l.locktype = 'virtualxid' AND NOT EXISTS (SELECT FROM pg_stat_activity AS a WHERE a.pid = l.pid)
$$;
CREATE FUNCTION pg_temp.sessions() RETURNS text LANGUAGE sql AS $$
    SELECT pg_stat_clear_snapshot();
    SELECT string_agg(DISTINCT replace(x.name, '_', ' '), ', ' ORDER BY replace(x.name, '_', ' '))
    FROM session AS x JOIN pg_stat_activity AS a ON a.pid = x.pid
$$;
CREATE FUNCTION pg_temp.wait_until(_condition text) RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
    v_reached boolean;
BEGIN
    FOR i IN 1 .. 500 LOOP
        EXECUTE 'SELECT ' || _condition INTO v_reached;
        EXIT WHEN v_reached;
        PERFORM pg_sleep(0.02);
    END LOOP;
    RETURN v_reached;
END;
$$;
UPDATE _sluice.lease SET epoch = 7;
SELECT epoch FROM _sluice.acquire_lease(pg_backend_pid(), now(), 3600) \gset
SELECT _sluice.store_setting('cluster', 'max_workers', '8') \g /dev/null
INSERT INTO _sluice.member (db_oid, joined_by) VALUES (1, 'somebody');

-- A worker's life
SELECT nonce, application_name FROM _sluice.reserve_slot(:epoch, 1) \gset
INSERT INTO session VALUES ('worker', pg_temp.connect(:'application_name'));
SELECT ok(NOT _sluice.release_slot(:epoch, :'nonce'), 'a session that carries the nonce of a reservation holds it, before it is live');
UPDATE _sluice.slot SET epoch = :epoch - 1, deadline = '2024-01-01';
SELECT is(_sluice.reconcile_slots(:epoch), 0, 'also that of a former leader, and overdue');
UPDATE _sluice.slot SET epoch = :epoch;
SELECT ok(
    (SELECT _sluice.activate_slot(:epoch, :'nonce', a.pid, a.backend_start) FROM session AS x JOIN pg_stat_activity AS a USING (pid)), 'it goes live'
);
SELECT is(_sluice.reconcile_slots(:epoch), 0, 'and holds its slot');
SELECT pg_terminate_backend(pid) FROM session \g /dev/null
SELECT ok(pg_temp.wait_until('pg_temp.sessions() IS NULL'), 'when it is killed');
SELECT is(_sluice.reconcile_slots(:epoch), 1, 'its slot is freed');

-- A reservation of a former leader, while a session is starting
SELECT nonce FROM _sluice.reserve_slot(:epoch, 1) \gset
UPDATE _sluice.slot SET epoch = :epoch - 1, deadline = '2024-01-01';
SELECT pg_temp.begin_to_connect('pg_sluice worker ' || :'nonce') \g /dev/null
SELECT ok(pg_temp.wait_until('EXISTS (SELECT FROM pg_temp.starting())'), 'a session that is starting is not to be seen by name');
SELECT is(_sluice.reconcile_slots(:epoch), 0, 'an overdue reservation, which may be its, stays');
SELECT pg_terminate_backend(pid) FROM pg_temp.starting() AS s (pid) \g /dev/null
-- There is always another one that may be starting, of the server's own.
SELECT ok(
    pg_temp.wait_until(format('NOT EXISTS (SELECT FROM pg_temp.starting()) AND _sluice.reconcile_slots(%s) = 1', :epoch)),
    'when none is starting any more it is freed'
);

-- What former leaders left
SELECT nonce AS present, application_name AS present_name FROM _sluice.reserve_slot(:epoch, 1) \gset
SELECT nonce AS former, application_name AS former_name FROM _sluice.reserve_slot(:epoch, 1) \gset
SELECT nonce AS renamed FROM _sluice.reserve_slot(:epoch, 1) \gset
TRUNCATE session;
INSERT INTO session VALUES
    ('stays_worker', pg_temp.connect(:'present_name')),
    ('former_worker', pg_temp.connect(:'former_name')),
    ('former_renamed', pg_temp.connect('somebody')),
    ('former_unknown', pg_temp.connect('pg_sluice worker ' || gen_random_uuid())),
    ('former_scheduler', pg_temp.connect('pg_sluice scheduler ' || :epoch - 1)),
    ('former_job', pg_temp.connect('pg_sluice job 1')),
    ('former_upkeep', pg_temp.connect('pg_sluice upkeep ' || :epoch - 1)),
    ('stays_scheduler', pg_temp.connect('pg_sluice scheduler ' || :epoch)),
    ('stays_job', pg_temp.connect('pg_sluice job ' || :epoch)),
    ('stays_leader', pg_temp.connect('pg_sluice leader')),
    ('stays_other', pg_temp.connect('my pg_sluice scheduler 1'));
SELECT pg_stat_clear_snapshot() \g /dev/null
SELECT _sluice.activate_slot(:epoch, :'renamed', a.pid, a.backend_start)
FROM session AS x JOIN pg_stat_activity AS a USING (pid) WHERE x.name = 'former_renamed' \g /dev/null
UPDATE _sluice.slot SET epoch = :epoch - 1 WHERE nonce <> :'present';
-- A worker that has gone, under whose number another session is by now.
INSERT INTO _sluice.slot (slot, state, db_oid, epoch, deadline, pid, backend_start)
SELECT 9, 'live', 1, :epoch - 1, now(), pid, '2024-01-01' FROM session WHERE name = 'stays_other';
SELECT throws_ok(format('SELECT _sluice.evict_former_sessions(%s)', :epoch - 1), 'SL001', 'leadership lost', 'a former leader evicts nobody');
SELECT is((SELECT count(*) FROM session JOIN pg_stat_activity USING (pid)), 11::bigint, 'they are all there');
SELECT is(_sluice.evict_former_sessions(:epoch), 6::bigint, 'sessions of former leaders are ended: workers, schedulers, jobs, upkeep, and workers without a slot');
SELECT ok(pg_temp.wait_until($$pg_temp.sessions() NOT LIKE '%former%'$$), 'all of them');
SELECT is(pg_temp.sessions(), 'stays job, stays leader, stays other, stays scheduler, stays worker', 'and no other');
SELECT is(_sluice.evict_former_sessions(:epoch), 0::bigint, 'after which there are none');
DELETE FROM _sluice.slot WHERE slot = 9;

-- Names that anybody can take
INSERT INTO session VALUES ('huge', pg_temp.connect('pg_sluice scheduler 99999999999999999999'));
SELECT pg_stat_clear_snapshot() \g /dev/null
SELECT lives_ok(format('SELECT _sluice.evict_former_sessions(%s)', :epoch), 'a session under a name with a number beyond all bounds does not stop a leader');
SELECT is(_sluice.reconcile_slots(:epoch), 1, 'the slots of those sessions are free, but for a reservation that is not overdue');

-- A run that is past its deadline
SELECT pid AS late FROM session WHERE name = 'huge' \gset
SELECT throws_ok(format('SELECT _sluice.interrupt_backend(%s, %s, now(), true)', :epoch - 1, :late), 'SL001', 'leadership lost', 'a former leader ends nobody');
-- This one began before.
SELECT is(_sluice.interrupt_backend(:epoch, :late, now(), true), NULL, 'a session that began after the run is another one under its number');
-- As it is when the clock was set back by years.
CREATE OR REPLACE FUNCTION _sluice.latest_past(_now timestamptz) RETURNS timestamptz LANGUAGE sql IMMUTABLE STRICT AS $$SELECT timestamptz '2000-01-01'$$;
SELECT ok(_sluice.interrupt_backend(:epoch, :late, now() - interval '1 d', true) IS NOT NULL, 'but one that began in the future');
SELECT ok(pg_temp.wait_until($$pg_temp.sessions() NOT LIKE '%huge%'$$), 'is ended, as one that began before it');

-- One that does not react: this session stands for it
SELECT pid, backend_start FROM pg_stat_activity WHERE pid = pg_backend_pid() \gset
CREATE FUNCTION pg_temp.stuck() RETURNS text LANGUAGE sql AS $$
    SELECT string_agg(concat_ws(' ', a.event, a.severity, a.node = current_database(), CASE WHEN a.closed_at IS NULL THEN 'open' END), ', ' ORDER BY a.seq) FROM _sluice.alert AS a
$$;
SELECT throws_ok(
    format('SELECT _sluice.report_stuck_backend(%s, %s, %L)', :epoch - 1, :pid, :'backend_start'), 'SL001', 'leadership lost', 'a former leader reports nobody'
);
SELECT is(
    ARRAY[_sluice.report_stuck_backend(:epoch, :pid, '2024-01-01'), _sluice.report_stuck_backend(:epoch, 2147483647, :'backend_start')], '{f,f}',
    'a backend that has ended is not stuck'
);
SELECT is(_sluice.report_stuck_backend(:epoch, :pid, :'backend_start'), true, 'one that is there is');
SELECT _sluice.open_alert('other', 'info', NULL, 'x', 'x'), _sluice.close_stuck_backends() \g /dev/null
SELECT is(pg_temp.stuck(), 'session_stuck critical t open, other info f open', 'with an alert that stays open until it ends');
UPDATE _sluice.alert SET detail = detail || '{"backend_start": "2024-01-01"}' WHERE event = 'session_stuck';
SELECT _sluice.close_stuck_backends(), _sluice.report_stuck_backend(:epoch, :pid, :'backend_start') \g /dev/null
UPDATE _sluice.alert SET detail = detail || '{"pid": 2147483647}' WHERE closed_at IS NULL AND event = 'session_stuck';
SELECT is(pg_temp.stuck(), 'session_stuck critical t, other info f open, session_stuck critical t open', 'which another under its number does not keep open');
SELECT _sluice.close_stuck_backends() \g /dev/null
SELECT is(pg_temp.stuck(), 'session_stuck critical t, other info f open, session_stuck critical t', 'nor one that began with it');
\ir finish.psql
