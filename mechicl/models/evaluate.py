"""Evaluating many models on the same prompts, on all cores."""

import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import torch
from jaxtyping import Float, Shaped

from mechicl.models.base import Model
from mechicl.tasks import Task

_PROMPTS_AT_ONCE = 1024  # so that what a forward pass keeps stays in a core's cache
_NUMBERS_AT_ONCE = 2**22


@contextmanager
def one_thread_an_operation() -> Iterator[None]:
    """Give torch one thread an operation, for callers that run operations side by side.

    OpenMP across operations this small loses to a busy neighbour, and to itself.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def evaluate(
    model: Model,
    task: Task,
    parameters: Mapping[str, Float[np.ndarray, "..."]],
    inputs: Shaped[np.ndarray, "batch *input"],
) -> Float[np.ndarray, "*models_batch_prediction"]:
    """Predict the target of every prompt with every model, in float32.

    Parameters
    ----------
    parameters
        By name, with any leading axes `*models`.
    inputs
        Prompts that all models read.
    """
    return _each(model, task, parameters, inputs, model.predict, batch_axis=0)


def attention(
    model: Model,
    task: Task,
    parameters: Mapping[str, Float[np.ndarray, "..."]],
    inputs: Shaped[np.ndarray, "batch *input"],
) -> Float[np.ndarray, "*models layer head batch query_pos lag"]:
    """Return the attention weights of every model on every prompt by lag, in float32.

    As `Model.attention` defines them, which raises InputError where there are none.
    """
    return _each(model, task, parameters, inputs, model.attention, batch_axis=2)


def _each(
    model: Model,
    task: Task,
    parameters: Mapping[str, Float[np.ndarray, "..."]],
    inputs: Shaped[np.ndarray, "batch *input"],
    function: Callable[[Task, Mapping[str, torch.Tensor], torch.Tensor], torch.Tensor],
    *,
    batch_axis: int,
) -> Float[np.ndarray, "..."]:
    """Apply `function` to one model after another and a few prompts at a time, on all cores."""
    stacked = {name: np.asarray(value, np.float32) for name, value in parameters.items()}
    name, declared = next(iter(model.parameters(task).items()))
    inner = len(declared.dims) - len(("seed", "step"))
    leading = stacked[name].shape[: stacked[name].ndim - inner]
    prompts = torch.from_numpy(np.ascontiguousarray(inputs, task.input_dtype))
    size = max(1, prompts[:1].numel())
    parts = prompts.split(max(1, min(_PROMPTS_AT_ONCE, _NUMBERS_AT_ONCE // size)))

    def of_one(index: tuple[int, ...]) -> np.ndarray:
        weights = {
            name: torch.from_numpy(np.array(value[index])) for name, value in stacked.items()
        }
        with torch.no_grad():  # of this thread
            return torch.cat([function(task, weights, part) for part in parts], batch_axis).numpy()

    indices = list(np.ndindex(leading))
    with one_thread_an_operation(), ThreadPoolExecutor(os.cpu_count()) as pool:
        results = pool.map(of_one, indices)
        first = next(results)
        values = np.empty((len(indices), *first.shape), np.float32)
        values[0] = first
        for number, value in enumerate(results, start=1):
            values[number] = value
    return values.reshape(*leading, *first.shape)
