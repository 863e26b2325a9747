"""The priors of raj2026: leaves of a binary tree, and a Gaussian with a geometric spectrum.

θ is (covariate,). The tree of depth h has K = 2^h − 1 inner nodes, a coordinate each, and 2^h
leaves, a value of θ each. Nodes are numbered breadth first: the node at depth m whose prefix s_1 …
s_m has the bits b, s_1 the most significant and 1 for s = +1, is 2^m − 1 + b. A leaf has the number
of its bits s_1 … s_h.

What is out of range raises `mechicl.errors.InputError`.
"""

import numpy as np
from jaxtyping import Float, Int
from scipy.stats import ortho_group

from mechicl.errors import InputError, integer
from mechicl.theory._arguments import Number, constant, measurement_noise, quiet

Leaves = Float[np.ndarray, "leaf covariate"]
Covariance = Float[np.ndarray, "covariate covariate"]

LARGEST = 2**27
"""Numbers in an array that is made here: 1 GiB."""


def tree_leaves(depth: int, alpha: Number) -> Leaves:
    """Return θ(σ) of every leaf, θ(σ) = κ Σ_{m<h} α^{m/2} s_{m+1} e_{s_1…s_m}, |θ(σ)| = 1.

    Parameters
    ----------
    depth
        h, from 1 to 13.
    alpha
        α, above 0 and below 1.

    Returns
    -------
    np.ndarray
        (leaf, covariate) = (2^h, 2^h − 1), in units of 1; h entries of a row are not 0.

    Raises
    ------
    InputError
        h or α out of range, or a tree beyond 1 GiB.

    Notes
    -----
    Source: raj2026 (4), (16).
    """
    h, steps = _depth(depth), tree_steps(depth, alpha)
    _small(2**h * (2**h - 1), f"depth = {h} makes a table of 2^{h} leaves and 2^{h} − 1 nodes")
    leaf = np.arange(2**h)
    found = np.zeros((2**h, 2**h - 1))
    for m, step in enumerate(steps):
        spin = (leaf >> (h - 1 - m)) & 1
        found[leaf, 2**m - 1 + (leaf >> (h - m))] = np.where(spin == 1, step, -step)
    return found


def tree_steps(depth: int, alpha: Number) -> Float[np.ndarray, " depth"]:
    """Return κ α^{m/2} for m = 0 … h − 1, the size of a leaf's coordinate at each depth.

    κ² = (1 − α)/(1 − α^h), so that the squares sum to 1.

    Parameters
    ----------
    depth
        h, from 1.
    alpha
        α, above 0 and below 1.

    Returns
    -------
    np.ndarray
        (depth,), positive, falling; the first is κ.

    Raises
    ------
    InputError
        h or α out of range.

    Notes
    -----
    Source: raj2026 (16).
    """
    h, decay = _depth(depth), _tree_alpha(alpha)
    # expm1 keeps κ right for α near 1, where it tends to 1/√h.
    kappa = np.sqrt((1 - decay) / -np.expm1(h * np.log(decay)))
    return kappa * decay ** (np.arange(h) / 2)


def tree_distance(depth: int) -> Int[np.ndarray, "leaf leaf"]:
    """Return the distance of every two leaves: h less the length of their common prefix.

    Parameters
    ----------
    depth
        h, from 1 to 13.

    Returns
    -------
    np.ndarray
        (leaf, leaf), from 0, the same leaf, to h, leaves that part at the root; symmetric.

    Raises
    ------
    InputError
        h out of range, or a table beyond 1 GiB.

    Notes
    -----
    Source: raj2026 section II, the distance of Fig. 4d.
    """
    h = _depth(depth)
    _small(4**h, f"depth = {h} makes a table of 2^{h} by 2^{h} leaves")
    leaf = np.arange(2**h)
    # The exponent of an integer is its number of bits, and 0 for 0.
    return np.frexp((leaf[:, None] ^ leaf).astype(float))[1].astype(int)


def tree_variances(depth: int, alpha: Number) -> Float[np.ndarray, " covariate"]:
    """Return the prior variance of every node, κ² (α/2)^m at depth m: C₀ is diagonal.

    Parameters
    ----------
    depth
        h, from 1 to 27.
    alpha
        α, above 0 and below 1.

    Returns
    -------
    np.ndarray
        (covariate,), falling, breadth first; they sum to 1.

    Raises
    ------
    InputError
        h or α out of range, or a tree beyond 1 GiB.

    Notes
    -----
    Source: raj2026 section II, "proportional to (α/2)^m".
    """
    h, steps = _depth(depth), tree_steps(depth, alpha)
    _small(2**h, f"depth = {h} makes 2^{h} − 1 nodes")
    levels = np.arange(h)
    return np.repeat(steps**2 * 0.5**levels, 2**levels)


def tree_covariance(depth: int, alpha: Number) -> Covariance:
    """Return C₀ of the uniform law over leaves, diagonal with `tree_variances`; its mean is 0.

    Parameters
    ----------
    depth
        h, from 1 to 13.
    alpha
        α, above 0 and below 1.

    Returns
    -------
    np.ndarray
        (covariate, covariate) = (2^h − 1, 2^h − 1), of trace 1.

    Raises
    ------
    InputError
        h or α out of range, or a matrix beyond 1 GiB.

    Notes
    -----
    Source: raj2026 section II.
    """
    h = _depth(depth)
    _small((2**h - 1) ** 2, f"depth = {h} makes a matrix of 2^{h} − 1 rows")
    return np.diag(tree_variances(h, alpha))


def symmetric_axes(depth: int) -> Float[np.ndarray, "depth covariate"]:
    """Return μ_m = 2^{−m/2} Σ_v e_v over the nodes v at depth m, for m = 0 … h − 1.

    μ_m·θ(σ) = κ (α/2)^{m/2} s_{m+1}: they read one spin each, in base √(α/2).

    Parameters
    ----------
    depth
        h, from 1 to 22.

    Returns
    -------
    np.ndarray
        (depth, covariate), orthonormal rows.

    Raises
    ------
    InputError
        h out of range, or axes beyond 1 GiB.

    Notes
    -----
    Source: raj2026 (5), (23).
    """
    h = _depth(depth)
    _small(h * 2**h, f"depth = {h} makes {h} axes of 2^{h} − 1 nodes")
    found = np.zeros((h, 2**h - 1))
    for m in range(h):
        found[m, 2**m - 1 : 2 ** (m + 1) - 1] = 2 ** (-m / 2)
    return found


@quiet
def symmetric_cutoff(depth: int, alpha: Number, tau: Number) -> float:
    """Return m*_sym = 2 log(τ/κ)/log(α/2): the depth to which symmetric axes resolve spins.

    The step κ (α/2)^{m/2} along μ_m is τ there.

    Parameters
    ----------
    depth
        h, from 1.
    alpha
        α, above 0 and below 1.
    tau
        τ, at least 0.

    Returns
    -------
    float
        A real number of levels; it may be beyond h. Infinite for τ = 0; 0 or less for τ ≥ κ, where
        noise hides the first spin.

    Raises
    ------
    InputError
        Constants out of range.

    Notes
    -----
    Source: raj2026 section II.
    """
    return _cutoff(depth, alpha, tau, _tree_alpha(alpha) / 2)


@quiet
def adaptive_cutoff(depth: int, alpha: Number, tau: Number) -> float:
    """Return m*_ada = 2 log(τ/κ)/log α: the depth to which an adaptive path resolves spins.

    The step κ α^{m/2} along one node is τ there.

    Parameters
    ----------
    depth, alpha, tau
        As in `symmetric_cutoff`.

    Returns
    -------
    float
        As in `symmetric_cutoff`, of which it is log(α/2)/log α times as much.

    Raises
    ------
    InputError
        Constants out of range.

    Notes
    -----
    Source: raj2026 section II.
    """
    return _cutoff(depth, alpha, tau, _tree_alpha(alpha))


def gaussian_spectrum(d: int, alpha: Number) -> Float[np.ndarray, " d"]:
    """Return λ_k = α^k for k = 1 … d, the variances of the Gaussian prior along its axes.

    Parameters
    ----------
    d
        Number of covariates, K in the paper, from 1.
    alpha
        α, above 0, up to 1.

    Returns
    -------
    np.ndarray
        (d,), not rising; not normalised.

    Raises
    ------
    InputError
        d or α out of range.

    Notes
    -----
    Source: raj2026 VI.1. Elsewhere the paper has "∝ α^k, up to a normalization constant"; here the
    constant is 1, and the trace (1 − α^d) α/(1 − α).
    """
    width, decay = integer("d", d, 1), constant("alpha", alpha, minimum=0)
    if not 0 < decay <= 1:
        raise InputError(
            f"alpha = {alpha!r}; accepted: above 0 and up to 1, for the Gaussian prior"
        )
    _small(width, f"d = {width} makes as many variances")
    return decay ** np.arange(1.0, width + 1)


def gaussian_axes(d: int, rotation: int | None) -> Covariance:
    """Return the orthogonal U whose columns are the axes of the Gaussian prior.

    Parameters
    ----------
    d
        Number of covariates, from 1.
    rotation
        Seed, from 0, of a U uniform over orthogonal matrices: a function of d and the seed alone.
        None is the identity.

    Returns
    -------
    np.ndarray
        (covariate, covariate).

    Raises
    ------
    InputError
        d or the seed out of range, or a matrix beyond 1 GiB.

    Notes
    -----
    Source: raj2026 VI.1.
    """
    width = integer("d", d, 1)
    _small(width**2, f"d = {width} makes a matrix of as many rows")
    if rotation is None:
        return np.eye(width)
    rng = np.random.default_rng(integer("rotation", rotation, 0))
    if width == 1:  # SciPy starts from 2
        return np.where(rng.random((1, 1)) < 0.5, -1.0, 1.0)
    return np.asarray(ortho_group.rvs(width, random_state=rng))


def gaussian_covariance(d: int, alpha: Number, rotation: int | None = None) -> Covariance:
    """Return C₀ = U diag(α^k) Uᵀ of the Gaussian prior.

    Parameters
    ----------
    d, alpha
        As in `gaussian_spectrum`.
    rotation
        As in `gaussian_axes`.

    Returns
    -------
    np.ndarray
        (covariate, covariate), symmetric to the last bit.

    Raises
    ------
    InputError
        d, α or the seed out of range, or a matrix beyond 1 GiB.

    Notes
    -----
    Source: raj2026 VI.1.
    """
    spectrum = gaussian_spectrum(d, alpha)
    axes = gaussian_axes(d, rotation)
    found = (axes * spectrum) @ axes.T
    return (found + found.T) / 2


def _depth(depth: object) -> int:
    return integer("depth", depth, 1)


def _tree_alpha(alpha: object) -> float:
    given = constant("alpha", alpha, minimum=0)
    if not 0 < given < 1:
        raise InputError(
            f"alpha = {alpha!r}; accepted: above 0 and below 1, for κ² = (1 − α)/(1 − α^h) and "
            "coordinates that shrink with depth"
        )
    return given


def _cutoff(depth: int, alpha: Number, tau: Number, base: float) -> float:
    kappa = tree_steps(depth, alpha)[0]
    noise = measurement_noise(tau)
    return float(2 * np.log(noise / kappa) / np.log(base))


def _small(size: int, what: str) -> None:
    if size > LARGEST:
        raise InputError(f"{what}, {size:.2g} numbers; accepted: at most {LARGEST}, 1 GiB")
