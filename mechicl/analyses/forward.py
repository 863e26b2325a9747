"""What forward probes ask of a run, made from its task and its model."""

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr

from mechicl.analyses.probe import Forward

if TYPE_CHECKING:
    from torch import Tensor
    from transformer_lens import HookedTransformer

    from mechicl.models import Model
    from mechicl.tasks import Task


def forward_of(task: "Task", model: "Model", **of_the_run: Any) -> Forward:
    """Return the `Forward` of a task and a model; `of_the_run` are those of its fields.

    They are `load`, `checkpoints` and `against`: what only a run has.
    """
    return Forward(
        predict=partial(_predict, task, model),
        prompts=partial(_prompts, task),
        references=task.references,
        attention=partial(_attention, task, model),
        hooked=partial(_hooked, task, model),
        reads=partial(_reads, task, model),
        answers=partial(_answers, task, model),
        loss=partial(_loss, task),
        sample=partial(_sample, task),
        **of_the_run,
    )


def _prompts(
    task: "Task", n: int, seed: int, *, part: int = 0, n_context: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    asked = task if n_context is None else task.at_length(n_context)
    sample = asked.sample(n, seed=seed, part=part)
    return sample["inputs"].values, sample["targets"].values


def _sample(task: "Task", n: int, seed: int, *, part: int = 0) -> xr.Dataset:
    return task.sample(n, seed=seed, part=part)


def _predict(
    task: "Task", model: "Model", parameters: Mapping[str, np.ndarray], inputs: np.ndarray
) -> np.ndarray:
    from mechicl.models.evaluate import evaluate

    return evaluate(model, task, parameters, inputs)


def _attention(
    task: "Task", model: "Model", parameters: Mapping[str, np.ndarray], inputs: np.ndarray
) -> np.ndarray:
    from mechicl.models.evaluate import attention

    return attention(model, task, parameters, inputs)


def _hooked(
    task: "Task", model: "Model", parameters: Mapping[str, np.ndarray]
) -> "HookedTransformer":
    import torch

    weights = {name: torch.from_numpy(np.array(value)) for name, value in parameters.items()}
    return model.hooked(task, weights).eval()


def _reads(
    task: "Task", model: "Model", inputs: np.ndarray, dtype: type[np.floating] = np.float32
) -> "Tensor":
    import torch

    wanted = task.input_dtype if task.input_kind == "tokens" else dtype
    return model.windows(task, torch.from_numpy(np.array(inputs, wanted, order="C")))


def _answers(task: "Task", model: "Model", output: "Tensor") -> np.ndarray:
    return model.answers(task, output).detach().cpu().numpy()


def _loss(task: "Task", predictions: np.ndarray, targets: np.ndarray) -> np.ndarray:
    import torch

    return task.loss(torch.from_numpy(predictions), torch.from_numpy(targets)).numpy()
