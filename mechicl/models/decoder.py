"""The decoder of yuksel2026: post-norm transformer blocks over tokens and learned positions."""

from typing import TYPE_CHECKING, Annotated, Literal

import pydantic

from mechicl.models.base import of_kind, register
from mechicl.models.tokens import TokenModel, masked_softmax, one_hot
from mechicl.schema import Var
from mechicl.tasks import Task, TokenTask

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy as np
    import torch
    from jaxtyping import Float, Int
    from torch import Tensor
    from transformer_lens import HookedTransformer

EPS = 1e-5
"""Added to the variance by layer norm, as PyTorch and TransformerLens do."""


@register
class Decoder(TokenModel):
    """A causal decoder: x = E[token] + P[position], blocks, logits (x W_U + b_U)/τ.

    A block is post-norm, as in *Attention Is All You Need*: x ← LN(x + attention(x)), then
    x ← LN(x + MLP(x)), with a ReLU MLP, no bias in attention, and no norm after the last block.
    τ is the temperature of the task.

    Attributes
    ----------
    n_layers, n_heads, d_head, d_mlp
        Blocks, heads of each, their width, hidden units of the MLP. The residual stream has
        n_heads · d_head entries.
    score_scale
        Factor on scores; None is 1/√d_head.
    dropout
        Probability with which training drops an entry of what attention and the MLP of a block add
        to the residual stream.
    """

    name: Literal["decoder"] = "decoder"  # pyright: ignore[reportIncompatibleVariableOverride]
    n_layers: Annotated[int, pydantic.Field(ge=1)] = 1
    n_heads: Annotated[int, pydantic.Field(ge=1)] = 3
    d_head: Annotated[int, pydantic.Field(ge=1)] = 16
    d_mlp: Annotated[int, pydantic.Field(ge=1)] = 64
    score_scale: Annotated[float, pydantic.Field(gt=0)] | None = None
    dropout: Annotated[float, pydantic.Field(ge=0, lt=1)] = 0.0

    @property
    def d_model(self) -> int:
        """Width of the residual stream."""
        return self.n_heads * self.d_head

    @property
    def dropout_rate(self) -> float:
        """As set."""
        return self.dropout

    def n_dropout(self, task: Task) -> int:
        """Two entries of every block for each one of the residual stream that is computed."""
        if self.dropout == 0:
            return 0
        return self.n_windows(task) * sum(2 * n * self.d_model for n in self._computed(task))

    def _computed(self, task: Task) -> list[int]:
        """Return how many of the last positions each block computes: the last, those scored."""
        return [self.n_read(task)] * (self.n_layers - 1) + [self.n_scored(task)]

    def parameters(self, task: Task) -> dict[str, Var]:
        """Declare embeddings, attention, MLP and norms in TransformerLens's layout."""
        del task
        run, layer = ("seed", "step"), ("seed", "step", "layer")
        head = (*layer, "head")
        return {
            "W_E": Var((*run, "d_vocab", "d_model"), "1", "token embedding"),
            "W_pos": Var((*run, "pos", "d_model"), "1", "positional embedding"),
            "W_Q": Var((*head, "d_model", "d_head"), "1", "query projection"),
            "W_K": Var((*head, "d_model", "d_head"), "1", "key projection"),
            "W_V": Var((*head, "d_model", "d_head"), "1", "value projection"),
            "W_O": Var((*head, "d_head", "d_model"), "1", "output projection"),
            "ln1_w": Var((*layer, "d_model"), "1", "gain of the norm after attention"),
            "ln1_b": Var((*layer, "d_model"), "1", "bias of the norm after attention"),
            "W_in": Var((*layer, "d_model", "d_mlp"), "1", "input weights of the MLP"),
            "b_in": Var((*layer, "d_mlp"), "1", "input bias of the MLP"),
            "W_out": Var((*layer, "d_mlp", "d_model"), "1", "output weights of the MLP"),
            "b_out": Var((*layer, "d_model"), "1", "output bias of the MLP"),
            "ln2_w": Var((*layer, "d_model"), "1", "gain of the norm after the MLP"),
            "ln2_b": Var((*layer, "d_model"), "1", "bias of the norm after the MLP"),
            "W_U": Var((*run, "d_model", "d_vocab"), "1", "unembedding, times tau in logits"),
            "b_U": Var((*run, "d_vocab"), "1", "bias of the unembedding, times tau in logits"),
        }

    def sizes(self, task: Task) -> dict[str, int]:
        """Return the size of every axis of the parameters."""
        return {
            "layer": self.n_layers,
            "head": self.n_heads,
            "d_model": self.d_model,
            "d_head": self.d_head,
            "d_mlp": self.d_mlp,
            "d_vocab": of_kind(self, task, TokenTask).d_vocab,
            "pos": self.n_read(task),
        }

    def constants(self) -> "dict[str, tuple[Var, float | np.ndarray]]":
        """None that its settings do not say."""
        return {}

    def initial(self, task: Task, generator: "torch.Generator") -> "dict[str, Tensor]":
        """Orthogonal embedding and unembedding, Xavier-uniform weights, zero biases, unit gains.

        Q, K, V and O of all heads are one square matrix each, as Xavier's bound counts. Positions
        are Xavier-uniform as a matrix of n_positions × d_model.
        """
        import torch
        from torch import Tensor
        from torch.nn import init

        sizes, width = self.sizes(task), self.d_model

        def xavier(rows: int, columns: int) -> Tensor:
            return init.xavier_uniform_(torch.empty(rows, columns), generator=generator)

        def orthogonal(rows: int, columns: int) -> Tensor:
            return init.orthogonal_(torch.empty(rows, columns), generator=generator)

        def layers(make: "Callable[[], Tensor]") -> Tensor:
            return torch.stack([make() for _ in range(self.n_layers)])

        def heads_read() -> Tensor:
            return xavier(width, width).unflatten(1, (self.n_heads, self.d_head)).movedim(1, 0)

        def heads_write() -> Tensor:
            return xavier(width, width).unflatten(0, (self.n_heads, self.d_head))

        gains, zeros = torch.ones(self.n_layers, width), torch.zeros(self.n_layers, width)
        return {
            "W_E": orthogonal(sizes["d_vocab"], width),
            "W_pos": xavier(sizes["pos"], width),
            "W_Q": layers(heads_read),
            "W_K": layers(heads_read),
            "W_V": layers(heads_read),
            "W_O": layers(heads_write),
            "ln1_w": gains,
            "ln1_b": zeros,
            "W_in": layers(lambda: xavier(width, self.d_mlp)),
            "b_in": torch.zeros(self.n_layers, self.d_mlp),
            "W_out": layers(lambda: xavier(self.d_mlp, width)),
            "b_out": zeros.clone(),
            "ln2_w": gains.clone(),
            "ln2_b": zeros.clone(),
            "W_U": orthogonal(width, sizes["d_vocab"]),
            "b_U": torch.zeros(sizes["d_vocab"]),
        }

    def logits(
        self,
        task: TokenTask,
        parameters: "Mapping[str, Float[Tensor, '*models ...']]",
        tokens: "Int[Tensor, '... sequence read']",
        kept: "Float[Tensor, '... sequence n_kept'] | None" = None,
    ) -> "Float[Tensor, '*models sequence scored d_vocab']":
        """Run the blocks, the last one at the scored positions alone."""
        stream = self._blocks(task, parameters, tokens, kept)[0]
        unembedded = _times(stream, parameters["W_U"])
        return (unembedded + parameters["b_U"][..., None, None, :]) / task.temperature

    def patterns(
        self,
        task: TokenTask,
        parameters: "Mapping[str, Float[Tensor, '*models ...']]",
        tokens: "Int[Tensor, '... sequence read']",
    ) -> "Float[Tensor, '*models layer head sequence scored read']":
        """Return the patterns of every block, at the scored positions."""
        import torch

        patterns = self._blocks(task, parameters, tokens, None)[1]
        scored = [pattern[..., -self.n_scored(task) :, :] for pattern in patterns]
        return torch.stack(scored, -5).movedim(-3, -4)

    def _blocks(
        self,
        task: TokenTask,
        parameters: "Mapping[str, Float[Tensor, '*models ...']]",
        tokens: "Int[Tensor, '... sequence read']",
        kept: "Float[Tensor, '... sequence n_kept'] | None",
    ) -> "tuple[Float[Tensor, '*models sequence scored d_model'], list[Tensor]]":
        """Return the residual stream at the scored positions, and every block's pattern."""
        import torch

        layered = {
            name: parameters[name].movedim(axis, 0) for name, axis in self.layer_axes(task).items()
        }
        scale = self.d_head**-0.5 if self.score_scale is None else self.score_scale
        embedding = parameters["W_E"]
        stream = _times(one_hot(tokens, task.d_vocab, embedding.dtype), embedding)
        stream = stream + parameters["W_pos"][..., None, :, :]
        patterns, at = [], 0
        for layer, n_computed in enumerate(self._computed(task)):
            weights = {name: values[layer] for name, values in layered.items()}
            attention, mlp = _of_block(kept, at, n_computed, self.d_model)
            asking = stream[..., -n_computed:, :]
            q = _times(asking, _side_by_side(weights["W_Q"])) * scale
            k = _times(stream, _side_by_side(weights["W_K"]))
            v = _times(stream, _side_by_side(weights["W_V"]))
            # (*models, sequence, head, position, d_head)
            q, k, v = (part.unflatten(-1, (self.n_heads, -1)).movedim(-2, -3) for part in (q, k, v))
            pattern = masked_softmax(q @ k.mT)
            patterns.append(pattern)
            z = (pattern @ v).movedim(-3, -2).flatten(-2)
            attended = _times(z, weights["W_O"].flatten(-3, -2))
            stream = _norm(asking + attended * attention, weights["ln1_w"], weights["ln1_b"])
            hidden = _times(stream, weights["W_in"]) + weights["b_in"][..., None, None, :]
            added = _times(torch.relu(hidden), weights["W_out"])
            added = added + weights["b_out"][..., None, None, :]
            stream = _norm(stream + added * mlp, weights["ln2_w"], weights["ln2_b"])
            at += 2 * n_computed * self.d_model
        return stream, patterns

    def hooked(self, task: Task, parameters: "Mapping[str, Tensor]") -> "HookedTransformer":
        """Return it as a HookedTransformer; see `mechicl.models.hooked_tokens`.

        It reads what `windows` gives, and returns logits at every position.
        """
        from mechicl.models.hooked_tokens import decoder

        return decoder(self, of_kind(self, task, TokenTask), parameters)


def _of_block(
    kept: "Float[Tensor, '... sequence n_kept'] | None", start: int, n_computed: int, width: int
) -> "tuple[Tensor | float, Tensor | float]":
    """Return what dropout leaves of a block's attention and MLP; 1 without dropout."""
    if kept is None:
        return 1.0, 1.0
    size = n_computed * width
    parts = kept[..., start : start + 2 * size].unflatten(-1, (2, n_computed, width))
    return parts[..., 0, :, :], parts[..., 1, :, :]


def _times(
    values: "Float[Tensor, '... sequence position d_in']",
    weights: "Float[Tensor, '*models d_in d_out']",
) -> "Float[Tensor, '*models sequence position d_out']":
    """Multiply every position by a matrix of its model, in one product a model."""
    flat = values.flatten(-3, -2) @ weights
    return flat.unflatten(-2, values.shape[-3:-1])


def _side_by_side(
    weights: "Float[Tensor, '*models head d_model d_head']",
) -> "Float[Tensor, '*models d_model width']":
    """Put the heads' projections beside each other."""
    return weights.movedim(-3, -2).flatten(-2)


def _norm(
    values: "Float[Tensor, '*batch d_model']",
    gain: "Float[Tensor, '*models d_model']",
    bias: "Float[Tensor, '*models d_model']",
) -> "Float[Tensor, '*batch d_model']":
    """Layer norm, with a gain and bias of each model."""
    centred = values - values.mean(-1, keepdim=True)
    scale = (centred.square().mean(-1, keepdim=True) + EPS).rsqrt()
    return centred * scale * gain[..., None, None, :] + bias[..., None, None, :]
