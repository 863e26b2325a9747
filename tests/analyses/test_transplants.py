import numpy as np

from mechicl.analyses import transplants
from mechicl.analyses.transplants import choose_donors
from mechicl.theory import priors
from tests.analyses import pooled_toy

TREE = pooled_toy.tree()


def test_donors_have_their_distance_and_are_used_in_turn():
    rng = np.random.default_rng(0)
    leaves, distance = rng.integers(0, 16, 500), priors.tree_distance(4)
    donors = choose_donors(leaves, 4, np.random.default_rng(1))
    assert donors.found.all()
    for k in range(5):
        index = donors.index[:, k]
        np.testing.assert_array_equal(distance[leaves, leaves[index]], k)
        assert (index != np.arange(500)).all()
        used = np.bincount(index, minlength=500)
        # Sides of a pair of subtrees differ in size: as often as the next, to one.
        side = leaves >> max(k - 1, 0)
        for group in np.unique(side):
            assert np.ptp(used[side == group]) <= 1
    again = choose_donors(leaves, 4, np.random.default_rng(1))
    np.testing.assert_array_equal(donors.index, again.index)


def test_every_donor_is_as_likely():
    leaves = np.array([0, 0, 0, 1, 2, 2, 3, 3, 3, 3])
    tally = np.zeros((3, 10))
    for seed in range(4000):
        index = choose_donors(leaves, 2, np.random.default_rng(seed)).index
        for k in range(3):
            tally[k, index[0, k]] += 1
    expected = np.zeros((3, 10))
    expected[0, 1:3], expected[1, 3], expected[2, 4:] = 2000, 4000, 4000 / 6
    assert (abs(tally - expected) <= 4 * np.sqrt(expected)).all()


def test_there_may_be_no_donor():
    donors = choose_donors(np.array([0, 0, 1, 2, 3, 3, 7]), 3, np.random.default_rng(0))
    alone = [[1, 1, 1, 1], [1, 1, 1, 1], [0, 1, 1, 1], [0, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 1]]
    np.testing.assert_array_equal(donors.found, [*alone, [0, 0, 0, 1]])


def test_parts_are_of_about_one_size_and_bounded(monkeypatch):
    forward = pooled_toy.random(TREE, pooled_toy.model("A")).forward()
    for n in (1, 2, 3, 10, 1023, 1025, 5000):
        cut = transplants.parts(n, forward, 0)
        sizes = [size for size, _ in cut]
        assert sum(sizes) == n and max(sizes) - min(sizes) <= 1 and max(sizes) < 2048
        assert [part for _, part in cut] == list(range(len(cut)))
    monkeypatch.setattr(transplants, "AT_ONCE", 1)
    for n in (2, 3, 9):
        assert min(size for size, _ in transplants.parts(n, forward, 0)) >= 2


def test_mean_and_error_of_what_is_not_finite_or_alone():
    values = np.array([[1.0, 3.0], [np.inf, 1.0], [np.nan, 1.0]])
    mean, error = transplants.mean_and_error(values)
    np.testing.assert_array_equal(mean, [2, np.nan, np.nan])
    np.testing.assert_array_equal(error, [1, np.nan, np.nan])
    for n in (0, 1):
        assert np.isnan(transplants.mean_and_error(np.ones((2, n)))).all()
