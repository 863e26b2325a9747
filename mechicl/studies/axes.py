"""The axes of a study: where the labels of every run lie on an axis that all runs share."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from mechicl.errors import InputError
from mechicl.schema import DIMS, flag_table

Join = Literal["outer", "inner", "last"]
JOINS: tuple[Join, ...] = ("outer", "inner", "last")

PLACES = ("seed", "seed_other")
"""Axes whose labels mean something in one run only: runs are joined by place."""


@dataclass(frozen=True)
class Labels:
    """What one run has along an axis: its size, and its labels and their names if it has any."""

    size: int
    values: np.ndarray | None = None
    attrs: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Axis:
    """An axis that runs share.

    Attributes
    ----------
    dim, size
        Its name, and how long it is.
    labels, attrs
        Its coordinate; None where it has places alone.
    source, target
        For each run, which of its own entries are taken, and where they go.
    own
        Labels of each run by place, where they differ so that they cannot be the coordinate.
    codes
        For each run, the code here of each code that it has, of axes whose labels have names.
    """

    dim: str
    size: int
    labels: np.ndarray | None
    attrs: Mapping[str, Any]
    source: Sequence[np.ndarray]
    target: Sequence[np.ndarray]
    own: Sequence[np.ndarray] | None = None
    codes: Sequence[Mapping[int, int]] | None = None

    @property
    def by_place(self) -> bool:
        """Whether entries of one place in two runs share nothing but it."""
        return self.labels is None or self.own is not None


def axis(dim: str, runs: Sequence[Labels], join: Join) -> Axis:
    """Return the axis `dim` of several runs.

    Steps, and labels that are whole numbers, are joined by label, as `join` says for steps and all
    of them for the others; labels with names (`flag_meanings`) by name; heads, seeds and what else
    has no labels of its own by place. Labels that are other numbers are joined by place unless all
    runs have the same.

    Raises InputError where steps are joined by `inner` and runs share none.
    """
    values = [each.values for each in runs]
    if dim in PLACES or any(each is None for each in values):
        return _by_place(dim, runs)
    known = [np.asarray(each) for each in values]
    if dim == "step":
        return _by_label(dim, runs, known, np.intersect1d if join == "inner" else np.union1d)
    if any("flag_values" in (each.attrs or {}) for each in runs):
        return _by_name(dim, runs, known)
    whole = all((each == np.round(each)).all() for each in known)
    if whole or all(np.array_equal(each, known[0]) for each in known):
        return _by_label(dim, runs, known, np.union1d)
    return _by_place(dim, runs)


def _by_place(dim: str, runs: Sequence[Labels]) -> Axis:
    size = max(each.size for each in runs)
    places = [np.arange(each.size) for each in runs]
    own = None
    labels = None
    if all(each.values is not None for each in runs):
        own = [np.asarray(each.values) for each in runs]
        labels = np.arange(size)
    text = f"place in its run: {dim}_label says which it is" if own else DIMS.get(dim, dim)
    return Axis(dim, size, labels, {"units": "1", "long_name": text}, places, places, own)


def _by_label(
    dim: str,
    runs: Sequence[Labels],
    known: Sequence[np.ndarray],
    combine: Callable[[np.ndarray, np.ndarray], np.ndarray],
) -> Axis:
    labels = np.unique(known[0])
    for each in known[1:]:
        if not np.array_equal(each, labels):
            labels = combine(labels, each)
    if labels.size == 0 and dim == "step":
        raise InputError(
            f"the {len(runs)} runs have no step in common; join them by outer, or by their last "
            "steps (--join last)"
        )
    source = [np.flatnonzero(np.isin(each, labels)) for each in known]
    target = [np.searchsorted(labels, each[own]) for each, own in zip(known, source, strict=True)]
    return Axis(dim, labels.size, labels, dict(runs[0].attrs or {}), source, target)


def _by_name(dim: str, runs: Sequence[Labels], known: Sequence[np.ndarray]) -> Axis:
    tables = [flag_table(each.attrs or {}) for each in runs]
    codes, attrs = merged_flags(tables, runs[0].attrs or {})
    labels = np.sort(np.asarray(attrs["flag_values"], dtype=np.int64))
    target = [
        np.searchsorted(labels, [code[int(label)] for label in each])
        for each, code in zip(known, codes, strict=True)
    ]
    source = [np.arange(each.size) for each in known]
    return Axis(dim, labels.size, labels, attrs, source, target, codes=codes)


def merged_flags(
    tables: Sequence[Mapping[int, str]], attrs: Mapping[str, Any]
) -> tuple[list[dict[int, int]], dict[str, Any]]:
    """Return for each table the code that every code of it gets, and attributes with all of them.

    Codes stay as they are where all tables agree; else names are numbered anew, from 0, in the
    order in which they come.
    """
    if all(table == tables[0] for table in tables):
        same = {code: code for code in tables[0]}
        return [same for _ in tables], dict(attrs)
    names = list(dict.fromkeys(name for table in tables for name in table.values()))
    number = {name: code for code, name in enumerate(names)}
    codes = [{code: number[name] for code, name in table.items()} for table in tables]
    flags = {"flag_values": list(range(len(names))), "flag_meanings": " ".join(names)}
    return codes, {**attrs, **flags}
