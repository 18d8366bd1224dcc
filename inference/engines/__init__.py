"""Engines: what samples tokens from a policy."""
