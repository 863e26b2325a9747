"""Data distributions, one module each, found by name in one registry."""

from mechicl.tasks.base import Prompts, Task, get, names, register

__all__ = ["Prompts", "Task", "get", "names", "register"]
