"""What patches do: of the whole hook point over training, and of its parts at the last step."""

from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mechicl.plots import style
from mechicl.schema import flag_names

_MOST_MAPS = 4
_NAMES = {
    "recovered": "recovered (1: the donor's)",
    "moved": "mean square change of predictions",
    "loss_change": "change of loss",
}


def draw(result: xr.Dataset) -> Figure:
    """Draw two panels over training and, of parts, two at the last step, or a map a seed.

    What is shown is how far predictions go to the donor's, or without a donor how far they move,
    and the change of the loss; bars are two standard errors. Heads and positions at once are maps
    of the first of these, of the first seeds that have one.
    """
    donor = style.parameter(result, "source") not in ("zero", "mean")
    shown = ("recovered" if donor else "moved", "loss_change")
    last = result.isel(step=-1)
    n_heads, n_positions = result.sizes["head"], result.sizes["pos"]
    maps = n_heads > 1 and n_positions > 1
    parts = 0 if n_heads * n_positions == 1 else 2
    seeds = range(result.sizes["seed"])
    mapped: list[int] = []
    if maps:
        finite = np.isfinite(last[shown[0]].values).any((-1, -2))
        mapped = [int(seed) for seed in np.argsort(~finite, kind="stable")][:_MOST_MAPS]
        parts = len(mapped)
    columns = 2
    rows = 1 + -(-parts // columns)
    figure = style.figure(rows, columns, width=3.8, height=2.9)
    panels = list(np.ravel(figure.subplots(rows, columns, squeeze=False)))
    for axes, name in zip(panels, shown, strict=False):
        _over_training(axes, result, name)
    if maps:
        _maps(figure, panels[2:], last.isel(seed=mapped), shown[0])
    elif parts:
        along = "head" if n_heads > 1 else "pos"
        for axes, name in zip(panels[2:], shown, strict=True):
            for seed in seeds:
                _parts(axes, last.isel(seed=seed), name, along, seed, len(seeds))
            _finish(axes, last[name], name)
            axes.set_xlabel("head" if along == "head" else "position")
            axes.set_title(f"each {axes.get_xlabel()}, step {int(last['step']):,}", fontsize=9)
    for axes in panels[2 + parts :]:
        axes.set_axis_off()
    style.legend(figure, panels[0])
    style.title(figure, *_title(result))
    return figure


def _title(result: xr.Dataset) -> tuple[str, str]:
    (hook,) = flag_names(result["hook"]).values()
    source = style.parameter(result, "source")
    given = {"checkpoint": "from_step", "seed": "from_seed"}.get(str(source))
    which = style.parameter(result, given) if given else None
    put_in = {
        "prompt": "from another prompt",
        "checkpoint": f"from {'the last step' if which is None else f'step {which:,}'}",
        "seed": f"from {'the next seed' if which is None else f'seed {which}'}",
        "zero": "set to 0",
        "mean": "set to the mean",
    }.get(str(source), "patched")
    # A reason that is of every seed, such as that there is no donor, is no news of one of them.
    absent = style.absent(result["whole_moved"], result.get("undefined"))
    if not absent and source not in ("zero", "mean"):
        absent = style.absent(result["whole_recovered"], result.get("undefined"))
    return f"{hook} {put_in}", absent


def _over_training(axes: Axes, result: xr.Dataset, name: str) -> None:
    steps = result["step"].values
    for number, seed in enumerate(result["seed"].values):
        one = result.isel(seed=number)
        look: dict[str, Any] = {"color": style.colour(number), "ls": style.dash(number), "lw": 1.4}
        look |= {"marker": "o", "ms": 3} if len(steps) <= 12 else {}
        bars = 2 * one[f"whole_{name}_error"].values
        values = one[f"whole_{name}"].values
        axes.errorbar(steps, values, bars, label=f"seed {seed}", elinewidth=0.8, **look)
    style.step_axis(axes, steps)
    axes.set_title("all of the hook point", fontsize=9)
    _finish(axes, result[f"whole_{name}"], name)


def _parts(axes: Axes, one: xr.Dataset, name: str, along: str, number: int, n_seeds: int) -> None:
    """Draw the parts of one seed, beside those of the others."""
    values = one[name].values.ravel()
    bars = 2 * one[f"{name}_error"].values.ravel()
    shift = 0.5 * ((number + 0.5) / n_seeds - 0.5) if along == "head" else 0.0
    look: dict[str, Any] = {"color": style.colour(number), "ms": 4, "elinewidth": 0.8}
    line = "none" if along == "head" else style.dash(number)
    axes.errorbar(np.arange(len(values)) + shift, values, bars, ls=line, marker="o", **look)
    if len(values) <= 12:
        axes.set_xticks(range(len(values)))


def _finish(axes: Axes, variable: xr.DataArray, name: str) -> None:
    axes.set_ylabel(_NAMES[name])
    axes.grid(visible=True, color="0.9", lw=0.6)
    for height in (0.0, 1.0) if name == "recovered" else (0.0,):
        axes.axhline(height, color=style.GUIDE, lw=0.8, ls=(0, (6, 2)), zorder=1)
    if not np.isfinite(variable.values).any():
        style.undefined(axes)


def _maps(figure: Figure, panels: list[Axes], last: xr.Dataset, name: str) -> None:
    values = last[name].transpose("seed", "head", "pos").values
    limit = np.abs(values[np.isfinite(values)]).max(initial=0.0) or 1.0
    drawn = [axes for axes, _ in zip(panels, values, strict=False)]
    for axes, seed, table in zip(drawn, last["seed"].values, values, strict=True):
        axes.imshow(table, cmap=style.DIVERGING, vmin=-limit, vmax=limit, aspect="auto")
        axes.set_title(f"seed {seed}, step {int(last['step']):,}", fontsize=9)
        axes.set_xlabel("position")
        axes.set_ylabel("head")
        axes.set_yticks(range(len(table)))
        if not np.isfinite(table).any():
            style.undefined(axes)
    figure.colorbar(style.colours(limit), ax=drawn, label=name.replace("_", " "))
