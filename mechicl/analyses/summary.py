"""Results in words: verdicts and key numbers as tables of text, for a terminal or a page."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import xarray as xr

from mechicl.analyses.probe import get
from mechicl.schema import flag_names

_MOST_COLUMNS = 8


class Table(NamedTuple):
    """A table of text; the first cells of a row say what the row is of.

    Attributes
    ----------
    title
        What it has, and at which step.
    columns
        Headings, one a cell of a row.
    rows
        The cells.
    """

    title: str
    columns: tuple[str, ...]
    rows: list[list[str]]


def verdict_table(results: Mapping[str, xr.Dataset]) -> Table | None:
    """Return what each probe says yes or no to at its last step; None where none says either.

    Parameters
    ----------
    results
        Results of one run by probe, over (seed, step).

    Returns
    -------
    Table or None
        A row a probe. Up to eight seeds have a column each: `since N` where the statement holds, N
        the first step from which it does, `no`, or `undefined` with the reason. More are counted.
    """
    stated = {name: result for name, result in results.items() if "holds" in result}
    if not stated:
        return None
    first = next(iter(results.values()))
    each = _each(first)
    counted = ("holds", "fails", "undefined", "since (median of those that hold)")
    cells = verdicts if each else _verdict_counts
    rows = [[name, *cells(result)] for name, result in stated.items()]
    columns = ("probe", *(_by_seed(first) if each else counted))
    return Table(f"verdicts {_at_step(first)}", columns, rows)


def number_table(results: Mapping[str, xr.Dataset]) -> Table | None:
    """Return the headline variables at the last step; None where no probe has any.

    Parameters
    ----------
    results
        Results of one run by probe, over (seed, step).

    Returns
    -------
    Table or None
        A row a variable, below the name of its probe. Up to eight seeds have a column each, heads
        beside each other; of more there are median, range, and how many have a value.
    """
    if not results:
        return None
    first = next(iter(results.values()))
    each = _each(first)
    cells = _figures if each else _figure_ranges
    rows = [
        [name if index == 0 else "", variable, *cells(result, variable)]
        for name, result in results.items()
        for index, variable in enumerate(_shown(name, each=each))
    ]
    if not rows:
        return None
    seeds = _by_seed(first) if each else ("median [least, largest]", "defined")
    return Table(f"key figures {_at_step(first)}", ("probe", "variable", *seeds), rows)


def verdicts(result: xr.Dataset) -> list[str]:
    """Return a cell a seed: whether the statement holds at the last step, and since when."""
    cells = []
    for seed in result["seed"].values:
        one = result.sel(seed=seed)
        holds, since = one["holds"].values[-1], one["since"].item()
        if np.isnan(holds):
            cells.append(f"undefined: {_reason(one)}")
        else:
            cells.append(f"since {since:,.0f}" if holds else "no")
    return cells


def _each(result: xr.Dataset) -> bool:
    """Whether seeds are few enough for a column each."""
    return result.sizes["seed"] <= _MOST_COLUMNS


def _by_seed(result: xr.Dataset) -> tuple[str, ...]:
    return tuple(f"seed {seed}" for seed in result["seed"].values)


def _at_step(result: xr.Dataset) -> str:
    return f"at step {result['step'].values[-1]:,}"


def _verdict_counts(result: xr.Dataset) -> list[str]:
    """How many seeds the statement holds for, fails for, and says nothing about; since when."""
    holds, since = result["holds"].values[:, -1], result["since"].values
    counts = [(holds == 1).sum(), (holds == 0).sum(), np.isnan(holds).sum()]
    median = np.median(since[~np.isnan(since)]) if (holds == 1).any() else np.nan
    return [*map(str, counts), "never" if np.isnan(median) else f"{median:,.0f}"]


def _reason(one: xr.Dataset) -> str:
    if "undefined" not in one:
        return "no value"
    return flag_names(one["undefined"])[int(one["undefined"].values[-1])].replace("_", " ")


def _shown(name: str, *, each: bool) -> list[str]:
    """Headlines of a probe; over many seeds without those by head, which no median sums up."""
    probe = get(name)
    return [v for v in probe.headline if each or "head" not in probe.outputs[v].dims]


def _figures(result: xr.Dataset, variable: str) -> list[str]:
    """One cell a seed: the variable at the last step, heads beside each other."""
    cells = []
    for seed in result["seed"].values:
        one = result.sel(seed=seed)
        values = np.atleast_1d(one[variable].isel(step=-1).values)
        if np.isnan(values).all():
            cells.append(f"undefined: {_reason(one)}")
        else:
            cells.append(" ".join("–" if np.isnan(v) else f"{v:.3g}" for v in values))
    return cells


def _figure_ranges(result: xr.Dataset, variable: str) -> list[str]:
    """Sum the variable at the last step up over seeds: median, range, and how many have one."""
    last = result[variable].isel(step=-1).values
    values = last[~np.isnan(last)]
    defined = f"{values.size} of {last.size}"
    if values.size == 0:
        return ["undefined", defined]
    return [f"{np.median(values):.3g} [{values.min():.3g}, {values.max():.3g}]", defined]
