"""What one-layer attention models share: he2025 (2.2), whatever turns scores into weights."""

from abc import ABC, abstractmethod
from functools import partial
from typing import TYPE_CHECKING, Annotated

import pydantic

from mechicl.models.base import Model, of_kind
from mechicl.schema import Var
from mechicl.tasks import ContinuousTask, Task

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    import torch
    from jaxtyping import Bool, Float
    from torch import Tensor
    from transformer_lens import HookedTransformer


class OneLayerAttention(Model, ABC):
    """TF(Z) = Z + Σ_h O V Z · weigh(score_scale · Zᵀ Kᵀ Q Z), each matrix d_model×d_model.

    The mask is strict: a position attends to those before it, not to itself. There is no
    normalisation layer, no positional embedding, no bias and no MLP. The prediction is the last
    entry of the last position (2.3), or the last N where a target has N responses; those entries of
    the input are 0, so the residual adds nothing to them.

    Attributes
    ----------
    n_heads
        H.
    score_scale
        Factor on the scores; 1 as in (2.2), 1/√(d+1) as in the authors' code. KQ and ω include it.
    """

    input_kind = "continuous"
    n_heads: Annotated[int, pydantic.Field(ge=1)] = 2
    score_scale: Annotated[float, pydantic.Field(gt=0)] = 1.0

    @property
    @abstractmethod
    def slope(self) -> float:
        """C_f = f′(0), to first order in scores s the slope of a key's weight times L.

        The weight is (1 + C_f·(s − s̄))/L where weights are normalised, s̄ the mean score, and
        C_f·s/L where they are linear.
        """

    @property
    def is_softmax(self) -> bool:
        """Whether weights are the softmax of the scores."""
        return False

    @abstractmethod
    def weigh(
        self,
        task: Task,
        scores: "Float[Tensor, '...']",
        dim: int,
        allowed: "Bool[Tensor, '...'] | None" = None,
    ) -> "Float[Tensor, '...']":
        """Turn finite scores into the weights of keys, which lie along `dim`.

        Keys that are not `allowed` (None: all are) get weight 0, and so does every key where none
        is allowed; no gradient passes to their scores. `allowed` broadcasts against `scores`.
        """

    def refusal(self, task: Task) -> str | None:
        """Refuse tokens, and targets that are not the responses of the last position."""
        inherited = super().refusal(task)
        if inherited is None and not set(task.target_sizes) <= {"response"}:
            return (
                f"model {self.name!r} predicts the responses of one query, the last position, and "
                f"a target of task {task.name!r} has axes {', '.join(task.target_sizes)}"
            )
        return inherited

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
        width = of_kind(self, task, ContinuousTask).d_model
        return {"layer": 1, "head": self.n_heads, "d_model": width, "d_head": width}

    def constants(self) -> "dict[str, tuple[Var, float | np.ndarray]]":
        """Return the score scale, C_f, and whether this is softmax."""
        return {
            "score_scale": (Var((), "1", "factor on attention scores"), self.score_scale),
            "slope": (
                Var((), "1", "first-order coefficient of attention weights in scores, C_f"),
                self.slope,
            ),
            "softmax": (Var((), "1", "1 where attention is softmax", 0, 1), self.is_softmax),
        }

    def initial(self, task: Task, generator: "torch.Generator") -> "dict[str, Tensor]":
        """Draw from U(−1/√fan_in, 1/√fan_in), PyTorch's default for `nn.Linear`.

        fan_in is d_model for Q, K, V and n_heads · d_model for the stacked output projection.
        """
        import torch

        width = of_kind(self, task, ContinuousTask).d_model
        weights = {}
        for name in ("W_Q", "W_K", "W_V", "W_O"):
            fan_in = width * (self.n_heads if name == "W_O" else 1)
            uniform = torch.rand(1, self.n_heads, width, width, generator=generator)
            weights[name] = (2 * uniform - 1) / fan_in**0.5
        return weights

    def predict(
        self,
        task: Task,
        parameters: "Mapping[str, Float[Tensor, '*models layer head d_model d_head']]",
        inputs: "Float[Tensor, '... batch pos d_model']",
    ) -> "Float[Tensor, '*models_batch_response']":
        """Evaluate (2.3) at the query position alone.

        Products are written as broadcast, multiply, sum, with the batch as the last axis: a
        compiler fuses them and runs over a vector of prompts at a time, where a batched matmul of
        6×6 matrices would be a call of its own.
        """
        import torch

        entries = range(-task.target_sizes.get("response", 1), 0)
        w_q, w_k, w_v, w_o = (
            parameters[name].select(-4, 0) for name in ("W_Q", "W_K", "W_V", "W_O")
        )
        # Matmuls, so that these small products are made once and not again for every prompt.
        kq = (w_k @ w_q.mT) * self.score_scale  # (*models, head, d_model, d_model)
        ov = w_v @ w_o[..., entries[0] :]  # last rows of OV: (*models, head, d_model, response)
        tokens = inputs.movedim(-3, -1)  # (..., pos, d_model, batch)
        context, query = tokens[..., None, :-1, :, :], tokens[..., -1, :, :]
        keys = (kq.flatten(-3, -2) @ query).unflatten(-2, (self.n_heads, -1))
        scores = (keys[..., None, :, :] * context).sum(-2)  # (*models, head, pos, batch)
        pattern = self.weigh(task, scores, -2)
        attended = (pattern[..., None, :] * context).sum(-3)  # (*models, head, d_model, batch)
        # One row is not split off: the compiler makes slower code of a split, even into one part.
        rows = ov.split(1, -1) if task.target_sizes else [ov]
        predicted = [
            query[..., entry, :] + (attended * row).sum((-3, -2))
            for entry, row in zip(entries, rows, strict=True)
        ]
        return torch.stack(predicted, -1) if task.target_sizes else predicted[0]

    def hooked(self, task: Task, parameters: "Mapping[str, Tensor]") -> "HookedTransformer":
        """Return the whole sequence-to-sequence map (2.2), with TransformerLens's hook points."""
        from mechicl.models.hooked import ContinuousTransformer

        return ContinuousTransformer.from_parameters(
            parameters,
            n_positions=task.n_positions,
            score_scale=self.score_scale,
            weigh=None if self.is_softmax else partial(self.weigh, task, dim=-1),
        )

    def answers(
        self, task: Task, output: "Float[Tensor, '*variants batch pos d_model']"
    ) -> "Float[Tensor, '*variants_batch_response']":
        """Return the last entry of the last position (2.3), or the last N of N responses."""
        last = output[..., -1, :]
        return last[..., -task.target_sizes["response"] :] if task.target_sizes else last[..., -1]


def softmax(
    scores: "Float[Tensor, '...']", dim: int, allowed: "Bool[Tensor, '...'] | None" = None
) -> "Float[Tensor, '...']":
    """Softmax along `dim` over the allowed keys; zeros where none is allowed."""
    if allowed is None:
        return scores.softmax(dim)
    pattern = scores.masked_fill(~allowed, float("-inf")).softmax(dim)
    return pattern.where(allowed.any(dim, keepdim=True), 0.0)
