"""Controlled experiments: does a policy learn as well from stale samples, and what does each part of curation do?

python -m tests.experiments [--quick] [--only NAME ...], then python -m tests.experiments.report
"""
