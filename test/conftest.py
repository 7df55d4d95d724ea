"""Properties hold on any machine: no example is too slow, and none counts as flaky for its time."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("any", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any")
