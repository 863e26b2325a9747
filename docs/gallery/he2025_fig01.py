"""he2025, Fig. 1: two softmax heads become a positive and a negative one.

Published: (a) heat maps of KQ and OV after 500,000 steps, each head a multiple of the identity and
a last entry, with one sign; (b) ω and μ of both heads over training.

Ours: the same of the first seed that ends with a head of each sign, over the 20,000 steps of
`he2025-two-head`. |ω| is still falling there, so ω is larger and μ smaller than published (0.127
and 3.50).
"""

from gallery import Runs, circuit_limits, circuit_maps, main, settled
from matplotlib.figure import Figure

from mechicl.plots import style


def draw(runs: Runs) -> Figure:
    """Draw the circuits at the end, and their scales over training."""
    run = runs.trained("he2025-two-head")
    good = settled(run, "head_roles", "sign_matching")
    seed = [*good, *run.seeds][0]
    circuits = run.analyze("circuits").sel(seed=seed).isel(layer=0)
    last = circuits.isel(step=-1)

    figure = style.figure(2, 1, width=8.0, height=3.0)
    above, below = figure.subfigures(2, 1)
    maps = above.subplots(1, 4, width_ratios=[5, 1.2, 5, 1.2])
    circuit_maps(maps, last, circuit_limits(last))
    for axes, scale in zip(below.subplots(1, 2), ("omega", "mu"), strict=True):
        style.lines(axes, circuits[scale], along="head")
        axes.axhline(0, color=style.GUIDE, lw=0.8)
        axes.set_ylabel(style.greek(scale))
        axes.legend(fontsize=8, frameon=False, loc="upper left")
    style.title(
        figure,
        f"circuits of two heads at step {int(last['step']):,}, and their scales; seed {seed}",
        f"{len(good)} of {len(run.seeds)} seeds end with a head of each sign",
    )
    return figure


if __name__ == "__main__":
    main(draw)
