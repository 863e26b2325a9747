"""What `analyze` prints: tables for people, one JSON document for programs."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mechicl import analyses
from mechicl.cli.tables import show
from mechicl.schema import flag_names

if TYPE_CHECKING:
    import xarray as xr

    from mechicl.run import Run

_MOST_COLUMNS = 8


def print_tables(
    results: Mapping[str, "xr.Dataset"],
    written: Mapping[str, list[Path]],
    skipped: Mapping[str, str],
) -> None:
    """Print verdicts and key figures at the last step, what was skipped, and where results are.

    Up to eight seeds have a column each; more are summed up.
    """
    first = next(iter(results.values()))
    seeds = first["seed"].values
    each = len(seeds) <= _MOST_COLUMNS
    step = f"at step {first['step'].values[-1]:,}"
    by_seed = [f"seed {seed}" for seed in seeds]
    stated = {name: result for name, result in results.items() if "holds" in result}
    if stated:
        columns = (
            by_seed
            if each
            else ["holds", "fails", "undefined", "since (median of those that hold)"]
        )
        cells = _verdicts if each else _verdict_counts
        rows = [[name, *cells(result)] for name, result in stated.items()]
        show(f"verdicts {step}", ["probe", *columns], rows)
        for name, result in stated.items():
            print(f"  {name}: {result.attrs['statement']}")
    columns = by_seed if each else ["median [least, largest]", "defined"]
    figures = _figures if each else _figure_ranges
    rows = [
        [name if index == 0 else "", variable, *figures(result, variable)]
        for name, result in results.items()
        for index, variable in enumerate(_shown(name, each=each))
    ]
    if rows:
        print()
        show(f"key figures {step}", ["probe", "variable", *columns], rows)
    for name, reason in skipped.items():
        print(f"{name} does not apply: {reason}")
    paths = [path for of_probe in written.values() for path in of_probe]
    if len(written) == 1:
        print(*paths, sep="\n")
    else:
        print(f"{len(paths)} files in", *sorted({str(path.parent) for path in paths}))


def _verdicts(result: "xr.Dataset") -> list[str]:
    """One cell a seed: whether the statement holds at the last step, and since when."""
    cells = []
    for seed in result["seed"].values:
        one = result.sel(seed=seed)
        holds, since = one["holds"].values[-1], one["since"].item()
        if np.isnan(holds):
            cells.append(f"undefined: {_reason(one)}")
        else:
            cells.append(f"since {since:,.0f}" if holds else "no")
    return cells


def _verdict_counts(result: "xr.Dataset") -> list[str]:
    """How many seeds the statement holds for, fails for, and says nothing about; since when."""
    holds, since = result["holds"].values[:, -1], result["since"].values
    counts = [(holds == 1).sum(), (holds == 0).sum(), np.isnan(holds).sum()]
    median = np.median(since[~np.isnan(since)]) if (holds == 1).any() else np.nan
    return [*map(str, counts), "never" if np.isnan(median) else f"{median:,.0f}"]


def _reason(one: "xr.Dataset") -> str:
    if "undefined" not in one:
        return "no value"
    return flag_names(one["undefined"])[int(one["undefined"].values[-1])].replace("_", " ")


def _shown(name: str, *, each: bool) -> list[str]:
    """Headlines of a probe; over many seeds without those by head, which no median sums up."""
    probe = analyses.get(name)
    return [v for v in probe.headline if each or "head" not in probe.outputs[v].dims]


def _figures(result: "xr.Dataset", variable: str) -> list[str]:
    """One cell a seed: the variable at the last step, heads beside each other."""
    cells = []
    for seed in result["seed"].values:
        one = result.sel(seed=seed)
        values = np.atleast_1d(one[variable].isel(step=-1).values)
        if np.isnan(values).all():
            cells.append(f"undefined: {_reason(one)}")
        else:
            cells.append(" ".join("–" if np.isnan(v) else f"{v:.3g}" for v in values))
    return cells


def _figure_ranges(result: "xr.Dataset", variable: str) -> list[str]:
    """Sum the variable at the last step up over seeds: median, range, and how many have one."""
    last = result[variable].isel(step=-1).values
    values = last[~np.isnan(last)]
    defined = f"{values.size} of {last.size}"
    if values.size == 0:
        return ["undefined", defined]
    return [f"{np.median(values):.3g} [{values.min():.3g}, {values.max():.3g}]", defined]


def print_json(
    run: "Run",
    results: Mapping[str, "xr.Dataset"],
    written: Mapping[str, list[Path]],
    skipped: Mapping[str, str],
    *,
    every_step: bool,
) -> None:
    """Print one JSON document: each variable at the last step, or at all steps that were chosen.

    NaN and infinities are null. Whole trajectories are in the files that the document names.
    """
    document = {
        "run": str(run.path),
        "run_digest": run.trajectory.attrs["run_digest"],
        "complete": run.complete,
        "probes": {
            name: _document(result, written[name], every_step=every_step)
            for name, result in results.items()
        },
        "skipped": dict(skipped),
    }
    print(json.dumps(document, allow_nan=False))


def _document(result: "xr.Dataset", paths: list[Path], *, every_step: bool) -> dict[str, Any]:
    shown = result if every_step else result.isel(step=slice(-1, None))
    variables = {
        str(name): {
            "dims": list(variable.dims),
            **{
                key: value for key, value in variable.attrs.items() if key in ("units", "long_name")
            },
            **({"flags": flag_names(variable)} if "flag_values" in variable.attrs else {}),
            "values": _plain(variable.values.tolist()),
        }
        for name, variable in shown.data_vars.items()
    }
    return {
        "statement": result.attrs.get("statement"),
        "parameters": json.loads(result.attrs["parameters"]),
        "coords": {str(name): _plain(c.values.tolist()) for name, c in shown.coords.items()},
        "variables": variables,
        "files": [str(path) for path in paths],
    }


def _plain(value: Any) -> Any:
    """Return nested lists with every non-finite number as None, which JSON calls null."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not np.isfinite(value) else value
