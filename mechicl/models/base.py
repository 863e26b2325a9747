"""What an architecture is: a config, its parameters, a batched forward, and a HookedTransformer."""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, Literal, TypeVar

import numpy as np

from mechicl.config import Config
from mechicl.errors import InputError
from mechicl.registry import Registry
from mechicl.schema import Var
from mechicl.tasks import Task

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from jaxtyping import Float, Shaped
    from torch import Tensor
    from transformer_lens import HookedTransformer

Registered = TypeVar("Registered", bound="Model")
Kind = TypeVar("Kind", bound=Task)

_REGISTRY: "Registry[type[Model]]" = Registry(
    "model",
    {
        "decoder": "mechicl.models.decoder",
        "linear_attention": "mechicl.models.linear_attention",
        "normalized_attention": "mechicl.models.normalized_attention",
        "pooled_attention": "mechicl.models.pooled_attention",
        "softmax_attention": "mechicl.models.softmax_attention",
        "sparse_attention": "mechicl.models.sparse_attention",
    },
)


class Model(Config, ABC):
    """An architecture: a config that is torch-free, with two equal forward passes.

    `predict` is written for speed, over any leading axes of the parameters and for what the loss
    reads alone; `hooked` gives the same function as a HookedTransformer, to look into.
    """

    name: str
    input_kind: ClassVar[Literal["continuous", "tokens"]]
    """What the model reads; tasks of the other kind are refused."""

    def refusal(self, task: Task) -> str | None:
        """Return why this model does not read the prompts of `task`, or None if it does."""
        if self.input_kind == task.input_kind:
            return None
        kinds = {"continuous": "continuous inputs", "tokens": "token ids"}
        return (
            f"model {self.name!r} reads {kinds[self.input_kind]}, and task {task.name!r} gives "
            f"{kinds[task.input_kind]}"
        )

    @property
    def dropout_rate(self) -> float:
        """Probability with which training sets an activation to 0; see `n_dropout`."""
        return 0.0

    def n_dropout(self, task: Task) -> int:
        """Return how many activations of one prompt training may drop: 0 where none is."""
        del task
        return 0

    @abstractmethod
    def parameters(self, task: Task) -> dict[str, Var]:
        """Declare the parameters as stored: dims (seed, step, layer, ...)."""

    def layer_axes(self, task: Task) -> dict[str, int]:
        """Return where `layer` is, from the end, in the parameters that every layer has."""
        return {
            name: var.dims.index("layer") - len(var.dims)
            for name, var in self.parameters(task).items()
            if "layer" in var.dims
        }

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
        inputs: "Shaped[Tensor, '... batch *input']",
    ) -> "Float[Tensor, '*models_batch_prediction']":
        """Predict the target of each prompt, for every model of the leading axes `*models`.

        The leading axes of `inputs` are those of the parameters, or none: then every model reads
        the same prompts. `task` is the one that the model is trained on; `inputs` may be longer or
        shorter than its prompts where the model reads any length.
        """

    def predict_dropped(
        self,
        task: Task,
        parameters: "Mapping[str, Float[Tensor, '*models layer ...']]",
        inputs: "Shaped[Tensor, '... batch *input']",
        kept: "Float[Tensor, '... batch n_dropout']",
    ) -> "Float[Tensor, '*models_batch_prediction']":
        """Predict as `predict` does, with activations multiplied by `kept`: 0, 1/(1 − rate) or 1.

        Called by training alone, and of models with an `n_dropout`.
        """
        raise NotImplementedError(f"{type(self).__name__} has an n_dropout and no predict_dropped")

    def attention(
        self,
        task: Task,
        parameters: "Mapping[str, Float[Tensor, '*models layer ...']]",
        inputs: "Shaped[Tensor, 'batch *input']",
    ) -> "Float[Tensor, '*models layer head batch query_pos lag']":
        """Return attention weights by lag, at the positions whose predictions the loss reads.

        Lag 0 is the position itself, lag i the one i before it; weights of lags that reach before
        the prompt are 0.

        Raises
        ------
        InputError
            If the architecture has no batched patterns.
        """
        del task, parameters, inputs
        raise InputError(
            f"model {self.name!r} gives no batched attention patterns; run.cache has those of any "
            "checkpoint, at hook_pattern"
        )

    def windows(
        self, task: Task, inputs: "Shaped[Tensor, 'batch *input']"
    ) -> "Shaped[Tensor, 'sequence *read']":
        """Return the sequences in which the `hooked` model reads prompts: these, as they are."""
        del task
        return inputs

    @abstractmethod
    def hooked(self, task: Task, parameters: "Mapping[str, Tensor]") -> "HookedTransformer":
        """Return a HookedTransformer that holds a copy of `parameters`, (layer, ...)."""

    @abstractmethod
    def answers(
        self, task: Task, output: "Float[Tensor, '*variants sequence ...']"
    ) -> "Float[Tensor, '*variants batch ...']":
        """Return the predictions in what the `hooked` model returns for what `windows` gives.

        They are shaped as those of `predict`. Axes before that of the sequences stay.
        """


def of_kind(model: Model, task: Task, kind: type[Kind]) -> Kind:
    """Return `task`, known to be of the kind that `model` reads; raise InputError if it is not."""
    if not isinstance(task, kind):
        raise InputError(model.refusal(task) or f"task {task.name!r} is no {kind.__name__}")
    return task


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
