"""Paths as users give them."""

from os import PathLike, fspath
from pathlib import Path

from mechicl.checkpoints.layout import CONFIG, TRAJECTORY
from mechicl.checkpoints.reader import is_url
from mechicl.errors import InputError


def local_directory(path: str | Path) -> Path:
    """Return `path` as a local path to write to, `~` expanded.

    Raises InputError for a URL, an empty path, and for what is there and is no directory.
    """
    text = path_text(path)
    if is_url(text):
        raise InputError(f"{text} is a URL, and only local directories are written; give a path")
    local = expanded(text)
    try:
        if not local.is_dir() and (local.exists() or local.is_symlink()):
            raise InputError(f"{local} is not a directory; give another path")
    except OSError as error:
        raise InputError(f"{local} is no place to write to: {error.strerror or error}") from None
    return local


def local_file(path: str | Path, *, ending: str, overwrite: bool) -> Path:
    """Return `path` as a local file to write, `~` expanded.

    Raises InputError for a URL, an empty path, another ending, a directory, and for a file that is
    there unless `overwrite`.
    """
    text = path_text(path)
    if is_url(text):
        raise InputError(f"{text} is a URL, and only local files are written; give a path")
    local = expanded(text)
    try:
        if local.is_dir():
            raise InputError(f"{local} is a directory; give a file, such as {local}/name{ending}")
        if not local.name.endswith(ending) or local.name == ending:
            raise InputError(
                f"the name of the file ends in {ending}, such as name{ending}; given {local}"
            )
        if not overwrite and (local.exists() or local.is_symlink()):
            raise InputError(
                f"{local} is there already; give another name, or --overwrite (overwrite=True in "
                "Python)"
            )
    except OSError as error:
        raise InputError(f"{local} is no place to write to: {error.strerror or error}") from None
    return local


def is_run(folder: Path) -> bool:
    """Return whether a folder is that of a run: it has a trajectory, or the recipe for one.

    A `config.yaml` that names no recipe is another program's.
    """
    if (folder / TRAJECTORY).exists():
        return True
    try:
        config = (folder / CONFIG).read_bytes()
    except OSError:
        return False
    return config.startswith(b"recipe:") or b"\nrecipe:" in config


def outside_runs(path: Path, *, itself: bool = True) -> Path:
    """Return `path`; raise InputError if it lies in a run, or, with `itself`, is one."""
    real = path.resolve()
    for folder in (*((real,) if itself else ()), *real.parents):
        if TRAJECTORY in (real.name, folder.name) or is_run(folder):
            raise InputError(f"{path} lies in a run, which is left as it is; give another --out")
    return path


def expanded(path: str | Path) -> Path:
    """Return `path` with `~` expanded; raise InputError where it names no user."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise InputError(
            f"{str(path)!r} begins with the home of a user that this machine does not know; give "
            "the path without ~, or ./~... for what is called so"
        ) from None


def path_text(path: object) -> str:
    """Return a path as text; raise InputError if it is none, or empty."""
    if not isinstance(path, (str, PathLike)):
        raise InputError(f"a path is text or a Path; given {type(path).__name__}")
    text = fspath(path)
    if not isinstance(text, str) or not text.strip():
        raise InputError(f"a path cannot be empty; given {text!r}")
    if "\0" in text:
        raise InputError(f"a path has no null characters; given {text!r}")
    return text
