"""What the regression tasks share: Gaussian covariates of any covariance, a context, a query."""

from abc import ABC
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Self

import numpy as np
import pydantic
from jaxtyping import Float

from mechicl.config import Config
from mechicl.errors import InputError, integer
from mechicl.schema import Var
from mechicl.tasks.base import ContinuousTask
from mechicl.theory import preconditioned

if TYPE_CHECKING:
    from torch import Tensor


_LARGEST_D = 11_585  # d² numbers of 8 bytes are 1 GiB

Rows = tuple[tuple[float, ...], ...]
_ROWS = pydantic.TypeAdapter(Rows, config=pydantic.ConfigDict(allow_inf_nan=False))


class KacMurdockSzego(Config):
    """Σ_ij = ρ^|i−j| (he2025, section 5.3).

    Attributes
    ----------
    rho
        Correlation of neighbours, −1 < ρ < 1.
    """

    rho: Annotated[float, pydantic.Field(gt=-1, lt=1)]


def _rows_or_rho(given: object) -> object:
    """Take each form by itself: of a union pydantic tells what is wrong for every member."""
    if given is None or isinstance(given, KacMurdockSzego):
        return given
    if isinstance(given, Mapping):
        return KacMurdockSzego.model_validate(given)
    if isinstance(given, (list, tuple)):
        return _ROWS.validate_python(given)
    raise ValueError("must be d rows of d numbers, {rho: a number}, or null")


class GaussianRegression(ContinuousTask, ABC):
    """Regression on x ~ N(0, Σ), a context of L examples and a query.

    Attributes
    ----------
    d
        Dimension of the covariates.
    n_context
        Examples in a context, L.
    noise_variance
        σ², at least 0.
    covariance
        Σ: d×d rows, symmetric positive definite; `{rho: ρ}` for Σ_ij = ρ^|i−j|; or None for the
        identity.
    """

    d: Annotated[int, pydantic.Field(ge=1)] = 5
    n_context: Annotated[int, pydantic.Field(ge=1)] = 40
    noise_variance: Annotated[float, pydantic.Field(ge=0)] = 0.1
    covariance: Annotated[Rows | KacMurdockSzego | None, pydantic.BeforeValidator(_rows_or_rho)] = (
        None
    )

    @pydantic.model_validator(mode="after")
    def _covariance_is_one(self) -> Self:
        if self.covariance is None:
            return self
        smallest = self.d * np.finfo(float).eps  # relative to the largest: below is rounding
        if isinstance(self.covariance, KacMurdockSzego):
            rho = abs(self.covariance.rho)
            if (1 - rho) / (1 + rho) <= smallest:  # a bound on the ratio of the eigenvalues
                raise ValueError(f"rho = {self.covariance.rho!r} is 1 or -1 up to rounding")
            return self
        rows = [len(row) for row in self.covariance]
        if rows != [self.d] * self.d:
            raise ValueError(f"covariance needs {self.d} rows of {self.d}; its rows have {rows}")
        matrix = np.array(self.covariance)
        if not np.allclose(matrix, matrix.T, rtol=1e-12, atol=0):
            raise ValueError("covariance is not symmetric")
        values = np.linalg.eigvalsh(matrix)
        if values[0] <= smallest * values[-1]:
            raise ValueError(
                f"covariance is not positive definite: its smallest eigenvalue is {values[0]:.3g}"
            )
        return self

    @property
    def sigma(self) -> Float[np.ndarray, "d d"]:
        """Σ as a matrix; raises InputError where that is beyond 1 GiB."""
        if self.d > _LARGEST_D:
            raise InputError(f"d = {self.d}; accepted: up to {_LARGEST_D}, for Σ is stored whole")
        if self.covariance is None:
            return np.eye(self.d)
        if isinstance(self.covariance, KacMurdockSzego):
            return preconditioned.kac_murdock_szego(self.d, self.covariance.rho)
        return np.array(self.covariance)

    @property
    def isotropic(self) -> bool:
        """Whether Σ is the identity."""
        return self.covariance is None or bool((self.sigma == np.eye(self.d)).all())

    @property
    def n_positions(self) -> int:
        """L + 1: the context and the query."""
        return self.n_context + 1

    def at_length(self, n_context: int) -> Self:
        """Return the same task with `n_context` examples a context."""
        length = integer("n_context", n_context, 1)
        return self.model_copy(update={"n_context": length})

    def constants(self) -> dict[str, tuple[Var, float | np.ndarray]]:
        """Return d, L, σ² and Σ."""
        axes = ("covariate", "covariate_other")
        return {
            "d": (Var((), "1", "dimension of the covariates", 1), self.d),
            "n_context": (Var((), "1", "examples in a context, L", 1), self.n_context),
            "noise_variance": (
                Var((), "1", "variance of the noise, sigma squared", 0),
                self.noise_variance,
            ),
            "covariance": (Var(axes, "1", "covariance of the covariates, Sigma"), self.sigma),
        }

    def correlated(
        self, normals: "Float[Tensor, '*models d pos batch']"
    ) -> "Float[Tensor, '*models d pos batch']":
        """Return covariates made from independent standard normals."""
        if self.covariance is None:
            return normals
        import torch

        from mechicl.tasks.factors import cholesky_rows

        factor = torch.tensor(cholesky_rows(self), dtype=normals.dtype, device=normals.device)
        return (factor @ normals.flatten(-2)).unflatten(-1, normals.shape[-2:])
