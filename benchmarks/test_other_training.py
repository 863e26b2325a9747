"""Training of the models of yuksel2026 and raj2026 beside plain PyTorch loops, in CPU time."""

from collections.abc import Callable, Iterator
from contextlib import closing

import pytest
import torch

from benchmarks.baselines import plain_chain_loop, plain_decoder_loop, plain_pooling_loop
from benchmarks.measure import cpu_rate, in_turns
from mechicl.models.evaluate import one_thread_an_operation
from mechicl.training import load_recipe
from mechicl.training.batches import draw_from
from mechicl.training.compilation import compiled_step
from mechicl.training.recipe import Recipe
from mechicl.training.step import initial_state

MINIMAL = {"scores": "tokens_and_positions", "positional_values": True, "seeds": [0]}
SIZES = {20: {}, 50: {"d": 50, "blocks": [2, 2, 2], "temperature": 0.1, "base_scale": 2}}
N_STEPS = {"ours": 32, "theirs": 8}


def training(recipe: Recipe) -> Iterator[float]:
    """Train one seed in this thread, drawing included, yielding the loss of each step."""
    step, compiled = compiled_step(recipe, [1], "cpu", print)
    assert compiled
    state = initial_state(recipe, recipe.seeds)
    with closing(draw_from(recipe, recipe.seeds, 0)) as batches:
        for batch in batches:
            with torch.no_grad():
                state, loss = step(state, *batch)
            yield float(loss[0])


def beside(
    benchmark: object, report: Callable, name: str, recipe: Recipe, plain: Iterator[float]
) -> float:
    """Measure in turns, one thread an operation for each, and report steps a second of CPU time."""
    with one_thread_an_operation(), closing(training(recipe)) as own:
        next(own), next(plain)

        def ours() -> float:
            return cpu_rate(lambda: next(own), N_STEPS["ours"])

        turns = in_turns(ours, lambda: cpu_rate(lambda: next(plain), N_STEPS["theirs"]))
        benchmark.pedantic(ours, rounds=1)
    report("training", f"{name} beside a plain loop, steps/s of CPU time", **turns.row())
    return turns.ratio


@pytest.mark.parametrize("d", list(SIZES))
def test_the_minimal_model_beside_a_plain_loop(benchmark: object, report: Callable, d: int) -> None:
    """As published, scores and values of tokens and positions, 512 sequences a step."""
    recipe = load_recipe("yuksel2026-minimal", MINIMAL | SIZES[d])
    plain = plain_chain_loop(recipe.task, 3, 512, 0.01)
    assert beside(benchmark, report, f"yuksel2026's minimal model, d = {d},", recipe, plain) > 3


def test_the_decoder_beside_a_plain_loop(benchmark: object, report: Callable) -> None:
    """One block of PyTorch's own transformer layer, 256 sequences a step."""
    settings = {"model": {"name": "decoder"}, "batch_size": 256, "seeds": [0]}
    recipe = load_recipe("yuksel2026-minimal", settings)
    plain = plain_decoder_loop(recipe.task, 3, 16, 64, 256)
    beside(benchmark, report, "yuksel2026's decoder", recipe, plain)


@pytest.mark.parametrize(("kind", "n_queries"), [("deep", 8), ("wide", 8), ("deep", 64)])
def test_the_pooling_models_beside_a_plain_loop(
    benchmark: object, report: Callable, kind: str, n_queries: int
) -> None:
    """N = 512 tokens of K = 63 covariates in the plain loop, pseudo-tokens of the same law here."""
    settings = {"seeds": [0], "n_queries": n_queries}
    recipe = load_recipe(f"raj2026-tree-{kind}", settings)
    shape = (recipe.model.n_layers, recipe.model.n_channels)
    plain = plain_pooling_loop(recipe.task, *shape, recipe.batch_size)
    name = f"raj2026's {kind} model, {n_queries} queries,"
    ratio = beside(benchmark, report, name, recipe, plain)
    assert ratio > (3 if n_queries == 8 else 1)
