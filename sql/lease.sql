-- Control database: who leads. One row; its epoch fences every function that changes dispatch state.
--
-- The gate is the lock of a view in the control database. Claims share it; drain, pause and takeover own
-- it. So a claim either commits before a drain request, which then sees the run, or comes after it and
-- sees the request. It is no advisory lock, which is for everybody to take who can connect.

-- A table would be locked by an ANALYZE or VACUUM that names none, until the end of its transaction.
CREATE VIEW _sluice_locks.gate AS SELECT true AS gate;
COMMENT ON VIEW _sluice_locks.gate IS 'Is there to be locked, see _sluice.enter_gate() and _sluice.close_gate()';

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
    -- In the way of nobody who reads it.
    LOCK TABLE _sluice_locks.gate IN EXCLUSIVE MODE
$$;
COMMENT ON FUNCTION _sluice.close_gate() IS
    'Until the end of the transaction no claim commits; waits for those that are under way';

CREATE FUNCTION _sluice.enter_gate(_epoch bigint)
RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    LOCK TABLE _sluice_locks.gate IN ROW SHARE MODE;
    -- A statement of its own, whose snapshot is taken behind the gate.
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

CREATE FUNCTION _sluice.is_live(_lease _sluice.lease)
RETURNS boolean
LANGUAGE sql VOLATILE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT _lease.expires_at IS NOT NULL AND _lease.expires_at > clock_timestamp()
        AND _lease.renewed_at <= clock_timestamp() + (_lease.expires_at - _lease.renewed_at)
$$;
COMMENT ON FUNCTION _sluice.is_live(_sluice.lease) IS
    'Whether somebody holds the lease. One that was renewed later than now, by more than its time, was so by a clock that has been set back since: a holder that lives renews it at once, and nobody should wait for it until then';

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
    acquired := NOT _sluice.is_live(v_lease);
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

CREATE FUNCTION _sluice.leader_lives()
RETURNS boolean
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT _sluice.is_live(l) FROM _sluice.lease AS l
$$;
COMMENT ON FUNCTION _sluice.leader_lives() IS 'Whether somebody holds the lease';

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
