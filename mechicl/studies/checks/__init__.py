"""Checks: what claims measure, each registered by its name."""

from mechicl.studies.checks.base import Check, Measurement, Outcome, check, get, names

__all__ = ["Check", "Measurement", "Outcome", "check", "get", "names"]
