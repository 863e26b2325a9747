import json

import numpy as np
import pytest

from mechicl import analyses
from tests import trajectories

DEVIATIONS = ("kq_off_diagonal", "kq_diagonal_spread", "kq_last_row", "ov_other")
OMEGA, MU = np.array([[[0.2, -0.1]]]), np.array([[[2.0, -4.0]]])


def measure(kq, ov, *, d: int = 5, **settings):
    return analyses.get("circuits")(trajectories.from_circuits(kq, ov, d=d), **settings)


def test_the_pattern_itself_has_no_deviation():
    kq, ov = trajectories.ideal_circuits(OMEGA, MU)
    result = measure(kq, ov)
    for name in DEVIATIONS:
        np.testing.assert_allclose(result[name].values, 0, atol=1e-13)
    np.testing.assert_allclose(result["omega"].values, OMEGA, rtol=1e-12)
    np.testing.assert_allclose(result["mu"].values, MU, rtol=1e-12)
    np.testing.assert_allclose(result["KQ"].values[:, :, 0], kq, atol=1e-12)
    np.testing.assert_allclose(result["OV"].values[:, :, 0], ov, atol=1e-12)
    assert result["holds"].values == 1 and result["since"].values == 0


def test_each_deviation_has_its_closed_form_and_is_its_own():
    """d = 5: 20 entries off the diagonal, 5 on it, 5 in each last row; head 0 has (0.2, 2)."""
    changes = {
        "kq_off_diagonal": ("kq", (0, 3), 0.1, 0.1 / np.sqrt(20) / 0.2),
        "kq_diagonal_spread": ("kq", (1, 1), None, 0.1 * np.sqrt(2 / 5) / 0.2),
        "kq_last_row": ("kq", (5, 2), 0.3, 0.3 / np.sqrt(5) / 0.2),
        "ov_other": ("ov", (5, 4), 0.5, 0.5 / np.sqrt(5) / 2.0),
    }
    for name, (which, place, size, expected) in changes.items():
        kq, ov = trajectories.ideal_circuits(OMEGA, MU)
        if size is None:  # one up, one down: the mean stays
            kq[0, 0, 0, 1, 1] += 0.1
            kq[0, 0, 0, 2, 2] -= 0.1
        else:
            {"kq": kq, "ov": ov}[which][(0, 0, 0, *place)] += size
        result = measure(kq, ov, tolerance=expected * 0.99)
        for other in DEVIATIONS:
            want = expected if other == name else 0.0
            np.testing.assert_allclose(result[other].values[0, 0], [want, 0.0], atol=1e-12)
        assert result["holds"].values == 0
        assert measure(kq, ov, tolerance=expected * 1.01)["holds"].values == 1


def test_the_transposed_last_entries_are_free():
    """KQ's last column and OV's other rows do not reach the prediction."""
    kq, ov = trajectories.ideal_circuits(OMEGA, MU)
    kq[..., :, 5], ov[..., :5, :] = 9.0, -9.0
    assert measure(kq, ov)["holds"].values == 1
    swapped = measure(np.swapaxes(kq, -1, -2), ov)
    assert swapped["holds"].values == 0


def test_deviations_do_not_depend_on_scale():
    kq, ov = trajectories.ideal_circuits(OMEGA, MU)
    rng = np.random.default_rng(0)
    kq, ov = kq + 0.01 * rng.normal(size=kq.shape), ov + 0.01 * rng.normal(size=ov.shape)
    one, other = measure(kq, ov), measure(-7 * kq, 0.1 * ov)
    for name in DEVIATIONS:
        np.testing.assert_allclose(one[name].values, other[name].values, rtol=1e-9)
        assert (one[name].values > 0.001).all()


def test_dummies_are_not_judged():
    kq, ov = trajectories.ideal_circuits([[[0.2, -0.2, 0.01]]], [[[2.0, -2.0, 0.1]]])
    kq[0, 0, 2, 0, 1] = 0.5
    assert measure(kq, ov)["holds"].values == 1
    assert measure(kq, ov, dummy_threshold=0.04)["holds"].values == 0


def test_a_dead_head_has_no_ratios_but_the_model_has_a_verdict():
    kq, ov = trajectories.ideal_circuits(OMEGA, MU)
    kq[0, 0, 1], ov[0, 0, 1] = 0.0, 0.0
    result = measure(kq, ov)
    for name in DEVIATIONS:
        np.testing.assert_allclose(result[name].values[0, 0], [0, np.nan], atol=1e-12)
    assert result["holds"].values == 1
    assert json.loads(result.attrs["n_undefined"])["head_without_scale"] == 1


@pytest.mark.parametrize("which", ["kq", "ov"])
def test_a_live_head_without_a_scale_lacks_the_pattern(which):
    kq, ov = trajectories.ideal_circuits(OMEGA, MU)
    {"kq": kq, "ov": ov}[which][0, 0, 1] = 0.0
    result = measure(kq, ov)
    assert result["holds"].values == 0 and result["undefined"].values == 4


def test_all_heads_dead():
    kq, ov = np.zeros((2, 1, 1, 2, 6, 6))
    result = measure(kq, ov)
    for name in DEVIATIONS:
        assert np.isnan(result[name].values).all()
    assert np.isnan(result["holds"].values) and np.isnan(result["since"].values)
    assert json.loads(result.attrs["n_undefined"])["no_live_head"] == 1


def test_one_covariate_has_no_off_diagonal_and_no_spread():
    kq, ov = trajectories.ideal_circuits(OMEGA, MU, d=1)
    result = measure(kq, ov, d=1)
    for name in ("kq_off_diagonal", "kq_diagonal_spread", "holds"):
        assert np.isnan(result[name].values).all()
    np.testing.assert_allclose(result["kq_last_row"].values, 0, atol=1e-12)
    assert json.loads(result.attrs["n_undefined"])["one_covariate"] == 1


def test_one_head_is_judged_like_any_other():
    kq, ov = trajectories.ideal_circuits(OMEGA[..., :1], MU[..., :1])
    assert measure(kq, ov)["holds"].values == 1


def test_a_hole_off_the_diagonal_is_not_skipped():
    trajectory = trajectories.from_scales(OMEGA, MU)
    trajectory["W_K"].values[0, 0, 0, 0, 5, :] = np.nan  # KQ's last row alone: ω stays finite
    result = analyses.get("circuits")(trajectory)
    assert np.isfinite(result["omega"].values).all()
    assert np.isnan(result["kq_last_row"].values[0, 0, 0])
    assert np.isnan(result["holds"].values)
    assert json.loads(result.attrs["n_undefined"])["nonfinite_parameters"] == 1
