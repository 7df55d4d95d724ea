-- Conditions that somebody should look at. An open one is a row without closed_at.

CREATE TABLE _sluice.alert (
    seq bigint GENERATED ALWAYS AS IDENTITY CONSTRAINT alert_pkey PRIMARY KEY,
    event text NOT NULL,
    severity text NOT NULL CONSTRAINT alert_severity_check CHECK (severity IN ('info', 'warning', 'critical')),
    -- What it is about: a node, or in the control database a database.
    node text,
    pgt_id bigint,
    opened_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    closed_at timestamptz,
    last_emitted_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    message text NOT NULL,
    detail jsonb
);
-- Forbids that one condition is open twice.
CREATE UNIQUE INDEX alert_open_key ON _sluice.alert (event, COALESCE(pgt_id::text, node, ''))
    WHERE closed_at IS NULL;
CREATE INDEX alert_closed_at_idx ON _sluice.alert (closed_at) WHERE closed_at IS NOT NULL;

CREATE FUNCTION _sluice.emit_alert(_alert _sluice.alert)
RETURNS void
LANGUAGE sql
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT pg_notify('sluice_alert', jsonb_build_object(
        'event', _alert.event,
        'severity', _alert.severity,
        'database', current_database(),
        'node', left(_alert.node, 200),
        'pgt_id', _alert.pgt_id,
        'at', clock_timestamp(),
        'seq', _alert.seq,
        -- NOTIFY takes less than 8,000 bytes; a character is at most six of them as JSON.
        'message', left(_alert.message, 600),
        'truncated', length(_alert.message) > 600 OR length(_alert.node) > 200
    )::text)
$$;

CREATE FUNCTION _sluice.open_alert(
    _event text, _severity text, _pgt_id bigint, _node text, _message text, _detail jsonb DEFAULT NULL
)
RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_alert _sluice.alert%ROWTYPE;
BEGIN
    INSERT INTO _sluice.alert (event, severity, pgt_id, node, message, detail)
    VALUES (_event, _severity, _pgt_id, _node, _message, _detail)
    ON CONFLICT (event, COALESCE(pgt_id::text, node, '')) WHERE closed_at IS NULL DO NOTHING
    RETURNING * INTO v_alert;
    IF FOUND THEN
        PERFORM _sluice.emit_alert(v_alert);
    END IF;
END;
$$;
COMMENT ON FUNCTION _sluice.open_alert(text, text, bigint, text, text, jsonb) IS
    'Opens a condition and announces it on the channel sluice_alert; does nothing while it is open already';

CREATE FUNCTION _sluice.close_alert(_event text, _pgt_id bigint, _node text DEFAULT NULL)
RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_alert _sluice.alert%ROWTYPE;
BEGIN
    UPDATE _sluice.alert AS a SET closed_at = clock_timestamp(), last_emitted_at = clock_timestamp()
    WHERE a.event = _event
        AND COALESCE(a.pgt_id::text, a.node, '') = COALESCE(_pgt_id::text, _node, '')
        AND a.closed_at IS NULL
    RETURNING * INTO v_alert;
    IF FOUND THEN
        v_alert.severity := 'info';
        PERFORM _sluice.emit_alert(v_alert);
    END IF;
END;
$$;
COMMENT ON FUNCTION _sluice.close_alert(text, bigint, text) IS
    'Closes an open condition and announces that once, with the severity info';
