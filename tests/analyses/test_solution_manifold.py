import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mechicl import analyses
from tests import trajectories

ETA_STAR = 0.879120879120879121
GOLDEN = {  # CHECKED.md 1.3, computed apart from this library
    0.05: 8.791181117288294,
    0.1: 4.395382988750514,
    0.1267: 3.46885064992963,
    0.2: 2.196028961373636,
    0.5: 0.850187522454168,
}


def measure(omega, mu, *, trajectory_settings=None, **parameters):
    trajectory = trajectories.from_scales(omega, mu, **(trajectory_settings or {}))
    return analyses.get("solution_manifold")(trajectory, **parameters)


@pytest.mark.parametrize(("gamma", "mu_gamma"), GOLDEN.items())
def test_golden_points_of_the_manifold(gamma, mu_gamma):
    result = measure([gamma, -gamma], [mu_gamma, -mu_gamma])
    expected = {
        "gamma": gamma,
        "mu_gamma": mu_gamma,
        "mu_gamma_predicted": mu_gamma,
        "eta": 2 * gamma * mu_gamma,
        "eta_predicted": 2 * gamma * mu_gamma,
        "eta_star": ETA_STAR,
        "eta_error": 2 * gamma * mu_gamma / ETA_STAR - 1,
        "eta_predicted_error": 0,
        "distance": 0,
    }
    for name, value in expected.items():
        np.testing.assert_allclose(result[name].values, value, rtol=1e-11, atol=1e-11)
    assert result["holds"].values == 1


def test_measured_mu_off_by_a_tenth_is_caught():
    """The predicted step size stays within 2 % of η* whatever was learnt; the measured moves."""
    gamma, mu_gamma = 0.1, GOLDEN[0.1]
    for factor in (0.9, 1.1):
        mu = factor * mu_gamma
        result = measure([gamma, -gamma], [mu, -mu])
        assert abs(result["eta_predicted"].values / ETA_STAR - 1) < 0.02
        np.testing.assert_allclose(result["eta_error"].values, factor - 1, atol=1e-3)
        np.testing.assert_allclose(result["eta_predicted_error"].values, factor - 1, rtol=1e-9)
        np.testing.assert_allclose(result["distance"].values, 0.1, rtol=1e-9)
        assert result["holds"].values == 0
        assert measure([gamma, -gamma], [mu, -mu], distance_tolerance=9)["holds"].values == 0


def test_gamma_weighs_heads_by_what_they_write():
    result = measure([0.3, -0.2, 0.1], [1.5, -1.0, 0.5])
    np.testing.assert_allclose(result["gamma"].values, (0.45 + 0.2 + 0.05) / 3.0, rtol=1e-12)
    np.testing.assert_allclose(result["eta"].values, 0.7, rtol=1e-12)
    np.testing.assert_allclose(result["mu_gamma"].values, 1.5, rtol=1e-12)


def test_distance_against_a_projection_by_hand():
    """Heads (+, +, −): half of the missing sum of μ goes to each of two, all of it to the other."""
    omega, mu = np.array([0.12, 0.1, -0.1]), np.array([2.0, 2.0, -4.2])
    gamma = np.sum(abs(omega * mu)) / np.sum(abs(mu))
    mu_gamma = 0.5 * gamma / (gamma**2 + 1.1 / 40 * np.sinh(5 * gamma**2))
    near_omega = gamma * np.sign(omega)
    short = mu_gamma - 4.0
    near_mu = np.array([2.0 + short / 2, 2.0 + short / 2, -mu_gamma])
    expected = np.hypot(
        np.linalg.norm(omega - near_omega) / np.linalg.norm(near_omega),
        np.linalg.norm(mu - near_mu) / np.linalg.norm(near_mu),
    )
    result = measure(omega, mu)
    np.testing.assert_allclose(result["distance"].values, expected, rtol=1e-9)


@settings(max_examples=20, deadline=None)
@given(
    gamma=st.floats(0.02, 0.25),
    share=st.floats(0.1, 0.9),
    n_dummies=st.integers(0, 2),
)
def test_every_way_to_share_mu_is_on_the_manifold(gamma, share, n_dummies):
    mu_gamma = 0.5 * gamma / (gamma**2 + 1.1 / 40 * np.sinh(5 * gamma**2))
    omega = [gamma, gamma, -gamma] + [0.0] * n_dummies
    mu = [share * mu_gamma, (1 - share) * mu_gamma, -mu_gamma] + [0.0] * n_dummies
    result = measure(omega, mu)
    np.testing.assert_allclose(result["distance"].values, 0, atol=1e-7)
    np.testing.assert_allclose(result["gamma"].values, gamma, rtol=1e-9)
    assert result["holds"].values == 1


def test_constants_of_the_task_count():
    task = {"d": 3, "n_context": 12, "noise_variance": 0.5}
    gamma = 0.1
    mu = 0.5 * gamma / (gamma**2 + 1.5 / 12 * np.sinh(3 * gamma**2))
    result = measure([gamma, -gamma], [mu, -mu], trajectory_settings=task)
    np.testing.assert_allclose(result["eta_star"].values, 1 / (1 + 1.5 * 3 / 12), rtol=1e-12)
    np.testing.assert_allclose(result["mu_gamma_predicted"].values, mu, rtol=1e-11)
    assert result["holds"].values == 1


@pytest.mark.parametrize(
    ("omega", "mu"),
    [
        ([0.1, -0.1], [-4.395, 4.395]),  # signs do not match
        ([0.15, -0.05], [4.395, -4.395]),  # KQ is not homogeneous
        ([0.1, -0.1], [6.0, -2.79]),  # OV does not cancel
        ([0.1, 0.1], [4.395, 4.395]),  # one sign
    ],
)
def test_step_size_alone_is_not_enough(omega, mu):
    result = measure(omega, mu)
    assert abs(result["eta_error"].values) < 0.01
    assert result["holds"].values == 0


def test_a_live_head_of_the_wrong_sign_counts_however_little_it_writes():
    omega, mu = [0.1, 0.1, -0.1], [GOLDEN[0.1] + 0.02, -0.02, -GOLDEN[0.1]]
    result = measure(omega, mu)
    assert result["distance"].values < 0.02 and abs(result["eta_error"].values) < 0.02
    assert result["holds"].values == 0
    mu = [GOLDEN[0.1] - 0.02, 0.02, -GOLDEN[0.1]]
    assert measure(omega, mu)["holds"].values == 1


def test_one_sign_has_no_distance_and_is_not_on_the_manifold():
    for omega, mu in (([0.4472, 0.4472], [0.8, 0.8]), ([-0.5], [-1.6]), ([0.2, 0.001], [2, 0.01])):
        result = measure(omega, mu)
        assert np.isnan(result["distance"].values) and result["holds"].values == 0
        assert np.isfinite(result["eta"].values).all()
        assert json.loads(result.attrs["n_undefined"])["one_sign_only"] == 1


@pytest.mark.parametrize(
    ("omega", "mu", "reason"),
    [
        ([0, 0], [0, 0], "zero_step_size"),
        ([0.1, -0.1], [0, 0], "zero_step_size"),
        ([0, 0], [1, -1], "zero_step_size"),
        ([20, -20], [1, -1], "kq_too_large"),
    ],
)
def test_undefined(omega, mu, reason):
    result = measure(omega, mu)
    for name in ("gamma", "mu_gamma", "eta", "eta_predicted", "eta_error", "distance", "holds"):
        assert np.isnan(result[name].values).all()
    np.testing.assert_allclose(result["eta_star"].values, ETA_STAR)
    assert json.loads(result.attrs["n_undefined"])[reason] == 1
