"""he2025, Fig. 7: gradient descent on the approximate loss meets (4.3) and stays.

Published: (1 + (1+σ²)d/L)⟨μ, ω⟩ along gradient descent on (4.1) with H = 2 and a rate of 0.01: it
rises to one quickly and is stable from there.

Ours: the same, from random small starts and up to 50,000 steps; no training is needed. Starts of
which both heads come to one sign are absorbed at 0.828, which the paper does not say.
"""

import numpy as np
from gallery import Runs, main
from matplotlib.figure import Figure

from mechicl.plots import style
from mechicl.theory import descent

TASK = {"d": 5, "n_context": 40, "noise_variance": 0.1}


def draw(runs: Runs) -> Figure:
    """Draw the left side of (4.3) over steps, a line a start."""
    rng = np.random.default_rng(0)
    omega, mu = 0.1 * rng.normal(size=(2, 12, 2))  # (start, head)
    steps, omega, mu = descent.descend(
        omega, mu, learning_rate=0.01, n_steps=runs.size(50_000, 500), every=10, **TASK
    )
    ratio = descent.optimality_ratio(omega, mu, **TASK)
    both = (omega[-1] > 0).any(-1) & (omega[-1] < 0).any(-1)

    figure = style.figure(1, 1, width=6.4, height=3.6)
    axes = figure.subplots()
    for name, kind, colour in (
        ("ends with a head of each sign", both, style.colour(0)),
        ("ends with heads of one sign", ~both, style.colour(1)),
    ):
        lines = axes.plot(steps[1:], ratio[1:, kind], color=colour, lw=1.2)
        if lines:
            lines[0].set_label(f"{name}: {kind.sum()} starts")
    style.guide(axes, 1.0, "(4.3)")
    style.guide(axes, 0.828017, "0.828, one sign", dashes=(2, 2))
    axes.set_xscale("log")
    axes.set_xlabel("step of gradient descent")
    axes.set_ylabel("(1 + (1+σ²)d/L) ⟨μ, ω⟩")
    style.log_ticks(axes)
    style.legend(figure, axes)
    style.title(figure, "(4.3) along gradient descent on the approximate loss, H = 2, rate 0.01")
    return figure


if __name__ == "__main__":
    main(draw)
