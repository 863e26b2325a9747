"""Sequences follow the law that they are drawn from, and references are that law."""

import numpy as np
import pytest
import torch

from mechicl.errors import InputError
from mechicl.tasks.markov_chain import MarkovChain
from mechicl.training import load_recipe

SMALL = MarkovChain(d=3, blocks=(1, 2), n_predictions=4, base_scale=1.5)
ODD = MarkovChain(d=3, blocks=((1,), (0, 1)), weights=((1.0,), (0.25, 0.75)), n_predictions=3)
"""Blocks that overlap, out of order, of several sizes, weighted."""


def sequences(task: MarkovChain, n: int, seed: int = 0) -> np.ndarray:
    sample = task.sample(n, seed=seed)
    last = sample["targets"].values[:, -1:]
    return np.concatenate([sample["inputs"].values, last], 1)


def z_scores(task: MarkovChain, law: MarkovChain, n: int = 120_000) -> np.ndarray:
    """Compare counts of the next state after every context, at every time, with `law`."""
    drawn, found = sequences(task, n), []
    probabilities = np.exp(law.references(drawn[:, :-1])["generator"])
    for t in range(task.n_predictions):
        context = drawn[:, t : t + task.order] @ task.d ** np.arange(task.order)
        for code in np.unique(context):
            here = context == code
            p, total = probabilities[here][0, t], here.sum()
            counts = np.bincount(drawn[here, task.order + t], minlength=task.d)
            found.append((counts - total * p) / np.sqrt(total * p * (1 - p)))
    return np.concatenate(found)


@pytest.mark.parametrize("task", [SMALL, ODD], ids=["blocks", "odd"])
def test_tokens_follow_the_law_of_equation_1(task: MarkovChain) -> None:
    scores = z_scores(task, task)
    assert len(scores) == task.d ** (task.order + 1) * task.n_predictions
    assert abs(scores).max() < 4.7  # of some 300 normals: 1 in 1,500 by chance
    assert 0.6 < scores.std() < 1.4


@pytest.mark.parametrize(
    "change",
    [
        {"features_seed": 1},
        {"base_scale": 1.6},
        {"temperature": 1.1},
        {"blocks": ((2,), (0, 1))},
        {"weights": ((1.0,), (0.4, 0.6))},
    ],
    ids=lambda change: next(iter(change)),
)
def test_another_law_is_told_apart(change: dict[str, object]) -> None:
    other = SMALL.model_copy(update=change)
    assert abs(z_scores(SMALL, MarkovChain(**other.model_dump()))).max() > 6


def test_the_first_tokens_are_uniform() -> None:
    drawn = sequences(SMALL, 30_000)[:, : SMALL.order]
    pairs = np.bincount(drawn[:, 0] * 3 + drawn[:, 2], minlength=9)
    assert abs(pairs - 30_000 / 9).max() < 5 * (30_000 / 9) ** 0.5


def test_targets_are_the_tokens_that_follow() -> None:
    sample = SMALL.sample(50, seed=2)
    inputs, targets = sample["inputs"].values, sample["targets"].values
    assert sample["targets"].dims == ("batch", "query_pos")
    assert (inputs.shape, targets.shape) == ((50, 6), (50, 4))
    np.testing.assert_array_equal(targets[:, :-1], inputs[:, SMALL.order :])


def test_extreme_numbers_are_states_too() -> None:
    """Where rounding leaves a cumulative law below 1, the last state is taken."""
    normals = torch.tensor([[-40.0] * 7, [40.0] * 7])
    low, high = SMALL.examples(normals)
    assert low.tolist() == [0] * 7
    assert high.tolist() == [2] * 7


def test_the_generator_reaches_its_entropy_floor_and_nothing_goes_below() -> None:
    """Cross-entropy by `Task.loss` against closed-form entropy, within Monte-Carlo error."""
    sample = SMALL.sample(40_000, seed=5)
    inputs, targets = sample["inputs"].values, torch.from_numpy(sample["targets"].values)
    references, floor = SMALL.references(inputs), SMALL.entropy_floor(inputs)
    losses = {
        name: SMALL.loss(torch.from_numpy(predicted), targets).numpy()
        for name, predicted in references.items()
    }
    error = losses["generator"].std() / len(inputs) ** 0.5
    assert abs(losses["generator"].mean() - floor) < 4 * error
    assert losses["blocks_1"].mean() > floor + 20 * error
    assert list(references) == ["generator", "blocks_1"]


def test_shifted_logits_have_the_same_loss() -> None:
    targets = torch.tensor([[0, 2, 1, 1]])
    logits = torch.randn(1, 4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = torch.nn.functional.cross_entropy(logits[0], targets[0])
    for shift in (0.0, 300.0, -1e4):
        torch.testing.assert_close(SMALL.loss(logits + shift, targets)[0], expected)


def test_the_exact_conditional_is_the_best_that_so_few_tokens_allow() -> None:
    """Its loss is below that of the predictor that drops terms, which is not Bayes."""
    sample = SMALL.sample(40_000, seed=6)
    inputs, targets = sample["inputs"].values, torch.from_numpy(sample["targets"].values)
    exact = torch.from_numpy(SMALL.exact_conditional(inputs, 1))
    dropped = torch.from_numpy(SMALL.references(inputs)["blocks_1"])
    gain = (SMALL.loss(dropped, targets) - SMALL.loss(exact, targets)).numpy()
    assert gain.mean() > 4 * gain.std() / len(inputs) ** 0.5
    whole = SMALL.exact_conditional(inputs, 3)
    np.testing.assert_allclose(whole, SMALL.references(inputs)["generator"], atol=1e-12)


def test_published_teachers_have_the_published_entropy() -> None:
    """0.606 ± 0.026 for blocks of 2, 0.362 ± 0.020 for blocks of 4, over 30 teachers."""
    checked = 0
    for lags, mean, spread in ((2, 0.606, 0.026), (4, 0.362, 0.020)):
        floors = [
            task.entropy_floor(task.sample(400, seed=0)["inputs"].values)
            for task in (
                MarkovChain(
                    d=50,
                    blocks=(lags,) * 3,
                    base_scale=lags,
                    temperature=0.1,
                    features_seed=number,
                )
                for number in range(6)
            )
        ]
        assert abs(np.mean(floors) - mean) < 3 * spread / 6**0.5 + 0.01
        checked += 1
    assert checked == 2


def test_temperature_scales_the_features() -> None:
    sample = SMALL.sample(20, seed=0)["inputs"].values
    cold = SMALL.model_copy(update={"temperature": 0.5})
    strong = SMALL.model_copy(update={"base_scale": 3.0})
    np.testing.assert_allclose(
        cold.references(sample)["generator"],
        MarkovChain(**strong.model_dump()).references(sample)["generator"],
        atol=1e-12,
    )


def test_features_are_scaled_orthogonal_matrices_strongest_first() -> None:
    features = MarkovChain(d=7, importance=2.0, base_scale=0.5).features
    for number, scale in enumerate((2.0, 1.0, 0.5)):
        np.testing.assert_allclose(
            features[number] @ features[number].T, scale**2 * np.eye(7), atol=1e-12
        )
    apart = MarkovChain(d=7, orthogonal_features=True).features.reshape(3, -1)
    gram = apart @ apart.T
    np.testing.assert_allclose(gram, np.diag(np.diag(gram)), atol=1e-9)
    plain = MarkovChain(d=7).features.reshape(3, -1)
    assert abs((plain @ plain.T)[0, 1]) > 0.1


def test_lengths_stand_for_contiguous_blocks() -> None:
    assert MarkovChain(blocks=(2, 3)).blocks == ((0, 1), (2, 3, 4))
    given = load_recipe("yuksel2026-minimal", {"blocks": [2, 2]})
    assert given.task == MarkovChain(**{**given.task.model_dump(), "blocks": ((0, 1), (2, 3))})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"blocks": []}, "one set of lags"),
        ({"blocks": [[0], []]}, r"blocks\[1\] is empty"),
        ({"blocks": [[0, 0]]}, "repeats a lag"),
        ({"blocks": [[0, -1]]}, "greater than or equal to 0"),
        ({"blocks": [True, True]}, "must not be a boolean"),
        ({"blocks": [[10**12]]}, "less than 65536"),
        ({"blocks": [2, 10**12]}, "reach 1000000000002 tokens back"),
        ({"d": 10**8}, "the most is 67108864"),
        ({"base_scale": 1e300}, r"features of 10\^30\d logits"),
        ({"importance": 1e200}, r"features of 10\^4\d\d logits"),
        ({"importance": 1e-200, "temperature": 1e-300}, r"features of 10\^300 logits"),
        ({"d": 2000, "blocks": [20]}, "a window of 20 tokens"),
        ({"blocks": [2], "weights": [[0.5]]}, "weights has"),
        ({"blocks": [2], "weights": [[0.5, 0.6]]}, r"sums to 1.1"),
        ({"d": 1}, "greater than or equal to 2"),
        ({"temperature": 0}, "greater than 0"),
        ({"n_predictions": 0}, "greater than or equal to 1"),
    ],
)
def test_bad_settings_say_what_is_wrong(settings: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_recipe("yuksel2026-minimal", settings)


def test_a_model_of_vectors_refuses_tokens() -> None:
    with pytest.raises(InputError, match="reads continuous inputs, and task 'markov_chain' gives"):
        load_recipe("yuksel2026-minimal", {"model": {"name": "softmax_attention"}})
    with pytest.raises(InputError, match="reads token ids, and task 'linear_regression' gives"):
        load_recipe("he2025-two-head-quick", {"model": {"name": "decoder"}})
