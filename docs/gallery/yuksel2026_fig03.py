"""yuksel2026, Fig. 3: the full model passes by models of shorter contexts.

Published: the divergence KL(reference ‖ model) of the full model over training, from models trained
on the last c = 4 and 8 tokens and from the chain itself (labelled c = 12): it is nearest to them in
that order.

Ours: the same by the probe `context_kl`, also against a trained model of c = 12; d = 20 instead of
50, on fresh data. Triangles are the least of each curve; lines are of one seed.
"""

from gallery import Runs, main
from matplotlib.figure import Figure

from mechicl.plots import style
from mechicl.schema import flag_names


def draw(runs: Runs) -> Figure:
    """Draw the divergences of one seed, from trained models and from the chain's blocks."""
    run = runs.trained("yuksel2026-full")
    others = {f"c={c}": runs.trained("yuksel2026-context", context=c) for c in (4, 8, 12)}
    found = run.analyze(
        "context_kl", against=others, n_prompts=runs.size(1000, 20), n_steps=runs.size(100, 3)
    )
    one = found.isel(seed=0)

    figure = style.figure(1, 2, width=4.6, height=3.4)
    panels = figure.subplots(1, 2, sharey=True)
    kinds = {"trained:": "from trained models", "": "from the chain with its first blocks"}
    names = flag_names(found["reference"])
    trained = {code: name for code, name in names.items() if "trained:" in name}
    chain = {code: name for code, name in names.items() if code not in trained}
    for axes, references, text in zip(panels, (trained, chain), kinds.values(), strict=True):
        for number, (code, name) in enumerate(references.items()):
            curve = one["kl"].sel(reference=code)
            paint = {"color": style.colour(number)}
            axes.plot(curve["step"], curve, lw=1.4, label=name, **paint)
            axes.plot(curve.idxmin("step"), curve.min(), "v", ms=7, mec="black", **paint)
        style.step_axis(axes, one["step"].values)
        axes.set_yscale("log")
        axes.set_title(text, fontsize=9)
        axes.grid(visible=True, color="0.9", lw=0.6)
        axes.legend(fontsize=7, frameon=False)
    panels[0].set_ylabel("divergence [nat]")
    style.title(figure, f"full model: divergence from references, seed {int(one['seed'])}")
    return figure


if __name__ == "__main__":
    main(draw)
