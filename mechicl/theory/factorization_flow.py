"""Gradient flow of sparse attention on the regression task: a tensor factorisation (yuksel2026).

The task is y = Σ_k A*_k X s*_k + ξ, the model ŷ = Σ_k V_k X s_k with s_k = softmax(q_k), X of T
independent columns with mean 0 and covariance I. Up to E‖ξ‖² the population loss is

    L = ‖Σ_k A*_k ⊗ s*_k − Σ_k V_k ⊗ s_k‖_F² = ‖R‖²,

and the flow, d(V, q)/dt = −½∇L, is V̇_k = R s_k and q̇_k = J(s_k) Rᵀ V_k with J(s) = diag(s) − ssᵀ.
So attention moves by ṡ_k = Π(s_k) Rᵀ V_k with Π = J². That is `projection="squared"`, the default;
`"single"` takes Π = J instead, as the notebook of the authors' Fig. 10 does: a flow with the same
fixed points, but another path, faster where s is sparse.

Shapes: `features` A* are (block, ...), the values V of heads (head, ...) with the same axes after
the first: matrices (d, d), or coordinates in any orthonormal basis. Nothing but inner products
enters, and V̇ is a combination of A* and V. So V never leaves the span of the A* that it starts in,
and coordinates there say everything: `mechicl.theory.features.gram_schmidt` gives them, and for
features that are orthogonal, as the theorems assume, they are diag(m), m_k = ‖A*_k‖_F, with v_j =
⟨V, A*_j⟩/m_j. Attention s is (head, T), positions counted from 0, which the paper counts from 1.
`targets` s* are (block, T); None is one position a feature, s*_k = e_k.

There are at least two blocks and two heads, and T is at least the number of blocks; starts are
finite and each s is on the simplex. `mechicl.errors.InputError` says what is not, and
`mechicl.errors.MechiclError` that a flow could not be followed to its end.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Float, Int
from scipy.special import softmax

from mechicl.errors import InputError, MechiclError, integer
from mechicl.theory._arguments import finite, quiet
from mechicl.theory._integration import follow, increasing

Features = Float[np.ndarray, "block *v"]
Values = Float[np.ndarray, "head *v"]
Attention = Float[np.ndarray, "head T"]
Targets = Float[np.ndarray, "block T"] | None
Times = Float[np.ndarray, " time"]
Projection = Literal["squared", "single"]

_ON_SIMPLEX = 1e-9


class Flow(NamedTuple):
    """A solution, at the times that were asked for. Heads that move as one are one row."""

    time: Float[np.ndarray, " time"]
    values: Float[np.ndarray, "time head *v"]
    s: Float[np.ndarray, "time head T"]
    """On the simplex to 1e-9: what solvers add may be below 0."""
    loss: Float[np.ndarray, " time"]
    """Population loss of all heads, without E‖ξ‖²."""
    n_alike: Int[np.ndarray, " head"]
    """How many heads each row stands for."""


def population_loss(
    features: Features, values: Values, s: Attention, *, targets: Targets = None
) -> float:
    """Return the population loss without the noise, ‖Σ_k A*_k ⊗ s*_k − Σ_k V_k ⊗ s_k‖_F².

    Parameters
    ----------
    features, values, s, targets
        Task and model.

    Returns
    -------
    float
        From 0.

    Raises
    ------
    InputError
        Task or model out of range.

    Notes
    -----
    Source: yuksel2026 (4), as the text describes it.
    """
    aim, values, s = _model(features, values, s, targets)
    return _squared(_residual(aim, values, s, np.ones(len(s))))


def loss_gradient(
    features: Features, values: Values, q: Attention, *, targets: Targets = None
) -> tuple[Values, Attention]:
    """Gradient of the population loss in V and in q: −2 R s_k and −2 J(s_k) Rᵀ V_k.

    Parameters
    ----------
    features, values, targets
        Task and values.
    q
        Scores of the positions, (head, T), finite: s_k = softmax(q_k).

    Returns
    -------
    in_values, in_q
        (head, ...) and (head, T).

    Raises
    ------
    InputError
        Task or model out of range.

    Notes
    -----
    Source: derived from yuksel2026 (4).
    """
    scores = finite("q", q)
    if scores.ndim != 2:
        raise InputError(f"q has shape {scores.shape}; accepted: (head, T)")
    aim, flat, s = _model(features, values, softmax(scores, -1), targets)
    residual = _residual(aim, flat, s, np.ones(len(s)))
    in_values = -2 * s @ residual.T
    return in_values.reshape(np.shape(values)), -2 * _tangent(s, flat @ residual)


def free_flow(
    features: Features,
    values: Values,
    s: Attention,
    *,
    times: Times,
    targets: Targets = None,
    projection: Projection = "squared",
) -> Flow:
    """Follow every head from a start of its own.

    V̇_k = Σ_j A*_j ⟨s*_j, s_k⟩ − Σ_j V_j ⟨s_j, s_k⟩ and
    ṡ_k = Π(s_k)(Σ_j ⟨A*_j, V_k⟩ s*_j − Σ_j ⟨V_j, V_k⟩ s_j).

    Solved by an eighth-order Runge-Kutta method to 1e-10 (relative) and 1e-12 (absolute). It keeps
    Σ_i s_i = 1, and it stops where it can go no further. An explicit one will do: no rate is far
    above Σ_j ‖A*_j‖² and the number of heads, however slowly s sharpens. Heads that start alike, to
    the last bit, are solved as one and stay so: rounding would part them in time.

    Parameters
    ----------
    features, targets
        The task.
    values, s
        Where to start, (head, ...) and (head, T).
    times
        When to look, (time): from 0, where the start is, and increasing.
    projection
        Π: `squared` is the gradient flow, `single` that of the authors' notebook.

    Returns
    -------
    Flow
        A row for every head.

    Raises
    ------
    InputError
        Task, start, times or projection out of range.
    MechiclError
        The solver could go no further.

    Notes
    -----
    Source: yuksel2026 section 3.1, reconstructed; Theorem 2 is about starts that are nearly alike.
    """
    aim, flat, start = _model(features, values, s, targets)
    _, first, row, together = np.unique(
        np.concatenate([flat, start], 1),
        axis=0,
        return_index=True,
        return_inverse=True,
        return_counts=True,
    )
    shape = (len(first), *np.shape(values)[1:])
    flow = _solve(aim, flat[first], start[first], together, times, projection, shape)
    row = row.ravel()
    return flow._replace(
        values=flow.values[:, row], s=flow.s[:, row], n_alike=np.ones(len(row), int)
    )


def coupled_flow(
    features: Features,
    value: Float[np.ndarray, " *v"],
    s: Float[np.ndarray, " T"],
    *,
    n_heads: int,
    times: Times,
    targets: Targets = None,
    projection: Projection = "squared",
) -> Flow:
    """Follow h heads that start alike: the competitive phase.

    V̇ = Σ_j A*_j ⟨s*_j, s⟩ − h‖s‖²V and ṡ = Π(s)(Σ_j ⟨A*_j, V⟩ s*_j − h‖V‖² s).

    From a start with a positive `mechicl.theory.flow_conditions.order_margin` all heads end at s =
    e_1 and V = A*_1/h.

    Parameters
    ----------
    features, targets, times, projection
        As in `free_flow`.
    value, s
        Where all heads start, (...) and (T).
    n_heads
        h, from 2.

    Returns
    -------
    Flow
        One row, for all heads.

    Raises
    ------
    InputError
        Task, start, times or projection out of range.
    MechiclError
        The solver could go no further.

    Notes
    -----
    Source: yuksel2026 Theorem 1, reconstructed.
    """
    values = finite("value", value)[None]
    aim, flat, start = _model(features, values, finite("s", s)[None], targets, least=1)
    together = np.array([_heads(n_heads, 2)])
    return _solve(aim, flat, start, together, times, projection, values.shape)


def cooperative_flow(
    features: Features,
    ensemble: Float[np.ndarray, " *v"],
    free_value: Float[np.ndarray, " *v"],
    free_s: Float[np.ndarray, " T"],
    *,
    n_heads: int,
    times: Times,
    specialised: Float[np.ndarray, "head *v"] | None = None,
    projection: Projection = "squared",
) -> Flow:
    """Follow one free head (V', s') beside heads that attend to one position each.

    With n = 2, h − 1 heads at s = e_1 that share V:

        V̇  = A*_1 − (h−1)V − V's'_1
        V̇' = Σ_j A*_j s'_j − (h−1)V s'_1 − V'‖s'‖²
        ṡ' = Π(s')(Σ_j ⟨A*_j, V'⟩e_j − (h−1)⟨V, V'⟩e_1 − ‖V'‖²s').

    With `specialised` heads V_2 … V_{n−1} at e_2 … e_{n−1} the ensemble has h − n + 1, and their
    terms are added. Π(e_j) = 0 holds all of these where they attend, so this is exact. Targets are
    one position a feature.

    Parameters
    ----------
    features, times, projection
        As in `free_flow`.
    ensemble
        V at the start, (...).
    free_value, free_s
        V' and s' at the start, (...) and (T).
    n_heads
        h, from n.
    specialised
        V_2 … V_{n−1} at the start, (n − 2, ...); None is none.

    Returns
    -------
    Flow
        n rows: the ensemble, the specialised heads, the free one.

    Raises
    ------
    InputError
        Task, start, times or projection out of range.
    MechiclError
        The solver could go no further.

    Notes
    -----
    Source: yuksel2026 (8) and its appendix C.4, reconstructed.
    """
    first = finite("ensemble", ensemble)[None]
    last = finite("free_value", free_value)[None]
    between = first[:0] if specialised is None else finite("specialised", specialised)
    if not first.shape[1:] == between.shape[1:] == last.shape[1:]:
        raise InputError(
            f"ensemble has shape {first.shape[1:]}, specialised {between.shape}, free_value "
            f"{last.shape[1:]}; accepted: one shape, that of a feature, after the heads' axis"
        )
    values = np.concatenate([first, between, last])
    attention = finite("free_s", free_s)
    if attention.ndim != 1:
        raise InputError(f"free_s has shape {attention.shape}; accepted: (T)")
    held = len(values) - 1
    blocks = len(finite("features", features)) if np.ndim(features) else 0
    if len(between) and held > min(blocks, attention.size):
        raise InputError(
            f"{len(between)} specialised heads beside the ensemble; accepted: at most one less "
            f"than the {blocks} features"
        )
    s = np.concatenate([np.eye(held, attention.size), attention[None]])
    aim, flat, start = _model(features, values, s, None)
    together = np.ones(len(s), int)
    together[0] = _heads(n_heads, len(s)) - held
    return _solve(aim, flat, start, together, times, projection, values.shape)


@quiet
def two_scale_flow(
    features: Features,
    free_value: Float[np.ndarray, " *v"],
    free_s: Float[np.ndarray, " T"],
    *,
    n_heads: int,
    times: Times,
    projection: Projection = "squared",
) -> Flow:
    """Follow the free head of `cooperative_flow`, n = 2, with the ensemble always at its optimum.

    (h−1)V = A*_1 − V's'_1 cancels all that the free head adds at the first position. What is left,
    with s̃ = s' without its first entry:

        V̇' = Σ_{j≥2} A*_j s'_j − V'‖s̃‖²,   ṡ' = Π(s')(Σ_{j≥2} ⟨A*_j, V'⟩e_j − ‖V'‖² s̃).

    The loss is the potential Φ = ‖Σ_{j≥2} A*_j ⊗ e_j − V' ⊗ s̃‖_F², which never rises.

    Parameters
    ----------
    features, times, projection
        As in `free_flow`.
    free_value, free_s
        V' and s' at the start, (...) and (T).
    n_heads
        h, from 2.

    Returns
    -------
    Flow
        Two rows: the ensemble, h − 1 heads at e_1, and the free head. `loss` is Φ.

    Raises
    ------
    InputError
        Task, start, times or projection out of range.
    MechiclError
        The solver could go no further.

    Notes
    -----
    Source: yuksel2026 (9) and Theorem 4, reconstructed: the fast variable is V alone. It follows
    the cooperative flow the better the more heads there are.
    """
    values = finite("free_value", free_value)[None]
    aim, flat, start = _model(features, values, finite("free_s", free_s)[None], None, least=1)
    others = _heads(n_heads, 2) - 1
    aim_rest = aim * (np.arange(aim.shape[1]) > 0)

    def velocity(value: np.ndarray, s: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        rest = s * (np.arange(s.shape[1]) > 0)
        residual = aim_rest - value.T @ rest
        return s @ residual.T, _project(s, value @ residual, projection)

    _check_projection(projection)
    when, path, attention = _integrate(velocity, flat, start, times)
    held = np.broadcast_to(np.eye(1, aim.shape[1]), attention.shape)
    ensemble = (aim[:, 0] - path * attention[:, :, :1]) / others
    both = np.concatenate([ensemble, path], 1)
    s = np.concatenate([held, attention], 1)
    together = np.array([others, 1])
    loss = [_squared(_residual(aim, v, a, together)) for v, a in zip(both, s, strict=True)]
    shape = (len(when), 2, *values.shape[1:])
    return Flow(when, both.reshape(shape), s, np.array(loss), together)


@quiet
def _solve(
    aim: np.ndarray,
    values: np.ndarray,
    s: np.ndarray,
    together: np.ndarray,
    times: Times,
    projection: Projection,
    shape: tuple[int, ...],
) -> Flow:
    """Follow heads of which row g stands for `together[g]`."""
    _check_projection(projection)

    def velocity(values: np.ndarray, s: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        residual = _residual(aim, values, s, together)
        return s @ residual.T, _project(s, values @ residual, projection)

    when, path, attention = _integrate(velocity, values, s, times)
    loss = [_squared(_residual(aim, v, a, together)) for v, a in zip(path, attention, strict=True)]
    return Flow(when, path.reshape(len(when), *shape), attention, np.array(loss), together)


def _integrate(
    velocity: Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]],
    values: np.ndarray,
    s: np.ndarray,
    times: Times,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Follow values and attention together; raise MechiclError where that ends too soon."""
    when = increasing(times)

    def stacked(point: np.ndarray) -> np.ndarray:
        parts = velocity(
            point[: values.size].reshape(values.shape), point[values.size :].reshape(s.shape)
        )
        return np.concatenate([part.ravel() for part in parts])

    start = np.concatenate([values.ravel(), s.ravel()])
    if not np.isfinite(stacked(start)).all():
        raise MechiclError(
            "the flow leaves float64 at its start; scale features and values down, and times up by "
            "the square of that"
        )
    path, fault = follow(stacked, start, when)
    if fault:
        raise MechiclError(
            f"the flow could not be followed to time {when[-1]:g}: {fault} Ask for earlier times, "
            "or scale features and values down, and times up by the square of that"
        )
    return (
        when,
        path[:, : values.size].reshape(-1, *values.shape),
        path[:, values.size :].reshape(-1, *s.shape),
    )


def _residual(
    aim: np.ndarray, values: np.ndarray, s: np.ndarray, together: np.ndarray
) -> Float[np.ndarray, "entry T"]:
    """Return R, what the heads leave of the target: a column for every position."""
    return aim - (together[:, None] * values).T @ s


def _squared(residual: np.ndarray) -> float:
    return float((residual**2).sum())


def _tangent(s: np.ndarray, force: np.ndarray) -> np.ndarray:
    """Return J(s_k) force_k of every head."""
    return s * (force - (s * force).sum(-1, keepdims=True))


def _project(s: np.ndarray, force: np.ndarray, projection: Projection) -> np.ndarray:
    once = _tangent(s, force)
    return _tangent(s, once) if projection == "squared" else once


def _model(
    features: object, values: object, s: object, targets: object, *, least: int = 2
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the target (entry, T), values (head, entry) and s (head, T), checked.

    `least` is the number of heads that are asked for.
    """
    task, model = finite("features", features), finite("values", values)
    attention = finite("s", s)
    shapes = f"features have shape {task.shape}, values {model.shape}, s {attention.shape}"
    if task.ndim < 2 or task.size == 0 or task.shape[1:] != model.shape[1:]:
        raise InputError(
            f"{shapes}; accepted: (block, ...), (head, ...) and (head, T), alike in ..."
        )
    if attention.ndim != 2 or len(attention) != len(model) or len(model) < least:
        raise InputError(f"{shapes}; accepted: one number of heads, at least {least}")
    blocks, length = len(task), attention.shape[1]
    if blocks < 2:
        raise InputError(f"{shapes}; accepted: at least 2 features, or heads have nothing to share")
    if length < blocks:
        raise InputError(f"{shapes}; accepted: at least as many positions (T) as features")
    aims = np.eye(blocks, length) if targets is None else finite("targets", targets)
    if aims.shape != (blocks, length):
        raise InputError(f"targets have shape {aims.shape}; accepted: {(blocks, length)}")
    for name, rows in (("s", attention), ("targets", aims)):
        off = np.abs(rows.sum(-1) - 1).max()
        if rows.min() < 0 or off > _ON_SIMPLEX:
            raise InputError(
                f"{name} reaches down to {rows.min():g} and has a row that sums to 1 only within "
                f"{off:.1e}; accepted: rows from 0 that sum to 1 within {_ON_SIMPLEX:g}"
            )
    return task.reshape(blocks, -1).T @ aims, model.reshape(len(model), -1), attention


def _heads(given: int, least: int) -> int:
    return integer("n_heads", given, least)


def _check_projection(projection: str) -> None:
    if projection not in ("squared", "single"):
        raise InputError(f"projection = {projection!r}; accepted: 'squared', 'single'")
