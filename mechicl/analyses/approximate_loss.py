"""The approximate loss (4.1) of the measured head scales beside the loss on fixed prompts."""

from typing import Annotated

import numpy as np
import pydantic
import xarray as xr

from mechicl.analyses.evaluation import (
    losses,
    reference_axis,
    spread_steps,
)
from mechicl.analyses.heads import (
    ATTENTION,
    NONFINITE,
    REGRESSION,
    SOFTMAX,
    apply_where,
    constants,
    head_scales,
    isotropic_softmax,
    nonfinite,
)
from mechicl.analyses.probe import Forward, probe, undefined_codes
from mechicl.schema import Var
from mechicl.theory import linear_regression

_MODEL = ("seed", "step")


@probe(
    needs=ATTENTION | REGRESSION | SOFTMAX,
    gives={
        "approximate_loss": Var(_MODEL, "1", "approximate loss of eq. (4.1) at (omega, mu)", 0),
        "measured_loss": Var(_MODEL, "1", "mean squared error on the evaluation set", 0),
        "measured_error": Var(_MODEL, "1", "standard error of measured_loss", 0),
        "gap": Var(_MODEL, "1", "measured_loss less approximate_loss"),
        "reference": Var(("reference",), "1", "reference predictor"),
        "reference_loss": Var(("reference",), "1", "squared error of references, same prompts", 0),
        "reference_error": Var(("reference",), "1", "standard error of reference_loss", 0),
    },
    undefined=(NONFINITE, "nonfinite_loss"),
    headline=("measured_loss", "approximate_loss", "gap"),
    applies=isotropic_softmax,
    references=("he2025 (2.5), (4.1), Proposition 4.1",),
    forward=True,
)
def approximate_loss(
    trajectory: xr.Dataset,
    forward: Forward,
    *,
    n_steps: Annotated[int, pydantic.Field(ge=2)] = 30,
    n_prompts: Annotated[int, pydantic.Field(ge=2)] = 16384,
    evaluation_seed: Annotated[int, pydantic.Field(ge=0)] = 0,
) -> xr.Dataset:
    """Compare the approximate loss L̃(ω, μ) with the loss of the model itself.

    - `approximate_loss` = L̃ = 1 + σ² − 2⟨μ,ω⟩ + Σ_{h,k} μ_h μ_k (ω_h ω_k + (1+σ²)/L · exp(d ω_h
      ω_k)) at the measured (ω, μ).
    - `measured_loss` = mean of (prediction − y_q)² over a fixed evaluation set, drawn apart from
      the training data; `measured_error` is its Monte-Carlo standard error.
    - `gap` = `measured_loss` − `approximate_loss`, of either sign.
    - `reference_loss`, `reference_error` (reference): the same for the task's exact and classical
      predictors. `reference` is a number whose meanings `mechicl.schema.flag_names` reads (labels
      of text do not survive a Zarr store).

    The first five are (seed, step), at `n_steps` of the saved steps; all are mean squared errors,
    in units of y². There is no yes or no: the ideal depends on the size. At the published d = 5, L
    = 40, σ² = 0.1 the floor of L̃ is 0.2209 and that of the loss of such a model 0.243, so a gap of
    0.022 there is what (4.1) leaves out, not a fault of a model; it shrinks as L grows.

    When it misleads: L̃ overestimates by far once |ω| passes 1/√d; before KQ ∝ I (see `circuits`),
    ω and μ do not describe the model, and L̃ is of another one. All steps and seeds share the
    prompts, so their errors are correlated: differences along a run are surer than `measured_error`
    says. (4.1) is of softmax attention.

    Undefined: weights that are not finite; a loss that overflows (the other one stays).

    Parameters
    ----------
    n_steps
        At most so many of the saved steps, spread evenly in log(1 + steps since the first), first
        and last in.
    n_prompts
        Size of the evaluation set. At 16384 the standard error is about 1.5 % of the loss, a sixth
        of the gap at the published size.
    evaluation_seed
        Seed of the evaluation set.

    References
    ----------
    he2025, (2.5), (4.1) and Proposition 4.1.
    """
    setting = constants(trajectory)
    chosen = forward.load(trajectory.isel(step=spread_steps(trajectory["step"].values, n_steps)))
    omega, mu = head_scales(chosen)
    broken = nonfinite(chosen)
    measured, error, references = losses(chosen, forward, n_prompts, evaluation_seed)
    measured, error = measured.where(~broken), error.where(~broken)

    def closed_form(kq: np.ndarray, ov: np.ndarray) -> np.ndarray:
        value = linear_regression.approximate_loss(kq, ov, **setting)
        return np.where(np.isfinite(value), value, np.nan)

    approximate = apply_where(~broken, closed_form, omega, mu)
    gap = measured - approximate
    return xr.Dataset(
        {
            "approximate_loss": approximate,
            "measured_loss": measured,
            "measured_error": error,
            "gap": gap,
            "reference_loss": ("reference", [one.mean for one in references.values()]),
            "reference_error": ("reference", [one.error for one in references.values()]),
            "undefined": undefined_codes({NONFINITE: broken, "nonfinite_loss": gap.isnull()}),
        },
        coords={"reference": reference_axis(references)},
    )
