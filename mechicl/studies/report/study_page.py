"""What is on the page of a study."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
from markupsafe import Markup

from mechicl.analyses.summary import Table
from mechicl.errors import unknown
from mechicl.plots.interactive import Explorer, scripts
from mechicl.plots.interactive_runs import MARKS, Quantity, over_runs
from mechicl.studies.claims import wilson
from mechicl.studies.report import figures, render
from mechicl.studies.settings import differing
from mechicl.studies.study import Study
from mechicl.studies.table import at_the_end

_MOST_ROWS = 200
_MOST_POINTS = 2000
_MOST_QUANTITIES = 40
_FACTS = {"last_step": "last step", "n_diverged": "seeds diverged"}
_NONE = -1


def write(target: Path, study: Study, probes: Sequence[str] | None) -> list[str]:
    """Write the page of a study, and return what it says was thinned or left out.

    Raises InputError for a probe that is not in it.
    """
    for name in probes or ():
        if name not in study.results:
            raise unknown("probe in this study", name, study.results)
    results = {
        name: result for name, result in study.results.items() if not probes or name in probes
    }
    ends = {name: at_the_end(result) for name, result in results.items()}
    drawn, remark = figures.embedded({name: study.figure(name) for name in results})
    notes = [remark] if remark else []
    explored = _explored(study, ends, notes)
    name = "study" if study.path is None else study.path.stem
    n_seeds = _n_seeds(ends)
    render.write(
        target,
        "study.html",
        title=f"Study {name}",
        lead=f"{', '.join(results)} over {len(n_seeds)} runs, {sum(n_seeds.values())} seeds",
        where="" if study.path is None else str(study.path),
        warnings=_warnings(study),
        contents=_contents(study, explored, notes),
        verdicts=_verdicts(ends),
        numbers=_numbers(ends),
        explore=_explore(explored),
        figures=[figures.described(each, result, drawn[each]) for each, result in results.items()],
        runs=_runs(study, notes),
        failures=_failures(study, notes),
        notes=notes,
        scripts=Markup(scripts() + explored.script) if explored else "",
    )
    return notes


def _n_seeds(ends: dict[str, xr.Dataset]) -> dict[int, int]:
    """Count the seeds of each run that some probe has a result of."""
    counts: dict[int, int] = {}
    for last in ends.values():
        own = last["seed_label"].notnull().sum("seed").values
        counts |= dict(zip(last["run"].values.tolist(), own.tolist(), strict=True))
    return counts


def _warnings(study: Study) -> list[str]:
    failed = sum(each.kind == "failed" for each in study.failures)
    unfinished = int((study.runs["complete"].values == 0).sum()) if "complete" in study.runs else 0
    said = []
    if failed:
        said.append(f"{failed} of the runs and probes failed; the reasons are below.")
    if unfinished:
        said.append(f"{unfinished} of {study.runs.sizes['run']} runs are unfinished.")
    return said


def _contents(study: Study, explored: Explorer | None, notes: list[str]) -> list[tuple[str, str]]:
    there = {
        "verdicts": ("Verdicts and key figures", True),
        "explore": ("Against settings", explored is not None),
        "figures": ("Figures", True),
        "runs": ("Runs", True),
        "absent": ("What gave nothing", bool(study.failures)),
        "left-out": ("What was left out", bool(notes)),
    }
    return [(key, text) for key, (text, shown) in there.items() if shown]


def _verdicts(ends: dict[str, xr.Dataset]) -> Table | None:
    """Of how many runs' seeds each statement holds at the last step."""
    rows = []
    for name, last in ends.items():
        if "holds" not in last:
            continue
        there = np.isfinite(last["seed_label"].transpose("run", "seed").values)
        holds = last["holds"].transpose("run", "seed").values[there]
        yes, no = int((holds == 1).sum()), int((holds == 0).sum())
        low, high = wilson(yes, yes + no)
        fraction = f"{yes / (yes + no):.2f} [{low:.2f}, {high:.2f}]" if yes + no else "undefined"
        since = last["since"].transpose("run", "seed").values[there]
        at = since[np.isfinite(since)]
        median = f"{np.median(at):,.0f}" if at.size else "never"
        undefined = str(len(holds) - yes - no)
        rows.append([name, str(yes), str(no), undefined, fraction, median])
    columns = (
        "probe",
        "holds",
        "fails",
        "undefined",
        "fraction that holds [95 %]",
        "since (median of those that hold)",
    )
    title = "verdicts of every run and seed at its last step"
    return Table(title, columns, rows) if rows else None


def _numbers(ends: dict[str, xr.Dataset]) -> Table | None:
    rows = []
    for probe, name, one in _headlines(ends):
        values = one.value[np.isfinite(one.value)]
        spread = "undefined"
        if values.size:
            spread = f"{np.median(values):.3g} [{values.min():.3g}, {values.max():.3g}]"
        rows.append([probe, name, spread, f"{values.size} of {one.value.size}"])
    columns = ("probe", "variable", "median [least, largest]", "defined")
    title = "key figures over every run and seed at its last step"
    return Table(title, columns, rows) if rows else None


def _headlines(ends: dict[str, xr.Dataset]) -> list[tuple[str, str, Quantity]]:
    """Return the headline variables, those along another axis one a place."""
    found = []
    for probe, last in ends.items():
        labels = last["seed_label"].transpose("run", "seed").values
        row, seed = np.nonzero(np.isfinite(labels))
        run = last["run"].values[row]
        verdict = np.full(len(row), _NONE)
        if "holds" in last:
            holds = last["holds"].transpose("run", "seed").values[row, seed]
            verdict = np.where(np.isfinite(holds), holds, _NONE).astype(int)
        for name, variable in last.data_vars.items():
            if name in ("holds", "since", "undefined"):
                continue
            values = variable.transpose("run", "seed", ...)
            extra = values.dims[2:]
            flat = values.values[row, seed].reshape(len(row), -1).astype(float)
            for number in range(flat.shape[1]):
                text = f"{name}, {extra[0]} {number}" if extra else str(name)
                one = Quantity(run, labels[row, seed].astype(np.int64), flat[:, number], verdict)
                found.append((probe, text, one))
    return found


def _explored(study: Study, ends: dict[str, xr.Dataset], notes: list[str]) -> Explorer | None:
    """Return the plot of headline variables against settings; None where there are none."""
    with_results = np.unique(np.concatenate([each["run"].values for each in ends.values()]))
    quantities: dict[str, Quantity] = {}
    headlines = _headlines(ends)
    for probe, name, one in headlines[:_MOST_QUANTITIES]:
        if np.isfinite(one.value).any():
            # Settings are those of the runs with a result.
            at = np.searchsorted(with_results, one.run)
            quantities[f"{probe}: {name}"] = _thinned(one._replace(run=at))
    if len(headlines) > _MOST_QUANTITIES:
        notes.append(f"quantities: the first {_MOST_QUANTITIES} of {len(headlines)}")
    longest = max((len(one.value) for _, _, one in headlines), default=0)
    if longest > _MOST_POINTS:
        notes.append(f"points of a quantity: {_MOST_POINTS} of {longest}, evenly taken")
    if not quantities:
        return None
    runs = study.runs.sel(run=with_results)
    settings = {name: runs[name].values for name in differing(runs)}
    settings["run"] = runs["run"].values
    return over_runs(runs["run_name"].values.tolist(), settings, quantities)


def _thinned(one: Quantity) -> Quantity:
    if len(one.value) <= _MOST_POINTS:
        return one
    kept = np.unique(np.linspace(0, len(one.value) - 1, _MOST_POINTS).astype(int))
    return Quantity(*(each[kept] for each in one))


def _explore(explored: Explorer | None) -> dict[str, Any] | None:
    if explored is None:
        return None
    (parts,) = explored.plots.values()
    return {
        "controls": [Markup(each) for each in explored.controls],
        "plots": [Markup(each) for each in parts],
        "marks": MARKS,
    }


def _runs(study: Study, notes: list[str]) -> Table:
    """Return the runs with the settings in which they differ."""
    runs = study.runs
    settings = differing(runs)
    facts = [name for name in _FACTS if name in runs.coords]
    shown = min(runs.sizes["run"], _MOST_ROWS)
    if shown < runs.sizes["run"]:
        notes.append(f"runs: the first {shown} of {runs.sizes['run']}; the study has them all")
    rows = [
        [str(runs["run_name"].values[row]), *(_text(runs[name].values[row]) for name in settings)]
        + [_text(runs[name].values[row]) for name in facts]
        for row in range(shown)
    ]
    columns = ("run", *settings, *(_FACTS[name] for name in facts))
    return Table("runs, and the settings in which they differ", columns, rows)


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value or "not set"
    if np.isnan(value):
        return "not set"
    return f"{int(value):,}" if float(value).is_integer() else f"{value:.6g}"


def _failures(study: Study, notes: list[str]) -> Table | None:
    if not study.failures:
        return None
    if len(study.failures) > _MOST_ROWS:
        said = f"the first {_MOST_ROWS} of {len(study.failures)}; the study has them all"
        notes.append(f"failures: {said}")
    rows = [
        [each.run, each.probe or "every probe", f"{each.kind}: {each.reason}"]
        for each in study.failures[:_MOST_ROWS]
    ]
    return Table("and why", ("run", "probe", "reason"), rows)
