"""The usual ways, written as one would: what mechicl is measured against."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from mechicl.models.softmax_attention import SoftmaxAttention
from mechicl.tasks.linear_regression import LinearRegression
from mechicl.tasks.markov_chain import MarkovChain
from mechicl.tasks.streams import generator


class PlainAttention(nn.Module):
    """he2025's model with `nn.Linear` projections, evaluated at the query position alone."""

    def __init__(self, d: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads, self.width = n_heads, d + 1
        stacked = n_heads * self.width
        self.query = nn.Linear(self.width, stacked, bias=False)
        self.key = nn.Linear(self.width, stacked, bias=False)
        self.value = nn.Linear(self.width, stacked, bias=False)
        self.output = nn.Linear(stacked, self.width, bias=False)

    def forward(self, prompts: Tensor) -> Tensor:
        """Predict y_q from (batch, pos, d + 1)."""
        context, query = prompts[:, :-1], prompts[:, -1]
        heads = (len(prompts), -1, self.n_heads, self.width)
        q = self.query(query).view(heads)
        k, v = self.key(context).view(heads), self.value(context).view(heads)
        pattern = torch.einsum("bqhd,bkhd->bhqk", q, k).softmax(-1)
        attended = torch.einsum("bhqk,bkhd->bqhd", pattern, v)
        return self.output(attended.flatten(1))[:, -1]


def draw(task: LinearRegression, batch_size: int) -> tuple[Tensor, Tensor]:
    """Draw a batch on the fly, as the papers' scripts do."""
    x = torch.randn(batch_size, task.n_positions, task.d)
    beta = torch.randn(batch_size, task.d, 1) / task.d**0.5
    noise = task.noise_variance**0.5 * torch.randn(batch_size, task.n_positions)
    y = (x @ beta).squeeze(-1) + noise
    shown = torch.cat([y[:, :-1], torch.zeros(batch_size, 1)], 1)
    return torch.cat([x, shown[..., None]], -1), y[:, -1]


def plain_loop(task: LinearRegression, n_heads: int, batch_size: int) -> Iterator[float]:
    """Train one model with autograd and `torch.optim.Adam`, yielding the loss of each step."""
    model = PlainAttention(task.d, n_heads)
    yield from _train(task, batch_size, model.parameters(), model)


def hooked_loop(task: LinearRegression, n_heads: int, batch_size: int) -> Iterator[float]:
    """Train a HookedTransformer likewise, with all its positions and hook points."""
    architecture = SoftmaxAttention(n_heads=n_heads)
    model = architecture.hooked(task, architecture.initial(task, generator("benchmark", 0)))
    trained = [p for p in model.parameters() if p.requires_grad]
    yield from _train(task, batch_size, trained, lambda prompts: model(prompts)[:, -1, -1])


def _train(
    task: LinearRegression,
    batch_size: int,
    parameters: object,
    predict: Callable[[Tensor], Tensor],
) -> Iterator[float]:
    optimizer = torch.optim.Adam(parameters, lr=1e-3)  # type: ignore[arg-type]
    while True:
        prompts, target = draw(task, batch_size)
        loss = ((predict(prompts) - target) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item()


def steps_per_second(loop: Iterator[float], seconds: float) -> float:
    """Run a training loop for some seconds."""
    start, steps = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        next(loop)
        steps += 1
    return steps / (time.perf_counter() - start)


def save_state_dicts(folder: Path, task: LinearRegression, n_heads: int, n: int) -> list[Path]:
    """Save `n` checkpoints the usual way: a file each, by `torch.save`."""
    folder.mkdir()
    architecture = SoftmaxAttention(n_heads=n_heads)
    paths = []
    for index in range(n):
        model = architecture.hooked(task, architecture.initial(task, generator("saved", index)))
        paths.append(folder / f"step-{index}.pt")
        torch.save(model.state_dict(), paths[-1])
    return paths


def circuits_of_state_dicts(
    paths: list[Path], task: LinearRegression, n_heads: int
) -> list[Tensor]:
    """Read checkpoints the usual way: load each into a HookedTransformer, take QK and OV there."""
    architecture = SoftmaxAttention(n_heads=n_heads)
    model = architecture.hooked(task, architecture.initial(task, generator("read", 0)))
    found = []
    for path in paths:
        model.load_state_dict(torch.load(path, weights_only=True))
        with torch.no_grad():
            found += [model.QK.AB, model.OV.AB]
    return found


class PlainSparseAttention(nn.Module):
    """yuksel2026's minimal model on concatenated one-hots, every position computed."""

    def __init__(self, task: MarkovChain, n_heads: int, init_scale: float) -> None:
        super().__init__()
        self.d, self.n_positions = task.d, task.n_positions
        width = task.d + task.n_positions
        self.query = nn.Parameter(init_scale * (2 * torch.rand(n_heads, width, width) - 1))
        self.value = nn.Parameter(torch.zeros(n_heads, width, width))
        mask = torch.ones(self.n_positions, self.n_positions).triu(1).bool()
        self.register_buffer("future", mask)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits (batch, pos, d) of token ids (batch, pos)."""
        words = nn.functional.one_hot(tokens, self.d).float()
        places = torch.eye(self.n_positions).expand(len(tokens), -1, -1)
        x = torch.cat([words, places], -1)
        q = torch.einsum("bqi,hji->bhqj", x, self.query)
        scores = torch.einsum("bhqj,bkj->bhqk", q, x) / x.shape[-1] ** 0.5
        pattern = scores.masked_fill(self.future, float("-inf")).softmax(-1)
        values = torch.einsum("bki,hoi->bhko", x, self.value)
        return torch.einsum("bhqk,bhko->bqo", pattern, values)[..., : self.d]


def draw_chain(task: MarkovChain, batch_size: int) -> Tensor:
    """Sample sequences token by token, as the papers' scripts do."""
    features = torch.from_numpy(task.features / task.temperature).float()
    tokens = torch.randint(task.d, (batch_size, task.order))
    for t in range(task.n_predictions):
        window = nn.functional.one_hot(tokens[:, t:], task.d).float().flip(1)
        logits = torch.zeros(batch_size, task.d)
        for feature, lags in zip(features, task.blocks, strict=True):
            logits += window[:, list(lags)].mean(1) @ feature.T
        tokens = torch.cat([tokens, torch.multinomial(logits.softmax(-1), 1)], 1)
    return tokens


class PlainDecoder(nn.Module):
    """yuksel2026's decoder of one block: `nn.TransformerEncoderLayer` with a causal mask."""

    def __init__(self, task: MarkovChain, n_heads: int, d_head: int, d_mlp: int) -> None:
        super().__init__()
        width = n_heads * d_head
        self.words = nn.Embedding(task.d, width)
        self.places = nn.Parameter(torch.randn(task.n_positions, width) / width**0.5)
        self.block = nn.TransformerEncoderLayer(width, n_heads, d_mlp, dropout=0, batch_first=True)
        self.unembed = nn.Linear(width, task.d)
        mask = nn.Transformer.generate_square_subsequent_mask(task.n_positions)
        self.register_buffer("future", mask)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits (batch, pos, d) of token ids (batch, pos)."""
        stream = self.words(tokens) + self.places
        return self.unembed(self.block(stream, self.future, is_causal=True))


def plain_chain_loop(
    task: MarkovChain, n_heads: int, batch_size: int, init_scale: float
) -> Iterator[float]:
    """Train the minimal model with autograd and `torch.optim.AdamW`, on fresh sequences."""
    return _train_on_chains(task, PlainSparseAttention(task, n_heads, init_scale), batch_size)


def plain_decoder_loop(
    task: MarkovChain, n_heads: int, d_head: int, d_mlp: int, batch_size: int
) -> Iterator[float]:
    """Train the decoder likewise."""
    return _train_on_chains(task, PlainDecoder(task, n_heads, d_head, d_mlp), batch_size)


def _train_on_chains(task: MarkovChain, model: nn.Module, batch_size: int) -> Iterator[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.01)
    while True:
        tokens = draw_chain(task, batch_size)
        logits = model(tokens[:, :-1])[:, task.order - 1 :] / task.temperature
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, task.order :].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        yield loss.item()
