"""A dull registry: one dict a kind, names unique, entries imported when they are asked for."""

from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import entry_points
from typing import Generic, TypeVar

from mechicl.errors import InputError, canonical, unknown

T = TypeVar("T")


class Registry(Generic[T]):
    """The tasks, the models or the probes.

    Parameters
    ----------
    kind
        What one entry is called in messages; `mechicl.<kind>s` is the entry-point group by which
        outside packages add theirs.
    builtin
        Name of each built-in entry and the module that registers it when imported.
    """

    def __init__(self, kind: str, builtin: Mapping[str, str]) -> None:
        self.kind = kind
        self._builtin = dict(builtin)
        self._entries: dict[str, T] = {}
        self._owners: dict[str, str] = {}

    @property
    def group(self) -> str:
        """Entry-point group of outside packages."""
        return f"mechicl.{self.kind}s"

    def add(self, name: str, entry: T, *, owner: str) -> T:
        """Register `entry`; a name that is taken is refused, naming the module that holds it."""
        if name != canonical(name) or not name.isidentifier():
            raise InputError(f"{self.kind} name {name!r} is not a Python identifier")
        holder = self._owners.get(name) or self._builtin.get(name, owner)
        if name in self._entries or holder != owner:
            raise InputError(f"{self.kind} {name!r} of {owner} is already registered by {holder}")
        self._entries[name] = entry
        self._owners[name] = owner
        return entry

    def names(self) -> tuple[str, ...]:
        """Return all names, sorted, without importing what they stand for."""
        outside = {point.name for point in entry_points(group=self.group)}
        return tuple(sorted({*self._builtin, *self._entries, *outside}))

    def get(self, name: str) -> T:
        """Return the entry `name` (`-` and `_` are one); raise InputError with near matches."""
        if not isinstance(name, str):
            raise unknown(self.kind, name, self.names())
        key = canonical(name)
        if key not in self._entries and key in self._builtin:
            import_module(self._builtin[key])
        if key not in self._entries:
            for point in entry_points(group=self.group, name=key):
                point.load()
        if key not in self._entries:
            raise unknown(self.kind, name, self.names())
        return self._entries[key]
