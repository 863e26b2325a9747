"""Normalised activations at large scores, and settings that are refused."""

import numpy as np
import pydantic
import pytest
import torch

from mechicl.models.normalized_attention import NormalizedAttention
from mechicl.tasks.linear_regression import LinearRegression

TASK = LinearRegression(d=2, n_context=3)


@pytest.mark.parametrize("activation", ["exp", "one_plus_tanh"])
def test_large_scores_neither_overflow_nor_vanish(activation: str) -> None:
    """In float32 what float64 says; 1 + tanh(-12) is 0 in float32, and 0/0 is no weight."""
    model = NormalizedAttention(activation=activation)
    scores = torch.tensor([-12.0, -11.5, -12.5])
    exact = np.exp(scores.double().numpy() * (2 if activation == "one_plus_tanh" else 1))
    if activation == "one_plus_tanh":
        exact = 2 * exact / (1 + exact)
    weights = model.weigh(TASK, scores, 0)
    np.testing.assert_allclose(weights, exact / exact.sum(), rtol=1e-5)
    assert (1 + scores.tanh()).sum() == 0, "the naive form would do"
    large = model.weigh(TASK, torch.tensor([200.0, -200.0, 3.0]), 0)
    assert large.isfinite().all()
    assert float(large.sum()) == pytest.approx(1)


@pytest.mark.parametrize("activation", ["exp", "affine", "square", "one_plus_tanh"])
def test_an_only_key_has_all_the_weight(activation: str) -> None:
    scores = torch.tensor([[-30.0], [-3.0], [0.0], [5.0], [30.0]])
    weights = NormalizedAttention(activation=activation).weigh(TASK, scores, -1)
    torch.testing.assert_close(weights, torch.ones_like(weights))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"activation": "exp", "coefficient": 2.0}, "exp has no coefficient; score_scale"),
        ({"activation": "one_plus_tanh", "coefficient": 0.5}, "has no coefficient"),
        ({"activation": "affine", "coefficient": 0.0}, "greater than 0"),
        ({"activation": "affine", "coefficient": float("inf")}, "finite"),
        ({"activation": "relu"}, "'exp', 'affine', 'square' or 'one_plus_tanh'"),
        ({"n_heads": 0}, "greater than or equal to 1"),
        ({"score_scale": 0}, "greater than 0"),
    ],
)
def test_bad_settings_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(pydantic.ValidationError, match=message):
        NormalizedAttention(**settings)
