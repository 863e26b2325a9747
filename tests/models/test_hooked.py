"""HookedTransformers of every architecture: patterns, causality, hooks, gradients, lengths."""

import copy
import pickle

import pytest
import torch

from mechicl.errors import InputError
from mechicl.models.hooked import HOOK_DIMS, hook_dims
from mechicl.models.softmax_attention import SoftmaxAttention
from tests.models.architectures import (
    ARCHITECTURES,
    TASKS,
    prompts,
    random_parameters,
)

TASK = TASKS["several"]
PATTERN, SCORES = "blocks.0.attn.hook_pattern", "blocks.0.attn.hook_attn_scores"
every_architecture = pytest.mark.parametrize("name", ARCHITECTURES)


def build(name: str, n_heads: int = 2) -> tuple:
    model = ARCHITECTURES[name].model(n_heads=n_heads)
    parameters = random_parameters(model, TASK)
    return model, parameters, model.hooked(TASK, parameters)


@every_architecture
def test_patterns_are_strictly_causal_and_sum_to_one_where_normalised(name: str) -> None:
    _, _, hooked = build(name)
    _, cache = hooked.run_with_cache(prompts(TASK, 5))
    pattern, scores = cache[PATTERN], cache[SCORES]
    assert pattern.shape == (5, 2, 7, 7)
    assert (pattern.triu() == 0).all()
    assert (scores.triu() == torch.full((7, 7), -torch.inf).triu()).all()
    assert (pattern[..., 0, :] == 0).all(), "the first position attends to nothing"
    assert (pattern[..., 1:, 0] != 0).all()
    sums = pattern.sum(-1)[..., 1:]
    if ARCHITECTURES[name].normalized:
        torch.testing.assert_close(sums, torch.ones_like(sums))
    else:
        assert (sums - 1).abs().min() > 1e-3
        finite = scores.masked_fill(scores.isneginf(), 0.0)
        torch.testing.assert_close(pattern, finite / TASK.n_context)


@every_architecture
def test_later_tokens_never_change_earlier_outputs(name: str) -> None:
    _, _, hooked = build(name)
    inputs = prompts(TASK, 4)
    before = hooked(inputs)
    for position in (0, 3, 6):
        changed = inputs.clone()
        changed[:, position] += 1.0
        after = hooked(changed)
        torch.testing.assert_close(before[:, :position], after[:, :position], rtol=0, atol=0)
        assert (before[:, position:] != after[:, position:]).any(-1).all()


@every_architecture
@pytest.mark.parametrize("by", ["method", "cfg"])
def test_results_of_heads_add_up(name: str, by: str) -> None:
    _, parameters, hooked = build(name, n_heads=3)
    inputs = prompts(TASK, 4)
    before, cache = hooked.run_with_cache(inputs)
    assert "blocks.0.attn.hook_result" not in cache
    if by == "method":
        hooked.set_use_attn_result(True)
    else:
        hooked.cfg.use_attn_result = True
    after, cache = hooked.run_with_cache(inputs)
    torch.testing.assert_close(before, after)
    result, pattern = cache["blocks.0.attn.hook_result"], cache[PATTERN]
    assert result.shape == (4, 7, 3, 7)
    torch.testing.assert_close(result.sum(-2), cache["blocks.0.hook_attn_out"])
    ov = parameters["W_V"][0] @ parameters["W_O"][0]
    expected = torch.einsum("bhqk,bkd,hde->bqhe", pattern, inputs, ov)
    torch.testing.assert_close(result, expected)


@every_architecture
def test_hook_points_are_those_of_softmax(name: str) -> None:
    _, _, hooked = build(name)
    _, _, softmax = build("softmax")
    assert set(hooked.hook_dict) == set(softmax.hook_dict)
    hooked.set_use_attn_result(True)
    hooked.set_use_attn_in(True)
    output, cache = hooked.run_with_cache(prompts(TASK, 2))
    torch.testing.assert_close(output, softmax_free(hooked, prompts(TASK, 2)))
    sizes = {"batch": 2, "head": 2} | dict.fromkeys(
        ("pos", "query_pos", "key_pos", "d_model", "d_head"), 7
    )
    seen = set()
    for point, value in cache.items():
        assert value.shape == tuple(sizes[dim] for dim in hook_dims(point)), point
        seen.add(point.rsplit(".", 1)[-1])
    assert seen == set(HOOK_DIMS)


def softmax_free(hooked: object, inputs: torch.Tensor) -> torch.Tensor:
    """Run the same model with its inputs not split by head."""
    whole = copy.deepcopy(hooked)
    whole.set_use_attn_in(False)
    whole.set_use_attn_result(False)
    return whole(inputs)


@every_architecture
def test_hooks_reach_the_output(name: str) -> None:
    """Without the pattern only the residual is left; without a head, the other head."""
    model, parameters, hooked = build(name)
    inputs = prompts(TASK, 4)
    zeroed = hooked.run_with_hooks(inputs, fwd_hooks=[(PATTERN, lambda value, hook: value * 0)])
    torch.testing.assert_close(zeroed, inputs)

    def ablate(value: torch.Tensor, hook: object) -> torch.Tensor:
        value[:, :, 0] = 0
        return value

    left = hooked.run_with_hooks(inputs, fwd_hooks=[("blocks.0.attn.hook_z", ablate)])
    second = {key: value[:, 1:] for key, value in parameters.items()}
    one = type(model)(**(model.model_dump() | {"n_heads": 1}))
    torch.testing.assert_close(one.answers(TASK, left), one.predict(TASK, second, inputs))
    assert not torch.allclose(left, hooked(inputs))


@every_architecture
def test_a_score_of_minus_infinity_takes_the_key_out(name: str) -> None:
    """As TransformerLens's users knock attention out: the others share the weight."""
    model, parameters, hooked = build(name)
    inputs = prompts(TASK, 4)

    def knock_out(value: torch.Tensor, hook: object) -> torch.Tensor:
        value[..., 2] = -torch.inf
        return value

    out = hooked.run_with_hooks(inputs, fwd_hooks=[(SCORES, knock_out)])
    without = torch.cat([inputs[:, :2], inputs[:, 3:]], 1)
    torch.testing.assert_close(model.answers(TASK, out), model.predict(TASK, parameters, without))
    assert not torch.allclose(model.answers(TASK, out), model.predict(TASK, parameters, inputs))


@every_architecture
@pytest.mark.parametrize("length", [1, 25])
def test_prompts_may_be_longer_or_shorter_than_trained_ones(name: str, length: int) -> None:
    model, parameters, hooked = build(name)
    inputs = prompts(TASK.at_length(length))
    assert hooked.cfg.n_ctx == 7
    torch.testing.assert_close(
        model.answers(TASK, hooked(inputs)).detach(), model.predict(TASK, parameters, inputs)
    )


@every_architecture
def test_gradients_are_those_of_the_batched_forward(name: str) -> None:
    """Through the position that attends to nothing as well, where a 0/0 would spoil them all."""
    model, parameters, hooked = build(name)
    sample = TASK.sample(20, seed=0)
    inputs, targets = (torch.from_numpy(sample[key].values).double() for key in sample)
    leaves = {key: value.clone().requires_grad_() for key, value in parameters.items()}
    TASK.loss(model.predict(TASK, leaves, inputs), targets).mean().backward()
    with torch.autograd.set_detect_anomaly(mode=not model.is_softmax):
        outputs = hooked(inputs)
        loss = TASK.loss(model.answers(TASK, outputs), targets).mean()
        # The outputs at all positions, each with weight 0, take part in the backward pass.
        (loss + 0 * outputs.square().sum()).backward()
    for key, leaf in leaves.items():
        gradient = getattr(hooked.blocks[0].attn, key).grad
        torch.testing.assert_close(gradient, leaf.grad[0])
        assert gradient.abs().max() > 1e-3


@pytest.mark.parametrize("name", ["softmax", "linear", "square"])
def test_models_can_be_copied_and_pickled(name: str) -> None:
    _, _, hooked = build(name)
    inputs, copies = prompts(TASK, 3), 0
    for other in (copy.deepcopy(hooked), pickle.loads(pickle.dumps(hooked))):
        torch.testing.assert_close(other(inputs), hooked(inputs), rtol=0, atol=0)
        copies += 1
    assert copies == 2


@pytest.mark.parametrize("name", ["linear", "one_plus_tanh"])
def test_what_the_attention_cannot_do_is_refused(name: str) -> None:
    _, _, hooked = build(name)
    inputs = prompts(TASK, 2)
    with pytest.raises(InputError, match="this attention takes no attention_mask"):
        hooked.blocks[0].attn(inputs, inputs, inputs, attention_mask=torch.ones(2, 7))


def test_a_hook_may_unmask_as_it_may_in_softmax() -> None:
    """Scores that a hook makes finite count, whichever the architecture."""
    inputs, counted = prompts(TASK, 2), 0
    for name in ("softmax", "exp", "one_plus_tanh"):
        _, _, hooked = build(name)
        seen: list[torch.Tensor] = []
        hooked.run_with_hooks(
            inputs,
            fwd_hooks=[
                (SCORES, lambda value, hook: torch.zeros_like(value)),
                (PATTERN, lambda value, hook, seen=seen: seen.append(value)),
            ],
        )
        torch.testing.assert_close(seen[0], torch.full_like(seen[0], 1 / 7))
        counted += 1
    assert counted == 3


def test_the_loss_that_is_named_instead_counts_responses() -> None:
    hooked = SoftmaxAttention().hooked(TASK, random_parameters(SoftmaxAttention(), TASK))
    with pytest.raises(InputError, match="-N: in place of the last -1"):
        hooked(prompts(TASK, 2), return_type="loss")
