import json

import numpy as np
import pytest
import torch

from mechicl import analyses
from mechicl.models.base import get as get_model
from mechicl.tasks import get as get_task
from tests import trajectories

SIGMA = 0.5 ** abs(np.arange(5)[:, None] - np.arange(5))
RIDGE = (5 + 5 * 0.1) / 40
KNOWN = {
    "identity": np.eye(5),
    "inverse_covariance": np.linalg.inv(SIGMA),
    "plain_optimum": np.linalg.inv((1 + 1 / 40) * SIGMA + RIDGE * np.eye(5)),
    "debiased_optimum": np.linalg.inv(SIGMA + RIDGE * np.eye(5)),
}
CODES = dict(zip(KNOWN, range(4), strict=True))


def pair(matrix: np.ndarray, gamma: float = 0.1, mu: float = 5.0, free: float = 1.0, **settings):
    """Two heads (5.3) of opposite sign over covariates of covariance Σ: P = 2γμ·matrix.

    Entries marked * are of size `free`; a change of basis leaves their rounding in the others.
    """
    d = len(matrix)
    kq, ov = free * np.random.default_rng(2).normal(size=(2, 1, 1, 2, d + 1, d + 1))
    kq[..., :d, :d] = gamma * matrix * np.array([1, -1])[:, None, None]
    kq[..., d, :d], ov[..., d, :d] = 0.0, 0.0
    ov[..., d, d] = mu * np.array([1, -1])
    settings = {"covariance": SIGMA, "isotropic": 0} | settings
    return trajectories.from_circuits(kq, ov, **settings)


def measure(trajectory):
    return analyses.get("preconditioner")(trajectory)


def sine(one: np.ndarray, two: np.ndarray) -> float:
    """Sine of the angle, by least squares over the factor."""
    column = two.reshape(-1, 1)
    (factor,) = np.linalg.lstsq(column, one.ravel(), rcond=None)[0]
    return np.linalg.norm(one - factor * two) / np.linalg.norm(one)


def test_the_references_have_their_golden_values():
    """CHECKED.md 1.8, computed apart from this library."""
    result = measure(pair(np.eye(5)))
    plain = result["plain_optimum"].values
    np.testing.assert_allclose(plain[0, :3], [1.06886374, -0.45588708, -0.03350061], atol=5e-9)
    np.testing.assert_allclose(plain[[1, 2], [1, 2]], [1.26330667, 1.26435098], atol=5e-9)
    for name, matrix in list(KNOWN.items())[1:]:
        assert result[name].dims == ("covariate", "covariate_other")
        np.testing.assert_allclose(result[name].values, matrix, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("name", KNOWN)
def test_a_pair_that_has_a_reference_is_at_no_distance_from_it_and_from_it_alone(name):
    """P = 2γμ·M = M, so the other distances are those between the references."""
    result = measure(pair(KNOWN[name]))
    np.testing.assert_allclose(result["preconditioner"].values[0, 0], KNOWN[name], atol=1e-12)
    for other, matrix in KNOWN.items():
        found = result[f"distance_{other}"].values
        np.testing.assert_allclose(found, sine(KNOWN[name], matrix), atol=1e-12)
        assert (found < 1e-12) == (other == name)
        if other != "identity":
            error = np.linalg.norm(KNOWN[name] - matrix) / np.linalg.norm(matrix)
            np.testing.assert_allclose(result[f"error_{other}"].values, error, atol=1e-12)
    assert result["nearest"].values == CODES[name]
    assert result["holds"].values == (name != "inverse_covariance")
    best = KNOWN["debiased_optimum"]
    expected = np.linalg.lstsq(best.reshape(-1, 1), KNOWN[name].ravel(), rcond=None)[0][0]
    np.testing.assert_allclose(result["eta"].values, expected, rtol=1e-11)


def test_the_verdict_is_about_the_plain_optimum():
    """Drawn from Σ⁻¹ towards I, some are nearer to Σ̃⁻¹ than to Σ⁻¹, but not to the other."""
    counted = {True: 0, False: 0}
    for part in np.linspace(0.4, 0.6, 21):
        matrix = np.linalg.inv(SIGMA + part * RIDGE * np.eye(5))
        to_sigma, to_plain, to_debiased = (sine(matrix, KNOWN[name]) for name in list(KNOWN)[1:])
        holds = measure(pair(matrix))["holds"].values
        assert holds == (to_plain < to_sigma)
        counted[to_plain < to_sigma < to_debiased] += 1
    assert counted[True] >= 1


def test_scale_moves_eta_and_errors_but_no_distance():
    best = KNOWN["debiased_optimum"]
    for factor in (0.3, 1.0, -2.0):
        result = measure(pair(best, mu=5.0 * factor))
        np.testing.assert_allclose(result["eta"].values, factor, rtol=1e-11)
        np.testing.assert_allclose(
            result["error_debiased_optimum"].values, abs(factor - 1), atol=1e-12
        )
        np.testing.assert_allclose(result["distance_debiased_optimum"].values, 0, atol=1e-12)
        assert result["nearest"].values == 3


def test_slope_and_every_head_count():
    rng = np.random.default_rng(4)
    kq, ov = rng.normal(size=(2, 2, 3, 3, 6, 6))
    trajectory = trajectories.from_circuits(kq, ov, slope=1.6, score_scale=0.4, covariance=SIGMA)
    expected = 1.6 * np.einsum("...h,...hij->...ij", ov[..., 5, 5], kq[..., :5, :5])
    result = measure(trajectory)
    assert result["preconditioner"].dims == ("seed", "step", "covariate", "covariate_other")
    np.testing.assert_allclose(result["preconditioner"].values, expected, rtol=1e-10)
    for index in np.ndindex(2, 3):
        for name, matrix in KNOWN.items():
            np.testing.assert_allclose(
                result[f"distance_{name}"].values[index], sine(expected[index], matrix), rtol=1e-9
            )


MODELS = {
    "softmax": ("softmax_attention", {}, 2),
    "one head": ("softmax_attention", {}, 1),
    "square": ("normalized_attention", {"activation": "square", "coefficient": 0.8}, 2),
    "tanh": ("normalized_attention", {"activation": "one_plus_tanh"}, 3),
    "linear": ("linear_attention", {}, 2),
}


@pytest.mark.parametrize("kind", MODELS)
def test_small_scores_make_the_step_that_p_says(kind):
    """Halving the scores leaves a quarter of the difference, or none where attention is linear."""
    name, settings, heads = MODELS[kind]
    d, length = 3, 7
    task = get_task("linear_regression")(d=d, n_context=length)
    model = get_model(name)(n_heads=heads, **settings)
    rng = np.random.default_rng(5)
    kq, ov = rng.normal(size=(2, 1, 1, heads, d + 1, d + 1))
    kq[..., d, :d], ov[..., d, :d] = 0.0, 0.0
    x, y = rng.normal(size=(4, length, d)), rng.normal(size=(4, length))
    query = rng.normal(size=(4, d))
    inputs = np.zeros((4, length + 1, d + 1))
    inputs[:, :-1, :d], inputs[:, :-1, d], inputs[:, -1, :d] = x, y, query
    gaps = []
    for scale in (0.02, 0.01):
        trajectory = trajectories.from_circuits(
            scale * kq, ov, n_context=length, slope=model.slope, covariance=SIGMA[:d, :d]
        )
        p = measure(trajectory)["preconditioner"].values[0, 0]
        weights = {
            w: torch.tensor(trajectory[w].values[0, 0].astype(float)) for w in trajectories.WEIGHTS
        }
        predicted = model.predict(task, weights, torch.tensor(inputs)).numpy()
        linear = kind == "linear"
        centred = x if linear else x - x.mean(1, keepdims=True)
        step = np.einsum("bl,bli,ij,bj->b", y, centred, p, query) / length
        gap = predicted - step - (0 if linear else ov[0, 0, :, d, d].sum() * y.mean(1))
        gaps.append(np.abs(gap).max())
        assert gaps[-1] < 0.1 * np.abs(step).max()
    if kind == "linear":
        assert max(gaps) < 1e-12
    else:
        assert 3 < gaps[0] / gaps[1] < 5


@pytest.mark.parametrize("covariance", [np.eye(5), 2.5 * np.eye(5)])
def test_where_covariates_are_isotropic_nothing_is_nearest(covariance):
    result = measure(pair(np.eye(5), covariance=covariance))
    assert np.isnan(result["nearest"].values) and np.isnan(result["holds"].values)
    for name in KNOWN:
        np.testing.assert_allclose(result[f"distance_{name}"].values, 0, atol=1e-12)
    scale = covariance[0, 0]
    np.testing.assert_allclose(
        result["eta"].values, scale + (5 * scale + 0.5) / 40, rtol=1e-12
    )  # 1/η*, of P = I
    assert json.loads(result.attrs["n_undefined"])["references_are_the_same"] == 1
    barely = np.eye(5)
    barely[0, 0] = 1.001
    assert np.isfinite(measure(pair(np.eye(5), covariance=barely))["holds"].values)


def test_one_covariate():
    result = measure(pair(np.eye(1), covariance=[[2.0]]))
    np.testing.assert_allclose(result["eta"].values, 2.0 + (2.0 + 0.1) / 40, rtol=1e-12)
    assert json.loads(result.attrs["n_undefined"])["references_are_the_same"] == 1


def test_a_model_of_zeros_has_no_direction():
    result = measure(pair(np.zeros((5, 5)), mu=0.0, free=0.0))
    assert json.loads(result.attrs["n_undefined"])["zero_preconditioner"] == 1
    for name in KNOWN:
        assert np.isnan(result[f"distance_{name}"].values)
    assert np.isnan(result["nearest"].values) and np.isnan(result["holds"].values)
    assert result["eta"].values == 0 and result["error_plain_optimum"].values == 1


@pytest.mark.parametrize("scale", [1e-170, 1e170])
def test_a_covariance_whose_square_is_out_of_range(scale):
    """Without noise the optimum of scale·Σ is that of Σ over scale, and so is η of a given P."""
    best = np.linalg.inv(SIGMA + 5 / 40 * np.eye(5))
    result = measure(pair(best, covariance=scale * SIGMA, noise_variance=0.0))
    np.testing.assert_allclose(result["eta"].values / scale, 1, rtol=1e-9)


@pytest.mark.parametrize("scale", [1e-200, 1e-90, 1e90])
def test_squares_out_of_range_do_not_matter(scale):
    """Entries of P go with the square of `scale`: beyond 1e154 their own square overflows."""
    best, mu = KNOWN["debiased_optimum"], max(scale, 1.0)
    result = measure(pair(best, gamma=scale, mu=mu, free=0.0))
    assert result["nearest"].values == 3
    np.testing.assert_allclose(result["distance_debiased_optimum"].values, 0, atol=1e-9)
    assert np.isfinite(result["error_debiased_optimum"].values)
