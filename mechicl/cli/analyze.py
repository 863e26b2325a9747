"""`mechicl analyze`."""

import sys
from typing import Annotated

import typer

from mechicl.cli.options import Against, Json, Plot, ProbeSettings, RunDir


def analyze(
    run_dir: RunDir,
    probe: Annotated[
        list[str] | None,
        typer.Option(help="Probe to run; may be repeated.", show_default="all that apply"),
    ] = None,
    set: ProbeSettings = None,
    seed: Annotated[
        list[int] | None, typer.Option(help="Seed to analyse; may be repeated.", show_default="all")
    ] = None,
    step: Annotated[
        list[int] | None, typer.Option(help="Step to analyse; may be repeated.", show_default="all")
    ] = None,
    against: Against = None,
    out: Annotated[
        str | None, typer.Option(help="Where results and figures go.", show_default="RUN")
    ] = None,
    plot: Plot = True,
    skip_damaged: Annotated[
        bool, typer.Option("--skip-damaged", help="Go on without what cannot be read.")
    ] = False,
    json: Json = False,
) -> int:
    """Run probes over a stored trajectory: verdicts, key figures, results and figures on disk."""
    from mechicl import analyses
    from mechicl.cli import printing, settings
    from mechicl.cli.remarks import remarks
    from mechicl.errors import NothingToAnalyseError
    from mechicl.run import named_runs, open_run

    names = list(dict.fromkeys(analyses.get(name).name for name in probe or analyses.names()))
    chosen = settings.by_probe(settings.parse(set or []), names)
    for name in names:
        analyses.get(name).resolve(chosen[name])

    run = open_run(run_dir)
    others = named_runs(settings.named_runs(against or []))
    run.select(step or None, seed or None)
    run.results_directory(out)
    if not run.complete:
        saved, planned = run.trajectory.attrs["n_saved"], run.trajectory.attrs["n_planned"]
        print(f"unfinished run: {saved} of {planned} checkpoints", file=sys.stderr)
    for number, at in run.diverged().items():
        print(f"seed {number} diverged at step {at}; it is undefined after that", file=sys.stderr)
    results, written, skipped = {}, {}, {}
    for name in names:
        reason = run.objection(name)
        if reason is not None:
            skipped[name] = reason
            continue
        with remarks():
            results[name] = run.analyze(
                name,
                steps=step or None,
                seeds=seed or None,
                skip_damaged=skip_damaged,
                against=others if analyses.get(name).comparative or probe else None,
                **chosen[name],
            )
        written[name] = run.save(results[name], out=out, figure=plot)
    if not results:
        raise NothingToAnalyseError(f"{run_dir}: {run.refusal(skipped)}")
    if json:
        printing.print_json(run, results, written, skipped, every_step=bool(step))
    else:
        printing.print_tables(results, written, skipped)
    return 4 if probe and skipped else 0
