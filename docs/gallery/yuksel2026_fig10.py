"""yuksel2026, Fig. 10: how heads cooperate while one leaves the first position.

Published: the gradient flow of the regression task, in which the free head's V' takes up a second
feature while it still attends to the first position, and the ensemble V takes up the opposite, so
that the prediction stays as it was.

Ours: the flow of (8) with h = 3 heads, T = 10 positions and orthogonal features of sizes 2.89, 1.7
and 1; no training is needed. The published notebook integrates another flow (one factor J(s) and
Euler's method).
"""

import numpy as np
from gallery import Runs, main
from matplotlib.figure import Figure

from mechicl.plots import style
from mechicl.theory.factorization_flow import cooperative_flow

SIZES = np.array([2.89, 1.7, 1.0])


def draw(runs: Runs) -> Figure:
    """Draw the free head's attention, both value matrices, and the loss."""
    features, times = np.diag(SIZES), np.linspace(0, 200, runs.size(801, 9))
    free = np.full(10, 0.008 / 7)
    free[:3] = 0.98, 0.008, 0.004
    start = features[0] / 3  # where three heads that are alike end
    found = cooperative_flow(features, start, start, free, n_heads=3, times=times)
    (ensemble, value), attention = found.values.swapaxes(0, 1), found.s[:, -1]

    figure = style.figure(2, 2, width=4.4, height=2.7)
    (s, v), (first, loss) = figure.subplots(2, 2, sharex=True)
    for position in range(3):
        paint = {"color": style.colour(position)}
        s.plot(times, attention[:, position], label=f"position {position + 1}", **paint)
        v.plot(times, value[:, position], label=f"feature {position + 1}", **paint)
    s.set_ylabel("attention of the free head, s'")
    v.set_ylabel("value of the free head, V'")
    first.plot(times, 2 * ensemble[:, 1], color=style.colour(1), label="two settled heads, 2V")
    first.plot(times, value[:, 1] * attention[:, 0], "--", color="k", label="free head, V's'₁")
    together = 2 * ensemble[:, 1] + value[:, 1] * attention[:, 0]
    first.plot(times, together, ":", color=style.GUIDE, label="together")
    first.set_ylabel("feature 2 at position 1")
    first.set_ylim(-1.5, 2.3)
    loss.plot(times, found.loss, color="k")
    for plateau in (SIZES[1] ** 2 + SIZES[2] ** 2, SIZES[2] ** 2):
        style.guide(loss, plateau, f"plateau {plateau:.2f}")
    loss.set_ylabel("population loss")
    for axes in (s, v, first, loss):
        axes.grid(visible=True, color="0.9", lw=0.6)
        axes.legend(fontsize=7, frameon=False)
    first.set_xlabel("time")
    loss.set_xlabel("time")
    style.title(figure, "Cooperative flow (8), h = 3: one head leaves for the second position")
    return figure


if __name__ == "__main__":
    main(draw)
