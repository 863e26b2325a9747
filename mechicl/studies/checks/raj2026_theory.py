"""Checks of raj2026 on strategies of measurement: no model, no run."""

from typing import TYPE_CHECKING, Annotated

import numpy as np
import pydantic
from jaxtyping import Float

from mechicl.studies.checks.base import Measurement, Outcome, check, curves
from mechicl.theory import measurement, priors, strategies, tree_posterior

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mechicl.run import Run

_Count = Annotated[int, pydantic.Field(ge=1)]
_Several = Annotated[int, pydantic.Field(ge=2)]
_Seed = Annotated[int, pydantic.Field(ge=0)]
_Positive = Annotated[float, pydantic.Field(gt=0)]
_Share = Annotated[float, pydantic.Field(gt=0, lt=1)]

_Curve = list[tuple[float, float]]
"""Loss and standard error, channel by channel."""

_TENTHS = np.arange(0.05, 1, 0.1)


@check
def tree_strategies(
    runs: "Mapping[str, Run]",
    *,
    depth: _Count = 8,
    alpha: _Share = 0.5,
    tau: _Positive = 0.1,
    n_paths: _Several = 1_000_000,
    n_steps: Annotated[int, pydantic.Field(ge=0)] = 1000,
    n_polish: Annotated[int, pydantic.Field(ge=0)] = 600,
    n_draws: _Several = 200,
    seed: _Seed = 0,
) -> Outcome:
    """Measure the loss of strategies on the tree prior against the number M of channels (Fig. 2b).

    M goes from 1 to the depth. Quantities:

    - `adaptive, M = N`: the path along the tree, `n_paths` of them.
    - `non-adaptive, M = N`: the best fixed measurement found, by `n_steps` of SPSA from three
      starts and `n_polish` of its gradient, judged on `n_draws` for every leaf.
    - `Gauss-PC, M = N`: (34).
    - `adaptive wins from M`: the least M from which on it has the lower loss; NaN if it never has.
    - `m*_sym`, `m*_ada`: the cutoffs.
    - `non-adaptive over the best plain choice`: the largest ratio over M to the lower of symmetric
      axes and first nodes with the full posterior; NaN if that is 0 for all M.
    """
    del runs
    rng = np.random.default_rng(seed)
    tree, counts = (depth, alpha), range(1, depth + 1)
    fixed = [
        strategies.optimised_measurement(
            *tree, count, tau, rng=rng, n_steps=n_steps, n_polish=n_polish, n_draws=n_draws
        )
        for count in counts
    ]
    path = [
        strategies.adaptive_loss(*tree, count, tau, n_draws=n_paths, rng=rng) for count in counts
    ]
    variances = priors.tree_variances(*tree)
    gauss_pc = measurement.gauss_pc_loss(variances, np.array(counts), tau)
    symmetric = [strategies.symmetric_loss(*tree, count, tau) for count in counts]
    losses: dict[str, _Curve] = {
        "adaptive": path,
        "non-adaptive": [(found.loss, found.error) for found in fixed],
        "Gauss-PC": [(float(loss), 0.0) for loss in gauss_pc],
    }
    measured = [
        Measurement(f"{name}, M = {count}", loss, error=error or None)
        for name, curve in losses.items()
        for count, (loss, error) in zip(counts, curve, strict=True)
    ]
    wins = [mine[0] < other.loss for mine, other in zip(path, fixed, strict=True)]
    plain = np.minimum(symmetric, _first_nodes(depth, alpha, tau, n_draws, rng))
    ratios = [found.loss / least for found, least in zip(fixed, plain, strict=True) if least > 0]
    measured += [
        Measurement("adaptive wins from M", _for_good(wins)),
        Measurement("m*_sym", priors.symmetric_cutoff(*tree, tau)),
        Measurement("m*_ada", priors.adaptive_cutoff(*tree, tau)),
        Measurement("non-adaptive over the best plain choice", float(max(ratios, default=np.nan))),
    ]
    shown = curves(
        {name: np.array([loss for loss, _ in curve]) for name, curve in losses.items()}
        | {"symmetric axes": np.array(symmetric)},
        np.array(counts),
        f"Tree prior, h = {depth}, α = {alpha:g}, τ = {tau:g}",
        "channels M",
        "loss, Tr C of the posterior",
        y_scale="log",
    )
    errors = [[error for _, error in curve] for curve in losses.values()]
    shown["y_error"] = (("curve", "x"), np.array([*errors, [0.0] * depth]))
    shown.attrs |= {
        "dashed": ("symmetric axes",),
        "x_mark": priors.symmetric_cutoff(*tree, tau),
        "x_mark_label": "m*_sym",
    }
    return Outcome(tuple(measured), shown)


def _first_nodes(
    depth: int, alpha: float, tau: float, n_draws: int, rng: np.random.Generator
) -> Float[np.ndarray, " count"]:
    """Return the losses of the first 1 … h nodes with the full posterior."""
    rows = np.eye(depth, 2**depth - 1)
    return np.array(
        [
            tree_posterior.tree_mmse(depth, alpha, rows[:count], tau, n_draws=n_draws, rng=rng)[0]
            for count in range(1, depth + 1)
        ]
    )


def _for_good(wins: list[bool]) -> float:
    """Return the least M from which on all are won; NaN if the last is not."""
    lost = [number for number, won in enumerate(wins, 1) if not won]
    first = max(lost, default=0) + 1
    return float(first) if first <= len(wins) else np.nan


@check
def no_adaptivity(
    runs: "Mapping[str, Run]",
    *,
    d: _Several = 32,
    alpha: _Share = 0.75,
    tau: _Positive = 0.01,
    n_channels: _Count = 8,
    tree_depth: _Count = 5,
    tree_alpha: _Share = 0.5,
    tree_tau: _Positive = 0.1,
    n_contexts: Annotated[int, pydantic.Field(ge=100)] = 200_000,
    seed: _Seed = 0,
) -> Outcome:
    """Measure whether what is left to learn depends on what was read, for either prior.

    θ is drawn, and Φ = W(θ + ξ) with a random W of `n_channels` rows; the squared error of the
    posterior mean, for the Gaussian prior by regression on Φ, is compared between contexts by |Φ|.
    Quantities:

    - `Gaussian: error, upper over lower half of |Phi|`: 1 where C_{θ|Φ} does not depend on Φ.
    - `Gaussian: error over (15)`: over the trace of the posterior covariance.
    - `Gaussian: greedy over top-M loss`: axes chosen one after the other from the running
      posterior, over all at once (34): of all M, the ratio that is farthest from 1.
    - `tree: error, upper over lower half of |Phi|`: the negative control.
    - `tree: error over (20)`: over the mean trace of the exact posterior.

    The figure has errors over their mean in tenths of the contexts.
    """
    del runs
    rng = np.random.default_rng(seed)
    covariance = priors.gaussian_covariance(d, alpha, rotation=seed)
    axes, spectrum = priors.gaussian_axes(d, seed), priors.gaussian_spectrum(d, alpha)
    rows = _random_rows(n_channels, d, rng)
    theta = rng.standard_normal((n_contexts, d)) * np.sqrt(spectrum) @ axes.T
    phi = (theta + tau * rng.standard_normal(theta.shape)) @ rows.T
    gaussian = ((theta - phi @ np.linalg.lstsq(phi, theta)[0]) ** 2).sum(1)
    expected = np.trace(measurement.posterior_covariance(covariance, rows, tau))
    measured = [
        _halves("Gaussian", phi, gaussian),
        Measurement("Gaussian: error over (15)", *_mean(gaussian, float(expected))),
        Measurement("Gaussian: greedy over top-M loss", _greedy(covariance, tau)),
    ]
    leaves = priors.tree_leaves(tree_depth, tree_alpha)
    tree_rows = _random_rows(n_channels, leaves.shape[1], rng)
    truth = leaves[rng.integers(0, len(leaves), n_contexts)]
    read = (truth + tree_tau * rng.standard_normal(truth.shape)) @ tree_rows.T
    posterior = tree_posterior.leaf_posterior(leaves, tree_rows, read, tree_tau)
    mean, trace = tree_posterior.leaf_moments(leaves, posterior)
    tree = ((truth - mean) ** 2).sum(1)
    measured += [
        _halves("tree", read, tree),
        Measurement("tree: error over (20)", *_mean(tree, float(trace.mean()))),
    ]
    shown = curves(
        {"Gaussian prior": _by_tenth(phi, gaussian), "tree prior": _by_tenth(read, tree)},
        _TENTHS,
        "Error of the posterior mean, by what was read",
        "quantile of |Φ|",
        "mean squared error over that of all",
    )
    return Outcome(tuple(measured), shown)


def _random_rows(
    n_channels: int, width: int, rng: np.random.Generator
) -> Float[np.ndarray, "channel covariate"]:
    rows = rng.standard_normal((n_channels, width))
    return measurement.row_basis(rows)[0]


def _mean(values: Float[np.ndarray, " context"], over: float) -> tuple[float, float]:
    """Return the mean and its standard error, both over a number."""
    return float(values.mean() / over), float(values.std() / np.sqrt(values.size) / over)


def _halves(
    prior: str, phi: Float[np.ndarray, "context channel"], squares: Float[np.ndarray, " context"]
) -> Measurement:
    size = np.linalg.norm(phi, axis=1)
    upper = size > np.median(size)
    (high, high_error), (low, low_error) = (_mean(squares[half], 1.0) for half in (upper, ~upper))
    error = high / low * np.hypot(high_error / high, low_error / low)
    return Measurement(
        f"{prior}: error, upper over lower half of |Phi|", high / low, error=float(error)
    )


def _by_tenth(
    phi: Float[np.ndarray, "context channel"], squares: Float[np.ndarray, " context"]
) -> Float[np.ndarray, " tenth"]:
    tenths = np.array_split(squares[np.argsort(np.linalg.norm(phi, axis=1))], len(_TENTHS))
    return np.array([tenth.mean() for tenth in tenths]) / squares.mean()


def _greedy(covariance: Float[np.ndarray, "covariate covariate"], tau: float) -> float:
    """Return the loss of axes chosen in turn over that of all at once, farthest from 1."""
    counts = np.arange(1, len(covariance) + 1)
    rows = measurement.greedy_axes(covariance, len(covariance), tau)
    found = [
        np.trace(measurement.posterior_covariance(covariance, rows[:count], tau))
        for count in counts
    ]
    ratios = np.array(found) / measurement.gauss_pc_loss(covariance, counts, tau)
    return float(ratios[np.argmax(abs(ratios - 1))])
