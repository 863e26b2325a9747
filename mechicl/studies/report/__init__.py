"""One self-contained HTML page of a run or of a study."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from mechicl import analyses
from mechicl.checkpoints.layout import CONFIG
from mechicl.checkpoints.reader import is_url
from mechicl.paths import expanded, path_text
from mechicl.run import Run, open_run
from mechicl.studies.report import render

if TYPE_CHECKING:
    from mechicl.studies.study import Study


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
    source: "Run | Study | str | Path",
    out: str | Path | None = None,
    *,
    probes: Sequence[str] | None = None,
    forward: bool = False,
    attention: bool = True,
) -> Report:
    """Write a page about a run or a study, to look at in a browser.

    Of a run it has verdicts, key figures, figures, plots over training and the recipe; of a study
    verdicts and key figures over runs, figures, a plot against settings, the runs, and what failed.

    The page is one file, below 5 MB, that opens without a network. Results of the default
    parameters that are stored under the run, and are of its present steps, are read; the others are
    computed and stored there, where it can be written to. Of a study nothing is computed.

    Parameters
    ----------
    source
        A run or its directory; a study or its store, whose name ends in `.zarr`.
    out
        The file, `.html`; by default `report.html` in the run, `NAME-report.html` beside the study
        `NAME.zarr`. A report that is there is replaced,
        another file is not.
    probes
        Which ones; all that apply by default, of forward probes those that are stored.
    forward
        Compute the other forward probes too, which evaluate the model.
    attention
        Compute attention patterns over training. Without them, and without forward probes to
        compute, nothing imports torch. `forward` and `attention` are of runs alone.

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
    from mechicl.studies.study import Study, open_study

    for name in probes or ():
        analyses.get(name)
    if not isinstance(source, Run | Study) and _is_study(source):
        source = open_study(source)
    if isinstance(source, Study):
        return _of_study(source, out, probes)
    run = source if isinstance(source, Run) else open_run(source)
    target = render.place(out, render.default_place(run.path))
    found = run_page.gather(run, probes, forward=forward)
    notes = run_page.write(target, run, found, attention=attention)
    return Report(target, found.computed, found.saved, found.refused, found.waiting, notes)


def _is_study(path: str | Path) -> bool:
    """Whether a path is meant as a study; a run may be called anything, and has its config."""
    text = path_text(path)
    if is_url(text) or not text.rstrip("/").endswith(".zarr"):
        return False
    return not (expanded(text) / CONFIG).exists()


def _of_study(study: "Study", out: str | Path | None, probes: Sequence[str] | None) -> Report:
    from mechicl.studies.report import study_page

    path = study.path
    default = None if path is None else path.with_name(f"{path.stem}-report.html")
    target = render.place(out, default)
    names = None if probes is None else [analyses.get(name).name for name in probes]
    return Report(target, [], True, {}, [], study_page.write(target, study, names))
