"""One training step of a stack of models: forward, gradient, update, in one function."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from mechicl.tasks.streams import generator
from mechicl.training import optimizer
from mechicl.training.optimizer import Stacked
from mechicl.training.recipe import Recipe


class State(NamedTuple):
    """All that a stack of models needs to go on training.

    Attributes
    ----------
    parameters
        (seed, layer, ...) by name.
    moments
        Optimiser state, by moment and name.
    diverged_at
        Step at which the loss, the gradient or the update of a model became non-finite; NaN for
        healthy ones.
    step
        Number of updates made.
    """

    parameters: Stacked
    moments: dict[str, Stacked]
    diverged_at: Float[Tensor, " seed"]
    step: Float[Tensor, ""]

    def map(self, function: Callable[[Tensor], Tensor]) -> "State":
        """Apply `function` to every tensor that has a seed axis."""
        return State(
            parameters={name: function(value) for name, value in self.parameters.items()},
            moments={
                moment: {name: function(value) for name, value in stack.items()}
                for moment, stack in self.moments.items()
            },
            diverged_at=function(self.diverged_at),
            step=self.step,
        )

    def to(self, device: str) -> "State":
        """Return the state on `device`."""
        return self.map(lambda tensor: tensor.to(device))._replace(step=self.step.to(device))


Step = Callable[..., tuple[State, Float[Tensor, " seed"]]]
"""(state, examples, kept) -> (state, loss of each model before it); see `Batch`."""


def make_step(recipe: Recipe) -> Step:
    """Return the step of `recipe`.

    A model whose loss, gradient or update is not finite is left as it is, marked as diverged, and
    not trained further; those stacked with it are not touched by it.
    """
    task, model = recipe.task, recipe.model

    def total_loss(
        parameters: Stacked, examples: Tensor, kept: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        prompts = task.prompts(examples)
        if kept is None:
            predictions = model.predict(task, parameters, prompts.inputs)
        else:
            predictions = model.predict_dropped(task, parameters, prompts.inputs, kept)
        loss = task.loss(predictions, prompts.targets).mean(-1)
        return loss.sum(), loss

    gradient = torch.func.grad(total_loss, has_aux=True)

    def step(state: State, examples: Tensor, kept: Tensor | None = None) -> tuple[State, Tensor]:
        gradients, loss = gradient(state.parameters, examples, kept)
        number = state.step + 1
        parameters, moments = optimizer.update(
            recipe.optimizer, state.parameters, gradients, state.moments, number, recipe.n_steps
        )
        finite = torch.isfinite(loss) & torch.isfinite(optimizer.gradient_norm(gradients))
        for stack in (parameters, *moments.values()):
            for value in stack.values():
                finite &= torch.isfinite(value).reshape(len(value), -1).all(1)
        healthy = finite & torch.isnan(state.diverged_at)
        newly = ~finite & torch.isnan(state.diverged_at)
        return State(
            parameters=_keep(healthy, parameters, state.parameters),
            moments={name: _keep(healthy, moments[name], state.moments[name]) for name in moments},
            diverged_at=torch.where(newly, state.step, state.diverged_at),
            step=number,
        ), loss

    return step


def _keep(healthy: Float[Tensor, " seed"], new: Stacked, old: Stacked) -> Stacked:
    def choose(name: str) -> Tensor:
        mask = healthy.reshape(-1, *[1] * (new[name].ndim - 1))
        return torch.where(mask, new[name], old[name])

    return {name: choose(name) for name in new}


def in_order(recipe: Recipe) -> list[str]:
    """Return the names of the parameters as the model declares them.

    A state has them in this order, new or restored: the norm of a gradient is summed over them.
    """
    return list(recipe.model.parameters(recipe.task))


def initial_state(recipe: Recipe, seeds: tuple[int, ...]) -> State:
    """Return the untrained models of `seeds`, each drawn from a stream of its own."""
    drawn = [recipe.model.initial(recipe.task, generator("initial", seed)) for seed in seeds]
    parameters = {name: torch.stack([each[name] for each in drawn]) for name in in_order(recipe)}
    return State(
        parameters=parameters,
        moments=optimizer.initial_state(recipe.optimizer, parameters),
        diverged_at=torch.full((len(seeds),), torch.nan),
        step=torch.tensor(0.0),
    )
