"""A study as a table, a row a run, probe and seed, and as what its figures are drawn from."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr

from mechicl import analyses
from mechicl.errors import MechiclError, in_a_line
from mechicl.schema import flag_names
from mechicl.studies.heads import aligned_heads, last_steps
from mechicl.studies.settings import differing, setting_names

if TYPE_CHECKING:
    import pandas as pd

_NO_SETTINGS = ("recipe", "seeds", "steps", "weights")
"""What runs of one setting may differ in: a name, seeds, and what was imported of them."""


UNREADABLE = (OSError, RuntimeError, ValueError, KeyError)
"""What Zarr raises where files of a store were lost or altered."""


def damaged(text: str, path: Path | None = None) -> MechiclError:
    """Return the error that says that a study is not what was written, and what to do."""
    which = "a file of this study" if path is None else str(path)
    return MechiclError(
        f"{which} is not what was written: {text}; the command that made the study makes it anew"
    )


def headlines(result: xr.Dataset) -> list[str]:
    """Return the variables to look at first; of a probe that is not installed any more, none."""
    name = str(result.attrs.get("probe", ""))
    if name not in analyses.names():
        return []
    return [each for each in analyses.get(name).headline if each in result]


def at_the_end(result: xr.Dataset) -> xr.Dataset:
    """Return headlines and verdicts of each run and seed at the run's last step.

    Variables along `head` are in an order that seeds share, along `place`; attributes say which,
    and which could not be ordered and are left out (see `aligned_heads`).

    Raises MechiclError where what the study has on disk was altered.
    """
    shown = headlines(result)
    verdict = [name for name in ("holds", "since", "undefined") if name in result]
    wanted = [*shown, *verdict]
    by_head = any("head" in result[name].dims for name in shown)
    # The order of heads is decided by other variables as well.
    small = [str(n) for n, each in result.data_vars.items() if not _is_large(each)]
    try:
        last = last_steps(result[small if by_head else wanted])
    except UNREADABLE as error:
        raise damaged(in_a_line(error)) from error
    if by_head:
        last = aligned_heads(last)
    return _named(last[[name for name in wanted if name in last]], result)


def _named(last: xr.Dataset, result: xr.Dataset) -> xr.Dataset:
    """Give variables whose values are labels of an axis with names these names."""
    for variable in last.data_vars.values():
        of = variable.attrs.get("label_of")
        if of in result.coords and flag_names(result[of]):
            names = {key: result[of].attrs[key] for key in ("flag_values", "flag_meanings")}
            variable.attrs.update(names)
    return last


def _is_large(variable: xr.DataArray) -> bool:
    """Matrices a head decide no order, and are most of what a result holds."""
    return bool({"d_query", "d_in", "query_pos"} & {*variable.dims})


def table(
    runs: xr.Dataset, results: Mapping[str, xr.Dataset], *, all_columns: bool = True
) -> "pd.DataFrame":
    """Return a row for every run, probe and seed, at the last step of the run.

    Columns: `run`, `probe`, `seed`, `step`; `holds` (1, 0 or NaN), `since`, `undefined` (the reason
    why values are NaN, empty where there is none); the headline variables of the probes, one
    column for each place of a head or other axis (`omega_0`), codes as words; then the settings of
    recipes.

    Parameters
    ----------
    runs, results
        Those of a `Study`.
    all_columns
        Whether settings that all runs share have a column, too.
    """
    import pandas as pd

    names = setting_names(runs) if all_columns else differing(runs)
    frames = [_rows(runs, probe, result, names) for probe, result in results.items()]
    if not frames:
        return pd.DataFrame()
    whole = pd.concat(frames, ignore_index=True, join="outer")
    first = [c for c in ("run", "probe", "seed", "step", *VERDICT) if c in whole]
    measured = [c for c in whole if c not in first and c not in (*names, "run_path")]
    return whole.reindex(
        columns=[*first, *measured, *names, *(["run_path"] if all_columns else [])]
    )


VERDICT = ("holds", "since", "undefined")


def _rows(runs: xr.Dataset, probe: str, result: xr.Dataset, settings: list[str]) -> "pd.DataFrame":
    import pandas as pd

    last = at_the_end(result)
    labels = last["seed_label"].transpose("run", "seed").values
    row, seed = np.nonzero(~np.isnan(labels))
    at = runs.sel(run=last["run"].values[row])
    columns: dict[str, Any] = {
        "run": at["run_name"].values,
        "probe": probe,
        "seed": labels[row, seed].astype(np.int64),
    }
    if "last_step" in last.coords:
        columns["step"] = last["last_step"].values[row]
    for name, variable in last.data_vars.items():
        columns |= _columns(str(name), variable, row, seed)
    columns |= {name: at[name].values for name in settings}
    columns["run_path"] = at["run_path"].values
    return pd.DataFrame(columns)


def _columns(
    name: str, variable: xr.DataArray, row: np.ndarray, seed: np.ndarray
) -> dict[str, np.ndarray]:
    """Return the columns of one variable, numbered where it has more than run and seed."""
    values = variable.transpose("run", "seed", ...).values[row, seed]
    names = flag_names(variable)
    flat = values.reshape(len(values), -1)
    numbered = variable.ndim > 2
    columns = {}
    for number in range(flat.shape[1]):
        column = flat[:, number]
        shown = _words(column, names, name) if names else column
        columns[f"{name}_{number}" if numbered else name] = shown
    return columns


def _words(codes: np.ndarray, names: Mapping[int, str], variable: str) -> np.ndarray:
    """Return codes as words; of reasons, none where values are defined."""
    words = {code: text.replace("_", " ") for code, text in names.items()}
    if variable == "undefined":
        words[0] = ""
    return np.array(["" if np.isnan(code) else words[int(code)] for code in codes], dtype=object)


def varied(runs: xr.Dataset) -> str | None:
    """Return the one setting that differs between runs; None where there are none or several."""
    names = [name for name in differing(runs) if name not in _NO_SETTINGS]
    return names[0] if len(names) == 1 else None


def figure_data(runs: xr.Dataset, result: xr.Dataset) -> xr.Dataset:
    """Return what `mechicl.plots.over_runs` draws: headlines and verdicts over run and seed."""
    last = at_the_end(result).drop_vars("undefined", errors="ignore")
    chosen = runs.sel(run=last["run"].values)
    coords: dict[str, Any] = {"run_name": ("run", chosen["run_name"].values)}
    along = varied(chosen)
    if along is not None:
        coords["x"] = ("run", chosen[along].values)
    keep = {key: result.attrs[key] for key in ("probe", "statement") if key in result.attrs}
    keep |= {key: last.attrs[key] for key in ("heads_by", "not_aligned") if key in last.attrs}
    settings = [name for name in last.coords if name in setting_names(runs)]
    shown = last.drop_vars(settings).assign_coords(coords)
    shown.attrs = {"figure": "over_runs", "x_label": along or "run", **keep}
    return shown
