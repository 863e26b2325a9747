"""Strategies of raj2026 on the tree prior: along the tree, on symmetric axes, the best fixed one.

Each spends M channels, reads Φ = W(θ + ξ) with orthonormal rows and ξ ~ N(0, τ²I), and knows the
exact posterior; its loss is the mean of Tr C_{θ|Φ}, from 0 to 1. `tau` is the noise that it meets:
`mechicl.theory.measurement.context_noise` for a context of N tokens.

The adaptive strategy here is the paper's heuristic, not the best one: where noise is low, one
channel of a fixed measurement can carry several spins, and for small M such a one wins.

What is out of range raises `mechicl.errors.InputError`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int
from scipy.special import softmax

from mechicl.errors import InputError, integer
from mechicl.theory import priors
from mechicl.theory._arguments import Number, constant, measurement_noise, require_generator
from mechicl.theory.measurement import Rows, channels
from mechicl.theory.tree_posterior import power_gradient, powers, tree_mmse

_Rotation = Float[np.ndarray, "channel direction"]
_Contexts = tuple[Int[np.ndarray, " n"], Float[np.ndarray, "channel n"]]

_BLOCK = 2**16
"""Paths that are drawn at a time."""

_POLISH = 0.02
"""First size of a step along the gradient, in units of an entry of U."""


def symmetric_loss(depth: int, alpha: Number, n_channels: int, tau: Number) -> float:
    """Loss of the first M symmetric axes on the tree prior, exact to rounding.

    1 − Σ_m κ²α^m q_m Π_{j<m} (1 + q_j)/2, q_m = ⟨tanh²(r² + r z)⟩ with r = κ(α/2)^{m/2}/τ and z ~
    N(0, 1) for m < M, 0 beyond: spins are read one by one, and stay independent.

    Parameters
    ----------
    depth, alpha
        h, from 1, and α of the tree.
    n_channels
        M, from 0 to h.
    tau
        τ, at least 0.

    Returns
    -------
    float
        From 0 to 1.

    Raises
    ------
    InputError
        What is out of range.

    Notes
    -----
    Source: raj2026 (5), (19) to (21); the integral is one-dimensional.
    """
    steps = priors.tree_steps(depth, alpha)
    count = channels(n_channels, len(steps), "symmetric axes")
    noise = measurement_noise(tau)
    known = np.zeros(len(steps))
    known[:count] = 1
    if noise > 0:
        z = np.linspace(-12, 12, 8193)
        density = np.exp(-(z**2) / 2)
        ratios = steps * 0.5 ** (np.arange(len(steps)) / 2) / noise
        for m, r in enumerate(ratios[:count]):
            # The sum over a grid is exact to rounding for a smooth integrand that vanishes.
            known[m] = density @ np.tanh(r**2 + r * z) ** 2 / density.sum()
    shared = np.append(1, np.cumprod((1 + known) / 2)[:-1])
    return float(max(1 - (steps**2 * known * shared).sum(), 0))


def adaptive_loss(
    depth: int,
    alpha: Number,
    n_channels: int,
    tau: Number,
    *,
    n_draws: int,
    rng: np.random.Generator,
) -> tuple[float, float]:
    """Loss of the path that follows the sign of what it reads, and its standard error.

    It reads the root's coordinate, then that of the child on the side of the sign, and so on; past
    a wrong turn it reads noise. The posterior is exact: given the nodes that were read, leaves
    differ only by the level at which they leave the path, so M + 1 classes of them are told apart.

    Parameters
    ----------
    depth, alpha
        h, from 1, and α of the tree.
    n_channels
        M, from 0 to h: the path ends at a leaf then.
    tau
        τ, at least 0.
    n_draws
        Draws of the noise, from 2; by symmetry one leaf stands for all.
    rng
        Where they are drawn from. The same generator gives the same draws, whatever α and τ.

    Returns
    -------
    loss, error
        The loss and its standard error, 0 at τ = 0: no turn is wrong, and Σ_{m≥M} κ²α^m is left.

    Raises
    ------
    InputError
        What is out of range.

    Notes
    -----
    Source: raj2026 section II, VI.4, "Adaptive along tree coordinates".
    """
    require_generator(rng)
    steps, noise = priors.tree_steps(depth, alpha), measurement_noise(tau)
    count = channels(n_channels, len(steps), "levels, after which the path is at a leaf")
    n_paths = integer("n_draws", n_draws, 2)
    read = steps[:count]
    if noise == 0 or count == 0:
        return float((steps[count:] ** 2).sum()), 0.0
    losses = np.concatenate(
        [
            1 - _path_powers(read, noise, rng.standard_normal((min(_BLOCK, n_paths - at), count)))
            for at in range(0, n_paths, _BLOCK)
        ]
    )
    return float(losses.mean()), float(losses.std(ddof=1) / np.sqrt(n_paths))


def _path_powers(
    steps: Float[np.ndarray, " channel"], noise: float, draws: Float[np.ndarray, "n channel"]
) -> Float[np.ndarray, " n"]:
    """Return |θ̄|² of paths under the leaf of which every spin is +1."""
    n_paths, count = draws.shape
    right, read = np.ones(n_paths, bool), np.empty((count, n_paths))
    for m, step in enumerate(steps):
        read[m] = step * right + noise * draws[:, m]
        right &= read[m] > 0
    toward = steps[:, None] * np.abs(read) / noise**2
    power = (steps**2 / (2 * noise**2))[:, None]
    # Class j leaves the path after j turns; the last one never does.
    followed = np.vstack([np.zeros((1, n_paths)), np.cumsum(toward - power, axis=0)])
    followed[:-1] -= toward + power
    prior = np.append(np.arange(1, count + 1), count) * np.log(0.5)
    rho = softmax(followed + prior[:, None], axis=0)
    beyond = rho[::-1].cumsum(0)[::-1][1:]
    return steps**2 @ (beyond - rho[:-1]) ** 2


@dataclass(frozen=True)
class FixedMeasurement:
    """What `optimised_measurement` found.

    Attributes
    ----------
    measurement
        W, (channel, covariate), orthonormal rows.
    loss, error
        Its loss and the standard error, on draws that chose nothing.
    start
        Where the search that found it began.
    found
        The loss after SPSA from every start, on draws that are the same for all.
    """

    measurement: Rows
    loss: float
    error: float
    start: str
    found: Mapping[str, float]


def optimised_measurement(
    depth: int,
    alpha: Number,
    n_channels: int,
    tau: Number,
    *,
    rng: np.random.Generator,
    n_levels: int = 4,
    n_random: int = 1,
    n_steps: int = 1000,
    step_size: Number | None = None,
    perturbation: Number = 0.03,
    n_contexts: int = 128,
    n_polish: int = 600,
    n_draws: int = 200,
) -> FixedMeasurement:
    """Search the measurement of least loss among those that do not depend on what was read.

    W = UD, UUᵀ = I, D a basis of the span of the nodes above depth g and of the symmetric axes.
    J(U) = ⟨|θ̄|²⟩ is climbed by SPSA from several starts: with random signs Δ, U ← R(U + a_kΠ(G)), G
    = (J(R(U + c_kΔ)) − J(R(U − c_kΔ)))/2c_k · Δ on the same contexts, Π the projection on the
    tangent space, R(U) the nearest matrix with orthonormal rows, a_k = η k^−0.602 and c_k = ε
    k^−0.101. The best of them, on fresh contexts, is polished along the gradient of J itself: SPSA
    alone ends 1 to 7 % higher.

    Parameters
    ----------
    depth, alpha
        h from 1 to 13 and α of the tree.
    n_channels
        M, from 1 to the dimension of the span.
    tau
        τ, above 0.
    rng
        Where starts, perturbations and contexts are drawn from.
    n_levels
        g, from 0; from h on the span is all.
    n_random
        Random starts, from 0, beside the symmetric axes and the first directions of D, which are
        the top eigenvectors of C₀ while M < 2^g.
    n_steps
        Steps of SPSA from each start, from 0.
    step_size, perturbation
        η and ε, above 0. None is 1.5 M: J is the steeper, the fewer rows share the work.
    n_contexts
        Contexts that J is a mean of in a step, from 1; eight times as many when polishing.
    n_polish
        Steps along the gradient, from 0.
    n_draws
        Draws of ξ for every leaf, from 2, that judge starts, and as many anew for the loss.

    Returns
    -------
    FixedMeasurement

    Raises
    ------
    InputError
        What is out of range. τ = 0 is: there J has no slope, and almost any one channel tells all
        leaves apart.

    Notes
    -----
    Source: raj2026 (22) to (24), g = 4 in Fig. 2b. The polish is ours.
    """
    require_generator(rng)
    leaves, steps = priors.tree_leaves(depth, alpha), priors.tree_steps(depth, alpha)
    noise = measurement_noise(tau)
    if noise == 0:
        raise InputError(
            "tau = 0; accepted: above 0: without noise almost any one channel tells all leaves "
            "apart, and nothing is left to optimise"
        )
    basis = _hybrid_basis(len(steps), integer("n_levels", n_levels, 0))
    count = channels(integer("n_channels", n_channels, 1), len(basis), "directions searched")
    eta = 1.5 * count if step_size is None else _above("step_size", step_size)
    seen, size = basis @ leaves.T, integer("n_contexts", n_contexts, 1)
    epsilon, judged = _above("perturbation", perturbation), integer("n_draws", n_draws, 2)
    n_spsa, n_last = integer("n_steps", n_steps, 0), integer("n_polish", n_polish, 0)
    starts = _starts(count, basis, len(steps), integer("n_random", n_random, 0), rng)

    def contexts(number: int) -> _Contexts:
        return rng.integers(0, len(leaves), number), rng.standard_normal((count, number))

    def objective(rotation: _Rotation, drawn: _Contexts) -> float:
        return float(powers(rotation @ seen, steps, noise, *drawn).mean())

    def gradient(rotation: _Rotation) -> _Rotation:
        drawn = contexts(8 * size)
        return power_gradient(rotation @ seen, steps, noise, *drawn) @ seen.T

    def judge(rotation: _Rotation, draws: np.random.Generator) -> tuple[float, float]:
        return tree_mmse(depth, alpha, rotation @ basis, tau, n_draws=judged, rng=draws)

    reached = {
        name: _spsa(
            start, objective, lambda: contexts(size), n_spsa, eta=eta, epsilon=epsilon, rng=rng
        )
        for name, start in starts.items()
    }
    same = int(rng.integers(2**63))
    found = {name: judge(at, np.random.default_rng(same))[0] for name, at in reached.items()}
    best = min(found, key=lambda name: found[name])
    rotation = _polished(reached[best], gradient, n_last)
    loss, error = judge(rotation, rng)
    return FixedMeasurement(rotation @ basis, loss, error, best, found)


def _spsa(
    rotation: _Rotation,
    objective: Callable[[_Rotation, _Contexts], float],
    contexts: Callable[[], _Contexts],
    n_steps: int,
    *,
    eta: float,
    epsilon: float,
    rng: np.random.Generator,
) -> _Rotation:
    for k in range(1, n_steps + 1):
        size = epsilon * k**-0.101
        drawn, signs = contexts(), rng.choice([-1.0, 1.0], rotation.shape)
        ahead = objective(_orthonormal(rotation + size * signs), drawn)
        behind = objective(_orthonormal(rotation - size * signs), drawn)
        slope = (ahead - behind) / (2 * size) * signs
        rotation = _orthonormal(rotation + eta * k**-0.602 * _tangent(rotation, slope))
    return rotation


def _polished(
    rotation: _Rotation, gradient: Callable[[_Rotation], _Rotation], n_steps: int
) -> _Rotation:
    """Follow the gradient for `n_steps`, with Adam's scaling and steps that shrink to nothing."""
    first, second = np.zeros(rotation.shape), np.zeros(rotation.shape)
    for k in range(1, n_steps + 1):
        slope = _tangent(rotation, gradient(rotation))
        first = 0.9 * first + 0.1 * slope
        second = 0.99 * second + 0.01 * slope**2
        scaled = first / (1 - 0.9**k) / (np.sqrt(second / (1 - 0.99**k)) + 1e-12)
        size = _POLISH * (1 - k / (n_steps + 1))
        rotation = _orthonormal(rotation + size * _tangent(rotation, scaled))
    return rotation


def _tangent(rotation: _Rotation, slope: _Rotation) -> _Rotation:
    """Project on the Z with ZUᵀ + UZᵀ = 0."""
    across = slope @ rotation.T
    return slope - (across + across.T) / 2 @ rotation


def _orthonormal(rows: _Rotation) -> _Rotation:
    """Return the nearest matrix with orthonormal rows: it moves as little, and as smoothly."""
    left, _, right = np.linalg.svd(rows, full_matrices=False)
    return left @ right


def _hybrid_basis(depth: int, n_levels: int) -> Float[np.ndarray, "direction covariate"]:
    """Return an orthonormal basis of (22): axes above depth g are in the span of its nodes."""
    g = min(n_levels, depth)
    return np.vstack([np.eye(2**g - 1, 2**depth - 1), priors.symmetric_axes(depth)[g:]])


def _starts(
    count: int,
    basis: Float[np.ndarray, "direction covariate"],
    depth: int,
    n_random: int,
    rng: np.random.Generator,
) -> dict[str, _Rotation]:
    """Return where searches begin; axes that are fewer than M are filled up at random."""
    filled = rng.standard_normal((count, len(basis)))
    symmetric = filled.copy()
    axes = (priors.symmetric_axes(depth) @ basis.T)[:count]
    symmetric[: len(axes)] = axes
    symmetric[len(axes) :] -= symmetric[len(axes) :] @ axes.T @ axes
    found = {
        "symmetric axes": _orthonormal(symmetric),
        "first directions": np.eye(count, len(basis)),
    }
    for number in range(n_random):
        found[f"random {number}"] = _orthonormal(rng.standard_normal(filled.shape))
    return found


def _above(name: str, value: Number) -> float:
    given = constant(name, value, minimum=0)
    if given == 0:
        raise InputError(f"{name} = {value!r}; accepted: above 0")
    return given
