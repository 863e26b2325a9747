"""Open a run, hook into its checkpoints, and watch a head become what it is.

Usage: python examples/hook_into_a_checkpoint.py [RUN]     (RUN is runs/demo after `make demo`)
"""

import sys

import numpy as np
import torch

import mechicl


def main(path: str = "runs/demo") -> None:
    run = mechicl.open_run(path)
    print(run)

    # 1. Which seeds learnt the positive-negative pair? Probes return labelled datasets.
    roles = run.analyze("head_roles")
    learnt = roles["holds"].isel(step=-1)
    for number in run.seeds:
        print(
            f"seed {number}: {'a' if learnt.sel(seed=number) == 1 else 'not a'} head of each sign"
        )
    seed = int(run.seeds[np.nanargmax(learnt.values)])
    last = int(run.steps[-1])

    # 2. Any checkpoint is a HookedTransformer.
    model = run.model(step=last, seed=seed)
    prompts = run.task.sample(2000, seed=0)
    inputs = torch.from_numpy(prompts["inputs"].values)
    targets = torch.from_numpy(prompts["targets"].values)

    def loss(output: torch.Tensor) -> float:
        return float(((output[:, -1, -1] - targets) ** 2).mean())

    with torch.no_grad():
        print(f"seed {seed}, step {last}: loss {loss(model(inputs)):.3f}")

        # 3. Ablate one head at a time: each is half of one gradient step.
        for head in range(model.cfg.n_heads):

            def silence(z: torch.Tensor, hook: object, head: int = head) -> torch.Tensor:
                z[:, :, head] = 0
                return z

            ablated = model.run_with_hooks(inputs, fwd_hooks=[("blocks.0.attn.hook_z", silence)])
            print(f"  without head {head}: loss {loss(ablated):.3f}")

    # 4. Activations over training are data too: how sharply does the query attend?
    pattern = run.cache(
        "blocks.0.attn.hook_pattern",
        prompts=prompts.isel(batch=slice(200)),
        steps=[step for step in (0, 50, 100, 500, last) if step in run.steps],
        seeds=[seed],
    )["blocks.0.attn.hook_pattern"]
    weights = pattern.isel(query_pos=-1, key_pos=slice(None, -1)).sel(seed=seed)
    effective = np.exp(-(weights * np.log(weights + 1e-30)).sum("key_pos")).mean("batch")
    print("context positions that each head attends to (exp of the entropy, mean over prompts):")
    for step in effective["step"].values:
        print(f"  step {step:>6}: {np.round(effective.sel(step=step).values, 1)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
