"""Data distributions, one module each, found by name in one registry."""

from mechicl.tasks.base import ContinuousTask, Prompts, Task, TokenTask, get, names, register

__all__ = ["ContinuousTask", "Prompts", "Task", "TokenTask", "get", "names", "register"]
