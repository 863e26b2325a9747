"""What every closed form asks of its arguments, and how it says so."""

import numpy as np
from jaxtyping import Float
from numpy.typing import ArrayLike

from mechicl.errors import InputError

Number = int | float
Scalars = Float[np.ndarray, "*#batch"] | int | float
"""One number, or one for every entry of a batch."""

Heads = Float[np.ndarray, "*#batch H"] | int | float
"""One number a head; a scalar is one head."""

quiet = np.errstate(over="ignore", invalid="ignore", divide="ignore")
"""Decorator: what is undefined or infinite says so by its value, not by a warning."""


def constant(name: str, value: object, *, minimum: float, whole: bool = False) -> float:
    """Return a finite constant of the task, refused below `minimum` and, if `whole`, in between."""
    number = reals(name, value)
    kind = "a whole number" if whole else "a finite number"
    if number.ndim or not minimum <= number < np.inf or (whole and number % 1 != 0):
        raise InputError(f"{name} = {value!r}; accepted: {kind} of at least {minimum:g}")
    return float(number)


def measurement_noise(tau: object) -> float:
    """Return τ, refused where its square is beyond floating point."""
    given = constant("tau", tau, minimum=0)
    if not given * given < np.inf:
        raise InputError(f"tau = {tau!r}; accepted: a number from 0 whose square is finite")
    return given


def require_generator(rng: object) -> None:
    """Refuse what draws cannot be taken from: a seed is no generator."""
    if not isinstance(rng, np.random.Generator):
        raise InputError(
            f"rng = {rng!r}; accepted: a NumPy Generator, such as np.random.default_rng(0)"
        )


def task_constants(
    d: object, n_context: object, noise_variance: object
) -> tuple[float, float, float]:
    return (
        constant("d", d, minimum=1, whole=True),
        constant("n_context", n_context, minimum=1, whole=True),
        constant("noise_variance", noise_variance, minimum=0),
    )


def reals(name: str, value: ArrayLike | object, *, minimum: float = -np.inf) -> np.ndarray:
    """Return `value` in float64; NaN passes, as the mark of what is undefined."""
    try:
        given = np.asarray(value)
        if given.dtype.kind not in "biuf":
            raise TypeError
        numbers = given.astype(float)
    except (TypeError, ValueError):
        raise InputError(f"{name} = {value!r}; accepted: real numbers") from None
    if (numbers < minimum).any():
        low = numbers[numbers < minimum].min()
        raise InputError(f"{name} reaches down to {low}; accepted: at least {minimum:g}")
    return numbers


def finite(name: str, value: ArrayLike | object) -> np.ndarray:
    """Return `value` in float64, refused where a number of it is not finite."""
    array = reals(name, value)
    if not np.isfinite(array).all():
        raise InputError(
            f"{name} has {(~np.isfinite(array)).sum()} numbers that are not finite; accepted: "
            "finite numbers"
        )
    return array


def per_head(**arrays: ArrayLike) -> list[Float[np.ndarray, "*batch H"]]:
    """Return arrays (..., H) broadcast over their leading axes; a scalar is one head."""
    found = [np.atleast_1d(reals(name, value)) for name, value in arrays.items()]
    if len({array.shape[-1] for array in found}) > 1 or found[0].shape[-1] == 0:
        raise InputError(
            f"{_shapes(arrays, found)}; accepted: one number of heads (last axis), at least 1"
        )
    batch = leading(arrays, [array.shape[:-1] for array in found])
    return [np.broadcast_to(array, (*batch, array.shape[-1])) for array in found]


def leading(arrays: dict[str, ArrayLike], shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the shape that leading axes broadcast to; `arrays` are named where they do not."""
    try:
        return np.broadcast_shapes(*shapes)
    except ValueError:
        found = [np.asarray(array) for array in arrays.values()]
        raise InputError(
            f"{_shapes(arrays, found)}; accepted: leading axes that broadcast"
        ) from None


def _shapes(arrays: dict[str, ArrayLike], found: list[np.ndarray]) -> str:
    pairs = zip(arrays, found, strict=True)
    return ", ".join(f"{name} has shape {array.shape}" for name, array in pairs)
