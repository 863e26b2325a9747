"""The errors that mechicl raises on purpose, each with the exit code that the shell gets.

A message says what was given, what is accepted, and what to do.
"""

from collections.abc import Iterable
from difflib import get_close_matches
from operator import index


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


def in_a_line(error: BaseException) -> str:
    r"""Return what an error says, in one line; of an error that is not ours its kind as well.

    >>> in_a_line(InputError("no YAML:\n  line 2"))
    'no YAML: line 2'
    >>> in_a_line(KeyError("W_Q"))
    "KeyError: 'W_Q'"
    >>> in_a_line(ValueError())
    'ValueError'
    """
    said, kind = " ".join(str(error).split()), type(error).__name__
    if isinstance(error, MechiclError) and said:
        return said
    return f"{kind}: {said}" if said else kind


def canonical(name: str) -> str:
    """Return `name` as registries and settings spell it: `-` is accepted for `_`."""
    return name.strip().replace("-", "_")


def unknown(kind: str, given: object, known: Iterable[str]) -> InputError:
    """Return the error for a name that is not among `known`, with its nearest matches.

    Names are near if they are spelt alike, as a whole or in their last dotted part, or if one
    begins with what was given.

    >>> unknown("probe", "sign_matchng", ["circuits", "sign_matching"]).args[0]
    "there is no probe 'sign_matchng'; did you mean 'sign_matching'? Known: circuits, sign_matching"
    """
    names = sorted(known)
    wanted = canonical(str(given))
    spellings = {canonical(name): name for name in names}
    spellings |= {canonical(name).rpartition(".")[2]: name for name in names}
    close = [spellings[match] for match in get_close_matches(wanted, spellings, n=3)]
    begun = [name for key, name in spellings.items() if wanted and key.startswith(wanted)]
    hint = " or ".join(repr(name) for name in list(dict.fromkeys(close + begun))[:3])
    question = f"did you mean {hint}? " if hint else ""
    listed = ", ".join(names) or "none"
    return InputError(f"there is no {kind} {given!r}; {question}Known: {listed}")


_PYDANTIC_WORDS = (
    ("Value error, ", ""),
    ("Input should be", "must be"),
    ("a valid tuple", "a list"),
    ("a valid dictionary", "a mapping of settings"),
    ("Tuple should have", "must have"),
    (" after validation", ""),
)


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
            text = fault["msg"]
            for theirs, ours in _PYDANTIC_WORDS:
                text = text.replace(theirs, ours)
            lines.append(f"{key}: {text} (given: {_short(fault['input'])})" if key else text)
    return InputError(f"{where}: " + "; ".join(lines))


def _short(given: object) -> str:
    text = repr(given)
    return text if len(text) <= 80 else text[:77] + "..."


def integer(name: str, given: object, minimum: int | None = None) -> int:
    """Return `given` as an int; raise InputError for what is none, a boolean or below `minimum`."""
    least = "" if minimum is None else f" from {minimum}"
    try:
        value = None if isinstance(given, bool) else index(given)  # type: ignore[arg-type]
    except TypeError:
        value = None
    if value is None or (minimum is not None and value < minimum):
        raise InputError(f"{name} is an integer{least}; given {_short(given)}")
    return value
