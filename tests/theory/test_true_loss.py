"""The simulated loss against brute force, exact risks, and itself."""

import numpy as np
import pytest
from beartype import beartype
from jaxtyping import jaxtyped

from mechicl.errors import InputError
from mechicl.theory.exact_risk import debiased_gd_risk
from mechicl.theory.linear_regression import (
    approximate_loss,
    optimal_learning_rate,
)
from mechicl.theory.regressors import kernel_regression
from mechicl.theory.true_loss import true_loss

PUBLISHED = {"d": 5, "n_context": 40, "noise_variance": 0.1}
OTHER = {"d": 3, "n_context": 6, "noise_variance": 0.7}
Z = 4.0
"""Standard errors that a simulation may be off."""

PAIR = np.array([1.0, -1.0])
CHECKED = {
    "pair .05": (0.05 * PAIR, 4 * PAIR, 0.49763, 5e-6),
    "pair .1": (0.1 * PAIR, 4.395383 * PAIR, 0.242863, 1e-5),
    "pair .1267": (0.1267 * PAIR, 3.5006 * PAIR, 0.243011, 1.8e-5),
    "pair .2": (0.2 * PAIR, 2 * PAIR, 0.25200, 5e-5),
    "pair .3": (0.3 * PAIR, PAIR, 0.33968, 7e-5),
    "pair .4472": (0.4472 * PAIR, PAIR, 0.26002, 1.3e-4),
    "pair .4472, 2": (0.4472 * PAIR, 2 * PAIR, 1.0336, 1.3e-3),
    "pair .6": (0.6 * PAIR, PAIR, 0.3314, 5e-4),
    "pair .8": (0.8 * PAIR, PAIR, 0.5529, 1.4e-3),
    "pair 1": (PAIR, PAIR, 0.8193, 2.2e-3),
    "single .4472": (np.array([0.4472]), np.array([1.6277]), 0.40805, 2.8e-4),
    "single .6": (np.array([0.6]), np.array([1.6277]), 0.4418, 7e-4),
    "three": (np.array([0.3, -0.2, 0.1]), np.array([1.5, -1.0, 0.5]), 0.31732, 1e-4),
}
"""ω, μ, true loss and its standard error at the published constants, by other code."""


@pytest.mark.parametrize("name", sorted(CHECKED))
def test_loss_agrees_with_the_checked_table(name: str) -> None:
    omega, mu, expected, error = CHECKED[name]
    loss, own = true_loss(omega, mu, **PUBLISHED, n_samples=10_000, rng=np.random.default_rng(1))
    assert own < 0.01 * expected
    assert abs(loss - expected) < Z * np.hypot(own, error)
    assert abs(loss - approximate_loss(omega, mu, **PUBLISHED)) > 5 * own


@pytest.mark.parametrize(
    ("activation", "omega", "mu", "expected"),
    [
        (lambda s: 1 + np.tanh(s), 0.14376, 3.440, (0.239367, 5e-6)),
        (lambda s: (1 + s) ** 2, 0.14237, 1.7661, (0.238329, 3e-6)),
        (lambda s: (1 + 0.5 * s) ** 2, 2 * 0.14237, 1.7661, (0.238329, 3e-6)),
    ],
    ids=["1 + tanh", "square", "square, C = .5"],
)
def test_loss_of_other_activations(
    activation: object, omega: float, mu: float, expected: tuple[float, float]
) -> None:
    settings = {**PUBLISHED, "n_samples": 20_000, "activation": activation}
    loss, error = true_loss(omega * PAIR, mu * PAIR, **settings, rng=np.random.default_rng(2))
    assert error < 2e-4
    assert abs(loss - expected[0]) < Z * np.hypot(error, expected[1])
    softmax, _ = true_loss(
        omega * PAIR, mu * PAIR, **PUBLISHED, n_samples=20_000, rng=np.random.default_rng(2)
    )
    assert abs(softmax - loss) > 10 * error


def _brute_force(
    omega: np.ndarray, mu: np.ndarray, n: int, *, d: int, n_context: int, noise_variance: float
) -> tuple[float, float]:
    """Everything is drawn, as the task is defined."""
    rng, scale = np.random.default_rng(3), np.sqrt(noise_variance)
    x, x_query = rng.standard_normal((n, n_context, d)), rng.standard_normal((n, d))
    beta = rng.standard_normal((n, d)) / np.sqrt(d)
    y = np.einsum("nld,nd->nl", x, beta) + scale * rng.standard_normal((n, n_context))
    target = (x_query * beta).sum(-1) + scale * rng.standard_normal(n)
    draws = (kernel_regression(x, y, x_query, omega=omega, mu=mu) - target) ** 2
    return float(draws.mean()), float(draws.std(ddof=1) / np.sqrt(n))


@pytest.mark.parametrize(
    ("omega", "mu", "constants"),
    [
        (np.array([0.4, -0.3, 0.2]), np.array([1.2, -0.9, 0.5]), OTHER),
        (np.array([0.7]), np.array([1.1]), OTHER),
        (np.array([0.5, -0.5]), np.array([1.0, 0.4]), OTHER | {"d": 1}),
        (np.array([0.5, -0.2]), np.array([1.0, -1.0]), OTHER | {"noise_variance": 0}),
        (np.array([0.5, -0.2]), np.array([1.0, -0.6]), OTHER | {"n_context": 2}),
    ],
    ids=["three heads", "one head", "d = 1", "no noise", "L = 2"],
)
def test_loss_agrees_with_brute_force(
    omega: np.ndarray, mu: np.ndarray, constants: dict[str, float]
) -> None:
    expected, error = _brute_force(omega, mu, 100_000, **constants)
    loss, own = true_loss(omega, mu, **constants, n_samples=30_000, rng=np.random.default_rng(4))
    assert own < error < 0.02
    assert abs(loss - expected) < Z * np.hypot(own, error)
    # The noise of the response counts, and the sign of μ too.
    flipped, _ = true_loss(omega, -mu, **constants, n_samples=1_000, rng=np.random.default_rng(4))
    assert abs(flipped - expected) > 10 * error


def test_limit_of_small_kq_is_debiased_gd() -> None:
    for constants in (PUBLISHED, OTHER):
        rate = 0.8 * optimal_learning_rate(**constants)
        loss, error = true_loss(
            1e-3 * PAIR,
            rate / 2e-3 * PAIR,
            **constants,
            n_samples=5_000,
            rng=np.random.default_rng(5),
        )
        expected = float(debiased_gd_risk(rate, **constants))
        assert loss == pytest.approx(expected, abs=3e-5)
        assert error < 1e-5


def test_loss_without_attention_and_of_one_example() -> None:
    settings = {"n_samples": 1000, "rng": np.random.default_rng(6)}
    # ω = 0 weighs evenly: ŷ = ‖μ‖·ȳ, for which E ȳ² = (1 + σ²)/L.
    loss, error = true_loss([0.0, 0.0], [1.5, 0.5], **PUBLISHED, **settings)
    assert loss == pytest.approx(1.1 + 4 * 1.1 / 40, rel=1e-9)
    assert error < 1e-9
    loss, error = true_loss([0.3, -0.7], [1.5, 0.5], **PUBLISHED | {"n_context": 1}, **settings)
    assert loss == pytest.approx(1.1 + 4 * 1.1, rel=1e-9)
    assert error < 1e-9
    loss, error = true_loss([0.3, -0.7], [0.0, 0.0], **PUBLISHED, **settings)
    assert (loss, error) == (1.1, 0)


def test_standard_error_is_the_spread_of_repetitions() -> None:
    rng = np.random.default_rng(7)
    omega, mu = 0.3 * PAIR, 1.4 * PAIR
    runs = [true_loss(omega, mu, **OTHER, n_samples=1000, rng=rng) for _ in range(150)]
    losses, errors = np.array(runs).T
    # Of 150 repetitions the spread is known within 6 %.
    assert losses.std(ddof=1) / errors.mean() == pytest.approx(1, abs=0.25)
    exact, _ = true_loss(omega, mu, **OTHER, n_samples=200_000, rng=rng)
    assert abs(losses.mean() - exact) < Z * errors.mean() / np.sqrt(150)


def test_grids_are_loops_over_models_on_the_same_draws() -> None:
    """30,000 draws of 6 come in more than one chunk a fold."""
    omega = np.array([0.1, 0.3])[:, None, None] * PAIR
    mu = np.array([[1.0, -1.0], [2.0, -2.5], [0.5, 0.1]])
    grid = true_loss(omega, mu, **OTHER, n_samples=30_000, rng=np.random.default_rng(8))
    assert grid[0].shape == grid[1].shape == (2, 3)
    for index in np.ndindex(2, 3):
        alone = true_loss(
            omega[index[0], 0],
            mu[index[1]],
            **OTHER,
            n_samples=30_000,
            rng=np.random.default_rng(8),
        )
        np.testing.assert_allclose([part[index] for part in grid], alone, rtol=1e-9)
    swapped = true_loss(
        omega[..., ::-1], mu[:, ::-1], **OTHER, n_samples=30_000, rng=np.random.default_rng(8)
    )
    np.testing.assert_allclose(swapped, grid, rtol=1e-8)


def test_undefined_models_are_nan_and_leave_others_alone() -> None:
    omega = np.array([[0.1, -0.1], [np.nan, 0.1], [np.inf, 0.1], [0.1, -0.1]])
    mu = np.array([[1.0, -1.0], [1.0, 1.0], [1.0, 1.0], [np.nan, 1.0]])
    loss, error = true_loss(omega, mu, **OTHER, n_samples=1000, rng=np.random.default_rng(9))
    assert np.isnan(loss).tolist() == np.isnan(error).tolist() == [False, True, True, True]
    # Softmax of scores beyond exp is well defined.
    loss, _ = true_loss([500.0], [1.0], **OTHER, n_samples=1000, rng=np.random.default_rng(9))
    assert np.isfinite(loss)
    undefined, _ = true_loss(
        0.1, 1.0, **OTHER, n_samples=1000, rng=np.random.default_rng(9), activation=np.zeros_like
    )
    assert np.isnan(undefined)


def test_shapes_are_as_annotated() -> None:
    typed = jaxtyped(typechecker=beartype)(true_loss)
    settings = {**OTHER, "n_samples": 1000, "rng": np.random.default_rng(10)}
    assert typed(0.1, 1, **settings)[0].shape == ()
    assert typed(np.ones((2, 1, 3)), np.ones((4, 3)), **settings)[1].shape == (2, 4)
    assert typed(np.ones((0, 3)), np.ones(3), **settings)[0].shape == (0,)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"d": 0}, "d = 0; accepted: a whole number of at least 1"),
        ({"n_context": 2.5}, "n_context = 2.5"),
        ({"noise_variance": -1}, "noise_variance = -1"),
        ({"n_samples": 999}, "n_samples = 999; accepted: a whole number of at least 1000"),
        ({"mu": [1.0, 2.0, 3.0]}, "one number of heads"),
        ({"activation": lambda s: s[0]}, "activation turns shape"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(bad: dict, message: str) -> None:
    given = {"omega": PAIR, "mu": PAIR, **OTHER, "n_samples": 1000, "rng": np.random.default_rng()}
    with pytest.raises(InputError) as caught:
        true_loss(**given | bad)
    assert message in str(caught.value)
