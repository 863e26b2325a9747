"""Figures: one module a probe, each drawing the probe's result and nothing else."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import xarray as xr
    from matplotlib.figure import Figure

OWN = (
    "activation_patching",
    "approximate_loss",
    "attention_spans",
    "circuits",
    "context_kl",
    "function_vector",
    "head_permutation",
    "head_roles",
    "homogeneous_kq",
    "key_patching",
    "learning_stages",
    "length_generalization",
    "loss_landscape",
    "mmse",
    "predictor_distance",
    "preconditioner",
    "routing",
    "sign_matching",
    "solution_manifold",
    "task_allocation",
    "training_stages",
    "value_alignment",
    "zero_sum_ov",
)
"""Probes with a figure of their own; the others get `mechicl.plots.generic`."""

KINDS = ("curves", "over_runs", "quantities")
"""Figures of what is no probe's result, by the name that its attribute `figure` gives."""

_MEANINGS = "flag_meanings"

__all__ = ["KINDS", "OWN", "draw"]


def draw(result: "xr.Dataset") -> "Figure":
    """Return the figure of a result.

    It is chosen by `result.attrs["figure"]`, one of `KINDS`, or by `result.attrs["probe"]`. Names
    that users give, of runs and of labels, are drawn as they are: no `$` in them begins a formula.
    """
    result = _without_formulas(result)
    kind = result.attrs.get("figure")
    if kind in KINDS:
        return import_module(f"mechicl.plots.{kind}").draw(result)
    name = result.attrs.get("probe")
    module = import_module(f"mechicl.plots.{name if name in OWN else 'generic'}")
    return module.draw(result)


def _without_formulas(result: "xr.Dataset") -> "xr.Dataset":
    """Escape each `$` in coordinates that are text and in names of codes, for matplotlib."""
    import numpy as np

    texts = {
        name: values.copy(data=np.char.replace(values.values, "$", r"\$"))
        for name, values in result.coords.items()
        if values.dtype.kind == "U"
    }
    escaped = result.assign_coords(texts)
    for name in escaped.variables:
        meanings = str(escaped[name].attrs.get(_MEANINGS, ""))
        if "$" in meanings:
            escaped[name].attrs = {
                **escaped[name].attrs,
                _MEANINGS: meanings.replace("$", r"\$"),
            }
    return escaped
