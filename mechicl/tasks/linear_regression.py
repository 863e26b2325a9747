"""In-context linear regression with Gaussian covariates (he2025, section 2)."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
import pydantic
from jaxtyping import Float

from mechicl.schema import Var
from mechicl.tasks.base import Prompts, Task, register
from mechicl.theory import linear_regression as theory
from mechicl.theory import regressors

if TYPE_CHECKING:
    from torch import Tensor


@register
class LinearRegression(Task):
    """x ~ N(0, Σ), β ~ N(0, I/d), y = βᵀx + ε with ε ~ N(0, σ²); a new β and context a prompt.

    A prompt is the embedding (2.1): position ℓ < L holds (x_ℓ, y_ℓ), the last one (x_q, 0). Its
    target is y_q = βᵀx_q + ε_q, noise included, as in the loss (2.5).

    Attributes
    ----------
    d
        Dimension of the covariates.
    n_context
        Examples in a context, L.
    noise_variance
        σ², at least 0.
    covariance
        Σ, d×d, symmetric positive definite; None is the identity.
    """

    name: Literal["linear_regression"] = "linear_regression"  # pyright: ignore[reportIncompatibleVariableOverride]
    d: Annotated[int, pydantic.Field(ge=1)] = 5
    n_context: Annotated[int, pydantic.Field(ge=1)] = 40
    noise_variance: Annotated[float, pydantic.Field(ge=0)] = 0.1
    covariance: tuple[tuple[float, ...], ...] | None = None

    @pydantic.model_validator(mode="after")
    def _covariance_is_one(self) -> "LinearRegression":
        if self.covariance is None:
            return self
        rows = [len(row) for row in self.covariance]
        if rows != [self.d] * self.d:
            raise ValueError(f"covariance needs {self.d} rows of {self.d}; its rows have {rows}")
        matrix = np.array(self.covariance)
        if not np.allclose(matrix, matrix.T, rtol=1e-12, atol=0):
            raise ValueError("covariance is not symmetric")
        smallest = np.linalg.eigvalsh(matrix)[0]
        if smallest <= 0:
            raise ValueError(
                f"covariance is not positive definite: its smallest eigenvalue is {smallest:.3g}"
            )
        return self

    @property
    def isotropic(self) -> bool:
        """Whether Σ is the identity."""
        return self.covariance is None or bool((np.array(self.covariance) == np.eye(self.d)).all())

    @property
    def d_model(self) -> int:
        """A covariate and its response: d + 1."""
        return self.d + 1

    @property
    def n_positions(self) -> int:
        """L + 1: the context and the query."""
        return self.n_context + 1

    @property
    def n_normals(self) -> int:
        """(d + 1)(L + 1) for covariates and noise, d for β."""
        return self.d_model * self.n_positions + self.d

    def constants(self) -> dict[str, tuple[Var, float]]:
        """Return d, L, σ² and whether covariates are isotropic."""
        return {
            "d": (Var((), "1", "dimension of the covariates", 1), self.d),
            "n_context": (Var((), "1", "examples in a context, L", 1), self.n_context),
            "noise_variance": (
                Var((), "1", "variance of the noise, sigma squared", 0),
                self.noise_variance,
            ),
            "isotropic": (
                Var((), "1", "1 where covariates have identity covariance", 0, 1),
                self.isotropic,
            ),
        }

    def prompts(self, normals: "Float[Tensor, '*models batch n_normals']") -> Prompts:
        """Embed covariates and responses as in (2.1).

        Computed with the batch as the last axis, as training draws it: a vector of prompts at a
        time, whatever d and L are.
        """
        import torch

        d, positions = self.d, self.n_positions
        normals = normals.mT
        x = normals[..., : d * positions, :].unflatten(-2, (d, positions))
        noise = normals[..., d * positions : -d, :]
        beta = normals[..., -d:, :] / d**0.5
        if self.covariance is not None:
            sigma = torch.tensor(self.covariance, dtype=torch.float64, device=normals.device)
            factor = torch.linalg.cholesky(sigma).to(normals.dtype)
            x = (factor[:, :, None, None] * x[..., None, :, :, :]).sum(-3)
        y = (beta[..., None, :] * x).sum(-3) + self.noise_variance**0.5 * noise
        shown = torch.cat([y[..., :-1, :], torch.zeros_like(y[..., -1:, :])], -2)
        inputs = torch.cat([x, shown[..., None, :, :]], -3)  # (*models, d_model, pos, batch)
        return Prompts(inputs.movedim(-1, -3).mT, y[..., -1, :])

    def loss(
        self, predictions: "Float[Tensor, '*batch']", targets: "Float[Tensor, '*batch']"
    ) -> "Float[Tensor, '*batch']":
        """Squared error (2.5)."""
        return (predictions - targets) ** 2

    def references(
        self, inputs: Float[np.ndarray, "*batch pos d_model"]
    ) -> Mapping[str, Float[np.ndarray, "*batch"]]:
        """Predict as the classical estimators of he2025 do, at the length of `inputs`.

        `ridge` at penalty d·σ² is the posterior mean, hence optimal, for every Σ. The steps of
        vanilla and debiased GD (4.11) and the single head (4.12) are tuned for Σ = I, at the
        trained length.
        """
        inputs = np.asarray(inputs, dtype=float)
        x, y, x_query = inputs[..., :-1, :-1], inputs[..., :-1, -1], inputs[..., -1, :-1]
        at = {"d": self.d, "n_context": self.n_context, "noise_variance": self.noise_variance}
        omega, mu = theory.single_head_optimum(**at)
        return {
            "ridge": regressors.ridge(x, y, x_query, penalty=self.d * self.noise_variance),
            "vanilla_gd": regressors.vanilla_gd(
                x, y, x_query, learning_rate=theory.optimal_vanilla_learning_rate(**at)
            ),
            "debiased_gd": regressors.debiased_gd(
                x, y, x_query, learning_rate=theory.optimal_learning_rate(**at)
            ),
            "single_head": regressors.kernel_regression(
                x, y, x_query, omega=np.atleast_1d(omega), mu=np.atleast_1d(mu)
            ),
        }
