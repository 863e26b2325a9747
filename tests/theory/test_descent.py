"""Descent, flow and Taylor terms on the approximate loss against series and closed forms."""

import inspect
from collections.abc import Callable
from math import factorial

import numpy as np
import pytest
from beartype import beartype
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import jaxtyped

from mechicl.errors import InputError
from mechicl.theory import descent
from mechicl.theory.descent import (
    descend,
    gradient_flow,
    gradient_terms,
    loss_terms,
    optimality_ratio,
)
from mechicl.theory.linear_regression import (
    approximate_loss,
    approximate_loss_gradient,
    manifold_ov,
    optimal_learning_rate,
    single_head_optimum,
)

PUBLISHED = {"d": 5, "n_context": 40, "noise_variance": 0.1}
OTHER = {"d": 8, "n_context": 24, "noise_variance": 0.7}
OMEGA3, MU3 = np.array([0.3, -0.2, 0.1]), np.array([1.5, -1.0, 0.5])
OPPOSITE = np.array([0.02, -0.01]), np.array([0.01, -0.015])
SAME = np.array([0.02, 0.01]), np.array([0.01, 0.015])
MISMATCHED = np.array([0.02, -0.01]), np.array([-0.01, 0.015])

models = st.integers(1, 5).flatmap(
    lambda n: st.tuples(
        *(
            st.lists(st.floats(-bound, bound), min_size=n, max_size=n).map(np.array)
            for bound in (0.7, 3.0)
        )
    )
)
fixed = settings(deadline=None, derandomize=True, max_examples=50)


# --- Taylor terms ---------------------------------------------------------------------------------


def _series(
    omega: np.ndarray, mu: np.ndarray, start: int, *, d: int, n_context: int, noise_variance: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return the high-order terms of the two updates, times 2, summed from k = `start`."""
    c = (1 + noise_variance) / n_context
    in_omega, in_mu = np.zeros_like(omega), np.zeros_like(mu)
    for k in range(start, 60):
        weight = 2 * c * d**k * float(mu @ omega**k)
        in_omega += weight / factorial(k - 1) * mu * omega ** (k - 1)
        in_mu += weight / factorial(k) * omega**k
    return in_omega, in_mu


@given(models)
@fixed
def test_gradient_terms_are_their_series(model: tuple[np.ndarray, np.ndarray]) -> None:
    omega, mu = model
    terms = gradient_terms(omega, mu, **OTHER)
    assert list(terms) == ["sign_matching", "zero_sum", "high_order"]
    c = 1.7 / 24
    pull = -2 * (1 - (1 + c * 8) * (mu @ omega))
    np.testing.assert_allclose(terms["sign_matching"], (pull * mu, pull * omega), atol=1e-12)
    np.testing.assert_array_equal(terms["zero_sum"][0], 0)
    np.testing.assert_allclose(terms["zero_sum"][1], 2 * c * mu.sum(), atol=1e-12)
    np.testing.assert_allclose(
        terms["high_order"], _series(omega, mu, 2, **OTHER), rtol=1e-9, atol=1e-12
    )


@given(models)
@fixed
def test_gradient_terms_sum_to_the_gradient(model: tuple[np.ndarray, np.ndarray]) -> None:
    terms = gradient_terms(*model, **OTHER)
    gradient = approximate_loss_gradient(*model, **OTHER)
    for part in (0, 1):
        total = sum(term[part] for term in terms.values())
        np.testing.assert_allclose(total, gradient[part], rtol=1e-10, atol=1e-11)


def test_series_from_another_order_is_not_the_gradient() -> None:
    terms = gradient_terms(OMEGA3, MU3, **PUBLISHED)
    low = [terms["sign_matching"][i] + terms["zero_sum"][i] for i in (0, 1)]
    gradient = approximate_loss_gradient(OMEGA3, MU3, **PUBLISHED)
    for start, right in ((2, True), (1, False), (3, False)):
        high = _series(OMEGA3, MU3, start, **PUBLISHED)
        apart = max(np.abs(low[i] + high[i] - gradient[i]).max() for i in (0, 1))
        assert (apart < 1e-14) == right
        assert right or apart > 1e-3


def test_high_order_terms_of_small_heads_keep_their_digits() -> None:
    """E − 1 − dωω would be rounding alone: the first term of the series is 10⁻¹⁶ of 1."""
    scale = 1e-8
    found = gradient_terms(scale * OMEGA3, MU3, **PUBLISHED)["high_order"]
    np.testing.assert_allclose(found, _series(scale * OMEGA3, MU3, 2, **PUBLISHED), rtol=1e-12)
    assert (np.abs(found) > 0).all()
    # Either side of the switch between the two forms.
    edge = np.sqrt(0.5 / 5) * np.array([1 - 1e-9, 1 + 1e-9])
    for omega in edge:
        found = gradient_terms(omega, 1.0, **PUBLISHED)["high_order"]
        series = _series(np.array([omega]), np.array([1.0]), 2, **PUBLISHED)
        np.testing.assert_allclose(found, series, rtol=1e-13)


@given(models)
@fixed
def test_loss_terms_are_their_series_and_sum_to_the_loss(
    model: tuple[np.ndarray, np.ndarray],
) -> None:
    omega, mu = model
    terms = loss_terms(omega, mu, **OTHER)
    assert list(terms) == ["fit", "zero_sum", "odd", "even"]
    c = 1.7 / 24
    orders = [c * 8.0**k / factorial(k) * (mu @ omega**k) ** 2 for k in range(60)]
    assert terms["fit"] == pytest.approx(0.7 + (1 - mu @ omega) ** 2, rel=1e-12)
    assert terms["zero_sum"] == pytest.approx(orders[0], abs=1e-12)
    assert terms["odd"] == pytest.approx(sum(orders[1::2]), rel=1e-9, abs=1e-12)
    assert terms["even"] == pytest.approx(sum(orders[2::2]), rel=1e-9, abs=1e-12)
    assert sum(terms.values()) == pytest.approx(
        float(approximate_loss(omega, mu, **OTHER)), rel=1e-11
    )


def test_loss_series_from_another_order_is_not_the_loss() -> None:
    loss = float(approximate_loss(OMEGA3, MU3, **PUBLISHED))
    terms = loss_terms(OMEGA3, MU3, **PUBLISHED)
    first = 1.1 / 40 * 5 * (MU3 @ OMEGA3) ** 2
    assert sum(terms.values()) == pytest.approx(loss, rel=1e-14)
    assert sum(terms.values()) - first < 0.9 * loss


def test_terms_on_the_manifold() -> None:
    gamma = 0.3
    ov = float(manifold_ov(gamma, **PUBLISHED))
    omega, mu = gamma * np.array([1, 1, -1]), ov * np.array([0.3, 0.7, -1])
    terms = loss_terms(omega, mu, **PUBLISHED)
    assert terms["zero_sum"] == pytest.approx(0, abs=1e-15)
    assert terms["even"] == pytest.approx(0, abs=1e-15)
    odd = 1.1 / 40 * np.sinh(5 * gamma**2) * (2 * ov) ** 2
    assert terms["odd"] == pytest.approx(odd, rel=1e-12)
    # (4.3) is a condition at γ → 0; off it, high orders hold the balance.
    assert optimality_ratio(omega, mu, **PUBLISHED) == pytest.approx(1, abs=0.01)
    pull = gradient_terms(omega, mu, **PUBLISHED)
    total = pull["sign_matching"][1] + pull["high_order"][1]
    np.testing.assert_allclose(total, 0, atol=1e-12)
    assert np.abs(pull["high_order"][1]).max() > 1e-3
    uneven = loss_terms(omega * [1, 1.5, 1], mu, **PUBLISHED)
    assert uneven["even"] > 1e-4


def test_ratio_golden() -> None:
    assert optimality_ratio(OMEGA3, MU3, **PUBLISHED) == pytest.approx(0.7 * 1.1375, rel=1e-14)
    single = single_head_optimum(**PUBLISHED)
    assert optimality_ratio(*single, **PUBLISHED) == pytest.approx(0.828017, abs=5e-7)
    for gamma in (1e-1, 1e-2, 1e-3):
        pair = gamma * np.array([1, -1]), manifold_ov(gamma, **PUBLISHED) * np.array([1, -1])
        assert abs(optimality_ratio(*pair, **PUBLISHED) - 1) < 25 * gamma**4
    rate = optimal_learning_rate(**OTHER)
    assert optimality_ratio(0.1, rate / 0.1, **OTHER) == pytest.approx(1, rel=1e-14)
    assert optimality_ratio([0.1, 0.1], [2.0, -2.0], **OTHER) == 0


# --- descent --------------------------------------------------------------------------------------


def test_steps_are_those_of_the_gradient() -> None:
    omega, mu = OMEGA3, MU3
    steps, path_omega, path_mu = descend(omega, mu, learning_rate=0.03, n_steps=7, every=3, **OTHER)
    assert steps.tolist() == [0, 3, 6, 7]
    row = 0
    for step in range(8):
        if step in steps:
            np.testing.assert_allclose(path_omega[row], omega, rtol=1e-12)
            np.testing.assert_allclose(path_mu[row], mu, rtol=1e-12)
            row += 1
        grad_omega, grad_mu = approximate_loss_gradient(omega, mu, **OTHER)
        omega, mu = omega - 0.03 * grad_omega, mu - 0.03 * grad_mu
    assert row == 4
    assert np.abs(path_omega[-1] - OMEGA3).min() > 1e-3
    np.testing.assert_array_equal(OMEGA3, [0.3, -0.2, 0.1])


def test_chosen_steps() -> None:
    def steps(n_steps: int, every: int) -> list[int]:
        return descend(*SAME, learning_rate=0.1, n_steps=n_steps, every=every, **OTHER)[0].tolist()

    assert steps(0, 5) == [0]
    assert steps(4, 2) == [0, 2, 4]
    assert steps(3, 10) == [0, 3]


def test_heads_of_both_signs_reach_the_manifold() -> None:
    """Values of other code, from a start that it does not state: late ones forget the start."""
    steps, omega, mu = descend(
        *OPPOSITE, learning_rate=0.01, n_steps=10_000, every=100, **PUBLISHED
    )
    ratio = optimality_ratio(omega, mu, **PUBLISHED)
    assert ratio[steps == 1_000] == pytest.approx(0.954, abs=1e-3)
    assert ratio[-1] == pytest.approx(0.9918, abs=1e-4)
    largest = np.abs(omega).max(-1)
    assert largest.max() == pytest.approx(0.56, abs=0.005)
    assert steps[largest.argmax()] == 300
    np.testing.assert_allclose(omega[-1], -omega[-1, ::-1], atol=1e-6)
    assert abs(mu[-1].sum()) < 1e-6
    loss = approximate_loss(omega, mu, **PUBLISHED)
    assert (np.diff(loss) < 0).all()
    # |ω| rises and falls, Σ₊μ rises all the way.
    assert (np.diff(largest[steps >= 300]) < 0).all()
    assert (np.diff(mu[:, 0]) > 0).all()


@pytest.mark.slow
def test_heads_of_both_signs_go_on_along_the_valley() -> None:
    steps, omega, mu = descend(
        *OPPOSITE, learning_rate=0.01, n_steps=200_000, every=50_000, **PUBLISHED
    )
    assert optimality_ratio(omega, mu, **PUBLISHED)[-1] == pytest.approx(0.99895, abs=1e-5)
    assert omega[steps == 50_000, 0] == pytest.approx(0.2057, abs=1e-4)
    assert omega[-1, 0] == pytest.approx(0.1626, abs=1e-4)


@pytest.mark.parametrize("start", [SAME, MISMATCHED], ids=["same sign", "mismatched"])
def test_heads_of_one_sign_are_absorbed(start: tuple[np.ndarray, np.ndarray]) -> None:
    """The negative control of (4.3): without both signs it does not come to hold."""
    _, omega, mu = descend(*start, learning_rate=0.01, n_steps=6_000, every=3_000, **PUBLISHED)
    best = single_head_optimum(**PUBLISHED)
    np.testing.assert_allclose(omega[-1], best[0], rtol=1e-4)
    assert mu[-1].sum() == pytest.approx(best[1], rel=1e-4)
    assert optimality_ratio(omega, mu, **PUBLISHED)[-1] == pytest.approx(0.828017, abs=1e-5)
    assert approximate_loss(omega, mu, **PUBLISHED)[-1] == pytest.approx(0.3720728, abs=1e-6)


def test_descent_of_batches_and_of_what_diverges() -> None:
    omega = np.array([[0.1, -0.1], [0.3, 0.2], [np.nan, 0.1], [40.0, 1.0]])
    mu = np.array([[1.0, -1.0], [1.0, 0.5], [1.0, 1.0], [30.0, 1.0]])
    run = {"learning_rate": 0.05, "n_steps": 30, "every": 10, **OTHER}
    _, found_omega, found_mu = descend(omega, mu, **run)
    assert found_omega.shape == found_mu.shape == (4, 4, 2)
    for row in (0, 1):
        _, alone_omega, alone_mu = descend(omega[row], mu[row], **run)
        np.testing.assert_allclose(found_omega[:, row], alone_omega, rtol=1e-12)
        np.testing.assert_allclose(found_mu[:, row], alone_mu, rtol=1e-12)
    assert np.isnan(found_omega[:, 2]).all()
    assert np.isnan(found_mu[:, 2]).all()
    assert np.isfinite(found_omega[0, 3]).all()
    assert np.isnan(found_omega[1:, 3]).all()
    _, too_fast, _ = descend(*SAME, learning_rate=50, n_steps=100, every=100, **OTHER)
    assert np.isnan(too_fast[-1]).all()


# --- flow -----------------------------------------------------------------------------------------


def test_flow_is_the_limit_of_descent() -> None:
    """The distance falls with the step, as an Euler method's does."""
    times = np.array([0.0, 0.5, 2.0, 4.0])
    flow = gradient_flow(OMEGA3, MU3, times=times, **OTHER)
    np.testing.assert_array_equal(flow[0][0], OMEGA3)
    np.testing.assert_array_equal(flow[1][0], MU3)

    def distance(rate: float) -> float:
        n = round(0.5 / rate)
        steps, omega, mu = descend(OMEGA3, MU3, learning_rate=rate, n_steps=8 * n, every=n, **OTHER)
        rows = np.isin(steps, [0, n, 4 * n, 8 * n])
        return float(np.abs(np.stack([omega[rows] - flow[0], mu[rows] - flow[1]])).max())

    rates = 0.5 / np.array([50, 100, 200, 400])
    distances = np.array([distance(rate) for rate in rates])
    slopes = np.diff(np.log(distances)) / np.diff(np.log(rates))
    np.testing.assert_allclose(slopes, 1, atol=0.05)
    assert distances[-1] < 2e-3


def test_flow_without_spread_is_logistic() -> None:
    """As L → ∞ the loss is σ² + (1 − μω)²: ω² of a matched head is a logistic curve."""
    wide = {"d": 5, "n_context": 10**15, "noise_variance": 0.1}
    times = np.linspace(0, 3, 13)
    omega, mu = gradient_flow(0.1, 0.1, times=times, **wide)
    expected = 1 / (1 + (1 / 0.01 - 1) * np.exp(-4 * times))
    np.testing.assert_allclose(omega[:, 0] ** 2, expected, rtol=1e-8)
    np.testing.assert_allclose(mu[:, 0] ** 2, expected, rtol=1e-8)
    # A factor ½ would run half as fast.
    assert np.abs(1 / (1 + 99 * np.exp(-2 * times)) - expected).max() > 0.3
    # ω² − μ² of every head is conserved.
    omega, mu = gradient_flow(OMEGA3, 0.1 * MU3, times=times, **wide)
    kept = omega**2 - mu**2
    np.testing.assert_allclose(kept, np.broadcast_to(kept[0], kept.shape), atol=1e-9)
    assert np.abs(omega[-1] - omega[0]).min() > 0.1


def test_flow_loses_what_the_gradient_says() -> None:
    """dL̃/dt = −‖∇L̃‖² along the way, by differences."""
    times = np.concatenate([[t - 1e-4, t, t + 1e-4] for t in (0.2, 1.0, 3.0)])
    omega, mu = gradient_flow(OMEGA3, MU3, times=times, **PUBLISHED)
    loss = approximate_loss(omega, mu, **PUBLISHED)
    slope = (loss[2::3] - loss[::3]) / 2e-4
    gradient = np.concatenate(approximate_loss_gradient(omega[1::3], mu[1::3], **PUBLISHED), -1)
    np.testing.assert_allclose(slope, -(gradient**2).sum(-1), rtol=1e-4)


def test_a_flow_that_is_looked_at_where_it_starts() -> None:
    for times in ([0.0], [0.0, 1e-300]):
        omega, mu = gradient_flow(OMEGA3, MU3, times=times, **PUBLISHED)
        np.testing.assert_array_equal(omega, np.broadcast_to(OMEGA3, (len(times), 3)))
        np.testing.assert_array_equal(mu, np.broadcast_to(MU3, (len(times), 3)))


def test_flow_ends_where_descent_does() -> None:
    times = np.array([10.0, 100.0])
    omega, mu = gradient_flow(*OPPOSITE, times=times, **PUBLISHED)
    ratio = optimality_ratio(omega, mu, **PUBLISHED)
    assert ratio == pytest.approx([0.954, 0.9918], abs=1e-3)
    omega, mu = gradient_flow(*SAME, times=times, **PUBLISHED)
    assert optimality_ratio(omega, mu, **PUBLISHED)[-1] == pytest.approx(0.828017, abs=5e-7)


def test_flow_of_batches_and_of_what_is_undefined() -> None:
    omega = np.array([[[0.1, -0.1], [np.nan, 0.1]], [[50.0, 0.1], [0.3, 0.2]]])
    found = gradient_flow(omega, [1.0, -0.5], times=[0.0, 0.3], **OTHER)
    for part in found:
        assert part.shape == (2, 2, 2, 2)
        assert np.isnan(part).all((0, -1)).tolist() == [[False, True], [True, False]]
    alone = gradient_flow(omega[1, 1], [1.0, -0.5], times=[0.0, 0.3], **OTHER)
    np.testing.assert_allclose(found[0][:, 1, 1], alone[0], rtol=1e-12)
    np.testing.assert_allclose(found[1][:, 1, 1], alone[1], rtol=1e-12)


# --- shapes and refusals --------------------------------------------------------------------------

RUNS = {
    "descend": {"learning_rate": 0.01, "n_steps": 2, "every": 1},
    "gradient_flow": {"times": np.array([0.0, 0.1])},
    "gradient_terms": {},
    "loss_terms": {},
    "optimality_ratio": {},
}
every_function = pytest.mark.parametrize("name", sorted(RUNS))


def _call(name: str, omega: object, mu: object, **constants: object) -> object:
    typed = jaxtyped(typechecker=beartype)(getattr(descent, name))
    return typed(omega, mu, **{**RUNS[name], **constants})


def _arrays(result: object) -> list[np.ndarray]:
    if isinstance(result, np.ndarray):
        return [result]
    parts = result.values() if isinstance(result, dict) else result
    return [array for part in parts for array in _arrays(part)]


def test_every_public_function_is_covered() -> None:
    public = [
        name
        for name, value in vars(descent).items()
        if inspect.isfunction(value)
        and value.__module__ == descent.__name__
        and not name.startswith("_")
    ]
    assert sorted(RUNS) == sorted(public)


@every_function
def test_shapes_are_as_annotated_and_batches_are_loops(name: str) -> None:
    rng = np.random.default_rng(0)
    omega, mu = rng.uniform(-0.5, 0.5, (2, 2, 4, 3))
    _call(name, 0.2, 1, **OTHER)
    together = _arrays(_call(name, omega, mu, **OTHER))
    ahead = 1 if name in ("descend", "gradient_flow") else 0
    checked = 0
    for index in np.ndindex(2, 4):
        alone = _arrays(_call(name, omega[index], mu[index], **OTHER))
        for many, one in zip(together, alone, strict=True):
            if many.ndim > 1:
                row = many[(slice(None), *index)] if ahead else many[index]
                np.testing.assert_allclose(row, one, rtol=1e-9, atol=1e-14)
                checked += 1
    assert checked >= 8
    spread = _arrays(_call(name, np.full((3, 1, 2), 0.1), np.ones((4, 2)), **OTHER))[-1]
    assert spread.shape[ahead : ahead + 2] == (3, 4)


@pytest.mark.parametrize("name", ["gradient_terms", "loss_terms"])
def test_undefined_terms_are_nan(name: str) -> None:
    omega = np.array([[0.1, 0.1], [np.nan, 0.1], [np.inf, 0.1], [100.0, 0.1], [0.1, 0.1]])
    mu = np.array([[1.0, 1.0], [1.0, 1.0], [1.0, 1.0], [1.0, 1.0], [np.inf, 1.0]])
    for array in _arrays(_call(name, omega, mu, **OTHER)):
        gone = np.isnan(array).reshape(5, -1)
        assert gone.all(-1).tolist() == gone.any(-1).tolist() == [False, True, True, True, True]


@every_function
@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"d": 0}, "d = 0; accepted: a whole number of at least 1"),
        ({"n_context": 2.5}, "n_context = 2.5"),
        ({"noise_variance": -0.1}, "noise_variance = -0.1"),
    ],
)
def test_constants_out_of_range_are_refused(name: str, bad: dict, message: str) -> None:
    with pytest.raises(InputError) as caught:
        _call(name, OMEGA3, MU3, **OTHER | bad)
    assert message in str(caught.value)
    with pytest.raises(InputError, match="one number of heads"):
        getattr(descent, name)(OMEGA3, MU3[:2], **RUNS[name], **OTHER)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda run: descend(*SAME, **run | {"learning_rate": -1}), "learning_rate = -1"),
        (lambda run: descend(*SAME, **run | {"n_steps": -1}), "n_steps = -1"),
        (lambda run: descend(*SAME, **run | {"every": 0}), "every = 0; accepted: a whole number"),
        (lambda _: gradient_flow(*SAME, times=[1.0, 1.0], **OTHER), "accepted: finite times"),
        (lambda _: gradient_flow(*SAME, times=[-1.0, 1.0], **OTHER), "accepted: finite times"),
        (lambda _: gradient_flow(*SAME, times=[], **OTHER), "accepted: finite times"),
        (lambda _: gradient_flow(*SAME, times=[0.0, np.inf], **OTHER), "accepted: finite times"),
        (lambda _: gradient_flow(*SAME, times=1.0, **OTHER), "accepted: finite times"),
    ],
)
def test_runs_out_of_range_are_refused(call: Callable[[dict], object], message: str) -> None:
    with pytest.raises(InputError) as caught:
        call({"learning_rate": 0.1, "n_steps": 1, "every": 1, **OTHER})
    assert message in str(caught.value)
