"""he2025, Fig. 11: whatever the activation, the predictor is one step of gradient descent.

Published: the loss against the length of the context of two heads with the activations of Fig. 9,
beside vanilla and debiased gradient descent at the model's own rate η = 2C_f|ω||μ|; (1 + Cx)²
deviates a little at short contexts.

Ours: the same, of the seed that Fig. 9 shows; titles have the loss at 40 over that of debiased
descent. Descent is its exact risk at that η; models have errors of about 0.7 %. 1 + x is one curve
with it. The two whose η is near 1 are better than descent at that rate, more so the shorter the
context: their first order is not all of what they do.
"""

from gallery import Runs, main, settled
from he2025_fig09 import ACTIVATIONS, PATTERN
from matplotlib.figure import Figure

from mechicl.plots import style
from mechicl.theory.exact_risk import debiased_gd_risk, vanilla_gd_risk

TASK = {"d": 5, "noise_variance": 0.1}
RISKS = {"vanilla GD": vanilla_gd_risk, "debiased GD": debiased_gd_risk}


def draw(runs: Runs) -> Figure:
    """Draw losses over lengths, a panel an activation."""
    figure = style.figure(1, 3, width=3.6, height=3.2)
    panels = figure.subplots(1, 3, sharey=True)
    for (name, (recipe, settings)), axes in zip(ACTIVATIONS.items(), panels, strict=True):
        run = runs.trained(recipe, **settings)
        seed = [*settled(run, *PATTERN), *run.seeds][0]
        last = run.analyze("circuits").sel(seed=seed).isel(step=-1)
        eta = float(run.trajectory["slope"]) * float(abs(last["omega"] * last["mu"]).sum())
        found = run.analyze(
            "length_generalization",
            seeds=seed,
            n_prompts=runs.size(65_536, 64),
            references=False,
        )
        loss, lengths = found["loss"].isel(step=-1).sel(seed=seed), found["length"].values
        axes.plot(lengths, loss, "o-", ms=4, color=style.colour(0), label="two heads")
        known = {}
        for number, (text, risk) in enumerate(RISKS.items()):
            known[text] = [risk(eta, n_context=n, **TASK) for n in lengths]
            look = {"color": style.REFERENCE_COLOURS[number], "ls": style.DASHES[1 + number]}
            axes.plot(lengths, known[text], label=text, **look)
        axes.axvline(40, color=style.GUIDE, lw=1, ls=":", label="trained length")
        over = float(loss.sel(length=40)) / known["debiased GD"][list(lengths).index(40)] - 1
        axes.set_title(f"f(x) = {name}, seed {seed}\nη = {eta:.3f}, {over:+.1%} at 40", fontsize=9)
        axes.set_xlabel("examples in a context")
        axes.grid(visible=True, color="0.9", lw=0.6)
    panels[0].set_ylabel("mean squared error")
    style.legend(figure, panels[0])
    style.title(figure, "Loss by length, and the exact risk of gradient descent at each model's η")
    return figure


if __name__ == "__main__":
    main(draw)
