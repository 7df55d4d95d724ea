-- Faults on the real path, in one database: a wrapper in place of a function of _sluice fails as often
-- as it is armed to, and otherwise calls the function. faults.py tells how it is used.

CREATE SCHEMA faults;

CREATE TABLE faults.fault (
    function name CONSTRAINT fault_pkey PRIMARY KEY,
    sqlstate text,
    message text
);
COMMENT ON TABLE faults.fault IS
    'What wrapped functions raise. The sequence of that name counts calls, from minus the number of armed faults: up to 0 a call fails. A sequence, since what a fault rolls back must not refund it';

CREATE FUNCTION faults.strike(_function name)
RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_fault faults.fault%ROWTYPE;
BEGIN
    IF nextval(format('faults.%I', _function)) <= 0 THEN
        SELECT * INTO STRICT v_fault FROM faults.fault AS f WHERE f.function = _function;
        RAISE EXCEPTION USING ERRCODE = v_fault.sqlstate, MESSAGE = v_fault.message;
    END IF;
END;
$$;

CREATE FUNCTION faults.wrap(_function name)
RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    -- Raises an error for a name that several functions have.
    v_oid CONSTANT oid := format('_sluice.%I', _function)::regproc;
    v_original CONSTANT name := 'original_' || _function;
BEGIN
    INSERT INTO faults.fault (function) VALUES (_function);
    EXECUTE format('CREATE SEQUENCE faults.%I MINVALUE -1000000 START WITH 1', _function);
    -- Renamed it stays what it is: the extension's, with its privileges and its OID.
    EXECUTE format('ALTER FUNCTION %s RENAME TO %I', v_oid::regprocedure, v_original);
    EXECUTE format(
        'CREATE FUNCTION _sluice.%I(%s) RETURNS %s LANGUAGE sql AS %L',
        _function, pg_get_function_arguments(v_oid), pg_get_function_result(v_oid),
        format(
            'SELECT faults.strike(%L); SELECT _sluice.%I(%s)', _function, v_original,
            (
                SELECT string_agg('$' || n, ', ' ORDER BY n)
                FROM pg_proc AS p, generate_series(1, p.pronargs) AS n
                WHERE p.oid = v_oid
            )
        )
    );
END;
$$;

CREATE FUNCTION faults.lift(_function name)
RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    EXECUTE format('DROP FUNCTION _sluice.%I', _function);
    EXECUTE format('ALTER FUNCTION _sluice.%I RENAME TO %I', 'original_' || _function, _function);
    EXECUTE format('DROP SEQUENCE faults.%I', _function);
    DELETE FROM faults.fault AS f WHERE f.function = _function;
END;
$$;
