"""One layer of multi-head softmax attention, as he2025 (2.2) writes it."""

from typing import TYPE_CHECKING, Literal

from mechicl.models.attention import OneLayerAttention, softmax
from mechicl.models.base import register
from mechicl.tasks import Task

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor


@register
class SoftmaxAttention(OneLayerAttention):
    """TF(Z) = Z + Σ_h O V Z · softmax(mask(score_scale · Zᵀ Kᵀ Q Z)); see `OneLayerAttention`."""

    name: Literal["softmax_attention"] = "softmax_attention"  # pyright: ignore[reportIncompatibleVariableOverride]

    @property
    def slope(self) -> float:
        """exp(s) = 1 + s + ..."""
        return 1.0

    @property
    def is_softmax(self) -> bool:
        """Yes."""
        return True

    def weigh(
        self,
        task: Task,
        scores: "Float[Tensor, '...']",
        dim: int,
        allowed: "Bool[Tensor, '...'] | None" = None,
    ) -> "Float[Tensor, '...']":
        """Softmax over the allowed keys."""
        del task
        return softmax(scores, dim, allowed)
