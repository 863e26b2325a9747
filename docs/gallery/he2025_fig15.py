"""he2025, Fig. 15: what KQ learns is nearly the inverse of the covariance.

Published: Ω⁻¹ of the trained model of Fig. 12 beside Σ and Σ̃ of (5.6): the three are close.

Ours: the same, with Ω taken from both heads, P = Σ_h μ_h KQ_h = 2γμ_γ·Ω of the probe
`preconditioner`, so that its scale is part of the comparison. The mean over seeds with a head of
each sign; the debiased optimum, which the paper does not have, is drawn as well.
"""

import numpy as np
from gallery import Runs, main, settled
from matplotlib.figure import Figure

from mechicl.plots import style


def draw(runs: Runs) -> Figure:
    """Draw the inverse of the learnt matrix, and the matrices that it may be."""
    run = runs.trained("he2025-anisotropic")
    good = settled(run, "head_roles", "sign_matching") or run.seeds.tolist()
    learnt = run.analyze("preconditioner", seeds=good).isel(step=-1)
    inverses = np.linalg.inv(learnt["preconditioner"].values)
    shown = {
        f"inverse of P, mean of {len(good)} seeds": inverses.mean(0),
        r"$\Sigma$": run.trajectory["covariance"].values,
        r"$\tilde\Sigma$ of (5.6)": np.linalg.inv(learnt["plain_optimum"].values),
        "debiased optimum": np.linalg.inv(learnt["debiased_optimum"].values),
    }
    figure = style.figure(1, len(shown), width=2.9, height=3.0)
    panels = figure.subplots(1, len(shown))
    limit = max(abs(matrix).max() for matrix in shown.values())
    for axes, (text, matrix) in zip(panels, shown.items(), strict=True):
        style.heatmap(axes, matrix, limit)
        axes.set_title(text, fontsize=9)
    style.title(
        figure,
        f"what the inverse of the learnt P is at step {int(learnt['step']):,}; entries differ over "
        f"seeds by {inverses.std(0).max():.3f} (standard deviation, largest)",
    )
    return figure


if __name__ == "__main__":
    main(draw)
