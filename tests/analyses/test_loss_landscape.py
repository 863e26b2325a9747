import numpy as np
import pytest

from mechicl import analyses
from mechicl.analyses import evaluation
from mechicl.errors import InputError, NothingToAnalyseError
from tests import trajectories
from tests.analyses.toy import forward

PROBE = analyses.get("loss_landscape")
PAIR = trajectories.from_scales([0.1, -0.1], [4.395383, -4.395383])
GOLDEN = {  # CHECKED.md 1.1: (ω, μ): (L̃, true loss)
    (0.05, 4.0): (0.48200, 0.49763),
    (0.1, 4.395383): (0.220923, 0.242863),
    (0.1267, 3.5006): (0.221067, 0.243011),
    (0.2, 2.0): (0.22859, 0.25200),
    (0.3, 1.0): (0.31119, 0.33968),
    (0.4472, 1.0): (0.24041, 0.26002),
    (0.4472, 2.0): (1.23925, 1.0336),
    (0.6, 1.0): (0.46364, 0.3314),
    (0.8, 1.0): (1.80705, 0.5529),
    (1.0, 1.0): (9.26235, 0.8193),
}


def test_golden_values_of_both_losses():
    kq, ov = (tuple(sorted({pair[axis] for pair in GOLDEN})) for axis in (0, 1))
    result = PROBE(PAIR, forward(), kq_scales=kq, ov_scales=ov, n_prompts=20_000)
    assert result["measured_loss"].shape == (len(kq), len(ov)) and len(kq) != len(ov)
    for (omega, mu), (approximate, true) in GOLDEN.items():
        one = result.sel(kq_scale=omega, ov_scale=mu)
        # Both columns are rounded to five digits or so.
        np.testing.assert_allclose(one["approximate_loss"], approximate, rtol=3e-5)
        error = one["measured_error"].item()
        assert abs(one["measured_loss"].item() - true) < 4 * error < 0.09 * true
        np.testing.assert_allclose(
            one["difference"], one["measured_loss"] - one["approximate_loss"], rtol=1e-12
        )
        relative = 1 - approximate / true
        assert (
            abs(one["relative_difference"].item() - relative)
            < 6 * error / true * approximate / true
        )
    # Within 1/√d (4.1) is too low, beyond it far too high.
    far = result.sel(ov_scale=1.0)["relative_difference"]
    assert (far.sel(kq_scale=slice(0.2, 0.45)) > 0).all()
    assert (far.sel(kq_scale=slice(0.8, None)) < -2).all()


def test_the_measured_loss_is_that_of_the_model_on_the_same_prompts():
    """Against attention evaluated from weights."""
    omega, mu = (0.1, 0.7), (0.5, 2.0, 3.0)
    result = PROBE(PAIR, forward(), kq_scales=omega, ov_scales=mu, n_prompts=500, evaluation_seed=3)
    for kq in omega:
        for ov in mu:
            trajectory = trajectories.from_scales([kq, -kq], [ov, -ov])
            other = analyses.get("approximate_loss")(
                trajectory, forward(), n_prompts=500, evaluation_seed=3
            )
            one = result.sel(kq_scale=kq, ov_scale=ov)
            for name in ("measured_loss", "measured_error", "approximate_loss"):
                np.testing.assert_allclose(one[name], other[name].item(), rtol=1e-9)


def test_parts_are_put_together(monkeypatch):
    monkeypatch.setattr(evaluation, "PART", 64)
    toy = forward()
    result = PROBE(PAIR, toy, kq_scales=(0.0, 0.3), ov_scales=(0.0, 2.0), n_prompts=150)
    drawn = [toy.prompts(n, 0, part=part) for part, n in enumerate((64, 64, 22))]
    inputs, targets = (np.concatenate(arrays) for arrays in zip(*drawn, strict=True))
    model = trajectories.from_scales([0.3, -0.3], [2.0, -2.0])
    weights = {name: model[name].values[:, 0] for name in trajectories.WEIGHTS}
    squares = (toy.predict(weights, inputs)[0] - targets) ** 2
    np.testing.assert_allclose(result["measured_loss"][1, 1], squares.mean(), rtol=1e-9)
    np.testing.assert_allclose(
        result["measured_error"][1, 1], squares.std(ddof=1) / 150**0.5, rtol=1e-9
    )
    # At ω = 0 or μ = 0 the pair predicts 0.
    for row, column in ((0, 0), (0, 1), (1, 0)):
        np.testing.assert_allclose(result["measured_loss"][row, column], (targets**2).mean())
        np.testing.assert_allclose(result["approximate_loss"][row, column], 1.1)


def test_models_stand_where_the_solution_manifold_says():
    trajectory = trajectories.poison(trajectories.learning(3, 6, 4), seed=1, from_index=4)
    for weight in trajectories.WEIGHTS:
        trajectory[weight].values[2, 2] = 0.0
    result = PROBE(trajectory, forward(), n_prompts=10)
    other = analyses.get("solution_manifold")(trajectory)
    for name in ("gamma", "mu_gamma"):
        np.testing.assert_allclose(result[name], other[name], rtol=1e-12)
    assert result["eta_star"].item() == other["eta_star"].item()
    np.testing.assert_array_equal(result["undefined"][1], [0, 0, 0, 0, 1, 1])
    np.testing.assert_array_equal(result["undefined"][2], [0, 0, 2, 0, 0, 0])


def test_the_grid_by_default_follows_d():
    for d in (1, 4):
        trajectory = trajectories.from_scales([0.1, -0.1], [1.0, -1.0], d=d)
        result = PROBE(trajectory, forward(d=d), n_prompts=10)
        assert result["measured_loss"].shape == (25, 41)
        for dim, last in (("kq_scale", 1.2 / d**0.5), ("ov_scale", 3 * d**0.5)):
            values = result[dim].values
            assert values[0] == 0
            np.testing.assert_allclose(values[-1], last)


def test_an_approximate_loss_that_overflows_leaves_a_gap():
    result = PROBE(PAIR, forward(), kq_scales=(0.1, 20.0), ov_scales=(1.0,), n_prompts=50)
    assert np.isfinite(result["measured_loss"]).all()
    for name in ("approximate_loss", "difference", "relative_difference"):
        np.testing.assert_array_equal(np.isnan(result[name].values[:, 0]), [False, True])


@pytest.mark.parametrize("name", ["kq_scales", "ov_scales"])
@pytest.mark.parametrize("values", [(), (-1.0,), (1.0, 1.0), (2.0, 1.0), (0.0, np.inf)])
def test_grids_that_are_none(name, values):
    with pytest.raises(InputError, match=name):
        PROBE.resolve({name: values})


def test_closed_forms_ask_for_softmax_and_isotropic_covariates():
    for setting in ({"softmax": 0}, {"isotropic": 0}):
        with pytest.raises(NothingToAnalyseError):
            PROBE(trajectories.from_scales([0.1], [1.0], **setting), forward())
