-- Names of databases and roles. Databases of all encodings share them, so the server knows them by their
-- bytes, and what one database wrote can be no text in another. Whoever takes such a name for text fails,
-- a client when it decodes it; PL/Python then even crashes the server.
--
-- In a database in SQL_ASCII it is the same with all names, also those of nodes. And in WIN1252, EUC_TW and
-- others there are a few that can't be sent to a client in UTF-8: a node can be given one by renaming it.
--
-- chr(92) is a backslash, whatever standard_conforming_strings is.

CREATE FUNCTION _sluice.raw_name(_name text)
RETURNS bytea
LANGUAGE plpgsql IMMUTABLE STRICT
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN decode(replace(_name, chr(92), repeat(chr(92), 2)), 'escape');
END;
$$;
COMMENT ON FUNCTION _sluice.raw_name(text) IS
    'The bytes of the name of a database or role, by which to connect to it from whatever database';

CREATE FUNCTION _sluice.shown_name(_name text)
RETURNS text
LANGUAGE plpgsql STABLE STRICT
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_raw CONSTANT bytea := _sluice.raw_name(_name);
BEGIN
    IF encode(v_raw, 'escape') <> replace(_name, chr(92), repeat(chr(92), 2)) THEN
        BEGIN
            -- It goes to clients in UTF-8. In SQL_ASCII anything is a text; other encodings take some
            -- characters that UTF-8 is not known to have.
            PERFORM convert(v_raw, replace(getdatabaseencoding(), 'SQL_ASCII', 'UTF8'), 'UTF8');
        EXCEPTION
            WHEN character_not_in_repertoire OR untranslatable_character THEN
                RETURN encode(v_raw, 'escape');
        END;
    END IF;
    RETURN _name;
END;
$$;
COMMENT ON FUNCTION _sluice.shown_name(text) IS
    'The name of a database, a role or a node as a text of this database that clients can read: as it is, or where its bytes are none in this encoding or have no equivalent in UTF-8, these in octal, as \351';

CREATE FUNCTION _sluice.here()
RETURNS text
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT _sluice.shown_name(current_database())
$$;
COMMENT ON FUNCTION _sluice.here() IS 'The name of this database, to be shown';

CREATE FUNCTION _sluice.control_database()
RETURNS text
LANGUAGE sql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT _sluice.shown_name(current_setting('cron.database_name', true))
$$;
COMMENT ON FUNCTION _sluice.control_database() IS
    'The database that pg_cron works from; NULL when the server has not loaded pg_cron';

CREATE FUNCTION _sluice.database_name(_db_oid oid)
RETURNS text
LANGUAGE sql STABLE STRICT
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT _sluice.shown_name(d.datname) FROM pg_database AS d WHERE d.oid = _db_oid
$$;
COMMENT ON FUNCTION _sluice.database_name(oid) IS 'The present name of a database, to be shown; NULL when it is gone';
