"""Linear attention: one step of GD, and a divisor that does not follow the prompt."""

import numpy as np
import pytest
import torch

from mechicl.errors import InputError
from mechicl.models.linear_attention import LinearAttention, trained_length
from mechicl.tasks.linear_regression import LinearRegression
from mechicl.theory import regressors
from tests.models.architectures import from_circuits, prompts
from tests.models.architectures import random_parameters as drawn

TASK = LinearRegression(d=3, n_context=7)


def one_step(eta: float, n_heads: int) -> dict[str, torch.Tensor]:
    kq, ov = np.zeros((2, n_heads, 4, 4))
    kq[:, :3, :3] = eta / n_heads * np.eye(3)
    ov[:, -1, -1] = 1.0
    return from_circuits(kq, ov)


@pytest.mark.parametrize("n_heads", [1, 4])
def test_diagonal_circuits_are_one_step_of_gradient_descent(n_heads: int) -> None:
    inputs = prompts(TASK, 50).numpy()
    x, y, query = inputs[:, :-1, :-1], inputs[:, :-1, -1], inputs[:, -1, :-1]
    model = LinearAttention(n_heads=n_heads)
    given = model.predict(TASK, one_step(0.8, n_heads), torch.from_numpy(inputs))
    expected = regressors.vanilla_gd(x, y, query, learning_rate=0.8)
    np.testing.assert_allclose(given, expected, rtol=0, atol=1e-12)
    debiased = regressors.debiased_gd(x, y, query, learning_rate=0.8)
    assert np.abs(given.numpy() - debiased).max() > 0.1


@pytest.mark.parametrize("length", [1, 3, 30])
def test_the_divisor_is_the_trained_length_at_every_length(length: int) -> None:
    """At L′ examples the step has rate η·L′/L, in both forward passes."""
    inputs = prompts(TASK.at_length(length), 50)
    x, y, query = inputs[:, :-1, :-1], inputs[:, :-1, -1], inputs[:, -1, :-1]
    model, parameters = LinearAttention(n_heads=1), one_step(0.8, 1)
    expected = 0.8 / 7 * torch.einsum("nl,nld,nd->n", y, x, query)
    given = model.predict(TASK, parameters, inputs)
    hooked = model.answers(TASK, model.hooked(TASK, parameters)(inputs)).detach()
    torch.testing.assert_close(given, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(hooked, expected, rtol=0, atol=1e-12)
    other = model.predict(TASK.at_length(length), parameters, inputs)
    torch.testing.assert_close(other * length, given * 7, rtol=0, atol=1e-12)


def test_scores_enter_linearly() -> None:
    model = LinearAttention(n_heads=2)
    parameters, inputs = drawn(model, TASK), prompts(TASK)
    doubled = {**parameters, "W_K": 2 * parameters["W_K"]}
    torch.testing.assert_close(
        model.predict(TASK, doubled, inputs), 2 * model.predict(TASK, parameters, inputs)
    )


def test_a_task_without_length_is_refused() -> None:
    class Lengthless:
        name = "chain"

    with pytest.raises(InputError, match=r"task 'chain' has none; choose another model"):
        trained_length(Lengthless())
    assert trained_length(TASK) == 7
