"""yuksel2026, Fig. 1: the minimal model learns one block of positions after the other.

Published: loss and attention of the minimal model over training, and its divergence from predictors
of the newest one, two and three blocks: all heads first attend to the most important block, and
leave it one by one.

Ours: the same by the probe `learning_stages`, with d = 20 states and blocks of four positions
(published 50 and two), on fresh data. The loss has all seeds, the other panels one.
"""

from gallery import Runs, main
from matplotlib.figure import Figure

from mechicl.plots import style
from mechicl.schema import flag_names


def draw(runs: Runs) -> Figure:
    """Draw loss, divergences, and the attention of every head on every block."""
    run = runs.trained("yuksel2026-minimal")
    found = run.analyze("learning_stages", n_prompts=runs.size(1000, 20), n_steps=runs.size(100, 5))
    one = found.isel(seed=0, layer=0)
    entered = one["entered"].values

    figure = style.figure(2, 3, width=3.6, height=2.7)
    panels = figure.subplots(2, 3)
    loss, kl, overlap = panels[0]
    style.lines(loss, found["loss"])
    loss.set_ylabel("loss [nat]")
    loss.legend(fontsize=7, frameon=False)
    for number, (code, name) in enumerate(flag_names(found["reference"]).items()):
        curve = one["kl"].sel(reference=code)
        kl.plot(curve["step"], curve, color=style.REFERENCE_COLOURS[number], lw=1.4, label=name)
    kl.set_yscale("log")
    kl.set_ylabel("divergence [nat]")
    kl.legend(fontsize=7, frameon=False)
    overlap.plot(one["step"], one["overlap"], color=style.GUIDE)
    overlap.set_ylabel("least overlap of two heads")
    for head, axes in enumerate(panels[1]):
        for number, block in enumerate(one["block"].values):
            mass = one["mass"].isel(head=head, block=number)
            axes.plot(mass["step"], mass, color=style.colour(number), label=f"block {block}")
        axes.set_ylim(-0.02, 1.02)
        axes.set_ylabel(f"attention of head {head}")
    panels[1, 0].legend(fontsize=7, frameon=False)
    for axes in panels.ravel()[1:]:
        style.step_axis(axes, one["step"].values)
        axes.grid(visible=True, color="0.9", lw=0.6)
        for number, step in enumerate(entered):
            axes.axvline(step, color=style.colour(number), lw=1, ls=":")
    style.title(
        figure,
        f"minimal model; dotted, where seed {int(one['seed'])} enters the blocks: "
        f"{', '.join(f'{step:g}' for step in entered)}",
        f"seeds that enter all, in order: {int(found['in_order'].sum())} of {len(run.seeds)}",
    )
    return figure


if __name__ == "__main__":
    main(draw)
