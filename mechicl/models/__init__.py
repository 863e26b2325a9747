"""Architectures, one module each, found by name in one registry."""

from mechicl.models.base import Model, get, names, register

__all__ = ["Model", "get", "names", "register"]
