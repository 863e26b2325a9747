"""The step size over training, and the path of every seed to the solution manifold."""

from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mechicl.plots import style

_FEW_POINTS = 12
_START: dict[str, Any] = {"ls": "none", "marker": "o", "ms": 5, "mfc": "white"}
_END: dict[bool, tuple[str, dict[str, Any]]] = {
    True: ("end, yes at last step", {"ls": "none", "marker": "s", "ms": 5}),
    False: ("end, not yes at last step", {"ls": "none", "marker": "x", "ms": 8, "mew": 2}),
}


def draw(result: xr.Dataset) -> Figure:
    """Draw η against η*, the distance from the manifold, and (γ̂, Σ|μ|/2) beside the curve (4.6).

    The curve goes through the predictions that the result holds. A path starts at a circle; it ends
    at a square where the probe says yes at the last step, else it is pale and ends at a cross.
    """
    figure = style.figure(1, 3)
    size, distance, plane = figure.subplots(1, 3)
    _step_size(size, result)
    style.lines(distance, result["distance"])
    tolerance = style.parameter(result, "distance_tolerance")
    if tolerance is not None:
        style.guide(distance, tolerance, f"tolerated distance {tolerance:g}", (3, 2))
    distance.set_ylabel("relative distance from S_γ")
    _log_if_positive(distance, result["distance"].values)
    _plane(plane, result)
    for axes, name in ((size, "eta"), (distance, "distance"), (plane, "mu_gamma")):
        style.note(axes, style.absent(result[name], result.get("undefined")))
    style.legend(figure, size, distance, plane)
    style.title(figure, style.verdicts(result))
    return figure


def _step_size(axes: Axes, result: xr.Dataset) -> None:
    style.lines(axes, result["eta"])
    best = float(result["eta_star"])
    tolerance = style.parameter(result, "eta_tolerance")
    band = "" if tolerance is None else f" ± {100 * tolerance:g} %"
    style.guide(axes, best, f"η* = {best:.4f}{band}")
    if tolerance is not None:
        axes.axhspan(best * (1 - tolerance), best * (1 + tolerance), color="0.92", zorder=0)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("step size η = Σ|ω||μ|")


def _plane(axes: Axes, result: xr.Dataset) -> None:
    """Draw the measured (γ̂, Σ|μ|/2) of each seed on the curve of the manifold."""
    gamma, measured = result["gamma"], result["mu_gamma"].transpose(*result["gamma"].dims)
    predicted = result["mu_gamma_predicted"].transpose(*gamma.dims)
    ends_yes = (result["holds"].isel(step=-1) == 1).values
    ends: dict[str, dict[str, Any]] = {}
    for number in range(result.sizes["seed"]):
        x, y = gamma.isel(seed=number).values, measured.isel(seed=number).values
        keep = np.flatnonzero(np.isfinite(x) & np.isfinite(y))
        paint: dict[str, Any] = {"color": style.colour(number)}
        pale = 1.0 if ends_yes[number] else 0.5
        axes.plot(x[keep], y[keep], lw=1.2, ls=style.dash(number), alpha=pale, **paint)
        if not keep.size:
            continue
        name, end = _END[bool(ends_yes[number])]
        ends |= {"start": _START, name: end}
        axes.plot(x[keep[:1]], y[keep[:1]], **_START, **paint)
        axes.plot(x[keep[-1:]], y[keep[-1:]], **end, **paint)
    curve = np.array([gamma.values.ravel(), predicted.values.ravel()])
    curve = curve[:, np.isfinite(curve).all(axis=0)]
    top = 1.3 * np.nanmax(measured.values) if curve.size else 1.0
    if curve.size:
        look: dict[str, Any] = {"color": style.GUIDE, "lw": 1, "ls": (0, (1, 1))}
        if curve.shape[1] <= _FEW_POINTS:  # a line through few points would not be the curve
            look |= {"ls": "none", "marker": "+", "ms": 9}
        x, y = curve[:, np.argsort(curve[0])]
        axes.plot(x[y <= top], y[y <= top], zorder=1, **look)
        axes.plot([], [], label="μ_γ of (4.6) at γ̂", **look)
    else:
        style.undefined(axes)
    for name in sorted(ends, reverse=True):
        axes.plot([], [], color=style.GUIDE, label=name, **ends[name])
    axes.set_xlim(0, 1.08 * np.nanmax(gamma.values) if curve.size else 1.0)
    axes.set_ylim(0, top)
    axes.grid(visible=True, color="0.9", lw=0.6)
    axes.set_xlabel("KQ scale γ̂ = Σ|μ||ω| / Σ|μ|")
    axes.set_ylabel("Σ|μ| / 2")


def _log_if_positive(axes: Axes, values: np.ndarray) -> None:
    finite = values[np.isfinite(values)]
    if finite.size and finite.min() > 0 and finite.max() > 10 * finite.min():
        axes.set_yscale("log")
