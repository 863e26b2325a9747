"""Checks of he2025 on trained models."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import xarray as xr

from mechicl import analyses
from mechicl.errors import InputError, unknown
from mechicl.schema import flag_names
from mechicl.studies.checks.base import Measurement, Outcome, check
from mechicl.studies.checks.probes import labelled, last

if TYPE_CHECKING:
    from mechicl.run import Run

PATTERN = ("head_roles", "sign_matching")
"""Probes of the positive-negative pattern: a live head of each sign, and matched signs."""

SETTLED = (*PATTERN, "zero_sum_ov", "homogeneous_kq")
"""Probes of Observation 2 whole, none of which looks at the step size."""


@check
def effective_learning_rate(runs: "Mapping[str, Run]") -> Outcome:
    """Measure the effective learning rate η_eff = C_f Σ|ω||μ| of every run, seed by seed (Table 1).

    Quantities are the labels of the runs. A seed counts where it ends in the pattern of Observation
    2: a live head of each sign, matched signs, Σμ = 0 and one |ω|, by the probes of these. Besides,
    with no published value, are measured:

    - `LABEL: omega`, `LABEL: mu`: means of |ω| and |μ| over heads, at the last step.
    - `LABEL: in the pattern`: 1 where the seed ends in it.
    - `LABEL: in the pattern, OV of both signs at the start` and `..., of one sign at the start`:
      the same, of the seeds whose untrained heads have μ of both signs, or of one. Signs of μ are
      larger than those of ω there, and decide within a hundred steps what a head becomes.
    """
    measurements: list[Measurement] = []
    for label, run in runs.items():
        circuits = run.analyze("circuits")
        excluded = out_of_pattern(run, SETTLED)
        slope = float(run.trajectory["slope"])
        omega, mu = (abs(circuits[name].isel(step=-1)) for name in ("omega", "mu"))
        eta = slope * (omega * mu).sum("head", skipna=False)
        begun = circuits["mu"].isel(step=0)
        both = (begun > 0).any("head") & (begun < 0).any("head")
        for index, seed in enumerate(int(each) for each in run.seeds):
            out, settled = excluded[seed], float(not excluded[seed])
            values = {
                label: float(eta[index]),
                f"{label}: omega": float(omega[index].mean()),
                f"{label}: mu": float(mu[index].mean()),
            }
            measurements += [
                Measurement(name, value, seed=seed, excluded=out) for name, value in values.items()
            ]
            measurements.append(Measurement(f"{label}: in the pattern", settled, seed=seed))
            start = "both signs" if bool(both[index]) else "one sign"
            name = f"{label}: in the pattern, OV of {start} at the start"
            measurements.append(Measurement(name, settled, seed=seed))
    return Outcome(tuple(measurements))


@check
def loss_curves(
    runs: "Mapping[str, Run]",
    *,
    base: str,
    worse: str,
    references: tuple[str, ...],
    lengths: tuple[int, ...] = (10, 20, 30, 40, 50, 60, 70, 80, 90, 100),
    from_length: int = 20,
    at: int = 40,
    n_prompts: int = 163_840,
) -> Outcome:
    """Compare loss curves over lengths, all on the same prompts (Fig. 4).

    Measured for each seed that ends with a head of each sign and matched signs, but for `worse`,
    where every seed counts:

    - `LABEL against BASE`: largest |loss / mean loss of BASE − 1| over lengths from `from_length`.
    - `BASE against REFERENCE`: the same against each of `references`.
    - `BASE over WORSE`, `BASE over ridge`: ratio of losses at length `at`.
    - `standard error`: largest relative standard error of the losses of BASE.

    Parameters
    ----------
    base, worse
        Labels of the run that the others are held against, and of the one that is to be worse.
    references
        Predictors that BASE is held against.
    lengths, from_length, at
        Lengths drawn in the figure, the first that counts, and the one of the ratios.
    n_prompts
        Size of the evaluation set.
    """
    if not {base, worse} <= set(runs) or at not in lengths or from_length > max(lengths):
        raise InputError(
            f"base {base!r} and worse {worse!r} are to be among the runs {list(runs)}, and at {at} "
            f"and from_length {from_length} within the lengths {list(lengths)}"
        )
    found = {
        label: run.analyze(
            "length_generalization",
            lengths=lengths,
            n_prompts=n_prompts,
            references=label == base,  # the same for all
        ).isel(step=-1)
        for label, run in runs.items()
    }
    excluded = {
        label: out_of_pattern(run) if label != worse else dict.fromkeys(map(int, run.seeds), "")
        for label, run in runs.items()
    }
    means = {}
    for label, result in found.items():
        counted = [not excluded[label][int(seed)] for seed in result["seed"].values]
        means[label] = result["loss"].isel(seed=counted).mean("seed")
    named = {name: code for code, name in flag_names(found[base]["reference"]).items()}
    for name in (*references, "ridge"):
        if name not in named:
            raise unknown("reference", name, named)
    scored = found[base]["reference_loss"]
    reference = {name: scored.sel(reference=named[name]) for name in (*references, "ridge")}
    counts = found[base]["length"] >= from_length

    measurements: list[Measurement] = []

    def add(quantity: str, label: str, values: xr.DataArray) -> None:
        measurements.extend(
            Measurement(quantity, float(value), seed=int(seed), excluded=excluded[label][int(seed)])
            for seed, value in zip(values["seed"].values, values.values, strict=True)
        )

    for label, result in found.items():
        if label not in (base, worse):
            apart = abs(result["loss"] / means[base] - 1).where(counts).max("length")
            add(f"{label} against {base}", label, apart)
    own = found[base]["loss"]
    for name in references:
        apart = abs(own / reference[name] - 1).where(counts).max("length")
        add(f"{base} against {name}", base, apart)
    add(f"{base} over {worse}", base, (own / means[worse]).sel(length=at))
    add(f"{base} over ridge", base, (own / reference["ridge"]).sel(length=at))
    error = (found[base]["loss_error"] / own).where(counts).max("length")
    add("standard error", base, error)

    curves = {**means, **{name: reference[name] for name in reference}}
    shown = xr.Dataset(
        {"y": (("curve", "x"), np.stack([curve.values for curve in curves.values()]))},
        coords={"curve": list(curves), "x": np.array(lengths)},
        attrs={
            "figure": "curves",
            "title": "ICL prediction error against the length of the context",
            "x_label": "examples in the context, L'",
            "y_label": "mean squared error",
            "dashed": list(reference),
            "x_mark": int(runs[base].trajectory["n_context"]),
            "x_mark_label": "trained length",
        },
    )
    return Outcome(tuple(measurements), shown)


@check
def length_growth(
    runs: "Mapping[str, Run]",
    *,
    rising: tuple[str, ...],
    short: int = 40,
    long: int = 100,
    lengths: tuple[int, ...] = (10, 20, 30, 40, 50, 60, 70, 80, 90, 100),
    n_prompts: int = 65_536,
) -> Outcome:
    """Measure whether the loss falls or rises from the trained length to a long one (Fig. 8).

    Quantities, one value a seed: `LABEL: error at LONG over SHORT` for the runs whose error is to
    rise, `LABEL: error at SHORT over LONG` for the others, above 1 where it is so; and the errors
    themselves, `LABEL: error at L`, without a published value.

    Parameters
    ----------
    rising
        Labels of the runs whose error is to rise.
    short, long, lengths
        The two lengths compared, and all that the figure shows: the median over seeds.
    n_prompts
        Size of the evaluation set.
    """
    if not {short, long} <= set(lengths) or not set(rising) <= set(runs):
        raise InputError(
            f"short {short} and long {long} are to be among lengths {lengths}, and rising "
            f"{list(rising)} among the runs {list(runs)}"
        )
    measurements: list[Measurement] = []
    curves: dict[str, np.ndarray] = {}
    for label, run in runs.items():
        result = run.analyze(
            "length_generalization", lengths=lengths, n_prompts=n_prompts, references=False
        )
        loss = result["loss"].isel(step=-1)
        curves[label] = loss.median("seed").values
        over, under = (long, short) if label in rising else (short, long)
        for seed in loss["seed"].values:
            own = loss.sel(seed=seed)
            ratio = float(own.sel(length=over) / own.sel(length=under))
            name = f"{label}: error at {over} over {under}"
            measurements.append(Measurement(name, ratio, seed=int(seed)))
            measurements += [
                Measurement(f"{label}: error at {n}", float(own.sel(length=n)), seed=int(seed))
                for n in (short, long)
            ]
    shown = xr.Dataset(
        {"y": (("curve", "x"), np.stack(list(curves.values())))},
        coords={"curve": list(curves), "x": np.array(lengths)},
        attrs={
            "figure": "curves",
            "title": "Models trained at one length, evaluated at others",
            "x_label": "examples in the context, L'",
            "y_label": "mean squared error",
            "y_scale": "log",
            "x_mark": short,
            "x_mark_label": "trained length",
        },
    )
    return Outcome(tuple(measurements), shown)


@check
def allocation(
    runs: "Mapping[str, Run]", *, expected: Mapping[str, str], label_shown: str | None = None
) -> Outcome:
    """Measure whether heads are allotted to tasks as expected at the last step: 1 or 0 a seed.

    Parameters
    ----------
    expected
        Regime of `task_allocation` by label of a run.
    label_shown
        The run whose result is the figure; None takes the first.
    """
    measurements: list[Measurement] = []
    figure: xr.Dataset | None = None
    for label, run in runs.items():
        result = run.analyze("task_allocation")
        names = flag_names(result["regime"])
        if expected.get(label) not in names.values():
            raise InputError(
                f"expected regime of {label!r} is {expected.get(label)!r}; accepted: "
                f"{', '.join(names.values())}"
            )
        if label == (label_shown or next(iter(runs))):
            figure = labelled(result, label, runs)
        for seed in result["seed"].values:
            code = float(result["regime"].isel(step=-1).sel(seed=seed))
            regime = names.get(int(code), "") if np.isfinite(code) else ""
            met = float(regime == expected[label])
            measurements.append(Measurement(f"{label}: {expected[label]}", met, seed=int(seed)))
    return Outcome(tuple(measurements), figure)


def out_of_pattern(run: "Run", probes: tuple[str, ...] = PATTERN) -> dict[int, str]:
    """Return for each seed which of `probes` does not hold at its last step, "" where all do."""
    reasons = dict.fromkeys((int(seed) for seed in run.seeds), "")
    for name in probes:
        holds = last(run.analyze(name)["holds"])
        for seed, value in zip(holds["seed"].values, holds.values, strict=True):
            if value != 1 and not reasons[int(seed)]:
                reasons[int(seed)] = f"not so: {analyses.get(name).statement}"
    return reasons
