-- The clock of the server can be set back: a machine was resumed with a wrong time, or NTP steps it. What
-- was written before then lies in the future, and whoever compares it with the clock would wait for that.

CREATE FUNCTION _sluice.latest_past(_now timestamptz)
RETURNS timestamptz
LANGUAGE plpgsql IMMUTABLE STRICT
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN _now + interval '1 s';
END;
$$;
COMMENT ON FUNCTION _sluice.latest_past(timestamptz) IS
    'What is on record as having happened later than this, a clock wrote that has been set back since. Less than a second is no matter: who waits for it does not wait long';

CREATE FUNCTION _sluice.began_before(_backend_start timestamptz, _moment timestamptz)
RETURNS boolean
LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN _backend_start < _moment OR _backend_start > _sluice.latest_past(clock_timestamp());
END;
$$;
COMMENT ON FUNCTION _sluice.began_before(timestamptz, timestamptz) IS
    'Whether a session is older than something that is done in it, and so no later one under the same number. One that began in the future did so before the clock was set back';
