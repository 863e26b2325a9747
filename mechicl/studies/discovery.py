"""Which runs are meant: globs, folders that hold runs, run directories and list files."""

import glob
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from mechicl.checkpoints.layout import CONFIG, TRAJECTORY
from mechicl.checkpoints.reader import Location, is_url
from mechicl.errors import InputError, NothingToAnalyseError
from mechicl.paths import expanded, is_run, path_text
from mechicl.run import Run

RunsLike = str | Path | Run
_SOME = 5


def find_runs(
    given: RunsLike | Iterable[RunsLike], *, notify: Callable[[str], None] = warnings.warn
) -> list[Location]:
    """Return the absolute paths of the runs that are meant, sorted, each once; none is opened.

    Parameters
    ----------
    given
        One or several of: a run's directory (or its fsspec URL, or a `Run`); a folder, of which all
        runs below it are taken; a pattern such as `runs/*` (`**` for any depth), of which the
        folders that match are taken; a text file with one of these a line, `#` before a comment,
        paths relative to the file.
    notify
        Called with each remark: runs that were given twice, folders that hold none.

    Raises
    ------
    InputError
        For a path that is not there, or a file that is no list.
    NothingToAnalyseError
        If a pattern, folder or list holds no run; the message says what was looked for.
    """
    asked = [given] if isinstance(given, str | Path | Run) else list(given)
    if not asked:
        raise InputError("no runs were given; give run directories, folders of runs, or patterns")
    found: list[Location] = []
    for each in asked:
        found += _meant(each.path if isinstance(each, Run) else each, None, notify)
    once: dict[str, Location] = {}
    twice: dict[str, None] = {}
    for path in found:
        key = path if isinstance(path, str) else os.path.realpath(path)
        if key in once:
            twice[str(path)] = None
        once.setdefault(key, path)
    if twice:
        notify(f"given more than once, and kept once: {listed(list(twice))}")
    return sorted((_absolute(path) for path in once.values()), key=str)


def _absolute(path: Location) -> Location:
    """Keep a link in a path, by which its user knows the run, but for one with `..` in it."""
    if isinstance(path, str):
        return path
    return path.resolve() if ".." in path.parts else path.absolute()


def _meant(given: str | Path, listed_in: Path | None, notify: Callable[[str], None]) -> list:
    """Return the runs that one path or pattern stands for."""
    text = path_text(given)
    if is_url(text):
        return [text.rstrip("/")]
    path = expanded(text)
    if listed_in is not None:
        path = listed_in.parent / path
    said = f" (in {listed_in})" if listed_in else ""
    try:
        is_file, is_folder = path.is_file(), path.is_dir()
    except OSError as error:
        raise InputError(f"{path}{said} cannot be read: {error.strerror or error}") from None
    if is_file:
        if listed_in is not None:
            raise InputError(f"{path}{said} is a file; a list has run directories and patterns")
        return _of_list(path, notify)
    if is_folder:
        runs = list(_below(path))
        if not runs:
            raise NothingToAnalyseError(
                f"there is no run in {path}{said}: no folder there has a {CONFIG} or {TRAJECTORY}"
            )
        return runs
    if glob.has_magic(str(path)):
        return _matching(path, said, notify)
    if path.exists():
        raise InputError(f"{path}{said} is neither a folder nor a file; give one that has runs")
    raise InputError(f"there is no {path}{said}; give a run, a folder of runs, or a pattern")


def _matching(pattern: Path, said: str, notify: Callable[[str], None]) -> list[Path]:
    # Path.glob takes no absolute pattern.
    found = glob.glob(_with_literal_folder(pattern), recursive=True)  # noqa: PTH207
    matches = [Path(each) for each in sorted(found)]
    folders = [each for each in matches if each.is_dir()]
    runs, empty = [], []
    for folder in folders:
        if any(is_run(parent) for parent in folder.parents):
            continue  # ** matches what is inside of runs, too
        inside = list(_below(folder))
        runs += inside
        if not inside:
            empty.append(str(folder))
    if not runs:
        raise NothingToAnalyseError(
            f"no run matches {str(pattern)!r}{said}: of {len(matches)} matches, {len(folders)} are "
            f"folders, and none has or holds a {CONFIG} or {TRAJECTORY}"
        )
    if empty and "**" not in str(pattern):
        notify(f"no run in {listed(empty)}")
    # ** gives a folder and what is below it.
    return list(dict.fromkeys(runs)) if "**" in str(pattern) else runs


def _with_literal_folder(pattern: Path) -> str:
    """Return a pattern whose longest leading part that is a folder, `a [b]`, stands for itself."""
    folder = next((each for each in pattern.parents if each.is_dir()), None)
    if folder is None:
        return str(pattern)
    return os.path.join(glob.escape(str(folder)), pattern.relative_to(folder))  # noqa: PTH118


def _of_list(path: Path, notify: Callable[[str], None]) -> list:
    if path.name == CONFIG:
        raise InputError(f"{path} is the configuration of a run; give its directory, {path.parent}")
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (UnicodeDecodeError, OSError) as error:
        raise InputError(f"{path} is no list of runs: {error}; a list is text") from None
    entries = [line.partition("#")[0].strip() for line in lines]
    runs = [run for entry in entries if entry for run in _meant(entry, path, notify)]
    if not runs:
        raise NothingToAnalyseError(f"the list {path} names no run")
    return runs


def _below(folder: Path) -> Iterator[Path]:
    """Yield `folder` if it is a run, else the runs below it; links lead to runs and no further."""
    if is_run(folder):
        yield folder
        return
    try:
        inside = sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))
    except OSError:
        return
    for entry in inside:
        if is_run(entry):
            yield entry
        elif entry.is_dir() and not entry.is_symlink() and entry.suffix != ".zarr":
            yield from _below(entry)


def listed(names: list[str]) -> str:
    """Return the first few names, and how many more there are."""
    more = f" and {len(names) - _SOME} more" if len(names) > _SOME else ""
    return ", ".join(names[:_SOME]) + more


def run_names(paths: Iterable[Location]) -> list[str]:
    """Return a name for each run: the shortest trailing part of its path that no other has."""
    parts = [str(path).rstrip("/").split("/") for path in paths]
    lengths = [1] * len(parts)
    while True:
        names = ["/".join(part[-n:]) for part, n in zip(parts, lengths, strict=True)]
        counts: dict[str, int] = {}
        for name in names:
            counts[name] = counts.get(name, 0) + 1
        longer = [
            n + (counts[name] > 1 and n < len(part))
            for name, n, part in zip(names, lengths, parts, strict=True)
        ]
        if longer == lengths:
            return names
        lengths = longer
