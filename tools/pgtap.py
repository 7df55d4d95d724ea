"""Runs pg_prove over the given pgTAP files on a throwaway cluster, each in a fresh database."""

import os
import subprocess
import sys

from cluster import ROOT, TEMPLATE, Cluster


def main(files: list[str]) -> int:
    if not files:
        print("no pgTAP files")
        return 1
    with Cluster(fsync=False) as cluster:
        cluster.create_extensions()
        cluster.create_template("CREATE EXTENSION pgtap")
        return subprocess.run(
            ["pg_prove", "--psql-bin", ROOT / "tools" / "psql-fresh", *files],
            env={
                "PATH": f"{cluster.bindir}:{os.environ['PATH']}",
                "PGHOST": str(cluster.directory),
                "PGPORT": str(cluster.port),
                "PGUSER": "postgres",
                "SLUICE_CONTROL": cluster.control_db,
                "SLUICE_TEMPLATE": TEMPLATE,
            },
        ).returncode


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
