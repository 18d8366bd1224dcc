"""Hypothesis without a deadline: laws are about values, and these machines are noisy."""

from hypothesis import settings

settings.register_profile("lagoon", deadline=None)
settings.load_profile("lagoon")
