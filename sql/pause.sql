-- Control database: paused nodes.

CREATE TABLE _sluice.pause (
    db_oid oid NOT NULL,
    pgt_id bigint NOT NULL,
    name text NOT NULL,
    requested_by text NOT NULL,
    requested_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    CONSTRAINT pause_pkey PRIMARY KEY (db_oid, pgt_id)
);

CREATE FUNCTION _sluice.request_pause(_db_oid oid, _nodes jsonb, _requested_by text)
RETURNS bigint[]
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_capacity CONSTANT integer := _sluice.setting('max_pause_entries');
    v_added bigint[];
BEGIN
    PERFORM _sluice.close_gate();
    WITH added AS (
        INSERT INTO _sluice.pause AS p (db_oid, pgt_id, name, requested_by)
        SELECT _db_oid, n.pgt_id, n.name, _requested_by
        FROM jsonb_to_recordset(_nodes) AS n (pgt_id bigint, name text)
        ON CONFLICT (db_oid, pgt_id) DO NOTHING
        RETURNING p.pgt_id
    )
    SELECT array_agg(a.pgt_id) INTO v_added FROM added AS a;
    IF (SELECT count(*) FROM _sluice.pause AS p WHERE p.db_oid = _db_oid) > v_capacity THEN
        RAISE EXCEPTION USING
            ERRCODE = 'configuration_limit_exceeded',
            MESSAGE = 'too many paused nodes',
            DETAIL = format('A database can have %s paused nodes (max_pause_entries).', v_capacity),
            HINT = 'End some with sluice.unpause(), or use sluice.drain() to stop the whole database.';
    END IF;
    RETURN COALESCE(v_added, '{}');
END;
$$;
COMMENT ON FUNCTION _sluice.request_pause(oid, jsonb, text) IS
    'Pauses all of the nodes or none; gives those that were not paused already';

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
