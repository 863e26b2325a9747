"""The errors that mechicl raises on purpose, each with the exit code that the shell gets.

A message says what was given, what is accepted, and what to do.
"""

from collections.abc import Iterable
from difflib import get_close_matches


class MechiclError(Exception):
    """Something is wrong with a run or with the machine: exit code 1."""

    exit_code = 1


class InputError(MechiclError, ValueError):
    """The request is wrong, and nothing was done: exit code 2."""

    exit_code = 2


class SchemaError(InputError):
    """A dataset lacks the variables, dims or units that were asked of it."""


class NothingToAnalyseError(MechiclError):
    """The request is fine, but there is nothing to apply it to: exit code 3."""

    exit_code = 3


class DamagedRunError(MechiclError):
    """What a run directory holds cannot be what was written."""


class RunLockedError(MechiclError):
    """Another process is writing this run."""


def canonical(name: str) -> str:
    """Return `name` as registries and settings spell it: `-` is accepted for `_`."""
    return name.strip().replace("-", "_")


def unknown(kind: str, given: str, known: Iterable[str]) -> InputError:
    """Return the error for a name that is not among `known`, with its nearest matches.

    >>> unknown("probe", "sign_matchng", ["circuits", "sign_matching"]).args[0]
    "there is no probe 'sign_matchng'; did you mean 'sign_matching'? Known: circuits, sign_matching"
    """
    names = sorted(known)
    by_canonical = {canonical(name): name for name in names}
    close = get_close_matches(canonical(given), by_canonical, n=3)
    hint = " or ".join(repr(by_canonical[name]) for name in close)
    question = f"did you mean {hint}? " if hint else ""
    listed = ", ".join(names) or "none"
    return InputError(f"there is no {kind} {given!r}; {question}Known: {listed}")


def invalid(where: str, error: object, *, known: Iterable[str] = ()) -> InputError:
    """Return the InputError that says in a line a fault what a pydantic ValidationError found.

    `known` are the settings that `where` has, for the nearest match of one that it has not.
    """
    lines = []
    for fault in error.errors():  # type: ignore[attr-defined]
        key = ".".join(str(part) for part in fault["loc"])
        if fault["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
            lines.append(str(unknown("setting", key, known)))
        elif fault["type"] == "missing":
            lines.append(f"{key}: is required")
        else:
            text = fault["msg"].removeprefix("Value error, ")
            lines.append(f"{key}: {text} (given: {fault['input']!r})".lstrip(": "))
    return InputError(f"{where}: " + "; ".join(lines))
