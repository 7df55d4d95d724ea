-- Settings: one definition each, a value for the whole server (scope "cluster") and, where the
-- scope allows it, one for a database, which wins. The server's values are kept in the control
-- database; the leader copies them into every member, so that reading a setting stays local.

CREATE FUNCTION _sluice.parse_address(_address text, OUT host text, OUT port integer)
LANGUAGE plpgsql IMMUTABLE STRICT
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    -- Without backslashes, which standard_conforming_strings decides about.
    v_parts CONSTANT text[] := regexp_match(
        _address, '^(?:(localhost)|([0-9]+(?:[.][0-9]+){3})|[[]([0-9a-fA-F.]*:[0-9a-fA-F:.]*)[]]):([0-9]{1,5})$'
    );
BEGIN
    IF _address = 'off' THEN
        RETURN;
    END IF;
    host := CASE WHEN v_parts[1] IS NOT NULL THEN '127.0.0.1' ELSE host(COALESCE(v_parts[2], v_parts[3])::inet) END;
    port := v_parts[4]::integer;
    IF host IS NULL OR port NOT BETWEEN 1 AND 65535 THEN
        RAISE EXCEPTION USING
            ERRCODE = 'invalid_parameter_value',
            MESSAGE = format('"%s" is no address to listen on', _address);
    END IF;
END;
$$;
COMMENT ON FUNCTION _sluice.parse_address(text) IS
    'The IP address and port of an address to listen on; NULLs for off. A data exception (class 22) where it is none';

CREATE VIEW _sluice.setting_definition AS
SELECT d.name, d.type, d.default_value, d.min_value, d.max_value, d.unit, d.scope, d.description
FROM (VALUES
    ('max_workers', 'integer', '4', '0', '64', NULL, 'cluster',
        'Workers on the whole server at the most. 0 runs every node on the leader, one after the other.'),
    ('database_quota', 'integer', '0', '0', '64', NULL, 'cluster',
        'Workers for one database while others wait. 0 shares the limit evenly.'),
    ('scheduler_interval', 'interval', '1 s', '100 ms', '60 s', 's', 'cluster',
        'Longest time between two ticks of a database.'),
    ('max_scheduler_connections', 'integer', '16', '0', '1000', NULL, 'cluster',
        'Databases that keep a connection of the scheduler. Others are connected to for each tick, and new nodes there are noticed within ten scheduler_intervals.'),
    ('lease_ttl', 'interval', '15 s', '1 s', '5 min', 's', 'cluster',
        'Time after which a leader that stopped renewing its lease is replaced.'),
    ('worker_start_timeout', 'interval', '10 s', '100 ms', '5 min', 's', 'cluster',
        'Time that a worker has to connect before its slot is taken back.'),
    ('worker_idle_timeout', 'interval', '30 s', '0 s', '1 h', 's', 'cluster',
        'Time after which a worker without work gives its slot back.'),
    ('connection_reserve', 'integer', '5', '0', '1000', NULL, 'cluster',
        'Connections of the server that workers leave to others.'),
    ('refresh_timeout', 'interval', '5 min', '1 ms', '24 h', 's', 'database',
        'Deadline of one run; a node can have its own.'),
    ('lock_timeout', 'interval', '5 s', '1 ms', '10 min', 's', 'database',
        'Longest wait for one lock in a run; a node can have its own.'),
    ('refresh_work_mem', 'bytes', '64 MB', '64 kB', '8 GB', 'bytes', 'database',
        'work_mem of a run.'),
    ('drain_timeout', 'interval', '60 s', '0 s', '1 h', 's', 'database',
        'How long drain() waits when it is given no timeout.'),
    ('pause_timeout', 'interval', '30 s', '0 s', '1 h', 's', 'database',
        'How long pause() waits when it is given no timeout.'),
    ('max_consecutive_errors', 'integer', '3', '1', '100', NULL, 'database',
        'Failures in a row after which a node is suspended.'),
    ('recovery_successes', 'integer', '3', '1', '100', NULL, 'database',
        'Successes in a row after which a remedy is eased by one step.'),
    ('retry_backoff_base', 'interval', '1 s', '100 ms', '1 h', 's', 'database',
        'Wait before the first retry; doubled for each further one.'),
    ('retry_backoff_cap', 'interval', '5 min', '100 ms', '24 h', 's', 'database',
        'Longest wait before a retry.'),
    ('max_query_bytes', 'bytes', '64 kB', '1 kB', '1 MB', 'bytes', 'database',
        'Longest query or command that is accepted.'),
    ('max_parse_depth', 'integer', '64', '8', '256', NULL, 'database',
        'Deepest nesting of the parsed query of a stream table.'),
    ('max_parse_nodes', 'integer', '5000', '100', '50000', NULL, 'database',
        'Largest number of nodes in the parsed query of a stream table.'),
    ('max_query_sources', 'integer', '32', '1', '128', NULL, 'database',
        'Largest number of relations that a stream table reads, through views too.'),
    ('max_bulk_definitions', 'integer', '100', '1', '1000', NULL, 'database',
        'Largest number of definitions in one bulk_create().'),
    ('max_bulk_bytes', 'bytes', '1 MB', '1 kB', '8 MB', 'bytes', 'database',
        'Largest argument of bulk_create().'),
    ('max_pause_nodes', 'integer', '100', '1', '1000', NULL, 'cluster',
        'Largest number of nodes in one pause().'),
    ('max_pause_entries', 'integer', '1000', '1', '10000', NULL, 'cluster',
        'Largest number of paused nodes in a database.'),
    ('max_queue_depth', 'integer', '10000', '1', '100000', NULL, 'cluster',
        'Largest number of queued runs of a database; what is due beyond it stays due.'),
    ('history_retention', 'interval', '30 d', '1 s', '10 y', 's', 'database',
        'Age at which history rows and closed alerts are deleted.'),
    ('alert_reminder_interval', 'interval', '15 min', '1 s', '30 d', 's', 'database',
        'Time after which an alert that is still open is announced again.'),
    ('history_rows', 'integer', '10000', '0', '10000000', 'rows', 'database',
        'History rows of one node; the oldest beyond it are deleted. 0 means no limit.'),
    ('maintenance_batch', 'integer', '500', '1', '10000', 'rows', 'database',
        'Rows that one step of upkeep, a transaction, deletes at the most.'),
    ('maintenance_budget', 'interval', '50 ms', '1 ms', '1 s', 's', 'database',
        'Time that upkeep of the whole server takes out of each scheduler_interval, unless runs write more history than it deletes then; no step takes much longer.'),
    ('metrics_listen', 'address', 'off', NULL, NULL, NULL, 'cluster',
        'Where /metrics and /healthz are served over HTTP, as in 127.0.0.1:9188; off: nowhere. There is no authentication.'),
    ('metrics_timeout', 'interval', '5 s', '100 ms', '60 s', 's', 'cluster',
        'Longest time that the collection for a scrape takes.')
) AS d (name, type, default_value, min_value, max_value, unit, scope, description);

CREATE TABLE _sluice.setting (
    scope text NOT NULL CONSTRAINT setting_scope_check CHECK (scope IN ('cluster', 'database')),
    name text NOT NULL,
    value text NOT NULL,
    CONSTRAINT setting_pkey PRIMARY KEY (scope, name)
);
SELECT pg_catalog.pg_extension_config_dump('_sluice.setting', '');

CREATE FUNCTION _sluice.setting_quantity(_type text, _value text)
RETURNS numeric
LANGUAGE plpgsql STABLE STRICT
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN CASE _type
        WHEN 'integer' THEN _value::integer
        WHEN 'interval' THEN extract(epoch FROM _value::interval)
        WHEN 'bytes' THEN pg_size_bytes(_value)
        WHEN 'address' THEN (_sluice.parse_address(_value)).port
    END;
END;
$$;
COMMENT ON FUNCTION _sluice.setting_quantity(text, text) IS
    'A setting''s text as a number: an integer, seconds, bytes, or the port of an address';

CREATE VIEW _sluice.effective_setting AS
SELECT
    d.name,
    d.type,
    COALESCE(own.value, shared.value, d.default_value) AS value,
    d.default_value,
    d.min_value,
    d.max_value,
    d.unit,
    d.scope,
    d.description
FROM _sluice.setting_definition AS d
LEFT JOIN _sluice.setting AS own ON own.name = d.name AND own.scope = 'database'
LEFT JOIN _sluice.setting AS shared ON shared.name = d.name AND shared.scope = 'cluster';

CREATE FUNCTION _sluice.setting(_name text)
RETURNS numeric
LANGUAGE plpgsql STABLE STRICT SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN (
        SELECT _sluice.setting_quantity(e.type, e.value) FROM _sluice.effective_setting AS e WHERE e.name = _name
    );
END;
$$;
COMMENT ON FUNCTION _sluice.setting(text) IS
    'The value in force in this database, as a number: an integer, seconds, or bytes';

CREATE FUNCTION _sluice.interval_setting(_name text)
RETURNS interval
LANGUAGE plpgsql STABLE STRICT
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN make_interval(secs => _sluice.setting(_name)::double precision);
END;
$$;
COMMENT ON FUNCTION _sluice.interval_setting(text) IS 'The value in force of a setting that is an interval';

CREATE FUNCTION _sluice.settings_in_force()
RETURNS jsonb
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN (
        SELECT jsonb_object_agg(e.name, _sluice.setting_quantity(e.type, e.value))
        FROM _sluice.effective_setting AS e
    );
END;
$$;
COMMENT ON FUNCTION _sluice.settings_in_force() IS 'All settings as the leader reads them, as numbers';

CREATE FUNCTION _sluice.check_setting(_name text, _value text, _cluster boolean)
RETURNS void
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_definition _sluice.setting_definition%ROWTYPE;
    v_quantity numeric;
BEGIN
    SELECT * INTO v_definition FROM _sluice.setting_definition AS d WHERE d.name = _name;
    IF NOT FOUND THEN
        RAISE EXCEPTION USING
            ERRCODE = 'undefined_object',
            MESSAGE = format('unrecognized setting %s', COALESCE('"' || _name || '"', 'NULL')),
            HINT = 'The view sluice.settings lists all settings.';
    END IF;
    IF v_definition.scope = 'cluster' AND NOT _cluster THEN
        RAISE EXCEPTION USING
            ERRCODE = 'invalid_parameter_value',
            MESSAGE = format('setting "%s" can only be set for the whole server', _name),
            HINT = 'Pass cluster => true.';
    END IF;
    IF _value IS NULL THEN
        RETURN;
    END IF;
    BEGIN
        v_quantity := _sluice.setting_quantity(v_definition.type, _value);
    EXCEPTION
        WHEN data_exception THEN
            RAISE EXCEPTION USING
                ERRCODE = 'invalid_parameter_value',
                MESSAGE = format('invalid value for setting "%s": "%s"', _name, _value),
                HINT = CASE v_definition.type
                    WHEN 'integer' THEN 'The value is a whole number.'
                    WHEN 'interval' THEN 'The value is an interval such as ''30 s'' or ''5 min''.'
                    WHEN 'address' THEN 'The value is ''off'', or an IP address or localhost with a port, such as ''127.0.0.1:9188'' or ''[::1]:9188''.'
                    ELSE 'The value is a size such as ''64 MB''.'
                END;
    END;
    IF v_quantity NOT BETWEEN _sluice.setting_quantity(v_definition.type, v_definition.min_value)
        AND _sluice.setting_quantity(v_definition.type, v_definition.max_value)
    THEN
        RAISE EXCEPTION USING
            ERRCODE = 'invalid_parameter_value',
            MESSAGE = format(
                '%s is outside the valid range for setting "%s" (%s .. %s)',
                _value, _name, v_definition.min_value, v_definition.max_value
            );
    END IF;
END;
$$;
COMMENT ON FUNCTION _sluice.check_setting(text, text, boolean) IS
    'Raises an error unless the setting exists, may be set in that scope, and the value is within its bounds';

CREATE FUNCTION _sluice.store_setting(_scope text, _name text, _value text)
RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM _sluice.check_setting(_name, _value, _scope = 'cluster');
    IF _value IS NULL THEN
        DELETE FROM _sluice.setting AS s WHERE s.scope = _scope AND s.name = _name;
    ELSE
        INSERT INTO _sluice.setting (scope, name, value) VALUES (_scope, _name, _value)
        ON CONFLICT (scope, name) DO UPDATE SET value = EXCLUDED.value;
    END IF;
    IF _name = 'metrics_listen' THEN
        PERFORM _sluice.arrange_endpoint();
    END IF;
    PERFORM _sluice.wake();
END;
$$;
COMMENT ON FUNCTION _sluice.store_setting(text, text, text) IS
    'Stores a checked value for this database or, in the control database, for the server; NULL restores the default';

CREATE FUNCTION _sluice.cluster_settings()
RETURNS jsonb
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT COALESCE(jsonb_object_agg(s.name, s.value), '{}') FROM _sluice.setting AS s WHERE s.scope = 'cluster'
$$;
COMMENT ON FUNCTION _sluice.cluster_settings() IS 'The server''s values, as copied into the members';

CREATE FUNCTION _sluice.copy_cluster_settings(_settings jsonb)
RETURNS void
LANGUAGE sql
SET search_path = pg_catalog, pg_temp
AS $$
    DELETE FROM _sluice.setting AS s WHERE s.scope = 'cluster' AND NOT _settings ? s.name;
    INSERT INTO _sluice.setting (scope, name, value)
    SELECT 'cluster', e.key, e.value FROM jsonb_each_text(_settings) AS e
    ON CONFLICT (scope, name) DO UPDATE SET value = EXCLUDED.value WHERE setting.value <> EXCLUDED.value;
$$;
COMMENT ON FUNCTION _sluice.copy_cluster_settings(jsonb) IS
    'Makes the member''s copy of the server''s values equal to the argument';
