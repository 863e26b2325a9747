"""Checks that any probe serves: what it says yes or no to, and what it measures."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import pydantic
import xarray as xr

from mechicl import analyses
from mechicl.errors import InputError, unknown
from mechicl.studies.checks.base import Measurement, Outcome, check

if TYPE_CHECKING:
    from mechicl.run import Run


def _known(name: str) -> str:
    return analyses.get(name).name


def _resolved(settings: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Mapping[str, Any]]:
    for name, own in settings.items():
        analyses.get(name).resolve(own)
    return settings


_Probe = Annotated[str, pydantic.AfterValidator(_known)]
_Checked = pydantic.AfterValidator(_resolved)


@check
def probe_holds(
    runs: "Mapping[str, Run]",
    *,
    probes: tuple[_Probe, ...],
    settings: Annotated[Mapping[str, Mapping[str, Any]], _Checked] = {},
    by: int | None = None,
    only_where: _Probe | None = None,
    shown: _Probe | None = None,
) -> Outcome:
    """Measure whether a probe's statement holds to the end of training: 1 or 0, for each seed.

    Parameters
    ----------
    probes
        Each is a quantity: PROBE, or `LABEL: PROBE` with several runs.
    settings
        Parameters of a probe, by its name.
    by
        Step by which the statement must have set in for good; None: by the last.
    only_where
        A probe whose statement must hold at the end for a seed to count.
    shown
        Probe whose result on the first run is the figure; None takes the first of `probes`.
    """
    measurements: list[Measurement] = []
    figure: xr.Dataset | None = None
    for label, run in runs.items():
        excluded = _excluded(run, only_where, settings)
        for name in probes:
            result = run.analyze(name, **settings.get(name, {}))
            if "since" not in result:
                raise InputError(f"probe {name!r} states nothing that holds or not")
            if figure is None and name == (shown or probes[0]):
                figure = labelled(result, label, runs)
            latest = np.inf if by is None else by
            for seed, since in zip(result["seed"].values, result["since"].values, strict=True):
                measurements.append(
                    Measurement(
                        _named(label, name, runs),
                        float(since <= latest),
                        seed=int(seed),
                        excluded=excluded[int(seed)],
                    )
                )
        if figure is None and shown is not None:
            figure = labelled(run.analyze(shown, **settings.get(shown, {})), label, runs)
    return Outcome(tuple(measurements), figure)


@check
def probe_value(
    runs: "Mapping[str, Run]",
    *,
    probe: _Probe,
    variables: tuple[str, ...],
    settings: Annotated[Mapping[str, Mapping[str, Any]], _Checked] = {},
    only_where: _Probe | None = None,
    absolute: bool = False,
) -> Outcome:
    """Measure variables of a probe at the last step, for each seed.

    Parameters
    ----------
    probe
        Its result on the first run is the figure.
    variables
        Each is a quantity, VARIABLE, or `LABEL: VARIABLE` with several runs. A variable with an
        axis of heads is averaged over heads.
    settings
        Parameters of a probe, by its name.
    only_where
        A probe whose statement must hold at the end for a seed to count.
    absolute
        Take absolute values, before anything is averaged.
    """
    measurements: list[Measurement] = []
    figure: xr.Dataset | None = None
    for label, run in runs.items():
        excluded = _excluded(run, only_where, settings)
        result = run.analyze(probe, **settings.get(probe, {}))
        figure = labelled(result, label, runs) if figure is None else figure
        for name in variables:
            if name not in result:
                raise unknown(f"variable of probe {probe!r}", name, map(str, result.data_vars))
            values = last(result[name], absolute=absolute)
            for seed, value in zip(values["seed"].values, values.values, strict=True):
                measurements.append(
                    Measurement(
                        _named(label, name, runs),
                        float(value),
                        seed=int(seed),
                        excluded=excluded[int(seed)],
                    )
                )
    return Outcome(tuple(measurements), figure)


def labelled(result: xr.Dataset, label: str, runs: "Mapping[str, Run]") -> xr.Dataset:
    """Return a result whose figure says of which of several runs it is."""
    return result.assign_attrs(run_label=label) if len(runs) > 1 else result


def last(variable: xr.DataArray, *, absolute: bool = False) -> xr.DataArray:
    """Return a variable at the last step, (seed,); an axis of heads is averaged over."""
    if not {"seed"} <= {*variable.dims} <= {"seed", "step", "head"}:
        raise InputError(f"{variable.name} has dims {variable.dims}, not seed, step and head")
    values = variable.isel(step=-1) if "step" in variable.dims else variable
    values = abs(values) if absolute else values
    return values.mean("head", skipna=False) if "head" in values.dims else values


def _excluded(
    run: "Run", probe: str | None, settings: Mapping[str, Mapping[str, Any]]
) -> dict[int, str]:
    """Return for each seed why it does not count."""
    if probe is None:
        return {int(seed): "" for seed in run.seeds}
    since = run.analyze(probe, **settings.get(probe, {}))["since"]
    text = f"not so: {analyses.get(probe).statement}"
    return {
        int(seed): text if np.isnan(at) else ""
        for seed, at in zip(since["seed"].values, since.values, strict=True)
    }


def _named(label: str, what: str, runs: "Mapping[str, Run]") -> str:
    return f"{label}: {what}" if len(runs) > 1 else what
