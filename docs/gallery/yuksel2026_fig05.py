"""yuksel2026, Fig. 5: with less data there are fewer stages.

Published: learning curves of the minimal model for training sets of several sizes, and the
divergence from models of shorter contexts: the fewer sequences, the fewer stages.

Ours: loss on fresh prompts and divergence from the chain, for 100 to 9,000 sequences; d = 20 (50).
Lines are of one seed; the legend has the stages that the probe `learning_stages` finds on each.
"""

from gallery import Runs, main
from matplotlib.figure import Figure

from mechicl.plots import style
from mechicl.schema import flag_names

SIZES = (100, 400, 2000, 3000, 6000, 9000)


def draw(runs: Runs) -> Figure:
    """Draw loss and divergence from the chain's first block and the chain, a line a size."""
    figure = style.figure(1, 3, width=3.6, height=3.4)
    loss, first, chain = figure.subplots(1, 3)
    for number, size in enumerate(SIZES):
        run = runs.trained("yuksel2026-minimal", training_set=size)
        found = run.analyze(
            "learning_stages", n_prompts=runs.size(1000, 20), n_steps=runs.size(80, 3)
        )
        names = {name: code for code, name in flag_names(found["reference"]).items()}
        one = found.isel(seed=0)
        stages = ", ".join(f"{count:g}" for count in sorted({*found["n_stages"].values}))
        look = {"color": style.colour(number), "lw": 1.4}
        loss.plot(one["step"], one["loss"], label=f"{size:,} sequences: {stages}", **look)
        for axes, name in ((first, "blocks_1"), (chain, "generator")):
            code = next(code for text, code in names.items() if name in text)
            axes.plot(one["step"], one["kl"].sel(reference=code), **look)
            axes.set_yscale("log")
            axes.set_ylabel("divergence [nat]")
    for axes, text in zip(
        (loss, first, chain),
        ("on fresh prompts", "from the chain's first block", "from the chain"),
        strict=True,
    ):
        style.step_axis(axes, one["step"].values)
        axes.set_title(text, fontsize=9)
        axes.grid(visible=True, color="0.9", lw=0.6)
    loss.set_ylabel("loss [nat]")
    loss.set_ylim(top=1.05 * float(one["loss"].max()))  # what overfits goes beyond
    style.legend(figure, loss)
    style.title(figure, "minimal model by the size of its training set, with numbers of stages")
    return figure


if __name__ == "__main__":
    main(draw)
