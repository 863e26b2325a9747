"""How (ω, μ) move on the approximate loss, and what pushes them (he2025, section 4.2).

The approximate loss L̃ is that of `mechicl.theory.linear_regression`, without a factor ½; the
conventions on constants, heads and NaN are those of that module. c = (1+σ²)/L throughout.
"""

from itertools import pairwise

import numpy as np
from jaxtyping import Float, Int

from mechicl.theory._arguments import Heads, Number, constant, per_head, quiet
from mechicl.theory._integration import follow, increasing
from mechicl.theory.linear_regression import optimal_learning_rate

_LARGEST_EXPONENT = float(np.log(np.finfo(float).max))

Split = dict[str, tuple[Float[np.ndarray, "*#batch H"], Float[np.ndarray, "*#batch H"]]]
"""Terms of a gradient by name, each in ω and in μ."""


@quiet
def descend(
    omega: Heads,
    mu: Heads,
    *,
    learning_rate: Number,
    n_steps: Number,
    every: Number,
    d: Number,
    n_context: Number,
    noise_variance: Number,
) -> tuple[
    Int[np.ndarray, " step"],
    Float[np.ndarray, "step *#batch H"],
    Float[np.ndarray, "step *#batch H"],
]:
    """Run plain gradient descent on the approximate loss, ω and μ moving together.

    (ω, μ) ← (ω, μ) − η ∇L̃(ω, μ). Code that descends L̃/2 takes steps of half the length: its η is
    twice this one.

    It reaches the solution manifold from starts that keep a positive and a negative head. Others
    end at `single_head_optimum`, the heads sharing μ, where `optimality_ratio` is not 1.

    Parameters
    ----------
    omega, mu
        Where to start, (..., H).
    learning_rate
        η, at least 0.
    n_steps
        Steps to take, a whole number.
    every
        Steps between points of the trajectory, from 1.
    d, n_context, noise_variance
        Constants of the task.

    Returns
    -------
    step, omega, mu
        (step), (step, ..., H) and (step, ..., H): the start, every `every`-th step and the last.
        NaN from where a model has left float64, as too large a η makes it.

    Raises
    ------
    InputError
        Constants out of range, or shapes that do not fit.

    Notes
    -----
    Source: he2025 section 4.2, first display; Fig. 7 has H = 2 at η = 0.01 in code on L̃/2.
    """
    c = _context_share(d, n_context, noise_variance)
    rate = constant("learning_rate", learning_rate, minimum=0)
    last = int(constant("n_steps", n_steps, minimum=0, whole=True))
    apart = int(constant("every", every, minimum=1, whole=True))
    omega, mu = (np.array(part) for part in per_head(omega=omega, mu=mu))
    steps = np.unique(np.append(np.arange(0, last + 1, apart), last))
    path = np.empty((len(steps), 2, *omega.shape))
    path[0] = omega, mu
    for row, (before, after) in enumerate(pairwise(steps), 1):
        for _ in range(after - before):
            grad_omega, grad_mu = _slope(omega, mu, c, d)
            omega = omega - rate * grad_omega
            mu = mu - rate * grad_mu
        path[row] = omega, mu
    path = np.where(np.isfinite(path).all((1, -1), keepdims=True), path, np.nan)
    return steps, path[:, 0], path[:, 1]


@quiet
def gradient_flow(
    omega: Heads,
    mu: Heads,
    *,
    times: Float[np.ndarray, " time"],
    d: Number,
    n_context: Number,
    noise_variance: Number,
) -> tuple[Float[np.ndarray, "time *#batch H"], Float[np.ndarray, "time *#batch H"]]:
    """Follow the gradient flow of the approximate loss, d(ω, μ)/dt = −∇L̃(ω, μ), from time 0.

    It is the limit of `descend` for η → 0 at n_steps = t/η. Solved to a relative tolerance of
    1e-10 by an eighth-order Runge-Kutta method.

    Parameters
    ----------
    omega, mu
        Where to start, (..., H).
    times
        When to look, (time): from 0, increasing.
    d, n_context, noise_variance
        Constants of the task.

    Returns
    -------
    omega, mu
        Each (time, ..., H). NaN where the start is not finite or too large for exp(dω²), and from
        where the solver can go no further.

    Raises
    ------
    InputError
        Constants or times out of range, or shapes that do not fit.

    Notes
    -----
    Source: he2025 section 4.2 and appendix B.
    """
    c = _context_share(d, n_context, noise_variance)
    when = increasing(times)
    omega, mu = per_head(omega=omega, mu=mu)
    heads = omega.shape[-1]
    starts = np.concatenate([omega, mu], -1)
    path = np.full((len(when), *starts.shape), np.nan)

    def velocity(point: np.ndarray) -> np.ndarray:
        return -np.concatenate(_slope(point[:heads], point[heads:], c, d))

    for index in np.ndindex(*starts.shape[:-1]):
        start = starts[index]
        if not np.isfinite(start).all() or not np.isfinite(velocity(start)).all():
            continue
        reached, _ = follow(velocity, start, when)
        path[(slice(len(reached)), *index)] = reached
    return path[..., :heads], path[..., heads:]


@quiet
def gradient_terms(
    omega: Heads, mu: Heads, *, d: Number, n_context: Number, noise_variance: Number
) -> Split:
    """Split the gradient of the approximate loss into its Taylor terms; their sum is exact.

    - `sign_matching`: −2(1 − (1+cd)⟨μ,ω⟩) times μ in ω, and times ω in μ. It pulls μ and ω towards
      each other until `optimality_ratio` is 1.
    - `zero_sum`: nothing in ω, 2c⟨μ,1⟩·1 in μ. It is gone where μ sums to 0.
    - `high_order`: 2c Σ_{k≥2} dᵏ/(k−1)! ⟨μ,ω^k⟩ μ⊙ω^{k−1} in ω and 2c Σ_{k≥2} dᵏ/k! ⟨μ,ω^k⟩ ω^k
      in μ, powers entry by entry; summed in closed form. It makes |ω| alike.

    Parameters
    ----------
    omega, mu
        KQ and OV scales, (..., H).
    d, n_context, noise_variance
        Constants of the task.

    Returns
    -------
    dict
        The three terms by name, in that order, each as (term in ω, term in μ) of shape (..., H). A
        step of gradient descent moves by −η times each. NaN where a head is not finite or exp(dω²)
        is beyond float64.

    Raises
    ------
    InputError
        Constants out of range, or shapes that do not fit.

    Notes
    -----
    Source: he2025 section 4.2.1, the two updates.
    """
    rate = optimal_learning_rate(d=d, n_context=n_context, noise_variance=noise_variance)
    c = _context_share(d, n_context, noise_variance)
    omega, mu = per_head(omega=omega, mu=mu)
    pull = -2 * (1 - (mu * omega).sum(-1, keepdims=True) / rate)
    exponent = _exponent(omega, d)
    high_omega = 2 * c * d * mu * _apply(np.expm1(exponent), mu * omega)
    high_mu = 2 * c * _apply(_expm2(exponent), mu)
    balance = 2 * c * mu.sum(-1, keepdims=True) * np.ones_like(mu)
    # A head that is undefined, or too large, leaves no term of its model.
    defined = np.isfinite(exponent).all((-2, -1)) & np.isfinite(mu).all(-1)
    defined = np.asarray(defined)[..., None]
    terms = {
        "sign_matching": (pull * mu, pull * omega),
        "zero_sum": (np.zeros_like(omega), balance),
        "high_order": (high_omega, high_mu),
    }
    return {
        name: (np.where(defined, in_omega, np.nan), np.where(defined, in_mu, np.nan))
        for name, (in_omega, in_mu) in terms.items()
    }


@quiet
def loss_terms(
    omega: Heads, mu: Heads, *, d: Number, n_context: Number, noise_variance: Number
) -> dict[str, Float[np.ndarray, "*#batch"]]:
    """Split the approximate loss into its Taylor terms, none negative; their sum is exact.

    - `fit`: σ² + (1 − ⟨μ,ω⟩)².
    - `zero_sum`: c⟨μ,1⟩².
    - `odd`: c Σ dᵏ/k! ⟨μ,ω^k⟩² over k = 1, 3, 5, …, which is c·μᵀ sinh(dωωᵀ) μ.
    - `even`: the same over k = 2, 4, 6, …, which is c·μᵀ(cosh(dωωᵀ) − 1)μ.

    On the solution manifold `zero_sum` and `even` are 0 and `odd` is c·sinh(dγ²)‖μ‖₁².

    Parameters
    ----------
    omega, mu
        KQ and OV scales, (..., H).
    d, n_context, noise_variance
        Constants of the task.

    Returns
    -------
    dict
        The four terms by name, in that order, each (...). NaN where a head is not finite or
        exp(dω²) is beyond float64.

    Raises
    ------
    InputError
        Constants out of range, or shapes that do not fit.

    Notes
    -----
    Source: he2025 section 4.2.2, first display, and the left of (4.5); it sums from k = 1, where
    the updates sum from k = 2.
    """
    c = _context_share(d, n_context, noise_variance)
    omega, mu = per_head(omega=omega, mu=mu)
    exponent = _exponent(omega, d)
    terms = {
        "fit": noise_variance + (1 - (mu * omega).sum(-1)) ** 2,
        "zero_sum": c * mu.sum(-1) ** 2,
        "odd": c * (mu * _apply(np.sinh(exponent), mu)).sum(-1),
        "even": c * (mu * _apply(2 * np.sinh(exponent / 2) ** 2, mu)).sum(-1),
    }
    defined = np.isfinite(exponent).all((-2, -1)) & np.isfinite(mu).all(-1)
    return {name: np.where(defined, term, np.nan) for name, term in terms.items()}


@quiet
def optimality_ratio(
    omega: Heads, mu: Heads, *, d: Number, n_context: Number, noise_variance: Number
) -> Float[np.ndarray, "*#batch"]:
    """Left side of the local optimality condition, (1 + (1+σ²)d/L)⟨μ,ω⟩ = ⟨μ,ω⟩/η*.

    Parameters
    ----------
    omega, mu
        KQ and OV scales, (..., H).
    d, n_context, noise_variance
        Constants of the task.

    Returns
    -------
    np.ndarray
        (...), any real number. 1 where sign-matching no longer moves the heads, and on the solution
        manifold as γ → 0; 0.828 at the optimum of a single head at d = 5, L = 40, σ² = 0.1. NaN
        where a head is.

    Raises
    ------
    InputError
        Constants out of range, or shapes that do not fit.

    Notes
    -----
    Source: he2025 (4.3).
    """
    rate = optimal_learning_rate(d=d, n_context=n_context, noise_variance=noise_variance)
    omega, mu = per_head(omega=omega, mu=mu)
    return np.asarray((mu * omega).sum(-1) / rate)


def _context_share(d: Number, n_context: Number, noise_variance: Number) -> float:
    """Return c = (1+σ²)/L of checked constants."""
    constant("d", d, minimum=1, whole=True)
    length = constant("n_context", n_context, minimum=1, whole=True)
    return (1 + constant("noise_variance", noise_variance, minimum=0)) / length


def _slope(
    omega: Float[np.ndarray, "*batch H"], mu: Float[np.ndarray, "*batch H"], c: float, d: Number
) -> tuple[np.ndarray, np.ndarray]:
    """Return `approximate_loss_gradient` without its checks: a run takes 10⁵ steps."""
    kernel = np.exp(d * omega[..., :, None] * omega[..., None, :])
    both = mu * omega
    missing = -2 * (1 - both.sum(-1, keepdims=True))
    return (
        missing * mu + 2 * c * d * mu * _apply(kernel, both),
        missing * omega + 2 * c * _apply(kernel, mu),
    )


def _exponent(omega: Float[np.ndarray, "*batch H"], d: Number) -> np.ndarray:
    """Return d ωωᵀ, NaN where exp of it is beyond float64."""
    exponent = d * omega[..., :, None] * omega[..., None, :]
    return np.where(exponent < _LARGEST_EXPONENT, exponent, np.nan)


def _expm2(x: np.ndarray) -> np.ndarray:
    """Return eˣ − 1 − x = Σ_{k≥2} xᵏ/k!, without cancellation near 0."""
    small = np.abs(x) < 0.5
    near = np.where(small, x, 0.0)
    series = np.ones_like(near)
    for k in range(15, 2, -1):
        series = 1 + near / k * series
    return np.where(small, near**2 / 2 * series, np.expm1(x) - x)


def _apply(matrix: np.ndarray, vector: np.ndarray) -> np.ndarray:
    return (matrix @ vector[..., None])[..., 0]
