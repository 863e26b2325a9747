"""Contexts follow their law, as tokens and as moments; references are exact."""

from itertools import combinations_with_replacement

import numpy as np
import pytest
import torch

from mechicl.errors import InputError
from mechicl.tasks.latent_regression import LatentRegression
from mechicl.tasks.latents import GaussianPrior, TreePrior
from mechicl.training import load_recipe

TREE = {"kind": "tree", "depth": 2, "alpha": 0.6}
GAUSSIAN = {"kind": "gaussian", "d": 4, "alpha": 0.5, "rotation": 1}
PRIORS = {"tree": TREE, "gaussian": GAUSSIAN}
every_prior = pytest.mark.parametrize("prior", PRIORS)


def task(prior: str = "tree", **settings: object) -> LatentRegression:
    given = {"prior": PRIORS[prior], "n_context": 9, "n_queries": 3, "tau": 0.3}
    return LatentRegression.model_validate(given | settings)


def drawn(chosen: LatentRegression, n: int, seed: int = 0) -> dict[str, np.ndarray]:
    sample = chosen.sample(n, seed=seed)
    return {str(name): value.values.astype(float) for name, value in sample.items()}


@every_prior
def test_tokens_and_queries_are_what_the_prior_says(prior: str) -> None:
    chosen = task(prior, context="tokens", n_context=50)
    found = drawn(chosen, 4000)
    x, y = found["inputs"][:, :50, :-1], found["inputs"][:, :50, -1]
    noise = y - np.einsum("bnk,bk->bn", x, found["theta"])
    assert noise.var() == pytest.approx(50 * 0.3**2, rel=0.02)
    assert abs(noise.mean()) < 0.02
    np.testing.assert_allclose(np.cov(x.reshape(-1, chosen.d).T), np.eye(chosen.d), atol=0.02)
    queries = found["inputs"][:, 50:]
    assert (queries[..., -1] == 0).all()
    np.testing.assert_allclose(
        found["targets"], np.einsum("bqk,bk->bq", queries[..., :-1], found["theta"]), atol=1e-5
    )
    assert abs(np.corrcoef(x[:, 0, 0], queries[:, 0, 0])[0, 1]) < 0.06


def test_leaves_are_uniform_and_named() -> None:
    found = drawn(task(), 40_000)
    counts = np.bincount(found["leaf"].astype(int), minlength=4)
    assert counts.shape == (4,)
    assert ((counts - 10_000) ** 2 / 10_000).sum() < 16.3  # chi square of 3, 1 in 1,000
    leaves = task().prior.leaves
    np.testing.assert_allclose(found["theta"], leaves[found["leaf"].astype(int)], atol=1e-7)


def test_gaussian_coefficients_have_their_covariance() -> None:
    theta = drawn(task("gaussian"), 100_000)["theta"]
    prior = task("gaussian").prior
    covariance = prior.constants()["prior_covariance"][1]
    np.testing.assert_allclose(np.cov(theta.T), covariance, atol=0.01)
    np.testing.assert_allclose(np.linalg.eigvalsh(covariance), 0.5 ** np.arange(4, 0, -1.0))
    assert abs(covariance - np.diag(np.diag(covariance))).max() > 0.05, "it is rotated"


def moments_of_moments(chosen: LatentRegression, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean and covariance of G, distinct entries, for the context of one θ."""
    found = drawn(chosen, n)
    same = found["leaf"] == 1
    g = chosen.moments(found["inputs"][same])
    pairs = list(combinations_with_replacement(range(chosen.d_model), 2))
    entries = np.stack([g[:, i, j] for i, j in pairs], -1)
    return entries, np.array(pairs)


@pytest.mark.parametrize("context", ["tokens", "moments"])
@pytest.mark.parametrize("n_context", [4, 9])
def test_moments_follow_the_wishart_law(context: str, n_context: int) -> None:
    """Mean S and covariance (S_ik S_jl + S_il S_jk)/N, S = [[I, θ], [θᵀ, |θ|² + σ²]]."""
    chosen = task(context=context, n_context=n_context)
    entries, pairs = moments_of_moments(chosen, 120_000)
    theta = chosen.prior.leaves[1]
    s = np.eye(chosen.d_model)
    s[:-1, -1] = s[-1, :-1] = theta
    s[-1, -1] = theta @ theta + chosen.noise_variance
    i, j = pairs.T
    covariance = (s[np.ix_(i, i)] * s[np.ix_(j, j)] + s[np.ix_(i, j)] * s[np.ix_(j, i)]) / n_context
    spread = np.sqrt(np.diag(covariance))
    assert (abs(entries.mean(0) - s[i, j]) / spread * len(entries) ** 0.5 < 4.5).all()
    scale = np.outer(spread, spread)
    np.testing.assert_allclose(np.cov(entries.T) / scale, covariance / scale, atol=0.06)
    third = ((entries - entries.mean(0)) ** 3).mean(0) / spread**3
    squares = pairs[:, 0] == pairs[:, 1]  # χ² variables: skewness √(8/N)
    np.testing.assert_allclose(third[squares], (8 / n_context) ** 0.5, rtol=0.12)


def test_both_contexts_have_one_distribution() -> None:
    """Two-sample Kolmogorov-Smirnov on every entry of G and its determinant; and a control."""
    from scipy import stats

    def statistics(context: str, tau: float, seed: int) -> np.ndarray:
        chosen = task(context=context, tau=tau)
        g = chosen.moments(drawn(chosen, 20_000, seed)["inputs"])
        upper = g[:, *np.triu_indices(chosen.d_model)]
        return np.column_stack([upper, np.linalg.det(g)])

    one, other = statistics("tokens", 0.3, 1), statistics("moments", 0.3, 2)
    values = [stats.ks_2samp(a, b).pvalue for a, b in zip(one.T, other.T, strict=True)]
    assert len(values) == 11
    assert min(values) > 1e-4
    control = statistics("moments", 0.35, 2)
    assert stats.ks_2samp(one[:, -1], control[:, -1]).pvalue < 1e-6


@every_prior
@pytest.mark.parametrize("context", ["tokens", "moments"])
def test_the_posterior_mean_has_the_least_loss(prior: str, context: str) -> None:
    chosen = task(prior, context=context, n_context=20, tau=0.4)
    found = drawn(chosen, 4000)
    losses = {
        name: float(((predicted - found["targets"]) ** 2).mean())
        for name, predicted in chosen.references(found["inputs"]).items()
    }
    assert len(losses) == 3
    assert min(losses, key=losses.__getitem__) == "posterior_mean"
    # Its loss is what it says of itself: E|θ|² − E|θ̂|², by the projection theorem.
    queries = found["inputs"][:, -3:, :-1]
    predicted = chosen.references(found["inputs"])["posterior_mean"]
    gap = (found["targets"] ** 2 - predicted**2).mean()
    error = (found["targets"] ** 2 - predicted**2).std() / 4000**0.5
    assert abs(losses["posterior_mean"] - gap) < 4 * error
    assert queries.shape == (4000, 3, chosen.d)


def test_the_moment_measures_theta_with_the_noise_of_a_finite_context() -> None:
    """Variance τ² + |θ|²/N on every axis, and θθᵀ/N besides (CHECKED 2.1)."""
    chosen = task(n_context=6, tau=0.2)
    found = drawn(chosen, 60_000)
    error = chosen.moments(found["inputs"])[:, :-1, -1] - found["theta"]
    along = np.einsum("bk,bk->b", error, found["theta"]) ** 2
    assert along.mean() == pytest.approx(0.2**2 + 2 / 6, rel=0.03)
    total = (error**2).sum(-1).mean()
    assert total == pytest.approx(chosen.d * (0.2**2 + 1 / 6) + 1 / 6, rel=0.03)


def test_another_length_keeps_the_noise_of_an_example() -> None:
    chosen = task(n_context=16, tau=0.1)
    longer = chosen.at_length(64)
    assert longer.noise_variance == pytest.approx(chosen.noise_variance)
    assert (longer.n_context, longer.tau) == (64, pytest.approx(0.05))
    assert longer.sample(2, seed=0)["inputs"].shape == chosen.sample(2, seed=0)["inputs"].shape
    with pytest.raises(InputError, match="below K \\+ 1 = 4"):
        chosen.at_length(3)
    with pytest.raises(InputError, match="n_context is an integer from 1"):
        chosen.at_length(0)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"n_context": 3}, "n_context = 3 is below K \\+ 1 = 4"),
        ({"prior": {"kind": "tree", "depth": 2, "alpha": 1.0}}, "less than 1"),
        ({"prior": {"kind": "tree", "depth": 0}}, "greater than or equal to 1"),
        ({"prior": {"kind": "tree", "d": 3}}, "there is no setting"),
        ({"prior": {"kind": "gaussian", "d": 3, "alpha": 1.1}}, "less than or equal to 1"),
        ({"prior": {"kind": "bush"}}, "must be {kind: tree, depth, alpha} or"),
        ({"prior": "tree"}, "must be {kind: tree, depth, alpha} or"),
        ({"prior": {"kind": ["tree"]}}, "must be {kind: tree, depth, alpha} or"),
        ({"tau": -0.1}, "greater than or equal to 0"),
        ({"tau": 1e300}, "larger than single precision holds; accepted: below 6.1e\\+18"),
        ({"tau": 7e18}, "larger than single precision"),
        ({"n_queries": 0}, "greater than or equal to 1"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, object], said: str) -> None:
    base = {"name": "latent_regression", "prior": TREE, "n_context": 9}
    recipe = {"task": base | settings, "model": {"name": "pooled_attention"}}
    with pytest.raises(InputError, match=said):
        load_recipe("he2025-two-head", recipe)


@pytest.mark.parametrize(
    "prior", [TreePrior(depth=1), GaussianPrior(d=1), GaussianPrior(d=1, rotation=None)]
)
def test_the_smallest_priors_work(prior: TreePrior | GaussianPrior) -> None:
    chosen = LatentRegression(prior=prior, n_context=2, n_queries=1, tau=0.0)
    sample = chosen.sample(50, seed=0)
    assert sample["inputs"].shape == (50, 3, 2)
    found = chosen.references(sample["inputs"].values)
    np.testing.assert_allclose(found["posterior_mean"], sample["targets"], atol=1e-3)
    if isinstance(prior, TreePrior):
        np.testing.assert_allclose(abs(sample["theta"]), 1, atol=1e-6)


def test_many_models_have_the_prompts_of_one() -> None:
    chosen = task()
    normals = torch.randn(2, 5, chosen.n_normals, generator=torch.Generator().manual_seed(0))
    together = chosen.prompts(chosen.examples(normals))
    for number in range(2):
        alone = chosen.prompts(chosen.examples(normals[number]))
        torch.testing.assert_close(together.inputs[number], alone.inputs)
        torch.testing.assert_close(together.targets[number], alone.targets)
    for name, (dims, value) in chosen.latents(normals).items():
        assert value.shape == (2, 5, *[chosen.d] * len(dims)), name


@pytest.mark.parametrize("n_context", [2, 3, 4, 30])
def test_least_squares_are_those_of_numpy(n_context: int) -> None:
    """Of least norm where a context of fewer tokens than covariates leaves a choice."""
    chosen = task(context="tokens", n_context=n_context)
    inputs = drawn(chosen, 20)["inputs"]
    found = chosen.references(inputs)["least_squares"]
    for prompt, predicted in zip(inputs, found, strict=True):
        x, y = prompt[:n_context, :-1], prompt[:n_context, -1]
        theta = np.linalg.lstsq(x, y, rcond=None)[0]
        np.testing.assert_allclose(predicted, prompt[n_context:, :-1] @ theta, rtol=1e-3, atol=1e-4)
