"""How things are measured: in turns, medians, and ratios pair by pair."""

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from mechicl.training import load_recipe
from mechicl.training.loop import Progress, train

QUICK = "he2025-two-head-quick"


class Turns(NamedTuple):
    """Figures of two things measured in turns, and their ratio pair by pair: median and range."""

    ours: float
    theirs: float
    ratio: float
    least: float
    most: float

    def row(self) -> dict[str, float]:
        """Return the figures for a table."""
        return self._asdict()


def in_turns(ours: Callable[[], float], theirs: Callable[[], float], rounds: int = 5) -> Turns:
    """Measure A B A B ..., so that a machine whose speed drifts drifts for both."""
    pairs = [(ours(), theirs()) for _ in range(rounds)]
    ratios = [a / b for a, b in pairs]
    return Turns(
        statistics.median(a for a, _ in pairs),
        statistics.median(b for _, b in pairs),
        statistics.median(ratios),
        min(ratios),
        max(ratios),
    )


class Rate:
    """Seed-steps a second of a training, from its first checkpoint to its last."""

    def __init__(self) -> None:
        self._first: tuple[float, int] | None = None
        self.value = float("nan")

    def __call__(self, progress: Progress) -> None:
        """Take the time at each checkpoint; compiling and starting are not counted."""
        now = time.perf_counter()
        if self._first is None:
            self._first = (now, progress.step)
        elif progress.step == progress.n_steps:
            begun, step = self._first
            self.value = len(progress.loss) * (progress.step - step) / (now - begun)


def training_rate(run_dir: Path, *, n_steps: int, n_seeds: int, **overrides: object) -> float:
    """Train for `n_steps` and return seed-steps a second, the store included."""
    every = max(1, n_steps // 20)
    settings = {"n_steps": n_steps, "seeds": list(range(n_seeds)), "every": every, "per_decade": 0}
    rate = Rate()
    train(load_recipe(QUICK, settings | overrides), run_dir, overwrite=True, on_progress=rate)
    return rate.value


def seconds(function: Callable[[], object]) -> float:
    """Return how long one call takes."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def cpu_rate(step: Callable[[], object], n: int) -> float:
    """Return how many calls a second of the process's CPU time allows, its threads included."""
    start = time.process_time()
    for _ in range(n):
        step()
    return n / (time.process_time() - start)
