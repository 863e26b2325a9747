"""Batched forward = HookedTransformer = eq. (2.3), and the strict mask."""

import numpy as np
import pytest
import torch

from mechicl import models
from mechicl.errors import InputError
from mechicl.models.softmax_attention import SoftmaxAttention
from mechicl.tasks.linear_regression import LinearRegression
from mechicl.tasks.streams import generator

TASK = LinearRegression(d=3, n_context=7)


def random_parameters(model: SoftmaxAttention, seed: int = 0) -> dict[str, torch.Tensor]:
    drawn = model.initial(TASK, generator("test", seed))
    return {name: 3 * value.double() for name, value in drawn.items()}


def prompts(n: int = 20) -> torch.Tensor:
    return torch.from_numpy(TASK.sample(n, seed=0)["inputs"].values).double()


def equation_2_3(parameters: dict[str, torch.Tensor], prompt: np.ndarray, scale: float) -> float:
    """Transcribe (2.3) for one prompt with the paper's column matrices, in NumPy."""
    z = prompt[:-1].T  # columns z_1 .. z_L
    x_q = prompt[-1]
    total = 0.0
    for head in range(parameters["W_Q"].shape[1]):
        q, k, v, o = (parameters[f"W_{m}"][0, head].numpy().T for m in "QKVO")
        scores = scale * (z.T @ k.T @ q @ x_q)
        weights = np.exp(scores - scores.max())
        total += o[-1] @ v @ z @ (weights / weights.sum())
    return total


@pytest.mark.parametrize("n_heads", [1, 2, 4])
@pytest.mark.parametrize("score_scale", [1.0, 0.4])
def test_three_ways_to_one_prediction(n_heads: int, score_scale: float) -> None:
    model = SoftmaxAttention(n_heads=n_heads, score_scale=score_scale)
    parameters, inputs = random_parameters(model), prompts()
    batched = model.predict(parameters, inputs)
    with torch.no_grad():
        hooked = model.hooked(TASK, parameters)(inputs)[:, -1, -1]
    written_out = [equation_2_3(parameters, prompt, score_scale) for prompt in inputs.numpy()]
    np.testing.assert_allclose(batched, hooked, rtol=0, atol=1e-10)
    np.testing.assert_allclose(batched, written_out, rtol=0, atol=1e-10)
    assert batched.std() > 0.1, "predictions too small to tell anything"
    transposed = {**parameters, "W_Q": parameters["W_Q"].mT}
    assert (model.predict(transposed, inputs) - batched).abs().max() > 1e-3


def test_leading_axes_are_models() -> None:
    """Stacked models over shared prompts, and each over its own, equal one by one."""
    model = SoftmaxAttention(n_heads=2)
    each = [random_parameters(model, seed) for seed in range(6)]
    stacked = {name: torch.stack([p[name] for p in each]) for name in each[0]}
    inputs = prompts()
    alone = torch.stack([model.predict(p, inputs) for p in each])
    torch.testing.assert_close(model.predict(stacked, inputs), alone)
    grid = {name: value.unflatten(0, (2, 3)) for name, value in stacked.items()}
    torch.testing.assert_close(model.predict(grid, inputs), alone.unflatten(0, (2, 3)))
    own = torch.stack([inputs.roll(seed, 0) for seed in range(6)])
    torch.testing.assert_close(
        model.predict(stacked, own),
        torch.stack([model.predict(p, z) for p, z in zip(each, own, strict=True)]),
    )


def test_later_tokens_never_change_earlier_outputs() -> None:
    model = SoftmaxAttention(n_heads=2)
    hooked = model.hooked(TASK, random_parameters(model))
    inputs = prompts(4)
    for position in range(inputs.shape[1]):
        changed = inputs.clone()
        changed[:, position] += 1.0
        with torch.no_grad():
            before, after = hooked(inputs), hooked(changed)
        torch.testing.assert_close(before[:, :position], after[:, :position], rtol=0, atol=0)
        if position < inputs.shape[1] - 1:
            assert (before[:, position + 1 :] != after[:, position + 1 :]).any()


def test_no_position_attends_to_itself() -> None:
    """The pattern is strictly lower triangular; the first position attends to nothing."""
    model = SoftmaxAttention(n_heads=2)
    _, cache = model.hooked(TASK, random_parameters(model)).run_with_cache(prompts(4))
    pattern = cache["blocks.0.attn.hook_pattern"]
    assert (pattern.triu() == 0).all()
    sums = pattern.sum(-1)
    assert (sums[..., 0] == 0).all()
    torch.testing.assert_close(sums[..., 1:], torch.ones_like(sums[..., 1:]))


def test_hooks_reach_the_output() -> None:
    """Zeroing the pattern of all heads leaves the residual stream: the query's slot, 0."""
    model = SoftmaxAttention(n_heads=2)
    hooked = model.hooked(TASK, random_parameters(model))
    inputs = prompts(4)
    zeroed = hooked.run_with_hooks(
        inputs, fwd_hooks=[("blocks.0.attn.hook_pattern", lambda value, hook: value * 0)]
    )
    torch.testing.assert_close(zeroed, inputs)
    assert (hooked(inputs)[:, -1, -1] != 0).all()


@pytest.mark.parametrize(
    "given",
    [torch.zeros(2, 8, dtype=torch.long), torch.zeros(2, 8, 5), torch.zeros(8, 4), "text"],
    ids=["tokens", "width", "rank", "text"],
)
def test_other_inputs_are_refused(given: object) -> None:
    model = SoftmaxAttention(n_heads=1)
    hooked = model.hooked(TASK, random_parameters(model))
    with pytest.raises(InputError, match=r"reads continuous inputs \(batch, pos, 4\)"):
        hooked(given)


def test_initialisation_is_that_of_linear_layers() -> None:
    """Uniform within ±1/√fan_in; the output projection's fan-in counts all heads."""
    model = SoftmaxAttention(n_heads=4)
    task = LinearRegression(d=15)
    drawn = [model.initial(task, generator("test", seed)) for seed in range(20)]
    for name, fan_in in (("W_Q", 16), ("W_K", 16), ("W_V", 16), ("W_O", 64)):
        values = torch.cat([p[name].flatten() for p in drawn])
        assert values.abs().max() <= fan_in**-0.5
        assert values.abs().max() > 0.999 * fan_in**-0.5
        expected = (fan_in * 3) ** -0.5
        assert values.std().item() == pytest.approx(expected, rel=0.02)


def test_hooked_copies_its_parameters() -> None:
    model = SoftmaxAttention(n_heads=1)
    parameters = random_parameters(model)
    first, second = model.hooked(TASK, parameters), model.hooked(TASK, parameters)
    first.W_Q.data.zero_()
    assert (parameters["W_Q"] != 0).all()
    assert (second.W_Q != 0).all()


def test_only_the_architectures_own_parameters_can_be_trained() -> None:
    model = SoftmaxAttention(n_heads=2)
    hooked = model.hooked(TASK, random_parameters(model))
    trainable = {name.split(".")[-1] for name, p in hooked.named_parameters() if p.requires_grad}
    assert trainable == {"W_Q", "W_K", "W_V", "W_O"}
    assert all(
        float(p.detach().abs().sum()) == 0 for p in hooked.parameters() if not p.requires_grad
    )


def test_found_by_name() -> None:
    assert models.get("softmax_attention") is SoftmaxAttention
    with pytest.raises(InputError, match="did you mean 'softmax_attention'"):
        models.get("softmax_atention")
