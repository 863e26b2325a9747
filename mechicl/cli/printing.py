"""What `analyze` prints: tables for people, one JSON document for programs."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mechicl.analyses.summary import number_table, verdict_table
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
    """Print verdicts and key figures at the last step, what was skipped, and where results are.

    Up to eight seeds have a column each; more are summed up.
    """
    verdicts, numbers = verdict_table(results), number_table(results)
    if verdicts is not None:
        show(*verdicts)
        for name, result in results.items():
            if "holds" in result:
                print(f"  {name}: {result.attrs['statement']}")
    if numbers is not None:
        print()
        show(*numbers)
    for name, reason in skipped.items():
        print(f"{name} does not apply: {reason}")
    paths = [path for of_probe in written.values() for path in of_probe]
    if len(written) == 1:
        print(*paths, sep="\n")
    else:
        print(f"{len(paths)} files in", *sorted({str(path.parent) for path in paths}))


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
