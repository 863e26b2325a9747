"""How far the predictions of a model are from those of the references, on the same prompts."""

from typing import Annotated

import numpy as np
import pydantic
import xarray as xr
from jaxtyping import Float

from mechicl.analyses.evaluation import (
    JointMoments,
    Moments,
    predict_steps,
    reference_axis,
    shares,
    spread_steps,
)
from mechicl.analyses.heads import NONFINITE, REGRESSION, WEIGHTS, nonfinite
from mechicl.analyses.probe import Forward, probe, undefined_codes
from mechicl.errors import NothingToAnalyseError
from mechicl.schema import Var

_MODEL = ("seed", "step")
_AGAINST = (*_MODEL, "reference")


@probe(
    needs=WEIGHTS | {"d": REGRESSION["d"]},
    gives={
        "reference": Var(("reference",), "1", "reference predictor"),
        "distance": Var(_AGAINST, "1", "relative rms distance of predictions from reference", 0),
        "distance_error": Var(_AGAINST, "1", "standard error of distance", 0),
        "scale": Var(_AGAINST, "1", "factor on the model that brings it nearest to reference"),
        "scaled_distance": Var(_AGAINST, "1", "distance after that factor", 0, 1),
        "scaled_distance_error": Var(_AGAINST, "1", "standard error of scaled_distance", 0),
        "nearest": Var(
            _MODEL,
            "1",
            "the reference at the least distance, by its number",
            0,
            label_of="reference",
        ),
        "nearest_distance": Var(_MODEL, "1", "distance from that reference", 0),
        "seed_distance": Var(
            ("seed", "seed_other"), "1", "relative rms distance between seeds, last step", 0, 2
        ),
    },
    undefined=(NONFINITE, "nonfinite_predictions", "zero_predictions"),
    headline=("nearest_distance",),
    references=("he2025 Observation 3, Theorem 4.2 (i)",),
    forward=True,
)
def predictor_distance(
    trajectory: xr.Dataset,
    forward: Forward,
    *,
    n_prompts: Annotated[int, pydantic.Field(ge=2)] = 16384,
    n_steps: Annotated[int, pydantic.Field(ge=1)] = 30,
    n_context: Annotated[int, pydantic.Field(ge=1)] | None = None,
    evaluation_seed: Annotated[int, pydantic.Field(ge=0)] = 0,
) -> xr.Dataset:
    """Measure how far the predictions ŷ are from those of every reference ŷ°, prompt by prompt.

    Equal losses do not make equal predictors; this compares the predictions themselves. ⟨·⟩ is the
    mean over a fixed evaluation set, and over responses where there are several.

    - `distance` (seed, step, reference) = √(⟨(ŷ − ŷ°)²⟩ / ⟨ŷ°²⟩), from 0, the same predictor; a
      model that predicts 0 has 1. `distance_error` is its Monte-Carlo standard error, to first
      order (delta method).
    - `scale` = c = ⟨ŷŷ°⟩ / ⟨ŷ²⟩, of either sign; `scaled_distance` = √(⟨(cŷ − ŷ°)²⟩ / ⟨ŷ°²⟩), the
      least over all factors on ŷ, from 0 to 1: the distance but for the step size.
      `scaled_distance_error` is its standard error.
    - `nearest` (seed, step): the value on the axis `reference` of the least `distance`, which is
      `nearest_distance`. `reference` is a number that `mechicl.schema.flag_names` reads.
    - `seed_distance` (seed, seed_other) at the last step = √(⟨(ŷ_s − ŷ_t)²⟩ / (½⟨ŷ_s²⟩ + ½⟨ŷ_t²⟩)),
      from 0, the same predictor, to 2; NaN with a seed that is not finite or predicts 0.

    None has units. A reference that predicts 0 on every prompt, as debiased descent does at L = 1,
    has no relative distance, and is left out of the axis.

    When it misleads: references are near each other too, and nearer the longer the context, so
    the nearest one need not be what was learnt: compare with how far it is from the others. A
    converged softmax pair stands off `debiased_gd` for its finite γ, by a distance that falls as γ²
    (Theorem 4.2 (i)). `scaled_distance` sees no sign: a model that predicts −ŷ° has 0, at a
    negative `scale`. All models share the prompts, so differences along a run are surer than the
    standard errors say.

    Undefined: weights that are not finite; predictions, of the model or a reference, that are not
    finite; `scale` and `scaled_distance` of a model that predicts 0 everywhere.

    Parameters
    ----------
    n_prompts
        Size of the evaluation set.
    n_steps
        At most so many of the saved steps, spread evenly in log(1 + steps since the first), first
        and last in; 1 takes the last.
    n_context
        Examples in a context; None takes the trained length. Fitted references keep the step of the
        trained length.
    evaluation_seed
        Seed of the evaluation set.

    References
    ----------
    he2025, Observation 3 (multi-head attention predicts as descent does), Theorem 4.2 (i).
    """
    chosen = forward.load(trajectory.isel(step=spread_steps(trajectory["step"].values, n_steps)))
    steps = range(chosen.sizes["step"])
    joint: dict[str, list[JointMoments]] = {}
    between, norms = Moments(), Moments()
    for size, part in shares(n_prompts):
        inputs, _ = forward.prompts(size, evaluation_seed, part=part, n_context=n_context)
        references = {
            name: np.asarray(values, dtype=float)
            for name, values in forward.references(inputs).items()
        }
        predicted = np.array(0.0)
        for step, predicted in enumerate(predict_steps(chosen, forward, inputs)):
            for name, reference in references.items():
                moments = joint.setdefault(name, [JointMoments() for _ in steps])
                moments[step].add(_products(predicted, reference))
        with np.errstate(over="ignore", invalid="ignore"):
            between.add(np.stack([_over_responses((predicted - one) ** 2) for one in predicted]))
            norms.add(_over_responses(predicted**2))
    kept = [name for name, moments in joint.items() if moments[0].mean[..., 3].any()]
    if not kept:
        raise NothingToAnalyseError("no reference of the task predicts anything but 0 here")
    measured = {
        name: (_AGAINST, np.stack([np.stack(row, 1) for row in rows], -1))
        for name, rows in _tables([joint[name] for name in kept]).items()
    }
    result = xr.Dataset(
        measured | {"seed_distance": (("seed", "seed_other"), _between(between, norms))},
        coords={dim: chosen[dim] for dim in _MODEL}
        | {
            "reference": reference_axis(kept),
            "seed_other": ("seed_other", chosen["seed"].values, chosen["seed"].attrs),
        },
    )
    distance = result["distance"]
    none = distance.isnull().all("reference")
    nearest = distance.fillna(np.inf).argmin("reference").where(~none)
    return result.assign(
        nearest=nearest,
        nearest_distance=distance.min("reference"),
        undefined=undefined_codes(
            {
                NONFINITE: nonfinite(chosen),
                "nonfinite_predictions": distance.isnull().any("reference"),
                "zero_predictions": result["scale"].isnull().any("reference"),
            }
        ),
    )


def _over_responses(
    values: Float[np.ndarray, "seed batch *response"],
) -> Float[np.ndarray, "seed batch"]:
    """Average over responses, where there are several."""
    return values.mean(-1) if values.ndim == 3 else values


def _products(
    predicted: Float[np.ndarray, "seed batch *response"],
    reference: Float[np.ndarray, "batch *response"],
) -> Float[np.ndarray, "seed 4 batch"]:
    """Return (ŷ − ŷ°)², ŷ², ŷŷ° and ŷ°² of each prompt, averaged over responses."""
    with np.errstate(over="ignore", invalid="ignore"):
        square = np.broadcast_to(reference**2, predicted.shape)
        terms = (predicted - reference) ** 2, predicted**2, predicted * reference, square
        return np.stack([_over_responses(term) for term in terms], 1)


def _tables(references: list[list[JointMoments]]) -> dict[str, list[list[np.ndarray]]]:
    """Return each measurement as rows [reference][step] of (seed,)."""
    tables: dict[str, list[list[np.ndarray]]] = {}
    for moments in references:
        row: dict[str, list[np.ndarray]] = {}
        for one in moments:
            for name, value in _measure(one).items():
                row.setdefault(name, []).append(value)
        for name, values in row.items():
            tables.setdefault(name, []).append(values)
    return tables


def _measure(moments: JointMoments) -> dict[str, Float[np.ndarray, " seed"]]:
    """Return distance, scale and scaled distance from one reference, with errors."""
    _, own, cross, _ = np.moveaxis(moments.mean, -1, 0)
    none, one = np.zeros_like(own), np.ones_like(own)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        scale = np.where(own > 0, cross / own, np.nan)
        distance, error = _relative(moments, np.stack([one, none, none, none], -1))
        # The numerator is stationary in the best factor, which so counts as fixed.
        scaled, scaled_error = _relative(moments, np.stack([none, scale**2, -2 * scale, one], -1))
    return {
        "distance": distance,
        "distance_error": error,
        "scale": np.where(np.isfinite(scaled), scale, np.nan),
        "scaled_distance": np.minimum(scaled, 1.0),
        "scaled_distance_error": scaled_error,
    }


def _relative(
    moments: JointMoments, weights: Float[np.ndarray, "seed 4"]
) -> tuple[Float[np.ndarray, " seed"], Float[np.ndarray, " seed"]]:
    """Return the root of `weights` · moments / ⟨ŷ°²⟩ and its error, by the delta method.

    NaN where either is not finite.
    """
    norm = moments.mean[..., 3]
    ratio = np.maximum((weights * moments.mean).sum(-1) / norm, 0.0)
    gradient = weights / norm[..., None]
    gradient[..., 3] -= ratio / norm
    distance = np.sqrt(ratio)
    # A distance of exactly 0 is one on every prompt.
    error = np.where(distance == 0, 0.0, moments.error(gradient) / (2 * distance))
    defined = np.isfinite(distance) & np.isfinite(error)
    return np.where(defined, distance, np.nan), np.where(defined, error, np.nan)


def _between(between: Moments, norms: Moments) -> Float[np.ndarray, "seed seed_other"]:
    """Return the relative distance between any two seeds."""
    norm = (norms.mean[:, None] + norms.mean[None, :]) / 2
    dead = (norms.mean == 0)[:, None] | (norms.mean == 0)[None, :]
    with np.errstate(invalid="ignore", divide="ignore"):
        relative = np.sqrt(between.mean / norm)
    return np.where(np.isfinite(relative) & ~dead, np.minimum(relative, 2.0), np.nan)
