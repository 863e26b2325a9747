"""The losses of a pair of heads over its scales, and the paths of the models on them."""

from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, SymLogNorm
from matplotlib.figure import Figure

from mechicl.plots import style

_MOST = 4.0
"""Losses are drawn up to this multiple of that of a model that predicts 0."""
_VALLEY: dict[str, Any] = {"color": "black", "lw": 1.2, "ls": (0, (5, 2))}
_START: dict[str, Any] = {"ls": "none", "marker": "o", "ms": 5, "mfc": "white"}
_END: dict[str, Any] = {"ls": "none", "marker": "s", "ms": 5, "mec": "white", "mew": 0.6}


def draw(result: xr.Dataset) -> Figure:
    """Draw the difference, the measured and the approximate loss, with every model's path.

    The two losses share their colours, on a logarithmic scale that ends where a model does several
    times worse than 0.
    """
    figure = style.figure(1, 3, width=3.9, height=3.3)
    panels = figure.subplots(1, 3)
    measured, approximate = result["measured_loss"], result["approximate_loss"]
    # Every pair of scale 0 predicts 0; a grid without one has its most harmless at its first.
    most = _MOST * float(measured.values[0, 0])
    both = np.concatenate([measured.values.ravel(), approximate.values.ravel()])
    low = np.nanmin(both[both > 0], initial=most / 2)
    losses = LogNorm(low, most)
    difference = result["difference"].values
    within = np.abs(difference[np.isfinite(difference) & (measured.values <= most)])
    limit = min(within.max(initial=0.0), most) or 1.0
    differences = SymLogNorm(limit / 30, vmin=-limit, vmax=limit)
    for axes, values, norm, cmap, name in (
        (
            panels[0],
            result["difference"],
            differences,
            style.DIVERGING,
            "measured − L̃",
        ),
        (panels[1], measured, losses, "viridis", "measured loss"),
        (panels[2], approximate, losses, "viridis", "L̃ of (4.1)"),
    ):
        shown = values.transpose("ov_scale", "kq_scale")
        mesh = axes.pcolormesh(
            result["kq_scale"].values,
            result["ov_scale"].values,
            np.ma.masked_invalid(shown.values),
            norm=norm,
            cmap=cmap,
            shading="nearest",
        )
        extend = "both" if name == "measured − L̃" else "max"
        bar = figure.colorbar(mesh, ax=axes, extend=extend, format="%g", label="mean squared error")
        bar.minorticks_off()
        if isinstance(norm, LogNorm):
            bar.set_ticks(_round_numbers(low, most))
        else:
            # Powers within the linear part would be written over 0.
            powers = [p for p in _round_numbers(limit / 30, limit) if _is_power(p)]
            bar.set_ticks([*(-p for p in reversed(powers)), 0.0, *powers])
        axes.set_title(name, fontsize=9)
        axes.set_xlabel("KQ scale ω")
        axes.set_ylabel("OV scale μ")
        _paths(axes, result)
    style.legend(figure, panels[1])
    n_prompts = style.parameter(result, "n_prompts")
    prompts = "" if n_prompts is None else f", {n_prompts:,} prompts"
    absent = style.absent(result["gamma"], result.get("undefined"))
    said = "; ".join(filter(None, (absent, _outside(panels[0], result))))
    style.title(figure, f"loss of the pair (ω, −ω; μ, −μ){prompts}", said)
    return figure


def _round_numbers(low: float, high: float) -> list[float]:
    """Return the numbers 1, 2 and 5 times powers of ten between two positive ones."""
    powers = range(int(np.floor(np.log10(low))), int(np.ceil(np.log10(high))) + 1)
    numbers = [factor * 10.0**power for power in powers for factor in (1, 2, 5)]
    return [number for number in numbers if low <= number <= high]


def _is_power(number: float) -> bool:
    return bool(np.isclose(np.log10(number) % 1, (0, 1), atol=1e-9).any())


def _paths(axes: Axes, result: xr.Dataset) -> None:
    """Draw the valley and (γ̂, Σ|μ|/2) of every seed, within the limits of the grid."""
    limits = axes.get_xlim(), axes.get_ylim()
    omega = np.linspace(*limits[0], 400)
    omega = omega[omega > 0]
    best = float(result["eta_star"])
    axes.plot(omega, best / (2 * omega), label="valley 2ωμ = η*", **_VALLEY)
    gamma, mu = (result[name].transpose("seed", "step").values for name in ("gamma", "mu_gamma"))
    for number, seed in enumerate(result["seed"].values):
        keep = np.flatnonzero(np.isfinite(gamma[number]) & np.isfinite(mu[number]))
        paint: dict[str, Any] = {"color": style.colour(number + 1)}
        axes.plot([], [], lw=1.6, ls=style.dash(number), label=f"seed {seed}", **paint)
        if keep.size:
            x, y = gamma[number, keep], mu[number, keep]
            axes.plot(x, y, color="white", lw=2.8)
            axes.plot(x, y, lw=1.6, ls=style.dash(number), **paint)
            axes.plot(x[:1], y[:1], **_START, **paint)
            axes.plot(x[-1:], y[-1:], **_END, **paint)
    axes.plot([], [], color=style.GUIDE, label="start", **_START)
    axes.plot([], [], color=style.GUIDE, label="end", **_END)
    axes.set_xlim(limits[0])
    axes.set_ylim(limits[1])


def _outside(axes: Axes, result: xr.Dataset) -> str:
    """Say how many seeds leave the grid."""
    (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    gamma, mu = result["gamma"], result["mu_gamma"]
    out = (gamma < left) | (gamma > right) | (mu < bottom) | (mu > top)
    count = int(out.any("step").sum())
    return f"{count} of {result.sizes['seed']} seeds leave the grid" if count else ""
