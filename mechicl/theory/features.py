"""Feature matrices A*_k of yuksel2026: drawn, scaled, made orthogonal, as coordinates in a basis.

`features` are (block, d, d), output axis first, strongest first.
"""

import numpy as np
from jaxtyping import Float
from scipy.stats import ortho_group

from mechicl.errors import InputError, integer
from mechicl.theory._arguments import Number, constant, reals, require_generator

Features = Float[np.ndarray, "block d d"]


def haar_features(
    n_blocks: int, d: int, *, ratio: Number, base: Number, rng: np.random.Generator
) -> Features:
    """Draw features A*_k = m^{h−k} b₀ Q_k, k = 1 … h, with Q_k uniform over orthogonal matrices.

    Parameters
    ----------
    n_blocks
        h, from 1.
    d
        Number of tokens, from 2.
    ratio
        m, at least 0: each block is as many times as strong as the next.
    base
        b₀, at least 0: the singular values of the last block, in logits for a weight of 1.
    rng
        Where they are drawn from.

    Returns
    -------
    np.ndarray
        (block, d, d), the strongest first; ‖A*_k‖_F = m^{h−k} b₀ √d.

    Raises
    ------
    InputError
        Constants out of range, alone or together.

    Notes
    -----
    Source: yuksel2026 section 2.2. Published: h = 3, d = 50, m = 1.7; b₀ = 20 for spans of 2 and 40
    for spans of 4: its code sums over spans at a softmax temperature of 0.1, which is 10 a token.
    """
    require_generator(rng)
    h, width = integer("n_blocks", n_blocks, 1), integer("d", d, 2)
    strength = constant("ratio", ratio, minimum=0)
    least = constant("base", base, minimum=0)
    with np.errstate(over="ignore", invalid="ignore"):
        scales = least * strength ** np.arange(h - 1, -1, -1.0)
    if not np.isfinite(scales).all():
        raise InputError(
            f"ratio = {strength:g} and base = {least:g} make {scales[0]:g} of the first of {h} "
            "blocks; accepted: what float64 holds"
        )
    drawn = ortho_group.rvs(width, size=h, random_state=rng).reshape(h, width, width)
    return scales[:, None, None] * drawn


def gram_schmidt(
    features: Float[np.ndarray, "block *value"],
) -> tuple[Float[np.ndarray, "n *value"], Float[np.ndarray, "block n"]]:
    """Return a basis of the features, orthonormal by Frobenius, and their coordinates in it.

    A*_k = Σ_{j≤k} c_kj B_j with ⟨B_i, B_j⟩_F = δ_ij and c_kk ≥ 0. Features that are orthogonal
    have c = diag(‖A*_k‖) and B_k = A*_k/‖A*_k‖.

    Parameters
    ----------
    features
        (block, ...).

    Returns
    -------
    basis, coordinates
        (n, ...) and (block, n), n the smaller of the number of blocks and of entries of a feature.

    Raises
    ------
    InputError
        No features, or numbers that are not finite.
    """
    array = reals("features", features)
    if array.ndim < 2 or array.size == 0 or not np.isfinite(array).all():
        raise InputError(
            f"features have shape {array.shape}, {(~np.isfinite(array)).sum()} numbers of them not "
            "finite; accepted: (block, ...), at least one, all finite"
        )
    basis, upper = np.linalg.qr(array.reshape(len(array), -1).T)
    signs = np.where(np.diagonal(upper) < 0, -1.0, 1.0)
    return (basis * signs).T.reshape(-1, *array.shape[1:]), (signs[:, None] * upper).T


def orthogonalised(features: Features) -> Features:
    """Make features orthogonal by Frobenius, each as long as before.

    A*_k becomes ‖A*_k‖ B_k, B_k of `gram_schmidt`: the first keeps its direction. Theorem 1 and all
    that follows from it assume such features; random ones are nearly so at d = 50, not at d = 10.

    Parameters
    ----------
    features
        (block, d, d).

    Returns
    -------
    np.ndarray
        (block, d, d). The matrices are no longer multiples of orthogonal ones.

    Raises
    ------
    InputError
        Features that depend on one another: more than d², or one in the span of those before it.

    Notes
    -----
    Source: yuksel2026, an option of the authors' code.
    """
    array = square_features(features)
    basis, coordinates = gram_schmidt(array)
    norms = np.linalg.norm(array, axis=(1, 2))
    left = np.zeros(len(array))
    left[: len(basis)] = np.diagonal(coordinates)
    if (left <= 1e-10 * norms).any():
        raise InputError(
            f"feature {int(np.argmax(left <= 1e-10 * norms))} is in the span of those before it; "
            "accepted: features that are independent, at most d² of them"
        )
    return norms[:, None, None] * basis


def square_features(features: object) -> Features:
    """Return features (block, d, d) in float64; raise InputError for what is none."""
    array = reals("features", features)
    square = array.ndim == 3 and array.shape[-1] == array.shape[-2]
    if not square or array.size == 0 or not np.isfinite(array).all():
        raise InputError(
            f"features have shape {array.shape}, {(~np.isfinite(array)).sum()} numbers of them not "
            "finite; accepted: (block, d, d), at least one, all finite"
        )
    return array
