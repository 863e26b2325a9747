"""Posterior means under a tree and a Gaussian prior, against sums and solves over tokens."""

import numpy as np
import pytest

from mechicl.errors import InputError
from mechicl.theory import latent_bayes, priors

LEAVES = priors.tree_leaves(3, 0.6)


def contexts(
    n: int, theta: np.ndarray, noise: float, seed: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draw 5 contexts of `n` tokens: x, y, and their moments."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((5, n, len(theta)))
    y = x @ theta + noise * rng.standard_normal((5, n))
    z = np.concatenate([x, y[..., None]], -1)
    return x, y, np.swapaxes(z, -1, -2) @ z / n


@pytest.mark.parametrize("noise", [0.3, 2.0, 20.0])
def test_tree_mean_sums_likelihoods_of_tokens(noise: float) -> None:
    x, y, moments = contexts(12, LEAVES[5], noise)
    found = latent_bayes.tree_mean(moments, LEAVES, n_context=12, noise_variance=noise**2)
    for number in range(5):
        logs = [-((y[number] - x[number] @ leaf) ** 2).sum() / (2 * noise**2) for leaf in LEAVES]
        weights = np.exp(np.array(logs) - max(logs))
        np.testing.assert_allclose(found[number], weights / weights.sum() @ LEAVES, atol=1e-12)
    other = latent_bayes.tree_mean(moments, LEAVES, n_context=6, noise_variance=noise**2)
    assert abs(other - found).max() > 1e-6, "N tells how sure the context is"


@pytest.mark.parametrize("noise", [0.05, 1.0])
@pytest.mark.parametrize("n", [3, 20])
def test_gaussian_mean_is_ridge_regression(n: int, noise: float) -> None:
    covariance = priors.gaussian_covariance(6, 0.7, 3)
    x, y, moments = contexts(n, np.linalg.cholesky(covariance) @ np.ones(6), noise)
    found = latent_bayes.gaussian_mean(moments, covariance, n_context=n, noise_variance=noise**2)
    for number in range(5):
        penalty = noise**2 * np.linalg.inv(covariance)
        expected = np.linalg.solve(x[number].T @ x[number] + penalty, x[number].T @ y[number])
        np.testing.assert_allclose(found[number], expected, atol=1e-9)


def test_without_noise_a_context_leaves_what_it_does_not_say() -> None:
    x, y, moments = contexts(4, LEAVES[2], 0.0)
    covariance = priors.gaussian_covariance(7, 0.7, None)
    found = latent_bayes.gaussian_mean(moments, covariance, n_context=4, noise_variance=0)
    for number in range(5):
        gram = x[number] @ covariance @ x[number].T
        expected = covariance @ x[number].T @ np.linalg.solve(gram, y[number])
        np.testing.assert_allclose(found[number], expected, atol=1e-8)
    np.testing.assert_allclose(
        latent_bayes.tree_mean(moments, LEAVES, n_context=4, noise_variance=0),
        np.broadcast_to(LEAVES[2], (5, 7)),
    )


def test_leaves_that_fit_alike_share_the_weight() -> None:
    """One token with x on the root alone tells the first spin and nothing else."""
    x = np.zeros(7)
    x[0] = 1.0
    z = np.append(x, LEAVES[6, 0])
    found = latent_bayes.tree_mean(np.outer(z, z), LEAVES, n_context=1, noise_variance=0)
    np.testing.assert_allclose(found, LEAVES[4:].mean(0), atol=1e-15)


@pytest.mark.parametrize(
    ("moments", "settings", "said"),
    [
        (np.eye(7), {}, "leaves are of 7 covariates, moments of 6"),
        (np.ones((3, 8)), {}, r"moments have shape \(3, 8\)"),
        (np.ones((1, 1)), {}, r"moments have shape \(1, 1\)"),
        (np.eye(8), {"n_context": 0}, "n_context is an integer from 1; given 0"),
        (np.eye(8), {"noise_variance": -1}, "noise_variance = -1; accepted"),
    ],
)
def test_what_is_out_of_range_is_refused(moments: np.ndarray, settings: dict, said: str) -> None:
    with pytest.raises(InputError, match=said):
        latent_bayes.tree_mean(
            moments, LEAVES, **({"n_context": 4, "noise_variance": 1.0} | settings)
        )
    with pytest.raises(InputError, match="covariance are of 2 covariates, moments of 3"):
        latent_bayes.gaussian_mean(np.eye(4), np.eye(2), n_context=4, noise_variance=1.0)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_a_context_that_is_not_finite_has_no_mean_and_leaves_the_others(
    value: float, noise: float
) -> None:
    _, _, moments = contexts(12, LEAVES[5], 0.3)
    spoilt = moments.copy()
    spoilt[1, 2, 0] = value
    settings = {"n_context": 12, "noise_variance": noise**2}
    for found, whole in (
        (latent_bayes.tree_mean(each, LEAVES, **settings) for each in (spoilt, moments)),
        (latent_bayes.gaussian_mean(each, np.eye(7), **settings) for each in (spoilt, moments)),
    ):
        assert np.isnan(found[1]).all()
        np.testing.assert_array_equal(np.delete(found, 1, 0), np.delete(whole, 1, 0))


def test_what_is_no_prior_is_refused() -> None:
    settings = {"n_context": 4, "noise_variance": 1.0}
    for leaves, said in (
        (np.zeros((0, 7)), r"leaves have shape \(0, 7\)"),
        (np.zeros(7), r"leaves have shape \(7,\)"),
        (np.full((2, 7), np.nan), "14 numbers that are not finite"),
    ):
        with pytest.raises(InputError, match=said):
            latent_bayes.tree_mean(np.eye(8), leaves, **settings)
    for covariance, said in (
        (-np.eye(7), "an eigenvalue of -1"),
        (np.triu(np.ones((7, 7))), "symmetric"),
        (np.ones((6, 7)), "symmetric"),
        (np.full((7, 7), np.nan), "49 numbers that are not finite"),
    ):
        with pytest.raises(InputError, match=said):
            latent_bayes.gaussian_mean(np.eye(8), covariance, **settings)
