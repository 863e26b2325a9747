"""An interactive plot of many runs for a page: quantities against settings."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from mechicl.plots import style
from mechicl.plots.interactive import Explorer, choice, empty, on_change

_WIDE = 30.0
"""Settings above 0 whose largest is so many times their least have a logarithmic axis."""

_VERDICTS = {
    1: ("holds", "circle", style.PALETTE[2]),
    0: ("fails", "x", style.PALETTE[1]),
    -1: ("undefined", "triangle", style.GUIDE),
}
MARKS = "a circle where the probe's statement holds, a cross where it does not, a triangle else"
"""What the marks of points mean, for the caption."""

_SHOW = """
const at = quantity.options.indexOf(quantity.value)
const along = setting.options.indexOf(setting.value)
const of = probes[at].data
const y = values[at].data.y
sources.forEach((source, number) => {
  const out = {x: [], y: [], run: [], seed: [], setting: []}
  for (let i = 0; i < y.length; i++) {
    const x = settings.data[`x${along}`][of.run[i]]
    if (of.verdict[i] != codes[number] || !isFinite(y[i]) || !isFinite(x)) continue
    out.x.push(x)
    out.y.push(y[i])
    out.seed.push(of.seed[i])
    out.run.push(settings.data.name[of.run[i]])
    out.setting.push(labels[along] == null ? x.toPrecision(4) : labels[along][x])
  }
  source.data = out
})
const shown = plots[logarithmic[along] ? 1 : 0]
for (const plot of plots) plot.visible = plot == shown
shown.title.text = quantity.value
shown.below[0].axis_label = setting.value
shown.x_range.setv({start: x_ends[along][0], end: x_ends[along][1]})
shown.y_range.setv({start: y_ends[at][0], end: y_ends[at][1]})
plots[0].below[0].ticker = tickers[along]
plots[0].below[0].major_label_overrides = labels[along] == null
  ? new Map() : new Map(labels[along].map((text, place) => [place, text]))
"""


class Quantity(NamedTuple):
    """A number of every run and seed that has one.

    Attributes
    ----------
    run
        Position of the run.
    seed
        Its label.
    value
        The number; NaN is undefined.
    verdict
        1 where the probe's statement holds, 0 where it does not, -1 else.
    """

    run: Int[np.ndarray, " point"]
    seed: Int[np.ndarray, " point"]
    value: Float[np.ndarray, " point"]
    verdict: Int[np.ndarray, " point"]


def over_runs(
    names: Sequence[str],
    settings: Mapping[str, np.ndarray],
    quantities: Mapping[str, Quantity],
) -> Explorer:
    """Return a plot of one of the quantities against one of the settings, both to be chosen.

    Parameters
    ----------
    names
        Of the runs.
    settings
        By what they are called, one value a run: numbers, or text, whose values are the places of
        an axis. Settings above 0 that span a factor of 30 have a logarithmic axis. The first is
        shown at first; there must be one.
    quantities
        By what they are called; the first is shown at first. There must be one.
    """
    from bokeh.embed import components
    from bokeh.models import BasicTicker, ColumnDataSource, FixedTicker

    quantity = choice("Quantity", list(quantities), "quantity")
    setting = choice("Setting", list(settings), "setting")
    columns: dict[str, Any] = {"name": list(names)}
    labels, tickers, logarithmic = [], [], []
    for number, values in enumerate(settings.values()):
        places, words = _places(np.asarray(values))
        columns[f"x{number}"] = places
        labels.append(words)
        fixed = words is not None
        tickers.append(FixedTicker(ticks=list(range(len(words)))) if fixed else BasicTicker())
        logarithmic.append(not fixed and _spans_decades(places))
    probes = [
        ColumnDataSource(
            {
                "run": each.run.astype(np.int32),
                "seed": each.seed.astype(float),
                "verdict": each.verdict.astype(np.int8),
            }
        )
        for each in quantities.values()
    ]
    values = [
        ColumnDataSource({"y": each.value.astype(np.float32)}) for each in quantities.values()
    ]
    first = next(iter(quantities.values()))
    sources = [_points(first, code, columns, labels[0]) for code in _VERDICTS]
    x_ends = [
        _ends(columns[f"x{number}"], logarithmic=logarithmic[number])
        for number in range(len(settings))
    ]
    y_ends = [_ends(each.value) for each in quantities.values()]
    plots = []
    for kind in ("linear", "log"):
        shown = logarithmic[0] == (kind == "log")
        ends = (x_ends[0] if shown else [1.0, 10.0]), y_ends[0]
        plot = _scatter(kind, sources, *ends)
        plot.visible, plot.title.text = shown, quantity.value
        plot.xaxis.axis_label = setting.value
        plots.append(plot)
    plots[0].xaxis.ticker = tickers[0]
    if labels[0] is not None:
        plots[0].xaxis.major_label_overrides = dict(enumerate(labels[0]))
    arguments = {
        "quantity": quantity,
        "setting": setting,
        "probes": probes,
        "values": values,
        "settings": ColumnDataSource(columns),
        "sources": sources,
        "plots": plots,
        "labels": labels,
        "tickers": tickers,
        "logarithmic": logarithmic,
        "codes": list(_VERDICTS),
        "x_ends": x_ends,
        "y_ends": y_ends,
    }
    callback = on_change(quantity, _SHOW, arguments)
    setting.js_on_change("value", callback)
    models = {"quantity": quantity, "setting": setting, "linear": plots[0], "log": plots[1]}
    script, divs = components(models, wrap_plot_info=True)
    return Explorer(
        script,
        [divs["quantity"], divs["setting"]],
        {"over runs": [divs["linear"], divs["log"]]},
    )


def _places(values: np.ndarray) -> tuple[np.ndarray, list[str] | None]:
    """Return numbers as they are; of text the place of each value, and the values in order."""
    if values.dtype.kind in "fiub":
        return values.astype(float), None
    known, places = np.unique(values.astype(str), return_inverse=True)
    return places.astype(float), [text or "(not set)" for text in known.tolist()]


def _spans_decades(places: np.ndarray) -> bool:
    finite = places[np.isfinite(places)]
    return bool(finite.size and finite.min() > 0 and finite.max() >= _WIDE * finite.min())


def _ends(values: np.ndarray, *, logarithmic: bool = False) -> list[float]:
    """Return the ends of an axis that has room for the values."""
    finite = np.asarray(values, dtype=float)[np.isfinite(values)]
    if finite.size == 0:
        return [0.0, 1.0]
    low, high = float(finite.min()), float(finite.max())
    if logarithmic:
        room = (high / low) ** 0.06
        return [low / room, high * room]
    room = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
    return [low - room, high + room]


def _points(
    quantity: Quantity, code: int, columns: Mapping[str, Any], words: list[str] | None
) -> Any:
    """Return what is drawn at first of one verdict, as the browser makes it for later choices."""
    from bokeh.models import ColumnDataSource

    x = columns["x0"][quantity.run]
    chosen = (quantity.verdict == code) & np.isfinite(quantity.value) & np.isfinite(x)
    at = x[chosen]
    return ColumnDataSource(
        {
            "x": at,
            "y": quantity.value[chosen],
            "run": [columns["name"][run] for run in quantity.run[chosen]],
            "seed": quantity.seed[chosen],
            "setting": [f"{each:.4g}" if words is None else words[int(each)] for each in at],
        }
    )


def _scatter(
    kind: str, sources: Sequence[Any], x_ends: Sequence[float], y_ends: Sequence[float]
) -> Any:
    from bokeh.models import HoverTool, Range1d

    along, up = (Range1d(start=ends[0], end=ends[1]) for ends in (x_ends, y_ends))
    plot = empty(300, x_axis_type=kind, name=kind, x_range=along, y_range=up)
    for source, (text, marker, colour) in zip(sources, _VERDICTS.values(), strict=True):
        plot.scatter(
            "x",
            "y",
            source=source,
            marker=marker,
            size=9,
            line_color=colour,
            fill_color=colour,
            fill_alpha=0.4,
            line_width=2,
            name=text,
        )
    tips = [("run", "@run"), ("seed", "@seed"), ("setting", "@setting"), ("value", "@y{%.4g}")]
    plot.add_tools(HoverTool(tooltips=tips, formatters={"@y": "printf"}))
    return plot
