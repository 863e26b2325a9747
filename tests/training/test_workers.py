"""Data as a pure function of (seed, block), and threads that neither hang nor hide errors."""

import threading

import numpy as np
import pytest
import torch

from mechicl.training import load_recipe
from mechicl.training.step import initial_state, make_step
from mechicl.training.workers import (
    Worker,
    _mask_diverged,
    block_steps,
    draw_block,
    draw_from,
)

RECIPE = load_recipe(
    "he2025-two-head-quick", {"d": 2, "n_context": 3, "batch_size": 4, "seeds": [0, 1, 2]}
)


def take(seeds: tuple[int, ...], start: int, n: int) -> torch.Tensor:
    data = draw_from(RECIPE, seeds, start)
    return torch.stack([next(data) for _ in range(n)])


def test_data_depend_on_seed_and_step_alone() -> None:
    """Not on which seeds share a worker, nor on where drawing began."""
    together, alone = take((5, 7), 0, 40), take((7,), 0, 40)
    assert torch.equal(together[:, 1], alone[:, 0])
    assert torch.equal(take((5, 7), 23, 17), together[23:])
    assert not torch.equal(together[:, 0], together[:, 1])


def test_blocks_differ() -> None:
    first, second = (draw_block(RECIPE, (0,), block) for block in (0, 1))
    assert not torch.equal(first, second)
    assert first.shape == (1, block_steps(RECIPE), 4, RECIPE.task.n_normals)


def test_samples_are_apart_from_training_data() -> None:
    """The same seed and as many numbers: what `sample` draws is none of the first blocks."""
    checked = 0
    for seed in (0, 1):
        for block in range(3):
            normals = draw_block(RECIPE, (seed,), block)[0].flatten(0, 1)
            trained = RECIPE.task.prompts(normals).inputs.numpy()
            sampled = RECIPE.task.sample(len(normals), seed=seed)["inputs"].values
            assert not np.isin(sampled[..., :-1], trained[..., :-1]).any()
            checked += 1
    assert checked == 6


def test_memory_of_a_block_is_bounded_by_the_batch() -> None:
    large = load_recipe("he2025-two-head-quick", {"d": 50, "n_context": 1000, "batch_size": 4096})
    assert block_steps(large) == 1
    assert block_steps(RECIPE) == 16


def test_snapshots_come_in_order_and_add_up() -> None:
    step = make_step(RECIPE)
    with Worker(RECIPE, step, initial_state(RECIPE, (0, 1)), [0, 1], [0, 3, 10]) as worker:
        snapshots = list(worker.snapshots())
    assert [int(snapshot.state.step) for snapshot in snapshots] == [0, 3, 10]
    assert [snapshot.loss.shape for snapshot in snapshots] == [(2, 0), (2, 3), (2, 7)]
    with Worker(RECIPE, step, snapshots[1].state, [0, 1], [10]) as worker:
        (resumed,) = worker.snapshots()
    for name, value in snapshots[2].state.parameters.items():
        assert torch.equal(resumed.state.parameters[name], value)


def test_losses_end_with_the_one_that_diverged() -> None:
    """The loss at which a seed diverges is kept; those after it are NaN; steps count from start."""
    state = initial_state(RECIPE, (0, 1, 2))._replace(
        diverged_at=torch.tensor([torch.nan, 52.0, 47.0])
    )
    loss = _mask_diverged([torch.full((3,), float(step)) for step in range(50, 54)], state, 50)
    np.testing.assert_array_equal(loss, [[50, 51, 52, 53], [50, 51, 52, np.nan], [np.nan] * 4])


def test_an_error_in_the_thread_reaches_the_reader() -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no step today")

    with (
        Worker(RECIPE, broken, initial_state(RECIPE, (0,)), [0], [5]) as worker,
        pytest.raises(RuntimeError, match="no step today"),
    ):
        list(worker.snapshots())


def running() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("mechicl-seeds")]


def test_leaving_early_stops_the_thread() -> None:
    stops = list(range(0, 1_000_000, 10))
    with Worker(RECIPE, make_step(RECIPE), initial_state(RECIPE, (0,)), [0], stops) as worker:
        next(worker.snapshots())
        assert running(), "the check itself sees nothing"
    assert not running()
