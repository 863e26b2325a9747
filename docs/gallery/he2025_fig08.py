"""he2025, Fig. 8: softmax attention generalises in length, linear attention does not.

Published: the loss of linear attention and of one and several softmax heads, trained at L = 40,
against the length of the context: that of linear attention rises beyond 40, the others fall.

Ours: the same at 10,000 to 20,000 steps; lines are medians over seeds, bands their range. The exact
risk of linear attention has its least at 43 and is 1.72 at 100.
"""

from gallery import Runs, main, settled
from matplotlib.figure import Figure

from mechicl.plots import style

MODELS = {
    "linear attention": "he2025-linear-attention",
    "softmax, H = 1": "he2025-one-head",
    "softmax, H = 2": "he2025-two-head",
}


def draw(runs: Runs) -> Figure:
    """Draw the losses over lengths."""
    figure = style.figure(1, 1, width=6.4, height=3.6)
    axes = figure.subplots()
    for number, (name, recipe) in enumerate(MODELS.items()):
        run = runs.trained(recipe)
        loss = run.analyze(
            "length_generalization", n_prompts=runs.size(65_536, 64), references=False
        )["loss"].isel(step=-1)
        if recipe == "he2025-two-head":
            loss = loss.sel(seed=settled(run, "head_roles", "sign_matching") or run.seeds.tolist())
        paint = {"color": style.colour(number)}
        axes.plot(loss["length"], loss.median("seed"), marker="o", ms=3.5, label=name, **paint)
        axes.fill_between(
            loss["length"], loss.min("seed"), loss.max("seed"), alpha=0.2, lw=0, **paint
        )
    axes.axvline(40, color=style.GUIDE, lw=1, ls=":", label="trained length")
    axes.set_yscale("log")
    style.log_ticks(axes)
    axes.set_xlabel("examples in a context")
    axes.set_ylabel("mean squared error")
    axes.grid(visible=True, color="0.9", lw=0.6)
    style.legend(figure, axes)
    style.title(figure, "Loss by length of the context, of models trained at 40")
    return figure


if __name__ == "__main__":
    main(draw)
