"""Train a model of your own with plain PyTorch, import its checkpoints, and probe them.

Usage: python examples/import_checkpoints.py [FOLDER]     (a new folder; a temporary one by default)
"""

import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

import mechicl
from mechicl.errors import InputError
from mechicl.training import load_recipe

SAVED = (0, 20, 50, 100, 150, 200, 250, 300)


class Attention(nn.Module):
    """One layer that predicts the response of the last position, a projection each for q, k, v."""

    def __init__(self, width: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.query = nn.Linear(width, n_heads * width, bias=False)
        self.key = nn.Linear(width, n_heads * width, bias=False)
        self.value = nn.Linear(width, n_heads * width, bias=False)
        self.output = nn.Linear(n_heads * width, width, bias=False)

    def forward(self, z: Tensor) -> Tensor:
        """Return the predictions for a batch of prompts, (batch,)."""

        def heads(x: Tensor) -> Tensor:
            return x.unflatten(-1, (self.n_heads, -1)).movedim(-2, 1)

        context, last = z[:, :-1], z[:, -1:]
        q, k, v = heads(self.query(last)), heads(self.key(context)), heads(self.value(context))
        mixed = ((q @ k.mT) / z.shape[-1] ** 0.5).softmax(-1) @ v
        return (last + self.output(mixed.movedim(1, -2).flatten(-2)))[:, -1, -1]


def main(folder: str | None = None) -> None:
    place = Path(folder or tempfile.mkdtemp())

    # 1. A task, and a recipe that says which of mechicl's models yours is. How it trains is yours.
    recipe = load_recipe(
        "he2025-two-head-quick", {"n_context": 20, "score_scale": 6**-0.5, "name": "mine"}
    )
    torch.manual_seed(0)
    torch.set_num_threads(1)  # more lose time on a model this small
    model = Attention(recipe.task.d_model, n_heads=2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    (place / "checkpoints").mkdir(parents=True)
    for step in range(max(SAVED) + 1):
        if step in SAVED:
            torch.save(
                {"model": model.state_dict(), "step": step},
                place / "checkpoints" / f"step-{step:04d}.pt",
            )
        prompts = recipe.task.sample(128, seed=1, part=step)
        inputs, targets = (torch.from_numpy(prompts[n].values) for n in ("inputs", "targets"))
        optimizer.zero_grad()
        ((model(inputs) - targets) ** 2).mean().backward()
        optimizer.step()

    # 2. From its names to ours. The layouts are those of stacked nn.Linear projections.
    mapping = {
        "base": "linear",
        "parameters": {
            "W_Q": {"from": "query.weight"},
            "W_K": {"from": "key.weight"},
            "W_V": {"from": "value.weight"},
            "W_O": {"from": "output.weight"},
        },
    }
    run = mechicl.import_run(
        place / "checkpoints",
        place / "run",
        recipe=recipe,
        mapping=mapping,
        check=Attention(recipe.task.d_model, n_heads=2),
    )
    print(run)
    for each in run.config["origin"]["check"]["checkpoints"]:
        print(f"step {each['step']:>4}: outputs differ by {each['error']:.1e} at most")

    # 3. A wrong layout has the right shape, and does not get in.
    mapping["parameters"]["W_O"]["layout"] = "d_model (d_head head)"
    try:
        mechicl.import_run(
            place / "checkpoints", place / "wrong", recipe=recipe, mapping=mapping, check=model
        )
    except InputError as error:
        print(f"refused: {error}")

    # 4. It is a run like any other: every probe that suits its model works on it.
    circuits, signs = run.analyze("circuits"), run.analyze("sign_matching")
    for step in run.steps.tolist():
        at = circuits.sel(seed=0, step=step)
        omega, mu = (at[name].values.round(3) for name in ("omega", "mu"))
        matched = bool(signs["holds"].sel(seed=0, step=step) == 1)
        print(f"step {step:>4}: omega {omega}, mu {mu}, signs match: {matched}")


if __name__ == "__main__":
    main(*sys.argv[1:])
