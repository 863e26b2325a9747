"""The usual ways, written as one would: what mechicl is measured against."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from mechicl.models.softmax_attention import SoftmaxAttention
from mechicl.tasks.latent_regression import LatentRegression
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


class PlainMlp(nn.Module):
    """One hidden layer and GELU."""

    def __init__(self, d_in: int, d_hidden: int, d_out: int) -> None:
        super().__init__()
        self.read, self.write = nn.Linear(d_in, d_hidden), nn.Linear(d_hidden, d_out)

    def forward(self, x: Tensor) -> Tensor:
        """Apply it along the last axis."""
        return self.write(nn.functional.gelu(self.read(x)))


class PlainPooling(nn.Module):
    """raj2026's model as (6) is printed: values and keys of every token, then their mean."""

    def __init__(self, task: LatentRegression, n_layers: int, n_channels: int) -> None:
        super().__init__()
        width, self.n_channels = task.d_model, n_channels
        self.start = torch.full((width,), 0.1)
        self.keys = nn.ModuleList(
            PlainMlp(width, 2 * width, n_channels * width) for _ in range(n_layers)
        )
        value, gate, write = ((n_channels, width), (n_channels, width), (width, n_channels))
        self.values, self.gates, self.writes = (
            nn.ParameterList(torch.randn(shape) / shape[1] ** 0.5 for _ in range(n_layers))
            for shape in (value, gate, write)
        )
        self.output = nn.ModuleList(PlainMlp(2 * width, 2 * width, 2 * width) for _ in range(3))
        self.readout = nn.Linear(2 * width, 1)

    def forward(self, context: Tensor, queries: Tensor) -> Tensor:
        """Predict (batch, query) from tokens (batch, token, K + 1) and queries."""
        p = self.start.expand(len(context), -1)
        layers = zip(self.keys, self.values, self.gates, self.writes, strict=True)
        for keys, value, gate, write in layers:
            k = _norm(keys(_norm(p)).unflatten(-1, (self.n_channels, -1)))
            pooled = ((context @ value.T) * (context @ k.mT)).mean(1)
            p = p + (pooled * (p @ gate.T)) @ write.T / self.n_channels**0.5
        u = torch.cat([queries, p[:, None].expand(-1, queries.shape[1], -1)], -1)
        for mlp in self.output:
            u = u + mlp(_norm(u))
        return self.readout(u)[..., 0]


def _norm(x: Tensor) -> Tensor:
    return nn.functional.layer_norm(x, x.shape[-1:])


def plain_pooling_loop(
    task: LatentRegression, n_layers: int, n_channels: int, batch_size: int
) -> Iterator[float]:
    """Train it on N tokens a context, drawn on the fly, with autograd and `torch.optim.AdamW`."""
    model = PlainPooling(task, n_layers, n_channels)
    leaves = torch.from_numpy(task.prior.constants()["leaves"][1]).float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=1e-4)
    while True:
        theta = leaves[torch.randint(len(leaves), (batch_size,))]
        x = torch.randn(batch_size, task.n_context, task.d)
        noise = task.noise_variance**0.5 * torch.randn(batch_size, task.n_context)
        y = (x @ theta[..., None])[..., 0] + noise
        asked = torch.randn(batch_size, task.n_queries, task.d)
        queries = torch.cat([asked, torch.zeros(batch_size, task.n_queries, 1)], -1)
        predicted = model(torch.cat([x, y[..., None]], -1), queries)
        loss = ((predicted - (asked @ theta[..., None])[..., 0]) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        yield loss.item()
