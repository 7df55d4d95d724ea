"""Clusters and databases for the behaviour tests, and the limit on a test that hangs."""

import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

import pytest

from cluster import Cluster, Database


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """The suite's cluster: pg_cron and pg_sluice in its control database, and the template."""
    with Cluster() as cluster:
        cluster.create_extensions()
        cluster.create_template()
        yield cluster


@pytest.fixture
def database(cluster: Cluster) -> Iterator[Database]:
    """A fresh database with pg_sluice on the suite's cluster."""
    with cluster.database() as database:
        yield database


@pytest.fixture
def own_cluster() -> Iterator[Callable[..., Cluster]]:
    """Make a running cluster for this test alone, with the arguments of `Cluster`.

    It has what `cluster` has, unless `extensions=False`.
    """
    with ExitStack() as stack:

        def make(*, extensions: bool = True, **arguments: Any) -> Cluster:
            cluster = stack.enter_context(Cluster(**arguments))
            if extensions:
                cluster.create_extensions()
                cluster.create_template()
            return cluster

        yield make


@contextmanager
def time_limit(item: pytest.Item, phase: str) -> Iterator[None]:
    """Fail a phase that takes too long, from a signal, so that fixtures still clean up."""
    marker = item.get_closest_marker("timeout")
    seconds = marker.args[0] if marker else 60

    def give_up(number: int, frame: FrameType | None) -> None:
        pytest.fail(f"{phase} took longer than {seconds} s")

    previous = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    with time_limit(item, "setup"):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    with time_limit(item, "test"):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    with time_limit(item, "teardown"):
        return (yield)
