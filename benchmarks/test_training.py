"""Training beside a plain PyTorch loop and the HookedTransformer's own, and beside its floor."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks.baselines import hooked_loop, plain_loop, steps_per_second
from benchmarks.measure import QUICK, in_turns, seconds, training_rate
from mechicl.models.evaluate import one_thread_an_operation
from mechicl.tasks.linear_regression import LinearRegression
from mechicl.training import load_recipe
from mechicl.training.batches import block_steps, draw_block
from mechicl.training.compilation import compiled_step
from mechicl.training.step import initial_state

STEPS = {1: 4000, 4: 2000, 16: 600}


@pytest.mark.parametrize("n_seeds", [1, 4, 16])
def test_beside_a_plain_loop(
    benchmark: object, report: Callable, task: LinearRegression, run_dir: Path, n_seeds: int
) -> None:
    """Seed-steps a second, the store included; the plain loop on torch's own threads."""
    plain = plain_loop(task, 2, 256)
    steps_per_second(plain, 1)
    training_rate(run_dir, n_steps=100, n_seeds=n_seeds)  # compiles

    def ours() -> float:
        return training_rate(run_dir, n_steps=STEPS[n_seeds], n_seeds=n_seeds)

    turns = in_turns(ours, lambda: steps_per_second(plain, 2))
    report("training", f"{n_seeds} seeds beside a plain loop, seed-steps/s", **turns.row())
    benchmark.pedantic(ours, rounds=1)
    assert turns.ratio > (5 if n_seeds == 1 else 10)


def test_beside_the_hooked_loop(
    benchmark: object, report: Callable, task: LinearRegression, run_dir: Path
) -> None:
    """The HookedTransformer computes all 41 positions, of which the loss reads one."""
    hooked = hooked_loop(task, 2, 256)
    steps_per_second(hooked, 1)

    def ours() -> float:
        return training_rate(run_dir, n_steps=1000, n_seeds=4)

    turns = in_turns(ours, lambda: steps_per_second(hooked, 2), rounds=3)
    report("training", "4 seeds beside a HookedTransformer's loop, seed-steps/s", **turns.row())
    benchmark.pedantic(ours, rounds=1)


@pytest.mark.parametrize("group", [1, 2, 8])
def test_the_floor(benchmark: object, report: Callable, group: int) -> None:
    """What one thread takes for drawing a seed-step's numbers, and for the arithmetic alone."""
    recipe = load_recipe(QUICK, {"seeds": list(range(group))})
    with one_thread_an_operation(), torch.no_grad():
        step, compiled = compiled_step(recipe, [group], "cpu", print)
        normals = draw_block(recipe, recipe.seeds, 0)
        state = initial_state(recipe, recipe.seeds)

        def arithmetic() -> None:
            nonlocal state
            for index in range(block_steps(recipe)):
                state, _ = step(state, normals[:, index])

        def draw() -> None:
            draw_block(recipe, recipe.seeds, 1)

        arithmetic()
        per = group * block_steps(recipe)
        drawing = min(seconds(draw) for _ in range(20)) / per
        computing = min(seconds(arithmetic) for _ in range(20)) / per
        benchmark.pedantic(arithmetic, rounds=5)
    report(
        "floor",
        f"stack of {group} in one thread",
        drawing_us=1e6 * drawing,
        arithmetic_us=1e6 * computing,
        seed_steps_per_s_of_two_threads=2 / (drawing + computing),
        compiled=compiled,
    )


GROWTH = [
    *[("seeds", n, {"n_seeds": n}) for n in (1, 4, 16, 64)],
    *[("L", n, {"n_seeds": 4, "n_context": n}) for n in (40, 200, 1000)],
    *[("d", n, {"n_seeds": 4, "d": n}) for n in (5, 16, 50)],
    *[("H", n, {"n_seeds": 4, "n_heads": n}) for n in (1, 4, 16)],
]


@pytest.mark.parametrize(("axis", "size", "settings"), GROWTH)
def test_cost_as_the_work_grows(
    benchmark: object, report: Callable, run_dir: Path, axis: str, size: int, settings: dict
) -> None:
    """Microseconds of a seed-step along one axis at a time, the others as published."""
    training_rate(run_dir, n_steps=20, **settings)  # compiles

    def measure() -> float:
        return training_rate(run_dir, n_steps=100, **settings)

    rate = max(measure() for _ in range(2))
    benchmark.pedantic(measure, rounds=1)
    report("growth", f"{axis} = {size}", axis=axis, size=size, us_per_seed_step=1e6 / rate)
