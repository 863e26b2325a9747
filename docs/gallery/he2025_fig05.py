"""he2025, Fig. 5: the pattern of the circuits appears early and stays.

Published: KQ (above) and OV (below) of two heads at steps of training, from the untrained model on:
diagonal and last entry from early on, |ω| rising and then falling, |μ| rising throughout.

Ours: the same at 6 checkpoints of one seed over the 20,000 steps of `he2025-two-head` (500,000
published). Colours of each row end at its own largest entry.
"""

import numpy as np
from gallery import Runs, main, settled
from matplotlib.figure import Figure

from mechicl.plots import style


def draw(runs: Runs) -> Figure:
    """Draw KQ and OV's last row of both heads at six steps."""
    run = runs.trained("he2025-two-head")
    seed = [*settled(run, "head_roles", "sign_matching"), *run.seeds][0]
    wanted = np.array([0, 100, 400, 1000, 5000, run.steps[-1]])
    steps = run.steps[np.searchsorted(run.steps, np.minimum(wanted, run.steps[-1]))]
    circuits = run.analyze("circuits", steps=np.unique(steps)).sel(seed=seed).isel(layer=0)
    columns = circuits.sizes["step"]

    figure = style.figure(1, columns, width=2.0, height=5.6)
    panels = figure.subplots(4, columns, squeeze=False, height_ratios=[6, 1, 6, 1])
    for head in (0, 1):
        one = circuits.isel(head=head)
        rows = {
            "KQ": one["KQ"].transpose("step", "d_key", "d_query"),
            "OV": one["OV"].isel(d_out=[-1]).transpose("step", "d_out", "d_in"),
        }
        for row, (name, shown) in enumerate(rows.items(), 2 * head):
            limit = float(abs(shown).max())
            for column, axes in enumerate(panels[row]):
                style.heatmap(axes, shown.values[column], limit)
                axes.set_xticks([])
                axes.set_yticks([])
            panels[row, 0].set_ylabel(f"{name} {head}")
        for axes, omega, mu in zip(
            panels[2 * head], one["omega"].values, one["mu"].values, strict=True
        ):
            axes.set_title(f"ω = {omega:.3g}, μ = {mu:.3g}", fontsize=8)
    for axes, step in zip(panels[0], circuits["step"].values, strict=True):
        axes.set_title(f"step {step:,}\n{axes.get_title()}", fontsize=8)
    style.title(figure, f"circuits of two heads over training, seed {seed}")
    return figure


if __name__ == "__main__":
    main(draw)
