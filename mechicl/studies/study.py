"""Probes over many runs that are there already: one labelled result, one table, failures told."""

import os
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xarray as xr
import zarr
from zarr.storage import LocalStore

from mechicl import analyses, plots
from mechicl.errors import (
    InputError,
    MechiclError,
    NothingToAnalyseError,
    in_a_line,
    integer,
    unknown,
)
from mechicl.paths import local_directory, outside_runs
from mechicl.results import write_aside
from mechicl.run import RunLike, named_runs
from mechicl.studies import parts as of_parts
from mechicl.studies.axes import JOINS, Join
from mechicl.studies.batch import OnDone, check_workers, run_jobs
from mechicl.studies.discovery import RunsLike, find_runs, listed, run_names
from mechicl.studies.join import LIMIT, open_part, write_joined
from mechicl.studies.parts import DOES_NOT_APPLY, Failure, Job, by_reason
from mechicl.studies.settings import decoded, write_runs
from mechicl.studies.table import UNREADABLE, damaged, figure_data, table
from mechicl.version import __version__

if TYPE_CHECKING:
    import pandas as pd

STUDY_SCHEMA = 1
_RUNS = "runs"
_N_FILES = "n_files"
_SOME = 5


class Study:
    """Probes over several runs.

    Attributes
    ----------
    path
        Its Zarr store; None for one that was not written.
    runs
        What is known of each run, over `run`: `run_name`, `run_path`, `recipe`, every setting of
        its recipe by its dotted name (`task.d`, `model.n_heads`; NaN or empty where a run has no
        such setting), and how far it got.
    results
        By probe: its result over `run`, then what the probe gives (seed, step, ...), lazily, with
        the settings of runs as coordinates. Runs that it failed on are not in it.
    failures
        What gave nothing, with the reason.
    join
        How the steps of runs were joined.
    """

    def __init__(
        self,
        path: Path | None,
        runs: xr.Dataset,
        results: Mapping[str, xr.Dataset],
        failures: Sequence[Failure],
        join: Join,
    ) -> None:
        self.path = path
        self.runs = runs
        self.results = dict(results)
        self.failures = list(failures)
        self.join: Join = join

    def __repr__(self) -> str:
        failed = f", {len(self.failures)} failures" if self.failures else ""
        probes = ", ".join(self.results)
        return f"<mechicl.Study {self.path}: {probes} over {self.runs.sizes['run']} runs{failed}>"

    @cached_property
    def table(self) -> "pd.DataFrame":
        """A row for every run, probe and seed, at the last step; see `mechicl.studies.table`."""
        return self.frame()

    def frame(self, *, all_columns: bool = True) -> "pd.DataFrame":
        """Return the table, with the settings that all runs share or without them."""
        return table(self.runs, self.results, all_columns=all_columns)

    def figure(self, probe: str) -> Any:
        """Return the figure of a probe over runs."""
        if probe not in self.results:
            raise unknown("probe in this study", probe, self.results)
        return plots.draw(figure_data(self.runs, self.results[probe]))


def open_study(path: str | Path) -> Study:
    """Open a study for reading.

    Raises
    ------
    InputError
        If there is none at `path`, or a later mechicl wrote it.
    MechiclError
        If files of it are lost or altered.
    """
    local = local_directory(path)
    attrs = _root_attrs(local)
    there, written = _n_files(local), attrs.get(_N_FILES, 0)
    if there < written:  # what is not there would be read as NaN
        raise damaged(f"it has {there:,} of its {written:,} files", local)
    try:
        runs = decoded(_open_group(local, _RUNS))
        results = {
            probe: _with_settings(_open_group(local, probe), runs) for probe in attrs["probes"]
        }
        failures = [Failure(*each) for each in attrs["failures"]]
    except UNREADABLE as error:
        raise damaged(in_a_line(error), local) from error
    return Study(local, runs, results, failures, attrs["join"])


def _root_attrs(local: Path) -> dict[str, Any]:
    """Return what a study says of itself; raise InputError if it is none, or a later one."""
    try:
        root = zarr.open_group(LocalStore(local, read_only=True), mode="r")
        attrs: dict[str, Any] = dict(root.attrs)
        schema = int(attrs["study_schema"])
    except (OSError, ValueError, KeyError, TypeError):
        raise InputError(f"{local} is no study; `mechicl study` writes one") from None
    if schema > STUDY_SCHEMA:
        raise InputError(
            f"mechicl {attrs['mechicl_version']} wrote {local} with schema {schema}, and this "
            f"version reads up to {STUDY_SCHEMA}; install mechicl {attrs['mechicl_version']}"
        )
    return attrs


def _n_files(store: Path) -> int:
    """Count metadata and chunks of a store, without what a file manager may put beside them."""
    return sum(
        path.name == "zarr.json" or "c" in path.relative_to(store).parts[2:-1]
        for path in store.rglob("*")
        if path.is_file()
    )


def _open_group(path: Path, group: str) -> xr.Dataset:
    return xr.open_zarr(LocalStore(path, read_only=True), group=group, chunks=None)  # type: ignore[arg-type]


def _with_settings(result: xr.Dataset, runs: xr.Dataset) -> xr.Dataset:
    """Give a result the coordinates of its runs, but for those that it has of its own."""
    chosen = runs.sel(run=result["run"].values)
    taken = {*result.variables, *result.dims}
    # Variables: coordinates of coordinates would come along, and take the place of the result's.
    return result.assign_coords({k: v.variable for k, v in chosen.coords.items() if k not in taken})


def study(
    runs: RunsLike | Iterable[RunsLike],
    probes: str | Iterable[str],
    *,
    parameters: Mapping[str, Mapping[str, Any]] | None = None,
    against: "RunLike | Iterable[RunLike] | Mapping[str, RunLike] | None" = None,
    out: str | Path | None = None,
    join: Join = "outer",
    jobs: int = 1,
    scheduler: str | None = None,
    overwrite: bool = False,
    figures: bool = True,
    parquet: bool = False,
    all_columns: bool = False,
    limit: int = LIMIT,
    on_done: OnDone = lambda done, of: None,
    notify: Callable[[str], None] = warnings.warn,
) -> Study:
    """Run probes over many runs, and return one result.

    What is finished of each run and probe is kept in a folder beside `out` (NAME-parts), under the
    run's path and last commit and the probe's settings: it is not computed again, by this study or
    another of the same `out`, whatever stopped it. `out` itself, its table and its figures are
    made anew each time.

    Parameters
    ----------
    runs
        As `mechicl.studies.find_runs` takes them: directories, folders, patterns, list files.
    probes
        Names of one or several.
    parameters
        Those of each probe, by its name; the others have their defaults.
    against
        Other runs for comparative probes, as `Run.analyze` takes them.
    out
        Where the study goes: a name that ends in `.zarr`; the table goes beside it. None keeps it
        in memory, and nothing of it on disk.
    join
        Runs of different steps: `outer` takes every step that one of them has, NaN where a run has
        no checkpoint; `inner` those that all of them have; `last` the last of each run alone.
    jobs
        Processes that compute; 1 computes in this one. A script that asks for more than one needs
        the usual ``if __name__ == "__main__":``.
    scheduler
        Address of a Dask scheduler whose workers compute instead.
    overwrite
        Compute again what is finished.
    figures, parquet, all_columns
        Whether a figure a probe is drawn; whether the table is written as Parquet as well; whether
        it has the settings that all runs share.
    limit
        Largest result of one probe, in bytes.
    on_done, notify
        Called with the number of runs done and of all; called with each remark worth a line.

    Raises
    ------
    InputError
        For a wrong request, before a run is opened: an unknown probe or parameter, a path that is
        not there, an `out` that is no place for a study. For a result above `limit`.
    NothingToAnalyseError
        If no run matches, or no probe applies to any.
    MechiclError
        If everything failed, `out` cannot be written to, or the scheduler does not answer.
    """
    chosen = _resolved(probes, parameters or {})
    if join not in JOINS:
        raise unknown("way to join steps", join, JOINS)
    check_workers(jobs, scheduler)
    integer("limit", limit, 1)
    if parquet:
        _require_parquet()
    target = None if out is None else _target(out)
    others = _others(against, chosen)
    found = find_runs(runs, notify=notify)
    with _parts_folder(target) as root:
        keys = of_parts.keys_of(chosen, others)
        asked = [
            Job(str(run), str(of_parts.folder_of(run, root)), chosen, keys, others) for run in found
        ]
        failures = _computed(
            asked, overwrite=overwrite, jobs=jobs, scheduler=scheduler, on_done=on_done
        )
        made = _joined(asked, failures, join, limit, target or root / "study.zarr")
        if target is None:
            return _in_memory(made)
        _write_beside(made, target, figures=figures, parquet=parquet, all_columns=all_columns)
        stale = _stale(made, target, figures=figures, parquet=parquet)
        if stale:
            notify(f"of an earlier study of this name, and not made anew: {listed(stale)}")
        return made


def _resolved(
    probes: str | Iterable[str], parameters: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    asked = [probes] if isinstance(probes, str) else list(probes)
    names = list(dict.fromkeys(analyses.get(name).name for name in asked))
    if not names:
        raise InputError(f"no probe was named; there are {', '.join(analyses.names())}")
    for name in parameters:
        if name not in names:
            raise unknown("probe in this study with parameters", name, names)
    return {name: analyses.get(name).resolve(parameters.get(name, {})) for name in names}


def _others(against: Any, chosen: Mapping[str, Any]) -> dict[str, str]:
    """Return the paths of the runs of `against` by name; they are opened to see that they are."""
    others = {
        name: str(run.path if isinstance(run.path, str) else run.path.absolute())
        for name, run in named_runs(against).items()
    }
    if others and not any(analyses.get(name).comparative for name in chosen):
        raise InputError(
            f"none of {', '.join(chosen)} holds a run against others; those that do: "
            f"{', '.join(analyses.comparative())}"
        )
    return others


def _target(out: str | Path) -> Path:
    """Return `out` as a place for a study."""
    target = local_directory(out).absolute()
    if target.suffix != ".zarr" or not target.stem:
        raise InputError(f"the name of a study ends in .zarr, such as study.zarr; given {out}")
    outside_runs(target)
    if target.exists() and any(target.iterdir()):
        try:
            _root_attrs(target)  # one that is damaged is replaced
        except InputError as error:
            if "schema" in str(error):
                raise
            raise InputError(
                f"{target} is there and is no study; it is left as it is: give another --out"
            ) from None
        return target
    there = [place for place in files_of(target).values() if place.exists()]
    if there:
        raise InputError(
            f"{there[0]} is there, and no {target.name} that it belongs to; it is left as it is: "
            "move it, or give another --out"
        )
    return target


@contextmanager
def _parts_folder(target: Path | None) -> Iterator[Path]:
    """Yield the folder of parts: beside the study, or one for as long as it is needed."""
    if target is None:
        with tempfile.TemporaryDirectory(prefix="mechicl-study-") as folder:
            yield Path(folder)
        return
    root = target.with_name(f"{target.stem}-parts")
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MechiclError(
            f"cannot make {root} ({error.strerror or error}); give another --out"
        ) from None
    if not os.access(root, os.W_OK):
        raise MechiclError(f"{root} is read-only; give another --out")
    yield root


def _computed(
    asked: Sequence[Job], *, overwrite: bool, jobs: int, scheduler: str | None, on_done: OnDone
) -> list[Failure]:
    """Compute what is not finished; return what failed, refusals of finished parts included."""
    if overwrite:
        for part in (each.part(name) for each in asked for name in each.probes):
            part.unlink(missing_ok=True)
    missing = [(each, names) for each in asked if (names := each.missing())]
    n_done = len(asked) - len(missing)
    failures = run_jobs(
        [each.only(names) for each, names in missing],
        jobs=jobs,
        scheduler=scheduler,
        on_done=lambda done, of: on_done(n_done + done, n_done + of),
    )
    told = {(each.run, each.probe) for each in failures}
    for each in asked:
        for name in each.probes:
            head = of_parts.read_head(each.part(name))
            if head is not None and "refusal" in head and (each.run, name) not in told:
                failures.append(Failure(each.run, name, DOES_NOT_APPLY, head["refusal"]))
            elif head is None and not {(each.run, name), (each.run, "")} & told:
                failures.append(Failure(each.run, name, of_parts.FAILED, _unseen(each)))
    order = {each.run: number for number, each in enumerate(asked)}
    return sorted(failures, key=lambda each: (order[each.run], each.probe))


def _unseen(each: Job) -> str:
    return (
        f"its result is not in {each.folder}, where its worker wrote it; workers and this machine "
        "need one file system"
    )


def _joined(
    asked: Sequence[Job], failures: Sequence[Failure], join: Join, limit: int, target: Path
) -> Study:
    """Write the study of all finished parts, aside and renamed, and open it."""
    known = [(each, facts) for each in asked if (facts := of_parts.read_facts(each)) is not None]
    finished = {
        name: [
            open_part(number, each.part(name))
            for number, (each, _) in enumerate(known)
            if _has_result(each, name)
        ]
        for name in asked[0].probes
    }
    finished = {name: found for name, found in finished.items() if found}
    if not finished:
        raise _nothing(failures)
    paths = [each.run for each, _ in known]
    names = run_names([each.run for each in asked])
    named = [name for name, each in zip(names, asked, strict=True) if each.run in set(paths)]

    def write(aside: Path) -> None:
        attrs = {
            "study_schema": STUDY_SCHEMA,
            "mechicl_version": __version__,
            "probes": list(finished),
            "join": join,
            "failures": [[each.run, each.probe, each.kind, each.reason] for each in failures],
        }
        store = LocalStore(aside)
        root = zarr.create_group(store, zarr_format=3, attributes=attrs)
        write_runs(root.create_group(_RUNS), named, paths, [facts for _, facts in known])
        for name, found in finished.items():
            write_joined(root.create_group(name), found, join, limit=limit)
        root.attrs[_N_FILES] = _n_files(aside)
        with warnings.catch_warnings():
            # xarray warns on opening a store without consolidated metadata, zarr on writing one.
            warnings.filterwarnings("ignore", message="Consolidated metadata")
            zarr.consolidate_metadata(store)

    _written(target, write)
    return open_study(target)


def _has_result(each: Job, name: str) -> bool:
    head = of_parts.read_head(each.part(name))
    return head is not None and "refusal" not in head


def _nothing(failures: Sequence[Failure]) -> MechiclError:
    reasons = by_reason(failures)
    said = "; ".join(reasons[:_SOME])
    more = f"; and {len(reasons) - _SOME} more reasons" if len(reasons) > _SOME else ""
    if all(each.kind == DOES_NOT_APPLY for each in failures):
        return NothingToAnalyseError(f"no probe applies to any of the runs: {said}{more}")
    return MechiclError(f"no run gave a result: {said}{more}")


def _in_memory(made: Study) -> Study:
    results = {name: result.load() for name, result in made.results.items()}
    return Study(None, made.runs.load(), results, made.failures, made.join)


def files_of(target: Path) -> dict[str, Path]:
    """Return where the table and figures of a study go: `csv`, `parquet`, `figures`."""
    return {
        "csv": target.with_suffix(".csv"),
        "parquet": target.with_suffix(".parquet"),
        "figures": target.with_name(f"{target.stem}-figures"),
    }


def _write_beside(
    made: Study, target: Path, *, figures: bool, parquet: bool, all_columns: bool
) -> None:
    places, frame = files_of(target), made.frame(all_columns=all_columns)
    _written(places["csv"], lambda aside: frame.to_csv(aside, index=False))
    if parquet:
        _written(places["parquet"], lambda aside: frame.to_parquet(aside, index=False))
    if figures:
        for probe in made.results:
            drawn = made.figure(probe)
            place = places["figures"] / f"{probe}.png"
            _written(place, lambda aside, drawn=drawn: drawn.savefig(aside, dpi=120, format="png"))


def _stale(made: Study, target: Path, *, figures: bool, parquet: bool) -> list[str]:
    """Return the files beside a study that an earlier one of its name wrote, and this one did not.

    They may be of other runs.
    """
    places = files_of(target)
    drawn = {f"{name}.png" for name in made.results if figures}
    found = [places["parquet"]] if places["parquet"].exists() and not parquet else []
    found += sorted(each for each in places["figures"].glob("*.png") if each.name not in drawn)
    return [str(each.relative_to(target.parent)) for each in found]


def _written(target: Path, write: Callable[[Path], object]) -> None:
    try:
        write_aside(target, write)
    except OSError as error:
        raise MechiclError(
            f"cannot write {target} ({error.strerror or error}); give another --out"
        ) from error


def _require_parquet() -> None:
    from importlib.util import find_spec

    if find_spec("pyarrow") is None:
        raise InputError(
            "Parquet files are written by pyarrow, which is not installed: `pip install pyarrow`, "
            "or leave --parquet out; the table is in the CSV file too"
        )
