"""One step against autograd through the HookedTransformer, and what happens to a diverging seed."""

import pytest
import torch

from mechicl.training import load_recipe
from mechicl.training.recipe import Recipe
from mechicl.training.step import State, initial_state, make_step

RECIPE = load_recipe(
    "he2025-two-head-quick", {"d": 3, "n_context": 6, "batch_size": 8, "learning_rate": 0.01}
)


def normals(recipe: Recipe, n_seeds: int, step: int = 0) -> torch.Tensor:
    stream = torch.Generator().manual_seed(step)
    return torch.randn(n_seeds, recipe.batch_size, recipe.task.n_normals, generator=stream)


def test_equals_autograd_through_the_hooked_model() -> None:
    """Three Adam steps of the full model, all positions computed, give the same weights."""
    state, step = initial_state(RECIPE, (4, 9)), make_step(RECIPE)
    losses = []
    for number in range(3):
        state, loss = step(state, normals(RECIPE, 2, number))
        losses.append(loss)
    start = initial_state(RECIPE, (4, 9))
    for index in range(2):
        weights = {name: value[index] for name, value in start.parameters.items()}
        model = RECIPE.model.hooked(RECIPE.task, weights)
        trained = [p for p in model.parameters() if p.requires_grad]
        rule = torch.optim.Adam(trained, lr=0.01)
        for number in range(3):
            prompts = RECIPE.task.prompts(normals(RECIPE, 2, number)[index])
            predicted = RECIPE.model.answers(RECIPE.task, model(prompts.inputs))
            loss = ((predicted - prompts.targets) ** 2).mean()
            torch.testing.assert_close(losses[number][index], loss.detach())
            rule.zero_grad()
            loss.backward()
            rule.step()
        for name, value in weights.items():
            expected = getattr(model.blocks[0].attn, name).detach()
            torch.testing.assert_close(state.parameters[name][index, 0], expected)
            assert (expected - value[0]).abs().max() > 1e-3, "nothing was trained"


def test_a_diverging_seed_stops_before_its_update_and_alone() -> None:
    step = make_step(RECIPE)
    healthy = initial_state(RECIPE, (0, 1))
    healthy, _ = step(healthy, normals(RECIPE, 2, 0))
    sick = healthy._replace(
        parameters={
            name: torch.stack([value[0], value[1] * float("inf")])
            for name, value in healthy.parameters.items()
        }
    )
    after, loss = step(sick, normals(RECIPE, 2, 1))
    expected, _ = step(healthy, normals(RECIPE, 2, 1))
    assert torch.isfinite(loss[0])
    assert not torch.isfinite(loss[1])
    assert torch.isnan(after.diverged_at[0])
    assert after.diverged_at[1] == 1
    for name in RECIPE.model.parameters(RECIPE.task):
        torch.testing.assert_close(after.parameters[name][0], expected.parameters[name][0])
        assert torch.equal(after.parameters[name][1].isnan(), sick.parameters[name][1].isnan()), (
            "the diverged seed was updated"
        )
    later, _ = step(after, normals(RECIPE, 2, 2))
    assert later.diverged_at[1] == 1, "the first step of divergence is the one that counts"


def test_finite_loss_with_overflowing_gradient_is_divergence_too() -> None:
    """W_V large and W_O small: the prediction is ordinary, the gradient's norm is not."""
    state = initial_state(RECIPE, (0, 1))
    large, small = torch.tensor([1e20, 1.0]), torch.tensor([1e-20, 1.0])
    parameters = state.parameters | {
        "W_V": state.parameters["W_V"] * large.reshape(2, 1, 1, 1, 1),
        "W_O": state.parameters["W_O"] * small.reshape(2, 1, 1, 1, 1),
    }
    state = state._replace(parameters=parameters)
    after, loss = make_step(RECIPE)(state, normals(RECIPE, 2))
    assert torch.isfinite(loss).all()
    assert after.diverged_at[0] == 0
    assert torch.isnan(after.diverged_at[1])
    for name, value in state.parameters.items():
        assert torch.equal(after.parameters[name][0], value[0])
        assert not torch.equal(after.parameters[name][1], value[1])


@pytest.mark.parametrize("rule", ["sgd", "adam", "adamw"])
def test_an_update_that_overflows_is_divergence_too(rule: str) -> None:
    """Loss and gradient are ordinary; the rate, or the decay with it, is not."""
    settings = {"name": rule, "learning_rate": 1e39, "weight_decay": 0.1}
    optimizer = RECIPE.optimizer.model_copy(update=settings)
    recipe = RECIPE.model_copy(update={"optimizer": optimizer})
    state = initial_state(recipe, (0, 1))
    after, loss = make_step(recipe)(state, normals(recipe, 2))
    assert torch.isfinite(loss).all()
    assert after.diverged_at.tolist() == [0, 0]
    for name, value in state.parameters.items():
        assert torch.equal(after.parameters[name], value)


def test_decay_of_large_weights_that_overflows_is_divergence_too() -> None:
    """Adam squares the decayed gradient; with an infinite square no update would move again."""
    optimizer = RECIPE.optimizer.model_copy(update={"weight_decay": 1.0})
    recipe = RECIPE.model_copy(update={"optimizer": optimizer})
    state = initial_state(recipe, (0, 1))
    parameters = {name: value.clone() for name, value in state.parameters.items()}
    parameters["W_O"][0, ..., 0] = 1e20  # not of the column that the prediction is read from
    after, loss = make_step(recipe)(state._replace(parameters=parameters), normals(recipe, 2))
    assert torch.isfinite(loss).all()
    assert after.diverged_at[0] == 0
    assert torch.isnan(after.diverged_at[1])


def test_initial_models_are_functions_of_their_seeds() -> None:
    together, alone = initial_state(RECIPE, (4, 9)), initial_state(RECIPE, (9,))
    assert isinstance(together, State)
    for name, value in together.parameters.items():
        assert torch.equal(value[1], alone.parameters[name][0])
        assert not torch.equal(value[0], value[1])
