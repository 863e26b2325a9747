import json

import numpy as np
import pytest

from mechicl import analyses
from tests import trajectories


def measure(omega, mu, **settings):
    return analyses.get("sign_matching")(trajectories.from_scales(omega, mu), **settings)


@pytest.mark.parametrize(
    ("omega", "mu", "agreement"),
    [
        ([0.2, -0.2], [2, -2], 1),
        ([0.2, -0.2], [-2, 2], 0),
        ([0.2, -0.2, 0.2], [2, -2, -2], 2 / 3),
        ([0.2, 0.0], [2, 2], 1 / 2),  # a live head with ω = 0 matches nothing
        ([0.2, -0.2], [2, 0], 1 / 2),
        ([0.2], [2], 1),
        ([0.2], [-2], 0),
        ([0.2, -0.2, 0.001], [2, -2, -0.01], 1),  # a dummy is not counted
        ([0.2, 0.0], [2, 0], 1),
    ],
)
def test_the_fraction_of_live_heads(omega, mu, agreement):
    result = measure(omega, mu)
    np.testing.assert_allclose(result["sign_agreement"].values, [[agreement]], rtol=1e-12)
    assert result["holds"].values == (agreement == 1)
    assert result["undefined"].values == 0


def test_the_threshold_decides_who_is_counted():
    omega, mu = [0.2, -0.2, 0.02], [2, -2, -0.2]
    assert measure(omega, mu)["holds"].values == 1
    assert measure(omega, mu, dummy_threshold=0.05)["sign_agreement"].values == pytest.approx(2 / 3)


def test_positive_scales_do_not_matter():
    omega, mu = np.array([0.2, -0.1, 0.15]), np.array([2.0, -1.0, -1.5])
    one, other = measure(omega, mu), measure(3 * omega, 0.01 * mu)
    np.testing.assert_array_equal(one["sign_agreement"], other["sign_agreement"])
    assert one["sign_agreement"].values == pytest.approx(2 / 3)


def test_all_heads_dead():
    result = measure([0, 0], [0, 0])
    assert np.isnan(result["sign_agreement"].values) and np.isnan(result["holds"].values)
    assert json.loads(result.attrs["n_undefined"]) == {"no_live_head": 1, "nonfinite_parameters": 0}


def test_since_is_where_signs_settle():
    omega = np.full((1, 4, 2), 0.2) * [1, -1]
    mu = np.array([[[2, -2], [2, 2], [2, -2], [2, -2]]])
    assert measure(omega, mu)["since"].values == 20
