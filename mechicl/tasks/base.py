"""What a task is: a distribution over prompts, with its constants and its reference predictors."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple, Self, TypeVar

import numpy as np
import xarray as xr
from jaxtyping import Float

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
        "multi_task_regression": "mechicl.tasks.multi_task_regression",
    },
)


class Prompts(NamedTuple):
    """A batch of prompts: what the model reads, and what it is asked to predict.

    Targets have no axes of their own after the batch, or those of `Task.response_dims`.
    """

    inputs: "Float[Tensor, '*models batch pos d_model']"
    targets: "Float[Tensor, '*models_batch_response']"


class Task(Config, ABC):
    """A distribution over contexts: a config that is torch-free, and the sampling that it defines.

    A prompt is a deterministic map of independent standard normals, so that whoever owns the random
    numbers (a training worker, a notebook, a test) also owns the prompts.
    """

    name: str

    @property
    @abstractmethod
    def d_model(self) -> int:
        """Width of one input position."""

    @property
    @abstractmethod
    def n_positions(self) -> int:
        """Positions in a prompt, the query's included."""

    @property
    def response_sizes(self) -> dict[str, int]:
        """Axes of one target, by dim and in order: none where it is a single number."""
        return {}

    @property
    @abstractmethod
    def n_normals(self) -> int:
        """Standard normals that one prompt is made from."""

    @abstractmethod
    def constants(self) -> dict[str, tuple[Var, float | np.ndarray]]:
        """Return the numbers and arrays that a run stores for probes, each with its declaration."""

    @abstractmethod
    def prompts(self, normals: "Float[Tensor, '*models batch n_normals']") -> Prompts:
        """Return the prompts that standard normals make; a pure function of them."""

    @abstractmethod
    def loss(
        self,
        predictions: "Float[Tensor, '*batch *response']",
        targets: "Float[Tensor, '*batch *response']",
    ) -> "Float[Tensor, '*batch']":
        """Return the loss of each prompt."""

    @abstractmethod
    def references(
        self, inputs: Float[np.ndarray, "*batch pos d_model"]
    ) -> Mapping[str, Float[np.ndarray, "*batch_response"]]:
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
            `inputs` (batch, pos, d_model) and `targets` (batch, and the dims of a response),
            float32.

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
                f"{_LARGEST_SAMPLE / 2**30:.0f} GiB; take fewer, or several parts (part=)"
            )
        normals = torch.randn(n, self.n_normals, generator=generator("sample", seed, part))
        prompts = self.prompts(normals)
        return xr.Dataset(
            {
                "inputs": (("batch", "pos", "d_model"), prompts.inputs.numpy()),
                "targets": (("batch", *self.response_sizes), prompts.targets.numpy()),
            },
            attrs={"task": self.model_dump_json(), "n": n, "seed": seed, "part": part},
        )


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
