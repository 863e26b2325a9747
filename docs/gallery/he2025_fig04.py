"""he2025, Fig. 4: models of several heads are one predictor, that of gradient descent.

Published: the loss against the length of the context, (a) of 1, 2, 4 and 8 heads trained at L = 40,
(b) of several heads beside vanilla and debiased gradient descent and the Bayes predictor (ridge).

Ours: the same at 10,000 to 20,000 steps. Lines are means over seeds that end with a head of each
sign (all seeds for one head), bands their range. The published curves of (a) may be 0.1 too high:
the authors' notebook adds the variance of the noise to targets that have it.
"""

from gallery import Runs, main, settled
from matplotlib.figure import Figure

from mechicl.plots import style
from mechicl.schema import flag_names

RECIPES = {1: "one-head", 2: "two-head", 4: "four-head", 8: "eight-head"}
REFERENCES = {"vanilla_gd": "vanilla GD", "debiased_gd": "debiased GD", "ridge": "Bayes (ridge)"}


def draw(runs: Runs) -> Figure:
    """Draw the losses of models, and of two heads beside references."""
    figure = style.figure(1, 2, width=4.6, height=3.4)
    left, right = figure.subplots(1, 2, sharey=True)
    for number, (heads, name) in enumerate(RECIPES.items()):
        run = runs.trained(f"he2025-{name}")
        result = run.analyze(
            "length_generalization",
            n_prompts=runs.size(65_536, 64),
            references=heads == 2,  # they are the same for all
        ).isel(step=-1)
        good = [] if heads == 1 else settled(run, "head_roles", "sign_matching")
        loss = result["loss"].sel(seed=good or run.seeds.tolist())
        for axes in (left, right)[: 1 + (heads == 2)]:
            look = {
                "color": style.colour(number),
                "ls": style.DASHES[number],
                "lw": 2.6 - 0.5 * number,
            }
            axes.plot(
                loss["length"],
                loss.mean("seed"),
                label=f"H = {heads}",
                marker=style.REFERENCE_MARKERS[number],
                ms=4,
                **look,
            )
            band = loss.min("seed"), loss.max("seed")
            axes.fill_between(loss["length"], *band, color=style.colour(number), alpha=0.2, lw=0)
        if heads == 2:
            names = {name: code for code, name in flag_names(result["reference"]).items()}
            for place, (name, text) in enumerate(REFERENCES.items()):
                known = result["reference_loss"].sel(reference=names[name])
                look = {"color": style.REFERENCE_COLOURS[place], "ls": style.DASHES[1 + place]}
                right.plot(known["length"], known, label=text, **look)
    for axes, text in ((left, "(a) heads"), (right, "(b) two heads and references")):
        axes.axvline(40, color=style.GUIDE, lw=1, ls=":")
        axes.set_title(text, fontsize=9)
        axes.set_xlabel("examples in a context")
        axes.grid(visible=True, color="0.9", lw=0.6)
        axes.legend(fontsize=8, frameon=False)
    left.set_ylabel("mean squared error")
    style.title(figure, "Loss by length of the context; all models are trained at 40 (dotted)")
    return figure


if __name__ == "__main__":
    main(draw)
