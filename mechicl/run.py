"""The facade: a run on disk as parameters, models, activations and analyses."""

import json
import shutil
import uuid
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import xarray as xr

from mechicl import analyses
from mechicl.checkpoints import load, read_config, read_trajectory
from mechicl.checkpoints.layout import ANALYSES, FIGURES
from mechicl.errors import InputError, MechiclError, unknown
from mechicl.tasks import Task
from mechicl.training import Recipe, load_recipe

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from transformer_lens import HookedTransformer

_PREDICT_PROMPTS = 1024  # prompts evaluated at once, so that intermediates stay in the cache
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
    **options
        Those of `mechicl.training.loop.train`: `device`, `resume`, `overwrite`, `compile`,
        `on_progress`, `notify`.
    """
    from mechicl.training.loop import train as train_loop

    if not isinstance(recipe, Recipe):
        recipe = load_recipe(recipe, overrides)
    run_dir = Path("runs") / recipe.name if out is None else Path(out)
    train_loop(recipe, run_dir, **options)
    return open_run(run_dir)


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
        self.path = path
        self.trajectory = read_trajectory(path)
        self.config: dict[str, Any] = read_config(path)
        self.recipe = Recipe.model_validate(self.config["recipe"])

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

    def select(
        self,
        steps: Sequence[int] | None = None,
        seeds: Sequence[int] | None = None,
        *,
        method: Literal["nearest"] | None = None,
    ) -> xr.Dataset:
        """Return the trajectory at some steps and seeds; None takes all.

        Raises InputError for one that is not stored, naming its neighbours; `method="nearest"`
        takes the nearest step instead.
        """
        chosen = self.trajectory
        if seeds is not None:
            chosen = chosen.isel(seed=[self._seed_index(seed) for seed in seeds])
        if steps is not None:
            chosen = chosen.isel(step=[self._step_index(step, method) for step in steps])
        return chosen

    def _seed_index(self, seed: int) -> int:
        matches = np.flatnonzero(self.seeds == seed)
        if len(matches) == 0:
            raise InputError(f"the run has no seed {seed}; it has {self.seeds.tolist()}")
        return int(matches[0])

    def _step_index(self, step: int, method: str | None) -> int:
        steps = self.steps
        if method not in (None, "nearest"):
            raise InputError(f"method is None or 'nearest'; given {method!r}")
        nearest = int(np.abs(steps - step).argmin())
        if steps[nearest] == step or method == "nearest":
            return nearest
        after = int(np.searchsorted(steps, step))
        neighbours = " and ".join(str(s) for s in steps[max(after - 1, 0) : after + 1])
        raise InputError(
            f"step {step} is not stored; its neighbours are {neighbours} "
            "(method='nearest' takes the nearest)"
        )

    def model(
        self, *, step: int, seed: int, method: Literal["nearest"] | None = None
    ) -> "HookedTransformer":
        """Return the model of one checkpoint, to hook into.

        Each call makes a model with memory of its own. Its parameters require gradients, those that
        the architecture has; it is in evaluation mode.

        Raises
        ------
        InputError
            For a step or seed that is not stored, naming the neighbours of the step.
        MechiclError
            If the seed had diverged by that step.
        """
        import torch

        checkpoint = load(
            self.select([step], [seed], method=method)[list(self.params)], where=self.path
        )
        weights = {
            str(name): torch.from_numpy(values.values[0, 0].copy())
            for name, values in checkpoint.items()
        }
        if not all(bool(torch.isfinite(weight).all()) for weight in weights.values()):
            at = self.trajectory["diverged_at"].sel(seed=seed).item()
            raise MechiclError(
                f"seed {seed} diverged at step {at:g}; it has no model at step {step}"
            )
        return self.recipe.model.hooked(self.task, weights).eval()

    def cache(
        self,
        names: str | Iterable[str],
        *,
        prompts: xr.Dataset,
        steps: Sequence[int] | None = None,
        seeds: Sequence[int] | None = None,
        limit: int = _CACHE_LIMIT,
    ) -> xr.Dataset:
        """Return activations at hook points over training.

        Parameters
        ----------
        names
            Hook points, such as `blocks.0.attn.hook_pattern`.
        prompts
            As `run.task.sample` returns them; `inputs` (batch, pos, d_model) is read.
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
        import torch

        from mechicl.models.hooked import hook_dims

        names = [names] if isinstance(names, str) else list(names)
        chosen = load(self.select(steps, seeds)[list(self.params)], where=self.path)
        inputs = torch.from_numpy(np.asarray(prompts["inputs"].values, dtype=np.float32))
        checkpoints = [
            (i, j) for i in range(chosen.sizes["seed"]) for j in range(chosen.sizes["step"])
        ]

        def activations(i: int, j: int, batch: torch.Tensor) -> dict[str, np.ndarray]:
            weights = {
                str(name): torch.from_numpy(values.values[i, j].copy())
                for name, values in chosen.items()
            }
            model = self.recipe.model.hooked(self.task, weights)
            for name in names:
                if name not in model.hook_dict:
                    raise unknown("hook point", name, model.hook_dict)
            with torch.no_grad():
                _, cache = model.run_with_cache(batch, names_filter=lambda name: name in names)
            silent = [name for name in names if name not in cache]
            if silent:
                raise InputError(f"hook points {silent} do not fire in this model's forward pass")
            return {name: cache[name].numpy() for name in names}

        shapes = {
            name: (*chosen["seed"].shape, *chosen["step"].shape, len(inputs), *value.shape[1:])
            for name, value in activations(0, 0, inputs[:1]).items()
        }
        nbytes = sum(4 * int(np.prod(shape)) for shape in shapes.values())
        if nbytes > limit:
            raise InputError(
                f"these activations take {nbytes / 2**20:.0f} MiB, above the limit of "
                f"{limit / 2**20:.0f} MiB; take fewer steps, seeds or prompts, or give limit="
            )
        out = {name: np.empty(shape, np.float32) for name, shape in shapes.items()}
        for i, j in checkpoints:
            for name, value in activations(i, j, inputs).items():
                out[name][i, j] = value
        return xr.Dataset(
            {name: (("seed", "step", *hook_dims(name)), value) for name, value in out.items()},
            coords={"seed": chosen["seed"], "step": chosen["step"]},
            attrs={"run_digest": self.trajectory.attrs["run_digest"]},
        )

    def forward(self) -> analyses.Forward:
        """Return what forward probes ask of a run: predictions, prompts and references."""
        return analyses.Forward(
            predict=self._predict, prompts=self._prompts, references=self.task.references
        )

    def _prompts(self, n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
        sample = self.task.sample(n, seed=seed)
        return sample["inputs"].values, sample["targets"].values

    def _predict(self, parameters: Mapping[str, np.ndarray], inputs: np.ndarray) -> np.ndarray:
        """Evaluate one model after another, some prompts at a time; (*models, batch), float32."""
        import torch

        stacked = {name: np.asarray(value, np.float32) for name, value in parameters.items()}
        first, declared = next(iter(self.recipe.model.parameters(self.task).items()))
        leading = stacked[first].shape[: 2 - len(declared.dims)]  # seed and step are not inner
        predictions = np.empty((*leading, len(inputs)), np.float32)
        prompts = torch.from_numpy(np.asarray(inputs, np.float32)).split(_PREDICT_PROMPTS)
        with torch.no_grad():
            for index in np.ndindex(leading):
                weights = {name: torch.from_numpy(value[index]) for name, value in stacked.items()}
                parts = [self.recipe.model.predict(weights, part) for part in prompts]
                predictions[index] = torch.cat(parts).numpy()
        return predictions

    def objection(self, name: str) -> str | None:
        """Return why the probe `name` does not apply to this run, or None if it does."""
        return analyses.get(name).objection(self.trajectory)

    def analyze(
        self,
        name: str,
        *,
        steps: Sequence[int] | None = None,
        seeds: Sequence[int] | None = None,
        **parameters: Any,
    ) -> xr.Dataset:
        """Run a probe over this run and return its result.

        Parameters
        ----------
        name
            Of a probe; `mechicl probes` lists them.
        steps, seeds
            Which checkpoints; None takes all.
        **parameters
            Of the probe.

        Raises
        ------
        InputError
            For an unknown probe, step, seed or parameter.
        NothingToAnalyseError
            If the probe does not apply to such a run; the message says why.
        """
        probe = analyses.get(name)
        probe.resolve(parameters)
        trajectory = self.select(steps, seeds)
        wanted = [variable for variable in probe.needs if variable in trajectory.variables]
        result = probe(
            load(trajectory[wanted], where=self.path),
            self.forward() if probe.forward else None,
            **parameters,
        )
        asked = {
            "steps": None if steps is None else [int(step) for step in steps],
            "seeds": None if seeds is None else [int(seed) for seed in seeds],
        }
        return result.assign_attrs(selection=json.dumps(asked))

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
        from mechicl import plots

        root = Path(self.path if out is None else out)
        name = f"{result.attrs['probe']}-{_digest(result)}"
        written = []
        try:
            target = root / ANALYSES / f"{name}.zarr"
            _write_aside(target, lambda path: _to_zarr(result, path))
            written.append(target)
            if figure:
                target = root / FIGURES / f"{name}.png"
                drawn: Figure = plots.draw(result)
                _write_aside(target, lambda path: drawn.savefig(path, dpi=120, format="png"))
                written.append(target)
        except OSError as error:
            raise MechiclError(
                f"cannot write to {root} ({error.strerror or error}); --out DIR, or out= in "
                "Python, puts results elsewhere"
            ) from error
        return written


def _digest(result: xr.Dataset) -> str:
    """Short hash of what was asked: parameters, and the steps and seeds that were chosen."""
    asked = f"{result.attrs['parameters']} {result.attrs['selection']}"
    return sha256(asked.encode()).hexdigest()[:8]


def _to_zarr(result: xr.Dataset, path: Path) -> None:
    from zarr.storage import LocalStore

    with warnings.catch_warnings():
        # xarray warns on opening a store without consolidated metadata, zarr on writing one with.
        warnings.filterwarnings("ignore", message="Consolidated metadata")
        result.to_zarr(LocalStore(path), mode="w", consolidated=True, zarr_format=3)


def _write_aside(target: Path, write: Callable[[Path], object]) -> None:
    """Write beside `target` and rename, so that what stands there is whole or absent."""
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    try:
        write(aside)
        if target.is_dir():
            shutil.rmtree(target)
        aside.replace(target)
    finally:
        if aside.is_dir():
            shutil.rmtree(aside)
        else:
            aside.unlink(missing_ok=True)
