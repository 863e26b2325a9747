"""Checks of he2025 that need closed forms and simulations, and at most a figure from a run."""

from typing import TYPE_CHECKING, Annotated

import numpy as np
import pydantic
from jaxtyping import Float

from mechicl.studies.checks.base import Measurement, Outcome, check, curves
from mechicl.studies.checks.he2025_runs import out_of_pattern
from mechicl.studies.checks.probes import labelled, last
from mechicl.theory import (
    attention,
    bayes,
    descent,
    exact_risk,
    linear_regression,
    regressors,
    true_loss,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    import xarray as xr

    from mechicl.run import Run


_Count = Annotated[int, pydantic.Field(ge=1)]
_Several = Annotated[int, pydantic.Field(ge=2)]
_Seed = Annotated[int, pydantic.Field(ge=0)]
_Positive = Annotated[float, pydantic.Field(gt=0)]
_TASK = {"d": 5, "noise_variance": 0.1}
_AT = {**_TASK, "n_context": 40}


def _distinct(values: tuple[float, ...]) -> tuple[float, ...]:
    if len(set(values)) < 2:
        raise ValueError("needs two different values at least, for a slope")
    return values


_Scales = Annotated[tuple[_Positive, ...], pydantic.AfterValidator(_distinct)]


@check
def approximation_gap(
    runs: "Mapping[str, Run]",
    *,
    gamma: _Positive = 0.1,
    lengths: Annotated[tuple[_Count, ...], pydantic.Field(min_length=1)] = (40, 80, 160, 320),
    n_samples: Annotated[int, pydantic.Field(ge=1000)] = 400_000,
    seed: _Seed = 0,
) -> Outcome:
    """Measure by how much the true loss exceeds L̃ of (4.1) at ω = (γ, −γ) and its best μ.

    Quantities are `gap at L = N` for each of `lengths`, with standard errors. The figure is the
    landscape of both losses, from the first of `runs`.
    """
    rng = np.random.default_rng(seed)
    omega = np.array([gamma, -gamma])
    measurements = []
    for length in lengths:
        at = {**_TASK, "n_context": length}
        mu, _ = linear_regression.optimal_ov(omega, **at)
        loss, error = true_loss.true_loss(omega, mu, **at, n_samples=n_samples, rng=rng)
        gap = loss - linear_regression.approximate_loss(omega, mu, **at)
        measurements.append(Measurement(f"gap at L = {length}", float(gap), error=float(error)))
    shown = next(iter(runs.values())).analyze("loss_landscape") if runs else None
    return Outcome(tuple(measurements), shown)


@check
def descent_stages(
    runs: "Mapping[str, Run]",
    *,
    heads: Annotated[tuple[_Count, ...], pydantic.Field(min_length=1)] = (2, 4),
    n_starts: _Count = 48,
    learning_rate: _Positive = 0.01,
    n_steps: _Count = 50_000,
    every: _Count = 50,
    spread: _Positive = 0.1,
    within: _Positive = 0.1,
    seed: _Seed = 0,
) -> Outcome:
    """Descend L̃ from random small starts, and see what sets in when (Fig. 7).

    A start is ω, μ ~ N(0, spread²). Quantities, one value a start, for each number of `heads`:

    - `H=N: (4.3) at the end`: (1 + (1+σ²)d/L)⟨μ, ω⟩ of starts that end with a head of each sign.
    - `H=N: (4.3) at the end, one sign`: the same of those that end with heads of one sign.
    - `H=N: signs and zero sum before one |omega|`: 1 where matched signs and |Σμ|/Σ|μ| ≤ `within`
      are there for good no later than |ω| within `within` of each other (range over mean), of
      starts that end with both signs.
    - `H=N: ends with both signs`: 1 or 0.

    The figure has some starts of the first of `heads`.
    """
    del runs
    rng = np.random.default_rng(seed)
    measurements: list[Measurement] = []
    shown: xr.Dataset | None = None
    for n_heads in heads:
        start = spread * rng.normal(size=(2, n_starts, n_heads))
        steps, omega, mu = descent.descend(
            start[0], start[1], learning_rate=learning_rate, n_steps=n_steps, every=every, **_AT
        )
        ratio = descent.optimality_ratio(omega, mu, **_AT)
        both = (omega[-1] > 0).any(-1) & (omega[-1] < 0).any(-1)
        measurements += _stages(f"H={n_heads}", omega, mu, steps, ratio[-1], both, within)
        if shown is None:
            drawn = [*np.flatnonzero(both)[:5], *np.flatnonzero(~both)[:2]]
            shown = curves(
                {
                    f"start {index}, {'both signs' if both[index] else 'one sign'}": ratio[
                        1:, index
                    ]
                    for index in drawn
                },
                steps[1:],
                "(1 + (1+σ²)d/L)⟨μ, ω⟩ along gradient descent on the approximate loss",
                "step",
                "left side of (4.3)",
                x_scale="log",
            )
    return Outcome(tuple(measurements), shown)


def _stages(
    label: str,
    omega: Float[np.ndarray, "step start H"],
    mu: Float[np.ndarray, "step start H"],
    steps: Float[np.ndarray, " step"],
    ends: Float[np.ndarray, " start"],
    both: np.ndarray,
    within: float,
) -> list[Measurement]:
    matched = (np.sign(omega) == np.sign(mu)).all(-1)
    size = np.abs(omega)
    with np.errstate(invalid="ignore", divide="ignore"):
        summed = np.abs(mu.sum(-1)) / np.abs(mu).sum(-1) <= within
        even = np.ptp(size, axis=-1) / size.mean(-1) <= within
    ordered = _since(matched & summed, steps) <= _since(even, steps)
    found = []
    for index in range(len(ends)):
        one, two = ("", "ends with both signs") if both[index] else ("ends with one sign", "")
        for name, value, excluded in (
            ("(4.3) at the end", ends[index], one),
            ("(4.3) at the end, one sign", ends[index], two),
            ("signs and zero sum before one |omega|", ordered[index], one),
            ("ends with both signs", both[index], ""),
        ):
            found.append(
                Measurement(f"{label}: {name}", float(value), seed=index, excluded=excluded)
            )
    return found


@check
def debiased_limit(
    runs: "Mapping[str, Run]",
    *,
    gammas: _Scales = (0.1, 0.05, 0.025, 0.0125, 0.00625),
    imbalance: float = 0.1,
    n_contexts: _Count = 4000,
    seed: _Seed = 0,
) -> Outcome:
    """Measure how far a pair of heads is from debiased gradient descent as γ → 0 (Theorem 4.2 (i)).

    The pair is ω = (γ, −γ), μ = (η*/2γ)·(1, −1), and with an imbalance (1 + imbalance, −1).
    Quantities: `slope, balanced` and `slope, unbalanced`, of the log of the rms distance against
    log γ; `share within the bound`, of contexts at all γ with distance ≤ √(1+σ²)·γ·d, balanced.
    """
    del runs
    rng = np.random.default_rng(seed)
    x, y, query = _prompts(rng, n_contexts, 5, 40, 0.1)
    eta = linear_regression.optimal_learning_rate(**_AT)
    target = regressors.debiased_gd(x, y, query, learning_rate=eta)
    scales = np.array(gammas)
    far = {"balanced": [], "unbalanced": []}
    inside = []
    for gamma in gammas:
        omega, mu = np.array([gamma, -gamma]), eta / (2 * gamma) * np.array([1.0, -1.0])
        for name, own in (("balanced", mu), ("unbalanced", mu * [1 + imbalance, 1])):
            predicted = regressors.kernel_regression(x, y, query, omega=omega, mu=own)
            far[name].append(np.sqrt(np.mean((predicted - target) ** 2)))
            if name == "balanced":
                inside.append(np.abs(predicted - target) <= np.sqrt(1.1) * gamma * 5)
    measurements = [
        Measurement(f"slope, {name}", _slope(scales, np.array(rms))) for name, rms in far.items()
    ]
    measurements.append(Measurement("share within the bound", float(np.mean(inside))))
    shown = curves(
        {name: np.array(rms) for name, rms in far.items()},
        scales,
        "Distance of a pair of heads from debiased gradient descent",
        "γ",
        "rms distance of predictions",
        x_scale="log",
        y_scale="log",
    )
    return Outcome(tuple(measurements), shown)


@check
def limiting_ratio(
    runs: "Mapping[str, Run]",
    *,
    d: _Count = 200,
    n_context: _Count = 400,
    noise_variance: _Positive = 0.1,
    n_contexts: _Several = 100,
    grid: _Several = 60,
    seed: _Seed = 0,
) -> Outcome:
    """Hold the limiting risk ratio of Theorem 4.2 (iii) against its bound, and a simulation.

    Quantities: `share of the grid within the bound`, over ξ from 0.01 to 10 and σ² from 0.01 to 10
    where σ² + 1/ξ > 1; `simulated over limiting Bayes risk` at `d`, `n_context`, exact given the
    covariates of each context; `exact over limiting risk of descent` there; and `ratio at d = 5, L
    = 40`, which is no limit and exceeds the bound.
    """
    del runs
    xi, variance = np.meshgrid(np.geomspace(0.01, 10, grid), np.geomspace(0.01, 10, grid))
    applies = bayes.bound_applies(xi, noise_variance=variance)
    ratio = bayes.limiting_risk_ratio(xi, noise_variance=variance)
    inside = ratio <= bayes.risk_ratio_bound(xi, noise_variance=variance) * (1 + 1e-12)

    rng = np.random.default_rng(seed)
    risks = _bayes_risks(rng, d, n_context, noise_variance, n_contexts)
    own = d / n_context
    limit = float(bayes.limiting_bayes_risk(own, noise_variance=noise_variance))
    at = {"d": d, "n_context": n_context, "noise_variance": noise_variance}
    exact = exact_risk.debiased_gd_risk(linear_regression.optimal_learning_rate(**at), **at)
    small = _bayes_risks(rng, 5, 40, 0.1, 20_000)
    gd = exact_risk.debiased_gd_risk(linear_regression.optimal_learning_rate(**_AT), **_AT)
    error = risks.std(ddof=1) / np.sqrt(n_contexts) / limit
    measurements = (
        Measurement("share of the grid within the bound", float(inside[applies].mean())),
        Measurement(
            "simulated over limiting Bayes risk", float(risks.mean() / limit), error=float(error)
        ),
        Measurement(
            "exact over limiting risk of descent",
            float(exact / bayes.limiting_gd_risk(own, noise_variance=noise_variance)),
        ),
        Measurement("ratio at d = 5, L = 40", float(gd / small.mean())),
        Measurement("bound there", float(bayes.risk_ratio_bound(0.125, noise_variance=0.1))),
    )
    axis = np.geomspace(0.01, 10, grid)
    shown = curves(
        {
            f"{what}, σ² = {value:g}": function(axis, noise_variance=value)
            for value in (0.1, 1.0)
            for what, function in (
                ("ratio", bayes.limiting_risk_ratio),
                ("bound", bayes.risk_ratio_bound),
            )
        },
        axis,
        "Limiting risk of debiased descent over the Bayes risk, and the bound",
        "ξ = d/L",
        "ratio of risks",
        x_scale="log",
        y_scale="log",
    )
    return Outcome(measurements, shown)


@check
def linear_as_softmax(
    runs: "Mapping[str, Run]",
    *,
    gammas: _Scales = (0.1, 0.05, 0.025, 0.0125),
    n_heads: _Count = 2,
    width: _Count = 6,
    n_context: _Count = 40,
    n_contexts: _Count = 500,
    seed: _Seed = 0,
) -> Outcome:
    """Measure how 2H softmax heads approach H linear heads as γ → 0 (5.2), on tokens of mean 0.5.

    Quantities: `slope` of the log of the rms distance to the right side of (5.2) against log γ, and
    `slope, term left out`, of that to linear attention alone, which tokens of mean 0 would reach.
    """
    del runs
    rng = np.random.default_rng(seed)
    kq, ov = rng.normal(size=(2, n_heads, width, width)) / width**0.5
    context = 0.5 + rng.normal(size=(n_contexts, n_context, width))
    query = 0.5 + rng.normal(size=(n_contexts, width))
    whole = attention.centred_linear_attention(context, query, kq, ov)
    linear = attention.linear_attention(context, query, kq, ov, trained_length=n_context)
    far = {"to (5.2)": [], "to linear attention": []}
    for gamma in gammas:
        own = attention.softmax_attention(
            context, query, *attention.softmax_from_linear(kq, ov, gamma=gamma)
        )
        for name, target in zip(far, (whole, linear), strict=True):
            far[name].append(float(np.sqrt(np.mean((own - target) ** 2))))
    scales = np.array(gammas)
    measurements = (
        Measurement("slope", _slope(scales, np.array(far["to (5.2)"]))),
        Measurement("slope, term left out", _slope(scales, np.array(far["to linear attention"]))),
    )
    shown = curves(
        {name: np.array(rms) for name, rms in far.items()},
        scales,
        "Distance of 2H softmax heads from H linear heads",
        "γ",
        "rms distance of outputs",
        x_scale="log",
        y_scale="log",
    )
    return Outcome(measurements, shown)


@check
def on_manifold(runs: "Mapping[str, Run]", *, grid: _Several = 400) -> Outcome:
    """Measure where trained models stand to S_γ, and that L̃(θ_γ) grows with γ.

    Quantities, for each seed that ends with a head of each sign and matched signs: `LABEL: mu over
    (4.6)`, measured over predicted OV scale at the model's own γ, and `LABEL: eta over eta*`. And
    `L~ grows with gamma`: share of neighbours on a grid of γ from 0.001 to 1 on which it does.
    """
    measurements: list[Measurement] = []
    shown: xr.Dataset | None = None
    for label, run in runs.items():
        result = run.analyze("solution_manifold")
        shown = labelled(result, label, runs) if shown is None else shown
        excluded = out_of_pattern(run)
        values = {
            "mu over (4.6)": last(result["mu_gamma"]) / last(result["mu_gamma_predicted"]),
            "eta over eta*": last(result["eta"]) / float(result["eta_star"]),
            "distance": last(result["distance"]),
        }
        measurements += [
            Measurement(
                f"{label}: {name}", float(each), seed=int(seed), excluded=excluded[int(seed)]
            )
            for name, value in values.items()
            for seed, each in zip(result["seed"].values, value.values, strict=True)
        ]
    loss = linear_regression.manifold_loss(np.geomspace(0.001, 1, grid), **_AT)
    measurements.append(Measurement("L~ grows with gamma", float(np.mean(np.diff(loss) > 0))))
    return Outcome(tuple(measurements), shown)


@check
def single_head_optimum(runs: "Mapping[str, Run]") -> Outcome:
    """Minimise L̃ for one head numerically, and measure what training finds instead.

    Quantities: `L~: omega`, `L~: mu`, the minimiser from several starts; `true loss: omega`, `true
    loss: mu`, that of the simulated loss, without a published value; `trained omega` and `trained
    mu` of every seed of the one run, means over the last tenth of the checkpoints, of their
    absolute values.
    """
    from scipy.optimize import minimize

    def loss(point: Float[np.ndarray, " 2"]) -> float:
        return float(linear_regression.approximate_loss(point[:1], point[1:], **_AT))

    found = [
        minimize(loss, np.array(start), method="BFGS", options={"gtol": 1e-9})
        for start in ((0.1, 0.5), (0.3, 1.0), (0.6, 2.0), (0.2, 3.0))
    ]
    best = min(found, key=lambda result: result.fun).x
    measurements = [
        Measurement("L~: omega", float(abs(best[0]))),
        Measurement("L~: mu", float(abs(best[1]))),
    ]
    omegas = np.linspace(0.45, 0.6, 31)[:, None, None]
    # Quadratic in μ at each ω: three points give its minimum.
    points = np.array([[1.0], [1.5], [2.0]])
    losses, _ = true_loss.true_loss(
        omegas, points, **_AT, n_samples=200_000, rng=np.random.default_rng(0)
    )
    fits = np.polynomial.polynomial.polyfit(points[:, 0], losses.T, 2)
    least = fits[0] - fits[1] ** 2 / (4 * fits[2])
    # And nearly quadratic in ω, over a range that holds the minimum.
    valley = np.polynomial.polynomial.polyfit(omegas[:, 0, 0], least, 3)
    fine = np.linspace(0.45, 0.6, 3001)
    at = fine[np.polynomial.polynomial.polyval(fine, valley).argmin()]
    mu = np.interp(at, omegas[:, 0, 0], -fits[1] / (2 * fits[2]))
    measurements.append(Measurement("true loss: omega", float(at)))
    measurements.append(Measurement("true loss: mu", float(mu)))
    shown: xr.Dataset | None = None
    for run in runs.values():
        shown = run.analyze("circuits")
        late = slice(-max(1, shown.sizes["step"] // 10), None)
        for name in ("omega", "mu"):
            values = abs(shown[name].isel(step=late, head=0)).mean("step", skipna=False)
            measurements += [
                Measurement(f"trained {name}", float(value), seed=int(seed))
                for seed, value in zip(values["seed"].values, values.values, strict=True)
            ]
    return Outcome(tuple(measurements), shown)


def _since(
    holds: Float[np.ndarray, "step start"], steps: Float[np.ndarray, " step"]
) -> Float[np.ndarray, " start"]:
    """Return the first step from which each column is true to the last; infinite if never."""
    length = np.cumprod(holds[::-1], axis=0).sum(0)
    return np.where(length > 0, steps[np.minimum(len(steps) - length, len(steps) - 1)], np.inf)


def _slope(x: Float[np.ndarray, " n"], y: Float[np.ndarray, " n"]) -> float:
    """Return the slope of log y against log x, NaN where some y has no logarithm."""
    if not (np.isfinite(y) & (y > 0)).all():
        return float("nan")
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


def _prompts(
    rng: np.random.Generator, n: int, d: int, length: int, variance: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    x = rng.normal(size=(n, length, d))
    beta = rng.normal(size=(n, d)) / d**0.5
    y = np.einsum("nld,nd->nl", x, beta) + variance**0.5 * rng.normal(size=(n, length))
    return x, y, rng.normal(size=(n, d))


def _bayes_risks(
    rng: np.random.Generator, d: int, length: int, variance: float, n: int
) -> Float[np.ndarray, " n"]:
    """Return the risk of the posterior mean in each of n contexts, given its covariates.

    σ² + σ² tr (XᵀX + dσ²I)⁻¹, the posterior variance at a query x ~ N(0, I).
    """
    risks = np.empty(n)
    for index in range(n):
        x = rng.normal(size=(length, d))
        values = np.linalg.eigvalsh(x.T @ x)
        risks[index] = variance * (1 + (1 / (values + d * variance)).sum())
    return risks
