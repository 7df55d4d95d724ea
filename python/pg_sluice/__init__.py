"""pg_sluice: scheduler and stream tables inside PostgreSQL.

`core` decides, `backend` runs inside a user's session, `leader` is the scheduler process, and
the one that serves the metrics.
"""

__version__ = "0.1.0"
