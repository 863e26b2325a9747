import json

import numpy as np
import pytest

from mechicl import analyses, plots
from mechicl.analyses import Forward, evaluation, forward_of
from mechicl.errors import InputError
from mechicl.models.linear_attention import LinearAttention
from mechicl.models.softmax_attention import SoftmaxAttention
from mechicl.schema import flag_names
from mechicl.tasks.linear_regression import LinearRegression
from mechicl.tasks.multi_task_regression import MultiTaskRegression
from tests import trajectories
from tests.analyses.toy import forward

PROBE = analyses.get("length_generalization")
GOLDEN = (10, 20, 40, 60, 100)
PAIR = trajectories.from_scales([0.1267, -0.1267], [3.5006, -3.5006])


def codes(result):
    return json.loads(result.attrs["n_undefined"])


def test_curves_are_those_of_the_exact_risks():
    """CHECKED.md 1.5; a falling curve holds, that of linear attention does not."""
    task = LinearRegression()
    curves = {
        "pair": [0.59185, 0.36612, 0.24302, 0.20040, 0.16573],
        "linear": [0.746202, 0.484900, 0.239785, 0.364655, 1.724350],
        "ridge": [0.195845, 0.133952, 0.114455, 0.109166, 0.105288],
        "debiased_gd": [0.595713, 0.365789, 0.242857, 0.200699, 0.166548],
        "vanilla_gd": [0.600520, 0.360030, 0.239785, 0.199703, 0.167638],
    }
    linear = trajectories.from_scales([0.8602150537634408], [1.0])
    results = {
        "pair": PROBE(PAIR, forward_of(task, SoftmaxAttention()), lengths=GOLDEN, n_prompts=5000),
        "linear": PROBE(
            linear,
            forward_of(task, LinearAttention(n_heads=1)),
            lengths=GOLDEN,
            n_prompts=5000,
        ),
    }
    for name, result in results.items():
        loss, error = result["loss"].values[0, 0], result["loss_error"].values[0, 0]
        assert (np.abs(loss - curves[name]) < 4 * error).all()
        assert (error < 0.06 * loss).all()
    names = flag_names(results["pair"]["reference"])
    for number, name in names.items():
        if name in curves:
            one = results["pair"].sel(reference=number)
            far = np.abs(one["reference_loss"] - curves[name])
            assert (far < 4 * one["reference_error"]).all()
    assert {"ridge", "debiased_gd", "vanilla_gd"} <= set(names.values())
    assert results["pair"]["holds"].item() == 1
    assert results["linear"]["holds"].item() == 0
    assert results["linear"]["decrease"].item() < -1
    np.testing.assert_array_equal(results["pair"]["extrapolates"], [0, 0, 0, 1, 1])
    assert results["pair"]["n_context"].item() == 40


def test_linear_attention_below_its_own_minimum_falls():
    """Its least loss is at L' = 43 (CHECKED.md 1.5): what is asked of it up to there, holds."""
    made = forward_of(LinearRegression(), LinearAttention(n_heads=1))
    linear = trajectories.from_scales([0.8602150537634408], [1.0], n_context=15)
    result = PROBE(linear, made, lengths=(15, 40), n_prompts=2000)
    assert result["holds"].item() == 1


def test_means_and_paired_errors_over_parts(monkeypatch):
    """Against prompts cut by hand, in parts that do not divide their number."""
    monkeypatch.setattr(evaluation, "PART", 64)
    toy, lengths = forward(), (2, 40, 70)
    trajectory = trajectories.learning(2, 3, 2)
    result = PROBE(trajectory, toy, lengths=lengths, n_prompts=150, n_steps=3, evaluation_seed=4)
    drawn = [toy.prompts(n, 4, part=part, n_context=70) for part, n in enumerate((64, 64, 22))]
    inputs, targets = (np.concatenate(arrays) for arrays in zip(*drawn, strict=True))
    own = np.empty((2, 3, 3, 150))
    other = np.empty((2, 3, 150))
    for number, length in enumerate(lengths):
        cut = inputs[:, [*range(length), 70]]
        for step in range(3):
            weights = {name: trajectory[name].values[:, step] for name in trajectories.WEIGHTS}
            own[:, step, number] = (toy.predict(weights, cut) - targets) ** 2
        for row, predicted in enumerate(toy.references(cut).values()):
            other[row, number] = (predicted - targets) ** 2
    excess = own[:, :, None] - other[None, None]
    decrease = own[:, :, 1] - own[:, :, 2]
    for name, values in (
        ("loss", own), ("reference_loss", other), ("excess", excess), ("decrease", decrease)
    ):  # fmt: skip
        error = name.replace("_loss", "") + "_error"
        np.testing.assert_allclose(result[name], values.mean(-1), rtol=1e-9)
        np.testing.assert_allclose(result[error], values.std(-1, ddof=1) / 150**0.5, rtol=1e-9)
    np.testing.assert_allclose(
        result["relative_excess"], excess.mean(-1) / other.mean(-1), rtol=1e-9
    )
    np.testing.assert_array_equal(result["trained_loss"], result["loss"][..., 1])
    np.testing.assert_array_equal(result["longest_loss"], result["loss"][..., 2])
    expected = decrease.mean(-1) > 3 * decrease.std(-1, ddof=1) / 150**0.5
    np.testing.assert_array_equal(result["holds"], expected)


def test_prompts_keep_their_first_examples_and_the_query():
    seen = []

    def predict(parameters, inputs):
        seen.append(inputs[0, :, 0].tolist())
        return np.zeros((1, len(inputs)))

    def prompts(n, seed, *, part=0, n_context=None):
        return np.tile(np.arange(n_context + 1.0)[:, None], (n, 1, 6)), np.ones(n)

    toy = Forward(predict, prompts, lambda inputs: {"one": np.ones(len(inputs))})
    PROBE(PAIR, toy, lengths=(1, 3, 5), n_prompts=2)
    assert seen == [[0, 5], [0, 1, 2, 5], [0, 1, 2, 3, 4, 5]]


def test_several_responses_lengths_below_d_and_one_example():
    task = MultiTaskRegression(n_context=4)
    made = forward_of(task, SoftmaxAttention(n_heads=3))
    rng = np.random.default_rng(0)
    weights = {name: 0.3 * rng.normal(size=(2, 1, 3, 8, 8)) for name in trajectories.WEIGHTS}
    trajectory = trajectories.from_weights(weights, d=6, n_context=4)
    result = PROBE(trajectory, made, lengths=(1, 4, 9), n_prompts=300)
    inputs, targets = made.prompts(300, 0, n_context=9)
    cut = inputs[:, [0, 9]]
    own = {name: values[:, :1] for name, values in weights.items()}
    predicted = made.predict(own, cut)
    assert predicted.shape == (2, 300, 2)
    expected = ((predicted.astype(float) - targets) ** 2).mean((1, 2))
    np.testing.assert_allclose(result["loss"].values[:, 0, 0], expected, rtol=1e-6)
    ridge = made.references(cut)["ridge"]
    np.testing.assert_allclose(
        result["reference_loss"].values[0, 0], ((ridge - targets) ** 2).mean(), rtol=1e-6
    )
    assert np.isfinite(result["holds"]).all() and (result["undefined"] == 0).all()


def test_anisotropic_covariates_and_one_head_and_one_covariate():
    task = LinearRegression(d=2, n_context=8, covariance={"rho": 0.5})
    trajectory = trajectories.from_scales([0.5], [1.5], d=2, n_context=8, isotropic=0, softmax=0)
    result = PROBE(
        trajectory, forward_of(task, SoftmaxAttention(n_heads=1)), lengths=(1, 8, 16), n_prompts=99
    )
    assert "preconditioned_gd" in flag_names(result["reference"]).values()
    assert np.isfinite(result["excess"]).all()
    task = LinearRegression(d=1, n_context=1)
    trajectory = trajectories.from_scales([0.5], [1.5], d=1, n_context=1)
    result = PROBE(
        trajectory, forward_of(task, SoftmaxAttention(n_heads=1)), lengths=(1, 2), n_prompts=99
    )
    assert np.isfinite(result["excess"]).all()


@pytest.mark.parametrize("size", [1e200, np.inf, np.nan])
def test_a_reference_that_overflows_at_a_length_leaves_a_gap(size):
    toy = forward()

    def references(inputs):
        found = toy.references(inputs)
        return found | {"wild": found["vanilla_gd"] * (size if inputs.shape[1] == 101 else 1.0)}

    made = Forward(toy.predict, toy.prompts, references)
    result = PROBE(PAIR, made, lengths=(10, 40, 100), n_prompts=3000)
    wild = result.isel(reference=2)
    for name in ("reference_loss", "reference_error", "excess", "excess_error", "relative_excess"):
        np.testing.assert_array_equal(np.isnan(wild[name].values.ravel()), [False, False, True])
    assert np.isfinite(result["excess"].isel(reference=[0, 1])).all()
    assert result["holds"].item() == 1
    assert codes(result)["nonfinite_reference"] == 1


def test_a_model_that_overflows_at_a_length_is_undefined_there_alone():
    toy = forward()

    def predict(parameters, inputs):
        return toy.predict(parameters, inputs) * (np.inf if inputs.shape[1] == 11 else 1.0)

    made = Forward(predict, toy.prompts, toy.references)
    result = PROBE(PAIR, made, lengths=(10, 40, 100), n_prompts=3000)
    np.testing.assert_array_equal(np.isnan(result["loss"].values[0, 0]), [True, False, False])
    assert np.isfinite(result["reference_loss"]).all()
    assert result["holds"].item() == 1
    assert codes(result)["nonfinite_loss"] == 1


def test_a_perfect_reference_has_no_relative_excess():
    toy = forward()

    def prompts(n, seed, **asked):
        return toy.prompts(n, seed, **asked)[0], np.zeros(n)

    made = Forward(toy.predict, prompts, toy.references)
    result = PROBE(PAIR, made, lengths=(40, 100), n_prompts=50)
    assert np.isfinite(result["excess"]).all()
    np.testing.assert_array_equal(
        np.isnan(result["relative_excess"].values[0, 0]), [[True, True], [False, False]]
    )
    assert codes(result)["perfect_reference"] == 1


@pytest.mark.parametrize("lengths", [(10, 40), (40,), (100,), (1, 2)])
def test_without_a_length_beyond_there_is_no_verdict(lengths):
    result = PROBE(PAIR, forward(), lengths=lengths, n_prompts=20)
    assert np.isnan(result["holds"].item()) and np.isnan(result["decrease"].item())
    assert np.isfinite(result["loss"]).all()
    assert codes(result)["no_length_beyond_the_trained"] == 1


def test_of_two_lengths_as_near_the_shorter_stands_for_the_trained():
    trajectory = trajectories.from_scales([0.2, -0.2], [2.0, -2.0], n_context=15)
    result = PROBE(trajectory, forward(), lengths=(5, 10, 20, 30), n_prompts=50)
    assert result["trained_loss"].item() == result["loss"].sel(length=10).item()
    np.testing.assert_array_equal(result["extrapolates"], [0, 0, 1, 1])


def test_the_margin_is_in_standard_errors():
    settings = {"lengths": (40, 100), "n_prompts": 400}
    result = PROBE(PAIR, forward(), **settings)
    ratio = (result["decrease"] / result["decrease_error"]).item()
    assert 3 < ratio < 30
    for margin, expected in ((0.99 * ratio, 1), (1.01 * ratio, 0)):
        assert PROBE(PAIR, forward(), margin=margin, **settings)["holds"].item() == expected


def test_a_model_that_predicts_nothing_does_not_fall():
    dead = trajectories.from_scales([0.0, 0.0], [0.0, 0.0])
    result = PROBE(dead, forward(), lengths=(40, 100), n_prompts=50, margin=0)
    assert (result["holds"].item(), result["decrease"].item()) == (0, 0)


def test_the_last_step_alone_unless_more_are_asked_for():
    trajectory = trajectories.learning(2, 8, 2)
    settings = {"lengths": (40, 100), "n_prompts": 20}
    last = trajectory["step"].values[-1]
    np.testing.assert_array_equal(PROBE(trajectory, forward(), **settings)["step"], [last])
    several = PROBE(trajectory, forward(), n_steps=4, **settings)["step"].values
    assert several[0] == 0 and several[-1] == last and 3 <= len(several) <= 4


@pytest.mark.parametrize("lengths", [(), (0, 5), (5, 5), (9, 3), (1.5,), "many"])
def test_lengths_that_are_none(lengths):
    with pytest.raises(InputError, match="lengths"):
        PROBE.resolve({"lengths": lengths})
    assert PROBE.resolve({"lengths": [5, 9]})["lengths"] == (5, 9)


def test_without_references_the_curves_are_the_same():
    trajectory = trajectories.from_scales([0.2, -0.2], [2.0, -2.0])
    settings = {"lengths": (5, 40, 60), "n_prompts": 400}
    whole = PROBE(trajectory, forward(), **settings)
    alone = PROBE(trajectory, forward(), **settings, references=False)
    assert alone.sizes["reference"] == 0
    for name in ("loss", "loss_error", "decrease", "holds", "since", "undefined"):
        np.testing.assert_array_equal(alone[name], whole[name])
    plots.draw(alone)
