"""Evaluating many models on the same prompts, on all cores."""

import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import torch
from jaxtyping import Float

from mechicl.models.base import Model
from mechicl.tasks import Task

_PROMPTS_AT_ONCE = 1024  # so that what a forward pass keeps stays in a core's cache


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
    inputs: Float[np.ndarray, "batch pos d_model"],
) -> Float[np.ndarray, "*models_batch_response"]:
    """Predict the target of every prompt with every model, in float32.

    Parameters
    ----------
    parameters
        By name, with any leading axes `*models`.
    inputs
        Prompts that all models read.
    """
    stacked = {name: np.asarray(value, np.float32) for name, value in parameters.items()}
    name, declared = next(iter(model.parameters(task).items()))
    inner = len(declared.dims) - len(("seed", "step"))
    leading = stacked[name].shape[: stacked[name].ndim - inner]
    shape = (*leading, len(inputs), *task.response_sizes.values())
    predictions = np.empty(shape, np.float32)
    parts = torch.from_numpy(np.ascontiguousarray(inputs, np.float32)).split(_PROMPTS_AT_ONCE)

    def fill(index: tuple[int, ...]) -> None:
        weights = {name: torch.from_numpy(value[index].copy()) for name, value in stacked.items()}
        with torch.no_grad():  # of this thread
            predicted = [model.predict(task, weights, part) for part in parts]
        predictions[index] = torch.cat(predicted).numpy()

    with one_thread_an_operation(), ThreadPoolExecutor(os.cpu_count()) as pool:
        for _ in pool.map(fill, np.ndindex(leading)):
            pass
    return predictions
