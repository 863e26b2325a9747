"""The architectures of the tests, each with its weights of keys written out in NumPy."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import torch

from mechicl.models.attention import OneLayerAttention
from mechicl.models.linear_attention import LinearAttention
from mechicl.models.normalized_attention import NormalizedAttention
from mechicl.models.softmax_attention import SoftmaxAttention
from mechicl.tasks.linear_regression import LinearRegression
from mechicl.tasks.multi_task_regression import MultiTaskRegression
from mechicl.tasks.streams import generator

Task = LinearRegression | MultiTaskRegression


class Architecture(NamedTuple):
    """A model class with settings; `f` turns scores and the trained length into weights."""

    settings: dict
    slope: float
    f: Callable[[np.ndarray, int], np.ndarray]
    normalized: bool = True

    def model(self, **settings: float) -> OneLayerAttention:
        chosen = dict(self.settings)
        return chosen.pop("kind")(**chosen, **settings)


def normalized(f: Callable[[np.ndarray], np.ndarray]) -> Callable[[np.ndarray, int], np.ndarray]:
    return lambda scores, _: f(scores) / f(scores).sum()


def normalized_attention(activation: str, coefficient: float = 1.0) -> dict:
    return {"kind": NormalizedAttention, "activation": activation, "coefficient": coefficient}


ARCHITECTURES = {
    "softmax": Architecture({"kind": SoftmaxAttention}, 1.0, normalized(np.exp)),
    "linear": Architecture({"kind": LinearAttention}, 1.0, lambda s, length: s / length, False),
    "exp": Architecture(normalized_attention("exp"), 1.0, normalized(np.exp)),
    "affine": Architecture(
        normalized_attention("affine", 0.07), 0.07, normalized(lambda s: 1 + 0.07 * s)
    ),
    "square": Architecture(
        normalized_attention("square", 0.3), 0.6, normalized(lambda s: (1 + 0.3 * s) ** 2)
    ),
    "one_plus_tanh": Architecture(
        normalized_attention("one_plus_tanh"), 1.0, normalized(lambda s: 1 + np.tanh(s))
    ),
}

TASKS: dict[str, Task] = {
    "one": LinearRegression(d=3, n_context=7),
    "several": MultiTaskRegression(d=4, n_context=6, supports=((0, 1, 2), (3,), (2, 1))),
    "one-of-several": MultiTaskRegression(d=2, n_context=5, supports=((0, 1),)),
    "L=1": LinearRegression(d=2, n_context=1),
    "d=1": LinearRegression(d=1, n_context=4),
}


def random_parameters(
    model: OneLayerAttention, task: Task, seed: int = 0
) -> dict[str, torch.Tensor]:
    drawn = model.initial(task, generator("test", seed))
    return {name: 2.5 * value.double() for name, value in drawn.items()}


def prompts(task: Task, n: int = 20, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(task.sample(n, seed=seed)["inputs"].values).double()


def from_circuits(kq: np.ndarray, ov: np.ndarray) -> dict[str, torch.Tensor]:
    """Return weights with circuits KQ and OV, each (head, d_model, d_model)."""
    identity = np.broadcast_to(np.eye(kq.shape[-1]), kq.shape)
    weights = {"W_Q": identity, "W_K": kq, "W_V": np.swapaxes(ov, -1, -2), "W_O": identity}
    return {name: torch.tensor(value[None]) for name, value in weights.items()}


def written_out(
    architecture: Architecture,
    task: Task,
    parameters: Mapping[str, torch.Tensor],
    prompt: np.ndarray,
    scale: float,
) -> np.ndarray:
    """Transcribe (2.3) for one prompt with the paper's column matrices, in NumPy."""
    z, query = prompt[:-1].T, prompt[-1]  # columns z_1 .. z_L
    n = task.n_responses if isinstance(task, MultiTaskRegression) else 1
    total = np.zeros(n)
    for head in range(parameters["W_Q"].shape[1]):
        q, k, v, o = (parameters[f"W_{m}"][0, head].numpy().T for m in "QKVO")
        weights = architecture.f(scale * (z.T @ k.T @ q @ query), task.n_context)
        total += o[-n:] @ v @ z @ weights
    return total
