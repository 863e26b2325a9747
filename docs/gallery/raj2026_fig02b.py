"""raj2026, Fig. 2 (b): strategies of measurement on the tree prior.

Published: the loss against the number M of measurements for h = 8, α = 0.5, τ = 0.1: a path along
the tree (adaptive), the best measurement fixed in advance, and linear estimates (Gauss-PC), with
cutoffs 2.8 and 5.6.

Ours: the same at published size, with standard errors below the lines' width; no training is
needed. The path is worse than the best fixed measurement up to M = 3, and better from M = 4 on.
"""

import numpy as np
from gallery import Runs, main
from matplotlib.figure import Figure
from raj2026_fig04a import finish

from mechicl.plots import style
from mechicl.theory import measurement, priors, strategies

TREE, TAU = (8, 0.5), 0.1


def draw(runs: Runs) -> Figure:
    """Draw the loss of each strategy over M."""
    rng, counts = np.random.default_rng(0), np.arange(1, 9)
    effort = runs.size({}, {"n_steps": 2, "n_polish": 2, "n_draws": 2})
    losses = {
        "adaptive: a path along the tree": [
            strategies.adaptive_loss(*TREE, m, TAU, n_draws=runs.size(1_000_000, 100), rng=rng)[0]
            for m in counts
        ],
        "non-adaptive: the best fixed one": [
            strategies.optimised_measurement(*TREE, m, TAU, rng=rng, **effort).loss for m in counts
        ],
        "fixed on the symmetric axes": [strategies.symmetric_loss(*TREE, m, TAU) for m in counts],
        "Gauss-PC: linear estimates": measurement.gauss_pc_loss(
            priors.tree_variances(*TREE), counts, TAU
        ),
    }
    figure = style.figure(1, 1, width=6.6, height=3.8)
    axes = figure.subplots()
    for number, (name, curve) in enumerate(losses.items()):
        look = {"color": style.colour(number), "ls": style.DASHES[number], "marker": "o", "ms": 3.5}
        axes.plot(counts, curve, label=name, **look)
    for cutoff, name in (
        (priors.symmetric_cutoff(*TREE, TAU), "m*_sym"),
        (priors.adaptive_cutoff(*TREE, TAU), "m*_ada"),
    ):
        axes.axvline(cutoff, color=style.GUIDE, lw=1, ls=":")
        place = {"transform": axes.get_xaxis_transform(), "fontsize": 8, "va": "top"}
        axes.text(cutoff + 0.06, 0.98, f"{name} = {cutoff:.2f}", **place)
    finish(figure, axes, "Tree prior, h = 8, α = 0.5, τ = 0.1: loss of strategies")
    return figure


if __name__ == "__main__":
    main(draw)
