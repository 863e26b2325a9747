"""he2025, Fig. 3: one head, and how four heads divide the work.

Published: (a) the circuits of a single head, with ω = 0.52; (b), (c) ω and μ of four heads over
training, one of which becomes a dummy with both scales near zero.

Ours: (a) of the first seed, whose ω and μ may both be negative: the loss is the same; (b), (c) one
seed of `he2025-four-head` at 20,000 steps instead of 500,000. Weak heads fade slowly, and a seed
need not end with a dummy.
"""

from gallery import Runs, circuit_limits, circuit_maps, main
from matplotlib.figure import Figure

from mechicl.plots import style
from mechicl.schema import flag_names


def draw(runs: Runs) -> Figure:
    """Draw the circuits of one head, and the scales of four over training."""
    one = runs.trained("he2025-one-head").analyze("circuits").isel(seed=0, step=-1, layer=0)
    four = runs.trained("he2025-four-head")
    roles = four.analyze("head_roles")
    dummy = {name: code for code, name in flag_names(roles["role"]).items()}["dummy"]
    # The seed that ends with the most dummies, as the published one has one.
    seed = int((roles["role"].isel(step=-1) == dummy).sum("head").idxmax("seed"))
    circuits = four.analyze("circuits").sel(seed=seed)

    figure = style.figure(1, 3, width=4.2, height=3.2)
    left, right = figure.subfigures(1, 2, width_ratios=[4, 8])
    circuit_maps(left.subplots(1, 2, width_ratios=[5, 1.2]), one, circuit_limits(one))
    for axes, scale in zip(right.subplots(1, 2), ("omega", "mu"), strict=True):
        style.lines(axes, circuits[scale], along="head")
        axes.axhline(0, color=style.GUIDE, lw=0.8)
        axes.set_ylabel(style.greek(scale))
        axes.legend(fontsize=8, frameon=False, loc="upper left")
    named = flag_names(roles["role"])
    ends = [named[int(code)] for code in roles["role"].sel(seed=seed).isel(step=-1).values]
    style.title(
        figure,
        f"one head at step {int(one['step']):,} (|ω| = {abs(one['omega'].item()):.3f}, published "
        f"0.52); four heads over training, seed {seed}: {', '.join(ends)}",
    )
    return figure


if __name__ == "__main__":
    main(draw)
