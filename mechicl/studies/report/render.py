"""A page from its template: everything that it is given is text, and escaped."""

import os
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from mechicl.checkpoints.reader import is_url
from mechicl.errors import InputError, MechiclError
from mechicl.paths import expanded, local_file, path_text
from mechicl.results import write_aside
from mechicl.version import __version__

GENERATOR = "mechicl report"
_HEAD_BYTES = 2000


def place(out: str | Path | None, default: Path | None) -> Path:
    """Return the file that a page goes to: `out`, or `default`.

    Raises
    ------
    InputError
        For a URL, a directory, another ending than `.html`, a file that is there and is no report,
        and where there is neither `out` nor a default.
    MechiclError
        If its folder is read-only.
    """
    chosen = default if out is None else out
    if chosen is None:
        raise InputError(
            "a run at a URL, and a study that is on no disk, have no place for a report; give one "
            "with --out FILE.html (out= in Python)"
        )
    target = local_file(chosen, ending=".html", overwrite=True)
    if target.exists() and not _is_ours(target):
        raise InputError(f"{target} is there and is no report of mechicl; give another name")
    above = next(folder for folder in target.absolute().parents if folder.exists())
    if not os.access(above, os.W_OK):
        raise MechiclError(f"{above} is read-only; --out FILE.html puts the page elsewhere")
    return target


def _is_ours(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return f'name="generator" content="{GENERATOR}'.encode() in file.read(_HEAD_BYTES)
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror or error})") from None


def default_place(path: str | Path) -> Path | None:
    """Return where the report of a run or study goes of itself; None for a URL."""
    text = path_text(path)
    return None if is_url(text) else expanded(text) / "report.html"


def write(target: Path, template: str, **content: Any) -> Path:
    """Render a page and write it aside and rename; raise MechiclError where that cannot be done."""
    page = (
        _environment()
        .get_template(template)
        .render(version=__version__, style=Markup(_text("style.css")), **content)
    )
    try:
        write_aside(target, lambda path: path.write_text(page, encoding="utf-8"))
    except OSError as error:
        raise MechiclError(
            f"cannot write {target} ({error.strerror or error}); --out FILE.html puts the page "
            "elsewhere"
        ) from error
    return target


@cache
def _environment() -> Environment:
    return Environment(
        loader=FunctionLoader(_text),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _text(name: str) -> str:
    return files("mechicl.studies.report").joinpath("templates", name).read_text("utf-8")
