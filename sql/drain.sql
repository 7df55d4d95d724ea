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

CREATE VIEW _sluice.drain_in_force AS
SELECT d.db_oid, d.requested_by, d.requested_at, d.drained_at
FROM _sluice.drain AS d
WHERE d.stays
    OR d.drained_at IS NOT NULL
    OR EXISTS (
        SELECT FROM _sluice.drain_waiter AS w
        JOIN pg_catalog.pg_stat_activity AS a ON a.pid = w.pid AND a.backend_start = w.backend_start
        WHERE w.db_oid = d.db_oid
    );
COMMENT ON VIEW _sluice.drain_in_force IS
    'The requests without those whose callers all vanished before they were reached. Claims look at the table itself: it is cheaper, and such a request holds them back until the leader has taken it away';

CREATE FUNCTION _sluice.request_drain(
    _db_oid oid, _requested_by text, _pid integer, _backend_start timestamptz
)
RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM _sluice.close_gate();
    PERFORM _sluice.end_abandoned_drains();
    INSERT INTO _sluice.drain AS d (db_oid, requested_by)
    VALUES (_db_oid, _requested_by)
    -- Locked, so that no resume() takes it away before its waiter is there.
    ON CONFLICT (db_oid) DO UPDATE SET stays = d.stays;
    INSERT INTO _sluice.drain_waiter (db_oid, pid, backend_start)
    VALUES (_db_oid, _pid, _backend_start)
    ON CONFLICT DO NOTHING;
END;
$$;
COMMENT ON FUNCTION _sluice.request_drain(oid, text, integer, timestamptz) IS
    'Asks for a drain, or joins the one in force, for as long as that session waits. Once it has committed no claim of the scope follows';

CREATE FUNCTION _sluice.obstacles(_db_oid oid, _pgt_ids bigint[])
RETURNS TABLE (obstacle text)
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT format('run of "%s"', q.name)
    FROM _sluice.queue AS q
    WHERE q.state = 'running' AND _db_oid IN (0, q.db_oid) AND NOT _sluice.is_orphaned(q)
        AND (_pgt_ids IS NULL OR q.pgt_id = ANY (_pgt_ids))
    UNION ALL
    -- A manual refresh holds the node's lock and has no row in the queue; nor has, as far as this goes, a
    -- job whose leader is gone and that goes by another application_name.
    SELECT format('manual refresh by process %s', l.pid)
    FROM _sluice.node_lock AS l
    WHERE _db_oid IN (0, l.db_oid)
        AND (_pgt_ids IS NULL OR l.pgt_id = ANY (_pgt_ids))
        AND NOT EXISTS (
            SELECT FROM _sluice.queue AS q
            WHERE q.state = 'running' AND q.db_oid = l.db_oid AND q.pgt_id = l.pgt_id
                AND NOT _sluice.is_orphaned(q)
        )
$$;
COMMENT ON FUNCTION _sluice.obstacles(oid, bigint[]) IS
    'What still runs of these nodes (NULL: of all) in a database (0: on the server)';

CREATE FUNCTION _sluice.check_drain(_db_oid oid)
RETURNS boolean
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    -- resume() and another drain can come while we look.
    v_asked CONSTANT timestamptz := (
        SELECT d.requested_at FROM _sluice.drain_in_force AS d WHERE d.db_oid = _db_oid
    );
BEGIN
    IF v_asked IS NULL THEN
        RETURN NULL;
    ELSIF EXISTS (SELECT FROM _sluice.obstacles(_db_oid, NULL)) THEN
        RETURN false;
    END IF;
    IF NOT pg_is_in_recovery() THEN
        UPDATE _sluice.drain AS d SET drained_at = clock_timestamp()
        WHERE d.db_oid = _db_oid AND d.requested_at = v_asked AND d.drained_at IS NULL;
    END IF;
    RETURN CASE WHEN EXISTS (
        SELECT FROM _sluice.drain AS d WHERE d.db_oid = _db_oid AND d.requested_at = v_asked
    ) THEN true END;
END;
$$;
COMMENT ON FUNCTION _sluice.check_drain(oid) IS
    'NULL: no request. false: something still runs. true: nothing runs and nothing will start; the request then outlives its requester';

CREATE FUNCTION _sluice.keep_drain(_db_oid oid)
RETURNS void
LANGUAGE sql
SET search_path = pg_catalog, pg_temp
AS $$
    UPDATE _sluice.drain AS d SET stays = true WHERE d.db_oid = _db_oid
$$;
COMMENT ON FUNCTION _sluice.keep_drain(oid) IS
    'A call ends without its answer, at its timeout or as it does not wait: the request stays in force without it';

CREATE FUNCTION _sluice.end_abandoned_drains()
RETURNS bigint
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_ended bigint;
BEGIN
    DELETE FROM _sluice.drain AS d
    -- The row itself too: one that is reached or kept at this moment is looked at again.
    WHERE NOT d.stays AND d.drained_at IS NULL
        AND NOT EXISTS (SELECT FROM _sluice.drain_in_force AS f WHERE f.db_oid = d.db_oid);
    GET DIAGNOSTICS v_ended = ROW_COUNT;
    RETURN v_ended;
END;
$$;
COMMENT ON FUNCTION _sluice.end_abandoned_drains() IS
    'Ends requests that were not reached and that nobody waits for any more; gives how many';

CREATE FUNCTION _sluice.withdraw_drain(_db_oid oid, _pid integer, _backend_start timestamptz)
RETURNS void
LANGUAGE sql
SET search_path = pg_catalog, pg_temp
AS $$
    -- Calls that join or withdraw at the same time see each other.
    SELECT _sluice.close_gate();
    DELETE FROM _sluice.drain_waiter AS w
    WHERE w.db_oid = _db_oid AND w.pid = _pid AND w.backend_start = _backend_start;
    SELECT _sluice.wake() WHERE _sluice.end_abandoned_drains() > 0;
$$;
COMMENT ON FUNCTION _sluice.withdraw_drain(oid, integer, timestamptz) IS
    'A call was cancelled before its answer: the request goes with the last call that waits for it';

CREATE FUNCTION _sluice.end_drain(_db_oid oid)
RETURNS void
LANGUAGE sql
SET search_path = pg_catalog, pg_temp
AS $$
    DELETE FROM _sluice.drain AS d WHERE d.db_oid = _db_oid;
    SELECT _sluice.wake();
$$;
COMMENT ON FUNCTION _sluice.end_drain(oid) IS 'What resume() does; nothing when no drain is in force';

CREATE FUNCTION _sluice.is_draining(_db_oid oid)
RETURNS boolean
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT EXISTS (SELECT FROM _sluice.drain_in_force AS d WHERE d.db_oid IN (0, _db_oid))
$$;
COMMENT ON FUNCTION _sluice.is_draining(oid) IS 'Whether a drain of the database or of the server is in force';

CREATE FUNCTION _sluice.drain_end(_db_oid oid)
RETURNS text
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT string_agg(
        CASE d.db_oid WHEN 0 THEN 'sluice.resume(cluster => true)' ELSE 'sluice.resume()' END, ' and ' ORDER BY d.db_oid DESC
    )
    FROM _sluice.drain_in_force AS d
    WHERE d.db_oid IN (0, _db_oid)
$$;
COMMENT ON FUNCTION _sluice.drain_end(oid) IS
    'For a hint: the calls that end what drains of the database and of the server are in force; NULL when none is';

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
    FROM _sluice.drain_in_force AS d
    CROSS JOIN LATERAL (
        SELECT count(*) AS active, string_agg(x.obstacle, ', ' ORDER BY x.obstacle) AS waiting_for
        FROM _sluice.obstacles(d.db_oid, NULL) AS x
    ) AS o
    WHERE d.db_oid IN (0, _db_oid)
$$;
COMMENT ON FUNCTION _sluice.drain_rows(oid) IS 'The rows of sluice.drain_status() for a database';
