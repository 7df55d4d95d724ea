-- Conditions that somebody should look at. An open one is a row without closed_at.
--
-- Whoever finds one writes the row, and no more: a notification in the transaction of a run would fail
-- its commit when the server's queue of notifications is full. The leader announces what is pending, in
-- a transaction of its own.
--
--   (none) --open_alert--> open --close_alert--> closed
--   pending: not emitted since it was opened, or since it was closed; and open when a reminder is due

CREATE TABLE _sluice.alert (
    seq bigint GENERATED ALWAYS AS IDENTITY CONSTRAINT alert_pkey PRIMARY KEY,
    event text NOT NULL,
    severity text NOT NULL CONSTRAINT alert_severity_check CHECK (severity IN ('info', 'warning', 'critical')),
    -- What it is about: a node, or in the control database a database.
    node text,
    pgt_id bigint,
    opened_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    closed_at timestamptz,
    -- NULL: not announced yet.
    last_emitted_at timestamptz,
    message text NOT NULL,
    detail jsonb
);
-- Forbids that one condition is open twice.
CREATE UNIQUE INDEX alert_open_key ON _sluice.alert (event, COALESCE(pgt_id::text, node, ''))
    WHERE closed_at IS NULL;
CREATE INDEX alert_closed_at_idx ON _sluice.alert (closed_at) WHERE closed_at IS NOT NULL;
-- Empty but for moments, so that a tick asks for next to nothing.
CREATE INDEX alert_unannounced_idx ON _sluice.alert (opened_at)
    WHERE last_emitted_at IS NULL OR last_emitted_at < closed_at;

CREATE VIEW _sluice.unannounced_alert AS
SELECT a.opened_at, a.xmin::text AS version, a AS alert
FROM _sluice.alert AS a
WHERE a.last_emitted_at IS NULL OR a.last_emitted_at < a.closed_at;
COMMENT ON VIEW _sluice.unannounced_alert IS
    'What was opened or closed and is not announced yet. To be read in the order of opened_at, with a limit: for anything else the planner takes the table for full of them, and does not look at their index';

CREATE FUNCTION _sluice.can_notify()
RETURNS boolean
LANGUAGE sql VOLATILE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT pg_notification_queue_usage() < 0.9
$$;
COMMENT ON FUNCTION _sluice.can_notify() IS
    'Whether the server''s queue of notifications has room. When it is full, which one idle listener in a transaction can bring about, a commit with a notification fails';

CREATE FUNCTION _sluice.wake()
RETURNS void
LANGUAGE sql VOLATILE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT pg_notify('sluice_wake', '') WHERE _sluice.can_notify()
$$;
COMMENT ON FUNCTION _sluice.wake() IS
    'Has the leader look at this database once the transaction commits. A full queue of notifications costs that, and never the transaction: the leader then looks within a scheduler_interval';

CREATE FUNCTION _sluice.open_alert(
    _event text, _severity text, _pgt_id bigint, _node text, _message text, _detail jsonb DEFAULT NULL
)
RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    INSERT INTO _sluice.alert (event, severity, pgt_id, node, message, detail)
    VALUES (_event, _severity, _pgt_id, _node, _message, _detail)
    ON CONFLICT (event, COALESCE(pgt_id::text, node, '')) WHERE closed_at IS NULL DO NOTHING;
    IF FOUND THEN
        PERFORM _sluice.wake();
    END IF;
END;
$$;
COMMENT ON FUNCTION _sluice.open_alert(text, text, bigint, text, text, jsonb) IS
    'Opens a condition, which the leader then announces; does nothing while it is open already';

CREATE FUNCTION _sluice.close_alert(_event text, _pgt_id bigint, _node text DEFAULT NULL)
RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    -- Later than what was announced of it, whatever the clock says: that makes it pending.
    UPDATE _sluice.alert AS a
    SET closed_at = greatest(clock_timestamp(), a.last_emitted_at + interval '1 us')
    WHERE a.event = _event
        AND COALESCE(a.pgt_id::text, a.node, '') = COALESCE(_pgt_id::text, _node, '')
        AND a.closed_at IS NULL;
    IF FOUND THEN
        PERFORM _sluice.wake();
    END IF;
END;
$$;
COMMENT ON FUNCTION _sluice.close_alert(text, bigint, text) IS
    'Closes an open condition, which the leader then announces once, with the severity info';

CREATE FUNCTION _sluice.close_alerts(_event text)
RETURNS void
LANGUAGE sql
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT _sluice.close_alert(a.event, a.pgt_id, a.node)
    FROM _sluice.alert AS a
    WHERE a.event = _event AND a.closed_at IS NULL
$$;
COMMENT ON FUNCTION _sluice.close_alerts(text) IS
    'Closes what a database says of itself, also where it was opened under another name of the database';

CREATE FUNCTION _sluice.alert_json(_alert _sluice.alert, _severity text, _at timestamptz)
RETURNS bytea
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT convert_to(
        -- json keeps a string's characters as they are, where jsonb of a database in SQL_ASCII refuses some.
        json_build_object(
            'event', _alert.event,
            'severity', _severity,
            'database', _sluice.here(),
            'node', _alert.node,
            'pgt_id', _alert.pgt_id,
            'at', _at,
            'seq', _alert.seq,
            'message', _alert.message,
            'detail', _alert.detail::text
        )::text,
        -- There any bytes can be in a text, which a client that expects UTF-8 would not be given.
        CASE WHEN getdatabaseencoding() = 'SQL_ASCII' THEN 'SQL_ASCII' ELSE 'UTF8' END
    )
$$;
COMMENT ON FUNCTION _sluice.alert_json(_sluice.alert, text, timestamptz) IS
    'An alert as core/alerts.py takes it: JSON in UTF-8, or of whatever bytes a database in SQL_ASCII has';

CREATE FUNCTION _sluice.pending_alerts(_now timestamptz)
RETURNS TABLE (seq bigint, version text, alert bytea)
LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    -- Of either kind; the rest at the next look.
    v_limit CONSTANT integer := 200;
    v_seconds double precision;
BEGIN
    IF (SELECT true FROM _sluice.unannounced_alert AS u ORDER BY u.opened_at LIMIT 1) IS NULL
        AND NOT EXISTS (SELECT FROM _sluice.alert AS a WHERE a.closed_at IS NULL)
    THEN
        RETURN;
    ELSIF NOT _sluice.can_notify() THEN
        RETURN;
    END IF;
    v_seconds := _sluice.setting('alert_reminder_interval');
    RETURN QUERY
    WITH pending AS (
        (
            SELECT u.alert AS a, u.version
            FROM _sluice.unannounced_alert AS u
            ORDER BY u.opened_at
            LIMIT v_limit
        )
        UNION ALL
        (
            SELECT a, a.xmin::text
            FROM _sluice.alert AS a
            WHERE a.closed_at IS NULL
                -- A point of the grid from opened_at has passed since: as many reminders in the same
                -- time, however often somebody looks.
                -- Where the clock has been set back since, it has passed as well.
                AND (
                    floor(extract(epoch FROM _now - a.opened_at) / v_seconds)
                        > floor(extract(epoch FROM a.last_emitted_at - a.opened_at) / v_seconds)
                    OR a.last_emitted_at > _sluice.latest_past(_now)
                )
            ORDER BY a.last_emitted_at
            LIMIT v_limit
        )
    )
    SELECT (p.a).seq, p.version, _sluice.alert_json(p.a, s.severity, s.at)
    FROM pending AS p
    CROSS JOIN LATERAL (VALUES
        (1, (p.a).severity, (p.a).opened_at, (p.a).last_emitted_at IS NULL),
        (2, (p.a).severity, _now, (p.a).last_emitted_at IS NOT NULL AND (p.a).closed_at IS NULL),
        (3, 'info', (p.a).closed_at, (p.a).closed_at IS NOT NULL)
    ) AS s (step, severity, at, applies)
    WHERE s.applies
    ORDER BY (p.a).seq, s.step;
END;
$$;
COMMENT ON FUNCTION _sluice.pending_alerts(timestamptz) IS
    'What is to be announced, in order: alerts that were opened, that were closed (severity info), and reminders of open ones. version is the row''s, for emit_alerts. Nothing while can_notify() says no';

CREATE FUNCTION _sluice.emit_alerts(_now timestamptz, _seqs bigint[], _versions text[], _payloads bytea[])
RETURNS void
LANGUAGE sql
SET search_path = pg_catalog, pg_temp
AS $$
    WITH given AS (
        SELECT g.seq, g.version, g.payload, g.position
        FROM unnest(_seqs, _versions, _payloads) WITH ORDINALITY AS g (seq, version, payload, position)
    ), free AS (
        SELECT a.seq
        FROM _sluice.alert AS a
        JOIN (SELECT DISTINCT g.seq, g.version FROM given AS g) AS d ON d.seq = a.seq
        WHERE a.xmin::text = d.version
        -- Users close alerts in transactions of any length, which nobody is to wait for.
        FOR NO KEY UPDATE OF a SKIP LOCKED
    ), marked AS (
        UPDATE _sluice.alert AS a
        SET last_emitted_at = greatest(_now, a.closed_at)
        FROM free AS f
        WHERE a.seq = f.seq
        RETURNING a.seq
    )
    SELECT pg_notify('sluice_alert', convert_from(o.payload, 'UTF8'))
    FROM (
        SELECT g.payload FROM given AS g JOIN marked AS m ON m.seq = g.seq ORDER BY g.position
    ) AS o
$$;
COMMENT ON FUNCTION _sluice.emit_alerts(timestamptz, bigint[], text[], bytea[]) IS
    'Announces on the channel sluice_alert what was pending, as JSON in UTF-8. An alert that changed since it was read, closed or announced by another session, or that is being changed, is left to the next look';
