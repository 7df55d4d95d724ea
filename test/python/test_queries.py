"""The leader's statements fit the catalog."""

import re

from psycopg.pq import ExecStatus

from cluster import Cluster
from pg_sluice.leader.queries import statements

PARAMETER = re.compile(r"%\((\w+)\)s")


def test_every_statement_can_be_prepared(cluster: Cluster) -> None:
    refused = {}
    with cluster.connect() as connection:
        for name, statement in statements().items():
            given = list(dict.fromkeys(PARAMETER.findall(statement)))
            text = PARAMETER.sub(lambda found: f"${1 + given.index(found[1])}", statement)  # noqa: B023
            result = connection.pgconn.prepare(name.encode(), text.encode())
            if result.status != ExecStatus.COMMAND_OK:
                refused[name] = result.get_error_message()
    assert refused == {}
