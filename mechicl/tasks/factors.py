"""Factors of covariances as numbers, made once and not at every step of training."""

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from mechicl.tasks.covariates import GaussianRegression


@torch.compiler.assume_constant_result
def cholesky_rows(task: "GaussianRegression") -> list[list[float]]:
    """Return the rows of the lower triangular C with Σ = C Cᵀ, in float64.

    A compiler takes them as they are, for it does not follow NumPy; numbers and not a tensor, which
    would be one of the transformation that is being compiled.
    """
    return _cholesky_rows(task)  # frozen, so hashable  # pyright: ignore[reportArgumentType]


@lru_cache(maxsize=16)
def _cholesky_rows(task: "GaussianRegression") -> list[list[float]]:
    return np.linalg.cholesky(task.sigma).tolist()
