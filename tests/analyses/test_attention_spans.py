import json
from dataclasses import replace

import numpy as np
import pytest
import torch
import xarray as xr

from mechicl import analyses
from mechicl.errors import InputError, NothingToAnalyseError
from mechicl.models.sparse_attention import SparseAttention
from tests import trajectories
from tests.analyses import markov_toy
from tests.analyses.markov_toy import Toy, chain, on_blocks

PROBE = analyses.get("attention_spans")


def measure(toy: Toy, **settings: object) -> xr.Dataset:
    return PROBE(toy.trajectory, toy.forward(), **settings)


def counts(result: xr.Dataset) -> dict[str, int]:
    return json.loads(result.attrs["n_undefined"])


GAPS = chain(blocks=((0, 1), (3,)), weights=((0.75, 0.25), (1.0,)))


def test_masses_and_entropy_of_known_patterns():
    """Lag 2 is of no block, and weights of lags are unequal."""
    toy = markov_toy.sparse(GAPS, on_blocks(GAPS, [[[[0.6, 0.3], [0.1, 0.9]]]]))
    result = measure(toy)
    np.testing.assert_allclose(result["mass"][0, 0, 0], [[0.6, 0.3], [0.1, 0.9]], atol=1e-6)
    np.testing.assert_allclose(result["elsewhere"][0, 0, 0], [0.1, 0.0], atol=1e-6)
    weights = np.array([[0.45, 0.15, 0.1, 0.3], [0.075, 0.025, 1e-300, 0.9]])
    entropy = -(weights * np.log(weights)).sum(-1)
    np.testing.assert_allclose(result["entropy"][0, 0, 0], entropy, atol=1e-6)
    assert result["span_mass"].dims[-2:] == ("query_pos", "block")
    assert result["span_mass"].sizes["query_pos"] == GAPS.n_predictions
    for position in range(GAPS.n_predictions):
        xr.testing.assert_allclose(
            result["span_mass"].isel(query_pos=position), result["mass"], atol=1e-6
        )
    np.testing.assert_array_equal(result["serves"][0, 0, 0], [1, 2])
    assert result["block"].values.tolist() == [1, 2]
    assert result["n_served"].item() == 2 and result["holds"].item() == 1


def test_a_uniform_head_has_the_entropy_of_what_it_sees():
    """KQ = 0: the mass of a block falls with the position, and the entropy rises."""
    task = chain()
    toy = markov_toy.sparse(task, np.full((1, 1, 2, 4), 0.25))
    toy.trajectory["KQ"].values[...] = 0.0
    result = measure(toy)
    seen = task.order + np.arange(task.n_predictions)
    np.testing.assert_allclose(result["span_mass"][0, 0, 0, 0, :, 0], 2 / seen, rtol=1e-6)
    np.testing.assert_allclose(result["entropy"][0, 0, 0], np.log(seen).mean(), rtol=1e-6)
    np.testing.assert_allclose(result["elsewhere"][0, 0, 0], 1 - 4 * (1 / seen).mean(), rtol=1e-6)
    assert result["serves"].isnull().all() and result["n_served"].item() == 0
    assert counts(result)["head_without_block"] == 1


def random_tokens(context: int | None = None, blocks: object = ((0, 1), (2, 3))) -> Toy:
    """Return the published form, whose scores read tokens, with weights that were drawn."""
    task = chain(blocks=blocks)
    model = SparseAttention(n_heads=2, positional_values=False, context=context)
    size, rng = model.sizes(task), np.random.default_rng(0)
    kq = rng.normal(scale=6, size=(2, 1, 1, 2, size["d_key"], size["d_query"]))
    return markov_toy.toy(task, model, {"KQ": kq, "OV": np.zeros((2, 1, 1, 2, 4, 4))})


@pytest.mark.parametrize("kind", ["tokens", "decoder", "context"])
def test_equal_to_the_patterns_of_the_hooked_model_summed_one_by_one(kind):
    if kind == "decoder":
        by_lag = on_blocks(chain(), [[[[0.6, 0.4], [0.1, 0.9]]], [[[0.5, 0.5], [0.8, 0.2]]]])
        toy = markov_toy.decoder(chain(), by_lag, token_scores=1.0)
    else:
        toy = random_tokens(3 if kind == "context" else None)
    result, n = measure(toy, n_prompts=20), 20
    inputs, _ = toy.forward().prompts(n, 0)
    read = toy.model.windows(toy.task, torch.from_numpy(inputs))
    checked = 0
    for seed in range(2):
        names = toy.model.parameters(toy.task)
        weights = {
            name: torch.from_numpy(toy.trajectory[name].values[seed, 0]).float() for name in names
        }
        _, cache = toy.model.hooked(toy.task, weights).run_with_cache(read)
        pattern = cache["blocks.0.attn.hook_pattern"].numpy().astype(float)
        for head in range(2):
            rows, entropies = [], []
            for prompt in range(n):
                for target in range(3):
                    if kind == "context":
                        row, query = pattern[3 * prompt + target, head], 2
                    else:
                        row, query = pattern[prompt, head], 3 + target
                    weights_seen = row[query, : query + 1]
                    rows.append(
                        [
                            sum(row[query, query - lag] for lag in lags if lag <= query)
                            for lags in toy.task.blocks
                        ]
                    )
                    entropies.append(-(weights_seen * np.log(weights_seen + 1e-30)).sum())
            masses = np.array(rows).reshape(n, 3, 2)
            found = result.isel(seed=seed, step=0, layer=0, head=head)
            np.testing.assert_allclose(found["span_mass"], masses.mean(0), atol=1e-6)
            np.testing.assert_allclose(found["mass"], masses.mean((0, 1)), atol=1e-6)
            np.testing.assert_allclose(
                found["mass_error"], masses.mean(1).std(0, ddof=1) / n**0.5, atol=1e-6
            )
            np.testing.assert_allclose(found["entropy"], np.mean(entropies), atol=1e-6)
            np.testing.assert_allclose(
                found["elsewhere"] + masses.mean((0, 1)).sum(), 1.0, atol=1e-6
            )
            checked += 1
    assert checked == 4
    assert float(result["mass_error"].min()) > 1e-4


def test_the_error_is_the_spread_over_evaluation_sets():
    toy = random_tokens()
    results = [measure(toy, n_prompts=50, evaluation_seed=seed) for seed in range(12)]
    spread = np.var([result["mass"] for result in results], axis=0, ddof=1).mean()
    said = np.mean([result["mass_error"] ** 2 for result in results])
    assert said == pytest.approx(spread, rel=0.6)


def counted(toy: Toy) -> tuple[analyses.Forward, list[int]]:
    """Return a Forward that notes on how many prompts it is asked for patterns."""
    forward, asked = toy.forward(), []

    def attention(parameters, inputs):
        asked.append(len(inputs))
        return toy.forward().attention(parameters, inputs)

    return replace(forward, attention=attention), asked


def test_patterns_of_positions_take_one_prompt_and_have_no_error():
    toy = markov_toy.learning(2)
    forward, asked = counted(toy)
    result = PROBE(toy.trajectory, forward, n_prompts=256)
    assert set(asked) == {1}
    assert (result["mass_error"] == 0).all()
    # Negative control: scores of tokens take them all. At c = 2 their KQ is as wide as a prompt.
    for context in (None, 2):
        toy = random_tokens(context, ((0, 2), (1, 3)))
        forward, asked = counted(toy)
        result = PROBE(toy.trajectory, forward, n_prompts=300)
        assert sum(asked) - 1 == 300 and max(asked) <= 256
        assert (result["mass_error"] > 0).all()
    assert toy.trajectory.sizes["d_key"] == toy.task.n_positions


def test_all_prompts_would_give_what_one_gives(monkeypatch):
    toy = markov_toy.learning(1)
    one = measure(toy)
    monkeypatch.setattr("mechicl.analyses.spans._positional", lambda *_: False)
    every = measure(toy, n_prompts=10)
    xr.testing.assert_allclose(every["span_mass"], one["span_mass"], rtol=1e-7)
    xr.testing.assert_allclose(every["entropy"], one["entropy"], rtol=1e-7)
    assert float(every["mass_error"].max()) < 1e-8


def test_lags_beyond_the_context_have_no_mass():
    task = chain(blocks=((0, 1), (2, 3), (4,)))
    for context, expected in ((2, [1.0, 0.0, 0.0]), (3, [2 / 3, 1 / 3, 0.0])):
        uniform = np.full((1, 1, 1, context), 1 / context)
        result = measure(markov_toy.sparse(task, uniform, context=context))
        np.testing.assert_allclose(result["mass"][0, 0, 0, 0], expected, atol=1e-6)
        np.testing.assert_allclose(result["elsewhere"], 0.0, atol=1e-6)
        np.testing.assert_allclose(result["entropy"], np.log(context), rtol=1e-6)
        assert result["serves"].item() == 1 and result["holds"].item() == 0


def test_blocks_that_overlap_share_lags():
    task = chain(blocks=((0, 1, 2), (2, 3)))
    by_lag = [[[[0.1, 0.1, 0.2, 0.6], [0.05, 0.05, 0.8, 0.1], [0.3, 0.0, 0.4, 0.3]]]]
    result = measure(markov_toy.sparse(task, by_lag))
    expected = [[0.4, 0.8], [0.9, 0.9], [0.7, 0.7]]
    np.testing.assert_allclose(result["mass"][0, 0, 0], expected, atol=1e-6)
    assert result["serves"].values[0, 0, 0, 0] == 2
    np.testing.assert_allclose(result["elsewhere"], 0.0, atol=1e-6)


def test_of_equal_masses_the_first_block_counts():
    toy = markov_toy.sparse(chain(), np.full((1, 1, 1, 4), 0.25))
    pattern = np.zeros((1, 1, 1, 1, 3, 6))
    pattern[..., [0, 2]] = 0.5
    forward = replace(toy.forward(), attention=lambda *_: pattern)
    assert PROBE(toy.trajectory, forward, serve_threshold=0.4)["serves"].item() == 1
    # At the threshold is not above it.
    assert np.isnan(PROBE(toy.trajectory, forward, serve_threshold=0.5)["serves"].item())


def test_stages_and_when_heads_moved():
    result = measure(markov_toy.learning(2))
    nan = np.nan
    expected = [
        [nan, nan, nan],
        [nan, nan, nan],
        [1, 1, 1],
        [1, 1, 1],
        [1, 2, 1],
        [1, 2, nan],
        [1, 2, 3],
    ]
    np.testing.assert_array_equal(result["serves"][0, :, 0], expected)
    np.testing.assert_array_equal(result["serves"][1, :, 0], np.roll(expected, 1, axis=1))
    np.testing.assert_array_equal(result["moved"][:, 0], [[100, 700, 1500], [1500, 100, 700]])
    np.testing.assert_array_equal(result["n_served"], [[0, 0, 1, 1, 2, 2, 3]] * 2)
    np.testing.assert_array_equal(result["since"], [1500, 1500])
    assert counts(result) == {
        "nonfinite_parameters": 0,
        "nonfinite_patterns": 0,
        "head_without_block": 6,
    }
    # A lower threshold lets it serve block 1 to the end.
    lower = measure(markov_toy.learning(1), serve_threshold=0.4)
    assert lower["serves"].values[0, 5, 0, 2] == 1
    # Without the stages nothing moves.
    still = markov_toy.learning(1)
    last = still.trajectory.isel(step=[-1, -1]).assign_coords(step=still.trajectory["step"][:2])
    assert PROBE(last, still.forward())["moved"].isnull().all()
    alone = PROBE(still.trajectory.isel(step=[-1]), still.forward())
    assert alone["moved"].isnull().all() and alone["since"].item() == 1500


def test_a_head_that_serves_none_has_not_moved_and_one_that_leaves_has():
    """Serving none is a state like others: it is entered once."""
    none, first = [0.4, 0.4], [0.9, 0.1]
    mass = [[none, first], [none, first], [none, none], [none, none]]
    result = measure(markov_toy.sparse(GAPS, on_blocks(GAPS, [mass])))
    np.testing.assert_array_equal(result["moved"][0, 0], [np.nan, 20])


def test_seeds_are_averaged_in_the_order_of_blocks():
    toy = markov_toy.learning(3)
    result = measure(toy)
    one = measure(markov_toy.learning(1))
    np.testing.assert_allclose(result["mean_mass"], one["mass"].isel(seed=0), atol=1e-6)
    np.testing.assert_allclose(result["mass_deviation"], 0.0, atol=1e-6)
    assert result["n_ordered"].values.tolist() == [3]
    # Negative control: the plain mean over seeds mixes the blocks.
    plain = result["mass"].mean("seed").rename(head="place")
    assert float(abs(plain - result["mean_mass"]).max()) > 0.5


def test_the_mean_leaves_out_what_has_no_order():
    toy = markov_toy.learning(3)
    trajectory = markov_toy.poison(toy.trajectory, seed=1, from_index=5)
    trajectory["KQ"].values[2, -1] = 0.0  # three heads alike
    result = PROBE(trajectory, toy.forward())
    assert result["n_ordered"].values.tolist() == [1]
    np.testing.assert_allclose(result["mean_mass"], result["mass"].isel(seed=0), atol=1e-6)
    trajectory["KQ"].values[0, -1] = 0.0
    none = PROBE(trajectory, toy.forward())
    assert none["n_ordered"].values.tolist() == [0]
    assert none["mean_mass"].isnull().all() and none["mass_deviation"].isnull().all()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_diverged_seed_is_undefined_from_there_on(value):
    toy = markov_toy.learning(2)
    trajectory = markov_toy.poison(toy.trajectory, seed=1, from_index=5, value=value)
    result, whole = PROBE(trajectory, toy.forward()), measure(toy)
    for name in ("span_mass", "mass", "mass_error", "elsewhere", "entropy", "serves", "n_served"):
        assert result[name][1, 5:].isnull().all(), name
        xr.testing.assert_equal(result[name][0], whole[name][0])
        xr.testing.assert_equal(result[name][1, :5], whole[name][1, :5])
    assert result["moved"][1].isnull().all() and result["moved"][0].notnull().all()
    assert result["holds"][1, 5:].isnull().all() and np.isnan(result["since"][1])
    assert counts(result)["nonfinite_parameters"] == 2


def test_patterns_that_overflow_have_a_reason_of_their_own():
    toy = markov_toy.learning(2)
    forward = toy.forward()

    def attention(parameters, inputs):
        found = forward.attention(parameters, inputs).copy()
        found[1, 0, 2, 0, 1, 3] = np.nan  # one weight of one head
        return found

    result = PROBE(toy.trajectory, replace(forward, attention=attention))
    assert counts(result)["nonfinite_patterns"] == 7
    for name in ("span_mass", "mass", "mass_error", "elsewhere", "entropy"):
        assert result[name][1, :, 0, 2].isnull().all()
        assert result[name][1, :, 0, :2].notnull().all()
    assert result["n_served"][1].isnull().all() and result["n_served"][0].notnull().all()
    assert result["moved"][1].isnull().all()


def test_what_is_not_a_run_of_the_chain_is_refused():
    with pytest.raises(NothingToAnalyseError, match="no lag_weights"):
        PROBE(trajectories.learning(), markov_toy.forward64())
    toy = markov_toy.learning(1)
    with pytest.raises(InputError, match="no attention"):
        PROBE(toy.trajectory, replace(toy.forward(), attention=None))


def test_few_steps_are_spread_and_the_last_is_in():
    result = measure(markov_toy.learning(1), n_steps=2)
    assert result["step"].values.tolist() == [0, 1500]
    np.testing.assert_array_equal(result["moved"][0, 0], [1500, 1500, 1500])
