"""What passes the hook points of many checkpoints, as labelled data."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from mechicl.errors import InputError, integer, unknown
from mechicl.models.base import Model
from mechicl.models.hooked import hook_dims
from mechicl.tasks import Task


def activations(
    model: Model,
    task: Task,
    parameters: xr.Dataset,
    names: str | Iterable[str],
    *,
    prompts: xr.Dataset,
    limit: int,
    load: Callable[[xr.Dataset], xr.Dataset] = xr.Dataset.compute,
) -> xr.Dataset:
    """Return activations at hook points for every seed and step; `Run.cache` says what of.

    Parameters
    ----------
    parameters
        (seed, step, layer, ...), which `load` reads into memory once names and prompts are checked.
    names, prompts, limit
        As of `Run.cache`, which has what is returned and raised.
    """
    names = [names] if isinstance(names, str) else list(names)
    if not names:
        raise InputError("no hook points were named; mechicl's are those of TransformerLens")
    inputs = model.windows(task, _inputs(task, prompts))
    parameters = load(parameters)
    first = _passing(model, task, weights_at(parameters, 0, 0), names, inputs[:1])
    grid = (parameters.sizes["seed"], parameters.sizes["step"])
    shapes = {name: (*grid, len(inputs), *one.shape[1:]) for name, one in first.items()}
    nbytes = sum(4 * prod(shape) for shape in shapes.values())
    if nbytes > integer("limit", limit, 0):
        raise InputError(
            f"these activations take {nbytes / 2**20:.0f} MiB, above the limit of "
            f"{limit / 2**20:.0f} MiB; take fewer steps, seeds or prompts, or give limit="
        )
    out = {name: np.empty(shape, np.float32) for name, shape in shapes.items()}
    for index in np.ndindex(grid):
        weights = weights_at(parameters, *index)
        for name, value in _passing(model, task, weights, names, inputs).items():
            out[name][index] = value
    return xr.Dataset(
        {name: (("seed", "step", *hook_dims(name)), value) for name, value in out.items()},
        coords={"seed": parameters["seed"], "step": parameters["step"]},
    )


class HookShape(NamedTuple):
    """What passes a hook point.

    Attributes
    ----------
    dims
        Its dims, batch first; None where they have no names, as the scale of a norm has none.
    shape
        Its shape, in that order; None for a hook point that never fires.
    """

    dims: tuple[str, ...] | None
    shape: tuple[int, ...] | None


def hook_shapes(model: Model, task: Task) -> dict[str, HookShape]:
    """Return dims and shapes at every hook point of a model on one prompt; `Run.hooks` says how."""
    shapes: dict[str, tuple[int, ...]] = {}

    def note(value: Tensor, hook: Any) -> None:
        shapes[hook.name] = tuple(value.shape)

    # Shapes are those of any parameters: a run need not be read, and may be damaged.
    hooked = model.hooked(task, model.initial(task, torch.Generator().manual_seed(0)))
    inputs = model.windows(task, _inputs(task, task.sample(1, seed=0)))
    with torch.no_grad():
        hooked.run_with_hooks(inputs, fwd_hooks=[(lambda name: True, note)])
    names = dict.fromkeys([*shapes, *hooked.hook_dict])
    return {name: HookShape(_dims(name, shapes.get(name)), shapes.get(name)) for name in names}


def _dims(name: str, shape: tuple[int, ...] | None) -> tuple[str, ...] | None:
    try:
        dims = hook_dims(name)
    except InputError:
        return None
    return dims if shape is None or len(shape) == len(dims) else None


def weights_at(parameters: xr.Dataset, seed: int, step: int) -> dict[str, Tensor]:
    """Return a copy of one checkpoint's parameters, by position: (layer, ...)."""
    return {
        str(name): torch.from_numpy(np.array(values.values[seed, step]))
        for name, values in parameters.items()
    }


def _inputs(task: Task, prompts: xr.Dataset) -> Tensor:
    """Return the prompts' inputs as a tensor, whatever order their dims are in."""
    dims = ("batch", *task.input_dims)
    wanted = f"prompts are a Dataset with inputs ({', '.join(dims)}), as run.task.sample gives"
    if not isinstance(prompts, xr.Dataset) or "inputs" not in prompts:
        raise InputError(f"{wanted}; given {type(prompts).__name__}")
    inputs = prompts["inputs"]
    if set(inputs.dims) != set(dims) or inputs.sizes["batch"] == 0:
        raise InputError(f"{wanted}, one at least; given {dict(inputs.sizes)}")
    ordered = np.ascontiguousarray(inputs.transpose(*dims).values, dtype=task.input_dtype)
    return torch.from_numpy(ordered)


def _passing(
    model: Model,
    task: Task,
    weights: Mapping[str, Tensor],
    names: Sequence[str],
    inputs: Tensor,
) -> dict[str, np.ndarray]:
    """Return what passes each hook point of the model with these weights."""
    hooked = model.hooked(task, weights)
    for name in names:
        if name not in hooked.hook_dict:
            raise unknown("hook point", name, hooked.hook_dict)
    with torch.no_grad():
        _, cache = hooked.run_with_cache(inputs, names_filter=list(names))
    silent = [name for name in names if name not in cache]
    if silent:
        raise InputError(f"hook points {silent} do not fire in this model's forward pass")
    return {name: cache[name].numpy() for name in names}
