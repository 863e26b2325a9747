"""The order of heads that seeds share, without which no mean over seeds or runs means anything.

Which head of a model does what is chance: "head 0" of two seeds have nothing in common but their
number. Whatever sums heads up over seeds or runs goes through `aligned_heads`.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import xarray as xr
from jaxtyping import Float, Int

from mechicl.analyses.spans import TIE_TOLERANCE, head_order

_LEADING = ("run", "seed")


class _Rule(NamedTuple):
    """How heads are ordered by a variable: along which dims it is, in words, and how."""

    variable: str
    dims: frozenset[str]
    words: str
    places: Callable[[xr.Dataset], xr.DataArray]


def aligned_heads(result: xr.Dataset) -> xr.Dataset:
    """Put the heads of every seed, of every run, in an order that seeds share.

    The order is one of what the heads do at the last step: of the circuits of he2025 the largest ω
    first, and of one ω the largest μ; of roles positive, dummy, negative; of tasks by the ones that
    the heads serve, then ω; of a Markov chain, and of each layer, by the block that they attend to
    or whose feature they write (`head_permutation`). The result is then the same whatever order the
    heads were in, up to heads that are alike in every variable of one number a head.

    Parameters
    ----------
    result
        What a probe gives, or one of `Study.results`: (run, seed, step, ..., head, ...).

    Returns
    -------
    xr.Dataset
        `head` is `place`, from 0, NaN for a seed whose heads tie. Variables along `head` that no
        order is known for are left out; attributes say by what heads were ordered (`heads_by`), and
        what was left out (`not_aligned`, names with blanks between).
    """
    along = [str(name) for name, each in result.data_vars.items() if "head" in each.dims]
    if not along:
        return result
    last = last_steps(result)
    rule = next((each for each in _RULES if _fits(each, last)), None)
    if rule is None:
        left = result.drop_vars([*along, *(["head"] if "head" in result.coords else [])])
        return left.assign_attrs(not_aligned=" ".join(along))
    places = rule.places(last)
    fitting = [name for name in along if {*places.dims} <= {*result[name].dims}]
    moved = {name: _moved(result[name], places) for name in fitting}
    rest = [name for name in along if name not in fitting]
    coords = ["head"] if "head" in result.coords else []
    out = result.drop_vars([*along, *coords]).assign(moved)
    return out.assign_attrs(heads_by=rule.words, not_aligned=" ".join(rest))


def last_steps(result: xr.Dataset) -> xr.Dataset:
    """Return a result at the last step, of several runs each at its own (`last_step`).

    Read into memory, without the axis `step`.
    """
    if "step" not in result.dims:
        return result.load()
    if "last_step" not in result.coords or "run" not in result.dims:
        return result.isel(step=-1).load()
    steps = result["step"].values
    at = np.searchsorted(steps, result["last_step"].values)
    rows = []
    for step in np.unique(at):
        runs = np.flatnonzero(at == step)
        rows.append((runs, result.isel(step=int(step), run=runs).drop_vars("step").load()))
    if len(rows) == 1:
        return rows[0][1]
    order = np.argsort(np.concatenate([runs for runs, _ in rows]))
    joined = xr.concat(
        [each for _, each in rows],
        "run",
        data_vars="minimal",
        coords="minimal",
        compat="override",
        join="exact",
    )
    assert isinstance(joined, xr.Dataset)
    return joined.isel(run=order)


def _fits(rule: _Rule, last: xr.Dataset) -> bool:
    if rule.variable not in last:
        return False
    return {*last[rule.variable].dims} - {*_LEADING} == rule.dims


def _moved(variable: xr.DataArray, places: xr.DataArray) -> xr.DataArray:
    """Return a variable with its heads in their places, `head` renamed `place`."""
    lead = [dim for dim in places.dims if dim != "head"]
    rest = [dim for dim in variable.dims if dim not in places.dims]
    given = variable.transpose(*lead, *rest, "head")
    wanted = places.transpose(*lead, "head").values
    shape = (*wanted.shape[:-1], *(1,) * len(rest), wanted.shape[-1])
    unknown = np.isnan(wanted).any(-1).reshape((*shape[:-1], 1))
    order = np.argsort(wanted, axis=-1).reshape(shape)
    values = np.take_along_axis(np.asarray(given.values, dtype=float), order, -1)
    moved = given.copy(data=np.where(unknown, np.nan, values)).transpose(*variable.dims)
    return moved.rename(head="place").assign_attrs(variable.attrs)


def _by_keys(*names: str) -> Callable[[xr.Dataset], xr.DataArray]:
    """Order heads by variables, the largest first; then by whatever has one number a head."""

    def places(last: xr.Dataset) -> xr.DataArray:
        dims = [dim for dim in last[names[0]].dims if dim in _LEADING]
        known = [name for name in names if name in last]
        others = sorted(
            str(name)
            for name, each in last.data_vars.items()
            if {*each.dims} == {*dims, "head"} and name not in names
        )
        keys = [key for name in (*known, *others) for key in _columns(last[name], dims)]
        return _places(keys, last[names[0]], dims)

    return places


def _columns(variable: xr.DataArray, dims: Sequence[object]) -> Iterator[np.ndarray]:
    """Yield (..., head) for each entry of what other axes a variable has."""
    extra = [dim for dim in variable.dims if dim not in (*dims, "head")]
    table = variable.transpose(*extra, *dims, "head").values.astype(float)
    yield from table.reshape(-1, *table.shape[len(extra) :])


def _places(
    keys: list[Float[np.ndarray, "... head"]], like: xr.DataArray, dims: Sequence[object]
) -> xr.DataArray:
    """Return the place of each head, (..., head): heads without a number come last."""
    # The last key of lexsort decides first; NaN sorts behind every number.
    order = np.lexsort([-key for key in reversed(keys)], axis=-1)
    return xr.DataArray(np.argsort(order, axis=-1).astype(float), dims=(*dims, "head"))


def _by_block(name: str) -> Callable[[xr.Dataset], xr.DataArray]:
    """Order the heads of each layer by the blocks on which they have most of a variable."""

    def places(last: xr.Dataset) -> xr.DataArray:
        lead = [dim for dim in last[name].dims if dim in _LEADING]
        table = last[name].transpose(*lead, "layer", "head", "block").values
        found = np.full(table.shape[:-1], np.nan)
        for index in np.ndindex(found.shape[:-1]):
            found[index] = _block_places(table[index])
        return xr.DataArray(found, dims=(*lead, "layer", "head"))

    return places


def _block_places(table: Float[np.ndarray, "head block"]) -> Float[np.ndarray, " head"]:
    """Order heads of one layer by `head_order`; those that a smaller run has not come last."""
    heads, blocks = ~np.isnan(table).all(1), ~np.isnan(table).all(0)
    own = table[np.ix_(heads, blocks)]
    places = np.full(len(table), np.nan)
    if own.size == 0 or not np.isfinite(own).all():
        return places
    order, margin = head_order(own)
    if margin <= TIE_TOLERANCE:
        return places
    places[heads] = order
    places[~heads] = np.arange(heads.sum(), len(table))
    return places


def _given(last: xr.Dataset) -> xr.DataArray:
    """Return the places that `head_permutation` found, those of heads that are not there last."""
    given = last["permutation"]
    dims = [dim for dim in given.dims if dim != "head"]
    table = given.transpose(*dims, "head").values
    absent = np.isnan(table)
    behind = np.cumsum(absent, -1) - 1 + (~absent).sum(-1, keepdims=True)
    tied = absent.all(-1, keepdims=True)
    filled: Int[np.ndarray, "... head"] = np.where(absent, behind, table)
    return xr.DataArray(np.where(tied, np.nan, filled), dims=(*dims, "head"))


_RULES = (
    _Rule("permutation", frozenset({"layer", "head"}), "the block that they serve", _given),
    _Rule(
        "mass",
        frozenset({"layer", "head", "block"}),
        "the block that they serve",
        _by_block("mass"),
    ),
    _Rule(
        "cosine",
        frozenset({"layer", "head", "block"}),
        "the block whose feature they write",
        _by_block("cosine"),
    ),
    _Rule(
        "serves",
        frozenset({"head", "response"}),
        "the tasks that they serve, then omega",
        _by_keys("serves", "omega"),
    ),
    _Rule("omega", frozenset({"head"}), "omega, the largest first", _by_keys("omega", "mu")),
    _Rule("role", frozenset({"head"}), "role: positive, dummy, negative", _by_keys("role")),
)
