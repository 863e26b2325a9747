"""What an architecture is: a config, its parameters, a batched forward, and a HookedTransformer."""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from mechicl.config import Config
from mechicl.registry import Registry
from mechicl.schema import Var
from mechicl.tasks import Task

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from jaxtyping import Float
    from torch import Tensor
    from transformer_lens import HookedTransformer

Registered = TypeVar("Registered", bound="Model")

_REGISTRY: "Registry[type[Model]]" = Registry(
    "model",
    {
        "linear_attention": "mechicl.models.linear_attention",
        "normalized_attention": "mechicl.models.normalized_attention",
        "softmax_attention": "mechicl.models.softmax_attention",
    },
)


class Model(Config, ABC):
    """An architecture: a config that is torch-free, with two equal forward passes.

    `predict` is written for speed, over any leading axes of the parameters and for what the loss
    reads alone; `hooked` gives the same function as a HookedTransformer, to look into.
    """

    name: str

    @abstractmethod
    def parameters(self, task: Task) -> dict[str, Var]:
        """Declare the parameters as stored: dims (seed, step, layer, ...)."""

    @abstractmethod
    def sizes(self, task: Task) -> dict[str, int]:
        """Return the size of every dim of the parameters but seed and step."""

    @abstractmethod
    def constants(self) -> dict[str, tuple[Var, float | np.ndarray]]:
        """Return the scalars of the architecture that a run stores for probes."""

    @abstractmethod
    def initial(self, task: Task, generator: "torch.Generator") -> "dict[str, Tensor]":
        """Draw the parameters of one untrained model: (layer, ...), float32."""

    @abstractmethod
    def predict(
        self,
        task: Task,
        parameters: "Mapping[str, Float[Tensor, '*models layer ...']]",
        inputs: "Float[Tensor, '... batch pos d_model']",
    ) -> "Float[Tensor, '*models_batch_response']":
        """Predict the target of each prompt, for every model of the leading axes `*models`.

        The leading axes of `inputs` are those of the parameters, or none: then every model reads
        the same prompts. `task` is the one that the model is trained on; `inputs` may be longer or
        shorter than its prompts.
        """

    @abstractmethod
    def hooked(self, task: Task, parameters: "Mapping[str, Tensor]") -> "HookedTransformer":
        """Return a HookedTransformer that holds a copy of `parameters`, (layer, ...)."""


def register(model: type[Registered]) -> type[Registered]:
    """Register a model class under the default of its `name` field."""
    _REGISTRY.add(model.model_fields["name"].default, model, owner=model.__module__)
    return model


def get(name: str) -> type[Model]:
    """Return the model class called `name`; raise InputError with near matches if there is none."""
    return _REGISTRY.get(name)


def names() -> tuple[str, ...]:
    """Return the names of all models, sorted."""
    return _REGISTRY.names()
