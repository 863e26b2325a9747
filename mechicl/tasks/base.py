"""What a task is: a distribution over prompts, with its constants and its reference predictors."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, NamedTuple, Self, TypeVar

import numpy as np
import pydantic
import xarray as xr
from jaxtyping import Float, Shaped

from mechicl.config import Config
from mechicl.errors import InputError, integer
from mechicl.registry import Registry
from mechicl.schema import Var

if TYPE_CHECKING:
    from torch import Tensor

Registered = TypeVar("Registered", bound="Task")

_LARGEST_SAMPLE = 2**32  # bytes of random numbers

_REGISTRY: "Registry[type[Task]]" = Registry(
    "task",
    {
        "linear_regression": "mechicl.tasks.linear_regression",
        "latent_regression": "mechicl.tasks.latent_regression",
        "markov_chain": "mechicl.tasks.markov_chain",
        "multi_task_regression": "mechicl.tasks.multi_task_regression",
    },
)


class Prompts(NamedTuple):
    """A batch of prompts: what the model reads, and what it is asked to predict.

    Inputs have the axes of `Task.input_dims` after the batch, targets those of `Task.target_sizes`.
    """

    inputs: "Tensor"
    targets: "Tensor"


class Task(Config, ABC):
    """A distribution over contexts: a config that is torch-free, and the sampling that it defines.

    A prompt is a deterministic map of independent standard normals, so that whoever owns the random
    numbers (a training worker, a notebook, a test) also owns the prompts. Built-in tasks are
    `ContinuousTask`s or `TokenTask`s.
    """

    name: str
    input_kind: ClassVar[Literal["continuous", "tokens"]]
    """What prompts are made of; a model reads one kind and refuses the other."""

    @property
    def input_dtype(self) -> type[np.number]:
        """Type of inputs as models read them: float32, or int64 for token ids."""
        return np.int64 if self.input_kind == "tokens" else np.float32

    @property
    @abstractmethod
    def n_positions(self) -> int:
        """Positions of a prompt that the model reads."""

    @property
    @abstractmethod
    def input_dims(self) -> tuple[str, ...]:
        """Axes of the input of one prompt."""

    @property
    @abstractmethod
    def target_sizes(self) -> dict[str, int]:
        """Axes of one target, by dim and in order: none where it is a single number."""

    @property
    def prediction_sizes(self) -> dict[str, int]:
        """Axes of what a model predicts for one prompt: those of its target, unless a task says."""
        return self.target_sizes

    @property
    @abstractmethod
    def n_normals(self) -> int:
        """Standard normals that one prompt is made from."""

    @abstractmethod
    def constants(self) -> dict[str, tuple[Var, float | np.ndarray]]:
        """Return the numbers and arrays that a run stores for probes, each with its declaration."""

    def examples(self, normals: "Float[Tensor, '*models batch n_normals']") -> "Tensor":
        """Return what a training step is given for each prompt: (*models, batch, ...).

        The part of the map from normals to prompts that is better done once and ahead of the step
        than inside it. The normals themselves, unless a task says otherwise.
        """
        return normals

    def latents(
        self, normals: "Float[Tensor, '*models batch n_normals']"
    ) -> "Mapping[str, tuple[tuple[str, ...], Tensor]]":
        """Return what a prompt is about and the model is not told, by name: dims and values.

        Dims are those after the batch. A sample has them as variables; none, unless a task says.
        """
        del normals
        return {}

    @abstractmethod
    def prompts(self, examples: "Shaped[Tensor, '*models batch n_numbers']") -> Prompts:
        """Return the prompts that `examples` stand for; a pure function, part of the step."""

    @abstractmethod
    def loss(
        self,
        predictions: "Float[Tensor, '*batch_prediction']",
        targets: "Shaped[Tensor, '*batch_target']",
    ) -> "Float[Tensor, '*batch']":
        """Return the loss of each prompt."""

    @abstractmethod
    def references(
        self, inputs: Shaped[np.ndarray, "*batch_input"]
    ) -> Mapping[str, Float[np.ndarray, "*batch_prediction"]]:
        """Return the predictions of the task's exact and classical predictors, in float64."""

    def at_length(self, n_context: int) -> Self:
        """Return the same distribution with contexts of another length.

        Its prompts are what a model trained on this task is asked at that length; predictors that
        are fitted to a length (`references`) stay those of this task.

        Raises
        ------
        InputError
            If `n_context` is no length, or the task has none.
        """
        del n_context
        raise InputError(f"task {self.name!r} has no contexts of examples, hence no other length")

    def sample(self, n: int, *, seed: int, part: int = 0) -> xr.Dataset:
        """Draw `n` prompts, the same ones for the same arguments, apart from all training data.

        Parameters
        ----------
        n
            How many.
        seed, part
            Which ones. Parts of one seed are independent, so that a large sample can be drawn one
            part after another.

        Returns
        -------
        xr.Dataset
            `inputs` and `targets`: batch, and the dims of one of them; float32, and token ids
            int64. Besides, the `latents` of tasks that have some.

        Raises
        ------
        InputError
            If `n` is not an integer from 1, `seed` and `part` not from 0, or the sample above 4
            GiB.
        """
        import torch

        from mechicl.tasks.streams import generator

        n, seed = integer("n of a sample", n, 1), integer("seed of a sample", seed, 0)
        part = integer("part of a sample", part, 0)
        nbytes = 4 * n * self.n_normals
        if nbytes > _LARGEST_SAMPLE:
            raise InputError(
                f"a sample of {n} prompts takes {nbytes / 2**30:.0f} GiB, above the limit of "
                f"{_LARGEST_SAMPLE / 2**30:.0f} GiB; take fewer (n, or n_prompts of "
                "a probe), or several parts (part=)"
            )
        normals = torch.randn(n, self.n_normals, generator=generator("sample", seed, part))
        prompts = self.prompts(self.examples(normals))
        return xr.Dataset(
            {
                "inputs": (("batch", *self.input_dims), prompts.inputs.numpy()),
                "targets": (("batch", *self.target_sizes), prompts.targets.numpy()),
            }
            | {
                name: (("batch", *dims), value.numpy())
                for name, (dims, value) in self.latents(normals).items()
            },
            attrs={"task": self.model_dump_json(), "n": n, "seed": seed, "part": part},
        )


class ContinuousTask(Task):
    """A task whose inputs are vectors, (batch, pos, d_model)."""

    input_kind = "continuous"

    @property
    @abstractmethod
    def d_model(self) -> int:
        """Width of one input position."""

    @property
    def input_dims(self) -> tuple[str, ...]:
        """Positions, and the entries of each."""
        return ("pos", "d_model")

    @property
    def target_sizes(self) -> dict[str, int]:
        """A target is a number, unless a task has several responses."""
        return {}


class TokenTask(Task):
    """A task whose inputs are token ids, (batch, pos), and whose predictions are their logits.

    Attributes
    ----------
    temperature
        τ: what a model trained on the task puts out is divided by it to give logits.
    """

    input_kind = "tokens"
    temperature: Annotated[float, pydantic.Field(gt=0)] = 1.0

    @property
    @abstractmethod
    def d_vocab(self) -> int:
        """How many tokens there are."""

    @property
    def input_dims(self) -> tuple[str, ...]:
        """Positions."""
        return ("pos",)


def register(task: type[Registered]) -> type[Registered]:
    """Register a task class under the default of its `name` field."""
    _REGISTRY.add(task.model_fields["name"].default, task, owner=task.__module__)
    return task


def get(name: str) -> type[Task]:
    """Return the task class called `name`; raise InputError with near matches if there is none."""
    return _REGISTRY.get(name)


def names() -> tuple[str, ...]:
    """Return the names of all tasks, sorted."""
    return _REGISTRY.names()
