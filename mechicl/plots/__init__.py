"""Figures: one module a probe, each drawing the probe's result and nothing else."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import xarray as xr
    from matplotlib.figure import Figure

OWN = (
    "approximate_loss",
    "circuits",
    "head_roles",
    "homogeneous_kq",
    "preconditioner",
    "sign_matching",
    "solution_manifold",
    "task_allocation",
    "training_stages",
    "zero_sum_ov",
)
"""Probes with a figure of their own; the others get `mechicl.plots.generic`."""

__all__ = ["OWN", "draw"]


def draw(result: "xr.Dataset") -> "Figure":
    """Return the figure of a probe's result, chosen by `result.attrs["probe"]`."""
    name = result.attrs.get("probe")
    module = import_module(f"mechicl.plots.{name if name in OWN else 'generic'}")
    return module.draw(result)
