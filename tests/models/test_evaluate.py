"""Many models on the same prompts: the order of axes, parts of a batch, threads."""

import numpy as np
import pytest
import torch

from mechicl.models.evaluate import evaluate
from tests.models.architectures import ARCHITECTURES, TASKS, prompts, random_parameters


@pytest.mark.parametrize("name", ["softmax", "linear", "one_plus_tanh"])
@pytest.mark.parametrize("on", ["one", "several"])
@pytest.mark.parametrize("leading", [(), (3,), (2, 3)])
def test_equal_to_one_model_after_another(name: str, on: str, leading: tuple[int, ...]) -> None:
    task, model = TASKS[on], ARCHITECTURES[name].model(n_heads=2)
    n_models = int(np.prod(leading))
    each = [random_parameters(model, task, seed) for seed in range(n_models)]
    stacked = {
        key: torch.stack([p[key] for p in each]).reshape(*leading, *each[0][key].shape).numpy()
        for key in each[0]
    }
    inputs = prompts(task, 1100)  # more than are predicted at once
    given = evaluate(model, task, stacked, inputs.numpy())
    expected = torch.stack([model.predict(task, p, inputs) for p in each]).numpy()
    assert given.dtype == np.float32
    assert given.shape == (*leading, 1100, *task.target_sizes.values())
    np.testing.assert_allclose(
        given.reshape(expected.shape), expected, rtol=0, atol=1e-4 * np.abs(expected).max()
    )
    assert np.abs(expected[0, :500] - expected[0, 500:1000]).max() > 0.1


def test_another_length_is_evaluated_by_the_trained_task() -> None:
    task, model = TASKS["one"], ARCHITECTURES["linear"].model(n_heads=2)
    parameters, inputs = random_parameters(model, task), prompts(task.at_length(20))
    given = evaluate(model, task, {k: v.numpy() for k, v in parameters.items()}, inputs.numpy())
    np.testing.assert_allclose(given, model.predict(task, parameters, inputs), atol=1e-4)


def test_threads_and_gradients_are_as_before() -> None:
    task, model = TASKS["one"], ARCHITECTURES["softmax"].model()
    before = torch.get_num_threads()
    weights = {key: value.numpy() for key, value in random_parameters(model, task).items()}
    evaluate(model, task, weights, prompts(task).numpy())
    assert torch.get_num_threads() == before
    assert torch.is_grad_enabled()
