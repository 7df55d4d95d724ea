-- Joining and leaving, the leader, and what they need.

CREATE FUNCTION _sluice.database_oid()
RETURNS bigint
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN (SELECT d.oid FROM pg_database AS d WHERE d.datname = current_database());
END;
$$;
COMMENT ON FUNCTION _sluice.database_oid() IS 'The OID of this database, which keys all state in the control database';

CREATE FUNCTION _sluice.extension_version()
RETURNS text
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT e.extversion FROM pg_extension AS e WHERE e.extname = 'pg_sluice'
$$;
COMMENT ON FUNCTION _sluice.extension_version() IS 'The version of the extension in this database';

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

CREATE FUNCTION _sluice.commit_without_flush()
RETURNS void
LANGUAGE sql
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT set_config('synchronous_commit', 'off', true)
$$;
COMMENT ON FUNCTION _sluice.commit_without_flush() IS
    'This transaction''s commit waits for no flush and no standby: a crash may undo it until something is flushed that is committed later';

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
'Everything that start() needs, one row each: pg_cron, its version and mode, the connections it and the scheduler make, settings that would end a long session; and whether pg_cron has an active entry for the leader, which start() sees to. Changes nothing.';

CREATE TABLE _sluice.home (
    singleton boolean NOT NULL DEFAULT true
        CONSTRAINT home_pkey PRIMARY KEY
        CONSTRAINT home_singleton_check CHECK (singleton),
    db_oid oid NOT NULL
);
COMMENT ON TABLE _sluice.home IS 'The database that the nodes, their errors and their history belong to';

CREATE FUNCTION _sluice.rehome()
RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_former oid;
BEGIN
    SELECT h.db_oid INTO v_former FROM _sluice.home AS h FOR UPDATE;
    IF v_former = _sluice.database_oid() THEN
        RETURN;
    END IF;
    INSERT INTO _sluice.home (db_oid) VALUES (_sluice.database_oid())
    ON CONFLICT (singleton) DO UPDATE SET db_oid = EXCLUDED.db_oid;
    IF v_former IS NOT NULL THEN
        -- A copy made from a template: what its original went through is not its own.
        DELETE FROM _sluice.history;
        DELETE FROM _sluice.alert;
        DELETE FROM _sluice.baseline;
        UPDATE _sluice.upkeep AS u
        SET place = NULL, due_at = clock_timestamp(), deleted = 0, last_at = NULL, error = NULL;
        UPDATE _sluice.node_state AS s
        SET consecutive_errors = 0, work_mem = NULL, successes = 0, gated_since = NULL, last_run_at = NULL, last_outcome = NULL,
            runs = '{}', run_seconds = 0, rows_changed = 0;
        UPDATE _sluice.node AS n
        SET fired_at = NULL, retry_at = NULL, retry_of = NULL,
            status = CASE WHEN n.status IN ('suspended', 'quarantined') THEN 'active' ELSE n.status END;
        PERFORM _sluice.settle(ARRAY(SELECT n.pgt_id FROM _sluice.node AS n), true);
    END IF;
END;
$$;
COMMENT ON FUNCTION _sluice.rehome() IS
    'Makes the nodes this database''s own; in a copy of a member it clears the errors, alerts and history of the original and starts new grids';

CREATE FUNCTION sluice.start()
RETURNS void
LANGUAGE sql VOLATILE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT _sluice.rehome();
    SELECT _sluice.unwrap(_sluice.invoke_privileged('start', jsonb_build_object('user', _sluice.shown_name(session_user))))
$$;
COMMENT ON FUNCTION sluice.start() IS
'Makes this database a member, so that its nodes are scheduled, and sees to the pg_cron entry in the control database, and to that of the metrics where metrics_listen is set; it also activates them and brings them up to date with the server''s cron.host and port. Takes effect at once, whether or not the calling transaction commits. Idempotent. In a copy that was made from a template of a member it also makes the nodes its own, as part of the transaction: their errors, alerts and history are cleared and their grids begin anew. An error names the first failed check of preflight(), but for the one of the entry.';

CREATE FUNCTION sluice.stop()
RETURNS void
LANGUAGE sql VOLATILE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT _sluice.control('leave_database', jsonb_build_object('_db_oid', _sluice.database_oid()))
$$;
COMMENT ON FUNCTION sluice.stop() IS
'Ends the scheduling of this database at once: queued runs are forgotten, running ones end as usual, and the scheduler''s connections go within a tick. The last member to stop takes the pg_cron entries along. Idempotent.';

CREATE PROCEDURE sluice.run(run_for interval DEFAULT '1 hour')
LANGUAGE plpgsql
AS $$
DECLARE
    v_result jsonb;
BEGIN
    CALL _sluice.lead(pg_catalog.date_part('epoch', run_for), v_result);
    PERFORM _sluice.unwrap(v_result);
END;
$$;
COMMENT ON PROCEDURE sluice.run(interval) IS
'The leader: schedules all member databases for that long, then ends. Where a run takes longer it goes on scheduling until there is a moment without long runs, however late that is. ''0'' makes one pass over all members, runs what is due, and ends. pg_cron calls it in the control database; must not be called inside a transaction block. A second leader waits one lease (lease_ttl) for the first to lapse and ends if it does not. Only for superusers.';
