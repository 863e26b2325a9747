"""`mechicl report`."""

import sys
from typing import Annotated

import typer


def report(
    source: Annotated[
        str, typer.Argument(metavar="RUN|STUDY", help="Run directory, or store of a study.")
    ],
    probe: Annotated[
        list[str] | None,
        typer.Option(
            help="Probe to show; may be repeated.",
            show_default="all that apply; of forward probes those with a stored result",
        ),
    ] = None,
    forward: Annotated[
        bool, typer.Option("--forward", help="Compute forward probes too, which takes longer.")
    ] = False,
    attention: Annotated[
        bool,
        typer.Option("--attention/--no-attention", help="Show attention patterns over training."),
    ] = True,
    out: Annotated[
        str | None,
        typer.Option(
            metavar="FILE.html", help="The page.", show_default="RUN/report.html, STUDY-report.html"
        ),
    ] = None,
) -> int:
    """Write one HTML page: verdicts, key figures, figures, sliders over training."""
    from mechicl.cli.remarks import remarks
    from mechicl.studies.report import report as write

    with remarks():
        done = write(source, out, probes=probe, forward=forward, attention=attention)
    if done.computed and not done.saved:
        print(
            f"not stored, for {source} cannot be written to: {', '.join(done.computed)}",
            file=sys.stderr,
        )
    if done.waiting:
        print(
            f"not computed: {', '.join(done.waiting)}; --forward computes them, or mechicl analyze",
            file=sys.stderr,
        )
    print(f"{done.path} ({done.path.stat().st_size / 1e6:.1f} MB)")
    return 4 if probe and done.refused else 0
