"""`mechicl study`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mechicl.cli.options import Against, Json, Plot, ProbeSettings

if TYPE_CHECKING:
    from collections.abc import Sequence

    import xarray as xr

    from mechicl.studies.parts import Failure
    from mechicl.studies.study import Study

_MOST_FAILURES = 20


def study(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUNS...",
            help="Run directories, folders of runs, 'patterns/*', or text files with one a line.",
        ),
    ],
    probe: Annotated[
        list[str] | None, typer.Option(help="Probe to run; may be repeated.", show_default=False)
    ] = None,
    set: ProbeSettings = None,
    against: Against = None,
    out: Annotated[str, typer.Option(help="The study; its table goes beside it.")] = "study.zarr",
    join: Annotated[
        str,
        typer.Option(
            help="Steps of runs: outer, all of them; inner, those that all have; last, the last."
        ),
    ] = "outer",
    jobs: Annotated[int, typer.Option(help="Worker processes; 1 computes in this one.")] = 1,
    scheduler: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS", help="A Dask scheduler that computes instead.", show_default=False
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Compute again what is finished.")
    ] = False,
    plot: Plot = True,
    parquet: Annotated[
        bool, typer.Option("--parquet", help="Write the table as Parquet, too.")
    ] = False,
    all_columns: Annotated[
        bool, typer.Option("--all-columns", help="With the settings that all runs share.")
    ] = False,
    limit: Annotated[float, typer.Option(help="Largest result of a probe, in GiB.")] = 4.0,
    json: Json = False,
) -> int:
    """Run probes over many runs: one labelled result, one table, a figure a probe.

    What is finished of each run is kept beside OUT and is not computed again.
    """
    from mechicl import analyses
    from mechicl.cli import progress, settings
    from mechicl.cli.remarks import remarks
    from mechicl.errors import InputError
    from mechicl.studies.study import study as study_runs

    if not probe:
        raise InputError(f"--probe names what to run; there are {', '.join(analyses.names())}")
    names = list(dict.fromkeys(analyses.get(name).name for name in probe))
    chosen = settings.by_probe(settings.parse(set or []), names)
    most = limit * 2**30
    if not 1 <= most < float("inf"):
        raise InputError(f"--limit is a number of GiB above 0, a byte at least; given {limit:g}")
    try:
        with remarks(), progress.counted("runs") as on_done:
            made = study_runs(
                runs,
                names,
                parameters=chosen,
                against=settings.named_runs(against or []) or None,
                out=out,
                join=join,  # type: ignore[arg-type]
                jobs=jobs,
                scheduler=scheduler,
                overwrite=overwrite,
                figures=plot,
                parquet=parquet,
                all_columns=all_columns,
                limit=int(most),
                on_done=on_done,
                notify=progress.say,
            )
    except (KeyboardInterrupt, SystemExit):
        progress.say("what is finished is kept beside the study; the same command goes on")
        raise
    written = _written(made, plot=plot, parquet=parquet)
    if json:
        _print_json(made, written)
    else:
        _print_tables(made, written)
    return 4 if made.failures else 0


def _written(made: "Study", *, plot: bool, parquet: bool) -> list[Path]:
    from mechicl.studies.study import files_of

    assert made.path is not None
    places = files_of(made.path)
    figures = [places["figures"] / f"{name}.png" for name in made.results if plot]
    return [made.path, places["csv"], *([places["parquet"]] if parquet else []), *figures]


def _print_tables(made: "Study", written: "Sequence[Path]") -> None:
    from mechicl.cli.tables import show

    columns = ["probe", "runs", "seeds", "holds", "fails", "undefined", "since (median)"]
    rows = []
    for name, result in made.results.items():
        each = _counts(result)
        cells = [each[key] for key in ("runs", "seeds", "holds", "fails", "undefined")]
        since = each["since"]
        shown = ["–" if cell is None else f"{cell:,}" for cell in cells]
        rows.append([name, *shown, "–" if since is None else f"{since:,.0f}"])
    show(f"{made.runs.sizes['run']} runs, each at its last step", columns, rows)
    for name, result in made.results.items():
        if "statement" in result.attrs:
            print(f"  {name}: {result.attrs['statement']}")
    _print_failures(made.failures)
    print(*written, sep="\n")


def _print_failures(failures: "Sequence[Failure]") -> None:
    """Print a line for each reason, with the runs that it is of."""
    from mechicl.studies.parts import by_reason

    lines = by_reason(failures)
    for line in lines[:_MOST_FAILURES]:
        print(line)
    if len(lines) > _MOST_FAILURES:
        print(f"and {len(lines) - _MOST_FAILURES} more reasons, in the study's `failures`")


def _counts(result: "xr.Dataset") -> dict[str, Any]:
    """Count runs and seeds, and for how many of them the statement holds at the last step."""
    import numpy as np

    from mechicl.studies.table import at_the_end

    labels = result["seed_label"].values
    counts: dict[str, Any] = {
        "runs": result.sizes["run"],
        "seeds": int(np.isfinite(labels).sum()),
        **dict.fromkeys(("holds", "fails", "undefined", "since")),
    }
    if "holds" not in result:
        return counts
    last = at_the_end(result)
    yes, no = (int((last["holds"].values == value).sum()) for value in (1, 0))
    since = last["since"].values[np.isfinite(last["since"].values)]
    undefined = counts["seeds"] - yes - no
    median = float(np.median(since)) if since.size else None
    return {**counts, "holds": yes, "fails": no, "undefined": undefined, "since": median}


def _print_json(made: "Study", written: "Sequence[Path]") -> None:
    import json
    from dataclasses import asdict

    document = {
        "study": str(made.path),
        "join": made.join,
        "runs": made.runs.sizes["run"],
        "probes": {
            name: {
                "statement": result.attrs.get("statement"),
                "parameters": json.loads(result.attrs["parameters"]),
                **_counts(result),
            }
            for name, result in made.results.items()
        },
        "table": _records(made),
        "failures": [asdict(each) for each in made.failures],
        "files": [str(path) for path in written],
    }
    print(json.dumps(document, ensure_ascii=False, allow_nan=False))


def _records(made: "Study") -> list[dict[str, Any]]:
    """Return the rows of the table, NaN and infinities as None."""
    import numpy as np

    frame = made.frame(all_columns=False)
    return [
        {
            str(key): None if isinstance(value, float) and not np.isfinite(value) else value
            for key, value in row.items()
        }
        for row in frame.to_dict("records")
    ]
