"""What training steps are given: batches drawn ahead, a pure function of recipe, seed and step."""

from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from itertools import count
from typing import NamedTuple

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from mechicl.tasks.streams import generator
from mechicl.training.recipe import Recipe

_BLOCK_STEPS = 16
_BLOCK_NUMBERS = 2**22  # a block of one seed is at most 16 MB, or a single step


class Batch(NamedTuple):
    """What one step of a stack of models is given.

    Attributes
    ----------
    examples
        As `Task.examples` returns them: (seed, batch, ...).
    kept
        Factors on the activations that dropout acts on: 0 or 1/(1 − rate), all 1 in a step without
        it. None for models that have none.
    """

    examples: Shaped[Tensor, "seed batch ..."]
    kept: Float[Tensor, "seed batch n_dropout"] | None

    def to(self, device: torch.device) -> "Batch":
        """Return the batch on `device`."""
        kept = None if self.kept is None else self.kept.to(device)
        return Batch(self.examples.to(device), kept)


def block_steps(recipe: Recipe) -> int:
    """Return the training steps whose data are drawn from one random stream.

    Part of the definition of the data, hence a function of the recipe alone.
    """
    numbers = recipe.task.n_normals + recipe.model.n_dropout(recipe.task)
    return max(1, min(_BLOCK_STEPS, _BLOCK_NUMBERS // (recipe.prompts_a_step * numbers)))


def draw_block(
    recipe: Recipe, seeds: Sequence[int], block: int
) -> Shaped[Tensor, "seed steps batch ..."]:
    """Draw the examples of `block`, every one afresh: for each seed a function of (seed, block)."""
    shape = (len(seeds), block_steps(recipe), recipe.task.n_normals, recipe.prompts_a_step)
    normals = torch.empty(shape).mT  # the batch runs along memory
    for index, seed in enumerate(seeds):
        stream = generator("train", seed, block)
        # One call a block: each call gives up the interpreter's lock and has to wait for it again.
        normals[index].mT.normal_(generator=stream)
    return recipe.task.examples(normals)


def training_set(recipe: Recipe, seed: int) -> Shaped[Tensor, "prompts ..."]:
    """Draw the fixed training set of one seed."""
    shape = (recipe.training_set or 0, recipe.task.n_normals)
    return recipe.task.examples(torch.randn(shape, generator=generator("training_set", seed)))


def draw_from(
    recipe: Recipe, seeds: Sequence[int], start: int, *, threads: int = 1
) -> Generator[Batch, None, None]:
    """Yield the batches of one step after another from step `start`.

    Blocks of steps are drawn ahead, as many at once as there are `threads`: drawing may cost more
    than the step that uses it.
    """
    length = block_steps(recipe)
    first, skip = divmod(start, length)
    examples_of = _from_fixed_sets(recipe, seeds)

    def draw(block: int) -> list[Batch]:
        examples = examples_of(block).unbind(1)
        return [Batch(*each) for each in zip(examples, _kept(recipe, seeds, block), strict=True)]

    pool = ThreadPoolExecutor(threads, thread_name_prefix="mechicl-draw")
    try:
        pending = deque(pool.submit(draw, first + ahead) for ahead in range(threads))
        for block in count(first + threads):
            batches = pending.popleft().result()
            pending.append(pool.submit(draw, block))
            yield from batches[skip:]
            skip = 0
    finally:
        # Without waiting: a generator may be closed by the garbage collector, in any thread and
        # under any lock, and a thread that needs that lock to end would be waited for for good.
        pool.shutdown(wait=False, cancel_futures=True)


def _from_fixed_sets(recipe: Recipe, seeds: Sequence[int]) -> Callable[[int], Tensor]:
    """Return what gives the examples of a block, from each seed's own set where sets are fixed."""
    if recipe.training_set is None:
        return partial(draw_block, recipe, seeds)
    sets = [training_set(recipe, seed) for seed in seeds]
    size = recipe.prompts_a_step
    epoch_steps = recipe.training_set // size

    @lru_cache(maxsize=2 * len(seeds))
    def order(seed: int, epoch: int) -> Tensor:
        stream = generator("order", seed, epoch)
        return torch.randperm(len(sets[0]), generator=stream)[: epoch_steps * size]

    def examples(block: int) -> Tensor:
        steps = range(block * block_steps(recipe), (block + 1) * block_steps(recipe))
        rows = [
            [order(seed, step // epoch_steps).split(size)[step % epoch_steps] for step in steps]
            for seed in seeds
        ]
        return torch.stack(
            [known[torch.stack(each)] for known, each in zip(sets, rows, strict=True)]
        )

    return examples


def _kept(recipe: Recipe, seeds: Sequence[int], block: int) -> Sequence[Tensor | None]:
    """Return for each step of a block what dropout leaves; None for models without it."""
    n_dropout, length = recipe.model.n_dropout(recipe.task), block_steps(recipe)
    if not n_dropout:
        return [None] * length
    keep = 1 - recipe.model.dropout_rate
    kept = torch.ones(len(seeds), length, recipe.prompts_a_step, n_dropout)
    first = block * length
    on = [index for index in range(length) if recipe.drops_at(first + index)]
    for number, seed in enumerate(seeds):
        stream = generator("dropout", seed, block)
        for index in on:
            kept[number, index].bernoulli_(keep, generator=stream).div_(keep)
    return kept.unbind(1)
