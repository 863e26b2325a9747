"""Preconditioned steps: risks against simulation, optima against minimisers, golden values."""

import inspect
from collections.abc import Callable

import numpy as np
import pytest
from beartype import beartype
from jaxtyping import jaxtyped
from scipy.linalg import inv, toeplitz
from scipy.optimize import minimize, minimize_scalar

from mechicl.errors import InputError
from mechicl.theory import exact_risk, linear_regression, preconditioned
from mechicl.theory.preconditioned import (
    kac_murdock_szego,
    optimal_preconditioner,
    optimal_scalar_learning_rate,
    preconditioned_gd_risk,
    scale_free_distance,
)
from mechicl.theory.regressors import preconditioned_gd

PUBLISHED = {"n_context": 40, "noise_variance": 0.1}
SHORT = {"n_context": 4, "noise_variance": 0.6}
SIGMA = np.array([[2.0, 0.5, -0.3], [0.5, 0.7, 0.2], [-0.3, 0.2, 1.2]])
STEP = np.array([[0.3, 0.7, -0.6], [0.0, 0.4, 0.5], [0.0, 0.1, 0.3]])
Z = 4.0
"""Standard errors that a simulation may be off."""

both = pytest.mark.parametrize("debiased", [False, True], ids=["plain", "debiased"])


# --- Kac-Murdock-Szegő ---------------------------------------------------------------------------


@pytest.mark.parametrize("rho", [0.5, -0.7, 0.0, 0.99])
def test_kms_is_toeplitz_with_a_tridiagonal_inverse(rho: float) -> None:
    sigma = kac_murdock_szego(5, rho)
    np.testing.assert_allclose(sigma, toeplitz([1, rho, rho**2, rho**3, rho**4]), rtol=1e-15)
    # The inverse of an AR(1) chain, known by itself.
    precision = toeplitz([1 + rho**2, -rho, 0, 0, 0]) / (1 - rho**2)
    precision[0, 0] = precision[-1, -1] = 1 / (1 - rho**2)
    np.testing.assert_allclose(sigma @ precision, np.eye(5), atol=1e-12)


def test_kms_is_the_covariance_of_a_chain() -> None:
    rng = np.random.default_rng(0)
    chain = [rng.standard_normal(200_000)]
    for _ in range(3):
        chain.append(0.6 * chain[-1] + 0.8 * rng.standard_normal(200_000))
    np.testing.assert_allclose(np.cov(chain), kac_murdock_szego(4, 0.6), atol=0.015)


def test_kms_of_size_one_and_refusals() -> None:
    np.testing.assert_array_equal(kac_murdock_szego(1, 0.3), [[1.0]])
    for bad, message in (
        ((0, 0.5), "d = 0"),
        ((2.5, 0.5), "d = 2.5"),
        ((3, 1), "rho = 1; accepted: between -1 and 1, both excluded"),
        ((3, -1), "rho = -1; accepted: between"),
        ((3, np.nan), "rho = nan"),
    ):
        with pytest.raises(InputError) as caught:
            kac_murdock_szego(*bad)
        assert message in str(caught.value)


# --- golden values -------------------------------------------------------------------------------


def test_preconditioner_golden() -> None:
    sigma = kac_murdock_szego(5, 0.5)
    plain = optimal_preconditioner(sigma, **PUBLISHED, debiased=False)
    np.testing.assert_allclose(
        inv(plain)[0], [1.1625, 0.5125, 0.25625, 0.128125, 0.0640625], rtol=1e-12
    )
    np.testing.assert_allclose(plain[0, :3], [1.06886374, -0.45588708, -0.03350061], atol=5e-9)
    assert plain[1, 1] == pytest.approx(1.26330667, abs=5e-9)
    assert plain[2, 2] == pytest.approx(1.26435098, abs=5e-9)
    debiased = optimal_preconditioner(sigma, **PUBLISHED, debiased=True)
    np.testing.assert_allclose(inv(debiased), sigma + 5.5 / 40 * np.eye(5), rtol=1e-12)
    assert np.abs(plain - debiased).max() > 0.01


def test_risk_golden() -> None:
    sigma = kac_murdock_szego(5, 0.5)
    plain = optimal_preconditioner(sigma, **PUBLISHED, debiased=False)
    debiased = optimal_preconditioner(sigma, **PUBLISHED, debiased=True)
    for matrix, kind, expected in (
        (plain, False, 0.233925),
        (inv(sigma), False, 0.262524),
        (debiased, True, 0.236822),
    ):
        # The values are a simulation's, of 2·10⁶ contexts.
        risk = preconditioned_gd_risk(matrix, sigma, **PUBLISHED, debiased=kind)
        assert risk == pytest.approx(expected, abs=8e-5)
        other = preconditioned_gd_risk(matrix, sigma, **PUBLISHED, debiased=not kind)
        assert abs(other - expected) > 2e-4
    # Whitening costs (tr Σ/L + d(tr Σ + dσ²)/L)/d above the noise, whatever Σ is.
    whitened = preconditioned_gd_risk(inv(sigma), sigma, **PUBLISHED, debiased=False)
    assert whitened == pytest.approx(0.2625, rel=1e-13)


LINEAR = {10: 0.746202, 20: 0.484900, 40: 0.239785, 60: 0.364655, 100: 1.724350}
"""Risk of isotropic linear attention trained at L₀ = 40, by the length shown."""


def _linear_attention_risk(length: float) -> float:
    rate = 0.8602150537634408
    return float(
        preconditioned_gd_risk(
            rate * length / 40 * np.eye(5),
            np.eye(5),
            n_context=length,
            noise_variance=0.1,
            debiased=False,
        )
    )


def test_linear_attention_rises_past_its_trained_length() -> None:
    for length, expected in LINEAR.items():
        assert _linear_attention_risk(length) == pytest.approx(expected, abs=6e-7)
    # 43.25 is between two lengths: 43 is the best of all, and 40 is not.
    risks = [_linear_attention_risk(length) for length in range(1, 101)]
    assert int(np.argmin(risks)) + 1 == 43
    assert risks[43] < risks[41]  # L' = 44 is nearer to 43.25 than 42 is
    assert risks[39] > risks[42]
    assert _linear_attention_risk(50) == pytest.approx(0.25597, abs=5e-6)
    # A quadratic in L': its vertex, from three lengths.
    vertex = np.polynomial.Polynomial.fit([10, 40, 100], [risks[i - 1] for i in (10, 40, 100)], 2)
    assert vertex.deriv().roots()[0] == pytest.approx(43.25, abs=1e-9)


# --- risks against simulation ---------------------------------------------------------------------


def _simulated(
    steps: list[np.ndarray], n: int, *, n_context: int, noise_variance: float, debiased: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Everything is drawn, as the task is defined."""
    rng, scale = np.random.default_rng(1), np.sqrt(noise_variance)
    root = np.linalg.cholesky(SIGMA)
    x = rng.standard_normal((n, n_context, 3)) @ root.T
    x_query = rng.standard_normal((n, 3)) @ root.T
    beta = rng.standard_normal((n, 3)) / np.sqrt(3)
    y = np.einsum("nld,nd->nl", x, beta) + scale * rng.standard_normal((n, n_context))
    target = (x_query * beta).sum(-1) + scale * rng.standard_normal(n)
    draws = np.stack(
        [
            (preconditioned_gd(x, y, x_query, preconditioner=s, debiased=debiased) - target) ** 2
            for s in steps
        ]
    )
    return draws.mean(-1), draws.std(-1, ddof=1) / np.sqrt(n)


@both
@pytest.mark.parametrize("constants", [SHORT, PUBLISHED], ids=["short", "published"])
def test_risk_against_simulation(constants: dict[str, float], debiased: bool) -> None:
    """Ω that is not symmetric, and its transpose, which has another risk."""
    steps = [STEP, 2 * STEP.T]
    n = 400_000 if constants is SHORT else 30_000
    found, error = _simulated(steps, n, **constants, debiased=debiased)
    risks = preconditioned_gd_risk(np.stack(steps), SIGMA, **constants, debiased=debiased)
    assert (np.abs(found - risks) < Z * error).all(), (found, risks, error)
    assert (error < 0.02 * risks).all()
    if constants is SHORT:
        for wrong in (
            preconditioned_gd_risk(np.stack(steps), SIGMA, **constants, debiased=not debiased),
            preconditioned_gd_risk(
                np.stack([STEP.T, 2 * STEP]), SIGMA, **constants, debiased=debiased
            ),
            preconditioned_gd_risk(
                np.stack(steps), SIGMA, **SHORT | {"n_context": 5}, debiased=debiased
            ),
        ):
            assert (np.abs(found - wrong) > 6 * error).any()


@both
def test_isotropic_risk_is_that_of_linear_regression(debiased: bool) -> None:
    for d, length, variance in ((5, 40, 0.1), (8, 24, 0.7), (1, 1, 0.0), (3, 1, 2.0)):
        at = {"n_context": length, "noise_variance": variance}
        risk = exact_risk.debiased_gd_risk if debiased else exact_risk.vanilla_gd_risk
        rate = (
            linear_regression.optimal_learning_rate
            if debiased
            else exact_risk.optimal_vanilla_learning_rate
        )(d=d, **at)
        for eta in (0.0, 0.4, rate, 1.5):
            found = preconditioned_gd_risk(eta * np.eye(d), np.eye(d), **at, debiased=debiased)
            assert found == pytest.approx(float(risk(eta, d=d, **at)), rel=1e-12)
        found = optimal_scalar_learning_rate(np.eye(d), **at, debiased=debiased)
        assert found == pytest.approx(rate, rel=1e-12)
        best = optimal_preconditioner(np.eye(d), **at, debiased=debiased)
        np.testing.assert_allclose(best, rate * np.eye(d), rtol=1e-12, atol=1e-15)


# --- optima ---------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("constants", [SHORT, PUBLISHED], ids=["short", "published"])
def test_optimal_preconditioner_is_the_numerical_minimum(
    constants: dict[str, float], debiased: bool
) -> None:
    """Over all matrices, symmetric or not; the other kind's optimum is not it."""

    def risk(flat: np.ndarray) -> float:
        matrix = flat.reshape(3, 3)
        return float(preconditioned_gd_risk(matrix, SIGMA, **constants, debiased=debiased))

    found = minimize(risk, STEP.ravel(), tol=1e-12)
    best = optimal_preconditioner(SIGMA, **constants, debiased=debiased)
    np.testing.assert_allclose(found.x.reshape(3, 3), best, atol=2e-5)
    np.testing.assert_allclose(best, best.T, rtol=1e-12)
    other = optimal_preconditioner(SIGMA, **constants, debiased=not debiased)
    assert risk(best.ravel()) < risk(other.ravel()) - 1e-6
    # tr Σ + σ², the paper's constant for β of another scale, misses it too.
    own = 1.0 if debiased else 1 + 1 / constants["n_context"]
    trace = np.trace(SIGMA) + constants["noise_variance"]
    misread = inv(own * SIGMA + trace / constants["n_context"] * np.eye(3))
    assert risk(best.ravel()) < risk(misread.ravel()) - 1e-6


@both
@pytest.mark.parametrize("constants", [SHORT, PUBLISHED], ids=["short", "published"])
def test_optimal_scalar_is_the_numerical_minimum(
    constants: dict[str, float], debiased: bool
) -> None:
    def risk(eta: float) -> float:
        return float(preconditioned_gd_risk(eta * np.eye(3), SIGMA, **constants, debiased=debiased))

    rate = float(optimal_scalar_learning_rate(SIGMA, **constants, debiased=debiased))
    assert minimize_scalar(risk, tol=1e-10).x == pytest.approx(rate, rel=1e-6)
    other = float(optimal_scalar_learning_rate(SIGMA, **constants, debiased=not debiased))
    assert abs(rate - other) > 1e-3
    best = optimal_preconditioner(SIGMA, **constants, debiased=debiased)
    assert risk(rate) > preconditioned_gd_risk(best, SIGMA, **constants, debiased=debiased) + 1e-4


@both
def test_rotations_turn_everything_with_them(debiased: bool) -> None:
    rotation, _ = np.linalg.qr(np.random.default_rng(2).standard_normal((3, 3)))
    turned = rotation @ SIGMA @ rotation.T
    settings = {**SHORT, "debiased": debiased}
    np.testing.assert_allclose(
        optimal_preconditioner(turned, **settings),
        rotation @ optimal_preconditioner(SIGMA, **settings) @ rotation.T,
        atol=1e-12,
    )
    np.testing.assert_allclose(
        preconditioned_gd_risk(rotation @ STEP @ rotation.T, turned, **settings),
        preconditioned_gd_risk(STEP, SIGMA, **settings),
    )
    np.testing.assert_allclose(
        optimal_scalar_learning_rate(turned, **settings),
        optimal_scalar_learning_rate(SIGMA, **settings),
    )


# --- distance -------------------------------------------------------------------------------------


def test_distance_is_the_least_over_scales() -> None:
    rng = np.random.default_rng(3)
    for _ in range(5):
        a, b = rng.standard_normal((2, 4, 4))
        found = minimize_scalar(lambda c, a=a, b=b: np.linalg.norm(a - c * b), tol=1e-12)
        expected = found.fun / np.linalg.norm(a)
        assert scale_free_distance(a, b) == pytest.approx(expected, rel=1e-9)
        assert scale_free_distance(b, a) == pytest.approx(expected, rel=1e-9)
        assert scale_free_distance(-3 * a, 1e5 * b) == pytest.approx(expected, rel=1e-9)
        # Without the scale taken out, it is something else.
        assert abs(np.linalg.norm(a - b) / np.linalg.norm(a) - expected) > 0.01


def test_distance_of_known_pairs() -> None:
    assert scale_free_distance(SIGMA, -7 * SIGMA) == pytest.approx(0, abs=1e-15)
    assert scale_free_distance([[1, 0], [0, 0]], [[0, 0], [0, 3]]) == pytest.approx(1, rel=1e-15)
    assert scale_free_distance([[1, 0], [0, 0]], [[2, 0], [0, 2]]) == pytest.approx(
        np.sqrt(0.5), rel=1e-15
    )
    # A part in 10¹⁰ is seen; 1 − cos² would round it to 0.
    off = np.array([[1.0, 1e-10], [0.0, 0.0]])
    assert scale_free_distance(off, [[1, 0], [0, 0]]) == pytest.approx(1e-10, rel=1e-6)


def test_distance_is_undefined_for_zero() -> None:
    matrices = np.stack(
        [np.eye(2), np.zeros((2, 2)), np.full((2, 2), np.nan), np.full((2, 2), np.inf)]
    )
    found = scale_free_distance(matrices, np.eye(2))
    assert np.isnan(found).tolist() == [False, True, True, True]
    assert np.isnan(scale_free_distance(np.eye(2), matrices)).tolist() == [False, True, True, True]


# --- shapes and refusals --------------------------------------------------------------------------


def _calls() -> dict[str, Callable[[np.ndarray], np.ndarray]]:
    """Each public function of a stack of matrices, those of annotated shape checked."""

    def typed(name: str) -> Callable[..., np.ndarray]:
        return jaxtyped(typechecker=beartype)(getattr(preconditioned, name))

    settings = {**SHORT, "debiased": True}
    return {
        "kac_murdock_szego": lambda m: typed("kac_murdock_szego")(m.shape[-1], 0.5),
        "optimal_preconditioner": lambda m: typed("optimal_preconditioner")(m, **settings),
        "preconditioned_gd_risk": lambda m: typed("preconditioned_gd_risk")(m, m, **settings),
        "optimal_scalar_learning_rate": lambda m: typed("optimal_scalar_learning_rate")(
            m, **settings
        ),
        "scale_free_distance": lambda m: typed("scale_free_distance")(m, SIGMA),
    }


def test_batches_are_loops_and_every_function_is_called() -> None:
    public = [
        name
        for name, value in vars(preconditioned).items()
        if inspect.isfunction(value)
        and value.__module__ == preconditioned.__name__
        and not name.startswith("_")
    ]
    calls = _calls()
    assert sorted(calls) == sorted(public)
    stack = np.stack([SIGMA, np.eye(3), SIGMA @ SIGMA, 2 * SIGMA]).reshape(2, 2, 3, 3)
    checked = 0
    for name, call in calls.items():
        if name == "kac_murdock_szego":
            assert call(stack).shape == (3, 3)
            continue
        together = call(stack)
        for index in np.ndindex(2, 2):
            np.testing.assert_allclose(together[index], call(stack[index]), rtol=1e-12)
            checked += 1
    assert checked == 16
    risks = preconditioned_gd_risk(stack[:, :1], stack[0], **SHORT, debiased=True)
    assert risks.shape == (2, 2)


def test_undefined_matrices_are_nan_and_leave_others_alone() -> None:
    stack = np.stack([SIGMA, SIGMA, SIGMA])
    stack[1, 0, 0], stack[2, 0, 0] = np.nan, np.inf
    mark = [False, True, True]
    settings = {**SHORT, "debiased": True}
    assert np.isnan(optimal_preconditioner(stack, **settings)).any((-2, -1)).tolist() == mark
    assert np.isnan(optimal_preconditioner(stack, **settings)).all((-2, -1)).tolist() == mark
    assert np.isnan(optimal_scalar_learning_rate(stack, **settings)).tolist() == mark
    assert np.isnan(preconditioned_gd_risk(STEP, stack, **settings)).tolist() == mark
    assert np.isnan(preconditioned_gd_risk(stack, SIGMA, **settings)).tolist() == mark


@both
def test_a_singular_covariance_is_one_and_nothing_at_all_has_no_best_step(debiased: bool) -> None:
    ones = np.ones((3, 3))  # rank 1; rounding leaves eigenvalues just below 0
    found = optimal_preconditioner(ones, n_context=7, noise_variance=0, debiased=debiased)
    own = 1.0 if debiased else 1 + 1 / 7
    np.testing.assert_allclose(found @ (own * ones + 3 / 7 * np.eye(3)), np.eye(3), atol=1e-12)
    stack = np.stack([np.zeros((3, 3)), ones])
    found = optimal_preconditioner(stack, n_context=7, noise_variance=0, debiased=debiased)
    assert np.isnan(found).all((-2, -1)).tolist() == [True, False]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: optimal_preconditioner(np.ones((2, 3)), **SHORT, debiased=True),
            "has shape (2, 3)",
        ),
        (
            lambda: optimal_preconditioner(np.ones(3), **SHORT, debiased=True),
            "accepted: (..., d, d)",
        ),
        (lambda: optimal_preconditioner(STEP, **SHORT, debiased=True), "not symmetric"),
        (lambda: optimal_preconditioner(-SIGMA, **SHORT, debiased=True), "negative eigenvalue"),
        (
            lambda: preconditioned_gd_risk(
                STEP, 1e-200 * (SIGMA - 2 * np.eye(3)), **SHORT, debiased=False
            ),
            "negative eigenvalue",
        ),
        (
            lambda: optimal_scalar_learning_rate(SIGMA - 2 * np.eye(3), **SHORT, debiased=True),
            "negative eigenvalue",
        ),
        (
            lambda: optimal_preconditioner(SIGMA, n_context=0, noise_variance=1, debiased=True),
            "n_context = 0; accepted: a whole number of at least 1",
        ),
        (
            lambda: optimal_preconditioner(SIGMA, n_context=1, noise_variance=-1, debiased=True),
            "noise_variance = -1",
        ),
        (lambda: optimal_scalar_learning_rate(STEP, **SHORT, debiased=True), "not symmetric"),
        (
            lambda: preconditioned_gd_risk(np.eye(2), SIGMA, **SHORT, debiased=True),
            "preconditioner has shape (2, 2), covariance (3, 3); accepted: one size",
        ),
        (
            lambda: preconditioned_gd_risk(
                np.ones((2, 3, 3)), np.stack([SIGMA] * 4), **SHORT, debiased=True
            ),
            "accepted: leading axes that broadcast",
        ),
        (lambda: scale_free_distance(np.eye(2), SIGMA), "accepted: one size"),
        (lambda: scale_free_distance(np.ones((2, 3)), SIGMA), "matrix has shape (2, 3)"),
        (lambda: scale_free_distance(np.empty((0, 0)), SIGMA), "matrix has shape (0, 0)"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(InputError) as caught:
        call()
    assert message in str(caught.value)
