import json

import numpy as np
import pytest

from mechicl import analyses
from mechicl.analyses import Forward, evaluation, forward_of
from mechicl.errors import NothingToAnalyseError
from mechicl.models.linear_attention import LinearAttention
from mechicl.models.softmax_attention import SoftmaxAttention
from mechicl.schema import flag_names
from mechicl.tasks.linear_regression import LinearRegression
from mechicl.tasks.multi_task_regression import MultiTaskRegression
from tests import trajectories
from tests.analyses.toy import forward

PROBE = analyses.get("predictor_distance")
ETA = 1 / (1 + 1.1 * 5 / 40)


def made(*tags: float, size: float = 0.0) -> tuple[object, Forward]:
    """Return models that predict tag·r + size·s where one reference is r, the other s.

    r and s are independent standard normals; tags are of seeds at one step.
    """

    def predict(parameters, inputs):
        tag = (parameters["W_V"][:, 0, 0, -1, :] * parameters["W_O"][:, 0, 0, :, -1]).sum(-1)
        return tag[:, None] * inputs[:, 0, 0] + size * inputs[:, 0, 1]

    def prompts(n, seed, *, part=0, n_context=None):
        return np.random.default_rng([seed, part]).normal(size=(n, 1, 6)), np.zeros(n)

    def references(inputs):
        return {"r": inputs[:, 0, 0], "s": 2 * inputs[:, 0, 1]}

    mu = np.array(tags, dtype=float)[:, None, None]
    return trajectories.from_scales(np.ones_like(mu), mu), Forward(predict, prompts, references)


def test_multiples_of_a_reference_are_at_the_factors_distance():
    result = PROBE(*made(1.0, 1.5, 0.25, -1.0), n_prompts=500)
    one = result.isel(reference=0, step=0)
    np.testing.assert_allclose(one["distance"], [0, 0.5, 0.75, 2], atol=1e-12)
    np.testing.assert_allclose(one["scale"], [1, 1 / 1.5, 4, -1], rtol=1e-12)
    np.testing.assert_allclose(one["scaled_distance"], 0, atol=1e-7)
    # Every prompt says the same: there is no Monte-Carlo error.
    np.testing.assert_allclose(one["distance_error"], 0, atol=1e-8)
    np.testing.assert_array_equal(result["nearest"].values[:3, 0], 0)
    np.testing.assert_allclose(result["nearest_distance"].values[1, 0], 0.5)
    np.testing.assert_array_equal(result["undefined"], 0)


def test_distances_by_hand_over_parts(monkeypatch):
    monkeypatch.setattr(evaluation, "PART", 64)
    trajectory, toy = made(0.8, -0.3, size=0.5)
    result = PROBE(trajectory, toy, n_prompts=150, evaluation_seed=2)
    drawn = [toy.prompts(n, 2, part=part)[0] for part, n in enumerate((64, 64, 22))]
    r, s = np.concatenate(drawn)[:, 0, :2].T
    for seed, tag in enumerate((0.8, -0.3)):
        model = tag * r + 0.5 * s
        for number, reference in enumerate((r, 2 * s)):
            one = result.isel(seed=seed, step=0, reference=number)
            norm = np.linalg.norm(reference)
            np.testing.assert_allclose(
                one["distance"], np.linalg.norm(model - reference) / norm, rtol=1e-9
            )
            factor, residue = np.linalg.lstsq(model[:, None], reference, rcond=None)[:2]
            np.testing.assert_allclose(one["scale"], factor.item(), rtol=1e-9)
            np.testing.assert_allclose(
                one["scaled_distance"], residue.item() ** 0.5 / norm, rtol=1e-9
            )
        expected = np.argmin(result["distance"].isel(seed=seed, step=0).values)
        assert result["nearest"].values[seed, 0] == expected
        assert result["nearest_distance"].values[seed, 0] == result["distance"][seed, 0].min()


def test_standard_errors_are_the_spread_over_evaluation_sets():
    trajectory, toy = made(0.8, size=0.5)
    results = [
        PROBE(trajectory, toy, n_prompts=100, evaluation_seed=seed).isel(seed=0, step=0)
        for seed in range(300)
    ]
    for name in ("distance", "scaled_distance"):
        values = np.array([result[name].values for result in results])
        errors = np.array([result[f"{name}_error"].values for result in results])
        # The spread of 300 has an error of 4 %.
        np.testing.assert_allclose(values.std(0) / errors.mean(0), 1, atol=0.17)


def test_a_pair_comes_to_debiased_descent_as_the_square_of_gamma():
    """CHECKED.md 1.6: rms 1.157e-2 and 2.941e-3 at γ = 0.1, 0.05, slope 1.975."""
    gamma = np.array([0.1, 0.05])[None, :, None]
    signs = np.array([1.0, -1.0])
    task = LinearRegression()
    made = forward_of(task, SoftmaxAttention())
    balanced = PROBE(
        trajectories.from_scales(gamma * signs, ETA / (2 * gamma) * signs), made, n_prompts=4000
    )
    number = {name: code for code, name in flag_names(balanced["reference"]).items()}
    one = balanced.isel(seed=0).sel(reference=number["debiased_gd"])
    far = one["distance"].values
    predicted = task.references(made.prompts(4000, 0)[0])["debiased_gd"]
    rms = np.sqrt(np.mean(predicted**2))
    off = np.abs(rms * far - [1.157e-2, 2.941e-3])
    assert (off < 4 * rms * one["distance_error"].values).all()
    assert (one["distance_error"].values < 0.08 * far).all()
    assert abs(np.log2(far[0] / far[1]) - 1.975) < 0.05
    np.testing.assert_array_equal(balanced["nearest"], number["debiased_gd"])

    unbalanced = PROBE(
        trajectories.from_scales(gamma * signs, ETA / (2 * gamma) * signs * [1.05, 0.95]),
        made,
        n_prompts=4000,
    )
    far = unbalanced["distance"].sel(reference=number["debiased_gd"]).values[0]
    assert far[1] > 1.5 * far[0]


def test_linear_attention_is_vanilla_descent():
    task = LinearRegression()
    linear = trajectories.from_scales([0.8602150537634408], [1.0])
    result = PROBE(linear, forward_of(task, LinearAttention(n_heads=1)), n_prompts=500)
    names = flag_names(result["reference"])
    assert names[int(result["nearest"].item())] == "vanilla_gd"
    assert result["nearest_distance"].item() < 1e-6
    half = trajectories.from_scales([0.8602150537634408], [0.5])
    result = PROBE(half, forward_of(task, LinearAttention(n_heads=1)), n_prompts=500)
    one = result.isel(seed=0, step=0).sel(reference=list(names.values()).index("vanilla_gd"))
    np.testing.assert_allclose([one["distance"], one["scale"]], [0.5, 2.0], rtol=1e-6)
    assert one["scaled_distance"] < 1e-6


def test_several_responses_count_alike():
    task = MultiTaskRegression(n_context=4)
    toy = forward_of(task, SoftmaxAttention(n_heads=3))
    rng = np.random.default_rng(0)
    weights = {name: 0.3 * rng.normal(size=(2, 1, 3, 8, 8)) for name in trajectories.WEIGHTS}
    trajectory = trajectories.from_weights(weights, d=6, n_context=4)
    result = PROBE(trajectory, toy, n_prompts=300, n_context=7)
    inputs, _ = toy.prompts(300, 0, n_context=7)
    own = {name: trajectory[name].values[:, 0] for name in weights}
    one, other = toy.predict(own, inputs)
    ridge = toy.references(inputs)["ridge"]
    expected = np.linalg.norm(one - ridge) / np.linalg.norm(ridge)
    np.testing.assert_allclose(result["distance"].values[0, 0, 0], expected, rtol=1e-6)
    own = np.sqrt((np.sum(one**2) + np.sum(other**2)) / 2)
    expected = np.linalg.norm(one.astype(float) - other) / own
    np.testing.assert_allclose(result["seed_distance"].values[0, 1], expected, rtol=1e-6)


def test_distances_between_seeds():
    trajectory, toy = made(1.0, -1.0, 0.5, 1.0, 0.0, np.nan)
    result = PROBE(trajectory, toy, n_prompts=50)["seed_distance"]
    a = 0.5 / np.sqrt((1 + 0.25) / 2)
    b = 1.5 / np.sqrt((1 + 0.25) / 2)
    expected = [[0, 2, a, 0], [2, 0, b, 2], [a, b, 0, a], [0, 2, a, 0]]
    np.testing.assert_allclose(result[:4, :4], expected, atol=1e-12)
    assert np.isnan(result[4:]).all() and np.isnan(result[:, 4:]).all()
    np.testing.assert_array_equal(result["seed_other"], trajectory["seed"])


def test_a_model_that_predicts_nothing():
    result = PROBE(*made(0.0, 1.0), n_prompts=50)
    np.testing.assert_allclose(result["distance"].values[0, 0], 1)
    assert np.isnan(result["scale"].values[0]).all()
    assert np.isnan(result["scaled_distance"].values[0]).all()
    np.testing.assert_array_equal(result["undefined"].values[:, 0], [3, 0])
    assert json.loads(result.attrs["n_undefined"])["zero_predictions"] == 1


def test_tiny_predictions_are_predictions():
    trajectory, toy = made(1.0)

    def predict(parameters, inputs):
        return 1e-20 * toy.predict(parameters, inputs)

    result = PROBE(trajectory, Forward(predict, toy.prompts, toy.references), n_prompts=50)
    np.testing.assert_allclose(result["scale"].values[0, 0, 0], 1e20, rtol=1e-9)
    assert result["undefined"].item() == 0


def test_references_that_predict_nothing_are_left_out():
    result = PROBE(trajectories.from_scales(0.1, 1.0), forward(), n_prompts=20)
    assert flag_names(result["reference"]) == {0: "vanilla_gd"}
    toy = forward()
    nothing = Forward(toy.predict, toy.prompts, lambda inputs: {"zero": np.zeros(len(inputs))})
    with pytest.raises(NothingToAnalyseError, match="no reference"):
        PROBE(trajectories.from_scales(0.1, 1.0), nothing, n_prompts=20)
    task = LinearRegression()
    one = PROBE(
        trajectories.from_scales([0.1, -0.1], [1.0, -1.0]),
        forward_of(task, SoftmaxAttention()),
        n_prompts=20,
        n_context=1,
    )
    assert set(flag_names(one["reference"]).values()) == {
        "ridge", "least_squares", "vanilla_gd", "single_head"
    }  # fmt: skip


def test_a_reference_that_overflows_has_no_distance_and_others_do():
    trajectory, toy = made(0.9)

    def references(inputs):
        return {"wild": np.full(len(inputs), np.inf)} | toy.references(inputs)

    result = PROBE(trajectory, Forward(toy.predict, toy.prompts, references), n_prompts=50)
    np.testing.assert_array_equal(np.isnan(result["distance"].values[0, 0]), [True, False, False])
    assert result["nearest"].item() == 1
    assert json.loads(result.attrs["n_undefined"])["nonfinite_predictions"] == 1
