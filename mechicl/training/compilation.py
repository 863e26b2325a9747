"""Compiling the training step where a compiler exists, and running it as it is where none does."""

import warnings
from collections.abc import Callable, Iterable
from contextlib import closing
from types import FunctionType
from typing import Any

import torch
from torch._dynamo.utils import counters

from mechicl.training.batches import draw_from
from mechicl.training.recipe import Recipe
from mechicl.training.step import Step, initial_state, make_step

_OPTIONS: dict[str, dict[str, str | int | bool | Callable[..., Any]]] = {
    # One C++ call a step, which gives up the interpreter's lock: workers run side by side.
    "cpu": {"cpp_wrapper": True},
    # The whole step is one captured graph.
    "cuda": {"triton.cudagraphs": True},
}


def compiled_step(
    recipe: Recipe,
    group_sizes: Iterable[int],
    device: str,
    notify: Callable[[str], None],
) -> tuple[Step, bool]:
    """Return the step of `recipe` for stacks of `group_sizes`, and whether it is compiled.

    Without a working compiler the step comes back as it is, and `notify` is told once, in a line.
    """
    eager = make_step(recipe)
    own = _with_code_of_its_own(eager, f"step_{recipe.digest}")
    try:
        # A remark of torch about itself is no reason to train without it, whatever the filters say.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # Without fullgraph=True: torch keeps that check's counter in a global, and of two
            # workers that step at once one may read the other's zero and fail.
            compiled = torch.compile(own, dynamic=False, options=_OPTIONS[device])
            _compile_for(recipe, sorted(set(group_sizes)), compiled, device)
    except Exception as error:  # torch.compile has no exception of its own for "no compiler"
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        notify(f"training without a compiler, which is slower ({reason})")
        return eager, False
    return compiled, True


def _with_code_of_its_own(function: Any, name: str) -> Step:
    """Copy a function, its code included.

    Torch counts recompilations by code object and gives up after a few: recipes trained one after
    another in one process would end uncompiled.
    """
    code = function.__code__.replace(co_name=name)
    return FunctionType(code, function.__globals__, name, None, function.__closure__)


def _compile_for(recipe: Recipe, sizes: Iterable[int], compiled: Step, device: str) -> None:
    """Run one step of each stack size, which compiles it; raise if it does not compile whole."""
    breaks = counters["graph_break"]
    before = sum(breaks.values())
    for size in sizes:
        state = initial_state(recipe, tuple(range(size))).to(device)
        with closing(draw_from(recipe, range(size), 0)) as batches, torch.no_grad():
            compiled(state, *next(batches).to(state.step.device))  # strides as in training
    if sum(breaks.values()) > before:
        raise RuntimeError(f"the step does not compile whole: {next(reversed(breaks))}")
