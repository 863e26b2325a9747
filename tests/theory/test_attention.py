"""Attention in matrix form against loops and predictors, and linear heads made of softmax ones."""

import inspect
from collections.abc import Callable

import numpy as np
import pytest
from beartype import beartype
from jaxtyping import jaxtyped

from mechicl.errors import InputError
from mechicl.theory import attention
from mechicl.theory.attention import (
    centred_linear_attention,
    linear_attention,
    softmax_attention,
    softmax_from_linear,
)
from mechicl.theory.regressors import debiased_gd, kernel_regression, preconditioned_gd

Layer = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
CALLS: dict[str, Callable[..., np.ndarray]] = {
    "softmax_attention": softmax_attention,
    "linear_attention": lambda *layer: linear_attention(*layer, trained_length=5),
    "centred_linear_attention": centred_linear_attention,
}
every_layer = pytest.mark.parametrize("name", sorted(CALLS))


def _layer(*batch: int, seed: int = 0, length: int = 7, heads: int = 3, width: int = 4) -> Layer:
    """Tokens with a mean, and heads whose circuits are neither symmetric nor alike."""
    rng = np.random.default_rng(seed)
    context = rng.standard_normal((*batch, length, width)) + 0.5
    query = rng.standard_normal((*batch, width))
    kq, ov = rng.standard_normal((2, heads, width, width)) / width
    return context, query, kq, ov


# --- matrix form ----------------------------------------------------------------------------------


def _by_loop(
    layer: Layer, weigh: Callable[[np.ndarray], np.ndarray], *, columns: int | None = None
) -> np.ndarray:
    """Σ_h OV_h Z weigh(Zᵀ KQ_h z_q) with tokens as columns, as the paper writes it."""
    context, query, kq, ov = layer
    tokens = context.T if columns is None else np.column_stack([context.T, query])
    total = np.zeros(len(query))
    for h in range(len(kq)):
        scores = np.array([token @ kq[h] @ query for token in tokens.T])
        total += ov[h] @ sum(w * token for w, token in zip(weigh(scores), tokens.T, strict=True))
    return total


def _softmax(scores: np.ndarray) -> np.ndarray:
    return np.exp(scores) / np.exp(scores).sum()


def test_layers_are_their_sums() -> None:
    layer = _layer()
    for found, weigh in (
        (softmax_attention(*layer), _softmax),
        (linear_attention(*layer, trained_length=7), lambda s: s / 7),
        (linear_attention(*layer, trained_length=40), lambda s: s / 40),
        (centred_linear_attention(*layer), lambda s: (s - s.mean()) / 7),
    ):
        np.testing.assert_allclose(found, _by_loop(layer, weigh), rtol=1e-12)
        # With the query among the keys, as (5.1) is printed, it is something else.
        assert np.abs(found - _by_loop(layer, weigh, columns=1)).max() > 1e-3
        context, query, kq, ov = layer
        turned = context, query, np.swapaxes(kq, -1, -2), ov
        assert np.abs(found - _by_loop(turned, weigh)).max() > 1e-2
        turned = context, query, kq, np.swapaxes(ov, -1, -2)
        assert np.abs(found - _by_loop(turned, weigh)).max() > 1e-2


def test_centring_is_the_correction() -> None:
    """At L₀ = L: linear attention less Σ_h OV_h z̄ z̄ᵀ KQ_h z_q (5.2), and none at mean 0."""
    context, query, kq, ov = _layer()
    mean = context.mean(0)
    correction = sum(o @ mean * (mean @ k @ query) for k, o in zip(kq, ov, strict=True))
    linear = linear_attention(context, query, kq, ov, trained_length=7)
    found = centred_linear_attention(context, query, kq, ov)
    np.testing.assert_allclose(found, linear - correction, rtol=1e-12)
    assert np.abs(correction).max() > 0.1
    flat = context - mean
    np.testing.assert_allclose(
        centred_linear_attention(flat, query, kq, ov),
        linear_attention(flat, query, kq, ov, trained_length=7),
        atol=1e-14,
    )
    np.testing.assert_array_equal(centred_linear_attention(context[:1], query, kq, ov), 0)


def _embedded(seed: int = 1) -> tuple[tuple[np.ndarray, ...], tuple[np.ndarray, np.ndarray]]:
    """A prompt of regression, and its embedding (2.1)."""
    rng = np.random.default_rng(seed)
    x, y, x_query = rng.standard_normal((9, 3)) + 0.3, rng.standard_normal(9), np.ones(3)
    return (x, y, x_query), (np.column_stack([x, y]), np.append(x_query, 0))


def test_last_entry_is_the_predictor() -> None:
    """Circuits of the form (3.1) make kernel regressors of softmax and gradient steps of linear."""
    prompt, tokens = _embedded()
    omega, mu = np.array([0.4, -0.3]), np.array([1.5, -2.0])
    identity = np.diag([1.0, 1, 1, 0])
    kq = omega[:, None, None] * identity
    ov = mu[:, None, None] * np.diag([0.0, 0, 0, 1])
    # What the read-out does not see changes nothing: the * of (2.4).
    kq[:, :, 3] += 5.0
    ov[:, :3] += 7.0
    found = softmax_attention(*tokens, kq, ov)[-1]
    expected = kernel_regression(*prompt, omega=omega, mu=mu)
    assert found == pytest.approx(float(expected), rel=1e-12)

    step = np.array([[0.8, 0.3, -0.1], [-0.2, 0.6, 0.4], [0.1, 0.5, 1.1]])
    kq = np.zeros((1, 4, 4))
    kq[0, :3, :3] = step
    ov = np.diag([0.0, 0, 0, 1])[None]
    for debiased, found in (
        (False, linear_attention(*tokens, kq, ov, trained_length=9)),
        (True, centred_linear_attention(*tokens, kq, ov)),
    ):
        expected = preconditioned_gd(*prompt, preconditioner=step, debiased=debiased)
        assert found[-1] == pytest.approx(float(expected), rel=1e-12)
    # Trained at 40 and shown 9, it takes 9/40 of the step.
    found = linear_attention(*tokens, kq, ov, trained_length=40)[-1]
    plain = float(preconditioned_gd(*prompt, preconditioner=step, debiased=False))
    assert found == pytest.approx(9 / 40 * plain, rel=1e-12)


def test_softmax_is_stable() -> None:
    context, query, kq, ov = _layer()
    found = softmax_attention(context, query, 1e6 * kq, ov)
    attended = [context[(context @ k @ query).argmax()] for k in kq]
    expected = sum(o @ token for o, token in zip(ov, attended, strict=True))
    np.testing.assert_allclose(found, expected, rtol=1e-12)


# --- softmax heads that imitate linear ones -------------------------------------------------------


def _imitation_error(gamma: float, target: np.ndarray, layer: Layer) -> float:
    context, query, kq, ov = layer
    found = softmax_attention(context, query, *softmax_from_linear(kq, ov, gamma=gamma))
    return float(np.sqrt(((found - target) ** 2).mean()))


def test_imitation_error_falls_as_the_square() -> None:
    layer = _layer(50, length=12)
    target = centred_linear_attention(*layer)
    gammas = np.array([0.1, 0.05, 0.025, 0.0125, 0.00625])
    errors = np.array([_imitation_error(g, target, layer) for g in gammas])
    slopes = np.diff(np.log(errors)) / np.diff(np.log(gammas))
    np.testing.assert_allclose(slopes, 2, atol=0.05)
    assert errors[-1] < 1e-3 * np.abs(target).max()
    # The negative control: without the correction the difference stays.
    linear = linear_attention(*layer, trained_length=12)
    left = np.array([_imitation_error(g, linear, layer) for g in gammas])
    assert (left > 0.1).all()
    np.testing.assert_allclose(left[-2:], np.sqrt(((linear - target) ** 2).mean()), rtol=1e-2)


def test_one_head_of_a_pair_does_not_do() -> None:
    """Without its mirror image a head is 1/γ off, and with one of the same sign too."""
    layer = _layer(20)
    context, query, kq, ov = layer
    target = centred_linear_attention(*layer)
    errors = []
    for gamma in (0.02, 0.01):
        kq2, ov2 = softmax_from_linear(kq, ov, gamma=gamma)
        alone = softmax_attention(context, query, kq2[::2], ov2[::2])
        errors.append(np.abs(alone - target).max())
    assert errors[1] > 1.8 * errors[0] > 1


def test_construction_is_as_printed() -> None:
    _, _, kq, ov = _layer()
    kq2, ov2 = softmax_from_linear(kq, ov, gamma=0.2)
    assert kq2.shape == ov2.shape == (6, 4, 4)
    for h in range(3):
        np.testing.assert_allclose(kq2[2 * h], 0.2 * kq[h])
        np.testing.assert_allclose(kq2[2 * h + 1], -0.2 * kq[h])
        np.testing.assert_allclose(ov2[2 * h], ov[h] / 0.4)
        np.testing.assert_allclose(ov2[2 * h + 1], -ov[h] / 0.4)
    stacked = softmax_from_linear(np.stack([kq, ov]), np.stack([ov, kq]), gamma=0.2)
    np.testing.assert_array_equal(stacked[0][0], kq2)
    np.testing.assert_array_equal(stacked[1][0], ov2)


def test_construction_of_one_step_is_the_pair_of_the_theory() -> None:
    """A linear head that takes a step η becomes the pair (±γ, ±η/2γ), near debiased GD."""
    prompt, tokens = _embedded()
    kq = 0.8 * np.diag([1.0, 1, 1, 0])[None]
    ov = np.diag([0.0, 0, 0, 1])[None]
    found = softmax_attention(*tokens, *softmax_from_linear(kq, ov, gamma=1e-3))[-1]
    expected = debiased_gd(*prompt, learning_rate=0.8)
    assert found == pytest.approx(float(expected), abs=1e-5)
    pair = kernel_regression(
        *prompt, omega=0.8e-3 * np.array([1, -1]), mu=500 * np.array([1.0, -1])
    )
    assert found == pytest.approx(float(pair), rel=1e-9)


# --- shapes, undefined, refusals ------------------------------------------------------------------


@every_layer
def test_batches_are_loops(name: str) -> None:
    context, query, kq, ov = _layer(2, 3)
    together = CALLS[name](context, query, kq, ov)
    assert together.shape == (2, 3, 4)
    for index in np.ndindex(2, 3):
        alone = CALLS[name](context[index], query[index], kq, ov)
        np.testing.assert_allclose(together[index], alone, rtol=1e-11)
    # One model a prompt, and every model on every prompt.
    models = np.stack([kq, -kq, 2 * kq])
    found = CALLS[name](context, query, models, ov)
    np.testing.assert_allclose(found[1, 2], CALLS[name](context[1, 2], query[1, 2], 2 * kq, ov))
    assert CALLS[name](context, query, models[:, None, None], ov).shape == (3, 2, 3, 4)


@every_layer
def test_undefined_is_nan_and_leaves_others_alone(name: str) -> None:
    context, query, kq, ov = _layer(4)
    models = np.stack([kq] * 4)
    expected = CALLS[name](context, query, models, ov)
    context[1, 2, 0], query[2, 1], models[3, 0, 0, 0] = np.inf, np.nan, -np.inf
    found = CALLS[name](context, query, models, ov)
    assert np.isnan(found).all(-1).tolist() == [False, True, True, True]
    np.testing.assert_array_equal(found[0], expected[0])
    assert np.isnan(CALLS[name](context[0], query[0], kq, ov * np.nan)).all()


def test_shapes_are_as_annotated() -> None:
    typed = {
        name: jaxtyped(typechecker=beartype)(value)
        for name, value in vars(attention).items()
        if inspect.isfunction(value)
        and value.__module__ == attention.__name__
        and not name.startswith("_")
    }
    assert sorted(typed) == sorted([*CALLS, "softmax_from_linear"])
    layer = _layer(2, 5)
    for name in CALLS:
        extra = {"trained_length": 3} if name == "linear_attention" else {}
        assert typed[name](*layer, **extra).shape == (2, 5, 4)
    typed["softmax_from_linear"](*layer[2:], gamma=1)


@every_layer
@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((7, 4), (3,), (2, 4, 4), (2, 4, 4)), "query (3,); accepted: (..., L, D)"),
        (((7, 3), (3,), (2, 4, 4), (2, 4, 4)), "D = 4, as the heads have it"),
        (((4,), (4,), (2, 4, 4), (2, 4, 4)), "context has shape (4,)"),
        (((0, 4), (4,), (2, 4, 4), (2, 4, 4)), "context has shape (0, 4)"),
        (((7, 4), (), (2, 4, 4), (2, 4, 4)), "query ()"),
        (((7, 4), (4,), (4, 4), (4, 4)), "kq has shape (4, 4), ov (4, 4)"),
        (((7, 4), (4,), (2, 4, 4), (3, 4, 4)), "ov (3, 4, 4); accepted: (..., H, D, D)"),
        (((7, 4), (4,), (2, 3, 4), (2, 3, 4)), "kq has shape (2, 3, 4)"),
        (((7, 4), (4,), (0, 4, 4), (0, 4, 4)), "H and D at least 1"),
        (((2, 7, 4), (3, 4), (2, 4, 4), (2, 4, 4)), "accepted: leading axes that broadcast"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(
    name: str, shapes: tuple[tuple[int, ...], ...], message: str
) -> None:
    with pytest.raises(InputError) as caught:
        CALLS[name](*(np.ones(shape) for shape in shapes))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda layer: linear_attention(*layer, trained_length=0), "trained_length = 0; accepted"),
        (lambda layer: linear_attention(*layer, trained_length=2.5), "trained_length = 2.5"),
        (lambda layer: softmax_from_linear(*layer[2:], gamma=0), "gamma = 0; accepted: a finite"),
        (lambda layer: softmax_from_linear(*layer[2:], gamma=-1), "gamma = -1"),
        (lambda layer: softmax_from_linear(layer[2], layer[3][:2], gamma=1), "ov (2, 4, 4)"),
        (lambda layer: softmax_attention(layer[0] * 1j, *layer[1:]), "accepted: real numbers"),
    ],
)
def test_constants_out_of_range_are_refused(call: Callable[[Layer], object], message: str) -> None:
    with pytest.raises(InputError) as caught:
        call(_layer())
    assert message in str(caught.value)
