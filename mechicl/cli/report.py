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


def print_tables(
    results: Mapping[str, "xr.Dataset"],
    written: Mapping[str, list[Path]],
    skipped: Mapping[str, str],
) -> None:
    """Print verdicts and key figures at the last step, what was skipped, and where results are."""
    first = next(iter(results.values()))
    seeds = [f"seed {seed}" for seed in first["seed"].values]
    step = f"at step {first['step'].values[-1]:,}"
    stated = {name: result for name, result in results.items() if "holds" in result}
    if stated:
        rows = [
            [name, result.attrs["statement"], *_verdicts(result)] for name, result in stated.items()
        ]
        show(f"verdicts {step}", ["probe", "statement", *seeds], rows)
    rows = [
        [name, variable, *_figures(result, variable)]
        for name, result in results.items()
        for variable in analyses.get(name).headline
    ]
    if rows:
        show(f"key figures {step}", ["probe", "variable", *seeds], rows)
    for name, reason in skipped.items():
        print(f"{name} does not apply: {reason}")
    for paths in written.values():
        for path in paths:
            print(path)


def _verdicts(result: "xr.Dataset") -> list[str]:
    """One cell a seed: whether the statement holds at the last step, and since when."""
    cells = []
    for seed in result["seed"].values:
        one = result.sel(seed=seed)
        holds, since = one["holds"].values[-1], one["since"].item()
        if np.isnan(holds):
            cells.append(f"undefined: {_reason(one)}")
        else:
            cells.append(f"yes, since {since:,.0f}" if holds else "no")
    return cells


def _reason(one: "xr.Dataset") -> str:
    if "undefined" not in one:
        return "no value"
    return flag_names(one["undefined"])[int(one["undefined"].values[-1])].replace("_", " ")


def _figures(result: "xr.Dataset", variable: str) -> list[str]:
    """One cell a seed: the variable at the last step, by head where it has heads."""
    last = result[variable].isel(step=-1)
    return [
        " ".join(f"{value:.4g}" for value in np.atleast_1d(last.sel(seed=seed).values))
        for seed in result["seed"].values
    ]


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
