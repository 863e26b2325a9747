import json

import numpy as np
import pytest

from mechicl import analyses
from mechicl.schema import flag_names
from tests import trajectories


def measure(omega, mu, **settings):
    return analyses.get("head_roles")(trajectories.from_scales(omega, mu), **settings)


def counts(result):
    return [int(result[f"n_{role}"].values[0, 0]) for role in ("positive", "negative", "dummy")]


@pytest.mark.parametrize(
    ("omega", "mu", "role", "holds"),
    [
        ([0.2, -0.2], [2, -2], [1, -1], 1),
        ([0.2, 0.2], [2, 2], [1, 1], 0),
        ([-0.2, -0.2], [-2, -2], [-1, -1], 0),
        ([-0.2, 0.2, 0.001, -0.2], [-1, 2, 0.01, -1], [-1, 1, 0, -1], 1),
        ([0.2, -0.001], [2, -0.01], [1, 0], 0),
        ([0.2, -0.2], [-2, 2], [1, -1], 1),  # by ω alone
        ([0.2, -0.001], [2, -2], [1, -1], 1),  # live by its μ
        ([0.2], [2], [1], 0),
        ([0.0, 0.0], [0, 0], [0, 0], 0),
    ],
)
def test_roles(omega, mu, role, holds):
    result = measure(omega, mu)
    np.testing.assert_array_equal(result["role"].values[0, 0], role)
    assert counts(result) == [role.count(value) for value in (1, -1, 0)]
    assert result["holds"].values == holds
    assert result["undefined"].values == 0


def test_codes_have_names():
    result = measure([0.2, -0.2], [2, -2])
    assert flag_names(result["role"]) == {-1: "negative", 0: "dummy", 1: "positive"}


def test_the_threshold_is_relative_to_the_models_own_largest_head():
    omega, mu = np.array([0.2, -0.2, 0.03]), np.array([2, -2, 0.3])
    for scale in (1, 1e-6, 1e6):
        assert counts(measure(scale * omega, scale * mu)) == [1, 1, 1]
        assert counts(measure(scale * omega, scale * mu, dummy_threshold=0.1)) == [2, 1, 0]


def test_a_live_head_without_kq_has_no_role():
    result = measure([0.2, -0.2, 0.0], [2, -1, -1])
    np.testing.assert_array_equal(result["role"].values[0, 0], [1, -1, np.nan])
    assert counts(result) == [1, 1, 0] and result["holds"].values == 1
    assert json.loads(result.attrs["n_undefined"])["live_head_with_zero_kq"] == 1


def test_a_diverged_seed_has_neither_roles_nor_counts():
    trajectory = trajectories.from_scales([0.2, -0.2], [2, -2])
    result = analyses.get("head_roles")(trajectories.poison(trajectory, seed=0, from_index=0))
    for name in ("role", "n_positive", "n_negative", "n_dummy", "holds"):
        assert np.isnan(result[name].values).all()
