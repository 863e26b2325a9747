"""The facade: a run on disk as parameters, models, activations and analyses."""

import json
from bisect import bisect
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import xarray as xr
from safetensors.numpy import save as to_safetensors

from mechicl import analyses
from mechicl.checkpoints import load, read_config, read_trajectory
from mechicl.checkpoints.files import write_file
from mechicl.checkpoints.layout import CONFIG, TRAJECTORY, resume_step
from mechicl.checkpoints.reader import is_url
from mechicl.errors import (
    DamagedRunError,
    InputError,
    MechiclError,
    NothingToAnalyseError,
    integer,
)
from mechicl.paths import local_directory, local_file, path_text
from mechicl.tasks import Task
from mechicl.training import Recipe, load_recipe, settings_digest, stored_recipe
from mechicl.training.devices import require_device
from mechicl.version import __version__

if TYPE_CHECKING:
    from torch import Tensor
    from transformer_lens import HookedTransformer

    from mechicl.models.activations import HookShape

RunLike: TypeAlias = "Run | str | Path"

_CACHE_LIMIT = 2**30  # bytes of activations that `Run.cache` returns without being asked twice


def open_run(path: str | Path) -> "Run":
    """Open a run directory, or its fsspec URL, for reading.

    A run that is still being trained shows what was committed when it was opened.

    Raises
    ------
    InputError
        If `path` is not a run directory; the message says what it is instead.
    NothingToAnalyseError
        If the run has no checkpoint yet.
    DamagedRunError
        If its metadata cannot be read.
    """
    return Run(path)


def train(
    recipe: str | Path | Recipe,
    out: str | Path | None = None,
    *,
    overrides: Mapping[str, Any] | None = None,
    scale: str | None = None,
    **options: Any,
) -> "Run":
    """Train a recipe and open the run.

    Parameters
    ----------
    recipe
        Name of a recipe that comes with mechicl, path of a YAML file, or a `Recipe`.
    out
        Run directory; `runs/NAME` by default.
    overrides
        Settings by key, as `load_recipe` takes them.
    scale
        A size of the recipe's file, such as `paper`.
    **options
        Those of `mechicl.training.loop.train`: `device`, `resume`, `overwrite`, `compile`,
        `on_progress`, `notify`.
    """
    require_device(options.get("device", "auto"))
    chosen = load_recipe(recipe, overrides, scale=scale)
    run_dir = run_directory(chosen, out)

    from mechicl.training.loop import train as train_loop

    train_loop(chosen, run_dir, **options)
    return open_run(run_dir)


def run_directory(recipe: Recipe, out: str | Path | None) -> Path:
    """Return where a recipe is trained: `out`, or `runs/NAME`."""
    return local_directory(Path("runs") / recipe.name if out is None else out)


class Run:
    """A trained run, or the committed part of one that is being trained.

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
        self.path: str | Path = text if is_url(text) else Path(text).expanduser()
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

    def forward(
        self, *, skip_damaged: bool = False, against: "Mapping[str, Run] | None" = None
    ) -> analyses.Forward:
        """Return what forward probes ask of a run: predictions, prompts, references, hooked models.

        Raises InputError for a run in `against` whose task is another one, naming what differs.
        """
        return analyses.forward_of(
            self.task,
            self.recipe.model,
            load=partial(self._load, skip_damaged=skip_damaged),
            checkpoints=partial(self._checkpoints, skip_damaged=skip_damaged),
            against={
                name: self._against(name, other, skip_damaged=skip_damaged)
                for name, other in (against or {}).items()
            },
        )

    def _against(self, name: str, other: "Run", *, skip_damaged: bool) -> analyses.Against:
        differences = [
            text for text in self.recipe.differences(other.recipe) if text.startswith("task.")
        ]
        if differences:
            raise InputError(
                f"run {name} ({other.path}) is of another task ({'; '.join(differences)}); a "
                "comparison needs the same prompts"
            )
        # With its axis of steps, by which what is damaged is found.
        last = other._load(other.params.isel(step=slice(-1, None)), skip_damaged=skip_damaged)
        parameters = {
            str(key): value.isel(step=0).transpose("seed", ...).values
            for key, value in last.items()
        }
        predict = analyses.forward_of(other.task, other.recipe.model).predict
        return analyses.Against(
            seeds=other.seeds,
            step=int(other.steps[-1]),
            run_digest=other.trajectory.attrs["run_digest"],
            predict=partial(predict, parameters),
        )

    def _load(self, part: xr.Dataset, *, skip_damaged: bool) -> xr.Dataset:
        return load(part.copy(), where=self.path, skip_damaged=skip_damaged)

    def _checkpoints(
        self, steps: Sequence[int], seeds: Sequence[int], *, skip_damaged: bool
    ) -> xr.Dataset:
        chosen = self.select(steps, seeds)[list(self.params)]
        return self._load(chosen, skip_damaged=skip_damaged)

    def objection(self, name: str) -> str | None:
        """Return why the probe `name` does not apply to this run, or None if it does."""
        return analyses.get(name).objection(self.trajectory)

    def refusal(self, reasons: Mapping[str, str]) -> str:
        """Say why probes do not apply to this run, by name, and which ones do."""
        able = [each for each in analyses.names() if self.objection(each) is None]
        refused = "; ".join(f"{name!r} does not apply: {why}" for name, why in reasons.items())
        return f"probe {refused}; probes that do: {', '.join(able) or 'none'}"

    def analyze(
        self,
        name: str,
        *,
        steps: int | Sequence[int] | None = None,
        seeds: int | Sequence[int] | None = None,
        skip_damaged: bool = False,
        against: "RunLike | Iterable[RunLike] | Mapping[str, RunLike] | None" = None,
        **parameters: Any,
    ) -> xr.Dataset:
        """Run a probe over this run and return its result.

        Parameters
        ----------
        name
            Of a probe; `mechicl probes` lists them.
        steps, seeds
            Which checkpoints; None takes all. What a probe says of a seed, such as `since`, is of
            the whole run all the same; of a forward probe, it is of those that it evaluates, at
            most its `n_steps` of the ones chosen.
        skip_damaged
            Go on without what cannot be read: it is NaN, with a warning that says which steps.
        against
            Other runs of the same task for a comparative probe: a run or a path, several, or a
            mapping from the names that they shall have; the others are named by their directories.
        **parameters
            Of the probe.

        Raises
        ------
        DamagedRunError
            If a chunk cannot be read, naming it, unless `skip_damaged`.
        InputError
            For an unknown probe, step, seed or parameter.
        NothingToAnalyseError
            If the probe does not apply to such a run; the message says why, and which probes do.
        """
        probe = analyses.get(name)
        probe.resolve(parameters)
        others = named_runs(against)
        if others and not probe.comparative:
            raise InputError(
                f"probe {probe.name!r} holds a run against no other; given {', '.join(others)}. "
                f"Those that do: {', '.join(analyses.comparative())}"
            )
        reason = self.objection(name)
        if reason is not None:
            raise NothingToAnalyseError(self.refusal({probe.name: reason}))
        chosen = self.select(steps, seeds)
        # A verdict, a peak, a time are of all of training, whichever steps are looked at; a forward
        # probe has them of the steps that it evaluates.
        whole = not probe.forward and (probe.statement is not None or not probe.by_step)
        trajectory = self.select(None, seeds) if whole else chosen
        read = [name for name in probe.reads if name in trajectory.variables]
        wanted = [*dict.fromkeys([*read, *(self.params if probe.forward else ())])]
        result = probe.run(
            trajectory[wanted],
            parameters,
            forward=self.forward(skip_damaged=skip_damaged, against=others)
            if probe.forward
            else None,
            load=partial(self._load, skip_damaged=skip_damaged),
        )
        if whole and steps is not None:
            result = probe.narrow(result, chosen["step"].values.tolist())
        return result

    def save(
        self, result: xr.Dataset, *, out: str | Path | None = None, figure: bool = True
    ) -> list[Path]:
        """Store a probe's result, and its figure, under the run or under `out`.

        Files are named by probe and parameters, written aside and renamed, so that a reader sees
        the old result or the new one.

        Returns
        -------
        list of Path
            What was written.

        Raises
        ------
        MechiclError
            If the place cannot be written to; the message says how to choose another.
        """
        from mechicl import results

        covered = {"step": self.steps, "seed": self.seeds}
        return results.save(result, self.results_directory(out), covered, figure=figure)

    def results_directory(self, out: str | Path | None = None) -> Path:
        """Return where `save` puts results: `out`, or the run itself.

        Raises InputError if it is no place for results (a URL, a file, a folder of code), and
        MechiclError if it may not be written to.
        """
        from mechicl import results

        return results.directory(self.path if out is None else out)


def named_runs(
    given: "RunLike | Iterable[RunLike] | Mapping[str, RunLike] | None",
) -> "dict[str, Run]":
    """Open runs, and return them by the names that results give them.

    A mapping has the names; a run or a path, or several, are named by their directories. Raises
    InputError for a name with blanks, for one that two runs have, and for what is no run.
    """
    if given is None:
        return {}
    if isinstance(given, (str, Path, Run)):
        given = [given]
    if not isinstance(given, Iterable):
        raise InputError(f"against is a run or its path, or several; given {given!r}")
    if isinstance(given, Mapping):
        pairs = [(str(name), run) for name, run in given.items()]
    else:
        pairs = [("", run) for run in given]
    found: dict[str, Run] = {}
    for name, run in pairs:
        opened = run if isinstance(run, Run) else Run(run)
        name = name or str(opened.path).rstrip("/").rpartition("/")[2]
        if not name or any(character.isspace() for character in name):
            raise InputError(
                f"{name!r} is no name for a run in results; give one without blanks, as NAME=RUN "
                "(in Python, a mapping of names to runs)"
            )
        if name in found:
            raise InputError(f"two of the runs are called {name!r}; name them, as NAME=RUN")
        found[name] = opened
    return found


def _integers(name: str, given: Any) -> list[int]:
    """Return one integer or several as a list; raise InputError for anything else, or for none."""
    several = isinstance(given, Iterable) and not isinstance(given, str)
    values = [integer(name, value) for value in (given if several else [given])]
    if not values:
        raise InputError(f"{name} is empty; leave it out to take all")
    return values
