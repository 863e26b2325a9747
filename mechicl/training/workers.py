"""Workers: each trains its own seeds in one thread, with its own data drawn ahead."""

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import NamedTuple, Self

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.training.batches import draw_from
from mechicl.training.recipe import Recipe
from mechicl.training.step import State, Step

_IDLE_SECONDS = 1.0
_AHEAD = 4  # snapshots that a worker may be in front of the slowest


class Snapshot(NamedTuple):
    """State of a group of seeds at a checkpoint, and the losses since the one before.

    Attributes
    ----------
    state
        After as many updates as the checkpoint's step.
    loss
        (seed, steps since the previous checkpoint); NaN once a seed has diverged.
    """

    state: State
    loss: Float[np.ndarray, "seed steps"]


def train_group(
    recipe: Recipe,
    step: Step,
    state: State,
    seeds: Sequence[int],
    stops: Sequence[int],
    stopping: threading.Event,
    draw_threads: int = 1,
) -> Iterator[Snapshot]:
    """Train `seeds` from `state`, and yield a snapshot at each of `stops`, which increase."""
    now = int(state.step)
    device = state.step.device
    batches = draw_from(recipe, seeds, now, threads=draw_threads)
    with closing(batches), torch.no_grad():
        for stop in stops:
            losses = []
            for _ in range(now, stop):
                if stopping.is_set():
                    return
                state, loss = step(state, *next(batches).to(device))
                losses.append(loss)
            yield Snapshot(state, _mask_diverged(losses, state, now))
            now = stop


def _mask_diverged(
    losses: Sequence[Tensor], state: State, start: int
) -> Float[np.ndarray, "seed steps"]:
    seeds = len(state.diverged_at)
    loss = torch.stack(list(losses), 1) if losses else torch.empty(seeds, 0)
    steps = start + torch.arange(loss.shape[1], device=loss.device)
    after = steps > state.diverged_at[:, None]  # never true of NaN, a seed that is healthy
    return loss.masked_fill(after, torch.nan).cpu().numpy()


def _nothing() -> None:
    pass


class Worker:
    """A thread that runs `train_group`; `snapshots` gives what it yields, in order.

    The thread is at most a few snapshots ahead of whoever reads them, so memory stays bounded. An
    error in the thread is raised to the reader. Leaving the `with` block stops the thread and waits
    for it.
    """

    def __init__(
        self,
        recipe: Recipe,
        step: Step,
        state: State,
        seeds: Sequence[int],
        stops: Sequence[int],
        *,
        draw_threads: int = 1,
    ) -> None:
        self._stopping = threading.Event()
        self._snapshots: queue.Queue[Snapshot | BaseException | None] = queue.Queue(_AHEAD)
        self._arguments = (recipe, step, state, seeds, stops, self._stopping, draw_threads)
        self._thread = threading.Thread(
            target=self._run, name=f"mechicl-seeds-{seeds[0]}-{seeds[-1]}", daemon=True
        )

    def _run(self) -> None:
        try:
            for snapshot in train_group(*self._arguments):
                self._put(snapshot)
            self._put(None)
        except BaseException as error:
            self._put(error)

    def _put(self, item: Snapshot | BaseException | None) -> None:
        while not self._stopping.is_set():
            try:
                return self._snapshots.put(item, timeout=0.1)
            except queue.Full:
                continue

    def snapshots(self, idle: Callable[[], object] = _nothing) -> Iterator[Snapshot]:
        """Yield snapshots in order; call `idle` about once a second while waiting for one."""
        while True:
            try:
                item = self._snapshots.get(timeout=_IDLE_SECONDS)
            except queue.Empty:
                idle()
                continue
            if item is None:
                return
            if isinstance(item, BaseException):
                raise item
            yield item

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stopping.set()
        self._thread.join()
