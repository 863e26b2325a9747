"""The chain and its restricted predictors against definitions, enumeration, counts and draws."""

import inspect
from collections import Counter
from collections.abc import Callable
from functools import cache
from itertools import product

import numpy as np
import pytest
from beartype import beartype
from jaxtyping import jaxtyped
from scipy.special import softmax

from mechicl.errors import InputError
from mechicl.theory import markov_chain
from mechicl.theory.divergence import finite_mean, kl
from mechicl.theory.features import haar_features
from mechicl.theory.markov_chain import (
    log_conditional,
    log_ngram,
    log_probabilities,
    logits,
    mean_entropy,
    window,
)

D, SPANS, WEIGHTS = 3, ((0, 2), (1, 2, 3), (0,)), ((0.3, 0.7), (0.2, 0.5, 0.3), (1.0,))
"""Spans that overlap, are not contiguous and have unequal sizes; w = 4."""
FEATURES = np.random.default_rng(5).standard_normal((3, D, D)) * np.array([3, 2, 1])[:, None, None]
TWO_STATE = np.array([[0.9, 0.1], [0.2, 0.8]])
MUTUAL_INFORMATION = 0.25299137818778483


def _tokens(*shape: int, d: int = D, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, d, shape)


def _law(past: np.ndarray, features: np.ndarray, spans: tuple, weights: tuple) -> np.ndarray:
    """Return the law of the next token as the definition has it, one-hot vector by vector."""
    total = np.zeros(features.shape[-1])
    for matrix, span, share in zip(features, spans, weights, strict=True):
        mixed = np.zeros_like(total)
        for lag, weight in zip(span, share, strict=True):
            mixed[past[len(past) - 1 - lag]] += weight
        total += matrix @ mixed
    return softmax(total)


@cache
def _all_sequences(length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return every sequence of the chain and its probability."""
    w = 1 + max(map(max, SPANS))
    found = np.array(list(product(range(D), repeat=length)))
    chances = np.full(len(found), float(D) ** -w)
    for row, tokens in enumerate(found):
        for t in range(w, length):
            chances[row] *= _law(tokens[:t], FEATURES, SPANS, WEIGHTS)[tokens[t]]
    return found, chances


# --- the generator --------------------------------------------------------------------------------


def test_window() -> None:
    assert window(SPANS) == 4
    assert window([[0]]) == 1
    assert window([range(4), range(4, 8), range(8, 12)]) == 12


def test_predictions_are_those_of_the_definition() -> None:
    tokens = _tokens(5, 9)
    for n in (1, 2, 3):
        found = log_probabilities(tokens, FEATURES, SPANS, WEIGHTS, n_blocks=n)
        assert found.shape == (5, 6, 3)
        for row, t in np.ndindex(5, 6):
            law = _law(tokens[row, : t + 4], FEATURES[:n], SPANS[:n], WEIGHTS[:n])
            np.testing.assert_allclose(np.exp(found[row, t]), law, rtol=1e-12)
    whole = log_probabilities(tokens, FEATURES, SPANS, WEIGHTS)
    np.testing.assert_array_equal(whole, found)
    fewer = log_probabilities(tokens, FEATURES, SPANS, WEIGHTS, n_blocks=2)
    assert np.abs(whole - fewer).max() > 0.1


def test_logits_add_up_over_blocks_and_read_columns() -> None:
    tokens = _tokens(6)
    parts = sum(
        logits(np.array(tokens), FEATURES[k : k + 1], SPANS[k : k + 1], WEIGHTS[k : k + 1])[-1]
        for k in range(3)
    )
    np.testing.assert_allclose(logits(tokens, FEATURES, SPANS, WEIGHTS)[-1], parts, rtol=1e-13)
    # x is a column that A acts on: a token picks a column, not a row.
    one = logits(np.array([2]), FEATURES[:1], [[0]])
    np.testing.assert_array_equal(one[0], FEATURES[0, :, 2])
    assert np.abs(one[0] - FEATURES[0, 2]).max() > 0.1


def test_weights_are_uniform_by_default() -> None:
    tokens, halves = _tokens(4, 7), ((0, 1), (2, 3), (1, 2))
    found = logits(tokens, FEATURES, halves)
    np.testing.assert_array_equal(found, logits(tokens, FEATURES, halves, ((0.5, 0.5),) * 3))
    # Code that sums has features half as large.
    summed = sum(
        (FEATURES[k] / 2).T[tokens[:, 3 - lag : 7 - lag]] for k in range(3) for lag in halves[k]
    )
    np.testing.assert_allclose(found, summed, rtol=1e-12)
    assert np.abs(found - logits(tokens, FEATURES, halves, ((0.2, 0.8),) * 3)).max() > 0.1


def test_mean_entropy() -> None:
    assert mean_entropy(np.log(np.full((4, 5), 0.2))) == pytest.approx(np.log(5), rel=1e-14)
    certain = np.array([[0.0, -np.inf], [-np.inf, 0.0]])
    assert mean_entropy(certain) == 0
    half = np.log([0.5, 0.5])
    assert mean_entropy(np.stack([half, certain[0]])) == pytest.approx(np.log(2) / 2, rel=1e-14)
    assert np.isnan(mean_entropy(np.array([[0.0, np.nan]])))


def test_entropy_is_the_least_cross_entropy() -> None:
    """Over all sequences: the loss of the generator is its entropy, of another one above it."""
    found, chances = _all_sequences(7)
    predicted = log_probabilities(found[:, :-1], FEATURES, SPANS, WEIGHTS)
    other = log_probabilities(found[:, :-1], FEATURES, SPANS, WEIGHTS, n_blocks=2)
    target = found[:, 4:, None]
    loss, worse = (
        -chances @ np.take_along_axis(part, target, -1).mean((1, 2)) for part in (predicted, other)
    )
    entropy = chances @ np.array([mean_entropy(row) for row in predicted])
    assert loss == pytest.approx(entropy, rel=1e-12)
    assert worse > loss + 0.01
    assert worse - loss == pytest.approx(chances @ kl(predicted, other).mean(1), rel=1e-10)


# --- exact conditionals ---------------------------------------------------------------------------


def test_conditional_is_that_of_all_sequences() -> None:
    """Bayes' rule over all 3⁷ sequences and their probabilities, at every position and c."""
    found, chances = _all_sequences(7)
    assert chances.sum() == pytest.approx(1, rel=1e-12)
    checked, spread = 0, 0.0
    for c in range(4):
        predicted = log_conditional(found[:, :-1], c, FEATURES, SPANS, WEIGHTS)
        assert predicted.shape == (3**7, 3, 3)
        for position in range(3):
            t = position + 3
            context = found[:, t - c + 1 : t + 1]
            for seen in product(range(D), repeat=c):
                same = (context == np.array(seen, int)).all(1)
                law = np.array([chances[same & (found[:, t + 1] == y)].sum() for y in range(D)])
                rows = np.exp(predicted[same, position])
                np.testing.assert_allclose(rows, np.tile(law / law.sum(), (len(rows), 1)), 1e-10)
                checked += 1
            spread = max(spread, float(np.ptp(predicted[:, position, 0])))
    assert checked == 3 * (1 + 3 + 9 + 27)
    assert spread > 0.5
    # The law of windows is not stationary, nor is the answer.
    first = log_conditional(found[:, :-1], 1, FEATURES, SPANS, WEIGHTS)
    assert np.abs(first[0, 0] - first[0, 2]).max() > 0.01


def test_conditional_on_a_whole_window_is_the_generator() -> None:
    tokens = _tokens(20, 9)
    generator = log_probabilities(tokens, FEATURES, SPANS, WEIGHTS)
    for c in (4, 5, 100):
        found = log_conditional(tokens, c, FEATURES, SPANS, WEIGHTS)
        np.testing.assert_array_equal(found, generator)
    assert np.abs(log_conditional(tokens, 3, FEATURES, SPANS, WEIGHTS) - generator).max() > 0.1
    # Where the oldest lag says nothing, one token less says all.
    silent = ((0, 2), (1, 2, 3), (0,)), ((0.3, 0.7), (0.4, 0.6, 0.0), (1.0,))
    np.testing.assert_allclose(
        log_conditional(tokens, 3, FEATURES, *silent),
        log_probabilities(tokens, FEATURES, *silent),
        rtol=1e-11,
    )
    # No limit on windows there: nothing is enumerated.
    long = haar_features(3, 50, ratio=1.7, base=40, rng=np.random.default_rng(0))
    blocks = [range(4), range(4, 8), range(8, 12)]
    assert log_conditional(_tokens(2, 31, d=50), 12, long, blocks).shape == (2, 20, 50)


def test_more_context_is_never_worse_and_dropping_blocks_is_no_optimum() -> None:
    found, chances = _all_sequences(7)
    inputs = found[:, :-1]
    truth = log_probabilities(inputs, FEATURES, SPANS, WEIGHTS)

    def distance(predicted: np.ndarray) -> float:
        return float(chances @ kl(truth, predicted).mean(1))

    exact = [distance(log_conditional(inputs, c, FEATURES, SPANS, WEIGHTS)) for c in range(5)]
    assert (np.diff(exact) < -1e-3).all()
    assert exact[-1] == 0
    # The last block alone reads lag 0, as c = 1 does.
    order = [2, 0, 1]
    spans, weights = [SPANS[k] for k in order], [WEIGHTS[k] for k in order]
    dropped = log_probabilities(inputs, FEATURES[order], spans, weights, n_blocks=1)
    assert distance(dropped) > exact[1] + 0.01


def test_two_states_reach_their_mutual_information() -> None:
    """Features log P at w = 1 are the chain P; from a uniform start it forgets as 0.7ᵗ."""
    chain = np.log(TWO_STATE.T)[None], [[0]]
    tokens = np.tile([[0], [1]], 200)
    bigram = log_conditional(tokens, 1, *chain)
    np.testing.assert_allclose(np.exp(bigram), np.tile(TWO_STATE[:, None], (200, 1)), rtol=1e-12)
    unigram = log_conditional(tokens, 0, *chain)
    np.testing.assert_allclose(np.exp(unigram[0, 0]), [0.55, 0.45], rtol=1e-12)
    share = 2 / 3 - (2 / 3 - 0.5) * 0.7 ** np.arange(1, 201)
    np.testing.assert_allclose(np.exp(unigram[0, :, 0]), share, rtol=1e-12)
    apart = np.array([2 / 3, 1 / 3]) @ kl(bigram, unigram)
    assert apart[-1] == pytest.approx(MUTUAL_INFORMATION, rel=1e-13)
    assert abs(apart[0] - MUTUAL_INFORMATION) > 1e-2


def test_contexts_of_no_probability() -> None:
    """Whatever came before, token 0 follows: e^−2000 is 0 in float64, and a 1 is not seen."""
    always = np.array([[[2000.0, 2000.0], [0.0, 0.0]]])
    tokens = np.array([[0, 1, 0, 0], [0, 0, 1, 1]])
    uniform = log_conditional(tokens, 1, always, [[0, 1]])
    undefined = log_conditional(tokens, 1, always, [[0, 1]], unseen="undefined")
    gone = np.isnan(undefined).all(-1)
    assert gone.tolist() == [[False, False, False], [False, True, True]]
    np.testing.assert_array_equal(uniform[gone], np.log(0.5))
    np.testing.assert_array_equal(uniform[~gone], undefined[~gone])
    np.testing.assert_array_equal(uniform[~gone, 0], 0)
    # The generator has no such contexts.
    assert np.isfinite(log_conditional(tokens, 2, always, [[0, 1]], unseen="undefined")).all()
    average = finite_mean(kl(np.log(np.full(2, 0.5)), undefined))
    assert average[1:] == (4, 2)
    assert np.isnan(average.mean)


# --- counts ---------------------------------------------------------------------------------------


def test_counts_of_two_states_are_their_mutual_information() -> None:
    """Thirty pairs in the proportions of the stationary chain: 18, 2, 2 and 8."""
    pairs = np.repeat([[0, 0], [0, 1], [1, 0], [1, 1]], [18, 2, 2, 8], axis=0)
    both = {"sequences": pairs, "d": 2, "start": 1}
    bigram, unigram = (log_ngram(pairs[:, :1], c, **both) for c in (1, 0))
    np.testing.assert_allclose(np.exp(bigram[[0, -1], 0]), TWO_STATE, rtol=1e-14)
    np.testing.assert_allclose(np.exp(unigram[:, 0]), [[2 / 3, 1 / 3]] * 30, rtol=1e-14)
    assert kl(bigram, unigram).mean() == pytest.approx(MUTUAL_INFORMATION, rel=1e-13)
    assert kl(unigram, bigram).mean() != pytest.approx(MUTUAL_INFORMATION, rel=1e-2)


@pytest.mark.parametrize(("d", "c", "start"), [(3, 0, 2), (3, 2, 2), (3, 1, 4), (3, 5, 6)])
def test_counts_are_those_of_a_loop(d: int, c: int, start: int) -> None:
    sequences, tokens = _tokens(40, 9, d=d), _tokens(3, 4, 8, d=d, seed=1)
    counts: dict[tuple, Counter] = {}
    for row in sequences.tolist():
        for t in range(start, 9):
            counts.setdefault(tuple(row[t - c : t]), Counter())[row[t]] += 1
    found = log_ngram(tokens, c, sequences, d=d, start=start, unseen="undefined")
    assert found.shape == (3, 4, 8 - start + 1, d)
    n_unseen = 0
    for index in np.ndindex(*found.shape[:-1]):
        t = index[-1] + start
        seen = counts.get(tuple(tokens[index[:-1]][t - c : t].tolist()))
        n_unseen += seen is None
        if seen is None:
            assert np.isnan(found[index]).all()
        else:
            shares = np.array([seen[y] for y in range(d)]) / seen.total()
            np.testing.assert_allclose(np.exp(found[index]), shares, rtol=1e-13)
    assert (n_unseen > 0) == (c == 5)
    uniform = log_ngram(tokens, c, sequences, d=d, start=start)
    np.testing.assert_array_equal(uniform[np.isnan(found)], -np.log(d))


def test_counts_without_mass_and_of_long_contexts() -> None:
    sequences = np.array([[0, 1, 2], [0, 1, 2]])
    found = log_ngram(np.array([0, 1]), 2, sequences, d=3, start=2)
    np.testing.assert_array_equal(found, [[-np.inf, -np.inf, 0]])
    assert kl(np.log(np.full(3, 1 / 3)), found).tolist() == [np.inf]
    # 50¹² contexts are beyond 64 bits; the oldest token alone tells these two apart.
    past = np.zeros((2, 12), int)
    past[1, 0] = 49
    sequences = np.concatenate([past, [[7], [8]]], 1)
    found = log_ngram(past, 12, sequences, d=50, start=12)
    assert found[:, 0].argmax(-1).tolist() == [7, 8]
    assert found.max(-1).tolist() == [[0], [0]]
    shorter = log_ngram(past, 11, sequences, d=50, start=12)
    np.testing.assert_allclose(np.exp(shorter[:, 0, 7:9]), 0.5)
    nothing = log_ngram(past, 12, sequences[:0], d=50, start=12, unseen="undefined")
    assert np.isnan(nothing).all()


def test_draws_follow_the_predictors() -> None:
    """20,000 sequences drawn by the definition: counts within their error of both predictors."""
    rng = np.random.default_rng(3)
    spans, weights = ((0,), (0, 1)), ((1.0,), (0.4, 0.6))
    features = FEATURES[:2] / 2
    drawn = rng.integers(0, D, (20_000, 5))
    table = np.array(
        [[_law(np.array(pair), features, spans, weights) for pair in product(range(D), repeat=2)]]
    ).reshape(D, D, D)
    for t in range(2, 5):
        chances = table[drawn[:, t - 2], drawn[:, t - 1]]
        drawn[:, t] = (rng.random((len(drawn), 1)) > chances.cumsum(-1)).sum(-1)
    every = np.array(list(product(range(D), repeat=4)))
    generator = log_probabilities(every, features, spans, weights)
    counted = log_ngram(every, 2, drawn, d=D, start=2)
    apart = np.abs(np.exp(counted) - np.exp(generator)).max()
    assert apart < 0.02
    # One token: pooled over the last position alone, as the law changes with it.
    exact = np.exp(log_conditional(every, 1, features, spans, weights)[:, 2])
    last = np.exp(log_ngram(every, 1, drawn[:, 2:], d=D, start=2)[:, 2])
    assert np.abs(exact - last).max() < 0.02
    dropped = log_probabilities(every, features, spans, weights, n_blocks=1)
    assert np.abs(np.exp(dropped) - np.exp(generator)).max() > 0.1


# --- shapes and refusals --------------------------------------------------------------------------

CHAIN = (FEATURES, SPANS, WEIGHTS)
PREDICTORS: dict[str, Callable[..., np.ndarray]] = {
    "logits": lambda f, tokens: f(tokens, *CHAIN, n_blocks=2),
    "log_probabilities": lambda f, tokens: f(tokens, *CHAIN),
    "log_conditional": lambda f, tokens: f(tokens, 2, *CHAIN),
    "log_ngram": lambda f, tokens: f(tokens, 2, _tokens(50, 9), d=D, start=4),
}
OTHERS = {"window", "mean_entropy", "per_lag_features"}


def test_every_public_function_is_covered() -> None:
    public = [
        name
        for name, value in vars(markov_chain).items()
        if inspect.isfunction(value) and value.__module__ == markov_chain.__name__
    ]
    assert {name for name in public if name[0] != "_"} == OTHERS | PREDICTORS.keys()


@pytest.mark.parametrize("name", sorted(PREDICTORS))
def test_shapes_are_as_annotated_and_batches_are_loops(name: str) -> None:
    typed = jaxtyped(typechecker=beartype)(getattr(markov_chain, name))
    tokens = _tokens(2, 4, 7)
    kept = tokens.copy()
    together = PREDICTORS[name](typed, tokens)
    assert together.shape == (2, 4, 4, 3)
    np.testing.assert_array_equal(tokens, kept)
    for index in np.ndindex(2, 4):
        np.testing.assert_allclose(PREDICTORS[name](typed, tokens[index]), together[index], 1e-13)
    # What a position hears of the future is nothing.
    changed = tokens.copy()
    changed[..., -1] = (changed[..., -1] + 1) % D
    again = PREDICTORS[name](typed, changed)
    np.testing.assert_array_equal(again[..., :-1, :], together[..., :-1, :])
    if name != "log_ngram":
        assert np.abs(again[..., -1, :] - together[..., -1, :]).min() > 0
    assert PREDICTORS[name](typed, tokens[..., :4]).shape == (2, 4, 1, 3)
    assert PREDICTORS[name](typed, tokens[:0]).shape == (0, 4, 4, 3)


def _with(tokens: object = None, n_blocks: int | None = None, **changed: object) -> np.ndarray:
    chain = {"features": FEATURES, "spans": SPANS, "weights": WEIGHTS, **changed}
    return logits(_tokens(6) if tokens is None else tokens, **chain, n_blocks=n_blocks)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: _with(np.zeros(6)), "tokens of type float64 and shape (6,); accepted: integers"),
        (lambda: _with([True] * 6), "tokens of type bool"),
        (lambda: _with([0, 1, 2]), "accepted: integers, (..., pos) with at least 4 positions"),
        (lambda: _with([0, 1, 2, 3]), "tokens from 0 to 3; accepted: 0 to 2, as d = 3"),
        (lambda: _with([0, 1, 2, -1]), "tokens from -1 to 2"),
        (lambda: _with(n_blocks=0), "n_blocks is an integer from 1; given 0"),
        (lambda: _with(n_blocks=4), "n_blocks = 4; accepted: up to the 3 of the chain"),
        (lambda: _with(features=FEATURES[0]), "features have shape (3, 3), 0 numbers"),
        (lambda: _with(features=FEATURES[:, :2]), "accepted: (block, d, d)"),
        (lambda: _with(features=FEATURES * np.nan), "27 numbers of them not finite"),
        (lambda: _with(features=FEATURES[:2]), "2 features, spans of [2, 3, 1] lags"),
        (lambda: _with(spans=((0, 2), (1, 2, 2), (0,))), "none empty, each lag once in a span"),
        (lambda: _with(spans=((0, 2), (), (0,))), "none empty"),
        (lambda: _with(spans=(0, 1, 2)), "accepted: a collection of lags for every block"),
        (lambda: _with(spans=((0, -1), (1, 2, 3), (0,))), "a lag is an integer from 0; given -1"),
        (lambda: _with(weights=WEIGHTS[:2]), "weights of [2, 3]; accepted"),
        (lambda: _with(weights=((0.5,), *WEIGHTS[1:])), "weights of [1, 3, 1]; accepted"),
        (lambda: _with(weights=((0.3, 0.6), *WEIGHTS[1:])), "weights [0.3, 0.6]; accepted"),
        (lambda: _with(weights=((1.5, -0.5), *WEIGHTS[1:])), "weights [1.5, -0.5]; accepted"),
        (lambda: _with(weights=((np.nan, 0.5), *WEIGHTS[1:])), "that sum to 1 in a span"),
        (lambda: log_conditional(_tokens(6), -1, *CHAIN), "c is an integer from 0; given -1"),
        (
            lambda: log_conditional(_tokens(6), 1, *CHAIN, unseen="nan"),
            "unseen = 'nan'; accepted: 'uniform', 'undefined'",
        ),
        (
            lambda: log_conditional(_tokens(12), 4, np.eye(50)[None], [range(12)]),
            "d = 50 tokens and a window of w = 12 make d^(w+1) = 1.2e+22 transition probabilities; "
            "accepted: at most 16777216",
        ),
        (lambda: log_ngram(_tokens(6), 3, _tokens(5, 6), d=3, start=2), "accepted: c at most star"),
        (lambda: log_ngram(_tokens(6), 1, _tokens(6), d=3, start=2), "accepted: (n, length)"),
        (lambda: log_ngram(_tokens(6), 1, _tokens(5, 2), d=3, start=2), "at least 3 positions"),
        (lambda: log_ngram(_tokens(6), 1, _tokens(5, 6), d=3, start=0), "start is an integer from"),
        (lambda: mean_entropy(np.zeros((0, 3))), "accepted: (..., d), at least one row"),
        (lambda: window([]), "spans = []; accepted: a collection of lags"),
        (
            lambda: _with(spans=((0, 2), (1, 2, 10**12), (0,))),
            "a window of w = 1000000000001 tokens, and d = 3 of them, make w·d² = 9e+12 numbers",
        ),
    ],
)
def test_refusals(call: Callable[[], object], message: str) -> None:
    with pytest.raises(InputError) as caught:
        call()
    assert message in str(caught.value)
