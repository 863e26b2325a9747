"""Checks of yuksel2026 on the gradient flow of its regression task (section 3)."""

from typing import TYPE_CHECKING, Annotated

import numpy as np
import pydantic
from jaxtyping import Float

from mechicl.studies.checks.base import Measurement, Outcome, check, curves
from mechicl.theory import factorization_flow as flow
from mechicl.theory import flow_conditions

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mechicl.run import Run

_Several = Annotated[int, pydantic.Field(ge=2)]
_ROUNDING = 1e-9
_APART = 0.1
_LONGEST = 2000.0


@check
def factorization_stages(
    runs: "Mapping[str, Run]",
    *,
    n_heads: _Several = 3,
    n_positions: Annotated[int, pydantic.Field(ge=4)] = 10,
    importance: Annotated[float, pydantic.Field(gt=1)] = 1.7,
    n_starts: Annotated[int, pydantic.Field(ge=1)] = 20,
    deviations: tuple[float, float] = (1e-4, 1e-6),
    seed: Annotated[int, pydantic.Field(ge=0)] = 0,
) -> Outcome:
    """Measure what Theorems 1 to 4 say of the flow, in coordinates of orthogonal features.

    - `Theorem 1: order lost`: fraction of random starts under (5) along which it fails at a time.
    - `Theorem 1: another feature`: fraction of them that end with another entry than s_1 largest.
    - `Theorem 1: another feature, without (5)`: of arbitrary starts; the negative control.
    - `Theorem 2: parting time, farther start over nearer`: times until heads are 0.1 apart, from
      starts that are the first and the second of `deviations` from symmetry.
    - `Eq. 8: distance from the full flow`: largest difference of losses.
    - `Theorem 4: largest rise`: of the two-scale potential, over its start.
    - `loss: largest rise`: of the full flow, over its start.
    """
    del runs
    rng = np.random.default_rng(seed)
    features = np.diag(importance ** np.arange(n_heads - 1, -1, -1.0))
    times = np.linspace(0, 60.0, 61)
    kept, first = _ordered_starts(features, n_positions, times, n_starts, rng)
    control = _arbitrary_starts(features, n_positions, times, n_starts, rng)
    parted = [_parting_time(features, n_positions, size, seed) for size in deviations]
    full, distance = _cooperation(features, n_positions)
    two_scale = _two_scale(features, n_positions)
    measured = {
        "Theorem 1: order lost": 1 - kept,
        "Theorem 1: another feature": 1 - first,
        "Theorem 1: another feature, without (5)": 1 - control,
        "Theorem 2: parting time, farther start over nearer": parted[0] / parted[1],
        "Eq. 8: distance from the full flow": distance,
        "Theorem 4: largest rise": _largest_rise(two_scale.loss),
        "loss: largest rise": _largest_rise(full.loss),
    }
    shown = curves(
        {"full flow": full.loss, "two scales": two_scale.loss},
        full.time,
        title="one head leaves for the second position",
        x_label="time",
        y_label="population loss",
    )
    return Outcome(tuple(Measurement(name, float(v)) for name, v in measured.items()), shown)


def _ordered_starts(
    features: Float[np.ndarray, "block block"],
    n_positions: int,
    times: Float[np.ndarray, " time"],
    n_starts: int,
    rng: np.random.Generator,
) -> tuple[float, float]:
    """Return what share of coupled flows from starts under (5) keep it, and end at position 1."""
    kept, first = [], []
    for _ in range(n_starts):
        s = -np.sort(-rng.dirichlet(np.ones(n_positions)))
        value = -np.sort(-rng.exponential(size=len(features))) / np.diag(features)
        found = flow.coupled_flow(features, value, s, n_heads=len(features), times=times)
        margins = flow_conditions.order_margin(features, found.values[:, 0], found.s[:, 0])
        kept.append(margins.min() > -_ROUNDING)
        first.append(found.s[-1, 0].argmax() == 0)
    return float(np.mean(kept)), float(np.mean(first))


def _arbitrary_starts(
    features: Float[np.ndarray, "block block"],
    n_positions: int,
    times: Float[np.ndarray, " time"],
    n_starts: int,
    rng: np.random.Generator,
) -> float:
    """Return what share of coupled flows from arbitrary starts end at position 1."""
    first = []
    for _ in range(n_starts):
        s, value = rng.dirichlet(np.ones(n_positions)), rng.normal(size=len(features))
        found = flow.coupled_flow(features, value, s, n_heads=len(features), times=times)
        first.append(found.s[-1, 0].argmax() == 0)
    return float(np.mean(first))


def _parting_time(
    features: Float[np.ndarray, "block block"], n_positions: int, size: float, seed: int
) -> float:
    """Return when heads that start `size` from symmetry are 0.1 apart; NaN: not by the end."""
    n_heads, rng = len(features), np.random.default_rng(seed)
    values = size * rng.normal(size=(n_heads, n_heads))
    s = np.full((n_heads, n_positions), 1 / n_positions)
    s = s * np.exp(size * rng.normal(size=s.shape))
    times = np.linspace(0, _LONGEST, 2001)
    found = flow.free_flow(features, values, s / s.sum(1, keepdims=True), times=times)
    apart = flow_conditions.head_deviation(found.values, found.s) > _APART
    return float(times[apart.argmax()]) if apart.any() else np.nan


def _free_head(n_positions: int) -> Float[np.ndarray, " T"]:
    """Return where a head starts that leaves the first position for the second (CHECKED 3.3)."""
    s = np.full(n_positions, 0.008 / (n_positions - 3))
    s[:3] = 0.98, 0.008, 0.004
    return s


def _cooperation(
    features: Float[np.ndarray, "block block"], n_positions: int
) -> tuple[flow.Flow, float]:
    """Return the full flow of one free head beside settled ones, and how far Eq. 8 is from it."""
    n_heads, free = len(features), _free_head(n_positions)
    value, times = features[0] / n_heads, np.linspace(0, 100.0, 201)
    settled = np.eye(1, n_positions)[0]
    full = flow.free_flow(
        features,
        np.tile(value, (n_heads, 1)),
        np.stack([*[settled] * (n_heads - 1), free]),
        times=times,
    )
    own = flow.cooperative_flow(features, value, value, free, n_heads=n_heads, times=times)
    return full, float(abs(full.loss - own.loss).max())


def _two_scale(features: Float[np.ndarray, "block block"], n_positions: int) -> flow.Flow:
    """Return the two-scale flow from the same start."""
    n_heads, times = len(features), np.linspace(0, 100.0, 201)
    free = _free_head(n_positions)
    return flow.two_scale_flow(features, features[0] / n_heads, free, n_heads=n_heads, times=times)


def _largest_rise(curve: Float[np.ndarray, " time"]) -> float:
    return float(np.diff(curve).max() / curve[0])
