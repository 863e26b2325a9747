"""Workers: each trains its own seeds in one thread, with its own data drawn ahead."""

import queue
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import count
from typing import NamedTuple, Self

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.tasks.streams import generator
from mechicl.training.recipe import Recipe
from mechicl.training.step import State, Step

_BLOCK_STEPS = 16
_BLOCK_NORMALS = 2**22  # a block of one seed is at most 16 MB, or a single step
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


def block_steps(recipe: Recipe) -> int:
    """Return the training steps whose data are drawn from one random stream.

    Part of the definition of the data, hence a function of the recipe alone.
    """
    return max(1, min(_BLOCK_STEPS, _BLOCK_NORMALS // (recipe.batch_size * recipe.task.n_normals)))


def empty_block(recipe: Recipe, n_seeds: int) -> Float[Tensor, "seed steps batch n_normals"]:
    """Return room for the normals of one block, the batch running along memory."""
    shape = (n_seeds, block_steps(recipe), recipe.task.n_normals, recipe.batch_size)
    return torch.empty(shape).mT


def draw_block(
    recipe: Recipe, seeds: Sequence[int], block: int
) -> Float[Tensor, "seed steps batch n_normals"]:
    """Draw the normals of `block`: for each seed a pure function of (seed, block)."""
    normals = empty_block(recipe, len(seeds))
    for index, seed in enumerate(seeds):
        stream = generator("train", seed, block)
        # One call a block: each call gives up the interpreter's lock and has to wait for it again.
        normals[index].mT.normal_(generator=stream)
    return normals


def draw_from(
    recipe: Recipe, seeds: Sequence[int], start: int, *, threads: int = 1
) -> Generator[Float[Tensor, "seed batch n_normals"], None, None]:
    """Yield the normals of one step after another from step `start`.

    Blocks are drawn ahead, as many at once as there are `threads`: drawing costs more than the
    step that uses it.
    """
    length = block_steps(recipe)
    first, skip = divmod(start, length)
    pool = ThreadPoolExecutor(threads, thread_name_prefix="mechicl-draw")
    try:
        pending = deque(
            pool.submit(draw_block, recipe, seeds, first + ahead) for ahead in range(threads)
        )
        for block in count(first + threads):
            normals = pending.popleft().result()
            pending.append(pool.submit(draw_block, recipe, seeds, block))
            yield from normals[:, skip:].unbind(1)
            skip = 0
    finally:
        # Without waiting: a generator may be closed by the garbage collector, in any thread and
        # under any lock, and a thread that needs that lock to end would be waited for for good.
        pool.shutdown(wait=False, cancel_futures=True)


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
    numbers = draw_from(recipe, seeds, now, threads=draw_threads)
    with closing(numbers), torch.no_grad():
        for stop in stops:
            losses = []
            for _ in range(now, stop):
                if stopping.is_set():
                    return
                state, loss = step(state, next(numbers).to(device))
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
