-- Control database: paused nodes.

CREATE TABLE _sluice.pause (
    db_oid oid NOT NULL,
    pgt_id bigint NOT NULL,
    name text NOT NULL,
    requested_by text NOT NULL,
    requested_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    -- The call that waits for its answer; NULL once it has it.
    pid integer,
    backend_start timestamptz,
    CONSTRAINT pause_waiter_check CHECK ((pid IS NULL) = (backend_start IS NULL)),
    CONSTRAINT pause_pkey PRIMARY KEY (db_oid, pgt_id)
);

CREATE FUNCTION _sluice.request_pause(
    _db_oid oid, _nodes jsonb, _requested_by text, _pid integer, _backend_start timestamptz
)
RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_capacity CONSTANT integer := _sluice.setting('max_pause_entries');
BEGIN
    PERFORM _sluice.close_gate();
    INSERT INTO _sluice.pause AS p (db_oid, pgt_id, name, requested_by, pid, backend_start)
    SELECT DISTINCT ON (n.pgt_id) _db_oid, n.pgt_id, n.name, _requested_by, _pid, _backend_start
    FROM jsonb_to_recordset(_nodes) AS n (pgt_id bigint, name text)
    -- Who joins a pause that another call still waits for wants it to stay.
    ON CONFLICT (db_oid, pgt_id) DO UPDATE SET pid = NULL, backend_start = NULL;
    IF (SELECT count(*) FROM _sluice.pause AS p WHERE p.db_oid = _db_oid) > v_capacity THEN
        RAISE EXCEPTION USING
            ERRCODE = 'configuration_limit_exceeded',
            MESSAGE = 'too many paused nodes',
            DETAIL = format('A database can have %s paused nodes (max_pause_entries).', v_capacity),
            HINT = 'End some with sluice.unpause(), or use sluice.drain() to stop the whole database.';
    END IF;
END;
$$;
COMMENT ON FUNCTION _sluice.request_pause(oid, jsonb, text, integer, timestamptz) IS
    'Pauses all of the nodes or none; a NULL pid asks for a pause that stays without a waiter';

CREATE FUNCTION _sluice.keep_pause(_db_oid oid, _pid integer, _backend_start timestamptz)
RETURNS void
LANGUAGE sql
SET search_path = pg_catalog, pg_temp
AS $$
    UPDATE _sluice.pause AS p SET pid = NULL, backend_start = NULL
    WHERE p.db_oid = _db_oid AND p.pid = _pid AND p.backend_start = _backend_start
$$;
COMMENT ON FUNCTION _sluice.keep_pause(oid, integer, timestamptz) IS
    'A call has its answer, or ended at its timeout: what it paused stays paused without it';

CREATE FUNCTION _sluice.withdraw_pause(_db_oid oid, _pid integer, _backend_start timestamptz)
RETURNS void
LANGUAGE sql
SET search_path = pg_catalog, pg_temp
AS $$
    DELETE FROM _sluice.pause AS p
    WHERE p.db_oid = _db_oid AND p.pid = _pid AND p.backend_start = _backend_start;
    SELECT pg_notify('sluice_wake', '');
$$;
COMMENT ON FUNCTION _sluice.withdraw_pause(oid, integer, timestamptz) IS
    'A call was cancelled before its answer: what it paused goes with it';

CREATE FUNCTION _sluice.withdraw_abandoned_pauses()
RETURNS void
LANGUAGE sql
SET search_path = pg_catalog, pg_temp
AS $$
    DELETE FROM _sluice.pause AS p
    WHERE p.pid IS NOT NULL
        AND NOT EXISTS (
            SELECT FROM pg_stat_activity AS a WHERE a.pid = p.pid AND a.backend_start = p.backend_start
        )
$$;
COMMENT ON FUNCTION _sluice.withdraw_abandoned_pauses() IS 'As withdraw_pause, for calls whose backend vanished';

CREATE FUNCTION _sluice.pause_is_done(_db_oid oid, _pgt_ids bigint[])
RETURNS boolean
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT NOT EXISTS (
        SELECT FROM _sluice.queue AS q
        WHERE q.db_oid = _db_oid AND q.pgt_id = ANY (_pgt_ids) AND q.state = 'running'
    ) AND NOT EXISTS (
        SELECT FROM pg_locks AS l
        WHERE l.locktype = 'advisory' AND l.classid = _sluice.lock_class('node')::oid AND l.objsubid = 2
            AND l.granted AND l.database = _db_oid AND l.objid::bigint = ANY (_pgt_ids)
    )
$$;
COMMENT ON FUNCTION _sluice.pause_is_done(oid, bigint[]) IS 'Whether none of these nodes of this database runs';

CREATE FUNCTION _sluice.end_pause(_db_oid oid, _pgt_ids bigint[])
RETURNS integer
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_ended integer;
BEGIN
    DELETE FROM _sluice.pause AS p WHERE p.db_oid = _db_oid AND p.pgt_id = ANY (_pgt_ids);
    GET DIAGNOSTICS v_ended = ROW_COUNT;
    PERFORM pg_notify('sluice_wake', '');
    RETURN v_ended;
END;
$$;
COMMENT ON FUNCTION _sluice.end_pause(oid, bigint[]) IS 'Ends the pause of these nodes; gives how many were paused';
