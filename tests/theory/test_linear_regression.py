"""Closed forms of he2025 against simulation, minimisation, finite differences and golden values."""

import inspect
from collections.abc import Callable
from functools import partial
from random import Random

import numpy as np
import pytest
from beartype import beartype
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import jaxtyped
from scipy.optimize import minimize, minimize_scalar

from mechicl.errors import InputError
from mechicl.theory import exact_risk, linear_regression
from mechicl.theory.exact_risk import (
    debiased_gd_risk,
    optimal_vanilla_learning_rate,
    vanilla_gd_risk,
)
from mechicl.theory.linear_regression import (
    approximate_loss,
    approximate_loss_gradient,
    effective_learning_rate,
    manifold_loss,
    manifold_ov,
    nearest_on_manifold,
    optimal_learning_rate,
    optimal_ov,
    single_head_optimum,
)
from mechicl.theory.regressors import debiased_gd

PUBLISHED = {"d": 5, "n_context": 40, "noise_variance": 0.1}
OTHER = {"d": 8, "n_context": 24, "noise_variance": 0.7}
OMEGA3, MU3 = np.array([0.3, -0.2, 0.1]), np.array([1.5, -1.0, 0.5])
Z = 4.0
"""Standard errors that a simulation may be off."""


def _lists(bound: float, size: int) -> st.SearchStrategy[np.ndarray]:
    return st.lists(st.floats(-bound, bound), min_size=size, max_size=size).map(np.array)


models = st.integers(1, 5).flatmap(lambda n: st.tuples(_lists(0.8, n), _lists(3.0, n)))
"""(ω, μ) of one to five heads."""

fixed = settings(deadline=None, derandomize=True, max_examples=50)


# --- (4.1) against the true loss ---------------------------------------------------------------


def _risk_given_scores(
    weights: np.ndarray, z: np.ndarray, r: np.ndarray, d: int, variance: float
) -> np.ndarray:
    """E[(ŷ − y)²] for ŷ = Σ w_ℓ y_ℓ, over β, ε and all covariates orthogonal to the query.

    r is the length of the query and z_ℓ = ⟨x_ℓ, x_q⟩/r. The error is
    (w·z − r) β_∥ + w·(X_⊥ β_⊥) + w·ε − ε_q.
    """
    along = (weights * z).sum(-1) - r
    size = (weights**2).sum(-1)
    return variance + (along**2 + (d - 1) * size) / d + variance * size


def _true_loss(
    omega: np.ndarray, mu: np.ndarray, *, d: int, n_context: int, noise_variance: float, n: int
) -> tuple[float, float]:
    """Return the true loss of (3.2) and its standard error.

    What softmax does not see is integrated out exactly. Debiased GD on the same draws, whose risk
    is known, is the control variate: for small ω the predictors agree, and so do their errors.
    """
    rng = np.random.default_rng(3)
    r = np.sqrt(rng.chisquare(d, n))
    z = rng.standard_normal((n, n_context))
    score = r[:, None] * z
    weights = np.zeros_like(z)
    for w, m in zip(omega, mu, strict=True):
        p = np.exp(w * score)
        weights += m * p / p.sum(-1, keepdims=True)
    constants = {"d": d, "n_context": n_context, "noise_variance": noise_variance}
    rate = 1 / (1 + (1 + noise_variance) * d / n_context)
    step = rate / n_context * (score - score.mean(-1, keepdims=True))
    risk = partial(_risk_given_scores, z=z, r=r, d=d, variance=noise_variance)
    paired = risk(weights) - risk(step)
    loss = paired.mean() + float(debiased_gd_risk(rate, **constants))
    return float(loss), float(paired.std(ddof=1) / np.sqrt(n))


Truth = list[tuple[dict[str, float], np.ndarray, np.ndarray, float, float]]
"""Constants, ω, μ, true loss and its standard error, by growing L."""


@pytest.fixture(scope="module")
def healthy_pairs() -> Truth:
    """The pair of γ = 0.1 at its best μ, L = 40 to 320; standard errors are 0.25 % of the gap."""
    rows = []
    for length in (40, 80, 160, 320):
        constants = PUBLISHED | {"n_context": length}
        omega = np.array([0.1, -0.1])
        mu = optimal_ov(omega, **constants)[0]
        rows.append((constants, omega, mu, *_true_loss(omega, mu, **constants, n=20_000)))
    return rows


def _assert_gap(truth: Truth, closed_form: Callable[..., np.ndarray]) -> None:
    """Assert that L − L̃ is η*/L within 1 % and the error of the simulation, hence halves.

    That it halves is not enough: the constant c of (4.1) is itself ∝ 1/L, so a wrong one leaves
    another gap that halves. Its size is known because the pair nearly is debiased GD.
    """
    gaps = []
    for constants, omega, mu, loss, error in truth:
        gap = loss - float(closed_form(omega, mu, **constants))
        expected = optimal_learning_rate(**constants) / constants["n_context"]
        assert error < 0.003 * expected
        assert abs(gap - expected) < 0.01 * expected + Z * error, (constants, gap, expected)
        gaps.append(gap)
    ratios = np.array(gaps[:-1]) / gaps[1:]
    assert ((ratios > 1.8) & (ratios < 2.05)).all(), ratios


def _loss_with(
    omega: np.ndarray,
    mu: np.ndarray,
    *,
    d: int,
    n_context: int,
    noise_variance: float,
    c: Callable[[float, int], float],
) -> np.ndarray:
    outer = np.outer(omega, omega)
    form = outer + c(noise_variance, n_context) * np.exp(d * outer)
    return 1 + noise_variance - 2 * mu @ omega + mu @ form @ mu


def test_gap_to_true_loss_is_known_and_halves(healthy_pairs: Truth) -> None:
    _assert_gap(healthy_pairs, approximate_loss)
    _assert_gap(healthy_pairs, partial(_loss_with, c=lambda s, n: (1 + s) / n))


@pytest.mark.parametrize(
    "wrong",
    [
        partial(_loss_with, c=lambda s, n: s / n),
        partial(_loss_with, c=lambda s, n: 1 / n),
        partial(_loss_with, c=lambda s, n: 2 * (1 + s) / n),
        partial(_loss_with, c=lambda s, n: (1 + s) / (n + 1)),
        lambda *a, **k: approximate_loss(*a, **k) / 2,
    ],
    ids=["noise alone", "signal alone", "doubled", "query counted", "factor one half"],
)
def test_gap_betrays_wrong_constants(
    healthy_pairs: Truth, wrong: Callable[..., np.ndarray]
) -> None:
    with pytest.raises(AssertionError):
        _assert_gap(healthy_pairs, wrong)


def test_simulation_agrees_with_the_checked_one() -> None:
    loss, error = _true_loss(OMEGA3, MU3, **PUBLISHED, n=40_000)
    assert error < 1e-3
    assert abs(loss - 0.31732) < Z * np.hypot(error, 1e-4)


def test_loss_is_far_too_high_for_large_kq() -> None:
    omega, mu = np.array([1.0, -1.0]), np.array([1.0, -1.0])
    loss, error = _true_loss(omega, mu, **PUBLISHED, n=10_000)
    assert approximate_loss(omega, mu, **PUBLISHED) > 5 * (loss + Z * error)


# --- the loss and its gradient -----------------------------------------------------------------


def test_loss_golden() -> None:
    assert approximate_loss(OMEGA3, MU3, **PUBLISHED) == pytest.approx(
        0.2897805114245052, rel=1e-13
    )


def test_loss_is_its_definition_entry_by_entry() -> None:
    expected = 1.7
    for w, m in zip(OMEGA3, MU3, strict=True):
        expected -= 2 * m * w
        for v, n in zip(OMEGA3, MU3, strict=True):
            expected += m * n * (w * v + 1.7 / 24 * np.exp(8 * w * v))
    assert approximate_loss(OMEGA3, MU3, **OTHER) == pytest.approx(expected, rel=1e-13)


def test_gradient_golden() -> None:
    grad_omega, grad_mu = approximate_loss_gradient(OMEGA3, MU3, **PUBLISHED)
    np.testing.assert_allclose(
        grad_mu, [-0.0594088051595277, 0.138823380503421, 0.0149952221834462], rtol=1e-12
    )
    np.testing.assert_allclose(
        grad_omega, [-0.523801716105875, 0.428705078993834, -0.196000988447613], rtol=1e-12
    )


def _differences(omega: np.ndarray, mu: np.ndarray, constants: dict[str, float]) -> np.ndarray:
    point, step = np.concatenate([omega, mu]), 1e-5
    n = len(omega)

    def slope(move: np.ndarray) -> float:
        ends = (point + move, point - move)
        up, down = (float(approximate_loss(p[:n], p[n:], **constants)) for p in ends)
        return (up - down) / (2 * step)

    return np.array([slope(move) for move in step * np.eye(2 * n)])


@given(models)
@fixed
def test_gradient_is_the_slope(model: tuple[np.ndarray, np.ndarray]) -> None:
    slopes = _differences(*model, OTHER)
    gradient = np.concatenate(approximate_loss_gradient(*model, **OTHER))
    np.testing.assert_allclose(gradient, slopes, rtol=1e-6, atol=1e-5)


def test_wrong_gradients_are_not_the_slope() -> None:
    slopes = _differences(OMEGA3, MU3, OTHER)
    gradient = np.concatenate(approximate_loss_gradient(OMEGA3, MU3, **OTHER))
    np.testing.assert_allclose(gradient, slopes, atol=1e-8)
    signal = -2 * (1 - MU3 @ OMEGA3) * np.concatenate([MU3, OMEGA3])
    for wrong in (gradient / 2, gradient[[3, 4, 5, 0, 1, 2]], signal):
        assert np.abs(wrong - slopes).max() > 0.05


@given(models, st.randoms(use_true_random=False))
@fixed
def test_order_of_heads_does_not_matter(
    model: tuple[np.ndarray, np.ndarray], random: Random
) -> None:
    omega, mu = model
    order = list(range(len(omega)))
    random.shuffle(order)
    loss = approximate_loss(omega, mu, **OTHER)
    assert approximate_loss(omega[order], mu[order], **OTHER) == pytest.approx(loss, rel=1e-9)
    for permuted, grad in zip(
        approximate_loss_gradient(omega[order], mu[order], **OTHER),
        approximate_loss_gradient(omega, mu, **OTHER),
        strict=True,
    ):
        np.testing.assert_allclose(permuted, grad[order], rtol=1e-9, atol=1e-9)


@given(models)
@fixed
def test_symmetries_of_the_loss(model: tuple[np.ndarray, np.ndarray]) -> None:
    omega, mu = model
    loss = pytest.approx(float(approximate_loss(omega, mu, **OTHER)), rel=1e-9)
    assert approximate_loss(-omega, -mu, **OTHER) == loss
    assert approximate_loss(np.r_[omega, omega], np.r_[0.3 * mu, 0.7 * mu], **OTHER) == loss
    assert approximate_loss(np.r_[omega, 0.4], np.r_[mu, 0.0], **OTHER) == loss
    # ω → ω/2, μ → 2μ, d → 4d, L → 4L changes neither ⟨μ,ω⟩ nor dωωᵀ nor μμᵀ/L.
    wider = OTHER | {"d": 4 * OTHER["d"], "n_context": 4 * OTHER["n_context"]}
    assert approximate_loss(omega / 2, 2 * mu, **wider) == loss
    assert approximate_loss(omega, mu, **OTHER) >= OTHER["noise_variance"]


# --- best OV scales ----------------------------------------------------------------------------


def test_optimal_ov_golden() -> None:
    mu, rank = optimal_ov(np.array([0.1, -0.1]), **PUBLISHED)
    np.testing.assert_allclose(mu, np.array([1, -1]) * 4.39538298875051456570, rtol=1e-12)
    assert rank == 2
    loss = approximate_loss([0.1, -0.1], mu, **PUBLISHED)
    assert loss == pytest.approx(0.220923402249897086860, rel=1e-13)
    assert loss == pytest.approx(2 * 0.11046170112494863, rel=1e-13)
    mu, rank = optimal_ov(OMEGA3, **PUBLISHED)
    golden = [0.734852266055221905, -2.4352750480318798, 1.7056585125400954]
    np.testing.assert_allclose(mu, golden, rtol=1e-9)
    assert rank == 3
    assert approximate_loss(OMEGA3, mu, **PUBLISHED) == pytest.approx(
        0.221923459323047928, rel=1e-12
    )


def test_optimal_ov_of_equal_heads_has_least_norm() -> None:
    omega = np.array([0.1, 0.1, -0.1])
    mu, rank = optimal_ov(omega, **PUBLISHED)
    np.testing.assert_allclose(mu, [2.19769149, 2.19769149, -4.39538299], rtol=1e-8)
    assert rank == 2
    assert approximate_loss(omega, mu, **PUBLISHED) == pytest.approx(0.220923402249897, rel=1e-12)
    longer = mu + 0.1 * np.array([1, -1, 0])
    assert approximate_loss(omega, longer, **PUBLISHED) == pytest.approx(0.220923402249897)
    assert np.linalg.norm(longer) > np.linalg.norm(mu)


@given(st.lists(st.integers(-8, 8), min_size=1, max_size=5))
@fixed
def test_optimal_ov_is_stationary_and_least(tenths: list[int]) -> None:
    omega = np.array(tenths) / 10
    mu, rank = optimal_ov(omega, **OTHER)
    assert 1 <= rank <= len(set(tenths))
    np.testing.assert_allclose(approximate_loss_gradient(omega, mu, **OTHER)[1], 0, atol=1e-9)
    least = approximate_loss(omega, mu, **OTHER)
    moves = np.random.default_rng(0).standard_normal((20, len(omega)))
    assert (approximate_loss(omega, mu + moves, **OTHER) >= least - 1e-12).all()


def test_optimal_ov_is_least_squares() -> None:
    omega = np.random.default_rng(1).uniform(-1, 1, (3, 4))
    mu, rank = optimal_ov(omega, **OTHER)
    for w, m, r in zip(omega, mu, rank, strict=True):
        outer = np.outer(w, w)
        solution, _, full, _ = np.linalg.lstsq(outer + 1.7 / 24 * np.exp(8 * outer), w)
        np.testing.assert_allclose(m, solution, rtol=1e-8)
        assert r == full == 4


def test_optimal_ov_leaves_nonfinite_models_out() -> None:
    omega = np.array([[0.1, -0.1], [np.nan, 0.1], [np.inf, 0.1], [30.0, 0.1], [0.0, 0.0]])
    mu, rank = optimal_ov(omega, **PUBLISHED)
    assert rank.tolist() == [2, 0, 0, 0, 1]
    assert np.isnan(mu[1:4]).all()
    np.testing.assert_allclose(mu[0], [4.39538299, -4.39538299])
    np.testing.assert_array_equal(mu[4], 0)


def test_lapack_sees_no_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    eigh, seen = np.linalg.eigh, []
    monkeypatch.setattr(np.linalg, "eigh", lambda a: seen.append(np.isfinite(a).all()) or eigh(a))
    optimal_ov(np.array([[0.1, -0.1], [np.nan, 0.1], [np.inf, 0.1], [30.0, 0.1]]), **PUBLISHED)
    assert seen == [True]


# --- solution manifold -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gamma", "ov", "loss"),
    [
        (0.01, 43.95604373465362, 0.2208791253069275),
        (0.05, 8.791181117288294, 0.2208818882711706),
        (0.1, 4.39538298875051456570, 0.220923402249897086860),
        (0.1267, 3.46885064992963, 0.2209932453078318),
        (0.2, 2.196028961373636, 0.2215884154505456),
        (0.5, 0.850187522454168, 0.249812477545832),
    ],
)
def test_manifold_golden(gamma: float, ov: float, loss: float) -> None:
    assert manifold_ov(gamma, **PUBLISHED) == pytest.approx(ov, rel=1e-13)
    assert manifold_loss(gamma, **PUBLISHED) == pytest.approx(loss, rel=1e-13)


@pytest.mark.parametrize("constants", [PUBLISHED, OTHER], ids=["published", "other"])
@pytest.mark.parametrize("gamma", [0.03, 0.1267, 0.4, 0.7])
def test_manifold_is_the_minimum_over_the_norm(gamma: float, constants: dict[str, float]) -> None:
    omega = gamma * np.array([1, 1, -1, -1, 0])
    share = np.array([0.3, 0.7, -0.9, -0.1, 0]) / 2
    found = minimize_scalar(
        lambda norm: float(approximate_loss(omega, norm * share, **constants)),
        bracket=(0.1, 1 / gamma),
        tol=1e-10,
    )
    assert found.x == pytest.approx(2 * manifold_ov(gamma, **constants), rel=1e-6)
    assert found.fun == pytest.approx(float(manifold_loss(gamma, **constants)), rel=1e-12)
    # The paper's form without the square has another minimum.
    c = (1 + constants["noise_variance"]) / constants["n_context"]
    spread = c * np.sinh(constants["d"] * gamma**2)
    norm = (gamma - spread / 2) / gamma**2
    misprint = constants["noise_variance"] + (1 - gamma * norm) ** 2 + spread * norm
    assert abs(misprint - found.fun) > 0.01


def test_manifold_ov_is_optimal_ov_of_the_pair() -> None:
    for gamma in (0.05, 0.2, 0.6):
        mu, _ = optimal_ov(np.array([gamma, -gamma]), **OTHER)
        np.testing.assert_allclose(mu, manifold_ov(gamma, **OTHER) * np.array([1, -1]), rtol=1e-9)


def test_manifold_loss_increases_from_its_limit() -> None:
    gamma = np.r_[0, np.geomspace(1e-3, 1.5, 60)]
    loss = manifold_loss(gamma, **PUBLISHED)
    assert (np.diff(loss) > 0).all()
    assert loss[0] == pytest.approx(0.220879120879120879, rel=1e-14)
    assert loss[0] == pytest.approx(1.1 - optimal_learning_rate(**PUBLISHED), rel=1e-14)
    assert loss[-1] < 1.1


def test_manifold_at_the_ends_of_float64() -> None:
    gamma = np.array([1e-300, 1e-160, 50.0, 1e200, np.inf])
    ov, loss = manifold_ov(gamma, **PUBLISHED), manifold_loss(gamma, **PUBLISHED)
    eta = optimal_learning_rate(**PUBLISHED)
    np.testing.assert_allclose(2 * gamma[:2] * ov[:2], eta, rtol=1e-14)
    np.testing.assert_allclose(ov[2:], 0, atol=1e-100)
    np.testing.assert_allclose(loss, [1.1 - eta, 1.1 - eta, 1.1, 1.1, 1.1], rtol=1e-14)


def test_manifold_ov_is_undefined_at_zero() -> None:
    assert np.isnan(manifold_ov([0.0, np.nan], **PUBLISHED)).all()
    # Any balanced μ has the same loss there, so none is best.
    balanced = np.array([[1.0, -1.0], [50.0, -50.0]])
    np.testing.assert_allclose(approximate_loss([0.0, 0.0], balanced, **PUBLISHED), 1.1)


ROLES = np.array([1, 1, -1, -1, -1, 0])


def _random_model(seed: int, n: int = 6) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.normal(0, 0.3, n), rng.normal(0, 3, n)


def _distance(a: tuple[np.ndarray, ...], b: tuple[np.ndarray, ...]) -> float:
    return float(np.linalg.norm(np.concatenate(a) - np.concatenate(b)))


@pytest.mark.parametrize("seed", range(4))
def test_nearest_point_is_the_constrained_minimum(seed: int) -> None:
    model, gamma = _random_model(seed), 0.2
    near = nearest_on_manifold(*model, gamma, ROLES, **PUBLISHED)
    ov = 2.196028961373636
    found = minimize(
        lambda p: ((p - np.concatenate(model)) ** 2).sum(),
        np.zeros(12),
        method="SLSQP",
        tol=1e-14,
        constraints=[
            {"type": "eq", "fun": lambda p: p[:6] - gamma * ROLES},
            {"type": "eq", "fun": lambda p: p[6:8].sum() - ov},
            {"type": "eq", "fun": lambda p: p[8:11].sum() + ov},
            {"type": "eq", "fun": lambda p: p[11]},
        ],
    )
    assert found.success
    np.testing.assert_allclose(np.concatenate(near), found.x, atol=1e-6)


def test_no_random_point_of_the_manifold_is_nearer() -> None:
    model, gamma = _random_model(7), 0.2
    near = nearest_on_manifold(*model, gamma, ROLES, **PUBLISHED)
    ov, rng = float(manifold_ov(gamma, **PUBLISHED)), np.random.default_rng(8)
    least = _distance(model, near)
    for scale in np.geomspace(1e-3, 10, 400):
        mu = near[1] + scale * rng.standard_normal(6)
        for sign in (1, -1):
            group = sign == ROLES
            mu[group] += (sign * ov - mu[group].sum()) / group.sum()
        mu[ROLES == 0] = 0
        assert _distance(model, (gamma * ROLES, mu)) > least


def test_scaling_within_a_sign_is_not_nearest() -> None:
    model = 0.2 * ROLES, np.array([1.0, 3, -1, -2, -4, 0])
    near = nearest_on_manifold(*model, 0.2, ROLES, **PUBLISHED)
    ov = float(manifold_ov(0.2, **PUBLISHED))
    scaled = model[1] * np.where(ROLES > 0, ov / 4, ov / 7)
    assert _distance(model, (0.2 * ROLES, scaled)) > _distance(model, near) + 0.01


def test_a_point_on_the_manifold_is_its_own_nearest() -> None:
    ov = manifold_ov(0.1267, **OTHER)
    omega, mu = 0.1267 * ROLES, ov * np.array([0.25, 0.75, -0.5, -0.2, -0.3, 0])
    near = nearest_on_manifold(omega, mu, 0.1267, ROLES, **OTHER)
    np.testing.assert_allclose(near[0], omega, rtol=1e-14)
    np.testing.assert_allclose(near[1], mu, rtol=1e-13)
    again = nearest_on_manifold(*_random_model(3), 0.1267, ROLES, **OTHER)
    twice = nearest_on_manifold(*again, 0.1267, ROLES, **OTHER)
    np.testing.assert_allclose(twice[1], again[1], rtol=1e-12, atol=1e-12)
    # Heads of one role have one ω: the loss sees their sum alone.
    assert approximate_loss(*again, **OTHER) == pytest.approx(
        float(manifold_loss(0.1267, **OTHER)), rel=1e-12
    )


def test_nearest_point_is_missing_where_the_manifold_is_empty() -> None:
    roles = np.array([[1, 1, 0], [-1, -1, -1], [0, 0, 0], [1, 0, -1]])
    near = nearest_on_manifold(np.full(3, 0.1), np.ones(3), 0.1, roles, **PUBLISHED)
    for part in near:
        assert np.isnan(part).all(-1).tolist() == [True, True, True, False]
        assert np.isfinite(part[3]).all()


def test_nearest_point_needs_finite_models_and_positive_gamma() -> None:
    omega = np.array([[0.1, -0.1], [np.nan, -0.1], [0.1, -0.1], [0.1, -0.1], [0.1, -0.1]])
    mu = np.array([[1.0, -1], [1, -1], [np.inf, -1], [1, -1], [1, -1]])
    gamma = np.array([0.1, 0.1, 0.1, 0.0, np.nan])
    for part in nearest_on_manifold(omega, mu, gamma, [1, -1], **PUBLISHED):
        assert np.isfinite(part).all(-1).tolist() == [True, False, False, False, False]


# --- rates, single head, risks -----------------------------------------------------------------


def test_rates_and_risks_golden() -> None:
    eta = optimal_learning_rate(**PUBLISHED)
    assert eta == pytest.approx(0.879120879120879121, rel=1e-15)
    assert debiased_gd_risk(eta, **PUBLISHED) == pytest.approx(0.2428571428571429, rel=1e-14)
    vanilla = optimal_vanilla_learning_rate(**PUBLISHED)
    assert vanilla == pytest.approx(0.8602150537634408, rel=1e-15)
    assert vanilla_gd_risk(vanilla, **PUBLISHED) == pytest.approx(0.2397849462365591, rel=1e-14)
    for length, debiased_risk, vanilla_risk in (
        (10, 0.595713, 0.600520),
        (20, 0.365789, 0.360030),
        (60, 0.200699, 0.199703),
        (100, 0.166548, 0.167638),
    ):
        other = PUBLISHED | {"n_context": length}
        assert debiased_gd_risk(eta, **other) == pytest.approx(debiased_risk, abs=6e-7)
        assert vanilla_gd_risk(vanilla, **other) == pytest.approx(vanilla_risk, abs=6e-7)


def test_gap_on_the_manifold_in_the_limit() -> None:
    for constants in (PUBLISHED, OTHER):
        eta = optimal_learning_rate(**constants)
        gap = debiased_gd_risk(eta, **constants) - manifold_loss(0, **constants)
        assert gap == pytest.approx(eta / constants["n_context"], rel=1e-12)


@pytest.mark.parametrize("constants", [PUBLISHED, OTHER], ids=["published", "other"])
def test_rates_are_where_risks_are_least(constants: dict[str, float]) -> None:
    for risk, rate in (
        (debiased_gd_risk, optimal_learning_rate(**constants)),
        (vanilla_gd_risk, optimal_vanilla_learning_rate(**constants)),
    ):
        found = minimize_scalar(lambda r, f=risk: float(f(r, **constants)), tol=1e-10)
        assert found.x == pytest.approx(rate, rel=1e-6)
    small = PUBLISHED | {"n_context": 1}
    np.testing.assert_allclose(debiased_gd_risk([0.0, 0.5, 2.0], **small), 1.1)


@pytest.mark.parametrize(
    ("constants", "n"),
    [(PUBLISHED, 30_000), ({"d": 3, "n_context": 7, "noise_variance": 0.7}, 200_000)],
    ids=["published", "short"],
)
def test_risks_against_simulation(constants: dict[str, float], n: int) -> None:
    """β and ε are integrated out; x is drawn. Each risk is told from the other's formula."""
    d, length, variance = constants["d"], constants["n_context"], constants["noise_variance"]
    rng = np.random.default_rng(5)
    x, x_query = rng.standard_normal((n, length, d)), rng.standard_normal((n, d))
    centred = x - x.mean(1, keepdims=True)
    for covariates, risk, other in (
        (centred, debiased_gd_risk, vanilla_gd_risk),
        (x, vanilla_gd_risk, debiased_gd_risk),
    ):
        for rate in (0.5, 0.9):
            weights = rate / length * np.einsum("nld,nd->nl", covariates, x_query)
            slope = np.einsum("nl,nld->nd", weights, x) - x_query
            draws = variance + (slope**2).sum(-1) / d + variance * (weights**2).sum(-1)
            error = draws.std(ddof=1) / np.sqrt(n)
            assert abs(draws.mean() - risk(rate, **constants)) < Z * error
            assert error < 0.005
            if length < 10:
                assert abs(draws.mean() - other(rate, **constants)) > 10 * error


TABLE1 = [
    (1.0, 0.1267, 3.5006, 0.88705),
    (1.0, 0.1504, 3.3362, 1.00353),
    (0.5, 0.3677, 2.3963, 0.88112),
    (0.8, 0.2411, 2.2819, 0.88027),
    (1.0, 0.1979, 2.2221, 0.87951),
    (2 * 0.5, 0.2882, 1.7561, 1.01222),
    (2 * 0.8, 0.1810, 1.7487, 1.01285),
    (2 * 1.0, 0.1452, 1.7448, 1.01338),
]
"""C_f, |ω|, |μ| and η_eff of the eight activations, he2025 Table 1."""


def test_effective_learning_rate_golden() -> None:
    for slope, omega, mu, expected in TABLE1:
        for sign in (1, -1):
            pair = np.array([sign, -sign])
            found = effective_learning_rate(omega * pair, mu * pair, slope=slope)
            assert found == pytest.approx(expected, abs=6e-6)
            # Signs do not matter; the number of heads does.
            assert effective_learning_rate(omega * pair, -mu * pair, slope=slope) == found
        assert abs(effective_learning_rate(omega, mu, slope=slope) - expected) > 0.4
    assert sum(slope != 1 for slope, *_ in TABLE1) == 4


@pytest.mark.parametrize(
    ("activation", "slope"),
    [
        (np.exp, 1.0),
        (lambda s: 1 + np.tanh(s), 1.0),
        (lambda s: 1 + 0.5 * s, 0.5),
        (lambda s: (1 + 0.8 * s) ** 2, 1.6),
    ],
    ids=["exp", "1 + tanh", "affine", "square"],
)
def test_effective_learning_rate_is_the_rate_of_the_limit(
    activation: Callable[[np.ndarray], np.ndarray], slope: float
) -> None:
    """Balanced heads of any activation tend to a debiased step at this rate, and at no other."""
    rng = np.random.default_rng(9)
    x, y, x_query = rng.standard_normal((50, 7, 3)), rng.standard_normal((50, 7)), np.ones(3)
    omega, mu = 1e-4 * np.array([1, 2, -1.5]), 1e4 * np.array([0.3, 0.1, -0.4])
    values = activation(omega[:, None] * (x @ x_query)[:, None, :])
    heads = (values * y[:, None, :]).sum(-1) / values.sum(-1)
    rate = effective_learning_rate(omega, mu, slope=slope)
    expected = debiased_gd(x, y, x_query, learning_rate=rate)
    np.testing.assert_allclose(heads @ mu, expected, atol=2e-3)
    assert np.abs(heads @ mu - 1.05 * expected).max() > 0.02


def test_effective_learning_rate_of_models() -> None:
    omega, mu = np.full((3, 1, 2), 0.1), np.array([[1.0, -2.0], [np.nan, 1.0]])
    typed = jaxtyped(typechecker=beartype)(effective_learning_rate)
    found = typed(omega, mu, slope=2)
    assert found.shape == (3, 2)
    np.testing.assert_allclose(found[:, 0], 0.6)
    assert np.isnan(found[:, 1]).all()
    with pytest.raises(InputError, match="slope = -1; accepted: a finite number of at least 0"):
        effective_learning_rate(0.1, 1.0, slope=-1)
    with pytest.raises(InputError, match="one number of heads"):
        effective_learning_rate([0.1, 0.1], 1.0, slope=1)


def test_single_head_golden() -> None:
    omega, mu = single_head_optimum(**PUBLISHED)
    assert omega == pytest.approx(0.447213595499957939, rel=1e-15)
    assert mu == pytest.approx(1.62769470019838443857875910802, rel=1e-14)
    assert approximate_loss(omega, mu, **PUBLISHED) == pytest.approx(
        0.372072800748052605, rel=1e-13
    )


@pytest.mark.parametrize("constants", [PUBLISHED, OTHER], ids=["published", "other"])
def test_single_head_is_the_numerical_minimum(constants: dict[str, float]) -> None:
    best = single_head_optimum(**constants)
    for start in ((0.05, 0.1), (0.8, 0.5), (0.2, 3.0)):
        found = minimize(
            lambda p: float(approximate_loss(p[:1], p[1:], **constants)), start, tol=1e-12
        )
        np.testing.assert_allclose(np.abs(found.x), best, rtol=1e-5)
        assert np.prod(found.x) > 0
    gradient = approximate_loss_gradient(*best, **constants)
    np.testing.assert_allclose(gradient, 0, atol=1e-13)


# --- shapes, types, refusals -------------------------------------------------------------------


def _public() -> dict[str, Callable]:
    """Whatever takes the constants of the task; `effective_learning_rate` has a test of its own."""
    return {
        name: function
        for module in (linear_regression, exact_risk)
        for name, function in vars(module).items()
        if inspect.isfunction(function)
        and function.__module__ == module.__name__
        and not name.startswith("_")
        and "d" in inspect.signature(function).parameters
    }


def _arguments(name: str, batch: tuple[int, ...]) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    omega, mu = rng.uniform(-0.5, 0.5, (2, *batch, 3))
    gamma = rng.uniform(0.1, 0.5, batch)
    names = list(inspect.signature(_public()[name]).parameters)
    known = {"omega": omega, "mu": mu, "gamma": gamma, "learning_rate": gamma}
    known["role"] = np.broadcast_to([1, -1, 0], (*batch, 3))
    return [known[n] for n in names if n in known]


@pytest.mark.parametrize("name", sorted(_public()))
def test_shapes_are_as_annotated_and_batches_are_loops(name: str) -> None:
    function = jaxtyped(typechecker=beartype)(_public()[name])
    arguments = _arguments(name, (2, 4))
    batched = function(*arguments, **OTHER)
    function(*_arguments(name, ()), **OTHER)
    function(*(0.2 for _ in arguments[:3]), *(1 for _ in arguments[3:]), **OTHER)
    if not arguments:
        assert function(d=8.0, n_context=np.int64(24).item(), noise_variance=0.7) == batched
        return
    for index in np.ndindex(2, 4):
        alone = function(*(argument[index] for argument in arguments), **OTHER)
        parts = zip(batched, alone, strict=True) if isinstance(alone, tuple) else [(batched, alone)]
        for many, one in parts:
            np.testing.assert_allclose(many[index], one, rtol=1e-9)


def test_leading_axes_broadcast() -> None:
    omega, mu = np.full((3, 1, 2), 0.1), np.ones((4, 2))
    assert approximate_loss(omega, mu, **PUBLISHED).shape == (3, 4)
    near = nearest_on_manifold(omega, mu, np.full((5, 1, 1), 0.1), [1, -1], **PUBLISHED)
    assert near[0].shape == near[1].shape == (5, 3, 4, 2)
    assert approximate_loss(np.empty((0, 2)), np.empty((0, 2)), **PUBLISHED).shape == (0,)
    assert optimal_ov(np.empty((0, 2)), **PUBLISHED)[0].shape == (0, 2)


def test_undefined_loss_is_nan_without_a_warning() -> None:
    omega = np.array([[np.nan, 0.1], [np.inf, 0.1], [100.0, -100.0], [1e200, 0.0], [0.1, 0.1]])
    expected = [False, False, False, False, True]
    assert np.isfinite(approximate_loss(omega, [1.0, -1.0], **PUBLISHED)).tolist() == expected
    for part in approximate_loss_gradient(omega, [1.0, -1.0], **PUBLISHED):
        assert np.isfinite(part).all(-1).tolist() == expected


@pytest.mark.parametrize("name", sorted(_public()))
@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"d": 0}, "d = 0; accepted: a whole number of at least 1"),
        ({"d": 2.5}, "d = 2.5"),
        ({"n_context": 0}, "n_context = 0; accepted: a whole number of at least 1"),
        ({"n_context": np.nan}, "n_context = nan"),
        (
            {"noise_variance": -0.1},
            "noise_variance = -0.1; accepted: a finite number of at least 0",
        ),
        ({"noise_variance": np.inf}, "noise_variance = inf"),
        ({"noise_variance": "x"}, "noise_variance = 'x'; accepted: real numbers"),
    ],
)
def test_constants_out_of_range_are_refused(name: str, bad: dict, message: str) -> None:
    with pytest.raises(InputError) as caught:
        _public()[name](*_arguments(name, ()), **(PUBLISHED | bad))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: approximate_loss([1, 2], [1, 2, 3], **OTHER),
            "omega has shape (2,), mu has shape",
        ),
        (lambda: approximate_loss([1, 2], 1.0, **OTHER), "one number of heads"),
        (lambda: approximate_loss([], [], **OTHER), "at least 1"),
        (lambda: approximate_loss(np.ones((2, 3)), np.ones((4, 3)), **OTHER), "broadcast"),
        (lambda: approximate_loss([1j], [1.0], **OTHER), "real numbers"),
        (lambda: optimal_ov([[1, 2], [3]], **OTHER), "real numbers"),
        (lambda: manifold_ov([-0.1, 1], **OTHER), "gamma reaches down to -0.1"),
        (lambda: manifold_loss(-1, **OTHER), "accepted: at least 0"),
        (lambda: nearest_on_manifold([1, 1], [1, 1], -1, [1, -1], **OTHER), "at least 0"),
        (lambda: nearest_on_manifold([1, 1], [1, 1], 1, [1, 2], **OTHER), "accepted: -1, 0 and 1"),
        (lambda: nearest_on_manifold([1, 1], [1, 1], 1, [1, np.nan], **OTHER), "-1, 0 and 1"),
        (lambda: nearest_on_manifold([[1, 1]] * 2, [1, 1], [1] * 3, [1, -1], **OTHER), "gamma has"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(InputError) as caught:
        call()
    assert message in str(caught.value)
