"""Checks the PL/pgSQL functions of the installed extension with plpgsql_check.

A trigger function is checked once for each table that has it; one for users' tables, which no table
of the extension has, can't be checked.
"""

import sys

from cluster import Cluster

FINDINGS = """
    WITH plpgsql AS (
        SELECT p.oid, p.prorettype
          FROM pg_proc p
          JOIN pg_language l ON l.oid = p.prolang AND l.lanname = 'plpgsql'
          JOIN pg_depend d
            ON d.classid = 'pg_proc'::regclass AND d.objid = p.oid AND d.deptype = 'e'
          JOIN pg_extension e
            ON e.oid = d.refobjid AND d.refclassid = 'pg_extension'::regclass
         WHERE e.extname = 'pg_sluice'
    ), checked AS (
        SELECT f.oid, coalesce(t.tgrelid, 0) AS relation
          FROM plpgsql f
          LEFT JOIN pg_trigger t ON t.tgfoid = f.oid
         WHERE f.prorettype <> 'trigger'::regtype OR t.tgrelid IS NOT NULL
    )
    SELECT checked.oid::regprocedure::text, finding.lineno, finding.level, finding.message
      FROM checked,
           plpgsql_check_function_tb(
               funcoid => checked.oid, relid => checked.relation,
               security_warnings => true, performance_warnings => false, extra_warnings => true
           ) AS finding
     ORDER BY 1, 2
"""


def main() -> int:
    with Cluster(fsync=False) as cluster:
        cluster.create_extensions()
        cluster.execute("CREATE EXTENSION plpgsql_check")
        findings = cluster.execute(FINDINGS)
    for function, line, level, message in findings:
        print(f"{function}:{line}: {level}: {message}")
    print(f"plpgsql_check: {len(findings)} findings")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
