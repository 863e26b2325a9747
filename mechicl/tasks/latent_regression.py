"""In-context regression on coefficients with a structured prior (raj2026)."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Literal, Self, TypeVar

import numpy as np
import pydantic
from jaxtyping import Float

from mechicl.errors import integer, invalid
from mechicl.schema import Var
from mechicl.tasks.base import ContinuousTask, Prompts, register
from mechicl.tasks.latents import AnyPrior, Constants, TreePrior

if TYPE_CHECKING:
    from torch import Tensor

Column = TypeVar("Column", int, "Tensor")

_AT_ONCE = 2**25  # bytes of moments that references hold at a time


@register
class LatentRegression(ContinuousTask):
    """θ from a prior, x ~ N(0, I_K), y = θᵀx + η with η ~ N(0, σ²), σ² = N τ²; several queries.

    A prompt has N context tokens z = (x, y) and Q queries (x, 0) after them. Its targets are θᵀx of
    the queries, without noise: the loss is ⟨(θᵀx − ŷ)²⟩ over the queries.

    Models that pool read a context through G = (1/N) Σ z zᵀ alone. Given θ, N·G has the Wishart law
    of N degrees of freedom and covariance C Cᵀ, C = [[I, 0], [θᵀ, σ]]; so by Bartlett's
    decomposition K + 1 tokens √((K + 1)/N)·C A, A lower triangular, with chi variables of N, N − 1,
    … degrees of freedom on its diagonal and normals below, have a mean of z zᵀ of exactly the law
    of G. With `context: moments` the context is these pseudo-tokens, at a cost that does not grow
    with N. It is for models that do not ask where a token is, nor how many there are.

    Attributes
    ----------
    prior
        Of θ: `{kind: tree, depth, alpha}` or `{kind: gaussian, d, alpha, rotation}`.
    n_context
        N; at least K + 1 with `context: moments`.
    n_queries
        Q.
    tau
        τ, at least 0: standard deviation of the noise that N examples leave on a coordinate of θ.
    context
        `moments` or `tokens`: whether a context is pseudo-tokens or its N examples.
    """

    name: Literal["latent_regression"] = "latent_regression"  # pyright: ignore[reportIncompatibleVariableOverride]
    prior: AnyPrior = TreePrior()
    n_context: Annotated[int, pydantic.Field(ge=1)] = 512
    n_queries: Annotated[int, pydantic.Field(ge=1)] = 64
    tau: Annotated[float, pydantic.Field(ge=0)] = 0.1
    context: Literal["moments", "tokens"] = "moments"

    @pydantic.model_validator(mode="after")
    def _moments_are_drawn(self) -> Self:
        if self.context == "moments" and self.n_context < self.d_model:
            raise ValueError(
                f"n_context = {self.n_context} is below K + 1 = {self.d_model}, where moments have "
                "no density to be drawn from; take context: tokens, or a longer one"
            )
        return self

    @pydantic.model_validator(mode="after")
    def _noise_is_finite(self) -> Self:
        # Of prompts, which are in single precision. Not by **, which raises where it overflows.
        most = float(np.finfo(np.float32).max)
        if not self.n_context * self.tau * self.tau < most:
            raise ValueError(
                f"tau = {self.tau:g} makes the variance N tau^2 of responses larger than single "
                f"precision holds; accepted: below {(most / self.n_context) ** 0.5:.1e}"
            )
        return self

    @property
    def d(self) -> int:
        """Dimension K of covariates and coefficients."""
        return self.prior.n_covariates

    @property
    def d_model(self) -> int:
        """A covariate and its response: K + 1."""
        return self.d + 1

    @property
    def n_tokens(self) -> int:
        """Positions of a context: N, or the K + 1 pseudo-tokens."""
        return self.n_context if self.context == "tokens" else self.d_model

    @property
    def n_positions(self) -> int:
        """The context and the queries."""
        return self.n_tokens + self.n_queries

    @property
    def target_sizes(self) -> dict[str, int]:
        """A target has one axis, `query`."""
        return {"query": self.n_queries}

    @property
    def noise_variance(self) -> float:
        """σ² = N τ²."""
        return self.n_context * self.tau**2

    @property
    def n_normals(self) -> int:
        """Those of θ, of the context, and of the queries."""
        return self.prior.n_normals + self._n_context_normals + self.n_queries * self.d

    @property
    def _n_context_normals(self) -> int:
        if self.context == "tokens":
            return self.n_context * self.d_model
        return self.d_model * (self.d_model + 1) // 2

    def at_length(self, n_context: int) -> Self:
        """Return the same task with N examples a context, each with the noise σ² of this one."""
        length = integer("n_context", n_context, 1)
        tau = self.tau * (self.n_context / length) ** 0.5
        settings = {**self.model_dump(), "n_context": length, "tau": tau}
        try:
            return type(self).model_validate(settings)
        except pydantic.ValidationError as error:
            raise invalid(f"task {self.name!r}", error) from None

    def constants(self) -> Constants:
        """Return K, N, Q, σ², τ and the constants of the prior."""
        return {
            "d": (Var((), "1", "dimension of the covariates", 1), self.d),
            "n_context": (Var((), "1", "examples in a context, N", 1), self.n_context),
            "n_queries": (Var((), "1", "queries of a prompt, Q", 1), self.n_queries),
            "noise_variance": (
                Var((), "1", "variance of the noise, sigma squared", 0),
                self.noise_variance,
            ),
            "tau": (Var((), "1", "noise of a measurement, sigma/sqrt(N)", 0), self.tau),
            **self.prior.constants(),
        }

    def latents(
        self, normals: "Float[Tensor, '*models batch n_normals']"
    ) -> "dict[str, tuple[tuple[str, ...], Tensor]]":
        """Return `theta` (batch, covariate), and with a tree prior its `leaf` (batch)."""
        drawn = self.prior.draw(normals[..., : self.prior.n_normals].mT)
        return {name: (dims, value.mT if dims else value) for name, (dims, value) in drawn.items()}

    def examples(
        self, normals: "Float[Tensor, '*models batch n_normals']"
    ) -> "Float[Tensor, '*models batch n_numbers']":
        """Return θ and what is left of the normals, those of the diagonal of A made chi variables.

        Tables of leaves and of quantiles, which are better looked up ahead of the step. The batch
        stays along memory.
        """
        import torch

        from mechicl.tasks.wishart import chi

        along = normals.mT
        theta = self.prior.draw(along[..., : self.prior.n_normals, :])["theta"][1]
        numbers = torch.cat([theta, along[..., self.prior.n_normals :, :]], -2)
        if self.context == "moments":
            freedom = tuple(self.n_context - j for j in range(self.d_model))
            rows = [self.d + self._column(j) for j in range(self.d_model)]
            numbers[..., rows, :] = chi(numbers[..., rows, :], freedom)
        return numbers.mT

    def prompts(self, examples: "Float[Tensor, '*models batch n_numbers']") -> Prompts:
        """Make the tokens of a context from θ and the rest, and those of the queries.

        Computed with the batch as the last axis, as training draws it.
        """
        import torch

        theta, made, queries = examples.mT.split(
            [self.d, self._n_context_normals, self.n_queries * self.d], -2
        )
        x, noise = (self._pseudo_tokens if self.context == "moments" else self._tokens)(made)
        query = queries.unflatten(-2, (self.n_queries, self.d))
        y = (x * theta[..., None, :, :]).sum(-2) + self.noise_variance**0.5 * noise
        targets = (query * theta[..., None, :, :]).sum(-2)
        shown = torch.cat([y, torch.zeros_like(targets)], -2)
        inputs = torch.cat([torch.cat([x, query], -3), shown[..., None, :]], -2)
        return Prompts(inputs.movedim(-1, -3).contiguous(), targets.mT)

    def _tokens(
        self, made: "Float[Tensor, '*models n_normals batch']"
    ) -> "tuple[Float[Tensor, '*models token d batch'], Float[Tensor, '*models token batch']]":
        """Return the covariates and the noise, of variance 1, of N tokens."""
        tokens = made.unflatten(-2, (self.n_context, self.d_model))
        return tokens[..., :-1, :], tokens[..., -1, :]

    def _pseudo_tokens(
        self, made: "Float[Tensor, '*models n_normals batch']"
    ) -> "tuple[Float[Tensor, '*models token d batch'], Float[Tensor, '*models token batch']]":
        """Return √((K + 1)/N) A, a column of it a token: covariates, and noise as the last entry.

        Columns of A come one after another from their entry on the diagonal down.
        """
        import torch

        size = self.d_model
        entry = torch.arange(size, device=made.device)
        token = entry[:, None]
        place = self._column(token) + entry - token
        below = entry >= token
        columns = made[..., (place * below).flatten(), :].unflatten(-2, (size, size))
        columns = columns * (below * (size / self.n_context) ** 0.5)[..., None]
        return columns[..., :-1, :], columns[..., -1, :]

    def _column(self, j: "Column") -> "Column":
        """Return where column j of A begins."""
        return j * self.d_model - j * (j - 1) // 2

    def loss(
        self,
        predictions: "Float[Tensor, '*batch query']",
        targets: "Float[Tensor, '*batch query']",
    ) -> "Float[Tensor, '*batch']":
        """Squared error, averaged over the queries."""
        return ((predictions - targets) ** 2).mean(-1)

    def moments(
        self, inputs: Float[np.ndarray, "*batch pos d_model"]
    ) -> Float[np.ndarray, "*batch d_model d_model"]:
        """Return G = ⟨z zᵀ⟩ over the context of each prompt, in float64."""
        context = np.asarray(inputs, dtype=float)[..., : -self.n_queries, :]
        return np.swapaxes(context, -1, -2) @ context / context.shape[-2]

    def references(
        self, inputs: Float[np.ndarray, "*batch pos d_model"]
    ) -> Mapping[str, Float[np.ndarray, "*batch query"]]:
        """Predict as exact and classical estimators do.

        - `posterior_mean`: E[θᵀx | context] under the prior, hence optimal, with no limit on what
          is communicated. With pseudo-tokens N is this task's own.
        - `least_squares`: of least norm where the context does not determine it.
        - `moment`: G_xyᵀx, the measurement θ + ξ itself, which is what large N leaves of the other.
        """
        inputs = np.asarray(inputs)
        batch = inputs.shape[:-2]
        flat = inputs.reshape(-1, *inputs.shape[-2:])
        size = max(1, _AT_ONCE // (8 * self.d_model**2))
        parts = [self._references(flat[at : at + size]) for at in range(0, len(flat), size)]
        return {
            name: np.concatenate([part[name] for part in parts]).reshape(*batch, self.n_queries)
            for name in parts[0]
        }

    def _references(
        self, inputs: Float[np.ndarray, "batch pos d_model"]
    ) -> dict[str, Float[np.ndarray, "batch query"]]:
        moments = self.moments(inputs)
        length = inputs.shape[-2] - self.n_queries if self.context == "tokens" else self.n_context
        gram, seen = moments[..., :-1, :-1], moments[..., :-1, -1:]
        # Solving is some twenty times as fast, where the solution is the only one.
        unique = length >= self.d
        least = (
            np.linalg.solve(gram, seen) if unique else np.linalg.pinv(gram, hermitian=True) @ seen
        )
        coefficients = {
            "posterior_mean": self.prior.posterior_mean(
                moments, n_context=length, noise_variance=self.noise_variance
            ),
            "least_squares": least[..., 0],
            "moment": seen[..., 0],
        }
        queries = inputs[..., -self.n_queries :, :-1].astype(float)
        return {name: (queries @ theta[..., None])[..., 0] for name, theta in coefficients.items()}
