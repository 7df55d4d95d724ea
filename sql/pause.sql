-- Control database: paused nodes. Requests come and go as those of a drain do, see drain.sql.

CREATE TABLE _sluice.pause (
    db_oid oid NOT NULL,
    pgt_id bigint NOT NULL,
    name text NOT NULL,
    requested_by text NOT NULL,
    requested_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    -- Stays though nobody waits for it: it was asked for so, or a call has its answer.
    stays boolean NOT NULL DEFAULT false,
    CONSTRAINT pause_pkey PRIMARY KEY (db_oid, pgt_id)
);

CREATE TABLE _sluice.pause_waiter (
    db_oid oid NOT NULL,
    pgt_id bigint NOT NULL,
    pid integer NOT NULL,
    backend_start timestamptz NOT NULL,
    CONSTRAINT pause_waiter_pkey PRIMARY KEY (db_oid, pgt_id, pid, backend_start),
    CONSTRAINT pause_waiter_pause_fkey FOREIGN KEY (db_oid, pgt_id) REFERENCES _sluice.pause ON DELETE CASCADE
);
COMMENT ON TABLE _sluice.pause_waiter IS
    'The calls that wait for a node to end its run. A pause that was not reached goes with the last of them';

CREATE VIEW _sluice.pause_in_force AS
SELECT p.db_oid, p.pgt_id, p.name, p.requested_by, p.requested_at
FROM _sluice.pause AS p
WHERE p.stays
    OR EXISTS (
        SELECT FROM _sluice.pause_waiter AS w
        JOIN pg_catalog.pg_stat_activity AS a ON a.pid = w.pid AND a.backend_start = w.backend_start
        WHERE w.db_oid = p.db_oid AND w.pgt_id = p.pgt_id
    );
COMMENT ON VIEW _sluice.pause_in_force IS
    'The paused nodes without those whose callers all vanished before their answer; claims look at the table itself';

CREATE FUNCTION _sluice.end_abandoned_pauses()
RETURNS bigint
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_ended bigint;
BEGIN
    DELETE FROM _sluice.pause AS p
    -- The row itself too: one that is reached or kept at this moment is looked at again.
    WHERE NOT p.stays AND NOT EXISTS (
        SELECT FROM _sluice.pause_in_force AS f WHERE f.db_oid = p.db_oid AND f.pgt_id = p.pgt_id
    );
    GET DIAGNOSTICS v_ended = ROW_COUNT;
    RETURN v_ended;
END;
$$;
COMMENT ON FUNCTION _sluice.end_abandoned_pauses() IS
    'Ends pauses that were not reached and that nobody waits for any more; gives how many';

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
    PERFORM _sluice.end_abandoned_pauses();
    INSERT INTO _sluice.pause AS p (db_oid, pgt_id, name, requested_by)
    SELECT DISTINCT ON (n.pgt_id) _db_oid, n.pgt_id, n.name, _requested_by
    FROM jsonb_to_recordset(_nodes) AS n (pgt_id bigint, name text)
    -- Locked, so that no unpause() takes it away before its waiter is there.
    ON CONFLICT (db_oid, pgt_id) DO UPDATE SET stays = p.stays;
    IF (SELECT count(*) FROM _sluice.pause AS p WHERE p.db_oid = _db_oid) > v_capacity THEN
        RAISE EXCEPTION USING
            ERRCODE = 'configuration_limit_exceeded',
            MESSAGE = 'too many paused nodes',
            DETAIL = format('A database can have %s paused nodes (max_pause_entries).', v_capacity),
            HINT = 'End some with sluice.unpause(), or use sluice.drain() to stop the whole database.';
    END IF;
    INSERT INTO _sluice.pause_waiter (db_oid, pgt_id, pid, backend_start)
    SELECT _db_oid, n.pgt_id, _pid, _backend_start
    FROM jsonb_to_recordset(_nodes) AS n (pgt_id bigint)
    ON CONFLICT DO NOTHING;
END;
$$;
COMMENT ON FUNCTION _sluice.request_pause(oid, jsonb, text, integer, timestamptz) IS
    'Pauses all of the nodes or none, or joins the pauses in force, for as long as that session waits. Once it has committed no claim of these nodes follows';

CREATE FUNCTION _sluice.keep_pause(_db_oid oid, _pgt_ids bigint[])
RETURNS void
LANGUAGE sql
SET search_path = pg_catalog, pg_temp
AS $$
    UPDATE _sluice.pause AS p SET stays = true WHERE p.db_oid = _db_oid AND p.pgt_id = ANY (_pgt_ids)
$$;
COMMENT ON FUNCTION _sluice.keep_pause(oid, bigint[]) IS
    'A call ends without its answer, at its timeout or as it does not wait: what it paused stays paused without it';

CREATE FUNCTION _sluice.check_pause(_db_oid oid, _pgt_ids bigint[])
RETURNS boolean
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    -- unpause() and another pause can come while we look.
    v_latest CONSTANT timestamptz := (
        SELECT max(p.requested_at) FROM _sluice.pause AS p WHERE p.db_oid = _db_oid AND p.pgt_id = ANY (_pgt_ids)
    );
BEGIN
    IF EXISTS (SELECT FROM _sluice.obstacles(_db_oid, _pgt_ids)) THEN
        RETURN CASE WHEN _sluice.are_paused(_db_oid, _pgt_ids) THEN false END;
    END IF;
    UPDATE _sluice.pause AS p SET stays = true
    WHERE p.db_oid = _db_oid AND p.pgt_id = ANY (_pgt_ids) AND NOT p.stays AND p.requested_at <= v_latest;
    RETURN CASE WHEN _sluice.are_paused(_db_oid, _pgt_ids) AND NOT EXISTS (
        SELECT FROM _sluice.pause AS p
        WHERE p.db_oid = _db_oid AND p.pgt_id = ANY (_pgt_ids) AND p.requested_at > v_latest
    ) THEN true END;
END;
$$;
COMMENT ON FUNCTION _sluice.check_pause(oid, bigint[]) IS
    'NULL: not all of these nodes of the database are paused any more. false: one of them runs. true: none runs and none will start; the pauses then outlive their requester';

CREATE FUNCTION _sluice.are_paused(_db_oid oid, _pgt_ids bigint[])
RETURNS boolean
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT NOT EXISTS (
        SELECT FROM unnest(_pgt_ids) AS n
        WHERE NOT EXISTS (SELECT FROM _sluice.pause AS p WHERE p.db_oid = _db_oid AND p.pgt_id = n)
    )
$$;
COMMENT ON FUNCTION _sluice.are_paused(oid, bigint[]) IS 'Whether each of these nodes has an entry';

CREATE FUNCTION _sluice.withdraw_pause(_db_oid oid, _pid integer, _backend_start timestamptz)
RETURNS void
LANGUAGE sql
SET search_path = pg_catalog, pg_temp
AS $$
    -- Calls that join or withdraw at the same time see each other.
    SELECT _sluice.close_gate();
    DELETE FROM _sluice.pause_waiter AS w
    WHERE w.db_oid = _db_oid AND w.pid = _pid AND w.backend_start = _backend_start;
    SELECT _sluice.wake() WHERE _sluice.end_abandoned_pauses() > 0;
$$;
COMMENT ON FUNCTION _sluice.withdraw_pause(oid, integer, timestamptz) IS
    'A call was cancelled before its answer: a pause goes with the last call that waits for it';

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
    PERFORM _sluice.wake();
    RETURN v_ended;
END;
$$;
COMMENT ON FUNCTION _sluice.end_pause(oid, bigint[]) IS 'Ends the pause of these nodes; gives how many were paused';
