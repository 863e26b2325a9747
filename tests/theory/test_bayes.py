"""Limiting risks against the Marchenko-Pastur law, simulation and exact risks; the bound."""

from collections.abc import Callable

import numpy as np
import pytest
from beartype import beartype
from jaxtyping import jaxtyped
from scipy.integrate import quad

from mechicl.errors import InputError
from mechicl.theory import bayes
from mechicl.theory.bayes import (
    bound_applies,
    limiting_bayes_risk,
    limiting_gd_risk,
    limiting_risk_ratio,
    risk_ratio_bound,
)
from mechicl.theory.exact_risk import (
    debiased_gd_risk,
    optimal_vanilla_learning_rate,
    vanilla_gd_risk,
)
from mechicl.theory.linear_regression import (
    optimal_learning_rate,
)
from mechicl.theory.regressors import debiased_gd, ridge

FUNCTIONS = [
    limiting_bayes_risk,
    limiting_gd_risk,
    limiting_risk_ratio,
    risk_ratio_bound,
    bound_applies,
]
GRID = np.geomspace(0.01, 20, 90)[:, None], np.geomspace(0.005, 10, 90)
"""ξ and σ², 8,100 points."""


@pytest.mark.parametrize(
    ("xi", "variance", "risk", "gd", "ratio", "bound"),
    [
        (0.125, 0.1, 0.114056677439, 0.220879120879, 1.9365733409, 2.0853344187),
        (0.5, 0.1, 0.184428877022, 0.454838709677, 2.4662011558, 4.0721966206),
        (0.2, 3, 3.405124837953, 3.444444444444, 1.0115471850, 1.0231481481),
        (1, 1, 1.618033988750, 1.666666666667, 1.0300566479, 1.1666666667),
    ],
)
def test_golden(
    xi: float, variance: float, risk: float, gd: float, ratio: float, bound: float
) -> None:
    at = {"noise_variance": variance}
    assert limiting_bayes_risk(xi, **at) == pytest.approx(risk, abs=1e-12)
    assert limiting_gd_risk(xi, **at) == pytest.approx(gd, abs=1e-12)
    assert limiting_risk_ratio(xi, **at) == pytest.approx(ratio, abs=1e-10)
    assert risk_ratio_bound(xi, **at) == pytest.approx(bound, abs=1e-10)
    assert bound_applies(xi, **at)


def _by_spectrum(xi: float, variance: float) -> float:
    """σ² + σ²ξ·E[1/(s + ξσ²)] over eigenvalues s of XᵀX/L, Marchenko-Pastur of ratio ξ."""
    low, high = (1 - np.sqrt(xi)) ** 2, (1 + np.sqrt(xi)) ** 2

    def integrand(angle: float) -> float:
        # s = mid + half·cos: the square roots at the edges of the law become smooth.
        half = (high - low) / 2
        s = (high + low) / 2 + half * np.cos(angle)
        return (half * np.sin(angle)) ** 2 / (2 * np.pi * xi * s) / (s + xi * variance)

    inside = quad(integrand, 0, np.pi, epsabs=1e-13, epsrel=1e-12, limit=400)[0]
    atom = max(0.0, 1 - 1 / xi) / (xi * variance)
    return variance + variance * xi * (inside + atom)


@pytest.mark.parametrize("variance", [0.05, 0.5, 3.0])
@pytest.mark.parametrize("xi", [0.02, 0.5, 1.0, 1.5, 8.0])
def test_bayes_risk_is_the_integral_over_the_spectrum(xi: float, variance: float) -> None:
    found = limiting_bayes_risk(xi, noise_variance=variance)
    assert found == pytest.approx(_by_spectrum(xi, variance), rel=1e-9)


def test_bayes_risk_keeps_its_digits_at_the_ends() -> None:
    assert limiting_bayes_risk([0.5, 1.0, 4.0], noise_variance=0) == pytest.approx([0, 0, 0.75])
    # Little noise: σ²/(1 − ξ) to first order, σ at ξ = 1; a difference would round it away.
    tiny = 1e-18
    assert limiting_bayes_risk(0.5, noise_variance=tiny) == pytest.approx(2e-18, rel=1e-9)
    assert limiting_bayes_risk(1.0, noise_variance=tiny) == pytest.approx(1e-9, rel=1e-6)
    # Many examples: σ²(1 + ξ); few: the prior's 1 + σ².
    excess = limiting_bayes_risk(1e-9, noise_variance=0.3) - 0.3
    assert excess == pytest.approx(0.3e-9, rel=1e-6)
    assert limiting_bayes_risk(1e9, noise_variance=0.3) == pytest.approx(1.3, rel=1e-8)


def test_gd_risk_is_the_limit_of_the_exact_risks() -> None:
    for xi, variance in ((0.125, 0.1), (0.5, 1.0), (3.0, 0.2)):
        gaps = []
        for d in (300, 600):
            task = {"d": d, "n_context": round(d / xi), "noise_variance": variance}
            risks = np.array(
                [
                    debiased_gd_risk(optimal_learning_rate(**task), **task),
                    vanilla_gd_risk(optimal_vanilla_learning_rate(**task), **task),
                ]
            )
            gaps.append(np.abs(risks - limiting_gd_risk(xi, noise_variance=variance)).max())
        assert gaps[1] == pytest.approx(gaps[0] / 2, rel=0.05)
        assert gaps[1] < 5e-3


def _simulated(n: int, d: int, length: int, variance: float, seed: int) -> np.ndarray:
    """Risks of ridge at penalty dσ² and of debiased GD at η*, by context: (2, n).

    Both are linear in the query, whose coefficients are written out here; the query and its noise
    are integrated out.
    """
    rng = np.random.default_rng(seed)
    rate = optimal_learning_rate(d=d, n_context=length, noise_variance=variance)
    risks = np.empty((2, n))
    for i in range(n):
        x = rng.standard_normal((length, d))
        beta = rng.standard_normal(d) / np.sqrt(d)
        y = x @ beta + np.sqrt(variance) * rng.standard_normal(length)
        posterior = np.linalg.solve(x.T @ x + d * variance * np.eye(d), x.T @ y)
        step = rate / length * (x - x.mean(0)).T @ y
        for row, found in enumerate((posterior, step)):
            risks[row, i] = variance + ((found - beta) ** 2).sum()
    return risks


def test_simulated_coefficients_are_those_of_the_predictors() -> None:
    """The first context of the simulation, through the predictors: d unit vectors are queries."""
    d, length, variance = 4, 9, 0.3
    rng = np.random.default_rng(5)
    x, beta = rng.standard_normal((length, d)), rng.standard_normal(d) / np.sqrt(d)
    y = x @ beta + np.sqrt(variance) * rng.standard_normal(length)
    rate = optimal_learning_rate(d=d, n_context=length, noise_variance=variance)
    expected = [
        variance + ((found - beta) ** 2).sum()
        for found in (
            ridge(x, y, np.eye(d), penalty=d * variance),
            debiased_gd(x, y, np.eye(d), learning_rate=rate),
        )
    ]
    found = _simulated(1, d, length, variance, seed=5)[:, 0]
    np.testing.assert_allclose(found, expected, rtol=1e-10)


def _assert_limits(risks: np.ndarray, xi: float, variance: float, *, exact_gd: float) -> None:
    error = risks.std(-1, ddof=1) / np.sqrt(risks.shape[-1])
    found = risks.mean(-1)
    bayes_risk = float(limiting_bayes_risk(xi, noise_variance=variance))
    assert abs(found[0] - bayes_risk) < 3 * error[0] + 0.005 * bayes_risk
    assert abs(found[1] - exact_gd) < 3 * error[1]
    assert error[0] < 0.02 * bayes_risk
    # Less the noise it is something else, and so is the other's limit.
    assert abs(found[0] - (bayes_risk - variance)) > 10 * error[0]
    assert found[1] - found[0] > 10 * error[1]
    assert found[1] / found[0] < risk_ratio_bound(xi, noise_variance=variance)


def test_limits_against_simulation() -> None:
    """At d = 200 Bayes is 0.2 % from its limit; standard errors are 1 %."""
    risks = _simulated(30, 200, 400, 0.1, seed=0)
    task = {"d": 200, "n_context": 400, "noise_variance": 0.1}
    exact = float(debiased_gd_risk(optimal_learning_rate(**task), **task))
    assert exact == pytest.approx(0.456452, abs=6e-7)
    _assert_limits(risks, 0.5, 0.1, exact_gd=exact)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("d", "length", "variance", "n"),
    [(200, 400, 1.0, 100), (200, 1600, 0.1, 40), (100, 100, 0.5, 300), (200, 100, 0.1, 150)],
)
def test_limits_against_longer_simulation(d: int, length: int, variance: float, n: int) -> None:
    task = {"d": d, "n_context": length, "noise_variance": variance}
    exact = float(debiased_gd_risk(optimal_learning_rate(**task), **task))
    risks = _simulated(n, d, length, variance, seed=1)
    _assert_limits(risks, d / length, variance, exact_gd=exact)


# --- the bound ------------------------------------------------------------------------------------


def test_bound_holds_on_a_grid() -> None:
    xi, variance = GRID
    at = {"noise_variance": variance}
    ratio, bound = limiting_risk_ratio(xi, **at), risk_ratio_bound(xi, **at)
    applies = bound_applies(xi, **at)
    assert applies.sum() > 5_000
    assert (~applies).sum() > 1_000
    assert (ratio >= 1).all()
    assert (ratio <= bound).all()  # outside its premise too, as far as it is known
    # It says something: the ratio uses up a good part of what is allowed.
    assert ((ratio - 1) / (bound - 1))[applies].max() > 0.8


def test_bound_does_not_hold_for_excess_risks() -> None:
    """The negative control: without σ² in both risks thousands of points break it."""
    xi, variance = GRID
    at = {"noise_variance": variance}
    excess = (limiting_gd_risk(xi, **at) - variance) / (limiting_bayes_risk(xi, **at) - variance)
    violated = (excess > risk_ratio_bound(xi, **at)) & bound_applies(xi, **at)
    assert violated.sum() > 3_000


def test_bound_is_asymptotic_only() -> None:
    """At the published size the real ratio is above it."""
    task = {"d": 5, "n_context": 40, "noise_variance": 0.1}
    gd = debiased_gd_risk(optimal_learning_rate(**task), **task)
    assert gd / 0.114455 == pytest.approx(2.122, abs=1e-3)
    assert gd / 0.114455 > risk_ratio_bound(0.125, noise_variance=0.1)


def test_premise_of_the_bound() -> None:
    found = bound_applies(
        [0.5, 2.0, 2.0, 1.0, 1.0, np.nan], noise_variance=[0, 0.5, 0.51, 0, 1e-9, 1]
    )
    assert found.tolist() == [False, False, True, False, True, False]
    assert found.dtype == bool


def test_without_noise_the_ratio_is_infinite() -> None:
    assert limiting_risk_ratio([0.5, 1.0], noise_variance=0).tolist() == [np.inf, np.inf]
    assert limiting_risk_ratio(2.0, noise_variance=0) == pytest.approx(2 / 3 / 0.5)
    assert np.isinf(risk_ratio_bound(2.0, noise_variance=0))


# --- shapes and refusals --------------------------------------------------------------------------


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_shapes_undefined_and_refused(function: Callable[..., np.ndarray]) -> None:
    typed = jaxtyped(typechecker=beartype)(function)
    assert typed(0.5, noise_variance=1).shape == ()
    xi, variance = np.array([[0.3], [2.0]]), np.array([0.1, 0.4, 1.5])
    together = typed(xi, noise_variance=variance)
    assert together.shape == (2, 3)
    for i, j in np.ndindex(2, 3):
        alone = typed(float(xi[i, 0]), noise_variance=float(variance[j]))
        assert alone == pytest.approx(together[i, j], rel=1e-14)
    undefined = function(np.array([0.5, np.nan]), noise_variance=0.1)
    assert undefined[1] == 0 if function is bound_applies else np.isnan(undefined[1])
    for bad, message in (
        ((0, 0.1), "xi reaches down to 0.0; accepted: above 0"),
        ((-1, 0.1), "xi reaches down to -1.0"),
        ((1, -0.1), "noise_variance reaches down to -0.1; accepted: at least 0"),
        ((1, "x"), "noise_variance = 'x'; accepted: real numbers"),
        ((np.ones(2), np.ones(3)), "xi has shape (2,), noise_variance has shape (3,)"),
    ):
        with pytest.raises(InputError) as caught:
            function(bad[0], noise_variance=bad[1])
        assert message in str(caught.value)


def test_every_public_function_is_covered() -> None:
    public = [n for n, f in vars(bayes).items() if getattr(f, "__module__", "") == bayes.__name__]
    assert sorted(f.__name__ for f in FUNCTIONS) == sorted(n for n in public if n[0] != "_")
