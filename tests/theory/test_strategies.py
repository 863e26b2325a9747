"""Strategies against the posterior over all leaves, brute force, and published numbers."""

from collections.abc import Callable

import numpy as np
import pytest
from scipy.optimize import minimize

from mechicl.errors import InputError
from mechicl.theory import measurement, priors, strategies, tree_posterior

DEPTH, ALPHA, TAU = 3, 0.6, 0.3
LEAVES = priors.tree_leaves(DEPTH, ALPHA)

ADAPTIVE = {
    8: [0.49803922, 0.247059030, 0.12164551, 0.0600605, 0.0323233, 0.0218331, 0.0187085, 0.0180006],
    6: [0.49206349, 0.23809544, 0.1111830, 0.0488155, 0.0206629, 0.0099770],
    4: [0.46666667, 0.20000009, 0.0667208, 0.0010448],
}
SYMMETRIC = {
    8: [0.49803922, 0.24721262, 0.13611714, 0.1080108, 0.1043847, 0.1040872, 0.104067, 0.1040658],
    6: [0.49206349, 0.23823893, 0.12549556, 0.09680227, 0.09308160],
    4: [0.466666667, 0.200107555, 0.080363955, 0.049135291],
}
FIXED = {
    8: [0.24221, 0.14164, 0.10832, 0.09020, 0.07932, 0.07257, 0.06748, 0.06314],
    6: [0.2322, 0.1307, 0.0971, 0.0789, 0.0680, 0.0612],
}
"""CHECKED.md 2.4, at α = 0.5, τ = 0.1, for M = 1, 2, …"""


def adaptive(
    depth: int, n_channels: int, tau: float = 0.1, n: int = 200_000
) -> tuple[float, float]:
    rng = np.random.default_rng(0)
    return strategies.adaptive_loss(depth, 0.5, n_channels, tau, n_draws=n, rng=rng)


def optimised(depth: int, n_channels: int, **settings: object) -> strategies.FixedMeasurement:
    rng = np.random.default_rng(0)
    return strategies.optimised_measurement(depth, 0.5, n_channels, 0.1, rng=rng, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("n_channels", [1, 2, 3])
@pytest.mark.parametrize("leaf", [7, 2])
def test_the_path_has_the_posterior_over_all_leaves(n_channels: int, leaf: int) -> None:
    """The walk, node by node, with the table of leaves; the noise of each read node the same.

    Any leaf has the losses of the last one, if the noise turns with its spins.
    """
    n = 300
    found, _ = strategies.adaptive_loss(
        DEPTH, ALPHA, n_channels, TAU, n_draws=n, rng=np.random.default_rng(1)
    )
    draws = np.random.default_rng(1).standard_normal((n, n_channels))
    spins = np.where([(leaf >> (DEPTH - 1 - m)) & 1 for m in range(DEPTH)], 1, -1)
    losses, wrong = [], 0
    for noise in draws:
        node, rows, phi, on_path = 0, [], [], True
        for m in range(n_channels):
            row = np.eye(7)[node]
            rows.append(row)
            phi.append(row @ LEAVES[leaf] + TAU * noise[m] * spins[m])
            # Off the path a turn is the mirror of that of the last leaf.
            turn = phi[-1] > 0
            on_path &= turn == (spins[m] > 0)
            node = 2 * node + 1 + int(turn)
        wrong += not on_path
        rho = tree_posterior.leaf_posterior(LEAVES, np.array(rows), np.array(phi), TAU)
        losses.append(float(tree_posterior.leaf_moments(LEAVES, rho)[1]))
    assert found == pytest.approx(np.mean(losses), rel=1e-12)
    assert 0 < wrong < n


def test_the_error_of_the_path_is_that_of_repeats() -> None:
    several = [
        strategies.adaptive_loss(4, 0.5, 3, 0.3, n_draws=500, rng=np.random.default_rng(seed))
        for seed in range(100)
    ]
    values, errors = np.array(several).T
    assert values.std() == pytest.approx(errors.mean(), rel=0.3)


@pytest.mark.parametrize(("depth", "n_channels"), [(8, 1), (8, 4), (8, 8), (6, 3), (6, 6), (4, 4)])
def test_published_losses_of_the_path(depth: int, n_channels: int) -> None:
    found, error = adaptive(depth, n_channels)
    expected = ADAPTIVE[depth][n_channels - 1]
    assert abs(found - expected) < 4 * error + 1e-8
    assert error < 0.02 * expected


def test_published_losses_in_a_finite_context() -> None:
    tau = measurement.context_noise(0.1, 512)
    for depth, expected in ((8, 0.02222), (6, 0.01352)):
        found, error = adaptive(depth, depth, tau)
        assert abs(found - expected) < 4 * error
    assert strategies.symmetric_loss(8, 0.5, 8, tau) == pytest.approx(0.11411, abs=1e-5)


@pytest.mark.parametrize("depth", [8, 6, 4])
def test_published_losses_of_symmetric_axes(depth: int) -> None:
    found = [
        strategies.symmetric_loss(depth, 0.5, count, 0.1)
        for count in range(1, len(SYMMETRIC[depth]) + 1)
    ]
    np.testing.assert_allclose(found, SYMMETRIC[depth], atol=6e-8)


def test_strategies_at_their_ends() -> None:
    rest = [float((priors.tree_steps(4, 0.5)[count:] ** 2).sum()) for count in range(5)]
    for count, left in enumerate(rest):
        assert strategies.symmetric_loss(4, 0.5, count, 0) == pytest.approx(left, abs=1e-15)
        assert adaptive(4, count, 0) == (pytest.approx(left, abs=1e-15), 0)
        assert adaptive(4, count, 1e-3)[0] == pytest.approx(left, abs=1e-9)
        assert adaptive(4, count, 1e3)[0] == pytest.approx(1, abs=1e-5)
        assert strategies.symmetric_loss(4, 0.5, count, 1e3) == pytest.approx(1, abs=1e-5)
    # With one channel they are one measurement, at a depth of 1 there is no other.
    both = adaptive(3, 1, 0.5), strategies.symmetric_loss(3, 0.5, 1, 0.5)
    assert abs(both[0][0] - both[1]) < 4 * both[0][1]
    shallow = adaptive(1, 1, 0.5), strategies.symmetric_loss(1, 0.5, 1, 0.5)
    assert abs(shallow[0][0] - shallow[1]) < 4 * shallow[0][1]


def test_one_channel_of_a_small_tree_by_brute_force() -> None:
    """h = 2: every direction of three covariates, its loss by a sum over Φ."""
    leaves = priors.tree_leaves(2, 0.5)
    phi = np.linspace(-2, 2, 801)

    def loss(angles: np.ndarray) -> float:
        (a, b), tau = angles, 0.1
        read = leaves @ [np.cos(a), np.sin(a) * np.cos(b), np.sin(a) * np.sin(b)]
        density = np.exp(-((phi[:, None] - read) ** 2) / (2 * tau**2))
        power = ((density @ leaves) ** 2).sum(1) / density.sum(1)
        return 1 - power.sum() * (phi[1] - phi[0]) / (4 * tau * np.sqrt(2 * np.pi))

    grid = [(a, b) for a in np.linspace(0, np.pi, 40) for b in np.linspace(0, np.pi, 40)]
    start = min(grid, key=lambda angles: loss(np.array(angles)))
    least = float(minimize(loss, start, method="Nelder-Mead").fun)
    found = optimised(2, 1, n_steps=400, n_polish=200, n_draws=5000)
    assert abs(found.loss - least) < 4 * found.error + 0.002
    row = found.measurement[0] * np.sign(found.measurement[0, 0])
    angles = np.array([np.arccos(row[0]), np.arctan2(row[2], row[1])])
    assert loss(angles) == pytest.approx(least, abs=0.002)


def test_the_optimised_measurement_beats_the_plain_ones() -> None:
    depth, count = 4, 2
    found = optimised(depth, count, n_steps=200, n_polish=50)
    rows = found.measurement
    np.testing.assert_allclose(rows @ rows.T, np.eye(count), atol=1e-12)
    plain = [priors.symmetric_axes(depth)[:count], np.eye(15)[:count]]
    for other in plain:
        rng = np.random.default_rng(1)
        loss, error = tree_posterior.tree_mmse(depth, 0.5, other, 0.1, n_draws=200, rng=rng)
        assert found.loss < loss - 10 * np.hypot(error, found.error)
    assert set(found.found) == {"symmetric axes", "first directions", "random 0"}
    assert found.found[found.start] == min(found.found.values())
    again = optimised(depth, count, n_steps=200, n_polish=50)
    np.testing.assert_array_equal(again.measurement, rows)
    assert again.loss == found.loss


def test_both_searches_climb() -> None:
    """From nothing, by SPSA alone, and by the polish after it."""
    none = optimised(4, 3, n_steps=0, n_polish=0)
    spsa = optimised(4, 3, n_steps=200, n_polish=0)
    both = optimised(4, 3, n_steps=200, n_polish=60)
    for before, after in ((none, spsa), (spsa, both)):
        assert after.loss < before.loss - 4 * np.hypot(before.error, after.error)
    for name, loss in none.found.items():
        assert spsa.found[name] < loss - 0.01
    plain = strategies.symmetric_loss(4, 0.5, 3, 0.1)
    assert none.found["symmetric axes"] == pytest.approx(plain, abs=0.005)


def test_the_search_stays_in_its_span() -> None:
    found = optimised(5, 2, n_levels=2, n_steps=20, n_polish=5, n_draws=20).measurement
    basis = np.vstack([np.eye(31)[:3], priors.symmetric_axes(5)[2:]])
    np.testing.assert_allclose(found @ basis.T @ basis, found, atol=1e-12)
    assert abs(found[:, 3]).max() > 1e-3
    symmetric = optimised(5, 5, n_levels=0, n_steps=5, n_polish=2, n_draws=20).measurement
    axes = priors.symmetric_axes(5)
    np.testing.assert_allclose(symmetric @ axes.T @ axes, symmetric, atol=1e-12)
    whole = optimised(3, 5, n_levels=9, n_steps=5, n_polish=2, n_draws=20)
    assert whole.measurement.shape == (5, 7)
    only = optimised(1, 1, n_steps=2, n_polish=2, n_draws=2000)
    assert only.loss == pytest.approx(strategies.symmetric_loss(1, 0.5, 1, 0.1), abs=1e-4)


def test_a_published_loss_of_the_optimised_measurement() -> None:
    found = optimised(6, 2, n_steps=300, n_polish=100, n_contexts=64)
    assert found.loss == pytest.approx(FIXED[6][1], rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("depth", "n_channels"), [(depth, m) for depth in FIXED for m in range(1, depth + 1)]
)
def test_published_losses_of_the_optimised_measurement(depth: int, n_channels: int) -> None:
    """And who wins: the fixed one up to M = 3, the path from 4 on."""
    found = optimised(depth, n_channels, n_draws=2000)  # 0.1 % of error, of which 200 have 0.4
    assert found.loss == pytest.approx(FIXED[depth][n_channels - 1], rel=0.01)
    path, _ = adaptive(depth, n_channels)
    assert (path > found.loss) == (n_channels <= 3)


@pytest.mark.slow
@pytest.mark.parametrize(("depth", "expected"), [(6, 0.06748), (8, 0.06894)])
def test_the_optimised_measurement_in_a_finite_context(depth: int, expected: float) -> None:
    tau = measurement.context_noise(0.1, 512)
    rng = np.random.default_rng(0)
    found = strategies.optimised_measurement(depth, 0.5, depth, tau, rng=rng)
    assert found.loss == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: adaptive(3, 4), "at most 3, the number of levels, after which the path is at a"),
        (lambda: adaptive(3, -1), "n_channels"),
        (lambda: adaptive(3, 2, -0.1), "tau"),
        (lambda: adaptive(3, 2, n=1), "n_draws"),
        (lambda: strategies.symmetric_loss(3, 0.5, 4, 0.1), "at most 3, the number of symmetric"),
        (lambda: strategies.symmetric_loss(3, 1, 1, 0.1), "above 0 and below 1"),
        (lambda: optimised(3, 0), "n_channels is an integer from 1"),
        (lambda: optimised(3, 8), "at most 7, the number of directions"),
        (lambda: optimised(6, 8, n_levels=2), "at most 7, the number of directions"),
        (lambda: optimised(3, 2, step_size=0), "step_size = 0; accepted: above 0"),
        (lambda: optimised(3, 2, perturbation=0), "perturbation = 0; accepted: above 0"),
        (lambda: optimised(3, 2, n_steps=-1), "n_steps"),
        (lambda: optimised(3, 2, n_contexts=0), "n_contexts"),
        (lambda: optimised(3, 2, n_random=-1), "n_random"),
        (lambda: optimised(3, 2, n_polish=-1), "n_polish"),
        (lambda: optimised(3, 2, n_draws=1), "n_draws"),
        (lambda: optimised(3, 2, n_levels=-1), "n_levels"),
    ],
)
def test_refused(wrong: Callable[[], object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        wrong()


def test_no_noise_is_refused_with_the_reason() -> None:
    with pytest.raises(InputError, match="almost any one channel tells all leaves apart"):
        strategies.optimised_measurement(3, 0.5, 1, 0, rng=np.random.default_rng(0))
    # And that is so.
    rows = np.random.default_rng(1).standard_normal((1, 7))
    rng = np.random.default_rng(0)
    found = tree_posterior.tree_mmse(3, 0.5, rows, 0, n_draws=2, rng=rng)
    assert found == (pytest.approx(0, abs=1e-15), 0)
