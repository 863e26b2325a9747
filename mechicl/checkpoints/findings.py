"""What is found wrong with a run: one thing each, and where."""

from dataclasses import dataclass
from typing import Literal

from mechicl.checkpoints.chunks import Fault

Kind = Literal[Fault, "not_finite", "disagrees", "duplicate", "jump", "leftover"]
"""What a finding is about: a fault of a file, or values and files that do not go together."""

Severity = Literal["damage", "remark"]


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong with a run.

    Attributes
    ----------
    what
        In a word.
    severity
        `damage` where data are lost or wrong, or the run cannot be continued; `remark` for what
        does no harm, or may be right.
    array, seeds, steps
        Which numbers it touches: seeds by label, steps of checkpoints (of `loss`: log steps); None
        and empty where it is not about one array, or about all of it.
    file
        Where, relative to the run.
    message
        What is wrong with it.
    """

    what: Kind
    severity: Severity
    file: str
    message: str
    array: str | None = None
    seeds: tuple[int, ...] = ()
    steps: tuple[int, ...] = ()
