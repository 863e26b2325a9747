"""The Markov chain of yuksel2026, and what a predictor of restricted context can know of it.

Tokens are 0 … d−1. The first w tokens are uniform; then

    x_{t+1} ~ softmax(Σ_k A*_k Σ_{i∈I(k)} α_i x_{t−i}),    x one-hot, lags i in 0 … w−1.

`features` are the A*_k, (block, d, d), output axis first, strongest first. `spans` are the I(k), a
collection of lags a block; they need be neither contiguous nor disjoint nor of one size, and w is 1
+ the largest lag. `weights` are the α_i, in the order of the spans and summing to 1 in each; None
is 1/|I(k)|. Code that sums over a span has features |I(k)| times smaller.

Predictors take `tokens` (..., pos) from the first of a chain on, and answer at every position that
has w tokens, itself included: at T = pos − w + 1 positions, for the token after it. In training the
last token of a prompt is a target alone, so a predictor is given the tokens before it. Three kinds
of restricted context are told apart: `log_probabilities` with `n_blocks` drops the terms of the
others; `log_conditional` is exact; `log_ngram` counts.

What is out of range, or does not fit in shape, raises `mechicl.errors.InputError`.
"""

from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np
from jaxtyping import Float, Int
from scipy.special import entr, log_softmax

from mechicl.errors import InputError, integer
from mechicl.theory._arguments import quiet, reals
from mechicl.theory.features import Features, square_features

Tokens = Int[np.ndarray, "*batch pos"]
Predictions = Float[np.ndarray, "*batch T d"]
Spans = Sequence[Sequence[int]]
Weights = Sequence[Sequence[float]] | None
Unseen = Literal["uniform", "undefined"]
"""What is said after a context that never occurs: every token alike, or NaN."""

LARGEST_CHAIN = 2**26
"""Numbers that say a chain, d² for every block and for every token of its window: 512 MiB."""

_LARGEST = 2**24
"""Transition probabilities, d^(w+1), that are held at a time: 128 MiB."""


def window(spans: Spans) -> int:
    """Return w = 1 + the largest lag: the tokens that the next one depends on.

    Raises
    ------
    InputError
        Spans that are empty, or lags that are no integers from 0, each once in a span.
    """
    return 1 + max(max(span) for span in _spans(spans))


def logits(
    tokens: Tokens,
    features: Features,
    spans: Spans,
    weights: Weights = None,
    *,
    n_blocks: int | None = None,
) -> Predictions:
    """Logits of the next token, Σ_{k≤n} A*_k Σ_{i∈I(k)} α_i x_{t−i}.

    Parameters
    ----------
    tokens
        (..., pos), pos at least w.
    features, spans, weights
        The chain.
    n_blocks
        n, from 1: how many blocks are heard, the first ones. None is all: the generator itself.

    Returns
    -------
    np.ndarray
        (..., T, d), in logits; T = pos − w + 1 whatever `n_blocks`.

    Raises
    ------
    InputError
        A chain or tokens out of range.

    Notes
    -----
    Source: yuksel2026 (1); the curves of its Figs. 1 and 6 to 9 drop blocks so.
    """
    per_lag = per_lag_features(features, spans, weights, n_blocks)
    known = _tokens(tokens, per_lag.shape[-1], len(per_lag))
    total = np.zeros((*known.shape[:-1], known.shape[-1] - len(per_lag) + 1, per_lag.shape[-1]))
    for heard, seen in zip(per_lag, _lagged(known, len(per_lag), len(per_lag)), strict=True):
        total += heard.T[seen]
    return total


def log_probabilities(
    tokens: Tokens,
    features: Features,
    spans: Spans,
    weights: Weights = None,
    *,
    n_blocks: int | None = None,
) -> Predictions:
    """Logarithms of the probabilities of the next token, the log-softmax of `logits`.

    Parameters
    ----------
    tokens, features, spans, weights, n_blocks
        As in `logits`.

    Returns
    -------
    np.ndarray
        (..., T, d), nat, at most 0.

    Raises
    ------
    InputError
        A chain or tokens out of range.

    Notes
    -----
    Source: yuksel2026 (1).
    """
    return log_softmax(logits(tokens, features, spans, weights, n_blocks=n_blocks), axis=-1)


@quiet
def mean_entropy(log_probabilities: Float[np.ndarray, "*batch d"]) -> float:
    """Mean entropy of predictions, that of −Σ_y p(y) log p(y) over all but the last axis.

    That of the generator is the least cross-entropy that a model can reach on these contexts.

    Parameters
    ----------
    log_probabilities
        (..., d); −inf is a token without mass.

    Returns
    -------
    float
        nat, from 0 to log d. NaN where a number is NaN.

    Raises
    ------
    InputError
        No predictions, or what is not real numbers.
    """
    given = reals("log_probabilities", log_probabilities)
    if given.ndim == 0 or given.size == 0:
        raise InputError(
            f"log_probabilities have shape {given.shape}; accepted: (..., d), at least one row"
        )
    return float(entr(np.exp(given)).sum(-1).mean())


def log_conditional(
    tokens: Tokens,
    c: int,
    features: Features,
    spans: Spans,
    weights: Weights = None,
    *,
    unseen: Unseen = "uniform",
) -> Predictions:
    """Logarithms of P(x_{t+1} | the last c tokens): the best that c tokens allow.

    P(y | u) = Σ_v π_t(v, u) P(y | v, u) / Σ_v π_t(v, u), u the last c tokens, v the w − c before
    them and π_t the law of windows after t steps from a uniform one, propagated exactly. π_t is not
    stationary, so the answer depends on the position. For c ≥ w it is the generator; for c = 0 the
    law of the token at that position, whatever came before.

    Parameters
    ----------
    tokens
        (..., pos), pos at least w, from the start of the chain.
    c
        Tokens that are known, from 0.
    features, spans, weights
        The chain. For c < w, d^(w+1) is at most 2²⁴: d = 50 at w = 3, d = 10 at w = 6.
    unseen
        What is said after a context whose probability is below 2.2e-308: `uniform` is −log d for
        every token, `undefined` is NaN. A softmax excludes no context, but rounding does.

    Returns
    -------
    np.ndarray
        (..., T, d), nat, at most 0.

    Raises
    ------
    InputError
        A chain, c or tokens out of range, or more windows than are accepted.

    Notes
    -----
    Source: yuksel2026 section 2.2, "maximum context length c"; there trained models stand for it.
    """
    per_lag = per_lag_features(features, spans, weights, None)
    w, d = per_lag.shape[:2]
    known = _tokens(tokens, d, w)
    heard = integer("c", c, 0)
    _policy(unseen)
    if heard >= w:
        return log_probabilities(known, features, spans, weights)
    if (w + 1) * np.log2(d) > np.log2(_LARGEST):
        raise InputError(
            f"d = {d} tokens and a window of w = {w} make d^(w+1) = {d ** (w + 1):.2g} transition "
            f"probabilities; accepted: at most {_LARGEST}; take fewer tokens or a shorter window, "
            "c from w on, or log_ngram of many sequences"
        )
    context = np.zeros((*known.shape[:-1], known.shape[-1] - w + 1), int)
    for lag, seen in enumerate(_lagged(known, heard, w)):
        context += seen * d**lag  # the newest token counts fastest
    # From the oldest token on, so that the newest is the last axis before the flattening.
    scores = np.zeros((1, d))
    for lag in reversed(range(w)):
        scores = (scores[:, None] + per_lag[lag].T).reshape(-1, d)
    transition = np.exp(log_softmax(scores, axis=-1))
    law = np.full(d**w, float(d) ** -w)
    found = np.empty((*context.shape, d))
    for position in range(context.shape[-1]):
        joint = law[:, None] * transition
        table = joint.reshape(-1, d**heard, d).sum(0)
        found[..., position, :] = _log_rows(table, unseen)[context[..., position]]
        law = joint.reshape(d, -1).sum(0)
    return found


def log_ngram(
    tokens: Tokens,
    c: int,
    sequences: Int[np.ndarray, "n length"],
    *,
    d: int,
    start: int,
    unseen: Unseen = "uniform",
) -> Predictions:
    """Logarithms of the shares of tokens that follow the last c in given sequences.

    P̂(y | u) = n(u, y) / Σ_y n(u, y), n(u, y) the number of tokens y in `sequences`, from position
    `start` on, that come right after the c tokens u; positions are pooled. c = 0 is the unigram, c
    = 1 the bigram. There is no smoothing: what was not counted after a known u has no mass.

    Parameters
    ----------
    tokens
        (..., pos), pos at least `start`.
    c
        Tokens that are known, from 0, at most `start`.
    sequences
        What is counted, (n, length), length above `start`.
    d
        Number of tokens.
    start
        First position that is predicted, from 1: w for a chain, whose first w tokens are drawn
        otherwise.
    unseen
        What is said after a context that `sequences` have not: `uniform` is −log d for every token,
        `undefined` is NaN.

    Returns
    -------
    np.ndarray
        (..., pos − start + 1, d), nat, at most 0; −inf is a token without mass. Its positions are
        those of `logits` where `start` is w.

    Raises
    ------
    InputError
        Settings, tokens or sequences out of range.
    """
    width, first = integer("d", d, 1), integer("start", start, 1)
    known, counted = _tokens(tokens, width, first), _tokens(sequences, width, first + 1)
    heard = integer("c", c, 0)
    _policy(unseen)
    if heard > first:
        raise InputError(
            f"c = {heard} tokens are known, but the first prediction is at start = {first}; "
            "accepted: c at most start"
        )
    if counted.ndim != 2:
        raise InputError(f"sequences have shape {counted.shape}; accepted: (n, length)")
    asked = (*known.shape[:-1], known.shape[-1] - first + 1)
    following = counted[:, first:].ravel()
    # Numbered anew with every token: d^c may be beyond any integer.
    codes = np.zeros(following.size + int(np.prod(asked)), int)
    past = _lagged(counted[:, :-1], heard, first)
    for seen, mine in zip(past, _lagged(known, heard, first), strict=True):
        both = np.concatenate([seen.ravel(), mine.ravel()])
        codes = np.unique(codes * width + both, return_inverse=True)[1]
    n_contexts = int(codes.max(initial=-1)) + 1
    pairs = codes[: following.size] * width + following
    counts = np.bincount(pairs, minlength=n_contexts * width).reshape(n_contexts, width)
    return _log_rows(counts.astype(float), unseen)[codes[following.size :]].reshape(*asked, width)


@quiet
def _log_rows(table: Float[np.ndarray, "context d"], unseen: Unseen) -> np.ndarray:
    """Return the logarithm of every row over its sum."""
    mass = table.sum(-1, keepdims=True)
    gone = -np.log(table.shape[-1]) if unseen == "uniform" else np.nan
    return np.where(mass >= np.finfo(float).tiny, np.log(table / mass), gone)


def _lagged(tokens: np.ndarray, n_lags: int, w: int) -> Iterator[np.ndarray]:
    """Yield x_{t−i} for i = 0 … n_lags − 1, each at every position t that has w tokens."""
    for lag in range(n_lags):
        yield tokens[..., w - 1 - lag : tokens.shape[-1] - lag]


def per_lag_features(
    features: object, spans: Spans, weights: Weights = None, n_blocks: int | None = None
) -> Float[np.ndarray, "w d d"]:
    """Sum over blocks, Σ_k α_i A*_k, for every lag i: logits are linear in each token of a window.

    Parameters
    ----------
    features, spans, weights, n_blocks
        As in `logits`.

    Returns
    -------
    np.ndarray
        (w, d, d), output axis before input axis; 0 for a lag that no block reads.

    Raises
    ------
    InputError
        A chain out of range.

    Notes
    -----
    Source: yuksel2026 (1).
    """
    matrices, lags = square_features(features), _spans(spans)
    shares = [[1 / len(span)] * len(span) for span in lags]
    if weights is not None:
        shares = [np.ravel(reals("weights", part)).tolist() for part in weights]
    if [len(part) for part in shares] != [len(span) for span in lags] or len(lags) != len(matrices):
        raise InputError(
            f"{len(matrices)} features, spans of {[len(span) for span in lags]} lags and weights "
            f"of {[len(part) for part in shares]}; accepted: a span and its weights for every "
            "feature, a weight for every lag"
        )
    for share in shares:
        if not (min(share) >= 0 and abs(sum(share) - 1) <= 1e-9):
            raise InputError(f"weights {share}; accepted: weights from 0 that sum to 1 in a span")
    used = len(matrices) if n_blocks is None else integer("n_blocks", n_blocks, 1)
    if used > len(matrices):
        raise InputError(f"n_blocks = {used}; accepted: up to the {len(matrices)} of the chain")
    w, d = window(lags), matrices.shape[-1]
    if w * d**2 > LARGEST_CHAIN:
        raise InputError(
            f"a window of w = {w} tokens, and d = {d} of them, make w·d² = {w * d**2:.2g} numbers; "
            f"accepted: at most {LARGEST_CHAIN}"
        )
    total = np.zeros((w, d, d))
    for matrix, span, share in list(zip(matrices, lags, shares, strict=True))[:used]:
        for lag, weight in zip(span, share, strict=True):
            total[lag] += weight * matrix
    return total


def _spans(spans: Spans) -> list[list[int]]:
    try:
        found = [[integer("a lag", lag, 0) for lag in span] for span in spans]
    except TypeError:  # a lag where a span should be
        found = []
    if not found or not all(span and len(set(span)) == len(span) for span in found):
        raise InputError(
            f"spans = {spans!r}; accepted: a collection of lags for every block, none empty, each "
            "lag once in a span"
        )
    return found


def _tokens(tokens: object, d: int, least: int) -> Tokens:
    array = np.asarray(tokens)
    if array.dtype.kind not in "iu" or array.ndim == 0 or array.shape[-1] < least:
        raise InputError(
            f"tokens of type {array.dtype} and shape {array.shape}; accepted: integers, (..., pos) "
            f"with at least {least} positions"
        )
    if array.size and not 0 <= array.min() <= array.max() < d:
        raise InputError(
            f"tokens from {array.min()} to {array.max()}; accepted: 0 to {d - 1}, as d = {d}"
        )
    return array.astype(int, copy=False)


def _policy(unseen: str) -> None:
    if unseen not in ("uniform", "undefined"):
        raise InputError(f"unseen = {unseen!r}; accepted: 'uniform', 'undefined'")
