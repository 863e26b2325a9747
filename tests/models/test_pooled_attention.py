"""The pooling model is equation (6), written out token by token; its hooked twin is the same."""

import re
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from scipy.special import erf

from mechicl.errors import InputError
from mechicl.models.hooked import POOLED_HOOK_DIMS, hook_dims
from mechicl.models.pooled_attention import PooledAttention, normalized
from mechicl.tasks import ContinuousTask, Task
from mechicl.tasks.latent_regression import LatentRegression
from mechicl.tasks.linear_regression import LinearRegression
from mechicl.tasks.markov_chain import MarkovChain
from mechicl.tasks.multi_task_regression import MultiTaskRegression
from mechicl.tasks.streams import generator

TREE = {"kind": "tree", "depth": 2, "alpha": 0.6}
TASK = LatentRegression.model_validate(
    {"prior": TREE, "n_context": 9, "n_queries": 3, "context": "tokens"}
)
MODELS = {
    "A": PooledAttention(n_layers=3),
    "B": PooledAttention(n_channels=3),
    "both": PooledAttention(n_layers=2, n_channels=2, d_workspace=5, d_mlp=7, n_output_mlps=1),
    "C": PooledAttention(n_channels=3, feedforward=False),
}
TASKS = {
    "tokens": TASK,
    "moments": TASK.model_copy(update={"context": "moments"}),
    "one number": LinearRegression(d=3, n_context=6),
}
Parameters = Mapping[str, torch.Tensor]
every_model = pytest.mark.parametrize("name", MODELS)


def parameters(name: str, task: ContinuousTask = TASK, seed: int = 0) -> dict[str, torch.Tensor]:
    drawn = MODELS[name].initial(task, generator("test", seed))
    stream = torch.Generator().manual_seed(seed)
    return {
        key: 1.5 * value.double() + 0.1 * torch.randn(value.shape, generator=stream).double()
        for key, value in drawn.items()
    }


def inputs(task: ContinuousTask = TASK, n: int = 5, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(task.sample(n, seed=seed)["inputs"].values).double()


def norm(x: np.ndarray) -> np.ndarray:
    return (x - x.mean()) / np.sqrt(x.var() + 1e-5)


def mlp(x: np.ndarray, weights: Mapping[str, np.ndarray]) -> np.ndarray:
    before = x @ weights["W_in"] + weights["b_in"]
    after = before * (1 + erf(before / 2**0.5)) / 2
    return np.tensordot(after, weights["W_out"], 1) + weights["b_out"]


def written_out(
    model: PooledAttention, given: Parameters, prompt: np.ndarray, n_queries: int
) -> np.ndarray:
    """Transcribe (6) for one prompt: a sum over tokens, one query at a time."""
    weights = {name: value.numpy() for name, value in given.items()}
    context, queries = prompt[:-n_queries], prompt[-n_queries:]
    if not model.feedforward:
        phi = sum((weights["W_V"][0] @ z) * (weights["W_K"][0] @ z) for z in context) / len(context)
        return np.array([weights["W_O"][0] @ (phi * (weights["W_Q"][0] @ z)) for z in queries])
    p = np.full(weights["W_Q"].shape[-1], model.epsilon)
    for layer in range(model.n_layers):
        own = {name: weights[name][layer] for name in ("W_in", "b_in", "W_out", "b_out")}
        keys = np.stack([norm(row) for row in mlp(norm(p), own)])
        phi = np.zeros(model.n_channels)
        for z in context:
            phi += (weights["W_V"][layer] @ z) * (keys @ z) / len(context)
        added = weights["W_O"][layer] @ (phi * (weights["W_Q"][layer] @ p))
        p = p + added / model.n_channels**0.5
    predicted = []
    for z in queries:
        u = np.concatenate([z, p])
        for number in range(model.n_output_mlps):
            own = {
                name: weights[f"out_{name}"][number] for name in ("W_in", "b_in", "W_out", "b_out")
            }
            u = u + mlp(norm(u), own)
        predicted.append(weights["W_U"] @ u + weights["b_U"])
    return np.array(predicted)


@every_model
@pytest.mark.parametrize("on", TASKS)
def test_predictions_are_equation_6(name: str, on: str) -> None:
    task, model = TASKS[on], MODELS[name]
    given, prompts = parameters(name, task), inputs(task)
    found = model.predict(task, given, prompts)
    n_queries = task.target_sizes.get("query", 1)
    expected = np.stack([written_out(model, given, each, n_queries) for each in prompts.numpy()])
    if not task.target_sizes:
        expected = expected[:, 0]
    assert found.shape == (5, *task.target_sizes.values())
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-11)
    assert np.std(expected) > 1e-3


@every_model
def test_every_parameter_is_read(name: str) -> None:
    """Each changes the predictions; the MLP of the first keys reads a constant, which is 0."""
    model, given, prompts = MODELS[name], parameters(name), inputs()
    before, counted = model.predict(TASK, given, prompts), 0
    for key, value in given.items():
        changed = value.clone()
        changed[-1 if key == "W_in" else ...] *= 1.1
        after = model.predict(TASK, {**given, key: changed}, prompts)
        unread = key == "W_in" and model.n_layers == 1
        assert torch.equal(after, before) == unread, key
        counted += 1
    assert counted == len(model.parameters(TASK)) == (13 if model.feedforward else 4)


@every_model
def test_stacked_models_are_each_of_them(name: str) -> None:
    model = MODELS[name]
    each = [parameters(name, seed=seed) for seed in range(3)]
    stacked = {key: torch.stack([one[key] for one in each])[:, None] for key in each[0]}
    own = torch.stack([inputs(seed=seed) for seed in range(3)])[:, None]
    shared = model.predict(TASK, stacked, inputs())
    separate = model.predict(TASK, stacked, own)
    assert shared.shape == separate.shape == (3, 1, 5, 3)
    for seed, one in enumerate(each):
        torch.testing.assert_close(shared[seed, 0], model.predict(TASK, one, inputs()))
        alone = model.predict(TASK, one, inputs(seed=seed))
        torch.testing.assert_close(separate[seed, 0], alone)


@every_model
def test_a_context_is_a_set_of_any_size(name: str) -> None:
    """Tokens in another order, and each of them twice, are the same context."""
    model, given, prompts = MODELS[name], parameters(name), inputs()
    before = model.predict(TASK, given, prompts)
    context, queries = model.split(TASK, prompts)
    twice = torch.cat([context.flip(1), context, queries], 1)
    torch.testing.assert_close(model.predict(TASK, given, twice), before)
    other = torch.cat([2 * context, queries], 1)
    assert (model.predict(TASK, given, other) - before).abs().max() > 1e-3
    swapped = torch.cat([context, queries.flip(1)], 1)
    torch.testing.assert_close(model.predict(TASK, given, swapped), before.flip(1))


@every_model
@pytest.mark.parametrize("on", TASKS)
def test_the_hooked_twin_is_the_same(name: str, on: str) -> None:
    task, model = TASKS[on], MODELS[name]
    given, prompts = parameters(name, task), inputs(task)
    hooked = model.hooked(task, given)
    output, cache = hooked.run_with_cache(prompts)
    torch.testing.assert_close(
        model.answers(task, output).detach(),
        model.predict(task, given, prompts),
        rtol=1e-11,
        atol=0,
    )
    sizes = model.sizes(task) | {
        "batch": 5,
        "query": task.target_sizes.get("query", 1),
        "d_model": task.d_model,
    }
    sizes["pos"] = prompts.shape[1] - sizes["query"]
    assert set(cache) == set(hooked.hook_dict)
    for point, value in cache.items():
        assert value.shape == tuple(sizes[dim] for dim in hook_dims(point)), point
    kinds = {point.rsplit(".", 1)[-1] for point in cache}
    linear = {"hook_channel_query", "hook_channel_result"}
    common = {"hook_context", "hook_queries", "hook_prediction"}
    pooling = {"hook_dynamic_key", "hook_token_key", "hook_token_value", "hook_phi"}
    expected = set(POOLED_HOOK_DIMS) - linear if model.feedforward else common | pooling | linear
    assert kinds == expected


@pytest.mark.parametrize("name", ["A", "B", "both"])
def test_what_passes_the_hooks_is_what_they_say(name: str) -> None:
    model, prompts = MODELS[name], inputs()
    hooked = model.hooked(TASK, parameters(name))
    _, cache = hooked.run_with_cache(prompts)
    workspace = torch.full_like(cache["blocks.0.hook_workspace"], model.epsilon)
    for layer in range(model.n_layers):
        at = f"blocks.{layer}"
        keys = cache[f"{at}.attn.hook_dynamic_key"]
        torch.testing.assert_close(keys.mean(-1), torch.zeros_like(keys[..., 0]))
        product = cache[f"{at}.attn.hook_token_key"] * cache[f"{at}.attn.hook_token_value"]
        torch.testing.assert_close(product.mean(1), cache[f"{at}.attn.hook_phi"])
        workspace = workspace + cache[f"{at}.hook_update"]
        torch.testing.assert_close(workspace, cache[f"{at}.hook_workspace"])
        varies = (keys - keys[:1]).abs().max() > 1e-3
        assert varies == (layer > 0), "the first keys know nothing of the context"
    read = cache["output.hook_query_resid"]
    torch.testing.assert_close(read[..., : TASK.d_model], prompts[:, -3:])
    torch.testing.assert_close(read[:, 1, TASK.d_model :], workspace)


@every_model
def test_hooks_intervene_and_gradients_reach_the_parameters(name: str) -> None:
    model, prompts = MODELS[name], inputs()
    hooked = model.hooked(TASK, parameters(name))
    before = hooked(prompts)
    point = "blocks.0.attn.hook_phi"
    after = hooked.run_with_hooks(prompts, fwd_hooks=[(point, lambda value, hook: 0 * value)])
    assert (after - before).abs().max() > 1e-3
    torch.testing.assert_close(hooked(prompts), before)
    before.square().sum().backward()
    idle = {
        key
        for key, value in hooked.named_parameters()
        if value.grad is None or not value.grad.abs().sum()
    }
    assert idle == ({"blocks.0.W_in"} if model.feedforward else set())


def test_a_constant_row_normalises_to_zero() -> None:
    values = torch.full((2, 4), 0.1).double()
    assert (normalized(values).abs() < 1e-6).all()
    rows = torch.randn(3, 50, generator=torch.Generator().manual_seed(0)).double()
    torch.testing.assert_close(normalized(rows), torch.nn.functional.layer_norm(rows, (50,)))


@pytest.mark.parametrize("name", MODELS)
def test_it_starts_from_the_law_that_it_says(name: str) -> None:
    task = LatentRegression.model_validate({"prior": TREE | {"depth": 5}, "n_context": 40})
    model, sizes = MODELS[name], MODELS[name].sizes(task)
    drawn = model.initial(task, generator("test", 1))
    again = model.initial(task, generator("test", 1))
    assert all(torch.equal(value, again[key]) for key, value in drawn.items())
    assert drawn["W_V"].std() == pytest.approx(sizes["d_model"] ** -0.5, rel=0.2)
    if model.feedforward:
        for key, fan_in in (
            ("W_in", "d_workspace"),
            ("W_out", "d_mlp"),
            ("out_W_in", "d_residual"),
        ):
            bound = sizes[fan_in] ** -0.5
            assert drawn[key].abs().max() <= bound
            assert drawn[key].std() == pytest.approx(bound / 3**0.5, rel=0.1)
    else:
        assert (drawn["W_O"] == 1).all()


@pytest.mark.parametrize(
    ("model", "task", "said"),
    [
        (MODELS["A"], MarkovChain(), "reads continuous inputs, and task 'markov_chain' gives"),
        (MODELS["A"], MultiTaskRegression(), "predicts one number a query, and a target of task"),
        (PooledAttention(n_layers=3, n_channels=2), TASK, "makes 6 measurements .* = 4 entries"),
        (PooledAttention(n_channels=5, feedforward=False), TASK, None),
        (PooledAttention(n_layers=4), TASK, None),
        (MODELS["B"], LinearRegression(), None),
    ],
)
def test_it_says_what_it_does_not_read(
    model: PooledAttention, task: Task, said: str | None
) -> None:
    refusal = model.refusal(task)
    assert (refusal is None) == (said is None)
    assert re.search(said or "", refusal or "")


def test_depth_without_mlps_is_refused() -> None:
    with pytest.raises(ValueError, match="n_layers = 2 without feedforward; accepted: 1"):
        PooledAttention(n_layers=2, feedforward=False)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (torch.zeros(2, 12, 5), r"given shape \(2, 12, 5\)"),
        (torch.zeros(2, 3, 4), r"a context and then 3 queries; given shape \(2, 3, 4\)"),
        (torch.zeros(2, 12, 4, dtype=torch.long), "not token ids; given torch.int64"),
        (np.zeros((2, 12, 4)), "as a tensor; given ndarray"),
    ],
)
def test_the_hooked_twin_refuses_what_is_no_prompt(given: object, said: str) -> None:
    hooked = MODELS["A"].hooked(TASK, parameters("A"))
    with pytest.raises(InputError, match=said):
        hooked(given)
    with pytest.raises(InputError, match="has no loss of its own"):
        hooked(inputs(), return_type="loss")
