"""Data as a pure function of (seed, step): afresh, from fixed sets, and what dropout leaves."""

from pathlib import Path

import numpy as np
import pytest
import torch

from mechicl.errors import InputError
from mechicl.training import Recipe, load_recipe
from mechicl.training.batches import Batch, block_steps, draw_block, draw_from, training_set
from mechicl.training.loop import plan_run
from mechicl.training.preflight import check_room

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


FIXED = load_recipe(
    "yuksel2026-minimal",
    {
        "d": 5,
        "blocks": [1, 2],
        "n_predictions": 4,
        "training_set": 35,
        "batch_size": 10,
        "model": {"name": "decoder", "d_head": 2, "d_mlp": 3, "dropout": 0.25},
        "dropout_on": "first_batch",
        "checkpoints": {"every": 10},
        "n_steps": 100,
    },
)


def examples(recipe: Recipe, seeds: tuple[int, ...], start: int, n: int) -> list[Batch]:
    data = draw_from(recipe, seeds, start, threads=2)
    return [next(data) for _ in range(n)]


def test_an_epoch_goes_through_its_set_once_in_a_new_order() -> None:
    """35 prompts are three batches of ten; which five are left out changes from epoch to epoch."""
    batches = [batch.examples[0] for batch in examples(FIXED, (3,), 0, 30)]
    known = {tuple(row) for row in training_set(FIXED, 3).tolist()}
    assert len(known) == 35
    orders = set()
    for epoch in range(10):
        rows = [tuple(row) for row in torch.cat(batches[3 * epoch : 3 * epoch + 3]).tolist()]
        assert len(rows) == 30
        assert len({*rows}) == 30, "a prompt came twice in an epoch"
        assert {*rows} <= known
        orders.add(tuple(rows))
    assert len(orders) == 10


def test_fixed_sets_depend_on_seed_and_step_alone() -> None:
    together = examples(FIXED, (5, 7), 0, 40)
    alone, later = examples(FIXED, (7,), 0, 40), examples(FIXED, (5, 7), 23, 17)
    for number, batch in enumerate(together):
        assert torch.equal(batch.examples[1], alone[number].examples[0])
        assert batch.kept is not None
        assert torch.equal(batch.kept[1], alone[number].kept[0])
    for before, after in zip(together[23:], later, strict=True):
        assert torch.equal(before.examples, after.examples)
        assert torch.equal(before.kept, after.kept)
    assert not torch.equal(together[0].examples[0], together[0].examples[1])


def test_a_set_smaller_than_a_batch_is_one_batch() -> None:
    small = load_recipe(FIXED, {"training_set": 7})
    assert small.prompts_a_step == 7
    for batch in examples(small, (0,), 0, 20):
        rows = {tuple(row) for row in batch.examples[0].tolist()}
        assert rows == {tuple(row) for row in training_set(small, 0).tolist()}


def test_dropout_acts_on_the_first_batch_of_an_epoch_where_it_is_asked_to() -> None:
    """Kept activations are scaled up, so that their mean stays; other steps have none dropped."""
    everywhere = load_recipe(FIXED, {"dropout_on": "every_batch"})
    for recipe, steps in ((FIXED, range(0, 30, 3)), (everywhere, range(30))):
        for number, batch in enumerate(examples(recipe, (0, 1), 0, 30)):
            kept = batch.kept
            assert kept is not None
            assert kept.shape == (2, 10, recipe.model.n_dropout(recipe.task))
            values = set(kept.unique().tolist())
            if number in steps:
                assert values == {0.0, torch.tensor(1 / 0.75).item()}
                n = kept.numel()
                assert abs(float((kept == 0).sum()) - 0.25 * n) < 5 * (0.25 * 0.75 * n) ** 0.5
                assert not torch.equal(kept[0], kept[1])
            else:
                assert values == {1.0}


def test_models_without_dropout_are_given_none() -> None:
    assert next(draw_from(RECIPE, (0,), 0)).kept is None


def test_dropout_on_a_first_batch_needs_epochs() -> None:
    with pytest.raises(InputError, match="needs a training_set; without one it is every_batch"):
        load_recipe(FIXED, {"training_set": None})


def test_a_training_set_that_is_too_large_is_what_the_refusal_names(tmp_path: Path) -> None:
    large = load_recipe("yuksel2026-minimal", {"training_set": 10**13})
    with pytest.raises(InputError, match=r"a training_set of 10,000.* or a smaller training_set"):
        check_room(large, plan_run(large), tmp_path)
