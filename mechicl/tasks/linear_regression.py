"""In-context linear regression with Gaussian covariates (he2025, sections 2 and 5.3)."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

import numpy as np
from jaxtyping import Float

from mechicl.schema import Var
from mechicl.tasks.base import Prompts, register
from mechicl.tasks.covariates import GaussianRegression
from mechicl.theory import linear_regression as theory
from mechicl.theory import preconditioned, regressors

if TYPE_CHECKING:
    from torch import Tensor


@register
class LinearRegression(GaussianRegression):
    """x ~ N(0, Σ), β ~ N(0, I/d), y = βᵀx + ε with ε ~ N(0, σ²); a new β and context a prompt.

    A prompt is the embedding (2.1): position ℓ < L holds (x_ℓ, y_ℓ), the last one (x_q, 0). Its
    target is y_q = βᵀx_q + ε_q, noise included, as in the loss (2.5). Settings are those of
    `GaussianRegression`.
    """

    name: Literal["linear_regression"] = "linear_regression"  # pyright: ignore[reportIncompatibleVariableOverride]

    @property
    def d_model(self) -> int:
        """A covariate and its response: d + 1."""
        return self.d + 1

    @property
    def n_normals(self) -> int:
        """(d + 1)(L + 1) for covariates and noise, d for β."""
        return self.d_model * self.n_positions + self.d

    def constants(self) -> dict[str, tuple[Var, float | np.ndarray]]:
        """Return d, L, σ², Σ, and whether covariates are isotropic."""
        isotropic = Var((), "1", "1 where covariates have identity covariance", 0, 1)
        return {**super().constants(), "isotropic": (isotropic, self.isotropic)}

    def prompts(self, examples: "Float[Tensor, '*models batch n_normals']") -> Prompts:
        """Embed covariates and responses as in (2.1).

        Computed with the batch as the last axis, as training draws it: a vector of prompts at a
        time, whatever d and L are.
        """
        import torch

        d, positions = self.d, self.n_positions
        normals = examples.mT
        x = self.correlated(normals[..., : d * positions, :].unflatten(-2, (d, positions)))
        noise = normals[..., d * positions : -d, :]
        beta = normals[..., -d:, :] / d**0.5
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

        - `ridge`: at penalty d·σ², the posterior mean, hence optimal, for every Σ and length.
        - `least_squares`: of least norm where the context does not determine it.
        - `vanilla_gd`, `debiased_gd` (4.11): one step, at the scalar rate that is best for Σ at
          this task's own L, whatever the length of `inputs`.
        - `preconditioned_gd`, `debiased_preconditioned_gd`: one step with the best matrix for Σ at
          this task's own L, (5.6) and its debiased counterpart. Where Σ = I that matrix is a
          multiple of I and they are left out: they are the two above.
        - `single_head` (4.12): at the (ω*, μ*) that minimise the approximate loss (4.1), which is
          for Σ = I; left out for other Σ.
        """
        inputs = np.asarray(inputs, dtype=float)
        x, y, query = prompts = inputs[..., :-1, :-1], inputs[..., :-1, -1], inputs[..., -1, :-1]
        at = {"n_context": self.n_context, "noise_variance": self.noise_variance}
        both = regressors.ridge(  # at once: most of the time is one decomposition
            x[..., None, :, :],
            y[..., None, :],
            query[..., None, :],
            penalty=np.array([self.d * self.noise_variance, 0.0]),
        )
        found = {"ridge": both[..., 0], "least_squares": both[..., 1]}
        for debiased, name in ((False, "vanilla_gd"), (True, "debiased_gd")):
            rate = preconditioned.optimal_scalar_learning_rate(self.sigma, debiased=debiased, **at)
            step = regressors.debiased_gd if debiased else regressors.vanilla_gd
            found[name] = step(*prompts, learning_rate=rate)
        if self.isotropic:
            omega, mu = theory.single_head_optimum(d=self.d, **at)
            found["single_head"] = regressors.kernel_regression(
                *prompts, omega=np.atleast_1d(omega), mu=np.atleast_1d(mu)
            )
            return found
        for debiased, name in (
            (False, "preconditioned_gd"),
            (True, "debiased_preconditioned_gd"),
        ):
            matrix = preconditioned.optimal_preconditioner(self.sigma, debiased=debiased, **at)
            found[name] = regressors.preconditioned_gd(
                *prompts, preconditioner=matrix, debiased=debiased
            )
        return found
