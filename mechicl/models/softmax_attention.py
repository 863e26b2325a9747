"""One layer of multi-head softmax attention, as he2025 (2.2) writes it."""

from typing import TYPE_CHECKING, Annotated, Literal

import pydantic

from mechicl.models.base import Model, register
from mechicl.schema import Var
from mechicl.tasks import Task

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from jaxtyping import Float
    from torch import Tensor
    from transformer_lens import HookedTransformer


@register
class SoftmaxAttention(Model):
    """TF(Z) = Z + Σ_h O V Z · softmax(mask(score_scale · Zᵀ Kᵀ Q Z)), each matrix d_model×d_model.

    The mask is strict: a position attends to those before it, not to itself. There is no
    normalisation, no positional embedding, no bias and no MLP. The prediction is the last entry of
    the last position (2.3); that entry of the input is 0, so the residual adds nothing to it.

    Attributes
    ----------
    n_heads
        H.
    score_scale
        Factor on the scores; 1 as in (2.2), 1/√(d+1) as in the authors' code. KQ and ω include it.
    """

    name: Literal["softmax_attention"] = "softmax_attention"  # pyright: ignore[reportIncompatibleVariableOverride]
    n_heads: Annotated[int, pydantic.Field(ge=1)] = 2
    score_scale: Annotated[float, pydantic.Field(gt=0)] = 1.0

    def parameters(self, task: Task) -> dict[str, Var]:
        """Declare W_Q, W_K, W_V and W_O in TransformerLens's layout, for row vectors."""
        del task
        head = ("seed", "step", "layer", "head")
        return {
            "W_Q": Var((*head, "d_model", "d_head"), "1", "query projection"),
            "W_K": Var((*head, "d_model", "d_head"), "1", "key projection"),
            "W_V": Var((*head, "d_model", "d_head"), "1", "value projection"),
            "W_O": Var((*head, "d_head", "d_model"), "1", "output projection"),
        }

    def sizes(self, task: Task) -> dict[str, int]:
        """One layer, H heads, d_head = d_model."""
        width = task.d_model
        return {"layer": 1, "head": self.n_heads, "d_model": width, "d_head": width}

    def constants(self) -> dict[str, tuple[Var, float]]:
        """Return the score scale."""
        return {"score_scale": (Var((), "1", "factor on attention scores"), self.score_scale)}

    def initial(self, task: Task, generator: "torch.Generator") -> "dict[str, Tensor]":
        """Draw from U(−1/√fan_in, 1/√fan_in), PyTorch's default for `nn.Linear`.

        fan_in is d_model for Q, K, V and n_heads · d_model for the stacked output projection.
        """
        import torch

        width = task.d_model
        weights = {}
        for name in ("W_Q", "W_K", "W_V", "W_O"):
            fan_in = width * (self.n_heads if name == "W_O" else 1)
            uniform = torch.rand(1, self.n_heads, width, width, generator=generator)
            weights[name] = (2 * uniform - 1) / fan_in**0.5
        return weights

    def predict(
        self,
        parameters: "Mapping[str, Float[Tensor, '*models layer head d_model d_head']]",
        inputs: "Float[Tensor, '... batch pos d_model']",
    ) -> "Float[Tensor, '*models batch']":
        """Evaluate (2.3) at the query position alone.

        Products are written as broadcast, multiply, sum, with the batch as the last axis: a
        compiler fuses them and runs over a vector of prompts at a time, where a batched matmul of
        6×6 matrices would be a call of its own.
        """
        w_q, w_k, w_v, w_o = (
            parameters[name].select(-4, 0) for name in ("W_Q", "W_K", "W_V", "W_O")
        )
        # Matmuls, so that these small products are made once and not again for every prompt.
        kq = (w_k @ w_q.mT) * self.score_scale  # (*models, head, d_model, d_model)
        ov = w_v @ w_o[..., -1:]  # last row of OV: (*models, head, d_model, 1)
        tokens = inputs.movedim(-3, -1)  # (..., pos, d_model, batch)
        context, query = tokens[..., None, :-1, :, :], tokens[..., -1, :, :]
        keys = (kq.flatten(-3, -2) @ query).unflatten(-2, (self.n_heads, -1))
        scores = (keys[..., None, :, :] * context).sum(-2)  # (*models, head, pos, batch)
        pattern = scores.softmax(-2)
        attended = (pattern[..., None, :] * context).sum(-3)  # (*models, head, d_model, batch)
        return query[..., -1, :] + (attended * ov).sum((-3, -2))

    def hooked(self, task: Task, parameters: "Mapping[str, Tensor]") -> "HookedTransformer":
        """Return the whole sequence-to-sequence map (2.2), with TransformerLens's hook points."""
        from mechicl.models.hooked import ContinuousTransformer

        return ContinuousTransformer.from_parameters(
            parameters, n_positions=task.n_positions, score_scale=self.score_scale
        )
