-- Control database: which databases are scheduled, and how they fare.

CREATE TABLE _sluice.member (
    db_oid oid CONSTRAINT member_pkey PRIMARY KEY,
    joined_by text NOT NULL,
    joined_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    state text NOT NULL DEFAULT 'joining' CONSTRAINT member_state_check CHECK (
        state IN ('joining', 'scheduled', 'failed', 'version_mismatch')
    ),
    last_tick_at timestamptz,
    last_tick_ms double precision,
    failures integer NOT NULL DEFAULT 0,
    spawn_failures integer NOT NULL DEFAULT 0,
    spawn_error text,
    error text
);
COMMENT ON TABLE _sluice.member IS
    'Databases that called sluice.start(). Keyed by OID, so a database made from a template of a member, or recreated under its name, is not one';

CREATE VIEW _sluice.cron_entry (jobname, command) AS VALUES
    ('pg_sluice', 'CALL sluice.run()'),
    ('pg_sluice metrics', 'CALL sluice.serve_metrics()');
COMMENT ON VIEW _sluice.cron_entry IS 'Our entries in pg_cron: the leader''s and the endpoint''s';

CREATE FUNCTION _sluice.arrange_entry(_jobname text, _wanted boolean)
RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_command CONSTANT text := (SELECT e.command FROM _sluice.cron_entry AS e WHERE e.jobname = _jobname);
BEGIN
    -- Where there is no pg_cron, or none any more, there is no entry. start() checks that there is.
    IF to_regclass('cron.job') IS NULL THEN
        RETURN;
    END IF;
    IF NOT _wanted THEN
        PERFORM cron.unschedule(j.jobid) FROM cron.job AS j WHERE j.jobname = _jobname AND j.command = v_command;
        RETURN;
    END IF;
    PERFORM cron.schedule(_jobname, '* * * * *', v_command)
    WHERE NOT EXISTS (SELECT FROM cron.job AS j WHERE j.jobname = _jobname AND j.command = v_command);
    -- It was made with what was so then: a standby or an upgraded server can have another socket or port.
    -- And pg_cron leaves one that somebody has deactivated as it is.
    UPDATE cron.job AS j
    SET nodename = current_setting('cron.host', true), nodeport = current_setting('port')::integer,
        database = current_database(), active = true
    WHERE j.jobname = _jobname
        AND j.command = v_command
        AND (j.nodename, j.nodeport, j.database, j.active) IS DISTINCT FROM (
            current_setting('cron.host', true), current_setting('port')::integer, current_database()::text, true
        );
END;
$$;
COMMENT ON FUNCTION _sluice.arrange_entry(text, boolean) IS
    'Makes a pg_cron entry what it should be: there, active, and leading to this server and database, or not there. Idempotent';

CREATE FUNCTION _sluice.entry_state(_jobname text)
RETURNS text
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_active boolean;
BEGIN
    IF to_regclass('cron.job') IS NOT NULL THEN
        SELECT bool_or(j.active) INTO v_active
        FROM _sluice.cron_entry AS e
        JOIN cron.job AS j ON j.jobname = e.jobname AND j.command = e.command
        WHERE e.jobname = _jobname;
    END IF;
    RETURN CASE WHEN v_active THEN 'active' WHEN NOT v_active THEN 'inactive' ELSE 'missing' END;
END;
$$;
COMMENT ON FUNCTION _sluice.entry_state(text) IS 'Of a pg_cron entry of ours: active, inactive or missing';

CREATE FUNCTION _sluice.arrange_leader()
RETURNS void
LANGUAGE sql
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT _sluice.arrange_entry('pg_sluice', EXISTS (SELECT FROM _sluice.member))
$$;
COMMENT ON FUNCTION _sluice.arrange_leader() IS 'The pg_cron entry of the leader, while there are members';

CREATE FUNCTION _sluice.leader_entry()
RETURNS text
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT _sluice.entry_state('pg_sluice') WHERE EXISTS (SELECT FROM _sluice.member)
$$;
COMMENT ON FUNCTION _sluice.leader_entry() IS 'The state of the leader''s pg_cron entry; NULL while there are no members, who need one';

CREATE FUNCTION _sluice.arrange_endpoint()
RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_wanted CONSTANT boolean := (SELECT s.host IS NOT NULL FROM _sluice.endpoint_settings() AS s);
BEGIN
    IF NOT v_wanted THEN
        PERFORM _sluice.record_endpoint(NULL);
    END IF;
    PERFORM _sluice.arrange_entry('pg_sluice metrics', v_wanted);
END;
$$;
COMMENT ON FUNCTION _sluice.arrange_endpoint() IS
    'The pg_cron entry of the endpoint, while metrics_listen is set and there are members; closes its alert when there is to be none';

CREATE FUNCTION _sluice.join_database(_db_oid oid, _joined_by text, _version text)
RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_own_version CONSTANT text := _sluice.extension_version();
BEGIN
    IF _version <> v_own_version THEN
        RAISE EXCEPTION USING
            ERRCODE = 'object_not_in_prerequisite_state',
            MESSAGE = format('pg_sluice is at version %s here and at version %s in the control database', _version, v_own_version),
            HINT = 'Run ALTER EXTENSION pg_sluice UPDATE in both.';
    END IF;
    -- The last member to leave meanwhile takes the entry along before we look for it.
    PERFORM _sluice.close_gate();
    INSERT INTO _sluice.member (db_oid, joined_by) VALUES (_db_oid, _joined_by) ON CONFLICT (db_oid) DO NOTHING;
    PERFORM _sluice.arrange_leader();
    PERFORM _sluice.arrange_endpoint();
    PERFORM _sluice.wake();
END;
$$;
COMMENT ON FUNCTION _sluice.join_database(oid, text, text) IS
    'Makes a database a member and sees to the pg_cron entries. Idempotent';

CREATE FUNCTION _sluice.leave_database(_db_oid oid)
RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM _sluice.close_gate();
    DELETE FROM _sluice.member AS m WHERE m.db_oid = _db_oid;
    PERFORM _sluice.close_alert(a.event, NULL, a.node)
    FROM _sluice.alert AS a
    WHERE a.closed_at IS NULL AND a.pgt_id IS NULL AND a.node = _sluice.database_name(_db_oid);
    DELETE FROM _sluice.queue AS q WHERE q.db_oid = _db_oid AND q.state = 'queued';
    IF NOT EXISTS (SELECT FROM _sluice.member) THEN
        PERFORM _sluice.arrange_leader();
        PERFORM _sluice.arrange_endpoint();
    END IF;
    PERFORM _sluice.wake();
END;
$$;
COMMENT ON FUNCTION _sluice.leave_database(oid) IS
    'Ends the membership and forgets what was queued; the last one to leave takes the pg_cron entries along. Runs in progress end as usual';

CREATE FUNCTION _sluice.members(_epoch bigint)
RETURNS TABLE (db_oid oid, database text, dbname bytea)
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_found boolean;
BEGIN
    PERFORM _sluice.enter_gate(_epoch);
    PERFORM _sluice.end_abandoned_drains();
    PERFORM _sluice.end_abandoned_pauses();
    PERFORM _sluice.close_stuck_backends();
    -- A dropped database leaves nothing behind.
    DELETE FROM _sluice.member AS m WHERE NOT EXISTS (SELECT FROM pg_database AS d WHERE d.oid = m.db_oid);
    v_found := FOUND;
    DELETE FROM _sluice.drain AS r WHERE r.db_oid <> 0
        AND NOT EXISTS (SELECT FROM pg_database AS d WHERE d.oid = r.db_oid);
    IF FOUND OR v_found THEN
        -- What can be many rows goes in small steps, and soon.
        UPDATE _sluice.upkeep AS u SET due_at = clock_timestamp() WHERE u.task = 'vanished_databases';
    END IF;
    PERFORM _sluice.close_alert(a.event, NULL, a.node)
    FROM _sluice.alert AS a
    WHERE a.closed_at IS NULL
        AND a.pgt_id IS NULL
        AND NOT EXISTS (SELECT FROM pg_database AS d WHERE _sluice.shown_name(d.datname) = a.node);
    -- Before version 1.6.3 pg_cron ignores who waits for it while a job runs, as this leader always does.
    -- DROP DATABASE waits for every process. A look at its jobs, which this makes it take, lets that go on.
    IF EXISTS (SELECT FROM pg_stat_activity AS a WHERE a.wait_event = 'ProcSignalBarrier') THEN
        UPDATE cron.job AS j SET active = j.active WHERE false;
    END IF;
    RETURN QUERY
    SELECT m.db_oid, _sluice.shown_name(d.datname), _sluice.raw_name(d.datname)
    FROM _sluice.member AS m
    JOIN pg_database AS d ON d.oid = m.db_oid;
END;
$$;
COMMENT ON FUNCTION _sluice.members(bigint) IS
    'The databases to schedule, under their present names, as they are shown and as the server knows them; clears away what dropped databases left';

CREATE FUNCTION _sluice.close_database_alerts(_db_oid oid)
RETURNS void
LANGUAGE sql
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT _sluice.close_alert(e.event, NULL, _sluice.database_name(_db_oid))
    FROM unnest(ARRAY['database_failed', 'database_version_mismatch']) AS e (event)
$$;
COMMENT ON FUNCTION _sluice.close_database_alerts(oid) IS 'The database is scheduled again';

CREATE FUNCTION _sluice.record_tick(_epoch bigint, _db_oid oid, _milliseconds double precision)
RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM _sluice.enter_gate(_epoch);
    PERFORM _sluice.close_database_alerts(_db_oid)
    FROM _sluice.member AS m
    WHERE m.db_oid = _db_oid AND m.state <> 'scheduled';
    UPDATE _sluice.member AS m
    SET state = 'scheduled', last_tick_at = clock_timestamp(), last_tick_ms = _milliseconds,
        failures = 0, error = NULL
    WHERE m.db_oid = _db_oid;
END;
$$;
COMMENT ON FUNCTION _sluice.record_tick(bigint, oid, double precision) IS 'Health of a database that was just scheduled';

CREATE FUNCTION _sluice.record_failed_tick(_epoch bigint, _db_oid oid, _state text, _error text, _detail jsonb)
RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM _sluice.enter_gate(_epoch);
    UPDATE _sluice.member AS m SET state = _state, failures = m.failures + 1, error = _error
    WHERE m.db_oid = _db_oid;
    IF NOT FOUND THEN
        -- It has left meanwhile.
        RETURN;
    END IF;
    PERFORM _sluice.open_alert(
        'database_' || _state, 'critical', NULL, _sluice.database_name(_db_oid),
        format('database "%s" is not scheduled: %s', _sluice.database_name(_db_oid), _error),
        _detail
    );
END;
$$;
COMMENT ON FUNCTION _sluice.record_failed_tick(bigint, oid, text, text, jsonb) IS
    'Health of a database that could not be scheduled; opens an alert in the control database';

CREATE FUNCTION _sluice.database_rows()
RETURNS jsonb
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT COALESCE(jsonb_agg(jsonb_build_object(
        'db_oid', m.db_oid::bigint,
        'database', _sluice.shown_name(d.datname),
        'state', m.state,
        'last_tick_at', m.last_tick_at,
        'last_tick_ms', m.last_tick_ms,
        'queued', c.queued,
        'running', c.running,
        'drain', CASE
            WHEN NOT _sluice.is_draining(m.db_oid) THEN NULL
            WHEN NOT EXISTS (SELECT FROM _sluice.obstacles(m.db_oid, NULL)) THEN 'drained'
            ELSE 'draining'
        END,
        'error', COALESCE(m.error, m.spawn_error),
        'failures', m.failures,
        'oldest_queued_at', (
            SELECT min(q.enqueued_at) FROM _sluice.queue AS q WHERE q.db_oid = m.db_oid AND q.state = 'queued'
        ),
        'workers', c.held,
        'paused', (SELECT count(*) FROM _sluice.pause_in_force AS p WHERE p.db_oid = m.db_oid),
        'joined_by', m.joined_by,
        'joined_at', m.joined_at
    ) ORDER BY d.datname), '[]')
    FROM _sluice.member AS m
    JOIN _sluice.queued_by_database() AS c ON c.db_oid = m.db_oid
    LEFT JOIN pg_database AS d ON d.oid = m.db_oid
$$;
COMMENT ON FUNCTION _sluice.database_rows() IS 'The rows of sluice.databases()';
