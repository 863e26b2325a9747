"""The loss of a symmetric pair of heads over its KQ and OV scale, measured and approximate."""

from itertools import pairwise
from typing import Annotated

import numpy as np
import pydantic
import xarray as xr
from jaxtyping import Float

from mechicl.analyses.evaluation import JointMoments, shares, spread_steps
from mechicl.analyses.heads import (
    ATTENTION,
    NONFINITE,
    REGRESSION,
    SOFTMAX,
    constants,
    head_scales,
    isotropic_softmax,
    nonfinite,
)
from mechicl.analyses.probe import Forward, probe, undefined_codes
from mechicl.schema import Var
from mechicl.theory import linear_regression, regressors

_MODEL = ("seed", "step")
_GRID = ("kq_scale", "ov_scale")
_KQ = Var(("kq_scale",), "1", "omega of the pair", 0)
_OV = Var(("ov_scale",), "1", "mu of the pair", 0)


def _increasing(scales: tuple[float, ...]) -> tuple[float, ...]:
    if any(one >= other for one, other in pairwise(scales)):
        raise ValueError("must increase from each scale to the next")
    return scales


Scales = Annotated[
    tuple[Annotated[float, pydantic.Field(ge=0)], ...],
    pydantic.Field(min_length=1),
    pydantic.AfterValidator(_increasing),
]


@probe(
    needs=ATTENTION | REGRESSION | SOFTMAX,
    gives={
        "kq_scale": _KQ,
        "ov_scale": _OV,
        "measured_loss": Var(_GRID, "1", "mean squared error of the pair", 0),
        "measured_error": Var(_GRID, "1", "standard error of measured_loss", 0),
        "approximate_loss": Var(_GRID, "1", "approximate loss of eq. (4.1)", 0),
        "difference": Var(_GRID, "1", "measured_loss less approximate_loss"),
        "relative_difference": Var(_GRID, "1", "difference over measured_loss", None, 1),
        "gamma": Var(_MODEL, "1", "KQ scale of a model, |mu|-weighted mean of |omega|", 0),
        "mu_gamma": Var(_MODEL, "1", "OV scale of each sign of a model, half the sum of |mu|", 0),
        "eta_star": Var((), "1", "optimal step size", 0),
    },
    undefined=(NONFINITE, "zero_step_size"),
    headline=("gamma", "mu_gamma"),
    applies=isotropic_softmax,
    references=("he2025 (3.2), (4.1), (4.8), Proposition 4.1, Figure 6",),
    forward=True,
)
def loss_landscape(
    trajectory: xr.Dataset,
    forward: Forward,
    *,
    kq_scales: Scales | None = None,
    ov_scales: Scales | None = None,
    n_prompts: Annotated[int, pydantic.Field(ge=2)] = 16384,
    n_steps: Annotated[int, pydantic.Field(ge=1)] = 100,
    evaluation_seed: Annotated[int, pydantic.Field(ge=0)] = 0,
) -> xr.Dataset:
    """Compare measured and approximate loss of a pair (ω, −ω; μ, −μ), and place the models on it.

    The pair predicts μ·q(ω), q = Σ_ℓ (p₊_ℓ − p₋_ℓ) y_ℓ with p_± = softmax over ℓ of ±ω⟨x_ℓ, x_q⟩.

    - `measured_loss` (kq_scale, ov_scale) = ⟨(y_q − μq)²⟩ over a fixed evaluation set, that is ⟨y²⟩
      − 2μ⟨yq⟩ + μ²⟨q²⟩; `measured_error` its Monte-Carlo standard error.
    - `approximate_loss` = L̃ of (4.1); NaN where exp(dω²) is beyond float64.
    - `difference` = `measured_loss` − `approximate_loss`; `relative_difference` = `difference` /
      `measured_loss`, at most 1, negative where L̃ is too high.
    - `kq_scale` = ω and `ov_scale` = μ of the grid, from 0. At ω = 0 the heads cancel, and every μ
      predicts 0.
    - `gamma` = Σ|μ||ω| / Σ|μ| and `mu_gamma` = Σ|μ| / 2 (seed, step): where the models stand, as in
      `solution_manifold`. `eta_star` = η*: the valley of both losses is near 2ωμ = η*.

    Losses are in units of y². There is no yes or no: see `approximate_loss` for why.

    When it misleads: the landscape is of the pair, whatever the model. A model is at its (`gamma`,
    `mu_gamma`) only once its heads are sign-matched, of one |ω| and of zero sum (`sign_matching`,
    `homogeneous_kq`, `zero_sum_ov`): before, and with heads of one sign, its loss is another one.
    All points share the prompts, so the landscape is smoother than its standard error. Within |ω|
    of about 1/√d, (4.1) is too low by up to a tenth at d = 5, L = 40, less at longer contexts;
    beyond, and for large μ near it, it is too high, soon by far.

    Undefined: weights that are not finite; `gamma` of a model with Σ|ω||μ| = 0.

    Parameters
    ----------
    kq_scales
        ω of the grid, increasing, from 0. None takes 25 values from 0 to 1.2/√d.
    ov_scales
        μ of the grid, increasing, from 0. None takes 41 values from 0 to 3√d.
    n_prompts
        Size of the evaluation set. At 16384 the standard error is about 1.5 % of the loss.
    n_steps
        At most so many of the saved steps, spread evenly in log(1 + steps since the first), first
        and last in; 1 takes the last.
    evaluation_seed
        Seed of the evaluation set.

    References
    ----------
    he2025, (3.2), (4.1), (4.8), Proposition 4.1 and Figure 6.
    """
    setting = constants(trajectory)
    root = setting["d"] ** 0.5
    kq = np.array(np.linspace(0, 1.2 / root, 25) if kq_scales is None else kq_scales, dtype=float)
    ov = np.array(np.linspace(0, 3 * root, 41) if ov_scales is None else ov_scales, dtype=float)
    measured, error = _measured(forward, kq, ov, n_prompts, evaluation_seed)
    signs = np.array([1.0, -1.0])
    approximate = linear_regression.approximate_loss(
        kq[:, None, None] * signs, ov[None, :, None] * signs, **setting
    )
    approximate = np.where(np.isfinite(approximate), approximate, np.nan)

    chosen = forward.load(trajectory.isel(step=spread_steps(trajectory["step"].values, n_steps)))
    omega, mu = head_scales(chosen)
    total, step_size = (abs(value).sum("head", skipna=False) for value in (mu, omega * mu))
    defined = step_size > 0
    return xr.Dataset(
        {
            "measured_loss": (_GRID, measured),
            "measured_error": (_GRID, error),
            "approximate_loss": (_GRID, approximate),
            "difference": (_GRID, measured - approximate),
            "relative_difference": (_GRID, (measured - approximate) / measured),
            "gamma": (step_size / total).where(defined),
            "mu_gamma": (total / 2).where(defined),
            "eta_star": linear_regression.optimal_learning_rate(**setting),
            "undefined": undefined_codes(
                {NONFINITE: nonfinite(chosen), "zero_step_size": ~defined}
            ),
        },
        coords={
            "kq_scale": ("kq_scale", kq, _KQ.attrs),
            "ov_scale": ("ov_scale", ov, _OV.attrs),
        },
    )


def _measured(
    forward: Forward,
    kq: Float[np.ndarray, " kq_scale"],
    ov: Float[np.ndarray, " ov_scale"],
    n_prompts: int,
    seed: int,
) -> tuple[Float[np.ndarray, "kq_scale ov_scale"], Float[np.ndarray, "kq_scale ov_scale"]]:
    """Return the mean squared error of every pair, and its standard error."""
    signs = np.array([1.0, -1.0])
    moments = JointMoments()
    for size, part in shares(n_prompts):
        inputs, targets = forward.prompts(size, seed, part=part)
        inputs, targets = inputs.astype(float), targets.astype(float)
        prompts = inputs[:, :-1, :-1], inputs[:, :-1, -1], inputs[:, -1, :-1]
        unit = np.stack(
            [regressors.kernel_regression(*prompts, omega=omega * signs, mu=signs) for omega in kq]
        )
        squares = np.broadcast_to(targets**2, unit.shape)
        moments.add(np.stack([squares, targets * unit, unit**2], 1))
    weights = np.stack([np.ones_like(ov), -2 * ov, ov**2], -1)  # of (1, μ) in (y − μq)²
    loss = moments.mean @ weights.T
    error = np.stack(
        [moments.error(np.broadcast_to(one, moments.mean.shape)) for one in weights], -1
    )
    return np.maximum(loss, 0.0), error
