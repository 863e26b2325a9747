"""What Theorems 1, 2 and 4 of yuksel2026 ask of a point of the flow, and how far heads are apart.

Conditions are margins: they hold where these are at least 0, or above it. Shapes and conventions
are those of `mechicl.theory.factorization_flow`.
"""

import numpy as np
from jaxtyping import Float

from mechicl.errors import InputError
from mechicl.theory._arguments import finite, quiet, reals

Features = Float[np.ndarray, "block *v"]


@quiet
def order_margin(
    features: Features,
    value: Float[np.ndarray, "*point"],
    s: Float[np.ndarray, "*time T"],
    *,
    top_only: bool = False,
) -> Float[np.ndarray, "*time"]:
    """By how much heads that start alike satisfy the ordering condition of Theorem 1.

    The condition is s_1 ≥ … ≥ s_h ≥ s_i for all i > h, and ⟨A*_1, V⟩ ≥ … ≥ ⟨A*_h, V⟩ ≥ 0. For
    features that are orthogonal the coupled flow keeps it. `top_only` is the weakest form that is
    kept, and enough: s_1 ≥ s_i and ⟨A*_1, V⟩ ≥ max(⟨A*_i, V⟩, 0) for all i. For the two-scale flow
    it is the alignment that Theorem 4 asks of the free head, with the first feature and the first
    position left out of what is passed.

    Parameters
    ----------
    features
        A*, (block, ...), from one block on.
    value
        V, (*time, ...).
    s
        (*time, T).
    top_only
        Whether the first feature and the first position alone are compared with the others.

    Returns
    -------
    np.ndarray
        (*time): the least of the differences that the condition wants to be at least 0. NaN where
        a number is.

    Raises
    ------
    InputError
        Shapes that do not fit.

    Notes
    -----
    Source: yuksel2026 (5), reconstructed: proved for orthogonal features, and false for others.
    """
    array, overlap, attention = _points(features, value, s)
    h = len(array)
    if top_only:
        in_values = [overlap[..., :1] - overlap[..., 1:], overlap[..., :1]]
        in_s = [attention[..., :1] - attention[..., 1:]]
    else:
        in_values = [overlap[..., :-1] - overlap[..., 1:], overlap[..., -1:]]
        in_s = [
            attention[..., : h - 1] - attention[..., 1:h],
            attention[..., h - 1 : h] - attention[..., h:],
        ]
    differences = np.concatenate([*in_values, *in_s], -1)
    return np.asarray(differences.min(-1))


@quiet
def escape_margin(
    features: Features,
    free_value: Float[np.ndarray, "*point"],
    free_s: Float[np.ndarray, "*time T"],
) -> Float[np.ndarray, "*time"]:
    """By how much a free head is below the saddle where all heads have the first feature.

    Σ_{j≥2} m_j² − Φ = 2 Σ_{j≥2} s'_j ⟨A*_j, V'⟩ − ‖V'‖²‖s̃‖², with Φ and s̃ of `two_scale_flow`.

    Parameters
    ----------
    features
        A*, (block, ...).
    free_value, free_s
        V' and s', (*time, ...) and (*time, T).

    Returns
    -------
    np.ndarray
        (*time). The condition holds where it is above 0: the potential, which never rises, then
        never returns to the saddle. NaN where a number is.

    Raises
    ------
    InputError
        Shapes that do not fit.

    Notes
    -----
    Source: yuksel2026 (10), reconstructed.
    """
    array, overlap, attention = _points(features, free_value, free_s)
    rest = attention[..., 1:]
    gained = (rest[..., : len(array) - 1] * overlap[..., 1:]).sum(-1)
    flat = np.reshape(free_value, (*attention.shape[:-1], -1))
    return np.asarray(2 * gained - (flat**2).sum(-1) * (rest**2).sum(-1))


@quiet
def head_deviation(
    values: Float[np.ndarray, "time head *v"], s: Float[np.ndarray, "time head T"]
) -> Float[np.ndarray, " time"]:
    """How far apart heads are, the largest over pairs of ‖V_j − V_k‖_F and of ‖s_j − s_k‖.

    Parameters
    ----------
    values, s
        Of a `Flow`, (time, head, ...) and (time, head, T).

    Returns
    -------
    np.ndarray
        (time), from 0, at which the heads are coupled. NaN where a number is.

    Raises
    ------
    InputError
        Shapes that do not fit.

    Notes
    -----
    Source: yuksel2026 Theorem 2: from heads that start δ apart it stays small for a time that grows
    as δ falls.
    """
    found = [reals("values", values), reals("s", s)]
    if found[0].ndim < 3 or found[1].ndim != 3 or found[0].shape[:2] != found[1].shape[:2]:
        raise InputError(
            f"values have shape {found[0].shape}, s {found[1].shape}; accepted: (time, head, ...) "
            "and (time, head, T)"
        )
    apart = []
    for array in found:
        flat = array.reshape(*array.shape[:2], -1)
        pairs = np.linalg.norm(flat[:, :, None] - flat[:, None], axis=-1)
        apart.append(pairs.max((1, 2)))
    return np.maximum(*apart)


def _points(
    features: object, value: object, s: object
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return features, ⟨A*_j, V⟩ (*time, block) and s (*time, T)."""
    task, values, attention = finite("features", features), reals("value", value), reals("s", s)
    axes = task.ndim - 1
    fits = (
        axes >= 1
        and task.size > 0
        and values.ndim >= axes
        and values.shape[values.ndim - axes :] == task.shape[1:]
        and attention.ndim == values.ndim - axes + 1
        and attention.shape[:-1] == values.shape[: values.ndim - axes]
        and attention.shape[-1] >= len(task)
    )
    if not fits:
        raise InputError(
            f"features have shape {task.shape}, value {values.shape}, s {attention.shape}; "
            "accepted: (block, ...), (*time, ...) and (*time, T), T at least the number of blocks"
        )
    flat = values.reshape(*attention.shape[:-1], -1)
    return task, flat @ task.reshape(len(task), -1).T, attention
