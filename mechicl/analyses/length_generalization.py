"""The loss of a model, and of the references, at context lengths other than the trained one."""

from itertools import pairwise
from typing import Annotated

import numpy as np
import pydantic
import xarray as xr
from jaxtyping import Float

from mechicl.analyses.evaluation import (
    Moments,
    predict_steps,
    reference_axis,
    shares,
    spread_steps,
    squared_error,
)
from mechicl.analyses.heads import NONFINITE, REGRESSION, WEIGHTS, nonfinite, quotient
from mechicl.analyses.probe import Forward, probe, undefined_codes, verdict
from mechicl.schema import Var

_MODEL = ("seed", "step")
_CURVE = (*_MODEL, "length")
_AGAINST = (*_MODEL, "reference", "length")
_LENGTH = Var(("length",), "1", "examples in a context", 1)


def _increasing(lengths: tuple[int, ...]) -> tuple[int, ...]:
    if any(one >= other for one, other in pairwise(lengths)):
        raise ValueError("must increase from each length to the next")
    return lengths


Lengths = Annotated[
    tuple[Annotated[int, pydantic.Field(ge=1)], ...],
    pydantic.Field(min_length=1),
    pydantic.AfterValidator(_increasing),
]


@probe(
    needs=WEIGHTS | {"n_context": REGRESSION["n_context"]},
    gives={
        "length": _LENGTH,
        "loss": Var(_CURVE, "1", "mean squared error at a length", 0),
        "loss_error": Var(_CURVE, "1", "standard error of loss", 0),
        "reference": Var(("reference",), "1", "reference predictor"),
        "reference_loss": Var(("reference", "length"), "1", "loss of a reference there", 0),
        "reference_error": Var(("reference", "length"), "1", "standard error of reference_loss", 0),
        "excess": Var(_AGAINST, "1", "loss less reference_loss, on the same prompts"),
        "excess_error": Var(_AGAINST, "1", "paired standard error of excess", 0),
        "relative_excess": Var(_AGAINST, "1", "excess over reference_loss"),
        "extrapolates": Var(("length",), "1", "1 beyond the trained length", 0, 1),
        "n_context": Var((), "1", "trained length, L", 1),
        "trained_loss": Var(_MODEL, "1", "loss at the length nearest the trained one", 0),
        "longest_loss": Var(_MODEL, "1", "loss at the longest length", 0),
        "decrease": Var(_MODEL, "1", "trained_loss less longest_loss"),
        "decrease_error": Var(_MODEL, "1", "paired standard error of decrease", 0),
    },
    statement="the loss falls further beyond the trained length",
    undefined=(
        NONFINITE,
        "nonfinite_loss",
        "no_length_beyond_the_trained",
        "nonfinite_reference",
        "perfect_reference",
    ),
    headline=("trained_loss", "longest_loss", "decrease"),
    references=("he2025 (2.5), section 5.1, Figures 4 and 8",),
    forward=True,
)
def length_generalization(
    trajectory: xr.Dataset,
    forward: Forward,
    *,
    lengths: Lengths = (10, 20, 30, 40, 50, 60, 70, 80, 90, 100),
    n_prompts: Annotated[int, pydantic.Field(ge=2)] = 65536,
    n_steps: Annotated[int, pydantic.Field(ge=1)] = 1,
    margin: Annotated[float, pydantic.Field(ge=0)] = 3.0,
    references: bool = True,
    evaluation_seed: Annotated[int, pydantic.Field(ge=0)] = 0,
) -> xr.Dataset:
    """Measure the loss against the number of examples in a context, within and beyond the trained.

    A fixed set of prompts of the longest length is drawn, and each is cut to its first L' examples
    and the query. So all lengths, models and references share queries and targets.

    - `length` = L'; `extrapolates` (length): 1 where L' is beyond `n_context`, the trained length.
    - `loss` (seed, step, length) = mean of (prediction − y_q)², averaged over responses where there
      are several; `loss_error` its Monte-Carlo standard error.
    - `reference_loss`, `reference_error` (reference, length): the same of the task's exact and
      classical predictors. Those with a step or a matrix fitted to a length keep the one of the
      trained length. `reference` is a number that `mechicl.schema.flag_names` reads.
    - `excess` (seed, step, reference, length) = mean over prompts of the model's squared error less
      the reference's; `excess_error` its paired standard error, from the differences;
      `relative_excess` = `excess` / `reference_loss`, from −1 for a model without error.
    - `trained_loss`, `longest_loss` (seed, step): `loss` at the length nearest to the trained one
      (of two the shorter), and at the longest; `decrease` the former less the latter,
      `decrease_error` its paired standard error.
    - `holds`: `decrease` is above `margin` times `decrease_error`.

    All are in units of y², but `relative_excess`, which has none.

    When it misleads: it asks for a lower loss at the longest length alone, whatever lies between
    (linear attention trained at L = 40 has its least at 43, and is back at its loss of 40 by 47: a
    longest length of 44 would not tell). A falling loss is not a good one: see `excess` over
    `ridge`, which is optimal at each length. Errors of neighbouring lengths are correlated. A task
    whose examples are not exchangeable has no such lengths, for prompts are cut.

    Undefined: weights that are not finite; a loss that overflows at a length; `decrease` and
    `holds` where no length is beyond the trained one and the one nearest to it; `excess` over a
    reference that overflows, as one step of descent may at a length that it was not fitted to;
    `relative_excess` over a reference whose loss is exactly 0.

    Parameters
    ----------
    lengths
        L', increasing, from 1. Lengths below d are fine.
    n_prompts
        Size of the evaluation set. At 65536 the standard error is about 0.7 % of the loss, and that
        of the excess over debiased descent 0.05 %.
    n_steps
        At most so many of the saved steps, spread evenly in log(1 + steps since the first); 1 takes
        the last.
    margin
        How many standard errors the loss has to fall by.
    references
        Whether references are evaluated as well: they take most of the time, and are the same for
        all runs of a task. Without them the axis `reference` is empty.
    evaluation_seed
        Seed of the evaluation set.

    References
    ----------
    he2025, (2.5), section 5.1 and Figures 4 and 8.
    """
    chosen = forward.load(trajectory.isel(step=spread_steps(trajectory["step"].values, n_steps)))
    n_context = int(trajectory["n_context"])
    base = int(np.argmin(np.abs(np.array(lengths) - n_context)))
    curves = _Curves(chosen, forward, lengths, base, references=references)
    for size, part in shares(n_prompts):
        inputs, targets = forward.prompts(size, evaluation_seed, part=part, n_context=lengths[-1])
        curves.add(inputs, targets)
    measured = curves.result()
    beyond = base < len(lengths) - 1  # else the longest is within the trained length, or nearest it
    for name in ("decrease", "decrease_error"):
        measured[name] = measured[name].where(beyond)
    broken = nonfinite(chosen)
    reasons = {
        NONFINITE: broken,
        "nonfinite_loss": measured["loss"].isnull().any("length"),
        "no_length_beyond_the_trained": measured["decrease"].isnull(),
        "nonfinite_reference": measured["excess"].isnull().any(("reference", "length")),
        "perfect_reference": measured["relative_excess"].isnull().any(("reference", "length")),
    }
    condition = measured["decrease"] > margin * measured["decrease_error"]
    return measured.assign(
        extrapolates=("length", (np.array(lengths) > n_context).astype(float)),
        n_context=n_context,
        trained_loss=measured["loss"].isel(length=base, drop=True),
        longest_loss=measured["loss"].isel(length=-1, drop=True),
        holds=verdict(condition, measured["decrease"].isnull()),
        undefined=undefined_codes(reasons),
    )


class _Curves:
    """Errors of models and references at every length, gathered over parts of the prompts."""

    def __init__(
        self,
        chosen: xr.Dataset,
        forward: Forward,
        lengths: tuple[int, ...],
        base: int,
        *,
        references: bool,
    ) -> None:
        self._chosen, self._forward = chosen, forward
        self._refer = forward.references if references else _none
        self._lengths, self._base = lengths, base
        self._steps = range(chosen.sizes["step"])
        self._models: dict[tuple[int, int], Moments] = {}
        self._decrease: dict[int, Moments] = {}
        self._references: dict[tuple[str, int], Moments] = {}
        self._excess: dict[tuple[int, str, int], Moments] = {}

    def add(
        self,
        inputs: Float[np.ndarray, "batch pos d_model"],
        targets: Float[np.ndarray, "batch *response"],
    ) -> None:
        """Take in prompts of the longest length."""
        errors: dict[tuple[str, int], np.ndarray] = {}
        for number, length in enumerate(self._lengths):
            for name, predicted in self._refer(_cut(inputs, length)).items():
                errors[name, number] = squared_error(predicted, targets)
                self._references.setdefault((name, number), Moments()).add(errors[name, number])
        for step in self._steps:
            one, base = self._chosen.isel(step=[step]), np.array(0.0)
            for number, length in enumerate(self._lengths):
                (predicted,) = predict_steps(one, self._forward, _cut(inputs, length))
                own = squared_error(predicted, targets)
                self._models.setdefault((step, number), Moments()).add(own)
                for (name, where), error in errors.items():
                    if where == number:
                        with np.errstate(invalid="ignore"):
                            paired = own - error
                        self._excess.setdefault((step, name, number), Moments()).add(paired)
                base = own if number == self._base else base
                if number == len(self._lengths) - 1:
                    with np.errstate(invalid="ignore"):
                        self._decrease.setdefault(step, Moments()).add(base - own)

    def result(self) -> xr.Dataset:
        """Return means and standard errors, NaN where either is not finite."""
        names = list(dict.fromkeys(name for name, _ in self._references))
        numbers = range(len(self._lengths))
        models = [[self._models[step, number] for number in numbers] for step in self._steps]
        references = [[self._references[name, number] for number in numbers] for name in names]
        excess = [
            [[self._excess[step, name, number] for number in numbers] for name in names]
            for step in self._steps
        ]
        decrease = [self._decrease[step] for step in self._steps]
        sizes = {"step": len(self._steps), "length": len(numbers), "reference": len(names)}
        sizes["seed"] = self._chosen.sizes["seed"]
        data: dict[str, tuple[tuple[str, ...], np.ndarray]] = {}
        for name, error, dims, moments in (
            ("loss", "loss_error", ("step", "length", "seed"), models),
            ("reference_loss", "reference_error", ("reference", "length"), references),
            ("excess", "excess_error", ("step", "reference", "length", "seed"), excess),
            ("decrease", "decrease_error", ("step", "seed"), decrease),
        ):
            shape = [sizes[dim] for dim in dims]
            each = np.ravel(np.array(moments, dtype=object))
            mean = np.reshape(np.array([one.mean for one in each], dtype=float), shape)
            spread = np.reshape(np.array([one.error for one in each], dtype=float), shape)
            defined = np.isfinite(mean) & np.isfinite(spread)
            data[name] = (dims, np.where(defined, mean, np.nan))
            data[error] = (dims, np.where(defined, spread, np.nan))
        coords = {dim: self._chosen[dim] for dim in _MODEL} | {
            "reference": reference_axis(names),
            "length": ("length", np.array(self._lengths), _LENGTH.attrs),
        }
        result = xr.Dataset(data, coords=coords)
        result["relative_excess"] = quotient(result["excess"], result["reference_loss"])
        return result.transpose("seed", "step", "reference", "length")


def _none(inputs: np.ndarray) -> dict[str, np.ndarray]:
    del inputs
    return {}


def _cut(
    inputs: Float[np.ndarray, "batch pos d_model"], length: int
) -> Float[np.ndarray, "batch cut d_model"]:
    """Return prompts cut to their first `length` examples and the query."""
    return np.concatenate([inputs[:, :length], inputs[:, -1:]], 1)
