"""he2025, Fig. 6: the approximate loss (4.1) beside the loss itself.

Published: over (ω, μ) of a pair of heads (ω, −ω; μ, −μ) at L = 40, d = 5, σ² = 0.1, the difference
of the two losses, and each of them, with an arrow along the valley of the loss.

Ours: the same, in the figure of the probe `loss_landscape`; in place of the arrow the valley 2ωμ =
η*, and the paths that the seeds of `he2025-two-head` take.
"""

from gallery import Runs, main
from matplotlib.figure import Figure

from mechicl import plots


def draw(runs: Runs) -> Figure:
    """Draw the landscape of the pair, with the paths of trained models."""
    run = runs.trained("he2025-two-head")
    return plots.draw(run.analyze("loss_landscape", n_prompts=runs.size(65_536, 64)))


if __name__ == "__main__":
    main(draw)
