"""Architectures, one module each, found by name in one registry."""
