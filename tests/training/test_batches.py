"""Data as a pure function of (seed, step): afresh, from fixed sets, and what dropout leaves."""

import numpy as np
import torch

from mechicl.training import load_recipe
from mechicl.training.batches import block_steps, draw_block, draw_from

RECIPE = load_recipe(
    "he2025-two-head-quick", {"d": 2, "n_context": 3, "batch_size": 4, "seeds": [0, 1, 2]}
)


def take(seeds: tuple[int, ...], start: int, n: int) -> torch.Tensor:
    data = draw_from(RECIPE, seeds, start)
    return torch.stack([next(data).examples for _ in range(n)])


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
