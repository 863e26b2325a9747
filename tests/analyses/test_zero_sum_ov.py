import json

import numpy as np
import pytest

from mechicl import analyses
from tests import trajectories


def measure(mu, omega=0.2, **settings):
    omega = np.broadcast_to(omega, np.shape(mu))
    return analyses.get("zero_sum_ov")(trajectories.from_scales(omega, mu), **settings)


@pytest.mark.parametrize(
    ("mu", "imbalance"),
    [
        ([2, -2], 0),
        ([1.5, -2, 0.5], 0),
        ([2, 2], 1),
        ([-2, -2], 1),
        ([2, 2, -2], 1 / 3),
        ([3, -1], 1 / 2),
        ([2, 0], 1),
        ([0.1, 0.2, 0.3], 1),  # a sum of one sign is not above 1 by rounding
    ],
)
def test_the_imbalance(mu, imbalance):
    result = measure(mu)
    np.testing.assert_allclose(result["ov_imbalance"].values, [[imbalance]], atol=1e-12)
    assert result["holds"].values == (imbalance == 0)


def test_the_tolerance_decides():
    assert measure([2.1, -1.9])["ov_imbalance"].values == pytest.approx(0.05)
    assert measure([2.1, -1.9], tolerance=0.051)["holds"].values == 1
    assert measure([2.1, -1.9], tolerance=0.049)["holds"].values == 0


def test_scale_and_sign_of_all_do_not_matter():
    one, other = measure([3, -1, 0.5]), measure([-0.3, 0.1, -0.05])
    np.testing.assert_allclose(one["ov_imbalance"], other["ov_imbalance"], rtol=1e-9)
    assert one["ov_imbalance"].values == pytest.approx(2.5 / 4.5)


@pytest.mark.parametrize(
    ("mu", "reason"), [([2.0], "single_head"), ([0.0, 0.0], "zero_ov"), ([0.0], "single_head")]
)
def test_undefined(mu, reason):
    result = measure(mu)
    assert np.isnan(result["ov_imbalance"].values) and np.isnan(result["holds"].values)
    counts = json.loads(result.attrs["n_undefined"])
    assert counts[reason] == 1 and sum(counts.values()) == 1
