-- Control database: the worker limit. A row is a slot that is taken; a free slot is no row.
--
--   free --reserve_slot--> reserved --activate_slot--> live --release_slot--> free
--                          reserved --release_slot--> free
--
-- Reserved and live both count. A slot is freed only when no backend carries its identity.

CREATE TABLE _sluice.slot (
    slot integer CONSTRAINT slot_pkey PRIMARY KEY CONSTRAINT slot_slot_check CHECK (slot BETWEEN 1 AND 64),
    state text NOT NULL CONSTRAINT slot_state_check CHECK (state IN ('reserved', 'live')),
    db_oid oid NOT NULL,
    epoch bigint NOT NULL,
    nonce uuid NOT NULL DEFAULT gen_random_uuid() CONSTRAINT slot_nonce_key UNIQUE,
    deadline timestamptz NOT NULL,
    pid integer,
    backend_start timestamptz,
    since timestamptz NOT NULL DEFAULT clock_timestamp(),
    CONSTRAINT slot_identity_check CHECK (
        (state = 'live') = (pid IS NOT NULL) AND (pid IS NULL) = (backend_start IS NULL)
    )
);

CREATE FUNCTION _sluice.limit_ingredients()
RETURNS TABLE (ingredient text, value integer)
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN QUERY
    VALUES
        ('max_workers', _sluice.setting('max_workers')::integer),
        ('max_parallel_workers', current_setting('max_parallel_workers')::integer),
        ('hard_maximum', 64),
        ('connections', greatest(0,
            current_setting('max_connections')::integer
            - current_setting('superuser_reserved_connections')::integer
            - COALESCE(current_setting('reserved_connections', true)::integer, 0)
            - _sluice.setting('connection_reserve')::integer
        ));
END;
$$;
COMMENT ON FUNCTION _sluice.limit_ingredients() IS
    'What bounds the number of workers; the least of them is the limit. The one definition, for quotas and for taking slots';

CREATE FUNCTION _sluice.worker_limit()
RETURNS integer
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN (SELECT min(i.value) FROM _sluice.limit_ingredients() AS i);
END;
$$;
COMMENT ON FUNCTION _sluice.worker_limit() IS 'The effective worker limit of the server; 0 means serial mode';

CREATE FUNCTION _sluice.worker_application_name(_nonce uuid)
RETURNS text
LANGUAGE sql IMMUTABLE STRICT
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT 'pg_sluice worker ' || _nonce
$$;
COMMENT ON FUNCTION _sluice.worker_application_name(uuid) IS 'How a worker''s connection carries its nonce';

CREATE FUNCTION _sluice.slot_is_gone(_slot _sluice.slot)
RETURNS boolean
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT NOT _sluice.backend_lives(_slot.pid, _slot.backend_start) AND NOT EXISTS (
        SELECT FROM _sluice.superuser_session AS a
        WHERE a.application_name = _sluice.worker_application_name(_slot.nonce)
    )
$$;
COMMENT ON FUNCTION _sluice.slot_is_gone(_sluice.slot) IS 'No backend has the slot''s identity or its nonce';

CREATE FUNCTION _sluice.reserve_slot(
    _epoch bigint, _db_oid oid, OUT slot integer, OUT nonce uuid, OUT application_name text
)
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM _sluice.enter_gate(_epoch);
    IF NOT EXISTS (SELECT FROM _sluice.member AS m WHERE m.db_oid = _db_oid) THEN
        -- It has left, and the leader is about to notice.
        RETURN;
    END IF;
    -- One reservation after the other. By a row: see _sluice_locks for who can lock a table.
    PERFORM FROM _sluice.lease FOR NO KEY UPDATE;
    IF (SELECT count(*) FROM _sluice.slot) >= _sluice.worker_limit() THEN
        RETURN;
    END IF;
    INSERT INTO _sluice.slot AS s (slot, state, db_oid, epoch, deadline)
    SELECT min(n), 'reserved', _db_oid, _epoch,
        clock_timestamp() + _sluice.interval_setting('worker_start_timeout')
    FROM generate_series(1, 64) AS n
    WHERE NOT EXISTS (SELECT FROM _sluice.slot AS taken WHERE taken.slot = n)
    RETURNING s.slot, s.nonce, _sluice.worker_application_name(s.nonce) INTO slot, nonce, application_name;
END;
$$;
COMMENT ON FUNCTION _sluice.reserve_slot(bigint, oid) IS
    'free -> reserved, under the effective limit; NULLs when no slot is free, or the database is no member';

CREATE FUNCTION _sluice.activate_slot(
    _epoch bigint, _nonce uuid, _pid integer, _backend_start timestamptz
)
RETURNS boolean
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_db_oid oid;
BEGIN
    PERFORM _sluice.enter_gate(_epoch);
    UPDATE _sluice.slot AS s
    SET state = 'live', pid = _pid, backend_start = _backend_start, since = clock_timestamp()
    WHERE s.nonce = _nonce AND s.state = 'reserved'
    RETURNING s.db_oid INTO v_db_oid;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    UPDATE _sluice.member AS m SET spawn_failures = 0, spawn_error = NULL
    WHERE m.db_oid = v_db_oid AND m.spawn_failures > 0;
    IF FOUND THEN
        PERFORM _sluice.close_alert('spawn_failed', NULL, _sluice.database_name(v_db_oid));
    END IF;
    RETURN true;
END;
$$;
COMMENT ON FUNCTION _sluice.activate_slot(bigint, uuid, integer, timestamptz) IS
    'reserved -> live; false when the reservation is no longer there, and then the worker must go';

CREATE FUNCTION _sluice.release_slot(_epoch bigint, _nonce uuid)
RETURNS boolean
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM _sluice.enter_gate(_epoch);
    DELETE FROM _sluice.slot AS s WHERE s.nonce = _nonce AND _sluice.slot_is_gone(s);
    RETURN NOT EXISTS (SELECT FROM _sluice.slot AS s WHERE s.nonce = _nonce);
END;
$$;
COMMENT ON FUNCTION _sluice.release_slot(bigint, uuid) IS
    'reserved or live -> free, once the worker''s backend is gone; false while it is still there';

CREATE FUNCTION _sluice.record_spawn_failure(_epoch bigint, _db_oid oid, _error text)
RETURNS integer
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_failures integer;
BEGIN
    PERFORM _sluice.enter_gate(_epoch);
    UPDATE _sluice.member AS m SET spawn_failures = m.spawn_failures + 1, spawn_error = _error
    WHERE m.db_oid = _db_oid
    RETURNING m.spawn_failures INTO v_failures;
    PERFORM _sluice.open_alert(
        'spawn_failed', 'critical', NULL, _sluice.database_name(_db_oid),
        format('no worker can be started in database "%s": %s', _sluice.database_name(_db_oid), _error)
    ) WHERE v_failures IS NOT NULL;
    RETURN v_failures;
END;
$$;
COMMENT ON FUNCTION _sluice.record_spawn_failure(bigint, oid, text) IS
    'A worker that did not come about: counted, and announced once until one does; gives the failures in a row';

CREATE FUNCTION _sluice.reconcile_slots(_epoch bigint)
RETURNS integer
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_freed integer;
    v_now CONSTANT timestamptz := clock_timestamp();
    v_latest CONSTANT timestamptz := _sluice.latest_past(v_now);
BEGIN
    PERFORM _sluice.enter_gate(_epoch);
    -- Where the clock has been set back since, a reservation has its time from now on.
    UPDATE _sluice.slot AS s SET since = v_now, deadline = v_now + (s.deadline - s.since)
    WHERE s.since > v_latest;
    DELETE FROM _sluice.slot AS s
    WHERE _sluice.slot_is_gone(s) AND (
        s.state = 'live'
        -- The present leader itself frees what it reserved. A former one's reservation can belong to a
        -- session that is still starting: such a one has no row in pg_stat_activity yet, but a lock.
        OR (s.epoch < _epoch AND s.deadline < clock_timestamp() AND NOT EXISTS (
            SELECT FROM pg_locks AS l
            WHERE l.locktype = 'virtualxid'
                AND NOT EXISTS (SELECT FROM pg_stat_activity AS a WHERE a.pid = l.pid)
        ))
    );
    GET DIAGNOSTICS v_freed = ROW_COUNT;
    RETURN v_freed;
END;
$$;
COMMENT ON FUNCTION _sluice.reconcile_slots(bigint) IS
    'Frees live slots whose backend is gone, and overdue reservations of former leaders that no backend carries while none is starting';

CREATE FUNCTION _sluice.worker_rows()
RETURNS jsonb
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT COALESCE(jsonb_agg(jsonb_build_object(
        'slot', n,
        'state', COALESCE(s.state, 'free'),
        'db_oid', s.db_oid::bigint,
        'database', _sluice.shown_name(d.datname),
        'pid', s.pid,
        'run_id', q.run_id,
        'name', q.name,
        'since', s.since
    ) ORDER BY n), '[]')
    FROM generate_series(1, greatest(
        _sluice.worker_limit(), (SELECT COALESCE(max(t.slot), 0) FROM _sluice.slot AS t)
    )) AS n
    LEFT JOIN _sluice.slot AS s ON s.slot = n
    LEFT JOIN pg_database AS d ON d.oid = s.db_oid
    -- What a former leader's worker ran is another's.
    LEFT JOIN _sluice.queue AS q ON q.slot = n AND q.epoch = s.epoch AND q.state = 'running'
$$;
COMMENT ON FUNCTION _sluice.worker_rows() IS 'The rows of sluice.workers()';

CREATE FUNCTION _sluice.limit_rows()
RETURNS jsonb
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT jsonb_agg(jsonb_build_object(
        'limit', _sluice.worker_limit(),
        'ingredient', i.ingredient,
        'value', i.value,
        'binding', i.value = _sluice.worker_limit()
    ))
    FROM _sluice.limit_ingredients() AS i
$$;
COMMENT ON FUNCTION _sluice.limit_rows() IS 'The rows of sluice.effective_limit()';
