"""Divergences against closed forms, chain rules and loops; averages that hide nothing."""

import inspect
from collections.abc import Callable
from math import inf, log, nan

import numpy as np
import pytest
from beartype import beartype
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import jaxtyped
from scipy.special import log_softmax

from mechicl.errors import InputError
from mechicl.theory import divergence
from mechicl.theory.divergence import finite_mean, kl, kl_of_probabilities

fixed = settings(deadline=None, derandomize=True, max_examples=50)
logits = st.integers(2, 6).flatmap(
    lambda d: st.tuples(
        *(st.lists(st.floats(-30, 30), min_size=d, max_size=d).map(np.array) for _ in range(2))
    )
)


def _both(p: object, q: object) -> np.ndarray:
    """Return the divergence by probabilities, held equal to that by logarithms."""
    with np.errstate(divide="ignore"):
        found = kl(np.log(p), np.log(q))
    np.testing.assert_allclose(found, kl_of_probabilities(p, q), rtol=1e-12, atol=1e-15)
    return found


def test_closed_forms() -> None:
    fair, biased = [0.5, 0.5], [0.9, 0.1]
    assert _both(biased, fair) == pytest.approx(log(2) + 0.9 * log(0.9) + 0.1 * log(0.1), rel=1e-14)
    assert _both(fair, biased) == pytest.approx(-log(2 * (0.9 * 0.1) ** 0.5), rel=1e-14)
    # The direction is told apart.
    assert abs(_both(fair, biased) - _both(biased, fair)) > 0.1
    # A certain token costs its surprise; a law against the uniform one, what it lacks of log d.
    assert _both([0, 1, 0], [0.2, 0.3, 0.5]) == pytest.approx(-log(0.3), rel=1e-14)
    p = np.array([0.1, 0.2, 0.3, 0.4])
    assert _both(p, np.full(4, 0.25)) == pytest.approx(log(4) + (p * np.log(p)).sum(), rel=1e-13)


def test_transition_against_stationary_law() -> None:
    """KL(bigram ‖ unigram) of [[.9, .1], [.2, .8]] at its stationary law, (2/3, 1/3)."""
    rows, law = np.array([[0.9, 0.1], [0.2, 0.8]]), np.array([2 / 3, 1 / 3])
    np.testing.assert_allclose(law @ rows, law, rtol=1e-15)
    assert law @ _both(rows, law) == pytest.approx(0.25299137818778483, rel=1e-14)
    assert law @ _both(law, rows) != pytest.approx(0.25299137818778483, rel=1e-2)


@given(logits)
@fixed
def test_against_a_loop_and_its_invariances(pair: tuple[np.ndarray, np.ndarray]) -> None:
    log_p, log_q = (log_softmax(part) for part in pair)
    found = kl(log_p, log_q)
    loop = sum(np.exp(a) * (a - b) for a, b in zip(log_p, log_q, strict=True))
    assert found == pytest.approx(loop, rel=1e-12, abs=1e-13)
    assert found >= 0
    assert kl(log_p[::-1], log_q[::-1]) == pytest.approx(found, rel=1e-12, abs=1e-14)
    assert kl(log_p, log_p) == 0
    # Independent tokens add.
    twice = kl(np.add.outer(log_p, log_p).ravel(), np.add.outer(log_q, log_q).ravel())
    assert twice == pytest.approx(2 * found, rel=1e-9, abs=1e-13)


def test_no_mass() -> None:
    assert _both([0.0, 1.0], [0.0, 1.0]) == 0
    assert _both([0.0, 1.0], [0.5, 0.5]) == pytest.approx(log(2))
    assert _both([0.5, 0.5], [0.0, 1.0]) == inf
    batch = _both([[0.5, 0.5], [0.0, 1.0], [1.0, 0.0]], [0.0, 1.0])
    assert batch.tolist() == [inf, 0, inf]
    # Mass that exp rounds to 0 is mass.
    assert kl(np.array([-800.0, 0.0]), np.array([-inf, 0.0])) == inf
    assert kl(np.array([-800.0, 0.0]), np.array([-900.0, 0.0])) == 0


def test_nan_stays_in_its_row() -> None:
    p = np.array([[0.5, 0.5], [nan, 0.5], [0.0, 1.0], [0.5, 0.5]])
    q = np.array([[0.5, 0.5], [0.0, 1.0], [nan, 1.0], [0.0, 1.0]])  # one where p has no mass
    found = _both(p, q)
    assert np.isnan(found).tolist() == [False, True, True, False]
    assert found[[0, 3]].tolist() == [0, inf]


def test_rounding_is_no_negative_divergence() -> None:
    """Laws a few bits apart: the sum itself is below 0 for many, the divergence for none."""
    rng = np.random.default_rng(0)
    log_p = log_softmax(3 * rng.standard_normal((2000, 50)), -1)
    log_q = log_softmax(log_p + 1e-16 * rng.standard_normal(log_p.shape), -1)
    raw = (np.exp(log_p) * (log_p - log_q)).sum(-1)
    assert raw.min() < 0
    found = kl(log_p, log_q)
    assert found.min() == 0
    np.testing.assert_array_equal(found, np.maximum(raw, 0))
    # What is not normalised is not clipped away, whichever way it is off.
    for shift in (1e-9, -1e-9):
        with pytest.raises(InputError, match="a row that sums to"):
            kl(log_p, log_p + shift)
        with pytest.raises(InputError, match="log_p has a row that sums to"):
            kl(log_p + shift, log_p)


def test_single_precision_is_judged_by_its_own_rounding() -> None:
    rng = np.random.default_rng(1)
    log_p = log_softmax(5 * rng.standard_normal((500, 50)), -1)
    log_q = log_softmax(5 * rng.standard_normal((500, 50)), -1)
    exact = kl(log_p, log_q)
    found = kl(log_p.astype(np.float32), log_q.astype(np.float32))
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, exact, rtol=1e-5)
    with pytest.raises(InputError, match="normalise it, in float64"):
        kl(log_p.astype(np.float32).astype(float), log_q)
    with pytest.raises(InputError, match="a row that sums to"):
        kl(log_p, (log_q + 1e-3).astype(np.float32))


def test_finite_mean() -> None:
    values = np.array([[1.0, inf, 3.0], [nan, inf, inf]])
    assert finite_mean(values) == (2, 3, 1)
    found = finite_mean(values, 1)
    assert found.mean[0] == 2
    assert np.isnan(found.mean[1])
    assert found.n_infinite.tolist() == [1, 2]
    assert found.n_undefined.tolist() == [0, 1]
    assert finite_mean(values, (0, 1)) == finite_mean(values)
    # Unlike a plain mean, which is infinite, and one that takes them for 0.
    assert finite_mean(values[0]).mean == 2 != np.nansum([1, 0, 3]) / 3
    empty = finite_mean(np.zeros((0, 2)), 0)
    assert np.isnan(empty.mean).all()
    assert empty.n_infinite.tolist() == [0, 0]


@pytest.mark.parametrize("function", [kl, kl_of_probabilities])
def test_shapes_and_batches(function: Callable[..., np.ndarray]) -> None:
    typed = jaxtyped(typechecker=beartype)(function)
    rng = np.random.default_rng(0)
    p, q = rng.dirichlet(np.ones(4), (3, 1)), rng.dirichlet(np.ones(4), 2)
    if function is kl:
        p, q = np.log(p), np.log(q)
    kept = p.copy(), q.copy()
    found = typed(p, q)
    assert found.shape == (3, 2)
    for i, j in np.ndindex(3, 2):
        assert typed(p[i, 0], q[j]) == pytest.approx(found[i, j], rel=1e-13)
    np.testing.assert_array_equal(p, kept[0])
    np.testing.assert_array_equal(q, kept[1])
    assert jaxtyped(typechecker=beartype)(finite_mean)(found, 0).mean.shape == (2,)


def test_every_public_function_is_covered() -> None:
    public = [
        name
        for name, value in vars(divergence).items()
        if inspect.isfunction(value) and value.__module__ == divergence.__name__
    ]
    assert {n for n in public if n[0] != "_"} == {"kl", "kl_of_probabilities", "finite_mean"}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: kl_of_probabilities([1.5, -0.5], [0.5, 0.5]), "p reaches down to -0.5"),
        (lambda: kl_of_probabilities([0.5, 0.4], [0.5, 0.5]), "p has a row that sums to 0.9"),
        (lambda: kl_of_probabilities([0.5, 0.5], [inf, 0.5]), "q has a row that sums to inf"),
        (lambda: kl([-inf, -inf], [0.0, -inf]), "log_p has a row that sums to 0"),
        (lambda: kl([0.0, -inf], [0.0, -inf, -inf]), "accepted: one number of tokens (last axis)"),
        (lambda: kl(0.0, [0.0]), "log_p has shape (); accepted: (..., d)"),
        (lambda: kl("p", [0.0]), "log_p = 'p'; accepted: real numbers"),
        (lambda: kl(np.zeros((2, 1)), np.zeros((3, 1))), "accepted: leading axes that broadcast"),
        (lambda: finite_mean(np.zeros(3), 1), "axis = 1 for values of shape (3,); accepted: axes"),
        (lambda: finite_mean(np.zeros((3, 2)), (0, 0)), "axis = (0, 0) for values of shape"),
        (lambda: finite_mean("x"), "values = 'x'; accepted: real numbers"),
    ],
)
def test_refusals(call: Callable[[], object], message: str) -> None:
    with pytest.raises(InputError) as caught:
        call()
    assert message in str(caught.value)
