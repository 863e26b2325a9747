"""The posterior over leaves against its definition, leaf by leaf, and against simulation."""

from collections.abc import Callable

import numpy as np
import pytest
from scipy.stats import multivariate_normal

from mechicl.errors import InputError
from mechicl.theory import measurement, priors, strategies, tree_posterior

DEPTH, ALPHA, TAU = 3, 0.6, 0.3
LEAVES = priors.tree_leaves(DEPTH, ALPHA)
STEPS = priors.tree_steps(DEPTH, ALPHA)
W = np.random.default_rng(0).standard_normal((2, 7))
ROWS = np.linalg.qr(W.T)[0].T


def loss(rows: np.ndarray, tau: float, *, n_draws: int = 400, seed: int = 0) -> tuple[float, float]:
    rng = np.random.default_rng(seed)
    return tree_posterior.tree_mmse(DEPTH, ALPHA, rows, tau, n_draws=n_draws, rng=rng)


def contexts(n: int, n_channels: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.integers(0, len(LEAVES), n), rng.standard_normal((n_channels, n))


def test_leaf_posterior_is_bayes_rule() -> None:
    """(18), with the density of the noise that these rows see."""
    phi = np.random.default_rng(1).standard_normal((2, 3, 2))
    for rows in (W, ROWS, 100 * W):
        found = tree_posterior.leaf_posterior(LEAVES, rows, phi, TAU)
        assert found.shape == (2, 3, 8)
        for index in np.ndindex(2, 3):
            noise = multivariate_normal(np.zeros(2), TAU**2 * rows @ rows.T)
            density = noise.pdf(phi[index] - LEAVES @ rows.T)
            np.testing.assert_allclose(found[index], density / density.sum(), atol=1e-12)


def test_only_the_span_of_the_rows_counts() -> None:
    theta = LEAVES[3] + TAU * np.random.default_rng(2).standard_normal(7)
    expected = tree_posterior.leaf_posterior(LEAVES, W, W @ theta, TAU)
    mix = np.array([[2.0, 1], [0, 3], [1, 1], [0, 0]]) @ W
    found = tree_posterior.leaf_posterior(LEAVES, mix, mix @ theta, TAU)
    np.testing.assert_allclose(found, expected, atol=1e-12)
    assert loss(mix, TAU)[0] == pytest.approx(loss(ROWS, TAU)[0], abs=4 * loss(W, TAU)[1])
    none = tree_posterior.leaf_posterior(LEAVES, np.zeros((0, 7)), np.zeros((4, 0)), TAU)
    np.testing.assert_allclose(none, 1 / 8)


def test_leaf_moments() -> None:
    rho = np.random.default_rng(3).dirichlet(np.ones(8), size=(2, 2))
    mean, trace = tree_posterior.leaf_moments(LEAVES, rho)
    assert mean.shape == (2, 2, 7)
    for index in np.ndindex(2, 2):
        expected = sum(p * theta for p, theta in zip(rho[index], LEAVES, strict=True))
        np.testing.assert_allclose(mean[index], expected, atol=1e-15)
        squares = ((LEAVES - expected) ** 2).sum(1)
        np.testing.assert_allclose(trace[index], rho[index] @ squares, rtol=1e-12)
    sure = tree_posterior.leaf_moments(LEAVES, np.eye(8))
    np.testing.assert_array_equal(sure[0], LEAVES)
    np.testing.assert_allclose(sure[1], 0, atol=1e-15)


def test_powers_are_those_of_the_moments() -> None:
    """Level by level, and in blocks, as by the table of leaves."""
    truth, draws = contexts(30_000, 2, 4)
    found = tree_posterior.powers(ROWS @ LEAVES.T, STEPS, TAU, truth, draws)
    phi = LEAVES[truth] @ ROWS.T + TAU * draws.T
    mean, trace = tree_posterior.leaf_moments(
        LEAVES, tree_posterior.leaf_posterior(LEAVES, ROWS, phi, TAU)
    )
    np.testing.assert_allclose(found, (mean**2).sum(1), rtol=1e-10)
    np.testing.assert_allclose(1 - found, trace, atol=1e-12)
    # A tree is no Gaussian: what is left depends on what was read.
    assert trace.std() > 0.1


def test_gradient_is_a_finite_difference() -> None:
    truth, draws = contexts(20_000, 2, 5)
    read = ROWS @ LEAVES.T
    found = tree_posterior.power_gradient(read, STEPS, TAU, truth, draws)
    for seed in range(3):
        along = np.random.default_rng(seed).standard_normal(read.shape)
        ends = [
            tree_posterior.powers(read + s * along, STEPS, TAU, truth, draws).mean()
            for s in (1e-5, -1e-5)
        ]
        np.testing.assert_allclose((found * along).sum(), (ends[0] - ends[1]) / 2e-5, rtol=1e-6)


def test_mmse_is_the_error_of_the_posterior_mean() -> None:
    """Simulated from θ and ξ in all covariates; another estimate does worse."""
    n, rng = 100_000, np.random.default_rng(6)
    theta = LEAVES[rng.integers(0, 8, n)]
    phi = (theta + TAU * rng.standard_normal(theta.shape)) @ W.T
    mean = tree_posterior.leaf_moments(LEAVES, tree_posterior.leaf_posterior(LEAVES, W, phi, TAU))[
        0
    ]
    squares = ((theta - mean) ** 2).sum(1)
    found, error = loss(W, TAU)
    assert abs(squares.mean() - found) < 4 * np.hypot(squares.std() / np.sqrt(n), error)
    linear = phi @ np.linalg.lstsq(phi, theta)[0]
    assert ((theta - linear) ** 2).sum(1).mean() > squares.mean() + 0.01
    best = measurement.posterior_covariance(priors.tree_covariance(DEPTH, ALPHA), W, TAU)
    assert found < np.trace(best)


def test_the_standard_error_is_that_of_repeats() -> None:
    several = [loss(ROWS, TAU, n_draws=20, seed=seed) for seed in range(100)]
    values, errors = np.array(several).T
    assert values.std() == pytest.approx(errors.mean(), rel=0.3)
    assert loss(ROWS, TAU, seed=1) == loss(ROWS, TAU, seed=1)


def test_draws_do_not_depend_on_how_many_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = loss(ROWS, TAU, n_draws=50)
    monkeypatch.setattr(tree_posterior, "_BLOCK", 24)
    np.testing.assert_allclose(loss(ROWS, TAU, n_draws=50), expected, rtol=1e-10)


def test_symmetric_axes_by_draws_and_by_integral() -> None:
    axes = priors.symmetric_axes(DEPTH)
    for count in range(DEPTH + 1):
        found, error = loss(axes[:count], TAU)
        expected = strategies.symmetric_loss(DEPTH, ALPHA, count, TAU)
        assert abs(found - expected) <= 4 * error + 1e-12


def test_all_first_nodes_with_the_full_posterior() -> None:
    """CHECKED.md 2.4: the posterior beats the linear estimate from the same numbers."""
    rng = np.random.default_rng(0)
    for count, expected in ((1, 0.49804), (2, 0.37255), (8, 0.11394)):
        rows = np.eye(255)[:count]
        found, error = tree_posterior.tree_mmse(8, 0.5, rows, 0.1, n_draws=4, rng=rng)
        assert abs(found - expected) < 4 * error + 1e-5
        linear = measurement.gauss_pc_loss(priors.tree_variances(8, 0.5), count, 0.1)
        assert found < linear - 0.009


def test_without_noise_the_nearest_leaves_are_alike() -> None:
    found = tree_posterior.leaf_posterior(LEAVES, np.eye(7)[:1], np.array([[0.1], [-5]]), 0)
    np.testing.assert_allclose(found, [[0, 0, 0, 0, 0.25, 0.25, 0.25, 0.25], [0.25] * 4 + [0] * 4])
    small = tree_posterior.leaf_posterior(LEAVES, np.eye(7)[:1], np.array([[0.1], [-5]]), 1e-3)
    np.testing.assert_allclose(found, small, atol=1e-12)
    assert loss(np.eye(7)[:1], 0) == (pytest.approx(1 - STEPS[0] ** 2), 0)
    assert loss(priors.symmetric_axes(DEPTH), 0) == (0, 0)


def test_nothing_and_everything_measured() -> None:
    assert loss(np.zeros((0, 7)), TAU)[0] == pytest.approx(1, abs=1e-14)
    full, _ = loss(np.eye(7), 1e-3)
    assert full == pytest.approx(0, abs=1e-12)
    one = tree_posterior.tree_mmse(
        1, 0.5, np.eye(1), 0.5, n_draws=20_000, rng=np.random.default_rng(0)
    )
    z = np.linspace(-12, 12, 4001)
    expected = 1 - np.average(np.tanh(4 + 2 * z) ** 2, weights=np.exp(-(z**2) / 2))
    assert abs(one[0] - expected) < 4 * one[1]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: loss(W[:, :6], TAU), "a column for every"),
        (lambda: loss(W[None], TAU), r"accepted: \(channel, 7\)"),
        (lambda: loss(W, -1), "tau"),
        (lambda: loss(W, TAU, n_draws=1), "n_draws"),
        (lambda: tree_posterior.leaf_posterior(LEAVES, W, np.zeros((4, 3)), TAU), "phi has shape"),
        (lambda: tree_posterior.leaf_posterior(LEAVES, W, np.float64(1), TAU), "phi has shape"),
        (lambda: tree_posterior.leaf_posterior(LEAVES[0], W, np.zeros(2), TAU), "leaves have"),
        (lambda: tree_posterior.leaf_moments(LEAVES, np.ones(7)), "weights have shape"),
    ],
)
def test_refused(wrong: Callable[[], object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        wrong()
