"""he2025, Figs 18 and 19: how four and three heads share two tasks.

Published: circuits of models trained on two tasks that read x_1..x_4 and x_3..x_6: with four heads
a pair for each task (18), with three a head that serves both (19, superposition).

Ours: the diagonal of KQ, μ and share of each task of every head at 10,000 steps, one seed each; the
title of a row has the regime of every seed. With four heads most seeds end in superposition too,
whose loss is lower (0.173) than that of two pairs (0.183); in the one shown head 3 is near the
probe's threshold for a second task.
"""

from collections import Counter

import numpy as np
from gallery import Runs, main
from matplotlib.figure import Figure

from mechicl.plots import style
from mechicl.schema import flag_names

TITLES = {
    "kq_diagonal": ("diagonal of KQ", "covariate"),
    "mu": ("μ", "task"),
    "share": ("share of the task's step size, sign of ω", "task"),
}


def draw(runs: Runs) -> Figure:
    """Draw what every head reads, writes and serves, a row a model."""
    figure = style.figure(1, 1, width=9.0, height=6.0)
    for heads, row in zip((4, 3), figure.subfigures(2, 1, height_ratios=[4.4, 3.6]), strict=True):
        settings = {} if heads == 4 else {"n_heads": heads}
        result = runs.trained("he2025-multi-task", **settings).analyze("task_allocation")
        last = result.isel(step=-1)
        names = flag_names(result["regime"])
        regimes = [names[int(code)].replace("_", " ") for code in last["regime"].values]
        # With four heads the published regime where a seed has it.
        seed = regimes.index("one task per head") if "one task per head" in regimes else 0
        one = last.isel(seed=seed)
        shown = {
            "kq_diagonal": one["kq_diagonal"].transpose("head", "covariate").values,
            "mu": one["mu"].transpose("head", "response").values,
            "share": (one["share"] * np.sign(one["omega"])).transpose("head", "response").values,
        }
        panels = row.subplots(1, 3, width_ratios=[6, 3, 3])
        for axes, (name, matrix) in zip(panels, shown.items(), strict=True):
            style.heatmap(axes, matrix, abs(matrix).max())
            axes.set_aspect("auto")
            axes.set_yticks(range(heads), map(str, range(heads)))
            axes.set_title(TITLES[name][0], fontsize=8)
            axes.set_xlabel(TITLES[name][1], fontsize=8)
        panels[0].set_ylabel("head", fontsize=8)
        counts = ", ".join(f"{text} {n}" for text, n in Counter(regimes).items())
        row.suptitle(
            f"Fig. {18 if heads == 4 else 19}: {heads} heads, seed {int(one['seed'])}, "
            f"{regimes[seed]} (seeds: {counts})",
            fontsize=9,
        )
    return figure


if __name__ == "__main__":
    main(draw)
