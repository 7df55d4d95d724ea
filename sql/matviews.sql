-- Existing materialized views, refreshed on a schedule.

CREATE FUNCTION _sluice.do_schedule_refresh(_caller name, _arguments jsonb)
RETURNS jsonb
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_relid CONSTANT oid := (_arguments ->> 'relid')::oid;
    v_pgt_id bigint;
BEGIN
    PERFORM _sluice.begin_definition();
    SELECT n.pgt_id INTO v_pgt_id FROM _sluice.node AS n WHERE n.relid = v_relid AND n.kind = 'matview';
    IF FOUND THEN
        PERFORM _sluice.find_own_node(_caller, _arguments);
        DELETE FROM _sluice.dependency AS d WHERE d.pgt_id = v_pgt_id;
    ELSE
        PERFORM _sluice.check_owned_relation(_caller, v_relid);
    END IF;
    INSERT INTO _sluice.node AS n (
        kind, relid, schedule, anchor, "concurrently", priority, lock_timeout, refresh_timeout, max_lag
    )
    VALUES (
        'matview', v_relid, _arguments ->> 'schedule', clock_timestamp(),
        (_arguments ->> 'concurrently')::boolean, (_arguments ->> 'priority')::integer,
        (_arguments ->> 'lock_timeout')::interval, (_arguments ->> 'refresh_timeout')::interval,
        (_arguments ->> 'max_lag')::interval
    )
    ON CONFLICT (relid) DO UPDATE
    SET schedule = EXCLUDED.schedule, anchor = EXCLUDED.anchor, "concurrently" = EXCLUDED."concurrently",
        priority = EXCLUDED.priority, lock_timeout = EXCLUDED.lock_timeout,
        refresh_timeout = EXCLUDED.refresh_timeout, max_lag = EXCLUDED.max_lag,
        status = CASE WHEN n.status = 'quarantined' THEN 'active' ELSE n.status END
    RETURNING n.pgt_id INTO v_pgt_id;
    PERFORM _sluice.close_alert('quarantined', v_pgt_id);
    INSERT INTO _sluice.dependency (pgt_id, relid)
    SELECT v_pgt_id, s.value::oid FROM jsonb_array_elements_text(_arguments -> 'sources') AS s;
    PERFORM _sluice.settle(ARRAY[v_pgt_id], true);
    RETURN to_jsonb(v_pgt_id);
END;
$$;

CREATE FUNCTION sluice.schedule_refresh(
    matview text,
    schedule text,
    "concurrently" boolean DEFAULT true,
    priority integer DEFAULT 0,
    lock_timeout interval DEFAULT NULL,
    refresh_timeout interval DEFAULT NULL,
    max_lag interval DEFAULT NULL
)
RETURNS bigint
LANGUAGE sql VOLATILE
AS $$
    SELECT _sluice.unwrap(_sluice.invoke('schedule_refresh', pg_catalog.jsonb_build_object(
        'session', _sluice.session_settings(),
        'name', matview, 'schedule', schedule, 'concurrently', "concurrently", 'priority', priority,
        'lock_timeout', lock_timeout, 'refresh_timeout', refresh_timeout, 'max_lag', max_lag
    )))::bigint
$$;
COMMENT ON FUNCTION sluice.schedule_refresh(text, text, boolean, integer, interval, interval, interval) IS
'Refreshes an existing materialized view on a schedule; called again it changes the schedule. sluice.unschedule() ends it.
concurrently: without blocking readers, where the view has contents and a unique index over plain columns of all rows; plainly otherwise. max_lag: when health_check() calls it late, see there. Only for its owner. Returns its pgt_id.';
