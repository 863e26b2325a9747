"""raj2026, Fig. 4 (b): on the tree prior only depth follows the path.

Published: the loss of models A, B and C on the tree prior against M: B on the line of the best
fixed measurement, C on that of linear estimates, and A below both.

Ours: a tree of depth 6 (published 8), at M = 6; marks are means over seeds, bars a standard
deviation. Strategies are at the noise that models see, √(τ² + 1/N) for N tokens.
"""

import numpy as np
from gallery import Runs, main
from matplotlib.figure import Figure
from raj2026_fig04a import finish, models

from mechicl.plots import style
from mechicl.theory import measurement, priors, strategies


def draw(runs: Runs) -> Figure:
    """Draw the losses of the models at their M, and of strategies over M."""
    task = runs.trained("raj2026-tree-linear").task
    tree, rng = (task.prior.depth, task.prior.alpha), np.random.default_rng(0)
    seen, counts = measurement.context_noise(task.tau, task.n_context), np.arange(1, tree[0] + 1)
    effort = runs.size({}, {"n_steps": 2, "n_polish": 2, "n_draws": 2})
    losses = {
        "adaptive: a path along the tree": [
            strategies.adaptive_loss(*tree, m, seen, n_draws=runs.size(300_000, 100), rng=rng)[0]
            for m in counts
        ],
        "non-adaptive: the best fixed one": [
            strategies.optimised_measurement(*tree, m, seen, rng=rng, **effort).loss for m in counts
        ],
        "Gauss-PC: linear estimates": measurement.gauss_pc_loss(
            priors.tree_variances(*tree), counts, task.tau, n_context=task.n_context
        ),
    }
    figure = style.figure(1, 1, width=6.6, height=3.8)
    axes = figure.subplots()
    for number, (name, curve) in enumerate(losses.items()):
        paint = {"color": style.REFERENCE_COLOURS[number], "ls": style.DASHES[1 + number]}
        axes.plot(counts, curve, lw=1.2, label=name, **paint)
    models(runs, "tree", axes)
    finish(figure, axes, f"Tree prior, h = {tree[0]}: loss of models and strategies")
    return figure


if __name__ == "__main__":
    main(draw)
