"""raj2026, Fig. 4 (a): on a Gaussian prior depth and MLPs buy nothing.

Published: the loss of models A (one measurement in each of M layers), B (M in one layer) and C (as
B, without MLPs) against M on a Gaussian prior, on the line of the theory; finite N shows at large
M.

Ours: K = 16 covariates, at M = 2 and the M = 4 of the recipes; marks are means over seeds, bars a
standard deviation. The line is (34) at the N = 4096 of the contexts. A seed of A may be stuck with
one axis less, which widens its bar.
"""

import numpy as np
from gallery import Runs, main
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mechicl.plots import style
from mechicl.theory import measurement

MODELS = {"A": "deep", "B": "wide", "C": "linear"}


def models(runs: Runs, prior: str, axes: Axes, *more: int) -> None:
    """Draw the loss of each model, over seeds, at its recipe's M and at `more`."""
    for number, (name, kind) in enumerate(MODELS.items()):
        size = "n_layers" if name == "A" else "n_channels"
        look = {"color": style.colour(number), "fmt": style.REFERENCE_MARKERS[number]}
        text = []
        for settings in (*({size: budget} for budget in more), {}):
            run = runs.trained(f"raj2026-{prior}-{kind}", **settings)
            found = run.analyze("mmse", n_prompts=runs.size(8192, 16)).isel(step=-1)
            loss, budget = found["loss"], int(found["n_measurements"])
            place, mean = budget + 0.12 * (number - 1), float(loss.mean())
            text.append(f"{mean:.3f}")
            spread = float(loss.std(ddof=1)) if loss.size > 1 else 0.0
            axes.errorbar(place, mean, spread, ms=6, capsize=4, **look)
        named = f"model {name}, {loss.sizes['seed']} seeds: {', '.join(text)}"
        axes.errorbar([], [], [], ms=6, label=named, **look)


def finish(figure: Figure, axes: Axes, title: str) -> None:
    """Name the axes, put a legend beside them, and a title over both."""
    axes.set_yscale("log")
    style.log_ticks(axes)
    axes.set_xlabel("measurements M")
    axes.set_ylabel("mean squared error")
    axes.grid(visible=True, color="0.9", lw=0.6)
    style.legend(figure, axes)
    style.title(figure, title)


def draw(runs: Runs) -> Figure:
    """Draw the losses of the models, and that of the best M axes."""
    figure = style.figure(1, 1, width=6.6, height=3.8)
    axes, counts = figure.subplots(), np.arange(1, 9)
    task = runs.trained("raj2026-gaussian-linear").task
    covariance = task.constants()["prior_covariance"][1]
    best = measurement.gauss_pc_loss(covariance, counts, task.tau, n_context=task.n_context)
    axes.plot(counts, best, "k--", lw=1.2, label="best M axes, (34) at finite N")
    models(runs, "gaussian", axes, 2)
    finish(figure, axes, f"Gaussian prior, K = {len(covariance)}: loss of the models")
    return figure


if __name__ == "__main__":
    main(draw)
