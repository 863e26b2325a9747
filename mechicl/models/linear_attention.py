"""One layer of multi-head linear attention (he2025, section 5.1)."""

from typing import TYPE_CHECKING, Literal

from mechicl.errors import InputError
from mechicl.models.attention import OneLayerAttention
from mechicl.models.base import register
from mechicl.tasks import Task

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor


@register
class LinearAttention(OneLayerAttention):
    """TF(Z) = Z + L⁻¹ Σ_h O V Z · mask(score_scale · Zᵀ Kᵀ Q Z) (5.1); see `OneLayerAttention`.

    L is the length of the contexts that the model is trained on, a constant of the model: at
    another length the weights do not rescale, which is why it does not generalise. Keys are the L
    examples: (5.1) as printed sums over the query as well, whose response is not known.
    """

    name: Literal["linear_attention"] = "linear_attention"  # pyright: ignore[reportIncompatibleVariableOverride]

    @property
    def slope(self) -> float:
        """The weight of a key is score/L."""
        return 1.0

    def weigh(
        self,
        task: Task,
        scores: "Float[Tensor, '...']",
        dim: int,
        allowed: "Bool[Tensor, '...'] | None" = None,
    ) -> "Float[Tensor, '...']":
        """Divide the scores by the trained length."""
        del dim
        weights = scores / trained_length(task)
        return weights if allowed is None else weights.where(allowed, 0.0)


def trained_length(task: Task) -> int:
    """Return L of a task; raise InputError for a task whose prompts have no such length."""
    n_context = getattr(task, "n_context", None)
    if n_context is None:
        raise InputError(
            f"linear attention divides by the number of examples, and task {task.name!r} has none; "
            "choose another model"
        )
    return n_context
