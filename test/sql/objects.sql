-- The closed list of what the extension shows to users, and the rules that all its objects keep.
\ir setup.psql
SELECT plan(22);

CREATE ROLE sluice_test_nobody;
CREATE FUNCTION pg_temp.columns(_view text) RETURNS text LANGUAGE sql AS $$
    SELECT string_agg(a.attname, ' ' ORDER BY a.attnum) FROM pg_attribute AS a WHERE a.attrelid = _view::regclass AND a.attnum > 0
$$;
CREATE FUNCTION pg_temp.list(_condition text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
    v_list text;
BEGIN
    EXECUTE format($query$
        SELECT string_agg(p.oid::regprocedure::text, E'\n' ORDER BY p.oid::regprocedure::text COLLATE "C")
        FROM pg_proc AS p
        WHERE p.pronamespace IN ('sluice'::regnamespace, '_sluice'::regnamespace) AND (%s)$query$, _condition
    ) INTO v_list;
    RETURN v_list;
END;
$$;

-- Functions
SELECT is(
    (SELECT string_agg(
            format('%s(%s) %s', p.proname, pg_get_function_arguments(p.oid), COALESCE(pg_get_function_result(p.oid), 'procedure')),
            E'\n' ORDER BY p.proname::text COLLATE "C"
        )
        FROM pg_proc AS p
        WHERE p.pronamespace = 'sluice'::regnamespace),
    concat_ws(E'\n',
        'advance_watermark(source text, watermark timestamp with time zone) void',
        'alter_stream_table(name text, query text DEFAULT NULL::text, schedule text DEFAULT NULL::text, refresh_mode text DEFAULT NULL::text, '
            'priority integer DEFAULT NULL::integer, lock_timeout interval DEFAULT NULL::interval, refresh_timeout interval DEFAULT NULL::interval, '
            'max_lag interval DEFAULT NULL::interval) void',
        'bulk_create(definitions jsonb) TABLE(name text, pgt_id bigint)',
        'configure(name text, value text, cluster boolean DEFAULT false) void',
        'create_stream_table(name text, query text, schedule text DEFAULT ''@every 1m''::text, refresh_mode text DEFAULT ''auto''::text, '
            'initialize boolean DEFAULT true, priority integer DEFAULT 0, lock_timeout interval DEFAULT NULL::interval, '
            'refresh_timeout interval DEFAULT NULL::interval, max_lag interval DEFAULT NULL::interval) bigint',
        'create_watermark_group(name text, sources text[], tolerance interval DEFAULT ''00:00:00''::interval) void',
        'databases() TABLE(db_oid oid, database text, state text, last_tick_at timestamp with time zone, last_tick_ms double precision, '
            'queued bigint, running bigint, drain text, error text, failures integer, oldest_queued_at timestamp with time zone, '
            'workers bigint, paused bigint, joined_by text, joined_at timestamp with time zone)',
        'drain(timeout interval DEFAULT NULL::interval, cluster boolean DEFAULT false, wait boolean DEFAULT true) text',
        'drain_status() TABLE(scope text, state text, requested_by text, requested_at timestamp with time zone, '
            'drained_at timestamp with time zone, active bigint, waiting_for text)',
        'drop_stream_table(name text, cascade boolean DEFAULT false) void',
        'drop_watermark_group(name text) void',
        'effective_limit() TABLE("limit" integer, ingredient text, value integer, binding boolean)',
        'explain_stream_table(name text) TABLE(property text, value text)',
        'health_check() TABLE("check" text, status text, detail text, hint text)',
        'is_drained(cluster boolean DEFAULT false) boolean',
        'metrics() text',
        'pause(nodes text[], timeout interval DEFAULT NULL::interval, wait boolean DEFAULT true) text',
        'preflight() TABLE("check" text, ok boolean, detail text, hint text)',
        'queue() TABLE(run_id uuid, db_oid oid, database text, pgt_id bigint, name text, state text, priority integer, '
            'enqueued_at timestamp with time zone, not_before timestamp with time zone)',
        'refresh_stream_table(name text, force boolean DEFAULT false) text',
        'reset(name text) void',
        'resume(cluster boolean DEFAULT false) void',
        'run(IN run_for interval DEFAULT ''01:00:00''::interval) procedure',
        'run_now(name text) uuid',
        'schedule(job_name text, schedule text, command text, transactional boolean DEFAULT true, catch_up integer DEFAULT 1, '
            'priority integer DEFAULT 0, lock_timeout interval DEFAULT NULL::interval, refresh_timeout interval DEFAULT NULL::interval, '
            'watermark_group text DEFAULT NULL::text, max_lag interval DEFAULT NULL::interval) bigint',
        'schedule_refresh(matview text, schedule text, "concurrently" boolean DEFAULT true, priority integer DEFAULT 0, '
            'lock_timeout interval DEFAULT NULL::interval, refresh_timeout interval DEFAULT NULL::interval, max_lag interval DEFAULT NULL::interval) bigint',
        'serve_metrics(IN run_for interval DEFAULT ''01:00:00''::interval) procedure',
        'start() void',
        'stop() void',
        'unpause(nodes text[]) integer',
        'unschedule(job_name text) boolean',
        'workers() TABLE(slot integer, state text, db_oid oid, database text, pid integer, run_id uuid, name text, since timestamp with time zone)'
    ),
    'the public functions, with their arguments and results'
);
SELECT is(
    pg_temp.list($$has_function_privilege('sluice_test_nobody', p.oid, 'EXECUTE')$$),
    concat_ws(E'\n',
        '_sluice.check_setting(text,text,boolean)', '_sluice.invoke(text,jsonb,text)', '_sluice.load_package()',
        '_sluice.name_nodes(text[],text)', '_sluice.relation_of(text)', '_sluice.session_settings()',
        '_sluice.setting(text)', '_sluice.unwrap(jsonb)'
    ),
    'the doors: nothing else is for everybody'
);
SELECT is(
    pg_temp.list($$p.proconfig IS NULL OR NOT 'search_path=pg_catalog, pg_temp' = ANY (p.proconfig)$$),
    concat_ws(E'\n',
        '_sluice.lead(double precision,jsonb,text)', '_sluice.name_nodes(text[],text)', '_sluice.relation_of(text)', '_sluice.serve(double precision,jsonb,text)', '_sluice.session_settings()',
        'sluice.advance_watermark(text,timestamp with time zone)', 'sluice.alter_stream_table(text,text,text,text,integer,interval,interval,interval)', 'sluice.bulk_create(jsonb)',
        'sluice.create_stream_table(text,text,text,text,boolean,integer,interval,interval,interval)',
        'sluice.create_watermark_group(text,text[],interval)', 'sluice.drop_stream_table(text,boolean)', 'sluice.drop_watermark_group(text)',
        'sluice.explain_stream_table(text)', 'sluice.pause(text[],interval,boolean)', 'sluice.refresh_stream_table(text,boolean)',
        'sluice.reset(text)', 'sluice.run(interval)', 'sluice.run_now(text)',
        'sluice.schedule(text,text,text,boolean,integer,integer,interval,interval,text,interval)',
        'sluice.schedule_refresh(text,text,boolean,integer,interval,interval,interval)', 'sluice.serve_metrics(interval)', 'sluice.unpause(text[])', 'sluice.unschedule(text)'
    ),
    'what resolves names for the caller, or commits, has no pinned search_path; all others have that one'
);
SELECT is(
    pg_temp.list($$cardinality(p.proconfig) > 1$$),
    concat_ws(
        E'\n', '_sluice.add_runs(oid,jsonb)', '_sluice.advance(jsonb)', '_sluice.column_signature(regclass)', '_sluice.do_pause(name,jsonb)',
        '_sluice.invoke(text,jsonb,text)', '_sluice.next_run(bigint,uuid,oid,integer)', '_sluice.node_name(_sluice.node)',
        '_sluice.refresh_matview(regclass,boolean)', '_sluice.refresh_stream_table(_sluice.node,oid)', '_sluice.tick(integer,bigint[])',
        '_sluice.upkeep()', '_sluice.upkeep_backlog()', 'sluice.drain(interval,boolean,boolean)'
    ),
    'thirteen pin more: where a query or a name is written down and read, where the server reads what it wrote itself, where a plan must not depend on how large a table was, and where a wait needs its notices'
);
SELECT is(
    pg_temp.list($$p.prosecdef AND p.proconfig[1] IS DISTINCT FROM 'search_path=pg_catalog, pg_temp'$$), NULL,
    'and every SECURITY DEFINER function is among those that do'
);
SELECT is(
    pg_temp.list('p.prosecdef'),
    concat_ws(E'\n',
        '_sluice.check_setting(text,text,boolean)', '_sluice.control_database()', '_sluice.forget_dropped_relations()',
        '_sluice.handle_request()', '_sluice.load_package()', '_sluice.setting(text)',
        'sluice.configure(text,text,boolean)', 'sluice.databases()', 'sluice.drain(interval,boolean,boolean)', 'sluice.drain_status()',
        'sluice.effective_limit()', 'sluice.health_check()', 'sluice.is_drained(boolean)', 'sluice.metrics()', 'sluice.preflight()', 'sluice.queue()',
        'sluice.resume(boolean)', 'sluice.start()', 'sluice.stop()', 'sluice.workers()'
    ),
    'the SECURITY DEFINER functions'
);
SELECT is(
    pg_temp.list($$p.pronamespace = 'sluice'::regnamespace AND obj_description(p.oid, 'pg_proc') IS NULL$$), NULL, 'every public function has a comment'
);
SELECT is(
    pg_temp.list($$p.pronamespace = '_sluice'::regnamespace AND p.prolang = (SELECT oid FROM pg_language WHERE lanname = 'plpython3u')$$),
    concat_ws(E'\n',
        '_sluice.add_package(text)', '_sluice.invoke(text,jsonb,text)', '_sluice.invoke_privileged(text,jsonb,text)', '_sluice.lead(double precision,jsonb,text)',
        '_sluice.serve(double precision,jsonb,text)'
    ),
    'the doors to Python'
);
SELECT is(
    (SELECT string_agg(p.proname, ', ') FROM (
        SELECT proname FROM pg_proc WHERE pronamespace IN ('sluice'::regnamespace, '_sluice'::regnamespace) GROUP BY pronamespace, proname HAVING count(*) > 1
    ) AS p), NULL, 'no function has a second form'
);

-- Views
SELECT is(
    (SELECT string_agg(c.relname, ' ' ORDER BY c.relname) FROM pg_class AS c WHERE c.relnamespace = 'sluice'::regnamespace AND c.relkind <> 'c'),
    'alerts history nodes settings watermarks', 'the public views'
);
SELECT is(
    (SELECT string_agg(c.relname, ' ') FROM pg_class AS c
        WHERE c.relnamespace = 'sluice'::regnamespace AND c.relkind = 'v' AND obj_description(c.oid, 'pg_class') IS NULL),
    NULL, 'each has a comment'
);
SELECT matches(
    pg_temp.columns('sluice.nodes'),
    '^pgt_id name kind schedule refresh_mode status next_fire_at last_run_at last_outcome consecutive_errors remedy lag\M', 'columns of nodes'
);
SELECT matches(
    pg_temp.columns('sluice.history'),
    '^run_id pgt_id name kind mode outcome sqlstate message attempt due_at started_at ended_at rows_changed reason pid\M', 'columns of history'
);
SELECT matches(
    pg_temp.columns('sluice.alerts'),
    '^seq event severity node pgt_id opened_at closed_at last_emitted_at message detail\M', 'columns of alerts'
);
SELECT matches(
    pg_temp.columns('sluice.settings'), '^name value default min max unit scope description\M', 'columns of settings'
);
SELECT matches(pg_temp.columns('sluice.watermarks'), '^source watermark advanced_at advanced_by group tolerance\M', 'columns of watermarks');

-- All of it
SELECT is(
    (SELECT string_agg(format('%s %s %s', n.nspname, has_schema_privilege('sluice_test_nobody', n.oid, 'USAGE'),
            has_schema_privilege('sluice_test_nobody', n.oid, 'CREATE')), ', ' ORDER BY n.nspname)
        FROM pg_namespace AS n WHERE n.nspname ~ 'sluice'),
    '_sluice t f, _sluice_locks f f, sluice t f', 'everybody may use the schemas but the one of locks, nobody create in them'
);
SELECT is(
    (SELECT string_agg(n.nspname, ' ') FROM pg_namespace AS n
        WHERE n.nspname ~ 'sluice' AND obj_description(n.oid, 'pg_namespace') IS NULL),
    NULL, 'the schemas have comments'
);
SELECT is_empty(
    $$SELECT c.oid::regclass::text FROM pg_class AS c
      WHERE c.relnamespace IN ('sluice'::regnamespace, '_sluice'::regnamespace, '_sluice_locks'::regnamespace) AND c.relkind IN ('r', 'v', 'm')
        AND NOT EXISTS (SELECT FROM pg_depend AS d WHERE d.classid = 'pg_class'::regclass AND d.objid = c.oid AND d.deptype = 'e')
      UNION ALL
      SELECT p.oid::regprocedure::text FROM pg_proc AS p
      WHERE p.pronamespace IN ('sluice'::regnamespace, '_sluice'::regnamespace)
        AND NOT EXISTS (SELECT FROM pg_depend AS d WHERE d.classid = 'pg_proc'::regclass AND d.objid = p.oid AND d.deptype = 'e')$$,
    'all objects belong to the extension'
);
SELECT is(
    (SELECT string_agg(c.oid::regclass::text, ' ' ORDER BY c.oid::regclass::text COLLATE "C")
        FROM pg_extension AS e CROSS JOIN unnest(e.extconfig) AS x (relid) JOIN pg_class AS c ON c.oid = x.relid
        WHERE e.extname = 'pg_sluice'),
    '_sluice.dependency _sluice.graph _sluice.node _sluice.node_pgt_id_seq _sluice.node_state _sluice.setting _sluice.watermark _sluice.watermark_group '
    '_sluice.watermark_group_source', 'what pg_dump takes along: definitions, never what runs'
);
SELECT is(
    (SELECT string_agg(format('%s %s', t.evtname, t.evtevent), ', ' ORDER BY t.evtname) FROM pg_event_trigger AS t),
    'sluice_forget_dropped_relations sql_drop', 'the event triggers'
);
SELECT is_empty(
    $$SELECT c.conname FROM pg_constraint AS c JOIN pg_class AS t ON t.oid = c.conrelid
      WHERE t.relnamespace = '_sluice'::regnamespace AND NOT c.convalidated$$,
    'every constraint is valid'
);
\ir finish.psql
