"""he2025, Fig. 10: ω and μ over training under other activations.

Published: both scales of two heads over training for the activations of Fig. 9; with 1 + tanh(x)
|ω| rises and then falls, as with the exponential, and the others are "more complicated".

Ours: the same, of one seed each, the one that Fig. 9 shows, beside the exponential.
"""

from gallery import Runs, main, settled
from he2025_fig09 import ACTIVATIONS, PATTERN
from matplotlib.figure import Figure

from mechicl.plots import style

SHOWN = {"exp(x)": ("he2025-two-head", {}), **ACTIVATIONS}


def draw(runs: Runs) -> Figure:
    """Draw ω above and μ below, a column an activation."""
    figure = style.figure(2, len(SHOWN), width=3.1, height=2.5)
    panels = figure.subplots(2, len(SHOWN), sharex="col")
    for (name, (recipe, settings)), (omega, mu) in zip(SHOWN.items(), panels.T, strict=True):
        run = runs.trained(recipe, **settings)
        seed = [*settled(run, *PATTERN), *run.seeds][0]
        circuits = run.analyze("circuits").sel(seed=seed)
        style.lines(omega, circuits["omega"], along="head")
        style.lines(mu, circuits["mu"], along="head")
        omega.set_title(f"f(x) = {name}, seed {seed}", fontsize=9)
        omega.set_xlabel("")
        for axes in (omega, mu):
            axes.axhline(0, color=style.GUIDE, lw=0.8)
    panels[0, 0].set_ylabel("ω")
    panels[1, 0].set_ylabel("μ")
    style.legend(figure, panels[0, 0])
    style.title(figure, "scales of two heads over training")
    return figure


if __name__ == "__main__":
    main(draw)
