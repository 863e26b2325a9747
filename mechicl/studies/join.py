"""Parts of many runs as one Zarr group a probe, a batch of runs in memory at a time."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from zarr.codecs import Crc32cCodec, ZstdCodec

from mechicl.errors import InputError
from mechicl.schema import Var, flag_table
from mechicl.studies.axes import Axis, Join, Labels, axis, merged_flags
from mechicl.studies.parts import read_head, reading

LIMIT = 4 * 2**30
"""Bytes of one probe's results over all runs that are joined without being asked twice."""
ABSENT = "not_in_this_run"
"""Meaning of the code that stands where a run has no such step, seed or head."""

_CODECS = (ZstdCodec(), Crc32cCodec())
"""A chunk that was altered is an error, and not other numbers."""

_BATCH_BYTES = 2**24
_SIZED = ("seed", "head")
"""Axes whose size in each run is always told; that of others where runs differ in it."""
_LAST_STEP = Var(("run",), "step", "last step of the run's result", 0)


@dataclass(frozen=True)
class Part:
    """A file with a probe's result: which run of the study it is of, and what it says of itself."""

    run: int
    path: Path
    head: Mapping[str, Any]
    labels: Mapping[str, Labels]

    @property
    def variables(self) -> Mapping[str, Any]:
        """Dims and attributes of each variable, coordinates among them."""
        return self.head["variables"]


@dataclass(frozen=True)
class _Variable:
    """A variable over all runs: its dims after `run`, and what stands for what a run has not."""

    name: str
    dims: tuple[str, ...]
    dtype: np.dtype
    absent: float
    attrs: Mapping[str, Any]
    codes: Sequence[Mapping[int, int]] | None


def open_part(run: int, path: Path) -> Part:
    """Return a part with its axes, without its numbers."""
    head = read_head(path)
    assert head is not None
    variables = head["variables"]
    labels: dict[str, Labels] = {}
    with reading(path) as file:
        for name, variable in variables.items():
            shape = file.get_slice(name).get_shape() if variable["dims"] else ()
            for dim, size in zip(variable["dims"], shape, strict=True):
                if dim in labels:
                    continue
                has = dim in variables and variables[dim]["dims"] == [dim]
                values = file.get_tensor(dim) if has else None
                labels[dim] = Labels(size, values, variables[dim]["attrs"] if has else None)
    return Part(run, path, head, labels)


def write_joined(
    group: zarr.Group, parts: Sequence[Part], join: Join, *, limit: int = LIMIT
) -> None:
    """Write the results of one probe over several runs into `group`.

    Every variable gets the axis `run` in front. What a run has not (a step of another schedule,
    seeds or heads of a larger run) is NaN, and in variables of codes a code of its own. By `last`
    each run has its last step alone, and `step` is gone.

    Raises InputError where the numbers take more than `limit` bytes, or where steps are joined by
    `inner` and runs share none.
    """
    axes = {dim: _axis(dim, parts, join) for dim in _dims(parts) if join != "last" or dim != "step"}
    variables = [_variable(name, parts, axes) for name in _names(parts, axes)]
    _require_size(parts, variables, axes, join, limit)
    coords = _write_axes(group, parts, axes)
    for variable in variables:
        _write_variable(group, variable, parts, axes)
        if variable.name in parts[0].head["coords"]:
            coords.append(variable.name)
    attrs = dict(parts[0].head["attrs"])
    attrs.pop("run_digest", None)
    if "n_undefined" in attrs:
        attrs["n_undefined"] = _summed([part.head["attrs"]["n_undefined"] for part in parts])
    group.attrs.update({**attrs, "join": join, "coordinates": " ".join(coords)})


def _dims(parts: Sequence[Part]) -> list[str]:
    return list(dict.fromkeys(dim for part in parts for dim in part.labels))


def _names(parts: Sequence[Part], axes: Mapping[str, Axis]) -> list[str]:
    every = dict.fromkeys(name for part in parts for name in part.variables)
    return [name for name in every if name not in axes and name != "step"]


def _axis(dim: str, parts: Sequence[Part], join: Join) -> Axis:
    none = Labels(0)
    having = [part.labels[dim] for part in parts if dim in part.labels]
    found = axis(dim, having, join)
    if len(having) == len(parts):
        return found
    # A run without the axis has none of its variables either.
    place = iter(range(len(having)))
    at = [next(place) if dim in part.labels else None for part in parts]
    empty = np.zeros(none.size, dtype=int)

    def spread(given: Sequence[Any], absent: Any) -> list[Any]:
        return [absent if number is None else given[number] for number in at]

    return Axis(
        dim,
        found.size,
        found.labels,
        found.attrs,
        spread(found.source, empty),
        spread(found.target, empty),
        None if found.own is None else spread(found.own, empty),
        None if found.codes is None else spread(found.codes, {}),
    )


def _variable(name: str, parts: Sequence[Part], axes: Mapping[str, Axis]) -> _Variable:
    having = [part for part in parts if name in part.variables]
    first = having[0].variables[name]
    dims = tuple(dim for dim in first["dims"] if dim in axes)
    attrs = dict(first["attrs"])
    tables = [
        flag_table(part.variables[name]["attrs"]) if name in part.variables else {}
        for part in parts
    ]
    codes = None
    of = str(attrs.get("label_of", ""))
    if of in axes and axes[of].codes is not None:
        codes = axes[of].codes
    elif any(tables):
        known = [table for table in tables if table]
        merged, attrs = merged_flags(known, attrs)
        number = iter(merged)
        codes = [next(number) if table else {} for table in tables]
    with reading(having[0].path) as file:
        dtype = file.get_tensor(name).dtype
    if "flag_values" in attrs and dtype.kind in "iu":
        absent = max(attrs["flag_values"]) + 1
        attrs["flag_values"] = [*attrs["flag_values"], absent]
        attrs["flag_meanings"] = f"{attrs['flag_meanings']} {ABSENT}"
        return _Variable(name, dims, np.dtype(np.int16), absent, attrs, codes)
    dtype = dtype if dtype.kind == "f" else np.dtype(float)
    return _Variable(name, dims, dtype, math.nan, attrs, codes)


def _shape(variable: _Variable, n_runs: int, axes: Mapping[str, Axis]) -> tuple[int, ...]:
    return (n_runs, *(axes[dim].size for dim in variable.dims))


def _require_size(
    parts: Sequence[Part],
    variables: Sequence[_Variable],
    axes: Mapping[str, Axis],
    join: Join,
    limit: int,
) -> None:
    size = sum(
        math.prod(_shape(each, len(parts), axes)) * each.dtype.itemsize for each in variables
    )
    if size <= limit:
        return
    sizes = ", ".join(f"{dim} {each.size:,}" for dim, each in axes.items())
    way = "" if join == "last" else ", --join last keeps the last step of each run alone"
    raise InputError(
        f"results of {parts[0].head['attrs'].get('probe')!r} over {len(parts)} runs would take "
        f"{_gib(size)} (run {len(parts):,}, {sizes}), over the limit of {_gib(limit)}; "
        f"finished parts are kept: take fewer runs{way}, or give a larger "
        "--limit (in Python limit=, in bytes)"
    )


def _gib(size: int) -> str:
    number = size / 2**30
    return f"{number:,.1f} GiB" if number >= 0.1 else f"{number:.2g} GiB"


def _write_axes(group: zarr.Group, parts: Sequence[Part], axes: Mapping[str, Axis]) -> list[str]:
    """Write coordinates, and return the names of those that are not of their own axis."""
    run = np.array([part.run for part in parts], dtype=np.int64)
    write_array(group, "run", ("run",), run, {"units": "1", "long_name": "number of the run"})
    coords = []
    for dim, each in axes.items():
        if each.labels is not None:
            write_array(group, dim, (dim,), each.labels, each.attrs)
        if each.own is not None:
            table = np.full((len(parts), each.size), np.nan)
            for row, own in zip(table, each.own, strict=True):
                row[: len(own)] = own
            about = next(part.labels[dim].attrs or {} for part in parts if dim in part.labels)
            write_array(group, f"{dim}_label", ("run", dim), table, about)
            coords.append(f"{dim}_label")
        sizes = np.array([len(own) for own in each.source], dtype=np.int64)
        if each.by_place and (dim in _SIZED or (sizes != sizes[0]).any()):
            text = {"units": "1", "long_name": f"size of {dim} in the run"}
            write_array(group, f"n_{dim}", ("run",), sizes, text)
            coords.append(f"n_{dim}")
    last = [part.labels["step"].values for part in parts if "step" in part.labels]
    if len(last) == len(parts):
        steps = np.array([each[-1] for each in last if each is not None], dtype=np.int64)
        common = axes["step"].labels if "step" in axes else None
        if common is not None:  # an inner join may end before a run does
            steps = np.minimum(steps, common[-1])
        write_array(group, "last_step", ("run",), steps, _LAST_STEP.attrs)
        coords.append("last_step")
    return coords


def _write_variable(
    group: zarr.Group, variable: _Variable, parts: Sequence[Part], axes: Mapping[str, Axis]
) -> None:
    shape = _shape(variable, len(parts), axes)
    row = max(math.prod(shape[1:]) * variable.dtype.itemsize, 1)
    batch = min(max(_BATCH_BYTES // row, 1), len(parts))
    array = _allocate(group, variable.name, ("run", *variable.dims), shape, batch, variable)
    for start in range(0, len(parts), batch):
        block = np.full((min(batch, len(parts) - start), *shape[1:]), variable.absent)
        block = block.astype(variable.dtype)
        for offset, part in enumerate(parts[start : start + batch]):
            if variable.name in part.variables:
                _place(block[offset : offset + 1], variable, part, start + offset, axes)
        array[start : start + len(block)] = block


def _place(
    into: np.ndarray,
    variable: _Variable,
    part: Part,
    number: int,
    axes: Mapping[str, Axis],
) -> None:
    """Put what one run has of a variable where it belongs; `into` is (1, ...)."""
    with reading(part.path) as file:
        values = file.get_tensor(variable.name)
    dims = part.variables[variable.name]["dims"]
    if "step" in dims and "step" not in axes:
        values = np.take(values, -1, axis=dims.index("step"))
        dims = [dim for dim in dims if dim != "step"]
    values = np.transpose(values, [dims.index(dim) for dim in variable.dims])
    if variable.codes is not None:
        values = _recoded(values, variable.codes[number])
    if not variable.dims:
        into[0] = values
        return
    source = [axes[dim].source[number] for dim in variable.dims]
    target = [axes[dim].target[number] for dim in variable.dims]
    into[0][np.ix_(*target)] = values[np.ix_(*source)]


def _recoded(values: np.ndarray, codes: Mapping[int, int]) -> np.ndarray:
    if all(old == new for old, new in codes.items()):
        return values
    out = values.copy()
    for old, new in codes.items():
        out[values == old] = new
    return out


def _summed(counts: Sequence[str]) -> str:
    """Add up how often each reason applies."""
    total: dict[str, int] = {}
    for each in counts:
        for reason, number in json.loads(each).items():
            total[reason] = total.get(reason, 0) + number
    return json.dumps(total, sort_keys=True)


def write_array(
    group: zarr.Group,
    name: str,
    dims: Sequence[str],
    values: np.ndarray,
    attrs: Mapping[str, Any],
) -> None:
    """Write an array whole, in one chunk."""
    made = group.create_array(
        name,
        shape=values.shape,
        chunks=tuple(max(size, 1) for size in values.shape),
        dtype=values.dtype,
        fill_value=math.nan if values.dtype.kind == "f" else 0,
        compressors=_CODECS,
        dimension_names=tuple(dims),
        attributes=dict(attrs),
    )
    made[...] = values


def _allocate(
    group: zarr.Group,
    name: str,
    dims: Sequence[str],
    shape: tuple[int, ...],
    batch: int,
    variable: _Variable,
) -> zarr.Array:
    return group.create_array(
        name,
        shape=shape,
        chunks=(batch, *(max(size, 1) for size in shape[1:])),
        dtype=variable.dtype,
        fill_value=variable.absent,
        compressors=_CODECS,
        dimension_names=tuple(dims),
        attributes=dict(variable.attrs),
    )
