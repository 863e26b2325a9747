"""The minimal model of yuksel2026: one layer of attention whose circuits are its parameters."""

from typing import TYPE_CHECKING, Annotated, Literal

import pydantic

from mechicl.models.base import of_kind, register
from mechicl.models.tokens import TokenModel, look_up, one_hot, unseen
from mechicl.schema import Var
from mechicl.tasks import Task, TokenTask

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    import torch
    from jaxtyping import Float, Int
    from torch import Tensor
    from transformer_lens import HookedTransformer


@register
class SparseAttention(TokenModel):
    """y_t = (1/τ) Σ_h OV_h Σ_{i ≤ t} softmax_i(s · x̃_iᵀ KQ_h x̃_t) x̃_i (yuksel2026, section 2.4).

    x̃ is a one-hot token above a one-hot position. There is no residual, no normalisation, no MLP
    and no output projection: KQ, one matrix for KᵀQ, and OV, which makes logits of tokens, are the
    parameters themselves. τ is the temperature of the task.

    Attributes
    ----------
    n_heads
        h.
    scores
        What KQ reads: `positions`, so that every sequence has one pattern, or
        `tokens_and_positions`, as published.
    positional_values
        Whether OV reads positions besides tokens, as published.
    init_scale
        u: KQ starts uniform in [−u, u]. OV starts at 0. At u = 0 heads are alike, gradients keep
        them so, and each is computed as the mean of all: rounding would part them, as the smallest
        of the published u does.
    score_scale
        s; None is 1/√width, of what KQ reads.
    """

    name: Literal["sparse_attention"] = "sparse_attention"  # pyright: ignore[reportIncompatibleVariableOverride]
    n_heads: Annotated[int, pydantic.Field(ge=1)] = 3
    scores: Literal["positions", "tokens_and_positions"] = "tokens_and_positions"
    positional_values: bool = True
    init_scale: Annotated[float, pydantic.Field(ge=0)] = 0.001
    score_scale: Annotated[float, pydantic.Field(gt=0)] | None = None

    @property
    def reads_tokens(self) -> bool:
        """Whether KQ reads tokens."""
        return self.scores == "tokens_and_positions"

    def parameters(self, task: Task) -> dict[str, Var]:
        """Declare the circuits KQ and OV."""
        del task
        head = ("seed", "step", "layer", "head")
        return {
            "KQ": Var((*head, "d_key", "d_query"), "1", "KQ circuit, not scaled"),
            "OV": Var((*head, "d_out", "d_in"), "1", "OV circuit, times tau in logits"),
        }

    def sizes(self, task: Task) -> dict[str, int]:
        """One layer, h heads; circuits over tokens first, then positions."""
        d, n_read = of_kind(self, task, TokenTask).d_vocab, self.n_read(task)
        read = d + n_read if self.reads_tokens else n_read
        values = d + n_read if self.positional_values else d
        return {
            "layer": 1,
            "head": self.n_heads,
            "d_key": read,
            "d_query": read,
            "d_out": d,
            "d_in": values,
        }

    def scale(self, task: Task) -> float:
        """Return the factor on scores."""
        width = self.sizes(task)["d_key"]
        return width**-0.5 if self.score_scale is None else self.score_scale

    def constants(self) -> "dict[str, tuple[Var, float | np.ndarray]]":
        """None that its settings do not say."""
        return {}

    def initial(self, task: Task, generator: "torch.Generator") -> "dict[str, Tensor]":
        """Draw KQ from U(−u, u), OV = 0."""
        import torch

        sizes = self.sizes(task)
        shape = (1, self.n_heads, sizes["d_key"], sizes["d_query"])
        return {
            "KQ": self.init_scale * (2 * torch.rand(shape, generator=generator) - 1),
            "OV": torch.zeros(1, self.n_heads, sizes["d_out"], sizes["d_in"]),
        }

    def logits(
        self,
        task: TokenTask,
        parameters: "Mapping[str, Float[Tensor, '*models layer head ...']]",
        tokens: "Int[Tensor, '... sequence read']",
        kept: "Float[Tensor, '... sequence n_kept'] | None" = None,
    ) -> "Float[Tensor, '*models sequence scored d_vocab']":
        """Sum over heads and positions what OV makes of each entry, weighted by attention."""
        del kept
        ov = self._heads(parameters["OV"]) / task.temperature  # (*models, head, d_out, d_in)
        d = task.d_vocab
        pattern = self._pattern(task, self._heads(parameters["KQ"]), tokens).flatten(-2)
        values = look_up(_table(ov[..., :d].mT), tokens)  # (*models, sequence, read, head, d_out)
        if self.positional_values:
            values = values + _table(ov[..., d:].mT)[..., None, :, :, :]
        if self.reads_tokens:
            return pattern @ values.movedim(-2, -3).flatten(-3, -2)
        # One pattern for all sequences: one product over all of them.
        values = values.movedim(-4, -2).movedim(-4, -3).flatten(-4, -3)
        logits = pattern @ values.flatten(-2)  # (*models, scored, sequence d_out)
        return logits.unflatten(-1, (-1, d)).movedim(-2, -3)

    def patterns(
        self,
        task: TokenTask,
        parameters: "Mapping[str, Float[Tensor, '*models layer head ...']]",
        tokens: "Int[Tensor, '... sequence read']",
    ) -> "Float[Tensor, '*models layer head sequence scored read']":
        """Return the patterns of its one layer, those of positions repeated for every sequence."""
        pattern = self._pattern(task, self._heads(parameters["KQ"]), tokens)
        pattern = pattern.movedim(-2, 0)  # (head, *models, ..., scored, read)
        if not self.reads_tokens:
            shape = (*pattern.shape[:-2], tokens.shape[-2], *pattern.shape[-2:])
            pattern = pattern[..., None, :, :].expand(shape)
        return pattern.movedim(0, -4)[..., None, :, :, :, :]

    def _heads(
        self, circuit: "Float[Tensor, '*models layer head rows columns']"
    ) -> "Float[Tensor, '*models head rows columns']":
        """Return the circuits of the one layer."""
        heads = circuit.select(-4, 0)
        if self.init_scale == 0:
            heads = heads.mean(-3, keepdim=True).expand_as(heads)
        return heads

    def _pattern(
        self,
        task: TokenTask,
        kq: "Float[Tensor, '*models head d_key d_query']",
        tokens: "Int[Tensor, '... sequence read']",
    ) -> "Float[Tensor, '*models ... scored head read']":
        """Attention weights; with an axis `sequence` before `scored` where KQ reads tokens."""
        n_read, n_scored, d = self.n_read(task), self.n_scored(task), task.d_vocab
        future = unseen(n_read, n_scored, kq)
        asked = (kq * self.scale(task)).mT  # (*models, head, d_query, d_key)
        first = n_read - n_scored
        if not self.reads_tokens:
            return (asked[..., first:, :] + future).softmax(-1).movedim(-2, -3)
        # What every query asks of tokens and of positions: its token's part and its position's.
        queries, position = tokens[..., first:], asked[..., d + first :, :]
        of_tokens = look_up(_table(asked[..., :d, :d]), queries)
        of_tokens = of_tokens + _table(position[..., :d])[..., None, :, :, :]
        of_positions = look_up(_table(asked[..., :d, d:]), queries)
        of_positions = of_positions + _table(position[..., d:] + future)[..., None, :, :, :]
        keys = one_hot(tokens, d, kq.dtype)
        scores = (of_tokens.flatten(-3, -2) @ keys.mT).unflatten(-2, (n_scored, -1))
        return (scores + of_positions).softmax(-1)

    def hooked(self, task: Task, parameters: "Mapping[str, Tensor]") -> "HookedTransformer":
        """Return it as a HookedTransformer; see `mechicl.models.hooked_tokens`.

        It reads what `windows` gives, and returns logits at every position.
        """
        from mechicl.models.hooked_tokens import sparse_attention

        return sparse_attention(self, of_kind(self, task, TokenTask), parameters)


def _table(
    circuit: "Float[Tensor, '*models head rows columns']",
) -> "Float[Tensor, '*models rows head columns']":
    """Put the rows of all heads for one token, or position, beside each other."""
    import torch

    # A concatenation is compiled into a table of its own, not into each reading of it.
    return torch.stack(circuit.unbind(-3), -2)
