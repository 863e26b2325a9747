"""he2025, Fig. 9: other activations than the exponential learn the same pattern.

Published: KQ and OV of two heads whose attention weights are f(s)/Σf(s), for f(x) = 1 + x,
(1 + 0.5x)² and 1 + tanh(x): a positive and a negative head each, at scales of their own.

Ours: the same of a seed that ends in the pattern, if there is one: for 1 + x most seeds do not, for
its normaliser can come near zero. Trained for 10,000 to 20,000 steps instead of 500,000.
"""

from gallery import Runs, circuit_limits, circuit_maps, main, settled
from matplotlib.figure import Figure

from mechicl.plots import style

# With 1 + x one seed of the recipe's eight ends in the pattern: all are trained, whatever --seeds.
ALL = {"seeds": list(range(8))}
ACTIVATIONS = {
    "1 + x": ("he2025-affine-activation", {"coefficient": 1.0, **ALL}),
    "(1 + 0.5x)²": ("he2025-square-activation", {"coefficient": 0.5}),
    "1 + tanh(x)": ("he2025-tanh-activation", {}),
}
PATTERN = ("head_roles", "sign_matching", "zero_sum_ov", "homogeneous_kq")


def draw(runs: Runs) -> Figure:
    """Draw the circuits of both heads, a row an activation."""
    figure = style.figure(1, 1, width=7.6, height=8.4)
    for (name, (recipe, settings)), row in zip(
        ACTIVATIONS.items(), figure.subfigures(3, 1), strict=True
    ):
        run = runs.trained(recipe, **settings)
        good = settled(run, *PATTERN)
        seed = [*good, *run.seeds][0]
        last = run.analyze("circuits").sel(seed=seed).isel(layer=0, step=-1)
        maps = row.subplots(1, 4, width_ratios=[5, 1.2, 5, 1.2])
        circuit_maps(maps, last, circuit_limits(last))
        row.suptitle(
            f"f(x) = {name}: seed {seed} at step {int(last['step']):,}; {len(good)} of "
            f"{len(run.seeds)} seeds end in the pattern",
            fontsize=9,
        )
    return figure


if __name__ == "__main__":
    main(draw)
