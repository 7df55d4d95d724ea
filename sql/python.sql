-- The doors to the Python package. Each takes arguments, makes one call and returns.
--
-- PL/Python can't tell an error of a statement as it is. What is executed before the package can return a
-- record of it is therefore in defaults of arguments, which are evaluated in the SQL that calls.

CREATE FUNCTION _sluice.package_directory()
RETURNS text
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT format('%s/pg_sluice/%s', c.setting, e.extversion)
    FROM pg_config AS c, pg_extension AS e
    WHERE c.name = 'SHAREDIR' AND e.extname = 'pg_sluice'
$$;
COMMENT ON FUNCTION _sluice.package_directory() IS
    'Where "make install" put the Python package of this version of the extension. Asked for at run time, so that it is right after pg_upgrade';

CREATE FUNCTION _sluice.add_package(_directory text)
RETURNS text
LANGUAGE plpython3u
SET search_path = pg_catalog, pg_temp
AS $$
import sys

if _directory not in sys.path:
    loaded = sys.modules.get("pg_sluice")
    if loaded is not None:
        plpy.error(
            "this session has loaded pg_sluice " + loaded.__version__ + ", which is not the installed version",
            sqlstate="55000",
            hint="Connect again.",
        )
    sys.path.insert(0, _directory)
return _directory
$$;
COMMENT ON FUNCTION _sluice.add_package(text) IS
    'Puts a package in front of sys.path; refuses a session that has loaded another version. Not for users: they would have code of their own run';

CREATE FUNCTION _sluice.load_package()
RETURNS text
LANGUAGE sql VOLATILE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT _sluice.add_package(_sluice.package_directory())
$$;
COMMENT ON FUNCTION _sluice.load_package() IS 'Adds the package of the installed version';

CREATE FUNCTION _sluice.session_settings()
RETURNS jsonb
LANGUAGE sql STABLE
AS $$
    -- The server takes any bytes for a setting that comes with a connection or with the role. This raises
    -- 22021 for what is no text; PL/Python would not say what is wrong.
    SELECT pg_catalog.jsonb_object_agg(
        s, pg_catalog.convert_from(pg_catalog.convert_to(pg_catalog.current_setting(s), 'UTF8'), 'UTF8')
    )
    FROM pg_catalog.unnest(ARRAY[
        'search_path', 'DateStyle', 'IntervalStyle', 'standard_conforming_strings'
    ]) AS s
$$;
COMMENT ON FUNCTION _sluice.session_settings() IS
    'The settings that decide what the caller''s SQL text means, hence with none of them pinned';

CREATE FUNCTION _sluice.invoke(
    _function text, _arguments jsonb, _package text DEFAULT _sluice.load_package()
)
RETURNS jsonb
LANGUAGE plpython3u
SET search_path = pg_catalog, pg_temp
SET DateStyle = 'ISO, MDY'
SET IntervalStyle = 'postgres'
SET standard_conforming_strings = on
SET extra_float_digits = 1
SET quote_all_identifiers = off
AS $$
from pg_sluice.backend import entry

return entry.invoke(plpy, entry.CALLER, _function, _arguments)
$$;
COMMENT ON FUNCTION _sluice.invoke(text, jsonb, text) IS
    'Runs a function of the package with the caller''s rights, under the settings that make what it stores mean the same everywhere; gives {"value": ...} or {"error": ...} for _sluice.unwrap';

CREATE FUNCTION _sluice.invoke_privileged(
    _function text, _arguments jsonb, _package text DEFAULT _sluice.load_package()
)
RETURNS jsonb
LANGUAGE plpython3u
SET search_path = pg_catalog, pg_temp
AS $$
from pg_sluice.backend import entry

return entry.invoke(plpy, entry.PRIVILEGED, _function, _arguments)
$$;
COMMENT ON FUNCTION _sluice.invoke_privileged(text, jsonb, text) IS
    'As _sluice.invoke, for what only the extension''s own SECURITY DEFINER functions may do: control connections and the graph';

CREATE PROCEDURE _sluice.serve(
    _seconds double precision, INOUT _result jsonb, _package text DEFAULT _sluice.load_package()
)
LANGUAGE plpython3u
AS $$
from pg_sluice.leader import endpoint

return [endpoint.serve(plpy, _seconds)]
$$;
COMMENT ON PROCEDURE _sluice.serve(double precision, jsonb, text) IS
    'The endpoint of the metrics, for that many seconds. It commits, so it has no pinned search_path, as _sluice.lead';

CREATE PROCEDURE _sluice.lead(
    _seconds double precision, INOUT _result jsonb, _package text DEFAULT _sluice.load_package()
)
LANGUAGE plpython3u
AS $$
from pg_sluice.leader import process

return [process.lead(plpy, _seconds)]
$$;
COMMENT ON PROCEDURE _sluice.lead(double precision, jsonb, text) IS
    'The leader process, for that many seconds; 0 makes one pass. It commits, so it has no pinned search_path: the package qualifies every name';
