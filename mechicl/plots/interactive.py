"""Interactive plots for a page: heat maps over training, losses and curves, by bokeh.

A page that holds `scripts()` and what an `Explorer` gives needs neither a server nor a network.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import matplotlib
import numpy as np
import xarray as xr
from jaxtyping import Float, Int
from matplotlib.colors import to_hex

from mechicl.plots import style

if TYPE_CHECKING:
    from bokeh.models import CustomJS, Model

LARGEST = 32767
"""Entries of heat maps are stored as integers: this one is the end of the colour scale."""
_UNDEFINED = -32768
_SEQUENTIAL = "Blues"
_GREY = "#c8c8c8"
_CELLS = 12  # as many are numbered one by one
_FADED = 0.3

_SHOW_MAP = """
const s = seed.options.indexOf(seed.value)
const wanted = steps[slider.categories.indexOf(slider.value)]
let at = 0
while (at + 1 < shown.length && shown[at + 1] <= wanted) at++
const l = layer == null ? 0 : layer.options.indexOf(layer.value)
const size = rows * columns
mapper.high = limits[s]
mapper.low = symmetric ? -limits[s] : 0
panels.forEach((panel, p) => {
  const start = (((s * shown.length + at) * n_layers + l) * panels.length + p) * size
  const value = new Array(size)
  for (let i = 0; i < size; i++) {
    const packed = entries.data.entry[start + i]
    value[i] = packed == undefined_entry ? NaN : packed * limits[s] / largest
  }
  panel.data.value = value
  panel.change.emit()
  titles[p].text = `${names[p]}, step ${shown[at].toLocaleString('en')}, seed ${seed.value}`
})
"""
_SHOW_STEP = """
const at = places[slider.categories.indexOf(slider.value)]
for (const mark of marks) mark.location = at
"""
_SHOW_SEED = """
const s = seed.options.indexOf(seed.value)
lines.forEach((line, number) => {
  const alpha = number % seed.options.length == s ? 1 : faded
  line.glyph.line_alpha = alpha
  if ("fill_alpha" in line.glyph) line.glyph.fill_alpha = alpha
})
"""
_SHOW_CURVE = """
const source = sources[choice.options.indexOf(choice.value)]
const {step, x} = source.data
lines.forEach((line, number) => { line.data = {step, x, y: source.data[`y${number}`]} })
title.text = choice.value
"""


class HeatMap(NamedTuple):
    """Matrices over training.

    Attributes
    ----------
    values
        (seed, step, layer, panel, row, column), the last three of any dims: matrices are drawn side
        by side along `panel`. NaN is undefined.
    limits
        End of the colour scale of each seed, over all its steps; above 0.
    symmetric
        Whether colours are symmetric about 0; else they begin there.
    """

    values: xr.DataArray
    limits: Float[np.ndarray, " seed"]
    symmetric: bool


class _Drawn(NamedTuple):
    """Parts of a page, the mark of the chosen step in one, and its lines and dots of each seed."""

    parts: "list[Model]"
    mark: Any
    lines: list[Any]


class Explorer(NamedTuple):
    """Parts of a page.

    Attributes
    ----------
    script
        What makes the plots: a script element, to come once, after `scripts()`.
    controls
        Places for the controls.
    plots
        Places for the plots, by name, those of a heat map in a list: a colour bar, then its panels.
    """

    script: str
    controls: list[str]
    plots: dict[str, list[str]]


def scripts() -> str:
    """Return bokeh's script elements, with all that plots and controls need inside."""
    from bokeh.resources import Resources

    return Resources(mode="inline", components=["bokeh", "bokeh-widgets"]).render_js()


def limits(values: xr.DataArray, least: float = 1e-12) -> Float[np.ndarray, " seed"]:
    """Return the end of the colour scale of each seed: the largest size of an entry, at any step.

    Where there is no entry that is finite and at least `least` it is 1.
    """
    entries = values.transpose("seed", ...).values.reshape(values.sizes["seed"], -1)
    largest = np.abs(np.where(np.isfinite(entries), entries, 0.0)).max(axis=1, initial=0.0)
    return np.where(largest >= least, largest, 1.0)


def packed(drawn: HeatMap) -> Int[np.ndarray, " entry"]:
    """Return all entries as integers, `LARGEST` for the end of the colour scale of their seed.

    A value beyond it is put there; one that is not finite is -32768.
    """
    values = drawn.values.values
    scale = drawn.limits.reshape(-1, *(1,) * (values.ndim - 1))
    scaled = np.clip(np.where(np.isfinite(values), values, 0.0) / scale, -1, 1) * LARGEST
    entries = np.where(np.isfinite(values), np.rint(scaled), _UNDEFINED)
    return entries.astype(np.int16).ravel()


def explorer(
    steps: Int[np.ndarray, " step"],
    seeds: Sequence[int],
    *,
    loss: xr.DataArray | None = None,
    curves: Mapping[str, xr.DataArray] | None = None,
    maps: Mapping[str, HeatMap] | None = None,
) -> Explorer:
    """Return plots that a slider over steps and a choice of seed act on, in the browser.

    Parameters
    ----------
    steps
        Those of the slider, increasing; it begins at the last one.
    seeds
        Those of the choice; it begins at the first. Every array has them, in this order.
    loss
        (seed, log_step): drawn against the step, with the chosen step marked. Losses that are not
        above 0 have no place on its axis, and are gaps.
    curves
        By what they are called, (seed, step) each, with steps of their own: one is drawn at a time.
    maps
        By name. Of the steps of a map, the last that is not after the chosen one is shown, and
        named above it.
    """
    from bokeh.embed import components
    from bokeh.models import CategoricalSlider

    labels = [f"{step:,}" for step in steps.tolist()]
    slider = CategoricalSlider(
        name="step",
        title="Training step",
        categories=labels,
        value=labels[-1],
        sizing_mode="stretch_width",
    )
    names = [str(seed) for seed in seeds]
    seed = choice("Seed", names, "seed")
    models: dict[str, Model] = {"slider": slider, "seed": seed}
    plots: dict[str, list[str]] = {}
    marks: list[Any] = []
    lines: list[Any] = []
    drawn_steps = [] if loss is None else [loss["log_step"].values]
    drawn_steps += [curve["step"].values for curve in (curves or {}).values()]
    axis = _StepAxis(np.unique(np.concatenate([steps, *drawn_steps])))
    over_steps: dict[str, _Drawn] = {} if loss is None else {"loss": _losses(loss, axis)}
    if curves:
        over_steps["curves"] = _curves(curves, axis)
    for name, (parts, mark, of_seeds) in over_steps.items():
        mark.location = axis.places(steps)[-1]
        marks.append(mark)
        lines += of_seeds
        models |= {f"{name}-{number}": part for number, part in enumerate(parts)}
        plots[name] = [f"{name}-{number}" for number in range(len(parts))]
    for number, (name, drawn) in enumerate((maps or {}).items()):
        parts = _map(name, drawn, slider, seed, steps)
        models |= {f"map{number}-{part}": each for part, each in enumerate(parts)}
        plots[name] = [f"map{number}-{part}" for part in range(len(parts))]
    on_change(
        slider,
        _SHOW_STEP,
        {"slider": slider, "marks": marks, "places": axis.places(steps).tolist()},
    )
    on_change(seed, _SHOW_SEED, {"seed": seed, "lines": lines, "faded": _FADED})
    script, divs = components(models, wrap_plot_info=True)
    return Explorer(
        script,
        [divs["slider"], divs["seed"]],
        {name: [divs[key] for key in keys] for name, keys in plots.items()},
    )


def on_change(widget: "Model", code: str, arguments: Mapping[str, Any]) -> "CustomJS":
    """Run a script in the browser when a control is moved; its variables are `arguments`."""
    from bokeh.models import CustomJS

    callback = CustomJS(args=dict(arguments), code=code)
    widget.js_on_change("value", callback)
    return callback


def empty(height: int, title: str = "", **options: Any) -> Any:
    """Return an empty bokeh figure as wide as its place, without tools that would catch a swipe."""
    from bokeh.models import Title
    from bokeh.plotting import figure

    plot = figure(height=height, sizing_mode="stretch_width", tools="", **options)
    plot.toolbar_location = None
    plot.title = Title(text=title, text_font_size="10pt")
    return plot


def choice(title: str, options: Sequence[str], name: str) -> Any:
    """Return a choice of one of `options`, the first one chosen."""
    from bokeh.models import Select

    return Select(title=title, options=[*options], value=options[0], sizing_mode="stretch_width")


class _StepAxis:
    """A logarithmic axis of training steps that has a place for 0: half of the first one after."""

    def __init__(self, steps: np.ndarray) -> None:
        values = np.asarray(steps, dtype=float)
        positive = values[values > 0]
        self._zero = float(positive.min()) / 2 if positive.size else 0.5
        self._has_zero = bool((values <= 0).any())
        self._high = float(positive.max()) if positive.size else 1.0

    def places(self, steps: np.ndarray) -> Float[np.ndarray, " step"]:
        """Return where steps are."""
        values = np.asarray(steps, dtype=float)
        return np.where(values > 0, values, self._zero)

    def figure(self, **options: Any) -> tuple[Any, Any]:
        """Return a figure over steps, and its mark of the chosen one."""
        from bokeh.models import FixedTicker, Range1d, Span

        low = self._zero if self._has_zero else 2 * self._zero
        along = Range1d(start=low / 1.15, end=self._high * 1.15)
        plot = empty(280, x_axis_type="log", x_range=along, **options)
        decades = 10.0 ** np.arange(np.floor(np.log10(low)), np.ceil(np.log10(self._high)) + 1)
        # A decade beside step 0 would be written over it.
        ticks = [float(each) for each in decades if not self._has_zero or each > 1.5 * low]
        labels = {each: f"{each:,.0f}" for each in ticks}
        if self._has_zero:
            labels = {low: "0"} | labels
        plot.xaxis.ticker = FixedTicker(ticks=list(labels))
        plot.xaxis.major_label_overrides = labels
        plot.xaxis.axis_label = "training step"
        mark = Span(dimension="height", line_color=style.GUIDE, line_dash="dotted", line_width=2)
        plot.add_layout(mark)
        return plot, mark


def _seed_lines(plot: Any, seeds: np.ndarray, sources: Sequence[Any]) -> list[Any]:
    from bokeh.models import HoverTool

    lines = []
    for number, (seed, source) in enumerate(zip(seeds.tolist(), sources, strict=True)):
        lines.append(
            plot.line(
                "x",
                "y",
                source=source,
                color=style.colour(number),
                line_width=2,
                line_alpha=1.0 if number == 0 else _FADED,
                line_dash=("solid", "dashed", "dotted", "dotdash")[
                    number // len(style.PALETTE) % 4
                ],
                legend_label=f"seed {seed}",
                name=f"seed {seed}",
            )
        )
    dots = [
        # A value between gaps is on no line.
        plot.scatter(
            "x", "y", source=source, size=3, color=style.colour(number), alpha=line.glyph.line_alpha
        )
        for number, (line, source) in enumerate(zip(lines, sources, strict=True))
    ]
    plot.add_tools(
        HoverTool(
            renderers=lines,
            tooltips=[("", "$name"), ("step", "@step{0,0}"), ("value", "@y{%.4g}")],
            formatters={"@y": "printf"},
        )
    )
    plot.legend.label_text_font_size = "9pt"
    plot.legend.background_fill_alpha = 0.7
    plot.legend.padding = plot.legend.spacing = 2
    plot.legend.location = "bottom_left"
    return lines + dots


def _losses(loss: xr.DataArray, axis: _StepAxis) -> "_Drawn":
    from bokeh.models import ColumnDataSource

    steps = loss["log_step"].values
    plot, mark = axis.figure(y_axis_type="log", name="loss")
    values = loss.transpose("seed", "log_step").values
    shown = _single(np.where(values > 0, values, np.nan))
    along = {"step": steps, "x": axis.places(steps)}
    sources = [ColumnDataSource(along | {"y": each}) for each in shown]
    lines = _seed_lines(plot, loss["seed"].values, sources)
    plot.yaxis.axis_label = style.label(loss, "training loss")
    return _Drawn([plot], mark, lines)


def _curves(curves: Mapping[str, xr.DataArray], axis: _StepAxis) -> "_Drawn":
    """Return a choice of what is drawn and the plot of it, its mark, and its line of each seed."""
    from bokeh.models import ColumnDataSource

    stored = []
    for each in curves.values():
        finite = _single(each.transpose("seed", "step").values)
        steps = each["step"].values
        columns: dict[str, Any] = {"step": steps, "x": axis.places(steps)}
        stored.append(
            ColumnDataSource(columns | {f"y{number}": y for number, y in enumerate(finite)})
        )
    first = next(iter(curves.values()))
    plot, mark = axis.figure(name="curves")
    shown = stored[0].data
    sources = [
        ColumnDataSource({"step": shown["step"], "x": shown["x"], "y": shown[f"y{number}"]})
        for number in range(first.sizes["seed"])
    ]
    lines = _seed_lines(plot, first["seed"].values, sources)
    names = list(curves)
    chosen = choice("Quantity", names, "quantity")
    plot.title.text = names[0]
    arguments = {"choice": chosen, "sources": stored, "lines": sources, "title": plot.title}
    on_change(chosen, _SHOW_CURVE, arguments)
    return _Drawn([chosen, plot], mark, lines)


def _single(values: np.ndarray) -> np.ndarray:
    """Return values in single precision; what is not finite there is NaN, and drawn as a gap."""
    with np.errstate(over="ignore"):
        single = np.asarray(values).astype(np.float32)
    return np.where(np.isfinite(single), single, np.float32(np.nan))


def _map(
    name: str, drawn: HeatMap, slider: "Model", seed: "Model", steps: np.ndarray
) -> "list[Model]":
    """Return the choice of a layer, where there are several, the colour bar, and the panels."""
    from bokeh.models import ColumnDataSource, LinearColorMapper

    values = drawn.values
    across, down, along = values.dims[3:]
    n_layers, rows, columns = (values.shape[axis] for axis in (2, 4, 5))
    limit = float(drawn.limits[0])
    mapper = LinearColorMapper(
        palette=_palette(style.DIVERGING if drawn.symmetric else _SEQUENTIAL),
        low=-limit if drawn.symmetric else 0.0,
        high=limit,
        nan_color=_GREY,
    )
    first = values.isel(seed=0, step=-1, layer=0).values.astype(float)
    row, column = (each.ravel() for each in np.indices((rows, columns), dtype=np.int16))
    panels = [
        ColumnDataSource({"row": row, "column": column, "value": matrix.ravel()})
        for matrix in first
    ]
    names = [f"{across} {number}" for number in range(len(panels))]
    at = f"step {int(values['step'][-1]):,}, seed {int(values['seed'][0])}"
    figures = [
        _panel(
            f"{label}, {at}",
            source,
            mapper,
            (str(down), rows),
            (str(along), columns),
            name=f"{name} {number}",
        )
        for number, (label, source) in enumerate(zip(names, panels, strict=True))
    ]
    layers = [str(number) for number in range(n_layers)]
    choices = [choice("Layer", layers, f"{name} layer")] if n_layers > 1 else []
    arguments = {
        "slider": slider,
        "seed": seed,
        "layer": choices[0] if choices else None,
        "steps": steps.tolist(),
        "shown": values["step"].values.tolist(),
        "entries": ColumnDataSource({"entry": packed(drawn)}),
        "panels": panels,
        "titles": [each.title for each in figures],
        "names": names,
        "mapper": mapper,
        "limits": drawn.limits.tolist(),
        "symmetric": drawn.symmetric,
        "largest": LARGEST,
        "undefined_entry": _UNDEFINED,
        "n_layers": n_layers,
        "rows": rows,
        "columns": columns,
    }
    callback = on_change(slider, _SHOW_MAP, arguments)
    for widget in (seed, *choices):
        widget.js_on_change("value", callback)
    return [*choices, _bar(name, mapper), *figures]


def _panel(
    title: str,
    source: Any,
    mapper: Any,
    down: tuple[str, int],
    along: tuple[str, int],
    *,
    name: str,
) -> Any:
    from bokeh.models import BasicTicker, FixedTicker, HoverTool, Range1d

    (row_name, rows), (column_name, columns) = down, along
    square = 0.5 <= rows / columns <= 2
    plot = empty(
        310 if square else int(np.clip(20 * rows, 60, 260)) + 90,
        title,
        name=name,
        x_range=Range1d(start=-0.5, end=columns - 0.5),
        y_range=Range1d(start=rows - 0.5, end=-0.5),
    )
    colour = {"field": "value", "transform": mapper}
    plot.rect("column", "row", 1, 1, source=source, fill_color=colour, line_color=colour)
    plot.grid.visible = False
    for axis, size, label in ((plot.xaxis, columns, column_name), (plot.yaxis, rows, row_name)):
        axis.axis_label = label
        few = size <= _CELLS
        axis.ticker = FixedTicker(ticks=list(range(size))) if few else BasicTicker(min_interval=1)
    plot.add_tools(
        HoverTool(
            tooltips=[(row_name, "@row"), (column_name, "@column"), ("value", "@value{%.3g}")],
            formatters={"@value": "printf"},
        )
    )
    return plot


def _bar(name: str, mapper: Any) -> Any:
    """Return a figure of nothing but the colour bar, which all panels of a map share."""
    from bokeh.models import ColorBar, Range1d

    plot = empty(
        62,
        min_border=0,
        outline_line_color=None,
        x_range=Range1d(start=0, end=1),
        y_range=Range1d(start=0, end=1),
    )
    plot.rect([0.5], [0.5], 1, 1, alpha=0.0)  # bokeh warns of a figure that holds nothing
    plot.axis.visible = plot.grid.visible = False
    bar = ColorBar(color_mapper=mapper, title=name, height=12, padding=4, margin=0)
    plot.add_layout(bar, "below")
    return plot


def _palette(name: str) -> tuple[str, ...]:
    colours = matplotlib.colormaps[name](np.linspace(0, 1, 256))
    return tuple(to_hex(each) for each in colours)
