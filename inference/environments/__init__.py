"""Environments: tasks made playable."""
