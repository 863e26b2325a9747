"""What all one-layer attention models share: batched forward = HookedTransformer = (2.3)."""

from itertools import product

import numpy as np
import pytest
import torch

from mechicl import models
from mechicl.models.attention import OneLayerAttention
from mechicl.models.softmax_attention import SoftmaxAttention
from mechicl.schema import DIMS
from mechicl.tasks.latent_regression import LatentRegression
from mechicl.tasks.latents import TreePrior
from tests.models.architectures import (
    ARCHITECTURES,
    TASKS,
    from_circuits,
    prompts,
    random_parameters,
    written_out,
)

every_architecture = pytest.mark.parametrize("name", ARCHITECTURES)


def test_every_registered_model_is_tested_here() -> None:
    tested = {architecture.model().name for architecture in ARCHITECTURES.values()}
    of_one_layer = {
        name for name in models.names() if issubclass(models.get(name), OneLayerAttention)
    }
    assert tested == of_one_layer
    assert len(tested) == 3


@every_architecture
@pytest.mark.parametrize("on", TASKS)
def test_three_ways_to_one_prediction(name: str, on: str) -> None:
    task, architecture, counted = TASKS[on], ARCHITECTURES[name], 0
    for n_heads, scale in ((1, 1.0), (2, 0.4), (4, 1.0)):
        model = architecture.model(n_heads=n_heads, score_scale=scale)
        parameters, inputs = random_parameters(model, task, seed=n_heads), prompts(task)
        batched = model.predict(task, parameters, inputs)
        assert batched.shape == (20, *task.target_sizes.values())
        with torch.no_grad():
            hooked = model.answers(task, model.hooked(task, parameters)(inputs))
        expected = np.array(
            [written_out(architecture, task, parameters, z, scale) for z in inputs.numpy()]
        )
        np.testing.assert_allclose(batched, hooked, rtol=0, atol=1e-10)
        np.testing.assert_allclose(batched.reshape(20, -1), expected, rtol=0, atol=1e-10)
        assert batched.std(0).min() > 0.01, "predictions too small to tell anything"
        for weight in ("W_Q", "W_K", "W_V", "W_O"):
            if task.n_context == 1 and architecture.normalized and weight in ("W_Q", "W_K"):
                continue  # the one key has weight 1, whatever its score
            transposed = {**parameters, weight: parameters[weight].mT}
            moved = (model.predict(task, transposed, inputs) - batched).abs().amax(0)
            assert (moved > 1e-3).all(), weight
            counted += 1
    assert counted in (6, 12)


@every_architecture
@pytest.mark.parametrize("n_queries", [1, 8])
def test_a_task_of_queries_is_refused(name: str, n_queries: int) -> None:
    """One prediction would be held against all of them, whatever their number."""
    task = LatentRegression(prior=TreePrior(depth=2), n_queries=n_queries)
    said = ARCHITECTURES[name].model().refusal(task)
    assert said is not None
    assert "a target of task 'latent_regression' has axes query" in said
    for accepted in TASKS.values():
        assert ARCHITECTURES[name].model().refusal(accepted) is None


@every_architecture
@pytest.mark.parametrize("on", ["one", "several"])
def test_leading_axes_are_models(name: str, on: str) -> None:
    """Stacked models over shared prompts, and each over its own, equal one by one."""
    task = TASKS[on]
    model = ARCHITECTURES[name].model(n_heads=2)
    each = [random_parameters(model, task, seed) for seed in range(6)]
    stacked = {key: torch.stack([p[key] for p in each]) for key in each[0]}
    grid = {key: value.unflatten(0, (2, 3)) for key, value in stacked.items()}
    inputs = prompts(task)
    own = torch.stack([prompts(task, seed=seed) for seed in range(6)])
    alone = torch.stack([model.predict(task, p, inputs) for p in each])
    own_alone = torch.stack([model.predict(task, p, z) for p, z in zip(each, own, strict=True)])
    assert (alone - own_alone).abs().max() > 0.1
    for given, expected in (
        (model.predict(task, stacked, inputs), alone),
        (model.predict(task, grid, inputs), alone.unflatten(0, (2, 3))),
        (model.predict(task, stacked, own), own_alone),
        (model.predict(task, grid, own.unflatten(0, (2, 3))), own_alone.unflatten(0, (2, 3))),
    ):
        assert given.shape == expected.shape
        torch.testing.assert_close(given, expected, rtol=0, atol=1e-12)


@every_architecture
def test_slope_is_that_of_the_weights(name: str) -> None:
    """L·∂(weight)/∂(score) at 0, by a central difference that leaves the mean score at 0."""
    architecture, task, step = ARCHITECTURES[name], TASKS["one"], 1e-5
    model = architecture.model()
    scores = torch.zeros(task.n_context, dtype=torch.float64)
    scores[0], scores[1] = step, -step
    up, down = model.weigh(task, scores, 0)[0], model.weigh(task, -scores, 0)[0]
    measured = task.n_context * float(up - down) / (2 * step)
    assert measured == pytest.approx(architecture.slope, rel=1e-7)
    assert model.slope == pytest.approx(architecture.slope, rel=1e-12)


@every_architecture
def test_weights_along_any_axis_and_under_any_mask(name: str) -> None:
    """A masked key has weight 0, and the others what they have by themselves."""
    model, task = ARCHITECTURES[name].model(), TASKS["one"]
    scores = torch.randn(4, 6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    allowed = torch.rand(6, 5, generator=torch.Generator().manual_seed(2)) > 0.4
    allowed[0], allowed[1] = False, True
    pattern = model.weigh(task, scores, -1, allowed)
    torch.testing.assert_close(model.weigh(task, scores.mT, -2, allowed.mT).mT, pattern)
    counted = 0
    for batch, row in product(range(4), range(6)):
        keys = allowed[row]
        assert (pattern[batch, row, ~keys] == 0).all()
        if keys.any():
            alone = model.weigh(task, scores[batch, row, keys], 0)
            expected = ARCHITECTURES[name].f(scores[batch, row, keys].numpy(), task.n_context)
            torch.testing.assert_close(pattern[batch, row, keys], alone)
            np.testing.assert_allclose(alone, expected, rtol=1e-12)
            counted += 1
    assert counted >= 12
    assert (~allowed).sum() > 5


@every_architecture
def test_no_gradient_is_lost_where_no_key_is_allowed(name: str) -> None:
    model, task = ARCHITECTURES[name].model(), TASKS["one"]
    scores = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    scores.requires_grad_(True)
    allowed = torch.tensor([[False] * 4, [True] * 4, [True, True, False, False]])
    (model.weigh(task, scores, -1, allowed) * torch.arange(1.0, 5.0) ** 2).sum().backward()
    assert scores.grad is not None
    assert (scores.grad[~allowed] == 0).all()
    assert (scores.grad[allowed] != 0).all()
    assert scores.grad.isfinite().all()


@every_architecture
def test_constants_tell_the_architecture(name: str) -> None:
    architecture = ARCHITECTURES[name]
    constants = architecture.model(score_scale=0.4).constants()
    values = {key: value for key, (_, value) in constants.items()}
    expected = {"score_scale": 0.4, "slope": architecture.slope}
    assert values == pytest.approx(expected | {"softmax": name in ("softmax", "exp")})


@every_architecture
def test_parameters_are_as_declared(name: str) -> None:
    task = TASKS["several"]
    model = ARCHITECTURES[name].model(n_heads=3)
    sizes, drawn = model.sizes(task), random_parameters(model, task)
    declared = model.parameters(task)
    assert list(drawn) == list(declared) == ["W_Q", "W_K", "W_V", "W_O"]
    for key, variable in declared.items():
        assert variable.dims[:2] == ("seed", "step")
        assert set(variable.dims) <= set(DIMS)
        assert drawn[key].shape == tuple(sizes[dim] for dim in variable.dims[2:])


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name != "linear"])
def test_a_pair_of_opposite_heads_tends_to_debiased_gd(name: str) -> None:
    """At η = C_f·2ωμ the distance falls as γ²; unbalanced heads do not get there."""
    task, architecture = TASKS["one"], ARCHITECTURES[name]
    model, inputs, eta = architecture.model(), prompts(task, 200), 0.7
    x, y, query = inputs[:, :-1, :-1], inputs[:, :-1, -1], inputs[:, -1, :-1]
    centred = x - x.mean(1, keepdim=True)
    expected = eta / task.n_context * torch.einsum("nl,nld,nd->n", y, centred, query)

    def distance(gamma: float, unbalance: float = 0.0) -> float:
        kq, ov = np.zeros((2, 2, 4, 4))
        for head, sign in enumerate((1.0, -1.0)):
            kq[head, :3, :3] = sign * gamma * np.eye(3)
            ov[head, -1, -1] = sign * eta / (2 * gamma * architecture.slope)
        ov[0] *= 1 + unbalance
        predicted = model.predict(task, from_circuits(kq, ov), inputs)
        return float((predicted - expected).square().mean().sqrt())

    scale = 0.02 / architecture.slope
    far, middle, near = (distance(scale / 2**power) for power in range(3))
    assert np.log2(far / middle) == pytest.approx(2, abs=0.1)
    assert np.log2(middle / near) == pytest.approx(2, abs=0.05)
    assert near < 1e-3
    assert distance(scale / 4, unbalance=0.1) > 0.1


@pytest.mark.parametrize("on", ["one", "several"])
def test_normalised_exp_is_softmax_attention(on: str) -> None:
    task, exp = TASKS[on], ARCHITECTURES["exp"].model(n_heads=3)
    softmax = SoftmaxAttention(n_heads=3)
    parameters, inputs = random_parameters(exp, task), prompts(task)
    torch.testing.assert_close(
        exp.predict(task, parameters, inputs), softmax.predict(task, parameters, inputs)
    )
    hooked = [model.hooked(task, parameters)(inputs) for model in (exp, softmax)]
    torch.testing.assert_close(*hooked, rtol=0, atol=0)
    tanh = ARCHITECTURES["one_plus_tanh"].model(n_heads=3)
    assert (tanh.hooked(task, parameters)(inputs) - hooked[0]).abs().max() > 0.01
