import json
from functools import cache

import numpy as np
import pytest
import xarray as xr

from mechicl import analyses
from mechicl.theory import linear_regression
from tests import trajectories

SETTING = {"d": 5, "n_context": 40, "noise_variance": 0.1}
STARTS = {
    "opposite": ((0.02, -0.01), (0.01, -0.015)),
    "same": ((0.02, 0.01), (0.01, 0.015)),
    "mismatched": ((0.02, -0.01), (-0.01, 0.015)),
}
CHECKPOINTS = np.arange(0, 1501, 10)
STAGES = ("sign_matching", "zero_sum", "optimality", "homogeneity")


def measure(omega, mu, **settings):
    parameters = {key: settings.pop(key) for key in [*settings] if key.endswith("_tolerance")}
    trajectory = trajectories.from_scales(omega, mu, **settings)
    return analyses.get("training_stages")(trajectory, **parameters)


def descend(omega: np.ndarray, mu: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Gradient descent on the approximate loss at rate 0.01; (seed, checkpoint, head)."""
    stored = {}
    for step in range(CHECKPOINTS[-1] + 1):
        if step in CHECKPOINTS:
            stored[step] = omega, mu
        slopes = linear_regression.approximate_loss_gradient(omega, mu, **SETTING)
        omega, mu = omega - 0.01 * slopes[0], mu - 0.01 * slopes[1]
    return tuple(np.stack(rows, 1) for rows in zip(*stored.values(), strict=True))


@cache
def descended() -> tuple[np.ndarray, np.ndarray, xr.Dataset]:
    omega, mu = (np.array([start[i] for start in STARTS.values()]) for i in (0, 1))
    omega, mu = descend(omega, mu)
    return omega, mu, measure(omega, mu, steps=CHECKPOINTS)


def first_for_good(condition: np.ndarray) -> float:
    """Walk back from the end, one checkpoint after another."""
    found = np.nan
    for step, met in list(zip(CHECKPOINTS, condition, strict=True))[::-1]:
        if not met:
            break
        found = float(step)
    return found


def test_gradient_descent_from_opposite_signs_goes_through_the_published_stages():
    """Values of CHECKED.md 1.11: (4.3) is 0.954 at step 1,000 and |ω| peaks near 0.56 at 300."""
    seed = descended()[2].isel(seed=0)
    assert float(seed["optimality_ratio"].sel(step=1000)) == pytest.approx(0.954, abs=1e-3)
    assert float(seed["gamma"].sel(step=300)) == pytest.approx(0.56, abs=0.005)
    assert 200 < float(seed["peak_step"]) < 300
    assert float(seed["initial_to_peak"]) < 0.05 and float(seed["final_to_peak"]) < 0.75
    assert float(seed["largest_drawdown"]) == 0
    assert float(seed["since_sign_matching"]) == 0
    assert float(seed["since_homogeneity"]) < float(seed["since_zero_sum"]) < 300
    assert 800 < float(seed["since_optimality"]) < 1000
    assert float(seed["since"]) == float(seed["since_optimality"])
    assert float(seed["order"]) == 0


def test_four_heads_differ_longest_in_kq():
    omega, mu = descend(
        np.array([[0.03, -0.02, 0.01, -0.01]]), np.array([[0.02, -0.01, 0.02, -0.02]])
    )
    seed = measure(omega, mu, steps=CHECKPOINTS).isel(seed=0)
    assert float(seed["since_homogeneity"]) > float(seed["since_zero_sum"]) > 200
    assert float(seed["since_homogeneity"]) > float(seed["since_optimality"])
    assert float(seed["order"]) == 2


def test_heads_of_one_sign_are_stuck_at_0_828_and_never_sum_to_zero():
    """The negative control of CHECKED.md 1.11, started with one sign or ending with it."""
    counted = 0
    for number in (1, 2):
        seed = descended()[2].isel(seed=number)
        assert float(seed["optimality_ratio"][-1]) == pytest.approx(0.828017, abs=2e-3)
        assert float(seed["ov_imbalance"][-1]) == 1
        assert np.isfinite(seed["since_sign_matching"]) and np.isfinite(seed["since_homogeneity"])
        for never in ("since_zero_sum", "since_optimality", "since", "order"):
            assert np.isnan(seed[never])
        assert (seed["holds"] == 0).all()
        counted += 1
    assert counted == 2


def test_every_time_is_what_a_walk_back_from_the_end_finds():
    """Written again, in loops over plain numbers."""
    omegas, mus, result = descended()
    counted = 0
    for seed in range(3):
        met = {stage: [] for stage in STAGES}
        gammas, sums = [], []
        for omega, mu in zip(omegas[seed], mus[seed], strict=True):
            big = max(abs(omega)), max(abs(mu))
            live = [h for h in (0, 1) if abs(omega[h]) > 0.2 * big[0] or abs(mu[h]) > 0.2 * big[1]]
            sizes = [abs(omega[h]) for h in live]
            met["sign_matching"].append(all(omega[h] * mu[h] > 0 for h in live))
            met["zero_sum"].append(abs(sum(mu)) <= 0.05 * sum(abs(mu)))
            met["optimality"].append(abs((1 + 1.1 * 5 / 40) * sum(omega * mu) - 1) <= 0.05)
            spread = max(sizes) - min(sizes)
            met["homogeneity"].append(len(live) > 1 and spread <= 0.15 * np.mean(sizes))
            gammas.append(sum(abs(omega * mu)) / sum(abs(mu)))
            sums.append(sum(m for w, m in zip(omega, mu, strict=True) if w > 0))
        for stage, condition in met.items():
            found = result[f"since_{stage}"].values[seed]
            np.testing.assert_equal(found, first_for_good(np.array(condition)))
            counted += 1
        np.testing.assert_equal(
            result["since"].values[seed],
            first_for_good(np.all([met[stage] for stage in STAGES], axis=0)),
        )
        np.testing.assert_allclose(result["gamma"].values[seed], gammas, rtol=1e-9)
        np.testing.assert_allclose(result["positive_ov"].values[seed], sums, rtol=1e-9)
        assert result["peak_step"].values[seed] == CHECKPOINTS[int(np.argmax(gammas))]
        falls = [max(sums[: i + 1]) - s for i, s in enumerate(sums)]
        np.testing.assert_allclose(
            result["largest_drawdown"].values[seed], max(falls) / max(sums), rtol=1e-9, atol=1e-12
        )
    assert counted == 12


def test_rise_fall_and_drawdown_in_closed_form():
    sizes = np.array([0.1, 0.4, 0.3, 0.4, 0.2])
    ov = np.array([1.0, 4.0, 3.0, 3.5, 3.8])
    omega, mu = (values[None, :, None] * np.array([1, -1]) for values in (sizes, ov))
    result = measure(omega, mu)
    np.testing.assert_allclose(result["gamma"].values[0], sizes, rtol=1e-12)
    np.testing.assert_allclose(result["positive_ov"].values[0], ov, rtol=1e-12)
    # The two peaks are equal up to the rounding of a change of basis.
    assert result["peak_step"].values[0] in (10, 30)
    expected = {
        "peak_gamma": 0.4,
        "initial_to_peak": 0.25,
        "final_to_peak": 0.5,
        "largest_drawdown": 0.25,
    }
    for name, value in expected.items():
        np.testing.assert_allclose(result[name].values, [value], rtol=1e-12)


def test_gamma_weighs_heads_by_what_they_write_and_only_positive_heads_sum():
    result = measure([0.3, -0.2, 0.1], [1.5, -1.0, -0.5])
    np.testing.assert_allclose(result["gamma"].values, 0.7 / 3.0, rtol=1e-12)
    np.testing.assert_allclose(result["positive_ov"].values, 1.0, rtol=1e-12)
    np.testing.assert_allclose(
        result["optimality_ratio"].values, (1 + 1.1 * 5 / 40) * 0.6, rtol=1e-12
    )
    other = measure([0.3, -0.2], [1.5, -1.0], d=3, n_context=12, noise_variance=0.5)
    np.testing.assert_allclose(
        other["optimality_ratio"].values, (1 + 1.5 * 3 / 12) * 0.65, rtol=1e-12
    )


GOOD = ((0.18, -0.18), (2.44, -2.44))
BAD = {
    "sign_matching": ((0.18, 0.18), (2.44, -2.44)),
    "zero_sum": ((0.18, -0.18), (2.90, -1.98)),
    "optimality": ((0.18, -0.18), (1.5, -1.5)),
    "homogeneity": ((0.22, -0.14), (2.44, -2.44)),
}


@pytest.mark.parametrize("stage", STAGES)
def test_each_condition_is_its_own_and_a_lapse_begins_anew(stage):
    """Bad, good, bad, good: only the last time counts, and for this one condition."""
    points = [BAD[stage], GOOD, BAD[stage], GOOD]
    omega, mu = (np.array([[point[i] for point in points]]) for i in (0, 1))
    result = measure(omega, mu)
    for other in STAGES:
        late = other == stage or (stage == "sign_matching" and other == "optimality")
        assert result[f"since_{other}"].values == (30 if late else 0), other
    np.testing.assert_array_equal(result["holds"].values, [[0, 1, 0, 1]])
    assert result["since"].values == 30
    wide = {
        "zero_sum": {"zero_sum_tolerance": 0.2},
        "optimality": {"optimality_tolerance": 0.5},
        "homogeneity": {"homogeneity_tolerance": 0.5},
    }
    if stage in wide:
        assert measure(omega, mu, **wide[stage])["since"].values == 0


@pytest.mark.parametrize(
    ("points", "code"),
    [
        (["homogeneity", "good"], 2),
        (["zero_sum", "good"], 0),
        (["sign_matching", "homogeneity", "good"], 2),
        (["homogeneity", "sign_matching", "good"], 0),
        (["all", "good"], 1),
        (["good", "homogeneity"], np.nan),
    ],
)
def test_the_order_of_the_stages(points, code):
    known = BAD | {"good": GOOD, "all": ((0.22, 0.14), (2.44, -1.0))}
    omega, mu = (np.array([[known[point][i] for point in points]]) for i in (0, 1))
    np.testing.assert_equal(measure(omega, mu)["order"].values, [code])


def test_what_is_of_the_whole_run_stays_when_a_step_is_looked_at():
    record, (_, _, result) = analyses.get("training_stages"), descended()
    assert not record.by_step
    one = record.narrow(result, [1500])
    assert one.sizes["step"] == 1
    for name, variable in result.data_vars.items():
        if variable.dims == ("seed",):
            xr.testing.assert_identical(one[name], variable)


def test_a_seed_that_diverges_has_no_peak_and_no_stage():
    trajectory = trajectories.poison(trajectories.learning(2, 6, 2), seed=1, from_index=4)
    result = analyses.get("training_stages")(trajectory)
    once = [name for name, var in result.data_vars.items() if var.dims == ("seed",)]
    assert len(once) == 11
    for name in once:
        assert np.isfinite(result[name].values[0]) and np.isnan(result[name].values[1])
    assert np.isfinite(result["gamma"].values[1, :4]).all()
    assert json.loads(result.attrs["n_undefined"])["nonfinite_parameters"] == 2


@pytest.mark.parametrize(
    ("omega", "mu", "reason", "missing"),
    [
        ([0, 0], [0, 0], "no_live_head", ["gamma", "sign_agreement", "ov_imbalance", "kq_spread"]),
        ([0.5], [1.6], "single_head", ["ov_imbalance", "kq_spread"]),
        ([0.1, -0.1], [0, 0], "zero_ov", ["gamma", "ov_imbalance"]),
        ([0.5, 0.01], [1.6, 0.01], "fewer_than_two_live_heads", ["kq_spread"]),
        ([0, 0], [1, -1], "zero_kq", ["kq_spread"]),
    ],
)
def test_undefined(omega, mu, reason, missing):
    result = measure(omega, mu)
    assert np.isnan(result["holds"].values).all() and np.isnan(result["since"].values).all()
    curves = [key for key, var in analyses.get("training_stages").gives.items() if var.dims[1:]]
    assert len(curves) == 6
    for name in curves:
        assert np.isnan(result[name].values).all() == (name in missing), name
    counts = json.loads(result.attrs["n_undefined"])
    assert counts[reason] == sum(counts.values()) == 1


def test_other_closed_forms_than_softmax_are_refused():
    record = analyses.get("training_stages")
    assert "softmax" in record.objection(trajectories.from_scales(0.1, 1.0, softmax=0))
    assert "isotropic" in record.objection(trajectories.from_scales(0.1, 1.0, isotropic=0))
    assert record.objection(trajectories.from_scales(0.1, 1.0)) is None
