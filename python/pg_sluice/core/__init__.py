"""Decisions only: no plpy, psycopg, asyncio, clock, random or environment.

Time and jitter are arguments; a decision is a value. cronsim is reached through
`core.schedule` alone, prometheus_client through `core.metrics`. `test/unit/test_layers.py` walks
the imports and fails on a breach.
"""
