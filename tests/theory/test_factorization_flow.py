"""Flows against finite differences, equations written out, descent on samples, and the theorems."""

import inspect
from collections.abc import Callable

import numpy as np
import pytest
from beartype import beartype
from jaxtyping import jaxtyped
from scipy.integrate import solve_ivp
from scipy.special import softmax

from mechicl.errors import InputError, MechiclError
from mechicl.theory import factorization_flow, flow_conditions
from mechicl.theory.factorization_flow import (
    Flow,
    cooperative_flow,
    coupled_flow,
    free_flow,
    loss_gradient,
    population_loss,
    two_scale_flow,
)
from mechicl.theory.features import gram_schmidt, haar_features, orthogonalised
from mechicl.theory.flow_conditions import escape_margin, head_deviation, order_margin

FEATURES = np.diag([2.89, 1.7, 1.0])
"""Orthogonal features in their own basis, m = (1.7², 1.7, 1)."""
SADDLE, SECOND = 1.7**2 + 1, 1.0
"""Losses where all heads have the first feature, and where the second is learnt too."""
AT_FIRST = np.array([0.98, 0.008, 0.004] + [0.008 / 7] * 7)
"""A free head at the first position, leaning to the second."""


def _random(
    seed: int, heads: int = 4, blocks: int = 3, length: int = 5
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return features, values, scores and targets that nothing is special about."""
    rng = np.random.default_rng(seed)
    return (
        rng.standard_normal((blocks, 2, 2)),
        rng.standard_normal((heads, 2, 2)),
        rng.standard_normal((heads, length)),
        rng.dirichlet(np.ones(length), blocks),
    )


def _jacobian(s: np.ndarray) -> np.ndarray:
    return np.diag(s) - np.outer(s, s)


def _full(
    features: np.ndarray, values: np.ndarray, s: np.ndarray, end: float
) -> tuple[np.ndarray, np.ndarray]:
    """Solve the full system, one position a feature, head by head and by another solver."""
    aim = np.tensordot(features, np.eye(len(features), s.shape[1]), (0, 0))

    def velocity(_: float, point: np.ndarray) -> np.ndarray:
        v, attention = point[: values.size].reshape(values.shape), point[values.size :]
        attention = attention.reshape(s.shape)
        left = aim - sum(np.multiply.outer(a, b) for a, b in zip(v, attention, strict=True))
        in_v = [left @ b for b in attention]
        in_s = [
            _jacobian(b) @ _jacobian(b) @ np.tensordot(a, left, a.ndim)
            for a, b in zip(v, attention, strict=True)
        ]
        return np.concatenate([np.ravel(in_v), np.ravel(in_s)])

    start = np.concatenate([values.ravel(), s.ravel()])
    path = solve_ivp(velocity, (0, end), start, method="LSODA", rtol=1e-11, atol=1e-13)
    v, attention = path.y[: values.size, -1], path.y[values.size :, -1]
    return v.reshape(values.shape), attention.reshape(s.shape)


def _start(
    rng: np.random.Generator, *, ordered_v: bool, ordered_s: bool, length: int = 6
) -> tuple[np.ndarray, np.ndarray]:
    """Draw V in coordinates and s, ordered as (5) or as they come."""
    norms = np.diagonal(FEATURES)
    s = rng.dirichlet(np.ones(length))
    v = 0.5 * rng.standard_normal(3)
    if ordered_s:
        s = np.sort(s)[::-1]
    if ordered_v:
        v = np.sort(np.abs(norms * v))[::-1] / norms
    return v, s


# --- the loss and its gradient ------------------------------------------------------------------


def test_loss_is_the_norm_of_the_tensor() -> None:
    features, values, q, targets = _random(0)
    s = softmax(q, -1)
    tensor = np.einsum("kab,kt->abt", features, targets) - np.einsum("kab,kt->abt", values, s)
    assert population_loss(features, values, s, targets=targets) == pytest.approx(
        (tensor**2).sum(), rel=1e-13
    )
    single = np.einsum("kab,kt->abt", features, np.eye(3, 5))
    singletons = single - np.einsum("kab,kt->abt", values, s)
    assert population_loss(features, values, s) == pytest.approx((singletons**2).sum(), rel=1e-13)
    assert population_loss(features, features, targets, targets=targets) < 1e-30


def test_loss_is_the_expected_error_of_the_regression() -> None:
    """Whatever the law of X is, if its columns are independent with mean 0 and covariance I."""
    features, values, q, targets = _random(1)
    s = softmax(q, -1)
    expected = population_loss(features, values, s, targets=targets)
    rng = np.random.default_rng(0)
    n, kinds = 100_000, {}
    kinds["normal"] = rng.standard_normal((n, 2, 5))
    kinds["signs"] = rng.choice([-1.0, 1.0], (n, 2, 5))
    kinds["off centre"] = kinds["normal"] + 1
    apart = {}
    for kind, x in kinds.items():
        y = np.einsum("kab,nbt,kt->na", features, x, targets, optimize=True)
        guess = np.einsum("kab,nbt,kt->na", values, x, s, optimize=True)
        errors = ((y - guess) ** 2).sum(-1)
        apart[kind] = abs(errors.mean() - expected) / (errors.std() / np.sqrt(n))
    assert max(apart["normal"], apart["signs"]) < 4
    assert apart["off centre"] > 20


def test_gradient_is_that_of_the_loss() -> None:
    for seed in range(3):
        features, values, q, targets = _random(seed)
        in_values, in_q = loss_gradient(features, values, q, targets=targets)

        def loss(
            change_v: np.ndarray, change_q: np.ndarray, case: tuple = (features, values, q, targets)
        ) -> float:
            f, v, scores, t = case
            return population_loss(f, v + change_v, softmax(scores + change_q, -1), targets=t)

        for array, found, place in ((values, in_values, 0), (q, in_q, 1)):
            for index in np.ndindex(array.shape):
                step = [np.zeros_like(values), np.zeros_like(q)]
                step[place][index] = 1e-5
                slope = (loss(*step) - loss(-step[0], -step[1])) / 2e-5
                assert found[index] == pytest.approx(slope, rel=1e-6, abs=1e-7)


# --- the flow -------------------------------------------------------------------------------------


@pytest.mark.parametrize("projection", ["squared", "single"])
def test_flow_moves_by_half_the_gradient(projection: str) -> None:
    """V̇ and q̇ are −½∇, and ṡ = J q̇; with a single J, it is ṡ that is −½∇_q."""
    features, values, q, targets = _random(2)
    s = softmax(q, -1)
    when = np.array([0, 1e-5, 2e-5])
    flow = free_flow(features, values, s, times=when, targets=targets, projection=projection)
    in_values, in_q = loss_gradient(features, values, q, targets=targets)

    def slope(path: np.ndarray) -> np.ndarray:
        return (4 * path[1] - 3 * path[0] - path[2]) / 2e-5

    np.testing.assert_allclose(slope(flow.values), -in_values / 2, rtol=1e-5, atol=1e-7)
    for head in range(4):
        in_s = -in_q[head] / 2  # the single J
        if projection == "squared":
            in_s = _jacobian(s[head]) @ in_s
        np.testing.assert_allclose(slope(flow.s[:, head]), in_s, rtol=1e-5, atol=1e-7)
        assert np.abs(in_s - _jacobian(s[head]) @ in_s).max() > 1e-3


def test_flow_in_scores_is_the_flow_in_attention() -> None:
    """Gradient flow integrated in (V, q) by another solver ends at the same V and s."""
    features, values, q, targets = _random(3)

    def velocity(_: float, point: np.ndarray) -> np.ndarray:
        v, scores = point[:16].reshape(4, 2, 2), point[16:].reshape(4, 5)
        parts = loss_gradient(features, v, scores, targets=targets)
        return -np.concatenate([part.ravel() for part in parts]) / 2

    start = np.concatenate([values.ravel(), q.ravel()])
    end = solve_ivp(velocity, (0, 5), start, method="LSODA", rtol=1e-10, atol=1e-12).y[:, -1]
    flow = free_flow(features, values, softmax(q, -1), times=np.array([5.0]), targets=targets)
    np.testing.assert_allclose(flow.values[0], end[:16].reshape(4, 2, 2), atol=1e-8)
    np.testing.assert_allclose(flow.s[0], softmax(end[16:].reshape(4, 5), -1), atol=1e-8)
    single = free_flow(
        features,
        values,
        softmax(q, -1),
        times=np.array([5.0]),
        targets=targets,
        projection="single",
    )
    assert np.abs(single.s - flow.s).max() > 0.01


@pytest.mark.parametrize("projection", ["squared", "single"])
def test_what_every_flow_keeps(projection: str) -> None:
    features, values, q, _ = _random(4)
    when = np.linspace(0, 50, 101)
    kept = values.copy()
    flow = free_flow(features, values, softmax(q, -1), times=when, projection=projection)
    np.testing.assert_array_equal(values, kept)
    np.testing.assert_array_equal(flow.time, when)
    np.testing.assert_array_equal(flow.values[0], values)
    np.testing.assert_allclose(flow.s.sum(-1), 1, atol=1e-12)
    assert flow.s.min() > -1e-9
    assert (np.diff(flow.loss) < 1e-12).all()
    assert flow.loss[0] - flow.loss[-1] > 1
    assert flow.n_alike.tolist() == [1, 1, 1, 1]
    for row in (0, 30, 100):
        at = np.maximum(flow.s[row], 0)
        assert flow.loss[row] == pytest.approx(
            population_loss(features, flow.values[row], at), rel=1e-8
        )
    # The order of heads, of positions outside the task, and the basis of V do not matter.
    order, places = [2, 0, 3, 1], [0, 1, 2, 4, 3]
    turn = np.linalg.qr(np.random.default_rng(0).standard_normal((2, 2)))[0]
    other = free_flow(
        turn @ features,
        turn @ values[order],
        softmax(q, -1)[order][:, places],
        times=when,
        projection=projection,
    )
    np.testing.assert_allclose(other.values, turn @ flow.values[:, order], atol=1e-7)
    np.testing.assert_allclose(other.s, flow.s[:, order][:, :, places], atol=1e-7)


def test_coordinates_say_what_matrices_do() -> None:
    """Features that are not orthogonal: V from 0 stays in their span."""
    features = haar_features(3, 5, ratio=1.7, base=0.4, rng=np.random.default_rng(0))
    basis, coordinates = gram_schmidt(features)
    assert np.abs(coordinates - np.diag(np.diagonal(coordinates))).max() > 0.05
    s = np.random.default_rng(1).dirichlet(np.ones(6), 3)
    when = np.array([0.0, 3.0, 30.0])
    whole = free_flow(features, np.zeros((3, 5, 5)), s, times=when)
    few = free_flow(coordinates, np.zeros((3, 3)), s, times=when)
    np.testing.assert_allclose(np.tensordot(few.values, basis, 1), whole.values, atol=1e-8)
    np.testing.assert_allclose(few.s, whole.s, atol=1e-8)
    np.testing.assert_allclose(few.loss, whole.loss, rtol=1e-7)
    assert whole.loss[-1] < 0.5 * whole.loss[0]


def test_descent_on_samples_follows_the_flow() -> None:
    """Small steps on fresh draws of y = Σ A*_k X s*_k + ξ, with the gradient of each batch."""
    features = orthogonalised(
        haar_features(2, 2, ratio=1.7, base=0.7, rng=np.random.default_rng(0))
    )
    rng = np.random.default_rng(1)
    runs, batch, length, rate, n_steps = 12, 200, 3, 2e-3, 500
    values = np.tile(0.3 * rng.standard_normal((2, 2, 2)), (runs, 1, 1, 1))
    q = np.tile(rng.standard_normal((2, length)), (runs, 1, 1))
    targets = np.eye(2, length)
    # A step on ‖y − ŷ‖² is 2η long in the time of a flow by −½∇.
    flow = free_flow(
        features, values[0], softmax(q[0], -1), times=np.array([0, 2 * rate * n_steps])
    )
    for _ in range(n_steps):
        s = softmax(q, -1)
        x = rng.standard_normal((runs, batch, 2, length))
        y = np.einsum("kab,rnbt,kt->rna", features, x, targets, optimize=True)
        y += 0.5 * rng.standard_normal(y.shape)
        seen = np.einsum("rnbt,rkt->rnkb", x, s, optimize=True)
        error = y - np.einsum("rkab,rnkb->rna", values, seen, optimize=True)
        in_values = -2 * np.einsum("rna,rnkb->rkab", error, seen, optimize=True) / batch
        by_s = -2 * np.einsum("rna,rkab,rnbt->rkt", error, values, x, optimize=True) / batch
        in_q = s * (by_s - (s * by_s).sum(-1, keepdims=True))
        values, q = values - rate * in_values, q - rate * in_q
    for found, expected, start in (
        (values, flow.values[1], flow.values[0]),
        (softmax(q, -1), flow.s[1], flow.s[0]),
    ):
        apart = np.abs(found.mean(0) - expected)
        error = found.std(0, ddof=1) / np.sqrt(runs)
        assert (apart < 4.5 * error).all()
        # The error is far below the distance covered.
        assert np.median(error) < 0.02 * np.abs(expected - start).max()


# --- Theorems 1 and 2: heads that start alike -----------------------------------------------------

GOLDEN = [
    (10, 10, (1.60823003, 0.12270211, 0.05890041), 0.58630098, 4.31050115),
    (10, 100, (1.09026878, 0.01219732, 0.00584789), 0.88204719, 3.90545656),
    (40, 10, (0.55805851, 0.30717394, 0.17703706), 0.03147907, 11.92546437),
    (40, 100, None, 0.74624062, 3.91429591),
]


@pytest.mark.parametrize(("length", "time", "v", "s_1", "loss"), GOLDEN)
def test_golden_coupled_flow(
    length: int, time: float, v: tuple | None, s_1: float, loss: float
) -> None:
    flow = coupled_flow(
        FEATURES, np.zeros(3), np.full(length, 1 / length), n_heads=3, times=np.array([time])
    )
    if v is not None:
        assert flow.values[0, 0] == pytest.approx(v, abs=6e-9)
    assert flow.s[0, 0, 0] == pytest.approx(s_1, abs=6e-9)
    assert flow.loss[0] == pytest.approx(loss, abs=6e-9)
    assert flow.n_alike.tolist() == [3]


def test_golden_coupled_flow_of_the_notebook() -> None:
    flow = coupled_flow(
        FEATURES,
        np.zeros(3),
        np.full(10, 0.1),
        n_heads=3,
        times=np.array([10.0]),
        projection="single",
    )
    assert flow.s[0, 0, 0] == pytest.approx(0.81815385, abs=6e-9)
    assert flow.loss[0] == pytest.approx(3.93314078, abs=6e-9)


@pytest.mark.parametrize("projection", ["squared", "single"])
def test_heads_that_start_alike_stay_alike(projection: str) -> None:
    features, values, q, targets = _random(5)
    value, s = values[0], softmax(q[0])
    settings = {"times": np.array([0.0, 1, 20]), "targets": targets, "projection": projection}
    many = free_flow(features, np.stack([value] * 4), np.stack([s] * 4), **settings)
    one = coupled_flow(features, value, s, n_heads=4, **settings)
    assert many.n_alike.tolist() == [1] * 4
    np.testing.assert_array_equal(head_deviation(many.values, many.s), 0)
    np.testing.assert_allclose(many.values[:, :1], one.values, atol=1e-12)
    np.testing.assert_allclose(many.s[:, :1], one.s, atol=1e-12)
    np.testing.assert_allclose(many.loss, one.loss, rtol=1e-12)
    # Heads that are not quite alike are solved apart, and come to the same.
    nudge = 1e-13 * np.arange(4)[:, None, None]
    apart = free_flow(features, np.stack([value] * 4) + nudge, np.stack([s] * 4), **settings)
    assert head_deviation(apart.values, apart.s)[0] > 0
    np.testing.assert_allclose(apart.values, many.values, atol=1e-8)
    np.testing.assert_allclose(apart.s, many.s, atol=1e-8)
    fewer = coupled_flow(features, value, s, n_heads=3, **settings)
    assert np.abs(fewer.values - one.values).max() > 0.01


def test_coupled_flow_starts_as_written() -> None:
    features, values, q, targets = _random(6)
    value, s, h = values[0], softmax(q[0]), 5
    flow = coupled_flow(features, value, s, n_heads=h, times=[0, 1e-5, 2e-5], targets=targets)
    in_value = np.einsum("jab,j->ab", features, targets @ s) - h * (s @ s) * value
    pull = np.einsum("jab,ab->j", features, value) @ targets - h * (value**2).sum() * s
    in_s = _jacobian(s) @ _jacobian(s) @ pull
    for path, expected in ((flow.values[:, 0], in_value), (flow.s[:, 0], in_s)):
        slope = (4 * path[1] - 3 * path[0] - path[2]) / 2e-5
        np.testing.assert_allclose(slope, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("projection", ["squared", "single"])
@pytest.mark.parametrize("top_only", [False, True])
def test_order_is_kept_and_the_first_feature_is_learnt(projection: str, top_only: bool) -> None:
    """Theorem 1, from random starts with (5) and with its weakest form."""
    rng = np.random.default_rng(7)
    when, kept = np.linspace(0, 250, 51), 0
    while kept < 2:
        v, s = _start(rng, ordered_v=not top_only, ordered_s=not top_only)
        margins = order_margin(FEATURES, v, s), order_margin(FEATURES, v, s, top_only=True)
        if margins[top_only] < 0 or (top_only and margins[0] >= 0):
            continue
        flow = coupled_flow(FEATURES, v, s, n_heads=3, times=when, projection=projection)
        margin = order_margin(FEATURES, flow.values[:, 0], flow.s[:, 0], top_only=top_only)
        assert margin.min() > -1e-9
        assert flow.s[-1, 0, 0] > 0.9
        np.testing.assert_allclose(flow.values[-1, 0], [2.89 / 3, 0, 0], atol=0.1)
        assert flow.loss[-1] == pytest.approx(SADDLE, abs=0.02)
        kept += 1


def test_without_order_another_feature_may_be_learnt() -> None:
    """V = 0 and attention that starts at the second position: a saddle that is left very slowly."""
    s = np.array([0.001, 0.959, 0.01, 0.01, 0.01, 0.01])
    assert order_margin(FEATURES, np.zeros(3), s, top_only=True) == pytest.approx(-0.958)
    flow = coupled_flow(FEATURES, np.zeros(3), s, n_heads=3, times=np.array([0.0, 400]))
    assert flow.s[-1, 0, 1] > 0.95
    assert flow.loss[-1] == pytest.approx(2.89**2 + 1, abs=0.02)
    # Of random starts some fail, and each that does was out of order.
    rng, failed = np.random.default_rng(8), 0
    for _ in range(8):
        v, s = _start(rng, ordered_v=False, ordered_s=False)
        flow = coupled_flow(FEATURES, v, s, n_heads=3, times=np.array([100.0]))
        if flow.s[0, 0, 0] < 0.8:
            failed += 1
            assert order_margin(FEATURES, v, s, top_only=True) < 0
    assert 1 <= failed <= 5


def test_features_that_overlap_break_the_theorem() -> None:
    """Small random features are far from orthogonal: attention ends shared between positions."""
    when, rises = np.array([100.0, 300]), {}
    for name, change in (("as drawn", lambda f: f), ("orthogonal", orthogonalised)):
        rises[name] = []
        for seed in range(2):
            rng = np.random.default_rng(seed)
            features = change(haar_features(3, 3, ratio=1.7, base=3**-0.5, rng=rng))
            coordinates = gram_schmidt(features)[1]
            assert np.linalg.norm(coordinates, axis=1) == pytest.approx(np.diagonal(FEATURES))
            flow = coupled_flow(coordinates, np.zeros(3), np.full(6, 1 / 6), n_heads=3, times=when)
            rises[name].append(flow.s[1, 0, 1:].max() > flow.s[0, 0, 1:].max())
            assert (flow.s[1, 0, 0] > 0.9) == (name == "orthogonal")
    assert rises == {"as drawn": [True] * 2, "orthogonal": [False] * 2}


def test_heads_part_later_the_closer_they_start() -> None:
    """Theorem 2: the deviation stays below 0.1 for a time set by the start; all end at loss 0."""
    rng = np.random.default_rng(9)
    noise_v, noise_q = rng.standard_normal((3, 3)), rng.standard_normal((3, 40))
    when = np.linspace(0, 500, 1001)
    parted = []
    for delta in (1e-3, 1e-4, 1e-6):
        flow = free_flow(FEATURES, delta * noise_v, softmax(delta * noise_q, -1), times=when)
        apart = head_deviation(flow.values, flow.s)
        assert apart[0] < 10 * delta
        parted.append(when[np.argmax(apart > 0.1)])
        learnt = when[np.argmax(flow.loss < 1.05 * SADDLE)]
        assert learnt < 45
    assert parted == sorted(parted)
    assert parted[0] < 45 < parted[1] < 150 < 250 < parted[2] < 480
    alike = free_flow(FEATURES, np.zeros((3, 3)), np.full((3, 40), 1 / 40), times=when)
    assert head_deviation(alike.values, alike.s).max() == 0


# --- Eq. 8: one free head -------------------------------------------------------------------------


def _first_is_learnt(h: int, free: np.ndarray = AT_FIRST, **settings: object) -> Flow:
    share = FEATURES[0] / h
    return cooperative_flow(FEATURES, share, share, free, n_heads=h, **settings)


def test_golden_cooperative_flow() -> None:
    flow = _first_is_learnt(3, times=np.array([100.0]))
    ensemble, free = flow.values[0]
    assert ensemble == pytest.approx((1.44415979, -0.51073215, -0.01003734), abs=6e-9)
    assert free == pytest.approx((0.00397522, 2.88250236, 0.05630774), abs=6e-9)
    assert flow.s[0, 1, :3] == pytest.approx((0.35426095, 0.58949604, 0.01892634), abs=6e-9)
    # The ensemble takes back what the free head adds at the first position.
    assert 2 * ensemble[1] == pytest.approx(-free[1] * flow.s[0, 1, 0], abs=5e-4)
    assert 2 * ensemble[1] == pytest.approx(-1.0215, abs=1e-4)


def test_cooperative_flow_is_the_full_system() -> None:
    """Eq. 8 beside every head of its own, with h − 1 heads exactly at the first position."""
    when = np.array([0.0, 100])
    flow = _first_is_learnt(4, times=when)
    values = np.stack([FEATURES[0] / 4] * 4)
    s = np.stack([np.eye(10)[0]] * 3 + [AT_FIRST])
    in_values, in_s = _full(FEATURES, values, s, 100)
    for head, row in enumerate((0, 0, 0, 1)):
        np.testing.assert_allclose(flow.values[1, row], in_values[head], atol=5e-9)
        np.testing.assert_allclose(flow.s[1, row], in_s[head], atol=5e-9)
    assert flow.n_alike.tolist() == [3, 1]
    np.testing.assert_array_equal(flow.s[:, 0], np.tile(np.eye(10)[0], (2, 1)))
    free = free_flow(FEATURES, values, s, times=when)
    np.testing.assert_allclose(free.values, flow.values[:, [0, 0, 0, 1]], atol=1e-12)
    # Heads that are only nearly at e_1 leave it in time.
    s[:3] = 0.999 * s[:3] + 0.001 * np.eye(10)[2]
    near = free_flow(FEATURES, values, s, times=when)
    assert np.abs(near.values[:, [0, 3]] - flow.values).max() > 1e-3


def test_cooperative_flow_is_equation_8() -> None:
    """Eq. 8 and its general form as written, by another solver; features not orthogonal."""
    features, values, q, _ = _random(10, blocks=4, length=6)
    free, end = softmax(q[3]), 3.0
    for n, h in ((2, 3), (2, 2), (3, 5), (4, 4)):
        c = h - n + 1

        def equations(_: float, point: np.ndarray, n: int = n, c: int = c) -> np.ndarray:
            heads, s = point[:-6].reshape(n, 2, 2), point[-6:]
            first, between, last = heads[0], heads[1:-1], heads[-1]
            overlap = np.einsum("jab,ab->j", features, last)
            in_first = features[0] - c * first - last * s[0]
            in_between = [features[j] - v - last * s[j] for j, v in enumerate(between, 1)]
            in_last = np.einsum("jab,j->ab", features, s[:4]) - c * first * s[0] - last * (s @ s)
            pull = -(last**2).sum() * s
            pull[:4] += overlap
            pull[0] -= c * (first * last).sum()
            for j, v in enumerate(between, 1):
                in_last = in_last - v * s[j]
                pull[j] -= (v * last).sum()
            in_s = _jacobian(s) @ _jacobian(s) @ pull
            return np.concatenate([np.ravel([in_first, *in_between, in_last]), in_s])

        start = np.concatenate([values[: n - 1].ravel(), values[3].ravel(), free])
        path = solve_ivp(equations, (0, end), start, method="LSODA", rtol=1e-10, atol=1e-12)
        flow = cooperative_flow(
            features,
            values[0],
            values[3],
            free,
            n_heads=h,
            times=np.array([end]),
            specialised=values[1 : n - 1] if n > 2 else None,
        )
        expected = path.y[:, -1]
        np.testing.assert_allclose(flow.values[0].ravel(), expected[:-6], atol=1e-8)
        np.testing.assert_allclose(flow.s[0, -1], expected[-6:], atol=1e-8)
        np.testing.assert_array_equal(flow.s[0, :-1], np.eye(n - 1, 6))
        assert flow.n_alike.tolist() == [c] + [1] * (n - 1)


def test_general_cooperative_flow_is_the_full_system_and_learns_the_next_feature() -> None:
    free = np.array([0.98, 0.004, 0.008, 0.004, 0.004])
    first, second = FEATURES[0] / 3, FEATURES[1]
    flow = cooperative_flow(
        FEATURES,
        first,
        first,
        free,
        n_heads=4,
        times=np.array([0.0, 80, 400]),
        specialised=second[None],
    )
    values = np.stack([first, first, second, first])
    s = np.stack([np.eye(5)[0], np.eye(5)[0], np.eye(5)[1], free])
    in_values, in_s = _full(FEATURES, values, s, 80)
    np.testing.assert_allclose(flow.values[1], in_values[1:], atol=1e-8)
    np.testing.assert_allclose(flow.s[1], in_s[1:], atol=1e-8)
    assert flow.n_alike.tolist() == [2, 1, 1]
    assert flow.loss[0] == pytest.approx(SECOND, abs=0.05)
    assert flow.loss[-1] < 0.02
    assert np.abs(flow.values[-1, -1]).argmax() == 2


# --- two scales -----------------------------------------------------------------------------------


def test_golden_two_scale_flow() -> None:
    """s'_2 at t = 100 for h = 2, 3, 5: two-scale beside full, nearer with more heads."""
    apart = []
    when = np.array([100.0])
    # The full value of h = 2 is that of Eq. 8 as written, by another solver.
    for h, full, slow in ((2, 0.527135, 0.574), (3, 0.589, 0.603), (5, 0.613, 0.619)):
        flow = two_scale_flow(FEATURES, FEATURES[0] / h, AT_FIRST, n_heads=h, times=when)
        assert flow.s[0, 1, 1] == pytest.approx(slow, abs=5e-4)
        whole = _first_is_learnt(h, times=when)
        assert whole.s[0, 1, 1] == pytest.approx(full, abs=5e-4)
        apart.append(flow.s[0, 1, 1] - whole.s[0, 1, 1])
    assert apart == sorted(apart, reverse=True)


def test_two_scale_flow_is_what_its_equations_say() -> None:
    features, values, q, _ = _random(11, length=6)
    free, h = softmax(q[0]), 3

    def equations(_: float, point: np.ndarray) -> np.ndarray:
        value, s = point[:4].reshape(2, 2), point[4:]
        rest = s.copy()
        rest[0] = 0
        in_value = np.einsum("jab,j->ab", features[1:], s[1:3]) - value * (rest @ rest)
        pull = -(value**2).sum() * rest
        pull[1:3] += np.einsum("jab,ab->j", features[1:], value)
        return np.concatenate([in_value.ravel(), _jacobian(s) @ _jacobian(s) @ pull])

    start = np.concatenate([values[0].ravel(), free])
    end = solve_ivp(equations, (0, 4), start, method="LSODA", rtol=1e-10, atol=1e-12).y[:, -1]
    flow = two_scale_flow(features, values[0], free, n_heads=h, times=np.array([0, 4.0]))
    np.testing.assert_allclose(flow.values[1, 1].ravel(), end[:4], atol=1e-8)
    np.testing.assert_allclose(flow.s[1, 1], end[4:], atol=1e-8)
    # V is where Eq. 8 would leave it: V̇ = 0, and the loss is the potential.
    for row in (0, 1):
        (ensemble, value), s = flow.values[row], flow.s[row, 1]
        np.testing.assert_allclose(features[0] - (h - 1) * ensemble, value * s[0], atol=1e-12)
        rest = np.einsum("kab,kt->abt", features[1:], np.eye(3, 6)[1:])
        rest = rest - np.einsum("ab,t->abt", value, s * (np.arange(6) > 0))
        assert flow.loss[row] == pytest.approx((rest**2).sum(), rel=1e-10)
        heads = np.stack([ensemble, ensemble, value]), np.stack([np.eye(6)[0]] * 2 + [s])
        assert flow.loss[row] == pytest.approx(population_loss(features, *heads), rel=1e-10)
    assert flow.n_alike.tolist() == [2, 1]
    single = two_scale_flow(
        features, values[0], free, n_heads=h, times=np.array([4.0]), projection="single"
    )
    assert np.abs(single.s[0] - flow.s[1]).max() > 0.01


def test_escape_margin_is_the_fall_of_the_potential() -> None:
    features, values, q, _ = _random(12, length=6)
    saddle = (features[1:] ** 2).sum()
    for value, scores in zip(values, q, strict=True):
        s = softmax(scores)
        flow = two_scale_flow(features, value, s, n_heads=3, times=np.array([0.0]))
        assert escape_margin(features, value, s) == pytest.approx(saddle - flow.loss[0], rel=1e-9)
    together = escape_margin(features, values, softmax(q, -1))
    assert together[3] == pytest.approx(float(escape_margin(features, values[3], softmax(q[3]))))
    assert escape_margin(FEATURES, FEATURES[0], AT_FIRST) < 0
    assert escape_margin(FEATURES, np.zeros(3), AT_FIRST) == 0
    assert np.isnan(escape_margin(FEATURES, [np.nan, 0, 0], AT_FIRST))


@pytest.mark.parametrize("projection", ["squared", "single"])
def test_potential_falls_and_alignment_is_kept(projection: str) -> None:
    """Theorem 4: in order and below the saddle, the second feature is learnt."""
    rng, when, escaped = np.random.default_rng(13), np.linspace(0, 800, 161), 0
    while escaped < 2:
        s = np.concatenate([[40], rng.dirichlet(np.ones(5))])
        s /= s.sum()
        value = 0.3 * rng.standard_normal(3)

        def aligned(value: np.ndarray, s: np.ndarray) -> np.ndarray:
            return order_margin(FEATURES[1:], value, s[..., 1:], top_only=True)

        if aligned(value, s) < 0 or escape_margin(FEATURES, value, s) <= 0:
            continue
        flow = two_scale_flow(FEATURES, value, s, n_heads=3, times=when, projection=projection)
        assert (np.diff(flow.loss) < 1e-12).all()
        assert flow.loss[0] < SADDLE
        assert aligned(flow.values[:, 1], flow.s[:, 1]).min() > -1e-9
        assert escape_margin(FEATURES, flow.values[:, 1], flow.s[:, 1]).min() > 0
        np.testing.assert_allclose(flow.s.sum(-1), 1, atol=1e-12)
        assert flow.loss[-1] == pytest.approx(SECOND, abs=0.05)
        escaped += 1


def test_above_the_saddle_a_head_may_be_stuck() -> None:
    """V' against both features it could learn: attention flees to the first position and stays."""
    s = np.array([0.9, 0.05, 0.02, 0.01, 0.01, 0.01])
    value = np.array([0.0, -4.0, -4.0])
    assert escape_margin(FEATURES, value, s) < 0
    flow = two_scale_flow(FEATURES, value, s, n_heads=3, times=np.linspace(0, 1500, 301))
    assert flow.loss[0] > SADDLE
    assert (np.diff(flow.loss) < 1e-12).all()
    assert flow.loss[-1] == pytest.approx(SADDLE, abs=0.05)
    assert flow.s[-1, 1, 0] > 0.95


# --- shapes and refusals --------------------------------------------------------------------------

VALUES, S = np.zeros((2, 3)), np.full((2, 4), 0.25)
WHEN = np.array([0.0, 0.1])
CALLS: dict[str, Callable[..., object]] = {
    "population_loss": lambda f, A, V, s: f(A, V, s),
    "loss_gradient": lambda f, A, V, s: f(A, V, np.log(s)),
    "free_flow": lambda f, A, V, s: f(A, V, s, times=WHEN),
    "coupled_flow": lambda f, A, V, s: f(A, V[0], s[0], n_heads=2, times=WHEN),
    "cooperative_flow": lambda f, A, V, s: f(A, V[0], V[1], s[1], n_heads=3, times=WHEN),
    "two_scale_flow": lambda f, A, V, s: f(A, V[0], s[0], n_heads=2, times=WHEN),
    "order_margin": lambda f, A, V, s: f(A, V, s),
    "escape_margin": lambda f, A, V, s: f(A, V, s),
    "head_deviation": lambda f, _, V, s: f(np.stack([V, V]), np.stack([s, s])),
}
FUNCTIONS = {
    name: value
    for module in (factorization_flow, flow_conditions)
    for name, value in vars(module).items()
    if inspect.isfunction(value) and value.__module__ == module.__name__ and name[0] != "_"
}
every_function = pytest.mark.parametrize("name", sorted(CALLS))


def test_every_public_function_is_covered() -> None:
    assert FUNCTIONS.keys() == CALLS.keys()


@every_function
def test_shapes_are_as_annotated(name: str) -> None:
    typed = jaxtyped(typechecker=beartype)(FUNCTIONS[name])
    rng = np.random.default_rng(0)
    matrices, s = rng.standard_normal((3, 2, 2)), rng.dirichlet(np.ones(4), 2)
    for features in (matrices, matrices.reshape(3, 4)):
        values = rng.standard_normal((2, *features.shape[1:]))
        kept = features.copy(), values.copy(), s.copy()
        found = CALLS[name](typed, features, values, s)
        for before, after in zip(kept, (features, values, s), strict=True):
            np.testing.assert_array_equal(before, after)
        if isinstance(found, Flow):
            rows = len(found.n_alike)
            assert found.values.shape == (2, rows, *features.shape[1:])
            assert found.s.shape == (2, rows, 4)
            assert found.loss.shape == found.time.shape == (2,)


@every_function
def test_bad_numbers_are_refused(name: str) -> None:
    function = FUNCTIONS[name]
    with pytest.raises(InputError, match="accepted: real numbers"):
        CALLS[name](function, FEATURES, VALUES.astype(str), S)
    if name != "head_deviation":
        with pytest.raises(InputError, match="features has 9 numbers that are not finite"):
            CALLS[name](function, FEATURES * np.nan, VALUES, S)
        with pytest.raises(InputError, match=r"features have shape \(3, 2\)"):
            CALLS[name](function, FEATURES[:, :2], VALUES, S)
        with pytest.raises(InputError, match=r"s \(.*2\); accepted: "):
            CALLS[name](function, FEATURES, VALUES, np.full((2, 2), 0.5))


def _free(**changed: object) -> Flow:
    return free_flow(**{"features": FEATURES, "values": VALUES, "s": S, "times": WHEN, **changed})


def _cooperate(**changed: object) -> Flow:
    start = {"ensemble": VALUES[0], "free_value": VALUES[0], "free_s": S[0], "n_heads": 3}
    return cooperative_flow(**{"features": FEATURES, "times": WHEN, **start, **changed})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: _free(features=FEATURES[:1]), "accepted: at least 2 features, or heads have noth"),
        (lambda: _free(values=VALUES[:1], s=S[:1]), "accepted: one number of heads, at least 2"),
        (lambda: _free(s=S[:1]), "values (2, 3), s (1, 4); accepted: one number of heads"),
        (lambda: _free(s=S[:, :2] * 2), "accepted: at least as many positions (T) as features"),
        (lambda: _free(s=S * 1.001), "s reaches down to 0.25025 and has a row that sums to 1 only"),
        (lambda: _free(s=[[1.5, -0.5, 0, 0]] * 2), "s reaches down to -0.5"),
        (lambda: _free(s=S * np.nan), "s has 8 numbers that are not finite"),
        (lambda: _free(values=VALUES + np.inf), "values has 6 numbers that are not finite"),
        (lambda: _free(targets=np.eye(3)), "targets have shape (3, 3); accepted: (3, 4)"),
        (lambda: _free(targets=2 * np.eye(3, 4)), "targets reaches down to 0 and has a row"),
        (lambda: _free(times=[-1.0, 1.0]), "accepted: finite times from 0, increasing"),
        (lambda: _free(times=[1.0, 1.0]), "accepted: finite times from 0, increasing"),
        (lambda: _free(times=[]), "accepted: finite times from 0, increasing"),
        (lambda: _free(times=[0.0, np.nan]), "accepted: finite times from 0, increasing"),
        (lambda: _free(times=1.0), "accepted: finite times from 0, increasing"),
        (lambda: _free(projection="J"), "projection = 'J'; accepted: 'squared', 'single'"),
        (
            lambda: two_scale_flow(
                FEATURES, VALUES[0], S[0], n_heads=2, times=WHEN, projection="J"
            ),
            "projection = 'J'",
        ),
        (
            lambda: two_scale_flow(FEATURES, VALUES[0], S, n_heads=2, times=WHEN),
            "accepted: one number of heads",
        ),
        (
            lambda: two_scale_flow(FEATURES, VALUES[0], S[0], n_heads=1, times=WHEN),
            "n_heads is an integer from 2; given 1",
        ),
        (
            lambda: coupled_flow(FEATURES, VALUES[0], S[0], n_heads=1, times=WHEN),
            "n_heads is an integer from 2; given 1",
        ),
        (
            lambda: coupled_flow(FEATURES[:1], VALUES[0], S[0], n_heads=2, times=WHEN),
            "accepted: at least 2 features",
        ),
        (lambda: _cooperate(n_heads=1), "n_heads is an integer from 2; given 1"),
        (
            lambda: _cooperate(specialised=VALUES[:1], n_heads=2),
            "n_heads is an integer from 3; given 2",
        ),
        (lambda: _cooperate(specialised=np.zeros((3, 3))), "3 specialised heads beside the ensem"),
        (lambda: _cooperate(specialised=np.zeros((1, 2))), "specialised (1, 2), free_value (3,)"),
        (lambda: _cooperate(free_value=VALUES), "accepted: one shape, that of a feature"),
        (lambda: _cooperate(free_s=S), "free_s has shape (2, 4); accepted: (T)"),
        (lambda: _cooperate(features=2.0), "features have shape (), values"),
        (
            lambda: order_margin(FEATURES, VALUES, S[0]),
            "value (2, 3), s (4,); accepted: (block, ...), (*time, ...) and (*time, T)",
        ),
        (lambda: escape_margin(FEATURES, VALUES[:1], S), "accepted: (block, ...), (*time"),
        (lambda: head_deviation(VALUES, S), "accepted: (time, head, ...) and (time, head, T)"),
        (lambda: loss_gradient(FEATURES, VALUES, S[0]), "q has shape (4,); accepted: (head, T)"),
    ],
)
def test_refusals(call: Callable[[], object], message: str) -> None:
    with pytest.raises(InputError) as caught:
        call()
    assert message in str(caught.value)


def test_a_flow_is_whole_or_an_error() -> None:
    assert _free(times=[0.0]).loss.tolist() == pytest.approx([(FEATURES**2).sum()])
    with pytest.raises(MechiclError, match="leaves float64 at its start") as caught:
        _free(features=1e200 * FEATURES, values=1e200 + VALUES)
    assert not isinstance(caught.value, InputError)
    with pytest.raises(MechiclError, match=r"could not be followed to time 1e\+06: .*step size"):
        _free(features=1e153 * FEATURES, values=1e153 + VALUES, times=[0, 1e6])
