"""Which head serves which of N tasks: section 5.4 of he2025."""

import numpy as np
import xarray as xr

from mechicl.analyses.heads import (
    ATTENTION,
    NONFINITE,
    Threshold,
    kq_circuit,
    nonfinite,
    ov_circuit,
    quotient,
    sign,
)
from mechicl.analyses.probe import probe, undefined_codes, verdict
from mechicl.schema import Var

_HEAD = ("seed", "step", "head")
_TASK = ("seed", "step", "response")
_PAIR = ("seed", "step", "head", "response")
_NO_TASK = "head_without_task"
_REGIMES = {
    0: "task_not_served",
    1: "one_head_per_task",
    2: "one_task_per_head",
    3: "superposition",
}


def several_responses(trajectory: xr.Dataset) -> str | None:
    """Apply to one layer over d covariates and the N responses that the index sets are of."""
    layers = trajectory.sizes.get("layer", 1)
    if layers != 1:
        return f"it reads one-layer models, and this one has {layers} layers"
    d, n = int(trajectory["d"]), trajectory["supports"].sizes["response"]
    width = trajectory.sizes["d_model"]
    if width != d + n:
        return f"it reads tokens of d + N = {d} + {n} entries, and here d_model is {width}"
    return None


@probe(
    needs=ATTENTION
    | {"supports": Var(("response", "covariate"), "1", "1 where a task reads a covariate", 0, 1)},
    gives={
        "kq_diagonal": Var((*_HEAD, "covariate"), "1", "diagonal of KQ over covariates"),
        "mu": Var(_PAIR, "1", "OV scale of the head for the task"),
        "omega": Var(_PAIR, "1", "KQ scale of the head over the covariates of the task"),
        "strength": Var(_PAIR, "1", "|omega mu|, the head's part of the task's step size", 0),
        "share": Var(_PAIR, "1", "strength of the head over that of all heads", 0, 1),
        "serves": Var(_PAIR, "1", "1 where the head serves the task", 0, 1),
        "n_tasks": Var(_HEAD, "1", "number of tasks that the head serves", 0),
        "n_positive": Var(_TASK, "1", "number of heads of positive omega that serve the task", 0),
        "n_negative": Var(_TASK, "1", "number of heads of negative omega that serve the task", 0),
        "superposition": Var(
            ("seed", "step"), "1", "fraction of serving heads that serve two tasks or more", 0, 1
        ),
        "regime": Var(("seed", "step"), "1", "how tasks share heads", 0, 3, flags=_REGIMES),
        "off_support": Var(
            _HEAD, "1", "fraction of KQ's diagonal outside the covariates of the tasks served", 0, 1
        ),
    },
    statement="every task has a head that serves it",
    undefined=(NONFINITE, "task_without_strength", _NO_TASK),
    headline=("regime", "superposition", "n_tasks"),
    applies=several_responses,
    references=("he2025 section 5.4, Definitions 5.1 and 5.2, Figs 18 and 19",),
)
def task_allocation(trajectory: xr.Dataset, *, serve_threshold: Threshold = 0.2) -> xr.Dataset:
    """Tell which head serves which task, and whether heads are in superposition.

    Task n reads the covariates in 𝒮_n and has its response in entry d + n of a token. With KQ₁₁
    diagonal a head adds, to first order, μ_n·ω_n to the step size of task n on average over 𝒮_n.
    All is float64 and without units.

    - `kq_diagonal` = KQ_ii, i ≤ d, (seed, step, head, covariate).
    - `mu` = OV[d+n, d+n], `omega` = mean of KQ_ii over i ∈ 𝒮_n, `strength` = |ω_n μ_n|,
      `share` = `strength` over its sum over heads, in [0, 1]: (seed, step, head, response).
    - `serves` (seed, step, head, response): 1 where ω_n μ_n > 0 and it is at least
      `serve_threshold` times the largest `strength` of a head in that task; else 0.
    - `n_tasks` (seed, step, head) = Σ_n serves. `n_positive`, `n_negative` (seed, step, response):
      how many heads serve the task with ω_n > 0, with ω_n < 0. A head may be positive for one task
      and negative for another.
    - `superposition` (seed, step) = #{h: n_tasks ≥ 2} / #{h: n_tasks ≥ 1}, in [0, 1]: 0 where every
      head that serves has a task of its own, 1 where all are shared. With one task it is 0.
    - `regime` (seed, step): a task without a head; else superposition, if a head serves two tasks
      or more; else one head per task, if every task has exactly one; else one task per head, where
      some tasks have several heads, as the pairs of H ≥ 2N.
    - `off_support` (seed, step, head) = Σ_{i∉U} |KQ_ii| / Σ_i |KQ_ii| with U the union of 𝒮_n over
      the tasks that the head serves, in [0, 1]; 0 is ideal.
    - `holds`: every task has a head that serves it.

    Where index sets overlap, a head of one task has ω_n ≠ 0 for the other too, of the overlap; its
    μ_n is what tells them apart, hence the product. Conversely a head that writes to a task of
    which it reads nothing has μ_n ≠ 0 and serves it not.

    When it misleads: it reads diagonals of KQ₁₁ and of OV's response block alone, so what a task
    takes from the responses of another is not seen, nor what two signs within 𝒮_n cancel. A
    threshold decides: see `share`. Heads that serve may be outweighed by others of the wrong sign.

    Undefined: weights that are not finite; a task in which every head has strength 0 (`share`); a
    head that serves no task (`off_support` of that head, and `superposition` where all are so).
    `holds` stands in the last two.

    Parameters
    ----------
    serve_threshold
        Least part of the strongest head's strength. A pair of heads has 1; a dummy, both scales at
        most 0.2 of the largest, has at most 0.04; a head of one task, of which half the covariates
        are the other's too, has half of its noise in μ.

    References
    ----------
    he2025, section 5.4, Definitions 5.1 and 5.2, Figs 18 and 19.
    """
    broken = nonfinite(trajectory)
    diagonal, mu = _scales(trajectory.isel(layer=0, drop=True))
    diagonal, mu = diagonal.where(~broken), mu.where(~broken)
    member = (
        trajectory["supports"].astype(float).drop_vars(["response", "covariate"], errors="ignore")
    )
    omega = (diagonal * member).sum("covariate", skipna=False) / member.sum("covariate")
    product = omega * mu
    strength = abs(product)
    strongest = strength.max("head")
    serves = (product > 0) & (product >= serve_threshold * strongest)
    n_tasks = serves.sum("response")
    idle = n_tasks == 0
    n_heads = serves.sum("head")
    served = (n_heads > 0).all("response")
    shared = (n_tasks > 1).any("head")
    regime = xr.where(shared, 3.0, xr.where((n_heads == 1).all("response"), 1.0, 2.0))
    # A covariate of several served tasks is inside once.
    inside = (serves & (member > 0)).any("response")
    outside = abs(diagonal).where(~inside, 0.0).sum("covariate", skipna=False)
    off_support = quotient(outside, abs(diagonal).sum("covariate", skipna=False))
    reasons = {
        NONFINITE: broken,
        "task_without_strength": (strongest == 0).any("response"),
        _NO_TASK: idle.any("head"),
    }
    counts = {
        "serves": serves,
        "n_tasks": n_tasks,
        "n_positive": (serves & (sign(omega) == 1)).sum("head"),
        "n_negative": (serves & (sign(omega) == -1)).sum("head"),
    }
    return xr.Dataset(
        {
            "kq_diagonal": diagonal,
            "mu": mu,
            "omega": omega,
            "strength": strength,
            "share": quotient(strength, strength.sum("head", skipna=False)).clip(max=1.0),
            **{name: count.astype(float).where(~broken) for name, count in counts.items()},
            "superposition": quotient((n_tasks > 1).sum("head"), (~idle).sum("head")),
            "regime": regime.where(served, 0.0).where(~broken),
            "off_support": off_support.where(~idle).clip(max=1.0),
            "holds": verdict(served, broken),
            "undefined": undefined_codes(reasons),
        }
    )


def _scales(layer: xr.Dataset) -> tuple[xr.DataArray, xr.DataArray]:
    """Return the diagonal of KQ₁₁, (..., head, covariate), and of OV₂₂, (..., head, response)."""
    d, width = int(layer["d"]), layer.sizes["d_model"]
    covariate = xr.DataArray(np.arange(d), dims="covariate")
    response = xr.DataArray(np.arange(d, width), dims="response")
    kq = kq_circuit(layer).isel(d_key=covariate, d_query=covariate)
    return kq, ov_circuit(layer).isel(d_out=response, d_in=response)
