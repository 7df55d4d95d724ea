-- Control database: who leads. One row; its epoch fences every function that changes dispatch state.
--
-- The gate is one advisory lock of the control database. Claims share it; drain, pause and takeover own
-- it. So a claim either commits before a drain request, which then sees the run, or comes after it and
-- sees the request.

CREATE TABLE _sluice.lease (
    singleton boolean NOT NULL DEFAULT true
        CONSTRAINT lease_pkey PRIMARY KEY
        CONSTRAINT lease_singleton_check CHECK (singleton),
    epoch bigint NOT NULL DEFAULT 0,
    pid integer,
    backend_start timestamptz,
    renewed_at timestamptz,
    expires_at timestamptz,
    CONSTRAINT lease_holder_check CHECK (
        (pid IS NULL) = (backend_start IS NULL) AND (pid IS NULL) = (expires_at IS NULL)
    )
);
INSERT INTO _sluice.lease DEFAULT VALUES;

CREATE FUNCTION _sluice.close_gate()
RETURNS void
LANGUAGE sql
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT pg_advisory_xact_lock(_sluice.lock_class('gate'), 0)
$$;
COMMENT ON FUNCTION _sluice.close_gate() IS
    'Until the end of the transaction no claim commits; waits for those that are under way';

CREATE FUNCTION _sluice.enter_gate(_epoch bigint)
RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM pg_advisory_xact_lock_shared(_sluice.lock_class('gate'), 0);
    PERFORM FROM _sluice.lease AS l WHERE l.epoch = _epoch AND l.expires_at > clock_timestamp();
    IF NOT FOUND THEN
        RAISE EXCEPTION USING
            ERRCODE = 'SL001',
            MESSAGE = 'leadership lost',
            DETAIL = format('The lease of epoch %s has ended or another leader holds it.', _epoch);
    END IF;
END;
$$;
COMMENT ON FUNCTION _sluice.enter_gate(bigint) IS
    'Shares the gate until the end of the transaction and raises SL001 unless the lease of that epoch is live. Every function that changes dispatch state begins with it';

CREATE FUNCTION _sluice.acquire_lease(
    _pid integer, _backend_start timestamptz, _ttl double precision,
    OUT acquired boolean, OUT epoch bigint, OUT wait_seconds double precision
)
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_lease _sluice.lease%ROWTYPE;
BEGIN
    PERFORM _sluice.close_gate();
    SELECT * INTO STRICT v_lease FROM _sluice.lease FOR UPDATE;
    acquired := v_lease.expires_at IS NULL OR v_lease.expires_at <= clock_timestamp();
    IF acquired THEN
        UPDATE _sluice.lease AS l
        SET epoch = l.epoch + 1, pid = _pid, backend_start = _backend_start,
            renewed_at = clock_timestamp(), expires_at = clock_timestamp() + make_interval(secs => _ttl)
        RETURNING l.epoch INTO epoch;
        wait_seconds := 0;
    ELSE
        epoch := v_lease.epoch;
        wait_seconds := extract(epoch FROM v_lease.expires_at - clock_timestamp());
    END IF;
END;
$$;
COMMENT ON FUNCTION _sluice.acquire_lease(integer, timestamptz, double precision) IS
    'Takes the lease when nobody holds a live one, under a new epoch; otherwise says how long the present one has to run';

CREATE FUNCTION _sluice.renew_lease(_epoch bigint, _ttl double precision)
RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM _sluice.enter_gate(_epoch);
    UPDATE _sluice.lease AS l
    SET renewed_at = clock_timestamp(), expires_at = clock_timestamp() + make_interval(secs => _ttl)
    WHERE l.epoch = _epoch;
END;
$$;
COMMENT ON FUNCTION _sluice.renew_lease(bigint, double precision) IS
    'Extends exactly the lease of that epoch; a lapsed one is lost and raises SL001';

CREATE FUNCTION _sluice.release_lease(_epoch bigint)
RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM _sluice.enter_gate(_epoch);
    UPDATE _sluice.lease AS l SET pid = NULL, backend_start = NULL, expires_at = NULL WHERE l.epoch = _epoch;
END;
$$;
COMMENT ON FUNCTION _sluice.release_lease(bigint) IS
    'The clean end of a leader; after an error the lease is left to lapse instead';
