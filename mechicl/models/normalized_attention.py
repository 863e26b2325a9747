"""One layer of attention with a normalised activation in place of softmax (he2025, section 5.2)."""

from typing import TYPE_CHECKING, Annotated, Literal

import pydantic

from mechicl.models.attention import OneLayerAttention, softmax
from mechicl.models.base import register
from mechicl.tasks import Task

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor

Activation = Literal["exp", "affine", "square", "one_plus_tanh"]


@register
class NormalizedAttention(OneLayerAttention):
    """Attention weights f(s_j) / Σ_k f(s_k), f ≈ 1 + C_f·s around 0; see `OneLayerAttention`.

    The sum may come near zero or change sign for `affine`, whose population loss is infinite for
    every KQ but 0 (the normaliser has a density at zero); a run in which it does may diverge.

    Attributes
    ----------
    activation
        f: `exp` (softmax), `affine` 1 + Cs, `square` (1 + Cs)², `one_plus_tanh` 1 + tanh(s).
    coefficient
        C of `affine` and `square`.
    """

    name: Literal["normalized_attention"] = "normalized_attention"  # pyright: ignore[reportIncompatibleVariableOverride]
    activation: Activation = "one_plus_tanh"
    coefficient: Annotated[float, pydantic.Field(gt=0)] = 1.0

    @pydantic.model_validator(mode="after")
    def _coefficient_is_used(self) -> "NormalizedAttention":
        if self.activation in ("exp", "one_plus_tanh") and self.coefficient != 1.0:
            raise ValueError(
                f"activation {self.activation} has no coefficient; score_scale scales its scores"
            )
        return self

    @property
    def slope(self) -> float:
        """C for `affine`, 2C for `square`, 1 for the others."""
        return {"affine": self.coefficient, "square": 2 * self.coefficient}.get(
            self.activation, 1.0
        )

    @property
    def is_softmax(self) -> bool:
        """Whether f is exp."""
        return self.activation == "exp"

    def weigh(
        self,
        task: Task,
        scores: "Float[Tensor, '...']",
        dim: int,
        allowed: "Bool[Tensor, '...'] | None" = None,
    ) -> "Float[Tensor, '...']":
        """Apply f and divide by its sum over the allowed keys."""
        del task
        if self.activation == "exp":
            return softmax(scores, dim, allowed)
        values = self._values(scores)
        if allowed is None:
            return values / values.sum(dim, keepdim=True)
        values = values.where(allowed, 0.0)
        total = values.sum(dim, keepdim=True)
        return values / total.where(allowed.any(dim, keepdim=True), 1.0)

    def _values(self, scores: "Tensor") -> "Tensor":
        if self.activation == "affine":
            return 1 + self.coefficient * scores
        if self.activation == "square":
            return (1 + self.coefficient * scores) ** 2
        # 1 + tanh(s), which would be 0 in float32 from s = -9 down, and 0/0 where all keys are.
        return 2 * (2 * scores).sigmoid()
