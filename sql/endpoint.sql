-- Control database: the session that serves the metrics over HTTP. pg_cron starts it, as it starts the
-- leader, see _sluice.arrange_endpoint().

CREATE FUNCTION _sluice.endpoint_settings(
    OUT host text, OUT port integer, OUT address text, OUT timeout_seconds double precision, OUT version text
)
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    SELECT a.host, a.port, e.value INTO host, port, address
    FROM _sluice.effective_setting AS e
    CROSS JOIN _sluice.parse_address(e.value) AS a
    WHERE e.name = 'metrics_listen' AND EXISTS (SELECT FROM _sluice.member);
    timeout_seconds := _sluice.setting('metrics_timeout');
    version := _sluice.extension_version();
END;
$$;
COMMENT ON FUNCTION _sluice.endpoint_settings() IS
    'Where the endpoint listens, how long a collection may take, and the version of the extension. No host: it is off, or there are no members';

CREATE FUNCTION _sluice.record_endpoint(_error text)
RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF _error IS NULL THEN
        PERFORM _sluice.close_alerts('metrics_failed');
    ELSE
        PERFORM _sluice.open_alert('metrics_failed', 'warning', NULL, _sluice.here(), _error);
    END IF;
END;
$$;
COMMENT ON FUNCTION _sluice.record_endpoint(text) IS
    'Opens an alert about an endpoint that cannot listen; NULL closes it: the endpoint listens, or is off';

CREATE TABLE _sluice.endpoint (
    singleton boolean NOT NULL DEFAULT true
        CONSTRAINT endpoint_pkey PRIMARY KEY
        CONSTRAINT endpoint_singleton_check CHECK (singleton),
    pid integer,
    backend_start timestamptz,
    CONSTRAINT endpoint_identity_check CHECK ((pid IS NULL) = (backend_start IS NULL))
);
COMMENT ON TABLE _sluice.endpoint IS
    'The session that serves. One row; a session that has ended without a word is left in it, and serves no more';
INSERT INTO _sluice.endpoint DEFAULT VALUES;

CREATE FUNCTION _sluice.begin_serving(_pid integer, _backend_start timestamptz)
RETURNS boolean
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_endpoint _sluice.endpoint%ROWTYPE;
BEGIN
    PERFORM _sluice.commit_without_flush();
    SELECT * INTO STRICT v_endpoint FROM _sluice.endpoint FOR NO KEY UPDATE;
    -- What this transaction has seen of the sessions can be older than the one that serves.
    PERFORM pg_stat_clear_snapshot();
    IF _sluice.backend_lives(v_endpoint.pid, v_endpoint.backend_start)
        AND (v_endpoint.pid, v_endpoint.backend_start) IS DISTINCT FROM (_pid, _backend_start)
    THEN
        RETURN false;
    END IF;
    UPDATE _sluice.endpoint AS e SET pid = _pid, backend_start = _backend_start;
    RETURN true;
END;
$$;
COMMENT ON FUNCTION _sluice.begin_serving(integer, timestamptz) IS
    'From its commit on this session serves, and no other until it calls end_serving() or ends; false while another one does';

CREATE FUNCTION _sluice.end_serving(_pid integer, _backend_start timestamptz)
RETURNS void
LANGUAGE sql
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT _sluice.commit_without_flush();
    UPDATE _sluice.endpoint AS e SET pid = NULL, backend_start = NULL
    WHERE e.pid = _pid AND e.backend_start = _backend_start;
$$;
COMMENT ON FUNCTION _sluice.end_serving(integer, timestamptz) IS 'This session serves no more; nothing when another one does';

CREATE FUNCTION _sluice.endpoint_state()
RETURNS jsonb
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT jsonb_build_object(
        'address', CASE WHEN s.host IS NOT NULL THEN s.address END,
        'lives', (SELECT _sluice.backend_lives(e.pid, e.backend_start) FROM _sluice.endpoint AS e),
        'entry', _sluice.entry_state('pg_sluice metrics'),
        'error', (SELECT a.message FROM _sluice.alert AS a WHERE a.event = 'metrics_failed' AND a.closed_at IS NULL)
    )
    FROM _sluice.endpoint_settings() AS s
$$;
COMMENT ON FUNCTION _sluice.endpoint_state() IS 'What health_check() says about the endpoint';

CREATE FUNCTION _sluice.endpoint_health(_state jsonb)
RETURNS TABLE ("check" text, status text, detail text, hint text)
LANGUAGE sql IMMUTABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT 'metrics',
        CASE WHEN s.address IS NULL OR (s.lives AND s.error IS NULL) THEN 'ok' ELSE 'warn' END,
        CASE
            WHEN s.address IS NULL THEN 'not served over HTTP'
            WHEN s.error IS NOT NULL THEN s.error
            WHEN s.lives THEN format('served on %s', s.address)
            ELSE format('not served on %s yet', s.address)
        END,
        CASE
            WHEN s.address IS NULL THEN NULL
            WHEN s.error IS NOT NULL THEN 'It is tried again within a minute; sluice.configure(''metrics_listen'', ..., cluster => true) sets another address.'
            WHEN NOT s.lives AND s.entry <> 'active' THEN format(
                'pg_cron does not start it, since its entry "pg_sluice metrics" is %s; sluice.start() makes it what it should be.', s.entry
            )
            WHEN NOT s.lives THEN 'pg_cron starts it within a minute; otherwise see cron.job_run_details.'
        END
    FROM jsonb_to_record(_state) AS s (address text, lives boolean, entry text, error text)
$$;
COMMENT ON FUNCTION _sluice.endpoint_health(jsonb) IS 'The row of health_check() about the endpoint, from _sluice.endpoint_state()';

CREATE PROCEDURE sluice.serve_metrics(run_for interval DEFAULT '1 hour')
LANGUAGE plpgsql
AS $$
DECLARE
    v_result jsonb;
BEGIN
    CALL _sluice.serve(pg_catalog.date_part('epoch', run_for), v_result);
    PERFORM _sluice.unwrap(v_result);
END;
$$;
COMMENT ON PROCEDURE sluice.serve_metrics(interval) IS
'The endpoint: serves /metrics and /healthz over HTTP for that long, on the address that metrics_listen names, then ends. pg_cron calls it in the control database; must not be called inside a transaction block. Ends at once while another session serves or metrics_listen is off. Where it could not listen, an error (55006, 42501 or 58030) and the alert metrics_failed. Only for superusers.';
