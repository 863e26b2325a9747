"""Priors of raj2026 against their definitions, node by node and leaf by leaf."""

from collections.abc import Callable
from itertools import product

import numpy as np
import pytest

from mechicl.errors import InputError
from mechicl.theory import priors


@pytest.mark.parametrize(("depth", "alpha"), [(1, 0.5), (2, 0.3), (4, 0.7)])
def test_leaves_follow_their_path(depth: int, alpha: float) -> None:
    """(4) word for word: spins in order, nodes by their prefix, breadth first."""
    kappa = np.sqrt((1 - alpha) / (1 - alpha**depth))
    nodes = {
        prefix: number
        for number, prefix in enumerate(
            prefix for m in range(depth) for prefix in product((-1, 1), repeat=m)
        )
    }
    found = priors.tree_leaves(depth, alpha)
    assert found.shape == (2**depth, 2**depth - 1)
    for leaf, spins in enumerate(product((-1, 1), repeat=depth)):
        expected = np.zeros(2**depth - 1)
        for m in range(depth):
            expected[nodes[spins[:m]]] = kappa * alpha ** (m / 2) * spins[m]
        np.testing.assert_allclose(found[leaf], expected, atol=1e-15)
    np.testing.assert_allclose((found**2).sum(1), 1, rtol=1e-14)


def test_tree_distance() -> None:
    found = priors.tree_distance(3)
    spins = list(product((-1, 1), repeat=3))
    for i, one in enumerate(spins):
        for j, other in enumerate(spins):
            same = 0
            while same < 3 and one[same] == other[same]:
                same += 1
            assert found[i, j] == 3 - same
    assert found.dtype.kind == "i"
    # Leaves that share more of their path are nearer in θ.
    leaves = priors.tree_leaves(3, 0.5)
    gaps = [np.mean((leaves @ leaves.T)[found == distance]) for distance in range(4)]
    assert (np.diff(gaps) < 0).all()


@pytest.mark.parametrize(("depth", "alpha"), [(1, 0.5), (3, 0.3), (6, 0.9)])
def test_tree_covariance_is_that_of_the_leaves(depth: int, alpha: float) -> None:
    leaves = priors.tree_leaves(depth, alpha)
    np.testing.assert_allclose(leaves.mean(0), 0, atol=1e-15)
    covariance = leaves.T @ leaves / len(leaves)
    np.testing.assert_allclose(priors.tree_covariance(depth, alpha), covariance, atol=1e-15)
    np.testing.assert_allclose(np.diag(covariance), priors.tree_variances(depth, alpha), rtol=1e-13)


def test_symmetric_axes_read_a_spin_each() -> None:
    depth, alpha = 4, 0.6
    axes, leaves = priors.symmetric_axes(depth), priors.tree_leaves(depth, alpha)
    np.testing.assert_allclose(axes @ axes.T, np.eye(depth), atol=1e-15)
    spins = np.array(list(product((-1, 1), repeat=depth)))
    kappa = np.sqrt((1 - alpha) / (1 - alpha**depth))
    expected = kappa * (alpha / 2) ** (np.arange(depth) / 2) * spins
    np.testing.assert_allclose(leaves @ axes.T, expected, rtol=1e-13)


def test_constants_at_published_size() -> None:
    """CHECKED.md 2.3."""
    assert priors.tree_steps(8, 0.5)[0] == pytest.approx(0.7084919084320762, rel=1e-14)
    assert priors.symmetric_cutoff(8, 0.5, 0.1) == pytest.approx(2.8247513764579333, rel=1e-13)
    assert priors.adaptive_cutoff(8, 0.5, 0.1) == pytest.approx(5.649502752915867, rel=1e-13)
    expected = np.repeat([0.5019607843, 0.1254901961, 0.0313725490, 0.0078431373], [1, 2, 4, 8])
    np.testing.assert_allclose(priors.tree_variances(8, 0.5)[:15], expected, atol=1e-10)


def test_cutoffs_at_their_ends() -> None:
    assert priors.symmetric_cutoff(3, 0.5, 0) == np.inf
    assert priors.adaptive_cutoff(3, 0.5, 0) == np.inf
    assert priors.adaptive_cutoff(1, 0.5, 1) == 0
    assert priors.symmetric_cutoff(3, 0.5, 2) < 0
    steps = priors.tree_steps(4, 1 - 1e-12)
    np.testing.assert_allclose(steps, 0.5, rtol=1e-10)


def test_gaussian_covariance() -> None:
    spectrum = 0.75 ** np.arange(1, 7)
    np.testing.assert_allclose(priors.gaussian_covariance(6, 0.75), np.diag(spectrum))
    found = priors.gaussian_covariance(6, 0.75, rotation=3)
    np.testing.assert_array_equal(found, found.T)
    np.testing.assert_allclose(np.linalg.eigvalsh(found)[::-1], spectrum, rtol=1e-12)
    assert abs(found - np.diag(np.diag(found))).max() > 0.01
    np.testing.assert_array_equal(found, priors.gaussian_covariance(6, 0.75, rotation=3))
    assert abs(found - priors.gaussian_covariance(6, 0.75, rotation=4)).max() > 0.01
    axes = priors.gaussian_axes(6, 3)
    np.testing.assert_allclose(axes.T @ found @ axes, np.diag(spectrum), atol=1e-14)
    np.testing.assert_allclose(priors.gaussian_covariance(3, 1, rotation=0), np.eye(3), atol=1e-14)
    assert {float(priors.gaussian_axes(1, seed)[0, 0]) for seed in range(9)} == {-1.0, 1.0}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: priors.tree_leaves(0, 0.5), "depth is an integer from 1"),
        (lambda: priors.tree_leaves(2.5, 0.5), "depth is an integer"),  # type: ignore[arg-type]
        (lambda: priors.tree_leaves(14, 0.5), "accepted: at most 134217728"),
        (lambda: priors.tree_distance(14), "1 GiB"),
        (lambda: priors.tree_covariance(14, 0.5), "1 GiB"),
        (lambda: priors.tree_variances(28, 0.5), "1 GiB"),
        (lambda: priors.symmetric_axes(23), "1 GiB"),
        (lambda: priors.tree_steps(3, 1), "above 0 and below 1"),
        (lambda: priors.tree_steps(3, 1.5), "above 0 and below 1"),
        (lambda: priors.tree_steps(3, 0), "above 0 and below 1"),
        (lambda: priors.adaptive_cutoff(3, 0.5, -0.1), "tau"),
        (lambda: priors.gaussian_covariance(0, 0.5), "d is an integer from 1"),
        (lambda: priors.gaussian_covariance(3, 0), "above 0 and up to 1"),
        (lambda: priors.gaussian_covariance(3, 1.1), "above 0 and up to 1"),
        (lambda: priors.gaussian_covariance(3, np.nan), "alpha"),
        (lambda: priors.gaussian_covariance(3, 0.5, rotation=-1), "rotation"),
        (lambda: priors.gaussian_axes(11586, None), "1 GiB"),
    ],
)
def test_refused(wrong: Callable[[], object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        wrong()
