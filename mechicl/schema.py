"""The words of the house: dims, units, and declarations that data are checked against."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xarray as xr

from mechicl.errors import InputError, SchemaError

DIMS: dict[str, str] = {
    "run": "a trained run, in studies of several",
    "seed": "one independent model and data stream of a run",
    "seed_other": "the other of two seeds that are compared",
    "step": "training step of a checkpoint: the number of updates made",
    "log_step": "training step of a logged value",
    "layer": "transformer block, from the input",
    "head": "attention head of a layer",
    "place": "place of a head in an order that seeds share: by the block that it serves",
    "d_model": "residual stream",
    "d_head": "inner dimension of a head",
    "d_mlp": "hidden units of an MLP",
    "d_vocab": "token ids",
    "d_key": "residual stream as keys read it: rows of a KQ circuit",
    "d_query": "residual stream as queries read it: columns of a KQ circuit",
    "d_out": "residual stream as heads write it: rows of an OV circuit",
    "d_in": "residual stream as values read it: columns of an OV circuit",
    "covariate": "entry of a covariate x",
    "covariate_other": "entry of a covariate x: columns of a matrix over covariates",
    "length": "number of examples in a context",
    "kq_scale": "KQ scale, on a grid",
    "ov_scale": "OV scale, on a grid",
    "batch": "prompt",
    "pos": "position in a prompt",
    "query_pos": "position that attends",
    "key_pos": "position that is attended to",
    "response": "one of the N tasks of a regression",
    "query": "one of the queries that are asked of a context",
    "channel": "measurement channel of a pooling model",
    "d_workspace": "workspace of a pooling model",
    "d_residual": "what a query of a pooling model is read from: its token and the workspace",
    "output_mlp": "one of the MLPs that a pooling model reads a query through",
    "block": "block of lags of a Markov chain, the most important first",
    "lag": "how far back an attended position is; 0 is the one that attends",
    "state": "state of a Markov chain",
    "next_state": "state that follows: rows of a feature matrix",
    "leaf": "leaf of a tree prior",
    "tree_distance": "distance of two leaves of a tree prior: its depth less their common spins",
    "patch_layer": "layer from which on activations are patched; after the last one, none",
    "node_depth": "depth of a node of a tree prior, 0 the root",
    "measurement": "one of M measurements",
    "curve": "quantity that is followed over training",
    "transition": "change of a curve between two plateaus, in the order of steps",
    "reference": "exact or classical predictor that a model is held against",
    "strategy": "way to spend a budget of measurements that a model is held against",
}
"""Every axis has one name; outside packages add theirs with `add_dim`."""

UNITS = ("1", "nat", "logit", "step", "token", "second")


def add_dim(name: str, meaning: str) -> None:
    """Add an axis to the table; a name that is taken with another meaning is refused."""
    if DIMS.setdefault(name, meaning) != meaning:
        raise InputError(f"dim {name!r} already means {DIMS[name]!r}")


@dataclass(frozen=True)
class Var:
    """Declaration of one variable: along what, in what unit, what it is, and between what values.

    `flags` names the values of a variable that holds codes (CF `flag_values`, `flag_meanings`);
    `label_of` is the axis whose labels the values are, where they are (such as the nearest of it).
    Range ends are included; NaN is always allowed and means undefined.
    """

    dims: tuple[str, ...]
    units: str
    long_name: str
    minimum: float | None = None
    maximum: float | None = None
    flags: Mapping[int, str] = field(default_factory=dict)
    label_of: str = ""

    def __post_init__(self) -> None:
        named = (*self.dims, self.label_of) if self.label_of else self.dims
        strange = [dim for dim in named if dim not in DIMS]
        if strange:
            raise InputError(
                f"no dims {strange} in the schema; add them with mechicl.schema.add_dim"
            )
        if len(set(self.dims)) != len(self.dims):
            raise InputError(f"dims {self.dims} repeat an axis")
        if self.units not in UNITS:
            raise InputError(f"no unit {self.units!r}; units are {', '.join(UNITS)}")

    @property
    def attrs(self) -> dict[str, object]:
        """Attributes that a variable of this declaration carries, all of them JSON."""
        attrs: dict[str, object] = {"units": self.units, "long_name": self.long_name}
        if self.flags:
            attrs["flag_values"] = [int(value) for value in self.flags]
            attrs["flag_meanings"] = " ".join(self.flags.values())
        if self.label_of:
            attrs["label_of"] = self.label_of
        return attrs


def check(
    dataset: xr.Dataset, declared: Mapping[str, Var], *, where: str, ordered: bool = False
) -> None:
    """Raise one SchemaError that lists every mismatch between `dataset` and `declared`.

    Checked are presence, dims (as a set, or in order), units, and values where a range is declared.
    """
    problems: list[str] = []
    for name, var in declared.items():
        if name not in dataset.variables:
            problems.append(f"{name!r} is missing (dims {var.dims})")
            continue
        found = dataset[name]
        same = found.dims == var.dims if ordered else set(found.dims) == set(var.dims)
        if not same:
            problems.append(f"{name!r} has dims {found.dims}, not {var.dims}")
        if found.attrs.get("units") != var.units:
            problems.append(f"{name!r} is in {found.attrs.get('units')!r}, not {var.units!r}")
        problems += _out_of_range(name, found, var)
    if problems:
        raise SchemaError(f"{where}: " + "; ".join(problems))


def _out_of_range(name: str, found: xr.DataArray, var: Var) -> list[str]:
    if (var.minimum is None and var.maximum is None) or found.size == 0:
        return []
    values = np.asarray(found.values, dtype=float)
    low = -np.inf if var.minimum is None else var.minimum
    high = np.inf if var.maximum is None else var.maximum
    bad = values[(values < low) | (values > high)]
    if bad.size == 0:
        return []
    return [f"{name!r} has {bad.size} values outside [{low}, {high}]: {bad[:3]}"]


def stamp(dataset: xr.Dataset, declared: Mapping[str, Var]) -> xr.Dataset:
    """Return `dataset` with inherited attributes dropped and the declared ones set.

    xarray carries attributes through arithmetic (nat² would say nat), so units are stated, not
    inherited. Coordinates keep theirs: arithmetic does not change what an axis is.
    """
    out = dataset.copy()
    out.attrs = {}
    for name in out.data_vars:
        out[name].attrs = dict(declared[str(name)].attrs) if name in declared else {}
    return out


def flag_names(variable: xr.DataArray) -> dict[int, str]:
    """Return the meaning of each code of a variable that was stamped with `flags`."""
    return flag_table(variable.attrs)


def flag_table(attrs: Mapping[str, Any]) -> dict[int, str]:
    """Return the meaning of each code by the attributes of a variable; none where it has none."""
    values: Sequence[int] = np.atleast_1d(attrs.get("flag_values", [])).tolist()
    return dict(zip(values, str(attrs.get("flag_meanings", "")).split(), strict=True))
