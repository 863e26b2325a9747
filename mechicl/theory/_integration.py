"""Following a flow from time 0, for all that is a gradient flow here."""

from collections.abc import Callable

import numpy as np
from jaxtyping import Float
from numpy.typing import ArrayLike
from scipy.integrate import solve_ivp

from mechicl.errors import InputError
from mechicl.theory._arguments import reals


def increasing(times: ArrayLike) -> Float[np.ndarray, " time"]:
    """Return times in float64; raise InputError unless finite, from 0 and increasing."""
    when = reals("times", times)
    ordered = when.ndim == 1 and when.size and np.isfinite(when).all()
    if not (ordered and when[0] >= 0 and (np.diff(when) > 0).all()):
        raise InputError(f"times = {times!r}; accepted: finite times from 0, increasing")
    return when


def follow(
    velocity: Callable[[np.ndarray], np.ndarray],
    start: Float[np.ndarray, " n"],
    when: Float[np.ndarray, " time"],
) -> tuple[Float[np.ndarray, "reached n"], str]:
    """Solve dx/dt = velocity(x) to a relative tolerance of 1e-10, eighth-order Runge-Kutta.

    Returns
    -------
    path, fault
        x at the times that were reached, from the first on, and why it went no further: empty where
        that is all of them.
    """
    if when[-1] == 0:  # solve_ivp answers an interval of no length with nothing
        return start[None], ""
    found = solve_ivp(
        lambda _, point: velocity(point),
        (0.0, when[-1]),
        start,
        method="DOP853",
        t_eval=when,
        rtol=1e-10,
        atol=1e-12,
    )
    # Where it fails before the first time it answers with a list that is empty.
    path = np.reshape(np.transpose(found.y), (-1, start.size))
    return path, "" if found.success else found.message
