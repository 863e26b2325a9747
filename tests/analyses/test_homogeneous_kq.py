import json

import numpy as np
import pytest

from mechicl import analyses
from tests import trajectories


def measure(omega, mu=2.0, **settings):
    mu = np.broadcast_to(mu, np.shape(omega))
    return analyses.get("homogeneous_kq")(trajectories.from_scales(omega, mu), **settings)


@pytest.mark.parametrize(
    ("omega", "spread"),
    [
        ([0.2, -0.2], 0),
        ([-0.2, 0.2, 0.2], 0),
        ([0.3, -0.1], 1),
        ([0.3, -0.2, 0.1], 1),
        ([0.2, 0.0], 2),  # live by its μ
    ],
)
def test_the_range_over_the_mean(omega, spread):
    result = measure(omega)
    np.testing.assert_allclose(result["kq_spread"].values, [[spread]], atol=1e-12)
    assert result["holds"].values == (spread == 0)


def test_the_tolerance_decides():
    omega = [0.22, -0.18]
    assert measure(omega)["kq_spread"].values == pytest.approx(0.2)
    assert measure(omega, tolerance=0.21)["holds"].values == 1
    assert measure(omega, tolerance=0.19)["holds"].values == 0


def test_scale_does_not_matter():
    one, other = measure([0.3, -0.2, 0.25]), measure([30, -20, 25])
    np.testing.assert_allclose(one["kq_spread"], other["kq_spread"], rtol=1e-9)
    assert one["kq_spread"].values == pytest.approx(0.4)


def test_dummies_are_left_out():
    omega, mu = [0.2, -0.2, 0.01], [2, -2, 0.1]
    assert measure(omega, mu)["holds"].values == 1
    assert measure(omega, mu, dummy_threshold=0.04)["holds"].values == 0


@pytest.mark.parametrize(
    ("omega", "mu", "reason"),
    [
        ([0.2], 2, "fewer_than_two_live_heads"),
        ([0.2, 0.0], [2, 0], "fewer_than_two_live_heads"),
        ([0.0, 0.0], 0, "fewer_than_two_live_heads"),
        ([0.0, 0.0], 2, "zero_kq"),
    ],
)
def test_undefined(omega, mu, reason):
    result = measure(omega, mu)
    assert np.isnan(result["kq_spread"].values) and np.isnan(result["holds"].values)
    counts = json.loads(result.attrs["n_undefined"])
    assert counts[reason] == 1 and sum(counts.values()) == 1
