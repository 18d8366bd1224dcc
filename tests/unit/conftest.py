"""Hypothesis without a limit of time: laws are about values, and these machines are noisy."""

from hypothesis import HealthCheck, settings

settings.register_profile("lagoon", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("lagoon")
