"""Many saved runs, after the fact: a sweep, probes over all of it, and back to single models.

Usage: python examples/study_many_runs.py [SWEEP.yaml [DIR]]     (the cells run in a notebook too)
"""

# %% A sweep trains them; what is complete already is left as it is.
import sys
from pathlib import Path

import numpy as np

import mechicl

HERE = Path(__file__).parent
given = [each for each in sys.argv[1:] if not each.startswith("-")]  # a notebook has its own
SWEEP, OUT = [*given, *[str(HERE / "heads.yaml"), "runs/heads"][len(given) :]]

for entry in mechicl.sweep(SWEEP, OUT):
    print(f"{entry.name}: {entry.status}, {dict(entry.settings)}")

# %% One probe over all of them: a labelled result with a dimension `run`.
study = mechicl.study(f"{OUT}/*", ["head_roles", "circuits"], out=f"{OUT}.zarr")
roles = study.results["head_roles"]
print(dict(roles.sizes))

# %% The settings of each run are coordinates. So: how often is there a head of each sign?
last = roles["holds"].sel(step=roles["last_step"])  # each run at its own last step
for n_heads, of_size in last.groupby("model.n_heads"):
    values = of_size.values[~np.isnan(of_size.values)]
    print(f"{n_heads:.0f} heads: a head of each sign on {values.sum():.0f} of {values.size} seeds")

# %% A table, a row a run, probe and seed, with heads in an order that seeds share.
table = study.table
scales = table[table["probe"] == "circuits"]
sizes = scales.assign(omega=scales["omega_0"].abs(), mu=scales["mu_0"].abs())  # of either sign
print(sizes.groupby(["model.n_heads", "task.noise_variance"])[["omega", "mu"]].mean())

# %% From a row of the table back to the model behind it.
row = scales.iloc[-1]
paths = dict(zip(study.runs["run_name"].values, study.runs["run_path"].values, strict=True))
run = mechicl.open_run(paths[row["run"]])
model = run.model(step=int(row["step"]), seed=int(row["seed"]))
print(f"{run.recipe.name}, seed {row['seed']}: a HookedTransformer of {model.cfg.n_heads} heads")
