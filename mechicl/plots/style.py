"""What all figures share: colours, the step axis, lines of seeds and heads, and the undefined."""

import json
import re
import textwrap
from collections.abc import Iterable
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.collections import QuadMesh
from matplotlib.colors import Colormap, Normalize
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import Patch
from matplotlib.ticker import FormatStrFormatter, LogLocator, NullFormatter

from mechicl.schema import flag_names

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6D00")
"""Colours of Okabe and Ito, yellow darkened to read on white: they differ for every eye."""
REFERENCE_COLOURS = ("#333333", "#C2185B", "#00796B", "#6A3FB5", "#8D5524", "#558B00")
REFERENCE_MARKERS = "ovDsP^"
DASHES = ("-", "--", ":", "-.")
DIVERGING = "RdBu_r"
GUIDE = "#555555"
GREEK = {"omega": "ω", "mu": "μ", "gamma": "γ", "eta": "η", "sigma": "σ"}
_LETTER = re.compile(rf"(?<![A-Za-z])({'|'.join(GREEK)})(?![A-Za-z])")
_FEW = 8
_MANY_SEEDS = 8
_ENTRY = 13.3
"""Height of a legend's line, in points."""
_LETTER_WIDTH = 0.6
"""Width of a letter over its font size, rather too wide."""


def figure(rows: int, columns: int, *, width: float = 4.2, height: float = 3.0) -> Figure:
    """Return an empty figure for panels of `width` by `height` inches, with room for a legend."""
    size = (max(columns * width, 4.8), max(rows * height, 2.6))
    layout = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.06, wspace=0.02, hspace=0.02)
    return Figure(figsize=size, layout=layout)


def colour(number: int) -> str:
    """Return the colour of a seed or head by its position."""
    return PALETTE[number % len(PALETTE)]


def dash(number: int) -> str:
    """Return the line style that tells two seeds or heads of one colour apart."""
    return DASHES[number // len(PALETTE) % len(DASHES)]


def label(variable: xr.DataArray, name: str | None = None) -> str:
    """Return `name` with the unit of `variable` for an axis; numbers without unit have none."""
    units = variable.attrs.get("units", "1")
    text = str(variable.name if name is None else name)
    return text if units == "1" else f"{text} [{units}]"


def greek(text: str) -> str:
    """Return `text` with the names of Greek letters replaced by the letters."""
    return _LETTER.sub(lambda found: GREEK[found[0]], text).replace("η_star", "η*")


def step_axis(axes: Axes, steps: Iterable[float]) -> None:
    """Make x the training step: logarithmic, but linear up to the first positive one, to show 0."""
    values = np.asarray(list(steps), dtype=float)
    axes.set_xlabel("training step")
    positive = values[values > 0]
    if positive.size == 0:
        axes.set_xlim(-0.5, 0.5)
        return
    low, high = values.min(), values.max()
    if high > 20 * positive.min():
        if low > 0:
            axes.set_xscale("log")
        else:
            axes.set_xscale("symlog", linthresh=positive.min(), linscale=0.5)
    if low == high:
        axes.set_xticks([low])
    else:
        room = 0.0 if low > 0 else 0.1 * positive.min()
        axes.set_xlim(low - room, high * 1.05)


def log_ticks(axes: Axes) -> None:
    """Label logarithmic axes with plain numbers, as many as have room; call it once all is drawn.

    Left to themselves, axes of less than a decade label every minor tick, one over another.
    """
    for axis, scale in ((axes.xaxis, axes.get_xscale()), (axes.yaxis, axes.get_yscale())):
        if scale == "log":
            low, high = axis.get_view_interval()
            axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 100 * low else (1,)))
            axis.set_minor_formatter(NullFormatter())
            if low >= 1e-3 and high <= 1e4:
                axis.set_major_formatter(FormatStrFormatter("%g"))


def lines(axes: Axes, variable: xr.DataArray, along: str = "seed") -> None:
    """Draw one line over steps for each entry of `along`; a panel without values says so."""
    steps = variable["step"].values
    table = variable.transpose(along, "step")
    for number, name in enumerate(table[along].values):
        style: dict[str, Any] = {"color": colour(number), "linestyle": dash(number)}
        values = table.values[number]
        alone = _alone(values)
        if len(steps) <= 12 or alone.size:
            style |= {"marker": "o", "markevery": 1 if len(steps) <= 12 else alone.tolist()}
        axes.plot(steps, values, label=f"{along} {name}", markersize=3.5, lw=1.4, **style)
    step_axis(axes, steps)
    axes.grid(visible=True, color="0.9", lw=0.6)
    if not np.isfinite(variable.values).any():
        undefined(axes)


def _alone(values: np.ndarray) -> np.ndarray:
    """Return the positions of values that no line reaches: those beside them are not finite."""
    finite = np.pad(np.isfinite(values), 1)
    return np.flatnonzero(finite[1:-1] & ~finite[:-2] & ~finite[2:])


def strips(
    axes: Axes, steps: np.ndarray, rows: np.ndarray, cmap: Colormap, norm: Normalize
) -> QuadMesh:
    """Draw each of `rows` as a strip over steps, the first on top; hatched where undefined.

    A step holds until the next one, the last as long as the one before it.
    """
    steps = steps.astype(float)
    last = steps[-1] + (steps[-1] - steps[-2] if len(steps) > 1 else 1.0)
    edges = np.append(steps, last)
    if len(steps) == 1:
        edges -= 0.5
    mesh = axes.pcolormesh(
        edges,
        np.arange(len(rows) + 1) - 0.5,
        np.ma.masked_invalid(rows),
        cmap=cmap,
        norm=norm,
        edgecolors="none",
    )
    step_axis(axes, steps)
    axes.set_xlim(edges[0], edges[-1])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.hlines(np.arange(len(rows) - 1) + 0.5, edges[0], edges[-1], color="white", lw=1.5)
    axes.patch.set(facecolor="white", hatch="////", edgecolor="0.75")
    if not np.isfinite(rows).any():
        undefined(axes)
    return mesh


def hatched() -> Patch:
    """Return the legend entry of what `strips` leaves undefined."""
    return Patch(facecolor="white", edgecolor="0.75", hatch="////", label="undefined")


def absent(variable: xr.DataArray, codes: xr.DataArray | None) -> str:
    """Say which seeds of `variable`, (seed, step), have no value at all, and by which reasons."""
    table = variable.transpose("seed", "step")
    names = {} if codes is None else flag_names(codes)
    groups: dict[str, list[str]] = {}
    for number in np.flatnonzero(~np.isfinite(table.values).any(axis=1)):
        seen = [] if codes is None else np.unique(codes.isel(seed=number).values).tolist()
        reasons = [names.get(int(code), "").replace("_", " ") for code in seen if code != 0]
        reason = ", ".join(filter(None, reasons)) or "no reason given"
        groups.setdefault(reason, []).append(str(table["seed"].values[number]))
    parts = [f"{_seeds(seeds)} ({reason})" for reason, seeds in groups.items()]
    return "undefined: " + "; ".join(parts) if parts else ""


def _seeds(seeds: list[str]) -> str:
    if len(seeds) > _MANY_SEEDS:
        return f"{len(seeds)} seeds"
    return f"seed{'s' * (len(seeds) > 1)} {', '.join(seeds)}"


def note(axes: Axes, text: str) -> None:
    """Write a small line above a panel, broken where it is too long for it."""
    if text:
        # A panel is about 3.4 inches wide, whatever the figure.
        axes.set_title(textwrap.fill(text, 52), fontsize=7, color=GUIDE, loc="left")


def guide(axes: Axes, height: float, text: str, dashes: tuple[int, ...] = (6, 2)) -> None:
    """Draw a horizontal line at a value to compare with, named in the legend."""
    axes.axhline(height, color=GUIDE, lw=1.0, ls=(0, dashes), label=text, zorder=2.5)


def undefined(axes: Axes, rotation: float = 0) -> None:
    """Say in the middle of a panel that nothing in it is defined."""
    place: dict[str, Any] = {
        "transform": axes.transAxes,
        "ha": "center",
        "va": "center",
        "rotation": rotation,
        "bbox": {"facecolor": "white", "edgecolor": "none", "pad": 2},
    }
    axes.text(0.5, 0.5, "undefined", color=GUIDE, **place)


def legend(figure: Figure, *panels: Axes, handles: Iterable[Artist] = ()) -> None:
    """Put the legend of `panels` and `handles` beside the figure, where it covers nothing.

    An entry of one name is kept once. The figure grows wider by the columns beyond the first.
    """
    entries: dict[str, Artist] = {}
    for axes in panels:
        for handle, text in zip(*axes.get_legend_handles_labels(), strict=True):
            entries.setdefault(text, handle)
    entries |= {str(handle.get_label()): handle for handle in handles}
    if not entries:
        return
    width, height = figure.get_size_inches()
    columns = _columns(len(entries), height)
    figure.set_size_inches(width + (columns - 1) * _legend_width(entries, 1), height)
    figure.legend(
        list(entries.values()),
        list(entries),
        loc="outside right upper",
        frameon=False,
        fontsize=8,
        ncols=columns,
    )


def _columns(entries: int, height: float) -> int:
    """Return in how many columns a legend fits into `height` inches."""
    return -(-entries // max(1, int((72 * height - 20) / _ENTRY)))


def _legend_width(names: Iterable[str], columns: int) -> float:
    """Return about how many inches a legend takes."""
    return columns * (0.55 + max(map(len, names), default=0) * 8 * _LETTER_WIDTH / 72)


def title(figure: Figure, *paragraphs: str) -> None:
    """Put a title over the figure, broken so that it ends before the legend; call it last."""
    width, height = figure.get_size_inches()
    for drawn in figure.legends:
        names = [text.get_text() for text in drawn.get_texts()]
        width -= _legend_width(names, _columns(len(names), height))
    most = int((width - 0.2) * 72 / (10 * _LETTER_WIDTH))
    written = [textwrap.fill(text, max(most, 20)) for text in paragraphs if text]
    if written:
        figure.suptitle("\n".join(written), fontsize=10, x=0.02, ha="left")


def colours(limit: float) -> ScalarMappable:
    """Return the map from values to colours that is symmetric about 0 and ends at ±`limit`."""
    return ScalarMappable(Normalize(-limit, limit), DIVERGING)


def heatmap(axes: Axes, matrix: np.ndarray, limit: float) -> None:
    """Draw a matrix as it is written, in `colours(limit)`, with its values where they are few."""
    axes.imshow(matrix, cmap=DIVERGING, vmin=-limit, vmax=limit, aspect="equal")
    rows, columns = matrix.shape
    axes.set_xticks(range(columns), [str(i + 1) for i in range(columns)], fontsize=7)
    axes.set_yticks(range(rows), [str(i + 1) for i in range(rows)], fontsize=7)
    if not np.isfinite(matrix).any():
        undefined(axes, rotation=0 if columns > 1 else 90)
    elif max(rows, columns) <= _FEW:
        for (row, column), value in np.ndenumerate(matrix):
            ink = "white" if abs(value) > 0.6 * limit else "black"
            text = f"{value:.2f}".replace("-0.00", "0.00")
            place: dict[str, Any] = {"ha": "center", "va": "center", "in_layout": False}
            axes.text(column, row, text, fontsize=5.5, color=ink, **place)


def parameter(result: xr.Dataset, name: str) -> float | None:
    """Return a parameter that the probe was run with, or None."""
    return json.loads(result.attrs.get("parameters", "{}")).get(name)


def verdicts(result: xr.Dataset) -> str:
    """Return what the probe says yes or no to, and for how many seeds it ends with yes.

    Seeds of which it says neither at the end are counted beside them.
    A claim about several runs says first of which of them the figure is, by `run_label`.
    """
    label = result.attrs.get("run_label", "")
    if "since" not in result:
        return label
    n_yes = int(result["since"].notnull().sum())
    statement = greek(str(result.attrs.get("statement", "holds")))
    of = f"{label}: " if label else ""
    neither = int(result["holds"].isel(step=-1).isnull().sum()) if "holds" in result else 0
    unsaid = f", undefined for {neither}" if neither else ""
    return f"{of}{statement}: {n_yes} of {result.sizes['seed']} seeds{unsaid}"


def seed_rows(axes: Axes, result: xr.Dataset) -> None:
    """Give every seed of a result a row, over training steps: what is drawn in one begins there."""
    steps = result["step"].values.astype(float)
    step_axis(axes, steps)
    if len(steps) == 1:
        axes.set_xlim(steps[0] - 0.5, steps[0] + 0.5)
    names = [f"seed {name}" for name in result["seed"].values]
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.hlines(np.arange(len(names) - 1) + 0.5, *axes.get_xlim(), color="0.85", lw=0.6)
    axes.set_ylabel("from then on")


def nothing(axes: Axes, text: str) -> None:
    """Say in the middle of empty axes why they are."""
    axes.text(0.5, 0.5, text, color=GUIDE, transform=axes.transAxes, ha="center", va="center")
