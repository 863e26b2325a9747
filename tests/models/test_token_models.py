"""sparse_attention and decoder: two equal forward passes, windows, lags, dropout."""

from collections.abc import Callable
from contextlib import closing
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

from mechicl.errors import InputError
from mechicl.models.decoder import Decoder
from mechicl.models.hooked import TOKEN_HOOK_DIMS, hook_dims
from mechicl.models.sparse_attention import SparseAttention
from mechicl.models.tokens import TokenModel, by_product, look_up, unseen
from mechicl.tasks.linear_regression import LinearRegression
from mechicl.tasks.markov_chain import MarkovChain
from mechicl.training import load_recipe
from mechicl.training.batches import draw_from
from mechicl.training.step import initial_state, make_step

TASK = MarkovChain(d=5, blocks=(1, 2), n_predictions=4, temperature=0.5)

MODELS: dict[str, TokenModel] = {
    **{
        f"sparse, {scores}, {'with' if values else 'without'} positional values": SparseAttention(
            scores=scores, positional_values=values
        )
        for scores, values in product(("positions", "tokens_and_positions"), (True, False))
    },
    "one block": Decoder(d_head=4, d_mlp=8),
    "two blocks": Decoder(n_layers=2, n_heads=2, d_head=3, d_mlp=7, score_scale=0.7),
}


@pytest.fixture(params=list(MODELS))
def model(request: pytest.FixtureRequest) -> TokenModel:
    return MODELS[request.param]


def with_context(model: TokenModel, context: int | None) -> TokenModel:
    return model.model_copy(update={"context": context})


def parameters(model: TokenModel, n: int | None = None, seed: int = 0) -> dict[str, Tensor]:
    """Random ones in float64, of one model or of a stack."""
    stream = torch.Generator().manual_seed(seed)
    stack = () if n is None else (n,)
    return {
        name: value + 0.7 * torch.randn(*stack, *value.shape, generator=stream).double()
        for name, value in model.initial(TASK, stream).items()
    }


def tokens(n: int = 6, seed: int = 0) -> Tensor:
    return torch.from_numpy(TASK.sample(n, seed=seed)["inputs"].values)


def one(stacked: dict[str, Tensor], index: int) -> dict[str, Tensor]:
    return {name: value[index] for name, value in stacked.items()}


@pytest.mark.parametrize("context", [None, 1, 2, 3])
def test_predictions_are_those_of_the_hooked_model(model: TokenModel, context: int | None) -> None:
    """Stacked models, on shared prompts and on prompts of their own, in float64."""
    chosen, inputs = with_context(model, context), torch.stack([tokens(seed=1), tokens(seed=2)])
    stacked = parameters(chosen, 2)
    own = chosen.predict(TASK, stacked, inputs)
    shared = chosen.predict(TASK, stacked, inputs[0])
    assert own.shape == shared.shape == (2, 6, 4, 5)
    for index in range(2):
        hooked = chosen.hooked(TASK, one(stacked, index))
        expected = chosen.answers(TASK, hooked(chosen.windows(TASK, inputs[index])))
        torch.testing.assert_close(own[index], expected, atol=1e-10, rtol=1e-10)
        torch.testing.assert_close(
            chosen.predict(TASK, one(stacked, index), inputs[index]), expected, atol=1e-10, rtol=0
        )
    first = chosen.hooked(TASK, one(stacked, 0))(chosen.windows(TASK, inputs[0]))
    torch.testing.assert_close(shared[0], chosen.answers(TASK, first), atol=1e-10, rtol=0)
    assert own.std() > 0.05


@pytest.mark.parametrize("context", [None, 2])
def test_attention_by_lag_is_the_hooked_pattern(model: TokenModel, context: int | None) -> None:
    chosen, inputs = with_context(model, context), tokens()
    weights = parameters(chosen)
    given = chosen.attention(TASK, weights, inputs)
    _, cache = chosen.hooked(TASK, weights).run_with_cache(chosen.windows(TASK, inputs))
    n_read, checked = chosen.n_read(TASK), 0
    n_layers = given.shape[0]
    assert given.shape[2:] == (6, 4, n_read)
    torch.testing.assert_close(given.sum(-1), torch.ones_like(given[..., 0]))
    for layer in range(n_layers):
        pattern = cache[f"blocks.{layer}.attn.hook_pattern"]
        for prompt, target in product(range(6), range(4)):
            sequence = prompt if context is None else 4 * prompt + target
            query = n_read - 4 + target if context is None else n_read - 1
            for lag in range(n_read):
                found = given[layer, :, prompt, target, lag]
                expected = torch.zeros_like(found)
                if lag <= query:
                    expected = pattern[sequence, :, query, query - lag]
                torch.testing.assert_close(found, expected, atol=1e-10, rtol=0)
                checked += 1
    assert checked == n_layers * 6 * 4 * n_read


def test_a_model_sees_its_context_and_nothing_else(model: TokenModel) -> None:
    """Predictions at position t depend on the last c tokens, on each, and on none after t."""
    for context, reach in ((None, None), (2, 2)):
        chosen = with_context(model, context)
        weights, inputs = parameters(chosen), tokens(1)
        before = chosen.predict(TASK, weights, inputs)[0]
        for position in range(TASK.n_positions):
            changed = inputs.clone()
            changed[0, position] = (changed[0, position] + 1) % TASK.d
            moved = (chosen.predict(TASK, weights, changed)[0] - before).abs().amax(-1) > 1e-9
            query = torch.arange(4) + TASK.order - 1
            seen = position <= query
            if reach is not None:
                seen &= position > query - reach
            assert torch.equal(moved, seen)


def test_heads_can_be_relabelled(model: TokenModel) -> None:
    weights, order = parameters(model), [1, 0, *range(2, model.n_heads)]
    axes = {
        name: var.dims.index("head") - 2
        for name, var in model.parameters(TASK).items()
        if "head" in var.dims
    }
    swapped = {
        name: value.index_select(axes[name], torch.tensor(order)) if name in axes else value
        for name, value in weights.items()
    }
    inputs = tokens()
    torch.testing.assert_close(
        model.predict(TASK, swapped, inputs), model.predict(TASK, weights, inputs)
    )
    wrong = {**weights, next(iter(axes)): swapped[next(iter(axes))]}
    assert not torch.allclose(
        model.predict(TASK, wrong, inputs), model.predict(TASK, weights, inputs)
    )


def test_the_construction_of_section_2_3_is_the_generator() -> None:
    """V_k = A*_k and scores λ on the block: as λ grows the predictions become the chain's own."""
    model, inputs = (
        SparseAttention(scores="positions", positional_values=False, n_heads=2),
        tokens(),
    )
    kq, ov = torch.zeros(1, 2, 6, 6), torch.zeros(1, 2, 5, 5)
    for head, lags in enumerate(TASK.blocks):
        for query, lag in product(range(2, 6), lags):
            kq[0, head, query - lag, query] = 1.0
        ov[0, head] = torch.from_numpy(TASK.features[head])
    expected = torch.from_numpy(TASK.references(inputs.numpy())["generator"]).float()
    errors = []
    for strength in (10.0, 20.0, 100.0):
        logits = model.predict(TASK, {"KQ": strength * kq, "OV": ov}, inputs)
        errors.append(float((logits.log_softmax(-1) - expected).abs().max()))
    assert errors[0] > 0.1 > 0.03 > errors[1] > errors[2]
    assert errors[2] < 1e-5


def by_definition(model: SparseAttention, weights: dict[str, Tensor], inputs: Tensor) -> Tensor:
    """Compute what the docstring of SparseAttention says, dense, every position at once."""
    n = TASK.n_positions
    words = torch.nn.functional.one_hot(inputs, TASK.d).double()
    places = torch.eye(n, dtype=torch.float64).expand(len(inputs), n, n)
    both = torch.cat([words, places], -1)
    read = both if model.scores == "tokens_and_positions" else places
    seen = both if model.positional_values else words
    logits = torch.zeros(len(inputs), n, TASK.d, dtype=torch.float64)
    for kq, ov in zip(weights["KQ"][0], weights["OV"][0], strict=True):
        scores = torch.einsum("bqj,ij,bki->bqk", read, kq, read) / read.shape[-1] ** 0.5
        hidden = torch.ones(n, n, dtype=torch.bool).triu(1)
        pattern = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        logits = logits + torch.einsum("bqk,bki,oi->bqo", pattern, seen, ov)
    return logits[:, TASK.order - 1 :] / TASK.temperature


@pytest.mark.parametrize("values", [True, False])
@pytest.mark.parametrize("scores", ["positions", "tokens_and_positions"])
def test_gradients_of_stacked_models_are_those_of_the_definition(scores: str, values: bool) -> None:
    """Each model's from its own prompts: nothing is added to another's rows."""
    model = SparseAttention(scores=scores, positional_values=values)
    stacked, inputs = parameters(model, 3), torch.stack([tokens(seed=n) for n in range(3)])
    targets = torch.randint(TASK.d, (3, 6, 4), generator=torch.Generator().manual_seed(1))

    def loss(weights: dict[str, Tensor]) -> Tensor:
        return TASK.loss(model.predict(TASK, weights, inputs), targets).sum()

    def defined(weights: dict[str, Tensor], index: int) -> Tensor:
        return TASK.loss(by_definition(model, weights, inputs[index]), targets[index]).sum()

    found = torch.func.grad(loss)(stacked)
    for index in range(3):
        expected = torch.func.grad(defined)(one(stacked, index), index)
        other = torch.func.grad(defined)(one(stacked, index), (index + 1) % 3)
        for name in ("KQ", "OV"):
            torch.testing.assert_close(found[name][index], expected[name], atol=1e-12, rtol=1e-9)
            assert not torch.allclose(found[name][index], other[name])


@pytest.mark.parametrize("lead", [(), (2,), (2, 3)])
@pytest.mark.parametrize("function", [look_up, by_product])
def test_rows_are_looked_up_in_each_models_own_table(
    function: Callable[[Tensor, Tensor], Tensor], lead: tuple[int, ...]
) -> None:
    """On shared tokens and on tokens of their own; `by_product` is what a GPU does."""
    stream = torch.Generator().manual_seed(0)
    table = torch.randn(*lead, 5, 3, 7, generator=stream)
    for own in {(), lead}:
        ids = torch.randint(5, (*own, 6, 4), generator=stream)
        rows = function(table, ids)
        assert rows.shape == (*lead, 6, 4, 3, 7)
        for at in np.ndindex(*lead, 6, 4):
            model, place = at[: len(lead)], at[len(lead) :]
            assert torch.equal(rows[at], table[model][ids[model if own else ()][place]])


def test_what_hides_later_positions_leaves_exact_zeros() -> None:
    scores = torch.randn(3, 5, generator=torch.Generator().manual_seed(0), requires_grad=True)
    pattern = (3 * scores + unseen(5, 3, scores)).softmax(-1)
    later = torch.tensor([[0, 0, 0, 1, 1], [0, 0, 0, 0, 1], [0, 0, 0, 0, 0]], dtype=torch.bool)
    assert not pattern[later].any()
    assert pattern[~later].all()
    (gradient,) = torch.autograd.grad(pattern.square().sum(), scores)
    assert torch.isfinite(gradient).all()
    assert not gradient[later].any()
    assert gradient[~later].any()


def test_untrained_models_are_what_is_said_of_them() -> None:
    stream = torch.Generator().manual_seed(0)
    minimal = SparseAttention(init_scale=0.3).initial(TASK, stream)
    assert not minimal["OV"].any()
    assert 0.28 < minimal["KQ"].abs().max() <= 0.3
    assert abs(float(minimal["KQ"].mean())) < 0.03
    full = Decoder(d_head=16).initial(TASK, stream)
    torch.testing.assert_close(full["W_E"] @ full["W_E"].T, torch.eye(5))
    torch.testing.assert_close(full["W_U"].T @ full["W_U"], torch.eye(5))
    bound = (6 / (48 + 48)) ** 0.5
    for name in ("W_Q", "W_K", "W_V", "W_O"):
        assert 0.97 * bound < full[name].abs().max() <= bound


@pytest.mark.parametrize("scores", ["positions", "tokens_and_positions"])
def test_heads_that_are_alike_stay_so(scores: str) -> None:
    """At u = 0, whatever rounding does to them, and at the smallest published u they part."""
    apart = {}
    for scale in (0.0, 1e-9):
        changes = {"d": 5, "blocks": [1, 2], "n_predictions": 4, "batch_size": 32}
        recipe = load_recipe(
            "yuksel2026-minimal", {**changes, "scores": scores, "init_scale": scale}
        )
        state, step = initial_state(recipe, (0,)), make_step(recipe)
        nudged = state.parameters["OV"].clone()
        nudged[0, 0, 0, 0, 0] += 1e-7  # more than rounding, in a direction that heads disagree on
        state = state._replace(parameters={**state.parameters, "OV": nudged})
        with closing(draw_from(recipe, (0,), 0)) as batches, torch.no_grad():
            for _ in range(300):
                state, _ = step(state, *next(batches))
        kq = state.parameters["KQ"][0, 0]
        assert float(kq.abs().max()) > 1
        apart[scale] = float((kq - kq[:1]).abs().max())
    assert apart[0.0] < 1e-4
    assert apart[1e-9] > 0.01


def test_dropout_acts_in_training_alone_and_on_what_blocks_add() -> None:
    model, inputs = Decoder(n_layers=2, d_head=4, d_mlp=8, dropout=0.25), tokens()
    weights, n = parameters(model), model.n_dropout(TASK)
    assert n == 2 * 12 * (TASK.n_positions + TASK.n_predictions)
    whole = model.predict(TASK, weights, inputs)
    ones = torch.ones(6, n, dtype=torch.float64)
    torch.testing.assert_close(model.predict_dropped(TASK, weights, inputs, ones), whole)
    changed = 0
    for entry in range(0, n, 12):  # one of every position's
        kept = ones.clone()
        kept[0, entry] = 0.0
        moved = (model.predict_dropped(TASK, weights, inputs, kept) - whole).abs().amax((-1, -2))
        assert moved[0] > 0
        assert not moved[1:].any(), "an entry of one prompt changed another"
        changed += 1
    assert changed == n / 12
    nothing = model.predict_dropped(TASK, weights, inputs, torch.zeros_like(ones))
    alone = {
        **weights,
        "W_O": 0 * weights["W_O"],
        "W_out": 0 * weights["W_out"],
        "b_out": 0 * weights["b_out"],
    }
    torch.testing.assert_close(nothing, model.predict(TASK, alone, inputs))


def test_dropout_of_windows_is_counted_by_window() -> None:
    model = Decoder(d_head=4, d_mlp=8, dropout=0.25, context=2)
    weights, inputs = parameters(model), tokens()
    n = model.n_dropout(TASK)
    assert n == 4 * 2 * 12
    kept = torch.ones(6, n, dtype=torch.float64)
    kept[:, : n // 4] = 0.0  # of the first window of each prompt
    moved = model.predict_dropped(TASK, weights, inputs, kept) - model.predict(
        TASK, weights, inputs
    )
    assert (moved.abs().amax(-1) > 0).tolist() == [[True, False, False, False]] * 6


def test_what_a_model_cannot_read_is_refused() -> None:
    with pytest.raises(InputError, match="context 4 is longer than the 3 tokens"):
        load_recipe("yuksel2026-minimal", {"blocks": [1, 2], "context": 4})
    with pytest.raises(InputError, match="reads token ids, and task 'linear_regression' gives"):
        SparseAttention().predict(LinearRegression(), {}, torch.zeros(2, 6, dtype=torch.int64))
    with pytest.raises(InputError, match="have 6 positions; given 7"):
        SparseAttention().windows(TASK, torch.zeros(2, 7, dtype=torch.int64))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (np.zeros((2, 3)), "as a tensor; given ndarray"),
        (torch.zeros(2, 3), "not continuous inputs; given torch.float32"),
        (torch.zeros(2, 9, dtype=torch.int64), r"given shape \(2, 9\)"),
        (torch.zeros(3, dtype=torch.int64), r"given shape \(3,\)"),
        (torch.full((2, 3), 5), "given 5 to 5"),
        (torch.full((2, 3), -1), "given -1 to -1"),
    ],
    ids=["array", "floats", "too long", "no batch", "too large", "negative"],
)
def test_the_hooked_model_says_what_it_reads(given: object, message: str) -> None:
    hooked = SparseAttention().hooked(TASK, SparseAttention().initial(TASK, torch.Generator()))
    with pytest.raises(InputError, match=message):
        hooked(given)


def test_hooks_of_the_hooked_model_work() -> None:
    """Ablating a head by TransformerLens's own hook is removing it from the parameters."""
    for name, model in MODELS.items():
        weights, inputs = parameters(model), tokens()
        hooked = model.hooked(TASK, weights)

        def without_first(z: Tensor, hook: object) -> Tensor:
            z[:, :, 0] = 0.0
            return z

        given = hooked.run_with_hooks(inputs, fwd_hooks=[("blocks.0.attn.hook_z", without_first)])[
            :, -4:
        ]
        key = "OV" if "OV" in weights else "W_O"
        cut = {**weights, key: weights[key].clone()}
        cut[key][0, 0] = 0.0
        torch.testing.assert_close(given, model.predict(TASK, cut, inputs), msg=name)
        assert not torch.allclose(given, model.predict(TASK, weights, inputs))


def test_hook_points_have_the_dims_that_are_named() -> None:
    """Every one of a decoder but the norms' scales, which have no axis of their own."""
    model = Decoder(n_layers=1, n_heads=2, d_head=4, d_mlp=7)
    _, cache = model.hooked(TASK, parameters(model)).run_with_cache(tokens(3))
    sizes = {"batch": 3, "head": 2, "d_model": 8, "d_head": 4, "d_mlp": 7, "d_vocab": 5}
    sizes |= dict.fromkeys(("pos", "query_pos", "key_pos"), 6)
    seen = set()
    for name, value in cache.items():
        if not name.endswith("hook_scale"):
            assert value.shape == tuple(sizes[dim] for dim in hook_dims(name)), name
            seen.add(name.rsplit(".", 1)[-1])
    assert set(TOKEN_HOOK_DIMS) <= seen
