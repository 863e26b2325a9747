"""yuksel2026, Fig. 4: the scale of the initial scores, and of importance.

Published: learning curves of the minimal model, (left) for scores drawn within ±u: the smaller u,
the later the stages, and one pattern alone for u = 0; (right) for matrices whose sizes are in the
ratio m: two stages for m = 1, intertwined ones for 1.3, three for 1.5 and 1.7.

Ours: the loss over the entropy of the chain, d = 20 (50), a line a seed. u = 10⁻⁹ is u = 0 here: in
float32 the heads are the same to the last bit.
"""

from gallery import Runs, main
from matplotlib.figure import Figure

from mechicl.plots import style

SCALES = {"u = 10⁻³": {}, "u = 10⁻⁶": {"init_scale": 1e-6}, "u = 10⁻⁹": {"init_scale": 1e-9}}
SCALES["u = 0"] = {"init_scale": 0.0}
IMPORTANCE = {
    f"m = {m}": {"init_scale": 1e-6} | ({"importance": m} if m < 1.7 else {})
    for m in (1.0, 1.3, 1.5, 1.7)
}


def draw(runs: Runs) -> Figure:
    """Draw learning curves, by the scale of scores and by importance."""
    figure = style.figure(1, 2, width=4.8, height=3.4)
    panels = figure.subplots(1, 2)
    for axes, settings in zip(panels, (SCALES, IMPORTANCE), strict=True):
        for number, (name, own) in enumerate(settings.items()):
            run = runs.trained("yuksel2026-minimal", **own)
            first = run.steps[run.steps <= run.steps[-1] / 2].tolist()
            excess = run.analyze(
                "context_kl", steps=first, n_prompts=runs.size(1000, 20), n_steps=100
            )["excess"]
            # By the sampling of its targets an excess near 0 may be below it.
            excess = excess.where(excess > 0)
            look = {"color": style.colour(number), "ls": style.DASHES[number]}
            for seed in range(excess.sizes["seed"]):
                own = {"label": name, "lw": 1.8} if seed == 0 else {"lw": 0.7}
                axes.plot(excess["step"], excess.isel(seed=seed), **look, **own)
        axes.set_xlabel("training step")
        axes.set_xlim(0, first[-1])
        axes.set_yscale("log")
        axes.grid(visible=True, color="0.9", lw=0.6)
        axes.legend(fontsize=8, frameon=False)
    panels[0].set_ylabel("loss over its floor [nat]")
    panels[0].set_title("initial scores within ±u, m = 1.7", fontsize=9)
    panels[1].set_title("importance m, u = 10⁻⁶", fontsize=9)
    style.title(
        figure,
        f"minimal model, {len(run.seeds)} seeds (the first is thick), first half of training",
    )
    return figure


if __name__ == "__main__":
    main(draw)
