"""Patch activations in a checkpoint, and watch what each head carries over training.

Usage: python examples/patch_activations.py [RUN]     (RUN is runs/demo after `make demo`)
"""

# %% A checkpoint, and two sets of prompts
import sys

import numpy as np
import torch

import mechicl
from mechicl.models.interventions import Donor, Patch, patched, run_each, run_patched

run = mechicl.open_run(sys.argv[1] if len(sys.argv) > 1 else "runs/demo")
task, config = run.task, run.recipe.model
seed, last = int(run.seeds[0]), int(run.steps[-1])
model = run.model(step=last, seed=seed)
prompts = torch.from_numpy(task.sample(400, seed=0)["inputs"].values)
clean, other = (config.windows(task, half) for half in prompts.split(200))
z = "blocks.0.attn.hook_z"


def predictions(output: torch.Tensor) -> np.ndarray:
    return config.answers(task, output).detach().numpy()


with torch.no_grad():
    own, donors = predictions(model(clean)), predictions(model(other))


def moved(patches: Patch | list[Patch]) -> float:
    """How far predictions go to the donors': 0 not at all, 1 all the way."""
    new = predictions(run_patched(model, clean, patches))
    way = donors - own
    return float(((new - own) * way).sum() / (way**2).sum())


# %% Which head carries the answer? Give each what it makes of other prompts, at the query
print(f"{run.recipe.name}, seed {seed}, step {last}: predictions go to those of other prompts by")
for head in range(model.cfg.n_heads):
    patch = Patch(z, Donor(other), {"head": head, "pos": -1})
    print(f"  {moved(patch):.2f} with head {head} of them")
both = Patch(z, Donor(other), {"pos": -1})
print(f"  {moved(both):.2f} with all heads of them")

# %% All heads one by one in a single pass, set to 0: what does each contribute?
heads = range(model.cfg.n_heads)
silenced = predictions(run_each(model, clean, [Patch(z, "zero", {"head": h}) for h in heads]))
for head, without in zip(heads, silenced, strict=True):
    print(f"without head {head}: predictions change by {np.abs(without - own).mean():.2f}")

# %% Hooks and caches work inside a patch: what the model sees is the patched activation
with torch.no_grad(), patched(model, Patch(z, "zero", {"head": 0})):
    _, cache = model.run_with_cache(clean)
print(f"inside the patch, head 0 writes {cache[z][:, :, 0].abs().max():.0f}")

# %% Over training: the probe makes the same patch at checkpoints, with standard errors
found = run.analyze("activation_patching", hook=z, per="head", n_prompts=200, n_steps=5)
shown = found["recovered"].sel(seed=seed).squeeze(drop=True).transpose("step", "head")
for step, row in zip(shown["step"].values, shown.values, strict=True):
    print(f"step {step:>6}: recovered by head", " ".join(f"{value:5.2f}" for value in row))
