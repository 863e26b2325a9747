"""Batched forward = HookedTransformer = eq. (2.3), and the strict mask."""

import numpy as np
import pytest
import torch

from mechicl import models
from mechicl.errors import InputError
from mechicl.models.hooked import HOOK_DIMS
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
    parameters, inputs = random_parameters(model, seed=n_heads), prompts()
    batched = model.predict(TASK, parameters, inputs)
    with torch.no_grad():
        hooked = model.answers(TASK, model.hooked(TASK, parameters)(inputs))
    written_out = [equation_2_3(parameters, prompt, score_scale) for prompt in inputs.numpy()]
    np.testing.assert_allclose(batched, hooked, rtol=0, atol=1e-10)
    np.testing.assert_allclose(batched, written_out, rtol=0, atol=1e-10)
    assert batched.std() > 0.1, "predictions too small to tell anything"
    transposed = {**parameters, "W_Q": parameters["W_Q"].mT}
    assert (model.predict(TASK, transposed, inputs) - batched).abs().max() > 1e-3


def test_leading_axes_are_models() -> None:
    """Stacked models over shared prompts, and each over its own, equal one by one."""
    model = SoftmaxAttention(n_heads=2)
    each = [random_parameters(model, seed) for seed in range(6)]
    stacked = {name: torch.stack([p[name] for p in each]) for name in each[0]}
    inputs = prompts()
    alone = torch.stack([model.predict(TASK, p, inputs) for p in each])
    torch.testing.assert_close(model.predict(TASK, stacked, inputs), alone)
    grid = {name: value.unflatten(0, (2, 3)) for name, value in stacked.items()}
    torch.testing.assert_close(model.predict(TASK, grid, inputs), alone.unflatten(0, (2, 3)))
    own = torch.stack([inputs.roll(seed, 0) for seed in range(6)])
    torch.testing.assert_close(
        model.predict(TASK, stacked, own),
        torch.stack([model.predict(TASK, p, z) for p, z in zip(each, own, strict=True)]),
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


def test_a_filled_query_slot_is_carried_to_the_output() -> None:
    """The residual term of (2.2): tasks leave the slot at 0, both forwards carry what is there."""
    model = SoftmaxAttention(n_heads=2)
    parameters, inputs = random_parameters(model), prompts()
    filled = inputs.clone()
    filled[:, -1, -1] = 5.0
    with torch.no_grad():
        hooked = model.answers(TASK, model.hooked(TASK, parameters)(filled))
    np.testing.assert_allclose(model.predict(TASK, parameters, filled), hooked, rtol=0, atol=1e-10)


def test_hook_points_have_the_dims_that_are_named() -> None:
    """Axes of one size are told apart: batch 2, and query from key by the strict mask."""
    model = SoftmaxAttention(n_heads=5)
    hooked = model.hooked(TASK, random_parameters(model))
    hooked.set_use_attn_result(True)
    hooked.set_use_attn_in(True)
    sizes = {"batch": 2, "pos": 8, "head": 5, "d_model": 4, "d_head": 4}
    sizes |= {"query_pos": 8, "key_pos": 8}
    _, cache = hooked.run_with_cache(prompts(2))
    seen = set()
    for name, value in cache.items():
        last = name.rsplit(".", 1)[-1]
        assert value.shape == tuple(sizes[dim] for dim in HOOK_DIMS[last]), name
        seen.add(last)
    assert seen == set(HOOK_DIMS)
    for last in ("hook_attn_scores", "hook_pattern"):
        value = cache[f"blocks.0.attn.{last}"]
        later = value.select(HOOK_DIMS[last].index("key_pos"), 7)  # no query sees the last position
        assert ((later == 0) | (later == -torch.inf)).all(), last


def test_a_forward_can_stop_before_a_layer() -> None:
    model = SoftmaxAttention(n_heads=2)
    hooked = model.hooked(TASK, random_parameters(model))
    torch.testing.assert_close(hooked(prompts(2), stop_at_layer=0), prompts(2), rtol=0, atol=0)
    assert not torch.equal(hooked(prompts(2), stop_at_layer=1), prompts(2))


@pytest.mark.parametrize("return_type", ["loss", "both"])
def test_a_model_has_no_loss_of_its_own(return_type: str) -> None:
    model = SoftmaxAttention(n_heads=1)
    hooked = model.hooked(TASK, random_parameters(model))
    with pytest.raises(InputError, match=f"return_type='{return_type}'"):
        hooked(prompts(2), return_type=return_type)
    torch.testing.assert_close(hooked(prompts(2), return_type="logits"), hooked(prompts(2)))


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
    ("given", "message"),
    [
        (torch.zeros(2, 8, dtype=torch.long), r"not token ids; given torch\.int64"),
        (torch.zeros(2, 8, 5), r"given.* \(2, 8, 5\)"),
        (torch.zeros(8, 4), r"given.* \(8, 4\)"),
        ("text", "given str"),
    ],
    ids=["tokens", "width", "rank", "text"],
)
def test_other_inputs_are_refused(given: object, message: str) -> None:
    model = SoftmaxAttention(n_heads=1)
    hooked = model.hooked(TASK, random_parameters(model))
    with pytest.raises(InputError, match=r"reads continuous inputs \(batch, pos, 4\).*" + message):
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
    for name, given in parameters.items():
        getattr(first.blocks[0].attn, name).data.zero_()
        assert (first.blocks[0].attn.get_parameter(name) == 0).all(), "zeroing reached nothing"
        assert (given != 0).all()
        assert (second.blocks[0].attn.get_parameter(name) != 0).all()


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
