-- Nothing is for everybody but the doors, which give no more than the caller's own rights. What a role
-- may use is granted by the administrator; docs/security.md has the lines.

REVOKE ALL ON ALL FUNCTIONS IN SCHEMA sluice FROM PUBLIC;
REVOKE ALL ON ALL PROCEDURES IN SCHEMA sluice FROM PUBLIC;
REVOKE ALL ON ALL FUNCTIONS IN SCHEMA _sluice FROM PUBLIC;
REVOKE ALL ON ALL PROCEDURES IN SCHEMA _sluice FROM PUBLIC;

GRANT USAGE ON SCHEMA sluice TO PUBLIC;
GRANT USAGE ON SCHEMA _sluice TO PUBLIC;
GRANT INSERT (command, arguments), SELECT (result) ON _sluice.request TO PUBLIC;
GRANT EXECUTE ON FUNCTION _sluice.invoke(text, jsonb, text) TO PUBLIC;
GRANT EXECUTE ON FUNCTION _sluice.unwrap(jsonb) TO PUBLIC;
GRANT EXECUTE ON FUNCTION _sluice.load_package() TO PUBLIC;
GRANT EXECUTE ON FUNCTION _sluice.name_nodes(text[], text) TO PUBLIC;
GRANT EXECUTE ON FUNCTION _sluice.relation_of(text) TO PUBLIC;
GRANT EXECUTE ON FUNCTION _sluice.session_settings() TO PUBLIC;
GRANT EXECUTE ON FUNCTION _sluice.setting(text) TO PUBLIC;
GRANT EXECUTE ON FUNCTION _sluice.check_setting(text, text, boolean) TO PUBLIC;
