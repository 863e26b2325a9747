"""What every task does: samples in parts, names, and lengths that it may not have."""

from itertools import combinations

import numpy as np
import pytest

from mechicl import tasks
from mechicl.errors import InputError
from mechicl.tasks.base import ContinuousTask, Task
from mechicl.tasks.latent_regression import LatentRegression
from mechicl.tasks.latents import TreePrior
from mechicl.tasks.linear_regression import LinearRegression
from mechicl.tasks.markov_chain import MarkovChain
from mechicl.tasks.multi_task_regression import MultiTaskRegression

LATENT = LatentRegression(prior=TreePrior(depth=2), n_context=9, n_queries=3)
TASKS: tuple[Task, ...] = (LinearRegression(), MultiTaskRegression(), LATENT, MarkovChain(d=4))
REGRESSIONS = TASKS[:3]
"""Tasks whose prompts differ in every position: numbers, where tokens repeat."""


def test_every_registered_task_is_tested_here() -> None:
    assert {task.name for task in TASKS} == set(tasks.names())
    assert len(TASKS) == 4


@pytest.mark.parametrize("task", REGRESSIONS, ids=lambda task: task.name)
def test_parts_are_reproducible_and_differ(task: Task) -> None:
    parts = [task.sample(4, seed=3, part=part) for part in (0, 1, 2)]
    for part, sample in enumerate(parts):
        assert sample.equals(task.sample(4, seed=3, part=part))
        assert (sample.attrs["seed"], sample.attrs["part"]) == (3, part)
    assert parts[0].equals(task.sample(4, seed=3)), "the first part is the default"
    swapped = ((4, 0), (4, 1), (5, 0), (0, 3), (1, 3), (2, 3))
    every = [*parts, *(task.sample(4, seed=seed, part=part) for seed, part in swapped)]
    pairs = list(combinations(every, 2))
    for one, other in pairs:
        assert not (one["inputs"].values == other["inputs"].values)[:, :-1].all(-1).any()
    assert len(pairs) == 36


@pytest.mark.parametrize("task", REGRESSIONS, ids=lambda task: task.name)
def test_parts_are_independent(task: Task) -> None:
    first, second = (task.sample(4000, seed=0, part=part)["inputs"].values for part in (0, 1))
    one, two = ((each - each.mean(0))[:, :-1].ravel() for each in (first, second))
    assert abs(np.corrcoef(one, two)[0, 1]) < 5 / len(one) ** 0.5
    assert abs(np.corrcoef(one[1:], two[:-1])[0, 1]) < 5 / len(one) ** 0.5


@pytest.mark.parametrize("part", [-1, 0.5, True, "1", None])
def test_bad_parts_are_refused(part: object) -> None:
    with pytest.raises(InputError, match="part of a sample is an integer from 0; given"):
        LinearRegression().sample(2, seed=0, part=part)


def test_a_large_sample_names_its_parts() -> None:
    with pytest.raises(InputError, match=r"of 4 GiB; take fewer \(n, or n_prompts of a probe\)"):
        LinearRegression().sample(10**8, seed=0)


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_a_sample_is_a_dataset_of_declared_axes(task: Task) -> None:
    sample = task.sample(3, seed=0)
    width = (task.d_model,) if isinstance(task, ContinuousTask) else ()
    assert sample["inputs"].dims == ("batch", *task.input_dims)
    assert sample["inputs"].shape == (3, task.n_positions, *width)
    assert sample["targets"].dims == ("batch", *task.target_sizes)
    assert sample["targets"].shape == (3, *task.target_sizes.values())
    kind = {"continuous": "float32", "tokens": "int64"}[task.input_kind]
    assert sample["inputs"].dtype == sample["targets"].dtype == np.dtype(kind)


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_references_have_the_shape_of_predictions(task: Task) -> None:
    sample = task.sample(6, seed=0)
    inputs = sample["inputs"].values
    given = task.references(inputs)
    stacked = task.references(inputs.reshape(2, 3, *inputs.shape[1:]))
    for name, predicted in given.items():
        assert predicted.shape == (6, *task.prediction_sizes.values()), name
        assert predicted.dtype == float, name
        np.testing.assert_allclose(stacked[name].reshape(predicted.shape), predicted, atol=1e-12)
    assert len(given) >= 3


def test_constants_are_declared_with_their_axes() -> None:
    counted = 0
    for task in TASKS:
        for name, (variable, value) in task.constants().items():
            assert np.ndim(value) == len(variable.dims), name
            counted += 1
    assert counted == 24


def test_a_task_without_length_says_so() -> None:
    class Chain(LinearRegression):
        at_length = Task.at_length

    with pytest.raises(InputError, match="has no contexts of examples, hence no other length"):
        Chain().at_length(3)
    with pytest.raises(InputError, match="has no contexts of examples, hence no other length"):
        MarkovChain().at_length(3)


def test_parts_of_sequences_are_reproducible_and_differ() -> None:
    task = MarkovChain()
    parts = [task.sample(40, seed=3, part=part) for part in (0, 1)]
    assert parts[0].equals(task.sample(40, seed=3))
    assert not (parts[0]["inputs"].values == parts[1]["inputs"].values).all(1).any()
