"""yuksel2026, Fig. 2: attention patterns of the full model over training.

Published: the attention of the three heads of a transformer block at steps of training: first
uniform, then all on the most important positions, and at the end one block of positions each.

Ours: the attention that a head pays to the token so many places back, mean over 200 prompts and all
predicted positions, of one seed of `yuksel2026-full` (d = 20 instead of 50). Activations at a hook
point are data over training too: `run.cache` returns them, labelled.
"""

import numpy as np
from gallery import Runs, main
from matplotlib.figure import Figure

from mechicl.plots import style

HOOK = "blocks.0.attn.hook_pattern"
STEPS = (0, 60, 120, 240, 500, 1000, 2000)


def draw(runs: Runs) -> Figure:
    """Draw the attention of every head by lag, a line a step."""
    run = runs.trained("yuksel2026-full")
    seed, last = int(run.seeds[0]), run.steps[-1]
    steps = np.unique(run.steps[np.searchsorted(run.steps, np.minimum(STEPS, last))]).tolist()
    prompts = run.task.sample(runs.size(200, 5), seed=0)
    pattern = run.cache(HOOK, prompts=prompts, steps=steps, seeds=[seed])[HOOK]
    pattern = pattern.sel(seed=seed).mean("batch").transpose("step", "head", "query_pos", "key_pos")
    # Every predicted position sees the whole window before it, and itself at lag 0.
    lags = np.arange(run.task.order + 2)
    queries = np.arange(lags[-1], pattern.sizes["query_pos"])[:, None]
    by_lag = pattern.values[:, :, queries, queries - lags].mean(2)  # (step, head, lag)

    heads = by_lag.shape[1]
    figure = style.figure(1, heads, width=3.6, height=3.0)
    panels = figure.subplots(1, heads, sharey=True)
    for head, axes in enumerate(panels):
        for number, block in enumerate(run.task.blocks):
            low, high = min(block) - 0.5, max(block) + 0.5
            axes.axvspan(low, high, color=style.colour(number), alpha=0.12, lw=0)
            axes.text(
                (low + high) / 2,
                0.96,
                f"block {number + 1}",
                fontsize=7,
                ha="center",
                va="top",
                transform=axes.get_xaxis_transform(),
            )
        for step, weights in zip(steps, by_lag[:, head], strict=True):
            shade = 0.8 - 0.8 * steps.index(step) / max(len(steps) - 1, 1)
            axes.plot(
                lags, weights, "o-", ms=3, lw=1.2, color=f"{shade:.2f}", label=f"step {step:,}"
            )
        axes.set_title(f"head {head}", fontsize=9)
        axes.set_xticks(lags[::2])
        axes.set_xlabel("tokens back")
    panels[0].set_ylabel("attention")
    panels[0].set_ylim(0, 1.2 * by_lag.max())
    style.legend(figure, panels[0])
    style.title(figure, f"full model, seed {seed}: where heads look, from light to dark")
    return figure


if __name__ == "__main__":
    main(draw)
