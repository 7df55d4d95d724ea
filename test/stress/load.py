"""5,000 runs that end in every way, see queue_load.py: afterwards the queue is empty, and in every
sample each gauge was the count of its rows. Prints one JSON line; exits 1 if that is not so.
"""

from __future__ import annotations

import argparse
import json
import sys
import time

from cluster import Cluster
from queue_load import ROUND, QueueLoad, failures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5000, help=f"a multiple of {ROUND}")
    rounds = parser.parse_args().runs // ROUND
    with Cluster() as cluster:
        cluster.create_extensions()
        cluster.silence_cron()
        cluster.create_template()
        with cluster.database() as served, cluster.database() as refused:
            started = time.monotonic()
            report = QueueLoad(cluster, served, refused, rounds).run()
            seconds = time.monotonic() - started
    found = failures(report, rounds)
    print(json.dumps(vars(report) | {"seconds": round(seconds, 1), "failures": found}))
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
