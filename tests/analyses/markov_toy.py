"""Tiny runs of the Markov chain made by hand, whose attention patterns and value maps are known."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import xarray as xr

from mechicl.analyses import Forward
from mechicl.analyses.heads import head_scales, nonfinite
from mechicl.models import Model
from mechicl.models.decoder import Decoder
from mechicl.models.evaluate import attention, evaluate
from mechicl.models.sparse_attention import SparseAttention
from mechicl.tasks.markov_chain import MarkovChain
from tests import trajectories

NEVER = -1e4
"""A score whose weight is 0, also in float32."""


@dataclass(frozen=True)
class Toy:
    """A task, a model of it, and a trajectory of parameters that were not trained."""

    task: MarkovChain
    model: Model
    trajectory: xr.Dataset

    def forward(self) -> Forward:
        """Return what a run of this task and model gives its forward probes, in float32."""

        def prompts(
            n: int, seed: int, *, part: int = 0, n_context: int | None = None
        ) -> tuple[np.ndarray, np.ndarray]:
            assert n_context is None
            return sampled(self.task, n, seed, part)

        return Forward(
            partial(evaluate, self.model, self.task),
            prompts,
            self.task.references,
            attention=partial(attention, self.model, self.task),
        )


def chain(**settings: object) -> MarkovChain:
    """Return a chain of four states and two blocks of two lags; settings are the task's."""
    chosen = {"d": 4, "blocks": ((0, 1), (2, 3)), "n_predictions": 3, "base_scale": 2.0}
    return MarkovChain(**(chosen | settings))


def sampled(task: MarkovChain, n: int, seed: int, part: int) -> tuple[np.ndarray, np.ndarray]:
    """Return inputs and targets of the task."""
    sample = task.sample(n, seed=seed, part=part)
    return sample["inputs"].values, sample["targets"].values


def on_blocks(task: MarkovChain, mass: object) -> np.ndarray:
    """Return patterns (..., lag) with these masses (..., block), in the shares of the task.

    What is left is spread over the lags of no block; without such lags, masses sum to 1.
    """
    mass = np.asarray(mass, dtype=float)
    pattern = mass @ task.lag_weights
    outside = (task.lag_weights == 0).all(0)
    rest = 1 - pattern.sum(-1, keepdims=True)
    if outside.any():
        return pattern + rest * outside / outside.sum()
    assert np.allclose(rest, 0)
    return pattern


def sparse(
    task: MarkovChain,
    by_lag: object,
    maps: object = 0.0,
    *,
    scores: str = "positions",
    context: int | None = None,
    **settings: object,
) -> Toy:
    """Return the minimal model with patterns `by_lag` (seed, step, head, lag), value maps `maps`.

    `maps` broadcasts to (seed, step, head, next_state, state). Settings: steps.
    """
    by_lag = np.asarray(by_lag, dtype=float)
    model = SparseAttention(
        n_heads=by_lag.shape[2],
        scores=scores,
        positional_values=False,
        score_scale=1.0,
        context=context,
    )
    sizes = model.sizes(task)
    by_position = position_scores(by_lag, model.n_read(task))
    kq = np.zeros((*by_lag.shape[:3], sizes["d_key"], sizes["d_query"]))
    read = by_position.shape[-1]
    kq[..., -read:, -read:] = by_position
    ov = np.broadcast_to(maps, (*by_lag.shape[:3], task.d, task.d))
    return toy(task, model, {"KQ": kq[:, :, None], "OV": ov[:, :, None]}, **settings)


def decoder(
    task: MarkovChain,
    by_lag: object,
    maps: object = 0.0,
    *,
    token_scores: float = 0.0,
    **settings: object,
) -> Toy:
    """Return the decoder of one block with such patterns, and W_E W_V W_O W_U the maps' transpose.

    The residual stream has the token, then the position. `token_scores` makes patterns depend on
    tokens: it scales random scores between tokens. The MLP is 0, layer norms are as they are.
    """
    by_lag = np.asarray(by_lag, dtype=float)
    n_seeds, n_steps, n_heads, _ = by_lag.shape
    d, n_read = task.d, task.n_positions
    wide = max(n_heads, 2)
    scored = np.zeros((n_seeds, n_steps, wide, d + n_read, d + n_read))
    scored[:, :, :n_heads, d:, d:] = position_scores(by_lag, n_read)
    rng = np.random.default_rng(3)
    scored[:, :, :, :d, :d] = token_scores * rng.normal(size=(d, d))
    model = Decoder(n_heads=wide, d_head=d + n_read, d_mlp=2, score_scale=1.0)
    width, inner = model.d_model, model.d_head
    run, layer, head = (n_seeds, n_steps), (n_seeds, n_steps, 1), (n_seeds, n_steps, 1, wide)
    values = {
        "W_E": np.broadcast_to(np.eye(d, width), (*run, d, width)),
        "W_pos": np.broadcast_to(np.eye(n_read, width, d), (*run, n_read, width)),
        "W_K": np.broadcast_to(np.eye(width, inner), (*head, width, inner)),
        "W_Q": np.zeros((*head, width, inner)),
        "W_V": np.broadcast_to(np.eye(width, inner), (*head, width, inner)),
        "W_O": np.zeros((*head, inner, width)),
        "W_in": np.zeros((*layer, width, 2)),
        "W_out": np.zeros((*layer, 2, width)),
        "b_in": np.zeros((*layer, 2)),
        "b_out": np.zeros((*layer, width)),
        "W_U": np.broadcast_to(np.eye(width, d), (*run, width, d)),
        "b_U": np.zeros((*run, d)),
    }
    for norm in ("ln1", "ln2"):
        values |= {f"{norm}_w": np.ones((*layer, width)), f"{norm}_b": np.zeros((*layer, width))}
    values["W_Q"][:, :, 0, :, :inner, :] = scored.swapaxes(-1, -2)
    maps = np.broadcast_to(maps, (n_seeds, n_steps, n_heads, d, d))
    values["W_O"][:, :, 0, :n_heads, :d, :d] = maps.swapaxes(-1, -2)
    return toy(task, model, values, **settings)


def position_scores(by_lag: np.ndarray, n_read: int) -> np.ndarray:
    """Return scores (..., key, query) whose softmax is `by_lag` where the query sees all lags."""
    with np.errstate(divide="ignore"):
        logs = np.maximum(np.log(by_lag), NEVER)
    scores = np.full((*by_lag.shape[:-1], n_read, n_read), NEVER)
    for query in range(n_read):
        for lag in range(min(query + 1, by_lag.shape[-1])):
            scores[..., query - lag, query] = logs[..., lag]
    return scores


def toy(
    task: MarkovChain, model: Model, parameters: Mapping[str, np.ndarray], steps: object = None
) -> Toy:
    """Return these parameters, (seed, step, ...), as a run of this task and model stores them."""
    return Toy(task, model, trajectories.of(task, model, parameters, steps))


def learning(n_seeds: int = 2, steps: object = (0, 50, 100, 400, 700, 1250, 1500)) -> Toy:
    """Return three heads that go through the stages: all on block 1, then one each on 2 and 3.

    Seed s has its heads in another order, turned by s. Value maps follow the patterns.
    """
    task = chain(d=6, blocks=((0, 1), (2, 3), (4, 5)), n_predictions=4, orthogonal_features=True)
    even, first = [1 / 3] * 3, [0.9, 0.05, 0.05]
    second, third = [0.05, 0.9, 0.05], [0.05, 0.05, 0.9]
    stages = [
        [even, even, even],
        [[0.5, 0.25, 0.25], [0.48, 0.27, 0.25], [0.46, 0.25, 0.29]],
        [first, first, first],
        [first, [0.7, 0.25, 0.05], first],
        [first, second, first],
        [first, second, [0.5, 0.05, 0.45]],
        [first, second, third],
    ]
    mass = np.array([[np.roll(stage, seed, axis=0) for stage in stages] for seed in range(n_seeds)])
    progress = np.array([0.0, 0.3, 1.0, 1.0, 1.0, 1.0, 1.0])[None, :, None, None, None]
    # Heads on one block share its feature.
    shared = mass / np.maximum(mass.sum(2, keepdims=True), 1.0)
    maps = progress * np.einsum("sthk,kij->sthij", shared, task.features)
    return sparse(task, on_blocks(task, mass), maps, steps=steps)


def of_regression(trajectory: xr.Dataset) -> xr.Dataset:
    """Return a run of `chain()` that mirrors a regression run: its seeds, steps and heads.

    A head of ω > 0 attends to block 1, one of ω < 0 to block 2, the sharper the larger |ω|; its
    value map is |μ|/2 times the feature of that block. Heads that are not finite stay so. Thus what
    tests do to regression runs (a diverged seed, a dead head, another order) happens here too.
    """
    task = chain()
    broken = nonfinite(trajectory).transpose("seed", "step").values[..., None]
    scales = (
        each.transpose("seed", "step", "head").values for each in head_scales(trajectory.copy())
    )
    omega, mu = (np.where(broken, np.nan, each) for each in scales)
    chosen = np.where(omega > 0, 0, 1)
    member = task.lag_weights > 0  # (block, lag)
    by_lag = 15 * np.abs(omega)[..., None] * member[chosen]
    read = task.n_positions
    kq = np.zeros((*omega.shape, read, read))
    for query in range(read):
        for lag in range(min(query + 1, task.order)):
            kq[..., query - lag, query] = by_lag[..., lag]
    kq[np.isnan(omega)] = np.nan
    ov = 0.5 * np.abs(mu)[..., None, None] * task.features[chosen]
    model = SparseAttention(
        n_heads=omega.shape[-1], scores="positions", positional_values=False, score_scale=1.0
    )
    made = toy(task, model, {"KQ": kq[:, :, None], "OV": ov[:, :, None]})
    return made.trajectory.assign_coords(seed=trajectory["seed"], step=trajectory["step"])


def forward64(task: MarkovChain | None = None) -> Forward:
    """Return the minimal model with scores of positions in plain NumPy and float64.

    By default that of `of_regression`, with a score scale of 1.
    """
    task = chain() if task is None else task
    first, n_read = task.order - 1, task.n_positions

    def prompts(
        n: int, seed: int, *, part: int = 0, n_context: int | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        assert n_context is None
        return sampled(task, n, seed, part)

    def patterns(kq: np.ndarray) -> np.ndarray:
        """Return (..., layer, head, query_pos, lag)."""
        found = np.zeros((*kq.shape[:-2], task.n_predictions, n_read))
        for index in range(task.n_predictions):
            query = first + index
            scores = kq[..., query::-1, query]
            with np.errstate(invalid="ignore"):
                weights = np.exp(scores - scores.max(-1, keepdims=True))
            found[..., index, : query + 1] = weights / weights.sum(-1, keepdims=True)
        return found

    def attend(parameters: Mapping[str, np.ndarray], inputs: np.ndarray) -> np.ndarray:
        pattern = patterns(np.asarray(parameters["KQ"], dtype=float))
        shape = (*pattern.shape[:-2], len(inputs), *pattern.shape[-2:])
        return np.broadcast_to(pattern[..., None, :, :], shape)

    def predict(parameters: Mapping[str, np.ndarray], inputs: np.ndarray) -> np.ndarray:
        pattern = patterns(np.asarray(parameters["KQ"], dtype=float))[..., 0, :, :, :]
        ov = np.asarray(parameters["OV"], dtype=float)[..., 0, :, :, :]
        one_hot = np.eye(task.d)[inputs]  # (batch, pos, state)
        lagged = np.zeros((len(inputs), task.n_predictions, n_read, task.d))
        for index in range(task.n_predictions):
            query = first + index
            lagged[:, index, : query + 1] = one_hot[:, query::-1]
        pooled = np.einsum("...hql,bqls->...hbqs", pattern, lagged)
        return np.einsum("...hbqs,...hns->...bqn", pooled, ov[..., :, : task.d]) / task.temperature

    return Forward(predict, prompts, task.references, attention=attend)


def poison(
    trajectory: xr.Dataset, *, seed: int, from_index: int, value: float = np.nan
) -> xr.Dataset:
    """Return a copy in which one seed's parameters are not finite from a checkpoint on."""
    out = trajectory.copy(deep=True)
    for values in out.data_vars.values():
        if values.dims[:2] == ("seed", "step"):
            values.values[seed, from_index:] = value
    return out
