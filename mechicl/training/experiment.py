"""What every run has, whoever trained it: a task, a model and seeds."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import pydantic

from mechicl import models, tasks
from mechicl.checkpoints.layout import INDECISIVE, settings_digest
from mechicl.config import Config, Name
from mechicl.errors import canonical

MOST_STEPS = 2**24
"""Steps are counted in float32, as far as that is exact."""

_NOT_SET = object()


class Experiment(Config):
    """A model on a task, for one or more seeds.

    Attributes
    ----------
    name, description
        What it is called, and what it shows, in a line.
    task, model
        A registered task and architecture, each a mapping with `name` and its settings.
    seeds
        One independent model each.
    """

    name: Name
    description: str = ""
    task: pydantic.SerializeAsAny[tasks.Task]
    model: pydantic.SerializeAsAny[models.Model]
    seeds: tuple[Annotated[int, pydantic.Field(ge=0, lt=2**63)], ...] = (0,)

    @pydantic.field_validator("task", mode="before")
    @classmethod
    def _task_by_name(cls, given: object) -> object:
        return _by_name(given, tasks.get, tasks.Task)

    @pydantic.field_validator("model", mode="before")
    @classmethod
    def _model_by_name(cls, given: object) -> object:
        return _by_name(given, models.get, models.Model)

    @pydantic.field_validator("seeds")
    @classmethod
    def _seeds_differ(cls, seeds: tuple[int, ...]) -> tuple[int, ...]:
        if not seeds:
            raise ValueError("must have at least 1 seed")
        if len(set(seeds)) != len(seeds):
            raise ValueError("seeds repeat; each is a model of its own")
        return seeds

    @pydantic.model_validator(mode="after")
    def _model_reads_task(self) -> "Experiment":
        refusal = self.model.refusal(self.task)
        if refusal is not None:
            raise ValueError(refusal)
        return self

    def settings(self) -> dict[str, Any]:
        """Return all settings, defaults included, as plain JSON types."""
        return self.model_dump(mode="json")

    def flat(self) -> dict[str, Any]:
        """Return the settings by dotted key, `model.n_heads`; a list is one value."""
        return dict(leaves(self.settings()))

    @property
    def digest(self) -> str:
        """Short hash of what decides the numbers: all settings but name and description."""
        return settings_digest(self.settings())

    def differences(self, other: "Experiment") -> list[str]:
        """Return each setting in which `other` differs, as `key: ours -> theirs`.

        A setting that one of the two has not is "not set"; one that is a mapping in one of them
        alone is told as a whole.
        """
        changed = sorted(_differences(self.settings(), other.settings()))
        return [text for key, text in changed if key not in INDECISIVE]


class ImportedRecipe(Experiment):
    """What is known of a run that mechicl did not train: no optimiser, no batches.

    Attributes
    ----------
    steps
        Steps of its checkpoints, increasing: as many updates as whoever trained it had made.
    weights
        Hash of all its parameters.
    """

    steps: Annotated[
        tuple[Annotated[int, pydantic.Field(ge=0, le=MOST_STEPS)], ...],
        pydantic.Field(min_length=1),
    ]
    weights: str

    @property
    def n_steps(self) -> int:
        """The last of its steps."""
        return self.steps[-1]


def leaves(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the settings by dotted key, those of sections one by one."""
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _by_name(given: object, find: Any, base: type) -> object:
    if isinstance(given, base) or not isinstance(given, Mapping):
        return given
    if "name" not in given:
        raise ValueError("name is required")
    return find(given["name"]).model_validate({**given, "name": canonical(given["name"])})


def _differences(
    ours: Mapping[str, Any], theirs: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, str]]:
    for key in {**ours, **theirs}:
        mine, other = ours.get(key, _NOT_SET), theirs.get(key, _NOT_SET)
        if isinstance(mine, Mapping) and isinstance(other, Mapping):
            yield from _differences(mine, other, f"{prefix}{key}.")
        elif mine != other:
            said = ("not set" if value is _NOT_SET else repr(value) for value in (mine, other))
            yield f"{prefix}{key}", f"{prefix}{key}: " + " -> ".join(said)
