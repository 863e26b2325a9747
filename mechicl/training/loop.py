"""The loop: seeds train in workers, and every checkpoint goes into the store."""

import os
import platform
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from importlib.metadata import version
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from mechicl.checkpoints import Checkpoint, Plan, TrajectoryWriter, read_config
from mechicl.checkpoints.layout import ORIGIN
from mechicl.errors import DamagedRunError, InputError
from mechicl.models.evaluate import one_thread_an_operation
from mechicl.training.compilation import compiled_step
from mechicl.training.devices import require_device
from mechicl.training.experiment import ImportedRecipe
from mechicl.training.preflight import check_room
from mechicl.training.recipe import Recipe, stored_recipe
from mechicl.training.step import State, Step, in_order, initial_state, make_step
from mechicl.training.workers import Snapshot, Worker
from mechicl.version import __version__

_LIBRARIES = ("torch", "numpy", "zarr", "xarray", "transformer-lens")


class Progress(NamedTuple):
    """Where training is: what a progress bar shows.

    Attributes
    ----------
    step, n_steps
        Updates made, and all of them.
    loss
        Mean loss of each seed since the last checkpoint; NaN for diverged ones.
    rate
        Steps of one seed a second, summed over seeds, since training started.
    """

    step: int
    n_steps: int
    loss: np.ndarray
    rate: float


def _silent(*_: object) -> None:
    pass


def train(
    recipe: Recipe,
    run_dir: Path,
    *,
    device: str = "auto",
    resume: bool = False,
    overwrite: bool = False,
    compile: bool = True,
    on_progress: Callable[[Progress], None] = _silent,
    notify: Callable[[str], None] = _silent,
) -> None:
    """Train all seeds of `recipe` and store every checkpoint of its schedule in `run_dir`.

    Parameters
    ----------
    device
        `auto` (CUDA where there is one), `cpu` or `cuda`.
    resume
        Go on from the last commit of `run_dir`. On a CPU the result has the same bits as a run that
        was never stopped, given the same library versions.
    overwrite
        Replace a run that is already there.
    compile
        Compile the training step if a compiler is at hand.
    on_progress, notify
        Called at every checkpoint, and with each remark worth a line.

    Raises
    ------
    InputError
        For a directory that may not be written to, a recipe that differs from the one being resumed
        (naming the keys), a device that is not there, or a run larger than the machine.
    RunLockedError
        If another process is writing the run.
    """
    device = _resolve_device(device)
    groups = _partition(len(recipe.seeds), 1 if device == "cuda" else os.cpu_count() or 1)
    with ExitStack() as stack:
        if resume:
            groups = _check_resumable(recipe, run_dir, device, notify)
            writer = stack.enter_context(TrajectoryWriter.resume(run_dir))
        else:
            plan = plan_run(recipe)
            check_room(recipe, plan, run_dir)
            config = run_config(recipe, groups, device)
            writer = stack.enter_context(
                TrajectoryWriter.create(run_dir, plan, config, overwrite=overwrite)
            )
        stops = writer.steps[writer.n_saved :]
        if len(stops) == 0:
            notify(f"{run_dir} is complete: {writer.n_saved} checkpoints")
            return
        stack.enter_context(one_thread_an_operation())
        step, compiled = _step(recipe, groups, device, compile, notify)
        if writer.n_saved and bool(writer.resume_state["compiled"]) != compiled:
            notify("the run began with another kind of step (compiled or not): bits will differ")
        state = _restored(recipe, writer) if writer.n_saved else initial_state(recipe, recipe.seeds)
        workers = [
            stack.enter_context(
                Worker(
                    recipe,
                    step,
                    state.map(itemgetter(group)).to(device),
                    [recipe.seeds[index] for index in group],
                    stops.tolist(),
                    draw_threads=max(1, (os.cpu_count() or 1) // len(groups)),
                )
            )
            for group in groups
        ]
        streams = [worker.snapshots(idle=writer.commit_if_due) for worker in workers]
        started, begun = time.monotonic(), int(state.step)
        for stop, snapshots in zip(stops, zip(*streams, strict=True), strict=True):
            checkpoint = _checkpoint(snapshots, compiled)
            writer.add(checkpoint)
            made = (int(stop) - begun) * len(recipe.seeds)
            rate = made / max(time.monotonic() - started, 1e-9)
            on_progress(Progress(int(stop), recipe.n_steps, _mean_loss(checkpoint.loss), rate))


def _resolve_device(device: str) -> str:
    require_device(device)
    if device == "cuda" and not torch.cuda.is_available():
        raise InputError(
            "device cuda was asked for, but torch sees no CUDA device; use cpu or auto"
        )
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return device


def _partition(n_seeds: int, n_workers: int) -> list[list[int]]:
    """Split seed indices into contiguous groups of nearly equal size, one a worker."""
    parts = np.array_split(np.arange(n_seeds), min(n_seeds, n_workers))
    return [part.tolist() for part in parts]


def plan_run(recipe: Recipe | ImportedRecipe) -> Plan:
    """Return what a run of `recipe` will store."""
    imported = isinstance(recipe, ImportedRecipe)
    return Plan(
        parameters=recipe.model.parameters(recipe.task),
        sizes=recipe.model.sizes(recipe.task),
        seeds=recipe.seeds,
        steps=np.array(recipe.steps) if imported else recipe.checkpoints.steps(recipe.n_steps),
        constants={**recipe.task.constants(), **recipe.model.constants()},
        attrs={
            "run_digest": recipe.digest,
            "recipe": recipe.name,
            "task": recipe.task.name,
            "model": recipe.model.name,
        },
    )


def run_config(recipe: Recipe, groups: list[list[int]], device: str) -> dict[str, Any]:
    """Return what `config.yaml` will say: recipe, device, groups of seeds, versions."""
    return {
        "recipe": recipe.settings(),
        "device": device,
        "groups": groups,
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    """Return the versions of mechicl, Python and the libraries that numbers may depend on."""
    libraries = {name: version(name) for name in _LIBRARIES}
    return {"mechicl": __version__, "python": platform.python_version(), **libraries}


def _check_resumable(
    recipe: Recipe, run_dir: Path, device: str, notify: Callable[[str], None]
) -> list[list[int]]:
    """Return the groups that the run was begun with; refuse a recipe that is not its own."""
    config: dict[str, Any] = read_config(run_dir)
    if ORIGIN in config:
        raise InputError(
            f"the run in {run_dir} was imported: mechicl did not train it and has no optimiser "
            "state of it, so there is nothing to resume; train into another directory"
        )
    missing = [key for key in ("groups", "device", "versions") if key not in config]
    if missing:
        raise DamagedRunError(f"{run_dir}/config.yaml lacks {', '.join(missing)}; restore it")
    differences = stored_recipe(config, f"{run_dir}/config.yaml").differences(recipe)
    if differences:
        raise InputError(
            f"the run was begun with another recipe ({'; '.join(differences)}); resume it with the "
            "recipe in its config.yaml, or train into another directory"
        )
    groups, n_seeds = config["groups"], len(recipe.seeds)
    if not isinstance(config["versions"], dict) or not _is_partition(groups, n_seeds):
        raise DamagedRunError(
            f"{run_dir}/config.yaml is not what was written: its groups are {groups}, its versions "
            f"{config['versions']}; groups hold 0 to {n_seeds - 1} in order, and versions are by "
            "name; restore it"
        )
    now = run_config(recipe, groups, device)
    changed = [
        f"{name} {config['versions'].get(name)} -> {number}"
        for name, number in now["versions"].items()
        if config["versions"].get(name) != number
    ]
    if config["device"] != device:
        changed.append(f"device {config['device']} -> {device}")
    if changed:
        notify(f"resuming with {', '.join(changed)}: bits will differ from a run never stopped")
    return groups


def _is_partition(groups: object, n_seeds: int) -> bool:
    """Return whether that can be what `_partition` has returned, on whatever machine."""
    if not isinstance(groups, list) or not all(isinstance(part, list) and part for part in groups):
        return False
    return [index for part in groups for index in part] == list(range(n_seeds))


def _step(
    recipe: Recipe,
    groups: Sequence[Sequence[int]],
    device: str,
    compile: bool,
    notify: Callable[[str], None],
) -> tuple[Step, bool]:
    if not compile:
        return make_step(recipe), False
    return compiled_step(recipe, [len(group) for group in groups], device, notify)


def _checkpoint(snapshots: Sequence[Snapshot], compiled: bool) -> Checkpoint:
    """Join the groups' snapshots; a seed that has diverged has no parameters any more: NaN."""
    states = [snapshot.state for snapshot in snapshots]
    diverged_at = _join([state.diverged_at for state in states])
    gone = ~np.isnan(diverged_at)
    parameters = {}
    for name in states[0].parameters:
        parameters[name] = _join([state.parameters[name] for state in states])
        if gone.any():
            parameters[name][gone] = np.nan

    def resume() -> dict[str, np.ndarray]:
        moments = {
            f"{moment}.{name}": _join([state.moments[moment][name] for state in states])
            for moment, stack in states[0].moments.items()
            for name in stack
        }
        step = states[0].step.cpu().numpy()
        return {**moments, "compiled": np.array(compiled), "step": step, "diverged_at": diverged_at}

    return Checkpoint(
        parameters=parameters,
        loss=np.concatenate([snapshot.loss for snapshot in snapshots]),
        diverged_at=diverged_at.astype(float),
        resume=resume,  # joined when it is committed, which few checkpoints are the last to be
    )


def _join(groups: Sequence[torch.Tensor]) -> np.ndarray:
    return np.concatenate([tensor.cpu().numpy() for tensor in groups])


def _restored(recipe: Recipe, writer: TrajectoryWriter) -> State:
    """Return the state of the last commit: parameters from the store, the rest from its file."""
    saved = {name: torch.from_numpy(np.array(value)) for name, value in writer.resume_state.items()}
    moments: dict[str, dict[str, torch.Tensor]] = {}
    for key, value in saved.items():
        moment, _, name = key.partition(".")
        if name:
            moments.setdefault(moment, {})[name] = value
    last = writer.last_parameters()
    parameters = {name: torch.from_numpy(np.array(last[name])) for name in in_order(recipe)}
    return State(parameters, moments, saved["diverged_at"], saved["step"])


def _mean_loss(loss: np.ndarray) -> np.ndarray:
    """Mean over the steps since the last checkpoint: (seed,), NaN where there are none."""
    return loss.mean(1) if loss.shape[1] else np.full(len(loss), np.nan)
