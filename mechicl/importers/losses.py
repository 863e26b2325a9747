"""Training losses that whoever trained a run has logged."""

import csv
import math
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float32

from mechicl.errors import InputError
from mechicl.paths import expanded, path_text

_FEW = 5


class Losses(NamedTuple):
    """Losses of a run.

    Attributes
    ----------
    values
        Loss of the parameters after so many updates; NaN where none was given.
    n_late
        How many were given for the last checkpoint's step or later, where a run has none.
    """

    values: Float32[np.ndarray, "seed log_step"]
    n_late: int


def read_losses(path: str | Path | None, seeds: tuple[int, ...], n_steps: int) -> Losses:
    """Read a CSV with the columns `step` and `loss`, and `seed` where there are several.

    Parameters
    ----------
    path
        None gives NaN alone.
    n_steps
        The last step; losses are of the steps before it.

    Raises
    ------
    InputError
        For a file that is none, lacks a column, or has a line that is not two numbers; for a seed
        that is not imported, and a step that is there twice.
    """
    values = np.full((len(seeds), n_steps), np.nan, np.float32)
    if path is None:
        return Losses(values, 0)
    file = expanded(path_text(path))
    try:
        with file.open(newline="", encoding="utf-8-sig") as lines:
            reader = csv.DictReader(lines)
            columns = [name.strip() for name in reader.fieldnames or ()]
            reader.fieldnames = columns
            rows = list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise InputError(f"the losses {file} cannot be read: {why}") from None
    wanted = ["step", "loss", *(["seed"] if len(seeds) > 1 else [])]
    lacking = [name for name in wanted if name not in columns]
    if lacking:
        raise InputError(
            f"the losses {file} are a CSV with the columns {', '.join(wanted)}; it has "
            f"{', '.join(columns) or 'none'}"
        )
    twice = [name for name in ("step", "loss", "seed") if columns.count(name) > 1]
    if twice:
        raise InputError(f"the losses {file} have the column {twice[0]} more than once; keep one")
    problems: list[str] = []
    seen: set[tuple[int, int]] = set()
    n_late = 0
    for number, row in enumerate(rows, start=2):
        place = _place(row, seeds)
        if isinstance(place, str):
            problems.append(f"line {number} {place}")
            continue
        seed, step, loss = place
        if (seed, step) in seen:
            problems.append(f"line {number} has step {step} again")
        seen.add((seed, step))
        if step >= n_steps:
            n_late += 1
        else:
            values[seeds.index(seed), step] = loss
    if problems:
        more = f"; and {len(problems) - _FEW} more" if len(problems) > _FEW else ""
        raise InputError(f"the losses {file}: {'; '.join(problems[:_FEW])}{more}")
    return Losses(values, n_late)


def _place(row: dict[str, str], seeds: tuple[int, ...]) -> tuple[int, int, float] | str:
    """Return seed, step and loss of a line, or what is wrong with it."""
    try:
        step, loss = int(row["step"]), float(row["loss"])
        seed = int(row["seed"]) if "seed" in row else seeds[0]
    except (ValueError, TypeError):
        return f"is not numbers: {', '.join(str(value)[:40] for value in row.values())}"
    if None in row:
        return f"has more numbers than there are columns: {', '.join(map(str, row.values()))[:80]}"
    if seed not in seeds:
        return f"is of seed {seed}; imported are {', '.join(map(str, seeds))}"
    if step < 0:
        return f"is of step {step}"
    if math.isfinite(loss) and abs(loss) > float(np.finfo(np.float32).max):
        return f"has a loss of {loss:g}, too large for float32"
    return seed, step, loss if math.isfinite(loss) else math.nan
