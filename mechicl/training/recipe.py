"""Recipes: everything that decides what is trained, from a YAML file and the settings over it."""

from collections.abc import Mapping
from contextlib import suppress
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic

from mechicl import models, tasks
from mechicl.checkpoints import Schedule
from mechicl.checkpoints.layout import ORIGIN
from mechicl.config import Config, parse_yaml, read_yaml
from mechicl.errors import DamagedRunError, InputError, canonical, invalid, unknown
from mechicl.paths import expanded
from mechicl.training.experiment import MOST_STEPS, Experiment, ImportedRecipe, leaves

_PACKAGE = "mechicl.recipes"


class OptimizerConfig(Config):
    """Update rule, as `torch.optim` defines it.

    Attributes
    ----------
    name
        `adam`, `adamw` (weight decay decoupled from the gradient) or `sgd` (without momentum).
    learning_rate
        The largest of a run.
    schedule
        `constant`, or `cosine`: times ½(1 + cos(πt/T)) in update t + 1 of T.
    warmup_steps
        Over so many updates at the start the rate rises to that in equal steps; a run that is
        shorter does not reach it.
    betas, eps
        Of Adam and AdamW.
    weight_decay
        Added to the gradient by `adam` and `sgd`, applied to the weights by `adamw`.
    clip_norm
        Largest norm of a model's whole gradient; None leaves it as it is.
    """

    name: Literal["adam", "adamw", "sgd"] = "adam"
    learning_rate: Annotated[float, pydantic.Field(gt=0)] = 1e-3
    schedule: Literal["constant", "cosine"] = "constant"
    warmup_steps: Annotated[int, pydantic.Field(ge=0)] = 0
    betas: tuple[
        Annotated[float, pydantic.Field(ge=0, lt=1)], Annotated[float, pydantic.Field(ge=0, lt=1)]
    ] = (0.9, 0.999)
    eps: Annotated[float, pydantic.Field(gt=0)] = 1e-8
    weight_decay: Annotated[float, pydantic.Field(ge=0)] = 0.0
    clip_norm: Annotated[float, pydantic.Field(gt=0)] | None = None


class Recipe(Experiment):
    """One experiment that mechicl trains: a model on a task, for one or more seeds.

    Attributes
    ----------
    name, description
        What the recipe is called (the name of its run directory), and what it shows, in a line.
    task, model
        A registered task and architecture, each a mapping with `name` and its settings.
    seeds
        One independent model and data stream each.
    optimizer, batch_size, n_steps
        How it is trained. Steps are counted in float32, as far as that is exact: to 2²⁴.
    training_set
        Prompts in a fixed training set, of each seed its own, which is gone through in a new order
        every epoch; what is left over at the end of one is not used in it, and a set smaller than
        `batch_size` is one batch. None draws every batch afresh.
    dropout_on
        Whether a model's dropout acts on every batch, or on the first of each epoch alone (as in
        the code of yuksel2026).
    checkpoints
        Which steps are stored.
    """

    optimizer: OptimizerConfig = OptimizerConfig()
    batch_size: Annotated[int, pydantic.Field(ge=1)] = 256
    n_steps: Annotated[int, pydantic.Field(ge=1, le=MOST_STEPS)] = 10_000
    training_set: Annotated[int, pydantic.Field(ge=1)] | None = None
    dropout_on: Literal["every_batch", "first_batch"] = "every_batch"
    checkpoints: Schedule = Schedule()

    @pydantic.model_validator(mode="after")
    def _epochs_are_there(self) -> "Recipe":
        if self.dropout_on == "first_batch" and self.training_set is None:
            raise ValueError(
                "dropout_on first_batch is of the first batch of an epoch, which needs a "
                "training_set; without one it is every_batch"
            )
        return self

    @property
    def prompts_a_step(self) -> int:
        """Prompts in one batch: `batch_size`, or the whole training set where that is smaller."""
        return min(self.batch_size, self.training_set or self.batch_size)

    def drops_at(self, step: int) -> bool:
        """Return whether dropout acts at this step, of a model that has any."""
        if self.dropout_on == "every_batch" or self.training_set is None:
            return True
        return step % (self.training_set // self.prompts_a_step) == 0

    @pydantic.model_validator(mode="after")
    def _schedule_fits(self) -> "Recipe":
        self.checkpoints.steps(self.n_steps)  # says what does not fit
        return self


def recipe_names() -> tuple[str, ...]:
    """Return the names of the recipes that come with mechicl, sorted."""
    found = (Path(str(entry)) for entry in files(_PACKAGE).iterdir())
    return tuple(sorted(path.stem for path in found if path.suffix == ".yaml"))


def recipe_scales(source: str | Path) -> tuple[str, ...]:
    """Return the names of the sizes that a recipe's file has besides its own, sorted."""
    return tuple(sorted(_read(source)[1]))


def load_recipe(
    source: str | Path | Recipe,
    overrides: Mapping[str, Any] | None = None,
    *,
    scale: str | None = None,
) -> Recipe:
    """Read a recipe and change some of its settings.

    Parameters
    ----------
    source
        Name of a recipe that comes with mechicl, path of a YAML file, or a recipe to start from.
    overrides
        New values by key: dotted (`task.d`), or bare (`d`) where one section alone has it. A
        section as a mapping (`model`) replaces the whole of it, what it leaves out having its
        default; the other keys are set over it, whichever order they come in.
    scale
        Name of a size under `scales` in the recipe's file, such as `paper`: its settings come
        before `overrides`, and the recipe is called NAME-SCALE.

    Raises
    ------
    InputError
        For an unknown recipe, key or scale, with the nearest match; for a key that several sections
        have, naming them, or that is given twice, by itself or with a part of it; for a section
        that is no mapping; and for values of a wrong type or out of range, all of them at once.
    """
    if isinstance(source, Recipe):
        if scale is not None:
            raise InputError(f"scale {scale!r} is one of a recipe's file; given a Recipe")
        return _changed(source, overrides)
    settings, scales = _read(source)
    base = _validated(settings)
    if scale is None:
        return _changed(base, overrides)
    if canonical(scale) not in scales:
        raise unknown(f"scale of recipe {base.name!r}", scale, scales)
    scaled = _changed(base, scales[canonical(scale)])
    named = scaled.model_copy(update={"name": f"{base.name}-{canonical(scale)}"})
    return _changed(named, overrides)


def _changed(base: Recipe, overrides: Mapping[str, Any] | None) -> Recipe:
    """Return `base` with some of its settings changed."""
    if not overrides:
        return base
    settings = base.settings()
    sections = {key for key, value in settings.items() if isinstance(value, Mapping)}
    whole = {given: value for given, value in overrides.items() if _canonical(given) in sections}
    if whole:
        for given, value in whole.items():
            if not isinstance(value, Mapping):
                first = next(iter(settings[str(_canonical(given))]))
                raise InputError(
                    f"{given} is a section; given {value!r}. It takes a mapping of settings, as in "
                    f"{given}={{{first}: ...}}, or set one of them, as in {given}.{first}=..."
                )
        settings = _validated(_replaced(settings, whole)).settings()
    rest = {given: value for given, value in overrides.items() if given not in whole}
    return _validated(_replaced(settings, rest))


def _replaced(settings: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Put new values into `settings` and return them; all keys are those they had before."""
    given_as: dict[str, str] = {}
    for given in overrides:
        full = _full_key(given, settings)
        for other, before in given_as.items():
            if f"{full}.".startswith(f"{other}.") or f"{other}.".startswith(f"{full}."):
                raise InputError(f"{full} is set twice, as {before!r} and as {given!r}")
        given_as[full] = given
    for full, given in given_as.items():
        *sections, key = full.split(".")
        target = settings
        for section in sections:
            target = target[section]
        target[key] = overrides[given]
    return settings


def stored_recipe(config: Mapping[str, Any], where: object) -> Recipe | ImportedRecipe:
    """Return the recipe in a run's config; raise DamagedRunError naming `where` if it is none.

    That of a run that was imported says nothing of training.
    """
    kind = ImportedRecipe if ORIGIN in config else Recipe
    try:
        return kind.model_validate(config["recipe"])
    except KeyError:
        raise DamagedRunError(f"{where} has no recipe; restore it") from None
    except (pydantic.ValidationError, InputError) as error:
        fault = error if isinstance(error, InputError) else invalid("its recipe", error)
        raise DamagedRunError(f"{where} is not what was written: {fault}") from None


def _read(source: str | Path) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Return the settings in a recipe's file, and those of each of its scales."""
    if not isinstance(source, (str, Path)):
        raise InputError(f"a recipe is a name, a path or a Recipe; given {type(source).__name__}")
    path = expanded(source)
    if path.suffix in (".yaml", ".yml"):
        name, settings = path.stem, read_yaml(path, "recipe")
    else:
        by_canonical = {canonical(name): name for name in recipe_names()}
        if canonical(str(source)) not in by_canonical:
            raise unknown("recipe", str(source), recipe_names())
        name = by_canonical[canonical(str(source))]
        text = files(_PACKAGE).joinpath(f"{name}.yaml").read_text(encoding="utf-8")
        settings = parse_yaml(text, f"recipe {name!r}")
    scales = settings.pop("scales", {})
    if not isinstance(scales, dict) or not all(isinstance(each, dict) for each in scales.values()):
        raise InputError(f"scales of recipe {str(source)!r} are not mappings of settings by name")
    return {"name": name, **settings}, {canonical(str(key)): scales[key] for key in scales}


def _validated(settings: Mapping[str, Any]) -> Recipe:
    try:
        return Recipe.model_validate(settings)
    except pydantic.ValidationError as error:
        raise invalid(f"recipe {settings.get('name')!r}", error, known=_known(settings)) from None


def _known(settings: Mapping[str, Any]) -> list[str]:
    """Return the keys that a recipe with this task and this model may have."""
    known = list(Recipe.model_fields)
    sections: dict[str, type[Config]] = {"optimizer": OptimizerConfig, "checkpoints": Schedule}
    for section, find in (("task", tasks.get), ("model", models.get)):
        with suppress(InputError, KeyError, TypeError):  # which the error is about, then
            sections[section] = find(settings[section]["name"])
    known += [f"{name}.{key}" for name, config in sections.items() for key in config.model_fields]
    return known


def _full_key(given: str, settings: Mapping[str, Any]) -> str:
    known = dict(leaves(settings))
    wanted = _canonical(given)
    if wanted is None:
        raise unknown("setting", given, known)
    parts = [key.split(".") for key in known]
    keys = {".".join(part[:end]): None for part in parts for end in range(1, len(part) + 1)}
    matches = [key for key in keys if key == wanted or key.endswith(f".{wanted}")]
    if wanted in matches:
        return wanted
    if len(matches) > 1:
        raise InputError(
            f"setting {given!r} is one of several: {', '.join(matches)}; give one of these"
        )
    if not matches:
        above, _, last = wanted.rpartition(".")
        for key, value in known.items():
            if above and value is None and (key == above or key.endswith(f".{above}")):
                raise InputError(
                    f"there is no setting {given!r}, for {key} is null; give the whole of it, as "
                    f"in {key}={{{last}: ...}}"
                )
        raise unknown("setting", given, known)
    return matches[0]


def _canonical(given: object) -> str | None:
    """Return a key as settings spell it, or None for what is no string."""
    return ".".join(map(canonical, given.split("."))) if isinstance(given, str) else None
