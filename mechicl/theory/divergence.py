"""Kullback-Leibler divergence between predictors of a next token, in nat.

Direction: `kl(reference, model)` is KL(reference ‖ model), what the model loses on tokens that the
reference draws. It is not symmetric. A row of a predictor is a law over the last axis, given as
logarithms or as probabilities; what does not fit raises `mechicl.errors.InputError`.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int
from scipy.special import rel_entr

from mechicl.errors import InputError
from mechicl.theory._arguments import leading, quiet, reals

Law = Float[np.ndarray, "*#batch d"]
"""One law over d tokens for every entry of a batch."""

_ROUNDINGS = 16
"""A law sums to 1 within this many eps × d, eps being that of the type it was given in."""


class Average(NamedTuple):
    """Mean of what is finite, and how many values it leaves out and why."""

    mean: Float[np.ndarray, "*kept"]
    n_infinite: Int[np.ndarray, "*kept"]
    n_undefined: Int[np.ndarray, "*kept"]


@quiet
def kl(log_p: Law, log_q: Law) -> Float[np.ndarray, "*#batch"]:
    """Divergence of log-probabilities, KL(p ‖ q) = Σ_y p(y) (log p(y) − log q(y)).

    Parameters
    ----------
    log_p, log_q
        Logarithms of the reference and of the model, (..., d), leading axes broadcast; −inf is a
        token without mass.

    Returns
    -------
    np.ndarray
        (...), nat, from 0, and 0 for p = q. A token that p does not draw adds 0; one that p draws
        and q does not makes it inf. NaN where a law holds NaN. What rounding takes below 0 is 0.

    Raises
    ------
    InputError
        Shapes that do not fit, or a row that does not sum to 1 within 16 eps·d, with eps that of
        the type given: its divergence would be off by as much, and might be negative.

    Notes
    -----
    Source: yuksel2026 Fig. 3 and 5 (right), averaged over prompts and positions.
    """
    log_p, log_q = _laws(log_p=log_p, log_q=log_q, logarithms=True)
    terms = np.exp(log_p) * (log_p - log_q)
    terms = np.where(np.isneginf(log_q), np.inf, terms)
    terms = np.where(np.isneginf(log_p), 0.0, terms)
    return _total(terms, log_p, log_q)


@quiet
def kl_of_probabilities(p: Law, q: Law) -> Float[np.ndarray, "*#batch"]:
    """Divergence of probabilities, KL(p ‖ q) = Σ_y p(y) log(p(y) / q(y)).

    Parameters
    ----------
    p, q
        The reference and the model, (..., d), leading axes broadcast.

    Returns
    -------
    np.ndarray
        (...), nat, from 0; 0, inf and NaN as in `kl`.

    Raises
    ------
    InputError
        A negative probability; shapes and sums as in `kl`.
    """
    p, q = _laws(p=p, q=q, logarithms=False)
    return _total(rel_entr(p, q), p, q)


@quiet
def finite_mean(
    values: Float[np.ndarray, "*#batch"], axis: int | tuple[int, ...] | None = None
) -> Average:
    """Average what is finite, and count what is not.

    Parameters
    ----------
    values
        (...), such as divergences of many prompts and positions.
    axis
        Axes to average over; None is all.

    Returns
    -------
    Average
        `mean` of the finite values, NaN where there is none; `n_infinite` and `n_undefined`, how
        many are infinite and NaN. Each has the axes that are left.

    Raises
    ------
    InputError
        What is not real numbers, or axes that `values` has not.
    """
    numbers = reals("values", values)
    finite = np.isfinite(numbers)
    try:
        count = np.asarray(finite.sum(axis))
    except (np.exceptions.AxisError, ValueError):
        raise InputError(
            f"axis = {axis!r} for values of shape {numbers.shape}; accepted: axes that it has, "
            "each once, or None for all"
        ) from None
    mean = np.where(finite, numbers, 0.0).sum(axis) / count
    return Average(
        np.asarray(mean),
        np.asarray(np.isinf(numbers).sum(axis)),
        np.asarray(np.isnan(numbers).sum(axis)),
    )


def _total(terms: np.ndarray, p: np.ndarray, q: np.ndarray) -> np.ndarray:
    # Normalised laws are never below −2 · 16 eps·d: what is negative here is rounding.
    total = np.maximum(terms.sum(-1), 0.0)
    return np.where(np.isnan(p).any(-1) | np.isnan(q).any(-1), np.nan, total)


def _laws(*, logarithms: bool, **given: object) -> list[np.ndarray]:
    """Return arrays (..., d) that hold laws, refusing rows that are none."""
    found = []
    for name, value in given.items():
        array = reals(name, value, minimum=-np.inf if logarithms else 0.0)
        if array.ndim == 0 or array.shape[-1] == 0:
            raise InputError(
                f"{name} has shape {array.shape}; accepted: (..., d) with d at least 1"
            )
        kind = np.asarray(value).dtype
        eps = np.finfo(kind if kind.kind == "f" else float).eps
        allowed = _ROUNDINGS * float(eps) * array.shape[-1]
        sums = (np.exp(array) if logarithms else array).sum(-1)
        off = np.abs(sums - 1)
        if (off > allowed).any():
            raise InputError(
                f"{name} has a row that sums to {sums.flat[np.nanargmax(off)]:.17g}; accepted: "
                f"rows that sum to 1 within {allowed:.1e}; normalise it, in float64"
            )
        found.append(array)
    if len({array.shape[-1] for array in found}) > 1:
        shapes = ", ".join(
            f"{name} has shape {array.shape}" for name, array in zip(given, found, strict=True)
        )
        raise InputError(f"{shapes}; accepted: one number of tokens (last axis)")
    batch = leading(dict(zip(given, found, strict=True)), [array.shape[:-1] for array in found])
    return [np.broadcast_to(array, (*batch, array.shape[-1])) for array in found]
