-- Joining and leaving, the leader, and what they need.

CREATE FUNCTION _sluice.control_database()
RETURNS text
LANGUAGE sql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT current_setting('cron.database_name', true)
$$;
COMMENT ON FUNCTION _sluice.control_database() IS
    'The database that pg_cron works from; NULL when the server has not loaded pg_cron';

CREATE FUNCTION _sluice.database_oid()
RETURNS bigint
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT d.oid::bigint FROM pg_database AS d WHERE d.datname = current_database()
$$;
COMMENT ON FUNCTION _sluice.database_oid() IS 'The OID of this database, which keys all state in the control database';

CREATE FUNCTION _sluice.control(_function text, _arguments jsonb)
RETURNS jsonb
LANGUAGE sql
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT _sluice.unwrap(_sluice.invoke_privileged(
        'control', jsonb_build_object('function', _function, 'arguments', _arguments)
    ))
$$;
COMMENT ON FUNCTION _sluice.control(text, jsonb) IS
    'Calls a function of _sluice in the control database over a connection of its own: it takes effect at once';

CREATE FUNCTION sluice.preflight()
RETURNS TABLE ("check" text, ok boolean, detail text, hint text)
LANGUAGE sql VOLATILE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT r."check", r.ok, r.detail, r.hint
    FROM jsonb_to_recordset(_sluice.unwrap(_sluice.invoke_privileged('preflight', '{}')))
        AS r ("check" text, ok boolean, detail text, hint text)
$$;
COMMENT ON FUNCTION sluice.preflight() IS
'Everything that start() needs, one row each: pg_cron, its version and mode, the connections it and the scheduler make, settings that would end a long session. Changes nothing.';

CREATE FUNCTION sluice.start()
RETURNS void
LANGUAGE sql VOLATILE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT _sluice.unwrap(_sluice.invoke_privileged('start', jsonb_build_object('user', session_user)))
$$;
COMMENT ON FUNCTION sluice.start() IS
'Makes this database a member, so that its nodes are scheduled, and sees to the one pg_cron entry in the control database. Takes effect at once, whether or not the calling transaction commits. Idempotent. An error names the first failed check of preflight().';

CREATE FUNCTION sluice.stop()
RETURNS void
LANGUAGE sql VOLATILE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT _sluice.control('leave_database', jsonb_build_object('_db_oid', _sluice.database_oid()))
$$;
COMMENT ON FUNCTION sluice.stop() IS
'Ends the scheduling of this database at once: queued runs are forgotten, running ones end as usual, and the scheduler''s connections go within a tick. The last member to stop takes the pg_cron entry along. Idempotent.';

CREATE PROCEDURE sluice.run(run_for interval DEFAULT '1 hour')
LANGUAGE plpgsql
AS $$
DECLARE
    v_result jsonb;
BEGIN
    IF run_for IS NULL THEN
        RAISE EXCEPTION USING ERRCODE = 'null_value_not_allowed', MESSAGE = 'run_for must not be null';
    END IF;
    CALL _sluice.lead(pg_catalog.date_part('epoch', run_for), v_result);
    PERFORM _sluice.unwrap(v_result);
END;
$$;
COMMENT ON PROCEDURE sluice.run(interval) IS
'The leader: schedules all member databases for that long, then ends. ''0'' makes one pass over all members, runs what is due, and ends. pg_cron calls it in the control database; must not be called inside a transaction block. A second leader waits one lease (lease_ttl) for the first to lapse and ends if it does not. Only for superusers.';
