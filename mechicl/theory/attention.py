"""Attention in matrix form at the query, and softmax heads that imitate linear ones (he2025, 5.1).

Positions are rows: a context is L tokens `context` (..., L, D), the query one token `query` (...,
D), with D = d + 1 and the response last in he2025. Heads are KQ = KᵀQ, (..., H, D, D), key axis
first, and OV, (..., H, D, D), output axis first, as the paper orients them; leading axes of tokens
and heads broadcast. The query attends to the L tokens of the context, not to itself (2.2). What
comes out is what the heads add to the query's token, (..., D); its last entry is the prediction.

A prompt or head with a number that is not finite gives NaN; what does not fit in shape raises
`mechicl.errors.InputError`.
"""

import numpy as np
from jaxtyping import Float

from mechicl.errors import InputError
from mechicl.theory._arguments import Number, constant, leading, quiet, reals

Context = Float[np.ndarray, "*#batch L D"]
Token = Float[np.ndarray, "*#batch D"]
Circuits = Float[np.ndarray, "*#batch H D D"]
Paired = Float[np.ndarray, "*#batch 2*H D D"]


@quiet
def softmax_attention(context: Context, query: Token, kq: Circuits, ov: Circuits) -> Token:
    """Output of softmax heads at the query: Σ_h OV_h Zᵀ softmax(Z KQ_h z_q), rows of Z as tokens.

    Parameters
    ----------
    context, query
        Tokens, (..., L, D) and (..., D).
    kq, ov
        Circuits, each (..., H, D, D).

    Returns
    -------
    np.ndarray
        (..., D). NaN where a token or a head is not finite.

    Raises
    ------
    InputError
        What is not real numbers, or does not fit in shape.

    Notes
    -----
    Source: he2025 (2.2) at position L + 1; its last entry is (2.3).
    """
    context, query, kq, ov, finite = _layer(context, query, kq, ov)
    scores = _scores(context, query, kq)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights = weights / weights.sum(-1, keepdims=True)
    return _output(context, weights, ov, finite)


@quiet
def linear_attention(
    context: Context, query: Token, kq: Circuits, ov: Circuits, *, trained_length: Number
) -> Token:
    """Output of linear heads at the query: L₀⁻¹ Σ_h OV_h ZᵀZ KQ_h z_q, rows of Z as tokens.

    Parameters
    ----------
    context, query
        Tokens, (..., L, D) and (..., D); L need not be L₀.
    kq, ov
        Circuits, each (..., H, D, D).
    trained_length
        L₀, the length of the contexts that the model is trained on, a whole number from 1. It is a
        constant of the model, which is why the model does not generalise to other lengths.

    Returns
    -------
    np.ndarray
        (..., D). NaN where a token or a head is not finite.

    Raises
    ------
    InputError
        What is not real numbers, or does not fit in shape; L₀ out of range.

    Notes
    -----
    Source: he2025 (5.1), summed over the L tokens of the context; as printed the sum takes in the
    query too, whose response is not known.
    """
    length = constant("trained_length", trained_length, minimum=1, whole=True)
    context, query, kq, ov, finite = _layer(context, query, kq, ov)
    return _output(context, _scores(context, query, kq) / length, ov, finite)


@quiet
def centred_linear_attention(context: Context, query: Token, kq: Circuits, ov: Circuits) -> Token:
    """Limit as γ → 0 of the softmax heads that `softmax_from_linear` makes.

    Σ_h OV_h (ZᵀZ/L − z̄z̄ᵀ) KQ_h z_q, rows of Z as tokens and z̄ their mean: `linear_attention`
    at L₀ = L less a term that vanishes for tokens of mean 0. L is the length of the context shown,
    not a constant of the model.

    Parameters
    ----------
    context, query
        Tokens, (..., L, D) and (..., D).
    kq, ov
        Circuits of the linear heads, each (..., H, D, D).

    Returns
    -------
    np.ndarray
        (..., D), 0 for L = 1. NaN where a token or a head is not finite.

    Raises
    ------
    InputError
        What is not real numbers, or does not fit in shape.

    Notes
    -----
    Source: he2025 (5.2).
    """
    context, query, kq, ov, finite = _layer(context, query, kq, ov)
    scores = _scores(context, query, kq)
    weights = (scores - scores.mean(-1, keepdims=True)) / context.shape[-2]
    return _output(context, weights, ov, finite)


@quiet
def softmax_from_linear(kq: Circuits, ov: Circuits, *, gamma: Number) -> tuple[Paired, Paired]:
    """Turn H linear heads into 2H softmax heads that imitate them for small γ.

    Head (KQ, OV) becomes (γKQ, OV/2γ) and (−γKQ, −OV/2γ), next to each other. Their sum differs
    from `centred_linear_attention` by O(γ²): the terms of even order cancel in a pair.

    Parameters
    ----------
    kq, ov
        Circuits of the linear heads, each (..., H, D, D).
    gamma
        γ, above 0.

    Returns
    -------
    kq, ov
        Circuits of the softmax heads, each (..., 2H, D, D).

    Raises
    ------
    InputError
        γ out of range, or circuits that do not fit in shape.

    Notes
    -----
    Source: he2025, display before (5.2).
    """
    scale = constant("gamma", gamma, minimum=0)
    if scale == 0:
        raise InputError("gamma = 0; accepted: a finite number above 0")
    kq, ov = _circuits(kq, ov)
    return _paired(scale * kq), _paired(ov / (2 * scale))


def _paired(circuits: np.ndarray) -> np.ndarray:
    pairs = np.stack([circuits, -circuits], -3)
    return pairs.reshape(*circuits.shape[:-3], -1, *circuits.shape[-2:])


def _scores(context: np.ndarray, query: np.ndarray, kq: np.ndarray) -> np.ndarray:
    """Scores of every head and key, (..., H, L)."""
    keys = np.einsum("...hij,...j->...hi", kq, query)
    return np.einsum("...li,...hi->...hl", context, keys)


def _output(
    context: np.ndarray, weights: np.ndarray, ov: np.ndarray, finite: np.ndarray
) -> np.ndarray:
    attended = np.einsum("...hl,...li->...hi", weights, context)
    return np.where(finite[..., None], np.einsum("...hoi,...hi->...o", ov, attended), np.nan)


def _circuits(kq: object, ov: object) -> tuple[np.ndarray, np.ndarray]:
    kq, ov = reals("kq", kq), reals("ov", ov)
    own = kq.shape[-3:]
    if kq.ndim < 3 or own != ov.shape[-3:] or own[-1] != own[-2] or 0 in own:
        raise InputError(
            f"kq has shape {kq.shape}, ov {ov.shape}; accepted: (..., H, D, D) for both, with H "
            "and D at least 1"
        )
    leading({"kq": kq, "ov": ov}, [kq.shape[:-3], ov.shape[:-3]])
    return kq, ov


def _layer(context: object, query: object, kq: object, ov: object) -> tuple[np.ndarray, ...]:
    """Return checked arrays, and where all of them are finite."""
    kq, ov = _circuits(kq, ov)
    context, query = reals("context", context), reals("query", query)
    width = kq.shape[-1:]
    fits = context.shape[-1:] == query.shape[-1:] == width
    if context.ndim < 2 or 0 in context.shape[-2:] or not fits:
        raise InputError(
            f"context has shape {context.shape}, query {query.shape}; accepted: (..., L, D) and "
            f"(..., D) with L at least 1 and D = {width[0]}, as the heads have it"
        )
    parts = [(context, 2), (query, 1), (kq, 3), (ov, 3)]
    leading(
        {"context": context, "query": query, "kq": kq, "ov": ov},
        [array.shape[: array.ndim - axes] for array, axes in parts],
    )
    finite = np.asarray(True)
    for array, axes in parts:
        finite = finite & np.isfinite(array).all(tuple(range(-axes, 0)))
    return context, query, kq, ov, np.asarray(finite)
