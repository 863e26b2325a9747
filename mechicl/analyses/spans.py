"""Where heads look, by blocks of lags, and the order of heads that makes seeds comparable."""

from collections.abc import Iterator, Mapping

import numpy as np
import xarray as xr
from jaxtyping import Float, Int
from scipy.optimize import linear_sum_assignment
from scipy.special import entr

from mechicl.analyses.evaluation import Moments, shares
from mechicl.analyses.probe import Forward
from mechicl.errors import InputError
from mechicl.schema import Var

LAG_WEIGHTS = {"lag_weights": Var(("block", "lag"), "1", "weight alpha of a lag in a block", 0, 1)}
"""Constant of the Markov chain: lag i is in block I(k) where its weight there is above 0."""

BLOCK = {"block": Var(("block",), "1", "block, the k of I(k)", 1)}
"""The axis of blocks in results, numbered from 1 as in the paper."""

NONFINITE_PATTERNS = "nonfinite_patterns"

TIE_TOLERANCE = 1e-6
"""Patterns are float32: heads that are alike differ in mass by less."""

_HEAD = ("seed", "step", "layer", "head")
_AT_ONCE = 256  # prompts, whose patterns are in memory together


def block_axis(n_blocks: int) -> xr.DataArray:
    """Return the axis of blocks: 1 to `n_blocks`."""
    return xr.DataArray(np.arange(1, n_blocks + 1), dims="block", attrs=BLOCK["block"].attrs)


def measured_spans(
    chosen: xr.Dataset, forward: Forward, *, n_prompts: int, evaluation_seed: int
) -> xr.Dataset:
    """Measure the attention of every head on every block of lags, as a mean over prompts.

    Where KQ reads positions alone, patterns are those of any prompt: one is evaluated.

    Parameters
    ----------
    chosen
        All parameters of the models, at the steps wanted and in memory, and `lag_weights`.
    forward
        With `attention`.
    n_prompts, evaluation_seed
        Size, and seed, of the evaluation set.

    Returns
    -------
    xr.Dataset
        `span_mass` (seed, step, layer, head, query_pos, block), `mass` and `mass_error` (seed,
        step, layer, head, block), `elsewhere` and `entropy` (seed, step, layer, head), as the probe
        `attention_spans` defines them; NaN for heads with a pattern that is not finite.

    Raises
    ------
    InputError
        If `forward` has no `attention`, or the architecture no batched patterns.
    """
    if forward.attention is None:
        raise InputError("this Forward has no attention; give it one, as Run.forward does")
    models = list(_by_step(chosen))
    positional = _positional(chosen, forward, models[0], evaluation_seed)
    n_used = 1 if positional else n_prompts
    weights = chosen["lag_weights"].transpose("block", "lag").values
    by_position, averaged = ([Moments() for _ in models] for _ in range(2))
    for size, part in shares(n_used):
        inputs, _ = forward.prompts(size, evaluation_seed, part=part)
        for start in range(0, size, _AT_ONCE):
            for step, parameters in enumerate(models):
                patterns = forward.attention(parameters, inputs[start : start + _AT_ONCE])
                values = np.moveaxis(_on_blocks(patterns, weights), 3, -1)
                by_position[step].add(values)
                averaged[step].add(values.mean(-3))
    # (seed, step, layer, head, query_pos, blocks, elsewhere and entropy)
    means = np.stack([each.mean for each in by_position], 1)
    errors = np.zeros_like(means[..., 0, :])
    if not positional:
        errors = np.stack([each.error for each in averaged], 1)
    average = means.mean(-2)
    measured = {
        "span_mass": ((*_HEAD, "query_pos", "block"), means[..., :-2]),
        "mass": ((*_HEAD, "block"), average[..., :-2]),
        "mass_error": ((*_HEAD, "block"), errors[..., :-2]),
        "elsewhere": (_HEAD, average[..., -2]),
        "entropy": (_HEAD, average[..., -1]),
    }
    coords = {dim: chosen[dim] for dim in ("seed", "step")} | {"block": block_axis(len(weights))}
    result = xr.Dataset(measured, coords=coords)
    return result.where(result["entropy"].notnull())


def _by_step(chosen: xr.Dataset) -> Iterator[dict[str, np.ndarray]]:
    """Yield the parameters of one step after another, seeds first."""
    names = [name for name, value in chosen.data_vars.items() if {"seed", "step"} <= {*value.dims}]
    for index in range(chosen.sizes["step"]):
        one = chosen[names].isel(step=index).transpose("seed", ...)
        yield {str(name): one[name].values for name in names}


def _positional(
    chosen: xr.Dataset, forward: Forward, parameters: Mapping[str, np.ndarray], seed: int
) -> bool:
    """Return whether the scores are one matrix KQ over positions, and nothing else."""
    if "KQ" not in chosen or forward.attention is None:
        return False
    inputs, _ = forward.prompts(1, seed)
    # There are as many lags as positions, and KQ reads tokens too where it is wider.
    return forward.attention(parameters, inputs).shape[-1] == chosen.sizes["d_key"]


def _on_blocks(
    patterns: Float[np.ndarray, "seed layer head batch query_pos lag"],
    lag_weights: Float[np.ndarray, "block lag_of_the_chain"],
) -> Float[np.ndarray, "seed layer head batch query_pos value"]:
    """Return the mass on every block, then that on no block, then the entropy."""
    n_lags = patterns.shape[-1]
    member = np.zeros((len(lag_weights) + 1, max(n_lags, lag_weights.shape[1])))
    member[:-1, : lag_weights.shape[1]] = lag_weights > 0
    member[-1] = ~member.any(0)
    # Lags that the model cannot see have no mass.
    masses = patterns @ member[:, :n_lags].T.astype(patterns.dtype)
    entropy = entr(patterns).sum(-1, keepdims=True, dtype=float)
    # Rounding may leave a whole pattern an ulp above 1.
    return np.concatenate([masses.clip(0.0, 1.0), entropy.clip(min=0.0)], -1, dtype=float)


def head_order(mass: Float[np.ndarray, "head block"]) -> tuple[Int[np.ndarray, " head"], float]:
    """Return the place of each head in the order of the blocks they serve, and how sure it is.

    Blocks get different heads so that the sum of the masses is the largest (the assignment
    problem), and these heads come first, in the order of their blocks. Heads beyond the number of
    blocks follow, by the block on which they have most mass, and for one block by that mass, the
    largest first. With fewer heads than blocks, some blocks get none.

    Parameters
    ----------
    mass
        Finite, one head and one block at least.

    Returns
    -------
    place
        From 0, each once.
    margin
        From 0: how much less the sum is under the next best assignment, or, if that is less, how
        little the masses differ by which heads beyond the blocks are ordered. NaN for a single
        head, whose place nothing decides.
    """
    heads, blocks = linear_sum_assignment(mass, maximize=True)
    best = mass[heads, blocks].sum()
    rest = np.setdiff1d(np.arange(len(mass)), heads)
    nearest, most = mass[rest].argmax(-1), mass[rest].max(-1)
    behind = np.lexsort((-most, nearest))
    order = np.concatenate([heads[np.argsort(blocks)], rest[behind]])
    place = np.empty(len(mass), int)
    place[order] = np.arange(len(mass))
    if len(mass) == 1:
        return place, float("nan")
    differences = []
    for pair in zip(heads, blocks, strict=True):
        without = mass.astype(float)
        without[pair] = -np.inf
        differences.append(best - without[linear_sum_assignment(without, maximize=True)].sum())
    falls = -np.diff(most[behind])
    differences += falls[np.diff(nearest[behind]) == 0].tolist()
    return place, max(min(differences), 0.0)


def head_orders(mass: xr.DataArray, *, tie_tolerance: float) -> xr.Dataset:
    """Order the heads of every seed and layer by `head_order`.

    Parameters
    ----------
    mass
        (seed, layer, head, block); a seed and layer with a NaN has no order.
    tie_tolerance
        Largest margin that is a tie, without units.

    Returns
    -------
    xr.Dataset
        `permutation` (seed, layer, head): the place of the head, from 0; NaN where heads tie.
        `margin` (seed, layer): NaN for a single head.
    """
    table = mass.transpose("seed", "layer", "head", "block")
    places, margins = np.full(table.shape[:3], np.nan), np.full(table.shape[:2], np.nan)
    for index in np.ndindex(margins.shape):
        if np.isfinite(table.values[index]).all():
            place, margins[index] = head_order(table.values[index])
            if not margins[index] <= tie_tolerance:
                places[index] = place
    coords = {"seed": table["seed"]}
    return xr.Dataset(
        {
            "permutation": (("seed", "layer", "head"), places),
            "margin": (("seed", "layer"), margins),
        },
        coords=coords,
    )


def aligned(dataset: xr.Dataset, permutation: xr.DataArray) -> xr.Dataset:
    """Put the heads of every seed and layer in their places, so that seeds can be averaged.

    Along `head` of every variable, aligned[permutation[h]] = given[h]: a result or parameters with
    the same dims, in which heads of one place serve one block. Other variables stay as they are.

    Parameters
    ----------
    dataset
        A probe's result, or parameters, (..., head, ...), of seeds that `permutation` has.
    permutation
        (seed, layer, head), as `head_permutation` gives it: the place of each head, from 0. Of one
        layer it also serves variables without `layer`. Where it is NaN, so are the aligned values.

    Raises
    ------
    InputError
        If seeds or heads are not those of `permutation`, if a variable has heads and no seed, or
        heads and no layer where there are several, or if rows are neither permutations nor NaN.
    """
    _require_permutations(permutation)
    if "seed" in permutation.dims:
        known = permutation["seed"].values.tolist()
        given = np.ravel(dataset["seed"].values).tolist() if "seed" in dataset.coords else []
        if not given or not set(given) <= set(known):
            raise InputError(f"the permutation is of seeds {known}; the dataset has {given}")
        permutation = permutation.sel(seed=dataset["seed"])
    changed = {
        name: _placed(str(name), variable, permutation)
        for name, variable in dataset.data_vars.items()
        if "head" in variable.dims
    }
    return dataset.assign(changed)


def _require_permutations(permutation: xr.DataArray) -> None:
    wanted = "a permutation is (seed, layer, head), as head_permutation gives it"
    if "head" not in permutation.dims or not {*permutation.dims} <= {"seed", "layer", "head"}:
        raise InputError(f"{wanted}; given {permutation.dims}")
    rows = permutation.transpose(..., "head").values.reshape(-1, permutation.sizes["head"])
    rows = rows[~np.isnan(rows).all(-1)]
    if not (np.sort(rows, -1) == np.arange(rows.shape[-1])).all():
        raise InputError(f"{wanted}: rows hold each place from 0 once, or NaN alone")


def _placed(name: str, variable: xr.DataArray, permutation: xr.DataArray) -> xr.DataArray:
    """Return one variable along `head` with its heads in their places."""
    if "layer" in permutation.dims and "layer" not in variable.dims:
        if permutation.sizes["layer"] > 1:
            raise InputError(
                f"{name!r} has heads of no layer, and the permutation is of "
                f"{permutation.sizes['layer']}; choose one with permutation.isel(layer=...)"
            )
        permutation = permutation.isel(layer=0, drop=True)
    lacking = [str(dim) for dim in permutation.dims if dim not in variable.dims]
    if lacking:
        raise InputError(f"{name!r} has heads and no {', '.join(lacking)}: {variable.dims}")
    wrong = [dim for dim in permutation.dims if permutation.sizes[dim] != variable.sizes[dim]]
    if wrong:
        raise InputError(
            f"{name!r} has {dict(variable.sizes)}, and the permutation {dict(permutation.sizes)}; "
            "both need as many heads and layers"
        )
    without = permutation.isnull().any("head")
    # argsort is the inverse: which head comes to a place.
    order = permutation.fillna(0).argsort(permutation.get_axis_num("head"))
    given = variable.transpose(..., *[dim for dim in order.dims if dim != "head"], "head")
    spread = order.transpose(*[dim for dim in given.dims if dim in order.dims]).values
    placed = given.copy(data=np.take_along_axis(given.values, _expanded(spread, given), -1))
    placed = placed.where(~without) if bool(without.any()) else placed
    return placed.transpose(*variable.dims).assign_attrs(variable.attrs)


def _expanded(order: np.ndarray, given: xr.DataArray) -> np.ndarray:
    """Give `order` leading axes of size 1, as `take_along_axis` broadcasts them."""
    return order.reshape((1,) * (given.ndim - order.ndim) + order.shape)
