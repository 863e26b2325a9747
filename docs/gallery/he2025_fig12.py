"""he2025, Fig. 12: on covariates that are correlated, KQ learns a preconditioner.

Published: KQ and OV of two heads trained on a covariance with Σ_ij = 0.5^|i−j|, and the inverses of
Σ and of Σ̃ (5.6): the learnt matrices have small entries two off the diagonal, as Σ̃⁻¹ has, and Σ⁻¹
has not.

Ours: the same of the first seed with a head of each sign, at 20,000 steps instead of 500,000.
"""

from gallery import Runs, circuit_limits, circuit_maps, main, settled
from matplotlib.figure import Figure

from mechicl.plots import style

REFERENCES = {
    "inverse_covariance": r"$\Sigma^{-1}$",
    "plain_optimum": r"$\tilde\Sigma^{-1}$ of (5.6)",
}


def draw(runs: Runs) -> Figure:
    """Draw the circuits of both heads beside the two inverses."""
    run = runs.trained("he2025-anisotropic")
    seed = [*settled(run, "head_roles", "sign_matching"), *run.seeds][0]
    last = run.analyze("circuits").sel(seed=seed).isel(layer=0, step=-1)
    learnt = run.analyze("preconditioner").sel(seed=seed).isel(step=-1)

    figure = style.figure(1, 1, width=12.0, height=3.0)
    left, right = figure.subfigures(1, 2, width_ratios=[12.4, 10])
    circuit_maps(left.subplots(1, 4, width_ratios=[5, 1.2, 5, 1.2]), last, circuit_limits(last))
    for axes, (name, text) in zip(right.subplots(1, 2), REFERENCES.items(), strict=True):
        matrix = learnt[name].values
        style.heatmap(axes, matrix, abs(matrix).max())
        far = float(learnt[f"distance_{name}"])
        axes.set_title(f"{text}\nΣ μ KQ is {far:.3f} from it, up to scale", fontsize=8)
    style.title(
        figure,
        f"two heads on covariates with Σ_ij = 0.5^|i−j|, seed {seed}, step {int(last['step']):,}",
    )
    return figure


if __name__ == "__main__":
    main(draw)
