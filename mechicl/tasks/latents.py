"""Priors of the coefficients of a regression: raj2026's tree and Gaussian."""

from abc import ABC, abstractmethod
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
import pydantic
from jaxtyping import Float

from mechicl.config import Config
from mechicl.schema import Var
from mechicl.theory import latent_bayes, priors

if TYPE_CHECKING:
    from torch import Tensor

Constants = dict[str, tuple[Var, float | np.ndarray]]


class Prior(Config, ABC):
    """A distribution of θ ∈ R^K, which a regression draws anew for every context."""

    @property
    @abstractmethod
    def n_covariates(self) -> int:
        """K."""

    @property
    @abstractmethod
    def n_normals(self) -> int:
        """Standard normals that one θ is made from."""

    @abstractmethod
    def constants(self) -> Constants:
        """Return the numbers and arrays that define the prior, for probes."""

    @abstractmethod
    def draw(
        self, normals: "Float[Tensor, '*models n_normals batch']"
    ) -> "dict[str, tuple[tuple[str, ...], Tensor]]":
        """Return `theta`, (*models, covariate, batch), and what names it: own dims, and values."""

    @abstractmethod
    def posterior_mean(
        self,
        moments: Float[np.ndarray, "*batch entry entry"],
        *,
        n_context: int,
        noise_variance: float,
    ) -> Float[np.ndarray, "*batch covariate"]:
        """Return E[θ | context]; see `mechicl.theory.latent_bayes`."""


class TreePrior(Prior):
    """Uniform over the 2^h leaves of a binary tree, θ(σ) = κ Σ_{m<h} α^{m/2} s_{m+1} e_{s_1…s_m}.

    Nodes and leaves are numbered as in `mechicl.theory.priors`.

    Attributes
    ----------
    depth
        h, from 1; K = 2^h − 1.
    alpha
        α, above 0 and below 1.
    """

    kind: Literal["tree"] = "tree"
    depth: Annotated[int, pydantic.Field(ge=1, le=12)] = 6
    alpha: Annotated[float, pydantic.Field(gt=0, lt=1)] = 0.5

    @property
    def n_covariates(self) -> int:
        """One coordinate for each inner node: 2^h − 1."""
        return 2**self.depth - 1

    @property
    def n_normals(self) -> int:
        """One for each spin: its sign."""
        return self.depth

    @property
    def leaves(self) -> Float[np.ndarray, "leaf covariate"]:
        """θ of every leaf."""
        return _leaves(self.depth, self.alpha)

    def constants(self) -> Constants:
        """Return h, α, and θ of every leaf."""
        return {
            "depth": (Var((), "1", "depth of the tree prior, h", 1), self.depth),
            "alpha": (Var((), "1", "ratio of variances along the prior", 0, 1), self.alpha),
            "leaves": (Var(("leaf", "covariate"), "1", "theta of every leaf", -1, 1), self.leaves),
        }

    def draw(
        self, normals: "Float[Tensor, '*models n_normals batch']"
    ) -> "dict[str, tuple[tuple[str, ...], Tensor]]":
        """Return θ and the number of its leaf: s_m is the sign of the m-th normal."""
        import torch

        bits = 2 ** torch.arange(self.depth - 1, -1, -1)
        leaf = ((normals > 0) * bits[:, None]).sum(-2)
        theta = torch.from_numpy(self.leaves).to(normals.dtype)[leaf]
        return {"theta": (("covariate",), theta.mT), "leaf": ((), leaf)}

    def posterior_mean(
        self,
        moments: Float[np.ndarray, "*batch entry entry"],
        *,
        n_context: int,
        noise_variance: float,
    ) -> Float[np.ndarray, "*batch covariate"]:
        """Average over the leaves by their posterior weights."""
        return latent_bayes.tree_mean(
            moments, self.leaves, n_context=n_context, noise_variance=noise_variance
        )


class GaussianPrior(Prior):
    """θ ~ N(0, C₀) with C₀ = U diag(α^k, k = 1 … K) Uᵀ, U uniform over orthogonal matrices.

    Attributes
    ----------
    d
        K, from 1.
    alpha
        α, above 0, up to 1.
    rotation
        Seed of U, a part of the task and the same for all seeds of a run; None is U = I.
    """

    kind: Literal["gaussian"] = "gaussian"
    d: Annotated[int, pydantic.Field(ge=1, le=4095)] = 32
    alpha: Annotated[float, pydantic.Field(gt=0, le=1)] = 0.75
    rotation: Annotated[int, pydantic.Field(ge=0)] | None = 0

    @property
    def n_covariates(self) -> int:
        """K."""
        return self.d

    @property
    def n_normals(self) -> int:
        """One for each coordinate."""
        return self.d

    def constants(self) -> Constants:
        """Return α and C₀."""
        axes = ("covariate", "covariate_other")
        return {
            "alpha": (Var((), "1", "ratio of variances along the prior", 0, 1), self.alpha),
            "prior_covariance": (
                Var(axes, "1", "covariance of theta, C_0"),
                priors.gaussian_covariance(self.d, self.alpha, self.rotation),
            ),
        }

    def draw(
        self, normals: "Float[Tensor, '*models n_normals batch']"
    ) -> "dict[str, tuple[tuple[str, ...], Tensor]]":
        """Return θ = U diag(α^{k/2}) g."""
        import torch

        factor = _gaussian_factor(self.d, self.alpha, self.rotation)
        theta = torch.from_numpy(factor).to(normals.dtype) @ normals
        return {"theta": (("covariate",), theta)}

    def posterior_mean(
        self,
        moments: Float[np.ndarray, "*batch entry entry"],
        *,
        n_context: int,
        noise_variance: float,
    ) -> Float[np.ndarray, "*batch covariate"]:
        """Solve the ridge regression of the prior."""
        covariance = priors.gaussian_covariance(self.d, self.alpha, self.rotation)
        return latent_bayes.gaussian_mean(
            moments, covariance, n_context=n_context, noise_variance=noise_variance
        )


def _known(given: object) -> object:
    """Say which kinds there are before one of them is checked."""
    kinds = {"tree": TreePrior, "gaussian": GaussianPrior}
    if isinstance(given, Prior):
        return given
    kind = given.get("kind") if isinstance(given, dict) else None
    if not isinstance(kind, str) or kind not in kinds:
        raise ValueError(
            "must be {kind: tree, depth, alpha} or {kind: gaussian, d, alpha, rotation}"
        )
    return kinds[kind].model_validate(given)


AnyPrior = Annotated[TreePrior | GaussianPrior, pydantic.BeforeValidator(_known)]


@lru_cache(maxsize=4)
def _leaves(depth: int, alpha: float) -> Float[np.ndarray, "leaf covariate"]:
    return priors.tree_leaves(depth, alpha)


@lru_cache(maxsize=4)
def _gaussian_factor(
    d: int, alpha: float, rotation: int | None
) -> Float[np.ndarray, "covariate covariate"]:
    return priors.gaussian_axes(d, rotation) * np.sqrt(priors.gaussian_spectrum(d, alpha))
