"""Settings of runs as coordinates: numbers as numbers, text as codes on disk and as text here."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import xarray as xr
import zarr

from mechicl.studies.join import write_array

_TEXT = "text"
_FACTS = {
    "last_step": ("step", "last step that is stored"),
    "n_saved": ("1", "checkpoints stored"),
    "n_planned": ("1", "checkpoints planned"),
    "complete": ("1", "1 where training reached its last step"),
    "n_diverged": ("1", "seeds that diverged"),
}
_OURS = ("run", "run_name", "run_path", "run_digest", *_FACTS)
_UNSAID = frozenset({"name", "description"})


def flattened(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each setting with its dotted name: text, a number, or None; lists as JSON."""
    for key, value in settings.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from flattened(value, f"{name}.")
        elif isinstance(value, list | tuple):
            yield name, json.dumps(value)
        elif name not in _UNSAID:
            yield name, value


def write_runs(
    group: zarr.Group,
    names: Sequence[str],
    paths: Sequence[str],
    facts: Sequence[Mapping[str, Any]],
) -> None:
    """Write what is known of each run, (run,): the settings of its recipe, and how far it got."""
    run = np.arange(len(names), dtype=np.int64)
    write_array(group, "run", ("run",), run, {"units": "1", "long_name": "number of the run"})
    rows = [dict(flattened(each["settings"])) for each in facts]
    columns = {name: [row.get(name) for row in rows] for row in rows for name in row}
    columns["recipe"] = [each["settings"]["name"] for each in facts]
    columns["run_digest"] = [each["run_digest"] for each in facts]
    for name, values in columns.items():
        _write_setting(group, name, values)
    for name, (units, text) in _FACTS.items():
        values = np.array([each[name] for each in facts], dtype=np.int64)
        write_array(group, name, ("run",), values, {"units": units, "long_name": text})
    group.attrs.update(
        {
            "run_names": list(names),
            "run_paths": list(paths),
            "coordinates": " ".join([*columns, *_FACTS]),
        }
    )


def _write_setting(group: zarr.Group, name: str, values: Sequence[Any]) -> None:
    attrs: dict[str, Any] = {"units": "1", "long_name": f"setting {name}"}
    if not any(isinstance(each, str) for each in values):
        numbers = np.array([np.nan if each is None else float(each) for each in values])
        write_array(group, name, ("run",), numbers, attrs)
        return
    texts = ["" if each is None else str(each) for each in values]
    known = sorted(set(texts))
    number = {text: code for code, text in enumerate(known)}
    codes = np.array([number[text] for text in texts], dtype=np.int32)
    write_array(group, name, ("run",), codes, {**attrs, _TEXT: json.dumps(known)})


def decoded(runs: xr.Dataset) -> xr.Dataset:
    """Return the runs of a study with text where their store has codes, names and paths too."""
    runs = runs.load()
    coords: dict[str, Any] = {
        "run_name": ("run", np.array(runs.attrs["run_names"], dtype=str)),
        "run_path": ("run", np.array(runs.attrs["run_paths"], dtype=str)),
    }
    for name, variable in runs.coords.items():
        if _TEXT in variable.attrs:
            known = np.array(json.loads(variable.attrs[_TEXT]), dtype=str)
            attrs = {key: value for key, value in variable.attrs.items() if key != _TEXT}
            coords[str(name)] = ("run", known[variable.values], attrs)
    whole = runs.assign_coords(coords)
    whole.attrs = {}
    return whole


def setting_names(runs: xr.Dataset) -> list[str]:
    """Return the names of the settings of recipes, sorted: a store keeps no order of them."""
    return sorted(str(name) for name in runs.coords if name not in _OURS)


def differing(runs: xr.Dataset) -> list[str]:
    """Return the settings in which runs differ; one that a run has not differs from any value."""
    # NaN is one value to np.unique.
    return [name for name in setting_names(runs) if np.unique(runs[name].values).size > 1]
