"""What probes share that put activations of one context into the run of another."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import xarray as xr
from jaxtyping import Bool, Float, Int

from mechicl.analyses.heads import nonfinite
from mechicl.analyses.probe import Forward
from mechicl.errors import InputError
from mechicl.schema import Var

if TYPE_CHECKING:
    from torch import Tensor
    from transformer_lens import HookedTransformer

NONFINITE_PREDICTIONS = "nonfinite_predictions"

QUERIES = {"n_queries": Var((), "1", "queries of a prompt, Q", 1)}
"""Constant of a task that has several."""

_LACKING = (
    "this probe {}, and its Forward has no `{}`; mechicl.analyses.forward_of(task, model) makes "
    "one that has"
)

AT_ONCE = 2**22
"""Numbers of prompts that a model reads at once, so that memory does not grow with their number."""


def parts(n: int, forward: Forward, seed: int) -> list[tuple[int, int]]:
    """Cut `n` prompts into parts of about one size: (size, part), as `Forward.sample` takes them.

    A part has two prompts at least where there are as many. It is a function of `n` and of the size
    of a prompt.
    """
    one = sample(forward, 1, seed)["inputs"].size
    number = max(1, n // max(2, min(1024, AT_ONCE // one)))
    return [(n // number + (part < n % number), part) for part in range(number)]


def sample(forward: Forward, n: int, seed: int, part: int = 0) -> xr.Dataset:
    """Return prompts with what they are about.

    Raises InputError for a Forward without `sample`.
    """
    if forward.sample is None:
        raise InputError(_LACKING.format("reads latents of the task", "sample"))
    return forward.sample(n, seed, part=part)


@dataclass(frozen=True)
class Donors:
    """The donors of a pool: `index` of each at every distance, where `found`."""

    index: Int[np.ndarray, "context tree_distance"]
    found: Bool[np.ndarray, "context tree_distance"]


def choose_donors(
    leaves: Int[np.ndarray, " context"], depth: int, rng: np.random.Generator
) -> Donors:
    """Match every context of a pool with one at each tree distance, 0 another of its own leaf.

    Those at distance k of a leaf are the contexts of one subtree, and the same for all leaves of
    the subtree beside it. Either side is put into a random order, and these are matched in turn: so
    every donor is as likely, and is used as often as the next, to one. `leaves` are numbered as in
    `mechicl.theory.priors`.
    """
    n = len(leaves)
    index, found = np.zeros((n, depth + 1), int), np.zeros((n, depth + 1), bool)
    for distance in range(depth + 1):
        group = leaves >> max(distance - 1, 0)
        n_groups = 2 ** (depth - max(distance - 1, 0))
        size = np.bincount(group, minlength=n_groups)
        start = np.cumsum(size) - size
        targets = np.lexsort((rng.random(n), group))
        rank = np.empty(n, int)
        rank[targets] = np.arange(n) - start[group[targets]]
        if distance == 0:
            # Of its own order the next: it is itself where it is alone.
            order, of, turn = targets, group, rank + 1
            found[:, 0] = size[group] > 1
        else:
            order, of, turn = np.lexsort((rng.random(n), group)), group ^ 1, rank
            found[:, distance] = size[of] > 0
        place = start[of] + turn % np.maximum(size[of], 1)
        index[:, distance] = order[np.minimum(place, n - 1)]
    return Donors(index, found)


class Models:
    """The models of one step, hooked; None where parameters are not finite.

    They read prompts in the precision of their parameters.
    """

    def __init__(self, one: xr.Dataset, forward: Forward) -> None:
        if forward.hooked is None or forward.reads is None:
            raise InputError(_LACKING.format("hooks into the model", "hooked"))
        self._reads, self._dtype = forward.reads, one["W_V"].dtype.type
        self.n_seeds = one.sizes["seed"]
        broken = nonfinite(one.expand_dims("step")).isel(step=0).values
        names = [str(name) for name, value in one.data_vars.items() if "seed" in value.dims]
        self._hooked: list[HookedTransformer | None] = [
            None
            if broken[seed]
            else forward.hooked({name: one[name].isel(seed=seed).values for name in names})
            for seed in range(self.n_seeds)
        ]

    def each(self, function: "Callable[[int, HookedTransformer], None]") -> None:
        """Call `function` with the number of every seed that has a model and the model.

        Seeds go side by side: operations this small are slower on several threads than on one.
        """
        from mechicl.models.evaluate import one_thread_an_operation

        numbers = [seed for seed, model in enumerate(self._hooked) if model is not None]
        models = [model for model in self._hooked if model is not None]
        with one_thread_an_operation(), ThreadPoolExecutor(os.cpu_count()) as pool:
            for _ in pool.map(function, numbers, models):
                pass

    def reads(self, inputs: Float[np.ndarray, "batch pos d_model"]) -> "Tensor":
        """Return prompts as the models read them."""
        return self._reads(inputs, dtype=self._dtype)


def steps(
    chosen: xr.Dataset, forward: Forward, measure: Callable[[Models], dict[str, np.ndarray]]
) -> dict[str, np.ndarray]:
    """Measure the models of one step after another; arrays (seed, ...) become (seed, step, ...)."""
    found = [
        measure(Models(chosen.isel(step=step).transpose("seed", ...), forward))
        for step in range(chosen.sizes["step"])
    ]
    return {name: np.stack([each[name] for each in found], 1) for name in found[0]}


@contextmanager
def few_queries(model: "HookedTransformer", n: int) -> "Iterator[None]":
    """Let a pooling model answer the first `n` queries of a prompt alone, without gradient."""
    import torch

    def first(value: "Tensor", hook: object) -> "Tensor":
        del hook
        return value[:, :n]

    with torch.no_grad(), model.hooks(fwd_hooks=[("hook_queries", first)]):
        yield


def mean_and_error(
    values: Float[np.ndarray, "*models context"],
) -> tuple[Float[np.ndarray, "*models"], Float[np.ndarray, "*models"]]:
    """Return mean and standard error over contexts; NaN for fewer than two, or where not finite."""
    n = values.shape[-1]
    if n < 2:
        nothing = np.full(values.shape[:-1], np.nan)
        return nothing, nothing.copy()
    with np.errstate(over="ignore", invalid="ignore"):
        mean = values.mean(-1)
        error = values.std(-1, ddof=1) / n**0.5
    defined = np.isfinite(mean) & np.isfinite(error)
    return np.where(defined, mean, np.nan), np.where(defined, error, np.nan)


def any_missing(found: xr.Dataset, names: tuple[str, ...]) -> xr.DataArray:
    """Return where one of some variables has no value: (seed, step)."""
    model = {"seed", "step"}
    missing: list[Bool[np.ndarray, "seed step"]] = [
        found[name].isnull().any([*{*found[name].dims} - model]).transpose("seed", "step").values
        for name in names
    ]
    return xr.DataArray(
        np.logical_or.reduce(missing),
        {dim: found[dim] for dim in ("seed", "step")},
        ("seed", "step"),
    )
