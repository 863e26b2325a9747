"""Chi variables as maps of standard normals: what Bartlett's decomposition is made from."""

from functools import lru_cache

import numpy as np
import torch
from jaxtyping import Float
from scipy import special
from scipy.interpolate import CubicSpline
from torch import Tensor

_REACH = 9.0  # normals beyond it have probability 2e-19
_PER_UNIT = 32  # knots of the spline, whose error is then below 1e-8


def chi(
    normals: Float[Tensor, "*models freedom batch"], freedom: tuple[int, ...]
) -> Float[Tensor, "*models freedom batch"]:
    """Return F_ν⁻¹(Φ(g)): chi variables, with ν degrees of freedom along the last axis but one.

    F_ν is the distribution function of the square root of a χ²_ν variable; the map increases and is
    smooth in g, so that a cubic spline through its values at 577 knots is exact to 1e-8.
    """
    table = torch.from_numpy(_splines(freedom)).to(normals.dtype)
    n_intervals = table.shape[0] // len(freedom)
    scaled = (normals.clamp(-_REACH, _REACH) + _REACH) * _PER_UNIT
    interval = scaled.floor().clamp_(max=n_intervals - 1)
    rows = n_intervals * torch.arange(len(freedom))[:, None]
    of_each = table[(interval.long() + rows).flatten()].T.unflatten(-1, normals.shape)
    cubic, square, linear, constant = of_each
    along = (scaled - interval) / _PER_UNIT
    return ((cubic * along + square) * along + linear) * along + constant


@lru_cache(maxsize=4)
def _splines(freedom: tuple[int, ...]) -> Float[np.ndarray, "freedom_interval 4"]:
    """Return the coefficients of the splines, the highest power first."""
    knots = np.linspace(-_REACH, _REACH, int(2 * _REACH * _PER_UNIT) + 1)
    shape = np.asarray(freedom, float)[:, None] / 2
    # From the nearer tail, where the probability keeps its digits.
    tail = special.ndtr(-abs(knots))
    lower, upper = special.gammaincinv(shape, tail), special.gammainccinv(shape, tail)
    values = np.sqrt(2 * np.where(knots < 0, lower, upper))
    return np.moveaxis(CubicSpline(knots, values, axis=1).c, (0, 1, 2), (2, 1, 0)).reshape(-1, 4)
