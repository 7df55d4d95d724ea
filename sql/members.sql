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

CREATE FUNCTION _sluice.join_database(_db_oid oid, _joined_by text, _version text)
RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_own_version CONSTANT text := (SELECT e.extversion FROM pg_extension AS e WHERE e.extname = 'pg_sluice');
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
    PERFORM cron.schedule('pg_sluice', '* * * * *', 'CALL sluice.run()')
    WHERE NOT EXISTS (
        SELECT FROM cron.job AS j
        WHERE j.jobname = 'pg_sluice' AND j.command = 'CALL sluice.run()' AND j.active
    );
    PERFORM pg_notify('sluice_wake', '');
END;
$$;
COMMENT ON FUNCTION _sluice.join_database(oid, text, text) IS
    'Makes a database a member and sees to the one pg_cron entry. Idempotent';

CREATE FUNCTION _sluice.leave_database(_db_oid oid)
RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM _sluice.close_gate();
    DELETE FROM _sluice.member AS m WHERE m.db_oid = _db_oid;
    PERFORM _sluice.close_database_alerts(_db_oid);
    PERFORM _sluice.close_alert('spawn_failed', NULL, _sluice.database_name(_db_oid));
    DELETE FROM _sluice.queue AS q WHERE q.db_oid = _db_oid AND q.state = 'queued';
    IF NOT EXISTS (SELECT FROM _sluice.member) THEN
        PERFORM cron.unschedule(j.jobid) FROM cron.job AS j
        WHERE j.jobname = 'pg_sluice' AND j.command = 'CALL sluice.run()';
    END IF;
    PERFORM pg_notify('sluice_wake', '');
END;
$$;
COMMENT ON FUNCTION _sluice.leave_database(oid) IS
    'Ends the membership and forgets what was queued; the last one to leave takes the pg_cron entry along. Runs in progress end as usual';

CREATE FUNCTION _sluice.members(_epoch bigint)
RETURNS TABLE (db_oid oid, database text)
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM _sluice.enter_gate(_epoch);
    PERFORM _sluice.withdraw_abandoned_drains();
    PERFORM _sluice.withdraw_abandoned_pauses();
    -- A dropped database leaves nothing behind.
    DELETE FROM _sluice.member AS m WHERE NOT EXISTS (SELECT FROM pg_database AS d WHERE d.oid = m.db_oid);
    DELETE FROM _sluice.queue AS q WHERE q.state = 'queued'
        AND NOT EXISTS (SELECT FROM _sluice.member AS m WHERE m.db_oid = q.db_oid);
    DELETE FROM _sluice.drain AS r WHERE r.db_oid <> 0
        AND NOT EXISTS (SELECT FROM pg_database AS d WHERE d.oid = r.db_oid);
    DELETE FROM _sluice.pause AS p WHERE NOT EXISTS (SELECT FROM pg_database AS d WHERE d.oid = p.db_oid);
    PERFORM _sluice.close_alert(a.event, NULL, a.node)
    FROM _sluice.alert AS a
    WHERE a.closed_at IS NULL
        AND a.event IN ('database_failed', 'database_version_mismatch', 'spawn_failed')
        AND NOT EXISTS (SELECT FROM pg_database AS d WHERE d.datname = a.node);
    RETURN QUERY
    SELECT m.db_oid, d.datname::text FROM _sluice.member AS m JOIN pg_database AS d ON d.oid = m.db_oid;
END;
$$;
COMMENT ON FUNCTION _sluice.members(bigint) IS
    'The databases to schedule, under their present names; clears away what dropped databases left';

CREATE FUNCTION _sluice.database_name(_db_oid oid)
RETURNS text
LANGUAGE sql STABLE STRICT
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT d.datname::text FROM pg_database AS d WHERE d.oid = _db_oid
$$;
COMMENT ON FUNCTION _sluice.database_name(oid) IS 'The present name of a database; NULL when it is gone';

CREATE FUNCTION _sluice.close_database_alerts(_db_oid oid)
RETURNS void
LANGUAGE sql
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT _sluice.close_alert(e.event, NULL, _sluice.database_name(_db_oid))
    FROM unnest(ARRAY['database_failed', 'database_version_mismatch']) AS e (event)
$$;
COMMENT ON FUNCTION _sluice.close_database_alerts(oid) IS 'The database is scheduled again, or needs not be any more';

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

CREATE FUNCTION _sluice.record_failed_tick(_epoch bigint, _db_oid oid, _state text, _error text)
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
        format('database "%s" is not scheduled: %s', _sluice.database_name(_db_oid), _error)
    );
END;
$$;
COMMENT ON FUNCTION _sluice.record_failed_tick(bigint, oid, text, text) IS
    'Health of a database that could not be scheduled; opens an alert in the control database';

CREATE FUNCTION _sluice.database_rows()
RETURNS jsonb
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT COALESCE(jsonb_agg(jsonb_build_object(
        'db_oid', m.db_oid::bigint,
        'database', d.datname,
        'state', m.state,
        'last_tick_at', m.last_tick_at,
        'last_tick_ms', m.last_tick_ms,
        'queued', c.queued,
        'running', c.running,
        'drain', CASE
            WHEN NOT _sluice.drain_in_force(m.db_oid) THEN NULL
            WHEN NOT EXISTS (SELECT FROM _sluice.drain_obstacles(m.db_oid)) THEN 'drained'
            ELSE 'draining'
        END,
        'error', COALESCE(m.error, m.spawn_error)
    ) ORDER BY d.datname), '[]')
    FROM _sluice.member AS m
    JOIN _sluice.queued_by_database() AS c ON c.db_oid = m.db_oid
    LEFT JOIN pg_database AS d ON d.oid = m.db_oid
$$;
COMMENT ON FUNCTION _sluice.database_rows() IS 'The rows of sluice.databases()';

CREATE FUNCTION _sluice.queue_rows()
RETURNS jsonb
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT COALESCE(jsonb_agg(jsonb_build_object(
        'run_id', q.run_id,
        'db_oid', q.db_oid::bigint,
        'database', d.datname,
        'pgt_id', q.pgt_id,
        'name', q.name,
        'state', q.state,
        'priority', q.priority,
        'enqueued_at', q.enqueued_at,
        'not_before', q.not_before
    ) ORDER BY q.state DESC, q.rank, q.seq), '[]')
    FROM _sluice.queue AS q
    LEFT JOIN pg_database AS d ON d.oid = q.db_oid
$$;
COMMENT ON FUNCTION _sluice.queue_rows() IS 'The rows of sluice.queue()';

CREATE FUNCTION _sluice.worker_rows()
RETURNS jsonb
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT COALESCE(jsonb_agg(jsonb_build_object(
        'slot', n,
        'state', COALESCE(s.state, 'free'),
        'db_oid', s.db_oid::bigint,
        'database', d.datname,
        'pid', s.pid,
        'run_id', q.run_id,
        'name', q.name,
        'since', s.since
    ) ORDER BY n), '[]')
    FROM generate_series(1, greatest(
        _sluice.worker_limit(), (SELECT COALESCE(max(t.slot), 0) FROM _sluice.slot AS t)
    )) AS n
    LEFT JOIN _sluice.slot AS s ON s.slot = n
    LEFT JOIN pg_database AS d ON d.oid = s.db_oid
    LEFT JOIN _sluice.queue AS q ON q.slot = n AND q.state = 'running'
$$;
COMMENT ON FUNCTION _sluice.worker_rows() IS 'The rows of sluice.workers()';

CREATE FUNCTION _sluice.limit_rows()
RETURNS jsonb
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT jsonb_agg(jsonb_build_object(
        'limit', _sluice.worker_limit(),
        'ingredient', i.ingredient,
        'value', i.value,
        'binding', i.value = _sluice.worker_limit()
    ))
    FROM _sluice.limit_ingredients() AS i
$$;
COMMENT ON FUNCTION _sluice.limit_rows() IS 'The rows of sluice.effective_limit()';
