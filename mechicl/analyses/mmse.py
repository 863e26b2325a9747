"""The loss of a pooling model against strategies that make as many measurements."""

from functools import lru_cache
from typing import Annotated

import numpy as np
import pydantic
import xarray as xr
from jaxtyping import Float

from mechicl.analyses.evaluation import (
    JointMoments,
    Moments,
    flag_axis,
    predict_steps,
    spread_steps,
    squared_error,
)
from mechicl.analyses.heads import NONFINITE, nonfinite
from mechicl.analyses.pooled import GAUSSIAN, LATENT_REGRESSION, POOLED, TREE, samples
from mechicl.analyses.probe import Forward, probe, undefined_codes, verdict
from mechicl.schema import Var
from mechicl.theory import measurement, priors, strategies
from mechicl.theory.tree_posterior import tree_mmse

_MODEL = ("seed", "step")
_AGAINST = (*_MODEL, "strategy")
_STRATEGIES = ("adaptive", "non_adaptive", "symmetric_axes", "top_eigenvectors", "gauss_pc")
_FIXED = "non_adaptive"
_BOUND = "posterior_mean"
_LEVELS = 4
"""g of (22): the search is among nodes above this depth and symmetric axes."""

Losses = dict[str, tuple[float, float]]
"""A loss and its standard error, by strategy; NaN where a strategy has no such measurement."""


def _has_prior(trajectory: xr.Dataset) -> str | None:
    if "depth" in trajectory.variables or "prior_covariance" in trajectory.variables:
        return None
    return "it knows strategies for the tree and the Gaussian prior, and this run has another one"


@probe(
    needs=POOLED | LATENT_REGRESSION,
    wants=TREE | GAUSSIAN,
    gives={
        "strategy": Var(("strategy",), "1", "strategy with the same budget"),
        "loss": Var(_MODEL, "1", "mean squared error over queries and contexts", 0),
        "loss_error": Var(_MODEL, "1", "standard error of loss", 0),
        "strategy_loss": Var(("strategy",), "1", "loss of a strategy", 0),
        "strategy_error": Var(("strategy",), "1", "standard error of strategy_loss", 0),
        "excess": Var(_AGAINST, "1", "loss less strategy_loss"),
        "excess_error": Var(_AGAINST, "1", "standard error of excess", 0),
        "relative_excess": Var(_AGAINST, "1", "excess over strategy_loss", -1),
        "relative_excess_error": Var(_AGAINST, "1", "standard error of relative_excess", 0),
        "nearest": Var(
            _MODEL, "1", "the strategy of the nearest loss, by its number", 0, label_of="strategy"
        ),
        "n_measurements": Var((), "1", "budget of measurements, M", 1),
        "tau_seen": Var((), "1", "noise of a measurement, sqrt(tau^2 + Tr C_0/N)", 0),
    },
    statement="the loss is below that of the best measurement fixed in advance",
    undefined=(
        NONFINITE,
        "nonfinite_loss",
        "more_measurements_than_levels",
        "perfect_strategy",
        "gaussian_prior",
    ),
    headline=("loss", "nearest"),
    applies=_has_prior,
    references=("raj2026 (15), (22) to (24), (34), Figures 2b and 4",),
    forward=True,
)
def mmse(
    trajectory: xr.Dataset,
    forward: Forward,
    *,
    n_prompts: Annotated[int, pydantic.Field(ge=2)] = 2048,
    n_steps: Annotated[int, pydantic.Field(ge=1)] = 1,
    margin: Annotated[float, pydantic.Field(ge=0)] = 2.0,
    n_paths: Annotated[int, pydantic.Field(ge=2)] = 200_000,
    n_draws: Annotated[int, pydantic.Field(ge=2)] = 32768,
    spsa_steps: Annotated[int, pydantic.Field(ge=0)] = 500,
    strategy_seed: Annotated[int, pydantic.Field(ge=0)] = 0,
    evaluation_seed: Annotated[int, pydantic.Field(ge=0)] = 0,
) -> xr.Dataset:
    """Compare the loss of a model with that of strategies that make as many measurements as it can.

    The budget is `n_measurements`, M = layers times channels. All losses are of θᵀx, without the
    noise of a response: from 0, and Tr C₀ (1 on the tree) for a model that predicts 0.

    - `loss` (seed, step) = ⟨(θᵀx − ŷ)²⟩ over queries and a fixed set of contexts; `loss_error` its
      standard error over contexts, for the queries of one are not independent.
    - `strategy_loss`, `strategy_error` (strategy): those of each strategy with M measurements. On
      the tree prior: `adaptive`, the path that follows the sign of what it reads; `non_adaptive`,
      the best fixed measurement that SPSA finds ((22) to (24)); `symmetric_axes`, the first M of
      (5); `top_eigenvectors` of C₀, the first M nodes; each with the exact posterior. `gauss_pc` is
      (34), the best linear estimate from M measurements; for a Gaussian prior no other does better,
      and it is (15) for the top M axes. `posterior_mean` is the mean of θ given the whole context,
      with no limit on what is communicated, on the same contexts. `strategy` is a number that
      `mechicl.schema.flag_names` reads.
    - `excess` (seed, step, strategy) = `loss` − `strategy_loss`; `excess_error` is paired for
      `posterior_mean`, and the root of the sum of squares for the others. `relative_excess` =
      `excess` / `strategy_loss`, from −1; `relative_excess_error` likewise, to first order.
    - `nearest` (seed, step): the value on the axis `strategy` with the least |log(`loss` /
      `strategy_loss`)|.
    - `holds`: on the tree prior, `excess` over `non_adaptive` is below −`margin` times its
      `excess_error`. Then something in the model adapts.
    - `tau_seen` = √(τ² + Tr C₀/N), Tr C₀ = 1 on the tree: strategies meet the noise of N tokens,
      not that of N → ∞.

    None has units.

    When it misleads: `tau_seen` leaves out θθᵀ/N, noise along θ alone, which is small beside the
    rest when θ has many directions to be told from; `gauss_pc` has it: τ² becomes τ² + (Tr C₀ +
    λ)/N. Models also read G_xx, which strategies know to be I. `adaptive` is a heuristic: at low
    noise one channel of a fixed measurement carries several spins, and `non_adaptive` beats it for
    small M. `non_adaptive` is the best found in the span of (22), an upper bound on the best there
    is: a model just below it need not adapt. The nearest strategy need not be what was learnt. All
    models share the contexts, so differences between them are surer than the standard errors say.

    Undefined: weights that are not finite; a loss that is not; `adaptive` and `symmetric_axes` with
    more measurements than the tree has levels; `relative_excess` over a strategy whose loss is
    exactly 0; `holds` for a Gaussian prior, where no strategy has anything to adapt to (15).

    Parameters
    ----------
    n_prompts
        Contexts on which models and `posterior_mean` are evaluated.
    n_steps
        At most so many of the saved steps, spread evenly in log(1 + steps since the first); 1 takes
        the last.
    margin
        How many standard errors the loss has to be lower by.
    n_paths
        Draws of the noise for `adaptive`.
    n_draws
        Draws of the noise, as many for each leaf, at least 2, for `non_adaptive` and
        `top_eigenvectors`.
    spsa_steps
        Steps of SPSA from each start; they are followed by 200 along the gradient. 500 take 10
        seconds at depth 6 and M = 6.
    strategy_seed
        Seed of the draws of strategies and of the search.
    evaluation_seed
        Seed of the contexts.

    References
    ----------
    raj2026, (15), (22) to (24), (34), Figures 2b, 4a and 4b; the noise of N tokens is derived from
    the Wishart law of second moments.
    """
    chosen = forward.load(trajectory.isel(step=spread_steps(trajectory["step"].values, n_steps)))
    count, tau = int(trajectory["n_measurements"]), float(trajectory["tau"])
    n_context = int(trajectory["n_context"])
    on_tree, power = "depth" in trajectory.variables, 1.0
    if on_tree:
        depth, alpha = int(trajectory["depth"]), float(trajectory["alpha"])
        losses = _tree_losses(
            depth, alpha, count, tau, n_context, n_paths, n_draws, spsa_steps, strategy_seed
        )
    else:
        prior = trajectory["prior_covariance"].values
        power = float(np.trace(prior))
        losses: Losses = {"gauss_pc": _gauss_pc(prior, count, tau, n_context)}
    models = [JointMoments() for _ in range(chosen.sizes["step"])]
    bounds = Moments()
    for sample in samples(forward, n_prompts, evaluation_seed):
        inputs, targets = sample["inputs"].values, sample["targets"].values
        bound = squared_error(forward.references(inputs)[_BOUND], targets)
        bounds.add(bound)
        for model, predicted in zip(models, predict_steps(chosen, forward, inputs), strict=True):
            mine = squared_error(predicted, targets)
            model.add(np.stack([mine, np.broadcast_to(bound, mine.shape)], 1))
    losses = losses | {_BOUND: (float(bounds.mean), float(bounds.error))}
    result = _compared(chosen, models, losses)
    missing = result["strategy_loss"].isnull().any().item()
    perfect = (result["strategy_loss"] == 0).any().item()
    everywhere = xr.ones_like(result["loss"], dtype=bool)
    broken = nonfinite(chosen)
    if on_tree:
        fixed = result.isel(strategy=list(losses).index(_FIXED))
        below = fixed["excess"] < -margin * fixed["excess_error"]
        holds = verdict(below, result["loss"].isnull())
    else:
        holds = verdict(everywhere, everywhere)
    return result.assign(
        n_measurements=count,
        tau_seen=measurement.context_noise(tau, n_context, power=power),
        holds=holds,
        undefined=undefined_codes(
            {
                NONFINITE: broken,
                "nonfinite_loss": result["loss"].isnull() & ~broken,
                "more_measurements_than_levels": everywhere & missing,
                "perfect_strategy": everywhere & perfect,
                "gaussian_prior": everywhere & (not on_tree),
            }
        ),
    )


@lru_cache(maxsize=8)
def _tree_losses(
    depth: int,
    alpha: float,
    count: int,
    tau: float,
    n_context: int,
    n_paths: int,
    n_draws: int,
    spsa_steps: int,
    seed: int,
) -> Losses:
    """Return the loss of every strategy on the tree prior; kept, for they take seconds."""
    rng, noise = np.random.default_rng(seed), measurement.context_noise(tau, n_context)
    each = max(2, -(-n_draws // 2**depth))
    levels, width = range(1, depth + 1), 2**depth - 1
    rank = min(count, width)  # of the best of M measurements: none of them is left to make then
    variances = priors.tree_variances(depth, alpha)
    found: Losses = dict.fromkeys(_STRATEGIES, (np.nan, np.nan))
    if count in levels:
        found["adaptive"] = strategies.adaptive_loss(
            depth, alpha, count, noise, n_draws=n_paths, rng=rng
        )
        found["symmetric_axes"] = strategies.symmetric_loss(depth, alpha, count, noise), 0.0
    searched = 2 ** min(_LEVELS, depth) - 1 + max(depth - _LEVELS, 0)
    best = strategies.optimised_measurement(
        depth,
        alpha,
        rank,
        noise,
        rng=rng,
        n_levels=_LEVELS if rank <= searched else depth,
        n_steps=spsa_steps,
        n_draws=each,
    )
    found[_FIXED] = best.loss, best.error
    axes = measurement.principal_axes(np.diag(variances), rank)
    found["top_eigenvectors"] = tree_mmse(depth, alpha, axes, noise, n_draws=each, rng=rng)
    found["gauss_pc"] = _gauss_pc(variances, rank, tau, n_context)
    return found


def _gauss_pc(
    covariance: Float[np.ndarray, "*covariate covariate"], count: int, tau: float, n_context: int
) -> tuple[float, float]:
    rank = min(count, covariance.shape[-1])
    return float(measurement.gauss_pc_loss(covariance, rank, tau, n_context=n_context)), 0.0


def _compared(chosen: xr.Dataset, models: list[JointMoments], losses: Losses) -> xr.Dataset:
    """Return losses, and how far those of models are above those of strategies."""
    means = np.stack([model.mean for model in models], 1)  # (seed, step, 2)
    loss, bound = means[..., 0], means[..., 1]
    error = _errors(models, np.ones_like(loss), np.zeros_like(loss))
    defined = np.isfinite(loss) & np.isfinite(error)
    loss, error = np.where(defined, loss, np.nan), np.where(defined, error, np.nan)
    against, spread = np.array(list(losses.values())).T
    paired = list(losses).index(_BOUND)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        excess = loss[..., None] - against
        excess[..., paired] = loss - bound  # the same sums: equal losses differ by 0
        excess_error = np.hypot(error[..., None], spread)
        relative = excess / against
        relative_error = np.hypot(error[..., None] / against, loss[..., None] * spread / against**2)
        excess_error[..., paired] = _errors(models, np.ones_like(loss), -np.ones_like(loss))
        relative_error[..., paired] = _errors(models, 1 / bound, -loss / bound**2)
        apart = abs(np.log(loss[..., None]) - np.log(against))
    apart[loss[..., None] == against] = 0.0
    apart = np.where(np.isnan(apart), np.inf, apart)
    proper = defined[..., None] & (against > 0)
    nearest = np.where(defined, apart.argmin(-1), np.nan)
    return xr.Dataset(
        {
            "loss": (_MODEL, loss),
            "loss_error": (_MODEL, error),
            "strategy_loss": ("strategy", against),
            "strategy_error": ("strategy", spread),
            "excess": (_AGAINST, excess),
            "excess_error": (_AGAINST, np.where(defined[..., None], excess_error, np.nan)),
            "relative_excess": (_AGAINST, np.where(proper, relative, np.nan)),
            "relative_excess_error": (_AGAINST, np.where(proper, relative_error, np.nan)),
            "nearest": (_MODEL, nearest),
        },
        coords={dim: chosen[dim] for dim in _MODEL}
        | {"strategy": flag_axis("strategy", "strategy with the same budget", losses)},
    )


def _errors(
    models: list[JointMoments],
    own: Float[np.ndarray, "seed step"],
    bound: Float[np.ndarray, "seed step"],
) -> Float[np.ndarray, "seed step"]:
    """Return standard errors of these weights times the means of the two losses of each context."""
    weights = np.stack([own, bound], -1)
    return np.stack([model.error(weights[:, step]) for step, model in enumerate(models)], 1)
