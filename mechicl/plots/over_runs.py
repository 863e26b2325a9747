"""A probe over many runs: its headline variables at the last step, and how often it holds."""

from typing import NamedTuple

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mechicl.plots import style
from mechicl.schema import flag_names

_NAMED = 30
"""So many runs have their names below the axis; more are numbered."""
_FEW = 100
_COLUMNS = 3
_ACROSS = 50
"""Letters that stand beside each other below a panel."""
_LETTERS = 40
_LETTER = 0.065
"""Inches that a letter of a name takes below the axis."""


class _Across(NamedTuple):
    """The axis along which runs lie: where each is, what it is called, and how it is drawn."""

    at: np.ndarray
    text: str
    ticks: list[str] | None
    logarithmic: bool = False

    @property
    def letters(self) -> int:
        """Letters of the longest name, where names have no room beside each other and are turned.

        0 where they have.
        """
        longest = max(map(len, self.ticks or ()), default=0)
        return longest if longest * len(self.ticks or ()) > _ACROSS else 0

    @property
    def spread(self) -> np.ndarray:
        """Where points are drawn: runs that lie at one place side by side, not over each other."""
        places = np.log(self.at) if self.logarithmic else self.at
        known = np.unique(places[np.isfinite(places)])
        width = 0.2 * (np.diff(known).min() if known.size > 1 else 1.0)
        out = places.copy()
        for place in known:
            group = np.flatnonzero(places == place)
            if group.size > 1:
                out[group] += np.linspace(-width, width, group.size)
        return np.exp(out) if self.logarithmic else out


def draw(result: xr.Dataset) -> Figure:
    """Draw each variable over (run, seed), and the verdicts `holds`.

    Every seed is a point and every run's median a bar, over the one setting in which runs differ
    (coordinate `x`), or over the runs one after another. Variables along `place` have a colour a
    place; codes have their words on the axis and no median.

    Attributes of `result`: `probe`, `statement`, `x_label`; `heads_by` and `not_aligned`, as
    `mechicl.studies.aligned_heads` gives them.
    """
    across = _across(result)
    names = [str(name) for name in result.data_vars if name not in ("holds", "since")]
    wide = len(across.at) if across.text == "run" else len(across.ticks or ()) * 2
    panels = len(names) + ("holds" in result)
    columns = min(_COLUMNS, max(panels, 1))
    rows = -(-max(panels, 1) // columns)
    width = float(np.clip(0.14 * wide, 4.2, 7.5))
    figure = style.figure(rows, columns, width=width, height=3.2 + _LETTER * across.letters)
    grid = np.ravel(figure.subplots(rows, columns, squeeze=False))
    for axes, name in zip(grid, names, strict=False):
        _variable(axes, result[name], across)
    if "holds" in result:
        _verdicts(grid[len(names)], result["holds"], across)
    if not panels:
        style.nothing(grid[0], "no headline variable over seeds")
    for axes in grid[panels:]:
        axes.set_axis_off()
    style.legend(figure, *grid[: len(names)])
    style.title(figure, *_said(result))
    return figure


def _said(result: xr.Dataset) -> list[str]:
    attrs = result.attrs
    n_seeds = int(result["seed_label"].notnull().sum())
    said = [f"{attrs.get('probe', 'result')} over {result.sizes['run']} runs, {n_seeds} seeds"]
    if "holds" in result:
        holds = result["holds"].values
        yes, known = int((holds == 1).sum()), int(np.isfinite(holds).sum())
        unsaid = f", undefined for {n_seeds - known}" if n_seeds > known else ""
        said.append(
            f"{style.greek(str(attrs.get('statement', 'holds')))}: {yes} of {known} seeds{unsaid}"
        )
    if attrs.get("heads_by"):
        said.append(f"heads in the order of {style.greek(attrs['heads_by'])}")
    if attrs.get("not_aligned"):
        said.append(f"not shown, for heads have no order that seeds share: {attrs['not_aligned']}")
    return said


def _across(result: xr.Dataset) -> _Across:
    """Return where runs lie: at the numbers or words of `x`, or one after another."""
    n_runs = result.sizes["run"]
    if "x" not in result.coords:
        ticks = None
        if n_runs <= _NAMED and "run_name" in result.coords:
            ticks = [_short(str(name)) for name in result["run_name"].values]
        return _Across(np.arange(n_runs, dtype=float), "run", ticks)
    values, text = result["x"].values, str(result.attrs.get("x_label", "x"))
    if values.dtype.kind != "f":
        words, at = np.unique(values, return_inverse=True)
        return _Across(at.astype(float), text, [_short(str(word)) for word in words])
    known = values[np.isfinite(values)]
    far = bool(known.size and known.min() > 0 and known.max() >= 8 * known.min())
    return _Across(values, text, None, logarithmic=far)


def _short(text: str) -> str:
    return text if len(text) <= _LETTERS else f"…{text[1 - _LETTERS :]}"


def _variable(axes: Axes, variable: xr.DataArray, across: _Across) -> None:
    """Draw one variable: seeds as points, the median of a run as a bar."""
    names = flag_names(variable)
    extra = [dim for dim in variable.dims if dim not in ("run", "seed")]
    table = variable.transpose("run", "seed", *extra).values.astype(float)
    table = table.reshape(*table.shape[:2], -1)
    size, spread = 5.0 if len(across.at) <= _FEW else 2.0, across.spread
    for number in range(table.shape[2]):
        values, colour = table[:, :, number], style.colour(number)
        label = f"{extra[0]} {number}" if extra else None
        at = np.broadcast_to(spread[:, None], values.shape)
        axes.plot(
            at.ravel(),
            values.ravel(),
            "o",
            ms=size,
            mew=0,
            color=colour,
            alpha=0.35 if names or table.shape[1] > 1 else 0.7,
            label=label,
            rasterized=len(across.at) > _FEW,
        )
        if not names and table.shape[1] > 1:
            _medians(axes, values, across, colour)
    if names:
        axes.set_yticks(list(names), [text.replace("_", " ") for text in names.values()])
        axes.set_ylim(min(names) - 0.5, max(names) + 0.5)
    _finish(axes, across)
    axes.set_ylabel(style.greek(style.label(variable)))
    axes.set_title(style.greek(str(variable.attrs.get("long_name", variable.name))), fontsize=9)
    if not np.isfinite(table).any():
        style.undefined(axes)


def _medians(axes: Axes, values: np.ndarray, across: _Across, colour: str) -> None:
    known = np.isfinite(values).any(axis=1) & np.isfinite(across.at)
    if known.any():
        medians = np.nanmedian(values[known], axis=1)
        axes.plot(
            across.spread[known], medians, "_", ms=9 if known.sum() <= _FEW else 4, color=colour
        )


def _verdicts(axes: Axes, holds: xr.DataArray, across: _Across) -> None:
    """Draw the fraction of seeds that hold at each value of the axis, or of all runs."""
    table = holds.transpose("run", "seed").values
    if across.text == "run" and len(across.at) > _NAMED:
        _all_verdicts(axes, table)
        return
    for at in np.unique(across.at[np.isfinite(across.at)]):
        group = table[across.at == at]
        known = np.isfinite(group)
        if known.any():
            fraction = (group[known] == 1).mean()
            axes.plot([at], [fraction], "o", ms=6, color=style.colour(0), clip_on=False)
            axes.vlines(at, 0, fraction, color=style.colour(0), lw=1.2)
        else:
            axes.plot([at], [0], "x", ms=6, color=style.GUIDE)
    axes.set_ylim(-0.05, 1.05)
    _finish(axes, across)
    axes.set_ylabel("fraction of seeds")
    missing = " (×: undefined)" if np.isnan(table).all(axis=1).any() else ""
    axes.set_title(f"holds{missing}", fontsize=9)


def _all_verdicts(axes: Axes, table: np.ndarray) -> None:
    counts = {"holds": (table == 1).sum(), "does not": (table == 0).sum()}
    colours = (style.colour(2), style.colour(1))
    axes.barh(range(2), list(counts.values()), color=colours)
    axes.set_yticks(range(2), list(counts))
    axes.invert_yaxis()
    axes.set_xlabel("seeds")
    axes.set_title("at the last step", fontsize=9)


def _finish(axes: Axes, across: _Across) -> None:
    """Label the axis of runs; numbers far apart are on a logarithmic one."""
    axes.set_xlabel(across.text)
    axes.grid(visible=True, color="0.9", lw=0.6)
    if across.ticks is not None:
        axes.set_xticks(range(len(across.ticks)), across.ticks, fontsize=7)
        axes.tick_params(axis="x", rotation=90 if across.letters else 0)
        axes.set_xlim(-0.5, len(across.ticks) - 0.5)
        return
    known = across.at[np.isfinite(across.at)]
    if across.text == "run" or known.size == 0:
        return
    if across.logarithmic:
        axes.set_xscale("log")
    if np.unique(known).size <= 8:
        axes.set_xticks(np.unique(known), [f"{value:g}" for value in np.unique(known)], fontsize=7)
        axes.minorticks_off()
