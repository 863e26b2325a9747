"""In-context regression of several responses on one covariate (he2025, section 5.4)."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Literal, Self

import numpy as np
import pydantic
from jaxtyping import Float

from mechicl.schema import Var
from mechicl.tasks.base import Prompts, register
from mechicl.tasks.covariates import GaussianRegression
from mechicl.theory import linear_regression as theory
from mechicl.theory import preconditioned, regressors

if TYPE_CHECKING:
    from torch import Tensor


@register
class MultiTaskRegression(GaussianRegression):
    """N responses of one x, y_n = Σ_{i ∈ 𝒮_n} β_i x_i + ε_n (Definitions 5.1 and 5.2).

    x ~ N(0, Σ), β ~ N(0, I/d), ε_n ~ N(0, σ²); a new β a prompt, shared by its tasks, whose index
    sets 𝒮_n are fixed. A prompt is position ℓ < L with (x_ℓ, y_ℓ1 .. y_ℓN), and the last one with
    (x_q, 0). The target is y_q, noise included. With one task that reads all covariates, the same
    normals make the prompts of `linear_regression`, bit for bit.

    Attributes
    ----------
    supports
        𝒮_n for each task: indices of covariates from 0, each set nonempty; sets may overlap.
    """

    name: Literal["multi_task_regression"] = "multi_task_regression"  # pyright: ignore[reportIncompatibleVariableOverride]
    d: Annotated[int, pydantic.Field(ge=1)] = 6
    supports: tuple[tuple[int, ...], ...] = ((0, 1, 2, 3), (2, 3, 4, 5))

    @pydantic.model_validator(mode="after")
    def _supports_are_sets(self) -> Self:
        if not self.supports:
            raise ValueError("supports needs one set of covariates a task, one task at least")
        for number, support in enumerate(self.supports):
            if not support:
                raise ValueError(
                    f"supports[{number}] is empty; a task reads one covariate at least"
                )
            if len(set(support)) != len(support):
                raise ValueError(f"supports[{number}] = {support} repeats an index")
            if not 0 <= min(support) <= max(support) < self.d:
                raise ValueError(
                    f"supports[{number}] = {support} has indices outside 0 .. {self.d - 1} (d = "
                    f"{self.d})"
                )
        return self

    @property
    def n_responses(self) -> int:
        """N, the number of tasks."""
        return len(self.supports)

    @property
    def target_sizes(self) -> dict[str, int]:
        """A target has one axis, `response`."""
        return {"response": self.n_responses}

    @property
    def d_model(self) -> int:
        """A covariate and its responses: d + N."""
        return self.d + self.n_responses

    @property
    def n_normals(self) -> int:
        """(d + N)(L + 1) for covariates and noise, d for β."""
        return self.d_model * self.n_positions + self.d

    @property
    def membership(self) -> Float[np.ndarray, "response covariate"]:
        """1 where a covariate is in the index set of a task, 0 where not."""
        members = np.zeros((self.n_responses, self.d))
        for number, support in enumerate(self.supports):
            members[number, list(support)] = 1.0
        return members

    def constants(self) -> dict[str, tuple[Var, float | np.ndarray]]:
        """Return d, L, σ², Σ and the index sets."""
        declared = Var(("response", "covariate"), "1", "1 where a task reads a covariate", 0, 1)
        return {**super().constants(), "supports": (declared, self.membership)}

    def prompts(self, examples: "Float[Tensor, '*models batch n_normals']") -> Prompts:
        """Embed covariates and responses; the batch is the last axis while computing."""
        import torch

        d, positions, n = self.d, self.n_positions, self.n_responses
        normals = examples.mT
        x = self.correlated(normals[..., : d * positions, :].unflatten(-2, (d, positions)))
        noise = normals[..., d * positions : -d, :].unflatten(-2, (n, positions))
        beta = normals[..., -d:, :] / d**0.5
        terms = beta[..., None, :] * x  # (*models, d, pos, batch)
        y = torch.stack([terms[..., list(support), :, :].sum(-3) for support in self.supports], -3)
        y = y + self.noise_variance**0.5 * noise
        shown = torch.cat([y[..., :-1, :], torch.zeros_like(y[..., -1:, :])], -2)
        inputs = torch.cat([x, shown], -3)  # (*models, d_model, pos, batch)
        return Prompts(inputs.movedim(-1, -3).mT, y[..., -1, :].mT)

    def loss(
        self,
        predictions: "Float[Tensor, '*batch response']",
        targets: "Float[Tensor, '*batch response']",
    ) -> "Float[Tensor, '*batch']":
        """Squared error (2.5), averaged over the tasks."""
        return ((predictions - targets) ** 2).mean(-1)

    def references(
        self, inputs: Float[np.ndarray, "*batch pos d_model"]
    ) -> Mapping[str, Float[np.ndarray, "*batch response"]]:
        """Predict every response as estimators do that know the index sets.

        - `ridge`: the posterior mean of β given all responses, hence optimal: an example of task n
          tells about every coordinate in 𝒮_n, also for the tasks that share it.
        - `single_task_ridge`: each task from its own responses alone.
        - `debiased_gd`: each task on its own covariates by one debiased step (4.11), at the scalar
          rate that is best for their covariance at this task's own L.
        - `single_head`: each task on its own covariates by one softmax head (4.12), at the (ω*, μ*)
          that minimise the approximate loss (4.1), which is for Σ = I; left out for other Σ.
        """
        inputs = np.asarray(inputs, dtype=float)
        x, y = inputs[..., :-1, : self.d], inputs[..., :-1, self.d :]
        query = inputs[..., -1, : self.d]
        penalty = self.d * self.noise_variance
        rows = np.concatenate([x * member for member in self.membership], -2)
        responses = np.concatenate(np.moveaxis(y, -1, 0), -1)
        queries = query[..., None, :] * self.membership
        joint = regressors.ridge(
            rows[..., None, :, :], responses[..., None, :], queries, penalty=penalty
        )
        found: dict[str, list[np.ndarray]] = {}
        for number, support in enumerate(self.supports):
            columns = list(support)
            own = x[..., columns], y[..., number], query[..., columns]
            # Of unit signal: y·√(d/s) has β ~ N(0, I/s) and noise σ²d/s.
            at = {
                "n_context": self.n_context,
                "noise_variance": self.noise_variance * self.d / len(support),
            }
            sigma = self.sigma[np.ix_(columns, columns)]
            rate = preconditioned.optimal_scalar_learning_rate(sigma, debiased=True, **at)
            one = {
                "single_task_ridge": regressors.ridge(*own, penalty=penalty),
                "debiased_gd": regressors.debiased_gd(*own, learning_rate=rate),
            }
            if self.isotropic:
                omega, mu = theory.single_head_optimum(d=len(support), **at)
                one["single_head"] = regressors.kernel_regression(
                    *own, omega=np.atleast_1d(omega), mu=np.atleast_1d(mu)
                )
            for name, predicted in one.items():
                found.setdefault(name, []).append(predicted)
        return {"ridge": joint} | {name: np.stack(each, -1) for name, each in found.items()}
