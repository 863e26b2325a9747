"""At which training steps a checkpoint is saved."""

import math

import numpy as np
from jaxtyping import Int64
from pydantic import NonNegativeInt, PositiveInt

from mechicl.config import Config
from mechicl.errors import InputError

_MOST = 10**7  # checkpoints; a schedule beyond it is a slip of the pen


class Schedule(Config):
    """When to save: every so often, more densely at the start, and wherever asked.

    Parameters
    ----------
    every
        Save at each multiple of this number of steps; None: at none.
    per_decade
        Points a decade of the log-spaced start, the integers nearest to ``10 ** (k / per_decade)``
        from step 1 on. They go on while they lie closer together than `every` (to the end where
        `every` is None); 0: none.
    at
        Further steps, in any order.
    """

    every: PositiveInt | None = 50
    per_decade: NonNegativeInt = 8
    at: tuple[NonNegativeInt, ...] = ()

    def steps(self, n_steps: int) -> Int64[np.ndarray, " step"]:
        """Return the steps to save in a training of `n_steps` updates, increasing, each once.

        Step 0 (before any update) and step `n_steps` are always among them.

        Raises
        ------
        InputError
            `n_steps` is negative, `at` names steps beyond it, or there are over ten million, or as
            many points of the log-spaced start.
        """
        if n_steps < 0:
            raise InputError(f"a training cannot have {n_steps} steps; give 0 or more")
        late = sorted(step for step in self.at if step > n_steps)
        if late:
            raise InputError(
                f"checkpoints.at asks for checkpoints at {late}, but training ends at step "
                f"{n_steps}; take them out, or train longer"
            )
        if self.every and n_steps // self.every > _MOST:
            raise InputError(
                f"a checkpoint every {self.every} of {n_steps} steps makes "
                f"{n_steps // self.every} of them, and {_MOST} are the most; give a larger "
                "checkpoints.every"
            )
        if self.per_decade * math.log10(max(1, n_steps)) > _MOST:
            raise InputError(
                f"{self.per_decade} points a decade of {n_steps} steps are over {_MOST}, the most; "
                "give a smaller checkpoints.per_decade"
            )
        periodic = np.arange(0, n_steps + 1, self.every) if self.every else []
        chosen = np.concatenate([[0, n_steps], periodic, self._start(n_steps), self.at])
        steps = np.sort(chosen.astype(np.int64))  # np.unique hashes: ten times as long for millions
        return steps[np.diff(steps, prepend=-1) > 0]

    def _start(self, n_steps: int) -> np.ndarray:
        if not self.per_decade or n_steps < 1:
            return np.array([], dtype=np.int64)
        exponents = np.arange(np.floor(np.log10(n_steps) * self.per_decade) + 1)
        points = np.unique(np.rint(10 ** (exponents / self.per_decade)).astype(np.int64))
        points = points[points <= n_steps]
        gaps = np.diff(points, prepend=0)
        return points if self.every is None else points[gaps < self.every]
