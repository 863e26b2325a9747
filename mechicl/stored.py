"""A run on disk as recipe, parameters, models and activations."""

import json
from bisect import bisect
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import xarray as xr
from safetensors.numpy import save as to_safetensors

from mechicl.checkpoints import load, read_config, read_trajectory
from mechicl.checkpoints.files import write_file
from mechicl.checkpoints.layout import CONFIG, ORIGIN, TRAJECTORY, resume_step
from mechicl.checkpoints.reader import is_url
from mechicl.config import Config
from mechicl.errors import DamagedRunError, InputError, MechiclError, integer
from mechicl.paths import expanded, local_file, path_text
from mechicl.tasks import Task
from mechicl.training import ImportedRecipe, Recipe, settings_digest, stored_recipe
from mechicl.version import __version__

if TYPE_CHECKING:
    from torch import Tensor
    from transformer_lens import HookedTransformer

    from mechicl.models.activations import HookShape

_CACHE_LIMIT = 2**30  # bytes of activations that `cache` returns without being asked twice


class StoredRun:
    """A trained run, or the committed part of one that is being trained: what its checkpoints give.

    Attributes
    ----------
    path
        Where it is.
    config
        All of `config.yaml`: recipe, device, versions.
    recipe
        The resolved recipe, with its task and model.
    trajectory
        Everything stored, lazily: parameters, losses and constants (see `docs/dataset.md`).
    """

    def __init__(self, path: str | Path) -> None:
        text = path_text(path)
        self.path: str | Path = text if is_url(text) else expanded(text)
        self.trajectory = read_trajectory(self.path)
        self.config: dict[str, Any] = read_config(self.path)
        config_file = f"{self.path}/{CONFIG}"
        self.recipe = stored_recipe(self.config, config_file)
        if settings_digest(self.config["recipe"]) != self.trajectory.attrs["run_digest"]:
            raise DamagedRunError(
                f"{config_file} is not the one that the run was trained with (their digests "
                "differ); restore it"
            )

    def __repr__(self) -> str:
        return (
            f"<mechicl.Run {self.path}: {self.recipe.name}, {len(self.seeds)} seeds, "
            f"{len(self.steps)} of {self.trajectory.attrs['n_planned']} checkpoints>"
        )

    @property
    def task(self) -> Task:
        """The data distribution; `run.task.sample(n, seed=...)` draws prompts."""
        return self.recipe.task

    @property
    def steps(self) -> np.ndarray:
        """Steps of the stored checkpoints."""
        return self.trajectory["step"].values

    @property
    def seeds(self) -> np.ndarray:
        """Seeds of the run."""
        return self.trajectory["seed"].values

    @property
    def complete(self) -> bool:
        """Whether training reached its last step."""
        return bool(self.trajectory.attrs["complete"])

    @property
    def params(self) -> xr.Dataset:
        """Parameters of every checkpoint, lazily: (seed, step, layer, ...)."""
        return self.trajectory[list(self.recipe.model.parameters(self.task))]

    @property
    def metrics(self) -> xr.Dataset:
        """What training logged, lazily: `loss` (seed, log_step) and `diverged_at` (seed)."""
        return self.trajectory[["loss", "diverged_at"]]

    def diverged(self) -> dict[int, int]:
        """Return the seeds that diverged, and at which step: the loss or gradient overflowed."""
        at = self.trajectory["diverged_at"].values
        return {
            int(seed): int(step) for seed, step in zip(self.seeds, at, strict=True) if step == step
        }

    def about(self) -> dict[str, str]:
        """Return what the run is and how far it got, in words: recipe, loss, versions, digest.

        The loss by seed is the mean of the last hundred that were logged, read here.
        """
        recipe, attrs = self.recipe, self.trajectory.attrs
        late = self.metrics[["loss"]].isel(log_step=slice(-100, None))
        losses = load(late, where=self.path)["loss"].mean("log_step").values
        diverged = self.diverged()
        seeds = [
            f"{seed}: diverged at step {diverged[seed]}"
            if seed in diverged
            else f"{seed}: {f'{loss:.4f}' if loss == loss else 'not known'}"
            for seed, loss in zip(self.seeds.tolist(), losses, strict=True)
        ]
        versions = self.config.get("versions")
        written_by = versions.get("mechicl") if isinstance(versions, dict) else None
        state = "complete" if self.complete else "unfinished (or still training)"
        return {
            "recipe": f"{recipe.name}: {recipe.description}",
            "task": _words(recipe.task),
            "model": _words(recipe.model),
            **_of_training(recipe),
            "checkpoints": f"{attrs['n_saved']} of {attrs['n_planned']}, {state}",
            "steps": f"{self.steps[0]} to {self.steps[-1]} of {recipe.n_steps}",
            "loss by seed": ", ".join(seeds),
            **_of_origin(self.config, written_by, f"{self.path}/{CONFIG}"),
            "digest": attrs["run_digest"],
        }

    def select(
        self,
        steps: int | Sequence[int] | None = None,
        seeds: int | Sequence[int] | None = None,
        *,
        method: Literal["nearest"] | None = None,
    ) -> xr.Dataset:
        """Return the trajectory at some steps and seeds; None takes all.

        Steps come back increasing and each once, seeds in the order given and each once.

        Raises
        ------
        InputError
            For an empty list, and for a step or seed that is not stored, naming the neighbours of
            the step; with `method="nearest"` the nearest step is taken instead.
        """
        if method not in (None, "nearest"):
            raise InputError(f"method is None or 'nearest'; given {method!r}")
        chosen = self.trajectory
        if seeds is not None:
            indices = [self._seed_index(seed) for seed in _integers("seeds", seeds)]
            chosen = chosen.isel(seed=list(dict.fromkeys(indices)))
        if steps is not None:
            indices = [self._step_index(step, method) for step in _integers("steps", steps)]
            chosen = chosen.isel(step=sorted(set(indices)))
        return chosen

    def _seed_index(self, seed: int) -> int:
        known = self.seeds.tolist()
        if seed not in known:
            raise InputError(f"the run has no seed {seed}; it has {known}")
        return known.index(seed)

    def _step_index(self, step: int, method: str | None) -> int:
        known = self.steps.tolist()
        nearest = min(range(len(known)), key=lambda index: abs(known[index] - step))
        if known[nearest] == step or method == "nearest":
            return nearest
        after = bisect(known, step)
        near = [str(stored) for stored in known[max(after - 1, 0) : after + 1]]
        said = f"neighbours are {' and '.join(near)}" if near[1:] else f"neighbour is {near[0]}"
        raise InputError(f"step {step} is not stored; its {said}")

    def model(
        self, *, step: int, seed: int, method: Literal["nearest"] | None = None
    ) -> "HookedTransformer":
        """Return the model of one checkpoint, to hook into: what others call `to_hooked`.

        Each call makes a HookedTransformer with memory of its own, whose modules hold the
        parameters by TransformerLens's names; `state_dict` has them by ours, `hooks` lists its hook
        points. Its parameters require gradients, those that the architecture has; it is in
        evaluation mode.

        Raises
        ------
        InputError
            For a step or seed that is not stored, naming the neighbours of the step.
        MechiclError
            If the seed had diverged by that step.
        """
        weights = self.state_dict(step=step, seed=seed, method=method)
        return self.recipe.model.hooked(self.task, weights).eval()

    def state_dict(
        self, *, step: int, seed: int, method: Literal["nearest"] | None = None
    ) -> "dict[str, Tensor]":
        """Return the parameters of one checkpoint, by the names and with the layout of `params`.

        Each call makes tensors with memory of their own: float32, on the CPU, of the dims of
        `run.params` but `seed` and `step`, such as `W_Q` (layer, head, d_model, d_head).
        `run.recipe.model.predict` and `.hooked` take them.

        Raises
        ------
        InputError
            For a step or seed that is not stored, naming the neighbours of the step.
        MechiclError
            If the seed had diverged by that step.
        """
        import torch

        checkpoint = self._checkpoint(step, seed, method)
        return {
            str(name): torch.from_numpy(value.values.copy()) for name, value in checkpoint.items()
        }

    def _checkpoint(
        self, step: int, seed: int, method: Literal["nearest"] | None = None
    ) -> xr.Dataset:
        """Return the parameters of one checkpoint, all of them finite, without seed and step."""
        chosen = self.select(integer("step", step), integer("seed", seed), method=method)
        checkpoint = load(chosen[list(self.params)], where=self.path).isel(seed=0, step=0)
        if all(bool(np.isfinite(value.values).all()) for value in checkpoint.values()):
            return checkpoint
        step = int(checkpoint["step"])  # the nearest one, where that was asked for
        at = self.diverged().get(seed)
        if at is None:
            raise DamagedRunError(
                f"parameters of seed {seed} at step {step} are not finite, and the seed did not "
                f"diverge; mechicl verify {self.path} says what is damaged"
            )
        raise MechiclError(f"seed {seed} diverged at step {at}; it has no model at step {step}")

    def export(self, out: str | Path, *, step: int, seed: int, overwrite: bool = False) -> Path:
        """Write one checkpoint to a safetensors file, which any other tool reads.

        Tensors are those of `state_dict`, to the bit. Metadata, all of them text: `run_digest`,
        `recipe` (JSON, that of `config.yaml`), `step`, `seed`, `dims` (JSON, by tensor) and
        `mechicl_version`. The file is written aside and renamed: it is there whole or not at all.

        Parameters
        ----------
        out
            The file, `.safetensors`; its folder is made where there is none.
        overwrite
            Replace a file that is there.

        Returns
        -------
        Path
            The file.

        Raises
        ------
        InputError
            For an `out` that is there already, is a directory or a URL or has another ending, or is
            the optimiser state of a run; and as `state_dict` does.
        MechiclError
            As `state_dict` does, and if the file cannot be written.
        """
        target = local_file(out, ending=".safetensors", overwrite=overwrite)
        if TRAJECTORY in (folder.name for folder in target.resolve().parents):
            raise InputError(f"{target} lies among the arrays of a run; give another place")
        if resume_step(target.name) is not None and (target.parent / TRAJECTORY).exists():
            raise InputError(
                f"{target} is where a run keeps its optimiser state; give another name"
            )
        checkpoint = self._checkpoint(step, seed)
        metadata = {
            "run_digest": str(self.trajectory.attrs["run_digest"]),
            "recipe": json.dumps(self.config["recipe"]),
            "step": str(int(checkpoint["step"])),
            "seed": str(int(checkpoint["seed"])),
            "dims": json.dumps({str(name): value.dims for name, value in checkpoint.items()}),
            "mechicl_version": __version__,
        }
        arrays = {str(name): value.values.copy() for name, value in checkpoint.items()}
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            write_file(target, to_safetensors(arrays, metadata=metadata))
        except OSError as error:
            raise MechiclError(
                f"cannot write {target} ({error.strerror or error}); give another place"
            ) from error
        return target

    def hooks(self) -> "dict[str, HookShape]":
        """Return dims and shape of what passes every hook point of this run's models.

        They are those of one prompt of the task: `batch` is 1, and for a model with a `context` the
        number of windows that it reads of a prompt. No checkpoint is read.

        Returns
        -------
        dict
            By name, in the order in which they fire, then those that never do: `dims`, and `shape`
            in the same order. `dims` is None where axes have no names: `run.cache` has none of
            those, `run_with_cache` of a `model` has all that fire. `shape` is None where nothing
            passes.
        """
        from mechicl.models.activations import hook_shapes

        return hook_shapes(self.recipe.model, self.task)

    def cache(
        self,
        names: str | Iterable[str],
        *,
        prompts: xr.Dataset,
        steps: int | Sequence[int] | None = None,
        seeds: int | Sequence[int] | None = None,
        limit: int = _CACHE_LIMIT,
    ) -> xr.Dataset:
        """Return activations at hook points over training.

        Parameters
        ----------
        names
            Hook points, such as `blocks.0.attn.hook_pattern`.
        prompts
            As `run.task.sample` returns them; `inputs` is read. A model with a `context` reads each
            prompt as windows, and the batch of the result is of these, those of a prompt in order.
        steps, seeds
            Which checkpoints; None takes all.
        limit
            Largest result, in bytes; its size is worked out before anything is computed.

        Returns
        -------
        xr.Dataset
            One variable a hook point, (seed, step, batch, ...), float32.

        Raises
        ------
        InputError
            For a hook point that the model has not (with near matches), or one that never fires,
            and for a result above `limit`.
        """
        from mechicl.models.activations import activations

        found = activations(
            self.recipe.model,
            self.task,
            self.select(steps, seeds)[list(self.params)],
            names,
            prompts=prompts,
            limit=limit,
            load=partial(load, where=self.path),
        )
        return found.assign_attrs(run_digest=self.trajectory.attrs["run_digest"])


def _words(config: Config) -> str:
    """Name and settings of a part of the recipe, in a line."""
    settings = config.model_dump(exclude_none=True)
    name = settings.pop("name")
    return f"{name}: " + ", ".join(f"{key} {value}" for key, value in settings.items())


def _of_training(recipe: Recipe | ImportedRecipe) -> dict[str, str]:
    """Say how mechicl trained it, if it did."""
    if isinstance(recipe, ImportedRecipe):
        return {}
    return {"optimizer": _words(recipe.optimizer), "batch size": str(recipe.batch_size)}


def _of_origin(config: dict[str, Any], written_by: str | None, where: str) -> dict[str, str]:
    """Say what it was trained on, or where it was imported from and how that was checked."""
    if ORIGIN not in config:
        return {"trained on": f"{config.get('device')}, mechicl {written_by}"}
    try:
        imported = {"trained by": f"others, not known how; imported by mechicl {written_by}"}
        return imported | _of_import(config[ORIGIN])
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise DamagedRunError(
            f"the {ORIGIN} in {where} is not what was written ({error!r}); restore it"
        ) from None


def _of_import(origin: dict[str, Any]) -> dict[str, str]:
    files = [path for paths in origin["files"].values() for path in paths]
    check, checked = origin["check"], "no: nothing was compared, and the mapping may be wrong"
    if check:
        worst = max(each["error"] for each in check["checkpoints"])
        checked = (
            f"outputs of {len(check['checkpoints'])} checkpoints, by {', '.join(check['by'])}; "
            f"largest difference {worst:.1e} of their standard deviation, allowed "
            f"{check['tolerance']:g}"
        )
    about = {
        "imported from": f"{len(files)} files, {files[0]} to {files[-1]}",
        "mapping": str(origin["mapping"].get("name") or "without a name"),
        "checked": checked,
    }
    return about | ({"remarks": "; ".join(origin["remarks"])} if origin["remarks"] else {})


def _integers(name: str, given: Any) -> list[int]:
    """Return one integer or several as a list; raise InputError for anything else, or for none."""
    several = isinstance(given, Iterable) and not isinstance(given, str)
    values = [integer(name, value) for value in (given if several else [given])]
    if not values:
        raise InputError(f"{name} is empty; leave it out to take all")
    return values
