"""Predictors against gradient steps, Gaussian conditioning, loops and their exact risks."""

import inspect
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from beartype import beartype
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import jaxtyped

from mechicl.errors import InputError
from mechicl.theory import regressors
from mechicl.theory.exact_risk import debiased_gd_risk, vanilla_gd_risk
from mechicl.theory.linear_regression import (
    optimal_learning_rate,
)
from mechicl.theory.regressors import (
    condition_number,
    debiased_gd,
    kernel_regression,
    preconditioned_gd,
    ridge,
    vanilla_gd,
)

Prompt = tuple[np.ndarray, np.ndarray, np.ndarray]
Predictor = Callable[..., np.ndarray]

OMEGA, MU = np.array([0.4, -0.3, 0.1]), np.array([1.5, -2.0, 0.3])
STEP = np.array([[0.8, 0.3, -0.1], [-0.2, 0.6, 0.4], [0.1, 0.5, 1.1]])
"""Ω: neither symmetric nor diagonal, so that a transpose shows."""
PREDICTORS: dict[str, Predictor] = {
    "vanilla_gd": partial(vanilla_gd, learning_rate=0.8),
    "debiased_gd": partial(debiased_gd, learning_rate=0.8),
    "preconditioned_gd": partial(preconditioned_gd, preconditioner=STEP, debiased=False),
    "ridge": partial(ridge, penalty=0.5),
    "kernel_regression": partial(kernel_regression, omega=OMEGA, mu=MU),
}
every_predictor = pytest.mark.parametrize("name", sorted(PREDICTORS))
fixed = settings(deadline=None, derandomize=True, max_examples=40)


def _prompts(*batch: int, length: int = 7, d: int = 3, seed: int = 0, noise: float = 0.3) -> Prompt:
    """Prompts whose covariates have a mean: debiasing shows."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((*batch, length, d)) + 0.5
    beta = rng.standard_normal((*batch, d)) / np.sqrt(d)
    y = np.einsum("...ld,...d->...l", x, beta) + noise * rng.standard_normal((*batch, length))
    return x, y, rng.standard_normal((*batch, d))


# --- gradient descent --------------------------------------------------------------------------


def _one_step(covariates: np.ndarray, y: np.ndarray, rate: float) -> np.ndarray:
    """β after one step from zero, with the gradient by differences, exact for a quadratic loss."""

    def loss(beta: np.ndarray) -> float:
        return ((covariates @ beta - y) ** 2).sum() / (2 * len(y))

    basis = np.eye(covariates.shape[-1])
    return -rate * np.array([(loss(e) - loss(-e)) / 2 for e in basis])


def test_gd_is_one_gradient_step_on_the_context_loss() -> None:
    apart = []
    for seed in range(5):
        x, y, x_query = _prompts(seed=seed)
        plain = x_query @ _one_step(x, y, 0.8)
        centred = x_query @ _one_step(x - x.mean(0), y, 0.8)
        assert vanilla_gd(x, y, x_query, learning_rate=0.8) == pytest.approx(plain, rel=1e-9)
        assert debiased_gd(x, y, x_query, learning_rate=0.8) == pytest.approx(centred, rel=1e-9)
        apart.append(abs(plain - centred))
    assert max(apart) > 0.1


def test_preconditioned_gd_moves_by_the_preconditioned_gradient() -> None:
    """ŷ = x_qᵀ Ωᵀ (−∇): Ω has the key axis first, so its transpose acts on the gradient."""
    apart = []
    for seed in range(5):
        x, y, x_query = _prompts(seed=seed)
        plain, centred = _one_step(x, y, 1.0), _one_step(x - x.mean(0), y, 1.0)
        steps = {"preconditioner": STEP}
        found = preconditioned_gd(x, y, x_query, **steps, debiased=False)
        assert found == pytest.approx(x_query @ STEP.T @ plain, rel=1e-9)
        found = preconditioned_gd(x, y, x_query, **steps, debiased=True)
        assert found == pytest.approx(x_query @ STEP.T @ centred, rel=1e-9)
        apart.append(abs(x_query @ STEP.T @ centred - x_query @ STEP @ centred))
    assert max(apart) > 0.1


def test_preconditioned_gd_at_a_multiple_of_identity_is_gd() -> None:
    prompts = _prompts(6)
    for debiased, predict in ((False, vanilla_gd), (True, debiased_gd)):
        found = preconditioned_gd(*prompts, preconditioner=0.8 * np.eye(3), debiased=debiased)
        np.testing.assert_allclose(found, predict(*prompts, learning_rate=0.8), rtol=1e-12)


def test_debiased_gd_ignores_a_shift_of_x_or_y() -> None:
    x, y, x_query = _prompts(4)
    before = debiased_gd(x, y, x_query, learning_rate=0.8)
    np.testing.assert_allclose(debiased_gd(x + 5, y, x_query, learning_rate=0.8), before)
    np.testing.assert_allclose(debiased_gd(x, y + 5, x_query, learning_rate=0.8), before)
    assert (np.abs(vanilla_gd(x, y + 5, x_query, learning_rate=0.8) - before) > 0.01).all()
    alone = debiased_gd(x[:, :1], y[:, :1], x_query, learning_rate=0.8)
    np.testing.assert_array_equal(alone, 0)


@pytest.mark.parametrize(
    ("predictor", "risk", "other"),
    [
        (debiased_gd, debiased_gd_risk, vanilla_gd_risk),
        (vanilla_gd, vanilla_gd_risk, debiased_gd_risk),
    ],
    ids=["debiased", "vanilla"],
)
def test_gd_has_its_exact_risk(predictor: Predictor, risk: Predictor, other: Predictor) -> None:
    """Everything is drawn, as the task is defined; the other's risk is refuted."""
    constants = {"d": 2, "n_context": 4, "noise_variance": 0.5}
    n, rng = 400_000, np.random.default_rng(2)
    x, x_query = rng.standard_normal((n, 4, 2)), rng.standard_normal((n, 2))
    beta = rng.standard_normal((n, 2)) / np.sqrt(2)
    y = np.einsum("nld,nd->nl", x, beta) + np.sqrt(0.5) * rng.standard_normal((n, 4))
    target = (x_query * beta).sum(-1) + np.sqrt(0.5) * rng.standard_normal(n)
    draws = (predictor(x, y, x_query, learning_rate=0.9) - target) ** 2
    error = draws.std(ddof=1) / np.sqrt(n)
    assert abs(draws.mean() - risk(0.9, **constants)) < 4 * error
    assert abs(draws.mean() - other(0.9, **constants)) > 10 * error
    assert error < 0.01


# --- ridge and the Bayes predictor -------------------------------------------------------------


def _posterior_mean(x: np.ndarray, y: np.ndarray, x_query: np.ndarray, variance: float) -> float:
    """E[y_q | y] from the joint normal law of (y, y_q) for β ~ N(0, I/d)."""
    d = x.shape[-1]
    covariance = x @ x.T / d + variance * np.eye(len(y))
    return float((x @ x_query / d) @ np.linalg.pinv(covariance, hermitian=True) @ y)


@pytest.mark.parametrize("variance", [1e-4, 0.1, 3.0])
@pytest.mark.parametrize(("length", "d"), [(9, 4), (4, 4), (2, 5), (1, 3), (30, 1)])
def test_ridge_is_the_posterior_mean(length: int, d: int, variance: float) -> None:
    x, y, x_query = _prompts(length=length, d=d, noise=np.sqrt(variance))
    found = ridge(x, y, x_query, penalty=d * variance)
    expected = _posterior_mean(x, y, x_query, variance)
    assert found == pytest.approx(expected, rel=1e-8)
    # A penalty of σ² would be right for β ~ N(0, I).
    if d > 1 and variance >= 0.1:
        assert abs(ridge(x, y, x_query, penalty=variance) - expected) > 1e-3


def _rank_deficient(length: int = 8) -> Prompt:
    x, y, x_query = _prompts(length=length, d=4)
    x[:, 3] = x[:, 0] - 2 * x[:, 1]
    x[-1] = x[0]
    return x, y, x_query


@pytest.mark.parametrize("variance", [1e-6, 0.1])
def test_ridge_on_rank_deficient_contexts(variance: float) -> None:
    prompt = _rank_deficient()
    found = ridge(*prompt, penalty=4 * variance)
    assert found == pytest.approx(_posterior_mean(*prompt, variance), rel=1e-7)


@pytest.mark.parametrize(
    "prompt",
    [_prompts(length=9, d=4), _prompts(length=2, d=5), _prompts(noise=0.0), _rank_deficient()],
    ids=["full rank", "L < d", "noise-free", "rank-deficient"],
)
def test_ridge_without_penalty_is_least_squares_of_least_norm(prompt: Prompt) -> None:
    x, y, x_query = prompt
    expected = x_query @ np.linalg.lstsq(x, y)[0]
    assert ridge(*prompt, penalty=0) == pytest.approx(expected, rel=1e-9)
    # It is where a vanishing penalty leads, even one below rounding.
    for penalty in (1e-9, 1e-40, 1e-300):
        assert ridge(*prompt, penalty=penalty) == pytest.approx(expected, rel=1e-6)


def _normal_equations(x: np.ndarray, y: np.ndarray, x_query: np.ndarray) -> float:
    """Least squares of least norm another way: (XᵀX)⁺Xᵀy by eigenvalues."""
    values, vectors = np.linalg.eigh(x.T @ x)
    kept = values > 1e-9 * values[-1]
    return float(x_query @ vectors[:, kept] @ ((vectors[:, kept].T @ x.T @ y) / values[kept]))


def _hard_contexts() -> dict[str, Prompt]:
    rng = np.random.default_rng(11)
    beta, x_query = rng.standard_normal(6), rng.standard_normal(6)
    one_hot = np.eye(6)[[0, 3, 3, 5]]  # L < d, and one direction twice
    doubled = rng.standard_normal((8, 6))
    doubled[:, 4:] = doubled[:, :2]
    line = np.outer(rng.standard_normal(8), rng.standard_normal(6))
    thin = rng.standard_normal((2, 6))
    contexts = {"one-hot": one_hot, "doubled": doubled, "rank 1": line, "L < d": thin}
    return {name: (x, x @ beta, x_query) for name, x in contexts.items()}


@pytest.mark.parametrize("name", sorted(_hard_contexts()))
def test_least_squares_on_hard_contexts_without_noise(name: str) -> None:
    x, y, x_query = _hard_contexts()[name]
    found = ridge(x, y, x_query, penalty=0)
    assert found == pytest.approx(_normal_equations(x, y, x_query), rel=1e-9)
    assert found == pytest.approx(_posterior_mean(x, y, x_query, 0.0), rel=1e-9)
    assert condition_number(x, penalty=0) == np.inf
    # It fits what it was shown, which a penalty does not.
    shown = ridge(x, y, x, penalty=0)
    np.testing.assert_allclose(shown, y, rtol=1e-9)
    assert np.abs(ridge(x, y, x, penalty=0.1) - y).max() > 1e-3 * np.abs(y).max()


def test_least_squares_of_one_hot_covariates_is_a_mean_a_direction() -> None:
    x, y = np.eye(4)[[0, 2, 2]], np.array([3.0, 1.0, 2.0])
    found = ridge(x, y, np.eye(4), penalty=0)
    np.testing.assert_allclose(found, [3.0, 0.0, 1.5, 0.0], atol=1e-14)
    # With a penalty each sum of responses is shared by one more "example".
    found = ridge(x, y, np.eye(4), penalty=1)
    np.testing.assert_allclose(found, [1.5, 0.0, 1.0, 0.0], atol=1e-14)


@pytest.mark.parametrize("scale", [1e-8, 1.0, 1e8])
@pytest.mark.parametrize(("length", "d"), [(9, 4), (4, 4), (2, 5), (1, 1)])
def test_condition_number_is_that_of_the_system(length: int, d: int, scale: float) -> None:
    x = scale * _prompts(5, length=length, d=d)[0]
    for factor in (1e-3, 1.0):
        penalty = factor * scale**2
        system = np.swapaxes(x, -1, -2) @ x + penalty * np.eye(d)
        found = condition_number(x, penalty=penalty)
        np.testing.assert_allclose(found, np.linalg.cond(system), rtol=1e-6)
    found = condition_number(x, penalty=0)
    if length < d:
        assert np.isinf(found).all()
    else:
        np.testing.assert_allclose(found, np.linalg.cond(x) ** 2, rtol=1e-6)


def test_condition_number_says_how_far_an_error_in_y_can_grow() -> None:
    """Nearly collinear covariates: the worst response moves the answer by κ^½ of the best."""
    x = np.array([[1.0, 1.0], [1.0, 1.0 + 1e-4], [1.0, 1.0 - 1e-4]])
    left, values, right = np.linalg.svd(x, full_matrices=False)
    worst, best = (ridge(x, left[:, i], right[i], penalty=0) for i in (1, 0))
    assert condition_number(x, penalty=0) == pytest.approx((worst / best) ** 2, rel=1e-6)
    assert condition_number(x, penalty=0) > 1e8
    assert condition_number(x, penalty=1.0) < 10
    assert values[0] > values[1]


def test_condition_number_of_batches_and_bounds() -> None:
    x = _prompts(2, 3)[0]
    found = condition_number(x, penalty=np.array([0.0, 1.0, 1e12]))
    assert found.shape == (2, 3)
    assert (found >= 1).all()
    np.testing.assert_allclose(found[:, 2], 1, rtol=1e-9)
    assert (found[:, 0] > found[:, 1]).any()
    x[0, 0, 0] = [np.nan, 1, 1]
    x[1, 1, 0] = [np.inf, 1, 1]
    mark = np.isnan(condition_number(x, penalty=[0.0, 1.0, np.nan]))
    assert mark.tolist() == [[True, False, True], [False, True, True]]
    for bad, message in (
        ((np.ones(3), 0), "x has shape (3,)"),
        ((np.ones((0, 3)), 0), "x has shape (0, 3)"),
        ((np.ones((2, 3)), -1), "penalty reaches down to -1.0"),
        ((np.ones((2, 2, 3)), np.ones(3)), "penalty has shape (3,)"),
    ):
        with pytest.raises(InputError) as caught:
            condition_number(bad[0], penalty=bad[1])
        assert message in str(caught.value)
    assert condition_number(np.zeros((4, 2)), penalty=0) == np.inf


def test_ridge_without_noise_is_exact() -> None:
    rng = np.random.default_rng(4)
    x, beta, x_query = rng.standard_normal((9, 4)), rng.standard_normal(4), rng.standard_normal(4)
    assert ridge(x, x @ beta, x_query, penalty=0) == pytest.approx(beta @ x_query, rel=1e-12)


def test_ridge_on_contexts_without_information() -> None:
    x, y, x_query = _prompts()
    assert ridge(0 * x, y, x_query, penalty=0) == 0
    assert ridge(0 * x, y, x_query, penalty=1.0) == 0
    assert ridge(x, y, x_query, penalty=1e300) == pytest.approx(0, abs=1e-100)


def test_no_other_penalty_has_a_smaller_risk() -> None:
    n, d, variance, rng = 100_000, 3, 0.4, np.random.default_rng(6)
    x, x_query = rng.standard_normal((n, 5, d)), rng.standard_normal((n, d))
    beta = rng.standard_normal((n, d)) / np.sqrt(d)
    y = np.einsum("nld,nd->nl", x, beta) + np.sqrt(variance) * rng.standard_normal((n, 5))
    target = (x_query * beta).sum(-1)
    best = (ridge(x, y, x_query, penalty=d * variance) - target) ** 2
    for factor in (1 / d, 0.5, 2.0):
        excess = (ridge(x, y, x_query, penalty=factor * d * variance) - target) ** 2 - best
        assert excess.mean() > 4 * excess.std(ddof=1) / np.sqrt(n)


# --- softmax kernels ---------------------------------------------------------------------------


def _by_loop(x: np.ndarray, y: np.ndarray, x_query: np.ndarray) -> float:
    total = 0.0
    for omega, mu in zip(OMEGA, MU, strict=True):
        kernel = [np.exp(omega * sum(row * x_query)) for row in x]
        total += mu * sum(k * value for k, value in zip(kernel, y, strict=True)) / sum(kernel)
    return total


def test_kernel_regression_is_the_sum_over_heads() -> None:
    prompts = _prompts(5)
    found = kernel_regression(*prompts, omega=OMEGA, mu=MU)
    expected = [_by_loop(*prompt) for prompt in zip(*prompts, strict=True)]
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    heads = [kernel_regression(*prompts, omega=o, mu=m) for o, m in zip(OMEGA, MU, strict=True)]
    np.testing.assert_allclose(sum(heads), expected, rtol=1e-12)


def test_kernel_regression_is_stable() -> None:
    x, y, x_query = _prompts()
    nearest, farthest = y[(x @ x_query).argmax()], y[(x @ x_query).argmin()]
    for omega in (1e4, 1e150):
        found = kernel_regression(x, y, x_query, omega=[omega, -omega], mu=[2.0, 1.0])
        assert found == pytest.approx(2 * nearest + farthest, rel=1e-12)
    flat = kernel_regression(x, y, x_query, omega=0.0, mu=3.0)
    assert flat == pytest.approx(3 * y.mean(), rel=1e-12)


def test_pair_tends_to_debiased_gd() -> None:
    """The distance falls as γ²; with unbalanced μ it grows, and vanilla GD is not the limit."""
    prompts = _prompts(50, length=40, d=5, noise=0.3)
    eta = optimal_learning_rate(d=5, n_context=40, noise_variance=0.1)
    target = debiased_gd(*prompts, learning_rate=eta)

    def distance(gamma: float, goal: np.ndarray = target, lean: float = 0.0) -> float:
        mu = eta / (2 * gamma) * np.array([1 + lean, -1 + lean])
        found = kernel_regression(*prompts, omega=gamma * np.array([1, -1]), mu=mu)
        return float(np.sqrt(((found - goal) ** 2).mean()))

    gammas = np.array([0.02, 0.01, 0.005, 0.0025])
    slopes = np.diff(np.log([distance(g) for g in gammas])) / np.diff(np.log(gammas))
    np.testing.assert_allclose(slopes, 2, atol=0.02)
    assert distance(1e-4) < 1e-6
    assert distance(1e-4, vanilla_gd(*prompts, learning_rate=eta)) > 0.1
    assert distance(1e-4, lean=0.01) > distance(1e-2, lean=0.01) > 0.01


# --- what all of them share --------------------------------------------------------------------


@every_predictor
def test_predictions_are_linear_in_y(name: str) -> None:
    predict, (x, y, x_query) = PREDICTORS[name], _prompts(6)
    other = np.cos(y)
    together = predict(x, 2 * y - 3 * other, x_query)
    apart = 2 * predict(x, y, x_query) - 3 * predict(x, other, x_query)
    np.testing.assert_allclose(together, apart, rtol=1e-10)


@every_predictor
@given(st.permutations(range(7)), st.integers(0, 10))
@fixed
def test_order_of_examples_does_not_matter(name: str, order: list[int], seed: int) -> None:
    x, y, x_query = _prompts(seed=seed)
    expected = PREDICTORS[name](x, y, x_query)
    found = PREDICTORS[name](x[order], y[order], x_query)
    assert found == pytest.approx(float(expected), rel=1e-9, abs=1e-12)


@every_predictor
@given(st.integers(0, 50))
@fixed
def test_rotations_do_not_matter(name: str, seed: int) -> None:
    x, y, x_query = _prompts(seed=seed)
    rotation, _ = np.linalg.qr(np.random.default_rng(seed).standard_normal((3, 3)))
    expected = PREDICTORS[name](x, y, x_query)
    turned = {"preconditioner": rotation.T @ STEP @ rotation} if "precond" in name else {}
    found = PREDICTORS[name](x @ rotation, y, x_query @ rotation, **turned)
    assert found == pytest.approx(float(expected), rel=1e-9, abs=1e-12)


@given(st.floats(0.1, 10), st.permutations(range(3)))
@fixed
def test_scale_of_x_and_order_of_heads(scale: float, order: list[int]) -> None:
    x, y, x_query = _prompts()
    scaled = (scale * x, y, scale * x_query)
    for predict, rescaled in (
        (partial(vanilla_gd, learning_rate=0.8), {"learning_rate": 0.8 / scale**2}),
        (partial(debiased_gd, learning_rate=0.8), {"learning_rate": 0.8 / scale**2}),
        (partial(ridge, penalty=0.5), {"penalty": 0.5 * scale**2}),
        (
            partial(kernel_regression, omega=OMEGA, mu=MU),
            {"omega": OMEGA[order] / scale**2, "mu": MU[order]},
        ),
        (PREDICTORS["preconditioned_gd"], {"preconditioner": STEP / scale**2}),
    ):
        expected = float(predict(x, y, x_query))
        assert predict(*scaled, **rescaled) == pytest.approx(expected, rel=1e-9)


@every_predictor
def test_batches_are_loops(name: str) -> None:
    predict, prompts = PREDICTORS[name], _prompts(2, 3)
    together = predict(*prompts)
    assert together.shape == (2, 3)
    for index in np.ndindex(2, 3):
        alone = predict(*(part[index] for part in prompts))
        assert alone.shape == ()
        assert alone == pytest.approx(float(together[index]), rel=1e-12)
    x, y, x_query = prompts
    spread = predict(x[0, 0], y[:, :1], x_query[0])
    assert spread.shape == (2, 3)
    assert spread[1, 2] == pytest.approx(float(predict(x[0, 0], y[1, 0], x_query[0, 2])))
    assert predict(np.empty((0, 4, 3)), np.empty((0, 4)), np.empty((0, 3))).shape == (0,)


def test_settings_may_differ_from_prompt_to_prompt() -> None:
    prompts, values = _prompts(2), np.array([0.3, 0.9])
    for predict, name in (
        (vanilla_gd, "learning_rate"),
        (debiased_gd, "learning_rate"),
        (ridge, "penalty"),
    ):
        found = predict(*prompts, **{name: values})
        for i, value in enumerate(values):
            alone = predict(*(part[i] for part in prompts), **{name: value})
            assert found[i] == pytest.approx(float(alone), rel=1e-12)
    omega = np.stack([OMEGA, -OMEGA])
    found = kernel_regression(*prompts, omega=omega, mu=MU)
    x, y, x_query = (part[1] for part in prompts)
    assert found[1] == pytest.approx(float(kernel_regression(x, y, x_query, omega=-OMEGA, mu=MU)))
    assert kernel_regression(*prompts, omega=omega[:, None], mu=MU).shape == (2, 2)


@every_predictor
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nonfinite_prompts_are_nan_and_leave_others_alone(name: str, bad: float) -> None:
    predict, (x, y, x_query) = PREDICTORS[name], _prompts(5)
    expected = predict(x, y, x_query)
    x[1, 2, 0] = y[2, 4] = x_query[3, 1] = bad
    found = predict(x, y, x_query)
    assert np.isnan(found).tolist() == [False, True, True, True, False]
    np.testing.assert_array_equal(found[[0, 4]], expected[[0, 4]])


def test_lapack_sees_no_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []

    def spied(name: str) -> Callable[..., object]:
        own = getattr(np.linalg, name)

        def spy(a: np.ndarray, **options: bool) -> object:
            seen.append(bool(np.isfinite(a).all()))
            return own(a, **options)

        return spy

    for name in ("svd", "eigh"):
        monkeypatch.setattr(np.linalg, name, spied(name))
    x, y, x_query = _prompts(3)
    x[0, 0, 0], x[1, 0, 0] = np.nan, np.inf
    assert np.isnan(ridge(x, y, x_query, penalty=0.5)).tolist() == [True, True, False]
    x[2] = 1e200  # its square overflows
    assert np.isfinite(ridge(x[2], y[2], x_query[2], penalty=0.5))
    assert len(seen) >= 3 and all(seen)


@pytest.mark.parametrize("condition", [1.0, 900.0, 1100.0, 1e6])
def test_ridge_is_accurate_on_either_side_of_its_two_ways(condition: float) -> None:
    """Against a solution in twice the digits, on contexts of a given condition number."""
    rng = np.random.default_rng(5)
    left = np.linalg.qr(rng.normal(size=(20, 3)))[0]
    right = np.linalg.qr(rng.normal(size=(3, 3)))[0]
    x = (left * [condition, 2.0 if condition > 2 else 1.0, 1.0]) @ right.T
    y, query = x @ rng.normal(size=3), rng.normal(size=3)
    exact = np.linalg.lstsq(x, y, rcond=None)[0] @ query
    assert abs(ridge(x, y, query, penalty=0.0) - exact) <= 1e-15 * condition * 100 + 1e-9
    x_long, y_long = x.astype(np.longdouble), y.astype(np.longdouble)
    system = x_long.T @ x_long + np.longdouble(0.5) * np.eye(3)
    solution = _solve(system, x_long.T @ y_long)
    expected = float(solution @ query.astype(np.longdouble))
    np.testing.assert_allclose(ridge(x, y, query, penalty=0.5), expected, rtol=1e-8)


def _solve(matrix: np.ndarray, vector: np.ndarray) -> np.ndarray:
    """Gauss elimination in long doubles, which LAPACK does not have."""
    a, b = matrix.copy(), vector.copy()
    for i in range(len(b)):
        for j in range(i + 1, len(b)):
            factor = a[j, i] / a[i, i]
            a[j] -= factor * a[i]
            b[j] -= factor * b[i]
    out = np.zeros_like(b)
    for i in reversed(range(len(b))):
        out[i] = (b[i] - a[i, i + 1 :] @ out[i + 1 :]) / a[i, i]
    return out


def test_nonfinite_settings_are_nan() -> None:
    prompts, values = _prompts(3), np.array([0.5, np.nan, np.inf])
    mark = [False, True, True]
    assert np.isnan(vanilla_gd(*prompts, learning_rate=values)).tolist() == mark
    assert np.isnan(debiased_gd(*prompts, learning_rate=values)).tolist() == mark
    assert np.isnan(ridge(*prompts, penalty=values)).tolist() == mark
    found = kernel_regression(*prompts, omega=values[:, None] * OMEGA, mu=MU)
    assert np.isnan(found).tolist() == mark
    found = _precondition(prompts, values[:, None, None] * np.ones((3, 3)))
    assert np.isnan(found).tolist() == mark
    found = kernel_regression(*prompts, omega=OMEGA, mu=values[:, None] * MU)
    assert np.isnan(found).tolist() == mark


def test_shapes_are_as_annotated() -> None:
    checked = 0
    for name, predict in PREDICTORS.items():
        typed = jaxtyped(typechecker=beartype)(getattr(regressors, name))
        keywords = predict.keywords  # type: ignore[attr-defined]
        assert typed(*_prompts(2, 3), **keywords).shape == (2, 3)
        checked += 1
        if name == "preconditioned_gd":
            matrices = {"preconditioner": np.ones((2, 3, 3)), "debiased": True}
            assert typed(*_prompts(2), **matrices).shape == (2,)
            continue
        assert typed(*_prompts(), **dict.fromkeys(keywords, 1)).shape == ()
        assert typed(*_prompts(2), **dict.fromkeys(keywords, np.ones(2))).shape == (2,)
    typed = jaxtyped(typechecker=beartype)(condition_number)
    assert typed(_prompts(2, 3)[0], penalty=1).shape == (2, 3)
    checked += 1
    public = [
        name
        for name, value in vars(regressors).items()
        if inspect.isfunction(value)
        and value.__module__ == regressors.__name__
        and not name.startswith("_")
    ]
    assert checked == len(public)


@every_predictor
@pytest.mark.parametrize(
    "shapes",
    [
        ((7, 3), (6,), (3,)),
        ((7, 3), (7,), (2,)),
        ((3,), (7,), (3,)),
        ((7, 3), (), (3,)),
        ((3,), (), (3,)),
        ((7, 3), (7,), ()),
        ((0, 3), (0,), (3,)),
        ((7, 0), (7,), (0,)),
        ((2, 7, 3), (4, 7), (3,)),
    ],
    ids=str,
)
def test_shapes_that_do_not_fit_are_refused(name: str, shapes: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(InputError) as caught:
        PREDICTORS[name](*(np.ones(shape) for shape in shapes))
    assert "x has shape" in str(caught.value)
    assert "accepted: " in str(caught.value)


def _precondition(prompts: Prompt, matrix: np.ndarray) -> np.ndarray:
    return preconditioned_gd(*prompts, preconditioner=matrix, debiased=True)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda p: ridge(*p, penalty=-1), "penalty reaches down to -1.0; accepted: at least 0"),
        (lambda p: ridge(*p, penalty="x"), "penalty = 'x'; accepted: real numbers"),
        (lambda p: ridge(*p, penalty=np.ones(3)), "penalty has shape (3,); accepted"),
        (lambda p: vanilla_gd(*p, learning_rate=1j), "learning_rate = 1j"),
        (lambda p: vanilla_gd(*p, learning_rate=np.ones(3)), "learning_rate has shape (3,)"),
        (lambda p: debiased_gd(*p, learning_rate=np.ones(3)), "learning_rate has shape (3,)"),
        (lambda p: kernel_regression(*p, omega=OMEGA, mu=1.0), "one number of heads"),
        (
            lambda p: kernel_regression(*p, omega=np.ones((3, 2)), mu=[1, 1]),
            "omega has shape (3, 2)",
        ),
        (lambda p: _precondition(p, np.ones((2, 2))), "preconditioner has shape (2, 2); accepted"),
        (lambda p: _precondition(p, np.ones((3, 2))), "with d = 3"),
        (lambda p: _precondition(p, np.ones(3)), "preconditioner has shape (3,)"),
        (lambda p: _precondition(p, np.ones((4, 3, 3))), "preconditioner has shape (4, 3, 3)"),
        (lambda p: vanilla_gd(p[0] * 1j, *p[1:], learning_rate=1), "accepted: real numbers"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    call: Callable[[Prompt], object], message: str
) -> None:
    with pytest.raises(InputError) as caught:
        call(_prompts(2))
    assert message in str(caught.value)
