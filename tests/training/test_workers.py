"""Threads that neither hang nor hide errors."""

import threading

import numpy as np
import pytest
import torch

from mechicl.training import load_recipe
from mechicl.training.step import initial_state, make_step
from mechicl.training.workers import Worker, _mask_diverged

RECIPE = load_recipe(
    "he2025-two-head-quick", {"d": 2, "n_context": 3, "batch_size": 4, "seeds": [0, 1, 2]}
)


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
