"""raj2026, Fig. 4 (c), (d): keys of another leaf cost the more, the farther the leaf is.

Published: (c) is a scheme of the experiment; (d) the loss of model A under keys of another leaf,
used from layer ℓ₀ on, by the distance of the leaves in the tree, with two controls: no patch, and
keys of another context of the same leaf.

Ours: the same by the probe `key_patching`, in its figure, a panel a seed, for a tree of depth 6
(published 8). The order of the claim need not hold on every seed.
"""

from gallery import Runs, main
from matplotlib.figure import Figure

from mechicl import plots


def draw(runs: Runs) -> Figure:
    """Draw the loss under donors' keys, by distance and first layer."""
    run = runs.trained("raj2026-tree-deep")
    found = run.analyze(
        "key_patching", n_prompts=runs.size(4096, 256), seeds=run.seeds[:2].tolist()
    )
    return plots.draw(found)


if __name__ == "__main__":
    main(draw)
