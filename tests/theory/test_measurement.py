"""Linear measurements against simulation, other forms of the same law, and published numbers."""

from collections.abc import Callable

import numpy as np
import pytest

from mechicl.errors import InputError
from mechicl.theory import measurement, priors

RNG = np.random.default_rng(7)
C0 = priors.gaussian_covariance(5, 0.6, rotation=2)
A = RNG.standard_normal((3, 5))
TREE = priors.tree_covariance(8, 0.5)


def drawn(covariance: np.ndarray, n: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.multivariate_normal(np.zeros(len(covariance)), covariance, n, method="cholesky")


def left_over(theta: np.ndarray, phi: np.ndarray) -> np.ndarray:
    return theta - phi @ np.linalg.lstsq(phi, theta)[0]


def test_posterior_covariance_is_that_of_a_simulation_whatever_was_read() -> None:
    """(15); the trace is the same where |Φ| is low and where it is high."""
    n, tau = 200_000, 0.3
    theta = drawn(C0, n, 0)
    phi = (theta + tau * np.random.default_rng(1).standard_normal(theta.shape)) @ A.T
    rest = left_over(theta, phi)
    expected = measurement.posterior_covariance(C0, A, tau)
    np.testing.assert_allclose(rest.T @ rest / n, expected, atol=2e-3)
    size, squares = np.linalg.norm(phi, axis=1), (rest**2).sum(1)
    for half in (size < np.median(size), size > np.median(size)):
        error = squares[half].std() / np.sqrt(half.sum())
        assert abs(squares[half].mean() - np.trace(expected)) < 4 * error < 0.01
    assert np.trace(expected) < 0.8 * np.trace(C0)


def test_posterior_covariance_in_its_other_form() -> None:
    """Precisions add: (C₀⁻¹ + AᵀA/τ²)⁻¹ for orthonormal rows."""
    tau, rows = 0.2, np.linalg.qr(A.T)[0].T
    expected = np.linalg.inv(np.linalg.inv(C0) + rows.T @ rows / tau**2)
    np.testing.assert_allclose(
        measurement.posterior_covariance(C0, rows, tau), expected, atol=1e-14
    )


def test_only_the_span_of_the_rows_counts() -> None:
    expected = measurement.posterior_covariance(C0, A, 0.2)
    mixed = RNG.standard_normal((3, 3)) @ A
    redundant = np.vstack([A, A[0] - 2 * A[1], 1e-3 * A[2], np.zeros(5), A])
    for rows in (mixed, redundant, 1e6 * A):
        found = measurement.posterior_covariance(C0, rows, 0.2)
        np.testing.assert_allclose(found, expected, atol=1e-12)
    batch = measurement.posterior_covariance(C0, np.stack([A, np.tile(A[:1], (3, 1))]), 0.2)
    np.testing.assert_allclose(batch[0], expected, atol=1e-14)
    one = measurement.posterior_covariance(C0, A[:1], 0.2)
    np.testing.assert_allclose(batch[1], one, atol=1e-14)
    np.testing.assert_array_equal(measurement.posterior_covariance(C0, np.zeros((0, 5)), 0.2), C0)
    np.testing.assert_array_equal(measurement.posterior_covariance(C0, np.zeros((2, 5)), 0.2), C0)
    # Another span must differ.
    other = measurement.posterior_covariance(C0, RNG.standard_normal((3, 5)), 0.2)
    assert abs(other - expected).max() > 0.01


def test_without_noise_what_is_read_is_known() -> None:
    found = measurement.posterior_covariance(C0, A, 0)
    np.testing.assert_allclose(A @ found, 0, atol=1e-13)
    full = measurement.posterior_covariance(C0, np.eye(5), 0)
    np.testing.assert_allclose(full, 0, atol=1e-13)
    lacking = np.diag([1.0, 0, 0.5])
    np.testing.assert_allclose(measurement.posterior_covariance(lacking, np.eye(3), 0), 0)


def test_no_measurement_beats_the_principal_axes_of_a_gaussian() -> None:
    """(34) is the trace of (15) for them, and the least of many."""
    for covariance, tau in ((C0, 0.2), (priors.tree_covariance(3, 0.5), 0.3)):
        for count in range(len(covariance) + 1):
            rows = measurement.principal_axes(covariance, count)
            least = measurement.gauss_pc_loss(covariance, count, tau)
            at = np.trace(measurement.posterior_covariance(covariance, rows, tau))
            np.testing.assert_allclose(least, at, rtol=1e-12)
            if 0 < count < len(covariance):
                others = RNG.standard_normal((200, count, len(covariance)))
                found = measurement.posterior_covariance(covariance, others, tau)
                assert np.trace(found, axis1=1, axis2=2).min() > least


def test_principal_axes_of_a_tree_are_its_first_nodes() -> None:
    np.testing.assert_array_equal(measurement.principal_axes(TREE, 5), np.eye(255)[:5])


@pytest.mark.parametrize("tau", [0, 0.01, 0.3, 3])
def test_greedy_choice_is_no_better_than_all_at_once(tau: float) -> None:
    """Noise well above the last variances included: an axis is never read twice."""
    for covariance in (C0, np.eye(4), np.diag([0, 1.0, 0]), priors.tree_covariance(3, 0.7)):
        rows = measurement.greedy_axes(covariance, len(covariance), tau)
        np.testing.assert_allclose(rows @ rows.T, np.eye(len(rows)), atol=1e-12)
        for count in range(len(covariance) + 1):
            found = np.trace(measurement.posterior_covariance(covariance, rows[:count], tau))
            expected = measurement.gauss_pc_loss(covariance, count, tau)
            np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-14)


def test_gauss_pc_at_published_size() -> None:
    """CHECKED.md 2.1 and 2.4."""
    expected = [0.5078438882, 0.3916156314, 0.2753873745, 0.2515977639]
    expected += [0.2278081532, 0.2040185426, 0.1802289320, 0.1767813991]
    found = measurement.gauss_pc_loss(TREE, np.arange(1, 9), 0.1)
    np.testing.assert_allclose(found, expected, atol=1e-10)
    six = measurement.gauss_pc_loss(priors.tree_variances(6, 0.5), 6, 0.1)
    np.testing.assert_allclose(six, 0.194017734, atol=1e-9)
    tokens = measurement.gauss_pc_loss(TREE, 8, 0.1, n_context=512)
    np.testing.assert_allclose(tokens, 0.188057, atol=1e-6)
    spectrum = priors.gaussian_spectrum(32, 0.75)
    rotated = priors.gaussian_covariance(32, 0.75, rotation=0)
    for given in (spectrum, spectrum[::-1], rotated):
        limit = measurement.gauss_pc_loss(given, np.array([8, 16]), 0.01)
        np.testing.assert_allclose(limit, [0.3008, 0.03136], atol=5e-5)
        found = measurement.gauss_pc_loss(given, np.array([8, 16]), 0.01, n_context=4096)
        np.testing.assert_allclose(found, [0.3073, 0.04354], atol=5e-5)


def test_gauss_pc_at_its_ends() -> None:
    np.testing.assert_allclose(measurement.gauss_pc_loss(C0, 0, 0.1), np.trace(C0))
    np.testing.assert_allclose(measurement.gauss_pc_loss(C0, 5, 0), 0, atol=1e-15)
    np.testing.assert_allclose(measurement.gauss_pc_loss(C0, 5, 1e9), np.trace(C0))
    np.testing.assert_allclose(measurement.gauss_pc_loss(np.array([1.0, 0]), 2, 0), 0)
    assert measurement.gauss_pc_loss(C0, np.zeros((2, 3), int), 0.1).shape == (2, 3)
    far = measurement.gauss_pc_loss(C0, 3, 0.1, n_context=10**12)
    np.testing.assert_allclose(far, measurement.gauss_pc_loss(C0, 3, 0.1), rtol=1e-10)


def test_finite_context_is_that_of_tokens() -> None:
    """Best linear estimate of θ from (1/N) Σ y x of N tokens, drawn one by one."""
    n, d, tokens, tau = 200_000, 2, 8, 0.2
    rng = np.random.default_rng(3)
    variances = np.array([0.7, 0.2])
    theta = rng.standard_normal((n, d)) * np.sqrt(variances)
    x = rng.standard_normal((n, tokens, d))
    y = np.einsum("ntd,nd->nt", x, theta) + tau * np.sqrt(tokens) * rng.standard_normal((n, tokens))
    moment = np.einsum("nt,ntd->nd", y, x) / tokens
    for count in (1, 2):
        squares = (left_over(theta, moment[:, :count]) ** 2).sum(1)
        expected = measurement.gauss_pc_loss(variances, count, tau, n_context=tokens)
        assert abs(squares.mean() - expected) < 4 * squares.std() / np.sqrt(n)
        limit = measurement.gauss_pc_loss(variances, count, tau)
        assert abs(squares.mean() - limit) > 20 * squares.std() / np.sqrt(n)


def test_context_noise_is_that_of_tokens_across_theta() -> None:
    n, tokens, tau = 100_000, 5, 0.3
    rng = np.random.default_rng(4)
    x = rng.standard_normal((n, tokens, 2))
    y = x[..., 0] + tau * np.sqrt(tokens) * rng.standard_normal((n, tokens))  # θ = e_0
    moment = (y[..., None] * x).mean(1)
    expected = measurement.context_noise(tau, tokens)
    assert expected == pytest.approx(np.sqrt(tau**2 + 1 / tokens), rel=1e-14)
    assert moment[:, 1].std() == pytest.approx(expected, rel=0.01)
    twice = (2 * y[..., None] * x).mean(1)  # of 2θ, and twice the noise
    of_twice = measurement.context_noise(2 * tau, tokens, power=4)
    assert twice[:, 1].std() == pytest.approx(of_twice, rel=0.01)
    # Along θ there is as much again from its own size: what is left out.
    assert moment[:, 0].var() == pytest.approx(expected**2 + 1 / tokens, rel=0.03)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: measurement.posterior_covariance(C0, A[:, :4], 0.1), "a column for every"),
        (lambda: measurement.posterior_covariance(C0, A[0], 0.1), "a column for every"),
        (lambda: measurement.posterior_covariance(C0, A * np.nan, 0.1), "finite"),
        (lambda: measurement.posterior_covariance(C0, A, -1), "tau"),
        (lambda: measurement.posterior_covariance(C0[:3], A, 0.1), "symmetric"),
        (lambda: measurement.posterior_covariance(C0 + np.triu(C0), A, 0.1), "symmetric"),
        (lambda: measurement.posterior_covariance(-C0, A, 0.1), "none below 0"),
        (lambda: measurement.principal_axes(np.diag([1.0, -1]), 1), "none below 0"),
        (lambda: measurement.principal_axes(C0, 6), "at most 5, the number of covariates"),
        (lambda: measurement.greedy_axes(C0, 6, 0.1), "at most 5"),
        (lambda: measurement.gauss_pc_loss(C0, 6, 0.1), "integers from 0 to 5"),
        (lambda: measurement.gauss_pc_loss(C0, -1, 0.1), "integers from 0 to 5"),
        (lambda: measurement.gauss_pc_loss(C0, 2.0, 0.1), "integers"),  # type: ignore[arg-type]
        (lambda: measurement.gauss_pc_loss(np.array([1.0, -1]), 1, 0.1), "from 0 on"),
        (lambda: measurement.gauss_pc_loss(C0, 1, 0.1, n_context=0), "n_context"),
        (lambda: measurement.context_noise(-0.1, 5), "tau"),
        (lambda: measurement.context_noise(0.1, 0), "n_context"),
        (lambda: measurement.context_noise(0.1, 5, power=-1), "power"),
        (lambda: measurement.context_noise(1e200, 5), "whose square is finite"),
        (lambda: measurement.gauss_pc_loss(C0, 1, 1e200), "whose square is finite"),
    ],
)
def test_refused(wrong: Callable[[], object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        wrong()
