-- Control database: sessions, who is there and how those end that are to. A process ID alone names none,
-- since another session can have it by now: it goes with backend_start.

CREATE VIEW _sluice.superuser_session AS
SELECT a.pid, a.backend_start, a.datid, a.application_name
FROM pg_stat_activity AS a
JOIN pg_roles AS r ON r.oid = a.usesysid
WHERE r.rolsuper;
COMMENT ON VIEW _sluice.superuser_session IS
    'Sessions whose application_name counts when it is one of ours: every role can read and copy it';

CREATE FUNCTION _sluice.backend_lives(_pid integer, _backend_start timestamptz)
RETURNS boolean
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN EXISTS (SELECT FROM pg_stat_activity AS a WHERE a.pid = _pid AND a.backend_start = _backend_start);
END;
$$;
COMMENT ON FUNCTION _sluice.backend_lives(integer, timestamptz) IS
    'Whether a session is there, and not another one under its number; false for NULLs';

CREATE FUNCTION _sluice.interrupt_backend(_epoch bigint, _pid integer, _since timestamptz, _terminate boolean)
RETURNS timestamptz
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_backend_start timestamptz;
BEGIN
    PERFORM _sluice.enter_gate(_epoch);
    -- The process ID may be another backend's by now.
    SELECT a.backend_start INTO v_backend_start
    FROM pg_stat_activity AS a
    WHERE a.pid = _pid AND _sluice.began_before(a.backend_start, _since);
    IF FOUND THEN
        PERFORM CASE WHEN _terminate THEN pg_terminate_backend(_pid) ELSE pg_cancel_backend(_pid) END;
    END IF;
    RETURN v_backend_start;
END;
$$;
COMMENT ON FUNCTION _sluice.interrupt_backend(bigint, integer, timestamptz, boolean) IS
    'Cancels what a session of the leader''s executes, or ends the session: a run that it began after _since is past its deadline. Gives the start of that backend, NULL when it is gone';

CREATE FUNCTION _sluice.report_stuck_backend(_epoch bigint, _pid integer, _backend_start timestamptz)
RETURNS boolean
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_database text;
BEGIN
    PERFORM _sluice.enter_gate(_epoch);
    SELECT _sluice.shown_name(a.datname) INTO v_database
    FROM pg_stat_activity AS a WHERE a.pid = _pid AND a.backend_start = _backend_start;
    IF FOUND THEN
        PERFORM _sluice.open_alert(
            'session_stuck', 'critical', NULL, v_database,
            format('process %s in database "%s" is past its deadline and does not react to its termination', _pid, v_database),
            jsonb_build_object('pid', _pid, 'backend_start', _backend_start)
        );
    END IF;
    RETURN v_database IS NOT NULL;
END;
$$;
COMMENT ON FUNCTION _sluice.report_stuck_backend(bigint, integer, timestamptz) IS
    'Whether a backend that was to end is still there, and then opens an alert: it runs code that never looks for interrupts. Its slot stays taken, and a drain waits for it, for it does run';

CREATE FUNCTION _sluice.close_stuck_backends()
RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM _sluice.close_alert(a.event, NULL, a.node)
    FROM _sluice.alert AS a
    WHERE a.event = 'session_stuck' AND a.closed_at IS NULL AND NOT _sluice.backend_lives(
        (a.detail ->> 'pid')::integer, (a.detail ->> 'backend_start')::timestamptz
    );
END;
$$;
COMMENT ON FUNCTION _sluice.close_stuck_backends() IS 'Closes the alerts of report_stuck_backend whose backend has ended';

CREATE FUNCTION _sluice.evict_former_sessions(_epoch bigint)
RETURNS bigint
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM _sluice.enter_gate(_epoch);
    RETURN (
        SELECT count(*) FILTER (WHERE pg_terminate_backend(a.pid))
        FROM pg_stat_activity AS a
        WHERE EXISTS (
            SELECT FROM _sluice.slot AS s
            WHERE s.epoch < _epoch AND (
                (a.pid = s.pid AND a.backend_start = s.backend_start)
                OR a.application_name = _sluice.worker_application_name(s.nonce)
            )
        ) OR (
            starts_with(a.application_name, 'pg_sluice worker ') AND NOT EXISTS (
                SELECT FROM _sluice.slot AS s
                WHERE a.application_name = _sluice.worker_application_name(s.nonce)
            )
        ) OR substring(a.application_name FROM '^pg_sluice (?:scheduler|job|upkeep) ([0-9]+)$')::numeric < _epoch
    );
END;
$$;
COMMENT ON FUNCTION _sluice.evict_former_sessions(bigint) IS
    'Ends what sessions of former leaders are left: one that is frozen keeps its workers'' connections open';
