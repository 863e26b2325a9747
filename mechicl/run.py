"""The facade: training, opening runs, and the analyses of them."""

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import xarray as xr

from mechicl import analyses
from mechicl.analyses.evaluation import steps_of
from mechicl.checkpoints import load
from mechicl.errors import InputError, NothingToAnalyseError
from mechicl.paths import local_directory, outside_runs
from mechicl.stored import StoredRun
from mechicl.training import Recipe, load_recipe
from mechicl.training.devices import require_device
from mechicl.version import __version__

if TYPE_CHECKING:
    from mechicl.importers.mapping import MappingLike

RunLike: TypeAlias = "Run | str | Path"


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


def import_run(
    checkpoints: str | Path | Mapping[int, str | Path],
    out: str | Path,
    *,
    recipe: str | Path | Recipe,
    mapping: "MappingLike",
    overrides: Mapping[str, Any] | None = None,
    scale: str | None = None,
    **options: Any,
) -> "Run":
    """Make a run of checkpoints that others trained with PyTorch, and open it.

    Their model must be the same function as one of ours, which is checked: outputs of theirs are
    compared with ours in a forward pass, at one checkpoint at least. `docs/import.md` is of it.

    Parameters
    ----------
    checkpoints
        A folder with a file a step (`step-000500.pt`, `checkpoint-500/model.safetensors`); one with
        a folder a seed (`seed0`, `seed1`); or folders by seed. All seeds have the same steps.
    out
        Run directory. It is there whole or not at all.
    recipe, overrides, scale
        As `train` takes them. Its task and model count; how it trains is not that of this run, and
        is left out.
    mapping
        Which of their tensors is which parameter: name of a built-in mapping, path of a YAML file,
        or its settings as a dict.
    **options
        - `outputs`: a file (`.npz`, `.safetensors`, `.pt`), or a mapping of arrays, with `inputs`,
          `outputs`, and `step` and `seed` where there are several; or a list of these.
        - `check`: their module instead, into which state dicts are loaded, or a function
          `(state dict, inputs) -> outputs`; it is asked at the first, middle and last checkpoint.
        - `unchecked`: True goes without either.
        - `tolerance`: largest difference of an output over the standard deviation of theirs, 1e-4.
        - `losses`: CSV with the columns `step`, `loss`, and `seed` where there are several.
        - `key`: where in a file the state dict is, dotted.
        - `step_pattern`, `step_field`: a regular expression that finds the step in a name, or the
          name of the field in a file that has it.
        - `overwrite`: replace the run that is there.
        - `notify`: called with each remark worth a line.

    Raises
    ------
    InputError
        For files that cannot be read, names, shapes and steps that do not fit, all at once; and
        where outputs differ, saying by how much and what would match.
    RunLockedError
        If another process is writing the run that is to be replaced.
    """
    chosen = load_recipe(recipe, overrides, scale=scale)
    run_dir = outside_runs(local_directory(out), itself=False)

    from mechicl.importers.importing import import_checkpoints

    import_checkpoints(checkpoints, chosen, run_dir, mapping=mapping, **options)
    return open_run(run_dir)


def run_directory(recipe: Recipe, out: str | Path | None) -> Path:
    """Return where a recipe is trained: `out`, or `runs/NAME`; raise InputError if in a run."""
    place = local_directory(Path("runs") / recipe.name if out is None else out)
    return outside_runs(place, itself=False)


class Run(StoredRun):
    """A run, and the analyses of it; `StoredRun` has its attributes, models and activations."""

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

    def stored(self, name: str) -> xr.Dataset | None:
        """Return the probe's result that `save` put under the run, if it is what `analyze` gives.

        It is of the default parameters, of this version of mechicl, of all seeds, and of the steps
        that the probe takes of those that the run has now. None if there is none such, and for a
        run that is at a URL.
        """
        from mechicl import results

        probe = analyses.get(name)
        wanted = {
            "probe": probe.name,
            "parameters": json.dumps(probe.resolve({}), sort_keys=True),
            "run_digest": self.trajectory.attrs["run_digest"],
            "mechicl_version": __version__,
        }
        steps = steps_of(probe, self.steps)
        if isinstance(self.path, str):
            return None
        for result in results.stored(self.path, probe.name):
            same = all(result.attrs.get(key) == value for key, value in wanted.items())
            if (
                same
                and "against" not in result.attrs
                and {"seed", "step"} <= set(result.coords)
                and np.array_equal(result["seed"].values, self.seeds)
                and np.array_equal(result["step"].values, steps)
            ):
                return result.load()
        return None

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
