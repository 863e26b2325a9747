"""The step size over training, and the path of every seed to the solution manifold."""

from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mechicl.plots import style


def draw(result: xr.Dataset) -> Figure:
    """Draw η against η*, the distance from the manifold, and (γ̂, μ_γ) beside the curve (4.6).

    The curve goes through the predictions that the result holds. A path starts at a circle and ends
    at a square.
    """
    figure = style.figure(1, 3)
    size, distance, plane = figure.subplots(1, 3)
    _step_size(size, result)
    style.lines(distance, result["distance"])
    tolerance = style.parameter(result, "distance_tolerance")
    if tolerance is not None:
        style.guide(distance, tolerance, f"tolerance {tolerance:g}")
        distance.legend(*_last(distance), fontsize=7, loc="upper right")
    distance.set_ylabel("relative distance from S_γ")
    _log_if_positive(distance, result["distance"].values)
    _plane(plane, result)
    handles, labels = plane.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", frameon=False, fontsize=8)
    figure.suptitle(style.verdicts(result), fontsize=10)
    return figure


def _step_size(axes: Axes, result: xr.Dataset) -> None:
    style.lines(axes, result["eta"])
    best = float(result["eta_star"])
    style.guide(axes, best, f"η* = {best:.4f}")
    tolerance = style.parameter(result, "eta_tolerance")
    if tolerance is not None:
        axes.axhspan(best * (1 - tolerance), best * (1 + tolerance), color="0.92", zorder=0)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("step size η = Σ|ω||μ|")
    axes.legend(*_last(axes), fontsize=7, loc="lower right")


def _plane(axes: Axes, result: xr.Dataset) -> None:
    """Draw the measured (γ̂, μ_γ) of each seed on the curve of the manifold."""
    gamma, measured = result["gamma"], result["mu_gamma"].transpose(*result["gamma"].dims)
    predicted = result["mu_gamma_predicted"].transpose(*gamma.dims)
    for number in range(result.sizes["seed"]):
        x, y = gamma.isel(seed=number).values, measured.isel(seed=number).values
        keep = np.flatnonzero(np.isfinite(x) & np.isfinite(y))
        paint: dict[str, Any] = {"color": style.colour(number)}
        name = f"seed {result['seed'].values[number]}"
        axes.plot(x[keep], y[keep], lw=1.2, ls=style.dash(number), label=name, **paint)
        axes.plot(x[keep[:1]], y[keep[:1]], "o", ms=5, mfc="white", **paint)
        axes.plot(x[keep[-1:]], y[keep[-1:]], "s", ms=5, **paint)
    curve = np.array([gamma.values.ravel(), predicted.values.ravel()])
    curve = curve[:, np.isfinite(curve).all(axis=0)]
    top = 1.3 * np.nanmax(measured.values) if curve.size else 1.0
    if curve.size:
        x, y = curve[:, np.argsort(curve[0])]
        axes.plot(x[y <= top], y[y <= top], color=style.GUIDE, lw=1, ls=(0, (6, 2)), zorder=1)
        axes.plot([], [], color=style.GUIDE, lw=1, ls=(0, (6, 2)), label="μ_γ of (4.6)")
    else:
        style.undefined(axes)
    axes.set_xlim(left=0)
    axes.set_ylim(0, top)
    axes.grid(visible=True, color="0.9", lw=0.6)
    axes.set_xlabel("KQ scale γ")
    axes.set_ylabel("OV scale of each sign, Σ|μ| / 2")


def _last(axes: Axes) -> tuple[list, list]:
    """Return handle and label of the guide, the last thing drawn."""
    handles, labels = axes.get_legend_handles_labels()
    return handles[-1:], labels[-1:]


def _log_if_positive(axes: Axes, values: np.ndarray) -> None:
    finite = values[np.isfinite(values)]
    if finite.size and finite.min() > 0 and finite.max() > 10 * finite.min():
        axes.set_yscale("log")
