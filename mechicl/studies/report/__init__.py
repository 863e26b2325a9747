"""One self-contained HTML page of a run or of a study."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from mechicl import analyses
from mechicl.run import Run, open_run
from mechicl.studies.report import render


class Report(NamedTuple):
    """A page that was written.

    Attributes
    ----------
    path
        The file.
    computed
        Probes whose results were computed for it; the others were stored.
    saved
        Whether what was computed is stored under the run.
    refused
        Why probes do not apply, by name.
    waiting
        Forward probes that were left out.
    notes
        What else was thinned or left out, as the page says it.
    """

    path: Path
    computed: list[str]
    saved: bool
    refused: dict[str, str]
    waiting: list[str]
    notes: list[str]


def report(
    source: Run | str | Path,
    out: str | Path | None = None,
    *,
    probes: Sequence[str] | None = None,
    forward: bool = False,
    attention: bool = True,
) -> Report:
    """Write a page about a run: verdicts, key figures, figures, plots over training, its recipe.

    The page is one file, below 5 MB, that opens without a network. Results of the default
    parameters that are stored under the run, and are of its present steps, are read; the others are
    computed and stored there, where it can be written to.

    Parameters
    ----------
    source
        A run or its directory.
    out
        The file, `.html`; `report.html` in the run by default. A report that is there is replaced,
        another file is not.
    probes
        Which ones; all that apply by default, of forward probes those that are stored.
    forward
        Compute the other forward probes too, which evaluate the model.
    attention
        Compute attention patterns over training. Without them, and without forward probes to
        compute, nothing imports torch.

    Raises
    ------
    InputError
        For an unknown probe, and for an `out` that is a URL, a directory, of another ending, or a
        file that is no report.
    NothingToAnalyseError
        If no probe applies.
    MechiclError
        If the page cannot be written, and for a damaged run.
    """
    from mechicl.studies.report import run_page

    for name in probes or ():
        analyses.get(name)
    run = source if isinstance(source, Run) else open_run(source)
    target = render.place(out, render.default_place(run.path))
    found = run_page.gather(run, probes, forward=forward)
    notes = run_page.write(target, run, found, attention=attention)
    return Report(target, found.computed, found.saved, found.refused, found.waiting, notes)
