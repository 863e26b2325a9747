"""What is on the page of a run."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import xarray as xr
import yaml
from markupsafe import Markup

from mechicl import analyses, plots
from mechicl.analyses.summary import Table, number_table, verdict_table
from mechicl.errors import MechiclError, NothingToAnalyseError
from mechicl.plots.interactive import HeatMap, scripts
from mechicl.run import Run
from mechicl.studies.report import explore, figures, render


class Gathered(NamedTuple):
    """Results for a page.

    Attributes
    ----------
    results
        By probe.
    computed
        Those that were computed now.
    saved
        Whether these were stored under the run.
    refused
        Why the other probes do not apply.
    waiting
        Forward probes that apply and were not computed.
    """

    results: dict[str, xr.Dataset]
    computed: list[str]
    saved: bool
    refused: dict[str, str]
    waiting: list[str]


def gather(run: Run, probes: Sequence[str] | None, *, forward: bool) -> Gathered:
    """Read the results of a run that are stored, and compute the others.

    Parameters
    ----------
    probes
        Which ones; None takes all that apply, of forward probes those that are stored.
    forward
        Compute forward probes too.

    Raises NothingToAnalyseError if none applies; DamagedRunError as `Run.analyze` does.
    """
    names = list(dict.fromkeys(analyses.get(name).name for name in probes or analyses.names()))
    found = Gathered({}, [], _writable(run), {}, [])
    for name in names:
        reason = run.objection(name)
        if reason is not None:
            found.refused[name] = reason
            continue
        result = run.stored(name)
        if result is None and analyses.get(name).forward and not (forward or probes):
            found.waiting.append(name)
            continue
        if result is None:
            result = run.analyze(name)
            found.computed.append(name)
            if found.saved:
                run.save(result)
        found.results[name] = result
    if not found.results and not found.waiting:
        raise NothingToAnalyseError(f"{run.path}: {run.refusal(found.refused)}")
    return found


def _writable(run: Run) -> bool:
    if isinstance(run.path, str):
        return False
    try:
        run.results_directory()
    except MechiclError:
        return False
    return True


def write(target: Path, run: Run, found: Gathered, *, attention: bool) -> list[str]:
    """Write the page of a run, and return what it says was thinned or left out."""
    explored = explore.of_run(run, found.results, attention=attention)
    results = found.results
    drawn, remark = figures.embedded({name: plots.draw(each) for name, each in results.items()})
    notes = explored.notes + ([remark] if remark else [])
    about = run.about()
    called = Path(str(run.path).rstrip("/")).name
    render.write(
        target,
        "run.html",
        title=", run ".join(dict.fromkeys([run.recipe.name, called])),
        lead=run.recipe.description,
        where=str(run.path),
        warnings=_warnings(run),
        contents=_contents(found, notes),
        verdicts=verdict_table(results),
        numbers=_filled(number_table(results)),
        figures=[
            figures.described(each, result, drawn[each]) for each, result in found.results.items()
        ],
        absent=_absent(found),
        how=f"{shlex.quote(str(run.path))} --forward" if found.waiting else "",
        about=Table("what it is", ("", ""), [[key, value] for key, value in about.items()]),
        recipe=yaml.safe_dump(run.config["recipe"], sort_keys=False, allow_unicode=True).rstrip(),
        explore=_explore(explored),
        notes=notes,
        scripts=Markup(scripts() + explored.plots.script),
    )
    return notes


def _warnings(run: Run) -> list[str]:
    said = []
    if not run.complete:
        attrs = run.trajectory.attrs
        said.append(
            f"Unfinished run (or still training): {attrs['n_saved']} of {attrs['n_planned']} "
            "checkpoints."
        )
    said += [
        f"Seed {seed} diverged at step {step:,}; it is undefined after that."
        for seed, step in run.diverged().items()
    ]
    return said


def _contents(found: Gathered, notes: Sequence[str]) -> list[tuple[str, str]]:
    there = {
        "verdicts": ("Verdicts and key figures", bool(found.results)),
        "explore": ("Over training", True),
        "figures": ("Figures", bool(found.results)),
        "absent": ("Probes without a result", bool(found.refused or found.waiting)),
        "run": ("The run", True),
        "left-out": ("What was left out", bool(notes)),
    }
    return [(key, text) for key, (text, shown) in there.items() if shown]


def _filled(table: Table | None) -> Table | None:
    """Name the probe in every row: on a page a heading cell is not left empty."""
    if table is None:
        return None
    rows, name = [], ""
    for first, *rest in table.rows:
        name = first or name
        rows.append([name, *rest])
    return table._replace(rows=rows)


def _absent(found: Gathered) -> Table:
    rows = [[name, f"does not apply: {reason}"] for name, reason in found.refused.items()]
    rows += [[name, "not computed, for it evaluates the model"] for name in found.waiting]
    return Table("and why", ("probe", "reason"), rows)


def _explore(explored: explore.Explored) -> dict[str, Any]:
    headings = {"loss": "Training loss", "curves": "Quantities", "attention": "Attention"}
    plots = explored.plots
    maps = {
        name: {"panels": drawn.values.shape[3], "long": not _square(drawn)}
        for name, drawn in explored.maps.items()
    }
    return {
        "controls": [Markup(each) for each in plots.controls],
        "plots": {name: [Markup(each) for each in parts] for name, parts in plots.plots.items()},
        "headings": {name: headings.get(name, name) for name in plots.plots},
        "captions": explored.captions,
        "maps": maps,
    }


def _square(drawn: HeatMap) -> bool:
    rows, columns = drawn.values.shape[4:]
    return 0.5 <= rows / columns <= 2
