"""Models as others write them: plain torch modules, and folders of their checkpoints."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

REGRESSION: dict[str, Any] = {
    "name": "theirs",
    "description": "a model of others",
    "task": {"name": "linear_regression", "d": 5, "n_context": 8, "noise_variance": 0.1},
    "model": {"name": "softmax_attention", "n_heads": 2, "score_scale": 6**-0.5},
}
CHAIN: dict[str, Any] = {
    "name": "chain",
    "task": {
        "name": "markov_chain",
        "d": 5,
        "blocks": [1, 2],
        "n_predictions": 4,
        "base_scale": 1.0,
        "temperature": 0.5,
    },
    "model": {"name": "decoder", "n_layers": 2, "n_heads": 2, "d_head": 4, "d_mlp": 8},
}
STEPS = (500, 1000, 20_000)


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, *, mask: Tensor | None = None) -> Tensor:
    """Softmax attention over (batch, head, position, entry)."""
    scores = scale * q @ k.mT
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return scores.softmax(-1) @ v


class StackedAttention(nn.Module):
    """One layer that predicts the response of the last position, with a projection each."""

    def __init__(self, width: int = 6, n_heads: int = 2, *, d_head: int | None = None) -> None:
        super().__init__()
        inner = n_heads * (d_head or width)
        self.n_heads, self.scale = n_heads, (d_head or width) ** -0.5
        self.q_proj = nn.Linear(width, inner, bias=False)
        self.k_proj = nn.Linear(width, inner, bias=False)
        self.v_proj = nn.Linear(width, inner, bias=False)
        self.o_proj = nn.Linear(inner, width, bias=False)

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.n_heads, -1)).movedim(-2, -3)

    def forward(self, z: Tensor) -> Tensor:
        context, query = z[:, :-1], z[:, -1:]
        q, k, v = self.q_proj(query), self.k_proj(context), self.v_proj(context)
        mixed = attend(self.heads(q), self.heads(k), self.heads(v), self.scale)
        return (query + self.o_proj(mixed.movedim(-3, -2).flatten(-2)))[:, -1, -1]


class InterleavedAttention(StackedAttention):
    """The same, whose heads are the fastest axis of every projection."""

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.n_heads)).movedim(-1, -3)

    def forward(self, z: Tensor) -> Tensor:
        context, query = z[:, :-1], z[:, -1:]
        q, k, v = self.q_proj(query), self.k_proj(context), self.v_proj(context)
        mixed = attend(self.heads(q), self.heads(k), self.heads(v), self.scale)
        return (query + self.o_proj(mixed.movedim(-3, -1).flatten(-2)))[:, -1, -1]


class TorchAttention(nn.Module):
    """One layer of nn.MultiheadAttention, whose heads are narrower than the model."""

    def __init__(self, width: int = 6, n_heads: int = 2, *, bias: bool = False) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, n_heads, bias=bias, batch_first=True)

    def forward(self, z: Tensor) -> Tensor:
        context, query = z[:, :-1], z[:, -1:]
        return (query + self.attention(query, context, context)[0])[:, -1, -1]


class Conv1D(nn.Module):
    """GPT-2's linear layer: weights (in, out)."""

    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(n_in, n_out) / n_in**0.5)
        self.bias = nn.Parameter(torch.zeros(n_out))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


class GptAttention(nn.Module):
    """Attention with one matrix for queries, keys and values."""

    def __init__(self, width: int, n_heads: int, n_positions: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.c_attn, self.c_proj = Conv1D(width, 3 * width), Conv1D(width, width)
        mask = torch.ones(n_positions, n_positions, dtype=torch.bool).tril()
        self.register_buffer("bias", mask)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.n_heads, -1)).movedim(-2, -3)
            for part in self.c_attn(x).chunk(3, -1)
        )
        n = x.shape[-2]
        mixed = attend(q, k, v, q.shape[-1] ** -0.5, mask=self.bias[:n, :n])
        return self.c_proj(mixed.movedim(-3, -2).flatten(-2))


class GptMlp(nn.Module):
    """Two layers with a ReLU between."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.c_fc, self.c_proj = Conv1D(width, hidden), Conv1D(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(self.c_fc(x).relu())


class GptBlock(nn.Module):
    """A block with norms after what it adds, as in the first GPT."""

    def __init__(self, width: int, n_heads: int, hidden: int, n_positions: int) -> None:
        super().__init__()
        self.attn = GptAttention(width, n_heads, n_positions)
        self.mlp = GptMlp(width, hidden)
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.ln_1(x + self.attn(x))
        return self.ln_2(x + self.mlp(x))


class Gpt(nn.Module):
    """Tokens to logits at every position, by GPT-2's names."""

    def __init__(self, n_positions: int = 6) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(5, 8),
                "wpe": nn.Embedding(n_positions, 8),
                "h": nn.ModuleList([GptBlock(8, 2, 8, n_positions) for _ in range(2)]),
            }
        )
        self.lm_head = nn.Linear(8, 5, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        parts = self.transformer
        x = parts["wte"](tokens) + parts["wpe"](torch.arange(tokens.shape[-1]))
        for block in parts["h"]:
            x = block(x)
        return self.lm_head(x)


class Encoder(nn.Module):
    """Tokens to logits through nn.TransformerEncoderLayer, norms after, without dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(5, 8), nn.Parameter(torch.randn(6, 8))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.unembed = nn.Linear(8, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = torch.ones(6, 6, dtype=torch.bool).triu(1)
        x = self.embed(tokens) + self.positions
        for layer in self.layers:
            x = layer(x, src_mask=mask)
        return self.unembed(x)


def randomised(module: nn.Module, seed: int, *, skip: Iterable[str] = ()) -> nn.Module:
    """Give every parameter new numbers, but for those whose names end in one of `skip`."""
    stream = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if not name.endswith(tuple(skip)):
                size = parameter.shape[-1] ** -0.5
                parameter.copy_(size * torch.randn(parameter.shape, generator=stream))
            if ("norm" in name and name.endswith("weight")) or ("ln_" in name and name[-1] == "t"):
                parameter.add_(1.0)
    return module.eval()


def save_steps(
    make: Callable[[], nn.Module],
    folder: Path,
    steps: Iterable[int] = STEPS,
    *,
    seed: int = 0,
    name: str = "step-{:06d}.pt",
    skip: Iterable[str] = (),
    wrap: Callable[[dict[str, Tensor], int], Any] | None = None,
) -> dict[int, nn.Module]:
    """Write a state dict a step, of other numbers each; return the modules."""
    folder.mkdir(parents=True, exist_ok=True)
    modules = {}
    for step in steps:
        module = randomised(make(), 1000 * seed + step, skip=skip)
        state = module.state_dict()
        target = folder / name.format(step)
        target.parent.mkdir(exist_ok=True)
        torch.save(state if wrap is None else wrap(state, step), target)
        modules[step] = module
    return modules


def outputs_of(module: nn.Module, inputs: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return module(torch.from_numpy(np.array(inputs))).numpy()
