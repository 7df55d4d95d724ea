-- Control database: drain requests. db_oid 0 is the whole server. A request keeps claims out from its
-- commit on; "drained" is decided by looking at what runs, never from a counter.

CREATE TABLE _sluice.drain (
    db_oid oid CONSTRAINT drain_pkey PRIMARY KEY,
    requested_by text NOT NULL,
    requested_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    -- Stays though nobody waits for it: it was asked for so, or a call ended at its timeout.
    stays boolean NOT NULL DEFAULT false,
    drained_at timestamptz
);

CREATE TABLE _sluice.drain_waiter (
    db_oid oid NOT NULL CONSTRAINT drain_waiter_db_oid_fkey REFERENCES _sluice.drain ON DELETE CASCADE,
    pid integer NOT NULL,
    backend_start timestamptz NOT NULL,
    CONSTRAINT drain_waiter_pkey PRIMARY KEY (db_oid, pid, backend_start)
);
COMMENT ON TABLE _sluice.drain_waiter IS
    'The calls that wait for a request. One that was not reached goes with the last of them';

CREATE FUNCTION _sluice.request_drain(
    _db_oid oid, _requested_by text, _pid integer, _backend_start timestamptz
)
RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM _sluice.close_gate();
    INSERT INTO _sluice.drain AS d (db_oid, requested_by, stays)
    VALUES (_db_oid, _requested_by, _pid IS NULL)
    ON CONFLICT (db_oid) DO UPDATE SET stays = d.stays OR EXCLUDED.stays;
    IF _pid IS NOT NULL THEN
        INSERT INTO _sluice.drain_waiter (db_oid, pid, backend_start)
        VALUES (_db_oid, _pid, _backend_start)
        ON CONFLICT DO NOTHING;
    END IF;
END;
$$;
COMMENT ON FUNCTION _sluice.request_drain(oid, text, integer, timestamptz) IS
    'Asks for a drain, or joins the one in force; a NULL pid asks for one that stays without a waiter. Once it has committed no claim of the scope follows';

CREATE FUNCTION _sluice.drain_obstacles(_db_oid oid)
RETURNS TABLE (obstacle text)
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT format('run of "%s"', q.name)
    FROM _sluice.queue AS q
    WHERE q.state = 'running' AND _db_oid IN (0, q.db_oid)
    UNION ALL
    -- A manual refresh holds the node's lock and has no row in the queue.
    SELECT format('manual refresh by process %s', l.pid)
    FROM pg_locks AS l
    WHERE l.locktype = 'advisory'
        AND l.classid = _sluice.lock_class('node')::oid
        AND l.objsubid = 2
        AND l.granted
        AND _db_oid IN (0, l.database)
        AND NOT EXISTS (
            SELECT FROM _sluice.queue AS q
            WHERE q.state = 'running' AND q.db_oid = l.database AND q.pgt_id = l.objid::bigint
        )
$$;
COMMENT ON FUNCTION _sluice.drain_obstacles(oid) IS 'What still runs in the scope of a drain';

CREATE FUNCTION _sluice.check_drain(_db_oid oid)
RETURNS boolean
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_drained boolean;
BEGIN
    PERFORM FROM _sluice.drain AS d WHERE d.db_oid = _db_oid;
    IF NOT FOUND THEN
        RETURN NULL;
    END IF;
    v_drained := NOT EXISTS (SELECT FROM _sluice.drain_obstacles(_db_oid));
    IF v_drained THEN
        UPDATE _sluice.drain AS d SET drained_at = clock_timestamp()
        WHERE d.db_oid = _db_oid AND d.drained_at IS NULL;
    END IF;
    RETURN v_drained;
END;
$$;
COMMENT ON FUNCTION _sluice.check_drain(oid) IS
    'NULL: no request. false: something still runs. true: nothing runs and nothing will start; the request then outlives its requester';

CREATE FUNCTION _sluice.keep_drain(_db_oid oid, _pid integer, _backend_start timestamptz)
RETURNS void
LANGUAGE sql
SET search_path = pg_catalog, pg_temp
AS $$
    UPDATE _sluice.drain AS d SET stays = true WHERE d.db_oid = _db_oid;
    DELETE FROM _sluice.drain_waiter AS w
    WHERE w.db_oid = _db_oid AND w.pid = _pid AND w.backend_start = _backend_start;
$$;
COMMENT ON FUNCTION _sluice.keep_drain(oid, integer, timestamptz) IS
    'A call has its answer, or ended at its timeout: the request stays in force without it';

CREATE FUNCTION _sluice.end_unwanted_drains()
RETURNS void
LANGUAGE sql
SET search_path = pg_catalog, pg_temp
AS $$
    DELETE FROM _sluice.drain AS d
    WHERE NOT d.stays
        AND d.drained_at IS NULL
        AND NOT EXISTS (SELECT FROM _sluice.drain_waiter AS w WHERE w.db_oid = d.db_oid)
$$;
COMMENT ON FUNCTION _sluice.end_unwanted_drains() IS 'Ends requests that were not reached and that nobody waits for any more';

CREATE FUNCTION _sluice.withdraw_drain(_db_oid oid, _pid integer, _backend_start timestamptz)
RETURNS void
LANGUAGE sql
SET search_path = pg_catalog, pg_temp
AS $$
    -- Calls that join or withdraw at the same time see each other.
    SELECT _sluice.close_gate();
    DELETE FROM _sluice.drain_waiter AS w
    WHERE w.db_oid = _db_oid AND w.pid = _pid AND w.backend_start = _backend_start;
    SELECT _sluice.end_unwanted_drains();
    SELECT pg_notify('sluice_wake', '');
$$;
COMMENT ON FUNCTION _sluice.withdraw_drain(oid, integer, timestamptz) IS
    'A call was cancelled before its answer: the request goes with the last call that waits for it';

CREATE FUNCTION _sluice.withdraw_abandoned_drains()
RETURNS void
LANGUAGE sql
SET search_path = pg_catalog, pg_temp
AS $$
    DELETE FROM _sluice.drain_waiter AS w
    WHERE NOT EXISTS (
        SELECT FROM pg_stat_activity AS a WHERE a.pid = w.pid AND a.backend_start = w.backend_start
    );
    SELECT _sluice.end_unwanted_drains();
$$;
COMMENT ON FUNCTION _sluice.withdraw_abandoned_drains() IS 'As withdraw_drain, for calls whose backend vanished';

CREATE FUNCTION _sluice.end_drain(_db_oid oid)
RETURNS void
LANGUAGE sql
SET search_path = pg_catalog, pg_temp
AS $$
    DELETE FROM _sluice.drain AS d WHERE d.db_oid = _db_oid;
    SELECT pg_notify('sluice_wake', '');
$$;
COMMENT ON FUNCTION _sluice.end_drain(oid) IS 'What resume() does; nothing when no drain is in force';

CREATE FUNCTION _sluice.drain_in_force(_db_oid oid)
RETURNS boolean
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT EXISTS (SELECT FROM _sluice.drain AS d WHERE d.db_oid IN (0, _db_oid))
$$;
COMMENT ON FUNCTION _sluice.drain_in_force(oid) IS 'Whether a drain of the database or of the server is requested';

CREATE FUNCTION _sluice.drain_rows(_db_oid oid)
RETURNS jsonb
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT COALESCE(jsonb_agg(jsonb_build_object(
        'scope', CASE WHEN d.db_oid = 0 THEN 'cluster' ELSE 'database' END,
        'state', CASE WHEN o.active = 0 THEN 'drained' ELSE 'draining' END,
        'requested_by', d.requested_by,
        'requested_at', d.requested_at,
        'drained_at', d.drained_at,
        'active', o.active,
        'waiting_for', o.waiting_for
    ) ORDER BY d.db_oid), '[]')
    FROM _sluice.drain AS d
    CROSS JOIN LATERAL (
        SELECT count(*) AS active, string_agg(x.obstacle, ', ' ORDER BY x.obstacle) AS waiting_for
        FROM _sluice.drain_obstacles(d.db_oid) AS x
    ) AS o
    WHERE d.db_oid IN (0, _db_oid)
$$;
COMMENT ON FUNCTION _sluice.drain_rows(oid) IS 'The rows of sluice.drain_status() for a database';
