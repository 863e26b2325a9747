import json

import numpy as np
import pytest

from mechicl import analyses
from mechicl.analyses import Forward
from mechicl.analyses.evaluation import PART, spread_steps
from mechicl.schema import flag_names
from tests import trajectories
from tests.analyses.toy import forward

PROBE = analyses.get("approximate_loss")


def test_golden_values_of_the_closed_form():
    """CHECKED.md 1.3."""
    cases = {
        0.220923402249897086860: ([0.1, -0.1], [4.395382988750514, -4.395382988750514]),
        0.2897805114245052: ([0.3, -0.2, 0.1], [1.5, -1.0, 0.5]),
        0.372072800748052605: ([0.447213595499957939], [1.62769470019838843857875910802]),
    }
    for expected, (omega, mu) in cases.items():
        result = PROBE(trajectories.from_scales(omega, mu), forward(), n_prompts=10)
        np.testing.assert_allclose(result["approximate_loss"].values, expected, rtol=1e-11)


def test_the_measured_loss_is_the_models_and_the_gap_is_what_the_closed_form_leaves_out():
    """At (±0.2; ±2) the true loss is 0.25200(5) and L̃ 0.22859 (CHECKED.md 1.1)."""
    trajectory = trajectories.from_scales([0.2, -0.2], [2.0, -2.0])
    result = PROBE(trajectory, forward(), n_prompts=20_000)
    error = float(result["measured_error"].values[0, 0])
    assert 0.001 < error < 0.004
    assert abs(float(result["measured_loss"].values[0, 0]) - 0.2520) < 4 * error
    np.testing.assert_allclose(
        result["gap"].values, result["measured_loss"].values - 0.22859, atol=1e-5
    )


def test_references_are_scored_on_the_same_prompts():
    toy = forward()
    inputs, targets = toy.prompts(5000, 3)
    trajectory = trajectories.from_scales([0.2, -0.2], [2.0, -2.0])
    result = PROBE(trajectory, toy, n_prompts=5000, evaluation_seed=3)
    assert flag_names(result["reference"]) == {0: "zero", 1: "vanilla_gd"}
    losses = [np.mean(targets**2), np.mean((toy.references(inputs)["vanilla_gd"] - targets) ** 2)]
    np.testing.assert_allclose(result["reference_loss"].values, losses, rtol=1e-12)
    errors = np.std(targets**2, ddof=1) / np.sqrt(5000)
    np.testing.assert_allclose(result["reference_error"].values[0], errors, rtol=1e-12)


def test_every_prompt_is_used_once_and_every_model_apart():
    """A forward that returns the number of its weights, in prompts of more than one part."""

    def predict(parameters, inputs):
        assert set(parameters) == {"W_Q", "W_K", "W_V", "W_O"}
        assert parameters["W_Q"].shape[1:] == (1, 1, 6, 6)
        tag = parameters["W_O"][:, 0, 0, :, -1] * parameters["W_V"][:, 0, 0, -1, :]
        return np.broadcast_to(tag.sum(-1)[:, None], (len(tag), len(inputs)))

    def prompts(n, seed, *, part=0, n_context=None):
        assert n_context is None
        return np.zeros((n, 3, 6)), np.arange(n) + float(seed) + PART * part

    toy = Forward(predict, prompts, lambda inputs: {"zero": np.zeros(len(inputs))})
    mu = np.array([[[1.0], [2.0]], [[3.0], [4.0]], [[5.0], [6.0]]])
    result = PROBE(
        trajectories.from_scales(0 * mu + 1, mu), toy, n_prompts=20_000, evaluation_seed=7
    )
    targets = np.arange(20_000) + 7.0
    expected = ((targets - mu) ** 2).mean(-1)
    np.testing.assert_allclose(result["measured_loss"].values, expected, rtol=1e-9)


def test_another_evaluation_seed_gives_other_prompts():
    trajectory = trajectories.from_scales([0.2, -0.2], [2.0, -2.0])
    one, other = (
        PROBE(trajectory, forward(), n_prompts=100, evaluation_seed=seed) for seed in (0, 1)
    )
    assert one["measured_loss"].values != other["measured_loss"].values
    assert one["approximate_loss"].values == other["approximate_loss"].values


@pytest.mark.parametrize("n", [2, 5, 30, 1000])
@pytest.mark.parametrize(
    "steps", [[7], [0, 1], [0, 10, 20], list(range(0, 10_001, 10)), [500, 501, 9000]]
)
def test_steps_are_spread_with_both_ends(steps, n):
    chosen = spread_steps(np.array(steps), n)
    assert chosen[0] == 0 and chosen[-1] == len(steps) - 1
    assert (np.diff(chosen) > 0).all() and len(chosen) <= n
    if n >= len(steps) and len(steps) <= 2:
        assert len(chosen) == len(steps)


def test_steps_are_even_in_the_logarithm():
    steps = np.arange(0, 100_001)
    chosen = steps[spread_steps(steps, 6)]
    np.testing.assert_allclose(np.log1p(chosen), np.linspace(0, np.log1p(100_000), 6), atol=0.06)
    saved = np.arange(0, 100_001, 10)
    result = PROBE(
        trajectories.from_scales(np.full((1, 30, 1), 0.1), np.ones((1, 30, 1)), steps=saved[:30]),
        forward(),
        n_prompts=10,
        n_steps=4,
    )
    assert result["step"].values[0] == 0 and result["step"].values[-1] == 290
    assert result.sizes["step"] <= 4


def test_a_loss_that_overflows_is_undefined_and_the_other_stays():
    trajectory = trajectories.from_scales([20.0, -20.0], [1.0, -1.0])
    result = PROBE(trajectory, forward(), n_prompts=50)
    assert np.isnan(result["approximate_loss"].values) and np.isnan(result["gap"].values)
    assert np.isfinite(result["measured_loss"].values)
    assert json.loads(result.attrs["n_undefined"]) == {
        "nonfinite_loss": 1,
        "nonfinite_parameters": 0,
    }


def test_dead_heads_predict_zero():
    result = PROBE(trajectories.from_scales([0.0, 0.0], [0.0, 0.0]), forward(), n_prompts=200)
    np.testing.assert_allclose(result["approximate_loss"].values, 1.1, rtol=1e-12)
    zero = result["reference_loss"].values[0]
    np.testing.assert_allclose(result["measured_loss"].values, zero, rtol=1e-12)
    assert result["undefined"].values == 0
