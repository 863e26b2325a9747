"""he2025, Fig. 14: the circuits of four heads.

Published: heat maps of KQ and OV of a model of four heads: diagonal and last-entry-only on all.

Ours: the same, in the figure of the probe `circuits`, of the first two seeds of `he2025-four-head`
at 20,000 steps instead of 500,000. Every seed has a weak head there whose KQ is noise beside its
own ω, so that the statement of the probe does not hold, while the predictor does not feel it.
"""

from gallery import Runs, main
from matplotlib.figure import Figure

from mechicl import plots


def draw(runs: Runs) -> Figure:
    """Draw the circuits of two seeds at the last step."""
    run = runs.trained("he2025-four-head")
    return plots.draw(run.analyze("circuits", seeds=run.seeds[:2].tolist(), steps=run.steps[-1:]))


if __name__ == "__main__":
    main(draw)
