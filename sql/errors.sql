-- How an error that Python decided on reaches the user: PL/Python alone can't raise a clean message,
-- so it returns a record and this PL/pgSQL frame raises it.

CREATE FUNCTION _sluice.unwrap(_result jsonb)
RETURNS jsonb
LANGUAGE plpgsql IMMUTABLE
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_error CONSTANT jsonb := _result -> 'error';
BEGIN
    IF v_error IS NULL THEN
        RETURN _result -> 'value';
    END IF;
    -- A NULL option in USING is an error of its own, hence the four forms.
    IF v_error ? 'detail' AND v_error ? 'hint' THEN
        RAISE EXCEPTION USING
            ERRCODE = v_error ->> 'sqlstate', MESSAGE = v_error ->> 'message',
            DETAIL = v_error ->> 'detail', HINT = v_error ->> 'hint';
    ELSIF v_error ? 'detail' THEN
        RAISE EXCEPTION USING
            ERRCODE = v_error ->> 'sqlstate', MESSAGE = v_error ->> 'message',
            DETAIL = v_error ->> 'detail';
    ELSIF v_error ? 'hint' THEN
        RAISE EXCEPTION USING
            ERRCODE = v_error ->> 'sqlstate', MESSAGE = v_error ->> 'message',
            HINT = v_error ->> 'hint';
    END IF;
    RAISE EXCEPTION USING ERRCODE = v_error ->> 'sqlstate', MESSAGE = v_error ->> 'message';
END;
$$;
COMMENT ON FUNCTION _sluice.unwrap(jsonb) IS
    'The value in a result of a PL/Python function; raises the error record in it, if there is one';
